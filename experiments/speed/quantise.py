"""How near does quantising Q, K and V come to the speed of memory?

Varies       the mode: Q and K (balanced), V too (aggressive), rotated rows, rows behind a norm by
             head and tables of RoPE by column; sizes; with ``--against`` the kernels
Holds fixed  N(0, 1) operands in float16, grouped and smoothed as the classes of
             `cupyattn.problem.choose`
Measures     codes and scales of the first head against the mirror, to the bit; time and launches;
             the bytes that the pass must move per second, and as a share of a copy of Q in the same
             rounds; Q counts once, K once and a quarter again, V twice, codes and scales once, and
             tables once. With ``--against``, the speed to that of each folder, and whether the bits
             are the same
Expect       one launch and 70 % of the bandwidth of a copy; rotated at most 1.2 times the time
Run          python -m experiments.speed.quantise [--modes NAME ...] [--against FOLDER ...]
             [--only TEXT] [--quick] [--json FILE]

A FOLDER is kernels_cu of an earlier revision, or a changed copy of today's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.described import describe
from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.memory import data_address
from cupyattn.arrays.operand import Operand
from cupyattn.cli import output
from cupyattn.compiler.target import own_arch
from cupyattn.kernels import ladder
from cupyattn.measure import device, timing
from cupyattn.plans.prepare_rows import prepares_of
from cupyattn.plans.quantize import Part, operand_parts, plan_quantize
from cupyattn.plans.records import Plan, Work
from cupyattn.problem import choose
from cupyattn.problem.form import scale_tiles
from cupyattn.problem.row_preparation import Norm, Preparation, Rope
from cupyattn.quant import QuantConfig
from cupyattn.quant.quantizers import rows_of_mean
from cupyattn.reference.quantize import quantize_mirror
from cupyattn.runtime import ready
from experiments._harness import recording
from experiments._harness.cells import rotating
from experiments._harness.others import format_comparison
from experiments.tuning.kernel_revisions import kernels_in

EPS = 1e-6


@dataclass(frozen=True)
class Mode:
    """A way to make codes. `prepared`: Q and K are normalised by head and turned before."""

    quant: QuantConfig
    prepared: bool = False


MODES = {name: Mode(quant) for name, quant in choose.QUANT.items()} | {
    "rotated": Mode(QuantConfig(rotate="hadamard")),
    **{f"{name}, prepared": Mode(quant, True) for name, quant in choose.QUANT.items()},
}


@dataclass(frozen=True)
class Shape:
    """Operands of one call."""

    batch: int
    heads: int
    length: int
    head_dim: int

    @property
    def name(self) -> str:
        """The sizes, as the table shows them."""
        return f"{self.batch} x {self.heads} x {self.length} x {self.head_dim}"


SHAPES = (
    *(Shape(1, 2048 // d, 16_384, d) for d in (64, 128, 256)),
    *(Shape(60, 2048 // d, 512, d) for d in (64, 128, 256)),
    *(Shape(1, 24, 118_800, d) for d in (64, 128)),
    Shape(1, 24, 4608, 128),
)
QUICK_SHAPES = (Shape(1, 1, 70, 64),)


def preparation_of(mode: Mode, shape: Shape, seed: int) -> Preparation | None:
    """Return what precedes the codes of Q and K, with arrays on the host."""
    if not mode.prepared:
        return Preparation(rotate=True) if mode.quant.rotate else None
    rng = np.random.default_rng(seed)
    tables = (rng.standard_normal((shape.length, shape.head_dim), np.float32) for _ in range(2))
    weights = rng.uniform(0.5, 2, (2, 1, shape.head_dim)).astype(np.float32)
    return Preparation(Rope(*tables, interleaved=True, by_column=True), Norm(*weights, EPS))


def plan_of(
    shape: Shape, quant: QuantConfig, before: Preparation | None, arch: str | None
) -> tuple[dict[str, Part], Plan]:
    """Return what becomes of contiguous operands, and how."""
    sizes = shape.batch, shape.heads, shape.length, shape.head_dim
    x = Operand.contiguous(sizes, 2)
    tiles = scale_tiles(ladder.lookup("fa_int8"), shape.head_dim, quant, arch)
    prepares = prepares_of(before)
    found = operand_parts(quant, tiles, dict.fromkeys("qkv", x), dict.fromkeys("qkv"), prepares)
    return found, plan_quantize("float16", **found, p_type=quant.value_p_type)


def bytes_moved(found: Mapping[str, Part], before: Preparation | None) -> int:
    """Return the bytes that the pass has to move, and no pass on that path fewer."""
    moved = sum(x.nbytes for x in before.buffers.values()) if before else 0
    for name, part in found.items():
        _, _, length, head_dim = part.x.shape
        summed = rows_of_mean(length) if part.sums_apart else length
        read = length + (summed if part.smooth else 0)
        moved += int(np.prod(part.x.shape[:2])) * read * head_dim * part.x.itemsize
        for sizes, dtype in part.buffers(name).values():
            moved += int(np.prod(sizes)) * np.dtype(dtype).itemsize
    return moved


def equal_to_mirror(
    made: ca.QuantizedQKV,
    operands: Sequence[Any],
    quant: QuantConfig,
    before: Preparation | None,
    arch: str | None,
) -> bool:
    """Compare codes and scales of the first head with the mirror's, which takes the means."""
    first = [on_host(x[:1, :1]) for x in operands]
    tiles = scale_tiles(ladder.lookup("fa_int8"), first[0].shape[-1], quant, arch)
    means = {
        name: None if a is None else on_host(a[:1, :1])
        for name, a in (("k_mean", made.k_mean), ("v_mean", made.v_mean))
    }
    wanted = quantize_mirror(*first, quant, tiles, **means, preparation=before)
    names = ("q_codes", "q_scale", "k_codes", "k_scale", "v_codes", "v_scale")
    pairs = [(getattr(made, name), getattr(wanted, name)) for name in names]
    return all(
        mirror is None or on_host(own[:1, :1]).tobytes() == np.ascontiguousarray(mirror).tobytes()
        for own, mirror in pairs
    )


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call that reads these tables and weights, by buffer."""
    if not given:
        return {}
    weights = given["q_norm_weight"][0], given["k_norm_weight"][0]
    tables = given["rope_cos"], given["rope_sin"]
    return {"rope": tables, "rope_interleaved": True, "qk_norm": weights, "qk_norm_eps": EPS}


def same_bits(
    ways: Mapping[str, Mapping[str, Any]], calls: Mapping[str, Callable[[int], Any]]
) -> dict[str, bool]:
    """Run the passes on the first operands; compare all that they write with the first's."""
    for name in ways:
        calls[name](0)
    first, *others = ways
    return {
        name: all(bool((ways[name][n] == x).all()) for n, x in ways[first].items())
        for name in others
    }


