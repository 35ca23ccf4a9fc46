"""Given scales of ``fa_int8``: all ranks have the same, and each uses the scales of its heads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import distributed
from cupyattn.arrays.described import Described
from cupyattn.distributed import Mesh, Partition, RankError, Shared
from cupyattn.distributed import scales as of_ranks
from cupyattn.distributed.rank_calls import Calls
from cupyattn.errors import UnsupportedError
from cupyattn.problem.settings import Settings
from tests.distributed.distributed_cases import ROWS, X, attend, entry, errors_of, on_ranks, packed
from tests.support.runs import bits, normal


def given(q: Any, k: Any, of_q: str = "tensor", of_k: str = "tensor") -> dict[str, Any]:
    quant = ca.QuantConfig(granularity_q=of_q, granularity_k=of_k, scales=(q, k))
    return {"variant": "fa_int8", "quant": quant}


def scales(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.01, 0.04, shape).astype(np.float32)


ONE, OTHER = scales(1, 4, 1), scales(1, 4, 1, seed=1)
DYNAMIC = {
    "variant": "fa_int8", "quant": ca.QuantConfig(granularity_q="tensor", granularity_k="tensor"),
}  # fmt: skip


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("all_but_one", "last", "message"),
    [
        (given(0.02, 1), given(0.5, 1), 'q_scale="0.5", rank 0 with q_scale="0.02": give all'),
        (given(0.02, 1), given(0.02, 2), 'k_scale="2.0", rank 0 with k_scale="1.0": give all'),
        (given(0.02, 0.02), DYNAMIC, 'q_scale="dynamic", rank 0 with q_scale="0.02": give all'),
        (DYNAMIC, given(0.02, 0.02), 'q_scale="0.02", rank 0 with q_scale="dynamic": give all'),
        (given(ONE, ONE, "head", "head"), given(ONE, OTHER, "head", "head"),
         r'k_scale="0.01\S* to 0.0\S*, float32 \(1, 4, 1\), sha256 \w{16}", rank 0 with k_'),
        (given(ONE, ONE, "head", "head"), given(ONE, ONE[:, :1], "head", "head"), r'k_scale="0.0'),
    ],
)  # fmt: skip
def test_given_scales_that_differ_are_named(
    all_but_one: Any, last: Any, message: str, known: bool, method: str
) -> None:
    def on_rank(own: Any) -> None:
        if known:
            attend(own, method=method, **all_but_one)
        with pytest.raises(RankError, match=f"rank 2 called parallel_attention with {message}"):
            attend(own, method=method, **(last if own.rank == 2 else all_but_one))

    assert errors_of(3, on_rank) == [None] * 3


def test_given_scales_that_are_equal_may_be_of_other_types() -> None:
    """A number and an array of one element, float32 and float64, another object on each rank."""
    numbers = [0.02, np.full((1, 1, 1), 0.02), np.full((1, 1, 1), 0.02, np.float32)]

    def on_rank(own: Any) -> Any:
        number = numbers[own.rank]
        return attend(own, **given(number, number)), attend(
            own, **given(ONE.copy(), ONE.astype(float), "head", "head")
        )

    for found in zip(*distributed.run(on_rank, 3), strict=True):
        assert len({one.tobytes() for one in found}) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("granularity", ["head", "token", "block"])
@pytest.mark.parametrize("backend", ["mirror", pytest.param("interpret", marks=pytest.mark.slow)])
def test_exchanged_heads_have_their_own_scales(size: int, granularity: str, backend: str) -> None:
    """The bits of one device; batch entries have scales of their own, too, on every call."""
    q, k, v = normal((2, 6, 70, 24), (2, 3, 70, 24))
    groups = {"head": (1, 1), "token": (70, 70), "block": (2, 3)}[granularity]
    of_q, of_k = scales(2, 6, groups[0]), scales(1, 3, groups[1], seed=1)
    options = given(of_q, of_k, granularity, granularity) | {"causal": True, "backend": backend}
    options["tiles"] = ca.Tiles(64, 32, 4, 2)
    o, lse = ca.attention(q, k, v, return_lse=True, **options)
    rows = Partition.zigzag(70, size)

    def on_rank(own: Any) -> Any:
        mine = [rows.take(x, own.rank) for x in (q, k, v)]
        how = {"partition": "zigzag", "return_lse": True, **options}
        return [distributed.parallel_attention(*mine, own, "ulysses", **how) for _ in range(2)]

    for found in zip(*distributed.run(on_rank, size), strict=True):
        parts, of_rows = zip(*found, strict=True)
        np.testing.assert_array_equal(bits(rows.join(parts)), bits(o))
        np.testing.assert_array_equal(bits(rows.join(of_rows, axis=-1)), bits(lse))


def test_packed_sequences_have_their_own_scales() -> None:
    q, k, v = normal((1, 4, 40, 16), (1, 2, 40, 16))
    ends = np.array([0, 11, 40])
    options = given(scales(2, 4, 1), scales(2, 2, 1, seed=1), "head", "head")
    rows = Partition.contiguous(40, 3)
    shared = Shared(Mesh(3, 3), rows, rows, ends, ends)
    found = on_ranks((q, k, v), shared, **options)
    alone = ca.attention_varlen(*map(packed, (q, k, v)), ends, ends, **options)
    np.testing.assert_array_equal(bits(found.o), bits(entry(alone)))
    assert distributed.judge(found.o, q, k, v, shared, lse=found.lse, **options) <= 1


@pytest.mark.parametrize("mesh", [Mesh(2, 1), Mesh(2, 2), Mesh(4, 2)], ids=str)
def test_heads_with_their_own_scales_are_within_their_bound(mesh: Mesh) -> None:
    q, k, v = normal((1, 4, 48, 16), (1, 2, 48, 16))
    rows = Partition.contiguous(48, mesh.size)
    shared, options = Shared(mesh, rows, rows), given(ONE, scales(1, 2, 1), "head", "head")
    found = on_ranks((q, k, v), shared, **options)
    assert distributed.judge(found.o, q, k, v, shared, lse=found.lse, **options) <= 1
    wrong = given(ONE[:, ::-1], scales(1, 2, 1), "head", "head")
    assert distributed.judge(found.o, q, k, v, shared, lse=found.lse, **wrong) > 1


def test_given_scales_per_row_go_with_exchanged_heads() -> None:
    """They belong to the whole sequence, which a ring would cut."""
    q, k, v = normal((1, 4, 16, 16), (1, 4, 16, 16))
    options = given(scales(1, 4, 16), ONE, "token", "head")

    def on_rank(own: Any) -> Any:
        mine = [ROWS.take(x, own.rank) for x in (q, k, v)]
        with pytest.raises(
            UnsupportedError, match="no given scales of granularity_q='token': use method='ulysses'"
        ):
            distributed.parallel_attention(*mine, own, "ring", **options)
        return distributed.parallel_attention(*mine, own, **options)  # "auto"

    found = ROWS.join(distributed.run(on_rank, 2))
    np.testing.assert_array_equal(bits(found), bits(ca.attention(q, k, v, **options)))


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "options",
    [
        given(scales(1, 3, 1), ONE, "head", "head"), given(ONE, scales(1, 3, 1), "head", "head"),
        given(scales(2, 4, 1), ONE, "head", "head"), given(scales(1, 4, 2), ONE, "head", "head"),
        given(np.full((1, 1, 1), np.nan, np.float32), 0.02), given(1e-39, 0.02),
        given(scales(1, 4, 8), 0.02, "token"),
        {"variant": "fa_int8", "quant": ca.QuantConfig(
            granularity_q="tensor", granularity_k="tensor", symmetric=False, scales=(0.1, 0.1))},
    ],
)  # fmt: skip
def test_given_scales_are_refused_as_one_device_refuses_them(options: Any, method: str) -> None:
    """Before anything travels: the group is as it was."""
    whole = np.concatenate([X, X], axis=2)
    with pytest.raises((ValueError, UnsupportedError)) as alone:
        ca.attention(whole, whole, whole, **options)

    def on_rank(own: Any) -> None:
        with pytest.raises(alone.type) as found:
            attend(own, method=method, **options)
        assert str(found.value) == str(alone.value)
        attend(own, method=method)

    assert errors_of(2, on_rank) == [None, None]


def test_scales_follow_the_rows_to_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales on another device are copied, since threads may share a configuration."""
    quant = given(ONE, 0.5, "head")["quant"]
    assert of_ranks.scales_beside(quant, X) is quant
    monkeypatch.setattr(of_ranks, "device_of", lambda x: 0 if x is quant.scales[0] else 1)
    found = of_ranks.scales_beside(quant, X)
    assert found.scales[0] is not quant.scales[0] and found.scales[1] == 0.5
    np.testing.assert_array_equal(found.scales[0], quant.scales[0])


