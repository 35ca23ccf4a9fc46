"""Rounding points and types of each kernel: the record that drives mirror and bound.

docs/MATH_REFERENCE.md defines the tags R0 to R7, and its lemmas have numbers such as [L24]. A
kernel's header and body, its mirror in `cupyattn.reference` and its bound in `cupyattn.bounds` use
the same tags.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

#: Unit roundoff of each storage type: half the distance from 1 to the next number.
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Absolute rounding error in the subnormal range: half the smallest subnormal.
HALF_SUBNORMAL = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
#: Least normal number. Tensor cores may align smaller operands, except 0, as if they had its
#: exponent.
LEAST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
#: Relative error of ``ex2.approx.ftz.f32`` (PTX ISA, "ex2": 2^-22 over the full range).
EX2_APPROX_ERROR = 2.0**-22
#: Results of ``ex2.approx.ftz.f32`` below this are flushed to zero.
EX2_FLUSH = 2.0**-126
#: Relative error of tanhf, as its instructions guarantee it (docs/MATH_REFERENCE.md [L24]). The
#: CUDA C++ Programming Guide (mathematical functions) says 2 ulp, from tests.
TANHF_ERROR = 2.0**-21
#: Relative error of ``tanh.approx.f32`` (PTX ISA, "tanh": 2^-11).
TANH_APPROX_ERROR = 2.0**-11
#: LARGEST_SCORE of ``score.cuh``, in log2 units. M is rounded to nearest below it. From there on M
#: is rounded down, and exponents are capped at LARGEST_EXPONENT, which rounding would exceed.
LARGEST_SCORE, LARGEST_EXPONENT = 2.0**27, 8
#: [L31] How far weights may grow before a lazy M rises, in log2 units. P and its sums can store
#: weights up to this size, whether the rounding of M or its lag makes them large. The value is that
#: of ``sm90/attn_fa_int8.cu``. LARGEST_SUM of ``sm90/attn_fa_tc.cu``, ``attn_fa_tc.cu``,
#: ``attn_fa_int8.cu`` and ``attn_fa_int8_fused.cu`` is 2 to its power.
HEADROOM = LARGEST_EXPONENT
#: Pieces along the keys that a tile of the Hopper forms is cut into, but the last one [L32].
MOST_PIECES = 16
#: Largest code of P by type: the code of the largest exponential of a tile.
P_CODE_ONE = {"u8": 255.0, "s8": 127.0, "e4m3": 448.0}


@dataclass(frozen=True)
class Shifts:
    """R4 to R6 of the kernels whose O is an integer: the values of their constants.

    Defaults are the constants of ``sm90/attn_fa_int8_pv8.cu``. `WHOLE` has the constants of
    ``attn_fa_int8_pv8_whole.cu``.

    Parameters
    ----------
    code_bits : int
        The largest weight of a tile is at least 2^(code_bits - 1) and below 2^code_bits.
    lower_bits : int
        Largest distance of M below its highest value in a row.
    watch_steps : int
        Number of steps between two checks of l.
    sum_bits : int
        l stays below 2^sum_bits. A check keeps M so high that l is below a quarter of this limit.
        The weights until the next check are less than the rest.
    l_bits : int, optional
        If given, l is an integer, too, in units of 2^(M - l_bits), in each of `LANES` lanes. None:
        l is a float.
    """

    code_bits: int = 8
    lower_bits: int = 4
    watch_steps: int = 6
    sum_bits: int = 23
    l_bits: int | None = None

    def guards(self, len_kv: int) -> bool:
        """Whether M must not fall so low that l overflows."""
        return len_kv >= 1 << (self.sum_bits - self.code_bits - self.lower_bits)


#: The constants of ``attn_fa_int8_pv8_whole.cu``.
WHOLE = Shifts(watch_steps=12, l_bits=7)
#: Lanes that share a row, each with two neighbours of eight keys.
LANES = 4

#: Unit roundoff of a tensor-core accumulation step (they truncate and align; Blanchard et al. 2020,
#: Khattak and Mikaitis, arXiv 2512.07004).
TENSOR_CORE_ROUNDOFF = 2.0**-23
#: Unit roundoff of a tensor core over 8-bit floats. A sum keeps 13 bits of its fraction. Addends,
#: including the accumulator, keep 13 bits below the first bit of the largest addend.
FP8_ROUNDOFF = 2.0**-13
#: Least normal e4m3. Tensor cores align smaller operands, except 0, as if they had its exponent.
FP8_LEAST_NORMAL = 2.0**-6


@dataclass(frozen=True)
class Foreign:
    """The documented roundings of another library's kernel.

    `cupyattn.testing.numerics` creates this record and describes its scope.

    Parameters
    ----------
    name : str
        Its name in reports.
    accumulate : {"float32", "float16", "fp22"}
        R2, R6. Type of the sums of both products.
    promote : int, optional
        R6. Number of keys after which partial sums of P.V are added in float32; None: never.
    score_type : {"float32", "float16", "bfloat16"}
        R3. Storage type of scores.
    exponential : float
        R4. Largest relative error of one exponential.
    sequential : bool
        R4. Whether a row takes its keys in order, from either end. False: in any order, in slices.
    qk_codes, v_codes : {"int8", "e4m3"}, optional
        R1. Type of the codes that the kernel makes of Q and K, and of V.
    out_type : {"float16", "bfloat16", "float32"}, optional
        R7. Storage type of O; that of q when omitted.
    tanh : float
        R3. Largest relative error of the tanh of a softcap.
    scaled_q : {"float16", "bfloat16", "float32"}, optional
        R3. Type of Q after its multiplication by the scale; None: the scores are scaled.
    sinks : bool
        Whether the last key is a sink: it has a score and no value, and is never converted to
        codes.
    """

    name: str
    accumulate: str
    promote: int | None
    score_type: str
    exponential: float
    sequential: bool
    qk_codes: str | None
    v_codes: str | None
    out_type: str | None
    tanh: float = TANH_APPROX_ERROR
    scaled_q: str | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Numerics:
    """Rounding points of one kernel.

    Parameters
    ----------
    q_type, k_type, v_type : str
        Storage types of the operands, ``"int8"`` for codes with scales.
    out_type : str
        Storage type of O.
    scores : {"fma", "tensor_core", "int32"}
        R2, how Q.K^T accumulates over head_dim.
    scaling : {"natural", "folded", "dequantised"}
        R3. ``natural``: S = fl(dot * scale) is rounded, then exp2(fma(S, log2 e, -M)).
        ``folded``: S = dot, then exp2(fma(S, scale_log2, -M)), without a separate rounding.
        ``dequantised``: S = fl(fl(dot * k_scale) * fl(scale_log2 * q_scale)) in log2 units, then
        exp2(S - M); with softcap or bias the same with `scale`, in natural units.
    p_type : str
        R5, storage type of P as an operand; ``"float32"`` means that it is not rounded again. Codes
        ``"u8"`` and ``"s8"`` are multiples of 1/255 and 1/127 of the largest exponential of a tile;
        ``"e4m3"`` is an 8-bit float, 448 for that exponential.
    values : {"fma", "tensor_core", "int32", "fp8"}
        R6, how P.V accumulates over the keys. ``int32``: exactly within a tile, then in float32;
        ``fp8``: within a tile on tensor cores that keep 14 bits.
    online : bool
        R6. True: l and O are rescaled by alpha as the maximum rises, O is divided by l at the end
        (R7). False: the whole row is known, P is divided by l before P.V.
    softcap : bool
        R3. S = fl(softcap * tanhf(fl(S * fl(1 / softcap)))).
    bias : bool
        R3. S = fl(S + bias), last of all.
    headroom : int
        R4. M stays while weights are at most 2^headroom, and then rises to the largest score of the
        step. 0: M is the largest score so far.
    splits : bool
        R6. Each slice of the keys has its online recurrence. A weighted sum merges the slices.
    pieces : int
        R6. Largest number of pieces along the keys into which a row may be cut, each with its
        recurrence. A weighted sum merges the pieces. 0 or 1: rows are not cut.
    sums_operand : bool
        R6, R7. True: O is divided by the sum of rounded P, which is a column of the product P.V or
        a sum of codes. lse uses the sum of P before rounding.
    shifts : Shifts, optional
        R4 to R6. M is an integer and follows the largest score of each tile, down as well as up.
        Codes of P are multiples of 2^M. O stays in int32, and shifts convert it to another M.
    scales_last : bool
        R6, R7. A channel of V has one scale for all tiles, which multiplies the sum of all tiles,
        not the sum of each.
    scored : bool
        R3, R4. Softcap and bias change scores in the units that the softmax takes: S becomes
        fl(u tanh(S / u)), u = softcap / scale, within `cupyattn.kernels.softcap.SOFTCAP_ERROR`,
        then fma(bias, fl(1 / scale), S). With codes S is in log2 units: log2 e replaces 1 / scale.
        A mask alone changes no number: these kernels then round as the kernels of plain calls.
    foreign : Foreign, optional
        A kernel of another library: `cupyattn.bounds.foreign` bounds it by this and `p_type` alone.
    """

    q_type: str
    k_type: str
    v_type: str
    out_type: str
    scores: Literal["fma", "tensor_core", "int32"]
    scaling: Literal["natural", "folded", "dequantised"]
    p_type: str
    values: Literal["fma", "tensor_core", "int32", "fp8"]
    online: bool
    softcap: bool = False
    bias: bool = False
    headroom: int = 0
    splits: bool = False
    pieces: int = 0
    sums_operand: bool = False
    shifts: Shifts | None = None
    scales_last: bool = False
    scored: bool = False
    foreign: Foreign | None = None

    @property
    def subtracts_first(self) -> bool:
        """R4. True: exp2(fl(fl(S - m) * log2 e)), m the largest score itself, in natural units.

        This holds with softcap and bias, unless `scored`. If a bias of -1e9 in a whole block of
        keys were subtracted after scaling, its rounding would remain in the exponents.
        """
        return (self.softcap or self.bias) and not self.scored

    @property
    def by_tile(self) -> bool:
        """R4, R5. True: exponentials are relative to the largest score of their tile.

        They are in units of code 1, so rounding them gives codes. M is that score minus log2 of the
        largest code, rounded up; with softcap or bias it is the score. A factor
        beta = exp2(M_tile - M) converts the tile's part of l and O to the row's M.
        """
        return self.p_type in P_CODE_ONE

    @property
    def value_codes(self) -> bool:
        """R6, R7. Whether V is codes, whose scale and mean are applied after the product with P."""
        return self.v_type in ("int8", "e4m3")

    @property
    def code_log2(self) -> float:
        """R4. Largest exponent in log2 units, which belongs to the largest code."""
        return math.log2(P_CODE_ONE[self.p_type]) if self.by_tile and not self.shifts else 0.0

    @property
    def tags(self) -> tuple[str, ...]:
        """The rounding points at which this kernel rounds, e.g. ``("R2", "R4", ...)``."""
        tags = ["R1"] if self.q_type == "int8" else []
        tags += [] if self.scores == "int32" else ["R2"]
        tags += [] if self.scaling == "folded" and not (self.softcap or self.bias) else ["R3"]
        tags += ["R4"]
        tags += [] if self.p_type == "float32" else ["R5"]
        return (*tags, "R6", "R7")


#: Forms with P and V in 8 bits, and all forms of kernels.
_OF_CODES = ("pv8", "pv8_whole", "sm90_pv8", "sm90_pv8_by_tile", "sm90_fp8")
_FORMS = ("portable", "sm90", "split", "v8", *_OF_CODES, "fused")


def numerics(
    family: str,
    form: str,
    dtype: str,
    quant: Any = None,
    *,
    softcap: bool = False,
    bias: bool = False,
) -> Numerics:
    """Compose the rounding points of a kernel.

    Parameters
    ----------
    family : {"unfused", "float32", "tensor_core", "int8"}
        Arithmetic of the variant (`cupyattn.kernels.ladder.Variant.family`).
    form : str
        ``"portable"``, ``"sm90"``, ``"split"``, ``"v8"``, ``"pv8"``, ``"pv8_whole"``,
        ``"sm90_pv8"``, ``"sm90_pv8_by_tile"``, ``"sm90_fp8"`` or ``"fused"``: which form of the
        kernel. The tensor cores of all forms have the same roundoff. With 16-bit P, M is lazy,
        except in the split form, which adds up slices of the keys. The fused form rounds where the
        portable form does. ``"v8"``, whose V is codes, does so too, except for V's scale and mean.
        With P and V in 8 bits, ``"pv8_whole"`` and ``"sm90_pv8"`` have `Shifts`, and the other
        forms have sums of tiles.
    dtype : {"float16", "bfloat16", "float32"}
        Storage type of the caller's arrays. ``int8`` with float32 converts V and P to float16.
    quant : QuantConfig, optional
        Codes of P in the forms with P and V in 8 bits. Default: unsigned, or e4m3 in the form that
        has no other.
    softcap, bias : bool
        Features that change a score; window and masks only select, which rounds nothing.

    Returns
    -------
    Numerics

    Raises
    ------
    ValueError
        If family, form or dtype is none of the above.

    Examples
    --------
    >>> numerics("tensor_core", "portable", "float16").tags
    ('R2', 'R4', 'R5', 'R6', 'R7')
    >>> numerics("tensor_core", "portable", "float16", softcap=True).scaling
    'natural'
    """
    if form not in _FORMS:
        raise ValueError(f"form must be one of {', '.join(_FORMS)}, got {form!r}")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"dtype must be float16, bfloat16 or float32, got {dtype!r}")
    changed, stored = softcap or bias, (dtype,) * 4
    features: dict[str, Any] = {"softcap": softcap, "bias": bias, "splits": form == "split"}
    scored = {**features, "scored": form.startswith("sm90") and changed}
    lags = {**scored, **_lagging(form, changed)}
    folded: Literal["natural", "folded"] = "natural" if changed else "folded"
    match family:
        case "unfused":
            return Numerics(*stored, "fma", "natural", "float32", "fma", False, **features)
        case "float32":
            return Numerics(*stored, "fma", folded, "float32", "fma", True, **features)
        case "tensor_core":
            scaling: Literal["natural", "folded"] = "folded" if scored["scored"] else folded
            return Numerics(
                *stored, "tensor_core", scaling, dtype, "tensor_core", True, **lags
            )
        case "int8" if form in _OF_CODES:
            return _of_codes(form, dtype, quant, scored)
        case "int8":
            value = "float16" if dtype == "float32" else dtype
            v_type = "int8" if form == "v8" else value
            return Numerics(
                "int8", "int8", v_type, dtype, "int32", "dequantised", value, "tensor_core", True,
                sums_operand=form == "sm90", scales_last=form == "v8", **lags,
            )  # fmt: skip
    raise ValueError(
        f"family must be 'unfused', 'float32', 'tensor_core' or 'int8', got {family!r}"
    )


def _lagging(form: str, changed: bool) -> dict[str, int]:
    """Return how far a lazy M may lag in kernels with 16-bit P, and how their sums are cut."""
    lags = form.startswith("sm90") if changed else form != "split"
    return {
        "headroom": HEADROOM if lags else 0, "pieces": MOST_PIECES + 1 if form == "sm90" else 0
    }  # fmt: skip


def _of_codes(form: str, dtype: str, quant: Any, features: dict[str, Any]) -> Numerics:
    """Compose the rounding points of a form with P and V in 8 bits."""
    by_form = "e4m3" if form == "sm90_fp8" else "u8"
    p_type = by_form if quant is None else quant.p_type
    fp8 = p_type == "e4m3"
    one_scale = quant is not None and quant.granularity_v != "block"
    return Numerics(
        "int8", "int8", "e4m3" if fp8 else "int8", dtype, "int32", "dequantised", p_type,
        "fp8" if fp8 else "int32", True, **features, sums_operand=not fp8,
        shifts={"sm90_pv8": Shifts(), "pv8_whole": WHOLE}.get(form),
        pieces=MOST_PIECES + 1 if form == "sm90_pv8" else 0,
        scales_last=form == "sm90_fp8" or (form == "pv8" and one_scale),
    )  # fmt: skip


def check_features(n: Numerics, softcap: float, bias: object) -> Numerics:
    """Return `n` if it rounds as a call with this softcap and bias does; raise otherwise."""
    if n.softcap != bool(softcap) or n.bias != (bias is not None):
        raise ValueError(
            f"numerics says softcap={n.softcap}, bias={n.bias}, the call has softcap={softcap} and "
            f"{'no bias' if bias is None else 'a bias'}"
        )
    return n
