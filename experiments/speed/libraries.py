"""Is a module of our own better than the library that could stand in its place?

Varies       the module (NVML, NVRTC, XLA's calls, NCCL, the cache's limit) and its rival
Holds fixed  one thread; a separate process for every start, ours and theirs in turns
Measures     seconds from a process that has neither to the first answer, and of a call later; lines
             of code of either; bytes that the wheels add; for JAX also what an error says, and
             whether the program stays in JAX's cache on disk; for the cache the time of a trim
Run          python -m experiments.speed.libraries [--quick] [--folder FOLDER] [--json FILE]

Libraries that are not installed are left out. Without a device, so are calls that need one. The
same command on a device times calls of NVML and NCCL. FOLDER holds the wheels as ``pip download``
leaves them.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.cli import output
from cupyattn.compiler import disk_cache, nvrtc, size_limit
from cupyattn.interop import xla_ffi
from cupyattn.measure import device, nvml, timing
from experiments._harness import library_candidates as candidates
from experiments._harness import recording

#: Distributions that install the libraries.
DISTRIBUTIONS = ("nvidia-ml-py", "cuda-bindings", "jax", "nccl4py", "cuda-core", "cupy-cuda13x")
_KERNEL = 'extern "C" __global__ void add(float* x) { x[threadIdx.x] += 1.0f; }'
_COMPILED = f".compile({_KERNEL!r}, 'add.cu', ['-arch=sm_90'])"
_MONITORED = "('0000:00:00.0') as found: pass"
_CANDIDATES = "from experiments._harness import library_candidates as c"
_HANDLED = """
spoken = xla_ffi.spoken_version(jax.ffi.include_dir())
made = jax.ffi.pycapsule(xla_ffi.handler(print, spoken, on_device=False))
jax.ffi.register_ffi_target("cupyattn_start", made, platform="cpu")
"""
#: (part, way, imports of the process, timed code, modules that it needs).
STARTS = (
    ("import cupyattn", "ours", "", "import cupyattn", ()),
    ("NVML", "ours", f"from cupyattn.measure import nvml; {_CANDIDATES}",
     f"with nvml.monitor{_MONITORED}", ()),
    ("NVML", "theirs", f"from cupyattn.measure import nvml; {_CANDIDATES}",
     f"with c.pynvml_monitor{_MONITORED}", ("pynvml",)),
    ("NVRTC", "ours", f"from cupyattn.compiler import nvrtc; {_CANDIDATES}",
     f"nvrtc.load(){_COMPILED}", ()),
    ("NVRTC", "theirs", f"from cupyattn.compiler import nvrtc; {_CANDIDATES}",
     f"c.BindingsNvrtc(){_COMPILED}", ("cuda.bindings",)),
    ("XLA's calls", "ours", "import jax; from cupyattn.interop import xla_ffi", _HANDLED,
     ("jax",)),
    ("XLA's calls", "theirs", "import jax; from cupyattn.interop import xla_ffi",
     "import jax.experimental.buffer_callback", ("jax",)),
    ("NCCL", "ours", "import cupy", "from cupy.cuda import nccl", ("cupy",)),
    ("NCCL", "theirs", "import cupy", "import nccl.core", ("cupy", "nccl")),
)  # fmt: skip
#: Calls of a sample.
CALLS = 20
#: Elements of each of three operands of an empty call of JAX, in 16 bits.
ELEMENTS = 2**12
#: Entries of a cache that is trimmed.
ENTRIES = (100, 1000, 8000)


def missing(modules: Sequence[str]) -> bool:
    """Whether one of several modules is not installed."""
    for name in modules:
        try:
            if find_spec(name) is None:
                return True
        except ModuleNotFoundError:
            return True
    return False


# ---- starts --------------------------------------------------------------------------------------


def started(before: str, timed: str) -> float:
    """Return the seconds that statements take in a process of their own."""
    script = (
        f"import time\n{before}\nstart = time.perf_counter()\n{timed}\n"
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True,
        cwd=recording.ROOT,
    )  # fmt: skip
    return float(done.stdout)


def starts(rounds: int) -> list[dict[str, Any]]:
    """Time every start, in turns."""
    present = [one for one in STARTS if not missing(one[4])]
    samples: list[list[float]] = [[] for _ in present]
    with output.progress("processes", rounds * len(present)) as advance:
        for _ in range(rounds):
            for seconds, (part, way, before, timed, _needs) in zip(samples, present, strict=True):
                seconds.append(started(before, timed))
                advance(f"{part}, {way}")
    return [
        {"part": part, "way": way, "kind": "start", "samples": seconds}
        for seconds, (part, way, *_rest) in zip(samples, present, strict=True)
    ]


# ---- calls ---------------------------------------------------------------------------------------


def nothing(operands: Any, results: Any, attributes: Any) -> None:
    """Read nothing and write a zero."""
    results[0][...] = 0


def refuse(operands: Any, results: Any, attributes: Any) -> None:
    """Fail as a call with a wrong argument does."""
    raise ValueError("q must have four axes, got 3: pass (batch, heads, len, head_dim)")


_REGISTERED = itertools.count()


def by_ffi(target: Any, name: str) -> Callable[..., Any]:
    """Return a jitted call of a target as `cupyattn.interop.jax` makes it."""
    import jax

    name = f"{name}_of_libraries_{next(_REGISTERED)}"  # XLA takes no name twice
    gpu = jax.default_backend() == "gpu"
    spoken = xla_ffi.spoken_version(jax.ffi.include_dir())
    function = jax.ffi.pycapsule(xla_ffi.handler(target, spoken, on_device=gpu))
    jax.ffi.register_ffi_target(name, function, platform="CUDA" if gpu else "cpu")
    one = [jax.ShapeDtypeStruct((1,), np.float32)]
    return jax.jit(lambda *x: jax.ffi.ffi_call(name, one)(*x, call="a"))


def by_callback(target: Any, name: str) -> Callable[..., Any]:
    """Return the same by buffer_callback; `name` is not needed."""
    import jax

    one = [jax.ShapeDtypeStruct((1,), np.float32)]
    return jax.jit(lambda *x: candidates.buffer_call(target, one)(*x, call="a"))


JAX_WAYS = {"ours": by_ffi, "theirs": by_callback}


def jax_calls() -> dict[str, Callable[[], Any]]:
    """Return an empty call of three operands by each way, jitted and awaited."""
    import jax
    import jax.numpy as jnp

    operands = jax.block_until_ready([jnp.zeros(ELEMENTS, jnp.bfloat16) for _ in range(3)])
    made = {way: make(nothing, "cupyattn_nothing") for way, make in JAX_WAYS.items()}
    return {
        way: lambda call=call: jax.block_until_ready(call(*operands)) for way, call in made.items()
    }


def nvrtc_calls() -> dict[str, Callable[[], Any]]:
    """Return the compilation of a kernel of one line by each way."""
    ways = {"ours": nvrtc.load(), "theirs": candidates.BindingsNvrtc()}
    return {
        way: lambda one=one: one.compile(_KERNEL, "add.cu", ["-arch=sm_90", "--no-cache"])
        for way, one in ways.items()
    }


def nvml_calls(pci_bus_id: str) -> dict[str, Callable[[], Any]]:
    """Return a question for the power by each way, both open until the process ends."""
    opened = {"ours": nvml.monitor(pci_bus_id), "theirs": candidates.pynvml_monitor(pci_bus_id)}
    monitors: dict[str, Any] = {way: one.__enter__() for way, one in opened.items()}
    return {way: lambda m=monitor: m.power_w() for way, monitor in monitors.items()}


def nccl_calls() -> dict[str, Callable[[], Any]]:
    """Return a message of 4 KiB that a rank sends to itself, launched and not awaited."""
    import cupy

    x, y = cupy.zeros(4096, np.uint8), cupy.zeros(4096, np.uint8)
    stream = cupy.cuda.get_current_stream().ptr
    made = {"ours": candidates.CupyNccl(), "theirs": candidates.Nccl4py()}
    return {way: lambda one=one: one.exchange(x, y, stream) for way, one in made.items()}


def calls(rounds: int) -> list[dict[str, Any]]:
    """Time the calls of each part whose libraries, and whose device, are there."""
    found: list[tuple[str, Mapping[str, Callable[[], Any]]]] = []
    if not missing(["cuda.bindings"]):
        found.append(("NVRTC", nvrtc_calls()))
    if not missing(["jax"]):
        found.append(("XLA's calls", jax_calls()))
    if not device.device_missing():
        import cupy
        from cupy.cuda import nccl  # no attribute before its import

        if not missing(["pynvml"]):
            found.append(("NVML", nvml_calls(cupy.cuda.Device().pci_bus_id)))
        if nccl.available and not missing(["nccl"]):
            found.append(("NCCL", nccl_calls()))
    rows = []
    for part, ways in found:
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for call in ways.values():
            call()  # compiles, connects
        for _ in range(rounds):
            for way, call in ways.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                samples[way].append((time.perf_counter() - start) / CALLS)
        rows += [
            {"part": part, "way": way, "kind": "call", "samples": seconds}
            for way, seconds in samples.items()
        ]
    return rows


# ---- what else JAX's users see -------------------------------------------------------------------


def jax_facts(way: str, folder: str) -> dict[str, Any]:
    """Return what an error of a call says by one way, and files that JAX's cache keeps of one."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    x = jax.block_until_ready(jnp.zeros(8))
    call = JAX_WAYS[way](nothing, "cupyattn_nothing")
    jax.block_until_ready(call(x))  # a jitted lambda
    kept = [name for name in os.listdir(folder) if name.startswith("jit__lambda")]
    try:
        jax.block_until_ready(JAX_WAYS[way](refuse, "cupyattn_refuse")(x))
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
    return {"way": way, "cached": bool(kept), "error_lines": len(said.splitlines()),
            "status": said.partition(":")[0]}  # fmt: skip


