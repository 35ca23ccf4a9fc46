"""What do a step cache of diffusers and INT8 gain together, in whole transformers?

Varies       model of diffusers: Flux, Wan 2.1 14B, at their own depth and number of tokens.
Holds fixed  a first-block cache: if the first block adds nearly the same as in the last pass, it
             leaves out all others. Steps of a flow-matching scheduler, random weights in bfloat16,
             compiled blocks. The threshold is searched: the native model leaves out about half of
             the passes. That share depends on weights and prompt, so trained models have another.
Measures     `handle.compare` of the steps. The mean time of a step in turns with 95 % intervals:
             native with the cache and without, INT8 layers and attention with the cache. The first
             step leaves out nothing, and is not timed. The share of passes left out. Whether
             `restore` gives the bits from before.
Beside       native without the cache, compiled alike.
Expect       a product of the two gains, less the time of the first block in each step.
Run          python -m experiments.diffusion.cached_models [--models NAME ...] [--steps N]
             [--threshold X] [--accuracy CLASS] [--quick] [--json FILE] [--rounds N]
             [--update-docs] [--stored]

Both models take about eight minutes on an H200.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from cupyattn.measure import timing
from cupyattn.measure.trial import ALL, NATIVE, UNCACHED, Comparison
from cupyattn.measure.words import format_seconds
from experiments._harness import recording, whole_families
from experiments._harness.diffusers_models import libraries
from experiments._harness.whole_families import FAMILIES, Family
from experiments.diffusion.accelerated_models import PAGE
from experiments.diffusion.whole_models import ratio_cell

NAME = "cached_models"
ROUNDS = 7
DEFAULT = ("Flux", "Wan 2.1 14B")
#: Shares of passes that are left out which end the search for a threshold, and its most runs.
ENOUGH, MOST_RUNS = (0.4, 0.6), 8
BEGIN, END = "<!-- cached: begin -->", "<!-- cached: end -->"
LEAST_THRESHOLD, MOST_THRESHOLD = 1e-4, 4.0


def denoiser(family: Family, model: Any, latents: Any, arguments: Callable[..., Any]) -> Any:
    """Return a pipeline that denoises latents by a model, without text encoders or a VAE."""
    torch, diffusers = libraries()

    class Denoiser(diffusers.DiffusionPipeline):  # type: ignore[misc, name-defined]
        def __init__(self, transformer: Any, scheduler: Any) -> None:
            super().__init__()
            self.register_modules(transformer=transformer, scheduler=scheduler)

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def __call__(self, steps: int) -> Any:
            x = latents
            self.scheduler.set_timesteps(steps, device=x.device)
            for t in self.scheduler.timesteps:
                with self.transformer.cache_context("cond"):
                    velocity = family.call(self.transformer, arguments(x, t[None]))
                x = self.scheduler.step(velocity, t, x, return_dict=False)[0]
            self.transformer._reset_stateful_cache()
            return (x,)

    return Denoiser(model, diffusers.FlowMatchEulerDiscreteScheduler())


def left_out(pipe: Any, threshold: float, steps: int) -> float:
    """Return the share of passes in which the native model leaves out its other blocks."""
    _, diffusers = libraries()
    model = pipe.transformer
    kinds = {type(block) for name in model._repeated_blocks for block in model.modules()
             if type(block).__name__ == name}  # fmt: skip
    last = [module for module in model.modules() if type(module) in kinds][-1]
    calls = []
    own = last.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    last.forward = counted  # below the cache
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=threshold))
    try:
        pipe(steps)
    finally:
        model.disable_cache()
        del last.forward
    return 1 - len(calls) / steps


def searched(pipe: Any, steps: int) -> tuple[float, float]:
    """Return a threshold that leaves out about half of the passes, and the share that it does."""
    low, high = LEAST_THRESHOLD, MOST_THRESHOLD
    found: list[tuple[float, float]] = []
    for _ in range(MOST_RUNS):
        threshold = float(f"{(low * high) ** 0.5:.3g}")
        share = left_out(pipe, threshold, steps)
        found.append((threshold, share))
        output.say(f"threshold {threshold:g}: {share:.0%} of the passes left out", flush=True)
        if ENOUGH[0] <= share <= ENOUGH[1]:
            break
        low, high = (threshold, high) if share < 0.5 else (low, threshold)
    return min(found, key=lambda one: abs(one[1] - 0.5))


def measured(family: Family, args: argparse.Namespace) -> dict[str, Any]:
    """Compare a model with and without a cache, native and accelerated. Return a row."""
    from cupyattn.interop.diffusers import accelerate

    torch, diffusers = libraries()
    where = "cpu" if args.quick else "cuda"
    model = whole_families.make(family, where, args.seed)
    pipe = denoiser(family, model, *whole_families.inputs(family, where, args.seed))
    native = pipe(args.steps)[0]
    given = args.threshold
    threshold, share = (given, left_out(pipe, given, args.steps)) if given else (
        searched(pipe, args.steps)
    )  # fmt: skip
    with accelerate(pipe, args.accuracy, compile=False, log=None):
        accelerated = left_out(pipe, threshold, args.steps)
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=threshold))
    handle = accelerate(pipe, args.accuracy, compile=False if args.quick else "blocks")
    found = handle.compare(rounds=args.rounds, steps=args.steps)
    print(found, flush=True)
    lines = list(handle.report().lines)
    handle.restore()
    model.disable_cache()
    return {
        "threshold": threshold, "left_out": {"native": share, "accelerated": accelerated},
        "lines": lines, "compared": found.record["ways"],
        "verdicts": found.verdicts(), "bits_equal": bool(torch.equal(pipe(args.steps)[0], native)),
    }  # fmt: skip


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/PIPELINES.md says about a step cache and INT8 together."""
    where = record["environment"]["device"] or {}
    return "\n".join([
        f"Measured on an {where.get('name', 'no device')} in whole models with random weights. The "
        f"speeds are multiples of compiled native without a cache, with 95 % intervals "
        f"({recording.link(NAME)}):",
        "",
        *recording.markdown(
            ["model", "passes left out", "native step", "first-block cache", "cache and INT8"],
            [line(row) for row in record["rows"]],
        ),
    ])  # fmt: skip


