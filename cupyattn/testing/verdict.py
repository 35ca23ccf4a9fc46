"""The judge: how far is an output from exact attention, as a fraction of its bound?

`judge` compares an output with exact attention as a fraction of a derived bound, element by
element; `assert_within_bound` raises where the fraction exceeds 1. `cupyattn.strategies` draws the
arrays, with Hypothesis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.interchange import take, taken, taken_pair
from cupyattn.arrays.kinds import Array, array_namespace, as_float64, check_values
from cupyattn.bounds import prepared as bounds_prepared
from cupyattn.bounds import quantised
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.errors import shown
from cupyattn.kernels import ladder
from cupyattn.kernels.numerics import Numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.attention import ATTENTION
from cupyattn.ops.operation import problem_of
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.borrowed_names import points_to_our_names
from cupyattn.problem.received import Received, receive
from cupyattn.problem.row_preparation import EPS, PAIRS
from cupyattn.problem.settings import of_arguments
from cupyattn.reference.exact import attention_exact
from cupyattn.testing.counterexamples import keep
from cupyattn.testing.expected import expectation, operands_of, options_of_exact, worst_of
from cupyattn.testing.functionals import FunctionalRatio, sums_over_channels
from cupyattn.testing.signed import SignedRatio, SignedRun, judge_signed
from cupyattn.testing.watching import WATCHED

#: A rung that takes what any kernel does: beside `numerics` of another library, it only cuts rows.
_ANY_RUNG = "unfused"
#: Rows without a bound that a report names.
FIRST_UNBOUNDED = 4


@dataclass(frozen=True)
class Report:
    """What `judge` found.

    Parameters
    ----------
    variant : str
        The rung judged, or what `cupyattn.testing.numerics` calls a kernel of another library.
    rows : int
        Query rows looked at, of each (batch, head).
    judged : int
        Rows of all (batch, head) that have a bound. In others any output passes.
    unbounded : int
        Rows looked at that have no bound (docs/MATH_REFERENCE.md, §18).
    unbounded_rows : tuple of (int, int, int)
        The first of these, four at most: (batch, head, row).
    ratio : float
        Largest error of O as a fraction of its bound (J2); it must not exceed 1. Where P is codes
        and `judge` knows the tiles of the call, the larger of that and the error beside the
        predicted codes.
    index : tuple of int
        Where: (batch, head, row, channel).
    value, expected, bound : float
        There: the output, exact attention, and what they may differ by; or the output, its
        prediction, and what these may differ by.
    tag : str
        There: the rounding point with the largest share of the bound, or "predicted codes".
    lse_ratio : float or None
        Largest error of lse as a fraction of its bound; None where lse was not given.
    lse_index : tuple of int or None
        Where: (batch, head, row).
    relative_l2 : float
        ``norm(o - exact) / norm(exact)`` over the rows looked at, exact attention being that of
        the operands which the kernel multiplies. It decides nothing.
    tightness : float
        Median over rows of ``rms(bound) / rms(exact)``: below 1, zeros would fail. The narrower
        bound of each element, where codes are predicted.
    quantisation : float or None
        J3: largest difference between exact attention of the INT8 operands and of the caller's
        arrays, as a fraction of its bound; it must not exceed 1.
    relative_l2_given : float or None
        The same norm against exact attention of the caller's arrays: what quantising or preparing
        them cost is in it. It decides nothing. None where they were not given.
    signed : SignedRatio or None
        The largest error with signed values; None where they were not asked for.
    sums : tuple of FunctionalRatio
        The largest errors of sums over the channels of a row, where they were asked for.
    """

    variant: str
    rows: int
    judged: int
    unbounded: int
    unbounded_rows: tuple[tuple[int, int, int], ...]
    ratio: float
    index: tuple[int, ...]
    value: float
    expected: float
    bound: float
    tag: str
    lse_ratio: float | None
    lse_index: tuple[int, ...] | None
    relative_l2: float
    tightness: float
    quantisation: float | None
    relative_l2_given: float | None
    signed: SignedRatio | None = None
    sums: tuple[FunctionalRatio, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no ratio exceeds 1. It says nothing of rows that are `unbounded`."""
        ratios = [self.ratio, self.lse_ratio, self.quantisation]
        ratios += [one.ratio for one in (self.signed, *self.sums) if one is not None]
        return all(ratio is None or ratio <= 1.0 for ratio in ratios)

    def __str__(self) -> str:
        judged = f"{_rows(self.rows)} of every head judged"
        if self.unbounded:
            judged = f"{self.judged} of {_rows(self.judged + self.unbounded)} judged"
        found = f"{'within' if self.ratio <= 1 else 'OUTSIDE'} its bound"
        if self.unbounded and not self.judged:
            found = "NOT JUDGED in any row"
        lines = [
            f"{self.variant}: O is {found}, "
            f"error / bound = {self.ratio:.3g} at {self.index}",
            f"  value {self.value:.9g}, expected {self.expected:.9g}, bound {self.bound:.3g} "
            f"(mostly {self.tag}), {judged}",
            f"  relative L2 error {self.relative_l2:.3g} to exact attention of what the kernel "
            f"multiplies (J2), bound / rms of a row {self.tightness:.3g} (median)",
        ]
        if self.unbounded:
            more = ", ..." * (self.unbounded > len(self.unbounded_rows))
            lines.append(
                f"  no bound is promised in {_rows(self.unbounded)}, (batch, head, "
                f"row) = {', '.join(map(str, self.unbounded_rows))}{more}"
            )
        if self.relative_l2_given is not None:
            lines.append(
                f"  relative L2 error {self.relative_l2_given:.3g} to exact attention of the "
                "arrays as the caller gave them"
            )
        if self.lse_ratio is not None:
            lines.append(f"  lse: error / bound = {self.lse_ratio:.3g} at {self.lse_index}")
        if self.quantisation is not None:
            lines.append(f"  quantisation (J3): difference / bound = {self.quantisation:.3g}")
        if self.signed is not None:
            lines.append(str(self.signed))
        lines += [str(one) for one in self.sums if one.ratio > 1]
        return "\n".join(lines)


