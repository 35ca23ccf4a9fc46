"""Options of attention: one list of them, shown and refused as if they stood in each signature."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import bounds, distributed, gradients, reference, testing, unfused
from cupyattn.problem import settings

X = np.ones((1, 1, 4, 8), np.float16)
SCORES = {"scale", "causal", "causal_align", "window", "softcap", "mask", "bias", "block_mask"}
TURNED = SCORES | {"rope", "rope_interleaved", "rope_offset_q"}
#: Functions that take options, with the options that are no separate arguments.
TAKEN = {
    ca.explain: TURNED | {"variant", "out", "cu_seqlens_q", "max_len_k"},
    ca.kernel_form: TURNED | {"variant", "out", "cu_seqlens_q", "max_len_k"},
    ca.plan: TURNED | {"variant", "out", "cu_seqlens_q", "max_len_k"},
    testing.judge: TURNED | {"qk_norm", "qk_norm_eps", "lengths_q", "lengths_kv", "layout"},
    testing.judge_backward: SCORES | {"lengths_q", "lengths_kv"},
    bounds.attention: TURNED,
    bounds.quantisation: SCORES,
    gradients.backward_bound: SCORES,
    gradients.backward_exact: SCORES,
    gradients.backward_mirror: SCORES,
    reference.attention_exact: TURNED,
    reference.attention_mirror: TURNED,
    reference.score_blocks: SCORES,
    reference.scores_mirror: SCORES,
    unfused.scores: SCORES,
}


def keywords(function: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one for one in parameters if one.kind is one.KEYWORD_ONLY}


def test_the_list_is_that_of_attention() -> None:
    listed = {one.name: one for one in settings.parameters("Unpack[CallOptions]")}
    named = keywords(ca.attention) | keywords(ca.attention_varlen)
    offsets = {"cu_seqlens_q", "cu_seqlens_k"}
    assert listed.keys() - offsets == named.keys()
    defaults = {name: one.default for name, one in named.items()}
    assert {name: listed[name].default for name in named} == defaults


@pytest.mark.parametrize("function", TAKEN, ids=lambda function: function.__name__)
def test_signatures_show_the_options(function: Any) -> None:
    shown, listed = keywords(function), keywords(ca.attention_varlen) | keywords(ca.attention)
    assert TAKEN[function] <= shown.keys()
    same = TAKEN[function] & listed.keys()
    assert all(shown[name].default == listed[name].default for name in same)
    assert "options" not in inspect.signature(function).parameters


@pytest.mark.parametrize("function", TAKEN, ids=lambda function: function.__name__)
def test_other_keywords_are_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword "):
        function(*[X] * 2, no_option=True)


def test_sharded_calls_show_and_refuse_theirs() -> None:
    for name in ("", "_varlen", "_backward", "_varlen_backward"):
        function = getattr(distributed, f"parallel_attention{name}")
        assert {"scale", "softcap", "backend"} <= keywords(function).keys()
        assert ("variant" in keywords(function)) == ("backward" not in name)
        with pytest.raises(TypeError, match=f"{function.__name__}.. got an unexpected .* 'mask'"):
            function(mask=None)
