"""Runs a few lines of PTX in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.compiler.modules import Binary, ModuleSpec
from cupyattn.interpret import executor
from cupyattn.plans.records import Launch

ENTRY = """
.version 8.0
.target sm_80
.address_size 64
.file 1 "/somewhere/probe.cu"
.file 2 "/somewhere/prims/inner.cuh"
.visible .entry probe({parameters})
{{
.reg .pred %p<9>;
.reg .b16 %h<9>;
.reg .b32 %r<40>;
.reg .f32 %f<9>;
.reg .b64 %rd<20>;
{body}
ret;
}}
"""


def run_ptx(
    body: str, *, grid: int = 1, block: int = 32, undefined: dict[str, Any] | None = None,
    **arrays: np.ndarray,
) -> None:  # fmt: skip
    """Run a body whose parameters are the addresses of the arrays, named as these are.

    Registers: %p %h (b16) %r (b32) %f %rd (b64). Read-only arrays are inputs. `undefined`: which
    bytes no launch before this one has written, by name; bytes that this one writes are taken out.
    """
    parameters = ", ".join(f".param .u64 {name}" for name in arrays)
    ptx = ENTRY.format(parameters=parameters, body=body)
    binary = Binary("sm_80", (0, 0), ptx, b"", "", {}, 0)
    params: Any = tuple((np.dtype([(name, "u8")]), {name: name}) for name in arrays)
    launch = Launch(ModuleSpec("probe.cu"), "probe", grid, block, False, params)
    executor.run_launch(launch, binary, arrays, {} if undefined is None else undefined)
