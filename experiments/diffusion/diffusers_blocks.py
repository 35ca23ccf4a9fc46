"""What do INT8 attention and INT8 linear layers win in a real-size block of a diffusion model?

Varies       model of diffusers: Flux, Wan 14B, Kandinsky 5 Lite (and Wan 1.3B, where it is named),
             with one block of each kind it has; what runs in it: attention as it is, in 16 bits of
             ours (fa_tc), in INT8 (the mode "balanced", whose class takes the fastest rung); linear
             layers as they are or INT8, a scale for each row and each column; both; and all of
             these with the whole model compiled, ``model.compile(fullgraph=True)``
Holds fixed  random weights in the sizes of the models, bfloat16 but for what from_pretrained keeps
             in float32; N(0, 1) latents and prompts, batch 1; no VAE, text encoder or guidance
Measures     a pass of the model, and 10 steps of FlowMatchEulerDiscreteScheduler round it: time in
             turns, the ratio to native with its 95 % interval; bytes of parameters and buffers,
             peak memory of a pass; relative L2 of the output to native and to float32; the first
             call of compiled models, which compiles
Beside       torch's attention by cuDNN, which is forced, and cuBLAS: native; native compiled, for
             compiled models
Expect       both INT8 1.2 of native in Flux and Kandinsky, 1.3 in Wan; weights at 0.66 to 0.71 of
             their bytes, by count: modulation, time and embeddings keep their type
Run          python -m experiments.diffusion.diffusers_blocks [--quick] [--json FILE]
             [--models NAME ...] [--mode MODE] [--loop-rounds N] [--update-docs]
             [--stored [--merge FILE ...]]

The loop is the scheduler's, without a pipeline. A pipeline's work outside of the transformer is the
same in every way. experiments/diffusion/kandinsky_block.py has the parts of a block by themselves,
without torch. ``--update-docs`` writes the tables of docs/INTEROP.md: from the record alone with
``--stored``. Needs torch and diffusers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from cupyattn.measure import device, timing
from cupyattn.measure.words import format_bytes, format_seconds
from cupyattn.quant import Int8Config
from experiments._harness import merging, recording
from experiments._harness.diffusers_models import drawn
from experiments._harness.diffusers_models import libraries as libraries
from experiments._harness.others import format_comparison

PAGE = recording.ROOT / "docs" / "INTEROP.md"
BEGIN, END = "<!-- blocks: begin -->", "<!-- blocks: end -->"
STEPS, QUICK_STEPS, LOOP_ROUNDS, PROMPT = 10, 2, 5, 512
HEADER = ["", "pass", "of native", f"{STEPS} steps", "of native", "weights", "peak",
          "to native", "to float32"]  # fmt: skip
NATIVE, COMPILED = "native", ", compiled"
COMPILED_HEADER = [*HEADER[:2], f"of {NATIVE}{COMPILED}", HEADER[3], f"of {NATIVE}{COMPILED}",
                   "first call", *HEADER[5:]]  # fmt: skip
#: Strategy of `Int8Config` for linear layers: a scale for each row and each column.
STRATEGY = "channel"
#: Replacements: the policy of attention, and whether linear layers are INT8.
REPLACED: dict[str, tuple[str | None, bool]] = {
    NATIVE: (None, False),
    "attention in 16 bits": ("precision", False),
    "INT8 attention": ("balanced", False),
    "INT8 linear layers": (None, True),
    "both INT8": ("balanced", True),
}
#: Words on how to get the same, for the pages that show its gain.
RECIPE = (
    f'Measured with `replace_attention_with_int8(model, policy="{REPLACED["INT8 attention"][0]}")` '
    f'(16 bits: `policy="{REPLACED["attention in 16 bits"][0]}"`)\n'
    f'and `replace_linear_with_int8(model, config=Int8Config(strategy="{STRATEGY}"))`.'
)
#: The same, and whether the model is compiled, by way.
WAYS = {
    f"{name}{COMPILED if compiled else ''}": (policy, linear, compiled)
    for compiled in (False, True)
    for name, (policy, linear) in REPLACED.items()
}
#: Modes of ``torch.compile``.
MODES = ("default", "reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Model:
    """A transformer of diffusers with one block of each kind, and its arguments.

    Parameters
    ----------
    family : {"flux", "wan", "kandinsky"}
    config : mapping
        What its class is made with.
    grid : tuple of int
        Patches: rows and columns, behind frames for a video.
    prompt : int
        Tokens of the prompt.
    """

    family: str
    config: Mapping[str, Any]
    grid: tuple[int, ...]
    prompt: int = PROMPT

    @property
    def tokens(self) -> int:
        """Patches of the picture or video."""
        return math.prod(self.grid)


def flux(heads: int, head_dim: int, grid: tuple[int, int], prompt: int, **others: Any) -> Model:
    """Return Flux: a block of two streams, and one of a single stream."""
    config = {
        "num_layers": 1, "num_single_layers": 1, "num_attention_heads": heads,
        "attention_head_dim": head_dim, **others,
    }  # fmt: skip
    return Model("flux", config, grid, prompt)


def wan(heads: int, head_dim: int, ffn: int, grid: tuple[int, ...], prompt: int = PROMPT,
        **others: Any) -> Model:  # fmt: skip
    """Return Wan 2.1: a block of self-attention, a look at the prompt, and a feed-forward part."""
    config = {"num_layers": 1, "num_attention_heads": heads, "attention_head_dim": head_dim}
    return Model("wan", {**config, "ffn_dim": ffn, **others}, grid, prompt)


def kandinsky(width: int, ffn: int, axes: tuple[int, ...], grid: tuple[int, ...], prompt: int,
              **others: Any) -> Model:  # fmt: skip
    """Return Kandinsky 5: a block of text, and a visual one."""
    config = {
        "num_text_blocks": 1, "num_visual_blocks": 1, "model_dim": width, "ff_dim": ffn,
        "axes_dims": axes, "in_visual_dim": 16, "out_visual_dim": 16, **others,
    }  # fmt: skip
    return Model("kandinsky", config, grid, prompt)


#: 1024 x 1024; 81 frames of 832 x 480; as many tokens as kandinsky_block.py has.
MODELS = {
    "Flux": flux(24, 128, (64, 64), PROMPT),
    "Wan 14B": wan(40, 128, 13_824, (21, 30, 52)),
    "Wan 1.3B": wan(12, 128, 8960, (21, 30, 52)),
    "Kandinsky 5 Lite": kandinsky(1792, 7168, (16, 24, 24), (16, 32, 32), 256, visual_cond=True),
}
#: Models that are measured by default.
DEFAULT = ("Flux", "Wan 14B", "Kandinsky 5 Lite")
_SMALL_FLUX = {
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (8, 12, 12),
}
_SMALL_WAN = {"text_dim": 64, "freq_dim": 32, "rope_max_seq_len": 32}
_SMALL_KANDINSKY = {"in_text_dim": 64, "in_text_dim2": 32, "time_dim": 64}
QUICK_MODELS = {
    "Flux": flux(4, 32, (12, 12), 128, **_SMALL_FLUX),
    "Wan 14B": wan(4, 32, 256, (2, 8, 9), 128, **_SMALL_WAN),
    "Kandinsky 5 Lite": kandinsky(128, 256, (8, 12, 12), (2, 8, 9), 128, **_SMALL_KANDINSKY),
}
QUICK_MODELS["Wan 1.3B"] = QUICK_MODELS["Wan 14B"]


# ---- libraries -----------------------------------------------------------------------------------


def forced_cudnn(torch: Any, *, on_device: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which torch's attention uses cuDNN, or raises if it cannot."""
    if not on_device:
        return contextlib.nullcontext()
    attention = torch.nn.attention
    found: contextlib.AbstractContextManager[Any]
    found = attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION)
    return found


