"""Which form of norm_quant is fastest with rotated rows, and what does each part of it cost?

Varies       whether the next row of a team waits in registers or in shared memory; teams of a
             block, blocks of a multiprocessor; codes that leave a lane in 4 bytes or in 16, or a
             warp by the copy engine, which may bring rows, too; factors as floats or as words;
             parts that are left out: most reads of factors, the exchange between lanes, stores,
             sums over lanes
Holds fixed  bfloat16 rows of Flux, Wan and Kandinsky, N(0, 1), as in experiments.speed.norm_quant
Measures     registers, spills, shared memory; codes and scales against the mirror and today's
             kernel, to the bit; then the time of CUDA graphs in turns with the pass without
             rotation and with a copy of the same bytes
Expect       at 4,608 x 3,072 today's kernel takes 20.1 us: 0.75 of the speed without rotation.
             Codes in 16 bytes make it 19.5 us (0.77), the copy engine 18.8 us (0.80). Factors as
             words make it 19.9 us (0.755), since fewer passes cost more instructions
Run          python -m experiments.tuning.rotated_rows [--quick] [--compiled] [--groups NAME ...]
             [--json FILE]

The patch in experiments/tuning/row_forms makes the forms, and must apply exactly once. A form with
a part left out computes other numbers: its bits are not compared. ``--compiled`` needs no device:
it prints what the compiler says of each form.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn import errors, interpret
from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.memory import data_address
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.limits import HOPPER_BLOCKS
from cupyattn.measure import device, timing
from cupyattn.ops.norm_quant import NORM_QUANT, NormQuantSettings
from cupyattn.ops.operation import make_ready, problem_of
from cupyattn.plans.records import Work
from experiments._harness import graphs, patches, recording
from experiments._harness.others import format_comparison
from experiments.speed.norm_quant import (
    CHECKED_ROWS,
    COPY,
    GROUPS,
    MODULATED,
    Group,
    copy_of,
    operands,
    options,
    pass_over,
)

Array = Any
PATCH = Path(__file__).parent / "row_forms" / "norm_quant.patch"
ARCH, SOURCE, WITHOUT, TODAY = "sm_90", "linear/norm_quant.cu", "without rotation", "today"
#: Values of CFG_NEXT_IN_SHARED: where the next row waits.
REGISTERS, SHARED = False, True
#: ``enum class Codes`` of the patch.
CODES = ("", "codes in 16 bytes", "codes by the copy engine")
#: Parts that are left out, bits of CFG_LEAVE.
PARTS = {"factors": 1, "exchange": 2, "stores": 4, "sums": 8, "all four": 15}


@dataclass(frozen=True)
class Form:
    """A form of the kernel: `teams` in a block, `blocks` on a multiprocessor.

    The next row of a team waits in `shared` memory or in registers. `codes` are one of `CODES`, and
    `words` factors as they are stored. With `engine` the copy engine brings rows, too.
    """

    shared: bool
    teams: int
    blocks: int
    codes: str = ""
    words: bool = False
    engine: bool = False
    without: str = ""

    @property
    def name(self) -> str:
        """The differences, in words."""
        parts = ["in shared memory" if self.shared else "in registers"]
        parts += [f"{self.teams} teams x {self.blocks} blocks"]
        parts += [self.codes] * bool(self.codes) + ["rows by the copy engine"] * self.engine
        parts += ["factors as words"] * self.words
        parts += [f"no {self.without}"] * bool(self.without)
        return ", ".join(parts)


BESIDE = Form(SHARED, 6, 2)
#: Codes leave together, and in the second form rows come together. Weights cannot be words.
TOGETHER = replace(BESIDE, codes=CODES[1]), replace(BESIDE, codes=CODES[2], engine=True)
LESS = (*TOGETHER, replace(BESIDE, words=True))
FORMS: dict[str, tuple[Form, ...]] = {
    "Flux, modulated": (
        Form(REGISTERS, 2, 4), *LESS, *(replace(BESIDE, without=part) for part in PARTS)
    ),
    "4,096 rows": LESS,
    "RMS, weight": (Form(REGISTERS, 2, 4), *TOGETHER),
    "Wan, modulated": (Form(SHARED, 3, 2), Form(SHARED, 8, 1)),
    "GELU": (Form(SHARED, 1, 2),),
    "Kandinsky, modulated": (
        Form(REGISTERS, 2, 6), Form(SHARED, 4, 4), *(replace(one, teams=8) for one in LESS)
    ),
}  # fmt: skip
ALL_GROUPS = {one.name: one for one in GROUPS if one.name in FORMS} | {
    "4,096 rows": Group("4,096 rows", 4096, 3072, "layer", MODULATED)
}
QUICK = Group("few", 11, 1536, "layer", MODULATED)
QUICK_FORMS = tuple(
    replace(one, teams=teams, blocks=1) for teams, one in zip((4, 2, 4), LESS, strict=True)
)


@contextmanager
def patched_source() -> Iterator[Path]:
    """Yield the kernel's source with all forms in it."""
    with tempfile.TemporaryDirectory(prefix="cupyattn-rows-") as folder:
        source = Path(folder) / SOURCE
        source.parent.mkdir()
        source.write_text((compiler.KERNELS / SOURCE).read_text(encoding="utf-8"), "utf-8")
        lines = PATCH.read_text(encoding="utf-8").splitlines(keepends=True)
        patches.apply(PATCH.stem, patches.hunks_of(lines[1:]), Path(folder))
        yield source


