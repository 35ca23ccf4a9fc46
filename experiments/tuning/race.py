"""Which of several candidates for one form of a rung is fastest?

Varies       candidates: folders laid over kernels_cu, and tiles; head_dim, length, causal or not;
             rung and form (fa_tc for sm_90a, its Hopper form, if not told otherwise)
Holds fixed  16,384 tokens in all, heads x head_dim = 2048, float16, N(0, 1)
Measures     registers, spills, shared memory; J2, relative error; time, and in the same rounds the
             ratio to the first candidate and to a rival; the rival of the Hopper form is the faster
             of cuDNN and FlashAttention-3, of the portable form FlashAttention-2
Expect       stated beforehand by the author of the candidates
Run          python -m experiments.tuning.race now wide@192x96w16s2 new=FOLDER
             both=FOLDER@128x160w12s2 [--rung fa_tc --arch sm_90] [--cells 128:512 64:4096c ...]
             [--quick] [--json FILE]

A candidate is NAME[=FOLDER][@TILES]: FOLDER holds its changed files of kernels_cu, TILES replace
the registry's. A cell is HEAD_DIM:LENGTH, causal with a c behind it, or HEAD_DIM:LENGTHxKEYS.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cupyattn as ca
from cupyattn.arrays.operand import Operand
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.kernels import ladder
from cupyattn.measure.words import align
from cupyattn.plans import attention
from cupyattn.plans.records import Plan
from cupyattn.problem.form import check_kernel, settle
from cupyattn.problem.operands import Operands
from cupyattn.runtime import ready
from experiments._harness import recording
from experiments._harness.cells import Cell, Problem, describe_tiles, reason, resources
from experiments._harness.others import (
    FLASH_2,
    RIVALS,
    fastest,
    flash_attention_3,
    format_comparison,
    geometric_mean,
    ratio,
    sdpa,
)  # fmt: skip
from experiments.speed.peers import TOKENS, WIDTH

CELLS = ("128:512", "128:1024", "128:4096", "128:16384", "128:4096c", "64:4096")


@dataclass(frozen=True)
class Form:
    """One form of a rung: what the candidates are for."""

    variant: ladder.Variant
    arch: str

    @property
    def name(self) -> str:
        """``"sm90"`` where the architecture has the rung's Hopper form, else ``"portable"``."""
        return "sm90" if self.arch == "sm_90a" and "sm90" in self.variant.forms else "portable"

    @property
    def source(self) -> str:
        """Path of its source below kernels_cu."""
        return str(self.variant.forms[self.name].source)

    def rivals(self, problem: Problem) -> list[Cell]:
        """Return the calls of available rivals on a problem."""
        flash_2, *cudnn = sdpa(problem) or [None]
        if self.name == "portable":
            return [flash_2] if flash_2 else []
        return [*cudnn, *flash_attention_3(problem)]


HOPPER = Form(ladder.lookup("fa_tc"), "sm_90a")


@dataclass(frozen=True)
class Candidate:
    """A candidate: a source, in a folder with all that it includes, and tiles or None."""

    name: str
    source: Path
    tiles: ca.Tiles | None = None
    form: Form = HOPPER


def parse_candidate(text: str, stage: Path, form: Form = HOPPER) -> Candidate:
    """Return the candidate that NAME[=FOLDER][@TILES] stands for, its sources whole in `stage`.

    Examples
    --------
    >>> parse_candidate("now@192x96w16s2", Path("unused")).tiles
    Tiles(block_q=192, block_kv=96, num_warps=16, num_stages=2)
    """
    match = re.fullmatch(r"([\w.+-]+)(?:=([^@]+))?(?:@(\d+)x(\d+)w(\d+)s(\d+))?", text)
    if match is None:
        raise ValueError(f"a candidate looks like NAME[=FOLDER][@192x128w16s2], got {text!r}")
    name, folder = match[1], match[2]
    tiles = ca.Tiles(*map(int, match.groups()[2:])) if match[3] else None
    if folder is None:
        return Candidate(name, compiler.KERNELS / form.source, tiles, form)
    if not Path(folder).is_dir():
        raise ValueError(f"{name}: {folder} is not a folder")
    whole = stage / name
    for changes in (compiler.KERNELS, Path(folder)):
        shutil.copytree(changes, whole, dirs_exist_ok=True)
    # NOTE: a source finds headers beside itself first, so it includes these, not the package's.
    source = whole / Path(form.source).name
    if form.name == "sm90":
        shutil.copy(whole / form.source, source)
    return Candidate(name, source, tiles, form)


