"""Role of a tensor in its model, by its name: the conventions of diffusion transformers.

Names are of Kandinsky 5 (one for all its publishers) and of diffusers' Flux, SD3, Wan, PixArt and
similar models. If the files of their authors have other names, these are included, too.
"""

from __future__ import annotations

import re

#: Roles whose weights are few and determine the inputs of all others: never narrowed.
PRECISE_ROLES = ("adapter", "norm", "embedding", "modulation", "time", "final")
#: Roles of linear layers, whose weights may become INT8.
INT8_ROLES = ("attention", "feed_forward", "linear")
#: Roles whose weights may be narrowed to 16 bits. Other libraries read INT8 for linear layers only;
#: errors of a VAE's decoder are errors of the picture, which no later step mends.
LAYER_ROLES = (*INT8_ROLES, "convolution", "vae")

_WORD = r"(?:^|[._])(?:{})(?:[._]|$)"
#: Searched in this order: the linear layer of an adaptive norm is modulation, and no norm.
_PATTERNS = (
    (  # of PEFT, diffusers, kohya and LyCORIS
        "adapter",
        re.compile(r"(?:^|[._])(?:lora|dora|loha|hada|lokr|oft|boft|hra|ia3|vera)(?:_\w*)?(?:\.|$)"),
    ),
    (
        "modulation",
        re.compile(
            _WORD.format(
                r"ada_?ln\w*|adaln_single|\w*modulation|(?:img|txt)_mod|scale_shift_table|"
                r"av_cross_attn_\w+"  # of LTX-2
            )
            + r"|(?:^|\.)norm\w*\.linear(?:\.|$)|(?:^|\.)mod(?:\.|$)",
            re.IGNORECASE,
        ),
    ),
    ("time", re.compile(_WORD.format(r"time(?:step)?s?|guidance|sigma"), re.IGNORECASE)),
    ("norm", re.compile(_WORD.format(r"\w*norm\w*|ln\w?"), re.IGNORECASE)),
    (
        "embedding",
        re.compile(
            r"embed|" + _WORD.format(r"img_in|txt_in|vector_in|caption_projection|wte|wpe|shared"),
            re.IGNORECASE,
        ),
    ),
)
#: The last layers, where they stand outside of every numbered block.
_FINAL = re.compile(
    r"(?:^|\.)(?:(?:audio_)?proj_out|final_layer|out_layer|norm_out|conv_out|lm_head|head)\."
)
_IN_A_BLOCK = re.compile(r"\.\d+\.")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_FEED_FORWARD = re.compile(
    r"(?:^|[._])(?:ff|ffn|feed_forward|mlp)(?:[._]|$)|proj_mlp", re.IGNORECASE
)
#: A VAE as a part of a pipeline, or alone. Its encoder and decoder begin and end with convolutions,
#: and narrow and widen in between.
_VAE = re.compile(
    r"(?:^|\.)(?:\w*vae\w*|first_stage_model|autoencoder)\."
    r"|(?:^|\.)(?:en|de)coder\.(?:conv_(?:in|out)|block_(?:in|out)|mid|middle|mid_block|"
    r"(?:up|down)(?:_blocks|samples|_temporal)?)\."
)
#: Classes of VAEs in diffusers, by their names in ``config.json``.
_VAE_CLASS = re.compile(r"Autoencoder|VAE|Vae|VQModel")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def role_of(name: str, shape: tuple[int, ...], model: str = "") -> str:
    """Return the role of a tensor.

    Parameters
    ----------
    name : str
        As in the state dict of the model.
    shape : tuple of int
    model : str
        Class of the model, as ``config.json`` of diffusers has it; "" if it is not known.

    Returns
    -------
    str
        One of `PRECISE_ROLES` and `LAYER_ROLES`, "vector" (biases, and whatever else has one axis)
        or "other" (what is no layer's ``weight``, too).

    Examples
    --------
    >>> role_of("visual_transformer_blocks.0.self_attention.to_query.weight", (64, 64))
    'attention'
    >>> role_of("transformer_blocks.0.norm1.linear.weight", (384, 64))
    'modulation'
    >>> role_of("single_transformer_blocks.3.proj_out.weight", (64, 320))
    'linear'
    >>> role_of("proj_out.weight", (64, 320))
    'final'
    >>> role_of("vae.decoder.mid_block.attentions.0.to_q.weight", (512, 512))
    'vae'
    >>> role_of("transformer_blocks.0.attn.to_q.lora_A.weight", (16, 64))
    'adapter'
    """
    for role, pattern in _PATTERNS:
        if pattern.search(name):
            return role
    if _FINAL.search(name) and not _IN_A_BLOCK.search(name):
        return "final"
    if len(shape) == 1:
        return "vector"
    if not name.endswith(".weight") or not 2 <= len(shape) <= 5:
        return "other"
    if _VAE.search(name) or _VAE_CLASS.search(model):
        return "vae"
    if len(shape) > 2:
        return "convolution"
    if _FEED_FORWARD.search(name):
        return "feed_forward"
    return "attention" if _ATTENTION.search(name) else "linear"


def family_of(name: str) -> str:
    """Return the name with a ``*`` for every number of a block, which its likes share.

    Examples
    --------
    >>> family_of("blocks.12.ffn.net.0.proj.weight")
    'blocks.*.ffn.net.*.proj.weight'
    """
    return _NUMBER.sub("*", name)
