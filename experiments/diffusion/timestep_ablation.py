"""What do static scales lose over the steps of sampling, and what do scales by timestep win back?

Varies       the step of an EDM schedule; where scales come from: one for all steps, one by bin of
             log-SNR, the middle's times sigma over the middle's, every call's own; and the last of
             these with the adaptive precision policy, late steps in 16 bits
Holds fixed  Q, K, V of experiments/data (layer 2, 12 heads, head_dim 32), to Q and K of which noise
             is added; where experiments.dit.capture has recorded them, Q, K, V of a diffusion
             transformer at three steps; balanced mode (INT8 Q.K^T, 16-bit P.V) but for the policy;
             K not smoothed
Measures     relative L2 error of the output; share of the code range that the largest code of Q
             reaches, mean over heads; share of the values of Q that saturate
Run          python -m experiments.diffusion.timestep_ablation [--quick] [--json FILE] [--plot FILE]

Needs no device. With "raw", activations grow with the noise, like the network's input without
preconditioning. With "scaled", they are divided by the root of 1 + sigma^2, as in EDM.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import as_float64
from cupyattn.cli import output, plot
from cupyattn.measure import rungs
from cupyattn.quant.quantizers import INT8_MAX
from experiments._harness import captures, plots, recording

STEPS, BINS, LAYER = 50, 8, 2
#: Every so many steps are measured; calibration sees the others.
EVERY = 7
#: Heads and length.
Size = tuple[int, int]
MODELS = ("raw", "scaled")
#: Recordings of a transformer on its schedule. Scales are of the judged steps.
TRANSFORMER, TRANSFORMER_LAYER, TRANSFORMER_BINS = "diffusion transformer", 1, 3
#: Colour of each source of scales.
ARMS = {
    "uniform static": plots.COLOURS[1],
    "proportional static": plots.COLOURS[3],
    "static by bin": plots.COLOURS[0],
    "dynamic": plots.COLOURS[2],
    "dynamic, policy": plots.GREY,
}
#: Columns of the printed table: title, key of a row, format.
COLUMNS = (
    ("error", "error", "{:.1e}"),
    ("range of Q's codes", "range", "{:.0%}"),
    ("saturated", "saturated", "{:.1%}"),
)


@functools.cache
def signal(heads: int, length: int) -> tuple[Any, ...]:
    """Return Q, K and V without noise, float64."""
    return tuple(x[:, :heads, :length].astype(np.float64) for x in captures.recorded(LAYER))


def schedule(model: str) -> Any:
    """Return the noise-to-signal ratios of a model's steps."""
    return ca.compute_sigma_schedule(STEPS, "flow" if model == TRANSFORMER else "edm")


def judged_steps(model: str, every: int) -> list[int]:
    """Return the steps to measure: at a fixed interval, or the recorded steps."""
    return [*captures.captured_steps(STEPS)] if model == TRANSFORMER else [*range(0, STEPS, every)]


def activations(model: str, t: int, size: Size, seed: int) -> tuple[Any, Any, Any]:
    """Return Q, K and V at a step, float16."""
    if model == TRANSFORMER:
        q, k, v = (x[:, : size[0], : size[1]] for x in captures.captured(TRANSFORMER_LAYER, t))
        return q, k, v
    sigma = float(schedule(model)[t])
    q, k, v = signal(*size)
    rng = np.random.default_rng(seed)
    factor = 1.0 if model == "raw" else (1 + sigma**2) ** -0.5
    q, k = (factor * (x + sigma * x.std() * rng.standard_normal(x.shape)) for x in (q, k))
    return q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)


def arms(model: str, size: Size, seed: int) -> dict[str, ca.Int8Attention]:
    """Return one attention for each source of scales, calibrated where it needs to be."""
    recorded, sigmas = model == TRANSFORMER, schedule(model)
    seen = judged_steps(model, 1) if recorded else [t for t in range(STEPS) if t % EVERY]
    batches = [(*activations(model, t, size, seed + 1 + t)[:2], t) for t in seen]
    by_bin = ca.calibrate_quantization_scales(
        batches, 100.0, sigmas=sigmas, num_bins=TRANSFORMER_BINS if recorded else BINS
    )
    middle = STEPS // 2
    near = [b[:2] for b in batches if abs(b[2] - middle) <= 1]
    at_middle = ca.calibrate_quantization_scales(near, 100.0)
    scales = tuple(s[..., None] for s in at_middle.uniform())
    own = ca.QuantConfig("head", "head", smooth_k=False)
    proportional = ca.QuantConfig("head", "head", smooth_k=False, scales=scales)
    given: dict[str, dict[str, Any]] = {
        "uniform static": {"timestep_scales": by_bin, "use_adaptive_scaling": False},
        "proportional static": {"quant": proportional},
        "static by bin": {"timestep_scales": by_bin},
        "dynamic": {"quant": own},
        "dynamic, policy": {"quant": own, "precision_policy": "adaptive"},
    }
    heads, head_dim = batches[0][0].shape[1], batches[0][0].shape[3]
    return {
        name: ca.Int8Attention(
            heads,
            head_dim,
            STEPS,
            sigmas=sigmas,
            **{"precision_policy": "balanced", **options},
        )
        for name, options in given.items()
    }


