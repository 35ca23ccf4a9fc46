"""How near do several devices come to as many times the speed of one, and is that what paper says?

Varies       devices; Ulysses, ring, both mixed, codes round a ring, batch entries or heads shared;
             strong scaling by length, causal or not; weak scaling with batch entries
Holds fixed  32 heads (weak: 16) of head_dim 128, float16; zigzag rows where causal
Measures     error against its bound, on rows of their own; seconds of the slowest rank; bytes that
             a rank sends; bytes of its memory pool; all but the first beside the model's
Run          python -m experiments.speed.scaling [--quick] [--devices 1 2 4] [--lengths N N]
             [--heads N] [--transport auto|nccl|copies ...] [--memory] [--json FILE] [--plot FILE]
             [--update-docs] [--stored]

``--memory`` runs a million rows once on the most devices, for the bytes of the pool alone.
``--update-docs`` writes what was measured into docs/DISTRIBUTED.md, ``--stored`` does so from the
record.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import distributed, distributions
from cupyattn.arrays.interchange import on_host
from cupyattn.cli import output, plot
from cupyattn.distributed import Group, Mesh, Partition, Shared
from cupyattn.distributed.model import H200, H200_NCCL, Costs, fastest, predict
from cupyattn.distributed.start import TRANSPORTS, by_copies
from cupyattn.errors import UnsupportedError
from cupyattn.measure import device, timing
from cupyattn.measure.words import format_bytes, format_ratio, format_seconds, format_share
from cupyattn.problem.checks import AttentionSpec
from experiments._harness import recording

#: Lengths of strong scaling; the first alone in a quick run.
LENGTHS = (32768, 131072, 1048576)
#: Length past which only the largest number of devices is measured: one device would take minutes.
ALONE = 2**18
HEADS, HEAD_DIM, WEAK_HEADS, WEAK_LENGTH = 32, 128, 16, 4096
#: Size of the judged cell: rows per rank, and heads that ranks do not divide.
JUDGED_ROWS, JUDGED_HEADS = 96, (6, 2)
#: Devices that the model is asked for.
PREDICTED = (8, 64, 512)
#: Codes without smoothing, because smoothed codes depend on the order in which a device sums a
#: mean.
UNSMOOTHED = ca.QuantConfig(smooth_k=False)
#: Rows of the check of memory.
MANY = 2**20
#: The page that says what was measured, and the marks it stands between.
PAGE = recording.ROOT / "docs" / "DISTRIBUTED.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEADER = ["problem", "way", "devices", "transport", "J2", "time", "scaling", "on paper", "sent",
          "memory pool", "memory on paper"]  # fmt: skip
#: Calls before the first that is timed.
WARM = 2


@dataclass(frozen=True)
class Way:
    """One way to compute on several devices.

    Parameters
    ----------
    name : str
        Row of the table.
    variant : str
    ulysses : int
        Ranks that exchange heads: 0 all, 1 none (a ring).
    axis : str
        What is shared where nothing is exchanged: "batch" or "heads"; "" where something is.
    """

    name: str
    variant: str = "fa_tc"
    ulysses: int = 0
    axis: str = ""

    def mesh(self, ranks: int) -> Mesh:
        """Return the mesh of so many ranks."""
        return Mesh(ranks, min(self.ulysses or ranks, ranks))

    def fits(self, ranks: int) -> bool:
        """Whether this number of ranks makes it differ from the other ways."""
        return ranks == 1 or self.ulysses in (0, 1) or (
            ranks % self.ulysses == 0 and ranks > self.ulysses
        )  # fmt: skip


STRONG = (
    Way("ulysses"), Way("ring", ulysses=1), Way("mixed", ulysses=2),
    Way("ring of codes", "fa_int8", 1), Way("heads", axis="heads"),
)  # fmt: skip
WEAK = (Way("batch", axis="batch"),)


@dataclass(frozen=True)
class Problem:
    """Sizes of one call on all devices."""

    batch: int
    heads: int
    length: int
    causal: bool
    heads_kv: int = 0
    head_dim: int = HEAD_DIM

    @property
    def name(self) -> str:
        """One line that tells it from the others."""
        return f"B{self.batch} H{self.heads} {self.length}{' causal' if self.causal else ''}"

    @property
    def call(self) -> AttentionSpec:
        """Its sizes as the model takes them."""
        heads_kv = self.heads_kv or self.heads
        sizes = self.batch, self.heads, heads_kv, self.length, self.length, self.head_dim
        return AttentionSpec(*sizes, "float16", self.head_dim**-0.5, causal=self.causal)

    def partition(self, ranks: int) -> Partition:
        """Partition of rows among ranks."""
        share = Partition.zigzag if self.causal else Partition.contiguous
        return share(self.length, ranks)

    def draw(self, seed: int) -> tuple[Any, ...]:
        """Return q, k and v of all ranks, NumPy."""
        call = self.call
        made: tuple[Any, ...] = distributions.make(
            "normal",
            call.batch,
            call.heads,
            call.len_q,
            call.len_kv,
            call.head_dim,
            "float16",
            seed,
        )
        q, k, v = made
        return q, k[:, : call.heads_kv].copy(), v[:, : call.heads_kv].copy()


def call_of(way: Way, problem: Problem, group: Group) -> Callable[..., Any]:
    """Return what one rank calls with its own q, k and v."""
    options: dict[str, Any] = {"variant": way.variant, "causal": problem.causal}
    if way.variant == "fa_int8":
        options["quant"] = UNSMOOTHED
    if way.axis or group.size == 1:
        return lambda q, k, v: ca.attention(q, k, v, **options)
    mesh = way.mesh(group.size)
    how: dict[str, Any] = {"method": "ulysses" if mesh.ring == 1 else "ring"}
    if mesh.ring > 1 and mesh.ulysses > 1:
        how = {"method": "mixed", "ulysses": mesh.ulysses}
    rows = problem.partition(group.size)
    return lambda q, k, v: distributed.parallel_attention(
        q, k, v, group, partition=rows, **how, **options
    )


def judge(way: Way, causal: bool, ranks: int | Sequence[int], transport: str, seed: int) -> float:
    """Return J2 of a way: on few rows in heads that do not divide, all of them looked at."""
    size = ranks if isinstance(ranks, int) else len(ranks)
    heads, heads_kv = JUDGED_HEADS
    problem = Problem(1, heads, JUDGED_ROWS * size, causal, heads_kv, 64)
    if way.axis:
        problem = replace(problem, batch=size, heads=2 * size, heads_kv=size, length=JUDGED_ROWS)
    operands, rows = problem.draw(seed), problem.partition(size)

    def on_rank(group: Group) -> Any:
        given = operands if isinstance(ranks, int) else tuple(map(on_device, operands))
        call = call_of(way, problem, group)
        if way.axis:
            o = call(*distributed.share(*given, group, way.axis))
            return on_host(distributed.gather(o, group, way.axis))
        return on_host(call(*(rows.take(x, group.rank) for x in given)))

    found = distributed.run(on_rank, ranks, transport=transport)
    options: dict[str, Any] = {"variant": way.variant, "causal": causal}
    if way.variant == "fa_int8":
        options["quant"] = UNSMOOTHED
    if not isinstance(ranks, int):
        options["form"] = "sm90" if is_hopper() else None
    mesh, o = way.mesh(size), found[0] if way.axis else rows.join(found)
    if way.axis:  # as one device would
        mesh, rows = Mesh(1, 1), Partition.contiguous(problem.length, 1)
    return distributed.judge(o, *operands, Shared(mesh, rows, rows), **options)


def measure(
    way: Way, problem: Problem, ranks: int | Sequence[int], transport: str, rounds: int, seed: int
) -> dict[str, Any]:
    """Return samples of seconds, bytes sent and bytes of memory, all of the rank with most."""
    size = ranks if isinstance(ranks, int) else len(ranks)
    rows = problem.partition(size)

    def on_rank(group: Group) -> Any:
        xp, wait, pool = platform(ranks)
        rng = xp.random.default_rng(seed + group.rank)

        def of(heads: int) -> Any:
            shape = problem.batch, heads, rows.lengths[group.rank], problem.head_dim
            if way.axis == "batch":
                shape = problem.batch // size, heads, problem.length, problem.head_dim
            elif way.axis == "heads":
                shape = problem.batch, heads // size, problem.length, problem.head_dim
            return rng.standard_normal(shape, dtype=np.float32).astype(np.float16)

        operands = of(problem.heads), of(problem.call.heads_kv), of(problem.call.heads_kv)
        call = call_of(way, problem, group)
        if pool is not None:
            pool.free_all_blocks()
        call(*operands)
        sent = group.bytes_sent
        held = 0 if pool is None else int(pool.total_bytes())
        samples = []
        for number in range(WARM + rounds if rounds else 0):
            group.barrier()
            wait()
            start = time.perf_counter()
            call(*operands)
            wait()
            slowest = max(group.gather("seconds", time.perf_counter() - start))
            samples += [slowest] if number >= WARM else []
        return samples, max(group.gather("sent", sent)), max(group.gather("held", held))

    samples, sent, held = distributed.run(on_rank, ranks, transport=transport)[0]
    return {"samples": samples, "bytes_sent": sent, "pool_bytes": held}


def platform(ranks: int | Sequence[int]) -> tuple[Any, Callable[[], Any], Any]:
    """Return the array library of the ranks, what waits for them, and their memory pool."""
    if isinstance(ranks, int):
        return np, lambda: None, None
    import cupy

    return cupy, cupy.cuda.Device().synchronize, cupy.get_default_memory_pool()


def on_device(x: Any) -> Any:
    """Return a copy on the current device."""
    import cupy

    return cupy.asarray(x)


def is_hopper() -> bool:
    """Whether the current device runs the Hopper forms."""
    import cupy

    return int(cupy.cuda.Device().compute_capability) == 90


def predicted(way: Way, problem: Problem, ranks: int, transport: str) -> Costs:
    """Return the model's costs of a cell."""
    if way.axis:  # a separate call for every rank
        part = {"batch": problem.batch, "heads": problem.heads}
        part[way.axis] //= ranks
        return predict(replace(problem, **part).call, Mesh(1, 1), variant=way.variant)
    machine = replace(H200_NCCL if transport == "nccl" else H200, per_host=max(ranks, 1))
    mesh = way.mesh(ranks)
    return predict(problem.call, mesh, machine, variant=way.variant, balanced=problem.causal)


