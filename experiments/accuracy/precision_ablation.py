"""What does each choice of INT8 arithmetic cost in error, and what does it win in time?

Varies       one choice at a time, from fa_int8's default: which rows of Q, which keys and which
             values share a scale; zero points; smoothing of K and of V; Q and K in 4 bits; P and V
             in 16 bits, INT8 or e4m3; what codes of P are relative to, in both forms; where codes
             are made; whose scales they have; how far the maximum may lag before sums are rescaled
             (the portable form: not at all); beside them what goes together, and fa_tc
Holds fixed  one batch entry, 16 heads, length 4096, head_dim 128, float16; the distributions of
             peers_int8.py, layer 5 of experiments/data and, where experiments.dit.capture has
             recorded it, a block of a diffusion transformer at the middle step
Measures     J2, J3, relative error; time with quantising, and in the same rounds the ratio to the
             default; which choices no other one beats in both
Run          python -m experiments.accuracy.precision_ablation [--quick] [--json FILE] [--plot FILE]
             [--distributions NAME ...]

A choice may run in another form than the default, which its time is then of, too: the record says
which. What runs alike by two names is measured once, and its row has both. Without a device
(``--quick``) there are no times: the plot has errors alone.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.cli import output, plot
from cupyattn.compiler.devices import device_architecture
from cupyattn.compiler.target import HOPPER_CAPABILITY
from cupyattn.quant.choices import CHOICES
from cupyattn.quant.quantizers import INT8_MAX
from experiments._harness import captures, plots, recording
from experiments._harness.cells import REFUSALS, Cell, Problem, rung
from experiments.speed import peers_int8

DEFAULT, FULL, RECORDED = "default", "fa_tc, 16 bits", "text encoder"
#: The kind of these two, which are no choices.
ENDS = "default, fa_tc"
LAYER = 5
#: Recording of the transformer: name, layer and number of steps.
TRANSFORMER, TRANSFORMER_LAYER, TRANSFORMER_STEPS = "diffusion transformer", 4, 50
#: The architecture whose form rescales at every rise of the maximum, and whose lets it lag.
RESCALED = {"rescaled at every rise": "sm_90", "rescaled past a margin": "sm_90a"}
#: Reference of the codes of P. It is the largest weight of their tile, with a scale of V for every
#: channel and tile. Or it is a running maximum, with a scale for every channel.
REFERENCES = {"its tile's maximum": "block", "the running maximum": "channel"}
#: The architectures whose forms these run in: so form and arithmetic are told apart.
FORMS = {"Hopper form": "sm_90a", "portable form": "sm_90"}
#: Colour of each kind of choice.
COLOURS = {
    "granularity": plots.COLOURS[0],
    "offsets of Q and K": plots.COLOURS[4],
    "P and V in 8 bits": plots.COLOURS[2],
    "what P is relative to": "#A0741F",
    "bits of Q and K": plots.COLOURS[5],
    "where codes come from": plots.COLOURS[3],
    "rescaling": plots.GREY,
    ENDS: plots.COLOURS[1],
}


@dataclass(frozen=True)
class Recorded(Problem):
    """Q, K and V of a layer of the text encoder, as many of its heads and rows as are asked for."""

    def host(self) -> tuple[Any, ...]:
        """Return q, k and v as NumPy arrays."""
        return tuple(x[:, : self.heads, : self.length] for x in captures.recorded(LAYER))


class Captured(Problem):
    """Q, K and V of a block of the diffusion transformer, as many of its rows as are asked for."""

    def host(self) -> tuple[Any, ...]:
        """Return q, k and v as NumPy arrays."""
        _, middle, _ = captures.captured_steps(TRANSFORMER_STEPS)
        found = captures.captured(TRANSFORMER_LAYER, middle)
        return tuple(x[:, : self.heads, : self.length] for x in found)


def problems(args: argparse.Namespace) -> list[Problem]:
    """Return the inputs."""

    def problem(name: str) -> Problem:
        recorded = {RECORDED: (Recorded, 12, 512, 32), TRANSFORMER: (Captured, 2, 1024, 64)}
        kind, heads, length, head_dim = recorded.get(name, (Problem, 16, 4096, 128))
        if args.quick:
            heads, length, head_dim = 2, recording.quick_length(args, length), min(head_dim, 64)
        return kind(1, heads, length, head_dim, distribution=name, seed=args.seed)

    return [problem(name) for name in args.distributions]


def given_scales(problem: Problem) -> ca.QuantConfig:
    """Return the default with scales known beforehand, one of Q and one of K: their maxima's."""
    q, k, _ = problem.host()
    scales = tuple(float(np.abs(x.astype(np.float32)).max() / INT8_MAX) for x in (q, k))
    return ca.QuantConfig("tensor", "tensor", smooth_k=False, scales=scales)


