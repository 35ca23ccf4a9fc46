"""What does each feature of a call cost, against the same call without it?

Varies       the feature; the rung; head_dim in {64, 128}
Holds fixed  batch 4, 16 heads, length 4096, N(0, 1), float16, each rung's own tiles and form
Measures     J2; time of a prepared call, and its ratio to the plain call in the same rounds
Expect       less time where keys are left out (causal, window), more where a score is worked on
Run          python -m experiments.speed.feature_costs [--quick] [--json FILE] [--update-docs]
             [--stored] [--merge FILE ...]

What the calls on a problem run is compiled beforehand, ``--threads`` modules at a time. The record
is written after each head_dim, so an interrupted run keeps its results. ``--head-dims`` measures
the others, and ``--merge`` puts their record into the committed one. ``--update-docs`` writes
docs/FEATURES.md: from the record alone with ``--stored``, and from none that lacks a head_dim or a
rung.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import array_namespace
from cupyattn.cli import cache, output
from cupyattn.cli.plan import own_arch
from cupyattn.compiler import architectures
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.devices import device_architecture
from cupyattn.measure import rungs as measure
from cupyattn.measure import timing, words
from cupyattn.ops.attention import resolved
from cupyattn.ops.explain import plans
from cupyattn.ops.prepared import Prepared
from cupyattn.plans.records import Plan
from cupyattn.problem.row_preparation import OPTIONS as PREPARATION
from cupyattn.quant import QuantConfig
from cupyattn.testing import verdict
from experiments._harness import merging, portable_calls, recording
from experiments._harness.cells import Problem, rotating
from experiments._harness.recording import ROOT
from experiments.speed import scores

PAGE = ROOT / "docs" / "FEATURES.md"
RECORD = "experiments/results/feature_costs.json"
HEAD_DIMS, RUNGS = (64, 128), tuple(ca.VARIANTS)
PLAIN, PACKED = "plain", "packed"
#: Marks a call in another form than the plain one.
DAGGER = "†"
#: Every feature alone, in the order of the page, with its options in this experiment.
FEATURES = {
    PLAIN: "nothing but attention",
    "lse": "`return_lse=True`; on Hopper, `fa_int8` then quantises Q in the pass before the "
    "kernel, not inside it",
    "causal": "`causal=True`: half of the keys",
    "window": "`window=(n, n)`, n a sixteenth of the length: an eighth of the keys",
    "softcap": "`softcap=30.0`",
    "mask": "`mask` of shape (length, length), one half True",
    "key mask": "`mask` of shape (length,), one half True",
    "bias": "`bias` of shape (length, length), float16",
    "rope": "`rope=(cos, sin)`, half-split",
    "rope interleaved": "the same with `rope_interleaved=True`",
    "block mask": "`block_mask` of blocks of 128 x 128, one half kept",
    PACKED: "`attention_varlen` of as many sequences of that length",
}

Options = dict[str, Any]


def operands_of(feature: str, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return q, k and v as the call takes them: packed (total, heads, head_dim), or as they are."""
    if feature != PACKED:
        return inputs
    return tuple(x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in inputs)


