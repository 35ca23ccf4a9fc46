"""Predict launches, scratch memory and memory of a call; with --devices, on several devices.

No array is made and no device is needed. Times come from `cupyattn.distributed.model`, with
assumed links and the measured rate of the rung."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from cupyattn.arrays.described import Described
from cupyattn.arrays.kinds import STORAGE
from cupyattn.cli import flags, output
from cupyattn.compiler.devices import device_architecture
from cupyattn.compiler.target import HOPPER_CAPABILITY
from cupyattn.distributed.mesh import Mesh
from cupyattn.distributed.model import H200, Costs, Machine, machine_of, meshes, predict
from cupyattn.kernels.features import DTYPES
from cupyattn.measure import device
from cupyattn.measure.words import counted, format_bytes, format_seconds, format_share
from cupyattn.ops.attention import resolved
from cupyattn.plans.stages import stages
from cupyattn.problem.attention import AttentionProblem
from cupyattn.problem.checks import AttentionSpec, check_limits

#: The architecture to plan for without a device.
_ARCH = "sm_90a"
#: Largest number of devices, since every mesh of them is predicted.
_MOST_DEVICES = 65536
#: Default number of queries and keys.
_LENGTH = 4096
#: Devices and rows of ``--all-sizes``.
DEVICES = (2, 4, 8, 16, 32, 64)
LENGTHS = (2**15, 2**17, 2**19, 2**20, 2**22)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    for name, default, what in (
        ("batch", 1, "batch entries"),
        ("heads", 16, "query heads"),
        ("len", _LENGTH, "length of queries and keys"),
        ("head-dim", 128, "head size, 1 to 256"),
    ):
        help_text = f"{what} (default {default})"
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=help_text)
    parser.add_argument("--heads-kv", type=int, metavar="N", help="key heads (default --heads)")
    parser.add_argument("--len-kv", type=int, metavar="N", help="keys, where they differ")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="(default float16)")
    parser.add_argument("--causal", action="store_true", help="a causal mask")
    parser.add_argument(
        "--variant", metavar="NAME", default="auto", help="the rung (default: auto)"
    )
    parser.add_argument(
        "--arch", metavar="NAME",
        help=f"architecture to plan for (default: the device's, or {_ARCH} without a device)",
    )  # fmt: skip
    many = parser.add_argument_group("several devices")
    many.add_argument("--devices", type=int, metavar="N", default=1, help="how many (default 1)")
    many.add_argument(
        "--per-host", type=int, metavar="N", default=H200.per_host,
        help=f"devices of a host (default {H200.per_host})",
    )  # fmt: skip
    many.add_argument(
        "--partition", choices=("contiguous", "zigzag"),
        help="distribution of rows over ranks (default: zigzag if causal)",
    )  # fmt: skip
    many.add_argument(
        "--ulysses", type=int, metavar="N",
        help="ranks that exchange heads; the others form a ring (default: the fastest)",
    )  # fmt: skip
    many.add_argument(
        "--all-sizes", action="store_true",
        help=f"predict {DEVICES[0]} to {DEVICES[-1]} devices and {LENGTHS[0]:,} to {LENGTHS[-1]:,} "
        "rows instead: the fastest mesh, and the gain of codes in rings",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the plan to a file, too")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(
        args, "batch", "heads", "heads_kv", "len", "len_kv", "head_dim", "devices", "per_host",
        "ulysses",
    )  # fmt: skip
    if args.devices > _MOST_DEVICES:
        raise ValueError(f"--devices must be at most {_MOST_DEVICES}, got {args.devices}")
    several = args.devices > 1
    _refuse(args, "with --all-sizes, which has its own sizes", args.all_sizes,
            devices=1, len=_LENGTH, len_kv=None, ulysses=None, variant="auto")  # fmt: skip
    _refuse(args, "without --devices of at least 2", not (several or args.all_sizes),
            ulysses=None, partition=None, per_host=H200.per_host)  # fmt: skip
    whole = _call(args)
    if args.all_sizes:
        sizes = _print_all_sizes(args, whole)
        if args.json:
            output.write_json(args.json, {"machine": H200.name, "sizes": sizes})
        return 0
    arch = args.arch or (_ARCH if device.device_missing() else own_arch())
    lengths = whole.len_q, whole.len_kv
    options = {"variant": args.variant, "causal": args.causal, "arch": arch}
    operands = rows_of(whole, whole.heads, whole.heads_kv, lengths)
    problem = resolved(*operands, **options)
    found = stages(problem)
    output.say("\n".join([f"{problem.variant.name}: {problem.why}", *map(str, found.plans)]))
    record: dict[str, Any] = {"arch": arch, "variant": problem.variant.name}
    variant = problem.variant.name
    alone = predict(whole, Mesh(1, 1), variant=_rated(variant))
    memory = {**alone.memory, "scratch of the kernels": _scratch(problem)}
    if args.devices == 1:
        output.say()
        _print_memory("memory", memory)
        record["memory"] = memory
    else:
        record |= _on_several(args, whole, variant, alone, options)
    if args.json:
        output.write_json(args.json, record)
    return 0


def _refuse(args: argparse.Namespace, when: str, applies: bool, **defaults: Any) -> None:
    """Raise ValueError for a flag without effect."""
    for name, default in defaults.items():
        if applies and getattr(args, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} changes nothing {when}: leave it out")


def _on_several(
    args: argparse.Namespace,
    whole: AttentionSpec,
    variant: str,
    alone: Costs,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Print the costs of the call on every mesh, and the memory on the chosen mesh."""
    machine = machine_of(args.devices, args.per_host)
    partition = args.partition or ("zigzag" if args.causal else "contiguous")
    choose = meshes(args.devices)
    if args.ulysses is not None:
        choose = [Mesh(args.devices, args.ulysses)]
    how: dict[str, Any] = {"variant": _rated(variant), "balanced": partition == "zigzag"}
    every = [predict(whole, mesh, machine, **how) for mesh in choose]
    taken = min(every, key=lambda costs: costs.seconds)
    devices = counted(args.devices, "device")
    output.say(f"\n{devices}, {machine.per_host} a host, rows {partition}; predicted:")
    header = ["ulysses x ring", "compute", "sent", "exposed", "merging", "host", "total",
              "scaling", ""]  # fmt: skip
    rows = [[*_cells(costs, alone, args.devices), "taken" if costs is taken else ""]
            for costs in every]  # fmt: skip
    output.print_table(header, rows)
    memory = {**taken.memory, "scratch of the kernels": _local_scratch(whole, taken.mesh, options)}
    output.say()
    _print_memory("memory of each device", memory, machine)
    return {
        "devices": args.devices, "partition": partition, "machine": machine.name,
        "ulysses": taken.mesh.ulysses, "ring": taken.mesh.ring, "memory": memory,
        "meshes": [
            {
                "ulysses": costs.mesh.ulysses, "ring": costs.mesh.ring, "seconds": costs.seconds,
                "compute": costs.compute, "exposed": costs.exposed, "merging": costs.merging,
                "host": costs.host, "heads_bytes": costs.heads_bytes,
                "ring_bytes": costs.ring_bytes,
            }
            for costs in every
        ],
    }  # fmt: skip


