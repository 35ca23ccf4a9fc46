"""Rotary position embedding: pairs of channels of Q and K turned by the angles of their position.

`Rope` holds the tables of one call. `Rope.turned` is the mirror of ``rope.cuh``,
bit for bit; `Rope.exact` is the definition, in float64.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.described import Described, check_together
from cupyattn.arrays.interchange import operand
from cupyattn.arrays.kinds import STORAGE, Array, array_namespace, as_float64
from cupyattn.errors import shown
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.limits import INT32_MAX

#: Alignment of the tables on the device: that of four floats, read at once.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Rope:
    """Tables of a rotary embedding, and which position each row has.

    Parameters
    ----------
    cos, sin : (positions, head_dim / 2) array or Described, float32
        Contiguous, aligned to 16 bytes.
    interleaved : bool
        Angle d turns the channels 2 d and 2 d + 1 (GPT-J); otherwise d and d + head_dim / 2
        (GPT-NeoX).
    offset_q : int
        Query row i has the position ``i + offset_q``, key j the position j.
    """

    cos: Any
    sin: Any
    interleaved: bool = False
    offset_q: int = 0

    @classmethod
    def of(
        cls, rope: Any, interleaved: Any, offset_q: Any, len_q: int, len_kv: int, head_dim: int
    ) -> Rope | None:
        """Check the options of a call on operands of these sizes; None where `rope` is.

        Parameters
        ----------
        rope : (Described, Described) or None
            Cosines and sines, (positions, head_dim / 2) in float16, bfloat16 or float32, of one
            kind: NumPy's or CuPy's.
        interleaved : bool
        offset_q : int
        len_q, len_kv, head_dim : int

        Raises
        ------
        TypeError
            For tables that are no such arrays, or options of another type.
        ValueError
            For an odd head_dim, tables of another width or too few positions, and options that
            mean nothing.
        """
        if not isinstance(interleaved, (bool, np.bool_)):
            raise TypeError(f"rope_interleaved must be True or False, got {shown(interleaved)}")
        try:
            offset = operator.index(offset_q)
        except TypeError:
            raise TypeError(
                f"rope_offset_q must be a whole number, got {shown(offset_q)}"
            ) from None
        if rope is None:
            if interleaved or offset:
                raise ValueError(
                    f"rope_interleaved={interleaved} and rope_offset_q={shown(offset)} say how "
                    "rope=(cos, sin) is applied: give rope too"
                )
            return None
        if not (isinstance(rope, (tuple, list)) and len(rope) == 2):
            raise TypeError(f"rope must be a pair (cos, sin) of arrays, got {shown(rope)}")
        cos, sin = rope
        check_together(cos=cos, sin=sin)
        if head_dim % 2:
            raise ValueError(f"rope turns pairs of channels: head_dim must be even, got {head_dim}")
        shapes = tuple(cos.shape), tuple(sin.shape)
        if shapes[0] != shapes[1] or cos.ndim != 2 or shapes[0][1] != head_dim // 2:
            raise ValueError(
                f"cos and sin of rope must both have shape (positions, head_dim / 2 = "
                f"{head_dim // 2}), got {shapes[0]} and {shapes[1]}"
            )
        for name, table in (("cos", cos), ("sin", sin)):
            if table.dtype not in STORAGE.values():
                raise TypeError(
                    f"{name} of rope must be one of {', '.join(DTYPES)}, got {table.dtype}"
                )
        if not 0 <= offset <= INT32_MAX:
            raise ValueError(f"rope_offset_q must be 0 to 2**31 - 1, got {shown(offset)}")
        if shapes[0][0] < max(offset + len_q if len_q else 0, len_kv):
            raise ValueError(
                f"the tables of rope have {shapes[0][0]} positions, but rope_offset_q + len_q = "
                f"{offset} + {len_q} and len_kv = {len_kv} are needed: give longer tables"
            )
        return cls(aligned_table(cos), aligned_table(sin), bool(interleaved), offset)

    @classmethod
    def of_arrays(cls, rope: Any, *others: Any) -> Rope | None:
        """Do what `of` does of arrays: with tables as the kernels read them."""
        if not (isinstance(rope, (tuple, list)) and len(rope) == 2):
            return cls.of(rope, *others)
        tables = [operand(name, x) for name, x in zip(("cos", "sin"), rope, strict=True)]
        found: Any = cls.of(tuple(map(Described.of, ("cos", "sin"), tables)), *others)
        cos, sin = (x.bound(own) for x, own in zip((found.cos, found.sin), tables, strict=True))
        return cls(cos, sin, found.interleaved, found.offset_q)

    @property
    def pairs(self) -> str:
        """Which channels make a pair, as `cupyattn.kernels.features.Features.rope` says it."""
        return "interleaved" if self.interleaved else "half_split"

    def turned(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Return Q and K as the kernels turn them.

        Parameters
        ----------
        q : (batch, heads, len_q, head_dim) array
        k : (batch, heads_kv, len_kv, head_dim) array
            Of one storage type.

        Returns
        -------
        q, k : array
            New ones of the same type, in C order.

        Notes
        -----
        R0: of a pair (x, y) and its angle's cosine c and sine s, in float32 (u = 2^-24), each
        operation rounded once::

            x' = fl(fl(x c) - fl(y s))    y' = fl(fl(y c) + fl(x s))

        and then both are rounded to the storage type.
        """
        return self._turn(q, self.offset_q), self._turn(k, 0)

    def exact(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Return Q and K turned by the same tables in float64."""
        return self._turn_exact(q, self.offset_q), self._turn_exact(k, 0)

    def angles(self, length: int, position: int) -> tuple[Array, Array]:
        """Return cosines and sines of so many rows from a position on: (length, head_dim / 2)."""
        rows = slice(position, position + length)
        return self.cos[rows], self.sin[rows]

    def split(self, x: Array) -> tuple[Array, Array]:
        """Return views of the first and of the second channel of each pair."""
        half = x.shape[-1] // 2
        if self.interleaved:
            return x[..., 0::2], x[..., 1::2]
        return x[..., :half], x[..., half:]

    def _turn(self, x: Array, position: int) -> Array:
        xp = array_namespace(x)
        cos, sin = self.angles(x.shape[2], position)
        first, second = (a.astype(np.float32) for a in self.split(x))
        out = xp.empty(x.shape, x.dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for target, value in zip(
                self.split(out),
                (first * cos - second * sin, second * cos + first * sin),
                strict=True,
            ):
                target[...] = value.astype(x.dtype)  # R0
        return out

    def _turn_exact(self, x: Array, position: int) -> Array:
        xp = array_namespace(x)
        cos, sin = (as_float64(table) for table in self.angles(x.shape[2], position))
        first, second = self.split(as_float64(x))
        out = xp.empty(x.shape, np.float64)
        one, other = self.split(out)
        with np.errstate(invalid="ignore"):
            one[...] = first * cos - second * sin
            other[...] = second * cos + first * sin
        return out


def check_turned_before(quantized: Any) -> None:
    """Raise where rows of operands that are quantised already were to be prepared."""
    if quantized is not None:
        raise ValueError(
            "rope and qk_norm come before quantising: give them to quantize, or turn q and k "
            "first (cupyattn.problem.rope.Rope.turned)"
        )


def aligned_table(table: Described) -> Described:
    """Describe a table as the kernels read it: float32, contiguous, aligned; a copy if need be."""
    return table.cast(np.float32).whole().at_multiples_of(_ALIGNMENT)
