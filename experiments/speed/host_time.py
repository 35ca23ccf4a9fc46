"""How long does the host take for one call?

Varies       rung; attention(), a prepared call, one with out=, one whose q lies elsewhere each time
             (so that no replay serves it); where torch is installed its function, that with a
             gradient, its operator, a CUDA graph
Holds fixed  batch 1, 2 heads, length 64, head_dim 64, float16: kernels shorter than their launches
Measures     equality with the first call; seconds of the host per call, the device running behind
Run          python -m experiments.speed.host_time [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import distributions
from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.kinds import array_namespace
from cupyattn.cli import output
from cupyattn.measure import timing
from cupyattn.problem.settings import Settings
from cupyattn.runtime import replay
from experiments._harness import recording

#: Calls of one sample: few enough that the queue of the device never fills up.
CALLS = 100


def ways(rung: str, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Return the ways to make one call."""
    out = q.copy()
    prepared, elsewhere = (ca.plan(q, k, v, variant=rung) for _ in range(2))
    into = ca.plan(q, k, v, variant=rung, out=out)
    xp = array_namespace(q)
    # NOTE: more places in turn than a thread looks back.
    places = itertools.cycle(list(xp.repeat(q[None], 2 * replay.HORIZON, axis=0)))
    return {
        "attention()": lambda: ca.attention(q, k, v, variant=rung),
        "prepared": lambda: prepared(q, k, v),
        "prepared, out=": lambda: into(q, k, v, out=out),
        "prepared, other addresses": lambda: elsewhere(next(places), k, v),
    }


def torch_ways(rung: str, *arrays: Any) -> dict[str, Callable[[], Any]]:
    """Return the ways to make one call on tensors; none where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return {}
    torch, interop, bridge, calls, schema = map(
        importlib.import_module,
        ["torch", *(f"cupyattn.interop.torch{n}" for n in ("", ".bridge", ".calls", ".schema"))],
    )
    tensors = dict(zip("qkv", map(bridge.as_tensor, arrays), strict=True))
    settings = calls.TensorSettings(Settings(variant=rung))
    arguments = schema.ATTENTION_QKV.flat(tensors, settings)
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    found = {
        "torch, attention()": lambda: interop.attention(**tensors, variant=rung),
        "torch, with a gradient": lambda: interop.attention(**leaves, variant=rung).detach(),
        "torch, operator": lambda: torch.ops.cupyattn.attention_qkv.default(*arguments)[0],
    }
    if tensors["q"].is_cuda:
        for call in found.values():
            call()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            o = interop.attention(**tensors, variant=rung)

        def replay() -> Any:
            graph.replay()
            return o

        found["torch, CUDA graph"] = replay
    return found


def numbers(o: Any) -> np.ndarray:
    """Return a result of either kind on the host."""
    return o.cpu().numpy() if hasattr(o, "cpu") else on_host(o)


def sample(call: Callable[[], Any], calls: int, wait: Callable[[], Any]) -> float:
    """Return the seconds of one call, of many made without waiting for the device."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - start) / calls
    wait()
    return seconds


def run(args: argparse.Namespace) -> int:
    """Time every way of every rung in turns, print the table and write the record."""
    arrays: tuple[Any, ...] = distributions.make("normal", 1, 2, 64, 64, 64, "float16", args.seed)
    wait: Callable[[], Any] = lambda: None  # noqa: E731
    if not args.quick:
        import cupy

        arrays = tuple(cupy.asarray(x) for x in arrays)
        wait = cupy.cuda.Device().synchronize
    calls, rounds = CALLS, 0 if args.quick else args.rounds
    rows = []
    for rung in ca.VARIANTS:
        found = {**ways(rung, *arrays), **torch_ways(rung, *arrays)}
        first = on_host(ca.attention(*arrays, variant=rung))
        equal = all(np.array_equal(numbers(call()), first) for call in found.values())
        samples: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(rounds):
            for name, call in found.items():
                samples[name].append(sample(call, calls, wait))
        for name, seconds in samples.items():
            rows.append({"rung": rung, "way": name, "equal": equal, "samples": seconds})
    cells = [
        [r["rung"], r["way"], "yes" if r["equal"] else "NO", microseconds(r["samples"])]
        for r in rows
    ]
    output.print_table(["rung", "way", "equal", "host time of a call, us"], cells)
    recording.keep(args, "host_time", "mirror" if args.quick else "cuda", {"rows": rows})
    return 0 if all(row["equal"] for row in rows) else 1


def microseconds(seconds: Sequence[float]) -> str:
    """Return the median of times, and its interval."""
    if not seconds:
        return "-"
    x = timing.median(seconds)
    return f"{1e6 * x.median:.1f} [{1e6 * x.low:.1f}, {1e6 * x.high:.1f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.main(run, recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
