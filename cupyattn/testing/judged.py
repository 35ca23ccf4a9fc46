"""Judgement of outputs of a known kernel, or by the first of several kernels that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cupyattn.arrays.kinds import Array, array_namespace, as_float64, check_values
from cupyattn.bounds import prepared as bounds_prepared
from cupyattn.bounds import quantised
from cupyattn.bounds.bound import widest
from cupyattn.bounds.perturbation import ratio_to_bound, worst_of
from cupyattn.kernels.numerics import Numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.attention import KernelCall
from cupyattn.reference.exact import attention_exact
from cupyattn.runtime.origins import origin
from cupyattn.testing.expected import (
    Element,
    Expectation,
    expectation,
    operands_of,
    options_of_exact,
)
from cupyattn.testing.functionals import FunctionalRatio, sums_over_channels
from cupyattn.testing.parts import Part
from cupyattn.testing.report import Report
from cupyattn.testing.signed import SignedRatio, SignedRun, judge_signed

#: Largest number of rows without a bound that a report names.
FIRST_UNBOUNDED = 4


@dataclass(frozen=True)
class Further:
    """Further judgements of O, with the options of `judge` as fields.

    `codes` says whether the call ran with this form and these tiles, as for `expectation`.
    """

    signed: SignedRun | None = None
    draws: int = 1
    sums: bool = False
    codes: bool = True


#: Codes alone.
NO_FURTHER_JUDGEMENT = Further()


@dataclass(frozen=True, eq=False)
class Held:
    """An output and its judgement.

    Parameters
    ----------
    received : KernelCall
        The kernel that is assumed to have made the output.
    known : Expectation
    o : Array
        The rows that are judged, float64.
    worst : Element
    lse_ratio : float or None
    lse_index : tuple of int or None
    signed : SignedRatio or None
    sums : tuple of FunctionalRatio
    """

    received: KernelCall
    known: Expectation
    o: Array
    worst: Element
    lse_ratio: float | None
    lse_index: tuple[int, ...] | None
    signed: SignedRatio | None
    sums: tuple[FunctionalRatio, ...]

    @property
    def ratio(self) -> float:
        """The largest of all ratios."""
        further = [one.ratio for one in (self.signed, *self.sums) if one is not None]
        return max(self.worst.ratio, self.lse_ratio or 0.0, *further, 0.0)


def judge_kernel(
    received: KernelCall,
    o: Array,
    lse: Array | None = None,
    *,
    numerics: Numerics | None = None,
    rows: Array | None = None,
    seed: int = 0,
    exact: Callable[..., Any] = attention_exact,
    further: Further = NO_FURTHER_JUDGEMENT,
) -> Report:
    """Judge the output of a kernel, such as the output of a prepared call.

    Parameters
    ----------
    received : KernelCall
    o, lse, numerics, rows, seed, exact
        As for `cupyattn.testing.judge`.
    further : Further
        Judgements beside the elements of O and lse.
    """
    check_values("rows", rows)
    check_shapes(received, o, lse)
    known = expectation(
        received, numerics=numerics, rows=rows, seed=seed, exact=exact, codes=further.codes
    )
    found = hold(received, known, o, lse, exact, further, numerics=numerics, seed=seed)
    report = report_of(found, exact, origin(o), numerics=numerics)
    if further.codes and numerics is None:
        report = replace(report, held_to=f"{named(received)}, as given")
    return report


def judge_parts(
    parts: Sequence[Part],
    tried: Sequence[tuple[str, Tiles]],
    *,
    rows: Array | None = None,
    seed: int = 0,
    exact: Callable[..., Any] = attention_exact,
    further: Further = NO_FURTHER_JUDGEMENT,
) -> list[Report]:
    """Judge outputs of one call by the first of several kernels that holds its sharp bound.

    Parameters
    ----------
    parts : sequence of Part
        One output, or the output of each packed sequence.
    tried : sequence of (str, Tiles)
        Form and tiles of each kernel, the likeliest first.
    rows, seed, exact, further
        As for `judge_kernel`.

    Returns
    -------
    list of Report
        One for each part. If only the widest bound of all kernels holds, the reports are of the
        kernel that came closest, and `undecided`.
    """
    check_values("rows", rows)
    of_exact: list[Any] = [None] * len(parts)
    attempts: list[list[Held]] = []
    for form, tiles in tried:
        attempts.append([])
        for i, part in enumerate(parts):
            received = part.received(form, tiles)
            check_shapes(received, part.o, part.lse)
            known = expectation(
                received, rows=rows, seed=seed, exact=exact, of_exact=of_exact[i]
            )
            of_exact[i] = of_exact[i] or (known.rows, known.of_exact)
            attempts[-1].append(
                hold(received, known, part.o, part.lse, exact, further, seed=seed)
            )
        if max((one.ratio for one in attempts[-1]), default=0.0) <= 1:
            held_to, found, undecided = "assumed", attempts[-1], False
            break
    else:
        found = min(attempts, key=lambda held: max(one.ratio for one in held))
        held_to, undecided = "the closest of all tried" if len(tried) > 1 else "assumed", True
        wide = [
            _held_to_widest([held[i] for held in attempts], part) for i, part in enumerate(parts)
        ]
        if max(one.ratio for one in wide) > 1:
            held_to, found, undecided = "" if len(tried) > 1 else held_to, wide, False
    forms = " or ".join(named(held[0].received) for held in attempts if held)
    reports = []
    for part, one in zip(parts, found, strict=True):
        words = f"{named(one.received)}, {held_to}"
        if not held_to:
            words = f"the widest bound of {forms}, since no single bound holds"
        report = report_of(one, exact, origin(part.given))
        failed = undecided and one.ratio > 1
        reports.append(replace(report, held_to=words, undecided=failed))
    return reports


def named(received: KernelCall) -> str:
    """Return the words for form and tiles of a kernel."""
    kernel = received.kernel
    tiles = kernel.tiles
    return f"form {kernel.form} on tiles {tiles.block_q} x {tiles.block_kv}"


def check_shapes(received: KernelCall, o: Array, lse: Array | None) -> None:
    """Raise ValueError unless O and lse have the shapes that follow from the operands."""
    q, *others = operands_of(received)
    array_namespace(o, q, *others)
    shape = tuple(q.shape)
    if o.shape != shape:
        raise ValueError(f"o must have q's shape {shape}, got {o.shape}")
    if lse is not None and lse.shape != shape[:3]:
        raise ValueError(f"lse must have shape {shape[:3]}, got {lse.shape}")


def hold(
    received: KernelCall,
    known: Expectation,
    o: Array,
    lse: Array | None,
    exact: Callable[..., Any],
    further: Further,
    *,
    numerics: Numerics | None = None,
    seed: int = 0,
) -> Held:
    """Judge an output by its expectation."""
    rows, bound = known.rows, known.bound
    scored = options_of_exact(received, rows)
    value = as_float64(o[:, :, rows])
    signed: SignedRatio | None = None
    sums: tuple[FunctionalRatio, ...] = ()
    if further.signed is not None:
        signed = judge_signed(
            received, further.signed, rows, lambda other: exact(*operands_of(other), **scored),
            draws=further.draws, numerics=numerics, seed=seed,
        )  # fmt: skip
    if further.sums:
        sums = sums_over_channels(received, value - known.o, bound, rows, numerics=numerics)
    ratio, at = _worst_lse(known, lse)
    return Held(received, known, value, known.worst(value), ratio, at, signed, sums)


def _held_to_widest(held: Sequence[Held], part: Part) -> Held:
    """Judge a part by the widest of its bounds, without predicted codes.

    Signed values and sums are taken from the kernel that comes closest in them.
    """
    first = held[0]
    bound = widest([one.known.bound for one in held])
    known = replace(first.known, bound=bound, predicted=None)
    ratio, at = _worst_lse(known, part.lse)
    signed = [one.signed for one in held if one.signed is not None]
    closest = min(signed, key=_ratio, default=None)
    sums = [min(forms, key=_ratio) for forms in zip(*(one.sums for one in held), strict=True)]
    worst = known.worst(first.o)
    return Held(first.received, known, first.o, worst, ratio, at, closest, tuple(sums))


def _ratio(judgement: SignedRatio | FunctionalRatio) -> float:
    return judgement.ratio


def _worst_lse(
    known: Expectation, lse: Array | None
) -> tuple[float, tuple[int, ...]] | tuple[None, None]:
    """Return the largest error of lse as a fraction of its bound, and its index; None without
    lse."""
    if lse is None:
        return None, None
    value = as_float64(lse[:, :, known.rows])
    ratio, at = worst_of(ratio_to_bound(value, known.lse, known.bound.lse))
    return ratio, (*at[:2], int(known.rows[at[2]])) if at else at


def report_of(
    held: Held, exact: Callable[..., Any], ran: str, *, numerics: Numerics | None = None
) -> Report:
    """Report on an output, with what quantising cost."""
    received, known, value, worst = held.received, held.known, held.o, held.worst
    rows, unbounded = known.rows, known.unbounded
    scored = options_of_exact(received, rows)
    relative_l2, size = _relative_l2(value, known.o, unbounded)
    of_caller, relative_l2_given = _exact_of_caller(received, exact, scored), None
    if of_caller is not None:
        relative_l2_given, _ = _relative_l2(value, of_caller[0], unbounded)
    elif received.quantized is None:
        relative_l2_given = relative_l2
    foreign = None if numerics is None else numerics.foreign
    return Report(
        variant=received.kernel.variant.name if foreign is None else foreign.name,
        rows=int(rows.size),
        judged=int((~unbounded).sum()),
        unbounded=int(unbounded.sum()),
        unbounded_rows=tuple(
            (int(b), int(h), int(rows[i]))
            for b, h, i in zip(*(at[:FIRST_UNBOUNDED] for at in unbounded.nonzero()), strict=True)
        ),
        ratio=worst.ratio,
        index=worst.at,
        value=worst.value,
        expected=worst.expected,
        bound=worst.bound,
        tag=worst.tag,
        lse_ratio=held.lse_ratio,
        lse_index=held.lse_index,
        relative_l2=relative_l2,
        tightness=_tightness(known.width, size),
        quantisation=_quantisation(received, (known.o, known.lse), of_caller, scored),
        relative_l2_given=relative_l2_given,
        signed=held.signed,
        sums=held.sums,
        ran=ran if foreign is None else "",
    )  # fmt: skip


def _exact_of_caller(
    received: KernelCall, exact: Callable[..., Any], scored: dict[str, Any]
) -> tuple[Array, Array] | None:
    """Return exact attention (o, lse) of the caller's arrays.

    `scored` are its options. None if the arrays are unknown, or if the kernel multiplies these
    arrays unchanged.
    """
    (q, k, v), preparation = received.rows, received.preparation
    if q is None or (received.quantized is None and preparation is None):
        return None
    if preparation is not None:
        q, k = preparation.exact(q, k)
    o, lse = exact(q, k, v, return_lse=True, **scored)
    return o, lse


def _quantisation(
    received: KernelCall,
    of_operands: tuple[Array, Array],
    of_caller: tuple[Array, Array] | None,
    scored: dict[str, Any],
) -> float | None:
    """J3: compare exact attention (o, lse) of the operands with that of the caller's arrays.

    `scored` are the options of exact attention. None if nothing was quantised, or the arrays are
    unknown.
    """
    (q, k, v), preparation, quantized = received.rows, received.preparation, received.quantized
    if quantized is None or of_caller is None:
        return None
    prepared = None
    if preparation is not None:
        stored = quantized.config.fused
        prepared = bounds_prepared.preparation(preparation, q, k, stored=stored)
        q, k = preparation.exact(q, k)
    means = quantized.k_mean, quantized.v_mean
    scales = quantized.q_scale, quantized.k_scale, quantized.v_scale
    if _finite(q, k, v, *means) and not _finite(*scales):  # which are of finite numbers
        return math.inf
    bound = quantised.quantisation(q, k, v, quantized, prepared=prepared, **scored)
    return max(
        worst_of(ratio_to_bound(of_operands[0], of_caller[0], bound.total))[0],
        worst_of(ratio_to_bound(of_operands[1], of_caller[1], bound.lse))[0],
    )


def _finite(*arrays: Array | None) -> bool:
    """Return whether all numbers of the arrays that are not None are finite."""
    return all(bool(array_namespace(x).isfinite(x).all()) for x in arrays if x is not None)


def _relative_l2(value: Array, expected: Array, unbounded: Array) -> tuple[float, Array]:
    """Return ``norm(value - expected) / norm(expected)`` of finite `expected`, and `expected` with
    0 for the others. In rows without a bound only finite values count."""
    xp = array_namespace(value, expected)
    finite = xp.isfinite(expected) & (xp.isfinite(value) | ~unbounded[..., None])
    size = xp.where(finite, expected, 0.0)
    error = xp.where(finite, value - size, 0.0)
    return _norm(error) / (_norm(size) or 1.0), size


def _norm(x: Array) -> float:
    return math.sqrt(float((x * x).sum()))


def _tightness(bound: Array, size: Array) -> float:
    """Return the median over rows of rms(bound) / rms(size), over rows where it is meaningful."""
    xp = array_namespace(bound)
    rms = xp.sqrt((size * size).mean(axis=-1))
    fraction = xp.sqrt((bound * bound).mean(axis=-1)) / xp.where(rms > 0, rms, xp.nan)
    fraction = fraction[xp.isfinite(fraction)]
    return float(xp.median(fraction)) if fraction.size else math.nan
