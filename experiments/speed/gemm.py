"""How fast are block-wise INT8 products, beside products without scales and in 16 bits?

Varies       the product: squares, layers of Flux and Kandinsky 5, few rows; the form; activations
             quantised in the call or before
Holds fixed  N(0, 1) activations and weights, codes in blocks of 128, float16 out
Measures     the largest error as a share of its bound, on 64 rows and the first and last 128
             columns; time, TOP/s; in the same rounds the ratios to torch._int_mm and to torch's
             FP16 product; of act_quant, weight_quant and weight_dequant their share of the
             bandwidth of a copy; with --tails, if the blocks of a cluster share the last wave's
             tiles, the same product with one block for each tile, in turns
Beside       torch._int_mm, which applies no scales, and torch.matmul
Expect       1.15 times torch._int_mm and 1.4 times FP16 from 4096 on; no loss to FP16 with few
             rows; act_quant, weight_quant and weight_dequant at 80 % of a copy
Run          python -m experiments.speed.gemm [--tiles | --tails | --passes] [--only LABEL]
             [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.kinds import array_namespace, as_float64
from cupyattn.cli import output
from cupyattn.compiler.target import HOPPER_CAPABILITY
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.measure import device, timing
from cupyattn.problem.gemm_form import HOPPER_TILES, PORTABLE_TILES, choose_tiles
from cupyattn.quant import gemm_error, gemm_exact
from cupyattn.quant.blocks import BLOCK_SIZE, strategy_of_weight
from experiments._harness import recording
from experiments._harness.cells import rotating
from experiments._harness.others import format_comparison

OWN, PORTABLE, LAYER = "int8_gemm", "int8_gemm, portable", "act_quant and int8_gemm"
ALONE = "int8_gemm, no tile shared"
INT_MM, FP16 = "torch._int_mm", "torch FP16"
#: Number of judged rows, and of compared rows of a pass over a matrix.
JUDGED_ROWS, PASS_ROWS = 64, 1024


@dataclass(frozen=True)
class Size:
    """One product, (m, k) by (n, k), and the layer that it represents."""

    label: str
    m: int
    n: int
    k: int


SIZES = (
    *(Size("square", s, s, s) for s in (4096, 8192, 12_288, 16_384)),
    Size("Flux, attention", 4608, 3072, 3072),
    Size("Flux, feed-forward in", 4608, 12_288, 3072),
    Size("Flux, feed-forward out", 4608, 3072, 12_288),
    Size("Flux, single block out", 4608, 3072, 15_360),
    Size("Kandinsky 5 Lite, attention", 16_384, 1792, 1792),
    Size("Kandinsky 5 Lite, feed-forward in", 16_384, 7168, 1792),
    Size("Kandinsky 5 Lite, feed-forward out", 16_384, 1792, 7168),
    Size("Kandinsky 5 Pro, attention", 16_384, 4096, 4096),
    Size("Kandinsky 5 Pro, feed-forward in", 16_384, 16_384, 4096),
    Size("Kandinsky 5 Pro, feed-forward out", 16_384, 4096, 16_384),
    *(Size("few rows", m, 4096, 4096) for m in (1, 2, 4, 8, 16, 32, 64)),
    *(Size("few rows", m, 12_288, 3072) for m in (1, 8, 16, 64)),
)
QUICK_SIZES = (Size("square", 256, 256, 256), Size("few rows", 1, 384, 256))
#: Hopper tiles to time: the default tiles, and tiles for three warpgroups, whose products and sums
#: may overlap more evenly than with two.
RACED_TILES = (
    *(tiles for tiles in HOPPER_TILES if tiles.splits == 1),
    *(GemmTiles(192, 128, num_warps=16, num_stages=5, tail_splits=s) for s in (1, 2)),
)
#: Rows and channels of activations to quantise.
ACTIVATIONS = ((4608, 3072), (4608, 12_288), (16_384, 1792), (16_384, 4096), (16_384, 16_384))
QUICK_ACTIVATIONS = ((64, 384),)
#: Out and in of weights to quantise: of Flux, of Kandinsky 5 Lite and Pro.
WEIGHTS = ((3072, 3072), (12_288, 3072), (3072, 15_360), (7168, 1792), (16_384, 4096))
QUICK_WEIGHTS = ((256, 384),)
#: Passes over a matrix, by what they are called: each returns a tuple.
PASSES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "act_quant": lambda x: ca.act_quant(x),
    "weight_quant": lambda w: ca.weight_quant(w),
    "weight_dequant": lambda *codes: (ca.weight_dequant(*codes, out_dtype="float16"),),
}


def draw(size: Size, seed: int, xp: Any) -> tuple[Any, Any]:
    """Return x (m, k) and w (n, k), float16."""
    if xp is np:
        rng = np.random.default_rng(seed)
        return tuple(rng.standard_normal((r, size.k)).astype(np.float16) for r in (size.m, size.n))
    rng = xp.random.default_rng(seed)
    return tuple(
        rng.standard_normal((r, size.k), dtype=np.float32).astype(np.float16)
        for r in (size.m, size.n)
    )


def judge(size: Size, c: Any, operands: Sequence[Any], seed: int) -> float:
    """Return the largest error of a product as a share of its bound, on some rows and columns."""
    rng = np.random.default_rng(seed)
    rows = np.unique([0, size.m - 1, *rng.integers(0, size.m, JUDGED_ROWS - 2)])
    blocks = np.unique([0, (size.n - 1) // BLOCK_SIZE])
    columns = np.concatenate([np.arange(b * BLOCK_SIZE, (b + 1) * BLOCK_SIZE) for b in blocks])
    columns = columns[columns < size.n]
    a, a_scales, b, b_scales = operands
    xp = array_namespace(c)
    by_channel = strategy_of_weight(b.shape, b_scales.shape) == "channel"
    down = columns if by_channel else blocks
    some, across, down = (xp.asarray(index) for index in (rows, columns, down))
    parts = a[some], a_scales[some], b[across], b_scales[down], c[some][:, across]
    host = [on_host(x) for x in parts]
    error = np.abs(as_float64(host[4]) - gemm_exact(*host[:4]))
    return float((error / gemm_error(*host[:4], c.dtype.name)).max())


def ways(tiles: GemmTiles | None, *, on_device: bool) -> dict[str, Callable[..., Any]]:
    """Return our ways to multiply, each ``way(x, w, a, a_scales, b, b_scales)``."""

    def product(arch: str | None) -> Callable[..., Any]:
        return lambda x, w, *codes: ca.int8_gemm(*codes, arch=arch, tiles=tiles)

    def layer(x: Any, w: Any, a: Any, a_scales: Any, b: Any, b_scales: Any) -> Any:
        return ca.int8_gemm(*ca.act_quant(x), b, b_scales)

    if tiles is not None:
        return {OWN: product(None if tiles in PORTABLE_TILES else "sm_90a")}
    found = {OWN: product(None), LAYER: layer}
    return found | ({PORTABLE: product("sm_90")} if on_device and _is_hopper() else {})


def ways_of_the_last_wave(size: Size) -> dict[str, Callable[..., Any]]:
    """Return a product as it is taken and with no tile shared, as `ways` does; none if it is so."""
    tiles = choose_tiles(size.m, size.n, size.k, HOPPER_TILES)
    if tiles.tail_splits == 1:
        return {}
    alone = ways(replace(tiles, tail_splits=1), on_device=True)
    return ways(tiles, on_device=True) | {ALONE: alone[OWN]}


def _is_hopper() -> bool:
    import cupy

    return int(cupy.cuda.Device().compute_capability) == HOPPER_CAPABILITY


def others(size: Size) -> dict[str, Callable[..., Any]]:
    """Return torch's ways, on tensors of the same memory; nothing where torch is missing."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    found: dict[str, Callable[..., Any]] = {
        FP16: lambda x, w, a, a_scales, b, b_scales: torch.matmul(x, w.t())
    }
    if size.m > 16 and size.n % 8 == 0 and size.k % 8 == 0:  # limits of torch._int_mm
        found[INT_MM] = lambda x, w, a, a_scales, b, b_scales: torch._int_mm(a, b.t())
    return found


