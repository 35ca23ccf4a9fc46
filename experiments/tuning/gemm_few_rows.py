"""Which tiles, shared by how many blocks, are the fastest for products of few rows?

Varies       rows, the layer, the form, tiles, and how many blocks of a cluster share one
Holds fixed  N(0, 1) activations and weights, codes in blocks of 128 or by channel, float16 out
Measures     the largest error as a share of its bound; time of a call, or with ``--graphs`` of a
             call within a CUDA graph, in which the host has no part; in the same rounds the ratio
             to torch's FP16 product
Beside       torch.matmul, FP16
Expect       no loss to FP16; the default at most 3 % behind the best
Run          python -m experiments.tuning.gemm_few_rows [--rows M,M] [--layers NxK,NxK]
             [--strategy channel] [--graphs] [--quick] [--json FILE]

``choose_tiles`` and ``on_hopper`` of cupyattn/problem/gemm_form.py are what its result is for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.cli import output
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.measure import device, timing, words
from cupyattn.problem.gemm_form import FEW_ROWS, HOPPER_TILES, PORTABLE_TILES, on_hopper
from cupyattn.quant.blocks import STRATEGIES
from experiments._harness import recording
from experiments._harness.cells import rotating
from experiments._harness.others import format_comparison
from experiments.speed.gemm import FP16, Size, draw, judge, others

ROWS = (1, 8, 16, 32, 64)
#: Columns and k of layers: as many tiles as SMs, a quarter of them, and more than twice as many.
LAYERS = ((4096, 4096), (1792, 7168), (12_288, 3072))
QUICK_ROWS, QUICK_LAYERS = (1, 20), ((160, 1024),)
DEFAULT = "default"

_MORE_PORTABLE = (
    GemmTiles(32, 64, num_warps=4, num_stages=6),
    GemmTiles(64, 32, num_warps=2, num_stages=6),
    GemmTiles(16, 64, num_warps=2, num_stages=8, splits=2),
    GemmTiles(16, 64, num_warps=2, num_stages=8, splits=4),
    GemmTiles(16, 128, num_warps=4, num_stages=6, splits=4),
    GemmTiles(32, 64, num_warps=4, num_stages=6, splits=2),
    GemmTiles(32, 64, num_warps=4, num_stages=6, splits=4),
    GemmTiles(64, 64, num_warps=4, num_stages=5, splits=4),
    GemmTiles(64, 128, num_warps=4, num_stages=4, splits=4),
)
#: An SM has room for one block of these tiles, and for two of the default tiles.
_MORE_HOPPER = (
    *(GemmTiles(64, 128, num_warps=8, num_stages=8, splits=s) for s in (2, 4, 8)),
    *(GemmTiles(64, 64, num_warps=8, num_stages=12, splits=s) for s in (2, 4, 8)),
    *(GemmTiles(128, 64, num_warps=12, num_stages=8, splits=s) for s in (1, 2, 4)),
    *(GemmTiles(128, 128, num_warps=12, num_stages=6, splits=s) for s in (2, 4)),
    *(GemmTiles(128, 256, num_warps=12, num_stages=4, splits=s) for s in (2, 4)),
)


def candidates(rows: int) -> dict[str, dict[str, Any]]:
    """Return what to race by name: the options of `int8_gemm`.

    Tiles of twice as many rows as there are stay out, but for the least of each form; past
    `FEW_ROWS` the portable form does.
    """
    found: dict[str, dict[str, Any]] = {DEFAULT: {}}
    few = rows <= FEW_ROWS
    for form, arch, least, choices in (
        ("portable", "sm_90", 16, (*PORTABLE_TILES, *_MORE_PORTABLE) if few else ()),
        ("sm90", "sm_90a", 64, (*HOPPER_TILES, *_MORE_HOPPER)),
    ):
        for tiles in choices:
            if tiles.block_m >= max(2 * rows, least + 1):
                continue
            name = "{} {block_m}x{block_n} w{num_warps} s{num_stages}".format(form, **asdict(tiles))
            name += f", {tiles.splits} blocks" if tiles.splits > 1 else ""
            name += f", {tiles.tail_splits} at the end" if tiles.tail_splits > 1 else ""
            found[name] = {"arch": arch, "tiles": tiles}
    return found


def layers_of(text: str) -> tuple[tuple[int, int], ...]:
    """Return columns and k of layers, by their text.

    Examples
    --------
    >>> layers_of("3072x12288,5120x5120")
    ((3072, 12288), (5120, 5120))
    """
    pairs = (tuple(map(int, layer.split("x"))) for layer in text.split(","))
    return tuple((n, k) for n, k in pairs)


def graph_of(way: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Callable[[int], Any]:
    """Return what replays a CUDA graph of one call on each set of arrays.

    The stream, and what the calls returned, are kept as long as the graph, which writes there.
    """
    import cupy
    import torch

    stream = cupy.cuda.Stream(non_blocking=True)
    torch_stream = torch.cuda.ExternalStream(stream.ptr)
    torch.cuda.synchronize()
    with stream, torch.cuda.stream(torch_stream):
        kept = [way(*arrays) for arrays in sets]  # leaves its memory to the pool of this stream
        stream.synchronize()
        kept.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch_stream):
            kept.extend(way(*arrays) for arrays in sets)

    def replay(_: int) -> Any:
        graph.replay()
        return stream, kept

    return replay


def race(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Judge every candidate on a product, then time the candidates that hold their bound in
    turns."""
    on_device = not args.quick
    xp: Any = np
    if on_device:
        import cupy as xp
    x, w = draw(size, args.seed, xp)
    by = args.strategy
    operands = (*ca.act_quant(x, strategy=by), *ca.weight_quant(w, strategy=by))

    def way(options: Mapping[str, Any]) -> Callable[..., Any]:
        return lambda x, w, *codes: ca.int8_gemm(*codes, **options)

    own = {name: way(options) for name, options in candidates(size.m).items()}
    row: dict[str, Any] = asdict(size) | {"shares": {}}
    for name, run in own.items():
        row["shares"][name] = judge(size, run(x, w, *operands), operands, args.seed)
    row["ok"] = all(share <= 1 for share in row["shares"].values())
    if not on_device:
        return row
    sets = [(x.copy(), w.copy(), *some) for some in timing.rotated(operands)]
    ways = {name: (run, sets) for name, run in own.items() if row["shares"][name] <= 1}
    peers = others(size)
    if FP16 in peers:
        import torch

        tensors = [tuple(torch.from_dlpack(array) for array in some) for some in sets]
        ways[FP16] = peers[FP16], tensors
    prepare = graph_of if args.graphs else rotating
    calls = {name: prepare(*way) for name, way in ways.items()}
    samples = timing.time_interleaved(calls, rounds=args.rounds)
    calls_at_once = len(sets) if args.graphs else 1
    row["samples"] = {name: [s / calls_at_once for s in found] for name, found in samples.items()}
    return row | {"clocks": device.clocks()}


