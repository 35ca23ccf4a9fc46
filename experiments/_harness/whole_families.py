"""Whole transformers of diffusers, at their own depth and size, and what they are called with.

The models are random. Numbers of tokens are those for which a native pass takes at most a second on
an H200; `experiments.diffusion.whole_models` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from experiments._harness.diffusers_models import drawn, libraries

#: Makes the arguments of a model of latents and a timestep.
Arguments = Callable[[Any, Any], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A transformer of diffusers, and its arguments.

    Parameters
    ----------
    cls : str
        Name of the class in diffusers.
    config : mapping
        What it is made with, depth included.
    grid : tuple of int
        Patches: rows and columns, behind frames for a video.
    prompt : int
        Tokens of the prompt.
    depth : tuple of str
        Arguments of `config` that count blocks.
    make_inputs : callable
        Returns latents and `Arguments`, of the family, a function that draws, and the device.
    output : callable
        Takes the numbers from what the model returns.
    """

    cls: str
    config: Mapping[str, Any]
    grid: tuple[int, ...]
    prompt: int
    depth: tuple[str, ...]
    make_inputs: Callable[[Family, Callable[..., Any], str], tuple[Any, Arguments]] = field(
        repr=False
    )
    output: Callable[[Any], Any] = field(default=lambda returned: returned[0], repr=False)

    def call(self, transformer: Any, arguments: Mapping[str, Any]) -> Any:
        """Return the numbers that a model makes of its arguments."""
        return self.output(transformer(**arguments, return_dict=False))

    @property
    def tokens(self) -> int:
        """Patches of the picture or video."""
        return math.prod(self.grid)

    @property
    def blocks(self) -> dict[str, int]:
        """Number of blocks of each kind."""
        return {name: self.config[name] for name in self.depth}

    def shallow(self) -> Family:
        """Return the same with one block of each kind."""
        return replace(self, config={**self.config, **dict.fromkeys(self.depth, 1)})


def make(family: Family, where: str, seed: int) -> Any:
    """Return the transformer on a device, in the types that ``from_pretrained`` gives a model."""
    _, diffusers = libraries()
    return drawn(getattr(diffusers, family.cls), family.config, where, seed)


def inputs(family: Family, where: str, seed: int) -> tuple[Any, Arguments]:
    """Return latents (bfloat16), and what makes of latents and a timestep a model's arguments."""
    torch, _ = libraries()
    random = torch.Generator(where).manual_seed(seed + 1)

    def noise(*shape: int) -> Any:
        return torch.randn(shape, generator=random, device=where).to(torch.bfloat16)

    return family.make_inputs(family, noise, where)


# ---- what each family is called with -------------------------------------------------------------


def _flux(family: Family, noise: Callable[..., Any], where: str) -> tuple[Any, Arguments]:
    torch, _ = libraries()
    rows, columns = family.grid
    places = torch.zeros(rows, columns, 3, device=where)
    places[..., 1] = torch.arange(rows, device=where)[:, None]
    places[..., 2] = torch.arange(columns, device=where)
    given = {
        "encoder_hidden_states": noise(1, family.prompt, family.config["joint_attention_dim"]),
        "pooled_projections": noise(1, family.config["pooled_projection_dim"]),
        "img_ids": places.reshape(-1, 3), "txt_ids": torch.zeros(family.prompt, 3, device=where),
    }  # fmt: skip
    return noise(1, family.tokens, 64), lambda x, t: {
        **given, "hidden_states": x, "timestep": t / 1000,
    }  # fmt: skip


def _wan(family: Family, noise: Callable[..., Any], where: str) -> tuple[Any, Arguments]:
    frames, rows, columns = family.grid
    given = {"encoder_hidden_states": noise(1, family.prompt, family.config["text_dim"])}
    x = noise(1, family.config["in_channels"], frames, 2 * rows, 2 * columns)
    return x, lambda x, t: {**given, "hidden_states": x, "timestep": t}


