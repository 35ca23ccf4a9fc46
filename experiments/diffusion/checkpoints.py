"""How long does a checkpoint take to become INT8, and how much memory does it need?

Varies       the step: write and read the files, analyze, convert, dequantize
Holds fixed  a model with the names and shapes of Kandinsky 5 Lite, N(0, 0.02), bfloat16, files of 5
             GB; the number of blocks follows from the number of parameters
Measures     wall time, CPU time, bytes a second of the source, peak memory of the process less its
             memory before the step, size of the files
Expect       analyze in at most three times the memory of the largest tensor, or the run fails
Run          python -m experiments.diffusion.checkpoints [--parameters N] [--folder DIR] [--quick]
             [--json FILE] [--update-docs]

Needs no device, and about three times the model's size on the disk, which it takes away again. Each
step is a separate process, whose memory the operating system counts. ``--update-docs`` writes the
table of docs/CHECKPOINTS.md: from the record alone with ``--stored``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn as ca
from cupyattn import checkpoints
from cupyattn.checkpoints.header import TensorInfo, encode_header
from cupyattn.cli import output
from cupyattn.measure import words
from experiments._harness import recording

PAGE = recording.ROOT / "docs" / "CHECKPOINTS.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
#: Sizes of Kandinsky 5 Lite: model_dim, ff_dim, time_dim, head_dim.
SIZES = (1792, 7168, 512, 64)
SMALL_SIZES = (128, 256, 32, 16)
FILE_BYTES = 5 * 10**9
STEPS = ("read", "analyze", "convert", "dequantize")
#: Memory that analyze may take, of the largest tensor.
MOST_MEMORY = 3


def shapes(parameters: int, sizes: tuple[int, int, int, int]) -> dict[str, tuple[int, ...]]:
    """Return tensors of at least so many parameters by name, in whole visual blocks."""
    width = sizes[0]
    found: dict[str, tuple[int, ...]] = {
        "visual_embeddings.in_layer.weight": (width, 64),
        "out_layer.out_layer.weight": (64, width),
    }
    count, i = 0, 0
    while count < parameters:
        for name, shape in block("visual", i, sizes):
            found[name] = shape
            count += int(np.prod(shape))
        i += 1
    return found


def block(
    kind: str, number: int, sizes: tuple[int, int, int, int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a text or visual block."""
    width, ff, time_dim, head_dim = sizes
    name = f"{kind}_transformer_blocks.{number}"
    attentions = ("self", "cross") if kind == "visual" else ("self",)
    modulated = 3 * (1 + len(attentions)) * width
    yield f"{name}.{kind}_modulation.out_layer.weight", (modulated, time_dim)
    yield f"{name}.feed_forward.in_layer.weight", (ff, width)
    yield f"{name}.feed_forward.out_layer.weight", (width, ff)
    for attention in attentions:
        for layer in ("to_query", "to_key", "to_value", "out_layer"):
            yield f"{name}.{attention}_attention.{layer}.weight", (width, width)
            yield f"{name}.{attention}_attention.{layer}.bias", (width,)
        for norm in ("query_norm", "key_norm"):
            yield f"{name}.{attention}_attention.{norm}.weight", (head_dim,)


