"""How long does the host take for an operator in code that Inductor compiled?

Varies       operator: a layer of INT8 codes, three layers of one input, attention of models of
             diffusers. Its call: by torch's dispatcher, or by the function made for its place.
Holds fixed  1 x 64 tokens, width 256, 4 heads, bfloat16: kernels shorter than their launches.
Measures     equality of results, bit for bit. Microseconds of the host a call, of 100 calls behind
             which the device runs, in turns. Functions of Python and C that run in a call.
Expect       at most 5 us a call from its place, the driver included.
Run          python -m experiments.speed.host_places [--quick] [--rounds N] [--json FILE]

With ``--quick`` on the host, where mirrors run and nothing is timed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cupyattn.cli import output
from experiments._harness import recording
from experiments.speed.host_time import microseconds, sample

CALLS, WARM = 100, 10
ROWS, WIDTH, HEADS = 64, 256, 4


def cases(torch: Any, kind: str, backend: str | None) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return operators by name: their arguments as texts of t0, t1, ..., and the tensors."""
    interop = importlib.import_module("cupyattn.interop.torch")
    torch.manual_seed(0)
    layers = [
        interop.Int8Linear.from_linear(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))
        for _ in range(3)
    ]
    x = torch.randn(1, ROWS, WIDTH, dtype=torch.bfloat16, device=kind)
    weights, scales, biases = (
        [getattr(one, name).detach().to(kind) for one in layers]
        for name in ("weight_codes", "weight_scale", "bias")
    )
    heads = [
        torch.randn(1, ROWS, HEADS, WIDTH // HEADS, dtype=torch.bfloat16, device=kind)
        for _ in range(3)
    ]
    text = f"variant='fa_int8', backend={backend!r}" if backend else "variant='fa_int8'"
    return {
        "int8_layer": (
            f"(t0, t1, t2, t3, None, None, '', None, {backend!r}, )",
            (x, weights[0], scales[0], biases[0]),
        ),
        "int8_layers": (
            "(t0, [t1, t2, t3], [t4, t5, t6], [t7, t8, t9], ['', '', ''], None, "
            f"{backend!r}, )",
            (x, *weights, *scales, *biases),
        ),
        "diffusers_attention": (
            f"(t0, t1, t2, {'None, ' * 7}0, False, {text!r}, )",
            tuple(one.transpose(1, 2) for one in heads),
        ),
    }


def ways(torch: Any, name: str, text: str, tensors: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """Return both calls of an operator."""
    places = importlib.import_module("cupyattn.interop.torch.places")
    names = {f"t{number}": x for number, x in enumerate(tensors)}
    arguments = eval(text, names)
    overload = getattr(torch.ops.cupyattn, name).default

    def dispatched() -> Any:
        return overload(*arguments)

    made = dispatched()
    results = made if isinstance(made, list) else [made]
    forms = [f"{tuple(y.shape)}, {tuple(y.stride())}, {y.dtype}" for y in results]
    returned = ", ".join(f"y{number}" for number in range(len(results)))
    call = places.place(
        name, (tensors[0].device.type, 0), len(tensors), (), forms, text,
        f"[{returned}]" if isinstance(made, list) else returned,
    )  # fmt: skip
    return {"dispatcher": dispatched, "place": lambda: call(*tensors)}


def functions_of(call: Callable[[], Any]) -> int:
    """Return how many functions of Python and C run in a call."""
    count = 0

    def noted(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(noted)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count - 2  # `call` itself, and the end of profiling


def run(args: argparse.Namespace) -> int:
    """Time both calls of every operator in turns, print the table and write the record."""
    import torch

    for module in ("torch.linear", "diffusers.operator"):
        importlib.import_module(f"cupyattn.interop.{module}")
    kind, backend = ("cpu", "mirror") if args.quick else ("cuda", None)
    rows = []
    with torch.no_grad():
        for name, (text, tensors) in cases(torch, kind, backend).items():
            found = ways(torch, name, text, tensors)
            results = [list(y) if isinstance(y := call(), list) else [y] for call in found.values()]
            equal = all(map(torch.equal, *results))
            for call in found.values():
                for _ in range(0 if args.quick else WARM):
                    call()
            samples: dict[str, list[float]] = {way: [] for way in found}
            for _ in range(0 if args.quick else args.rounds):
                for way, call in found.items():
                    samples[way].append(sample(call, CALLS, torch.cuda.synchronize))
            for way, call in found.items():
                functions = 0 if args.quick else functions_of(call)
                rows.append({
                    "operator": name, "way": way, "equal": equal, "functions": functions,
                    "samples": samples[way],
                })  # fmt: skip
    cells = [
        [r["operator"], r["way"], "yes" if r["equal"] else "NO", str(r["functions"] or "-"),
         microseconds(r["samples"])]
        for r in rows
    ]  # fmt: skip
    header = ["operator", "called by", "equal", "functions", "host time of a call, us"]
    output.print_table(header, cells)
    recording.keep(args, "host_places", "mirror" if args.quick else "cuda", {"rows": rows})
    return 0 if all(row["equal"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return recording.main(run, recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
