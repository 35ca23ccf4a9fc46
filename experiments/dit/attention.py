"""The attention of the transformer: cupyattn's kernels, forwards and backwards, and by timestep.

The model hands over q, k and v as (batch, len, heads, head_dim) in the type that `dtype` names,
and the number of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cupyattn as ca

Array = Any


class Attention(Protocol):
    """The interface of attention for the model."""

    @property
    def dtype(self) -> str:
        """Type that it takes q, k and v in."""

    def forward(self, q: Array, k: Array, v: Array, *, layer: int) -> tuple[Array, Any]:
        """Return o, as q is, and what `backward` needs."""

    def backward(self, d_o: Array, saved: Any) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v."""


@dataclass(frozen=True)
class Kernels:
    """`cupyattn.attention` of a rung and `cupyattn.attention_backward`, the same bits on every run.

    Parameters
    ----------
    variant : str
        Of the forward pass; after `fa_int8` gradients go straight through.
    dtype : str
    """

    variant: str = "fa_tc"
    dtype: str = "float16"

    def forward(self, q: Array, k: Array, v: Array, *, layer: int) -> tuple[Array, Any]:
        """Run the rung."""
        o, lse = ca.attention(q, k, v, variant=self.variant, layout="BSHD", return_lse=True)
        return o, (q, k, v, o, lse)

    def backward(self, d_o: Array, saved: Any) -> tuple[Array, Array, Array]:
        """Run the deterministic backward pass."""
        dq, dk, dv = ca.attention_backward(d_o, *saved, layout="BSHD", deterministic=True)
        return dq, dk, dv


@dataclass(frozen=True)
class ByTimestep:
    """`cupyattn.Int8Attention` at one step of sampling, a layer for each block.

    Parameters
    ----------
    layers : sequence of Int8Attention
    step : int
    dtype : str
    """

    layers: tuple[ca.Int8Attention, ...]
    step: int
    dtype: str = "float16"

    def forward(self, q: Array, k: Array, v: Array, *, layer: int) -> tuple[Array, Any]:
        """Run a block's layer at this step."""
        o = self.layers[layer](*(x.swapaxes(1, 2) for x in (q, k, v)), self.step)
        return o.swapaxes(1, 2), None

    def backward(self, d_o: Array, saved: Any) -> tuple[Array, Array, Array]:
        """Raise: it is for sampling."""
        raise ca.UnsupportedError("attention by timestep is for sampling: train with Kernels")


@dataclass(frozen=True)
class Recorder:
    """Another attention, of which q, k and v are kept.

    Parameters
    ----------
    inner : Attention
    step : int
    layers : tuple of int
        Whose operands are kept.
    found : list
        Receives (step, layer, q, k, v), the arrays as (batch, heads, len, head_dim).
    """

    inner: Attention
    step: int
    layers: tuple[int, ...]
    found: list[tuple[int, int, Array, Array, Array]]

    @property
    def dtype(self) -> str:
        """See the other implementation."""
        return self.inner.dtype

    def forward(self, q: Array, k: Array, v: Array, *, layer: int) -> tuple[Array, Any]:
        """Keep the operands and run the other."""
        if layer in self.layers:
            self.found.append((self.step, layer, *(x.swapaxes(1, 2) for x in (q, k, v))))
        return self.inner.forward(q, k, v, layer=layer)

    def backward(self, d_o: Array, saved: Any) -> tuple[Array, Array, Array]:
        """See the other implementation."""
        return self.inner.backward(d_o, saved)
