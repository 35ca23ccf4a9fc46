"""Every rung on small shapes, for compute-sanitizer: ``python -m tests.gpu.sanitize``.

Without a memory pool every array is an allocation of its own, so that a step outside one is seen.
"""

from __future__ import annotations

import sys

from tests.gpu.support import cupy, on_device, run
from tests.hopper import hopper_pv8_cases
from tests.support.runs import CELLS, normal

#: Rungs in their forms, and types; on a Hopper device.
ALL = [*CELLS, *hopper_pv8_cases.CELLS]


def main() -> None:
    """Lengths with tails, both masks, a head size that pads; one line per rung."""
    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)
    for variant, dtype in ALL:
        for head_dim, causal in ((64, True), (36, False)):
            inputs = on_device(*normal((1, 2, 70, head_dim), (1, 1, 45, head_dim), dtype))
            run(variant, inputs, causal=causal)
        cupy.cuda.Device().synchronize()
        print("ran", variant, dtype)


if __name__ == "__main__":
    sys.exit(main())