def rows(model: str, steps: Sequence[int], size: Size, seed: int) -> Iterator[dict[str, Any]]:
    """Yield what each source of scales makes of each step."""
    attend_by = arms(model, size, seed)
    for t in steps:
        sigma = float(schedule(model)[t])
        q, k, v = activations(model, t, size, seed)
        exact = ca.reference.attention_exact(*map(as_float64, (q, k, v)))
        for name, attend in attend_by.items():
            row: dict[str, Any] = {"activations": model, "scales": name, "timestep": t}
            row |= {"sigma": sigma, "mode": attend.mode(t)}
            row["error"] = rungs.relative_error(as_float64(attend(q, k, v, t)), exact)
            if row["mode"] != "precision":
                quant = attend.quant_config(q, k, t, mode=row["mode"])
                z = ca.quantize(q, k, v, quant=quant)
                largest = np.abs(z.q_codes.astype(np.int64)).max(axis=(0, 2, 3))
                row["range"] = float((largest / INT8_MAX).mean())
                end = (INT8_MAX + 0.5) * as_float64(z.q_scale)[..., None]
                row["saturated"] = float((np.abs(as_float64(q)) > end).mean())
            yield row


def draw(record: Mapping[str, Any], path: str) -> None:
    """Plot error by timestep, a panel for each model of activations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.9), layout="constrained", facecolor="none")
    found = record["rows"]
    models = [*dict.fromkeys(row["activations"] for row in found)]
    axes = figure.subplots(1, len(models), sharey=True)
    for axis, model in zip(axes, models, strict=True):
        for name, colour in ARMS.items():
            mine = [r for r in found if (r["activations"], r["scales"]) == (model, name)]
            steps, errors = ([r[key] for r in mine] for key in ("timestep", "error"))
            axis.plot(steps, errors, "o-", color=colour, label=name, markersize=3)
        axis.set_yscale("log")
        plots.bare(axis)
        title = model if model == TRANSFORMER else f"{model} activations"
        axis.set_title(title, fontsize=10, color=plots.TEXT)
    axes[0].set_ylabel("relative L2 error", fontsize=9, color=plots.TEXT)
    caption = plots.source(record)
    figure.supxlabel(f"timestep (0: most noise)\n{caption}", fontsize=8, color=plots.TEXT)
    lines = axes[0].get_lines()
    figure.legend(
        lines, ARMS, loc="outside upper center", ncols=len(ARMS), frameon=False, fontsize=8,
        labelcolor=plots.TEXT,
    )  # fmt: skip
    plot.save(figure, path, source=caption)


def table(
    found: Sequence[dict[str, Any]], steps: Sequence[int], key: str, form: str
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of one figure: a row for each source of scales."""
    cells = []
    for model in dict.fromkeys(row["activations"] for row in found):
        for name in ARMS:
            mine = [r for r in found if (r["activations"], r["scales"]) == (model, name)]
            cells.append([model, name, *(form.format(r[key]) if key in r else "" for r in mine)])
    return ["activations", "scales", *(f"t = {t}" for t in steps)], cells


def run(args: argparse.Namespace) -> int:
    """Compute, print the table, write the record and the plot."""
    if args.plot:
        plot.check(args.plot)
    size = 2 if args.quick else 12, recording.quick_length(args, 512)
    every, found = EVERY * (3 if args.quick else 1), []
    groups: tuple[tuple[tuple[str, ...], Size], ...] = ((MODELS, size),)
    if captures.CAPTURED.is_file():
        groups += (((TRANSFORMER,), (2, recording.quick_length(args, 1024))),)
    for models, size in groups:
        steps = judged_steps(models[0], every)
        mine = [row for model in models for row in rows(model, steps, size, args.seed)]
        found += mine
        for title, key, form in COLUMNS:
            print(f"\n{title}")
            output.print_table(*table(mine, steps, key, form))
    record = recording.keep(args, "timestep_ablation", "mirror", {"rows": found})
    if args.plot:
        draw(record, args.plot)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--plot", metavar="FILE", help="draw error by timestep")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