def parse_cell(text: str, seed: int = 0) -> Problem:
    """Return the problem that HEAD_DIM:LENGTH[c] or HEAD_DIM:LENGTHxKEYS stands for.

    Examples
    --------
    >>> parse_cell("128:512c").name
    'B32 H16 512 hd128 float16 causal normal'
    """
    match = re.fullmatch(r"(\d+):(\d+)(?:(c)|x(\d+))?", text)
    if match is None:
        raise ValueError(f"a cell looks like 128:512, 128:512c or 64:4096x77, got {text!r}")
    head_dim, length = int(match[1]), int(match[2])
    batch, heads = max(1, TOKENS // length), max(1, WIDTH // head_dim)
    keys = int(match[4]) if match[4] else None
    return Problem(
        batch, heads, length, head_dim, causal=bool(match[3]), seed=seed, length_kv=keys
    )  # fmt: skip


def plan_of(candidate: Candidate, problem: Problem, *operands: Operand) -> Plan:
    """Return the plan of the form with a candidate's source and tiles."""
    form = candidate.form
    lie = Operands(*operands)
    kernel = settle(form.variant, problem.call, lie, tiles=candidate.tiles, arch=form.arch)
    check_kernel(kernel, lie)
    plan = attention.plan_attention(kernel, lie)
    if plan.form != form.name:
        raise ca.UnsupportedError(plan.note)
    first, *rest = plan.launches  # those after it merge the pieces of tiles that were cut
    own = replace(first, module=replace(first.module, source=candidate.source))
    return replace(plan, launches=(own, *rest))


def runner(candidate: Candidate, problem: Problem) -> Callable[[Any, Any, Any], Any]:
    """Return what computes O: the candidate on a device, the mirror on NumPy arrays."""
    plans: dict[tuple[Operand, ...], Plan] = {}

    def run(q: Any, k: Any, v: Any) -> Any:
        if hasattr(q, "__array_interface__"):
            return ca.attention(
                q, k, v, variant=candidate.form.variant.name, causal=problem.causal, tiles=tiles,
                arch=candidate.form.arch,
            )
        import cupy

        o = cupy.empty(problem.call.output_shape, q.dtype)
        operands = tuple(Operand.of(x) for x in (q, k, v, o))
        if operands not in plans:
            plans[operands] = plan_of(candidate, problem, *operands)
        ready.run(plans[operands], {"q": q, "k": k, "v": v, "o": o}, candidate.form.arch)
        return o

    tiles = tiles_of(candidate, problem)
    return run


def tiles_of(candidate: Candidate, problem: Problem) -> ca.Tiles:
    """Return the tiles that a candidate has for a problem."""
    form = candidate.form
    return settle(form.variant, problem.call, tiles=candidate.tiles, form=form.name).tiles


def compiled(candidate: Candidate, problem: Problem) -> Cell | str:
    """Return the cell of a candidate with the compiler's figures, or why it does not compile."""
    shape = problem.call.output_shape
    operand = Operand.contiguous(shape, 2)
    try:
        plan = plan_of(candidate, problem, operand, operand, operand, operand)
        facts = resources(plan.launches[0], candidate.form.arch)
    except (ca.KernelCompileError, ca.UnsupportedError, ValueError) as error:
        return reason(error)
    tiles = tiles_of(candidate, problem)
    return Cell(
        candidate.name, candidate.form.variant.name, runner(candidate, problem), tiles=tiles,
        arch=candidate.form.arch, facts={"tiles": vars(tiles), **facts},
    )  # fmt: skip


def taken(cell: Cell) -> str:
    """Return what a compiled cell takes, in one line."""
    facts = cell.facts
    tiles = ca.Tiles(**facts["tiles"])
    return (
        f"{describe_tiles(tiles)}: {facts['registers']} registers, "
        f"{facts['spill_bytes']} bytes spilled, {facts['shared_bytes']} bytes shared"
    )


def cells(
    candidates: Sequence[Candidate], problems: Sequence[Problem], threads: int
) -> Iterator[tuple[Problem, list[Cell], dict[str, str]]]:
    """Yield for each problem the candidates that compile, and why the others do not."""
    pairs = [(c, p) for p in problems for c in candidates]
    with ThreadPoolExecutor(threads) as pool, output.progress("compiling", len(pairs)) as advance:
        found = []
        for (candidate, _), result in zip(
            pairs, pool.map(lambda pair: compiled(*pair), pairs), strict=True
        ):
            advance(candidate.name)
            found.append(result)
    for i, problem in enumerate(problems):
        own = found[i * len(candidates) : (i + 1) * len(candidates)]
        named = zip(candidates, own, strict=True)
        rejected = {c.name: result for c, result in named if isinstance(result, str)}
        yield problem, [result for result in own if isinstance(result, Cell)], rejected


# ---- what came of it -----------------------------------------------------------------------------


def compared(record: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each problem every candidate's ratio to the first and to the fastest rival."""
    result = []
    for found in record["problems"]:
        rows = {row["variant"]: row for row in found["rows"]}
        rival = fastest(rows, (FLASH_2, *RIVALS))
        result.append({
            "problem": found["problem"]["name"],
            "first": {name: ratio(rows.get(names[0]), rows.get(name)) for name in names},
            "rival": {name: ratio(rival, rows.get(name)) for name in names},
        })  # fmt: skip
    return result


def summary(comparison: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return one table: every candidate beside the first, then beside the fastest rival."""
    header = ["", "against", *names]
    rows = []
    for beside in ("first", "rival"):
        title = names[0] if beside == "first" else "rival"
        ratios: dict[str, list[float]] = {name: [] for name in names}
        for found in comparison:
            cells = []
            for name in names:
                value = found[beside][name]
                cells.append(format_comparison(value))
                if value is not None:
                    ratios[name].append(value[0])
            if set(cells) != {"-"}:
                rows.append([found["problem"], title, *cells])
        if any(ratios.values()):
            means = [
                f"{geometric_mean(some):.3f} ({len(some)})" if some else "-"
                for some in ratios.values()
            ]
            rows.append(["geometric mean (of so many)", title, *means])
    return align([header, *rows])


def run(args: argparse.Namespace) -> int:
    """Run the race and print one table."""
    names = [text.partition("=")[0].partition("@")[0] for text in args.candidates]
    if len(set(names)) < len(names):
        raise ValueError(f"two candidates have one name: {', '.join(names)}")
    form = Form(ladder.lookup(args.rung), args.arch)
    problems = [parse_cell(text, args.seed) for text in args.cells]
    if args.quick:
        problems = [
            replace(p, batch=1, heads=1, length=recording.quick_length(args, p.length))
            for p in problems
        ]
    with tempfile.TemporaryDirectory(prefix="cupyattn-race-") as folder:
        candidates = [parse_candidate(text, Path(folder), form) for text in args.candidates]
        grid, rejected = [], {}
        for problem, some, others in cells(candidates, problems, args.threads):
            rejected[problem.name] = others
            for cell in some:
                print(f"{problem.name}: {cell.name} {taken(cell)}")
            for name, why in others.items():
                print(f"{problem.name}: {name} takes no part: {why}")
            rivals = [] if args.quick else form.rivals(problem)
            grid.append((problem, some + rivals))
        record = recording.run_grid(
            args, "race", grid, baseline=names[0], extra={"rejected": rejected}
        )
    comparison = compared(record, names)
    print("\nspeed, with 95 % intervals:")
    print(summary(comparison, names))
    return 0 if recording.passed(record) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("candidates", nargs="+", metavar="CANDIDATE")
    parser.add_argument("--rung", default=HOPPER.variant.name, help="a 16 or 32-bit rung")
    parser.add_argument("--arch", default=HOPPER.arch, help="sm_90a: its Hopper form if it has one")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), metavar="CELL")
    parser.add_argument("--threads", type=int, default=4, help="compilations at a time")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