# ---- models --------------------------------------------------------------------------------------

CLASSES = {
    "flux": "FluxTransformer2DModel", "wan": "WanTransformer3DModel",
    "kandinsky": "Kandinsky5Transformer3DModel",
}  # fmt: skip


def make(model: Model, where: str, seed: int) -> Any:
    """Return the transformer on a device, in the types that ``from_pretrained`` gives a model."""
    _, diffusers = libraries()
    return drawn(getattr(diffusers, CLASSES[model.family]), model.config, where, seed)


def shared(transformer: Any) -> Any:
    """Return a copy of a model whose parameters and buffers are the same tensors."""
    tensors = (*transformer.parameters(), *transformer.buffers())
    return copy.deepcopy(transformer, {id(x): x for x in tensors})


def widened(transformer: Any) -> Any:
    """Return a copy of a model in float32."""
    torch, _ = libraries()
    made = copy.deepcopy(transformer)
    for x in made.parameters():
        x.data = x.data.to(torch.float32)
    return made


def inputs(model: Model, where: str, seed: int) -> tuple[Any, Callable[[Any, Any], dict[str, Any]]]:
    """Return latents (bfloat16), and what makes of latents and a timestep a model's arguments."""
    torch, _ = libraries()
    random = torch.Generator(where).manual_seed(seed + 1)

    def noise(*shape: int) -> Any:
        return torch.randn(shape, generator=random, device=where).to(torch.bfloat16)

    config, prompt = model.config, model.prompt
    if model.family == "flux":
        rows, columns = model.grid
        places = torch.zeros(rows, columns, 3, device=where)
        places[..., 1] = torch.arange(rows, device=where)[:, None]
        places[..., 2] = torch.arange(columns, device=where)
        given = {
            "encoder_hidden_states": noise(1, prompt, config.get("joint_attention_dim", 4096)),
            "pooled_projections": noise(1, config.get("pooled_projection_dim", 768)),
            "img_ids": places.reshape(-1, 3), "txt_ids": torch.zeros(prompt, 3, device=where),
        }  # fmt: skip
        return noise(1, model.tokens, 64), lambda x, t: {
            **given, "hidden_states": x, "timestep": t / 1000,
        }  # fmt: skip
    frames, rows, columns = model.grid
    if model.family == "wan":
        given = {"encoder_hidden_states": noise(1, prompt, config.get("text_dim", 4096))}
        return noise(1, 16, frames, 2 * rows, 2 * columns), lambda x, t: {
            **given, "hidden_states": x, "timestep": t,
        }  # fmt: skip
    latents = noise(1, frames, 2 * rows, 2 * columns, 16)
    given = {
        "encoder_hidden_states": noise(1, prompt, config.get("in_text_dim", 3584)),
        "pooled_projections": noise(1, config.get("in_text_dim2", 768)),
        "visual_rope_pos": [torch.arange(n, device=where) for n in model.grid],
        "text_rope_pos": torch.arange(prompt, device=where),
    }  # fmt: skip
    condition = torch.zeros_like(latents)[..., :1].expand(*latents.shape[:-1], 17)

    def arguments(x: Any, t: Any) -> dict[str, Any]:
        if config.get("visual_cond"):  # no frame is given: zeros, and their mask
            x = torch.cat([x, condition.to(x.dtype)], -1)
        return {**given, "hidden_states": x, "timestep": t}

    return latents, arguments