@dataclass(frozen=True)
class Further:
    """What O is held to beside exact attention; fields as the options of `judge`.

    `codes` says whether form and tiles are those of the call: as for `expectation`.
    """

    signed: SignedRun | None = None
    draws: int = 1
    sums: bool = False
    codes: bool = True


#: Codes alone.
NOTHING_FURTHER = Further()


@points_to_our_names
def judge(
    o: Array,
    q: Array | None,
    k: Array | None,
    v: Array | None,
    *,
    variant: str | None = None,
    lse: Array | None = None,
    quantized: Any = None,
    numerics: Numerics | None = None,
    tiles: Tiles | None = None,
    form: str | None = None,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Array | None = None,
    bias: Array | None = None,
    block_mask: BlockMask | None = None,
    rope: Any = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: Any = None,
    qk_norm_eps: float = EPS,
    rows: Array | None = None,
    seed: int = 0,
    exact: Callable[..., Any] = attention_exact,
    signed: SignedRun | None = None,
    draws: int = 1,
    sums: bool = False,
) -> Report:
    """Compare an output with exact attention, as a fraction of the derived bound.

    Parameters
    ----------
    o : (batch, heads, len_q, head_dim) array
        The output, all of it. All arrays: NumPy, CuPy, or anything with DLPack.
    q, k, v : array
        The caller's arrays. With `quantized` they may be None; J3 is then left out.
    variant : str, optional
        The rung that made `o`. "auto": rung, form and tiles that `cupyattn.attention` takes by
        itself for these arguments where they lie, of accuracy class "full"; ``fa_int8`` with
        `quantized`. It may be left out with the `numerics` of a kernel of another library.
    lse : (batch, heads, len_q) array, optional
        Log-sum-exp, natural logarithm, to be judged too.
    quantized : QuantizedQKV, optional
        The INT8 operands that the rung worked on. J2 is then against exact attention of these.
    numerics, tiles, form
        As for `cupyattn.bounds.attention`. Where `o` comes from another library, `numerics` is what
        `cupyattn.testing.numerics` makes of the words of its documents. `tiles` and `form` given
        together must be those of the call, as `cupyattn.kernel_form` returns them. With P in 8 bits
        they settle every code, and the output is held to the codes, too (docs/MATH_REFERENCE.md,
        §13). With one of them alone it is held to the wider bound, which any tiles meet.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for the call that made `o`.
    rope, rope_interleaved, rope_offset_q, qk_norm, qk_norm_eps
        As for the call that made `o`: q and k are prepared as the kernels prepare them, and
        everything else is about those. `quantized` has prepared operands already; J3 is then
        against attention of q and k prepared in float64.
    rows : 1-D integer array, optional
        Query rows to look at; by default all of a small cell, else those of `sample_rows`.
    seed : int
        Of that sample.
    exact : callable
        What computes exact attention: `cupyattn.reference.attention_exact`, or a cache before it.
    signed : callable, optional
        Runs the same call on other values: ``signed(v)``, or ``signed(quantized)``, returns O. It
        gets `v` as the kind of array that the caller's is. The values of each key then have a
        random sign, from `seed`. Errors of P cannot hide behind those of other keys, so the bound
        is narrower. It is random: right outputs fail with a probability of at most 1e-12 a
        judgement. For P in 16 or 32 bits.
    draws : int
        How many times signs are drawn, at least once.
    sums : bool
        Hold sums over the channels of a row to their bounds, too: along exact attention, the
        softmax scale, a group of keys, one key. These bounds are certain, and show faults that
        each element hides (docs/MATH_REFERENCE.md, §15). For P in 16 or 32 bits.

    Returns
    -------
    Report

    Raises
    ------
    TypeError
        If neither `variant` nor the `numerics` of another library say what made `o`.
    ValueError
        If `o` or `lse` does not have the shape that the inputs ask for, the rung has no such
        `form`, P or V are codes where `signed` is given, or `signed` or `sums` is given beside the
        `numerics` of another library.

    Examples
    --------
    >>> from cupyattn.reference import attention_mirror
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> report = judge(attention_mirror(x, x, x, variant="fa"), x, x, x, variant="fa")
    >>> report.passed, report.rows
    (True, 8)
    """
    if signed is not None and quantized is None and v is not None:
        run, (_, restore) = signed, take("v", v)

        def signed(values: Array) -> Array:  # of the caller's kind, torch's for example
            return run(restore(values))

    o, q, k, v, lse, mask, bias = taken(o=o, q=q, k=k, v=v, lse=lse, mask=mask, bias=bias)
    rope, qk_norm = taken_pair(PAIRS["rope"], rope), taken_pair(PAIRS["qk_norm"], qk_norm)
    rows = take("rows", rows)[0] if hasattr(rows, "__dlpack__") else rows
    if quantized is None and (q is None or k is None or v is None):
        raise TypeError("q, k and v may only be None where quantized is given")
    if numerics is not None and not isinstance(numerics, Numerics):
        raise TypeError(
            f"numerics must be what cupyattn.testing.numerics returns, got {shown(numerics)}"
        )
    if variant is None:
        if numerics is None or numerics.foreign is None:
            raise TypeError(
                "judge needs the rung that made o, such as variant='fa_tc', or for a kernel of "
                "another library numerics=cupyattn.testing.numerics('fp16 P')"
            )
        variant = _ANY_RUNG
    if numerics is not None and numerics.foreign is not None and (signed is not None or sums):
        raise ValueError(
            "signed and sums hold this library's kernels to narrower bounds, and numerics is of "
            "another's: leave them out"
        )
    if variant != "auto":
        ladder.lookup(variant, also=("auto",))  # whose refusal lists auto, too
    settings, arrays = of_arguments(locals())
    settings = settings._replace(return_lse=lse is not None)
    if variant == "auto":
        asked = arrays
        if quantized is not None:  # whose rows were prepared before
            asked = {"mask": mask, "bias": bias, "block_mask": block_mask}
            asked |= {"q": quantized, "k": None, "v": None}
        present = {n: a for n, a in asked.items() if a is not None or n in ("q", "k", "v")}
        own = problem_of(ATTENTION, settings, present).kernel
        settings = settings._replace(variant=own.variant.name)
        if form is None:
            form, settings = own.form, settings._replace(tiles=own.tiles)
    received = receive(settings, arrays, quantized=quantized, form=form)
    settled = form is not None and settings.tiles is not None
    return judge_kernel(
        received, o, lse, numerics=numerics, rows=rows, seed=seed, exact=exact,
        further=Further(signed, draws, sums, codes=settled),
    )  # fmt: skip


