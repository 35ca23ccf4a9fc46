"""Which faults does the judge see, and how small may they be?

Varies       30 kinds of fault, from 1e-1 to 1e-5 in steps of 1, 2 and 5; the form of the kernel
Holds fixed  N(0, 1), one batch entry, 2 heads, 256 queries and keys, head_dim 64; every other trial
             is causal; on the interpreter 1 head, 80 queries and keys, head_dim 32
Measures     share of the trials in which O, or O and lse, leave their bounds; the smallest fault
             that is seen in 95 % of them; right outputs outside their bounds, in judged rows
Run          python -m experiments.accuracy.sensitivity [--backend cuda] [--trials N]
             python -m experiments.accuracy.sensitivity --planted     # faults in the kernels
             python -m experiments.accuracy.sensitivity --resume FILE # goes on from a record
             python -m experiments.accuracy.sensitivity --processes N # as many trials at a time
             python -m experiments.accuracy.sensitivity --stored --update-docs  # no device

A fault is laid on the numbers that the kernel stored, and the sum is stored again
(`experiments._harness.output_faults`). The smallest size that a trial sees is found by bisection.
With ``--planted`` kernels are compiled from copies with a fault in them, one of each kind in
``experiments/accuracy/planted``: on a device or the interpreter. ``--update-docs`` writes
docs/SENSITIVITY.md from both records. Exit status 1: a false alarm, or a form of which no fault
changed a bit.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import array_namespace, as_float64
from cupyattn.bounds import kernel as kernel_bounds
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.bounds.signed import signed_bound
from cupyattn.cli import output, plot
from cupyattn.errors import UnsupportedError
from cupyattn.measure import device
from cupyattn.problem.attention import KernelCall, kernel_call
from cupyattn.problem.settings import Settings
from cupyattn.testing.expected import Expectation, expectation
from cupyattn.testing.signed import with_signs
from experiments._harness import plots, recording
from experiments._harness.cells import Problem
from experiments._harness.output_faults import CAUSAL_ALONE, FAULTS, Ground
from experiments._harness.planted import Patch

#: Sizes of the faults, from large to small.
SIZES = tuple(float(f"{d}e-{e}") for e in range(1, 6) for d in (5, 2, 1))[2:]
#: Sizes of the faults that are planted in kernels, each of which is compiled.
PLANTED_SIZES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
#: Heads, queries and keys, and head_dim of a call. Keys are more than any form has in a step, or
#: faults in what happens between two steps would have no place.
SHAPE, INTERPRETED_SHAPE = (2, 256, 64), (1, 80, 32)
#: Trials of each form where nothing is said.
TRIALS = {"mirror": 6, "interpret": 2, "cuda": 20}
#: A fault counts as seen where this share of the trials see it.
SEEN = 0.95
#: Settings that determine a run, and must be the same when it is resumed.
SETTINGS = ("backend", "seed", "trials", "forms", "planted")
#: Suffix of forms with signed values.
SIGNED = ", signed"
#: Columns of a record, and how pages call them.
KINDS = (("in_o", "Seen in O"), ("in_o_or_lse", "Seen in O or lse"))
DOCUMENT = recording.ROOT / "docs" / "SENSITIVITY.md"
PLOT = recording.ROOT / "docs" / "sensitivity.svg"
PLANTED = Path(__file__).parent / "planted"
#: Names of the records: of faults on outputs, and in kernels.
RECORDS = ("sensitivity", "sensitivity_planted")
#: Time between two writes of the record.
WRITE_SECONDS = 10.0


@dataclass(frozen=True)
class Form:
    """A kernel: rung, storage type, architecture that it is told to run as, and its codes.

    With `signed`, the values of each key have a random sign, and O is held to the bound for that.
    """

    variant: str
    dtype: str = "float16"
    arch: str = "sm_90"
    quant: Mapping[str, Any] | None = None
    signed: bool = False


FORMS = {
    "unfused": Form("unfused"),
    "fa, float32": Form("fa", "float32"),
    "fa": Form("fa"),
    "fa_warps": Form("fa_warps"),
    "fa_tc": Form("fa_tc"),
    "fa_tc, bfloat16": Form("fa_tc", "bfloat16"),
    "fa_tc Hopper": Form("fa_tc", arch="sm_90a"),
    "fa_tc Hopper, bfloat16": Form("fa_tc", "bfloat16", "sm_90a"),
    "fa_int8": Form("fa_int8", quant={}),
    "fa_int8 Hopper": Form("fa_int8", arch="sm_90a", quant={}),
    "u8 by tile": Form("fa_int8", quant={"pv": "int8"}),
    "s8 by tile": Form("fa_int8", quant={"pv": "int8", "p_type": "s8"}),
    "u8 whole": Form("fa_int8", quant={"pv": "int8", "granularity_v": "channel"}),
    "u8 by tile Hopper": Form("fa_int8", arch="sm_90a", quant={"pv": "int8"}),
    "u8 Hopper": Form(
        "fa_int8", arch="sm_90a", quant={"pv": "int8", "granularity_v": "channel"}
    ),
    "FP8": Form("fa_int8", quant={"pv": "fp8"}),
    "FP8 Hopper": Form("fa_int8", arch="sm_90a", quant={"pv": "fp8", "granularity_v": "channel"}),
}  # fmt: skip
FORMS |= {
    f"{name}{SIGNED}": replace(form, signed=True)
    for name, form in FORMS.items()
    if not {"pv"} & {*(form.quant or ())} and form.variant in ("fa", "fa_tc", "fa_int8")
}
#: Forms whose trials take the interpreter a few seconds.
INTERPRETED = ("fa", "fa_tc", "fa_int8", "u8 by tile")


def shape_of(backend: str) -> tuple[int, int, int]:
    """Return heads, queries and keys, and head_dim of a call on a backend."""
    return INTERPRETED_SHAPE if backend == "interpret" else SHAPE


def planted() -> list[Patch]:
    """Return the faults that kernels can be given."""
    return [Patch.read(path) for path in sorted(PLANTED.glob("*.patch"))]


# ---- one trial -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """The operands of one trial of a form, on the backend that runs it."""

    form: Form
    backend: str
    number: int
    seed: int

    @property
    def problem(self) -> Problem:
        """Results."""
        heads, length, head_dim = shape_of(self.backend)
        return Problem(
            1, heads, length, head_dim, causal=self.number % 2 == 1, dtype=self.form.dtype,
            seed=self.seed + self.number,
        )  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        """Options of the call beside its operands."""
        arch = {} if self.backend == "interpret" else {"arch": self.form.arch}
        backend = {"backend": "interpret"} if self.backend == "interpret" else {}
        return {"variant": self.form.variant, "causal": self.problem.causal, **arch, **backend}

    def operands(self) -> tuple[tuple[Any, ...], Any]:
        """Return q, k and v, and their codes or None; values as drawn, signed or not."""
        drawn = self.problem.draw(on_device=self.backend == "cuda")
        if self.form.quant is None:
            return drawn, None
        where = {n: x for n, x in self.options.items() if n in ("arch", "backend")}
        return drawn, ca.quantize(*drawn, quant=ca.QuantConfig(**self.form.quant), **where)

    def run(self) -> tuple[KernelCall, Expectation, Any, Any]:
        """Return what the kernel received, what its output is held to, O and lse."""
        arrays, codes = self.operands()
        kernel = received(self, arrays, codes)
        if not self.form.signed:
            return kernel, expectation(kernel), *call(self, arrays, codes)
        kernel, operand = with_signs(kernel, np.random.default_rng([self.seed, self.number]))
        signed = (None, operand) if codes is not None else ((*arrays[:2], operand), None)
        o, lse = call(self, *signed)
        known = expectation(kernel)
        bound = signed_bound(kernel, rows=known.rows, elements=o.size)
        return kernel, replace(known, bound=bound), o, lse


def call(trial: Trial, arrays: tuple[Any, ...], codes: Any) -> tuple[Any, Any]:
    """Return O and lse."""
    given = arrays if codes is None else (codes,)
    o, lse = ca.attention(*given, return_lse=True, **trial.options)
    return o, lse


def received(trial: Trial, arrays: tuple[Any, ...], codes: Any) -> KernelCall:
    """Return the kernel of a trial, with its operands, as the judge takes it."""
    form = ca.kernel_form(*(arrays if codes is None else (codes,)), **trial.options)
    settings = Settings(
        trial.form.variant, causal=trial.problem.causal, return_lse=True, tiles=form["tiles"]
    )
    named = dict(zip("qkv", arrays, strict=True))
    rest = dict.fromkeys(("mask", "bias", "block_mask", "rope", "qk_norm"))
    return kernel_call(settings, {**named, **rest}, quantized=codes, form=form["form"])


def ground_of(trial: Trial, kernel: KernelCall, o: Any, lse: Any) -> Ground:
    """Return an output and its operands in float64."""
    codes = kernel.quantized
    multiplied = kernel.prepared if codes is None else kernel_bounds.kernel_operands(codes)
    q, k, v = (as_float64(x) for x in multiplied)
    xp = array_namespace(q)
    admitted = xp.ones((q.shape[2], k.shape[2]), bool)
    mean = xp.zeros_like(v[:, :, :1])
    if codes is not None and codes.v_mean is not None:
        mean = as_float64(codes.v_mean)[:, :, None]
    return Ground(
        q, k, v, kernel.kernel.call.scale, xp.tril(admitted) if trial.problem.causal else admitted,
        mean, as_float64(o), as_float64(lse), trial.form.dtype,
    )  # fmt: skip


def leaves(known: Expectation, o: Any, lse: Any) -> tuple[float, float]:
    """Return the largest errors of O and lse as shares of their bounds."""
    of_lse = ratio_to_bound(lse, known.lse, known.bound.lse)
    return float(known.ratios(o).max()), float(of_lse.max())


def seen_by_size(
    known: Expectation, ground: Ground, name: str, trial: Trial
) -> tuple[int, int] | None:
    """Return how many of `SIZES`, from the largest on, are seen in O, and in O or lse.

    None where the call has no place for the fault.
    """
    found: dict[int, tuple[float, float]] = {}

    def shares(index: int) -> tuple[float, float]:
        if index not in found:
            rng = np.random.default_rng([trial.seed, trial.number, list(FAULTS).index(name)])
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                o, lse = FAULTS[name](ground, SIZES[index], rng)
            lse = ground.lse if lse is None else ground.lse + lse
            found[index] = leaves(known, ground.stored(o), lse)
        return found[index]

    if name in CAUSAL_ALONE and bool(ground.admitted.all()):
        return None
    in_o = bisect.bisect(range(len(SIZES)), False, key=lambda i: shares(i)[0] <= 1)
    return in_o, bisect.bisect(range(len(SIZES)), False, in_o, key=lambda i: max(shares(i)) <= 1)


# ---- one part of a trial -------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A unit of work of a process: the right output with faults laid on it, or one patch."""

    trial: Trial
    laid: bool
    patch: str | None = None