def _print_all_sizes(args: argparse.Namespace, whole: AttentionSpec) -> list[dict[str, Any]]:
    """Print, and return, the fastest mesh of every size: in 16 bits, and with codes in rings."""
    balanced = (args.partition or ("zigzag" if args.causal else "contiguous")) == "zigzag"
    found = []
    for devices in DEVICES:
        machine = machine_of(devices, args.per_host)
        for length in LENGTHS:
            call = replace(whole, len_q=length, len_kv=length)
            bits, codes = (
                [predict(call, mesh, machine, variant=v, balanced=balanced)
                 for mesh in meshes(devices)]
                for v in ("fa_tc", "fa_int8")
            )  # fmt: skip
            alone = predict(call, Mesh(1, 1), variant="fa_tc")
            best, best_codes = (min(every, key=lambda c: c.seconds) for every in (bits, codes))
            found.append({
                "devices": devices, "length": length, "fits": best.memory_bytes <= machine.memory,
                "ulysses": best.mesh.ulysses, "ring": best.mesh.ring, "seconds": best.seconds,
                "share": alone.seconds / (devices * best.seconds),
                "ulysses_int8": best_codes.mesh.ulysses, "ring_int8": best_codes.mesh.ring,
                "seconds_int8": best_codes.seconds,
                "ring_exposed": bits[0].exposed, "codes_exposed": codes[0].exposed,
            })  # fmt: skip
    output.say(f"{whole.heads} heads of {whole.head_dim}, at most {args.per_host} devices a host; "
               "predicted:")  # fmt: skip
    output.print_table(
        ["devices", "rows", "16 bits: ulysses x ring", "time", "scaling", "INT8: ulysses x ring",
         "time", "speed", "exposed in a ring of all", "with codes"],
        [[str(x["devices"]), f"{x['length']:,}", f"{x['ulysses']} x {x['ring']}",
          format_seconds(x["seconds"]) + ("" if x["fits"] else " (too large)"),
          format_share(x["share"]), f"{x['ulysses_int8']} x {x['ring_int8']}",
          format_seconds(x["seconds_int8"]), f"{x['seconds'] / x['seconds_int8']:.2f}",
          format_seconds(x["ring_exposed"]), format_seconds(x["codes_exposed"])] for x in found],
    )  # fmt: skip
    return found


