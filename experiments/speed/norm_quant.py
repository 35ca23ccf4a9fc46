"""How near does the pass in front of a product come to the speed of memory, and to Inductor's?

Varies       norm, modulation and activation of rows; codes by row, by block, rotated.
             Sizes of Flux, Wan and Kandinsky.
Holds fixed  N(0, 1) rows in bfloat16. Every input and output has separate memory.
Measures     codes and scales of the first rows against the mirror, to the bit but behind GELU. Then
             the time of CUDA graphs, and the bytes that the pass has to move per second. Rows,
             vectors, codes and scales count once. A copy of as many bytes runs in the same rounds.
             So does the norm and modulation that torch compiles, which writes 16 bits.
Expect       85 % of the speed of a copy from 40 MB on, and at least the speed of Inductor. Rotated
             rows take at most 1.2 times the time of others.
Run          python -m experiments.speed.norm_quant [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn as ca
from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.memory import data_address
from cupyattn.cli import output
from cupyattn.measure import device, timing
from cupyattn.ops.norm_quant import NORM_QUANT, NormQuantSettings
from cupyattn.ops.operation import make_ready, problem_of
from experiments._harness import graphs, recording
from experiments._harness.others import format_comparison

Array = Any
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: Rows that are compared with the mirror, and codes that may differ by one behind an activation.
CHECKED_ROWS, MOST_FLIPS = 48, 1e-3
COPY, INDUCTOR = "copy", "Inductor"
#: Arguments for each kind of codes, by name.
WAYS: dict[str, dict[str, Any]] = {
    "row": {}, "rotated": {"rotate": "hadamard"}, "block": {"strategy": "block"},
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Calls of one shape that are timed in turns: what comes before codes, and which are made."""

    name: str
    rows: int
    channels: int
    norm: str | None = None
    vectors: Mapping[str, Any] = field(default_factory=dict)
    activation: str | None = None
    ways: tuple[str, ...] = ("row", "rotated")
    groups: int = 1


MODULATED = {"scale": BFLOAT16, "shift": BFLOAT16}
GROUPS = (
    Group("Flux, modulated", 4608, 3072, "layer", MODULATED, ways=("row", "rotated", "block")),
    Group(
        "Wan, modulated", 32_760, 5120, "layer",
        {"scale": np.dtype(np.float32), "shift": np.dtype(np.float32)},
    ),
    Group("Kandinsky, modulated", 6144, 1792, "layer", MODULATED),
    Group("by token", 4608, 3072, "layer", MODULATED, groups=4608),
    Group("RMS, weight", 4608, 3072, "rms", {"weight": BFLOAT16}),
    Group("codes alone", 8192, 3072),
    Group("GELU", 4608, 12_288, activation="gelu_tanh"),
)  # fmt: skip
QUICK_GROUPS = (
    Group("modulated", 6, 192, "layer", MODULATED, ways=("row", "rotated", "block")),
    Group("GELU", 5, 256, activation="gelu_tanh"),
)


def operands(group: Group, xp: Any, seed: int) -> dict[str, Array]:
    """Draw the rows and the vectors over their channels."""
    rng = np.random.default_rng(seed)
    shapes = {"x": (group.rows, group.channels)}
    for name in group.vectors:
        shapes[name] = (
            (group.channels,) if name in ("weight", "bias") else (group.groups, group.channels)
        )
    draws = rng if xp is np else xp.random.default_rng(seed)
    types = {"x": BFLOAT16, **group.vectors}
    found = {n: draws.standard_normal(shape, dtype=np.float32) for n, shape in shapes.items()}
    # The upper half of a float32: CuPy has no conversion to bfloat16.
    return {
        name: (x.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)
        if types[name] == BFLOAT16
        else x
        for name, x in found.items()
    }


def options(group: Group, way: str) -> dict[str, Any]:
    """Return the arguments of a call beside arrays."""
    return {"norm": group.norm, "activation": group.activation, **WAYS[way]}


def equal_to_mirror(group: Group, way: str, arrays: Mapping[str, Array], made: Any) -> bool:
    """Compare codes and scales of the first rows with the mirror's."""
    count = min(CHECKED_ROWS, group.rows)
    host = {n: on_host(x[:count] if x.shape[0] == group.rows else x) for n, x in arrays.items()}
    wanted = ca.norm_quant(**host, **options(group, way), backend="mirror")
    codes, scales = (on_host(x[:count]) for x in made)
    if not group.activation:
        return bool(codes.tobytes() == wanted[0].tobytes() and (scales == wanted[1]).all())
    differ = np.abs(codes.astype(int) - wanted[0])
    near = np.allclose(scales, wanted[1], rtol=2.0**-18)
    return bool(near and differ.max() <= 1 and np.count_nonzero(differ) <= MOST_FLIPS * codes.size)


def pass_over(
    group: Group, way: str, sets: Sequence[Mapping[str, Array]]
) -> tuple[Callable[[int], Any], int]:
    """Return the pass alone on each of the sets, and the bytes that it moves."""
    import cupy

    how = {"activation": None, "rotate": None, "strategy": "channel"} | options(group, way)
    settings = NormQuantSettings(**how, eps=1e-6, backend="cuda")
    problem = problem_of(NORM_QUANT, settings, sets[0])
    call = make_ready(problem, NORM_QUANT.plan(problem))
    made = [
        {name: cupy.empty(r.shape, r.dtype) for name, r in problem.results.items()} for _ in sets
    ]
    at = [
        {name: data_address(x) for name, x in {**given, **out}.items()}
        for given, out in zip(sets, made, strict=True)
    ]

    def run(i: int) -> Any:
        call.enqueue(at[i % len(at)], 0, cupy.cuda.get_current_stream().ptr)
        return made[i % len(at)]["codes"], made[i % len(at)]["scales"]

    return run, sum(x.nbytes for x in (*sets[0].values(), *made[0].values()))