def test_codes_are_checked_without_reading_scales() -> None:
    """They may lie on a device, and the rows that are checked are descriptions."""
    on_device = (Described.contiguous("scale", (1, heads, 1), np.float32, 0) for heads in (6, 3))
    how = {"granularity_q": "head", "granularity_k": "head", "smooth_k": False}
    quant = ca.QuantConfig(**how, scales=tuple(on_device))
    calls = Calls(Settings(variant="fa_int8", quant=quant, backend="mirror"))
    q, k = (Described.contiguous("q", (2, heads, 0, 64), np.float16) for heads in (6, 3))
    calls.check_codes(q, k, k)
    wide = Described.contiguous("q", (2, 6, 0, 288), np.float16)
    with pytest.raises(UnsupportedError, match="head_dim"):
        calls.check_codes(wide, wide, wide)


def test_ranks_whose_tiles_give_scales_to_other_rows_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On devices of two architectures, codes of granularity "block" would not fit together."""
    archs = (None, "sm_90a")
    own_rank = threading.local()
    monkeypatch.setattr(of_ranks, "own_arch", lambda *_: archs[own_rank.number])

    def on_rank(own: Any) -> None:
        own_rank.number = own.rank
        x = X
        distributed.parallel_attention(x, x, x, own, "ring", variant="fa_int8")

    for found in errors_of(2, on_rank):
        assert isinstance(found, RankError) and "with scale_tiles=" in str(found)
        assert "give all ranks the same scale_tiles" in str(found)


def test_given_scales_of_packed_rows_are_refused_as_on_one_device() -> None:
    x, ends = packed(X), np.array([0, 6, 16])
    whole = np.concatenate([x, x])
    for options in (
        given(scales(1, 4, 16), 0.02, "token"), given(scales(3, 4, 1), 0.02, "head"),
    ):  # fmt: skip
        with pytest.raises((ValueError, UnsupportedError)) as alone:
            ca.attention_varlen(whole, whole, whole, ends, ends, backend="interpret", **options)

        def on_rank(own: Any, options: Any = options, alone: Any = alone) -> None:
            with pytest.raises(alone.type) as found:
                distributed.parallel_attention_varlen(x, x, x, ends, ends, own, **options)
            assert str(found.value) == str(alone.value)
            distributed.parallel_attention_varlen(x, x, x, ends, ends, own)

        assert errors_of(2, on_rank) == [None, None]
