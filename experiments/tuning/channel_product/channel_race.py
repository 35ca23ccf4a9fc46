"""How fast is an INT8 product with one scale for each row and column, and what binds it?

Varies       the candidate kernel (tile, pair of blocks, teams, lead, store, order of tiles); the
             product: a square, layers of Flux, Wan 14B, HunyuanVideo, Kandinsky 5 and SD 3.5
Holds fixed  random codes of full range, float16 out, no bias in what is timed
Measures     equality with exact sums, rounded in the kernel's order, on every product and on edge
             cases (sums near 2^31, odd m and n, k no multiple of 128, bias, bfloat16); registers
             and spills; time and TOP/s, calls in turn on operands that are not in the L2 cache; the
             same back to back for a second, with clock and power; at 8192^3 without copies and
             without stores
Beside       the library's products with scales of channels and of blocks, torch._int_mm (no
             scales), torch's bfloat16 product
Expect       1,500 TOP/s at 8192^3 and 1.6 times torch._int_mm; the header of the kernel says more
Run          python -m experiments.tuning.channel_product.channel_race [--quick | --interpret]
             [--only LABEL] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.measure import device, nvml, timing
from experiments._harness import recording
from experiments.tuning.channel_product.candidates import ARCH, CANDIDATES, SOURCE, Candidate
from experiments.tuning.channel_product.exact_products import (
    EDGE_CASES,
    Call,
    Case,
    check,
    check_edges,
    draw,
    sums_hold,
    trials,
)
from experiments.tuning.channel_product.interpreted_products import interpret, replaced

CHANNELS, BLOCKS = "int8_gemm, channels", "int8_gemm, blocks"
INT_MM, BF16 = "torch._int_mm", "torch bfloat16"
NAME = "channel_product"


@dataclass(frozen=True)
class Size:
    """One product, (m, k) by (n, k), and what it stands for."""

    label: str
    m: int
    n: int
    k: int

    @property
    def operations(self) -> int:
        """A multiply-add counts twice."""
        return 2 * self.m * self.n * self.k


SIZES = (
    Size("square", 8192, 8192, 8192),
    Size("Flux o", 4608, 3072, 3072),
    Size("Flux qkv", 4608, 9216, 3072),
    Size("Flux in", 4608, 12_288, 3072),  # of the feed-forward
    Size("Flux out", 4608, 3072, 12_288),
    Size("Flux single", 4608, 3072, 15_360),  # out of a single block
    Size("Wan o", 32_760, 5120, 5120),
    Size("Wan in", 32_760, 13_824, 5120),
    Size("Wan out", 32_760, 5120, 13_824),
    Size("Hunyuan qkv", 118_800, 9216, 3072),
    Size("K5 Lite in", 16_384, 7168, 1792),
    Size("K5 Pro o", 16_384, 4096, 4096),
    Size("SD3.5 o", 8858, 2432, 2432),  # 4096 + 333 tokens, with and without guidance
)
#: Products that run back to back for a while.
SUSTAINED = ("square", "Flux in")
WARM_SECONDS, TIMED_SECONDS, BATCH_SECONDS = 0.5, 0.8, 0.05


#: What a probe leaves out, so that its time tells what that took: text of the kernel, replacement.
PROBES = {
    "without copies": (
        ("mbarrier_arrive_expect_tx(full, sizeof(smem.A[0]) + sizeof(smem.B[0]));",
         "mbarrier_arrive(full);"),
        ("cp_async_bulk_tensor_4d_multicast(", "if (p.k < 0) cp_async_bulk_tensor_4d_multicast("),
        ("cp_async_bulk_tensor_4d(", "if (p.k < 0) cp_async_bulk_tensor_4d("),
    ),
    "without stores": (("      store_tile(", "      if (dot[0][0] == 0x7fffffff) store_tile("),),
}  # fmt: skip


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[int], object]:
    """Return what `timing.time_interleaved` calls: one set of operands after the other."""
    return lambda i: calls[i % len(calls)]()


def calls_of(size: Size, x: Mapping[str, Any], names: Iterable[str], probes: Mapping[str, Path]
             ) -> dict[str, Callable[[int], object]]:  # fmt: skip
    """Return every way to do a product, on operands that rotate through more than the L2 cache."""
    import cupy
    import torch

    import cupyattn as ca
    from cupyattn.quant.blocks import BLOCK_SIZE

    arrays = tuple(x[name] for name in ("a", "b", "a_scales", "b_scales"))
    sets = [dict(zip(("a", "b", "a_scales", "b_scales"), some, strict=True))
            for some in timing.rotated(arrays)]  # fmt: skip
    c = cupy.empty((size.m, size.n), cupy.float16)
    calls: dict[str, Callable[[int], object]] = {}
    kept = set(names)
    launches = {one.name: one.launch(size.m, size.n, size.k)
                for one in CANDIDATES if one.name in kept}  # fmt: skip
    for name, source in probes.items():
        launches[name] = PROBED.launch(size.m, size.n, size.k, source=source)
    for name, one in launches.items():
        call = Call(one)
        calls[name] = in_turn([call.bound({**some, "c": c, "bias": None}) for some in sets])
    slices, blocks = -(-size.k // BLOCK_SIZE), -(-size.n // BLOCK_SIZE)
    scales = cupy.full((size.m, slices), 1e-2, cupy.float32), cupy.full((blocks, slices), 1e-2,
                                                                       cupy.float32)  # fmt: skip
    calls[BLOCKS] = in_turn([
        lambda s=s: ca.int8_gemm(s["a"], scales[0], s["b"], scales[1]) for s in sets
    ])  # fmt: skip
    calls[CHANNELS] = in_turn([
        lambda s=s: ca.int8_gemm(s["a"], s["a_scales"][:, None], s["b"], s["b_scales"][:, None])
        for s in sets
    ])  # fmt: skip
    codes = [tuple(torch.from_dlpack(s[name]) for name in ("a", "b")) for s in sets]
    if size.m > 16 and size.n % 8 == 0 and size.k % 8 == 0:  # what it takes
        calls[INT_MM] = in_turn([lambda s=s: torch._int_mm(s[0], s[1].t()) for s in codes])
    wide = [tuple(t.to(torch.bfloat16) / 64 for t in s) for s in codes]
    linear = torch.nn.functional.linear
    calls[BF16] = in_turn([lambda s=s: linear(*s) for s in wide])
    return calls


def sustained(call: Callable[[int], object], seconds: float) -> dict[str, float]:
    """Run a call back to back; return its seconds, and clock and power meanwhile."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    batch, numbers = max(1, round(BATCH_SECONDS / seconds)), itertools.count()
    watts: list[float] = []
    clock: list[float] = []

    def work(monitor: Any) -> None:
        for _ in range(batch):
            call(next(numbers))
        if monitor is not None:  # while the device works off what was enqueued
            with contextlib.suppress(nvml.NvmlError):
                watts.append(monitor.power_w())
                clock.append(monitor.clock_mhz(nvml.CLOCK_SM))
        stream.synchronize()

    with nvml.monitor(cupy.cuda.Device().pci_bus_id) as monitor:
        start = time.monotonic()
        while time.monotonic() - start < WARM_SECONDS:
            work(None)
        begin.record(stream)
        done, start = 0, time.monotonic()
        while time.monotonic() - start < TIMED_SECONDS:
            work(monitor)
            done += batch
        end.record(stream)
        end.synchronize()
    elapsed = float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3
    result = {"seconds": elapsed / done}
    if watts and clock:
        result |= {"power_w": float(np.median(watts)), "sm_clock_mhz": float(np.median(clock))}
    return result