def _exact_of_caller(
    received: Received, exact: Callable[..., Any], scored: dict[str, Any]
) -> tuple[Array, Array] | None:
    """Return exact attention (o, lse) of the caller's arrays.

    `scored` are its options. None where the arrays are not known, or are those that the kernel
    multiplies.
    """
    (q, k, v), preparation = received.arrays, received.preparation
    if q is None or (received.quantized is None and preparation is None):
        return None
    if preparation is not None:
        q, k = preparation.exact(q, k)
    o, lse = exact(q, k, v, return_lse=True, **scored)
    return o, lse


def _quantisation(
    received: Received,
    of_operands: tuple[Array, Array],
    of_caller: tuple[Array, Array] | None,
    scored: dict[str, Any],
) -> float | None:
    """J3: hold exact attention (o, lse) of the operands to that of the caller's arrays.

    `scored` are the options of exact attention. None where nothing was quantised, or the arrays are
    not known.
    """
    (q, k, v), preparation, quantized = received.arrays, received.preparation, received.quantized
    if quantized is None or of_caller is None:
        return None
    prepared = None
    if preparation is not None:
        stored = quantized.config.fused
        prepared = bounds_prepared.preparation(preparation, q, k, stored=stored)
        q, k = preparation.exact(q, k)
    bound = quantised.quantisation(q, k, v, quantized, prepared=prepared, **scored)
    return max(
        worst_of(ratio_to_bound(of_operands[0], of_caller[0], bound.total))[0],
        worst_of(ratio_to_bound(of_operands[1], of_caller[1], bound.lse))[0],
    )