def copy_of(moved: int, count: int) -> Callable[[int], Any]:
    """Return a copy that reads half of so many bytes, and writes as many."""
    import cupy

    pairs = [[cupy.zeros(moved // 2, np.uint8) for _ in range(2)] for _ in range(count)]

    def run(i: int) -> Any:
        source, target = pairs[i % count]
        cupy.copyto(target, source)
        return target

    return run


def compiled(group: Group, sets: Sequence[Mapping[str, Array]]) -> Callable[[int], Any]:
    """Return norm, modulation and activation as torch compiles them, 16 bits out."""
    import torch

    def as_tensor(x: Array) -> Any:
        if x.dtype == BFLOAT16:
            return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(x)

    functional = torch.nn.functional

    def native(x: Any, weight: Any = None, scale: Any = None, shift: Any = None) -> Any:
        y, width = x, (x.shape[-1],)
        if group.norm == "layer":
            y = functional.layer_norm(x, width, weight, None, 1e-6)
        elif group.norm == "rms":
            y = functional.rms_norm(x, width, weight, 1e-6)
        if scale is not None:
            y = y * (1 + scale) + shift
        if group.activation:
            y = functional.gelu(y, approximate="tanh")
        return y.to(x.dtype)

    torch._dynamo.reset()
    call = torch.compile(native, dynamic=False)
    given = [{name: as_tensor(x) for name, x in one.items()} for one in sets]
    made: list[Any] = [None] * len(sets)

    def run(i: int) -> Any:
        with torch.no_grad():
            made[i % len(sets)] = call(**given[i % len(sets)])  # kept, so that each has its memory
        return made[i % len(sets)]

    return run


def measure(group: Group, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Judge all ways of a group, then time them, a copy and Inductor in turns."""
    rows: dict[str, dict[str, Any]] = {}
    facts = {"group": group.name, "rows": group.rows, "channels": group.channels}
    if args.quick:
        arrays = operands(group, np, args.seed)
        for way in group.ways:
            made = ca.norm_quant(**arrays, **options(group, way), backend="interpret")
            ok = equal_to_mirror(group, way, arrays, made)
            rows[way] = {**facts, "way": way, "ok": ok}
        return list(rows.values())
    import cupy

    arrays = operands(group, cupy, args.seed)
    sets = [dict(zip(arrays, one, strict=True)) for one in timing.rotated(tuple(arrays.values()))]
    calls: dict[str, Callable[[int], Any]] = {}
    for way in group.ways:
        run, moved = pass_over(group, way, sets)
        ok = equal_to_mirror(group, way, arrays, run(0))
        rows[way] = {**facts, "way": way, "ok": ok, "bytes": moved}
        if ok:
            calls[way] = run
    if not calls:
        return list(rows.values())
    calls[COPY] = copy_of(rows["row"]["bytes"], len(sets))
    if group.norm or group.activation:
        try:
            calls[INDUCTOR] = compiled(group, sets)
            calls[INDUCTOR](0)
        except (ImportError, RuntimeError) as error:  # no torch, or no compiler for it
            calls.pop(INDUCTOR, None)
            print(f"{INDUCTOR}: {error}", file=sys.stderr)
    samples = timing.time_interleaved(graphs.of_calls(calls, len(sets)), rounds=args.rounds)
    for way, row in rows.items():
        if way not in samples or COPY not in samples:
            continue
        row["seconds"] = timing.median(samples[way]).median / len(sets)
        of_bytes = row["bytes"] / rows["row"]["bytes"]
        for name, factor in ((COPY, of_bytes), (INDUCTOR, 1.0), ("row", 1.0)):
            if name in samples and name != way:
                ratio = timing.paired_ratio(samples[name], samples[way])
                row[f"speed of {name}"] = [factor * x for x in ratio.to_list()]
        row["samples"] = {name: samples[name] for name in (COPY, INDUCTOR, way) if name in samples}
        row["calls of a sample"] = len(sets)
        row["clocks"] = device.clocks()
    return list(rows.values())


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows."""
    header = ["rows", "shape", "codes", "bits", "MB", "us", "GB/s", "of a copy", "of Inductor",
              "of codes by row"]  # fmt: skip
    lines = []
    for r in rows:
        seconds = r.get("seconds")
        lines.append([
            r["group"], f"{r['rows']} x {r['channels']}", r["way"],
            "equal" if r["ok"] else "DIFFER", f"{r['bytes'] / 1e6:.1f}" if "bytes" in r else "-",
            f"{1e6 * seconds:.1f}" if seconds else "-",
            f"{r['bytes'] / seconds / 1e9:.0f}" if seconds else "-",
            *(format_comparison(r.get(f"speed of {one}")) for one in (COPY, INDUCTOR, "row")),
        ])  # fmt: skip
    return header, lines


def run(args: argparse.Namespace) -> int:
    """Measure every group, print the table, write the record."""
    recording.check_rounds(args)
    rows = []
    for group in QUICK_GROUPS if args.quick else GROUPS:
        found = measure(group, args)
        rows += found
        output.print_table(*table(found))
    output.print_table(*table(rows))
    recording.keep(args, "norm_quant", "interpret" if args.quick else "cuda", {"rows": rows})
    return 0 if all(row["ok"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.main(run, recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