def _kandinsky(family: Family, noise: Callable[..., Any], where: str) -> tuple[Any, Arguments]:
    torch, _ = libraries()
    frames, rows, columns = family.grid
    latents = noise(1, frames, 2 * rows, 2 * columns, 16)
    given = {
        "encoder_hidden_states": noise(1, family.prompt, family.config["in_text_dim"]),
        "pooled_projections": noise(1, family.config["in_text_dim2"]),
        "visual_rope_pos": [torch.arange(n, device=where) for n in family.grid],
        "text_rope_pos": torch.arange(family.prompt, device=where),
    }  # fmt: skip
    # No frame is given: zeros, and their mask.
    condition = torch.zeros_like(latents)[..., :1].expand(*latents.shape[:-1], 17)
    return latents, lambda x, t: {
        **given, "hidden_states": torch.cat([x, condition.to(x.dtype)], -1), "timestep": t,
    }  # fmt: skip


def _qwen(family: Family, noise: Callable[..., Any], where: str) -> tuple[Any, Arguments]:
    given = {
        "encoder_hidden_states": noise(1, family.prompt, family.config["joint_attention_dim"]),
        "img_shapes": [(1, *family.grid)],
    }  # fmt: skip
    return noise(1, family.tokens, 64), lambda x, t: {
        **given, "hidden_states": x, "timestep": t / 1000,
    }  # fmt: skip


def _sd3(family: Family, noise: Callable[..., Any], where: str) -> tuple[Any, Arguments]:
    rows, columns = family.grid
    given = {
        "encoder_hidden_states": noise(1, family.prompt, family.config["joint_attention_dim"]),
        "pooled_projections": noise(1, family.config["pooled_projection_dim"]),
    }
    return noise(1, 16, 2 * rows, 2 * columns), lambda x, t: {
        **given, "hidden_states": x, "timestep": t,
    }  # fmt: skip


def _hunyuan(family: Family, noise: Callable[..., Any], where: str) -> tuple[Any, Arguments]:
    torch, _ = libraries()
    frames, rows, columns = family.grid
    given = {
        "encoder_hidden_states": noise(1, family.prompt, family.config["text_embed_dim"]),
        "encoder_attention_mask": torch.ones(1, family.prompt, dtype=torch.int64, device=where),
        "pooled_projections": noise(1, family.config["pooled_projection_dim"]),
        "guidance": torch.full((1,), 6000.0, device=where).to(torch.bfloat16),
    }
    return noise(1, 16, frames, 2 * rows, 2 * columns), lambda x, t: {
        **given, "hidden_states": x, "timestep": t,
    }  # fmt: skip


def _ltx(family: Family, noise: Callable[..., Any], where: str) -> tuple[Any, Arguments]:
    torch, _ = libraries()
    frames, rows, columns = family.grid
    given = {
        "encoder_hidden_states": noise(1, family.prompt, family.config["caption_channels"]),
        "encoder_attention_mask": torch.ones(1, family.prompt, dtype=torch.int64, device=where),
        "num_frames": frames, "height": rows, "width": columns,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }  # fmt: skip
    return noise(1, family.tokens, family.config["in_channels"]), lambda x, t: {
        **given, "hidden_states": x, "timestep": t,
    }  # fmt: skip


def _z_image(family: Family, noise: Callable[..., Any], where: str) -> tuple[Any, Arguments]:
    rows, columns = family.grid
    prompt = noise(family.prompt, family.config["cap_feat_dim"])
    return noise(1, 16, 1, 2 * rows, 2 * columns), lambda x, t: {
        "x": [*x], "t": 1 - t / 1000, "cap_feats": [prompt],
    }  # fmt: skip


def _itself(returned: Any) -> Any:
    """Return what a model gives that has no tuple round it."""
    return returned


def _of_a_list(returned: Any) -> Any:
    """Return the one sample of a list as a batch."""
    return returned[0][0][None]


# ---- the models ----------------------------------------------------------------------------------

_FLUX = {"joint_attention_dim": 4096, "pooled_projection_dim": 768}
_WAN = {"in_channels": 16, "text_dim": 4096}
_KANDINSKY = {
    "in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 3584, "in_text_dim2": 768,
    "visual_cond": True,
}  # fmt: skip
_TWO_KINDS = ("num_layers", "num_single_layers")