def cells(args: argparse.Namespace, counts: Sequence[int]) -> list[tuple[Way, Problem, int]]:
    """Return the measurements: ways, problems, numbers of ranks."""
    if args.memory:
        problem = Problem(1, HEADS, recording.quick_length(args, MANY), True)
        if args.quick:
            problem = replace(problem, heads=4, head_dim=32)
        ways = (way for way in STRONG[:3] if way.fits(max(counts)))
        some = ((way, way.name == "ring") for way in ways)
        return [(way, replace(problem, causal=causal), max(counts)) for way, causal in some]
    lengths = LENGTHS[:1] if args.quick else args.lengths
    shrunk = [recording.quick_length(args, length) for length in lengths]
    heads = 4 if args.quick else args.heads
    head_dim = 32 if args.quick else HEAD_DIM
    found = []
    for length in shrunk:
        some = [n for n in counts if length <= ALONE or n == max(counts)]
        for causal in (True,) if args.quick else (False, True):
            problem = Problem(1, heads, length, causal, head_dim=head_dim)
            found += [
                (way, problem, n)
                for way in STRONG
                for n in some
                if way.fits(n) and not (way.axis == "heads" and heads % n)
            ]
    length = recording.quick_length(args, WEAK_LENGTH)
    weak_heads = 2 if args.quick else WEAK_HEADS
    found += [
        (way, Problem(n, weak_heads, length, False, head_dim=head_dim), n)
        for way in WEAK
        for n in counts
    ]
    return found


