"""Which other design of the Hopper backward kernels would be faster, and what do its parts cost?

Varies       the design: the patches in experiments/tuning/designs, of backward_keys.cu at 40 heads
             of 128 and of backward_keys_pair.cu at 16 heads of 256; length, causal or not; with
             --grouped 32 heads of 128 over 8 of K and V, 16 of 256 over 2
Holds fixed  16,384 tokens or one entry of batch, bfloat16, N(0, 1), all heads the same
Measures     spills; J2 of one head, and whether all heads have its bits of dK and dV; time, TFLOP/s
             and, in the same rounds, the ratio to the form that calls take; with --joules joules
Expect       the pair at 1.2 times the seven products of two kernels; a design of backward_keys.cu
             that spends less energy, at the limit of power
Run          python -m experiments.tuning.backward_designs [--quick] [--designs NAME ...]
             [--trees FOLDER[:FORM] ...] [--cells 256:16384 ...] [--grouped] [--joules]
             [--seconds 2] [--turns 2] [--json FILE]

A patch begins with its change, the form of calls that run it, and whether gradients stay right.
Where they do not, a part is left out, and the time alone says something. A design that hangs is the
last one whose name is printed. --trees are whole copies of kernels_cu. They replace the patches
that --designs does not name.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.kernels import backward_tiles
from cupyattn.measure import device, timing, words
from cupyattn.ops.backward import BACKWARD, resolved_backward
from cupyattn.ops.operation import make_ready
from cupyattn.problem import backward_form
from experiments._harness import joules, patches, recording
from experiments._harness.cells import Problem
from experiments._harness.others import format_comparison
from experiments.speed import backward
from experiments.tuning.kernel_revisions import kernels_in
from experiments.tuning.race import parse_cell

FOLDER = Path(__file__).parent / "designs"
#: Query heads by head_dim, and the cells.
HEADS = {64: 32, 128: 40, 256: 16}
CELLS = ("256:16384", "256:4096", "256:16384c", "128:16384", "128:8192c")
#: Buffers of what a backward pass is given, in its order.
BUFFERS = ("d_out", "q", "k", "v", "o", "lse")
#: Sources without a patch: the form that calls take, and past head_dim 128 the pair that adds in
#: turn, and seven products in two kernels.
TAKEN, TURNS, TWO_KERNELS = "taken", "turns", "two_kernels"
#: Option `deterministic` of the calls that run a form.
FORMS = {"sm90_atomic": False, "sm90_deterministic": True}
#: Number of calls whose bits must equal the bits of a first call, if the form repeats them.
REPEATS = 10


@dataclass(frozen=True)
class Design:
    """The sources of a backward pass, and the calls that run them.

    Parameters
    ----------
    name : str
    deterministic : bool or None
        Option of `cupyattn.attention_backward`.
    right : bool
        Whether gradients are right.
    hunks : tuple of Hunk
        What it changes.
    tree : Path, optional
        A copy of kernels_cu that it changes no further.
    """

    name: str
    deterministic: bool | None = None
    right: bool = True
    hunks: tuple[patches.Hunk, ...] = ()
    tree: Path | None = None

    @classmethod
    def read(cls, path: Path) -> Design:
        """Read a patch, below a sentence, its form and a word on its gradients."""
        _, form, gradients, *diff = path.read_text(encoding="utf-8").splitlines(keepends=True)
        forms = {f"form: {name}\n": how for name, how in FORMS.items()}
        rights = {"gradients: right\n": True, "gradients: wrong\n": False}
        return cls(path.stem, forms[form], rights[gradients], patches.hunks_of(diff))

    @classmethod
    def of_tree(cls, text: str) -> Design:
        """Return the design of a copy of kernels_cu, given as FOLDER or FOLDER:FORM."""
        path, _, form = text.partition(":")
        if form not in ("", *FORMS) or not (Path(path) / "backward").is_dir():
            raise ValueError(
                f"--trees: each is a copy of kernels_cu and perhaps :FORM of {list(FORMS)}, "
                f"got {text!r}"
            )
        name = Path(path).name + (f":{form}" if form else "")
        return cls(name, FORMS.get(form), tree=Path(path).resolve())

    @property
    def paired(self) -> bool:
        """Whether it is of the kernel that runs in pairs of blocks."""
        return self.name.startswith("pair_")

    def takes(self, head_dim: int) -> bool:
        """Whether calls of a head_dim run it."""
        wide = self.paired or self.name in (TURNS, TWO_KERNELS)
        return self.name == TAKEN or bool(self.tree) or wide == (head_dim > backward_tiles.SUMMED)

    @contextlib.contextmanager
    def in_place(self, folder: Path) -> Iterator[None]:
        """Let calls be compiled from its sources, which are put into a folder."""
        sources = self.tree or folder / self.name
        if not sources.exists():
            shutil.copytree(compiler.KERNELS, sources)
            patches.apply(self.name, self.hunks, sources)
        pairs = without_pairs() if self.name == TWO_KERNELS else contextlib.nullcontext()
        with kernels_in(sources), pairs:
            yield


@contextlib.contextmanager
def without_pairs() -> Iterator[None]:
    """Let calls past head_dim 128 run in no pairs of blocks."""
    takes = backward_form.pairs_take
    backward_form.pairs_take = lambda call: False
    try:
        yield
    finally:
        backward_form.pairs_take = takes


def designs(names: Sequence[str] = (), trees: Sequence[str] = ()) -> list[Design]:
    """Return the form that is taken, and the designs of these names and trees, by default all."""
    found = [Design(name, deterministic=True) for name in (TURNS, TWO_KERNELS)]
    found += [Design.read(path) for path in sorted(FOLDER.glob("*.patch"))]
    unknown = set(names) - {one.name for one in found}
    if unknown:
        raise ValueError(f"--designs: there are {[x.name for x in found]}, got {sorted(unknown)}")
    named = [one for one in found if one.name in names or not (names or trees)]
    return [Design(TAKEN), *named, *map(Design.of_tree, trees)]


def received(problem: Problem, *, on_device: bool) -> dict[str, Any]:
    """Return the arrays of a backward pass by buffer: one head is drawn, and the others are it."""
    q, k, v = replace(problem, batch=1, heads=1, heads_kv=None).host()
    rng = np.random.default_rng(problem.seed + 1)
    d_out = rng.standard_normal(q.shape, np.float32).astype(q.dtype)
    arrays = {"d_out": d_out, "q": q, "k": k, "v": v}
    xp: Any = np
    if on_device:
        import cupy as xp

    arrays = {n: xp.asarray(x) for n, x in arrays.items()}
    rows = (arrays[n] for n in "qkv")
    # NOTE: of the one head. Of all, some tiles are cut at other keys, and their last bits differ.
    out, lse = ca.attention(*rows, variant="fa_tc", causal=problem.causal, return_lse=True)
    heads = dict.fromkeys("kv", problem.key_heads)
    return {
        n: xp.ascontiguousarray(
            xp.broadcast_to(x, (problem.batch, heads.get(n, problem.heads), *x.shape[2:]))
        )
        for n, x in (arrays | {"o": out, "lse": lse}).items()
    }


def prepared(
    design: Design, problem: Problem, arrays: Mapping[str, Any], folder: Path
) -> tuple[Callable[[], dict[str, Any]], int]:
    """Return a call of a design that returns gradients by name, and the bytes that it spills."""
    options = {"causal": problem.causal, "deterministic": design.deterministic}
    d_out, q, k, v, out, lse = (arrays[n] for n in BUFFERS)
    with design.in_place(folder):
        call = resolved_backward("attention_backward", d_out, q, k, v, out, lse, options)
        work = BACKWARD.plan(call)
        ready = make_ready(call, work)
        binaries = [compiler.build(x.module, "sm_90a") for p in work.plans for x in p.launches]
    spilled = sum(x.spill_stores for b in binaries for x in b.kernels.values())
    addresses = {n: x.data.ptr for n, x in arrays.items()}
    return lambda: ready(arrays, dict(addresses)), spilled


def repeated(call: Callable[[], Any]) -> Callable[[int], Any]:
    """Return a call that takes a running number."""
    return lambda _: call()


def judged(problem: Problem, found: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Hold one head of gradients to its bound, and compare the bits of dK and dV of all heads."""
    given = [arrays[n] for n in BUFFERS]
    row = backward.judge(problem, backward.ATOMIC, [found[f"d{n}"] for n in "qkv"], given)
    alike = all(heads_are_alike(found[n].view("uint16"), problem.causal) for n in ("dk", "dv"))
    return {"j2": row["j2"], "alike": alike, "ok": row["ok"] and alike}


