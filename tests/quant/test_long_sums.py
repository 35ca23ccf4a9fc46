"""Sums of so many codes of P that M has to rise for them: `keep_in_range` of `pv8_whole`.

O, a sum of 8-bit codes times 8-bit codes, leaves 32 bits past 2^31 / (255 * 127) = 66,300 keys of
the largest weight. Of `ShiftState`, which `sm90_pv8` has, tests/prims holds the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.testing import Report, judge
from tests.faults.fault_patches import put_a_line_in_place

TILES = ca.Tiles(16, 128, 1, 2)


def judged(keys: int) -> tuple[Report, bool]:
    """Judge one row over keys whose codes of P are nearly 255; is O the mirror's to the bit?"""
    rng = np.random.default_rng(0)
    q = np.ones((1, 1, 1, 16), np.float16)
    k = (0.517 - 0.0005 * rng.random((1, 1, keys, 16))).astype(np.float16)
    v = np.broadcast_to(np.where(np.arange(16) % 2, 1, -1), (1, 1, keys, 16)).astype(np.float16)
    quant = ca.QuantConfig(
        "token", "token", pv="int8", granularity_v="channel", smooth_k=False, smooth_v=False
    )
    z = ca.quantize(q, k, v, quant=quant)
    named = ca.kernel_form(z, tiles=TILES)
    assert named["form"] == "pv8_whole"
    o, lse = ca.attention(z, return_lse=True, backend="interpret", tiles=TILES)
    mirror = ca.attention(z, backend="mirror", tiles=TILES)
    report = judge(o, q, k, v, variant="fa_int8", quantized=z, lse=lse, **named)
    return report, o.tobytes() == mirror.tobytes()


def test_m_rises_for_a_sum() -> None:
    """From 2^21 on, which 8,225 keys reach: bits of O are still the mirror's."""
    report, equal = judged(8300)
    assert report.passed and equal, str(report)


@pytest.mark.slow
def test_a_sum_that_does_not_make_m_rise_overflows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, equal = judged(70_000)
    assert report.passed and equal, str(report)
    put_a_line_in_place(
        "forms/attn_fa_int8_pv8_whole.cu", "state[r][h].keep_in_range(highest(r, h));", ";",
        tmp_path, monkeypatch,
    )  # fmt: skip
    assert not judged(70_000)[0].passed