def ratio(samples: Mapping[str, Sequence[float]], name: str, other: str) -> list[float] | None:
    """Return how many times as fast `name` is as `other`; None where one was not timed."""
    if name not in samples or other not in samples:
        return None
    return timing.paired_ratio(samples[other], samples[name]).to_list()


def table(row: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a product: every candidate, the fastest first."""
    samples = row.get("samples", {})
    names = list(row["shares"])
    seconds = {name: timing.median(samples[name]).median for name in names if name in samples}
    lines = []
    for name in sorted(names, key=lambda name: seconds.get(name, 0.0)):
        lines.append([
            name, f"{row['shares'][name]:.3f}",
            words.format_seconds(seconds[name]) if name in seconds else "-",
            format_comparison(ratio(samples, name, FP16)),
        ])  # fmt: skip
    return [f"{row['m']} x {row['n']} x {row['k']}", "bound", "time", f"x {FP16}"], lines


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows over all products: the default beside the best."""
    lines = []
    for row in rows:
        samples = row.get("samples", {})
        own = [name for name in samples if name not in (DEFAULT, FP16)]
        best = min(own, key=lambda name: timing.median(samples[name]).median, default=None)
        lines.append([
            f"{row['m']} x {row['n']} x {row['k']}",
            "sm90" if on_hopper(row["m"], row["n"], row["k"])[0] else "portable",
            format_comparison(ratio(samples, DEFAULT, FP16)),
            format_comparison(ratio(samples, DEFAULT, best) if best else None), best or "-",
        ])  # fmt: skip
    return ["", "default", f"default x {FP16}", "default x best", "best"], lines


def run(args: argparse.Namespace) -> int:
    """Race on every product, print the tables, write the record."""
    recording.check_rounds(args)
    counts = QUICK_ROWS if args.quick else args.rows
    rows = []
    for n, k in QUICK_LAYERS if args.quick else args.layers:
        for m in counts:
            rows.append(race(Size("few rows", m, n, k), args))
            output.print_table(*table(rows[-1]))
    output.print_table(*summary(rows))
    name = "gemm_few_rows" + ("_channel" if args.strategy == "channel" else "")
    content = {"strategy": args.strategy, "rows": rows}
    recording.keep(args, name, "mirror" if args.quick else "cuda", content)
    return 0 if all(row["ok"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default="block", help="of the scales")
    parser.add_argument("--layers", type=layers_of, default=LAYERS, metavar="NxK,NxK")
    parser.add_argument("--graphs", action="store_true", help="calls within CUDA graphs")
    parser.add_argument(
        "--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS, metavar="M,M"
    )
    parser.set_defaults(rounds=15)
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