def options_of(feature: str, problem: Problem, xp: Any) -> Options:
    """Return what a feature adds to the plain call, arrays in `xp`."""
    n, rng = problem.length, np.random.default_rng(problem.seed)
    if feature == "lse":
        return {"return_lse": True}
    if feature == "causal":
        return {"causal": True}
    if feature == "window":
        return {"window": (n // 16, n // 16)}
    if feature == "softcap":
        return {"softcap": 30.0}
    if feature == "mask":
        return {"mask": xp.asarray(rng.random((n, n)) < 0.5)}
    if feature == "key mask":
        return {"mask": xp.asarray(rng.random(n) < 0.5)}
    if feature == "bias":
        return {"bias": xp.asarray(rng.standard_normal((n, n)).astype(np.float16))}
    if feature.startswith("rope"):
        half = problem.head_dim // 2
        angles = np.arange(n)[:, None] * 10000.0 ** (-np.arange(half) / half)
        tables = (xp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        return {"rope": tuple(tables), "rope_interleaved": feature.endswith("interleaved")}
    if feature == "block mask":
        blocks = -(-n // 128)
        return {"block_mask": ca.BlockMask(rng.random((1, 1, blocks, blocks)) < 0.5, 128, 128)}
    if feature == PACKED:
        ends = xp.arange(problem.batch + 1, dtype=np.int32) * np.int32(n)
        return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_len_q": n, "max_len_k": n}
    return {}


def kernels(
    rungs: Sequence[str], inputs: tuple[Any, ...], options: Mapping[str, Options], arch: str
) -> list[tuple[compiler.ModuleSpec, str]]:
    """Return what the calls with each feature compile on a device, and for which architecture.

    Passes that quantise beforehand are included. A call that returns the log-sum-exp takes codes of
    Q from a pass, too.
    """
    capability = architectures.capability_of(arch)

    def planned(rung: str, feature: str, **given: Any) -> list[Plan]:
        return plans(resolved(*operands_of(feature, inputs), variant=rung, arch=arch, **given))

    found = [
        plan for rung in rungs for feature, given in options.items()
        for plan in planned(rung, feature, **given)
    ]  # fmt: skip
    for rung in rungs:
        for feature, given in options.items() if ca.VARIANTS[rung].family == "int8" else ():
            found += planned(rung, feature, **{**given, "return_lse": True})[:-1]
    modules = (one.module for plan in found for one in plan.launches)
    return [
        (module, device_architecture(capability, module.hopper))
        for module in dict.fromkeys(modules)
    ]


def quantising(options: Options) -> Options:
    """Return how a call with these options quantises, as `cupyattn.quantize` takes it."""
    quant = QuantConfig(smooth_k="softcap" not in options)
    return {"quant": quant, **{name: options[name] for name in PREPARATION if name in options}}


def judged(prepared: Prepared, problem: Problem, inputs: tuple[Any, ...], options: Options) -> Any:
    """Run a call as it will be timed and return its report, held to its bound on some rows."""
    q, k, v = inputs
    packed, with_lse = "cu_seqlens_q" in options, "return_lse" in options
    quantized = None
    if ca.VARIANTS[prepared.variant].family == "int8":
        quantized = ca.quantize(q, k, v, **quantising(options))
    result = prepared(*operands_of(PACKED if packed else PLAIN, inputs))
    o, lse = result if with_lse else (result, None)
    if packed:
        o = o.reshape(q.shape[0], -1, *o.shape[1:]).swapaxes(1, 2)
    rows = measure.judged_rows(problem.call, problem.seed)
    return verdict.judge(
        o, q, k, v, variant=prepared.variant, lse=lse, quantized=quantized, rows=rows,
        **({} if packed or with_lse else options),
    )  # fmt: skip


def measure_rung(
    rung: str,
    problem: Problem,
    inputs: tuple[Any, ...],
    options: Mapping[str, Options],
    *,
    rounds: int,
    on_device: bool,
) -> list[dict[str, Any]]:
    """Judge every feature of a rung, then time the features that hold their bound, in turns."""
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[int], Any]] = {}
    sets = timing.rotated(inputs) if on_device else []
    for feature, description in FEATURES.items():
        given = options[feature]
        prepared = ca.plan(*operands_of(feature, inputs), variant=rung, **given)
        report = judged(prepared, problem, inputs, given)
        rows.append({
            "rung": rung, "feature": feature, "description": description,
            "form": prepared.plans[-1].form,
            "launches": sum(len(p.launches) for p in prepared.plans),
            "j2": report.ratio, "ok": report.passed,
        })  # fmt: skip
        if on_device and report.passed:
            laid = [operands_of(feature, one) for one in sets]
            calls[feature] = rotating(prepared, laid)
    if not on_device:
        return rows
    with output.progress(f"{rung}, {problem.name}", rounds * len(calls)) as advance:
        samples = timing.time_interleaved(calls, rounds=rounds, advance=advance)
    for row in rows:
        found = samples.get(row["feature"])
        if found is None:
            continue
        time = timing.median(found)
        row |= {"seconds": time.median, "seconds_interval": [time.low, time.high], "samples": found}
        if PLAIN in samples:
            ratio = timing.paired_ratio(found, samples[PLAIN])
            row["ratio"] = ratio.to_list()
    return rows


def measure_problem(problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Compile what the rungs run on a problem, then measure one after the other."""
    on_device = not args.quick
    inputs = problem.draw(on_device=on_device)
    xp = array_namespace(inputs[0])
    options = {feature: options_of(feature, problem, xp) for feature in FEATURES}
    if on_device:
        cache.warm(kernels(args.rungs, inputs, options, own_arch()), args.threads)
    rows: list[dict[str, Any]] = []
    for rung in args.rungs:
        rows += measure_rung(
            rung, problem, inputs, options, rounds=args.rounds, on_device=on_device
        )
    return {"problem": vars(problem) | {"name": problem.name}, "rows": rows}


def run(args: argparse.Namespace) -> int:
    """Measure every rung on every problem; after each print its table and write the record."""
    recording.check_rounds(args)
    if args.update_docs:
        check_whole({(d, rung): set(FEATURES) for d in args.head_dims for rung in args.rungs})
    batch, heads = (1, 2) if args.quick else (4, 16)
    length = recording.quick_length(args, 4096)
    backend = "mirror" if args.quick else "cuda"
    content: dict[str, Any] = {"rounds": 0 if args.quick else args.rounds, "problems": []}
    for head_dim in args.head_dims:
        found = measure_problem(Problem(batch, heads, length, head_dim, seed=args.seed), args)
        content["problems"].append(found)
        print(f"\n{found['problem']['name']}")
        output.print_table(*table(found))
        record = recording.keep(args, "feature_costs", backend, content)
    if args.update_docs:
        update_page(record, PAGE)
    return 0 if all(row["ok"] for found in record["problems"] for row in found["rows"]) else 1


# ---- records in parts ----------------------------------------------------------------------------


def check_whole(measured: Mapping[tuple[int, str], Collection[str]]) -> None:
    """Raise ValueError where the page would lack a head_dim or a rung.

    A feature that a rung was not measured with is a cell that says so.

    Parameters
    ----------
    measured : mapping of (int, str) to collection of str
        The features that were measured, by head_dim and rung.
    """
    lacking = []
    for head_dim in HEAD_DIMS:
        rungs = [r for r in RUNGS if PLAIN not in measured.get((head_dim, r), ())]
        of = "" if len(rungs) == len(RUNGS) else f" of {', '.join(rungs)}"
        lacking += [f"head_dim {head_dim}{of}"] if rungs else []
    if lacking:
        raise ValueError(
            f"docs/FEATURES.md needs every head_dim and rung, this lacks {' and '.join(lacking)}: "
            "measure that with --head-dims and --rungs, then --merge its record"
        )


def merged(record: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in which the rungs of a partial record replace the old ones.

    Each of their rows says at which revision, by which command, and on which device if it is
    another, it was measured.

    Raises
    ------
    ValueError
        If the page could not say of both what it says of a record.
    """
    others = _said(part)
    for name, own in _said(record).items():
        if own != others[name]:
            raise ValueError(
                f"records of one page must have one {name}, got {own} and {others[name]}"
            )
    of_part = {"command": part["command"], "revision": _revision(part)}
    if _device(part) != _device(record):
        of_part["device"] = _device(part)
    problems = {found["problem"]["name"]: found for found in record["problems"]}
    for found in part["problems"]:
        name = found["problem"]["name"]
        rows = [{**of_part, **row} for row in found["rows"]]
        taken = {row["rung"] for row in rows}
        before = problems[name]["rows"] if name in problems else []
        rows += [row for row in before if row["rung"] not in taken]
        rows.sort(key=lambda row: RUNGS.index(row["rung"]))
        problems[name] = {**found, "rows": rows}
    in_order = sorted(problems.values(), key=lambda found: int(found["problem"]["head_dim"]))
    return {**record, "problems": in_order}


def _said(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page says of all of its rows."""
    return {
        "backend": record["backend"], "number of rounds": record["rounds"],
        "NVRTC": record["environment"]["nvrtc"],
    }  # fmt: skip


def _device(record: Mapping[str, Any]) -> str:
    return str((record["environment"]["device"] or {}).get("name"))


def _revision(record: Mapping[str, Any]) -> str:
    return str(record["environment"].get("revision", "unknown"))


def revisions(record: Mapping[str, Any]) -> str:
    """Return the revision of a record; which rungs have another where some were merged into it.

    Of these the device is said where it is another: a ratio is of calls on one device.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for problem in record["problems"]:
        for row in problem["rows"]:
            at = row.get("revision", _revision(record))[:10]
            at += f" on {row['device']}" if "device" in row else ""
            head_dims = found.setdefault(at, {}).setdefault(row["rung"], [])
            if problem["problem"]["head_dim"] not in head_dims:
                head_dims.append(problem["problem"]["head_dim"])
    if len(found) == 1:
        return f"revision {next(iter(found))}"
    everywhere = [problem["problem"]["head_dim"] for problem in record["problems"]]
    parts = []
    for at, rungs in found.items():
        where = [
            rung if head_dims == everywhere else f"{rung} at head_dim {head_dim}"
            for rung, head_dims in rungs.items()
            for head_dim in (head_dims[:1] if head_dims == everywhere else head_dims)
        ]
        parts.append(f"revision {at} ({', '.join(where)})")
    return " and ".join(parts)


def from_record(args: argparse.Namespace) -> int:
    """Write the page from the committed record, into which others are merged first."""
    update_page(merging.record_with("feature_costs", args.merge, merged), PAGE)
    return 0


# ---- tables --------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of one problem: the cost of each feature in each rung.

    A cell is the ratio to the plain call with its 95 % interval. It is "not measured" for a feature
    that the rung's run did not have yet. The plain call has its time. Without times a cell is the
    error as a share of the bound.
    """
    cells = {(row["feature"], row["rung"]): _cell(row) for row in found["rows"]}
    rungs = list(dict.fromkeys(row["rung"] for row in found["rows"]))
    features = [name for name in FEATURES if any((name, rung) in cells for rung in rungs)]
    rows = [
        [name, *(cells.get((name, rung), "not measured") for rung in rungs)] for name in features
    ]
    return ["", *rungs], rows


def _cell(row: Mapping[str, Any]) -> str:
    if not row["ok"]:
        return "misses its bound"
    if "seconds" not in row:
        return f"J2 {words.format_ratio(row['j2'])}"
    if row["feature"] == PLAIN or "ratio" not in row:
        return words.format_seconds(row["seconds"])
    ratio, low, high = row["ratio"]
    return f"x {ratio:.2f} [{low:.2f}, {high:.2f}]"


def page(record: Mapping[str, Any]) -> str:
    """Return the text of docs/FEATURES.md for a record that has times of every rung.

    Raises
    ------
    ValueError
        If it has none, or lacks some.
    """
    if record["backend"] != "cuda":
        raise ValueError("the record has no times: it was not made on a device")
    measured: dict[tuple[int, str], set[str]] = {}
    for found in record["problems"]:
        for row in found["rows"]:
            cell = found["problem"]["head_dim"], row["rung"]
            measured.setdefault(cell, set()).add(row["feature"])
    check_whole(measured)
    daggers = any(map(in_another_form, record["problems"]))
    environment, found_on = record["environment"], record["environment"]["device"]
    lines = [
        "# What features cost",
        "",
        "Written by `python -m experiments.speed.feature_costs --stored` from "
        f"[{Path(RECORD).name}](../{RECORD}). Device: {found_on['name']}, driver "
        f"{found_on['driver']}, NVRTC {environment['nvrtc']}, {revisions(record)}.",
        "",
        "A cell is the time of a prepared call with one feature, divided by the time of the plain "
        f"call in the same rounds. It has the median of {record['rounds']} rounds and a 95 % "
        "interval. Each call "
        "held its error bound before it was timed. `fa_int8` quantises by its default, "
        "`QuantConfig()`, with scales of K for each thread."
        + (f" {DAGGER} marks calls that run in another form than the plain one." * daggers),
        "",
        "| feature | what it is here |",
        "| --- | --- |",
        *(f"| {name} | {text} |" for name, text in _descriptions(record).items()),
        "",
        "## Masks, biases and a softcap on Hopper",
        "",
        scores.BEGIN,
        scores.section(recording.stored("scores")),
        scores.END,
        "",
        *portable_calls.section(),
    ]
    for found in record["problems"]:
        other = in_another_form(found)
        header, rows = table(found)
        for row in rows:
            for i, rung in enumerate(header[1:], 1):
                row[i] += f" {DAGGER}" if (row[0], rung) in other else ""
        on = devices(found, found_on["name"])
        if len({*on.values()}) > 1:
            header = [header[0], *(f"{rung} ({on[rung]})" for rung in header[1:])]
        lines += ["", f"## {found['problem']['name']}", "", *recording.markdown(header, rows)]
    return "\n".join(lines) + "\n"


def in_another_form(found: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return features and rungs of a problem's calls that run in another form than plain ones."""
    forms = {row["rung"]: row["form"] for row in found["rows"] if row["feature"] == PLAIN}
    return {
        (row["feature"], row["rung"]) for row in found["rows"] if row["form"] != forms[row["rung"]]
    }


def devices(found: Mapping[str, Any], own: str) -> dict[str, str]:
    """Return in one word the device of each rung of a problem; `own` is that of the record.

    Examples
    --------
    >>> rows = [{"rung": "fa"}, {"rung": "fa_tc", "device": "NVIDIA H200"}]
    >>> devices({"rows": rows}, "NVIDIA H100 80GB HBM3")
    {'fa': 'H100', 'fa_tc': 'H200'}
    """
    names = {row["rung"]: row.get("device", own) for row in found["rows"]}
    return {rung: name.removeprefix("NVIDIA ").split()[0] for rung, name in names.items()}


def _descriptions(record: Mapping[str, Any]) -> dict[str, str]:
    found = {row["feature"] for problem in record["problems"] for row in problem["rows"]}
    return {name: text for name, text in FEATURES.items() if name in found}


def update_page(record: Mapping[str, Any], path: Path) -> None:
    """Write docs/FEATURES.md."""
    path.write_text(page(record), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), metavar="N")
    parser.add_argument("--rungs", nargs="+", default=list(RUNGS), choices=RUNGS)
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="compilations at a time"
    )
    recording.add_page_arguments(parser)
    parser.add_argument(
        "--merge",
        nargs="+",
        default=(),
        type=Path,
        metavar="FILE",
        help="put the rungs of records of some problems into the committed one; measure nothing",
    )
    args = parser.parse_args(argv)
    if args.stored or args.merge:
        return recording.guarded(from_record, args)
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