def measure(size: Size, args: argparse.Namespace, good: Sequence[Candidate],
            probes: Mapping[str, Path]) -> dict[str, Any]:  # fmt: skip
    """Compare every candidate on a product, then time those that are exact beside the others."""
    import cupy

    x = draw(size, cupy, seed=args.seed)
    case = Case(size.m, size.n, size.k)
    if not sums_hold(x):
        raise FloatingPointError(f"torch._int_mm is not exact on {size.label}")
    exact = {one.name: check(one, case, x) for one in good if one.takes(size.n)}
    row: dict[str, Any] = asdict(size) | {
        "exact": exact, "waves": {one.name: one.waves(size.m, size.n) for one in CANDIDATES}
    }  # fmt: skip
    calls = calls_of(size, x, [name for name, ok in exact.items() if ok],
                     probes if size.label == "square" else {})  # fmt: skip
    samples = timing.time_interleaved(calls, rounds=args.rounds)
    row["seconds"] = {name: timing.median(found).median for name, found in samples.items()}
    row["tops"] = {name: size.operations / s / 1e12 for name, s in row["seconds"].items()}
    row["ratios"] = {
        other: {name: timing.paired_ratio(samples[other], samples[name]).to_list()
                for name in exact if name in samples}
        for other in (INT_MM, BF16, BLOCKS, CHANNELS) if other in samples
    }  # fmt: skip
    row |= {"samples": samples, "clocks": device.clocks()}
    if size.label in SUSTAINED:
        row["sustained"] = {}
        for name, call in calls.items():
            found = sustained(call, row["seconds"][name])
            row["sustained"][name] = found | {"tops": size.operations / found["seconds"] / 1e12}
    return row


