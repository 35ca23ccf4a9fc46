"""Windows that are no pair, and integers past any float: one sentence, whichever function asks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.diffusion.arguments import check_number
from cupyattn.distributed.store import check_timeout
from cupyattn.kernels.limits import as_float
from cupyattn.problem.settings import Settings
from cupyattn.reference.scoring import Scoring

X = np.ones((1, 2, 8, 16), np.float16)
ROWS, ENDS = X[0].swapaxes(0, 1).copy(), np.array([0, 3, 8])
LSE, WEIGHTS = np.zeros((1, 2, 8), np.float32), (np.ones(16, np.float32),) * 2
TABLES = (np.ones((8, 8), np.float32),) * 2

#: Calls that take a window, by name.
CALLS: dict[str, Callable[..., Any]] = {
    "mirror": lambda **o: ca.attention(X, X, X, **o),
    "fa": lambda **o: ca.attention(X, X, X, variant="fa", **o),
    "interpreter": lambda **o: ca.attention(X, X, X, backend="interpret", **o),
    "plan": lambda **o: ca.plan(X, X, X, **o),
    "explain": lambda **o: ca.explain(X, X, X, **o),
    "varlen": lambda **o: ca.attention_varlen(ROWS, ROWS, ROWS, ENDS, ENDS, **o),
    "backward": lambda **o: ca.attention_backward(X, X, X, X, X, LSE, **o),
}
#: Windows that are refused; functions, since one look uses an iterator up.
WINDOWS: dict[str, Callable[[], Any]] = {
    "iterator": lambda: iter((1, 2)), "generator": lambda: (n for n in (1, 2)),
    "set": lambda: {1, 2}, "bytes": lambda: b"\1\2", "dict": lambda: {1: 0, 2: 0},
    "range": lambda: range(1, 3), "array": lambda: np.array([1, 2]), "text": lambda: "12",
    "number": lambda: 3, "one": lambda: (1,), "three": lambda: [1, 2, 3], "none": lambda: None,
    "halves": lambda: (1.0, 2),
}  # fmt: skip
HUGE = [10**400, -(10**400), 10**5000, -(10**5000)]


def said(call: Callable[..., Any], **options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as found:
        call(**options)
    return str(found.value)


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_is_a_pair_of_whole_numbers_everywhere(kind: str) -> None:
    sentence = "window must be a pair (left, right) of whole numbers, got "
    for name, call in CALLS.items():
        assert said(call, window=WINDOWS[kind]()).startswith(sentence), name
    block = said(lambda: ca.BlockMask.from_window(8, 8, WINDOWS[kind]()))
    scored = said(lambda: Scoring.of(X, X, Settings(window=WINDOWS[kind]()).scores({})))
    assert block.startswith(sentence) and scored.startswith(sentence)


@pytest.mark.parametrize("window", [(3, 1), [3, 1], (np.int64(3), np.int8(1)), (3, True)])
def test_pairs_of_whole_numbers_are_windows(window: Any) -> None:
    expected = ca.attention(X, X, X, window=(3, 1))
    np.testing.assert_array_equal(ca.attention(X, X, X, window=window), expected)


@pytest.mark.parametrize("huge", HUGE, ids=lambda x: f"{x.bit_length()} bits {x < 0}")
def test_integers_past_any_float_are_refused_by_name(huge: int) -> None:
    """One sentence, with the name, where Python would say how integers become text or floats."""
    options: dict[str, dict[str, Any]] = {
        "scale": {"scale": huge}, "softcap": {"softcap": huge},
        "window": {"window": (huge, 1)},
        "qk_norm_eps": {"qk_norm_eps": huge, "qk_norm": WEIGHTS},
        "rope_offset_q": {"rope_offset_q": huge, "rope": TABLES},
        "causal_align": {"causal_align": huge}, "layout": {"layout": huge},
        "accuracy": {"accuracy": huge}, "backend": {"backend": huge}, "arch": {"arch": huge},
        "causal": {"causal": huge}, "variant": {"variant": huge},
    }  # fmt: skip
    for name, given in options.items():
        for call in (CALLS["mirror"], CALLS["explain"]):
            assert said(call, **given).startswith(f"{name} must "), name
    for name in ("scale", "softcap", "window"):
        assert said(CALLS["backward"], **options[name]).startswith(f"{name} must ")
    assert said(CALLS["mirror"], window=(1, huge)).startswith("window must hold numbers of keys")
    assert said(CALLS["varlen"], max_len_q=huge).startswith("max_len_q must be between 0 and ")
    assert said(lambda: ca.Tiles(huge, 64, 4)).startswith("tiles.block_q must be a positive ")
    assert said(lambda: ca.QuantConfig(qk_bits=huge)).startswith("quant.qk_bits must be 8 or 4, ")
    scales = said(lambda: ca.QuantConfig("tensor", "tensor", scales=(huge, 1.0)))
    assert scales.startswith("the static q_scale must be an array or a positive float, got ")
    assert said(lambda: check_timeout(huge)).startswith("timeout must be positive")
    number = said(lambda: check_number("share", huge, "0 to 1", lambda x: 0 <= x <= 1))
    assert number.startswith("share must be 0 to 1, got ")
    assert as_float(huge) == (float("inf") if huge > 0 else -float("inf"))


def test_the_largest_float_is_no_infinity() -> None:
    assert as_float(int(sys.float_info.max)) == sys.float_info.max