def measure(
    size: Size,
    args: argparse.Namespace,
    own: Mapping[str, Callable[..., Any]],
    tiles: GemmTiles | None = None,
) -> dict[str, Any]:
    """Judge our products of a size, then time them and, unless `tiles` are given, the others."""
    on_device = not args.quick
    xp: Any = np
    if on_device:
        import cupy as xp
    x, w = draw(size, args.seed, xp)
    operands = (*ca.act_quant(x), *ca.weight_quant(w))
    row: dict[str, Any] = asdict(size) | {"shares": {}, "ok": True}
    if tiles is not None:
        row["tiles"] = asdict(tiles)
    for name, way in own.items():
        row["shares"][name] = judge(size, way(x, w, *operands), operands, args.seed)
    row["ok"] = all(share <= 1 for share in row["shares"].values())
    if not on_device:
        return row
    # NOTE: codes alone must exceed the cache, or half as many bytes would stay where all do not.
    codes = timing.rotated(operands)
    sets = [(x.copy(), w.copy(), *some) for some in codes]
    calls = {name: rotating(way, sets) for name, way in own.items() if row["shares"][name] <= 1}
    if tiles is None and (peers := others(size)):
        import torch

        tensors = [tuple(torch.from_dlpack(array) for array in some) for some in sets]
        calls |= {name: rotating(way, tensors) for name, way in peers.items()}
    samples = timing.time_interleaved(calls, rounds=args.rounds)
    operations = 2 * size.m * size.n * size.k
    row["seconds"] = {name: timing.median(found).median for name, found in samples.items()}
    row["tops"] = {name: operations / s / 1e12 for name, s in row["seconds"].items()}
    row["ratios"] = {
        f"{mine} over {other}": _ratio(samples, mine, other)
        for other in (INT_MM, FP16, ALONE) if other in samples
        for mine in own if mine in samples
    }  # fmt: skip
    return row | {"samples": samples, "clocks": device.clocks()}


