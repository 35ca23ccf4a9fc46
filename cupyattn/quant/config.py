"""`QuantConfig`: the caller's choices for INT8 attention."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from cupyattn.arrays import memory
from cupyattn.arrays.described import Described
from cupyattn.arrays.interchange import device_of, is_cupy, taken_arrays
from cupyattn.arrays.kinds import array_namespace, check_real
from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels.limits import GROUP_ALL as GROUP_ALL
from cupyattn.kernels.limits import as_float
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant.rotation import ROTATIONS

#: Rows of Q, and keys, that share a scale at granularity "thread".
THREAD_ROWS_Q, THREAD_ROWS_K = 2, 16

#: Types of P for each arithmetic of P.V; the first is the default.
P_TYPES_OF = {"16bit": ("16bit",), "int8": ("u8", "s8", "16bit"), "fp8": ("e4m3",)}

#: Smallest scale, the smallest normal float32: its inverse is finite.
SCALE_MIN = np.float32(2.0**-126)

#: Names of given scales of Q and K in plans.
SCALE_BUFFERS = "q_static_scale", "k_static_scale"

GRANULARITIES = ("tensor", "head", "block", "thread", "token")


@dataclass(frozen=True, eq=False)
class QuantConfig:
    """Quantisation of the operands of INT8 attention.

    Parameters
    ----------
    granularity_q, granularity_k : {"tensor", "head", "block", "thread", "token"}
        Rows that share a scale: all rows of the array, all rows of a (batch, head), the rows of a
        tile of the attention kernel in the form that runs (with P and V in e4m3: in the portable
        form), 2 adjacent rows of Q or 16 adjacent keys, or one row.
    granularity_v : {"none", "tensor", "channel", "block"}, optional
        V in 16 bits has no scale. V in 8 bits has one for the array ("tensor"), for each channel of
        a (batch, head), or for each channel of a tile of keys ("block"). P in 16 bits does not
        support "block". Default: "none" for V in 16 bits, "channel" for V in 8 bits with P in 16
        bits, otherwise "block".
    symmetric : bool
        True: codes -127 to 127 without zero points. False: codes -128 to 127, filled by the range
        of a group even if it is not centred at 0. Every scale then has a zero point, the code of 0.
        V's INT8 codes have zero points, too, if P is codes; 8-bit floats have none. Needs dynamic
        scales.
    smooth_k : bool
        Subtract from the keys a mean over the length, per (batch, head, channel): the mean of all
        keys, or, from 1,024 keys on, of 32 of every 128. The softmax does not change, and an offset
        that all keys share no longer uses up the range of the codes.
    smooth_v : bool, optional
        The same for V in 8 bits; the output gets the mean back. Default: True if V has 8 bits.
    qk_bits : {8, 4}
        Bits of a code of Q or K. 4: codes -7 to 7, which `QuantizedQKV` stores two to a byte; the
        kernels still multiply INT8. Excludes zero points and `fused`.
    pv : {"16bit", "int8", "fp8"}
        Arithmetic of P.V: both in 16 bits; V as INT8 codes and P of `p_type`; or both as 8-bit
        floats (e4m3), which need compute capability 8.9.
    scales : "dynamic" or (q_scale, k_scale)
        Scales from the maxima of each call, or given scales: a positive float (granularity
        "tensor") or a float32 array ``(batch or 1, heads or 1, groups)`` of any library. The record
        stores copies, which are read-only on the host and must not be changed on a device. Values
        past 127 scales saturate. V's scales are always dynamic.
    p_type : {"16bit", "u8", "s8", "e4m3"}, optional
        P as an operand: 16 bits; codes 0 to 255 or 0 to 127, of which the largest stands for the
        largest exponential of a tile; or e4m3 up to 448. Default: the type for `pv`, "u8" for
        "int8". "16bit" with V in INT8 halves V's memory and leaves P unchanged.
    fused : bool
        True: the attention kernel makes the codes of Q and K, and does not store them. False: a
        pass before the kernel makes them. With tiles of the same sizes, the results have the same
        bits. Only for scales that depend on one tile of rows: granularity "block", "thread" or
        "token", dynamic scales, ``smooth_k=False`` and ``pv="16bit"``.
    rotate : {None, "hadamard"}
        "hadamard": multiply prepared rows of Q and K by one orthogonal matrix, of head_dim 64, 128
        or 256, before they become codes (`cupyattn.quant.rotation`). Scores do not change, and a
        channel of large numbers no longer uses up the range of the codes. Excludes given scales and
        `fused`.

    Raises
    ------
    ValueError
        For an invalid value.
    UnsupportedError
        For values that are not supported together.

    Notes
    -----
    The default, 2 rows and 16 keys, is the finest that costs next to nothing: on normal data it is
    as exact as one scale per row (the measurements of SageAttention 2 agree, arXiv 2411.10958),
    with 16 times fewer key scales to load.

    Two configurations are equal when their fields are; given scale arrays count by identity.

    Examples
    --------
    >>> QuantConfig().group_q(Tiles(128, 64, 4)), QuantConfig().group_kv(Tiles(128, 64, 4))
    (2, 16)
    >>> QuantConfig(granularity_k="head").group_kv(Tiles(128, 64, 4)) == GROUP_ALL
    True
    """

    granularity_q: str = "thread"
    granularity_k: str = "thread"
    granularity_v: str | None = None
    symmetric: bool = True
    smooth_k: bool = True
    smooth_v: bool | None = None
    qk_bits: int = 8
    pv: str = "16bit"
    scales: Any = field(default="dynamic", repr=False)
    p_type: str | None = None
    fused: bool = False
    rotate: str | None = None

    def __post_init__(self) -> None:
        _one_of("pv", self.pv, tuple(P_TYPES_OF))
        eight_bits = self.pv != "16bit"
        of_values: tuple[str, ...] = ("none",)
        if eight_bits:
            of_values = ("tensor", "channel", *(() if self.p_type == "16bit" else ("block",)))
        for name, value in (
            ("granularity_v", of_values[-1]),
            ("smooth_v", eight_bits),
            ("p_type", P_TYPES_OF[self.pv][0]),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _one_of("granularity_q", self.granularity_q, GRANULARITIES)
        _one_of("granularity_k", self.granularity_k, GRANULARITIES)
        allowed: dict[str, tuple[Any, ...]] = {
            "p_type": P_TYPES_OF[self.pv],
            "granularity_v": of_values,
            "smooth_v": (True, False) if eight_bits else (False,),
        }
        beside = f" with pv={self.pv!r}"
        for name, values in allowed.items():
            _one_of(name, getattr(self, name), values, where=beside)
            if eight_bits and self.p_type == "16bit":
                beside = " with pv='int8' and p_type='16bit'"
        _one_of("symmetric", self.symmetric, (True, False))
        _one_of("smooth_k", self.smooth_k, (True, False))
        _one_of("qk_bits", self.qk_bits, (8, 4))
        for name, value in (("symmetric", True), ("fused", False)):
            if self.qk_bits == 4 and getattr(self, name) != value:
                raise UnsupportedError(
                    f"quant.qk_bits=4 needs quant.{name}={value}, got {not value}: use qk_bits=8"
                )
        if isinstance(self.scales, str):
            _one_of("scales", self.scales, ("dynamic",))
        else:
            if isinstance(self.scales, tuple):  # plans store these scales, hence a copy
                own = tuple(_kept(name, x) for name, x in zip("qk", self.scales, strict=False))
                object.__setattr__(self, "scales", own + self.scales[2:])
            self._check_static_scales()
        _one_of("fused", self.fused, (True, False))
        _one_of("rotate", self.rotate, ROTATIONS)
        if self.fused:
            self._check_fused()
        if self.rotate and self.static:
            raise UnsupportedError(
                f"quant.rotate={self.rotate!r} needs quant.scales='dynamic', got given scales: "
                "a rotation changes the maxima of rows, so leave out one of both"
            )

    def _check_fused(self) -> None:
        """Raise unless the codes of a tile depend only on its rows."""
        for name, value, taken in (
            ("granularity_q", self.granularity_q, ("block", "thread", "token")),
            ("granularity_k", self.granularity_k, ("block", "thread", "token")),
            ("smooth_k", self.smooth_k, (False,)),
            ("scales", "static" if self.static else "dynamic", ("dynamic",)),
            ("pv", self.pv, ("16bit",)),
            ("rotate", self.rotate, (None,)),
        ):
            if value not in taken:
                raise ValueError(
                    f"quant.fused=True needs quant.{name}={' or '.join(map(repr, taken))}, got "
                    f"{value!r}: a kernel that quantises its own tiles sees no row beyond them"
                )

    def _check_static_scales(self) -> None:
        if not (isinstance(self.scales, tuple) and len(self.scales) == 2):
            raise ValueError(
                "quant.scales must be 'dynamic' or a pair (q_scale, k_scale), got "
                f"{shown(self.scales)}"
            )
        granularities = self.granularity_q, self.granularity_k
        for name, scale, granularity in zip("qk", self.scales, granularities, strict=True):
            if hasattr(scale, "shape"):
                if len(scale.shape) != 3:
                    raise ValueError(
                        f"the static {name}_scale must have shape (batch or 1, heads or 1, "
                        f"groups), got {tuple(scale.shape)}"
                    )
                check_real(f"the static {name}_scale", scale)
            elif not (isinstance(scale, (int, float)) and 0 < as_float(scale) < math.inf):
                raise ValueError(
                    f"the static {name}_scale must be an array or a positive float, got "
                    f"{shown(scale)}"
                )
            elif granularity != "tensor":
                raise ValueError(
                    f"a single static {name}_scale needs granularity_{name}='tensor', "
                    f"got {granularity!r}"
                )

    @property
    def static(self) -> bool:
        """Whether the scales are given."""
        return not isinstance(self.scales, str)

    def of_entry(self, number: int) -> QuantConfig:
        """Return the configuration of one batch entry, with its part of given scales."""
        if not self.static:
            return self
        each = (getattr(x, "shape", (1,))[0] > 1 for x in self.scales)
        own = zip(each, self.scales, strict=True)
        return replace(self, scales=tuple(x[number : number + 1] if many else x for many, x in own))

    @property
    def largest_code(self) -> int:
        """The largest code of Q and K without zero points."""
        return 127 if self.qk_bits == 8 else 7

    @property
    def zero_points(self) -> bool:
        """Whether codes of Q and K have zero points."""
        return not self.symmetric

    @property
    def value_zero_points(self) -> bool:
        """Whether codes of V have zero points."""
        return not self.symmetric and self.p_type in ("u8", "s8")

    @property
    def has_value_codes(self) -> bool:
        """Whether V is codes."""
        return self.pv != "16bit"

    @property
    def form(self) -> str:
        """The form of ``fa_int8`` for this: ``"portable"``, ``"pv8"``, ``"v8"`` or ``"fused"``."""
        if self.fused:
            return "fused"
        if not self.has_value_codes:
            return "portable"
        return "v8" if self.p_type == "16bit" else "pv8"

    @property
    def value_p_type(self) -> str:
        """Type of P if V is codes, as in `Features`; "" otherwise."""
        return str(self.p_type) if self.has_value_codes else ""

    def group_q(self, tiles: Tiles) -> int:
        """Return the number of adjacent rows of Q that share a scale."""
        return _group(self.granularity_q, tiles.block_q, THREAD_ROWS_Q)

    def group_kv(self, tiles: Tiles) -> int:
        """Return the number of adjacent keys that share a scale."""
        return _group(self.granularity_k, tiles.block_kv, THREAD_ROWS_K)

    def group_v(self, tiles: Tiles) -> int:
        """Return the number of adjacent keys per scale of a channel of V; 0 without scales."""
        return {"none": 0, "block": tiles.block_kv}.get(str(self.granularity_v), GROUP_ALL)

    @functools.cached_property
    def described(self) -> QuantConfig:
        """The same with descriptions in place of given scales, for the key of a call."""
        if not self.static:
            return self
        scales = (
            Described.contiguous(name, getattr(x, "shape", (1, 1, 1)), np.float32)
            for name, x in zip(SCALE_BUFFERS, self.scales, strict=True)
        )
        return replace(self, scales=tuple(scales))

    def with_scales(self, arrays: Mapping[str, Any]) -> QuantConfig:
        """Return the same with given scales, if any, replaced by a call's arrays, by buffer."""
        if not self.static:
            return self
        return replace(self, scales=tuple(arrays[name] for name in SCALE_BUFFERS))

    def scales_beside(
        self, array: Any, entries: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> dict[str, Any]:
        """Return given scales as the operands of a call, made once for each device.

        Parameters
        ----------
        array : array or Described
            NumPy or CuPy; the scales are returned on its device. For a description, they are
            descriptions.
        entries : pair of (int, int)
            Batch and heads of Q and of K, to which scales are repeated, except scales of whole
            tensors.

        Returns
        -------
        dict of str to array, float32, (batch or 1, heads or 1, groups)

        Raises
        ------
        ValueError
            As `check_scales`.
        """
        granularities = self.granularity_q, self.granularity_k
        shapes = tuple(map(_repeated, self.scales, granularities, entries))
        if isinstance(array, Described):
            self.check_scales()
            return {
                name: Described.contiguous(name, shape, np.float32, array.device)
                for name, shape in zip(SCALE_BUFFERS, shapes, strict=True)
            }
        key = device_of(array), shapes
        found: dict[str, Any] | None = self._on_devices.get(key)
        if found is None:
            self.check_scales()
            with memory.on_device_of(array):
                own = map(_laid_out, self.scales, shapes, (array, array))
                found = dict(zip(SCALE_BUFFERS, own, strict=True))
                if not is_cupy(array) or memory.wait_until_computed():
                    self._on_devices[key] = found
        return found

    def check_scales(self) -> None:
        """Raise ValueError for given scales on the host that are not finite and at least 2^-126."""
        for name, scale in zip("qk", self.scales, strict=True):
            if isinstance(scale, Described) or is_cupy(scale):
                continue
            with np.errstate(over="ignore"):
                array = np.asarray(scale, np.float32)
            if not (np.isfinite(array).all() and (array >= SCALE_MIN).all()):
                raise ValueError(f"the static {name}_scale must be finite and at least 2**-126")

    @functools.cached_property
    def _on_devices(self) -> dict[Any, dict[str, Any]]:
        return {}

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        """The fields; scales count by value on the host, and by identity on a device."""
        if not self.static:
            return (*_PLAIN_FIELDS(self), self.scales)
        scales = (
            (x.shape, x.dtype.str, x.tobytes()) if isinstance(x, np.ndarray)
            else id(x) if is_cupy(x) else x
            for x in self.scales
        )  # fmt: skip
        return (*_PLAIN_FIELDS(self), *scales)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, one.name) for one in fields(self))

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, QuantConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)


