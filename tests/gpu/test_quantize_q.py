"""Codes of Q within the Hopper forms of fa_int8, on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn import plan
from cupyattn.plans import attention_int8, stages
from cupyattn.problem import choose
from cupyattn.quant import QuantConfig
from tests.support.runs import bits, normal

cupy = pytest.importorskip("cupy")

CONFIGS = {
    **choose.QUANT, "fp8": QuantConfig("token", "block", pv="fp8", granularity_v="channel"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def hopper() -> None:
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("needs compute capability 9.0")


def within_and_before(inputs: Any, name: str, **options: Any) -> tuple[Any, Any]:
    """Return prepared calls: the kernel makes codes of Q, and the pass does."""
    given = {"variant": "fa_int8", "quant": CONFIGS[name], **options}
    within = plan(*inputs, **given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "_numbers", lambda *_: None)
        before = plan(*inputs, **given)
    made = [p.plans[-1].features.quantize_q for p in (within, before)]
    assert made == [inputs[0].shape[-1] <= attention_int8.QUANTIZED_HEAD_DIM, False]
    return within, before


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        (name, head_dim)
        for name in CONFIGS
        for head_dim in (16, 40, 64, 72, 80, 96, 128, 160, 192, 256)
        if name != "fp8" or head_dim <= 128
    ],
)
def test_head_sizes_and_lengths(name: str, head_dim: int, causal: bool) -> None:
    for seed, (len_q, len_kv) in enumerate(((1, 1), (63, 64), (65, 191), (193, 193), (700, 1000))):
        q, k, v = normal((1, 2, len_q, head_dim), (1, 1, len_kv, head_dim), seed=seed)
        q[0, 0, 0, 0] = np.nan if seed == 3 else q[0, 0, 0, 0]
        q[0, 0, len_q // 2] = 0
        inputs = tuple(cupy.asarray(x) for x in (q, k, v))
        within, before = within_and_before(inputs, name, causal=causal)
        assert bits(within(*inputs)) == bits(before(*inputs)), (len_q, len_kv)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("causal", [False, True])
def test_fifty_runs_have_the_same_bits(name: str, causal: bool) -> None:
    """Many tiles to a block, whose numbers and codes come and go while others multiply."""
    inputs = tuple(cupy.random.standard_normal((4, 16, 1100, 128)).astype("f2") for _ in range(3))
    within, before = within_and_before(inputs, name, causal=causal)
    expected = before(*inputs)
    for _ in range(50):
        assert (within(*inputs).view("i2") == expected.view("i2")).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences(name: str) -> None:
    """A box of rows includes larger rows of the next sequence, which must have no influence."""
    lengths = np.array([0, 71, 0, 300, 1, 900, 192, 40])
    ends = cupy.asarray(np.cumsum(lengths).astype(np.int32))
    q, k, v = (cupy.random.standard_normal((1504, 4, 64)).astype("f2") for _ in range(3))
    q[71:] *= 100
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
    within, before = within_and_before((q, k, v), name, **packed)
    assert bits(within(q, k, v)) == bits(before(q, k, v))