def line(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a model."""
    found = Comparison({"ways": row["compared"]})
    speeds = (found.speed(name, UNCACHED).to_list() for name in (NATIVE, ALL))
    share = 100 * row["left_out"]["accelerated"]
    return [
        f"{row['model']}, {row['tokens']:,} tokens", f"{share:.0f} %",
        format_seconds(timing.median(found.seconds(UNCACHED)).median), *map(ratio_cell, speeds),
    ]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure every model, and write the record after each."""
    torch, diffusers = libraries()
    if not args.quick and not torch.cuda.is_available():
        raise UnsupportedError(f"torch {torch.__version__} has no CUDA device; --quick needs none")
    rows: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    for name in args.models:
        family = whole_families.small(name) if args.quick else FAMILIES[name]
        start = time.perf_counter()
        found = measured(family, args)
        gc.collect()
        rows.append({"model": name, "blocks": family.blocks, "tokens": family.tokens,
                     "steps": args.steps, **found})  # fmt: skip
        took = time.perf_counter() - start
        output.say(f"{name}: {took:.0f} s, bits from before: {found['bits_equal']}", flush=True)
        record = recording.keep(
            args, NAME, "mirror" if args.quick else "cuda",
            {"rows": rows, "torch": torch.__version__, "diffusers": diffusers.__version__},
        )  # fmt: skip
    if args.update_docs:
        recording.replace_between(PAGE, BEGIN, END, section(record))
    return 0 if all(row["bits_equal"] for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.set_defaults(rounds=ROUNDS)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=DEFAULT, metavar="NAME",
                        help=", ".join(FAMILIES))  # fmt: skip
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="of the scheduler (8)")
    parser.add_argument("--threshold", type=float, metavar="X",
                        help="of the cache (searched: half are left out)")  # fmt: skip
    parser.add_argument("--accuracy", choices=("full", "balanced", "aggressive"),
                        default="balanced", help="class of attention")  # fmt: skip
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    if args.stored:
        recording.replace_between(PAGE, BEGIN, END, section(recording.stored(NAME)))
        return 0
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
