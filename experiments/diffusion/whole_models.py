"""What do INT8 attention and INT8 linear layers win in whole diffusion transformers?

Varies       model of diffusers, at its own depth: Flux, Wan 2.1 14B, Kandinsky 5 Lite, Qwen-Image,
             SD3.5 Large, HunyuanVideo, LTX, Z-Image, Wan 2.2 5B; what runs in it: native; FP8
             layers by row (the recipe of torchao) with native attention and with ours in 16 bits;
             INT8 layers by channel with attention of the classes full (16 bits), balanced and
             aggressive. Blocks compiled, ``compile_repeated_blocks(fullgraph=True)``, launched by
             the host or, all of a pass, as one CUDA graph
Holds fixed  random weights in bfloat16, N(0, 1) latents and prompts, batch 1; numbers of tokens for
             which a native pass takes at most a second; no VAE, text encoder or guidance
Measures     in cells, each written when it is done: ``replace``, seconds and extra memory of
             replacing linear layers, by what becomes of the originals; ``errors``, relative L2 to
             float32 of a model with one block of each kind, not compiled; ``first``, seconds of the
             first call, bytes of weights, peak memory of a pass, relative L2 to native; ``passes``,
             ``graphs`` and ``steps`` (ten of FlowMatchEulerDiscreteScheduler), time in turns and
             ratios with their 95 % intervals; ``host``, seconds until a pass of an idle device
             returns, and seconds in which the device is busy; ``warm``, the first call of another
             process, whose caches are warm
Beside       torch's attention by cuDNN where it takes the call, and cuBLAS: native
Expect       whole models of native: Flux 1.57, Wan 14B 1.65, Kandinsky 1.36; FP8 with our 16-bit
             attention left behind by 1.04 at a lower error
Run          python -m experiments.diffusion.whole_models --models NAME ... [--quick] [--json FILE]
             [--cells NAME ...] [--rounds N] [--loop-rounds N] [--update-docs]
             [--stored [--merge FILE ...]]

A cell that the file has is not measured again: the same command goes on where it was stopped. Run
a process for each model, and ``warm`` in one that comes after. Needs torch and diffusers.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from cupyattn.measure import device, records, timing
from cupyattn.measure.words import format_bytes, format_seconds
from cupyattn.quant import Int8Config
from experiments._harness import merging, recording, whole_families
from experiments._harness.diffusers_models import libraries
from experiments._harness.whole_families import FAMILIES, Family
from experiments.diffusion import diffusers_blocks as blocks

NAME = "whole_models"
BEGIN, END = "<!-- whole: begin -->", "<!-- whole: end -->"
NATIVE, FP8, FP8_OURS = "native", "FP8 layers", "FP8 layers, attention in 16 bits"
FULL, BALANCED, AGGRESSIVE = "INT8 layers, full", "INT8 layers, balanced", "INT8 layers, aggressive"
#: Type of linear layers, and the policy of attention; None for the native ones.
WAYS: dict[str, tuple[str | None, str | None]] = {
    NATIVE: (None, None),
    FP8: ("fp8", None),
    FP8_OURS: ("fp8", "precision"),
    FULL: ("int8", "precision"),
    BALANCED: ("int8", "balanced"),
    AGGRESSIVE: ("int8", "aggressive"),
}
CELLS = ("replace", "errors", "first", "passes", "graphs", "host", "steps")
WARM = "warm"
STEPS, HOST_PASSES = 10, 15
#: Kinds of kernels by a pattern of their names; Inductor's are of none.
PARTS = {
    "products": "gemm_int8|nvjet|cublas|gemv", "attention": "attn_|sdpa|merge_pieces",
    "codes and norms before them": "row_quant|norm_quant|quantize",
}  # fmt: skip
OTHER = "other kernels"
#: Columns of the first table of docs/INTEROP.md.
HEADER = [
    "", "pass", "of native", "of FP8, 16 bits", "as a CUDA graph", "of native", f"{STEPS} steps",
    "of native", "device busy", "host", "weights", "peak", "first call", "to float32",
]  # fmt: skip


class Stage:
    """A family's model in all ways, made when one is asked for; they share what they can.

    Parameters
    ----------
    family : Family
    args : argparse.Namespace
    """

    def __init__(self, family: Family, args: argparse.Namespace) -> None:
        self.family, self.args = family, args
        self.where = "cpu" if args.quick else "cuda"
        self.torch, self.diffusers = libraries()
        self.latents, self.arguments = whole_families.inputs(family, self.where, args.seed)
        # As a step of a loop has it.
        self.step = self.arguments(self.latents, self.at(700.0))
        self._models: dict[str, Any] = {}
        self.handles: dict[str, Any] = {}
        self.refused: dict[str, str] = {}

    def at(self, timestep: float) -> Any:
        """Return a timestep on the device."""
        return self.torch.full((), timestep, device=self.where).expand(1)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.where == "cuda":
            self.torch.cuda.synchronize()

    def models(self, *, compiled: bool = True) -> dict[str, Any]:
        """Return the model in every way that was not refused."""
        if not self._models:
            transformer = whole_families.make(self.family, self.where, self.args.seed)
            self._models, self.handles = ways(transformer)
            if compiled:
                options = {} if self.where == "cuda" else {"backend": "eager"}
                for model in self._models.values():
                    compile_blocks(model, fullgraph=True, **options)
        return {n: m for n, m in self._models.items() if n not in self.refused}

    def call(self, model: Any) -> Any:
        """Return the numbers of a pass."""
        return self.family.call(model, self.step)

    def denoise(self, model: Any, steps: int) -> Any:
        """Take the scheduler's steps from latents of noise; return the last latents."""
        scheduler = self.diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
        scheduler.set_timesteps(steps, device=self.latents.device)
        scheduler.set_begin_index(0)  # or the first step would wait for the device to look it up
        x = self.latents
        for t in scheduler.timesteps:
            v = self.family.call(model, self.arguments(x, t.expand(1)))
            x = scheduler.step(v, t, x, return_dict=False)[0]
        return x


