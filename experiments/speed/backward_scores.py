"""What do a bias and masks cost in the backward pass, and how far are other libraries?

Varies       the feature: none; a half-true mask (len, len); a float16 bias (heads, len, len),
             shared over the batch; a bias for each entry and head; softcap 30. Head_dim in
             {64, 128}; length in {1024, 4096, 16384}; float16 and bfloat16
Holds fixed  16,384 tokens in all, heads x head_dim = 2048, N(0, 1), d_out too; no gradient of the
             bias
Measures     J2 of one head; time of the backward pass alone, in the form that is taken and in the
             portable one; in the same rounds its ratio to the portable form and to the fastest
             other library
Beside       torch's scaled_dot_product_attention with its cuDNN and memory-efficient backends, and
             FlexAttention compiled for each case, its block mask made beforehand
Expect       at least 1.3 times the speed of the fastest library with a mask and with a bias
Run          python -m experiments.speed.backward_scores [--quick] [--json FILE] [--rounds N]
             [--cells 64:4096:bfloat16 ...] [--features bias ...] [--alone] [--stored]

A cell is HEAD_DIM:LENGTH:DTYPE. With ``--alone`` no other library runs: FlexAttention compiles for
up to a minute a case. The record is rewritten after each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import array_namespace, as_float64
from cupyattn.cli import output
from cupyattn.gradients import backward_exact, judge_backward
from cupyattn.measure import timing
from cupyattn.measure.rungs import relative_error
from cupyattn.measure.words import format_seconds
from experiments._harness import recording
from experiments._harness.cells import REFUSALS, Problem, reason
from experiments._harness.others import fastest, format_comparison, ratio, refusing
from experiments.speed import scores
from experiments.speed.backward import TOLERANCE, one_head
from experiments.speed.scores import BIAS, CELLS, MASK, OWN_BIAS, PLAIN, SOFTCAP, ScoreCell

TAKEN, PORTABLE = "taken", "portable"
FEATURES = (PLAIN, MASK, BIAS, OWN_BIAS, SOFTCAP)
#: Architecture of the same device for which no Hopper form is compiled.
PORTABLE_ARCH = "sm_90"
BESIDE_PORTABLE, BESIDE_PEERS = "beside portable", "beside the fastest library"
#: Takes d_out, q, k, v, out and lse and returns what runs the backward pass on them.
Prepare = Callable[..., Callable[[], Any]]


def received(problem: Problem, options: Mapping[str, Any], *, on_device: bool) -> tuple[Any, ...]:
    """Return d_out, q, k, v and what the forward pass of fa_tc made of them."""
    q, k, v = problem.draw(on_device=on_device)
    xp = array_namespace(q)
    rng = np.random.default_rng(problem.seed + 1)
    d_out = xp.asarray(rng.standard_normal(q.shape, np.float32).astype(problem.dtype))
    out, lse = ca.attention(q, k, v, variant="fa_tc", return_lse=True, **options)
    return d_out, q, k, v, out, lse


def ours(options: Mapping[str, Any], arch: str | None) -> Prepare:
    """Return `cupyattn.attention_backward` with the options of a feature."""
    return lambda *given: lambda: ca.attention_backward(*given, arch=arch, **options)


def theirs(name: str, make: Callable[[], Callable[..., Any] | None]) -> Prepare:
    """Return the backward pass of another library's call."""

    def prepared(d_out: Any, q: Any, k: Any, v: Any, *_: Any) -> Callable[[], Any]:
        import torch

        attend = make()
        if attend is None:
            raise RuntimeError(f"{name} cannot be imported")
        operands = [scores.tensor(x).detach().requires_grad_() for x in (q, k, v)]
        out, given = attend(*operands), scores.tensor(d_out)
        return refusing(
            name, lambda: torch.autograd.grad(out, operands, given, retain_graph=True)
        )

    return refusing(name, prepared)


