"""Codes of Q within the Hopper forms of fa_int8: the bits of a call whose pass makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import BlockMask, attention, attention_varlen, explain
from cupyattn.interpret import KernelFault
from cupyattn.plans import passes
from cupyattn.problem import choose
from cupyattn.quant import QuantConfig
from tests.faults.fault_patches import put_a_line_in_place
from tests.support.marks import slow_unless
from tests.support.runs import Arrays, bits, normal

HOPPER: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90a", "backend": "interpret"}
FP8 = QuantConfig("token", "block", pv="fp8", granularity_v="channel")
CONFIGS = {**choose.QUANT, "fp8": FP8, "by tile": QuantConfig(pv="int8")}

#: Codes then overwrite the codes of the last tile.
pytestmark = pytest.mark.usefixtures("one_block")


def by_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel takes codes from here on."""
    monkeypatch.setattr(passes, "_numbers", lambda *_: None)


def is_within(inputs: Arrays, **options: Any) -> bool:
    text = str(explain(*inputs, **HOPPER, **options))
    made = "q_codes" not in text and "q_scale" not in text
    assert made == ("quantize_q=True" in text)
    return made


@pytest.mark.parametrize(
    ("head_dim", "dtype", "options", "name"),
    [
        pytest.param(*one, name, marks=[] if i == j % 2 and j < 2 else [pytest.mark.slow])
        for i, one in enumerate(
            [
                (64, "float16", {}),
                (72, "bfloat16", {"causal": True}),
                (128, "float16", {"window": (60, 20)}),
            ]
        )
        for j, name in enumerate(CONFIGS)
    ],
)
def test_the_bits_are_those_of_the_pass(
    head_dim: int, dtype: str, options: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = normal((1, 2, 140, head_dim), (1, 1, 80, head_dim), dtype)
    given = {"quant": CONFIGS[name], **options}
    assert is_within((q, k, v), **given)
    found = attention(q, k, v, **HOPPER, **given)
    by_the_pass(monkeypatch)
    assert not is_within((q, k, v), **given)
    assert bits(found) == bits(attention(q, k, v, **HOPPER, **given))


def test_rows_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros, an infinity, a NaN, the least and the largest numbers."""
    q, k, v = normal((1, 1, 70, 64), (1, 1, 90, 64))
    q[0, 0, 0], q[0, 0, 3, 5], q[0, 0, 8, 1] = 0, np.inf, np.nan
    q[0, 0, 13], q[0, 0, 21] = 6e-8, 65504
    given = {"quant": choose.QUANT["balanced"]}
    found = attention(q, k, v, **HOPPER, **given)
    by_the_pass(monkeypatch)
    assert bits(found) == bits(attention(q, k, v, **HOPPER, **given))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A box of rows includes rows of the next sequence, which must have no influence."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, 2, 64)).astype(np.float16) for n in (110, 110, 110))
    q[71:90] *= 100  # rows of the second sequence, behind those of the first in its last tile
    ends = np.array([0, 71, 71, 110], np.int32), np.array([0, 60, 70, 110], np.int32)
    given = {"quant": CONFIGS[name]}

    def attend() -> Any:
        return attention_varlen(q, k, v, *ends, **HOPPER, **given)

    found = attend()
    by_the_pass(monkeypatch)
    assert bits(found) == bits(attend())


@pytest.mark.parametrize("name", slow_unless(lambda _, name: name == "balanced", choose.QUANT))
def test_block_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = normal((1, 1, 300, 64), (1, 1, 256, 64))
    kept = np.array([[[[1, 0], [0, 0], [0, 1]]]], bool)
    given = {"quant": CONFIGS[name], "block_mask": BlockMask(kept, 128, 128)}
    assert is_within((q, k, v), **given)
    found = attention(q, k, v, **HOPPER, **given)
    by_the_pass(monkeypatch)
    assert bits(found) == bits(attention(q, k, v, **HOPPER, **given))


#: Calls whose codes of Q something else reads, or that a tile does not have at hand.
LEFT_TO_THE_PASS: dict[str, dict[str, Any]] = {
    "lse reads codes": {"return_lse": True},
    "a scale for a head": {"quant": QuantConfig("head", "block")},
    "zero points": {"quant": QuantConfig("token", "block", symmetric=False)},
    "4 bits": {"quant": QuantConfig("token", "block", qk_bits=4)},
    "given scales": {"quant": QuantConfig("tensor", "tensor", scales=(0.1, 0.1))},
    "a portable form": {"arch": "sm_90"},
}


@pytest.mark.parametrize("why", LEFT_TO_THE_PASS)
def test_what_is_left_to_the_pass(why: str) -> None:
    inputs = normal((1, 1, 70, 64), (1, 1, 70, 64))
    text = str(explain(*inputs, **{**HOPPER, **LEFT_TO_THE_PASS[why]}))
    assert "q_codes" in text and "quantize_q=True" not in text


@pytest.mark.parametrize(("head_dim", "dtype"), [(200, "float16"), (64, "float32")])
def test_what_shared_memory_has_no_room_for(head_dim: int, dtype: str) -> None:
    assert not is_within(normal((1, 1, 70, head_dim), (1, 1, 70, head_dim), dtype))


def test_numbers_that_the_copy_engine_cannot_take() -> None:
    q, k, v = normal((1, 1, 70, 64), (1, 1, 70, 64))
    apart = np.zeros((1, 1, 70, 68), np.float16)[..., :64]
    assert is_within((q, k, v)) and not is_within((apart, k, v))


#: What closes each hazard of codes that are made where others were: a line, and what the
#: interpreter says without it.
HAZARDS = {
    "codes that another warp has not made": (
        "  named_barrier_sync(barrier, 128);", "", "race|never"),
    "codes that wgmma does not see": ("  fence_proxy_async();  ", "", "proxy"),
    "numbers that are replaced while they are read": ("  __syncwarp();  // all", "  //", "race"),
}  # fmt: skip


@pytest.mark.parametrize("what", HAZARDS)
def test_hazards_are_found(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead, kind = HAZARDS[what]
    inputs = normal((1, 1, 300, 64), (1, 1, 70, 64))
    put_a_line_in_place("prims/codes/quantize_q.cuh", line, instead, tmp_path, monkeypatch)
    with pytest.raises(KernelFault, match=kind):
        attention(*inputs, **HOPPER, quant=choose.QUANT["aggressive"])