def empty_buffers(found: Mapping[str, Part]) -> dict[str, Any]:
    """Return room on the device for codes, scales and means, by buffer."""
    import cupy

    return {
        buffer: cupy.zeros(size, dtype)
        for name, part in found.items()
        for buffer, (size, dtype) in part.buffers(name).items()
    }


def pass_over(plan: Plan, buffers: Mapping[str, Any]) -> Callable[..., None]:
    """Return the pass alone on q, k and v: launches with buffers that are there."""
    import cupy

    call = ready.Ready(Work.of(plan))
    scratch = cupy.empty(call.scratch_bytes, np.uint8)
    fixed = {name: data_address(a) for name, a in buffers.items()}

    def run(q: Any, k: Any, v: Any, *_: Any) -> None:
        given = {name: data_address(a) for name, a in zip("qkv", (q, k, v), strict=True)}
        call.launch(fixed | given, data_address(scratch), cupy.cuda.get_current_stream().ptr)

    return run


def measure(shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Judge all modes on a shape, then time them and a copy in turns."""
    rng = np.random.default_rng(args.seed)
    sizes = shape.batch, shape.heads, shape.length, shape.head_dim
    if args.quick:
        operands = [rng.standard_normal(sizes, np.float32).astype(np.float16) for _ in "qkv"]
    else:
        import cupy

        draws = cupy.random.default_rng(args.seed)
        operands = [draws.standard_normal(sizes, dtype=np.float32).astype("f2") for _ in "qkv"]
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[int], Any]] = {}
    sets: list[tuple[Any, ...]] = []
    held: list[Any] = []  # alive while launches read and write them
    if not args.quick:
        sets = timing.rotated((*operands, cupy.empty_like(operands[0])))
        calls["copy"] = rotating(lambda q, k, v, to: cupy.copyto(to, q), sets)
    for name in args.modes:
        mode, xp = MODES[name], np if args.quick else cupy
        before = preparation_of(mode, shape, args.seed)
        backend = "interpret" if args.quick else "cuda"
        arch = own_arch(backend, describe({"q": operands[0]})["q"])
        found, plan = plan_of(shape, mode.quant, before, arch)
        given = {n: xp.asarray(x) for n, x in before.buffers.items()} if before else {}
        made = ca.quantize(*operands, quant=mode.quant, backend=backend, **options_of(given))
        rows[name] = {
            "mode": name, **asdict(shape), "launches": len(plan.launches),
            "bytes": bytes_moved(found, before), "workspace": sum(w.nbytes for w in plan.workspace),
            "ok": equal_to_mirror(made, operands, mode.quant, before, arch),
        }  # fmt: skip
        if not calls or not rows[name]["ok"]:
            continue
        ways = {name: empty_buffers(found)}
        calls[name] = rotating(pass_over(plan, {**ways[name], **given}), sets)
        for folder in args.against:
            other = f"{name}, {folder}"
            ways[other] = empty_buffers(found)
            with kernels_in(folder.resolve()):
                calls[other] = rotating(pass_over(plan, {**ways[other], **given}), sets)
        held += [given, ways]
        rows[name]["same bits"] = same_bits(ways, calls)
        rows[name]["ok"] = all(rows[name]["same bits"].values())
    if not calls:
        return list(rows.values())
    samples = timing.time_interleaved(calls, rounds=args.rounds)
    for name, row in rows.items():
        if name in samples:
            ratio = timing.paired_ratio(samples["copy"], samples[name])
            share = row["bytes"] / (2 * operands[0].nbytes)
            row["share of copy"] = [share * x for x in ratio.to_list()]
            row["seconds"] = timing.median(samples[name]).median
            row["copy"] = timing.median(samples["copy"]).median
            row["samples"] = {one: samples[one] for one in ("copy", name)}
            row["speed of"] = {
                str(folder): timing.paired_ratio(
                    samples[f"{name}, {folder}"], samples[name]
                ).to_list()
                for folder in args.against
            }
            row["clocks"] = device.clocks()
    return list(rows.values())


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows."""
    folders = list(dict.fromkeys(one for r in rows for one in r.get("speed of", ())))
    header = ["mode", "batch x heads x length x head_dim", "bits", "launches", "MB", "us", "GB/s",
              "of a copy", *folders]  # fmt: skip
    lines = []
    for r in rows:
        seconds = r.get("seconds")
        lines.append([
            r["mode"], Shape(*(r[x.name] for x in fields(Shape))).name,
            "equal" if r["ok"] else "DIFFER", str(r["launches"]), f"{r['bytes'] / 1e6:.1f}",
            f"{1e6 * seconds:.1f}" if seconds else "-",
            f"{r['bytes'] / seconds / 1e9:.0f}" if seconds else "-",
            format_comparison(r.get("share of copy")),
            *(format_comparison(r.get("speed of", {}).get(one)) for one in folders),
        ])  # fmt: skip
    return header, lines


def run(args: argparse.Namespace) -> int:
    """Measure every shape in all modes, print the table, write the record."""
    recording.check_rounds(args)
    if args.quick and args.against:
        raise ValueError(
            f"--against {' '.join(map(str, args.against))} compares times, which --quick does not "
            "measure: leave one of them out"
        )
    rows = []
    shapes = [x for x in (QUICK_SHAPES if args.quick else SHAPES) if args.only in x.name]
    if not shapes:
        raise ValueError(f"--only {args.only!r}: no shape is called so; one is {SHAPES[0].name!r}")
    for shape in shapes:
        found = measure(shape, args)
        rows += found
        output.print_table(*table(found))
    output.print_table(*table(rows))
    recording.keep(args, "quantise", "interpret" if args.quick else "cuda", {"rows": rows})
    return 0 if all(row["ok"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--modes", nargs="+", choices=[*MODES], default=[*MODES])
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose name holds it")
    parser.add_argument("--against", nargs="+", type=Path, default=[], metavar="FOLDER")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
