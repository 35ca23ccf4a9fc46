"""Which tiles are fastest for a rung, per head_dim?

Varies       block_q, block_kv, warps, stages; head_dim in {64, 128, 256}
Holds fixed  the rung; batch 4, 16 heads, length 4096, float16, N(0, 1)
Measures     J2, relative error; registers, spills, shared memory; time, TFLOP/s, ratio to the
             rung's own tiles
Expect       the tiles of cupyattn/kernels/ladder.py at the top; a tile that spills, lower
Run          python -m experiments.tuning.tile_sweep fa_tc [--quick] [--head-dims 64 128]
             [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cupyattn as ca
from cupyattn.cli import output
from cupyattn.compiler import devices
from cupyattn.kernels import ladder
from cupyattn.ops.attention import resolved
from cupyattn.ops.explain import plans
from experiments._harness import recording
from experiments._harness.cells import Cell, Problem, reason, resources, rung

AXES = {
    "block_q": (16, 32, 64, 128),
    "block_kv": (16, 32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3),
}
QUICK_AXES = {"block_q": (64, 128), "block_kv": (32,), "num_warps": (4,), "num_stages": (2,)}


def candidates(variant: ladder.Variant, *, quick: bool) -> list[ca.Tiles]:
    """Return the tiles to try; rungs without a pipeline ignore the number of stages."""
    axes = dict(QUICK_AXES if quick else AXES)
    if variant.family in ("unfused", "float32"):
        axes["num_stages"] = (1,)
    return [ca.Tiles(*sizes) for sizes in itertools.product(*axes.values())]


def compiled(problem: Problem, cell: Cell, arch: str) -> Cell | str:
    """Return the cell with the compiler's figures, or why these tiles do not compile."""
    small = replace(problem, batch=1, heads=1, length=128)
    q, k, v = small.draw(on_device=False)
    options = {"variant": cell.variant, "causal": problem.causal, "tiles": cell.tiles}
    try:
        launch = plans(resolved(q, k, v, **options))[-1].launches[-1]
        facts = resources(launch, arch)
    except (ca.KernelCompileError, ValueError) as error:
        return reason(error)
    return replace(cell, facts={**cell.facts, **facts})


def cells(
    args: argparse.Namespace, problem: Problem, arch: str
) -> tuple[list[Cell], dict[str, str]]:
    """Return the rung with its own tiles, then every candidate that compiles; and the others."""
    variant = ladder.lookup(args.variant)
    own = variant.default_tiles(problem.head_dim)
    tried = [rung(variant.name, problem, tiles=t) for t in candidates(variant, quick=args.quick)]
    tried = [cell for cell in tried if cell.tiles != own]
    found: list[Cell] = []
    rejected: dict[str, str] = {}
    what = f"compiling, hd{problem.head_dim}"
    with ThreadPoolExecutor(args.threads) as pool, output.progress(what, len(tried)) as advance:
        for cell, result in zip(
            tried, pool.map(lambda c: compiled(problem, c, arch), tried), strict=True
        ):
            advance(cell.name)
            if isinstance(result, str):
                rejected[cell.name] = result
            else:
                found.append(result)
    first = compiled(problem, rung(variant.name, problem, tiles=own), arch)
    if isinstance(first, str):
        raise ValueError(f"{variant.name} does not compile with its own tiles: {first}")
    return [replace(first, name="own tiles", tiles=own), *found], rejected


def run(args: argparse.Namespace) -> int:
    """Run the experiment and say which tiles won."""
    ladder.lookup(args.variant)
    arch = args.arch or _architecture(args.quick)
    batch, heads = (1, 1) if args.quick else (4, 16)
    length = recording.quick_length(args, 4096)
    grid, rejected = [], {}
    for head_dim in args.head_dims:
        problem = Problem(batch, heads, length, head_dim, args.causal, seed=args.seed)
        some, others = cells(args, problem, arch)
        rejected[problem.name] = others
        grid.append((problem, some))
        print(f"hd{head_dim}: {len(some)} tiles compile for {arch}, {len(others)} do not")
    if args.json is None and not args.quick:
        args.json = recording.RESULTS / f"tile_sweep_{args.variant}.json"
    record = recording.run_grid(
        args, "tile_sweep", grid, baseline="own tiles", extra={"arch": arch, "rejected": rejected}
    )
    for found in record["problems"]:
        print(f"{found['problem']['name']}: {_winner(found['rows'])}")
    return 0 if recording.passed(record) else 1


def _architecture(quick: bool) -> str:
    if quick:
        return "sm_90"
    import cupy

    return devices.device_architecture(int(cupy.cuda.Device().compute_capability))


def _winner(rows: Sequence[dict[str, Any]]) -> str:
    timed = [row for row in rows if "seconds" in row]
    if not timed:
        return f"{len(rows)} tiles hold their bound; nothing was timed"
    best = min(timed, key=lambda row: float(row["seconds"]))
    return f"fastest: {best['variant']}, {best['tflops']:.4g} TFLOP/s"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("variant", metavar="VARIANT", help=f"one of {', '.join(ca.VARIANTS)}")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256], metavar="N")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--arch", help="to compile for (default: the device's; sm_90 with --quick)")
    parser.add_argument("--threads", type=int, default=4, help="compilations at a time")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
