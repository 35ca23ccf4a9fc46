"""Random models of diffusers, in the types that pipelines give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn.errors import UnsupportedError


def libraries() -> tuple[Any, Any]:
    """Return torch and diffusers.

    Raises
    ------
    UnsupportedError
        Where one is missing, which is named.
    """
    try:
        import diffusers
        import torch

        diffusers.FluxTransformer2DModel  # noqa: B018  what diffusers needs by itself shows here
    except (ImportError, RuntimeError) as error:  # the latter: a module that it loads lazily
        raise UnsupportedError(
            f"this needs torch and diffusers with what they need ({error}): pip install torch "
            "diffusers"
        ) from error
    return torch, diffusers


def drawn(cls: Any, config: Mapping[str, Any], where: str, seed: int) -> Any:
    """Return a random model of a class of diffusers in bfloat16, except parameters that must stay
    float32.

    Gates that are zero until training opens them are drawn, too.
    """
    torch, _ = libraries()
    torch.manual_seed(seed)
    with torch.device(where):
        made = cls(**config).eval()
    wide = set(made._keep_in_fp32_modules or ())
    for name, x in made.named_parameters():
        x.requires_grad_(False)
        if not x.any():
            x.normal_(std=0.1)
        if wide.isdisjoint(name.split(".")):
            x.data = x.data.to(torch.bfloat16)
    return made
