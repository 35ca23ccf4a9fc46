"""Write the figures of README.md and docs/INTEROP.md, and a drawing, from the records.

    python -m docs.write_readme
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from cupyattn.cli import plot
from cupyattn.measure.words import format_seconds
from docs import performance_plots
from docs.performance_tables import range_of
from experiments._harness import plots, recording
from experiments._harness.recording import ROOT
from experiments.diffusion import diffusers_blocks, whole_models
from experiments.speed import scores

README, INTEROP = ROOT / "README.md", ROOT / "docs" / "INTEROP.md"
DRAWING = ROOT / "docs" / "whole_models.svg"
SPEED = "<!-- speed: begin -->", "<!-- speed: end -->"
PIPELINES = "<!-- pipelines: begin -->", "<!-- pipelines: end -->"
OVERVIEW = "<!-- overview: begin -->", "<!-- overview: end -->"
INT8 = "<!-- int8: begin -->", "<!-- int8: end -->"
#: Ways of whole models that README and its drawing show, under names that a newcomer knows.
SHOWN = {
    whole_models.NATIVE: "bfloat16",
    whole_models.FP8: "FP8 layers",
    whole_models.BALANCED: "cupyattn, balanced",
}
#: Ways of a block's record, in the order of the table.
WAYS = ("attention in 16 bits", "INT8 attention", "INT8 linear layers", "both INT8")


def _device(record: Mapping[str, Any]) -> str:
    return str(record["environment"]["device"]["name"])


def lower(ratio: float) -> str:
    """Return the end of a range with three digits, none of them rounded up.

    Examples
    --------
    >>> lower(0.9985), lower(1.3349)
    ('0.998', '1.334')
    """
    return f"{math.floor(1e3 * ratio) / 1e3:.3f}"


def speed(peers: Mapping[str, Any]) -> str:
    """Return how fast `fa_tc` is beside the faster of its rivals, and on which shapes."""
    ratios = [cell["ratio"][0] for cell in peers["against_rival"]["cells"]]
    problems = [found["problem"] for found in peers["problems"]]
    lengths = sorted({problem["length"] for problem in problems})
    sizes = sorted({problem["head_dim"] for problem in problems})
    rivals = sorted({cell["rival"] for cell in peers["against_rival"]["cells"]}, reverse=True)
    return (
        f"On an {_device(peers)}, forward attention in float16 is {lower(min(ratios))} to "
        f"{lower(max(ratios))} times as fast\nas the faster of {' and '.join(rivals)}. "
        f"The median of {len(ratios)} shapes is {median(ratios):.2f}:\nlengths {lengths[0]:,} to "
        f"{lengths[-1]:,}, head_dim {sizes[0]} to {sizes[-1]}, causal and not "
        f"({recording.link('peers', '')})."
    )


def _by(ratios: Mapping[str, float]) -> str:
    """Return ratios by model, largest first.

    Examples
    --------
    >>> _by({"Flux": 1.161, "Wan": 1.5})
    '1.50 in Wan, 1.16 in Flux'
    """
    ordered = sorted(ratios.items(), key=lambda item: -item[1])
    return ", ".join(f"{ratio:.2f} in {name}" for name, ratio in ordered)


def _measured(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in record["rows"] if "passes" in row["cells"]]


def pipelines(record: Mapping[str, Any]) -> str:
    """Return the time of a pass of whole models, and how much faster INT8 makes it."""
    native, fp8, ours = SHOWN
    rows = []
    for row in _measured(record):
        ways = row["cells"]["passes"]["ways"]
        rows.append([
            row["model"], f"{row['tokens']:,}", format_seconds(ways[native]["seconds"]),
            format_seconds(ways[ours]["seconds"]),
            *(whole_models.ratio_cell(ways[way]["ratio"]) for way in (ours, fp8)),
        ])  # fmt: skip
    header = ["model", "tokens", "bfloat16", "cupyattn", "times as fast", "FP8 layers"]
    return "\n".join([
        f"One pass of a whole compiled model with random weights, on an {_device(record)} "
        f"({recording.link(whole_models.NAME, '')}).",
        '`accelerate(pipe, "balanced")` takes the same settings. Intervals are of 95 %; '
        "*undecided* means that one includes 1. FP8 is torch's product by row, with torch's "
        "attention.", "",
        *recording.markdown(header, rows), "",
        '`accelerate` leaves a part native where its interval includes 1. With `compile="graphs"` '
        "a pass is one CUDA graph: [its gains](docs/INTEROP.md#whole-models).",
    ])  # fmt: skip


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the time of a pass of whole models as bars, each a share of the model's own."""
    rows = _measured(record)
    figure, (axis,) = performance_plots.figure_of(1, 1, (7.5, 0.55 * len(rows) + 0.8))
    colours = (plots.GREY, plots.COLOURS[1], plots.COLOURS[0])
    for place, row in enumerate(rows):
        ways = row["cells"]["passes"]["ways"]
        own = ways[whole_models.NATIVE]["seconds"]
        for step, (way, colour) in enumerate(zip(SHOWN, colours, strict=True)):
            seconds, y = ways[way]["seconds"], place + 0.26 * (step - 1)
            label = SHOWN[way] if not place else None
            axis.barh(y, seconds / own, height=0.24, color=colour, label=label)
            text = f" {format_seconds(seconds)}"
            axis.text(seconds / own, y, text, va="center", fontsize=7, color=plots.TEXT)
    axis.set_yticks(range(len(rows)), [row["model"] for row in rows], color=plots.TEXT)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.45)
    performance_plots.labelled(axis, "", "time of one pass, as a share of bfloat16's")
    axis.legend(frameon=False, fontsize=8, labelcolor=plots.TEXT)
    plot.save(figure, str(path), source=plots.source(record))


