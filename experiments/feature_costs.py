"""What does each feature of a call cost, against the same call without it?

Varies       the feature; the rung; head_dim in {64, 128}
Holds fixed  batch 4, 16 heads, length 4096, N(0, 1), float16, each rung's own tiles and form
Measures     J2; time of a prepared call, and its ratio to the plain call in the same rounds
Expect       less time where keys are left out (causal, window), more where a score is worked on
Run          python -m experiments.feature_costs [--quick] [--json FILE] [--update-docs]
             [--stored]

``--update-docs`` writes docs/FEATURES.md: from the record alone with ``--stored``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import measure, testing, timing
from cupyattn.cli import output
from cupyattn.preparation import OPTIONS as PREPARATION
from cupyattn.quant import QuantConfig
from experiments import common
from experiments.common import ROOT, Problem

PAGE = ROOT / "docs" / "FEATURES.md"
RECORD = "experiments/results/feature_costs.json"
HEAD_DIMS = (64, 128)
PLAIN, PACKED = "plain", "packed"
#: Every feature alone, in the order of the page, and what it is in this experiment.
FEATURES = {
    PLAIN: "nothing but attention",
    "lse": "`return_lse=True`",
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


def judged(rung: str, problem: Problem, inputs: tuple[Any, ...], options: Options) -> Any:
    """Run a call and return its report, held to its bound on some rows."""
    q, k, v = inputs
    options = {name: x for name, x in options.items() if name != "return_lse"}
    quantized = None
    if ca.VARIANTS[rung].family == "int8":
        prepared = {name: options[name] for name in PREPARATION if name in options}
        quant = QuantConfig(smooth_k="softcap" not in options)
        quantized = ca.quantize(q, k, v, quant=quant, **prepared)
    if "cu_seqlens_q" in options:
        o, lse = ca.attention_varlen(
            *operands_of(PACKED, inputs), variant=rung, return_lse=True, **options
        )
        o = o.reshape(q.shape[0], -1, *o.shape[1:]).swapaxes(1, 2)
        lse = lse.reshape(lse.shape[0], q.shape[0], -1).swapaxes(0, 1)
        options = {}
    else:
        o, lse = ca.attention(q, k, v, variant=rung, return_lse=True, **options)
    rows = measure.judged_rows(problem.call, problem.seed)
    return testing.judge(
        o, q, k, v, variant=rung, lse=lse, quantized=quantized, rows=rows, **options
    )


def measure_rung(
    rung: str, problem: Problem, *, rounds: int, on_device: bool
) -> list[dict[str, Any]]:
    """Judge every feature of a rung, then time those that hold their bound, in turns."""
    inputs = problem.draw(on_device=on_device)
    xp = np
    if on_device:
        import cupy

        xp = cupy
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[int], Any]] = {}
    sets = timing.rotated(inputs) if on_device else []
    for feature, description in FEATURES.items():
        options = options_of(feature, problem, xp)
        report = judged(rung, problem, inputs, options)
        prepared = ca.plan(*operands_of(feature, inputs), variant=rung, **options)
        rows.append({
            "rung": rung, "feature": feature, "description": description,
            "form": prepared.plans[-1].form,
            "launches": sum(len(p.launches) for p in prepared.plans),
            "j2": report.ratio, "ok": report.passed,
        })  # fmt: skip
        if on_device and report.passed:
            laid = [operands_of(feature, one) for one in sets]
            calls[feature] = common.rotating(prepared, laid)
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


def run(args: argparse.Namespace) -> int:
    """Measure every rung on every problem, print the tables, write record and page."""
    common.check_rounds(args)
    batch, heads = (1, 2) if args.quick else (4, 16)
    length = common.quick_length(args, 4096)
    problems = []
    for head_dim in args.head_dims:
        problem = Problem(batch, heads, length, head_dim, seed=args.seed)
        rows: list[dict[str, Any]] = []
        for rung in args.rungs:
            rows += measure_rung(rung, problem, rounds=args.rounds, on_device=not args.quick)
        found = {"problem": vars(problem) | {"name": problem.name}, "rows": rows}
        problems.append(found)
        print(f"\n{problem.name}")
        output.print_table(*table(found))
    content = {"rounds": 0 if args.quick else args.rounds, "problems": problems}
    backend = "mirror" if args.quick else "cuda"
    record = common.keep(args, "feature_costs", backend, content)
    if args.update_docs:
        update_page(record)
    return 0 if all(row["ok"] for found in problems for row in found["rows"]) else 1


# ---- tables --------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of one problem: the cost of each feature in each rung.

    A cell is the ratio to the plain call with its 95 % interval; the plain call itself has its
    time. Without times a cell is the error as a share of the bound.
    """
    cells = {(row["feature"], row["rung"]): _cell(row) for row in found["rows"]}
    rungs = list(dict.fromkeys(row["rung"] for row in found["rows"]))
    features = list(dict.fromkeys(row["feature"] for row in found["rows"]))
    rows = [[feature, *(cells[feature, rung] for rung in rungs)] for feature in features]
    return ["", *rungs], rows