def heads_are_alike(bits: Any, causal: bool) -> bool:
    """Return whether all heads have the same bits.

    Under a causal mask the last heads that take turns step over their rows in reverse. So there a
    head may also have the bits of the last head.
    """
    same = (bits == bits[:1, :1]).all(axis=(2, 3))
    if causal:
        same |= (bits == bits[-1:, -1:]).all(axis=(2, 3))
    return bool(same.all())


def repeats(call: Callable[[], Mapping[str, Any]]) -> bool:
    """Return whether gradients have the same bits in every call."""
    first = [x.copy() for x in call().values()]
    for _ in range(REPEATS):
        both = zip(first, call().values(), strict=True)
        if any((x.view("uint16") != y.view("uint16")).any() for x, y in both):
            return False
    return True


def measure(problem: Problem, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Judge every design on one problem, and on a device time all of them."""
    arrays = received(problem, on_device=not args.quick)
    some = [one for one in designs(args.designs, args.trees) if one.takes(problem.head_dim)]
    some = some[:1] if args.quick else some  # the mirror has no design
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[int], Any]] = {}
    for one in some:
        row: dict[str, Any] = {"variant": one.name, "right": one.right, "ok": True}
        print(f"{problem.name}: {one.name}", flush=True)
        if args.quick:
            given = (arrays[n] for n in BUFFERS)
            found = ca.attention_backward(*given, causal=problem.causal)._asdict()
        else:
            call, row["spill_bytes"] = prepared(one, problem, arrays, folder)
            calls[one.name] = repeated(call)
            found = call()
        row |= judged(problem, found, arrays) if one.right else {}
        if one.right and one.deterministic and not args.quick:
            row["repeats"] = repeats(call)
            row["ok"] &= row["repeats"]
        rows.append(row)
    content = {"problem": vars(problem) | {"name": problem.name}, "rows": rows}
    return content if args.quick else content | timed(problem, rows, calls, args)


def timed(
    problem: Problem,
    rows: Sequence[dict[str, Any]],
    calls: Mapping[str, Callable[[int], Any]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Add the times of calls to their rows."""
    operations = problem.operations * 5 // 2
    samples = timing.time_interleaved(calls, rounds=args.rounds)
    for row in rows:
        row["samples"] = samples[row["variant"]]
        row["seconds"] = timing.median(row["samples"]).median
        row["tflops"] = operations / row["seconds"] / 1e12
        ratio = timing.paired_ratio(samples[rows[0]["variant"]], row["samples"])
        row["speed"] = ratio.to_list()
    if args.joules:
        typical = {row["variant"]: row["seconds"] for row in rows}
        counted = joules.on_device(calls, typical, args.seconds, args.turns, operations)
        of_taken = counted[rows[0]["variant"]]["joules_of_turns"]
        for row in rows:
            row["energy"] = counted[row["variant"]]
            own = row["energy"]["joules_of_turns"]
            row["joules"] = timing.paired_ratio(own, of_taken).to_list()
    return {"operations": operations, "clocks": device.clocks()}


def report(found: Mapping[str, Any]) -> None:
    """Print the table of one problem."""
    rows = []
    for row in found["rows"]:
        told = f"{row['j2']:.3f}" if row["right"] else "not judged"
        cells = [row["variant"], told if row["ok"] else f"{told} FAILED"]
        cells.append(str(row.get("spill_bytes", "-")))
        if "seconds" in row:
            cells += [words.format_seconds(row["seconds"]), f"{row['tflops']:.4g}"]
            cells.append(format_comparison(row["speed"]))
        else:
            cells += ["-"] * 3
        energy = backward.of_energy(row)
        rows.append([*cells, energy[0], format_comparison(row.get("joules")), *energy[1:]])
    print(f"\n{found['problem']['name']}")
    header = ["", "J2", "spilled", "time", "TFLOP/s", f"speed / {TAKEN}"]
    output.print_table([*header, "J a call", f"J / {TAKEN}", "W", "SM MHz"], rows)


def run(args: argparse.Namespace) -> int:
    """Run the experiment, print the tables, write the record."""
    recording.check_rounds(args)
    joules.check_seconds(args.seconds)
    found: list[dict[str, Any]] = []
    content = {"rounds": 0 if args.quick else args.rounds, "problems": found}
    for text in args.cells:
        cell = replace(parse_cell(text, args.seed), dtype="bfloat16")
        known = [x[0] for x in backward.GROUPED] if args.grouped else [*HEADS]
        if cell.head_dim not in known:
            raise ValueError(f"--cells: head_dim must be one of {known}, got {text!r}")
        heads, heads_kv = HEADS[cell.head_dim], None
        if args.grouped:
            _, heads, heads_kv = next(x for x in backward.GROUPED if x[0] == cell.head_dim)
        if args.quick:
            heads, heads_kv = (1, None) if heads_kv is None else (heads // heads_kv, 1)
        length = recording.quick_length(args, cell.length)
        batch = 1 if args.quick else cell.batch
        problem = replace(cell, heads=heads, heads_kv=heads_kv, length=length, batch=batch)
        with tempfile.TemporaryDirectory(prefix="cupyattn-designs-") as folder:
            found.append(measure(problem, args, Path(folder)))
        report(found[-1])
        recording.keep(args, "backward_designs", "mirror" if args.quick else "cuda", content)
    return 0 if all(row["ok"] for one in found for row in one["rows"]) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), metavar="CELL")
    parser.add_argument("--designs", nargs="+", default=[], metavar="NAME", help="these alone")
    parser.add_argument("--trees", nargs="+", default=[], metavar="FOLDER[:FORM]")
    parser.add_argument("--grouped", action="store_true", help="heads that share keys")
    parser.add_argument("--joules", action="store_true", help="count the energy of each")
    parser.add_argument(
        "--seconds", type=float, default=joules.LEAST_SECONDS, help="of each window of --joules"
    )
    parser.add_argument("--turns", type=int, default=2, help="windows of each design")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
