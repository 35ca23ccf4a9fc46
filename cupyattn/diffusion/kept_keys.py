"""Attention to the keys that pruning keeps: moved together, or quantised in place."""

from __future__ import annotations

from typing import Any

from cupyattn.arrays.interchange import is_cupy
from cupyattn.arrays.kinds import Array
from cupyattn.compiler.target import choose
from cupyattn.diffusion import pruning
from cupyattn.ops.attention import attention
from cupyattn.ops.quantize import QuantizeSettings, quantize_at
from cupyattn.quant.config import QuantConfig
from cupyattn.runtime.scratch import Memory, explaining_memory_errors


def needs_key_sums(quant: QuantConfig | None, backend: str | None, k: Array, v: Array) -> bool:
    """Whether the kernel that weighs keys should also sum them.

    They are if kept keys become codes in place. Smoothing may subtract any vector, and the mean of
    all keys saves a read of the kept keys.

    Parameters
    ----------
    quant : QuantConfig or None
        How q and k are quantised; None: they are not.
    backend, k, v
        As for `KeptKeys`.
    """
    smooth = quant is not None and quant.smooth_k and not (quant.fused or quant.rotate)
    return smooth and pruning.quantises_in_place(backend, k, v, 1)


class KeptKeys:
    """The most important of the keys of every head, and their values.

    Parameters
    ----------
    k, v : array, (batch, heads_kv, len_kv, head_dim)
    importance : array, float32, (batch, heads_kv, len_kv)
        As `pruning.weigh_keys` finds it,
    key_sums : array or None
        and what that says of sums.
    count : int
        Keys to keep in each head.
    needed : mapping of str to int
        Result of `pruning.bytes_needed`, for the message if memory is short.
    """

    def __init__(
        self,
        k: Array,
        v: Array,
        importance: Array,
        key_sums: Array | None,
        count: int,
        needed: dict[str, int],
    ) -> None:
        self._k, self._v, self._importance, self._count = k, v, importance, count
        self._key_sums, self._needed = key_sums, needed
        #: Mask of the kept keys, bool, (batch, heads_kv, len_kv), once `attend` was called.
        self.kept: Array | None = None

    def attend(
        self, q: Array, *, variant: str, quant: Any, backend: str | None, **options: Any
    ) -> Array:
        """Run `cupyattn.attention` of q to them, with options of it."""
        k, v, choice = self._k, self._v, (self._importance, self._count)
        needed = Memory("token pruning", self._needed)
        where = explaining_memory_errors(needed, on_device=is_cupy(k))
        options |= {"variant": variant, "backend": backend}
        codes = variant == "fa_int8" and not quant.fused
        if codes and pruning.quantises_in_place(backend, k, v, self._count):
            backend = choose(backend, is_cupy(k))
            with where:
                v, self.kept, places = pruning.compact_values(k, v, *choice, backend=backend)
            settings = QuantizeSettings(quant, options["tiles"], options["arch"], backend)
            z = quantize_at(q, k, v, places, settings, self._key_sums)
            return attention(z, **options)
        with where:
            k, v, self.kept = pruning.compact(k, v, *choice, backend=backend)
        return attention(q, k, v, quant=quant, **options)