@dataclass(frozen=True)
class Found:
    """Results of a part: for the right output, if it is judged here, and for its faults.

    `faults` has for each kind how many sizes, from the largest on, are seen in O, and in O or lse.
    """

    judged_rows: int
    largest_ratio: float
    false_alarms: int
    faults: Mapping[str, tuple[int, int]]


def parts_of(trial: Trial, name: str, planted_in: Sequence[Patch] | None) -> list[Part]:
    """Return the parts of a trial of the form `name`, the one of the right output first."""
    fitting = [
        patch.name
        for patch in planted_in or ()
        if name in patch.forms and (patch.kind not in CAUSAL_ALONE or trial.problem.causal)
    ]
    return [Part(trial, planted_in is None), *(Part(trial, False, patch) for patch in fitting)]


def run_part(part: Part) -> Found:
    """Run the kernel as it is, or with the fault of a patch, and judge what comes out."""
    trial = part.trial
    if part.patch is not None:
        patch = Patch.read(PLANTED / f"{part.patch}.patch")
        sizes = seen_in_kernels(trial, patch)
        return Found(0, 0.0, 0, {} if sizes is None else {patch.kind: sizes})
    kernel, known, o, lse = trial.run()
    of_o, of_lse = leaves(known, as_float64(o), as_float64(lse))
    rows = int(o.shape[0] * o.shape[1] * known.rows.size)
    ground = ground_of(trial, kernel, o, lse)
    seen = {name: seen_by_size(known, ground, name, trial) for name in FAULTS if part.laid}
    faults = {name: sizes for name, sizes in seen.items() if sizes is not None}
    return Found(rows, of_o, int(max(of_o, of_lse) > 1), faults)


