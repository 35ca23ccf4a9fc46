"""Small transformers of diffusers with random weights, a call of which takes milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor

#: Classes and sizes by family: one block of each kind, two of SD3, whose last one is another.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("FluxTransformer2DModel", {
        "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2,
        "attention_head_dim": 32, "joint_attention_dim": 64, "pooled_projection_dim": 32,
        "axes_dims_rope": (8, 12, 12),
    }),
    "wan": ("WanTransformer3DModel", {
        "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128,
        "text_dim": 64, "freq_dim": 32, "rope_max_seq_len": 32,
    }),
    "sd3": ("SD3Transformer2DModel", {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "sample_size": 8,
        "in_channels": 4, "out_channels": 4, "joint_attention_dim": 64,
        "caption_projection_dim": 64, "pooled_projection_dim": 64, "pos_embed_max_size": 8,
    }),
    "kandinsky": ("Kandinsky5Transformer3DModel", {
        "num_text_blocks": 1, "num_visual_blocks": 1, "model_dim": 64, "ff_dim": 128,
        "axes_dims": (8, 12, 12), "in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 64,
        "in_text_dim2": 32, "time_dim": 64,
    }),
}  # fmt: skip
FAMILIES = tuple(MODELS)


def transformer(family: str, seed: int = 0) -> Any:
    """Return a transformer of a family in float32, in ``eval()`` mode, on the CPU.

    Gates that are zero until training opens them are drawn, too.
    """
    torch.manual_seed(seed)
    kind, config = MODELS[family]
    model = getattr(diffusers, kind)(**config)
    for x in model.parameters():
        if not x.any():
            torch.nn.init.normal_(x, std=0.1)
    return model.eval()


def caller(family: str, seed: int = 0, where: str = "cpu") -> Callable[[Any], Any]:
    """Return what calls a transformer of a family, without gradients, and returns its output.

    The same numbers go in every time, from one device, in the type that the model has.
    """
    given = {name: _moved(x, where) for name, x in _inputs(family, seed).items()}

    def call(model: Any) -> Any:
        dtype = getattr(model, "dtype", torch.float32)
        own = {
            name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in given.items()
        }
        with torch.no_grad():
            return model(**own, return_dict=False)[0]

    return call


def _inputs(family: str, seed: int) -> dict[str, Any]:
    """Return the arguments of a call: 16 patches or 8, and a prompt of 8 tokens."""
    random = torch.Generator().manual_seed(seed + 1)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=random)

    given: dict[str, Any] = {
        "encoder_hidden_states": noise(1, 8, 64),
        "timestep": torch.tensor([0.7 if family == "flux" else 700.0]),
    }
    if family == "flux":
        places = torch.stack(torch.meshgrid(*[torch.arange(4.0)] * 2, indexing="ij"), -1)
        places = torch.nn.functional.pad(places.reshape(-1, 2), (1, 0))
        given |= {"hidden_states": noise(1, 16, 64), "pooled_projections": noise(1, 32),
                  "img_ids": places, "txt_ids": torch.zeros(8, 3)}  # fmt: skip
    elif family == "sd3":
        given |= {"hidden_states": noise(1, 4, 8, 8), "pooled_projections": noise(1, 64)}
    elif family == "wan":
        given |= {"hidden_states": noise(1, 16, 1, 4, 8)}
    else:
        places = [torch.arange(n) for n in (1, 2, 4)]
        given |= {"hidden_states": noise(1, 1, 4, 8, 16), "pooled_projections": noise(1, 32),
                  "visual_rope_pos": places, "text_rope_pos": torch.arange(8)}  # fmt: skip
    return given


def _moved(x: Any, where: str) -> Any:
    return [_moved(one, where) for one in x] if isinstance(x, list) else x.to(where)


def in_bfloat16(model: Any) -> Any:
    """Convert a model to bfloat16, but for the modules that its library keeps in float32."""
    wide = set(model._keep_in_fp32_modules or ())
    for name, x in model.named_parameters():
        if wide.isdisjoint(name.split(".")):
            x.data = x.data.to(torch.bfloat16)
    return model
