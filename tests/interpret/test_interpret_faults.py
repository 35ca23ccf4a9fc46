"""The interpreter notices every planted mistake: by a finding, or by a judgement that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from cupyattn.interpret import Finding, KernelFault
from cupyattn.kernels.ladder import VARIANTS
from tests.faults.fault_patches import FAULTS, Fault, put_in_place
from tests.support.padded import padded, run_padded
from tests.support.runs import (
    REVEALING,
    Arrays,
    Run,
    embedded,
    normal,
    packed,
    revealing,
    revealing_zero_points,
    run,
    run_packed,
)  # fmt: skip

#: The rungs that a mistake is planted in here are the first of those that it names; on a device it
#: is all of them (tests/gpu/test_faults.py). Seven of eight are slow.
SEEN = [
    pytest.param(
        fault, fault.variants[0], id=fault.name, marks=[pytest.mark.slow] if number % 8 else []
    )
    for number, fault in enumerate(FAULTS)
]

#: Rungs that run without a mistake at once; the others take minutes, and are slow.
AT_ONCE = ("fa_tc", "fa_tc@sm90", "fa_tc@split")


class Judged(Protocol):
    """A call that can be held to its bound."""

    def judge(self) -> Any:
        """Return what has `passed`."""


def far_apart(x: np.ndarray) -> np.ndarray:
    """Return `x` with heads that lie more than 2^31 elements apart.

    The gap is never accessed, so it takes no memory.
    """
    batch, heads, length, head_dim = x.shape
    step = 2**31 + head_dim
    buffer = np.zeros((heads - 1) * step + length * head_dim, x.dtype)
    strides = tuple(x.itemsize * n for n in (0, step, head_dim, 1))
    view = np.lib.stride_tricks.as_strided(buffer, (batch, heads, length, head_dim), strides)
    view[...] = x
    return view


def problems(first: str) -> list[tuple[Arrays, dict[str, Any]]]:
    """Small ones: lengths around the edges of tiles, all amid NaN; and heads far apart.

    What `first` names, an option or ``far_apart``, stands at the front.
    """
    q, k, v = normal((1, 2, 5, 64), (1, 2, 7, 64))
    found = [
        (options, tuple(embedded(x) for x in inputs), options)
        for inputs, options in revealing(1, 2, ((35, 33), (40, 150)))
    ]
    found.append(({"far_apart"}, (q, far_apart(k), far_apart(v)), {}))
    found.sort(key=lambda problem: first not in problem[0])
    return [(inputs, options) for _, inputs, options in found]


def interpreted(variant: str, first: str = "") -> Iterator[Run]:
    form = variant.partition("@")[2]
    arch = "sm_90a" if form == "sm90" else None
    for inputs, options in REVEALING[form]() if form in REVEALING else problems(first):
        yield run(variant, inputs, backend="interpret", arch=arch, **options)


def interpreted_zero_points(variant: str) -> Iterator[Run]:
    for inputs, options in revealing_zero_points(variant):
        yield run(variant, inputs, backend="interpret", **options)


def interpreted_packed(variant: str) -> Iterator[Run]:
    inputs, ends = packed(((5, 9), (35, 40)), 4, 2)
    yield from run_packed(variant, inputs, ends, backend="interpret", causal=True)


def interpreted_padded(variant: str) -> Iterator[Run]:
    inputs, lengths = padded(((5, 9), (35, 40)), (35, 40), 4, 2, 64)
    yield from run_padded(variant, inputs, lengths, backend="interpret", causal=True)


@pytest.mark.parametrize(
    ("variant", "calls"),
    [
        pytest.param(variant, calls, marks=[pytest.mark.slow] if variant not in AT_ONCE else [])
        for variant in (*VARIANTS, "fa_tc@sm90", "fa_tc@split", "fa_int8@pv8")
        for calls in (interpreted, interpreted_packed, interpreted_zero_points)
        if calls != interpreted_packed or variant.partition("@")[2] not in REVEALING
        if calls != interpreted_zero_points or variant in ("fa_int8", "fa_int8@pv8")
    ],
)
def test_without_a_mistake_nothing_is_reported_and_every_judgement_holds(
    variant: str, calls: Callable[[str], Iterator[Judged]]
) -> None:
    for one in calls(variant):
        one.check()


@pytest.mark.parametrize(("fault", "variant"), SEEN)
def test_a_mistake_is_noticed(
    fault: Fault, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fault.plant(tmp_path)
    put_in_place(folder, variant, monkeypatch)
    calls = interpreted_packed(variant) if fault.of_packed else interpreted(variant, fault.shown_by)
    calls = interpreted_padded(variant) if fault.of_padded else calls
    calls = interpreted_zero_points(variant) if fault.of_zero_points else calls
    check_noticed(calls, fault, folder)


def check_noticed(calls: Iterable[Judged], fault: Fault, folder: Path) -> None:
    """Some call is judged wrong, or the interpreter has the finding that the patch says."""
    if fault.caught_by == "interpreter":
        with pytest.raises(KernelFault) as caught:
            list(calls)
        check_finding(caught.value.finding, fault, folder)
        return
    try:
        noticed = any(not one.judge().passed for one in calls)
    except KernelFault:  # stricter than a device: what spoils a result may be a hazard, too
        noticed = True
    assert noticed, f"{fault.sentence} Nothing noticed."


def check_finding(finding: Finding, fault: Fault, folder: Path) -> None:
    """The kind is right, and one of the lines that it names is the one that the patch says."""
    assert finding.kind == fault.kind, finding
    assert finding.location is not None
    lines = [Path(x.file).read_text().splitlines()[x.line - 1] for x in finding.location.chain()]
    assert all(Path(x.file).is_relative_to(folder) for x in finding.location.chain())
    assert any(fault.line in line for line in lines), f"{finding} names {lines}"