def seen_in_kernels(trial: Trial, patch: Patch) -> tuple[int, int] | None:
    """Return how many of `PLANTED_SIZES`, from the largest on, are seen in O, and in O or lse.

    None if the largest fault changes no bit, because the call has no place for it. For example, a
    fault in rescaling has no effect if all maxima are in the first step.
    """
    arrays, codes = trial.operands()
    known = expectation(received(trial, arrays, codes))
    right = call(trial, arrays, codes)
    in_o = in_either = 0
    for index, size in enumerate(PLANTED_SIZES):
        with patch.plant(size):
            wrong = call(trial, arrays, codes)
        if index == 0 and all(bool((x == y).all()) for x, y in zip(right, wrong, strict=True)):
            return None
        of_o, of_lse = leaves(known, *(as_float64(x) for x in wrong))
        if of_o > 1:
            in_o = index + 1
        if max(of_o, of_lse) <= 1:
            break
        in_either = index + 1
    return in_o, in_either


# ---- the record ----------------------------------------------------------------------------------


def record_name(args: argparse.Namespace) -> str:
    """Return the name of the record of a run."""
    return RECORDS[bool(args.planted)]


class Record:
    """Results of a run so far."""

    def __init__(self, args: argparse.Namespace, stored: Mapping[str, Any] | None) -> None:
        self.args, self.began, self.written = args, time.monotonic(), 0.0
        stored = stored or {}
        self.seconds = float(stored.get("seconds", 0.0))
        self.found: dict[str, dict[str, Any]] = dict(stored.get("found", {}))

    def done(self, name: str) -> int:
        """Return how many trials of a form are finished."""
        return int(self.found.get(name, {}).get("trials", 0))

    def add(self, name: str, parts: Iterable[Found]) -> None:
        """Add a trial of a form, by its parts."""
        fresh = {"trials": 0, "judged_rows": 0, "false_alarms": 0, "largest_ratio": 0.0,
                 "faults": {}}  # fmt: skip
        found = self.found.setdefault(name, fresh)
        for part in parts:
            found["judged_rows"] += part.judged_rows
            found["false_alarms"] += part.false_alarms
            found["largest_ratio"] = max(found["largest_ratio"], part.largest_ratio)
            for fault, (in_o, in_o_or_lse) in part.faults.items():
                counts = found["faults"].setdefault(fault, {"in_o": [], "in_o_or_lse": []})
                counts["in_o"].append(in_o)
                counts["in_o_or_lse"].append(in_o_or_lse)
        found["trials"] += 1

    def content(self) -> dict[str, Any]:
        """Return the record without its environment."""
        spent = self.seconds + time.monotonic() - self.began
        settings = {name: getattr(self.args, name) for name in SETTINGS}
        return {**settings, "sizes": list(PLANTED_SIZES if self.args.planted else SIZES),
                "shape": shape_of(self.args.backend), "seconds": round(spent, 1),
                "found": self.found}  # fmt: skip

    def write(self, *, last: bool = False) -> None:
        """Write the record, every now and then."""
        target = self.args.json
        if target is None or not (last or time.monotonic() - self.written > WRITE_SECONDS):
            return
        self.written = time.monotonic()
        quiet = argparse.Namespace(seed=self.args.seed, quick=True, json=None)
        output.write_json(
            target, recording.keep(quiet, record_name(self.args), self.args.backend, self.content())
        )