def problem_for(group: Group, arrays: Mapping[str, Array], backend: str) -> Any:
    """Settle the rotated pass."""
    how = {"activation": None, "strategy": "channel"} | options(group, "rotated")
    return problem_of(NORM_QUANT, NormQuantSettings(**how, eps=1e-6, backend=backend), arrays)


def changed(work: Work, form: Form, source: Path, processors: int = HOPPER_BLOCKS) -> Work:
    """Return the pass in another form, its rows shared out over so many multiprocessors."""
    (inner,) = work.plans
    (launch,) = inner.launches
    defines = dict(launch.module.defines)
    lanes = launch.block // defines["CFG_BLOCK_M"]
    defines |= {
        "CFG_NEXT_IN_SHARED": int(form.shared), "CFG_CODES": CODES.index(form.codes),
        "CFG_WORDS": int(form.words), "CFG_ENGINE_ROWS": int(form.engine),
        "CFG_LEAVE": PARTS.get(form.without, 0), "CFG_BLOCK_M": form.teams,
        "CFG_BLOCKS_PER_SM": form.blocks, "CFG_NUM_WARPS": form.teams * lanes // 32,
    }  # fmt: skip
    ((struct, params),) = launch.params
    blocks = -(-params["rows"] // form.teams)
    each = -(-blocks // (processors * form.blocks))
    steps = -(-each // -(-each // 16))
    own = replace(
        launch, module=ModuleSpec.of(source, defines), grid=-(-blocks // steps),
        block=form.teams * lanes, params=((struct, {**params, "steps": steps}),),
    )  # fmt: skip
    return Work.of(replace(inner, launches=(own,), steps=steps))


def mirror_of(group: Group, arrays: Mapping[str, Array]) -> tuple[Any, Any]:
    """Return codes and scales of the first rows."""
    count = min(CHECKED_ROWS, group.rows)
    host = {n: on_host(x[:count] if x.shape[0] == group.rows else x) for n, x in arrays.items()}
    made = NORM_QUANT.mirror(problem_for(group, host, "mirror"), host)
    return made["codes"], made["scales"]


def equal(made: tuple[Array, Array], wanted: tuple[Array, Array]) -> bool:
    """Compare as many rows of codes and scales as are wanted, to the bit."""
    count = len(wanted[0])
    pairs = zip((on_host(x[:count]) for x in made), wanted, strict=True)
    return all(x.tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def resources(work: Work) -> dict[str, int] | str:
    """Compile; return registers, spills and shared memory, or why it does not compile."""
    (launch,) = work.plans[0].launches
    try:
        binary = compiler.build(launch.module, ARCH)
    except errors.KernelCompileError as error:
        return " ".join(str(error).split())[:200]
    used = binary.kernels[launch.entry]
    return {
        "registers": used.registers, "spill_bytes": used.spill_stores + used.spill_loads,
        "shared_bytes": binary.smem_bytes, "steps": work.plans[0].steps, "grid": launch.grid,
    }  # fmt: skip


def on_device(problem: Any, work: Work, sets: Sequence[Mapping[str, Array]]) -> Callable[..., Any]:
    """Return the pass on each of the sets."""
    import cupy

    call = make_ready(problem, work)
    made = [{n: cupy.empty(r.shape, r.dtype) for n, r in problem.results.items()} for _ in sets]
    at = [
        {n: data_address(x) for n, x in {**given, **out}.items()}
        for given, out in zip(sets, made, strict=True)
    ]

    def run(i: int) -> Any:
        call.enqueue(at[i % len(at)], 0, cupy.cuda.get_current_stream().ptr)
        return made[i % len(at)]["codes"], made[i % len(at)]["scales"]

    return run


def measure_quick(source: Path, seed: int) -> list[dict[str, Any]]:
    """Run every form in the interpreter on a few rows, and compare with the mirror."""
    arrays, rows = operands(QUICK, np, seed), []
    problem = problem_for(QUICK, arrays, "interpret")
    for form in QUICK_FORMS:
        work = changed(NORM_QUANT.plan(problem), form, source, processors=1)
        made = {n: np.empty(r.shape, r.dtype) for n, r in problem.results.items()}
        interpret.run(work.plans[0], {**arrays, **made})
        ok = equal((made["codes"], made["scales"]), mirror_of(QUICK, arrays))
        rows.append(
            {"group": QUICK.name, "form": form.name, "ok": ok, "steps": work.plans[0].steps}
        )
    return rows


def measure_compiled(group: Group, source: Path) -> list[dict[str, Any]]:
    """Return what the compiler says of every form for a group: its first rows, of several turns."""
    few = replace(group, rows=min(group.rows, 2304))
    today = NORM_QUANT.plan(problem_for(few, operands(few, np, 0), "interpret"))
    works = {TODAY: today} | {form.name: changed(today, form, source) for form in FORMS[group.name]}
    rows = []
    for name, work in works.items():
        facts = resources(work)
        if isinstance(facts, str):
            raise errors.KernelCompileError(f"{name}: {facts}")
        taken = {n: facts[n] for n in ("registers", "spill_bytes", "shared_bytes")}
        rows.append({"group": group.name, "form": name, "ok": True, **taken})
    return rows


def measure(group: Group, source: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Judge all forms for a group, then time them in turns."""
    import cupy

    arrays = operands(group, cupy, args.seed)
    sets = [dict(zip(arrays, one, strict=True)) for one in timing.rotated(tuple(arrays.values()))]
    problem = problem_for(group, arrays, "cuda")
    today = NORM_QUANT.plan(problem)
    forms: dict[str, Form | None] = {TODAY: None, **{one.name: one for one in FORMS[group.name]}}
    works = {name: changed(today, one, source) if one else today for name, one in forms.items()}
    with ThreadPoolExecutor(args.threads) as pool:
        found = dict(zip(works, pool.map(resources, works.values()), strict=True))
    rows, kept = {}, ()
    plain, moved = pass_over(group, "row", sets)
    plain(0)
    calls: dict[str, Callable[[int], Any]] = {WITHOUT: plain, COPY: copy_of(moved, len(sets))}
    for name, form in forms.items():
        facts = found[name]
        if isinstance(facts, str):
            print(f"{group.name}: {name} takes no part: {facts}", file=sys.stderr)
            continue
        run = on_device(problem, works[name], sets)
        made = run(0)
        if form is None:
            kept = tuple(x.copy() for x in made)
        ok = bool(form and form.without)
        ok = ok or bool(group.activation) or equal(made, mirror_of(group, arrays))
        if form and not form.without:
            ok = ok and all(bool((x == y).all()) for x, y in zip(made, kept, strict=True))
        rows[name] = {"group": group.name, "form": name, "ok": ok, "bytes": moved, **facts}
        if ok:
            calls[name] = run
    samples = timing.time_interleaved(graphs.of_calls(calls, len(sets)), rounds=args.rounds)
    for name, row in rows.items():
        if name not in samples:
            continue
        row["seconds"] = timing.median(samples[name]).median / len(sets)
        for other in (WITHOUT, COPY, TODAY):
            if other in samples and other != name:
                ratio = timing.paired_ratio(samples[other], samples[name])
                row[f"speed of {other}"] = ratio.to_list()
        row["clocks"] = device.clocks()
    return list(rows.values())


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows."""
    header = ["rows", "form", "bits", "registers", "spills", "shared", "steps", "us", WITHOUT,
              COPY, TODAY]  # fmt: skip
    lines = []
    for r in rows:
        facts = [str(r.get(n, "-")) for n in ("registers", "spill_bytes", "shared_bytes", "steps")]
        us = f"{1e6 * r['seconds']:.2f}" if "seconds" in r else "-"
        ratios = [format_comparison(r.get(f"speed of {one}")) for one in (WITHOUT, COPY, TODAY)]
        lines.append([r["group"], r["form"], "ok" if r["ok"] else "DIFFER", *facts, us, *ratios])
    return header, lines


def run(args: argparse.Namespace) -> int:
    """Measure every group, print the tables, write the record."""
    recording.check_rounds(args)
    rows = []
    with patched_source() as source:
        if args.quick:
            rows = measure_quick(source, args.seed)
            output.print_table(*table(rows))
        else:
            for name in args.groups:
                group = ALL_GROUPS[name]
                found = (
                    measure_compiled(group, source)
                    if args.compiled
                    else measure(group, source, args)
                )
                rows += found
                output.print_table(*table(found))
    if not args.compiled:
        backend = "interpret" if args.quick else "cuda"
        recording.keep(args, "rotated_rows", backend, {"rows": rows})
    return 0 if all(row["ok"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--groups", nargs="+", choices=[*ALL_GROUPS], default=[*ALL_GROUPS])
    parser.add_argument("--compiled", action="store_true", help="registers and memory: no device")
    parser.add_argument("--threads", type=int, default=8, help="compilations at a time")
    args = parser.parse_args(argv)
    return (recording.guarded if args.compiled else recording.main)(run, args)


if __name__ == "__main__":
    sys.exit(main())