def judge_kernel(
    received: Received,
    o: Array,
    lse: Array | None = None,
    *,
    numerics: Numerics | None = None,
    rows: Array | None = None,
    seed: int = 0,
    exact: Callable[..., Any] = attention_exact,
    further: Further = NOTHING_FURTHER,
) -> Report:
    """Judge the output of a kernel, such as that of a prepared call.

    Parameters
    ----------
    received : Received
    o, lse, numerics, rows, seed, exact
        As for `judge`.
    further : Further
        What is judged beside the elements of O and lse.
    """
    check_values("rows", rows)
    kernel, quantized, multiplied = received.kernel, received.quantized, operands_of(received)
    array_namespace(o, *multiplied)
    shape = tuple(multiplied[0].shape)
    if o.shape != shape:
        raise ValueError(f"o must have q's shape {shape}, got {o.shape}")
    if lse is not None and lse.shape != shape[:3]:
        raise ValueError(f"lse must have shape {shape[:3]}, got {lse.shape}")
    known = expectation(
        received, numerics=numerics, rows=rows, seed=seed, exact=exact, codes=further.codes
    )
    rows, bound, expected, expected_lse = known.rows, known.bound, known.o, known.lse
    scored = options_of_exact(received, rows)

    value = as_float64(o[:, :, rows])
    worst, unbounded = known.worst(value), known.unbounded
    lse_ratio = lse_at = None
    if lse is not None:
        lse_value = as_float64(lse[:, :, rows])
        lse_ratio, lse_at = worst_of(ratio_to_bound(lse_value, expected_lse, bound.lse))
        lse_at = (*lse_at[:2], int(rows[lse_at[2]])) if lse_at else lse_at
    relative_l2, size = _relative_l2(value, expected)
    of_caller, relative_l2_given = _exact_of_caller(received, exact, scored), None
    if of_caller is not None:
        relative_l2_given, _ = _relative_l2(value, of_caller[0])
    elif quantized is None:
        relative_l2_given = relative_l2
    foreign = None if numerics is None else numerics.foreign
    return Report(
        variant=kernel.variant.name if foreign is None else foreign.name,
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
        lse_ratio=lse_ratio,
        lse_index=lse_at,
        relative_l2=relative_l2,
        tightness=_tightness(known.width, size),
        quantisation=_quantisation(received, (expected, expected_lse), of_caller, scored),
        relative_l2_given=relative_l2_given,
        signed=None if further.signed is None else judge_signed(
            received, further.signed, rows, lambda other: exact(*operands_of(other), **scored),
            draws=further.draws, numerics=numerics, seed=seed,
        ),
        sums=() if not further.sums else sums_over_channels(
            received, value - expected, bound, rows, numerics=numerics
        ),
    )  # fmt: skip


@points_to_our_names
def assert_within_bound(
    o: Array, q: Array | None, k: Array | None, v: Array | None, **options: Any
) -> Report:
    """Raise unless an output is within its bound.

    Under pytest, the plugin of this package keeps the arrays of a test's last failure in a file.
    The report of the test ends with the line that replays it.

    Parameters
    ----------
    o, q, k, v, **options
        As for `judge`.

    Returns
    -------
    Report

    Raises
    ------
    AssertionError
        Naming coordinate, value, expected value, bound, ratio and rounding point.

    Examples
    --------
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> try:
    ...     assert_within_bound(0 * x, x, x, x, variant="fa")
    ... except AssertionError as error:
    ...     print(str(error)[:27])
    fa: O is OUTSIDE its bound,
    """
    __tracebackhide__ = True  # what a test shows is the line that called, and the verdict
    report = judge(o, q, k, v, **options)
    if not report.passed:
        message = str(report)
        if WATCHED.test:
            WATCHED.failure = keep(o, q, k, v, options, test=WATCHED.test, message=message)
        raise AssertionError(message)
    return report


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def _relative_l2(value: Array, expected: Array) -> tuple[float, Array]:
    """Return ``norm(value - expected) / norm(expected)`` of finite elements, and `expected` with 0
    for the others."""
    xp = array_namespace(value, expected)
    finite = xp.isfinite(value) & xp.isfinite(expected)
    size = xp.where(finite, expected, 0.0)
    error = xp.where(finite, value - size, 0.0)
    return _norm(error) / (_norm(size) or 1.0), size


def _norm(x: Array) -> float:
    return math.sqrt(float((x * x).sum()))


def _tightness(bound: Array, size: Array) -> float:
    """Return the median over rows of rms(bound) / rms(size), of the rows where that means much."""
    xp = array_namespace(bound)
    rms = xp.sqrt((size * size).mean(axis=-1))
    fraction = xp.sqrt((bound * bound).mean(axis=-1)) / xp.where(rms > 0, rms, xp.nan)
    fraction = fraction[xp.isfinite(fraction)]
    return float(xp.median(fraction)) if fraction.size else math.nan