def cells(problem: Problem, own: str) -> list[Cell]:
    """Return the default, each choice, and fa_tc; `own` is the architecture where none is named."""

    def cell(name: str, choice: str, quant: ca.QuantConfig, arch: str | None = None) -> Cell:
        made = rung("fa_int8", problem, quant=quant, arch=arch, name=name)
        return replace(made, name=name, facts={"choice": choice})

    default = ca.QuantConfig()
    found = [cell(DEFAULT, ENDS, default)]
    for choice, some in CHOICES.items():
        found += [cell(name, choice, ca.QuantConfig(**fields)) for name, fields in some.items()]
    for reference, granularity in REFERENCES.items():
        quant = ca.QuantConfig(pv="int8", granularity_v=granularity)
        found += [
            cell(f"P by {reference}, {form}", "what P is relative to", quant, arch)
            for form, arch in FORMS.items()
        ]
    found.append(cell("scales given", "where codes come from", given_scales(problem)))
    found += [cell(name, "rescaling", default, arch) for name, arch in RESCALED.items()]
    found.append(replace(rung("fa_tc", problem, name=FULL), facts={"choice": ENDS}))
    alike: dict[Any, list[Cell]] = {}
    for one in found:
        alike.setdefault((one.variant, one.quant, one.arch or own), []).append(one)
    return [
        replace(first, facts={**first.facts, "also": {x.name: x.facts["choice"] for x in others}})
        for first, *others in alike.values()
    ]


def own_architecture(quick: bool) -> str:
    """Return the architecture of a call that names none: on the mirror the portable form's."""
    if quick:
        return FORMS["portable form"]
    import cupy

    capability = int(cupy.cuda.Device().compute_capability)
    return device_architecture(capability, hopper=capability == HOPPER_CAPABILITY)


def compile_all(problem: Problem, some: Sequence[Cell], threads: int) -> None:
    """Compile the kernels of a problem's cells side by side; refusals are reported later."""
    import cupy

    operands = [cupy.empty(problem.call.output_shape, problem.dtype) for _ in "qkv"]

    def prepare(cell: Cell) -> None:
        with contextlib.suppress(*REFUSALS):
            ca.plan(*operands, variant=cell.variant, quant=cell.quant, arch=cell.arch)

    with ThreadPoolExecutor(threads) as pool, output.progress("compiling", len(some)) as advance:
        for cell, _ in zip(some, pool.map(prepare, some), strict=True):
            advance(cell.name)


# ---- what came of it -----------------------------------------------------------------------------


