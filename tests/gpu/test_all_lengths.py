"""Every length from 0 to 300 at one head_dim, each rung against the reference."""

from __future__ import annotations

import pytest

from tests.gpu.support import on_device, prebuild, run, specs_of
from tests.hopper import hopper_pv8_cases
from tests.kernels.test_all_lengths import MOST, SHAPES
from tests.support.runs import RUNGS, normal

cupy = pytest.importorskip("cupy")

HEAD_DIM = 64
ALL = (*RUNGS, *hopper_pv8_cases.RUNGS)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    prebuild(
        spec
        for rung in ALL
        for causal in (False, True)
        for spec in specs_of(rung, "float16", HEAD_DIM, causal)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rung", ALL)
def test_every_length(rung: str, causal: bool) -> None:
    q, k, v = on_device(*normal((1, 2, MOST, HEAD_DIM), (1, 1, MOST, HEAD_DIM), seed=1))
    for len_q, len_kv in SHAPES:
        # Contiguous arrays: the copy engine of the Hopper form takes them as they are.
        inputs = tuple(
            cupy.ascontiguousarray(x[:, :, :n]) for x, n in ((q, len_q), (k, len_kv), (v, len_kv))
        )
        one = run(rung, inputs, causal=causal)
        if rung in hopper_pv8_cases.RUNGS and len_q and len_kv:
            assert one.form == rung.partition("@")[2]
        report = one.judge()
        assert report.passed, f"{(len_q, len_kv)}: {report}"
