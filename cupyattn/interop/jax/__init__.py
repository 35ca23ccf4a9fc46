"""Attention and INT8 linear layers on JAX arrays, under `jax.jit`, `jax.grad` and `jax.vmap`."""

from cupyattn import lazy_face
from cupyattn.interop.jax.functional import attention
from cupyattn.interop.jax.linear import Int8Linear

__all__ = ["Int8Linear", "attention"]

__getattr__, __dir__ = lazy_face(__name__, {})  # answers for the founding notes' names