# ---- compiling -----------------------------------------------------------------------------------

#: The candidate whose probes are timed.
PROBED = CANDIDATES[0]


def probe_sources(folder: Path) -> dict[str, Path]:
    """Write the kernel without something, for each probe; return the files."""
    found = {}
    for name, changes in PROBES.items():
        path = folder / f"{name.replace(' ', '_')}.cu"
        text = replaced(changes)
        path.write_text(text.replace('"multicast.cuh"', f'"{SOURCE.parent / "multicast.cuh"}"'))
        found[name] = path
    return found


def resources(spec: ModuleSpec) -> dict[str, Any]:
    """Compile; return registers, spills and what ptxas says of serialised products."""
    binary = compiler.build(spec, ARCH)
    (kernel,) = binary.kernels.values()
    warnings = [line for line in binary.log.splitlines() if "C75" in line]
    return asdict(kernel) | {"smem_bytes": binary.smem_bytes, "warnings": warnings}


def compile_all(specs: Sequence[ModuleSpec], processes: int) -> list[dict[str, Any]]:
    """Compile in several processes; the cache on disk has all afterwards."""
    if processes == 1:
        return [resources(spec) for spec in specs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(resources, specs))


def specs_of(cases: Sequence[Case]) -> list[tuple[str, ModuleSpec]]:
    """Return what all candidates need for some cases and for what is timed, each once."""
    found = [(one.name, one.spec("float16", 8)) for one in CANDIDATES]
    found += [(one.name, one.spec(case.dtype, case.n, case.bias))
              for case in cases for one in CANDIDATES if one.takes(case.n)]  # fmt: skip
    return list(dict.fromkeys(found))


# ---- the run -------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: TOP/s of every way, then of the best candidate the ratios."""
    header = ["", *(row["label"] for row in rows)]
    names = list(dict.fromkeys(name for row in rows for name in row["tops"]))
    lines = [["m x n x k", *(f"{r['m']}x{r['n']}x{r['k']}" for r in rows)]]
    lines += [[name, *(f"{r['tops'][name]:.0f}" if name in r["tops"] else "-" for r in rows)]
              for name in names]  # fmt: skip
    own = [one.name for one in CANDIDATES]
    for other in (INT_MM, BF16, BLOCKS):
        cells = []
        for row in rows:
            some = [name for name in own if name in row["tops"]]
            best = max(some, key=row["tops"].get, default=None)
            ratio = row["ratios"].get(other, {}).get(best)
            cells.append("-" if ratio is None else f"{ratio[0]:.3f}")
        lines.append([f"best over {other}", *cells])
    return header, lines