def _cell(row: Mapping[str, Any]) -> str:
    if not row["ok"]:
        return "misses its bound"
    if "seconds" not in row:
        return f"J2 {measure.format_ratio(row['j2'])}"
    if row["feature"] == PLAIN or "ratio" not in row:
        return measure.format_seconds(row["seconds"])
    ratio, low, high = row["ratio"]
    return f"x {ratio:.2f} [{low:.2f}, {high:.2f}]"


def page(record: Mapping[str, Any]) -> str:
    """Return the text of docs/FEATURES.md for a record that has times.

    Raises
    ------
    ValueError
        If it has none.
    """
    if record["backend"] != "cuda":
        raise ValueError("the record has no times: it was not made on a device")
    environment, found_on = record["environment"], record["environment"]["device"]
    lines = [
        "# What features cost",
        "",
        "Written by `python -m experiments.feature_costs --stored` from "
        f"[{Path(RECORD).name}](../{RECORD}): {found_on['name']}, driver {found_on['driver']}, "
        f"NVRTC {environment['nvrtc']}, revision {environment.get('revision', 'unknown')[:10]}.",
        "",
        "A cell is the time of a prepared call with one feature, divided by that of the plain call "
        f"in the same rounds: median of {record['rounds']} rounds and 95 % interval. Each call "
        "held its error bound before it was timed. A dagger marks calls that run in another form "
        "than the plain one.",
        "",
        "| feature | what it is here |",
        "| --- | --- |",
        *(f"| {name} | {text} |" for name, text in _descriptions(record).items()),
    ]
    for found in record["problems"]:
        forms = {row["rung"]: row["form"] for row in found["rows"] if row["feature"] == PLAIN}
        other = {
            (row["feature"], row["rung"])
            for row in found["rows"]
            if row["form"] != forms[row["rung"]]
        }
        header, rows = table(found)
        for row in rows:
            for i, rung in enumerate(header[1:], 1):
                row[i] += " †" if (row[0], rung) in other else ""
        lines += ["", f"## {found['problem']['name']}", "", *common.markdown(header, rows)]
    return "\n".join(lines) + "\n"


def _descriptions(record: Mapping[str, Any]) -> dict[str, str]:
    return {r["feature"]: r["description"] for found in record["problems"] for r in found["rows"]}


def update_page(record: Mapping[str, Any], path: Path = PAGE) -> None:
    """Write docs/FEATURES.md."""
    path.write_text(page(record), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = common.parser(__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), metavar="N")
    parser.add_argument("--rungs", nargs="+", default=list(ca.VARIANTS), choices=list(ca.VARIANTS))
    parser.add_argument("--update-docs", action="store_true", help="rewrite docs/FEATURES.md")
    parser.add_argument("--stored", action="store_true", help="measure nothing: from the record")
    args = parser.parse_args(argv)
    if args.stored:
        update_page(common.stored("feature_costs"))
        return 0
    return common.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
