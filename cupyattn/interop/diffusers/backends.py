"""An entry in diffusers' table of attention backends, for modules whose processors use it.

The table, `diffusers.models.attention_dispatch`, is private, and its enumeration is closed. Only
this module changes it, in ways that were verified for the versions in `TESTED`.
"""

from __future__ import annotations

import threading
from typing import Any

import diffusers
from diffusers.models import attention_dispatch
from torch import Tensor

from cupyattn.errors import UnsupportedError
from cupyattn.interop.diffusers.context_parallel import Ranks
from cupyattn.interop.diffusers.interception import Layer, running_layer

#: The backend's name there.
NAME = "cupyattn_int8"
#: Versions of diffusers, major and minor, whose table was verified.
TESTED = ("0.36", "0.37", "0.38", "0.39", "0.40", "0.41", "0.42")

_lock = threading.Lock()


def backend() -> Any:
    """Return the member of ``AttentionBackendName`` for this library, registered once.

    Raises
    ------
    UnsupportedError
        For a version of diffusers whose table was not verified.
    """
    version = ".".join(diffusers.__version__.split(".")[:2])
    if version not in TESTED:
        raise UnsupportedError(
            f"diffusers {diffusers.__version__} may have another table of attention backends: "
            f"install one of {TESTED[0]}.* to {TESTED[-1]}.*"
        )
    names = attention_dispatch.AttentionBackendName
    with _lock:
        if NAME in names._value2member_map_:
            return names(NAME)
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        member._sort_order_ = len(names._member_names_)
        names._member_map_[member._name_] = member
        names._member_names_.append(member._name_)
        names._value2member_map_[NAME] = member
        attention_dispatch._AttentionBackendRegistry.register(member)(_attend)
        return member


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Run the layer of the module under call; tensors are (batch, len, heads, head_dim)."""
    layer = running_layer()
    if layer is None:
        raise ValueError(
            f"the attention backend {NAME!r} runs in modules that replace_attention_with_int8 "
            "chose, with their policy and noise level: call that, and set another backend here"
        )
    q, k, v = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    of_keys = isinstance(attn_mask, Tensor) and attn_mask.shape == (len(k), k.shape[2])
    mask = attn_mask[:, None, None] if of_keys else attn_mask  # as the table's own backends
    options = {"attn_mask": mask, "dropout_p": dropout_p, "is_causal": is_causal}
    o = layer.attend(q, k, v, scale, options, Ranks.of(_parallel_config))
    if o is not None:
        return o.permute(0, 2, 1, 3)
    own: Tensor = attention_dispatch.dispatch_attention_fn(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        backend=_own(layer), parallel_config=_parallel_config,
    )  # fmt: skip
    return own


def _own(layer: Layer) -> Any:
    """Return the backend that a layer's module would take without this one."""
    if layer.own_backend is not None:
        return layer.own_backend
    active, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    return attention_dispatch.AttentionBackendName.NATIVE if active == NAME else active
