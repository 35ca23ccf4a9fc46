"""How near does fa_tc come to the speed of memory when a few queries meet many keys?

Varies       (batch, key heads, len_kv) from one long sequence to many; query heads for each key
             head and len_q: 8 x 1, 8 x 4, 8 x 16 and 1 x 16 rows; head_dim in {64, 128}. With
             --tiles, where there are more than 16 rows, also the tiles of the split form
Holds fixed  float16, N(0, 1), causal
Measures     J2 of some rows; bytes of K and V per second of a prepared call; the unit is the
             bandwidth of a copy of K and V in the same rounds
Beside       the portable form of fa_tc, asked for by its tiles, up to 128 MB of K and V
Run          python -m experiments.speed.decode [--quick] [--tiles] [--json FILE]

Every way runs as a CUDA graph of at least 8 calls, on inputs that rotate through more than the L2
cache. Two launches from Python take longer than the shortest of these calls (`host_time.py` has the
host's share). The copy moves K, then V, from contiguous memory to contiguous memory. It is timed
outside of a graph, too, where copies may take another way through the device. The others are shares
of the faster of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import distributions
from cupyattn.cli import output
from cupyattn.kernels import splits
from cupyattn.kernels.forms import FormTiles
from cupyattn.measure import device, rungs, timing
from cupyattn.testing import verdict
from experiments._harness import recording
from experiments._harness.cells import describe_tiles, rotating

#: Batch, key heads, len_kv: from 16 MB of K and V at head_dim 64 to 1 GB at 128.
SHAPES = ((1, 8, 8192), (1, 8, 65_536), (16, 8, 8192), (64, 8, 4096), (8, 1, 32_768))
QUICK_SHAPES = ((1, 1, 520),)
#: Query heads for each key head, and len_q.
ROWS = ((8, 1), (8, 4), (8, 16), (1, 16))
HEAD_DIMS = (64, 128)
#: The portable form takes ten times as long and more, so it is left out above.
PORTABLE_BYTES = 2**27
#: Query rows of all heads that are judged, about; one of each head at least, the last.
JUDGED_ROWS = 2**11
#: Calls of one graph, at least.
GRAPH_CALLS = 8
COPY, PLAIN_COPY = "copy of K and V", "copy of K and V, no graph"
TAKEN, PORTABLE = "fa_tc", "fa_tc, portable"
#: Tiles of the split form beside the tiles of cupyattn/kernels/ladder.py: other steps, more stages.
CANDIDATES = {
    64: (ca.Tiles(64, 64, 4, 3), ca.Tiles(128, 32, 4, 8)),
    128: (ca.Tiles(64, 16, 4, 6), ca.Tiles(128, 16, 4, 12), ca.Tiles(128, 32, 4, 4)),
}


def candidates(head_dim: int, rows: int) -> list[ca.Tiles]:
    """Return tiles to compare: none with twice the rows that there are, or more."""
    split = ca.VARIANTS["fa_tc"].forms["split"].tiles
    own = split.default[head_dim], *split.more_rows[head_dim]
    return [tiles for tiles in (*own, *CANDIDATES[head_dim]) if tiles.block_q < 2 * rows]


@contextlib.contextmanager
def split_tiles(tiles: ca.Tiles) -> Iterator[None]:
    """Let fa_tc have these tiles, and no others, for its split form."""
    variant = ca.VARIANTS["fa_tc"]
    form = variant.forms["split"]
    only = replace(form, tiles=FormTiles({form.tiles.largest_head_dim: tiles}))
    ca.VARIANTS["fa_tc"] = replace(variant, forms={**variant.forms, "split": only})
    try:
        yield
    finally:
        ca.VARIANTS["fa_tc"] = variant


def draw(sizes: Sequence[int], seed: int, *, on_device: bool) -> tuple[Any, ...]:
    """Return Q, K and V."""
    batch, heads, heads_kv, len_q, len_kv, head_dim = sizes
    if not on_device:
        return distributions.make(
            "normal", batch, heads, len_q, len_kv, head_dim, "float16", seed, heads_kv
        )
    import cupy

    rng = cupy.random.default_rng(seed)
    return tuple(
        rng.standard_normal(shape, dtype=np.float32).astype(np.float16)
        for shape in (
            (batch, heads, len_q, head_dim), *((batch, heads_kv, len_kv, head_dim),) * 2,
        )
    )  # fmt: skip


def prepared(
    inputs: tuple[Any, ...], exact: rungs.Exact, **options: Any
) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Plan a call, run it and check its bound; return its facts and the call."""
    q, k, v = inputs
    o = q.copy()
    call = ca.plan(q, k, v, variant="fa_tc", causal=True, out=o, **options)
    call(q, k, v, out=o)
    batch, heads, len_q, _ = q.shape
    count = max(1, min(len_q, JUDGED_ROWS // (batch * heads)))
    rows = np.unique(np.linspace(len_q - 1, 0, count).astype(np.int64))
    plan = call.plans[-1]
    report = verdict.judge(
        o, q, k, v, variant="fa_tc", causal=True, form=plan.form, tiles=plan.tiles, rows=rows,
        exact=exact,
    )  # fmt: skip
    facts = {
        "form": plan.form, "tiles": describe_tiles(plan.tiles), "note": plan.note,
        "j2": report.ratio, "ok": report.passed,
    }  # fmt: skip
    return facts, lambda q, k, v: call(q, k, v, out=o)


def copies(k: Any, v: Any) -> Callable[..., Any]:
    """Return what copies K and V, once each, as contiguous bytes."""
    pairs = [(x.copy().data, x.nbytes) for x in (k, v)]

    def copy(_: Any, *operands: Any) -> None:
        for (target, count), source in zip(pairs, operands, strict=True):
            target.copy_from_device_async(source.data, count)

    return copy


def measured(
    problem: Mapping[str, int], rounds: int, seed: int, *, on_device: bool, raced: bool
) -> dict[str, Any]:
    """Judge one problem, and on a device time it."""
    batch, heads_kv, group, len_q, len_kv, head_dim = problem.values()
    sizes = batch, heads_kv * group, heads_kv, len_q, len_kv, head_dim
    inputs = draw(sizes, seed, on_device=on_device)
    _, k, v = inputs
    kv_bytes, exact = int(k.nbytes + v.nbytes), rungs.remembered()
    ways = {TAKEN: prepared(inputs, exact)}
    rows = splits.shared_rows(*sizes[1:4])
    for tiles in candidates(head_dim, rows) if raced and rows > 16 else ():
        name = describe_tiles(tiles)
        with contextlib.suppress(ca.KernelCompileError), split_tiles(tiles):
            if name != ways[TAKEN][0]["tiles"]:
                ways[name] = prepared(inputs, exact, arch="sm_90")  # not the Hopper form
    if kv_bytes < PORTABLE_BYTES:
        portable = ca.VARIANTS["fa_tc"].default_tiles(head_dim)
        ways[PORTABLE] = prepared(inputs, exact, tiles=portable)
    found = {name: facts for name, (facts, _) in ways.items()}
    row = {**problem, "rows": rows, "kv_bytes": kv_bytes, "ways": found}
    if on_device:
        calls = {name: call for name, (facts, call) in ways.items() if facts["ok"]}
        row |= timed({COPY: copies(k, v), **calls}, inputs, rounds)
    return row


def timed(
    calls: Mapping[str, Callable[..., Any]], inputs: tuple[Any, ...], rounds: int
) -> dict[str, Any]:
    """Time the ways in turns; each as a share of the faster copy."""
    import cupy

    sets = timing.rotated(inputs)
    count = len(sets) * math.ceil(GRAPH_CALLS / len(sets))
    calls = {name: rotating(call, sets) for name, call in calls.items()}
    cupy.cuda.Device().synchronize()  # what the inputs wait for is not on the stream below
    with cupy.cuda.Stream(non_blocking=True):
        graphs = {name: timing.captured(call, count) for name, call in calls.items()}
        samples = timing.time_interleaved({**graphs, PLAIN_COPY: calls[COPY]}, rounds=rounds)
    for name in graphs:
        samples[name] = [seconds / count for seconds in samples[name]]
    seconds = {name: timing.median(x).median for name, x in samples.items()}
    cupy.get_default_memory_pool().free_all_blocks()  # each stream has a separate pool
    copy = min((COPY, PLAIN_COPY), key=lambda name: seconds[name])
    # A copy moves every byte twice, attention once.
    shares = {
        name: [x / 2 for x in timing.paired_ratio(samples[copy], samples[name]).to_list()]
        for name in calls
        if name != COPY
    }
    return {
        "copy": copy, "share of copy": shares, "seconds": seconds, "samples": samples,
        "clocks": device.clocks(),
    }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure every problem, print the table, write the record."""
    found = []
    for shape, (group, len_q), head_dim in itertools.product(
        QUICK_SHAPES if args.quick else SHAPES, ROWS, HEAD_DIMS
    ):
        batch, heads_kv, len_kv = shape
        problem = {
            "batch": batch, "heads_kv": heads_kv, "group": group, "len_q": len_q,
            "len_kv": len_kv, "head_dim": head_dim,
        }  # fmt: skip
        found.append(
            measured(problem, args.rounds, args.seed, on_device=not args.quick, raced=args.tiles)
        )
    titles = [*problem, "form", "tiles", "J2", "time, us", "of a copy", PORTABLE, "other tiles"]
    output.print_table(titles, [_line(row, len(problem)) for row in found])
    recording.keep(args, "decode", "mirror" if args.quick else "cuda", {"problems": found})
    return 0 if all(facts["ok"] for row in found for facts in row["ways"].values()) else 1


def _line(row: Mapping[str, Any], sizes: int) -> list[str]:
    """Return the line of one problem: shares of the speed of a copy, and the time of fa_tc."""
    ways, seconds = row["ways"], row.get("seconds", {})

    def share(name: str) -> str:
        return f"{row['share of copy'][name][0]:.3f}" if name in seconds else "-"

    others = [name for name in ways if name not in (TAKEN, PORTABLE)]
    return [
        *map(str, [*row.values()][:sizes]), ways[TAKEN]["form"], ways[TAKEN]["tiles"],
        f"{max(facts['j2'] for facts in ways.values()):.3f}",
        f"{1e6 * seconds[TAKEN]:.1f}" if TAKEN in seconds else "-", share(TAKEN), share(PORTABLE),
        ", ".join(f"{name} {share(name)}" for name in others),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--tiles", action="store_true", help="compare tiles of the split form, too")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