@dataclass
class Way:
    """A model that runs in one way, and what was replaced in it."""

    transformer: Any
    attention: Any = None
    linear: Any = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of its parameters and buffers."""
        tensors = (*self.transformer.parameters(), *self.transformer.buffers())
        return sum({x.data_ptr(): x.nbytes for x in tensors}.values())

    def said(self) -> dict[str, Any]:
        """Return what was replaced, and where calls ran."""
        found: dict[str, Any] = {}
        if self.linear is not None:
            found |= {"int8_layers": len(self.linear.replaced), "kept": self.linear.kept}
        if self.attention is not None:
            report = self.attention.report()
            found |= {"modes": report.modes, "native": report.native,
                      "fallbacks": report.fallbacks | report.compiled_fallbacks,
                      "compiled": sorted({x for one in report.layers for x in one.compiled}),
                      }  # fmt: skip
        return found


def baseline(name: str) -> str:
    """Return what a way is compared with."""
    return f"{NATIVE}{COMPILED}" if name.endswith(COMPILED) else NATIVE


def ways(transformer: Any, compiler: Mapping[str, Any]) -> dict[str, Way]:
    """Return the model in every way; they share what they have in common.

    Parameters
    ----------
    transformer : Module
    compiler : mapping
        What ``torch.compile`` is given beside ``fullgraph=True``.
    """
    from cupyattn.interop.diffusers import replace_attention_with_int8
    from cupyattn.interop.torch import replace_linear_with_int8

    int8 = shared(transformer)
    linear = replace_linear_with_int8(int8, config=Int8Config(strategy=STRATEGY), originals="drop")
    found = {}
    for name, (policy, with_linear, compiled) in WAYS.items():
        own = shared(int8 if with_linear else transformer)
        handle = None if policy is None else replace_attention_with_int8(own, policy=policy)
        if compiled:
            own.compile(fullgraph=True, **compiler)
        found[name] = Way(own, handle, linear if with_linear else None)
    return found


# ---- runs ----------------------------------------------------------------------------------------


def denoise(
    transformer: Any, scheduler: Any, latents: Any, arguments: Callable[..., Any], steps: int
) -> Any:
    """Take the scheduler's steps from latents of noise; return the last latents."""
    scheduler.set_timesteps(steps, device=latents.device)
    scheduler.set_begin_index(0)  # or the first step would wait for the device to look it up
    x = latents
    for t in scheduler.timesteps:
        v = transformer(**arguments(x, t.expand(1)), return_dict=False)[0]
        x = scheduler.step(v, t, x, return_dict=False)[0]
    return x


