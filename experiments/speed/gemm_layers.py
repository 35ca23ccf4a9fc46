"""How much faster are layers that read the same codes as one launch?

Varies       rows and layers: projections of Flux, SD3.5, Kandinsky and Wan, for images and text
Holds fixed  random codes with scales of channels, bias, bfloat16 out
Measures     all numbers of one launch against separate launches, to the bit, and the first rows
             against the mirror. Then the time of CUDA graphs of both, in the same rounds, without
             the pass that makes the codes.
Beside       a launch for each layer
Expect       1.1 times the speed for q, k and v of 4,608 rows, 1.5 times for text; no loss anywhere
Run          python -m experiments.speed.gemm_layers [--only LABEL] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn import interpret
from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.memory import data_address
from cupyattn.cli import output
from cupyattn.measure import device, timing
from cupyattn.ops.gemm import GEMM, GemmSettings, plan_together, settle_together
from cupyattn.ops.operation import problem_of
from cupyattn.plans.gemm import GemmPlan, buffer_of
from cupyattn.plans.records import Work
from cupyattn.problem.gemm_form import HOPPER_TILES, choose_tiles
from cupyattn.quant import gemm_mirror
from cupyattn.runtime.ready import Ready
from experiments._harness import graphs, recording
from experiments._harness.others import format_comparison

Array = Any
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
APART, TOGETHER = "separate launches", "one launch"
#: Rows that are compared with the mirror.
CHECKED_ROWS = 16


@dataclass(frozen=True)
class Group:
    """Layers of (m, k) codes with n columns each."""

    label: str
    m: int
    n: tuple[int, ...]
    k: int


GROUPS = (
    Group("Flux, single block", 4608, (3072,) * 3, 3072),
    Group("Flux, image", 4096, (3072,) * 3, 3072),
    Group("Flux, text", 512, (3072,) * 3, 3072),
    Group("Flux, k and v", 4608, (3072,) * 2, 3072),
    Group("Flux, four layers", 4608, (3072, 3072, 3072, 12_288), 3072),
    Group("SD3.5 Large, image", 4096, (2432,) * 3, 2432),
    Group("SD3.5 Large, text", 333, (2432,) * 3, 2432),
    Group("Kandinsky 5 Lite", 16_384, (1792,) * 3, 1792),
    Group("Wan 14B", 32_760, (5120,) * 3, 5120),
    Group("Wan 14B, text", 512, (5120,) * 2, 5120),
)
QUICK_GROUPS = (Group("image", 40, (64, 32), 144), Group("text", 9, (32, 32), 144))
#: A plan, and the array of each of its buffers.
Launch = tuple[GemmPlan, Mapping[str, str]]


def draw(group: Group, xp: Any, seed: int) -> dict[str, Array]:
    """Return codes, scales and biases by name, with the number of the layer at the end."""
    rng = xp.random.default_rng(seed)

    def codes(rows: int) -> Array:
        return rng.integers(-127, 128, (rows, group.k)).astype(np.int8)

    def scales(rows: int) -> Array:
        return (rng.random((rows, 1), dtype=np.float32) + np.float32(0.5)) / np.float32(1024)

    found = {"a": codes(group.m), "a_scales": scales(group.m)}
    for number, n in enumerate(group.n):
        bias = rng.standard_normal(n, dtype=np.float32).view(np.uint32) >> 16
        found |= {
            f"b{number}": codes(n), f"b_scales{number}": scales(n),
            f"bias{number}": bias.astype(np.uint16).view(BFLOAT16),
        }  # fmt: skip
    return found


def results(group: Group, xp: Any) -> dict[str, Array]:
    """Return memory for the results of one way, all zero."""
    shapes = {f"c{i}": (group.m, n) for i, n in enumerate(group.n)}
    return {name: xp.zeros(shape, np.uint16).view(BFLOAT16) for name, shape in shapes.items()}


def launches_of(
    group: Group, arrays: Mapping[str, Array], backend: str
) -> tuple[dict[str, list[Launch]], bool]:
    """Return the launches of both ways, and whether layers of these sizes are one launch."""
    settings = GemmSettings("bfloat16", "", None, "sm_90a", backend)
    names = ("b", "b_scales", "bias", "c")
    products = [
        problem_of(GEMM, settings, {"a": arrays["a"], "a_scales": arrays["a_scales"]}
                   | {name: arrays[f"{name}{i}"] for name in names})
        for i in range(len(group.n))
    ]  # fmt: skip
    apart = [
        (GEMM.plan(one).plans[0], {name: f"{name}{i}" for name in names})
        for i, one in enumerate(products)
    ]
    kernel = settle_together(products)
    tiles = choose_tiles(group.m, group.n, group.k, HOPPER_TILES)
    plan = plan_together(kernel or replace(products[0].settled[1], tiles=tiles), products)
    own = {buffer_of(name, i): f"{name}{i}" for i in range(len(products)) for name in names}
    return {APART: apart, TOGETHER: [(plan, own)]}, kernel is not None


def runner(
    launches: Sequence[Launch], sets: Sequence[Mapping[str, Array]]
) -> Callable[[int], Array]:
    """Return the launches on each of the sets; a call returns the first result's bits."""
    import cupy

    calls = []
    for plan, names in launches:
        at = [
            {**{n: data_address(one[n]) for n in ("a", "a_scales")},
             **{inner: data_address(one[outer]) for inner, outer in names.items()}}
            for one in sets
        ]  # fmt: skip
        calls.append((Ready(Work.of(plan), "sm_90a"), at))

    def run(i: int) -> Array:
        stream = cupy.cuda.get_current_stream().ptr
        for call, at in calls:
            call.enqueue(at[i % len(at)], 0, stream)
        return sets[i % len(sets)]["c0"].view(np.uint16)

    return run