def measure_pass(name: str, shape: tuple[int, int], args: argparse.Namespace) -> dict[str, Any]:
    """Compare a pass over a matrix with NumPy's bits, then with a copy of that matrix.

    The first 1024 rows are compared: whole blocks of a weight.
    """
    host, _ = draw(Size("", shape[0], 1, shape[1]), args.seed, np)
    row: dict[str, Any] = {"pass": name, "rows": shape[0], "columns": shape[1]}
    function = PASSES[name]
    expected = function(*prepared(name, host[: min(PASS_ROWS, shape[0] // 2)]))
    if args.quick:
        found = function(*prepared(name, host))
        return row | {"ok": _equal(found, expected)}
    import cupy

    x = cupy.asarray(host)
    operands = prepared(name, x)
    found = function(*operands)
    row["ok"] = _equal(found, expected)
    if not row["ok"]:
        return row
    # NOTE: codes alone must exceed the cache, as above.
    sets = [(x.copy(), x.copy(), some) for some in timing.rotated(operands)]
    calls = {
        name: rotating(lambda x, y, some: function(*some), sets),
        "copy": rotating(lambda x, y, some: cupy.copyto(y, x), sets),
    }
    samples = timing.time_interleaved(calls, rounds=args.rounds)
    moved = sum(array.nbytes for array in (*operands, *found))
    ratio = _ratio(samples, name, "copy")
    row["seconds"] = {way: timing.median(times).median for way, times in samples.items()}
    row["share of copy"] = [moved / (2 * x.nbytes) * r for r in ratio]
    return row | {"samples": samples, "clocks": device.clocks()}


def prepared(name: str, x: Any) -> tuple[Any, ...]:
    """Return what a pass reads: the matrix, or its codes and scales."""
    return ca.weight_quant(x) if name == "weight_dequant" else (x,)


def _equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether arrays begin with the same bytes, as far as the expected ones go."""
    return all(
        on_host(mine[: len(theirs)]).tobytes() == theirs.tobytes()
        for mine, theirs in zip(found, expected, strict=True)
    )


def _ratio(samples: Mapping[str, Sequence[float]], mine: str, other: str) -> list[float]:
    return timing.paired_ratio(samples[other], samples[mine]).to_list()


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the products."""
    header = ["", "m x n x k", "bound", f"{OWN}, TOP/s", INT_MM, FP16, f"x {INT_MM}", f"x {FP16}",
              "with act_quant"]  # fmt: skip
    lines = []
    for r in rows:
        tops, ratios = r.get("tops", {}), r.get("ratios", {})
        name = r["label"]
        if "tiles" in r:
            name += " {block_m}x{block_n} w{num_warps} s{num_stages}".format(**r["tiles"])
            name += " last wave shared" if r["tiles"]["tail_splits"] > 1 else ""
        lines.append([
            name, f"{r['m']} x {r['n']} x {r['k']}", f"{max(r['shares'].values()):.3f}",
            *(f"{tops[way]:.4g}" if way in tops else "-" for way in (OWN, INT_MM, FP16)),
            *(format_comparison(ratios.get(f"{OWN} over {other}")) for other in (INT_MM, FP16)),
            format_comparison(ratios.get(f"{LAYER} over {FP16}")),
        ])  # fmt: skip
    return header, lines


def table_of_the_last_wave(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of products with and without tiles that are shared."""
    header = ["last wave", "m x n x k", "TOP/s", "and no tile shared", "x that"]
    header += [f"{way} x {other}" for other in (FP16, INT_MM) for way in ("shared", "not")]
    lines = []
    for r in rows:
        ratios = r.get("ratios", {})
        lines.append([
            r["label"], f"{r['m']} x {r['n']} x {r['k']}",
            *(f"{r['tops'][way]:.4g}" for way in (OWN, ALONE)),
            format_comparison(ratios.get(f"{OWN} over {ALONE}")),
            *(format_comparison(ratios.get(f"{way} over {other}"))
              for other in (FP16, INT_MM) for way in (OWN, ALONE)),
        ])  # fmt: skip
    return header, lines


def chosen_sizes(args: argparse.Namespace) -> tuple[Size, ...]:
    """Return the products whose label begins as the arguments say, or all."""
    sizes = QUICK_SIZES if args.quick else SIZES
    found = tuple(x for x in sizes if args.only is None or x.label.startswith(args.only))
    if not found:
        labels = ", ".join(repr(label) for label in dict.fromkeys(x.label for x in sizes))
        raise ValueError(f"--only must be how one of these begins: {labels}, got {args.only!r}")
    return found


def run_last_wave(args: argparse.Namespace) -> int:
    """Measure the products whose last wave is shared, print the table, write the record."""
    rows = []
    for size in chosen_sizes(args):
        own = ways_of_the_last_wave(size)
        if not own:
            print(f"{size.label} {size.m} x {size.n} x {size.k}: no tile is shared")
            continue
        rows.append(measure(size, args, own))
    timed = [row for row in rows if "ratios" in row and row["ok"]]
    if timed:
        output.print_table(*table_of_the_last_wave(timed))
    _keep(args, "gemm_tails", {"rows": rows})
    return 0 if all(r["ok"] for r in rows) else 1


def _keep(args: argparse.Namespace, name: str, content: Mapping[str, Any]) -> None:
    """Write the record; that of some products alone only where the arguments name a file."""
    if args.only is None or args.json is not None:
        recording.keep(args, name, "mirror" if args.quick else "cuda", content)


def run(args: argparse.Namespace) -> int:
    """Measure every product and pass over matrices, print the tables, write the record."""
    recording.check_rounds(args)
    if args.tails:
        if args.quick or not _is_hopper():
            raise ValueError("--tails needs a device of compute capability 9.0, and times on it")
        return run_last_wave(args)
    choices: tuple[GemmTiles | None, ...] = (None,)
    if args.tiles and not args.quick:
        choices = (None, *(RACED_TILES if _is_hopper() else PORTABLE_TILES))
    rows = []
    for size in () if args.passes else chosen_sizes(args):
        for tiles in choices:
            own = ways(tiles, on_device=not args.quick)
            rows.append(measure(size, args, own, tiles))
            output.print_table(*table(rows[-1:]))
    if rows:
        output.print_table(*table(rows))
    if args.only is not None:
        _keep(args, "gemm", {"rows": rows})
        return 0 if all(r["ok"] for r in rows) else 1
    passes = [
        measure_pass("act_quant", s, args)
        for s in (QUICK_ACTIVATIONS if args.quick else ACTIVATIONS)
    ]
    passes += [
        measure_pass(name, s, args)
        for name in ("weight_quant", "weight_dequant")
        for s in (QUICK_WEIGHTS if args.quick else WEIGHTS)
    ]
    output.print_table(
        ["pass", "matrix", "bits", "share of the bandwidth of a copy"],
        [
            [r["pass"], f"{r['rows']} x {r['columns']}", "equal" if r["ok"] else "DIFFER",
             format_comparison(r.get("share of copy"))]
            for r in passes
        ],
    )  # fmt: skip
    _keep(args, "gemm_passes" if args.passes else "gemm", {"rows": rows, "passes": passes})
    return 0 if all(r["ok"] for r in (*rows, *passes)) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tiles", action="store_true", help="time every tile beside the chosen")
    what.add_argument("--tails", action="store_true", help="time a last wave not shared, too")
    what.add_argument("--passes", action="store_true", help="the passes over matrices alone")
    parser.add_argument("--only", metavar="LABEL", help="products whose label begins so, alone")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
