"""Few rows in one launch: is a linear layer by channel then as fast as BF16, and in which tiles?

Varies       rows, the layer, and how it runs: codes of activations made in the product (the fused
             form, in several tiles), or by a pass before it; what shares a scale
Holds fixed  N(0, 1) activations and weights in BF16, bias, BF16 out; activations quantised in the
             call; weights that take turns, together more than twice the L2 cache
Measures     whether a fused result has the bits of the two launches; seconds of a call, as part of
             a CUDA graph of a call for each weight, and in the same rounds the ratio to BF16
Beside       torch.nn.functional.linear
Expect       1 to 16 rows: 1.2 times BF16 and more, the pass saved (2 us of 8 to 10); 64 rows of
             wide layers: the two launches ahead of every fused form
Run          python -m experiments.tuning.int8_layers_few_rows [--rows M,M] [--only LABEL] [--quick]
             [--json FILE]

``FUSED_TILES`` and ``fuses_quantising`` of cupyattn/problem/gemm_form.py are what its result is
for.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, array_namespace
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.measure import device, timing, words
from cupyattn.ops.act_quant import ACT_QUANT, ActQuantSettings
from cupyattn.ops.gemm import GEMM, GemmSettings
from cupyattn.ops.layers import LAYERS, LayersSettings
from cupyattn.ops.linear import quantised_product
from cupyattn.ops.operation import Known, problem_of, run
from cupyattn.problem.gemm_form import FUSED_ROWS, fitting_tiles, fuses_quantising
from cupyattn.quant.blocks import BLOCK_SIZE, STRATEGIES
from experiments._harness import recording
from experiments._harness.others import format_comparison, geometric_mean
from experiments.speed.gemm import Size
from experiments.speed.int8_layers import BF16, draw
from experiments.tuning.gemm_few_rows import graph_of

ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
#: (label, columns, k), and the most rows that it is raced with.
SHAPES = (
    ("Flux, modulation", 18_432, 3072, 1),
    ("Flux, attention out", 3072, 3072, 512),
    ("Flux, feed-forward in", 12_288, 3072, 512),
    ("Flux, feed-forward out", 3072, 12_288, 512),
    ("Wan 14B, attention", 5120, 5120, 512),
    ("Wan 14B, feed-forward in", 13_824, 5120, 512),
    ("Wan 14B, feed-forward out", 5120, 13_824, 512),
)
QUICK_ROWS, QUICK_SHAPES = (1, 20, 70), (("small", 160, 1040, 70),)
DEFAULT, TWO, BLOCKS = "default", "two launches", "blocks of 128"
#: Architecture that the fused candidates are compiled for.
ARCH = "sm_90"
#: Tiles that are raced beside those that are taken: an SM has room for one block of these or more.
MORE_TILES = (
    GemmTiles(16, 32, num_warps=2, num_stages=12),
    GemmTiles(16, 64, num_warps=4, num_stages=12),
    GemmTiles(16, 128, num_warps=8, num_stages=6, splits=2),
    GemmTiles(16, 128, num_warps=4, num_stages=4, splits=4),
    GemmTiles(32, 64, num_warps=4, num_stages=6, splits=4),
    GemmTiles(32, 128, num_warps=8, num_stages=5, splits=2),
    GemmTiles(64, 64, num_warps=4, num_stages=6, splits=4),
    GemmTiles(64, 128, num_warps=8, num_stages=3, splits=8),
)

Way = Callable[..., Any]


def fused(tiles: GemmTiles | None) -> Way:
    """Return a layer in these tiles of the fused form; None: in the form that sizes choose."""

    def way(x: Any, bias: Any, channel: Sequence[Any], *_: Any) -> Any:
        if tiles is None:
            return quantised_product(x, *channel, "bfloat16", bias=bias)
        codes, scales = channel
        c = array_namespace(x).empty((x.shape[0], codes.shape[0]), x.dtype)
        arrays = {"x": x, "b0": codes, "b_scales0": scales, "bias0": bias, "c0": c}
        (y,) = run(LAYERS, settings(tiles), arrays, Known(arrays))
        return y

    return way


def settings(tiles: GemmTiles) -> LayersSettings:
    """Return what a layer in these tiles of the fused form asks for."""
    return LayersSettings("bfloat16", ("",), ARCH, None, tiles)


def two_launches(x: Any, bias: Any, channel: Sequence[Any], *_: Any) -> Any:
    """Codes of the activations by a pass, then the product."""
    a = ca.act_quant(x, strategy="channel")
    return ca.int8_gemm(*a, *channel, "bfloat16", bias=bias)


def blocks(x: Any, bias: Any, _: Any, block: Sequence[Any], *__: Any) -> Any:
    """Codes of blocks of 128."""
    return ca.int8_gemm(*ca.act_quant(x), *block, "bfloat16", bias=bias)


def candidates(size: Size) -> dict[str, GemmTiles]:
    """Return the tiles of the fused form that are raced, by name."""
    if size.m > FUSED_ROWS:
        return {}
    return {
        "{block_m}x{block_n} w{num_warps} s{num_stages} x{splits}".format(**asdict(tiles)): tiles
        for tiles in fitting_tiles(size.m, size.k, MORE_TILES)
    }


def launches_of(size: Size, xp: Any) -> set[tuple[ModuleSpec, str]]:
    """Return what all ways of a size compile, and for which architecture."""
    x = xp.empty((size.m, size.k), STORAGE["bfloat16"])
    rest = {"bias": xp.empty(size.n, x.dtype), "c": xp.empty((size.m, size.n), x.dtype)}
    b, scales = xp.empty((size.n, size.k), np.int8), xp.empty((size.n, 1), np.float32)
    problems = []
    backend = "interpret" if xp is np else None
    for tiles in candidates(size).values():
        named = {f"{name}0": array for name, array in (rest | {"b": b, "b_scales": scales}).items()}
        asked = settings(tiles)._replace(backend=backend)
        problems.append((LAYERS, problem_of(LAYERS, asked, {"x": x, **named})))
    for strategy in STRATEGIES:
        asked_codes = ActQuantSettings(BLOCK_SIZE, backend, strategy=strategy)
        problems.append((ACT_QUANT, problem_of(ACT_QUANT, asked_codes, {"x": x})))
        slices = 1 if strategy == "channel" else -(-size.k // BLOCK_SIZE)
        of_b = scales if strategy == "channel" else xp.empty((-(-size.n // BLOCK_SIZE), slices),
                                                             np.float32)  # fmt: skip
        codes = {
            "a": xp.empty(x.shape, np.int8),
            "a_scales": xp.empty((size.m, slices), of_b.dtype),
        }
        asked_product = GemmSettings("bfloat16", "", None, None, backend)
        arrays = {**codes, "b": b, "b_scales": of_b, **rest}
        problems.append((GEMM, problem_of(GEMM, asked_product, arrays)))
    return {
        (one.module, problem.arch or ARCH)
        for operation, problem in problems
        for plan in operation.plan(problem).plans
        for one in plan.launches
    }


def compile_all(sizes: Sequence[Size], xp: Any) -> None:
    """Compile what all ways of all sizes launch, in as many processes as there are cores."""
    jobs = set().union(*(launches_of(size, xp) for size in sizes))
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_one, *job) for job in sorted(jobs, key=repr)]:
            done.result()


def compile_one(module: ModuleSpec, arch: str) -> None:
    """Compile into the cache on disk."""
    compiler.build(module, arch)


def race(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the bits of every way by channel, then time all in turns, each in a graph."""
    from cupyattn.interop.torch.bridge import as_array

    on_device = not args.quick
    tensors = draw(size, args.seed, "cuda" if on_device else "cpu")
    x, weight, bias = map(as_array, tensors)
    by = {strategy: ca.weight_quant(weight, strategy=strategy) for strategy in ("channel", "block")}
    ways = {DEFAULT: fused(None), TWO: two_launches, BLOCKS: blocks}
    ways |= {name: fused(tiles) for name, tiles in candidates(size).items()}
    arrays = x, bias, by["channel"], by["block"]
    expected = two_launches(*arrays).tobytes()
    row: dict[str, Any] = asdict(size) | {
        "fused": bool(fuses_quantising(size.m, size.n, size.k)),
        "same bits": {
            name: way(*arrays).tobytes() == expected for name, way in ways.items() if name != BLOCKS
        },
    }
    row["ok"] = all(row["same bits"].values())
    if not on_device:
        return row
    import torch

    cache = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    copies = 1 + max(1, -(-cache // (size.n * size.k)))  # of codes, of which there are the fewest
    sets = [
        (x, bias, *(tuple(part.copy() for part in by[s]) for s in ("channel", "block")))
        for _ in range(copies)
    ]
    of_torch = [(tensors[0], tensors[1].clone(), tensors[2]) for _ in range(copies)]
    same = row["same bits"]
    graphs = {n: graph_of(way, sets) for n, way in ways.items() if same.get(n, True)}
    with torch.no_grad():
        graphs[BF16] = graph_of(torch.nn.functional.linear, of_torch)
    samples = timing.time_interleaved(graphs, rounds=args.rounds)
    row["samples"] = {name: [s / copies for s in found] for name, found in samples.items()}
    return row | {"clocks": device.clocks()}


def ratio(row: Mapping[str, Any], name: str, other: str) -> list[float] | None:
    """Return how many times as fast `name` is as `other`; None where one was not timed."""
    samples = row.get("samples", {})
    if name not in samples or other not in samples:
        return None
    return timing.paired_ratio(samples[other], samples[name]).to_list()


def table(row: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a product: every way, the fastest first."""
    samples = row.get("samples", {})
    names = [*row["same bits"], BLOCKS, BF16]
    seconds = {name: timing.median(samples[name]).median for name in names if name in samples}
    lines = [
        [
            name, {True: "yes", False: "NO"}.get(row["same bits"].get(name), "-"),
            words.format_seconds(seconds[name]) if name in seconds else "-",
            format_comparison(ratio(row, name, BF16)),
        ]
        for name in sorted(names, key=lambda name: seconds.get(name, 0.0))
    ]  # fmt: skip
    return [f"{row['m']} x {row['n']} x {row['k']}", "bits", "time", f"x {BF16}"], lines


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows over all products: the default beside two launches and the best."""
    lines = []
    for row in rows:
        samples = row.get("samples", {})
        tiles = [
            name for name in row["same bits"] if name in samples and name not in (DEFAULT, TWO)
        ]
        best = min(tiles, key=lambda name: timing.median(samples[name]).median, default="-")
        lines.append([
            f"{row['label']}, {row['m']}", "fused" if row["fused"] else TWO,
            *(format_comparison(ratio(row, n, BF16)) for n in (DEFAULT, TWO, BLOCKS, best)), best,
        ])  # fmt: skip
    others = (f"default x {BF16}", f"{TWO} x", f"{BLOCKS} x", "best fused x", "best fused")
    return ["", "default", *others], lines


def race_all(args: argparse.Namespace) -> int:
    """Race on every layer and number of rows, print the tables, write the record."""
    recording.check_rounds(args)
    shapes = QUICK_SHAPES if args.quick else SHAPES
    sizes = [
        Size(label, m, n, k)
        for label, n, k, most in shapes if args.only is None or label.startswith(args.only)
        for m in (QUICK_ROWS if args.quick else args.rows) if m <= most
    ]  # fmt: skip
    if not args.quick:
        import cupy

        compile_all(sizes, cupy)
    rows = []
    for size in sizes:
        rows.append(race(size, args))
        output.print_table(*table(rows[-1]))
    output.print_table(*summary(rows))
    ratios = [found[0] for row in rows if (found := ratio(row, DEFAULT, BF16))]
    means = {"geometric mean": geometric_mean(ratios), "least": min(ratios)} if ratios else {}
    print(f"\ndefault x {BF16}: {means}")
    if args.only is None or args.json is not None:
        content = {"rounds": 0 if args.quick else args.rounds, "rows": rows, "summary": means}
        recording.keep(args, "int8_layers_few_rows", "mirror" if args.quick else "cuda", content)
    return 0 if all(row["ok"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--only", metavar="LABEL", help="layers whose label begins so, alone")
    parser.add_argument(
        "--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS, metavar="M,M"
    )
    parser.set_defaults(rounds=15)
    return recording.main(race_all, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
