"""J2 and J3 of every rung on the device: sizes, masks, kinds of values, drawn problems."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupyattn import strategies
from cupyattn.arrays.kinds import STORAGE
from tests.gpu.support import attend, on_device, prebuild, run, specs_of
from tests.support.problems import drawn_values
from tests.support.runs import CELLS, PLAIN, normal, on_host

cupy = pytest.importorskip("cupy")

#: Query and key lengths on both sides of the tiles' edges (32, 64, 128), and far from square.
LENGTHS = [(1, 1), (1, 77), (33, 64), (64, 33), (127, 65), (129, 128), (130, 257), (300, 5)]
#: Sizes that pad, that do not, and that allow every width of access.
HEAD_DIMS = (1, 7, 18, 40, 96, 200, 256)
#: Head sizes of the drawn problems: a tile's own, and one that pads.
DRAWN_HEAD_DIMS = (64, 36)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    wanted = [(d, causal) for d in (64, 128, *DRAWN_HEAD_DIMS) for causal in (False, True)]
    wanted += [(d, True) for d in HEAD_DIMS]
    prebuild(
        spec
        for (variant, dtype), (head_dim, causal) in itertools.product(CELLS, wanted)
        for spec in specs_of(variant, dtype, head_dim, causal)
    )


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(variant: str, dtype: str, head_dim: int, causal: bool) -> None:
    for seed, (len_q, len_kv) in enumerate(LENGTHS):
        inputs = normal((1, 4, len_q, head_dim), (1, 2, len_kv, head_dim), dtype, seed)
        run(variant, on_device(*inputs), causal=causal).check()


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_sizes(variant: str, dtype: str, head_dim: int) -> None:
    inputs = normal((2, 3, 67, head_dim), (2, 1, 131, head_dim), dtype)
    run(variant, on_device(*inputs), causal=True).check()


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
def test_kinds_of_values(variant: str, dtype: str) -> None:
    """Within the bound on all of them, and not a hundred times below it on each."""
    ratios = {}
    for regime in strategies.REGIMES:
        inputs = strategies.make_regime(regime, (1, 2, 70, 64), (1, 1, 200, 64), dtype, seed=1)
        ratios[regime] = run(variant, on_device(*inputs)).check().ratio
    print(variant, dtype, {name: f"{ratio:.3f}" for name, ratio in ratios.items()})
    assert max(ratios.values()) >= 0.05


@pytest.mark.parametrize(
    # The bound of 8-bit P is loose; exact fixtures stand beside it (test_pv8.py).
    ("variant", "dtype"),
    [cell for cell in CELLS if "@pv8" not in cell[0]],
)
def test_the_bound_would_notice_zeros(variant: str, dtype: str) -> None:
    inputs = normal((1, 2, 256, 64), (1, 2, 256, 64), dtype)
    report = run(variant, on_device(*inputs)).check()
    assert report.tightness <= 0.05


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_drawn_problems(variant: str, dtype: str, data: Any) -> None:
    lengths = st.integers(1, 150) | st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129])
    inputs, options = drawn_values(data, lengths, DRAWN_HEAD_DIMS, dtype, batches=3, groups=3)
    run(variant, on_device(*inputs), **options).check()


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
@pytest.mark.parametrize("causal_align", ["bottom-right", "top-left"])
def test_rows_without_keys(variant: str, dtype: str, causal_align: str) -> None:
    """Bottom-right alignment with more queries than keys leaves the first rows empty."""
    q, k, v = on_device(*normal((2, 2, 200, 64), (2, 2, 70, 64), dtype))
    found = run(variant, (q, k, v), causal=True, causal_align=causal_align)
    found.check()
    if causal_align == "bottom-right":
        assert (on_host(found.o)[:, :, :130] == 0).all()
        assert (on_host(found.lse)[:, :, :130] == -np.inf).all()
    without = run(variant, (q, k[:, :, :0], v[:, :, :0]))
    assert (on_host(without.o) == 0).all() and (on_host(without.lse) == -np.inf).all()


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
def test_empty_results(variant: str, dtype: str) -> None:
    q, k, v = on_device(*normal((2, 2, 5, 64), (2, 2, 7, 64), dtype))
    for empty in ((q[:0], k[:0], v[:0]), (q[:, :0], k[:, :0], v[:, :0]), (q[:, :, :0], k, v)):
        o, lse = attend(variant, *empty, return_lse=True)
        assert o.shape == empty[0].shape and lse.shape == empty[0].shape[:3]
        assert isinstance(o, cupy.ndarray) and o.dtype == STORAGE[dtype]


@pytest.mark.parametrize("variant", PLAIN)
def test_a_masked_nan_has_no_influence_and_an_attended_one_shows(variant: str) -> None:
    q, k, v = normal((1, 2, 100, 64), (1, 2, 100, 64))
    clean = on_host(run(variant, on_device(q, k, v), causal=True).o)
    k[:, :, 70] = np.nan  # attended to from row 70 on
    dirty = on_host(run(variant, on_device(q, k, v), causal=True).o)
    assert dirty[:, :, :70].tobytes() == clean[:, :, :70].tobytes()
    assert np.isnan(dirty[:, :, 70:]).all()


@pytest.mark.parametrize("variant", ["fa", "fa_tc", "fa_int8"])
def test_judging_on_the_device_is_judging(variant: str) -> None:
    """Reference and bounds take the kind of their arguments: the same lines, the same verdict."""
    found = run(variant, on_device(*normal((1, 4, 90, 64), (1, 2, 130, 64))), causal=True)
    here, there = found.judge(), found.judge(host=False)
    assert there.passed and there.rows == here.rows
    np.testing.assert_allclose(
        (there.ratio, there.lse_ratio, there.relative_l2, there.tightness),
        (here.ratio, here.lse_ratio, here.relative_l2, here.tightness),
        rtol=1e-6,
    )
