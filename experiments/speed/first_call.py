"""How long does the first call of a configuration take?

Varies       rung, form, head_dim; the compile cache empty, or filled by the call before
Holds fixed  batch 1, 2 heads, length 256, float16; a separate process for every call, its CuPy
             context up and another kernel of the library loaded
Measures     seconds from the call to its result (checks, plan, compiling or reading, launch), and
             seconds of the call after it
Run          python -m experiments.speed.first_call [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import cupyattn as ca
from cupyattn import distributions
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from experiments._harness import recording

#: (rung, head_dim); fa_tc runs in its Hopper form where the device has one.
CALLS = (("fa_tc", 64), ("fa_tc", 128), ("fa_tc", 256), ("fa_warps", 128), ("fa_int8", 128))


def timed_call(rung: str, head_dim: int, on_device: bool) -> dict[str, float]:
    """Make the first call of a configuration in this process, and the one after it.

    Without a device the modules are compiled, or read from the cache, and nothing is launched.
    """
    arrays: tuple[Any, ...] = distributions.make("normal", 1, 2, 256, 256, head_dim, "float16", 0)
    if not on_device:
        plans = explain.plans(resolved(*arrays, variant=rung))
        specs = [one.module for plan in plans for one in plan.launches]

        def call() -> None:
            for spec in specs:
                compiler.build(spec, "sm_90")
    else:
        import cupy

        arrays = tuple(cupy.asarray(x) for x in arrays)
        ca.attention(*arrays, variant="fa")

        def call() -> None:
            ca.attention(*arrays, variant=rung)
            cupy.cuda.Device().synchronize()

    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return {"first": seconds[0], "second": seconds[1]}


def in_a_process(rung: str, head_dim: int, on_device: bool, cache: str) -> dict[str, float]:
    """Make that call in a fresh process, with the compile cache in a folder."""
    asked = f"report({rung!r}, {head_dim}, {on_device})"
    text = f"from experiments.speed import first_call; first_call.{asked}"
    environment = {**os.environ, "CUPYATTN_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def report(rung: str, head_dim: int, on_device: bool) -> None:
    """Print what `timed_call` finds, for the process that asked."""
    print(json.dumps(timed_call(rung, head_dim, on_device)))


def run(args: argparse.Namespace) -> int:
    """Time every configuration with an empty and with a filled cache."""
    rows = []
    calls = CALLS[:1] if args.quick else CALLS
    with output.progress("first calls", 2 * len(calls)) as advance:
        for rung, head_dim in calls:
            with tempfile.TemporaryDirectory(prefix="cupyattn-first-call-") as cache:
                for filled in (False, True):
                    found = in_a_process(rung, head_dim, not args.quick, cache)
                    rows.append({"rung": rung, "head_dim": head_dim, "filled": filled, **found})
                    advance(rung)
    cells = [
        [r["rung"], str(r["head_dim"]), "filled" if r["filled"] else "empty",
         f"{1e3 * r['first']:.1f}", f"{1e3 * r['second']:.2f}"]
        for r in rows
    ]  # fmt: skip
    output.print_table(["rung", "head_dim", "cache", "first call, ms", "second, ms"], cells)
    recording.keep(args, "first_call", "compile" if args.quick else "cuda", {"rows": rows})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.main(run, recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