def replaceable(transformer: Any, **options: Any) -> Any:
    """Return the handle of a model whose linear layers were made INT8 by channel."""
    from cupyattn.interop.torch import replace_linear_with_int8

    return replace_linear_with_int8(transformer, config=Int8Config(strategy="channel"), **options)


def ways(transformer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model in every way, and the handles of INT8 attention."""
    from cupyattn.interop.diffusers import replace_attention_with_int8
    from experiments._harness import fp8_rows

    int8, fp8 = blocks.shared(transformer), blocks.shared(transformer)
    names = replaceable(int8, originals="device").replaced
    fp8_rows.replace(fp8, names)
    of_layers = {None: transformer, "int8": int8, "fp8": fp8}
    found, handles = {}, {}
    for name, (layers, policy) in WAYS.items():
        found[name] = own = blocks.shared(of_layers[layers])
        if policy is not None:
            handles[name] = replace_attention_with_int8(own, policy=policy)
    return found, handles


def compile_blocks(model: Any, **options: Any) -> None:
    """Compile the blocks that a model repeats, as its method does where it names them."""
    if model._repeated_blocks:
        model.compile_repeated_blocks(**options)
        return
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile(**options)


# ---- cells ---------------------------------------------------------------------------------------


def replacing(stage: Stage) -> dict[str, Any]:
    """Measure replacing the linear layers of a model, by what becomes of the originals."""
    torch, found = stage.torch, {}
    transformer = whole_families.make(stage.family, stage.where, stage.args.seed)
    replaceable(whole_families.make(stage.family.shallow(), stage.where, 0))  # loads the kernels
    for originals in ("device", "cpu", "drop"):
        stage.synchronize()
        if stage.where == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        handle = replaceable(transformer, originals=originals)
        stage.synchronize()
        row = {"seconds": time.perf_counter() - start, "layers": len(handle.replaced)}
        if stage.where == "cuda":
            row["extra_bytes"] = torch.cuda.max_memory_allocated() - before
            row["left_bytes"] = torch.cuda.memory_allocated() - before
        found[originals] = row
        if originals != "drop":
            handle.restore()
    return found


def errors(stage: Stage) -> dict[str, Any]:
    """Return the relative L2 to float32 of a model with one block of each kind, in every way."""
    shallow = Stage(stage.family.shallow(), stage.args)
    models = shallow.models(compiled=False)
    exact = blocks.output_in_float32(models[NATIVE], shallow.step, shallow.family.output)
    return {name: blocks.relative(shallow.call(model), exact) for name, model in models.items()}


def first(stage: Stage) -> dict[str, Any]:
    """Measure the first call in each way, memory, and how far the output is from native."""
    torch, found = stage.torch, {}
    native = None
    for name, model in stage.models().items():
        before, peak = 0, None
        start = time.perf_counter()
        try:
            stage.call(model)  # compiles
        except (RuntimeError, NotImplementedError) as error:
            stage.refused[name] = f"{name}: {str(error).splitlines()[0]}"
            found[name] = {"refused": stage.refused[name]}
            print(stage.refused[name], flush=True)
            continue
        stage.synchronize()
        seconds = time.perf_counter() - start
        if stage.where == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        result = stage.call(model)
        stage.synchronize()
        weights = blocks.Way(model).weight_bytes
        if stage.where == "cuda":
            peak = weights + torch.cuda.max_memory_allocated() - before
        native = result.clone() if native is None else native
        refused = judged(stage, name, result)
        if refused:
            stage.refused[name] = refused
        found[name] = {
            "seconds": seconds, "weight_bytes": weights, "peak_bytes": peak, "refused": refused,
            "to_native": blocks.relative(result, native),
        }  # fmt: skip
        print(f"{name}: first call {seconds:.1f} s {refused}", flush=True)
    return found


def judged(stage: Stage, name: str, result: Any) -> str:
    """Return why a way may not be timed; "": it may."""
    if not bool(result.isfinite().all()):
        return f"{name} gives numbers that are not finite"
    if name in stage.handles:
        report = stage.handles[name].report()
        ran = {x for layer in report.layers for x in layer.compiled} | set(report.modes)
        fallbacks = report.fallbacks | report.compiled_fallbacks
        if not ran or ran - {WAYS[name][1]} or fallbacks:
            return f"{name} left attention to others: {sorted(ran)} {report.native} {fallbacks}"
    return ""


def warmed(stage: Stage) -> dict[str, Any]:
    """Return the models after a first pass in each way, without ways that fail."""
    models = stage.models()
    for name in models:
        stage.call(models[name])
    stage.synchronize()
    return models


def compared(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return times, and ratios to native and to FP8 with our attention, of samples in turns."""
    found = {}
    for name, times in samples.items():
        row: dict[str, Any] = {"seconds": timing.median(times).median, "samples": [*times]}
        for other, key in ((NATIVE, "ratio"), (FP8_OURS, "to_fp8")):
            if other in samples and name != other:
                row[key] = timing.paired_ratio(samples[other], times).to_list()
        found[name] = row
    return found


def passes(stage: Stage) -> dict[str, Any]:
    """Time a pass in every way, in turns."""

    def one(model: Any) -> Callable[[int], Any]:
        return lambda _: stage.call(model)

    models = warmed(stage)
    return compared(
        timing.time_interleaved({n: one(m) for n, m in models.items()}, rounds=stage.args.rounds)
    )


def graphs(stage: Stage) -> dict[str, Any]:
    """Time a pass in every way as one CUDA graph, in turns."""
    torch, found, refused = stage.torch, {}, {}
    for name, model in warmed(stage).items():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                stage.call(model)
        except RuntimeError as error:
            refused[name] = {"refused": str(error).splitlines()[0]}
            continue
        found[name] = graph

    def replay(graph: Any) -> Callable[[int], Any]:
        return lambda _: graph.replay()

    if not found:
        return refused
    calls = {n: replay(g) for n, g in found.items()}
    return compared(timing.time_interleaved(calls, rounds=stage.args.rounds)) | refused


def host(stage: Stage) -> dict[str, Any]:
    """Measure how long the host takes for a pass of an idle device, and how long that is busy."""
    found = {}
    for name, model in warmed(stage).items():
        times = []
        for _ in range(HOST_PASSES):
            stage.synchronize()
            start = time.perf_counter()
            stage.call(model)
            times.append(time.perf_counter() - start)
        stage.synchronize()
        found[name] = {"host_seconds": statistics.median(times), **busy(stage, model)}
    return found


def busy(stage: Stage, model: Any) -> dict[str, Any]:
    """Return the seconds in which kernels of a pass run, by the profiler, and their number."""
    torch = stage.torch
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        stage.call(model)
        torch.cuda.synchronize()
    device_type = torch.autograd.DeviceType.CUDA
    events = [
        event for event in profile.profiler.kineto_results.events()
        if event.device_type() == device_type
    ]  # fmt: skip
    spans = sorted((one.start_ns(), one.start_ns() + one.duration_ns()) for one in events)
    total, end = 0, 0
    for begin, stop in spans:  # launches may overlap
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    parts = dict.fromkeys([*PARTS, OTHER], 0.0)
    for one in events:
        parts[part_of(one.name())] += one.duration_ns() * 1e-9
    return {"busy_seconds": total * 1e-9, "kernels": len(spans), "parts": parts}


def part_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    if kernel.startswith("triton"):
        return OTHER
    return next((part for part, names in PARTS.items() if re.search(names, kernel)), OTHER)


def steps(stage: Stage) -> dict[str, Any]:
    """Time ten steps of the scheduler in every way, in turns."""

    def many(model: Any) -> Callable[[int], Any]:
        return lambda _: stage.denoise(model, STEPS)

    models = warmed(stage)
    calls = {n: many(m) for n, m in models.items()}
    rounds = stage.args.loop_rounds
    return compared(timing.time_interleaved(calls, rounds=rounds, warmup=1))


#: Cells of the second kind need a device.
_CELLS: dict[str, Callable[[Stage], dict[str, Any]]] = {
    "replace": replacing, "errors": errors, "first": first, WARM: first,
    "passes": passes, "graphs": graphs, "host": host, "steps": steps,
}  # fmt: skip
TIMED = ("passes", "graphs", "host", "steps")


# ---- the record ----------------------------------------------------------------------------------


def begun(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of the file that the record goes to, none where it is not there."""
    target = args.json or (None if args.quick else recording.RESULTS / f"{NAME}.json")
    if target is None or not target.exists():
        return []
    rows: list[dict[str, Any]] = merging.record_of(NAME, target)["rows"]
    return rows


def new_row(name: str, family: Family) -> dict[str, Any]:
    """Return a row without cells."""
    return {
        "model": name, "class": family.cls, "blocks": family.blocks, "tokens": family.tokens,
        "prompt": family.prompt, "cells": {},
    }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure the cells that the file lacks, and write it after each."""
    recording.check_rounds(args)
    torch, diffusers = libraries()
    if not args.quick and not torch.cuda.is_available():
        raise UnsupportedError(f"torch {torch.__version__} has no CUDA device; --quick needs none")
    rows, record = begun(args), {}
    torch._dynamo.config.recompile_limit = 8 * len(WAYS)
    for name in args.models:
        family = whole_families.small(name) if args.quick else FAMILIES[name]
        row = next((one for one in rows if one["model"] == name), None)
        if row is None:
            row = new_row(name, family)
            rows.append(row)
        stage = Stage(family, args)
        stage.refused |= refusals(row)
        for cell in args.cells:
            if cell in row["cells"] or (args.quick and cell in TIMED):
                continue
            start = time.perf_counter()
            with torch.no_grad(), native_attention(torch, on_device=not args.quick):
                found = _CELLS[cell](stage)
            row["cells"][cell] = {"ways": found, **_made(args)}
            gc.collect()  # models with a separate cell
            print(f"{name}: {cell} took {time.perf_counter() - start:.0f} s", flush=True)
            record = recording.keep(
                args, NAME, "mirror" if args.quick else "cuda",
                {"rows": in_order(rows), "torch": torch.__version__,
                 "diffusers": diffusers.__version__},
            )  # fmt: skip
        del stage
        for header, lines in (table(row),):
            output.print_table(header, lines)
    if args.update_docs and record and not args.quick:
        update_page(record)
    return 0 if all(not refusals(row) for row in rows) else 1


def _made(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a cell must be read with."""
    environment = device.environment()
    found = {name: environment.get(name) for name in ("revision", "dirty")}
    of_device = environment["device"]
    found["device"] = of_device and of_device["name"]
    return {**found, "rounds": args.rounds, "loop_rounds": args.loop_rounds}


def native_attention(torch: Any, *, on_device: bool) -> Any:
    """Return a context in which torch's attention is cuDNN's, where that takes the call."""
    if not on_device:
        return blocks.forced_cudnn(torch, on_device=False)
    backends = torch.nn.attention.SDPBackend
    order = [backends.CUDNN_ATTENTION, backends.FLASH_ATTENTION, backends.EFFICIENT_ATTENTION,
             backends.MATH]  # fmt: skip
    return torch.nn.attention.sdpa_kernel(order, set_priority=True)


def refusals(row: Mapping[str, Any]) -> dict[str, str]:
    """Return why ways of a model were not timed."""
    ways_of_first = row["cells"].get("first", {}).get("ways", {})
    return {name: way["refused"] for name, way in ways_of_first.items() if way["refused"]}


def in_order(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows in the order of the families."""
    return sorted(rows, key=lambda row: list(FAMILIES).index(row["model"]))


def with_cells(record: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in which cells of another record replace the old cells."""
    rows = {row["model"]: row for row in record["rows"]}
    for row in part["rows"]:
        known = rows.get(row["model"], row)
        rows[row["model"]] = {**row, "cells": {**known["cells"], **row["cells"]}}
    return {**record, "rows": in_order([*rows.values()])}


# ---- tables --------------------------------------------------------------------------------------


def ratio_cell(value: Sequence[float] | None) -> str:
    """Return a ratio with its interval; "undecided" where that has 1.

    Examples
    --------
    >>> ratio_cell([1.5, 1.4, 1.6]), ratio_cell([1.01, 0.98, 1.02]), ratio_cell(None)
    ('1.500 [1.400, 1.600]', 'undecided [0.980, 1.020]', '-')
    """
    if value is None:
        return "-"
    middle, low, high = value
    said = "undecided" if low <= 1 <= high else f"{middle:.3f}"
    return f"{said} [{low:.3f}, {high:.3f}]"


def _of(row: Mapping[str, Any], cell: str, way: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = row["cells"].get(cell, {}).get("ways", {}).get(way, {})
    return found


def table(row: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a model's table."""
    lines = []
    for way in WAYS:
        cells = [way]
        for cell in ("passes", "graphs", "steps"):
            found = _of(row, cell, way)
            seconds = format_seconds(found["seconds"]) if "seconds" in found else "-"
            cells += [seconds, ratio_cell(found.get("ratio"))]
            if cell == "passes":
                beyond = WAYS[way][0] == "int8"
                cells.append(ratio_cell(found.get("to_fp8") if beyond else None))
        of_host, of_first = _of(row, "host", way), _of(row, "first", way)
        for found, key, words in (
            (of_host, "busy_seconds", format_seconds), (of_host, "host_seconds", format_seconds),
            (of_first, "weight_bytes", format_bytes), (of_first, "peak_bytes", format_bytes),
            (of_first, "seconds", format_seconds),
        ):  # fmt: skip
            cells.append("-" if found.get(key) is None else words(found[key]))
        error = row["cells"].get("errors", {}).get("ways", {}).get(way)
        lines.append([*cells, "-" if error is None else f"{error:.1e}"])
    return HEADER, lines


def title(row: Mapping[str, Any]) -> str:
    """Say in one line what a table is of."""
    counts = " + ".join(map(str, row["blocks"].values()))
    return (
        f"{row['model']} (`{row['class']}`, {counts} blocks, {row['tokens']:,} tokens and "
        f"{row['prompt']} of a prompt)"
    )


def overview(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return a table of all models: times as fast as native, blocks compiled."""
    others = [way for way in WAYS if way != NATIVE]
    header = ["model", "tokens", "its own pass", *others]
    lines = []
    for row in record["rows"]:
        if "passes" in row["cells"]:
            ratios = [ratio_cell(_of(row, "passes", way).get("ratio")) for way in others]
            own = format_seconds(_of(row, "passes", NATIVE)["seconds"])
            lines.append([row["model"], f"{row['tokens']:,}", own, *ratios])
    return header, lines


def parts_table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return a table of where the device's time of a pass goes, native and balanced."""
    lines = []
    for row in record["rows"]:
        for way in (NATIVE, BALANCED):
            parts = _of(row, "host", way).get("parts")
            if parts:
                lines.append([row["model"], way, *map(format_seconds, parts.values())])
    return ["model", "way", *PARTS, OTHER], lines


def replaced_table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return a table of how long it takes to replace layers, by what becomes of the originals."""
    header = ["model", "layers", "originals stay", "extra memory", "to the host", "dropped",
              "extra memory when dropped"]  # fmt: skip
    lines = []
    for row in record["rows"]:
        found = row["cells"].get("replace", {}).get("ways")
        if found:
            seconds = {name: format_seconds(one["seconds"]) for name, one in found.items()}
            extra = {name: one.get("extra_bytes", 0) for name, one in found.items()}
            lines.append([
                row["model"], str(found["drop"]["layers"]), seconds["device"],
                format_bytes(extra["device"]), seconds["cpu"], seconds["drop"],
                format_bytes(extra["drop"]),
            ])  # fmt: skip
    return header, lines


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/INTEROP.md says was measured."""
    lines = []
    for row in record["rows"]:
        header, of_table = table(row)
        lines += [f"{title(row)}:", "", *recording.markdown(header, of_table), ""]
    for words, (header, of_table) in (
        ("Seconds of the device by kind of kernel", parts_table(record)),
        ("Seconds to replace the linear layers", replaced_table(record)),
    ):
        if of_table:
            lines += [f"{words}:", "", *recording.markdown(header, of_table), ""]
    revisions: dict[str, set[str]] = {}
    for row in record["rows"]:
        for cell in row["cells"].values():
            revisions.setdefault(cell["device"], set()).add(cell["revision"][:10])
    measured = "; ".join(f"{on}: {', '.join(sorted(at))}" for on, at in sorted(revisions.items()))
    return "\n".join([
        *lines, f"`python -m experiments.diffusion.{NAME}`, torch {record['torch']}, diffusers "
        f"{record['diffusers']}, revisions by device: {measured}.",
    ])  # fmt: skip


def update_page(record: Mapping[str, Any]) -> None:
    """Write what was measured between the marks of docs/INTEROP.md."""
    recording.replace_between(blocks.PAGE, BEGIN, END, section(record))


# ---- command line --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = blocks.parser_of(__doc__, FAMILIES, [*FAMILIES][:3])
    parser.add_argument("--cells", nargs="+", choices=(*CELLS, WARM), default=CELLS,
                        metavar="NAME", help=f"{', '.join(CELLS)}; {WARM}")  # fmt: skip
    args = parser.parse_args(argv)
    if args.stored:
        if args.merge and not (recording.RESULTS / f"{NAME}.json").exists():
            output.write_json(recording.RESULTS / f"{NAME}.json", records.read(args.merge[0]))
        update_page(merging.record_with(NAME, args.merge, with_cells))
        return 0
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