def whole(record: Mapping[str, Any]) -> str:
    """Return what INT8 wins in whole models, beside FP8."""
    return "\n".join([
        "Times as fast as the same model in bfloat16, at its own depth, with "
        "random weights and compiled blocks.",
        f"Measured on an {_device(record)} ({recording.link(whole_models.NAME)}), with 95 % "
        "intervals: *undecided* where one has 1.",
        "FP8 is torch's product by row. INT8 has a scale for each row and column: *full* attends "
        "in 16 bits, the others in the INT8 of their accuracy class.", "",
        *recording.markdown(*whole_models.overview(record)),
    ])  # fmt: skip


def when_int8_pays(blocks: Mapping[str, Any]) -> list[str]:
    """Return sentences on what INT8 wins in a pass and in ten steps, and where it loses."""

    def ratios(way: str, kind: str = "ratio") -> dict[str, float]:
        return {row["model"]: row["ways"][way][kind][0] for row in blocks["rows"]}

    sixteen, attention, linear, both = (ratios(f"{way}, compiled") for way in WAYS)
    alone = [range_of([*found.values()]) for found in (attention, sixteen, linear)]
    steps, eager = ratios(f"{WAYS[-1]}, compiled", "steps_ratio"), ratios(WAYS[-1], "steps_ratio")
    slower = {name: ratio for name, ratio in eager.items() if ratio < 1}
    lines = [
        "**When INT8 pays.** INT8 attention and layers multiply a compiled pass's speed by",
        f"{_by(both)}. INT8 attention alone is {alone[0]} times as",
        f"fast (in 16 bits {alone[1]}), INT8 linear layers alone {alone[2]}. Ten steps with both:",
        f"{_by(steps)}.",
    ]
    if slower:
        lines[-1] += (
            " Without `torch.compile` ten steps with both take longer than the model's own:"
        )
        lines.append(f"{_by(slower)}.")
    return lines


def int8(
    blocks: Mapping[str, Any], ladder: Mapping[str, Any], more_heads: Mapping[str, Any]
) -> str:
    """Return what INT8 does to models with one block of each kind, and to attention alone.

    Parameters
    ----------
    blocks, ladder : mapping
        Records of models, and of rungs.
    more_heads : mapping
        A record of `experiments.speed.scores`, on the device of the ladder.
    """
    rows = []
    for row in blocks["rows"]:
        ways = {way: row["ways"][f"{way}, compiled"] for way in ("native", *WAYS)}
        native, both = ways["native"], ways["both INT8"]
        saved = 1 - both["weight_bytes"] / native["weight_bytes"]
        rows.append([
            row["model"], f"{row['tokens']:,}", f"{row['prompt']:,}",
            f"{1e3 * native['seconds']:.1f} ms",
            *(f"{ways[way]['ratio'][0]:.2f}" for way in WAYS),
            f"{saved:.0%}", *(f"{way['to_float32']:.1e}" for way in (native, both)),
        ])  # fmt: skip
    header = ["model", "tokens", "prompt", "its own time", *WAYS, "weights saved",
              "error: native", "error: both INT8"]  # fmt: skip
    pairs = []
    for found in ladder["problems"]:
        problem, rates = found["problem"], {r["variant"]: r.get("tflops") for r in found["rows"]}
        if not problem["causal"]:
            ratio = rates["fa_int8"] / rates["fa_tc"]
            pairs.append(f"{ratio:.2f} at head_dim {problem['head_dim']}")
    other = next(
        found for found in more_heads["problems"]
        if found["problem"]["heads"] > problem["heads"]
        and all(found["problem"][key] == problem[key] for key in ("batch", "length", "dtype"))
    )  # fmt: skip
    plain = {row["name"]: row for row in other["rows"] if row["feature"] == scores.PLAIN}
    return "\n".join([
        *when_int8_pays(blocks), "",
        f"Times as fast as a model with one block of each kind, all under `torch.compile`, on an "
        f"{_device(blocks)} ({recording.link('diffusers_blocks')}).",
        "Only Flux attends to tokens and prompt jointly. *error* is the relative L2 error of the "
        "output against float32;",
        "`rel. error` of [the ladder](LADDER.md) is that of attention alone.", "",
        *recording.markdown(header, rows), "",
        diffusers_blocks.RECIPE, "",
        f"Attention alone, at length {problem['length']:,}, batch {problem['batch']} and "
        f"{problem['heads']} heads: `fa_int8` with quantising, scales of K for each thread as "
        "by default. Its speed over that of `fa_tc`:",
        f"{', '.join(pairs)}. With {other['problem']['heads']} heads and as the accuracy class "
        '"balanced" quantises (scales of K for each block of keys), it is '
        f"{plain['fa_int8']['speed_of_fa_tc'][0]:.2f} at head_dim "
        f"{other['problem']['head_dim']}.",
        f"Measured on an {_device(ladder)} ({recording.link('ladder')}, "
        f"{recording.link('scores_h100')}).",
    ])  # fmt: skip


def figures() -> dict[tuple[Path, str, str], str]:
    """Return the texts by page and the marks that they stand between."""
    stored = recording.stored
    whole_record = stored(whole_models.NAME)
    return {
        (README, *SPEED): speed(stored("peers")),
        (README, *PIPELINES): pipelines(whole_record),
        (INTEROP, *OVERVIEW): whole(whole_record),
        (INTEROP, *INT8): int8(
            stored("diffusers_blocks"), stored("ladder"), stored("scores_h100")
        ),
    }


if __name__ == "__main__":
    for (page, begin, end), text in figures().items():
        recording.replace_between(page, begin, end, text)
    draw(recording.stored(whole_models.NAME), DRAWING)
    print(f"wrote {README}, {INTEROP} and {DRAWING}")
