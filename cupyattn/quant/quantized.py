"""`QuantizedQKV`: the operands of INT8 attention."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.groups import scale_of_row, value_scale_of_key
from cupyattn.arrays.interchange import operand, take, taken, taken_arrays, unchanged
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.kernels import limits
from cupyattn.kernels.features import DTYPES
from cupyattn.quant import nibbles, quantized_file
from cupyattn.quant.caller_scales import given_scale, given_value_scale, given_zero
from cupyattn.quant.config import GROUP_ALL, THREAD_ROWS_K, THREAD_ROWS_Q, QuantConfig
from cupyattn.quant.operand_protocol import codes_less_zero
from cupyattn.quant.packed import check_sequences, packed_groups, rows_of_sequences, split
from cupyattn.quant.quantizers import (
    VALUES_PAD,
    group_count,
    numbers_of,
    stored_values,
    values_by_key,
)  # fmt: skip

#: Zero points, and sums of codes, which are computed from the codes and not stored in files.
_ZEROS, _SUMS = ("q_zero", "k_zero", "v_zero"), ("q_code_sum", "k_code_sum")
_ARRAYS = (*quantized_file.ARRAYS, *_SUMS)
#: Offsets at which packed sequences begin and end.
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
#: All arrays that a call on codes may read, by their names in its plan.
BUFFERS = (
    "q_codes", "k_codes", "v", "q_scale", "k_scale", "k_mean", "v_codes", "v_scale", "v_mean",
    *_ZEROS, *_SUMS, *_OFFSETS,
)  # fmt: skip


class CodeFacts(NamedTuple):
    """The arguments of a `QuantizedQKV`, except its arrays."""

    group_q: int
    group_kv: int
    config: QuantConfig
    out_dtype: str
    group_v: int = 0
    max_len_q: int = 0
    max_len_k: int = 0
    prepared: tuple[str, ...] = ()
    has_queries: bool = True


@dataclass(frozen=True, eq=False)
class QuantizedQKV:
    """Q and K as INT8 codes with scales, V in 16 bits or as codes.

    Parameters
    ----------
    q_codes : array, (batch, heads, len_q, head_dim), int8
    k_codes : array, (batch, heads_kv, len_kv, head_dim), int8
        Contiguous along the last axis. Codes made here have rows of a multiple of 16 bytes, as the
        Hopper forms need; the padding is undefined. With ``config.qk_bits=4`` they may be uint8,
        (..., ceil(head_dim / 2)), two codes to a byte: `in_nibbles`, and back `unpacked`.
    v : array, (batch, heads_kv, len_kv, head_dim), float16 or bfloat16, or None
        The caller's array if it has 16 bits. None if V is codes.
    q_scale : array, (batch or 1, heads or 1, groups), float32
        Row i of Q is ``q_codes[..., i, :] * q_scale[..., i // group_q]``. If there are zero points,
        ``q_zero[..., i // group_q]`` is first subtracted from the codes.
    k_scale : array, (batch or 1, heads_kv or 1, groups), float32
        The same for K, without its mean.
    group_q, group_kv : int
        Rows per scale; GROUP_ALL (2**30) if a whole head or array has one scale.
    config : QuantConfig
        The configuration of the codes.
    out_dtype : {"float16", "bfloat16", "float32"}
        Type of the attention output.
    k_mean : array, (batch, heads_kv, head_dim), float32, optional
        Subtracted from the keys before they were quantised.
    q_zero, k_zero : array, as q_scale and k_scale, int32, optional
        Zero points, -128 to 128: the codes of the number 0. Give both or neither.
    v_codes : array, (batch, heads_kv, head_dim, padded), int8, optional
        V as codes, keys along the last axis, up to a multiple of 128 and in the order of
        `cupyattn.quant.quantizers.stored_values`.
    v_scale : array, (batch, heads_kv, groups, head_dim), float32, optional
        The scale of channel d at key j is ``v_scale[..., j // group_v, d]``; see `centred_values`.
    v_mean : array, (batch, heads_kv, head_dim), float32, optional
        Subtracted from V before it was quantised.
    group_v : int
        Keys per scale of V; 0 if V is not codes.
    v_zero : array, as v_scale, int32, optional
        Zero points of V; given if and only if V and P are integer codes and Q and K have zero
        points.
    q_code_sum, k_code_sum : array, (batch, heads or heads_kv, len_q or len_kv), int32, optional
        Sums of the codes of each row, needed with zero points; computed when omitted.
    cu_seqlens_q, cu_seqlens_k : array, (batch + 1,), int32, optional
        Given if operands are packed sequences. Sequence i has rows ``cu_seqlens_q[i]`` up to
        ``cu_seqlens_q[i + 1]`` of Q, and the same of K and V. Means then have `batch` entries, and
        all other arrays have one, which `sequences` cuts into sequences.
    max_len_q, max_len_k : int
        Largest length of a sequence; 0 without packed sequences.
    prepared : tuple of str
        Preparation of the rows of Q and K, from ``"rope"`` and ``"qk_norm"``: other queries need
        the same (`with_q`).
    has_queries : bool
        False if there are only keys and values, as from `cupyattn.quantize_kv`. Attention refuses
        such a record, and `with_q` adds queries.
    as_given : callable
        Converts a result to the kind of array of the queries.

    Raises
    ------
    ValueError
        If shapes or dtypes do not fit together, or, for NumPy arrays, if a zero point is past 128.
    """

    q_codes: Array
    k_codes: Array
    v: Array | None
    q_scale: Array
    k_scale: Array
    group_q: int
    group_kv: int
    config: QuantConfig
    out_dtype: str
    k_mean: Array | None = None
    q_zero: Array | None = None
    k_zero: Array | None = None
    v_codes: Array | None = None
    v_scale: Array | None = None
    v_mean: Array | None = None
    group_v: int = 0
    v_zero: Array | None = None
    q_code_sum: Array | None = None
    k_code_sum: Array | None = None
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    max_len_q: int = 0
    max_len_k: int = 0
    prepared: tuple[str, ...] = ()
    has_queries: bool = True
    as_given: Callable[[Any], Any] = field(default=unchanged, repr=False)

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            if (array := getattr(self, name)) is not None:
                object.__setattr__(self, name, operand(name, array))
        check_sequences(self)
        if self.q_zero is not None and self.k_zero is not None:
            each = zip(_SUMS, (self.q_codes, self.k_codes), _OFFSETS, strict=True)
            for name, codes, offsets in each:
                if getattr(self, name) is None:
                    sums, ends = codes.sum(axis=-1, dtype=np.int32), getattr(self, offsets)
                    sums = sums if ends is None else rows_of_sequences(sums, ends)
                    object.__setattr__(self, name, sums)
        present = {name: a for name in _ARRAYS if (a := getattr(self, name)) is not None}
        array_namespace(*present.values())
        for name, array in present.items():
            names = DTYPES[:2] if name == "v" else ("float32",)
            names = ("int8",) if name.endswith("codes") else names
            if self.config.qk_bits == 4 and name in ("q_codes", "k_codes"):
                names = (("int8", "uint8")[self.has_nibbles],)
            names = ("int32",) if name in (*_ZEROS, *_SUMS, *_OFFSETS) else names
            if array.dtype.name not in names:
                raise ValueError(f"{name} must be {' or '.join(names)}, got {array.dtype.name}")
        if self.out_dtype not in DTYPES:
            raise ValueError(f"out_dtype must be one of {DTYPES}, got {self.out_dtype!r}")
        self._check_shapes()

    def _groups(self, length: int, group: int) -> int:
        """Return the number of scales for a number of rows."""
        if self.cu_seqlens_q is None:
            return group_count(length, group)
        return packed_groups(length, self.batch, group)

    def _check_shapes(self) -> None:
        rows = self.q_codes.shape[:3], self.k_codes.shape[:3]
        columns = self.head_dim if self.has_nibbles else self.k_codes.shape[3]
        keys = (*rows[1], columns)
        v_shape = keys if self.v is None else self.v.shape
        limits.check_shapes(self.shape, keys, v_shape)
        bytes_of_codes = {self.q_codes.shape[3], self.k_codes.shape[3]}
        if self.has_nibbles and bytes_of_codes != {nibbles.packed_bytes(columns)}:
            raise ValueError(
                f"q_codes and k_codes must have {nibbles.packed_bytes(columns)} bytes a row, two "
                f"codes of head_dim {columns} to a byte, got {self.q_codes.shape[3]} and "
                f"{self.k_codes.shape[3]}"
            )
        for name, codes, scale, group in (
            ("q", self.q_codes, self.q_scale, self.group_q),
            ("k", self.k_codes, self.k_scale, self.group_kv),
        ):
            if not isinstance(group, int) or not 1 <= group <= GROUP_ALL:
                raise ValueError(f"rows per {name}_scale must be 1 to 2**30, got {group!r}")
            batch, heads, length, _ = codes.shape
            groups = self._groups(length, group)
            if (
                scale.ndim != 3
                or scale.shape[0] not in (1, batch)
                or scale.shape[1] not in (1, heads)
                or scale.shape[2] != groups
            ):
                raise ValueError(
                    f"{name}_scale must have shape ({batch} or 1, {heads} or 1, {groups}) for "
                    f"{length} rows in groups of {group}, got {tuple(scale.shape)}"
                )
        mean_shape = (self.batch, self.heads_kv, self.head_dim)
        for name, mean in (("k_mean", self.k_mean), ("v_mean", self.v_mean)):
            if mean is not None and mean.shape != mean_shape:
                raise ValueError(f"{name} must have shape {mean_shape}, got {tuple(mean.shape)}")
        self._check_values()
        self._check_zeros()

    def _check_zeros(self) -> None:
        """Raise unless Q, K and V's INT8 codes all have zero points, or none of them has."""
        q_zero, k_zero, v_zero = (getattr(self, name) for name in _ZEROS)
        coded = self.v_codes is not None and self.config.value_p_type in ("u8", "s8")
        of_v = q_zero is not None and coded
        if (q_zero is None) != (k_zero is None) or (v_zero is not None) != of_v:
            raise ValueError(
                "zero points must be given for q, k and INT8 codes of V together, 0 where there "
                "are none; V has none with p_type='16bit'"
            )
        sums = {
            name: (*codes.shape[:2], self._groups(codes.shape[2], 1))
            for name, codes in zip(_SUMS, (self.q_codes, self.k_codes), strict=True)
        }
        scales = dict(zip(_ZEROS, (self.q_scale, self.k_scale, self.v_scale), strict=True))
        for name in (*_ZEROS, *_SUMS):
            array = getattr(self, name)
            if array is None:
                continue
            if q_zero is None:
                raise ValueError(f"{name} belongs to zero points, got none")
            scale = scales.get(name)
            shape = sums[name] if scale is None else scale.shape
            if array.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")
            if name in _ZEROS and isinstance(array, np.ndarray) and (abs(array) > 128).any():
                raise ValueError(f"{name} must be -128 to 128, got up to {abs(array).max()}")

    def _check_values(self) -> None:
        """Raise unless V is one array in 16 bits, or codes with their scales."""
        codes, scale = self.v_codes, self.v_scale
        if (self.v is None) == (codes is None) or (codes is None) != (scale is None):
            raise ValueError(
                "V must be given as v, or as v_codes with v_scale, got both or neither"
            )
        if codes is None or scale is None:
            if self.v_mean is not None or self.group_v:
                raise ValueError("v_mean and group_v belong to v_codes, got them beside v")
            return
        if not isinstance(self.group_v, int) or not 1 <= self.group_v <= GROUP_ALL:
            raise ValueError(f"keys per v_scale must be 1 to 2**30, got {self.group_v!r}")
        head = self.k_codes.shape[:2]
        padded = self._groups(self.len_kv, VALUES_PAD) * VALUES_PAD
        for name, array, shape in (
            ("v_codes", codes, (*head, self.head_dim, padded)),
            ("v_scale", scale, (*head, self._groups(self.len_kv, self.group_v), self.head_dim)),
        ):
            if array.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")

    @property
    def facts(self) -> CodeFacts:
        """The record's arguments, except arrays."""
        return CodeFacts(
            self.group_q, self.group_kv, self.config, self.out_dtype, self.group_v,
            self.max_len_q, self.max_len_k, self.prepared, self.has_queries,
        )  # fmt: skip

    @property
    def buffers(self) -> dict[str, Array]:
        """The record's arrays, by their names in plans."""
        return {name: a for name in BUFFERS if (a := getattr(self, name)) is not None}

    @classmethod
    def of_buffers(cls, facts: CodeFacts, arrays: Mapping[str, Any]) -> QuantizedQKV:
        """Return a record of arrays or descriptions that have been checked before."""
        record = object.__new__(cls)
        given = {name: arrays.get(name) for name in BUFFERS}
        vars(record).update(facts._asdict(), as_given=unchanged, **given)
        return record

    def with_facts(self, **facts: Any) -> QuantizedQKV:
        """Return the record with other facts or `as_given`; arrays are not checked again."""
        record = object.__new__(type(self))
        vars(record).update(vars(self), **facts)
        return record

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of Q and of the output, (batch, heads, len_q, head_dim), packed (1, heads, total_q,
        head_dim)."""
        batch, heads, length, head_dim = self.q_codes.shape
        if self.has_nibbles:
            head_dim = self.v.shape[3] if self.v is not None else self.v_codes.shape[2]  # type: ignore[union-attr]
        return batch, heads, length, head_dim

    @property
    def has_nibbles(self) -> bool:
        """Whether codes of Q and K are stored two to a byte."""
        return str(self.q_codes.dtype) == "uint8"

    def with_q(self, q: Array, **options: Any) -> QuantizedQKV:
        """Return the same codes of K and V with other queries, quantised as `config` says.

        Parameters
        ----------
        q : array, (batch, heads, len_q, head_dim), out_dtype
            NumPy, CuPy, or anything with DLPack, on the device of the codes; not modified. Any
            number of rows, and any multiple of `heads_kv` heads. For packed keys (total_q, heads,
            head_dim).
        **options
            ``backend``, ``rope``, ``rope_interleaved``, ``rope_offset_q``, ``qk_norm``,
            ``qk_norm_eps`` and ``qk_norm_split`` as for K in `cupyattn.quantize`, for these rows.
            For packed keys ``cu_seqlens_q`` and ``max_len_q``; those of this record when omitted.

        Returns
        -------
        QuantizedQKV
            Shares the arrays of K and V with this record. Attention returns arrays of q's kind.

        Raises
        ------
        ValueError, TypeError
            For queries that do not fit the keys or the given scales of Q, or have another type.
        UnsupportedError
            For zero points with given scales.

        Examples
        --------
        >>> import cupyattn as ca
        >>> x = np.ones((1, 2, 4, 16), np.float16)
        >>> z = ca.quantize_kv(x, x).with_q(2 * x[:, :, :1])
        >>> z.len_q, z.len_kv, ca.attention(z)[0, 0, 0, :2].tolist()
        (1, 4, [1.0, 1.0])
        """
        raise RuntimeError("with_q quantises q by cupyattn.ops.quantize: import that module first")

    def in_nibbles(self) -> QuantizedQKV:
        """Return the record with 4-bit codes packed two to a byte."""
        if self.has_nibbles:
            return self
        q_codes, k_codes = map(nibbles.packed, (self.q_codes, self.k_codes))
        return replace(self, q_codes=q_codes, k_codes=k_codes)

    def unpacked(self) -> QuantizedQKV:
        """Return the record with INT8 codes, as the kernels multiply them."""
        if not self.has_nibbles:
            return self
        codes = (nibbles.unpacked(x, self.head_dim) for x in (self.q_codes, self.k_codes))
        return replace(self, **dict(zip(("q_codes", "k_codes"), codes, strict=True)))

    @property
    def batch(self) -> int:
        """Number of batch entries, or of packed sequences."""
        ends = self.cu_seqlens_q
        return self.shape[0] if ends is None else int(ends.shape[0]) - 1

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.shape[1]

    @property
    def heads_kv(self) -> int:
        """Number of key heads."""
        return int(self.k_codes.shape[1])

    @property
    def len_q(self) -> int:
        """Number of query rows."""
        return self.shape[2]

    @property
    def len_kv(self) -> int:
        """Number of keys."""
        return int(self.k_codes.shape[2])

    @property
    def head_dim(self) -> int:
        """Head size."""
        return self.shape[3]

    @property
    def form(self) -> str:
        """The form of ``fa_int8`` for these operands: ``"pv8"`` or ``"v8"`` if V is codes."""
        return "portable" if self.v_codes is None else self.config.form

    @property
    def nbytes(self) -> int:
        """Total bytes of all arrays, without padding of rows of codes."""
        arrays = (getattr(self, name) for name in _ARRAYS)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def dequantize(self, dtype: str = "float32") -> tuple[Array, Array, Array]:
        """Return the operands as floating-point arrays, for any attention.

        Parameters
        ----------
        dtype : {"float32", "float64"}
            Type of the result. In float64, code times scale is exact, and adding a subtracted mean
            back takes one rounding.

        Returns
        -------
        q : array, (batch, heads, len_q, head_dim)
        k, v : array, (batch, heads_kv, len_kv, head_dim)
            With their means; q and k rotated if ``config.rotate`` is set. Packed operands have
            shape (total, heads or heads_kv, head_dim). The arrays are of the queries' kind.

        Raises
        ------
        ValueError
            For another dtype.

        Examples
        --------
        >>> codes = np.full((1, 1, 2, 4), 3, np.int8)
        >>> x = QuantizedQKV.from_codes(codes, codes, codes.astype(np.float16), 0.5, 0.25)
        >>> [float(a[0, 0, 0, 0]) for a in x.dequantize()]
        [1.5, 0.75, 3.0]
        """
        if dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}")
        if self.as_given is not unchanged:
            q, k, v = map(self.as_given, self.with_facts(as_given=unchanged).dequantize(dtype))
            return q, k, v
        if self.has_nibbles:
            return self.unpacked().dequantize(dtype)
        if self.cu_seqlens_q is not None:
            found = [one.dequantize(dtype) for one in self.sequences()]
            none = (x[..., :0, :].astype(dtype) for x in (self.q_codes, *[self.k_codes] * 2))
            found.append(tuple(none))
            join = array_namespace(self.q_codes).concatenate
            q, k, v = (join(x, axis=2)[0].swapaxes(0, 1) for x in zip(*found, strict=True))
            return q, k, v

        def rows(codes: Array, scale: Array, zero: Array | None, group: int) -> Array:
            factor = scale_of_row(scale.astype(dtype), group, codes.shape[2])[..., None]
            return codes_less_zero(codes, zero, group).astype(dtype) * factor

        q = rows(self.q_codes, self.q_scale, self.q_zero, self.group_q)
        k = rows(self.k_codes, self.k_scale, self.k_zero, self.group_kv)
        if self.k_mean is not None:
            k = k + self.k_mean.astype(dtype)[:, :, None, :]
        v = self.centred_values(dtype)
        if self.v_mean is not None:
            v = v + self.v_mean.astype(dtype)[:, :, None, :]
        return q, k, v

    def sequences(self) -> Iterator[QuantizedQKV]:
        """Yield a record of each packed sequence, with views of these arrays.

        Offsets on a device cause a synchronisation. Without packing, yield this record.
        """
        return iter((self,)) if self.cu_seqlens_q is None else split(self)

    def value_codes(self) -> Array:
        """Codes of V less their zero points, (batch, heads_kv, len_kv, head_dim), float32."""
        codes: Any = self.v_codes
        by_key = values_by_key(codes, self.len_kv).swapaxes(2, 3)
        numbers = numbers_of(by_key, self.config.p_type == "e4m3")
        if self.v_zero is None:
            return numbers
        zero = value_scale_of_key(self.v_zero, self.group_v, self.len_kv)
        return numbers - zero.astype(np.float32)

    def centred_values(self, dtype: str = "float64") -> Array:
        """Return V as in the second product: without its mean, if a mean was subtracted.

        Parameters
        ----------
        dtype : {"float32", "float64"}

        Returns
        -------
        array, (batch, heads_kv, len_kv, head_dim)
        """
        if self.v is not None:
            # NOTE: bfloat16 is converted to float64 through float32, which is exact.
            return self.v.astype(np.float32).astype(dtype)
        scale: Any = self.v_scale
        scale = value_scale_of_key(scale.astype(dtype), self.group_v, self.len_kv)
        return self.value_codes().astype(dtype) * scale

    @classmethod
    def from_codes(
        cls,
        q_codes: Array,
        k_codes: Array,
        v: Array,
        q_scale: float | Array,
        k_scale: float | Array,
        q_zero: int | Array | None = None,
        k_zero: int | Array | None = None,
        *,
        group_q: int | None = None,
        group_kv: int | None = None,
        k_mean: Array | None = None,
        out_dtype: str | None = None,
        v_scale: float | Array | None = None,
        v_mean: Array | None = None,
        group_v: int | None = None,
        p_type: str | None = None,
        v_zero: int | Array | None = None,
    ) -> QuantizedQKV:
        """Wrap INT8 arrays that were quantised elsewhere.

        Arrays are NumPy, CuPy, or anything with DLPack; none is modified.

        Parameters
        ----------
        q_codes, k_codes : array, int8
            (batch, heads, len, head_dim). Attention returns arrays of the kind of q_codes.
        v : array, float16 or bfloat16, or int8 or float8_e4m3fn
            Values, not quantised; or codes, (batch, heads_kv, len_kv, head_dim), with `v_scale`.
            With ``p_type="e4m3"``, int8 may contain the bits of e4m3.
        q_scale, k_scale : float or array
            One positive scale for all, or float32 ``(batch or 1, heads or 1, groups)``. The codes
            are *multiplied* by it.
        q_zero, k_zero : int or array of integers, optional
            Zero points, which are subtracted from the codes first: one for all, or an array that
            broadcasts to the shape of the scale, or to whose shape the scale broadcasts.
        group_q, group_kv : int, optional
            Rows per scale; required if there is more than one group.
        k_mean : array, (batch, heads_kv, head_dim), float32, optional
            Mean that was subtracted from the keys.
        out_dtype : str, optional
            Type of the attention output; that of v when omitted, or float16 if v is codes.
        v_scale : float or array, optional
            With codes of V: one positive scale for all, or float32
            ``(batch or 1, heads_kv or 1, groups, head_dim or 1)``.
        v_mean : array, (batch, heads_kv, head_dim), float32, optional
            Mean that was subtracted from V.
        group_v : int, optional
            Keys per scale of V, a multiple of the attention kernel's ``block_kv``; required if
            there is more than one group.
        p_type : {"u8", "s8", "e4m3", "16bit"}, optional
            Type of P for codes of V; "u8" when omitted, or "e4m3" if V is e4m3. "16bit" requires
            INT8 codes with one scale for each channel and without zero points.
        v_zero : int or array of integers, optional
            The same for INT8 codes of V.

        Returns
        -------
        QuantizedQKV

        Raises
        ------
        ValueError
            If shapes, dtypes, scales, zero points or groups do not fit together.
        """
        q_codes, as_given = take("q_codes", q_codes)
        k_codes, v, k_mean, v_mean = taken(k_codes=k_codes, v=v, k_mean=k_mean, v_mean=v_mean)
        q_scale, k_scale, v_scale, q_zero, k_zero, v_zero = taken_arrays(
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, q_zero=q_zero, k_zero=k_zero,
            v_zero=v_zero,
        )  # fmt: skip
        xp = array_namespace(q_codes, k_codes, v)
        q_scale, group_q, granularity_q = given_scale(xp, "q", q_scale, group_q, THREAD_ROWS_Q)
        k_scale, group_kv, granularity_k = given_scale(xp, "k", k_scale, group_kv, THREAD_ROWS_K)
        given: dict[str, Any] = {}
        e4m3 = v.dtype.name == "float8_e4m3fn" or (p_type == "e4m3" and v.dtype.name == "int8")
        if e4m3 or v.dtype.name == "int8":
            v = v.view(np.int8)
            v_scale, group_v = given_value_scale(xp, v.shape, v_scale, group_v)
            given = {"v_codes": stored_values(v.swapaxes(2, 3)), "v_scale": v_scale}
            given |= {"v_mean": v_mean, "group_v": group_v}
            if v_zero is not None and (e4m3 or p_type == "16bit"):
                found = "8-bit floats" if e4m3 else "p_type='16bit'"
                raise ValueError(f"v_zero goes with INT8 codes of V and of P, got {found}")
        elif not all(x is None for x in (v_scale, v_mean, group_v, p_type, v_zero)):
            raise ValueError(
                "v_scale, v_mean, group_v, p_type and v_zero go with 8-bit codes of V, "
                f"got {v.dtype.name}"
            )
        symmetric = q_zero is None and k_zero is None and v_zero is None
        if not symmetric:
            q_scale, q_zero = given_zero(xp, "q", q_scale, q_zero)
            k_scale, k_zero = given_zero(xp, "k", k_scale, k_zero)
            if given and not e4m3 and p_type != "16bit":
                given["v_scale"], given["v_zero"] = given_zero(xp, "v", given["v_scale"], v_zero)
        config = QuantConfig(
            granularity_q=granularity_q,
            granularity_k=granularity_k,
            granularity_v=None if not given else "channel" if group_v == GROUP_ALL else "block",
            symmetric=symmetric,
            smooth_k=k_mean is not None,
            smooth_v=v_mean is not None,
            pv="fp8" if e4m3 else "int8" if given else "16bit",
            p_type=p_type,
            scales=(q_scale, k_scale),
        )
        if out_dtype is None:
            out_dtype = "float16" if given else v.dtype.name
        return cls(
            q_codes, k_codes, None if given else v, q_scale, k_scale, group_q, group_kv, config,
            out_dtype, k_mean, q_zero, k_zero, as_given=as_given, **given,
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one file, whole or not at all.

        Parameters
        ----------
        path : path
            Replaced if it exists. The format is NumPy's ``.npz``, without pickled objects.
        """
        quantized_file.write(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, namespace: Any = np) -> QuantizedQKV:
        """Read what `save` wrote.

        Parameters
        ----------
        path : path
        namespace : module
            ``cupy`` puts the arrays on the current device.

        Returns
        -------
        QuantizedQKV

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is damaged, another kind of file, or of another version; the message names it.
        """
        return quantized_file.read(cls, path, namespace)