def make(folder: Path, tensors: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """Write a model, one file after the other, from one piece of noise that is shifted about."""
    rng = np.random.default_rng(seed)
    noise = (0.02 * rng.standard_normal(2**22 + 1)).astype(np.float32).astype(ml_dtypes.bfloat16)
    files: list[dict[str, TensorInfo]] = [{}]
    for name, shape in tensors.items():
        info = TensorInfo("BF16", shape)
        if sum(t.nbytes for t in files[-1].values()) + info.nbytes > FILE_BYTES:
            files.append({})
        files[-1][name] = info
    folder.mkdir()
    for i, infos in enumerate(files, 1):
        start, placed = encode_header(infos, {"format": "pt"})
        with open(folder / f"model-{i:05d}-of-{len(files):05d}.safetensors", "wb") as file:
            file.write(start)
            for info in placed.values():
                left = info.elements
                while left:
                    first = int(rng.integers(noise.size // 2))
                    piece = noise[first : first + left]
                    file.write(piece.view(np.uint8).data)
                    left -= piece.size
            file.flush()
            os.fsync(file.fileno())


def step(name: str, folder: Path) -> dict[str, Any]:
    """Run one step in this process; return its times and its memory."""
    model, int8, back = folder / "model", folder / "int8", folder / "back"
    for file in model.iterdir():  # from the disk, not from what the kernel still has of it
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    held = _resident("VmRSS")
    # NOTE: this resets the peak. That of getrusage would have the process in it that started this.
    Path("/proc/self/clear_refs").write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.monotonic()
    extra: dict[str, Any] = {}
    if name == "read":
        for file in sorted(model.iterdir()):
            with open(file, "rb", buffering=0) as opened:
                while opened.read(2**24):
                    pass
    elif name == "analyze":
        record = checkpoints.analyze(model).to_dict()
        output.write_json(folder / "analysis.json", record)
        extra["totals"] = record["totals"]
    elif name == "convert":
        known = checkpoints.Analysis.load(folder / "analysis.json")
        extra["bytes_out"] = checkpoints.convert(model, int8, analysis=known).nbytes
    else:
        extra["bytes_out"] = checkpoints.dequantize(int8, back).nbytes
    seconds = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    memory = _resident("VmHWM") - held
    return {"step": name, "seconds": seconds, "cpu": cpu, "memory": memory, **extra}


def _resident(which: str) -> int:
    """Return bytes of this process in memory: ``VmRSS`` now, ``VmHWM`` at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{which}:"))
    return 1024 * int(line.split()[1])


def run(args: argparse.Namespace) -> int:
    """Make the model, run every step, print and keep the record."""
    sizes = SMALL_SIZES if args.quick else SIZES
    parameters = min(args.parameters, 10**6) if args.quick else args.parameters
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="checkpoints-") as name:
        folder = Path(name)
        start = time.monotonic()
        make(folder / "model", shapes(parameters, sizes), args.seed)
        rows = [{"step": "write", "seconds": time.monotonic() - start}]
        source = checkpoints.open_checkpoint(folder / "model")
        for what in STEPS:
            command = [sys.executable, "-m", "experiments.diffusion.checkpoints", "--step", what]
            done = subprocess.run(
                [*command, "--folder", name], cwd=recording.ROOT, check=True, capture_output=True,
                text=True,
            )  # fmt: skip
            rows.append(json.loads(done.stdout))
            print(f"{what}: {words.format_seconds(rows[-1]['seconds'])}", flush=True)
    content = {
        "parameters": sum(t.elements for t in source.tensors.values()),
        "bytes": sum(t.nbytes for t in source.tensors.values()),
        "largest": max(t.nbytes for t in source.tensors.values()),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "config": vars(ca.Int8Config()) | {"fp32_patterns": []},
        "rows": rows,
    }
    output.print_table(*table(content))
    record = recording.keep(args, "checkpoints", "numpy", content)
    if args.update_docs:
        update_page(record)
    (memory,) = (row["memory"] for row in rows if row["step"] == "analyze")
    # NOTE: about ten megabytes beside tensors are more than the tensors of a small model
    return 0 if args.quick or memory <= MOST_MEMORY * content["largest"] else 1


def table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: what each step took."""
    header = ["step", "time", "of reading", "CPU time", "of the source per second", "memory",
              "of the largest tensor", "files after"]  # fmt: skip
    rows = []
    reading = next((r["seconds"] for r in record["rows"] if r["step"] == "read"), None)
    for row in record["rows"]:
        after, memory = row.get("bytes_out"), row.get("memory")
        share = f" ({words.format_share(after / record['bytes'])})" if after else ""
        rows.append([
            row["step"],
            words.format_seconds(row["seconds"]),
            f"{row['seconds'] / reading:.1f}" if reading else "",
            words.format_seconds(row["cpu"]) if "cpu" in row else "",
            f"{words.format_bytes(int(record['bytes'] / row['seconds']))}",
            words.format_bytes(memory) if memory else "",
            f"{memory / record['largest']:.2f}" if memory else "",
            f"{words.format_bytes(after)}{share}" if after else "",
        ])  # fmt: skip
    return header, rows


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/CHECKPOINTS.md says was measured."""
    header, rows = table(record)
    environment = record["environment"]
    return "\n".join([
        f"`{recording.command_now(record)}`: {record['parameters'] / 1e9:.2f} billion parameters, "
        f"bfloat16, {words.format_bytes(record['bytes'])}, largest tensor "
        f"{words.format_bytes(record['largest'])}. One process on a machine of "
        f"{record['cores']} cores with a load of {record['load']:.1f}, NumPy "
        f"{environment['numpy']}, revision {environment.get('revision', 'unknown')[:10]}.",
        "",
        *recording.markdown(header, rows),
    ])  # fmt: skip


def update_page(record: Mapping[str, Any], path: Path = PAGE) -> None:
    """Write what was measured between the marks of docs/CHECKPOINTS.md."""
    recording.replace_between(path, BEGIN, END, section(record))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--parameters", type=int, default=5 * 10**9, metavar="N")
    parser.add_argument("--folder", metavar="DIR", help="where the model is made")
    recording.add_page_arguments(parser)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.step:
        print(json.dumps(step(args.step, Path(args.folder))))
        return 0
    if args.stored:
        update_page(recording.stored("checkpoints"))
        return 0
    return recording.guarded(run, args)


if __name__ == "__main__":
    sys.exit(main())
