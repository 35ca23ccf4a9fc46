"""Are INT8 linear layers of few rows as fast as BF16, with no host in the time?

Varies       rows, 1 to 512; the layer, of Flux and Wan 14B; what shares a scale
Holds fixed  N(0, 1) activations and weights in BF16, bias, BF16 out; activations quantised in the
             call; weights that take turns, together more than twice the L2 cache
Measures     the largest error as a share of its bound; seconds of a call, as part of a CUDA graph
             of a call for each weight; the ratio to BF16 in the same rounds
Beside       torch.nn.functional.linear
Expect       channels: no layer below 1.0
Run          python -m experiments.speed.int8_layers_few_rows [--rows M,M] [--only LABEL]
             [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from cupyattn.cli import output
from cupyattn.measure import device, timing, words
from cupyattn.quant.blocks import STRATEGIES
from experiments._harness import recording
from experiments._harness.others import format_comparison, geometric_mean
from experiments.speed.gemm import Size
from experiments.speed.int8_layers import BF16, draw, judge, layers_of
from experiments.tuning.gemm_few_rows import graph_of

ROWS, QUICK_ROWS = (1, 8, 16, 32, 64, 128, 256, 512), (1, 20, 70)
#: (label, columns, k), and the most rows that it is measured with.
SHAPES = (
    ("Flux, modulation", 18_432, 3072, 1),
    ("Flux, attention out", 3072, 3072, 512),
    ("Flux, feed-forward in", 12_288, 3072, 512),
    ("Flux, feed-forward out", 3072, 12_288, 512),
    ("Wan 14B, attention", 5120, 5120, 512),
    ("Wan 14B, feed-forward in", 13_824, 5120, 512),
    ("Wan 14B, feed-forward out", 5120, 13_824, 512),
)
QUICK_SHAPES = (("small", 160, 1040, 70),)


def sizes(args: argparse.Namespace) -> list[Size]:
    """Return the layers that are measured, with each of their numbers of rows."""
    return [
        Size(label, m, n, k)
        for label, n, k, most in (QUICK_SHAPES if args.quick else SHAPES)
        if label.startswith(args.only)
        for m in (QUICK_ROWS if args.quick else args.rows)
        if m <= most
    ]


def measure(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Judge the INT8 layers of a size, then time graphs of them and of BF16."""
    import torch

    on_device = not args.quick
    x, weight, bias = draw(size, args.seed, "cuda" if on_device else "cpu")
    layers = layers_of(weight, bias)
    row: dict[str, Any] = asdict(size)
    row["shares"] = {s: judge(size, x, layer, layer(x), args.seed) for s, layer in layers.items()}
    row["ok"] = max(row["shares"].values()) <= 1
    if not on_device or not row["ok"]:
        return row
    cache = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    copies = 1 + max(1, -(-cache // (size.n * size.k)))  # of codes, of which there are the fewest
    sets = [(x, weight, bias, layers)]
    sets += [(x, weight.clone(), bias, layers_of(weight, bias)) for _ in range(copies - 1)]
    ways: dict[str, Callable[..., Any]] = {
        s: lambda x, w, b, layers, s=s: layers[s](x) for s in STRATEGIES
    }
    ways[BF16] = lambda x, w, b, layers: torch.nn.functional.linear(x, w, b)
    with torch.no_grad():
        graphs = {name: graph_of(way, sets) for name, way in ways.items()}
    samples = timing.time_interleaved(graphs, rounds=args.rounds)
    row["samples"] = {name: [s / copies for s in found] for name, found in samples.items()}
    row["seconds"] = {name: timing.median(s).median for name, s in row["samples"].items()}
    row["ratios"] = {
        s: timing.paired_ratio(samples[BF16], samples[s]).to_list() for s in STRATEGIES
    }
    return row | {"clocks": device.clocks()}


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines, one for each layer and number of rows."""
    names = (BF16, *STRATEGIES)
    lines = [
        [
            row["label"], str(row["m"]),
            *(words.format_seconds(row["seconds"][name]) if "seconds" in row else "-"
              for name in names),
            *(format_comparison(row["ratios"][s]) if "ratios" in row else "-" for s in STRATEGIES),
            f"{max(row['shares'].values()):.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    return ["layer", "rows", *names, *(f"{s} x {BF16}" for s in STRATEGIES), "bound"], lines


def run(args: argparse.Namespace) -> int:
    """Measure every size, print the table, and write the record after each."""
    recording.check_rounds(args)
    rows: list[dict[str, Any]] = []
    for size in sizes(args):
        rows.append(measure(size, args))
        timed = [row["ratios"] for row in rows if "ratios" in row]
        summary = {
            s: {
                "geometric mean": geometric_mean([ratios[s][0] for ratios in timed]),
                "least": min(ratios[s][0] for ratios in timed),
            }
            for s in (STRATEGIES if timed else ())
        }
        content = {"rounds": 0 if args.quick else args.rounds, "rows": rows, "summary": summary}
        recording.keep(args, "int8_layers_few_rows", "mirror" if args.quick else "cuda", content)
    output.print_table(*table(rows))
    for s, means in summary.items():
        print(f"{s} x {BF16}: " + ", ".join(f"{name} {x:.3f}" for name, x in means.items()))
    return 0 if all(row["ok"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--only", default="", metavar="LABEL", help="layers that begin so")
    parser.add_argument(
        "--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS, metavar="M,M"
    )
    parser.set_defaults(rounds=recording.LEAST_ROUNDS)
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