def relative(found: Any, expected: Any) -> float:
    """Return ``|found - expected| / |expected|``, summed in float64."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def judged(name: str, way: Way, outputs: Sequence[Any]) -> str:
    """Return why a way may not be timed; "": it may."""
    if not all(bool(x.isfinite().all()) for x in outputs):
        return f"{name} gives numbers that are not finite"
    policy, _, compiled = WAYS[name]
    if policy is not None:
        said = way.said()
        ran = said["compiled"] if compiled else [*said["modes"]]
        if said["native"] or said["fallbacks"] or ran != [policy]:
            return f"{name} left attention to others: {said}"
    return ""


def measure(name: str, model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Run a model in every way: errors, memory, then times in turns."""
    torch, diffusers = libraries()
    on_device, steps = not args.quick, QUICK_STEPS if args.quick else STEPS
    where = "cuda" if on_device else "cpu"
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    transformer = make(model, where, args.seed)
    latents, arguments = inputs(model, where, args.seed)
    step = arguments(latents, torch.full((), 700.0, device=where).expand(1))  # as of a loop
    exact = output_in_float32(transformer, step)
    torch._dynamo.reset()
    # All models share functions of diffusers, for each of which torch keeps 8 graphs.
    torch._dynamo.config.recompile_limit = 8 * len(WAYS)
    found = ways(transformer, {"mode": args.mode} if on_device else {"backend": "eager"})
    row: dict[str, Any] = {
        "model": name, "class": CLASSES[model.family], "tokens": model.tokens,
        "prompt": model.prompt, "parameters": sum(x.numel() for x in transformer.parameters()),
        "ways": {}, "ok": True,
    }  # fmt: skip
    del transformer
    results: dict[str, tuple[Any, Any]] = {}
    for label, way in found.items():
        peak, start = None, time.perf_counter()
        way.transformer(**step, return_dict=False)  # compiles
        if on_device:
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        if on_device:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        one = way.transformer(**step, return_dict=False)[0].clone()  # of a CUDA graph's memory
        if on_device:
            torch.cuda.synchronize()
            peak = way.weight_bytes + torch.cuda.max_memory_allocated() - before
        results[label] = one, denoise(way.transformer, scheduler, latents, arguments, steps)
        native = results[NATIVE]
        row["ways"][label] = {
            "weight_bytes": way.weight_bytes, "peak_bytes": peak, "first_seconds": first,
            "to_native": relative(one, native[0]), "to_float32": relative(one, exact),
            "steps_to_native": relative(results[label][1], native[1]),
            "refused": judged(label, way, results[label]), **way.said(),
        }  # fmt: skip
    row["ok"] = not any(entry["refused"] for entry in row["ways"].values())
    return row | (timed(found, scheduler, latents, arguments, step, row, args) if on_device else {})