def smallest(counts: Sequence[int], sizes: Sequence[float]) -> float | None:
    """Return the smallest size that is seen in 95 % of the trials, None where none is.

    Parameters
    ----------
    counts : sequence of int
        Of each trial how many sizes, from the largest on, are seen.
    sizes : sequence of float
        From large to small.

    Examples
    --------
    >>> smallest([3, 3, 2], (0.1, 0.01, 0.001)), smallest([1] * 19 + [0], (0.1, 0.01))
    (0.01, 0.1)
    >>> smallest([0, 3], (0.1, 0.01, 0.001)) is None
    True
    """
    found = [size for i, size in enumerate(sizes) if rate(counts, i) >= SEEN]
    return min(found) if found else None


def rate(counts: Sequence[int], index: int) -> float:
    """Return the share of the trials that see the size with this index."""
    return sum(count > index for count in counts) / len(counts)


# ---- tables and plots ----------------------------------------------------------------------------


def table(record: Mapping[str, Any], kind: str) -> tuple[list[str], list[list[str]]]:
    """Return the smallest fault that is seen, a row for each fault and a column for each form.

    Parameters
    ----------
    record : mapping
    kind : {"in_o", "in_o_or_lse"}
    """
    found = record["found"]
    faults = list(dict.fromkeys(name for form in found.values() for name in form["faults"]))
    rows = []
    for fault in faults:
        cells = [_cell(form["faults"].get(fault), kind, record["sizes"]) for form in found.values()]
        rows.append([fault, *cells])
    return ["", *found], rows


def _cell(counts: Mapping[str, Sequence[int]] | None, kind: str, sizes: Sequence[float]) -> str:
    if counts is None:
        return ""
    size = smallest(counts[kind], sizes)
    return "–" if size is None else f"{size:.0e}".replace("e-0", "e-")


