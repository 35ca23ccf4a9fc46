"""One behaviour for arrays of every library: what goes in comes back, what cannot is one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.problem.borrowed_names import NOT_OFFERED
from tests.quant.kind_cases import CASES, TOLD, check

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from cupyattn.interop import jax as of_jax  # noqa: E402 - imports jax
from cupyattn.interop import torch as of_torch  # noqa: E402 - imports torch

X = np.random.default_rng(0).normal(size=(1, 1, 4, 8)).astype(np.float16)
T = torch.from_numpy(X)
ENTRIES: dict[str, Callable[..., Any]] = {
    "torch.attention": lambda **o: of_torch.attention(T, T, T, **o),
    "torch.attention_varlen": lambda **o: of_torch.attention_varlen(T[0], T[0], T[0], T, T, **o),
    "torch.int8_attention": lambda **o: of_torch.int8_attention(T, T, T, **o),
    "torch.Attention": lambda **o: of_torch.Attention(**o),
    "torch.Attention.forward": lambda **o: of_torch.Attention(backend="mirror")(T, T, T, **o),
    "jax.attention": lambda **o: of_jax.attention(X, X, X, **o),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_argument_of_another_library_names_ours(entry: str) -> None:
    for name in NOT_OFFERED:
        with pytest.raises(ca.UnsupportedError, match=rf"^{name} is not supported: ") as one:
            ENTRIES[entry](**{name: 1})
        assert "\n" not in str(one.value)


def test_the_drop_in_has_the_arguments_of_torch_and_no_others() -> None:
    given = {"is_causal": True, "enable_gqa": True, "dropout_p": 0.0}
    of_torch.scaled_dot_product_attention(T, T, T, **given, backend="mirror")
    with pytest.raises(ca.UnsupportedError, match="^softmax_scale is not supported: give scale="):
        of_torch.scaled_dot_product_attention(T, T, T, softmax_scale=0.1)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_tensor_that_requires_a_gradient_is_sent_to_torch(name: str) -> None:
    given = {"q": T, "k": T, "v": T, name: T.clone().requires_grad_()}
    sentence = rf"^{name} requires a gradient.*cupyattn\.interop\.torch, or give {name}\.detach\(\)"
    with pytest.raises(TypeError, match=sentence):
        ca.attention(**given)
    given[name] = given[name].detach()
    assert isinstance(ca.attention(**given), torch.Tensor)


KINDS: dict[str, tuple[Callable[[np.ndarray], Any], Callable[[Any], np.ndarray]]] = {
    "torch": (torch.from_numpy, lambda x: x.numpy()),
    "jax": (jax.numpy.asarray, np.asarray),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_given_comes_back(case: str, kind: str) -> None:
    check(case, *KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", TOLD)
def test_the_same_is_told_of_every_kind(case: str, kind: str) -> None:
    arrays, call = TOLD[case]
    assert call({name: KINDS[kind][0](array) for name, array in arrays.items()}) == call(arrays)


@pytest.mark.parametrize(
    "call", [ca.act_quant, ca.weight_quant, lambda x: ca.quantize(x, x, x)]
)
def test_bfloat16_of_torch_on_a_cpu_is_one_line(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"on a CPU must .* got torch.bfloat16: .*bfloat16$") as one:
        call(torch.ones(1, 1, 4, 16, dtype=torch.bfloat16))
    assert "\n" not in str(one.value)


@pytest.mark.parametrize("name", ["x", "w", "q"])
def test_codes_of_what_requires_a_gradient_are_refused(name: str) -> None:
    x = torch.ones(1, 1, 4, 16).requires_grad_()
    calls = {"x": lambda: ca.act_quant(x), "w": lambda: ca.weight_quant(x)}
    calls["q"] = lambda: ca.quantize(x, x, x)
    with pytest.raises(TypeError, match=rf"^{name} requires a gradient"):
        calls[name]()
