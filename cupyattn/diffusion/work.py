"""Count the work of a diffusion transformer's pass, from names and shapes of weights."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cupyattn.checkpoints.roles import LAYER_ROLES, role_of
from cupyattn.measure.words import counted

#: Layers that take the rows of the prompt, and of tokens and prompt together; others take tokens.
_PROMPT = re.compile(
    r"add_[qkv]_proj|to_add_out|ff_context|context_refiner|context_embedder|txt_|text_|caption|"
    r"token_refiner|refiner_blocks|attn2\.to_[kv]\.|cross_attention\.to_(key|value)\."
)
_JOINT = re.compile(r"(^|\.)single_transformer_blocks\.|^layers\.")
#: The layer of an attention module that makes its queries. Flux 2 makes Q, K, V and an MLP by one.
_QUERIES = re.compile(r"^(?P<module>.*)\.(to_q|to_query|(?P<fused>to_qkv_mlp_proj))\.weight$")
_CROSS = re.compile(r"attn2$|cross_attention$")
#: Classes whose attention always has a mask of keys, with which torch's own attention is slower.
MASKED = ("HunyuanVideoTransformer3DModel",)
#: Head sizes and numbers of keys whose rates are known; others are taken for the nearest.
HEAD_DIMS, KEYS = (64, 128), (1024, 4096, 16_384)
_OF_PROMPT = re.compile(r"context_refiner|text_transformer_blocks|token_refiner|refiner_blocks")
#: Layers of the audio in LTX-2 and Kandinsky 6, which has another number of tokens than the video.
_AUDIO = re.compile(r"(^|[._])audio_")
#: Attention between video and audio, with queries of the one and keys of the other.
_BETWEEN = re.compile(
    r"(?P<video_asks>audio_to_video_attn|va_cross_attention)|video_to_audio_attn|av_cross_attention"
)
_KEYS_VALUES = re.compile(r"\.to_(k|v|key|value)\.")


@dataclass(frozen=True)
class Work:
    """Operations and memory traffic of a pass.

    Parameters
    ----------
    linear : float
        Floating-point operations of the linear layers that may be INT8.
    traffic : float
        Elements that these layers read and write, weights aside.
    attention : mapping of str to float
        Floating-point operations of attention, by `kind_of_attention`.
    copies : float
        Elements of Q, K, V and O.
    width : int
        Channels that most of the layers take.
    layers, modules : int
        Linear layers and attention modules.
    left_out : tuple of int
        Linear layers and attention modules of audio, whose number of tokens is unknown.
    """

    linear: float
    traffic: float
    attention: Mapping[str, float]
    copies: float
    width: int
    layers: int
    modules: int
    left_out: tuple[int, int] = (0, 0)


def head_dim_of(config: Mapping[str, Any]) -> int:
    """Return the channels of a head by a model's configuration.

    Raises
    ------
    ValueError
        If it names none in a way that is known.
    """
    given = config.get("attention_head_dim")
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if config.get("axes_dims"):  # of a rotary embedding, which covers a head
        return sum(config["axes_dims"])
    if config.get("dim") and config.get("n_heads"):
        return int(config["dim"]) // int(config["n_heads"])
    raise ValueError(
        "the configuration has none of attention_head_dim, axes_dims, and dim with n_heads: is it "
        "the configuration of a diffusion transformer?"
    )


def kind_of_attention(head_dim: int, keys: int, cls: str = "") -> str:
    """Return the properties on which the rate of attention depends.

    Examples
    --------
    >>> kind_of_attention(72, 4429)
    'head_dim 64, 4,096 keys'
    >>> kind_of_attention(128, 11_056, "HunyuanVideoTransformer3DModel")
    'head_dim 128, masked, 16,384 keys'
    """
    masked = ", masked" if cls in MASKED else ""
    return f"head_dim {_nearest(HEAD_DIMS, head_dim)}{masked}, {_nearest(KEYS, keys):,} keys"


def _nearest(known: Sequence[int], given: int) -> int:
    return min(known, key=lambda one: abs(math.log(one / given)))


def work_of(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], tokens: int, prompt: int
) -> Work:
    """Return the operations and memory traffic of a pass.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        Shapes of all tensors, by their names in the state dict.
    config : mapping
        The model's ``config.json``.
    tokens, prompt : int
        Patches of the picture or video, and tokens of the prompt.

    Raises
    ------
    ValueError
        If no attention of a transformer of diffusers is among the names, for a U-Net and for Sana.
    """
    if any(name.startswith("down_blocks.") for name in shapes):
        raise ValueError(
            f"{config.get('_class_name') or 'the model'} is a U-Net, whose levels have different "
            "numbers of tokens: only transformers are predicted, measure with handle.compare(...)"
        )
    head_dim, cls = head_dim_of(config), str(config.get("_class_name", ""))
    if cls.startswith("Sana"):
        raise ValueError(
            f"{cls} has linear attention, which stays native: only transformers with softmax "
            "attention are predicted, measure with handle.compare(...)"
        )
    linear = traffic = copies = 0.0
    layers = modules = audio_layers = audio_modules = 0
    widths: dict[int, int] = defaultdict(int)
    for name, shape in shapes.items():
        if role_of(name, shape) not in LAYER_ROLES or len(shape) != 2 or "." not in name:
            continue
        rows = _rows(name, tokens, prompt)
        if rows is None:
            audio_layers += 1
            continue
        out, into = shape
        linear += 2.0 * rows * out * into
        traffic += float(rows) * (out + into)
        layers += 1
        widths[into] += 1
    attention: dict[str, float] = defaultdict(float)
    for name, shape in shapes.items():
        found = _QUERIES.match(name)
        if found is None:
            continue
        lengths = _lengths(found["module"], shapes, tokens, prompt)
        if lengths is None:
            audio_modules += 1
            continue
        queries, keys = lengths
        channels = shape[1] if found["fused"] else shape[0]
        attention[kind_of_attention(head_dim, keys, cls)] += 4.0 * queries * keys * channels
        copies += 2.0 * (queries + keys) * channels
        modules += 1
    if not modules:
        raise ValueError("no layer is named to_q or to_query, as in the transformers of diffusers")
    width = max(widths, key=lambda one: (widths[one], one), default=0)
    return Work(
        linear, traffic, dict(attention), copies, width, layers, modules,
        (audio_layers, audio_modules),
    )  # fmt: skip


def _rows(name: str, tokens: int, prompt: int) -> int | None:
    """Return the rows that a layer takes, or None for rows of audio."""
    if between := _BETWEEN.search(name):
        of_queries = not _KEYS_VALUES.search(name)
        return tokens if of_queries == bool(between["video_asks"]) else None
    if _PROMPT.search(name):
        return prompt
    if _AUDIO.search(name):
        return None
    return tokens + prompt if _JOINT.search(name) else tokens


def _lengths(
    module: str, shapes: Mapping[str, Any], tokens: int, prompt: int
) -> tuple[int, int] | None:
    """Return the numbers of queries and keys of an attention module; None if one is of audio."""
    if _OF_PROMPT.search(module):
        return prompt, prompt
    if _BETWEEN.search(module) or _AUDIO.search(module):
        return None
    if _CROSS.search(module):
        return tokens, prompt
    joint = bool(_JOINT.search(module)) or f"{module}.add_k_proj.weight" in shapes
    both = tokens + prompt if joint else tokens
    return both, both


def describes(work: Work) -> str:
    """Describe the operations of a pass in a line, and parts that are left out in another.

    Examples
    --------
    >>> describes(Work(2e12, 1e9, {"head_dim 128, 4,096 keys": 1e12}, 1e9, 3072, 10, 2))
    '10 linear layers with 2 TFLOP, 2 attention modules with 1 TFLOP (head_dim 128), width 3,072'
    """
    flops = math.fsum(work.attention.values())
    kinds = dict.fromkeys(kind.rpartition(", ")[0] for kind in work.attention)
    audio = [
        counted(count, name)
        for count, name in zip(work.left_out, ("linear layer", "attention module"), strict=True)
        if count
    ]
    left_out = f"\nLeft out: {' and '.join(audio)} of audio, whose tokens are not the video's"
    return (
        f"{counted(work.layers, 'linear layer')} with {work.linear / 1e12:.3g} TFLOP, "
        f"{counted(work.modules, 'attention module')} with {flops / 1e12:.3g} TFLOP "
        f"({', '.join(kinds)}), width {work.width:,}{left_out if audio else ''}"
    )