def are_right(
    group: Group, arrays: Mapping[str, Array], made: Mapping[str, Mapping[str, Array]]
) -> bool:
    """Whether both ways have the same bits, and the first rows the mirror's."""
    rows = min(CHECKED_ROWS, group.m)
    a, a_scales = (on_host(arrays[name][:rows]) for name in ("a", "a_scales"))
    for i in range(len(group.n)):
        one, other = (made[way][f"c{i}"].view(np.uint16) for way in (APART, TOGETHER))
        weight = (on_host(arrays[f"{name}{i}"]) for name in ("b", "b_scales"))
        bias = on_host(arrays[f"bias{i}"])
        expected = gemm_mirror(a, a_scales, *weight, "bfloat16", bias=bias)
        if not bool((one == other).all()):
            return False
        if on_host(one[:rows]).tobytes() != expected.tobytes():
            return False
    return True


def measure(group: Group, args: argparse.Namespace) -> dict[str, Any]:
    """Compare both ways of a group, then time them in turns."""
    xp: Any = np
    if not args.quick:
        import cupy as xp
    arrays = draw(group, xp, args.seed)
    made = {way: results(group, xp) for way in (APART, TOGETHER)}
    launches, taken = launches_of(
        group, {**arrays, **made[APART]}, "interpret" if args.quick else "cuda"
    )
    row = {**asdict(group), "taken": taken, "tiles": asdict(launches[TOGETHER][0][0].tiles)}
    if args.quick:
        for way, out in made.items():
            for plan, names in launches[way]:
                own = {inner: {**arrays, **out}[outer] for inner, outer in names.items()}
                codes = {name: arrays[name] for name in ("a", "a_scales")}
                interpret.run(plan, codes | own, "sm_90a")
        return row | {"ok": are_right(group, arrays, made)}
    sets = [dict(zip(arrays, one, strict=True)) for one in timing.rotated(tuple(arrays.values()))]
    calls = {
        way: runner(launches[way], [{**one, **out} for one in sets]) for way, out in made.items()
    }
    for call in calls.values():
        call(0)
    row["ok"] = are_right(group, arrays, made)
    if not row["ok"]:
        return row
    samples = timing.time_interleaved(graphs.of_calls(calls, len(sets)), rounds=args.rounds)
    row["seconds"] = {way: timing.median(s).median / len(sets) for way, s in samples.items()}
    row["speed"] = timing.paired_ratio(samples[APART], samples[TOGETHER]).to_list()
    operations = 2 * group.m * sum(group.n) * group.k
    row["tops"] = {way: operations / s / 1e12 for way, s in row["seconds"].items()}
    return row | {"samples": samples, "calls of a sample": len(sets), "clocks": device.clocks()}


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows."""
    header = ["layers", "m x n x k", "bits", "is one launch", f"{APART}, us", f"{TOGETHER}, us",
              "TOP/s", f"x {APART}"]  # fmt: skip
    lines = []
    for r in rows:
        seconds = r.get("seconds", {})
        n = " + ".join(map(str, r["n"]))
        lines.append([
            r["label"], f"{r['m']} x ({n}) x {r['k']}", "equal" if r["ok"] else "DIFFER",
            "yes" if r["taken"] else "no",
            *(f"{1e6 * seconds[way]:.1f}" if seconds else "-" for way in (APART, TOGETHER)),
            f"{r['tops'][TOGETHER]:.0f}" if seconds else "-", format_comparison(r.get("speed")),
        ])  # fmt: skip
    return header, lines


def run(args: argparse.Namespace) -> int:
    """Measure every group, print the table, write the record."""
    recording.check_rounds(args)
    groups = QUICK_GROUPS if args.quick else GROUPS
    some = [one for one in groups if args.only is None or one.label.startswith(args.only)]
    if not some:
        labels = ", ".join(repr(one.label) for one in groups)
        raise ValueError(f"--only must be how one of these begins: {labels}, got {args.only!r}")
    rows = []
    for group in some:
        rows.append(measure(group, args))
        output.print_table(*table(rows[-1:]))
    output.print_table(*table(rows))
    if args.only is None or args.json is not None:
        backend = "interpret" if args.quick else "cuda"
        recording.keep(args, "gemm_layers", backend, {"rows": rows})
    return 0 if all(row["ok"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--only", metavar="LABEL", help="layers whose label begins so, alone")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
