"""`explain` and `kernel_form` of views take no memory of their size."""

from __future__ import annotations

import numpy as np
import pytest

import cupyattn as ca

VIEWS = {
    "stride 0": lambda: np.broadcast_to(np.float16(1), (1, 4, 16384, 64)),
    "every second": lambda: np.ones((1, 1, 16384, 128), np.float16)[..., ::2],
    "odd address": lambda: np.zeros(16384 * 128 + 1, np.uint8)[1:].view(np.float16).reshape(
        1, 1, 16384, 64),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_not_copied(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = VIEWS[view]()
    touched: list[str] = []
    copy = np.ascontiguousarray
    monkeypatch.setattr(np, "ascontiguousarray", lambda a: touched.append("copy") or copy(a))
    for module in ("interchange", "described"):
        name = f"cupyattn.arrays.{module}.aligned_copy"
        monkeypatch.setattr(name, lambda a: touched.append("aligned") or a.copy())
    said = ca.explain(x, x, x, variant="fa_tc")
    form = ca.kernel_form(x, x, x, variant="fa_tc")
    assert not touched
    monkeypatch.undo()
    y = np.empty(x.shape, x.dtype)
    assert said == ca.explain(y, y, y, variant="fa_tc")
    assert form == ca.kernel_form(y, y, y, variant="fa_tc")


def test_an_out_whose_last_axis_has_a_stride_is_refused_as_documented() -> None:
    x = np.ones((1, 1, 8, 16), np.float16)
    out = np.zeros((1, 1, 8, 32), np.float16)[..., ::2]
    with pytest.raises(ValueError, match="contiguous last axis, got strides .*: give an array in"):
        ca.attention(x, x, x, variant="fa", out=out)
    for function in (ca.attention, ca.attention_varlen, ca.int8_gemm):
        words = " ".join((function.__doc__ or "").split())
        receiver = words[words.index("out : array") :][:200]
        assert "contiguous last axis" in receiver or "in C order" in receiver, function