#: Returns the fields that are numbers and names. Every call is looked up by them, hence no loop in
#: Python.
_PLAIN_FIELDS = operator.attrgetter(*(f.name for f in fields(QuantConfig) if f.name != "scales"))


def _kept(name: str, scale: Any) -> Any:
    """Return a copy of an operand's static scales; return numbers and descriptions unchanged."""
    if isinstance(scale, Described):
        return scale
    # NOTE: copying elements at odd addresses would fault on a device, hence the copy in two steps.
    (array,) = taken_arrays(**{f"the static {name}_scale": scale})
    if not hasattr(array, "copy"):
        return array
    own = array.copy()
    if isinstance(own, np.ndarray):  # CuPy's arrays have no such flag
        own.flags.writeable = False
    return own


def _repeated(scale: Any, granularity: str, entries: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of given scales, repeated to all entries and heads if only one is given."""
    have: tuple[int, ...] = getattr(scale, "shape", (1, 1, 1))
    if granularity == "tensor" or not entries:
        return have
    (batch, heads), (of_batch, of_heads) = have[:2], entries
    return of_batch if batch == 1 else batch, of_heads if heads == 1 else heads, have[2]


def _laid_out(scale: Any, shape: tuple[int, ...], beside: Any) -> Any:
    """Return given scales as an array in C order on the current device, or on the host."""
    xp = array_namespace(beside)
    if is_cupy(scale):
        scale = scale.copy()  # from another device to this one
        return xp.ascontiguousarray(xp.broadcast_to(scale.astype(np.float32), shape))
    return xp.array(np.broadcast_to(np.float32(scale), shape))


def _group(granularity: str, block: int, thread: int) -> int:
    return {"block": block, "thread": thread, "token": 1}.get(granularity, GROUP_ALL)


def _one_of(
    name: str,
    value: object,
    allowed: Iterable[object],
    where: str = "",
) -> None:
    """Raise unless `value` is allowed."""
    allowed = tuple(allowed)
    choices = " or ".join(map(repr, allowed))
    # NOTE: 1 == True in Python, but 1 as the value of a switch is a mistake.
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise ValueError(f"quant.{name} must be {choices}{where}, got {shown(value)}")