def of_one_head(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the first head of the first batch entry."""
    return {n: x[:1, :1] if getattr(x, "ndim", 0) == 4 else x for n, x in options.items()}


def judge(
    name: str, found: Sequence[Any], given: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Hold one head of a result to its bound (J2); another library's to a relative error."""
    xp = array_namespace(given[1])
    mine, head, own = one_head(found, xp), one_head(given, xp), of_one_head(options)
    if name in (TAKEN, PORTABLE):
        worst = judge_backward(mine, *head, **own).ratio
    else:
        exact = backward_exact(*head[:4], **own)
        errors = (relative_error(as_float64(x), y) for x, y in zip(mine, exact, strict=True))
        worst = max(errors) / TOLERANCE
    return {"j2": worst, "ok": worst <= 1}


def measure(cell: ScoreCell, feature: str, args: argparse.Namespace) -> dict[str, Any]:
    """Judge every pass on one problem, and on a device time the passes that hold their bound."""
    problem, on_device = cell.problem(args), not args.quick
    xp = array_namespace(problem.draw(on_device=on_device)[0])
    options = scores.options_of(feature, problem, xp)
    given = received(problem, options, on_device=on_device)
    ways = {TAKEN: ours(options, None)}
    if on_device:
        ways[PORTABLE] = ours(options, PORTABLE_ARCH)
        others = {} if args.alone else dict(scores.peers(feature, problem, options))
        ways |= {name: theirs(name, make) for name, make in others.items()}
    form, _, _ = ca.explain_backward(*given, **options).partition(":")
    rows: list[dict[str, Any]] = []
    runs: dict[str, Callable[[], Any]] = {}
    for name, prepare in ways.items():
        row: dict[str, Any] = {"variant": name, "peer": name not in (TAKEN, PORTABLE)}
        try:
            runs[name] = prepare(*given)
            row |= judge(name, runs[name](), given, options)
        except REFUSALS as error:
            row |= {"unsupported": reason(error), "ok": row["peer"]}
        rows.append(row)
    if on_device:
        fit = [row for row in rows if row["ok"] and "unsupported" not in row]
        calls = {row["variant"]: lambda _, run=runs[row["variant"]]: run() for row in fit}
        samples = timing.time_interleaved(calls, rounds=args.rounds)
        for row in fit:
            row["samples"] = samples[row["variant"]]
            row["seconds"] = timing.median(row["samples"]).median
            row["tflops"] = problem.operations * 5 // 2 / row["seconds"] / 1e12
    by_name = {row["variant"]: row for row in rows}
    return {
        "cell": str(cell), "feature": feature, "form": form, "rows": rows,
        BESIDE_PORTABLE: ratio(by_name.get(PORTABLE), by_name[TAKEN]),
        BESIDE_PEERS: ratio(
            fastest(by_name, [row["variant"] for row in rows if row["peer"]]), by_name[TAKEN]
        ),
    }  # fmt: skip


def report(record: Mapping[str, Any]) -> None:
    """Print the table of a record."""
    header = ["", "J2", "time", "TFLOP/s", BESIDE_PORTABLE, BESIDE_PEERS]
    table = []
    for found in record["cells"]:
        beside = [format_comparison(found[x]) for x in (BESIDE_PORTABLE, BESIDE_PEERS)]
        title = f"{found['cell']} {found['feature']}: {found['form']}"
        table.append([title, "", "", "", *beside])
        for row in found["rows"]:
            judged = f"{row['j2']:.3f}" if "j2" in row else "not supported"
            timed = ["-", "-"]
            if "seconds" in row:
                timed = [format_seconds(row["seconds"]), f"{row['tflops']:.4g}"]
            table.append([f"  {row['variant']}", judged, *timed, "", ""])
    output.print_table(header, table)


def run(args: argparse.Namespace) -> int:
    """Run the experiment, print the table, write the record."""
    recording.check_rounds(args)
    cells = [ScoreCell.parse(text) for text in args.cells] if args.cells else CELLS
    found: list[dict[str, Any]] = []
    content = {"rounds": 0 if args.quick else args.rounds, "cells": found}
    record: dict[str, Any] = {}
    for cell in cells:
        for feature in args.features:
            if feature in scores.features_of(cell.problem(args)):
                found.append(measure(cell, feature, args))
                record = recording.keep(
                    args, "backward_scores", "mirror" if args.quick else "cuda", content
                )
    report(record)
    return 0 if all(row["ok"] for one in found for row in one["rows"] if not row["peer"]) else 1


def again(_: argparse.Namespace) -> int:
    """Report on the committed record."""
    report(recording.stored("backward_scores"))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--cells", nargs="+", metavar="CELL")
    parser.add_argument(
        "--features", nargs="+", default=list(FEATURES), choices=FEATURES, metavar="FEATURE"
    )
    parser.add_argument("--alone", action="store_true", help="run no other library")
    recording.add_stored_argument(parser)
    args = parser.parse_args(argv)
    return recording.guarded(again, args) if args.stored else recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
