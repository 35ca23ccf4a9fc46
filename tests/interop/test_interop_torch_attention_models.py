"""Norms and rotary embeddings of small models of diffusers that become part of attention."""

from __future__ import annotations

import importlib
import math
from typing import Any
from unittest import mock

import pytest

from experiments._harness import whole_families

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
rows = importlib.import_module("tests.interop.test_interop_torch_attention_rows")
diffusers = importlib.import_module("cupyattn.interop.diffusers")
attention_rows = importlib.import_module("cupyattn.interop.torch.attention_rows")

fresh = rows.fresh  # runs by itself

#: Calls of attention in small models: how many, how many of them rotate, and how many normalise.
#: Self-attention of LTX rotates across heads. Norms of text and image in the double blocks of Flux
#: and HunyuanVideo, in Qwen-Image and in SD3 have weights of their own.
MODELS = {
    "Flux": (4, 4, 4), "Wan 2.1 14B": (4, 2, 4), "Kandinsky 5 Lite": (6, 4, 6),
    "Qwen-Image": (2, 2, 2), "SD3.5 Large": (2, 0, 2), "HunyuanVideo": (5, 4, 4),
    "LTX": (4, 0, 2), "Z-Image": (4, 4, 4), "Wan 2.2 5B": (4, 2, 4),
}  # fmt: skip


def wide(x: Any) -> Any:
    if isinstance(x, list):
        return [wide(one) for one in x]
    return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_diffusers_err_no_more(name: str) -> None:
    """Their error is against the model in float32.

    Two errors of n independent numbers differ by 1 / sqrt(n), relative, as standard deviation.
    """
    family = whole_families.small(name)
    latents, make = whole_families.inputs(family, "cpu", 0)
    given = make(latents, torch.tensor([700.0]))
    outputs, taken = [], []
    with torch.no_grad():
        model = whole_families.make(family, "cpu", 0)
        exact = family.call(model.float(), {name: wide(x) for name, x in given.items()})
        for fold in (lambda graph: None, attention_rows.fold):
            model = whole_families.make(family, "cpu", 0)
            diffusers.replace_attention_with_int8(
                model, policy="balanced", backend="mirror", min_length=16
            )
            torch._dynamo.reset()
            graphs = rows.Graphs()
            with mock.patch.object(attention_rows, "fold", fold):
                outputs.append(family.call(torch.compile(model, backend=graphs), given))
            taken.append(rows.is_taken(graphs))
    assert set(taken[0]) == {(False, False)}
    counts = [sum(one[i] for one in taken[1]) for i in (0, 1)]
    assert (len(taken[1]), *counts) == MODELS[name]
    before, after = ((x.float() - exact).norm() for x in outputs)
    assert after < before * (1 + 3 / math.sqrt(exact.numel()))
    if not any(counts):
        assert torch.equal(*outputs)
