"""Time on the host, as often as asked, one call of each public function.

    PYTHONPATH=REVISION python experiments/_harness/host_calls.py

First it prints the names of the calls, a line of JSON. For each line of its input, which is one of
these names, it prints the seconds of a call. A script, not a module: it times whichever cupyattn
stands first on the path, so it names public functions alone. `experiments.speed.host_revisions`
asks two of them in turn, one of each revision.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

#: Calls of one sample: few enough that the queue of the device never fills up.
CALLS = 100


def calls() -> dict[str, Callable[[], Any]]:
    """Return a call of each function, all on the same small arrays of the device."""
    import cupy

    import cupyattn as ca
    from cupyattn import distributions

    q, k, v = (cupy.asarray(x) for x in distributions.make(
        "normal", 1, 2, 64, 64, 64, "float16", 0
    ))  # fmt: skip
    found: dict[str, Callable[[], Any]] = {}
    for rung in ca.VARIANTS:
        found[f"attention(), {rung}"] = lambda rung=rung: ca.attention(q, k, v, variant=rung)
        prepared = ca.plan(q, k, v, variant=rung)
        found[f"prepared, {rung}"] = lambda prepared=prepared: prepared(q, k, v)
    rows_first = [cupy.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    by_rows = ca.plan(*rows_first, variant="fa_tc", layout="BSHD")
    found["prepared, BSHD"] = lambda: by_rows(*rows_first)
    mask = cupy.ones((64, 64), bool)
    masked = ca.plan(q, k, v, mask=mask, variant="fa_tc")
    found["prepared, another mask"] = lambda: masked(q, k, v, mask=mask)
    packed = [x[0].swapaxes(0, 1).copy() for x in (q, k, v)]
    offsets = cupy.asarray([0, 16, 64], "int32")
    found["attention_varlen()"] = lambda: ca.attention_varlen(
        *packed, offsets, offsets, max_len_q=48, max_len_k=48, variant="fa_tc"
    )
    o, lse = ca.attention(q, k, v, variant="fa_tc", return_lse=True)
    found["attention_backward()"] = lambda: ca.attention_backward(o, q, k, v, o, lse)
    found["quantize()"] = lambda: ca.quantize(q, k, v)
    x = cupy.asarray(distributions.make("normal", 1, 1, 64, 64, 256, "float16", 0)[0][0, 0])
    weight = ca.weight_quant(x.astype("float32"), block_size=128)
    codes = ca.act_quant(x, block_size=128)
    found["act_quant()"] = lambda: ca.act_quant(x, block_size=128)
    found["int8_gemm()"] = lambda: ca.int8_gemm(*codes, *weight)
    if importlib.util.find_spec("torch") is not None:
        found |= torch_calls(q, k, v)
    return found


def torch_calls(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Return the same for torch: its function and its operator."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import cupyattn as ca
    from cupyattn.interop import torch as interop

    class Seen(TorchDispatchMode):
        """Keeps the operator that a call came to, with its arguments: revisions differ in them."""

        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "cupyattn":
                self.operator, self.arguments = func, args
            return func(*args, **(kwargs or {}))

    tensors = [torch.from_dlpack(x) for x in (q, k, v)]
    found: dict[str, Callable[[], Any]] = {}
    for rung in ca.VARIANTS:
        call = lambda rung=rung: interop.attention(*tensors, variant=rung)  # noqa: E731
        with Seen() as seen:
            call()
        found[f"torch, attention(), {rung}"] = call
        found[f"torch, operator, {rung}"] = lambda s=seen: s.operator(*s.arguments)
    return found


def seconds_of(call: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Return the mean seconds of one call, of many made without waiting for the device."""
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    """Answer line by line, on one core, which a process keeps."""
    import cupy

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    wait = cupy.cuda.Device().synchronize
    found = calls()
    for call in found.values():
        for _ in range(5):
            call()
    print(json.dumps([*found]), flush=True)
    for line in sys.stdin:
        print(seconds_of(found[line.rstrip("\n")], wait), flush=True)


if __name__ == "__main__":
    main()