def unbeaten(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names of the points that no other has both coordinates at most of, in order.

    Examples
    --------
    >>> unbeaten({"slow": (2.0, 1.0), "worst": (2.0, 3.0), "fast": (1.0, 2.0)})
    ['fast', 'slow']
    """
    front: list[str] = []
    for name in sorted(points, key=lambda name: points[name]):
        if not front or points[name][1] < points[front[-1]][1]:
            front.append(name)
    return front


def rows_of(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a problem, one that has several names by each of them."""
    for row in found["rows"]:
        yield row
        for name, choice in row.get("also", {}).items():
            yield row | {"variant": name, "choice": choice}


def points_of(found: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return time over the default's and relative error of the rows of a problem that have both."""
    return {
        row["variant"]: (1 / row["speed_ratio"][0], row["judgement"]["relative_error"])
        for row in rows_of(found)
        if "speed_ratio" in row
    }


def conclude(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return for each problem every error over the default's, and what nothing beats in both."""
    result = []
    for one in found:
        errors = {
            row["variant"]: row["judgement"]["relative_error"]
            for row in rows_of(one)
            if row["judgement"] is not None
        }
        result.append({
            "problem": one["problem"]["name"],
            "error over default": {name: x / errors[DEFAULT] for name, x in errors.items()},
            "unbeaten": unbeaten(points_of(one)),
        })  # fmt: skip
    return {"compared": result}


def draw(record: Mapping[str, Any], path: str) -> None:
    """Plot error against time, a panel for each input; errors alone where there are no times.

    Parameters
    ----------
    record : mapping
    path : str
        Ends in .png, .svg or .pdf.
    """
    from matplotlib.figure import Figure

    timed = record["backend"] == "cuda"
    found = record["problems"]
    columns = min(3, len(found)) if timed else 1
    panels = -(-len(found) // columns) if timed else 1
    size = (4.2 * columns, 3.9 * panels + 0.6) if timed else (8.4, 8.0)
    figure = Figure(figsize=size, layout="constrained", facecolor="none")
    axes = figure.subplots(panels, columns, squeeze=False).ravel()
    for axis in axes:
        plots.bare(axis)
        axis.grid(color=plots.TEXT, alpha=0.25, linewidth=0.5)
    if timed:
        for axis, one in zip(axes, found, strict=False):
            _draw_times(axis, one)
        for axis in axes[len(found) :]:
            axis.set_visible(False)
        dots = [axes[0].plot([], [], "o", color=c, markersize=4)[0] for c in COLOURS.values()]
        figure.legend(
            dots, COLOURS, loc="outside upper center", ncols=min(len(COLOURS), 2 * columns),
            frameon=False, fontsize=8, labelcolor=plots.TEXT,
        )  # fmt: skip
        caption = plots.source(record)
    else:
        _draw_errors(axes[0], found)
        caption = "on the mirror, without a device: no times"
    figure.supxlabel(caption, fontsize=8, color=plots.TEXT)
    plot.save(figure, path, source=caption)


def _draw_times(axis: Any, one: Mapping[str, Any]) -> None:
    """Draw one problem: a point for each choice, a line through the choices that none beats."""
    points = points_of(one)
    kinds = {row["variant"]: row["choice"] for row in rows_of(one)}
    for name, (x, y) in points.items():
        axis.plot(x, y, "o", color=COLOURS[kinds[name]], markersize=4)
    front = unbeaten(points)
    xs, ys = zip(*(points[name] for name in front), strict=True)
    axis.step(xs, ys, where="post", color=plots.TEXT, linewidth=0.8)
    axis.text(
        0.97, 0.03, "\n".join(["unbeaten, by time:", *front]), transform=axis.transAxes, fontsize=7,
        color=plots.TEXT, ha="right", va="bottom",
    )  # fmt: skip
    axis.set_yscale("log")
    axis.set_xscale("log")
    ticks = [t for t in (0.5, 1, 2, 4, 8, 16) if 0.9 * min(points.values())[0] <= t]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_xlim(0.9 * min(points.values())[0], 1.1 * max(points.values())[0])
    axis.minorticks_off()
    axis.set_title(one["problem"]["distribution"], fontsize=10, color=plots.TEXT)
    axis.set_xlabel("time / default's", fontsize=8, color=plots.TEXT)
    axis.set_ylabel("relative error", fontsize=8, color=plots.TEXT)


def _draw_errors(axis: Any, found: Sequence[Mapping[str, Any]]) -> None:
    """Draw the errors of every choice, a line for each of them, a colour for each input."""
    names = [row["variant"] for row in rows_of(found[0])]
    for one, colour in zip(found, COLOURS.values(), strict=False):
        known = {row["variant"]: row["judgement"] for row in rows_of(one) if row["judgement"]}
        axis.plot(
            [known[name]["relative_error"] for name in names if name in known],
            [name for name in names if name in known],
            "o", color=colour, markersize=4, label=one["problem"]["distribution"],
        )  # fmt: skip
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("relative error", fontsize=8, color=plots.TEXT)
    axis.legend(fontsize=8, frameon=False, labelcolor=plots.TEXT)


def run(args: argparse.Namespace) -> int:
    """Measure every choice on every input, print the tables, write the record and the plot."""
    if args.plot:
        plot.check(args.plot)
    own = own_architecture(args.quick)
    grid = [(problem, cells(problem, own)) for problem in problems(args)]
    if not args.quick:
        for problem, some in {(p.length, p.head_dim): (p, c) for p, c in grid}.values():
            compile_all(problem, some, args.threads)
    record = recording.run_grid(
        args, "precision_ablation", grid, baseline=DEFAULT, conclude=conclude
    )
    for one in record["compared"]:
        if one["unbeaten"]:
            print(f"\n{one['problem']}: unbeaten in time and error: {', '.join(one['unbeaten'])}")
    if args.quick:
        print("\nno device: no times, hence nothing to weigh errors against")
    if args.plot:
        draw(record, args.plot)
    return 0 if recording.passed(record) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    known = (*peers_int8.DISTRIBUTIONS, RECORDED)
    known += (TRANSFORMER,) if captures.CAPTURED.is_file() else ()
    parser = recording.parser(__doc__)
    parser.add_argument(
        "--distributions", nargs="+", default=list(known), choices=known, metavar="NAME",
        help=", ".join(known),
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=8, help="compilations at a time")
    parser.add_argument("--plot", metavar="FILE", help="draw error against time")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
