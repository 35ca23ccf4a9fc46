"""What does one line, `accelerate`, win in transformers of full width, and does it go back?

Varies       model of diffusers: Flux, Wan 2.1 14B, Kandinsky 5 Lite, SD3.5 Large. How it is
             compiled: by blocks, and as CUDA graphs beside that.
Holds fixed  own width and number of tokens, a few blocks of each kind, random weights in bfloat16.
Measures     seconds to accelerate. `handle.compare` of a pass: time in turns with 95 % intervals,
             memory, error, a verdict on each part. Whether `restore` gives the bits from before,
             and whether codes that were saved give the bits of the accelerated model.
Beside       native, compiled in the same way, and native without a compiler.
Expect       the gains of whole models in experiments/results/whole_models.json, nearly.
Run          python -m experiments.diffusion.accelerated_models [--models NAME ...] [--blocks N]
             [--compile blocks graphs] [--accuracy CLASS] [--quick] [--json FILE] [--rounds N]
             [--update-docs] [--stored]

With three blocks it takes about four minutes on an H200, most of them spent in compiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from cupyattn.measure import timing
from cupyattn.measure.words import format_bytes, format_seconds
from experiments._harness import recording, whole_families
from experiments._harness.diffusers_models import libraries
from experiments._harness.whole_families import FAMILIES, Family
from experiments.diffusion.whole_models import ratio_cell

NAME = "accelerated_models"
DEFAULT = ("Flux", "Wan 2.1 14B", "Kandinsky 5 Lite", "SD3.5 Large")
HOW = ("blocks", "graphs")
WAYS = {"linear layers": "INT8 linear layers", "attention": "INT8 attention", "accelerated": "both"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "PIPELINES.md"
BEGIN, END = "<!-- accelerated: begin -->", "<!-- accelerated: end -->"


def shortened(family: Family, blocks: int) -> Family:
    """Return a family with at most so many blocks of each kind."""
    depth = {name: min(blocks, count) for name, count in family.blocks.items()}
    return dataclasses.replace(family, config={**family.config, **depth})


def measured(family: Family, how: str | bool, args: argparse.Namespace) -> dict[str, Any]:
    """Accelerate a model, compare it with itself, and restore it. Return a row."""
    from cupyattn.interop.diffusers import accelerate

    torch, _ = libraries()
    where = "cpu" if args.quick else "cuda"
    model = whole_families.make(family, where, args.seed)
    latents, arguments = whole_families.inputs(family, where, args.seed)
    call = {**arguments(latents, torch.full((1,), 700.0, device=where)), "return_dict": False}

    def run() -> Any:
        with torch.no_grad():
            return family.output(model(**call)).clone()

    native = run()
    start = time.perf_counter()
    handle = accelerate(model, args.accuracy, compile=how)
    row: dict[str, Any] = {"seconds": time.perf_counter() - start}
    row["lines"] = list(handle.report().lines)
    replaced = handle.report().layers or handle.report().attention
    if replaced:
        found = handle.compare(rounds=args.rounds, log=None, **call)
        print(found, flush=True)
        row |= {"compared": found.record["ways"], "verdicts": found.verdicts()}
        row["lines_after"] = list(handle.report().lines)  # with passes that ran without a graph
    fast = run()
    if handle.report().layers:
        with tempfile.TemporaryDirectory() as folder:
            saved = handle.save(Path(folder) / "int8")
            handle.restore()
            with accelerate(model, args.accuracy, compile=how, checkpoint=saved, log=None):
                row["codes_equal"] = bool(torch.equal(run(), fast))
    handle.restore()
    row["bits_equal"] = bool(torch.equal(run(), native))
    return row


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/PIPELINES.md says was measured."""
    where = record["environment"]["device"] or {}
    return "\n".join([
        f"`compare` of three blocks of each kind on an {where.get('name', 'no device')}, as "
        f"multiples of compiled native with 95 % intervals ({recording.link(NAME)}). Whole models, "
        "measured later, [gain more](INTEROP.md#whole-models):",
        "",
        *recording.markdown(
            ["model", "compiled", "native step", *WAYS.values(), "weights"],
            [line(row) for row in record["rows"]],
        ),
    ])  # fmt: skip


def line(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a model."""
    ways = row["compared"]
    steps = {name: [sum(steps) for steps in way["rounds"]] for name, way in ways.items()}
    ratios = [timing.paired_ratio(steps["native"], steps[name]).to_list() for name in WAYS]
    weights = [format_bytes(ways[name]["weights"]) for name in ("native", "accelerated")]
    return [
        f"{row['model']}, {row['tokens']:,} tokens", row["compile"],
        format_seconds(timing.median(steps["native"]).median), *map(ratio_cell, ratios),
        " to ".join(weights),
    ]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure every model, and write the record after each."""
    torch, diffusers = libraries()
    if not args.quick and not torch.cuda.is_available():
        raise UnsupportedError(f"torch {torch.__version__} has no CUDA device; --quick needs none")
    rows: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    for name in args.models:
        full = FAMILIES[name]
        family = whole_families.small(name) if args.quick else shortened(full, args.blocks)
        for how in ("off",) if args.quick else args.compile:
            start = time.perf_counter()
            found = measured(family, False if args.quick else how, args)
            gc.collect()
            rows.append({"model": name, "blocks": family.blocks, "tokens": family.tokens,
                         "compile": how, **found})  # fmt: skip
            took = time.perf_counter() - start
            said = f"{name}, {how}: {took:.0f} s, bits from before: {found['bits_equal']}"
            output.say(said, flush=True)
            record = recording.keep(
                args, NAME, "mirror" if args.quick else "cuda",
                {"rows": rows, "torch": torch.__version__, "diffusers": diffusers.__version__},
            )  # fmt: skip
    if args.update_docs:
        recording.replace_between(PAGE, BEGIN, END, section(record))
    return 0 if all(row["bits_equal"] and row.get("codes_equal", True) for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.set_defaults(rounds=recording.LEAST_ROUNDS)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=DEFAULT, metavar="NAME",
                        help=", ".join(FAMILIES))  # fmt: skip
    parser.add_argument("--blocks", type=int, default=3, metavar="N", help="of each kind")
    parser.add_argument("--compile", nargs="+", choices=HOW, default=HOW, help="how")
    parser.add_argument("--accuracy", choices=("full", "balanced", "aggressive"),
                        default="balanced", help="class of attention")  # fmt: skip
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    if args.stored:
        recording.replace_between(PAGE, BEGIN, END, section(recording.stored(NAME)))
        return 0
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
