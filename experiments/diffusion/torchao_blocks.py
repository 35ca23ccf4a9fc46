"""How fast are torchao's INT8 linear layers in a compiled model, beside ours?

Varies       model of diffusers, as in diffusers_blocks; what its linear layers are: as they are,
             torchao's (INT8 weights, activations quantised by row as they come), or ours, with
             the same scales; ours with INT8 attention as well; torchao's with the options of
             Inductor that it asks for, which tune each kernel, and without
Holds fixed  the layers that are replaced, the rest as in diffusers_blocks; the whole model is
             compiled, ``model.compile(fullgraph=True)``
Measures     a pass of the model: time in turns, and the ratio of the native model's to it; relative
             L2 of the output to native; the first call, which compiles and for torchao tunes
Expect       ours ahead of both
Run          python -m experiments.diffusion.torchao_blocks [--quick] [--json FILE]
             [--models NAME ...] [--ways NAME ...] [--stored] [--update-docs]

Needs torch, diffusers and torchao, and some minutes for torchao to tune its kernels: ``--ways``
can leave that out. ``--update-docs`` writes the table of docs/INTEROP.md, with ``--stored`` from
the committed record alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from cupyattn.measure import device, timing
from cupyattn.measure.words import format_seconds
from cupyattn.quant import Int8Config
from experiments._harness import recording
from experiments._harness.others import format_comparison
from experiments.diffusion import diffusers_blocks as blocks

NATIVE, OURS, BOTH, TORCHAO, TUNED = (
    "native", "INT8 linear layers", "both INT8", "torchao's INT8 linear layers",
    "torchao's, tuned",
)  # fmt: skip
WAYS = (NATIVE, OURS, BOTH, TORCHAO, TUNED)
#: Options that torchao would set for the process (``set_inductor_config``), for its model alone.
TUNING = {
    "coordinate_descent_tuning": True,
    "coordinate_descent_check_all_directions": True,
    "force_fuse_int_mm_with_mul": True,
}
HEADER = ["", "pass", "of native", "first call", "to native"]
NAME = "torchao_blocks"
BEGIN, END = "<!-- torchao: begin -->", "<!-- torchao: end -->"


def torchao_layers(transformer: Any, names: Container[str]) -> Any:
    """Return a copy of a model of which torchao has replaced these layers.

    Raises
    ------
    UnsupportedError
        Where torchao is missing.
    """
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise UnsupportedError(f"this needs torchao ({error}): pip install torchao") from error
    own = blocks.shared(transformer)
    config = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    quantize_(own, config, filter_fn=lambda _, name: name in names)
    return own


def ways(transformer: Any, chosen: Sequence[str], *, on_device: bool) -> dict[str, Any]:
    """Return the model in those ways, compiled, and as it is."""
    from cupyattn.interop.diffusers import replace_attention_with_int8
    from cupyattn.interop.torch import replace_linear_with_int8

    ours, both = blocks.shared(transformer), blocks.shared(transformer)
    for model in (ours, both):
        config = Int8Config(strategy="channel")
        names = replace_linear_with_int8(model, config=config, originals="drop").replaced
    replace_attention_with_int8(both, policy="balanced")
    found = {NATIVE: transformer, OURS: ours, BOTH: both}
    found |= {
        name: torchao_layers(transformer, names) for name in (TORCHAO, TUNED) if name in chosen
    }
    found = {name: model for name, model in found.items() if name in (NATIVE, *chosen)}
    for name, model in found.items():
        options = {"options": TUNING} if name == TUNED else {}
        model.compile(fullgraph=True, **(options if on_device else {"backend": "eager"}))
    return found


def measure(name: str, model: blocks.Model, args: argparse.Namespace) -> dict[str, Any]:
    """Run a model in every way: the error, then times in turns."""
    torch, _ = blocks.libraries()
    on_device = not args.quick
    where = "cuda" if on_device else "cpu"
    latents, arguments = blocks.inputs(model, where, args.seed)
    step = arguments(latents, torch.full((), 700.0, device=where).expand(1))
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 32
    found = ways(blocks.make(model, where, args.seed), args.ways, on_device=on_device)
    row: dict[str, Any] = {"model": name, "class": blocks.CLASSES[model.family], "ways": {}}
    for label, way in found.items():
        start = time.perf_counter()
        way(**step, return_dict=False)  # compiles
        if on_device:
            torch.cuda.synchronize()
        row["ways"][label] = {"first_seconds": time.perf_counter() - start}
        result = way(**step, return_dict=False)[0]
        if label == NATIVE:
            native = result.clone()
        row["ways"][label]["to_native"] = blocks.relative(result, native)
        print(
            f"{name}: {label} compiled in {row['ways'][label]['first_seconds']:.0f} s", flush=True
        )
    if not on_device:
        return row

    def call(way: Any) -> Callable[[int], Any]:
        return lambda _: way(**step, return_dict=False)

    samples = timing.time_interleaved({n: call(w) for n, w in found.items()}, rounds=args.rounds)
    for label, times in samples.items():
        row["ways"][label] |= {
            "samples": times, "seconds": timing.median(times).median,
            "ratio": timing.paired_ratio(samples[NATIVE], times).to_list(),
        }  # fmt: skip
    return row | {"clocks": device.clocks()}


def table(row: Mapping[str, Any]) -> list[list[str]]:
    """Return the lines of a model."""
    return [
        [
            name, format_seconds(way["seconds"]) if "seconds" in way else "-",
            format_comparison(way.get("ratio")) if name != NATIVE else "-",
            format_seconds(way["first_seconds"]),
            f"{way['to_native']:.1e}" if name != NATIVE else "-",
        ]
        for name, way in row["ways"].items()
    ]  # fmt: skip


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/INTEROP.md says was measured."""
    environment, lines = record["environment"], []
    for row in record["rows"]:
        lines += [f"{row['model']} (`{row['class']}`), every way compiled:", ""]
        lines += [*recording.markdown(HEADER, table(row)), ""]
    where = f"{environment['device']['name']}, revision {environment['revision'][:10]}"
    return "\n".join([*lines, f"`{recording.command_now(record)}` on {where}, "
                      f"torch {record['torch']}, torchao {record['torchao']}."])  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure the models, print their tables, write the record."""
    if args.stored:
        record = recording.stored(NAME)
        for row in record["rows"]:
            output.print_table(HEADER, table(row))
        if args.update_docs:
            recording.replace_between(blocks.PAGE, BEGIN, END, section(record))
        return 0
    recording.check_rounds(args)
    torch, _ = blocks.libraries()
    if not args.quick and not torch.cuda.is_available():
        raise UnsupportedError(f"torch {torch.__version__} has no CUDA device; --quick needs none")
    models = blocks.QUICK_MODELS if args.quick else blocks.MODELS
    rows = []
    with torch.no_grad():
        for name in args.models:
            with blocks.forced_cudnn(torch, on_device=not args.quick):
                rows.append(measure(name, models[name], args))
            output.print_table(HEADER, table(rows[-1]))
    content = {"rows": rows, "torch": torch.__version__, "rounds": 0 if args.quick else args.rounds,
               "torchao": importlib.metadata.version("torchao")}  # fmt: skip
    record = recording.keep(args, NAME, "mirror" if args.quick else "cuda", content)
    if args.update_docs and not args.quick:
        recording.replace_between(blocks.PAGE, BEGIN, END, section(record))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.set_defaults(rounds=recording.LEAST_ROUNDS)
    parser.add_argument("--models", nargs="+", choices=blocks.MODELS, metavar="NAME",
                        default=["Kandinsky 5 Lite"], help=", ".join(blocks.MODELS))  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="NAME",
                        help=f"beside {NATIVE}: {', '.join(WAYS[1:])}")  # fmt: skip
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    # Stored results are shown without a device.
    return recording.guarded(run, args) if args.stored else recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
