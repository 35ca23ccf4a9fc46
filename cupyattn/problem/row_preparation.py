"""Preparation of Q and K before attention: rows normalised, then rotated by their positions.

`Preparation` has the options of one call: `Norm`, and `Rope`, whose tables rotate pairs of channels
by angles that depend on the position. A Hadamard matrix may follow, before codes.
`Preparation.in_float32` mirrors ``kernels_cu/prims/io/prepare.cuh`` bit for bit, and `Rope.turned`
mirrors ``rope.cuh``. The method `exact` of each class is the definition in float64.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.arrays.described import Described, check_together
from cupyattn.arrays.interchange import operand
from cupyattn.arrays.kinds import STORAGE, Array, array_namespace, as_float64
from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels.features import BY_COLUMN, DTYPES
from cupyattn.kernels.limits import INT32_MAX, as_float
from cupyattn.quant.rotation import GROUPS, rotated, turned, unit_of

#: Alignment in bytes of the tables on the device: one load reads four floats.
_ALIGNMENT = 16
#: Least `qk_norm_eps`, the smallest normal float32. Underflow in a sum of squares is then no larger
#: than a rounding error.
EPS_MIN = 2.0**-126
#: The largest: a power of two in the range of float32.
EPS_MAX = 2.0**127
#: Arguments of calls that prepare rows, and the arrays that kernels read for them.
OPTIONS = (
    "rope", "rope_interleaved", "rope_offset_q", "qk_norm", "qk_norm_eps", "qk_norm_split",
)  # fmt: skip
#: Names for messages, for arguments that are a pair of arrays.
PAIRS = {"rope": ("cos", "sin"), "qk_norm": ("q_weight", "k_weight")}
BUFFERS = ("rope_cos", "rope_sin", "q_norm_weight", "k_norm_weight")
#: Buffers of each option.
BUFFERS_OF = {"rope": BUFFERS[:2], "qk_norm": BUFFERS[2:]}
#: Default of `qk_norm_eps`, which is added to a mean square.
EPS = 1e-6


def check_eps(name: str, eps: Any) -> None:
    """Raise ValueError unless this can be added to a mean square."""
    if not isinstance(eps, numbers.Real) or not EPS_MIN <= as_float(eps) <= EPS_MAX:
        raise ValueError(f"{name} must be a number from 2**-126 to 2**127, got {shown(eps)}")


@dataclass(frozen=True)
class Rope:
    """Tables of a rotary embedding, and which position each row has.

    Parameters
    ----------
    cos, sin : (positions, head_dim / 2 or head_dim) array or Described, float32
        A number for each pair of channels, or one for each channel. Contiguous, aligned to 16
        bytes.
    interleaved : bool
        Angle d turns the channels 2 d and 2 d + 1 (GPT-J); otherwise d and d + head_dim / 2
        (GPT-NeoX).
    offset_q : int
        Query row i has the position ``i + offset_q``, key j the position j.
    by_column : bool
        Whether tables have a number for each channel.
    """

    cos: Any
    sin: Any
    interleaved: bool = False
    offset_q: int = 0
    by_column: bool = False

    @classmethod
    def of(
        cls, rope: Any, interleaved: Any, offset_q: Any, len_q: int, len_kv: int, head_dim: int
    ) -> Rope | None:
        """Check the options of a call on operands of these sizes; return None if `rope` is None.

        Parameters
        ----------
        rope : (Described, Described) or None
            Cosines and sines, (positions, head_dim / 2) or (positions, head_dim) in float16,
            bfloat16 or float32, of one kind: NumPy's or CuPy's.
        interleaved : bool
        offset_q : int
        len_q, len_kv, head_dim : int

        Raises
        ------
        TypeError
            If tables are not such arrays, or options have another type.
        ValueError
            If head_dim is odd, tables have another width or too few positions, or an option has no
            effect.
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
        widths = head_dim // 2, head_dim
        if shapes[0] != shapes[1] or cos.ndim != 2 or shapes[0][1] not in widths:
            raise ValueError(
                f"cos and sin of rope must both have shape (positions, head_dim / 2 = {widths[0]}) "
                f"or (positions, head_dim = {head_dim}), got {shapes[0]} and {shapes[1]}"
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
        tables = aligned_table(cos), aligned_table(sin)
        return cls(*tables, bool(interleaved), offset, by_column=shapes[0][1] == head_dim)

    @classmethod
    def of_arrays(cls, rope: Any, *others: Any) -> Rope | None:
        """Do what `of` does of arrays: with tables as the kernels read them."""
        if not (isinstance(rope, (tuple, list)) and len(rope) == 2):
            return cls.of(rope, *others)
        tables = [operand(name, x) for name, x in zip(("cos", "sin"), rope, strict=True)]
        found: Any = cls.of(tuple(map(Described.of, ("cos", "sin"), tables)), *others)
        cos, sin = (x.bound(own) for x, own in zip((found.cos, found.sin), tables, strict=True))
        return cls(cos, sin, found.interleaved, found.offset_q, found.by_column)

    @property
    def pairs(self) -> str:
        """The pairing of channels, as in `cupyattn.kernels.features.Features.rope`."""
        pairing = "interleaved" if self.interleaved else "half_split"
        return pairing + BY_COLUMN if self.by_column else pairing

    @property
    def back(self) -> Rope:
        """The transposed rotation, which gradients take: each sine is negated.

        A sine of a channel is then of the other channel of its pair.
        """
        given = self.sin if isinstance(self.sin, Described) else Described.of("sin", self.sin)
        sin = given.negated()
        if self.by_column:
            positions, half = sin.shape[0], sin.shape[1] // 2
            pairs = (2, (positions, half, 2)) if self.interleaved else (1, (positions, 2, half))
            sin = sin.exchanged(*pairs)
        return replace(self, sin=sin if given is self.sin else sin.bound(self.sin))

    def turned(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Return Q and K as the kernels turn them.

        Parameters
        ----------
        q : (batch, heads, len_q, head_dim) array
        k : (batch, heads_kv, len_kv, head_dim) array
            Same storage type as q.

        Returns
        -------
        q, k : array
            New ones of the same type, in C order.

        Notes
        -----
        R0: of a pair (x, y) and its angle's cosine c and sine s, in float32 (u = 2^-24), each
        operation rounded once::

            x' = fl(fl(x c) - fl(y s))    y' = fl(fl(y c) + fl(x s))

        and then both are rounded to the storage type. With numbers for each channel, x' takes c
        and s of the channel of x, and y' of the channel of y.
        """
        return self._turn(q, self.offset_q), self._turn(k, 0)

    def exact(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Return Q and K turned by the same tables in float64."""
        return self._turn(q, self.offset_q, exact=True), self._turn(k, 0, exact=True)

    def angles(self, length: int, position: int) -> tuple[Array, Array, Array, Array]:
        """Return cosines, then sines, of `length` rows from a position on.

        Both are of the first and of the second channel of each pair: (length, head_dim / 2).
        """
        rows = slice(position, position + length)
        cos, sin = self.cos[rows], self.sin[rows]
        return (*self.split(cos), *self.split(sin)) if self.by_column else (cos, cos, sin, sin)

    def split(self, x: Array) -> tuple[Array, Array]:
        """Return views of the first and of the second channel of each pair."""
        half = x.shape[-1] // 2
        if self.interleaved:
            return x[..., 0::2], x[..., 1::2]
        return x[..., :half], x[..., half:]

    def _turn(self, x: Array, position: int, *, exact: bool = False) -> Array:
        """Turn rows in float32 and store them in their type; with `exact`, all in float64."""
        xp, numbers = array_namespace(x), [*self.angles(x.shape[2], position)]
        if exact:
            x, *numbers = map(as_float64, (x, *numbers))
        cos, other_cos, sin, other_sin = numbers
        first, second = (a if exact else a.astype(np.float32) for a in self.split(x))
        out = xp.empty(x.shape, x.dtype)
        one, other = self.split(out)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            one[...] = (first * cos - second * sin).astype(x.dtype)  # R0
            other[...] = (second * other_cos + first * other_sin).astype(x.dtype)
        return out


@dataclass(frozen=True)
class Norm:
    """RMS-normalisation of the rows of Q and K.

    Parameters
    ----------
    q_weight, k_weight : (heads or 1, head_dim) array or Described, float32
        Factors of the channels, for each head or for all. Contiguous, aligned to 16 bytes.
    eps : float
        Added to the mean square of a row; a float32.
    by_token : bool
        The mean square is that of the rows of all heads of a token. Weights are then of each head.
    split : int
        Weights are (2, head_dim): rows before this one take the first vector, all others the
        second. 0: the row does not matter.
    """

    q_weight: Any
    k_weight: Any
    eps: float
    by_token: bool = False
    split: int = 0

    @classmethod
    def of(
        cls, qk_norm: Any, eps: Any, heads: int, heads_kv: int, head_dim: int, split: Any = 0
    ) -> Norm | None:
        """Check the options of a call on operands of these sizes; return None if `qk_norm` is None.

        Parameters
        ----------
        qk_norm : (Described, Described) or None
            Weights of Q and of K, (head_dim,), (heads, head_dim) or (heads * head_dim,), in
            float16, bfloat16 or float32, of one kind: NumPy's or CuPy's.
        eps : float
        heads, heads_kv, head_dim : int
        split : int
            Other weights than (2, head_dim) are refused where it is not 0.

        Raises
        ------
        TypeError
            For weights that are no such arrays, or a `split` that is no whole number.
        ValueError
            For an odd head_dim, weights of another shape, weights of a token beside weights of a
            head, an `eps` that is no number from 2^-126 to 2^127, or a `split` without effect.
        """
        check_eps("qk_norm_eps", eps)
        split = _checked_split(split, qk_norm is not None)
        if qk_norm is None:
            return None
        if not (isinstance(qk_norm, (tuple, list)) and len(qk_norm) == 2):
            raise TypeError(
                f"qk_norm must be a pair (q_weight, k_weight) of arrays, got {shown(qk_norm)}"
            )
        check_together(q_weight=qk_norm[0], k_weight=qk_norm[1])
        if head_dim % 2:
            raise ValueError(
                f"qk_norm takes an even head_dim, got {head_dim}: normalise q and k before the call"
            )
        laid, by_token = [], set()
        for name, weight, count in zip("qk", qk_norm, (heads, heads_kv), strict=True):
            if weight.dtype not in STORAGE.values():
                raise TypeError(
                    f"{name}_weight of qk_norm must be one of {', '.join(DTYPES)}, got "
                    f"{weight.dtype}"
                )
            if split and weight.shape != (2, head_dim):
                raise ValueError(
                    f"{name}_weight of qk_norm must have shape (2, {head_dim}) beside "
                    f"qk_norm_split={split}, got {tuple(weight.shape)}"
                )
            allowed = (head_dim,), (count, head_dim), (count * head_dim,)
            if not split and weight.shape not in allowed:
                raise ValueError(
                    f"{name}_weight of qk_norm must have shape ({head_dim},), "
                    f"({count}, {head_dim}) or ({count * head_dim},), got {tuple(weight.shape)}"
                )
            laid.append(aligned_table(weight).in_rows_of(head_dim))
            if count > 1:  # otherwise a token has one row
                by_token.add(is_of_token(weight, head_dim))
        if len(by_token) > 1:
            shapes = " and ".join(str(tuple(weight.shape)) for weight in qk_norm)
            raise ValueError(
                "q_weight and k_weight of qk_norm must both have a number for each channel of all "
                f"heads, ({heads * head_dim},) and ({heads_kv * head_dim},), or neither, got "
                f"{shapes}: normalise q or k before the call"
            )
        return cls(laid[0], laid[1], float(np.float32(eps)), True in by_token, split)

    @property
    def vectors(self) -> tuple[int, int]:
        """Number of weight vectors of Q, and of K."""
        return int(self.q_weight.shape[0]), int(self.k_weight.shape[0])

    def mean_square(self, x: Array) -> Array:
        """Return the mean square that normalises each row, in the type of x, without `eps`."""
        return (x * x).mean(axis=(1, 3) if self.by_token else 3, keepdims=True)

    def by_row(self, weight: Array, length: int) -> Array:
        """Return the weights of each row of an operand, broadcast over (heads, length, head_dim).

        `weight` is `q_weight` or `k_weight`, of any float type.
        """
        if not self.split:
            return by_head(weight)
        return weight[(np.arange(length) >= self.split).astype(int)]


@dataclass(frozen=True)
class Preparation:
    """Preparation of the rows of Q and K in one call: `norm`, `rope`, `rotate`, each optional."""

    rope: Rope | None = None
    norm: Norm | None = None
    rotate: bool = False

    @classmethod
    def of(
        cls,
        options: Any,
        sizes: tuple[int, int, int, int, int],
        rotate: str | None = None,
    ) -> Preparation | None:
        """Check the options of a call; return None if they change no rows.

        Parameters
        ----------
        options : mapping
            `OPTIONS` as `cupyattn.attention` takes them, with descriptions of arrays.
        sizes : (heads, heads_kv, len_q, len_kv, head_dim)
        rotate : {None, "hadamard"}
            Of the `QuantConfig`.

        Raises
        ------
        TypeError, ValueError
            As `Rope.of` and `Norm.of`.
        UnsupportedError
            For a rotation of another head_dim than 64, 128 or 256.
        """
        rope = Rope.of(
            options["rope"], options["rope_interleaved"], options["rope_offset_q"], *sizes[2:]
        )
        norm = Norm.of(
            options["qk_norm"], options["qk_norm_eps"], *sizes[:2], sizes[4],
            options.get("qk_norm_split", 0),
        )  # fmt: skip
        if rotate is not None and sizes[4] not in GROUPS:
            raise UnsupportedError(
                f"quant.rotate={rotate!r} takes head_dim 64, 128 or 256, got {sizes[4]}: pad q and "
                "k with zeros, or use rotate=None"
            )
        return cls(rope, norm, rotate is not None) if rope or norm or rotate else None

    @classmethod
    def of_arrays(
        cls, options: Any, sizes: tuple[int, int, int, int, int], rotate: str | None = None
    ) -> Preparation | None:
        """Do what `of` does of arrays: with tables and weights as the kernels read them."""
        given: dict[str, Any] = dict(options)
        arrays: dict[str, Any] = {}
        for option, names in BUFFERS_OF.items():
            pair = given[option]
            if isinstance(pair, (tuple, list)) and len(pair) == 2:
                own = [operand(n, x) for n, x in zip(PAIRS[option], pair, strict=True)]
                arrays |= dict(zip(names, own, strict=True))
                given[option] = tuple(map(Described.of, names, own))
        found = cls.of(given, sizes, rotate)
        return found and found.with_arrays(
            {name: x.bound(arrays[name]) for name, x in found.buffers.items()}
        )

    def with_arrays(self, arrays: Mapping[str, Array]) -> Preparation:
        """Return the same with arrays, by buffer, in place of descriptions."""
        rope, norm = self.rope, self.norm
        if rope is not None:
            rope = replace(rope, cos=arrays["rope_cos"], sin=arrays["rope_sin"])
        if norm is not None:
            weights = arrays["q_norm_weight"], arrays["k_norm_weight"]
            norm = replace(norm, q_weight=weights[0], k_weight=weights[1])
        return replace(self, rope=rope, norm=norm)

    @property
    def buffers(self) -> dict[str, Any]:
        """The arrays that kernels read, or their descriptions, of `BUFFERS`."""
        rope, norm = self.rope, self.norm
        tables = (None, None) if rope is None else (rope.cos, rope.sin)
        weights = (None, None) if norm is None else (norm.q_weight, norm.k_weight)
        given = zip(BUFFERS, (*tables, *weights), strict=True)
        return {name: a for name, a in given if a is not None}

    @property
    def by_token(self) -> bool:
        """Whether the rows of all heads of a token are normalised together."""
        return self.norm is not None and self.norm.by_token

    def check_differentiable(self) -> None:
        """Raise UnsupportedError if there are no gradients through the preparation."""
        if self.by_token:
            refuse_gradient_of_token()
        if self.norm is not None and self.norm.split:
            raise UnsupportedError(
                "gradients through qk_norm take one vector of weights for all rows, got "
                f"qk_norm_split={self.norm.split}: normalise q and k before the call"
            )

    def in_float32(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Return Q and K as ``fa_int8`` quantises them: not rounded to their storage type.

        Parameters
        ----------
        q : (batch, heads, len_q, head_dim) array
        k : (batch, heads_kv, len_kv, head_dim) array

        Returns
        -------
        q, k : array, float32
            New ones.

        Notes
        -----
        R0: with w the weights, c and s an angle's cosine and sine, in float32 (u = 2^-24), each
        operation rounded once::

            r = 1 / sqrt(sum of squares / head_dim + eps)    x = fl(fl(x r) w)
            x' = fl(fl(x c) - fl(y s))                       y' = fl(fl(y c) + fl(x s))

        The squares of the two members of a pair are added first; pairs are as in `rope`, or one
        channel of each half. Then neighbouring sums are added, level by level, with zeros past the
        last. A sum that is not finite makes its row NaN. `Norm.by_token`: pairs are one channel of
        each half. Their sums are first added over heads, in rising order. A rotation is
        `cupyattn.quant.rotation.turned` of whole rows, times the float32 next to
        ``1 / sqrt(head_dim)``.
        """
        q, k = (x.astype(np.float32) for x in (q, k))
        if self.norm is not None:
            q = self._normalised(q, self.norm.q_weight, self.norm)
            k = self._normalised(k, self.norm.k_weight, self.norm)
        if self.rope is not None:
            q, k = self.rope.turned(q, k)
        return (_rotated(q), _rotated(k)) if self.rotate else (q, k)

    def stored(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Return Q and K as all other rungs take them: rounded to their storage type at the end."""
        q_made, k_made = self.in_float32(q, k)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return q_made.astype(q.dtype), k_made.astype(k.dtype)

    def exact(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Return Q and K normalised, turned and rotated in float64, by the same tables."""
        q, k = as_float64(q), as_float64(k)
        with np.errstate(invalid="ignore"):  # infinities
            if self.norm is not None:
                weights = self.norm.q_weight, self.norm.k_weight
                q, k = (
                    x / np.sqrt(self.norm.mean_square(x) + self.norm.eps)
                    * self.norm.by_row(w, x.shape[2])
                    for x, w in zip((q, k), map(as_float64, weights), strict=True)
                )  # fmt: skip
            if self.rope is not None:
                q, k = self.rope.exact(q, k)
            return (rotated(q), rotated(k)) if self.rotate else (q, k)

    def mean_of_products(self, x: Array, y: Array) -> Array:
        """Return the mean of x y over each row, (..., 1), in float32 and the order of `in_float32`.

        x and y are float32.
        """
        pairing = self.rope or _HALVES
        (first, second), (one, other) = pairing.split(x), pairing.split(y)
        return _sum_of_neighbours(first * one + second * other) / np.float32(x.shape[-1])

    def norm_factor(self, x: Array, norm: Norm) -> Array:
        """Return r of `in_float32`, (..., 1); x is float32."""
        xp = array_namespace(x)
        mean = _mean_of_tokens(x) if norm.by_token else self.mean_of_products(x, x)
        return xp.where(
            mean < np.inf, np.float32(1) / np.sqrt(mean + np.float32(norm.eps)), np.float32(np.nan)
        )

    def _normalised(self, x: Array, weight: Array, norm: Norm) -> Array:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return x * self.norm_factor(x, norm) * norm.by_row(weight, x.shape[2])


def _checked_split(split: Any, is_normed: bool) -> int:
    """Return `qk_norm_split` as an int."""
    try:
        found = operator.index(split)
    except TypeError:
        raise TypeError(f"qk_norm_split must be a whole number, got {shown(split)}") from None
    if isinstance(split, (bool, np.bool_)) or not 0 <= found <= INT32_MAX:
        raise ValueError(f"qk_norm_split must be 0 to 2**31 - 1, got {shown(split)}")
    if found and not is_normed:
        raise ValueError(
            f"qk_norm_split={found} says which weights of qk_norm a row takes: give qk_norm too"
        )
    return found


def _mean_of_tokens(x: Array) -> Array:
    """Return the mean square of the rows of all heads of a token, (batch, 1, length, 1)."""
    first, second = _HALVES.split(x)
    pairs = first * first + second * second
    total = array_namespace(x).zeros_like(pairs[:, :1])
    for head in range(x.shape[1]):
        total = total + pairs[:, head : head + 1]
    return _sum_of_neighbours(total) / np.float32(x.shape[1] * x.shape[3])


def _sum_of_neighbours(x: Array) -> Array:
    """Return sums along the last axis, (..., 1), of neighbours level by level."""
    count = x.shape[-1]
    sums = array_namespace(x).zeros((*x.shape[:-1], 1 << (count - 1).bit_length()), np.float32)
    sums[..., :count] = x
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums


def _rotated(x: Array) -> Array:
    """Return float32 rows times the matrix of a rotation, as `Preparation.in_float32` says."""
    head_dim = x.shape[-1]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return turned(x.reshape(-1, head_dim), head_dim).reshape(x.shape) * unit_of(head_dim)


def by_head(weight: Array) -> Array:
    """Return weights (heads or 1, head_dim) on the device of an operand."""
    return weight[:, None]


#: Pairs without rope: one channel of each half.
_HALVES = Rope(None, None)


def is_of_token(weight: Any, head_dim: int) -> bool:
    """Whether weights of `qk_norm` have a number for each channel of several heads."""
    return bool(weight.ndim == 1 and weight.shape[0] > head_dim)


def refuse_gradient_of_token() -> None:
    """Raise UnsupportedError for gradients through a norm of all heads of a token."""
    raise UnsupportedError(
        "gradients through qk_norm take weights (head_dim,) or (heads, head_dim), got "
        "(heads * head_dim,), which normalise all heads of a token together: normalise q and k "
        "before the call"
    )


def check_turned_before(quantized: Any) -> None:
    """Raise where rows of operands that are quantised already were to be prepared."""
    if quantized is not None:
        raise ValueError(
            "rope and qk_norm come before quantising: give them to quantize, or turn q and k "
            "first (cupyattn.problem.row_preparation.Rope.turned)"
        )


def aligned_table(table: Described) -> Described:
    """Describe a table as the kernels read it: float32, contiguous, aligned; a copy if need be."""
    return table.cast(np.float32).whole().at_multiples_of(_ALIGNMENT)