def jax_rows() -> list[dict[str, Any]]:
    """Return the facts of both ways, each from a separate process."""
    if missing(["jax"]):
        return []
    rows = []
    for way in JAX_WAYS:
        with tempfile.TemporaryDirectory(prefix="cupyattn-libraries-") as folder:
            text = (
                "import json; from experiments.speed import libraries as l; "
                f"print(json.dumps(l.jax_facts({way!r}, {folder!r})))"
            )
            done = subprocess.run(
                [sys.executable, "-c", text], check=True, capture_output=True, text=True,
                cwd=recording.ROOT,
            )  # fmt: skip
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    return rows


# ---- lines, wheels, the cache --------------------------------------------------------------------


def code_lines(*objects: Any) -> int:
    """Count the lines of modules, classes and functions that hold code: no text, no blank lines.

    Examples
    --------
    >>> code_lines(missing)
    8
    """
    return sum(_code_lines(inspect.getsource(one)) for one in objects)


def _code_lines(source: str) -> int:
    tree = ast.parse(source)
    texts: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            texts.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(
        1 for number, line in lines
        if number not in texts and line.strip() and not line.lstrip().startswith("#")
    )  # fmt: skip


def lines() -> list[dict[str, Any]]:
    """Count the code that each library would replace, and the code that would call the library."""
    found = (
        ("NVML", (nvml.Monitor, nvml.monitor),
         (candidates.PynvmlMonitor, candidates.pynvml_monitor)),
        ("NVRTC", (nvrtc.Nvrtc,), (candidates.BindingsNvrtc,)),
        ("XLA's calls", (xla_ffi,), (candidates.buffer_call, candidates._callback)),
        ("NCCL", (candidates.CupyNccl,), (candidates.Nccl4py,)),
    )  # fmt: skip
    return [
        {"part": part, "ours": code_lines(*ours), "theirs": code_lines(*theirs)}
        for part, ours, theirs in found
    ]