def output_in_float32(
    transformer: Any,
    step: Mapping[str, Any],
    output: Callable[[Any], Any] = lambda returned: returned[0],
) -> Any:
    """Return what the model gives with its weights and inputs in float32, by torch's own choice."""
    torch, _ = libraries()
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def wide(x: Any) -> Any:
        if isinstance(x, list):
            return [wide(one) for one in x]
        return x.float() if getattr(x, "dtype", None) == torch.bfloat16 else x

    cast = {name: wide(x) for name, x in step.items()}
    backends = torch.nn.attention.SDPBackend
    with torch.nn.attention.sdpa_kernel([backends.EFFICIENT_ATTENTION, backends.MATH]):
        return output(widened(transformer)(**cast, return_dict=False))


def timed(
    found: Mapping[str, Way],
    scheduler: Any,
    latents: Any,
    arguments: Callable[..., Any],
    step: Mapping[str, Any],
    row: Mapping[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Time those ways that were not refused, a pass and a loop; nothing rotates.

    The operands of a pass exceed the L2 cache by far.
    """
    models = {n: w.transformer for n, w in found.items() if not row["ways"][n]["refused"]}

    def one(model: Any) -> Callable[[int], Any]:
        return lambda _: model(**step, return_dict=False)

    def many(model: Any) -> Callable[[int], Any]:
        return lambda _: denoise(model, scheduler, latents, arguments, STEPS)

    samples = timing.time_interleaved({n: one(m) for n, m in models.items()}, rounds=args.rounds)
    loops = timing.time_interleaved(
        {n: many(m) for n, m in models.items()}, rounds=args.loop_rounds, warmup=1
    )
    for name in models:
        for kind, times in (("", samples), ("steps_", loops)):
            row["ways"][name] |= {
                f"{kind}seconds": timing.median(times[name]).median, f"{kind}samples": times[name],
            }  # fmt: skip
            other = baseline(name)
            if name != other and other in times:
                ratio = timing.paired_ratio(times[other], times[name]).to_list()
                row["ways"][name][f"{kind}ratio"] = ratio
    return {"clocks": device.clocks()}


# ---- tables --------------------------------------------------------------------------------------


def tables(row: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Return headers and rows of a model's tables: compiled first, where it was, then eager."""
    compiled = {name: way for name, way in row["ways"].items() if name.endswith(COMPILED)}
    eager = {name: way for name, way in row["ways"].items() if name not in compiled}
    both = (COMPILED_HEADER, cells(compiled)), (HEADER, cells(eager))
    return [(header, lines) for header, lines in both if lines]


def cells(ways_of_a_kind: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a table."""
    lines = []
    for name, way in ways_of_a_kind.items():
        times = [
            cell
            for kind in ("", "steps_")
            for cell in (
                format_seconds(way[f"{kind}seconds"]) if f"{kind}seconds" in way else "-",
                format_comparison(way.get(f"{kind}ratio")),
            )
        ]
        peak = "-" if way["peak_bytes"] is None else format_bytes(way["peak_bytes"])
        errors = [f"{way['to_native']:.1e}" if name != NATIVE else "-", f"{way['to_float32']:.1e}"]
        first = [format_seconds(way["first_seconds"])] if name.endswith(COMPILED) else []
        lines.append([name, *times, *first, format_bytes(way["weight_bytes"]), peak, *errors])
    return lines


def title(row: Mapping[str, Any]) -> str:
    """Say in one line what a table is of."""
    return (
        f"{row['model']} (`{row['class']}`, one block of each kind, {row['parameters'] / 1e6:,.1f} "
        f"million parameters, {row['tokens']:,} tokens and {row['prompt']} of a prompt)"
    )


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/INTEROP.md says was measured."""
    environment, lines = record["environment"], []
    for row in record["rows"]:
        lines += [f"{title(row)}:", ""]
        for header, of_table in tables(row):
            lines += [*recording.markdown(header, of_table), ""]
    where = f"{environment['device']['name']}, revision {environment['revision'][:10]}"
    others = [
        f" {row['model']}: {row['device']}, revision {row['revision'][:10]}."
        for row in record["rows"]
        if row.get("revision", environment["revision"]) != environment["revision"]
    ]
    source = (
        f"`{recording.command_now(record)}` on {where}, torch {record['torch']}, "
        f"diffusers {record['diffusers']}.{''.join(others)}"
    )
    return "\n".join([*lines, RECIPE, "", source])


def update_page(record: Mapping[str, Any]) -> None:
    """Write what was measured between the marks of docs/INTEROP.md."""
    recording.replace_between(PAGE, BEGIN, END, section(record))


# ---- command line --------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Measure the models, print their tables, write the record."""
    recording.check_rounds(args)
    torch, diffusers = libraries()
    if not args.quick and not torch.cuda.is_available():
        raise UnsupportedError(f"torch {torch.__version__} has no CUDA device; --quick needs none")
    rows = []
    models = {name: (QUICK_MODELS if args.quick else MODELS)[name] for name in args.models}
    with torch.no_grad():
        for name, model in models.items():
            with forced_cudnn(torch, on_device=not args.quick):
                try:
                    rows.append(measure(name, model, args))
                except RuntimeError as error:
                    if "No available kernel" not in str(error):
                        raise
                    raise UnsupportedError(f"cuDNN's attention does not take {name}") from error
            print(f"\n{title(rows[-1])}")
            for header, lines in tables(rows[-1]):
                output.print_table(header, lines)
            for way in rows[-1]["ways"].values():
                if way["refused"]:
                    print(f"not timed: {way['refused']}")
    content = {"rows": rows, "torch": torch.__version__, "diffusers": diffusers.__version__,
               "mode": args.mode,
               "rounds": 0 if args.quick else args.rounds,
               "loop_rounds": 0 if args.quick else args.loop_rounds}  # fmt: skip
    backend = "mirror" if args.quick else "cuda"
    record = recording.keep(args, "diffusers_blocks", backend, content)
    if args.update_docs and not args.quick:
        update_page(record)
    return 0 if all(row["ok"] for row in rows) else 1


def with_models(record: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with models replaced by another's; each row says its revision."""
    environment = part["environment"]
    of_part = {"command": part["command"], "revision": environment["revision"],
               "device": environment["device"]["name"]}  # fmt: skip
    names = {row["model"] for row in part["rows"]}
    rows = [row for row in record["rows"] if row["model"] not in names]
    rows += [{**row, **of_part} for row in part["rows"]]
    return {**record, "rows": sorted(rows, key=lambda row: list(MODELS).index(row["model"]))}


def parser_of(
    description: str | None, models: Collection[str], default: Sequence[str]
) -> argparse.ArgumentParser:
    """Return a parser of an experiment with models, timed in loops of steps."""
    parser = recording.parser(description)
    parser.set_defaults(rounds=recording.LEAST_ROUNDS)
    parser.add_argument("--models", nargs="+", choices=models, default=default, metavar="NAME",
                        help=", ".join(models))  # fmt: skip
    parser.add_argument("--loop-rounds", type=int, default=LOOP_ROUNDS, metavar="N",
                        help=f"samples of {STEPS} steps")  # fmt: skip
    recording.add_page_arguments(parser, merge=True)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = parser_of(__doc__, MODELS, DEFAULT)
    parser.add_argument("--mode", choices=MODES, default=MODES[0], help="of torch.compile")
    args = parser.parse_args(argv)
    if args.stored:
        update_page(merging.record_with("diffusers_blocks", args.merge, with_models))
        return 0
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
