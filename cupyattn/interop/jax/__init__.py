"""Attention and INT8 linear layers on JAX arrays, under `jax.jit`, `jax.grad` and `jax.vmap`."""

from cupyattn.interop.jax.functional import attention
from cupyattn.interop.jax.linear import Int8Linear
from cupyattn.interop.jax.norm_quant import norm_quant
from cupyattn.lazy_face import lazy_face

__all__ = ["Int8Linear", "attention", "norm_quant"]

__getattr__, __dir__ = lazy_face(__name__, {})  # answers for the founding notes' names
