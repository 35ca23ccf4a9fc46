"""Attention of CuPy arrays on a device: a call prepared once, replayed from a CUDA graph, timed.

Run it with ``python examples/cupy_script.py``. It needs a CUDA device of compute capability 8.0 or
later.
"""

import sys

import cupyattn as ca
from cupyattn.measure.device import device_missing

if missing := device_missing():
    sys.exit(f"cupy_script.py needs a CUDA device: {missing}.")
import cupy
from cupyx.profiler import benchmark


def main() -> None:
    """Run, prepare, capture and time one call."""
    rng = cupy.random.default_rng(0)
    shape = (2, 16, 2048, 128)  # (batch, heads, len, head_dim)
    q, k, v = (rng.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16) for _ in "qkv")

    o = ca.attention(q, k, v, causal=True)  # on the current device and stream
    print(ca.explain(q, k, v, causal=True))

    out = cupy.empty_like(q)
    prepared = ca.plan(q, k, v, causal=True, out=out)  # checked, compiled and loaded
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()  # a non-blocking stream does not wait for q, k, v
    with stream:
        prepared(q, k, v, out=out)
        stream.begin_capture()
        prepared(q, k, v, out=out)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    print("the graph's bits are those of the call:", bool((out == o).all()))

    for variant in ("fa_tc", "fa_int8"):
        print(benchmark(ca.attention, (q, k, v), {"causal": True, "variant": variant}, n_repeat=20))


if __name__ == "__main__":
    main()
