"""Small transformers of diffusers with random weights, a call of which takes milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.diffusion import diffusers_blocks as blocks

#: Small models of the families that `experiments.diffusion.diffusers_blocks` has.
_BLOCKS = {
    "flux": blocks.flux(
        2, 32, (4, 4), 8, joint_attention_dim=64, pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
    ),
    "wan": blocks.wan(2, 32, 128, (1, 2, 4), 8, text_dim=64, freq_dim=32, rope_max_seq_len=32),
    "kandinsky": blocks.kandinsky(
        64, 128, (8, 12, 12), (1, 2, 4), 8, in_text_dim=64, in_text_dim2=32, time_dim=64
    ),
}  # fmt: skip
FAMILIES = (*_BLOCKS, "sd3")


def transformer(family: str, seed: int = 0, blocks_of_each: int = 1) -> Any:
    """Return a transformer of a family in float32, in ``eval()`` mode, on the CPU.

    Parameters
    ----------
    family : str
        One of `FAMILIES`.
    seed : int
        Of its weights. Gates that are zero until training opens them are drawn, too.
    blocks_of_each : int
        How many blocks of each kind it has.
    """
    torch, diffusers = blocks.libraries()
    torch.manual_seed(seed)
    if family == "sd3":
        model = diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=2 * blocks_of_each,
            attention_head_dim=32, num_attention_heads=2, joint_attention_dim=64,
            caption_projection_dim=64, pooled_projection_dim=64, out_channels=4,
            pos_embed_max_size=8,
        )  # fmt: skip
    else:
        config = {
            name: blocks_of_each if name.startswith("num_") and "heads" not in name else value
            for name, value in _BLOCKS[family].config.items()
        }
        model = getattr(diffusers, blocks.CLASSES[family])(**config)
    for x in model.parameters():
        if not x.any():
            torch.nn.init.normal_(x, std=0.1)
    return model.eval()


def caller(family: str, seed: int = 0, where: str = "cpu") -> Callable[[Any], Any]:
    """Return what calls a transformer of a family, without gradients, and returns its output.

    The same numbers go in every time, from one device, in the type that the model has.
    """
    torch, _ = blocks.libraries()
    if family == "sd3":
        random = torch.Generator().manual_seed(seed + 1)
        sizes = {
            "hidden_states": (1, 4, 8, 8), "encoder_hidden_states": (1, 8, 64),
            "pooled_projections": (1, 64),
        }  # fmt: skip
        given = {name: torch.randn(size, generator=random) for name, size in sizes.items()}
        given["timestep"] = torch.tensor([700.0])
    else:
        latents, arguments = blocks.inputs(_BLOCKS[family], "cpu", seed)
        given = arguments(latents, torch.tensor([700.0]))
    given = {name: _moved(x, where) for name, x in given.items()}

    def call(model: Any) -> Any:
        dtype = getattr(model, "dtype", torch.float32)
        own = {
            name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in given.items()
        }
        with torch.no_grad():
            return model(**own, return_dict=False)[0]

    return call


def _moved(x: Any, where: str) -> Any:
    return [_moved(one, where) for one in x] if isinstance(x, list) else x.to(where)


def in_bfloat16(model: Any) -> Any:
    """Convert a model to bfloat16, but for the modules that its library keeps in float32."""
    torch, _ = blocks.libraries()
    wide = set(model._keep_in_fp32_modules or ())
    for name, x in model.named_parameters():
        if wide.isdisjoint(name.split(".")):
            x.data = x.data.to(torch.bfloat16)
    return model