FAMILIES = {
    "Flux": Family(
        "FluxTransformer2DModel", {"num_layers": 19, "num_single_layers": 38, **_FLUX},
        (64, 64), 512, _TWO_KINDS, _flux,
    ),
    "Wan 2.1 14B": Family(
        "WanTransformer3DModel",
        {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13_824, **_WAN},
        (9, 30, 52), 512, ("num_layers",), _wan,
    ),
    "Kandinsky 5 Lite": Family(
        "Kandinsky5Transformer3DModel",
        {"num_text_blocks": 2, "num_visual_blocks": 32, "model_dim": 1792, "ff_dim": 7168,
         "axes_dims": (16, 24, 24), **_KANDINSKY},
        (16, 32, 32), 256, ("num_text_blocks", "num_visual_blocks"), _kandinsky, _itself,
    ),
    "Qwen-Image": Family(
        "QwenImageTransformer2DModel", {"num_layers": 60, "joint_attention_dim": 3584},
        (64, 64), 256, ("num_layers",), _qwen,
    ),
    "SD3.5 Large": Family(
        "SD3Transformer2DModel",
        {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
         "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm",
         "pos_embed_max_size": 192},
        (64, 64), 333, ("num_layers",), _sd3,
    ),
    "HunyuanVideo": Family(
        "HunyuanVideoTransformer3DModel",
        {"num_layers": 20, "num_single_layers": 40, "text_embed_dim": 4096,
         "pooled_projection_dim": 768},
        (9, 30, 40), 256, _TWO_KINDS, _hunyuan,
    ),
    "LTX": Family(
        "LTXVideoTransformer3DModel",
        {"num_layers": 28, "caption_channels": 4096, "in_channels": 128},
        (21, 16, 24), 128, ("num_layers",), _ltx,
    ),
    "Z-Image": Family(
        "ZImageTransformer2DModel", {"n_layers": 30, "cap_feat_dim": 2560},
        (64, 64), 256, ("n_layers",), _z_image, _of_a_list,
    ),
    "Wan 2.2 5B": Family(
        "WanTransformer3DModel",
        {"num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14_336, **_WAN,
         "in_channels": 48, "out_channels": 48},
        (21, 22, 40), 512, ("num_layers",), _wan,
    ),
}  # fmt: skip

#: Two blocks of each kind, small, for machines without a device.
_SMALL: dict[str, dict[str, Any]] = {
    "Flux": {"num_attention_heads": 4, "attention_head_dim": 32, "joint_attention_dim": 64,
             "pooled_projection_dim": 32, "axes_dims_rope": (8, 12, 12)},
    "Wan 2.1 14B": {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 256,
                    "text_dim": 64, "freq_dim": 32, "rope_max_seq_len": 32},
    "Kandinsky 5 Lite": {"model_dim": 128, "ff_dim": 256, "axes_dims": (8, 12, 12),
                         "in_text_dim": 64, "in_text_dim2": 32, "time_dim": 64},
    "Qwen-Image": {"num_attention_heads": 4, "attention_head_dim": 32, "joint_attention_dim": 64,
                   "axes_dims_rope": (8, 12, 12)},
    "SD3.5 Large": {"num_attention_heads": 4, "attention_head_dim": 32, "joint_attention_dim": 64,
                    "caption_projection_dim": 128, "pooled_projection_dim": 64,
                    "pos_embed_max_size": 32, "sample_size": 24},
    "HunyuanVideo": {"num_attention_heads": 4, "attention_head_dim": 32, "text_embed_dim": 64,
                     "pooled_projection_dim": 32, "rope_axes_dim": (8, 12, 12),
                     "num_refiner_layers": 1},
    "LTX": {"num_attention_heads": 4, "attention_head_dim": 32, "cross_attention_dim": 128,
            "caption_channels": 64, "in_channels": 16, "out_channels": 16},
    "Z-Image": {"dim": 128, "n_heads": 4, "n_kv_heads": 4, "cap_feat_dim": 64,
                "axes_dims": [8, 12, 12], "axes_lens": [256, 64, 64], "n_refiner_layers": 1},
    "Wan 2.2 5B": {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 256,
                   "text_dim": 64, "freq_dim": 32, "rope_max_seq_len": 32},
}  # fmt: skip


def small(name: str) -> Family:
    """Return a family in small, with two blocks of each kind."""
    family = FAMILIES[name]
    config = {**family.config, **_SMALL[name], **dict.fromkeys(family.depth, 2)}
    grid = (12, 12) if len(family.grid) == 2 else (2, 8, 9)
    return replace(family, config=config, grid=grid, prompt=128)
