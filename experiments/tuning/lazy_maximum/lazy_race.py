"""What is a lazy M worth in the portable fa_tc?

Varies       M: the largest score so far (eager, as it is) or one that rises only when weights
             become large (lazy); keys a step; head_dim, length, causal or not, dtype; data whose
             scores spread nine times as far as those of N(0, 1), for which M rises more often
Holds fixed  16,384 tokens in all, heads x head_dim = 2048
Measures     registers and spills; error as a fraction of the bound, of small random and adversarial
             calls and of some rows of every call that is timed; time, and in the same rounds the
             ratio to what runs today
Expect       1.03 to 1.08 on N(0, 1): one of about five instructions for a score is saved; less at
             head_dim 256, whose step has half the scores for its products; below 1 at length 1024
             with spread scores, where a large share of the steps is weighted twice
Run          python -m experiments.tuning.lazy_maximum.lazy_race [--json FILE]
             [--quick | --interpret] [--head-dims N ...] [--rounds N]

With ``--interpret`` small calls run in the interpreter, without a device and without times; with
``--quick`` they run on the device if there is one, and nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.operand import Operand
from cupyattn.cli import output
from cupyattn.measure import device, rungs, timing, words
from cupyattn.plans.records import Plan
from cupyattn.problem.call import AttentionSpec
from cupyattn.runtime import ready
from experiments._harness import recording
from experiments._harness.others import geometric_mean
from experiments.tuning.lazy_maximum.contestants import (
    ARCH,
    CONTESTANTS,
    Contestant,
    resources,
)
from experiments.tuning.lazy_maximum.lazy_checks import check, dtype_of, judged

NAME = "lazy_maximum"
TOKENS, WIDTH = 16_384, 2048
LENGTHS = (1024, 4096, 16_384)
#: Standard deviation of Q and K: scores spread as far as that squared.
SPREADS = {"normal": 1.0, "nine times as wide": 3.0}
#: Rows of every head that are judged, as shares of the length.
JUDGED = (0.0, 0.01, 0.26, 0.5, 0.77, 1.0)
#: Other keys a step are raced in the first alone.
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Cell:
    """One problem that is timed."""

    head_dim: int
    length: int
    causal: bool
    dtype: str
    data: str

    @property
    def call(self) -> AttentionSpec:
        """Sizes of the call."""
        heads = WIDTH // self.head_dim
        return AttentionSpec(
            TOKENS // self.length, heads, heads, self.length, self.length, self.head_dim,
            self.dtype, self.head_dim**-0.5, self.causal,
        )  # fmt: skip

    @property
    def contestants(self) -> tuple[Contestant, ...]:
        """What takes part; the first is what runs today."""
        every = CONTESTANTS[self.head_dim]
        return every if self.dtype == DTYPES[0] else every[:2]

    def plan(self, contestant: Contestant) -> Plan:
        """Return the plan of a contestant on contiguous operands."""
        operand = Operand.contiguous(self.call.output_shape, 2)
        return contestant.plan(self.call, dict.fromkeys("qkvo", operand))


def cells(head_dims: Sequence[int]) -> Iterator[Cell]:
    """Yield every cell, those that share a draw of the inputs one behind the other."""
    for head_dim in head_dims:
        for dtype in DTYPES:
            for data in SPREADS:
                for length in LENGTHS:
                    for causal in (False, True):
                        yield Cell(head_dim, length, causal, dtype, data)


def compiled(head_dims: Sequence[int], threads: int) -> dict[str, dict[str, int]]:
    """Compile what is timed, many at a time; return what each kernel takes."""
    found = {}
    pairs = {
        f"hd{cell.head_dim} {cell.dtype}{' causal' if cell.causal else ''} {one.name}": (cell, one)
        for cell in cells(head_dims) for one in cell.contestants
    }  # fmt: skip
    with ThreadPoolExecutor(threads) as pool:
        taken = pool.map(lambda pair: resources(pair[0].plan(pair[1])), pairs.values())
        for name, facts in zip(pairs, taken, strict=True):
            found[name] = facts
    return found


def inputs(seed: int) -> dict[tuple[str, str], list[Any]]:
    """Return the elements of q, k and v on the device, by dtype and data: of every shape."""
    import cupy

    rng = np.random.default_rng(seed)
    drawn = [rng.standard_normal(TOKENS * WIDTH, np.float32) for _ in range(3)]
    found = {}
    for dtype in DTYPES:
        for data, spread in SPREADS.items():
            factors = np.float32(spread), np.float32(spread), np.float32(1)
            scaled = (x * factor for x, factor in zip(drawn, factors, strict=True))
            found[dtype, data] = [cupy.asarray(x.astype(dtype_of(dtype))) for x in scaled]
    return found


def measured(cell: Cell, elements: Sequence[Any], rounds: int) -> list[dict[str, Any]]:
    """Judge and time the contestants of one cell; return their rows."""
    import cupy

    call = cell.call
    q, k, v = (x.reshape(call.output_shape) for x in elements)
    sets = timing.rotated((q, k, v))
    o = cupy.empty_like(q)
    exact, chosen = rungs.remembered(), cupy.asarray(
        sorted({int(share * (cell.length - 1)) for share in JUDGED})
    )  # fmt: skip
    calls: dict[str, Callable[[int], object]] = {}
    rows: list[dict[str, Any]] = []
    for one in cell.contestants:
        plan = cell.plan(one)

        def run(i: int, plan: Plan = plan) -> None:
            a, b, c = sets[i % len(sets)]
            ready.run(plan, {"q": a, "k": b, "v": c, "o": o}, ARCH)

        o.view(np.uint16).fill(0xFFFF)  # NaN in either dtype
        run(0)
        j2 = judged(
            one, call, {"q": q, "k": k, "v": v, "o": o}, {"causal": cell.causal},
            rows=chosen, exact=exact,
        )  # fmt: skip
        finite = bool(cupy.isfinite(o.astype(np.float32)).all())
        rows.append({"name": one.name, "j2": j2, "ok": j2 <= 1 and finite})
        if rows[-1]["ok"]:
            calls[one.name] = run
        else:
            print(f"MISSED {cell} {one.name}: {j2:.3f}{'' if finite else ', not finite'}")
    samples = timing.time_interleaved(calls, rounds=rounds)
    today = samples.get(cell.contestants[0].name)
    for row in rows:
        if row["name"] in samples:
            found = samples[row["name"]]
            row |= {"seconds": timing.median(found).to_list(), "samples": found}
            if today is not None:
                row["speed"] = timing.paired_ratio(today, found).to_list()
    return rows


def table(problems: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the lines of one table: a cell a line, times as fast as what runs today."""
    result = [["", "J2, eager", "J2, lazy", "today", "times as fast, lazy"]]
    for found in problems:
        cell, rows = Cell(**found["cell"]), found["rows"]
        mask = " causal" if cell.causal else ""
        speeds = [
            f"{row['name'].split()[1]} {row['speed'][0]:.3f} "
            f"({row['speed'][1]:.3f} .. {row['speed'][2]:.3f})"
            for row in rows[1:] if "speed" in row
        ]  # fmt: skip
        result.append([
            f"hd{cell.head_dim} {cell.length} {cell.dtype}{mask}, {cell.data}",
            f"{rows[0]['j2']:.3f}", f"{max(row['j2'] for row in rows[1:]):.3f}",
            words.format_seconds(rows[0]["seconds"][0]) if "seconds" in rows[0] else "-",
            "  ".join(speeds),
        ])  # fmt: skip
    return result


