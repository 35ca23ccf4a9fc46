"""Which form of norm_quant is fastest with rotated rows, and what does each part of it cost?

Varies       where the next row of a team waits: nowhere, in registers, in shared memory (one row or
             two), in the L2 cache; teams of a block, blocks of a multiprocessor; one warp or three
             for a row of 3,072; rows and factors as floats or as words; sets of runs that wait in
             shared memory; factors in registers; parts that are left out: most reads of factors,
             the exchange between lanes, stores, sums over lanes
Holds fixed  bfloat16 rows of Flux, Wan and Kandinsky, N(0, 1), as in experiments.speed.norm_quant
Measures     registers, spills, shared memory; codes and scales against the mirror and today's
             kernel, to the bit; then the time of CUDA graphs in turns with the pass without
             rotation and with a copy of the same bytes
Expect       12 warps a multiprocessor win, with nothing ahead or one row in shared memory. At
             4,608 x 3,072 they reach 0.83 of the speed without rotation (0.63 today)
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
from unittest import mock

import numpy as np

from cupyattn import errors, interpret
from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.memory import data_address
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels import row_teams
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
#: ``enum class Ahead`` of the patch.
NOWHERE, REGISTERS, SHARED, L2 = range(4)
#: Parts that are left out, bits of CFG_LEAVE.
PARTS = {"factors": 1, "exchange": 2, "stores": 4, "sums": 8, "all four": 15}


@dataclass(frozen=True)
class Form:
    """A form of the kernel: `teams` in a block, `blocks` on a multiprocessor, lanes of a row.

    `lanes` are 0 for a team as it is planned. With `late` rows stay words of 16 bits, which are
    converted for each sum and again for each set of runs that is rotated. `stays` sets wait in
    shared memory for the scale, and `words` are factors as they are stored.
    """

    ahead: int
    teams: int
    blocks: int
    lanes: int = 0
    stages: int = 1
    keeps: bool = False
    late: bool = False
    stays: int = 0
    words: bool = False
    without: str = ""

    @property
    def name(self) -> str:
        """The differences, in words."""
        found = ("nothing ahead", "in registers", f"{self.stages} in shared memory", "in L2")
        parts = [found[self.ahead], f"{self.teams} teams x {self.blocks} blocks"]
        parts += [f"{self.lanes // 32} warps a row"] * bool(self.lanes)
        parts += ["rows as words"] * self.late + [f"{self.stays} sets stay"] * bool(self.stays)
        parts += ["factors as words"] * self.words + ["factors in registers"] * self.keeps
        parts += [f"no {self.without}"] * bool(self.without)
        return ", ".join(parts)


ROWS_OF_A_WARP = (
    Form(REGISTERS, 4, 2), Form(REGISTERS, 8, 1), Form(NOWHERE, 4, 3), Form(NOWHERE, 12, 1),
    Form(L2, 4, 3), Form(L2, 12, 1), Form(SHARED, 4, 3), Form(SHARED, 6, 2), Form(SHARED, 12, 1),
    Form(SHARED, 12, 1, stages=2),
)  # fmt: skip
THREE_WARPS = (
    Form(NOWHERE, 9, 1, 96), Form(REGISTERS, 9, 1, 96), Form(L2, 9, 1, 96), Form(NOWHERE, 3, 3, 96),
    Form(NOWHERE, 1, 5, 96, keeps=True), Form(SHARED, 1, 4, 96, keeps=True),
)  # fmt: skip
#: A row ahead in registers, or rows and factors that take less room, beside 12 warps.
WORDS = (
    Form(NOWHERE, 12, 1, late=True), Form(REGISTERS, 12, 1, late=True, stays=1),
    Form(REGISTERS, 4, 3, late=True, stays=1), Form(SHARED, 12, 1, late=True),
)  # fmt: skip
FACTOR_WORDS = (
    Form(SHARED, 12, 1, words=True), Form(NOWHERE, 4, 3, late=True, words=True),
    Form(REGISTERS, 12, 1, late=True, stays=1, words=True),
)  # fmt: skip
PARTED = (Form(REGISTERS, 2, 4), Form(NOWHERE, 4, 3))
FORMS: dict[str, tuple[Form, ...]] = {
    "Flux, modulated": ROWS_OF_A_WARP + WORDS + FACTOR_WORDS + THREE_WARPS + tuple(
        replace(one, without=part) for one in PARTED for part in PARTS
    ),
    "4,096 rows": ROWS_OF_A_WARP + WORDS + FACTOR_WORDS + THREE_WARPS,
    "RMS, weight": ROWS_OF_A_WARP[1:] + WORDS,
    "Wan, modulated": (
        Form(REGISTERS, 4, 1), Form(NOWHERE, 2, 2), Form(NOWHERE, 6, 1), Form(L2, 2, 2),
        Form(SHARED, 2, 2), Form(SHARED, 4, 1), Form(SHARED, 2, 2, stages=2),
        Form(NOWHERE, 1, 3, keeps=True),
    ),
    "GELU": (Form(NOWHERE, 1, 2), Form(L2, 1, 2), Form(SHARED, 1, 2), Form(SHARED, 1, 3)),
    "Kandinsky, modulated": (
        Form(NOWHERE, 4, 4), Form(NOWHERE, 12, 1), Form(NOWHERE, 16, 1), Form(L2, 4, 4),
        Form(SHARED, 4, 4), Form(SHARED, 16, 1), Form(NOWHERE, 4, 4, late=True),
        Form(REGISTERS, 12, 1, late=True),
    ),
}  # fmt: skip
ALL_GROUPS = {one.name: one for one in GROUPS if one.name in FORMS} | {
    "4,096 rows": Group("4,096 rows", 4096, 3072, "layer", MODULATED)
}
QUICK = Group("few", 5, 1536, "layer", MODULATED)
QUICK_FORMS = (
    Form(SHARED, 2, 1, stages=2), Form(L2, 4, 1),
    Form(REGISTERS, 2, 1, late=True, stays=1, words=True),
)  # fmt: skip


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
    lanes = form.lanes or launch.block // defines["CFG_BLOCK_M"]
    vectors = defines["CFG_MODULATION"] or defines["CFG_WEIGHT"]
    defines |= {
        "CFG_AHEAD": form.ahead, "CFG_STAGES": form.stages, "CFG_KEEP": int(form.keeps),
        "CFG_LATE": int(form.late), "CFG_STAY": form.stays, "CFG_WORDS": int(form.words),
        "CFG_LEAVE": PARTS.get(form.without, 0), "CFG_BLOCK_M": form.teams,
        "CFG_BLOCKS_PER_SM": form.blocks, "CFG_NUM_WARPS": form.teams * lanes // 32,
        "CFG_FACTORS": int(bool(vectors) and form.teams > 1),
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


def mirror_of(group: Group, arrays: Mapping[str, Array], form: Form | None) -> tuple[Any, Any]:
    """Return codes and scales of the first rows, with sums in the order of the form's lanes."""
    count, own = min(CHECKED_ROWS, group.rows), row_teams.team_of
    host = {n: on_host(x[:count] if x.shape[0] == group.rows else x) for n, x in arrays.items()}
    as_three = form is not None and form.lanes > 0

    def team_of(channels: int, of: int = 0, *, normed: bool = True) -> row_teams.Team:
        return own(channels, of, normed=normed and not as_three)

    with mock.patch.object(row_teams, "team_of", team_of):
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
        ok = equal((made["codes"], made["scales"]), mirror_of(QUICK, arrays, form))
        rows.append(
            {"group": QUICK.name, "form": form.name, "ok": ok, "steps": work.plans[0].steps}
        )
    return rows


def measure_compiled(group: Group, source: Path) -> list[dict[str, Any]]:
    """Return what the compiler says of every form for a group."""
    few = replace(group, rows=64)
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
        ok = ok or bool(group.activation) or equal(made, mirror_of(group, arrays, form))
        if form and not (form.lanes or form.without):
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
