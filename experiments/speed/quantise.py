"""How near does quantising Q, K and V come to the speed of memory?

Varies       the mode: Q and K (balanced), the same rotated, V too (aggressive); head_dim; batch,
             heads and length
Holds fixed  N(0, 1) operands in float16, grouped and smoothed as the classes of
             `cupyattn.problem.choose`
Measures     codes and scales of the first head against the mirror, to the bit; time and launches;
             the bytes that the pass must move per second, and as a share of a copy of Q in the same
             rounds; Q counts once, K once and a quarter again, V twice, codes and scales once
Expect       one launch and 70 % of the bandwidth of a copy; rotated at most 1.2 times the time
Run          python -m experiments.speed.quantise [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from cupyattn.problem.row_preparation import Preparation
from cupyattn.quant import QuantConfig
from cupyattn.quant.quantizers import rows_of_mean
from cupyattn.reference.quantize import quantize_mirror
from cupyattn.runtime import ready
from experiments._harness import recording
from experiments._harness.cells import rotating
from experiments._harness.others import format_comparison

MODES = choose.QUANT | {"rotated": QuantConfig(rotate="hadamard")}


@dataclass(frozen=True)
class Shape:
    """Operands of one call."""

    batch: int
    heads: int
    length: int
    head_dim: int


SHAPES = (
    *(Shape(1, 2048 // d, 16_384, d) for d in (64, 128, 256)),
    *(Shape(60, 2048 // d, 512, d) for d in (64, 128, 256)),
    *(Shape(1, 24, 118_800, d) for d in (64, 128)),
)
QUICK_SHAPES = (Shape(1, 1, 70, 64),)


def preparation_of(quant: QuantConfig) -> Preparation | None:
    """Return what precedes the codes of Q and K."""
    return Preparation(rotate=True) if quant.rotate else None


def plan_of(shape: Shape, quant: QuantConfig, arch: str | None) -> tuple[dict[str, Part], Plan]:
    """Return what becomes of contiguous operands, and how."""
    sizes = shape.batch, shape.heads, shape.length, shape.head_dim
    x = Operand.contiguous(sizes, 2)
    tiles = scale_tiles(ladder.lookup("fa_int8"), shape.head_dim, quant, arch)
    prepares = prepares_of(preparation_of(quant))
    found = operand_parts(quant, tiles, dict.fromkeys("qkv", x), dict.fromkeys("qkv"), prepares)
    return found, plan_quantize("float16", **found, p_type=quant.value_p_type)


def bytes_moved(found: Mapping[str, Part]) -> int:
    """Return the bytes that the pass has to move, and no pass on that path fewer."""
    moved = 0
    for name, part in found.items():
        _, _, length, head_dim = part.x.shape
        summed = rows_of_mean(length) if part.sums_apart else length
        read = length + (summed if part.smooth else 0)
        moved += int(np.prod(part.x.shape[:2])) * read * head_dim * part.x.itemsize
        for sizes, dtype in part.buffers(name).values():
            moved += int(np.prod(sizes)) * np.dtype(dtype).itemsize
    return moved


def equal_to_mirror(
    made: ca.QuantizedQKV, operands: Sequence[Any], quant: QuantConfig, arch: str | None
) -> bool:
    """Compare codes and scales of the first head with the mirror's, which takes the means."""
    first = [on_host(x[:1, :1]) for x in operands]
    tiles = scale_tiles(ladder.lookup("fa_int8"), first[0].shape[-1], quant, arch)
    means = {
        name: None if a is None else on_host(a[:1, :1])
        for name, a in (("k_mean", made.k_mean), ("v_mean", made.v_mean))
    }
    how = preparation_of(quant)
    wanted = quantize_mirror(*first, quant, tiles, **means, preparation=how)
    names = ("q_codes", "q_scale", "k_codes", "k_scale", "v_codes", "v_scale")
    pairs = [(getattr(made, name), getattr(wanted, name)) for name in names]
    return all(
        mirror is None or on_host(own[:1, :1]).tobytes() == np.ascontiguousarray(mirror).tobytes()
        for own, mirror in pairs
    )


def pass_over(plan: Plan, buffers: Mapping[str, Any]) -> Callable[..., None]:
    """Return the pass alone on q, k and v: launches into buffers that are there."""
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
    if not args.quick:
        sets = timing.rotated((*operands, cupy.empty_like(operands[0])))
        calls["copy"] = rotating(lambda q, k, v, to: cupy.copyto(to, q), sets)
    for mode, quant in MODES.items():
        backend = "interpret" if args.quick else "cuda"
        arch = own_arch(backend, describe({"q": operands[0]})["q"])
        found, plan = plan_of(shape, quant, arch)
        made = ca.quantize(*operands, quant=quant, backend=backend)
        rows[mode] = {
            "mode": mode, **asdict(shape), "launches": len(plan.launches),
            "bytes": bytes_moved(found), "workspace": sum(w.nbytes for w in plan.workspace),
            "ok": equal_to_mirror(made, operands, quant, arch),
        }  # fmt: skip
        if calls and rows[mode]["ok"]:
            buffers = {}
            for name, part in found.items():
                for buffer, (size, dtype) in part.buffers(name).items():
                    buffers[buffer] = cupy.empty(size, dtype)
            rows[mode]["buffers"] = buffers  # alive while they are written to
            calls[mode] = rotating(pass_over(plan, buffers), sets)
    if not calls:
        return list(rows.values())
    samples = timing.time_interleaved(calls, rounds=args.rounds)
    for mode, row in rows.items():
        row.pop("buffers", None)
        if mode in samples:
            ratio = timing.paired_ratio(samples["copy"], samples[mode])
            share = row["bytes"] / (2 * operands[0].nbytes)
            row["share of copy"] = [share * x for x in ratio.to_list()]
            row["seconds"] = timing.median(samples[mode]).median
            row["copy"] = timing.median(samples["copy"]).median
            row["samples"] = {name: samples[name] for name in ("copy", mode)}
            row["clocks"] = device.clocks()
    return list(rows.values())


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows."""
    header = ["mode", "batch x heads x length x head_dim", "bits", "launches", "MB", "us", "GB/s",
              "of a copy"]  # fmt: skip
    lines = []
    for r in rows:
        seconds = r.get("seconds")
        lines.append([
            r["mode"], f"{r['batch']} x {r['heads']} x {r['length']} x {r['head_dim']}",
            "equal" if r["ok"] else "DIFFER", str(r["launches"]), f"{r['bytes'] / 1e6:.1f}",
            f"{1e6 * seconds:.1f}" if seconds else "-",
            f"{r['bytes'] / seconds / 1e9:.0f}" if seconds else "-",
            format_comparison(r.get("share of copy")),
        ])  # fmt: skip
    return header, lines


def run(args: argparse.Namespace) -> int:
    """Measure every shape in all modes, print the table, write the record."""
    recording.check_rounds(args)
    rows = []
    for shape in QUICK_SHAPES if args.quick else SHAPES:
        found = measure(shape, args)
        rows += found
        output.print_table(*table(found))
    output.print_table(*table(rows))
    recording.keep(args, "quantise", "interpret" if args.quick else "cuda", {"rows": rows})
    return 0 if all(row["ok"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.main(run, recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