def _cells(costs: Costs, alone: Costs, devices: int) -> list[str]:
    mesh = costs.mesh
    return [
        f"{mesh.ulysses} x {mesh.ring}",
        format_seconds(costs.compute),
        format_bytes(costs.heads_bytes + costs.ring_bytes),
        format_seconds(costs.exposed),
        format_seconds(costs.merging),
        format_seconds(costs.host),
        format_seconds(costs.seconds),
        format_share(alone.seconds / (devices * costs.seconds)),
    ]


def _print_memory(title: str, memory: dict[str, int], machine: Machine | None = None) -> None:
    total = sum(memory.values())
    of = "" if machine is None else f" of {format_bytes(machine.memory)}"
    rows = [[name, f"{count:,}", format_bytes(count)] for name, count in memory.items()]
    rows.append(["total", f"{total:,}", f"{format_bytes(total)}{of}"])
    output.print_table([title, "bytes", ""], rows)


def _call(args: argparse.Namespace) -> AttentionSpec:
    """Return the sizes of the whole call."""
    heads_kv = args.heads if args.heads_kv is None else args.heads_kv
    len_kv = args.len if args.len_kv is None else args.len_kv
    flags.check_elements(args.batch, args.heads, max(args.len, len_kv), args.head_dim)
    if args.heads % heads_kv:
        raise ValueError(f"--heads-kv must divide --heads, got {heads_kv} and {args.heads}")
    _, last = check_limits(args.causal, "bottom-right", (-1, -1), args.len, len_kv)
    return AttentionSpec(
        args.batch, args.heads, heads_kv, args.len, len_kv, args.head_dim, args.dtype,
        args.head_dim**-0.5, causal=last is not None, causal_shift=last or 0,
    )  # fmt: skip


def rows_of(
    call: AttentionSpec, heads: int, heads_kv: int, lengths: tuple[int, int]
) -> tuple[Described, Described, Described]:
    """Return descriptions of contiguous q, k and v."""
    dtype, counts = STORAGE[call.dtype], {"q": heads, "k": heads_kv, "v": heads_kv}
    q, k, v = (
        Described.contiguous(
            name, (call.batch, count, lengths[name != "q"], call.head_dim), dtype
        )
        for name, count in counts.items()
    )
    return q, k, v


def _scratch(problem: AttentionProblem) -> int:
    return sum(work.nbytes for work in stages(problem).workspace)


def _local_scratch(whole: AttentionSpec, mesh: Mesh, options: dict[str, Any]) -> int:
    """Return the scratch memory of the largest call of a rank."""
    rows = -(-whole.len_q // mesh.ring), -(-whole.len_kv // mesh.ring)
    group = whole.heads // whole.heads_kv
    heads_kv = max(1, whole.heads_kv // mesh.ulysses)
    heads = max(1, whole.heads // mesh.ulysses)
    heads = heads_kv * max(1, min(group, heads // heads_kv))
    problem = resolved(*rows_of(whole, heads, heads_kv, rows), **options)
    return _scratch(problem)


def _rated(variant: str) -> str:
    """Return the rung whose rate predicts a variant."""
    return "fa_int8" if variant == "fa_int8" else "fa_tc"


def own_arch() -> str:
    """Return the architecture of kernels on the current device."""
    import cupy

    capability = int(cupy.cuda.Device().compute_capability)
    return _ARCH if capability == HOPPER_CAPABILITY else device_architecture(capability)