def sustained_table(row: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of what ran back to back."""
    header = [row["label"], "TOP/s", "W", "SM MHz (NVML)", "TOP/s in turn", "waves"]
    lines = []
    for name, found in row["sustained"].items():
        waves = row["waves"].get(name)
        lines.append([
            name, f"{found['tops']:.0f}", f"{found.get('power_w', float('nan')):.0f}",
            f"{found.get('sm_clock_mhz', float('nan')):.0f}", f"{row['tops'][name]:.0f}",
            "-" if waves is None else f"{waves:.2f}",
        ])  # fmt: skip
    return header, lines


def run(args: argparse.Namespace) -> int:
    """Compile, check, time, print, write."""
    if args.interpret or (args.quick and device.device_missing()):
        return interpret(args)
    import cupy
    import torch

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cupyattn-probes-") as folder:
        probes = probe_sources(Path(folder))
        named = specs_of(EDGE_CASES)
        named += [(name, PROBED.spec("float16", 8, source=path)) for name, path in probes.items()]
        found = compile_all([spec for _, spec in named], args.processes)
        compiled: dict[str, dict[str, Any]] = {}
        for (name, _), facts in zip(named, found, strict=True):
            compiled.setdefault(name, facts)  # what is timed comes first
        print(f"compiled in {time.monotonic() - start:.0f} s")
        tried = trials()
        output.print_table(
            ["", "trial", "registers", "spilled", "shared memory", "serialised", "tells"],
            [[one.name, tried[one.name], str(compiled[one.name]["registers"]),
              str(compiled[one.name]["spill_stores"]), str(compiled[one.name]["smem_bytes"]),
              "; ".join(compiled[one.name]["warnings"]) or "no", one.tells] for one in CANDIDATES],
        )  # fmt: skip
        good = [one for one in CANDIDATES if tried[one.name] == "exact"]
        edges = check_edges(good)
        wrong = sorted({n for some in edges.values() for n, ok in some.items() if ok is False})
        for name, some in edges.items():
            missed = {n: ok or "DIFFERS" for n, ok in some.items() if ok is not True}
            print(f"{name}: {len(some) - len(missed)} exact", *missed.items())
        print(f"checked after {time.monotonic() - start:.0f} s", flush=True)
        good = [one for one in good if one.name not in wrong]
        rows: list[dict[str, Any]] = []
        if not args.quick:
            recording.check_rounds(args)
            for size in SIZES:
                if args.only is not None and not size.label.startswith(args.only):
                    continue
                rows.append(measure(size, args, good, probes))
                print(f"\n{size.label}, after {time.monotonic() - start:.0f} s", flush=True)
                output.print_table(*table(rows[-1:]))
                content = {
                    "rounds": args.rounds, "compiled": compiled, "trials": tried, "edges": edges,
                    "candidates": {x.name: asdict(x) for x in CANDIDATES}, "rows": rows,
                }  # fmt: skip
                recording.keep(args, NAME, "cuda", content)
                cupy.get_default_memory_pool().free_all_blocks()
                torch.cuda.empty_cache()
            output.print_table(*table(rows))
            for row in rows:
                if "sustained" in row:
                    output.print_table(*sustained_table(row))
    failed = len(good) < len(CANDIDATES)
    return 1 if failed or not all(all(row["exact"].values()) for row in rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--interpret", action="store_true", help="in the interpreter, no device")
    parser.add_argument("--only", metavar="LABEL", help="products, or with --interpret candidates, "
                        "whose name begins so")  # fmt: skip
    parser.add_argument("--processes", type=int, default=12, help="compilations at a time")
    args = parser.parse_args(argv)
    if args.interpret:
        return recording.guarded(run, args)
    return recording.guarded(run, args) if args.quick else recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