def wheels(folder: Path | None) -> dict[str, int]:
    """Return the bytes of each wheel of a folder."""
    paths = sorted(folder.glob("*.whl")) if folder else []
    return {"-".join(path.name.split("-")[:2]): path.stat().st_size for path in paths}


def trims(rounds: int) -> list[dict[str, Any]]:
    """Time the trim after a compilation by entries of the cache, if it deletes nothing."""
    rows = []
    before = os.environ.get("CUPYATTN_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="cupyattn-libraries-") as folder:
        os.environ["CUPYATTN_CACHE_DIR"] = folder
        try:
            made = 0
            for entries in ENTRIES:
                for number in range(made, entries):
                    disk_cache.write(f"{number:064x}", b"content")
                made = entries
                seconds = []
                for _ in range(rounds):
                    start = time.perf_counter()
                    size_limit.trim(size_limit.DEFAULT)
                    seconds.append(time.perf_counter() - start)
                rows.append({"entries": entries, "samples": seconds})
        finally:
            os.environ.pop("CUPYATTN_CACHE_DIR")
            if before is not None:
                os.environ["CUPYATTN_CACHE_DIR"] = before
    return rows


# ---- the page ------------------------------------------------------------------------------------

PAGE = recording.ROOT / "docs" / "DESIGN.md"
BEGIN, END = "<!-- libraries: begin -->", "<!-- libraries: end -->"


def section(record: Mapping[str, Any]) -> str:
    """Return the table of docs/DESIGN.md."""
    facts = record["environment"]
    installed = ", ".join(f"{name} {number}" for name, number in record["installed"].items())
    rows = []
    for counted in record["lines"]:
        part = counted["part"]
        cells = [part, f"{counted['ours']} / {counted['theirs']}"]
        for kind in ("start", "call"):
            found = {
                row["way"]: timing.median(row["samples"]).median
                for row in record["rows"]
                if (row["part"], row["kind"]) == (part, kind)
            }
            cells.append(
                " / ".join(f"{1e3 * found[way]:.3g}" for way in ("ours", "theirs"))
                if len(found) == 2
                else "not measured"
            )
        rows.append(cells)
    text = [
        f"`{record['command']}`, Python {facts['python']}, {installed}, revision "
        f"{(facts.get('revision') or 'unknown')[:10]}; ours / theirs:",
        "",
        *recording.markdown(["", "lines of code", "start, ms", "call, ms"], rows),
        "",
        "Wheels: " + ", ".join(f"{n} {b / 1e6:.2f} MB" for n, b in record["wheels"].items()) + ".",
        "A trim of the compile cache takes "
        + ", ".join(
            f"{1e3 * timing.median(row['samples']).median:.3g} ms with {row['entries']:,} entries"
            for row in record["trims"]
        )
        + f"; `import cupyattn` {1e3 * start_of(record, 'import cupyattn'):.0f} ms.",
    ]
    for row in record["jax"]:
        text.append(
            f"JAX, {row['way']}: an error is `{row['status']}` in {row['error_lines']} "
            f"line{'s' * (row['error_lines'] > 1)}, JAX's cache on disk "
            f"{'keeps' if row['cached'] else 'does not keep'} the program."
        )
    return "\n".join(text)


def start_of(record: Mapping[str, Any], part: str) -> float:
    """Return the median start of our way of a part, in seconds."""
    rows = {(row["part"], row["way"], row["kind"]): row["samples"] for row in record["rows"]}
    return timing.median(rows[part, "ours", "start"]).median


# ---- the command ---------------------------------------------------------------------------------


def installed() -> dict[str, str]:
    """Return the versions of the libraries that are there."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run(args: argparse.Namespace) -> int:
    """Measure everything that can be measured here, print a table and write the record."""
    if args.stored:
        recording.replace_between(PAGE, BEGIN, END, section(recording.stored("libraries")))
        return 0
    rounds = 1 if args.quick else args.rounds
    rows = starts(rounds) + calls(rounds)
    cells = []
    for row in rows:
        found = timing.median(row["samples"])
        cells.append(
            [row["part"], row["kind"], row["way"], f"{1e3 * found.median:.3g}",
             f"{1e3 * found.low:.3g} .. {1e3 * found.high:.3g}"]
        )  # fmt: skip
    output.print_table(["", "", "", "ms", "95 %"], cells)
    content = {
        "rounds": rounds, "installed": installed(), "wheels": wheels(args.folder), "rows": rows,
        "jax": jax_rows(), "lines": lines(), "trims": trims(rounds),
    }  # fmt: skip
    recording.keep(args, "libraries", "host", content)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="wheels of the libraries")
    parser.add_argument(
        "--stored", action="store_true", help="measure nothing: docs/DESIGN.md from the record"
    )
    return recording.guarded(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
