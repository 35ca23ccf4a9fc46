"""One behaviour for arrays of every library: what goes in comes back, what cannot is one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.problem.borrowed_names import NOT_OFFERED

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
