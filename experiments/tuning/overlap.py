"""Is an INT8 layer faster where its product begins while its activations are quantised?

Varies       the layer, and its rows; what shares a scale; whether the launch of the product may
             begin before that of the codes has ended
Holds fixed  N(0, 1) activations and weights in BF16, bias; CUDA graphs of calls, one for each copy
             of the weight
Measures     whether every result has the same bits; time, and the ratio to calls whose launches
             follow one another, and to torch's BF16 layer, in the same rounds
Beside       torch.nn.functional.linear in BF16
Expect       1 to 2 us of every call: a launch, and the first slices of the weight
Run          python -m experiments.tuning.overlap [--only LABEL] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any
from unittest import mock

from cupyattn.cli import output
from cupyattn.measure import device, timing, words
from cupyattn.quant.blocks import STRATEGIES
from cupyattn.runtime import overlapping
from cupyattn.runtime.recent import CALLS
from experiments._harness import recording
from experiments._harness.others import format_comparison
from experiments.speed.gemm import Size
from experiments.speed.int8_layers import BF16, LAYERS, draw, layers_of
from experiments.tuning.gemm_few_rows import graph_of

OVERLAPS, FOLLOWS = "overlaps", "follows"
FEW = tuple(
    Size(f"{rows} rows", rows, n, k)
    for n, k in ((3072, 3072), (3072, 12_288), (5120, 5120))
    for rows in (16, 64, 256, 512)
)
QUICK = (Size("small", 40, 264, 272),)


def graphs_of(sets: Sequence[tuple[Any, ...]]) -> tuple[dict[str, Callable[[int], Any]], bool]:
    """Return graphs of each way to run a layer, and whether both ways of ours give the same bits.

    A call that was made ready keeps how its launches follow: none is remembered in between.
    """
    import torch

    found: dict[str, Callable[[int], Any]] = {}
    same = True
    with torch.no_grad():
        for strategy in STRATEGIES:
            results = {}
            for name, may in ((OVERLAPS, True), (FOLLOWS, False)):
                CALLS.clear()
                with mock.patch.object(overlapping, "is_supported", lambda may=may: may):
                    graph = graph_of(lambda x, w, b, layers, s=strategy: layers[s](x), sets)
                _, kept = graph(0)
                torch.cuda.synchronize()
                results[name] = [y.clone() for y in kept]
                found[f"{strategy}, {name}"] = graph
            pairs = zip(results[OVERLAPS], results[FOLLOWS], strict=True)
            same &= all(torch.equal(*pair) for pair in pairs)
        CALLS.clear()
        found[BF16] = graph_of(lambda x, w, b, _: torch.nn.functional.linear(x, w, b), sets)
    return found, same


def measure(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the bits of a layer's results, then time every way in turns."""
    row: dict[str, Any] = asdict(size) | {"same": True}
    x, weight, bias = draw(size, args.seed, "cpu" if args.quick else "cuda")
    if args.quick:
        for layer in layers_of(weight, bias).values():
            layer(x)
        return row
    import torch

    cache = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    copies = 1 + max(1, -(-cache // (size.n * size.k)))  # of codes, of which there are the fewest
    sets = [(x.clone(), w := weight.clone(), bias, layers_of(w, bias)) for _ in range(copies)]
    graphs, row["same"] = graphs_of(sets)
    samples = timing.time_interleaved(graphs, rounds=args.rounds)
    row["samples"] = {name: [s / copies for s in found] for name, found in samples.items()}
    row["seconds"] = {name: timing.median(s).median for name, s in row["samples"].items()}
    row["ratios"] = {
        f"{s} over {other}": timing.paired_ratio(
            samples[slow], samples[f"{s}, {OVERLAPS}"]
        ).to_list()
        for s in STRATEGIES
        for other, slow in ((FOLLOWS, f"{s}, {FOLLOWS}"), (BF16, BF16))
    }
    return row | {"clocks": device.clocks()}


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines."""
    names = [f"{s}, {way}" for s in STRATEGIES for way in (OVERLAPS, FOLLOWS)] + [BF16]
    ratios = [f"{s} over {other}" for s in STRATEGIES for other in (FOLLOWS, BF16)]
    lines = [
        [
            row["label"], f"{row['m']} x {row['n']} x {row['k']}",
            *(words.format_seconds(row["seconds"][n]) if "seconds" in row else "-" for n in names),
            *(format_comparison(row.get("ratios", {}).get(name)) for name in ratios),
            "same bits" if row["same"] else "OTHER BITS",
        ]
        for row in rows
    ]  # fmt: skip
    return ["layer", "m x n x k", *names, *ratios, ""], lines


def run(args: argparse.Namespace) -> int:
    """Measure every layer, print the table, write the record."""
    recording.check_rounds(args)
    sizes = QUICK if args.quick else (*LAYERS, *FEW)
    sizes = tuple(x for x in sizes if args.only is None or x.label.startswith(args.only))
    rows = [measure(size, args) for size in sizes]
    output.print_table(*table(rows))
    recording.keep(args, "overlap", "mirror" if args.quick else "cuda", {"rows": rows})
    return 0 if all(row["same"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--only", metavar="LABEL", help="layers whose label begins so, alone")
    parser.set_defaults(rounds=recording.LEAST_ROUNDS)
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
