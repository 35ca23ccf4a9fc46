"""Weights of `qk_norm` for two parts of the rows, as text and image of joint attention have."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, explain, plan, quantize, quantize_kv
from cupyattn.errors import UnsupportedError
from tests.faults.fault_patches import put_a_line_in_place
from tests.problem.test_qk_norm import (
    QUANTS,
    W,
    arrays,
    assert_codes_are_the_mirrors,
    options_of,
    preparation,
)
from tests.support.runs import bits


def test_the_definition_of_parts() -> None:
    """Each part is prepared as if it were alone; a part may have no rows."""
    q, k, _ = arrays("float32")
    own = options_of(16, "both, of parts")
    for split in (19, 50, 100):
        found = preparation(16, **{**own, "qk_norm_split": split}).in_float32(q, k)
        plain = {**own, "qk_norm_split": 0}
        weights_of = ([w[i] for w in own["qk_norm"]] for i in (0, 1))
        of_part = [preparation(16, **{**plain, "qk_norm": w}).in_float32(q, k) for w in weights_of]
        for y, first, second in zip(found, *of_part, strict=True):
            assert bits(y[:, :, :split]) == bits(first[:, :, :split])
            assert bits(y[:, :, split:]) == bits(second[:, :, split:])


def test_parts_have_no_gradients() -> None:
    q, k, v = arrays()
    options = {**options_of(16, "both, of parts"), "variant": "fa_tc"}
    how = preparation(16, **options_of(16, "both, of parts"))
    with pytest.raises(UnsupportedError, match="one vector of weights for all rows"):
        how.check_differentiable()
    text = explain(q, k, v, **options)
    assert "their root mean square" in text and "with other weights from row 19 on" in text


@pytest.mark.parametrize(
    ("line", "instead"), [("row >= split", "row > split"), ("int(p.weight_step) - row0", "19")],
    ids=["the first row", "rows of further blocks"],
)  # fmt: skip
def test_planted_mistakes_of_parts_are_seen(
    line: str, instead: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_a_line_in_place("prims/io/prepare.cuh", line, instead, tmp_path, monkeypatch)
    inputs = [np.concatenate([x] * 4, 2) for x in arrays(head_dim=64)]  # several blocks
    with pytest.raises(AssertionError, match="(q|k)_(codes|scale)"):
        assert_codes_are_the_mirrors(tuple(inputs), QUANTS[0], options_of(64, "norm, of parts"))


def test_queries_of_given_keys_take_the_weights_of_their_parts() -> None:
    q, k, v = arrays()
    options = options_of(16, "norm, of parts")
    whole = quantize(q, k, v, **options)
    found = quantize_kv(k, v, **options).with_q(q, **options)
    assert bits(found.q_codes) == bits(whole.q_codes)
    assert bits(found.k_codes) == bits(whole.k_codes)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        (
            {"qk_norm": (np.ones((2, 16), np.float32), W), "qk_norm_split": 3}, ValueError,
            "k_weight of qk_norm must have shape (2, 16) beside qk_norm_split=3, got (16,)",
        ),
        (
            {"qk_norm_split": 3}, ValueError,
            "qk_norm_split=3 says which weights of qk_norm a row takes: give qk_norm too",
        ),
        (
            {"qk_norm": (W, W), "qk_norm_split": 1.5}, TypeError,
            "qk_norm_split must be a whole number, got 1.5",
        ),
        (
            {"qk_norm": (W, W), "qk_norm_split": -1}, ValueError,
            "qk_norm_split must be 0 to 2**31 - 1, got -1",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    for call in (attention, explain, plan):
        with pytest.raises(error, match=re.escape(sentence)):
            call(*arrays(), **options)
