"""How near does fa_tc come to the speed of memory when a few queries meet many keys?

Varies       (batch, key heads, len_kv) from one long sequence to many; len_q in {1, 4}; head_dim
             in {64, 128}
Holds fixed  8 query heads for each key head, float16, N(0, 1), causal
Measures     J2; bytes of K and V per second of a prepared call, as a share of the bytes that a copy
             of K and V reads and writes per second in the same rounds
Beside       the portable form of fa_tc, asked for by its tiles
Run          python -m experiments.decode [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cupyattn as ca
from cupyattn import device, distributions, testing, timing
from cupyattn.cli import output
from experiments import common

#: Batch, key heads, len_kv: from 32 MB of K and V at head_dim 128 to 1 GB.
SHAPES = ((1, 8, 8192), (1, 8, 65_536), (16, 8, 8192), (64, 8, 4096), (8, 1, 32_768))
LENGTHS_Q, HEAD_DIMS, GROUP = (1, 4), (64, 128), 8
COPY, SPLIT, PORTABLE = "copy of K and V", "fa_tc", "fa_tc, portable"


def ways(q: Any, k: Any, v: Any) -> dict[str, Callable[..., Any]]:
    """Return the calls that are compared; each takes q, k and v."""
    tiles = ca.VARIANTS["fa_tc"].default_tiles(q.shape[3])
    split = ca.plan(q, k, v, variant="fa_tc", causal=True)
    portable = ca.plan(q, k, v, variant="fa_tc", causal=True, tiles=tiles)
    k_copy, v_copy = k.copy(), v.copy()

    def copy(_: Any, k: Any, v: Any) -> None:
        k_copy[...] = k
        v_copy[...] = v

    return {COPY: copy, SPLIT: split, PORTABLE: portable}


def measure(shape: tuple[int, ...], rounds: int, seed: int, *, on_device: bool) -> dict[str, Any]:
    """Judge one problem, and on a device time it."""
    batch, heads_kv, len_q, len_kv, head_dim = shape
    inputs: tuple[Any, ...] = distributions.make(
        "normal", batch, GROUP * heads_kv, len_q, len_kv, head_dim, "float16", seed, heads_kv
    )
    if on_device:
        import cupy

        inputs = tuple(cupy.asarray(x) for x in inputs)
    found = ways(*inputs)
    row: dict[str, Any] = {
        "batch": batch, "heads_kv": heads_kv, "len_q": len_q, "len_kv": len_kv,
        "head_dim": head_dim, "kv_bytes": int(inputs[1].nbytes + inputs[2].nbytes),
        "form": found[SPLIT].plans[-1].form,
    }  # fmt: skip
    report = testing.judge(found[SPLIT](*inputs), *inputs, variant="fa_tc", causal=True)
    row |= {"j2": report.ratio, "ok": report.passed and row["form"] == "split"}
    if not on_device or not row["ok"]:
        return row
    sets = timing.rotated(inputs)
    calls = {name: common.rotating(way, sets) for name, way in found.items()}
    samples = timing.time_interleaved(calls, rounds=rounds)
    # A copy moves every byte twice, attention once.
    for name in (SPLIT, PORTABLE):
        ratio = timing.paired_ratio(samples[COPY], samples[name])
        row[f"share of copy, {name}"] = [x / 2 for x in ratio.to_list()]
    row["seconds"] = {name: timing.median(x).median for name, x in samples.items()}
    return row | {"samples": samples, "clocks": device.clocks()}


def run(args: argparse.Namespace) -> int:
    """Measure every problem, print the table, write the record."""
    shapes = ((1, 1, 600), (2, 2, 520)) if args.quick else SHAPES
    rows = []
    for (batch, heads_kv, len_kv), len_q, head_dim in itertools.product(
        shapes, LENGTHS_Q, HEAD_DIMS
    ):
        problem = batch, heads_kv, len_q, len_kv, head_dim
        rows.append(measure(problem, args.rounds, args.seed, on_device=not args.quick))
    titles = ["batch", "heads_kv", "len_q", "len_kv", "head_dim"]
    shares = [f"share of copy, {name}" for name in (SPLIT, PORTABLE)]
    output.print_table(
        [*titles, "J2", "time, us", *shares],
        [[*(str(r[t]) for t in titles), f"{r['j2']:.3f}", *_times(r, shares)] for r in rows],
    )
    common.keep(args, "decode", "mirror" if args.quick else "cuda", {"rows": rows})
    return 0 if all(row["ok"] for row in rows) else 1


def _times(row: dict[str, Any], shares: Sequence[str]) -> list[str]:
    if "seconds" not in row:
        return ["-"] * (1 + len(shares))
    return [f"{1e6 * row['seconds'][SPLIT]:.1f}", *(f"{row[name][0]:.0%}" for name in shares)]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return common.main(run, common.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
