"""Views of torch's tensors on a device: layout of outputs, and copies of operands.
tests/interop/test_interop_torch_sdpa.py has the tests without a device.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.gpu.support import arch_of
from tests.support.runs import RUNGS, asked_for, normal

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this torch has no CUDA device", allow_module_level=True)
interop = importlib.import_module("cupyattn.interop.torch")
bridge = importlib.import_module("cupyattn.interop.torch.bridge")

SHAPES = ((2, 4, 100, 64), (2, 2, 130, 64))


@pytest.mark.parametrize("rung", RUNGS)
def test_an_output_is_laid_out_as_its_query(rung: str) -> None:
    """The first time and again, and where the heads lie behind the rows: then torch may view it."""
    options: dict[str, Any] = {**asked_for(rung), "arch": arch_of(rung), "causal": True}
    q, k, v = (bridge.as_tensor(x.copy()).cuda() for x in normal(*SHAPES, "float16", 0))
    expected = interop.attention(q, k, v, **options)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    for x in (q, turned, turned, torch._neg_view(-turned)):
        o = interop.attention(x, k, v, **options)
        assert o.stride() == x.stride() and torch.equal(o, expected)
        if x is not q:
            assert o.transpose(1, 2).view(2, 100, 256).is_contiguous()
    for _ in range(2):  # copied
        o = interop.attention(q.mT.contiguous().mT, k.mT.contiguous().mT, v, **options)
        assert o.is_contiguous() and torch.equal(o, expected)