def means(problems: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the geometric mean of speeds by head_dim, data and tiles.

    Examples
    --------
    >>> cell = dict(head_dim=64, length=1024, causal=False, dtype="float16", data="normal")
    >>> rows = [{"name": "eager 128x64", "speed": [1.0, 1.0, 1.0]},
    ...         {"name": "lazy 128x64", "speed": [1.1, 1.0, 1.2]}]
    >>> means([{"cell": cell, "rows": rows}])
    {'hd64, normal, lazy 128x64': 1.1}
    """
    speeds: dict[str, list[float]] = {}
    for found in problems:
        cell = Cell(**found["cell"])
        for row in found["rows"][1:]:
            if "speed" in row:
                name = f"hd{cell.head_dim}, {cell.data}, {row['name']}"
                speeds.setdefault(name, []).append(row["speed"][0])
    return {name: round(geometric_mean(some), 4) for name, some in speeds.items()}


def run(args: argparse.Namespace) -> int:
    """Check small calls, then judge and time large ones."""
    began = time.monotonic()
    options = {
        "head_dims": args.head_dims, "every": args.every, "threads": args.threads,
        "only": args.only,
    }  # fmt: skip
    if args.interpret or (args.quick and device.device_missing()):
        checked = check(on_device=False, **options)
        return 0 if all(one["ok"] for one in checked) else 1
    recording.check_rounds(args)
    taken = compiled(args.head_dims, args.threads)
    for name, facts in taken.items():
        if facts["spill_bytes"]:
            print(f"{name}: {facts['registers']} registers, {facts['spill_bytes']} bytes spilled")
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    checked = check(on_device=True, **options)
    worst = max(one.get("j2", 0.0) for one in checked)
    print(
        f"{len(checked)} small calls, largest error / bound {worst:.3f}, after "
        f"{time.monotonic() - began:.0f} s", flush=True,
    )  # fmt: skip
    elements = {} if args.quick else inputs(args.seed)
    problems: list[dict[str, Any]] = []
    for cell in [] if args.quick else cells(args.head_dims):
        rows = measured(cell, elements[cell.dtype, cell.data], args.rounds)
        problems.append({"cell": vars(cell), "rows": rows})
    if problems:
        lines = table(problems)
        print(f"{device.environment()['device']['name']}, portable forms")
        output.print_table(lines[0], lines[1:])
        averages = means(problems)
        print("geometric means of times as fast, over lengths, masks and dtypes:")
        output.print_table(["", ""], [[name, f"{x:.3f}"] for name, x in averages.items()])
        recording.keep(args, NAME, "cuda", {
            "rounds": args.rounds, "resources": taken, "checked": checked, "means": averages,
            "problems": problems,
        })  # fmt: skip
    print(f"done after {time.monotonic() - began:.0f} s")
    good = all(row["ok"] for found in problems for row in found["rows"])
    return 0 if good and all(one["ok"] for one in checked) else 1


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--interpret", action="store_true", help="small calls, without a device")
    parser.add_argument("--only", default="", metavar="WORDS", help="small calls so named")
    parser.add_argument("--every", action="store_true", help="more small calls")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256], metavar="N")
    parser.add_argument("--threads", type=int, default=14, help="compilations at a time")
    parser.set_defaults(rounds=recording.LEAST_ROUNDS)
    args = parser.parse_args(argv)
    if args.interpret:
        return recording.guarded(run, args)
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
