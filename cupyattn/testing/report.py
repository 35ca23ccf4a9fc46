"""The judge's report, in fields and in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cupyattn.testing.functionals import FunctionalRatio
from cupyattn.testing.signed import SignedRatio

#: Words for an output without a record of its call. For example, JAX copies a kernel's output.
UNKNOWN_ORIGIN = (
    "unknown, because o has no record of it (a copy, or from a plan or another library)"
)


@dataclass(frozen=True)
class Report:
    """Result of `judge`.

    Parameters
    ----------
    variant : str
        The rung judged, or the name that `cupyattn.testing.numerics` gives a kernel of another
        library.
    rows : int
        Query rows looked at, of each (batch, head).
    judged : int
        Rows of all (batch, head) that have a bound. In others any output passes.
    unbounded : int
        Rows looked at that have no bound (docs/MATH_REFERENCE.md, §18).
    unbounded_rows : tuple of (int, int, int)
        Indices (batch, head, row) of the first of these rows, four at most.
    ratio : float
        Largest error of O as a fraction of its bound (J2); it must not exceed 1. If P is codes and
        `judge` knows the tiles of the call, also the largest error against the predicted codes.
    index : tuple of int
        Where: (batch, head, row, channel).
    value, expected, bound : float
        There: the output, exact attention or the prediction of the output, and the bound of their
        difference.
    tag : str
        There: the rounding point with the largest share of the bound, or "predicted codes".
    lse_ratio : float or None
        Largest error of lse as a fraction of its bound; None where lse was not given.
    lse_index : tuple of int or None
        Where: (batch, head, row).
    relative_l2 : float
        ``norm(o - exact) / norm(exact)`` over the rows looked at, with exact attention of the
        operands that the kernel multiplies. It affects no verdict.
    tightness : float
        Median over rows of ``rms(bound) / rms(exact)``: below 1, zeros would fail. If codes are
        predicted, the narrower bound of each element is taken.
    quantisation : float or None
        J3: largest difference between exact attention of the INT8 operands and of the caller's
        arrays, as a fraction of its bound; it must not exceed 1.
    relative_l2_given : float or None
        The same norm against exact attention of the caller's arrays: it includes the error of
        quantising or preparing them. It affects no verdict. None if they were not given.
    signed : SignedRatio or None
        The largest error with signed values. None if they were not requested.
    sums : tuple of FunctionalRatio
        The largest errors of sums over the channels of a row, if they were requested.
    ran : str
        What made the output: "device", "interpreter" or "mirror". "" if unknown, as for NumPy
        arrays that this library did not make.
    held_to : str
        Form and tiles of the bound, and whether they were given or assumed. For the widest of
        several bounds, the reason.
    undecided : bool
        Whether the output leaves the bound of every form that was tried, but stays within the
        widest of them.
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
    ran: str = ""
    held_to: str = ""
    undecided: bool = False

    @property
    def passed(self) -> bool:
        """Whether no ratio exceeds 1. It says nothing of rows that are `unbounded`."""
        return self.holds and (self.quantisation is None or self.quantisation <= 1.0)

    @property
    def holds(self) -> bool:
        """Whether the kernel holds its bound (J2): no ratio but `quantisation` exceeds 1."""
        ratios = [self.ratio, self.lse_ratio]
        ratios += [one.ratio for one in (self.signed, *self.sums) if one is not None]
        return all(ratio is None or ratio <= 1.0 for ratio in ratios)

    def __str__(self) -> str:
        judged = f"{_rows(self.rows)} of every head judged"
        if self.unbounded:
            judged = f"{self.judged} of {_rows(self.judged + self.unbounded)} judged"
        found = f"{'within' if self.ratio <= 1 else 'OUTSIDE'} its bound"
        if self.unbounded and not self.judged:
            found = "NOT JUDGED in any row"
        if self.undecided:
            found = "UNDECIDED"
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
            verdict = "within its bound" if self.lse_ratio <= 1 else "OUTSIDE its bound"
            lines.append(
                f"  lse is {'UNDECIDED' if self.undecided and self.lse_ratio > 1 else verdict}, "
                f"error / bound = {self.lse_ratio:.3g} at {self.lse_index}"
            )
        if self.quantisation is not None:
            lines.append(f"  quantisation (J3): difference / bound = {self.quantisation:.3g}")
        if self.signed is not None:
            lines.append(str(self.signed))
        lines += [str(one) for one in self.sums if one.ratio > 1]
        if self.undecided:
            lines.append(
                f"  within what any tiles give, but not within the bound of {self.held_to}: name "
                "form and tiles"
            )
        elif self.held_to:
            lines.append(f"  held to {self.held_to}")
        if self.ratio > 1 and not self.undecided:
            lines.append(
                "  if the call had options, such as a mask, causal, scale or lengths, "
                "give the judge the same"
            )
        lines += [f"  run by: {self.ran or UNKNOWN_ORIGIN}"]
        return "\n".join(lines)


def merged(reports: Sequence[Report], entries: Sequence[int | None]) -> Report:
    """Return the report of a call with several outputs: the worst of each ratio.

    Parameters
    ----------
    reports : sequence of Report
        One for each output.
    entries : sequence of int or None
        Number of the packed sequence of each; None for the one output of another call.

    Raises
    ------
    ValueError
        If there is nothing to judge.
    """
    if not reports:
        raise ValueError("o must hold at least one query row to be judged, got none")
    if list(entries) == [None]:
        return reports[0]
    reports = [_of_entry(one, entry or 0) for one, entry in zip(reports, entries, strict=True)]
    worst = max(reports, key=lambda one: (not one.holds, one.ratio))
    of_lse = [one for one in reports if one.lse_ratio is not None]
    lse = max(of_lse, key=lambda one: one.lse_ratio or 0.0, default=worst)
    costs = [one.quantisation for one in reports if one.quantisation is not None]
    of_caller = [x for one in reports if (x := one.relative_l2_given) is not None]
    return replace(
        worst,
        rows=sum(one.rows for one in reports),
        judged=sum(one.judged for one in reports),
        unbounded=sum(one.unbounded for one in reports),
        unbounded_rows=tuple(row for one in reports for row in one.unbounded_rows)[:4],
        lse_ratio=lse.lse_ratio,
        lse_index=lse.lse_index,
        relative_l2=max(one.relative_l2 for one in reports),
        tightness=statistics.median(one.tightness for one in reports),
        quantisation=max(costs, default=None),
        relative_l2_given=max(of_caller, default=None),
        sums=tuple(x for one in reports for x in one.sums),
        undecided=any(one.undecided for one in reports),
    )


def _of_entry(report: Report, entry: int) -> Report:
    """Return the report of a packed sequence, with its number in all indices."""
    return replace(
        report,
        index=(entry, *report.index[1:]) if report.index else (),
        lse_index=(entry, *report.lse_index[1:]) if report.lse_index else report.lse_index,
        unbounded_rows=tuple((entry, head, row) for _, head, row in report.unbounded_rows),
    )


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"
