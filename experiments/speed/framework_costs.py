"""What does the way from a framework to a call cost, beside the call itself?

Varies       framework; the way: JAX's foreign functions or its callback, a module of diffusers by
             itself or watched; bytes of the operands
Holds fixed  the call does nothing (JAX), or stays native (diffusers); one thread
Measures     seconds of the host per call, the result awaited
Run          python -m experiments.speed.framework_costs [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyattn.cli import output
from cupyattn.measure import timing
from experiments._harness import recording

#: Elements of each of three operands, in 16 bits.
SIZES = (2**12, 2**23)
CALLS = 10
#: Length and width of what the module of diffusers gets.
LENGTH, WIDTH = 16, 32

Ways = dict[str, Callable[[], Any]]


@functools.lru_cache(maxsize=1)
def register_nothing() -> None:
    """Register a foreign function that reads nothing and writes a zero."""
    import jax

    from cupyattn.interop import xla_ffi

    def nothing(operands: Any, results: Any, attributes: Any) -> None:
        results[0][...] = 0

    gpu = jax.default_backend() == "gpu"
    version = xla_ffi.spoken_version(jax.ffi.include_dir())
    function = jax.ffi.pycapsule(xla_ffi.handler(nothing, version, on_device=gpu))
    jax.ffi.register_ffi_target("cupyattn_nothing", function, "CUDA" if gpu else "cpu")


def jax_ways(size: int) -> Ways:
    """Return an empty call of three operands by each way, jitted and awaited."""
    import jax
    import jax.numpy as jnp

    register_nothing()
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    operands = jax.block_until_ready([jnp.zeros(size, jnp.bfloat16) for _ in range(3)])
    found = {
        "foreign function": jax.jit(lambda *x: jax.ffi.ffi_call("cupyattn_nothing", one)(*x)),
        "pure_callback": jax.jit(
            lambda *x: jax.pure_callback(lambda *_: np.zeros(1, np.float32), one, *x)
        ),
    }
    return {
        name: lambda call=call: jax.block_until_ready(call(*operands))
        for name, call in found.items()
    }


def diffusers_ways() -> Ways:
    """Return a call of an attention module by itself, and of one that is watched."""
    import torch
    from diffusers.models.attention_processor import Attention

    from cupyattn.interop.diffusers import replace_attention_with_int8

    torch.set_num_threads(1)
    x = torch.zeros(1, LENGTH, WIDTH)
    alone, watched = (
        torch.nn.ModuleDict({"attn": Attention(WIDTH, heads=2, dim_head=WIDTH // 2)})
        for _ in range(2)
    )
    replace_attention_with_int8(watched, policy="balanced", min_length=LENGTH + 1)
    return {
        name: lambda module=module: torch.no_grad()(module["attn"])(x)
        for name, module in (("by itself", alone), ("watched", watched))
    }


def run(args: argparse.Namespace) -> int:
    """Time the ways of each framework in turns, print the table and write the record."""
    problems: list[tuple[str, int, Ways]] = [
        ("jax", 3 * 2 * size, jax_ways(size)) for size in SIZES[: 1 if args.quick else None]
    ]
    problems.append(("diffusers", 4 * LENGTH * WIDTH, diffusers_ways()))
    rows = []
    for framework, nbytes, ways in problems:
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for call in ways.values():
            call()  # compiles
        for _ in range(1 if args.quick else args.rounds):
            for name, call in ways.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                samples[name].append((time.perf_counter() - start) / CALLS)
        rows += [
            {"framework": framework, "way": name, "bytes": nbytes, "samples": seconds}
            for name, seconds in samples.items()
        ]
    cells = [
        [
            r["framework"],
            r["way"],
            str(r["bytes"]),
            f"{1e6 * timing.median(r['samples']).median:.0f}",
        ]
        for r in rows
    ]
    output.print_table(["framework", "way", "bytes", "host time of a call, us"], cells)
    recording.keep(args, "framework_costs", "mirror", {"rows": rows})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return run(recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