def _part(record: Mapping[str, Any], ending: str) -> dict[str, Any]:
    """Return the record of the forms with signed values, by their names, or of all others."""
    found = {
        name.removesuffix(ending): form
        for name, form in record["found"].items()
        if name.endswith(SIGNED) == bool(ending)
    }
    return {**record, "found": found}


def page(record: Mapping[str, Any], planted: Mapping[str, Any]) -> str:
    """Return the text of docs/SENSITIVITY.md, from faults on outputs and those in kernels."""
    found = record["found"].values()
    trials, rows = (sum(form[name] for form in found) for name in ("trials", "judged_rows"))
    alarms = sum(form["false_alarms"] for form in found)
    lines = [
        "# Sensitivity: which faults the judge sees",
        "",
        f"Written by `{recording.command_now(record)}` from "
        "[sensitivity.json](../experiments/results/sensitivity.json): "
        f"{plots.source(record)}.",
        "",
        "`cupyattn.testing.judge` compares an output with its derived bound. For this page, "
        f"{trials:,} right outputs of {len(record['found'])} kernel forms were judged, "
        f"{rows:,} rows in all: {alarms} of the outputs left their bounds.",
        "",
        f"A call has {_shape(record)}; every other one is causal.",
        "",
        "Then 30 kinds of fault were laid on each output, in sizes from 1e-1 to 1e-5. "
        "[output_faults.py](../experiments/_harness/output_faults.py) defines them. Tables with "
        "signed values are of calls whose values have a random sign for each key, as "
        "`judge(..., signed=...)` runs them.",
        "",
        "![The smallest fault that is seen, by form](sensitivity.svg)",
        "",
        "A number is the smallest fault that at least 95 % of the "
        f"{record['trials']} trials of a form see. A dash means that faults of 1e-1 are missed "
        "more often, and 1e-5 stands for 1e-5 or less. The size is relative, or absolute for "
        "scores and lse.",
    ]  # fmt: skip
    for kind, title in KINDS:
        lines += ["", f"## {title}", "", *recording.markdown(*table(_part(record, ""), kind))]
        of_signed = table(_part(record, SIGNED), kind)
        lines += ["", f"### {title}, with signed values", "", *recording.markdown(*of_signed)]
    lines += [
        "",
        "## Planted in kernels",
        "",
        f"Written by `{recording.command_now(planted)}` from "
        "[sensitivity_planted.json](../experiments/results/sensitivity_planted.json): "
        f"{plots.source(planted)}.",
        "",
        "Here the fault is in the kernel itself, compiled from sources that a "
        "[patch](../experiments/accuracy/planted) changed. There is one patch for each kind, and "
        "it fits the forms that it names; other cells are empty. A trial in which the largest "
        "fault changes no bit does not count. Sizes are powers of ten. "
        f"There are {_trials(planted)} trials of a form, each of a call of {_shape(planted)}.",
    ]
    for kind, title in KINDS:
        lines += ["", f"### {title}", "", *recording.markdown(*table(planted, kind))]
    return "\n".join(lines) + "\n"


def _trials(record: Mapping[str, Any]) -> str:
    """Say how many trials of each form a record has: fewer than were asked for, where it ended."""
    counts = sorted({form["trials"] for form in record["found"].values()})
    return " or ".join(map(str, counts))