def run(args: argparse.Namespace) -> int:
    """Judge and time every cell, print the table, draw the plot and write the record."""
    counts = args.devices
    if args.plot:
        plot.check(args.plot)
    if not args.quick:
        if not args.memory:
            recording.check_rounds(args)
        check_devices(max(counts))
    rows = []
    judged: dict[Any, float] = {}
    for way, problem, n in cells(args, counts):
        ranks = n if args.quick else list(range(n))
        # One rank sends nothing, and is measured once.
        for transport in args.transport if n > 1 and not way.axis else args.transport[:1]:
            key = way, problem.causal, n, transport
            if key not in judged and not args.memory:
                judged[key] = judge(way, problem.causal, ranks, transport, args.seed)
            row = {**asdict(way), "problem": problem.name, **asdict(problem), "ranks": n}
            row["transport"] = carrier(transport, ranks) if n > 1 and not way.axis else ""
            row |= {"j2": judged.get(key), "ok": args.memory or judged[key] <= 1}
            if row["ok"]:
                rounds = 0 if args.quick or args.memory else args.rounds
                row |= measure(way, problem, ranks, transport, rounds, args.seed)
            costs = predicted(way, problem, n, row["transport"])
            row |= {"predicted": costs.seconds, "predicted_memory": costs.memory_bytes}
            row["predicted_bytes_sent"] = costs.heads_bytes + costs.ring_bytes
            rows.append(row)
    add_shares(rows)
    output.print_table(HEADER, [cells_of(row) for row in rows])
    ahead = [ahead_of(length, causal, n) for length in LENGTHS for causal in (False, True)
             for n in PREDICTED]  # fmt: skip
    print("\non paper, the fastest mesh (ulysses x ring) for 32 heads, zigzag where causal:")
    output.print_table(
        ["problem", "devices", "mesh", "time", "scaling"],
        [[a["problem"], str(a["ranks"]), f"{a['ulysses']} x {a['ring']}",
          format_seconds(a["seconds"]), format_share(a["share"])] for a in ahead],
    )  # fmt: skip
    record = recording.keep(
        args, "scaling_memory" if args.memory else "scaling", "mirror" if args.quick else "cuda",
        {"machine": asdict(H200), "transport": args.transport, "rows": rows, "ahead": ahead},
    )  # fmt: skip
    if args.update_docs:
        update_page(record)
    if args.plot:
        plot.save(figure(record), args.plot, source=recording.command_now(record))
    return 0 if all(row["ok"] for row in rows) else 1