def _shape(record: Mapping[str, Any]) -> str:
    """Say how large the calls of a record are."""
    heads, length, head_dim = record.get("shape") or shape_of(record["backend"])
    said = f"{heads} head{'s' if heads > 1 else ''}"
    return f"{said}, {length} queries and keys and head_dim {head_dim}"


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Plot the smallest fault that is seen in O or lse: a mark for each fault and form."""
    from matplotlib.figure import Figure

    header, rows = table(record, "in_o_or_lse")
    sizes, forms = record["sizes"], header[1:]
    figure = Figure(figsize=(8.4, 7.6), layout="constrained", facecolor="none")
    axis = figure.subplots()
    plots.bare(axis)
    values = np.full((len(rows), len(forms)), np.nan)
    for i, (fault, *_) in enumerate(rows):
        for j, form in enumerate(forms):
            counts = record["found"][form]["faults"].get(fault)
            size = None if counts is None else smallest(counts["in_o_or_lse"], sizes)
            if counts is not None:
                values[i, j] = np.log10(2 * max(sizes) if size is None else size)
    image = axis.imshow(values, cmap="cividis_r", aspect="auto", vmin=-5.0, vmax=0.0)
    axis.set_xticks(range(len(forms)), forms, rotation=60, ha="right")
    axis.set_yticks(range(len(rows)), [fault for fault, *_ in rows])
    bar = figure.colorbar(image, ax=axis, ticks=range(-5, 1))
    bar.ax.set_yticklabels([f"1e{n}" for n in range(-5, 0)] + ["not seen"])
    bar.ax.tick_params(labelsize=8, colors=plots.TEXT)
    bar.set_label("smallest fault that is seen", fontsize=8, color=plots.TEXT)
    figure.supxlabel(plots.source(record), fontsize=8, color=plots.TEXT)
    plot.save(figure, str(path), source=plots.source(record))


def update_docs(record: Mapping[str, Any], planted: Mapping[str, Any]) -> None:
    """Write page and plot from both records."""
    DOCUMENT.write_text(page(record, planted), encoding="utf-8")
    draw(record, PLOT)
    print(f"wrote {DOCUMENT.name} and {PLOT.name}")


# ---- the command ---------------------------------------------------------------------------------


@contextmanager
def mapping(processes: int) -> Iterator[Callable[..., Iterable[Found]]]:
    """Give a function like `map`, which runs in as many processes; 1 means this one."""
    if processes == 1:
        yield map
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def work(args: argparse.Namespace) -> int:
    """Run the requested trials, or read the stored ones."""
    if args.update_docs:
        plot.check(str(PLOT))
    if args.stored:
        if args.update_docs:
            update_docs(*map(recording.stored, RECORDS))
        return 0
    if args.backend == "cuda" and (missing := device.device_missing()):
        raise UnsupportedError(f"--backend cuda needs a CUDA device ({missing})")
    if args.planted and args.backend == "mirror":
        raise ValueError("--planted compiles kernels: give --backend interpret or cuda")
    record = Record(args, args.resumed)
    todo = [(n, name) for n in range(args.trials) for name in args.forms if n >= record.done(name)]
    patches_in = planted() if args.planted else None
    parts = [
        parts_of(Trial(FORMS[name], args.backend, number, args.seed), name, patches_in)
        for number, name in todo
    ]
    with mapping(args.processes) as mapped, output.progress("trials", len(todo)) as advance:
        found = iter(mapped(run_part, itertools.chain.from_iterable(parts)))
        for (number, name), of_trial in zip(todo, parts, strict=True):
            record.add(name, list(itertools.islice(found, len(of_trial))))
            record.write()
            advance(f"{name}, trial {number + 1}")
    record.write(last=True)
    content = {**record.content(), "command": "", "environment": device.environment()}
    output.print_table(*table(content, "in_o_or_lse"))
    alarms = sum(form["false_alarms"] for form in record.found.values())
    rows = sum(form["judged_rows"] for form in record.found.values())
    print(f"\n{alarms} false alarms in {rows:,} rows; {content['seconds']} s")
    if blank := [name for name in args.forms if not record.found[name]["faults"]]:
        print(f"no fault changed a bit of {', '.join(blank)}: the run says nothing about the judge")
    if args.update_docs:
        of_run = json.loads(args.json.read_text(encoding="utf-8"))
        update_docs(*(
            of_run if name == record_name(args) else recording.stored(name) for name in RECORDS
        ))  # fmt: skip
    return int(alarms > 0 or bool(blank))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments, from a stored run if it is resumed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="mirror", choices=tuple(TRIALS))
    parser.add_argument("--trials", type=int, help=f"of each form; {TRIALS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="at a time")
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), metavar="NAME")
    parser.add_argument("--planted", action="store_true", help="faults in the kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="a record to go on from")
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    args.resumed = None
    if args.resume is not None:
        args.resumed = json.loads(args.resume.read_text(encoding="utf-8"))
        for name in SETTINGS:
            setattr(args, name, args.resumed[name])
        args.json = args.json or args.resume
    if args.update_docs and not args.stored:
        args.json = args.json or recording.RESULTS / f"{record_name(args)}.json"
    args.trials = args.trials or TRIALS[args.backend]
    if args.forms is None:
        args.forms = list(INTERPRETED if args.backend == "interpret" else FORMS)
    if args.planted:
        args.forms = [n for n in args.forms if any(n in p.forms for p in planted())]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.guarded(work, parsed(argv))


if __name__ == "__main__":
    sys.exit(main())