def check_devices(wanted: int) -> None:
    """Raise UnsupportedError unless there are so many devices."""
    missing = device.device_missing()
    there = 0
    if not missing:
        import cupy

        there = int(cupy.cuda.runtime.getDeviceCount())
    if there < wanted:
        raise UnsupportedError(
            f"{wanted} devices are asked for, {there} are here{': ' + missing if missing else ''}: "
            "give fewer, as in --devices 1 2, or --quick"
        )


def add_shares(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row its share of as many times the speed of one device, measured and on paper."""
    for row in rows:
        weak = row["axis"] == "batch"
        same = [
            r for r in rows
            if r["ranks"] == 1 and r["variant"] == row["variant"]
            and (r["name"] == row["name"] if weak else r["problem"] == row["problem"])
        ]  # fmt: skip
        times = 1 if weak else row["ranks"]
        for seconds, share in (("samples", "share"), ("predicted", "predicted_share")):
            if same and same[0].get(seconds) and row.get(seconds):
                alone, own = (typical(r[seconds]) for r in (same[0], row))
                row[share] = alone / (times * own)


def typical(seconds: Any) -> float:
    """Return the median of samples; a number as it is."""
    return seconds if isinstance(seconds, float) else timing.median(seconds).median


def ahead_of(length: int, causal: bool, ranks: int) -> dict[str, Any]:
    """Return what the model says of many devices."""
    call = Problem(1, HEADS, length, causal).call
    alone, many = predict(call, Mesh(1, 1)), fastest(call, ranks, balanced=causal)
    return {
        "problem": Problem(1, HEADS, length, causal).name, "ranks": ranks,
        "ulysses": many.mesh.ulysses, "ring": many.mesh.ring, "seconds": many.seconds,
        "share": alone.seconds / (ranks * many.seconds), "memory": many.memory_bytes,
    }  # fmt: skip


def carrier(transport: str, ranks: int | Sequence[int]) -> str:
    """Return what carries arrays: the store of ranks without devices, NCCL, or copy engines."""
    if isinstance(ranks, int):
        return "store"
    return "copies" if by_copies(transport, ranks) else "nccl"


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return one row of the table."""
    seconds = row.get("samples")
    return [
        row["problem"], row["name"], str(row["ranks"]), row["transport"],
        "" if row["j2"] is None else format_ratio(row["j2"]),
        format_seconds(typical(seconds)) if seconds else "",
        format_share(row["share"]) if "share" in row else "",
        format_share(row["predicted_share"]) if "predicted_share" in row else "",
        format_bytes(row["bytes_sent"]) if "bytes_sent" in row else "",
        format_bytes(row["pool_bytes"]) if row.get("pool_bytes") else "",
        format_bytes(row["predicted_memory"]),
    ]  # fmt: skip


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/DISTRIBUTED.md says was measured."""
    environment = record["environment"]
    where = environment["device"] or {}
    known = {"transport": record["transport"]} if "transport" in record else {}  # one for all rows
    return "\n".join([
        f"`{recording.command_now(record)}`, on {where.get('name', 'no device')}, driver "
        f"{where.get('driver', 'none')}, NVRTC {environment.get('nvrtc', 'none')}, revision "
        f"{environment.get('revision', 'unknown')[:10]}:",
        "",
        *recording.markdown(HEADER, [cells_of(known | row) for row in record["rows"]]),
        *summary(record["rows"]),
    ])  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that say how near the ways come to the speed of all devices at most rows."""
    timed = [row for row in rows if row["ranks"] > 1 and not row["axis"] and "share" in row]
    if not timed:
        return []
    length, ranks = max(r["length"] for r in timed), max(r["ranks"] for r in timed)
    found: dict[str, dict[bool, float]] = {}
    for row in timed:
        if (row["length"], row["ranks"]) == (length, ranks):
            of_way = found.setdefault(row["name"], {})
            of_way[row["causal"]] = max(of_way.get(row["causal"], 0.0), row["share"])
    said = {False: "without a mask", True: "causal"}
    return [
        "",
        f"At {length:,} rows {ranks} devices reach these shares of {ranks} times the speed of one:",
        "",
        *(
            f"- {name}: "
            + ", ".join(f"{format_share(of_way[c])} {said[c]}" for c in sorted(of_way))
            for name, of_way in found.items()
        ),
    ]


def update_page(record: Mapping[str, Any], path: Path = PAGE) -> None:
    """Write what was measured between the marks of docs/DISTRIBUTED.md."""
    recording.replace_between(path, BEGIN, END, section(record))


def figure(record: Any) -> Any:
    """Return the shares by number of devices: measured in full, on paper dashed."""
    from matplotlib.figure import Figure

    problems = list(dict.fromkeys(row["problem"] for row in record["rows"] if row["axis"] == ""))
    drawn = Figure(figsize=(4.2 * len(problems), 3.6), layout="constrained", facecolor="none")
    axes = drawn.subplots(1, len(problems), sharey=True, squeeze=False)[0]
    for axis, problem in zip(axes, problems, strict=True):
        for name in dict.fromkeys(row["name"] for row in record["rows"]):
            some = [r for r in record["rows"] if (r["problem"], r["name"]) == (problem, name)]
            for share, style in (("share", "o-"), ("predicted_share", "x--")):
                points = [(r["ranks"], 100 * r[share]) for r in some if share in r]
                if points:
                    label = name if share == "share" else f"{name}, on paper"
                    axis.plot(*zip(*sorted(points), strict=True), style, label=label)
        axis.set(title=problem, xlabel="devices", ylim=(0, 105))
    axes[0].set_ylabel("share of as many times one device, %")
    axes[0].legend(fontsize=7)
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS[:2]), metavar="N")
    parser.add_argument("--heads", type=int, default=HEADS, metavar="N", help="of strong scaling")
    parser.add_argument("--transport", choices=TRANSPORTS, nargs="+", default=[TRANSPORTS[0]])
    parser.add_argument("--memory", action="store_true", help="bytes of a million rows, no times")
    parser.add_argument("--plot", metavar="FILE", help="draw the shares (.png, .svg or .pdf)")
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    if args.stored:
        update_page(recording.stored("scaling"))
        return 0
    return recording.guarded(run, args)


if __name__ == "__main__":
    sys.exit(main())
