"""docs/QUALITY.md, its grid apart, from the records of training, sampling and fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.cli import plot
from cupyattn.measure.words import format_seconds
from experiments._harness import plots, recording
from experiments.dit import metrics, modes
from experiments.dit.data import NAMES

DOCS = recording.ROOT / "docs"
PAGE, GRID, CURVES = (
    DOCS / name for name in ("QUALITY.md", "quality_grid.png", "quality_curves.svg")
)
#: Largest loss in fine-tuning, as the founding notes claim.
CLAIMED_LOSS = 0.005
#: Share of the FID that they claim INT8 linear layers to add at most.
CLAIMED_FID = 0.005
#: Their PSNR by mode, in dB: 16 bits, INT8 uniform, adaptive, with late steps in 16 bits, INT4.
CLAIMED_PSNR = {
    modes.FULL: 36.2, modes.UNIFORM: 31.8, modes.BY_STEP: 33.1, modes.LATE: 34.5, modes.INT4: 29.2,
}  # fmt: skip
Record = Mapping[str, Any]
#: A claim of the notes, what was measured, and whether it holds.
Claim = tuple[str, str, str]


def number(x: Any) -> float:
    """Return a number of a record, which writes infinities as text."""
    return float(x)


def with_interval(triple: Sequence[Any], digits: int) -> str:
    """Return a figure and its interval; none is "-0.0".

    Examples
    --------
    >>> with_interval([1.234, 1.2, 1.3], 1)
    '1.2 [1.2, 1.3]'
    """
    middle, low, high = (f"{round(number(x), digits) + 0.0:.{digits}f}" for x in triple)
    return f"{middle} [{low}, {high}]"


# ---- the claims of the notes ---------------------------------------------------------------------


def verdict(triple: Sequence[float], holds: Callable[[float], bool]) -> str:
    """Return "holds" or "does not hold" where both ends of an interval agree, else "undecided".

    Examples
    --------
    >>> [verdict(x, lambda d: d > 0) for x in ([2, 1, 3], [0, -1, 1], [-2, -3, -1])]
    ['holds', 'undecided', 'does not hold']
    """
    ends = {holds(number(x)) for x in triple[1:]}
    return "undecided" if len(ends) > 1 else "holds" if ends == {True} else "does not hold"


def difference(rows: Mapping[str, Record], left: str, right: str) -> list[float]:
    """Return by how much the PSNR of a mode is higher than another's, to 32-bit, in pairs."""
    key = f"psnrs to {modes.REFERENCE}"
    a, b = (np.array([number(x) for x in rows[name][key]]) for name in (left, right))
    return metrics.mean_interval(a - b)


def claims(
    record: Record, tuned: Record | None, memory: Record | None, linear: Record | None = None
) -> list[Claim]:
    """Hold the measurements to what the founding notes claim.

    Parameters
    ----------
    record : mapping
        Of `experiments.dit.quality`.
    tuned : mapping or None
        Of `experiments.dit.fine_tune`.
    memory : mapping or None
        Of `experiments.dit.memory`.
    linear : mapping or None
        Of `experiments.dit.linear`.
    """
    rows = {row["mode"]: row for row in record["rows"]}
    found: list[Claim] = []

    def compared(text: str, left: str, right: str) -> None:
        measured = difference(rows, left, right)
        said = f"{with_interval(measured, 2)} dB"
        found.append((text, said, verdict(measured, lambda x: x > 0)))

    compared("scales by timestep beat one static scale (by 1.3 dB)", modes.BY_STEP, modes.UNIFORM)
    compared("late steps in 16 bits beat INT8 throughout (by 1.4 dB)", modes.LATE, modes.BY_STEP)
    compared("INT8 beats INT4 (by 3.9 dB)", modes.BY_STEP, modes.INT4)
    compared("16 bits beat INT8 adaptive (by 3.1 dB)", modes.FULL, modes.BY_STEP)
    share = [
        number(x) / number(rows[modes.FULL][f"psnr to {modes.REFERENCE}"][0])
        for x in difference(rows, modes.FULL, modes.BY_STEP)
    ]
    found.append((
        "INT8 adaptive loses less than 1 % of the PSNR",
        with_interval([100 * x for x in share], 1) + " %", verdict(share, lambda x: x < 0.01),
    ))  # fmt: skip
    for mode, claimed in ((modes.UNIFORM, 2.7), (modes.BY_STEP, 0.3), (modes.LATE, 0.1)):
        over = rows[mode]["frechet over 16-bit"]
        found.append((
            f"{mode}: further from real images than 16 bits (FID by {claimed})",
            f"Frechet distance {with_interval(over, 4)}", verdict(over, lambda x: x > 0),
        ))  # fmt: skip
    times = [rows[mode].get("seconds of an image") for mode in (modes.FULL, modes.BY_STEP)]
    if all(times):
        ratio = times[0][0] / times[1][0]
        found.append(("INT8 is 1.7 times as fast", f"{ratio:.2f} times, of whole images",
                      "holds" if ratio >= 1.7 else "does not hold"))  # fmt: skip
    peaks = [(memory or {}).get("peak_bytes", {}).get(m) for m in (modes.FULL, modes.BY_STEP)]
    if None not in peaks:
        saved = 1 - peaks[1] / peaks[0]
        found.append(("INT8 takes 35 % less memory", f"{saved:.1%} less at the peak of sampling",
                      "holds" if saved >= 0.35 else "does not hold"))  # fmt: skip
    if tuned is not None:
        over = tuned["held-out loss over 16-bit"]
        found.append((
            "fine-tuning in INT8 loses at most 0.5 %",
            with_interval([100 * number(x) for x in over], 3) + " % of the held-out loss",
            verdict(over, lambda x: x <= CLAIMED_LOSS),
        ))  # fmt: skip
    for row in [] if linear is None else linear["rows"]:
        if row["mode"] not in (modes.REFERENCE, modes.FULL):
            share = frechet_share(linear["rows"], row)
            found.append((
                f"{row['mode']}: FID by less than 0.5 %", f"{with_interval(share, 3)} %",
                verdict(share, lambda x: x < 100 * CLAIMED_FID),
            ))  # fmt: skip
    return found


def frechet_share(rows: Sequence[Record], row: Record) -> list[float]:
    """Return by how much of 16 bits' own the Frechet distance of a mode is larger, in per cent."""
    (of_full,) = (number(one["frechet"][0]) for one in rows if one["mode"] == modes.FULL)
    return [100 * number(x) / of_full for x in row["frechet over 16-bit"]]


# ---- the page ------------------------------------------------------------------------------------


def page(
    trained: Record, record: Record, tuned: Record | None, memory: Record | None,
    linear: Record | None = None,
) -> str:  # fmt: skip
    """Return the text of the page."""
    settings, rows = trained["settings"], record["rows"]
    shape = settings["shape"]
    minutes, last = trained["seconds"] / 60, np.mean(trained["losses"][-5:])
    lines = [
        "# Quality: a diffusion transformer with INT8 attention",
        "",
        "Written by `python -m experiments.dit.quality --stored` from "
        "[dit_train.json](../experiments/results/dit_train.json), "
        "[dit_quality.json](../experiments/results/dit_quality.json) and, where they were made, "
        "dit_fine_tune.json and dit_memory.json.",
        "",
        f"A transformer of {trained['parameters']:,} parameters ({shape['depth']} blocks of width "
        f"{shape['width']}, {shape['heads']} heads) learned from crops of "
        "[eight photographs](../experiments/data/photographs/README.md). A crop is "
        f"{(shape['size'] // shape['patch']) ** 2} tokens of {shape['patch']} x {shape['patch']} "
        f"pixels. Training took {settings['steps']:,} steps of {settings['batch']} crops, "
        f"{minutes:.1f} minutes on {device_of(trained)}, and the loss ended at {last:.4f}. "
        "Attention is cupyattn's in both directions, everything else "
        "CuPy's. Then it sampled "
        f"{record['images']} images in every mode, from the same noise, in {record['steps']} "
        f"steps, on {device_of(record)}.",
        "",
        f"![A row for each mode, from the same noise]({GRID.name})",
        "",
        f"Rows: {'; '.join(modes.NAMES)}. Columns: {', '.join(NAMES)}.",
        "",
        *recording.markdown(*_table(rows, memory)),
        "",
        "PSNR in dB and SSIM compare each image with the image of 32-bit or 16-bit attention from "
        "the same noise. Brackets are 95 % bootstrap intervals over seeds. *Frechet* is the "
        f"Frechet distance to real crops in {record['features']} features of a small network "
        "trained here, each in units of its spread. The network classifies "
        f"{record['accuracy of the features']:.1%} of crops correctly. The distance between as "
        "many real crops and the others is "
        f"{with_interval(record['frechet of real crops'], 2)}. It is not the FID. There is no "
        "LPIPS: its weights would have to be downloaded. *memory* is the peak in sampling a batch, "
        "without the weights. *an image* is the time of one image in a batch of many, with all "
        "other parts in 16 bits.",
        "",
        f"![Errors of the latents by step, and losses]({CURVES.name})",
        "",
        *([] if linear is None else _linear_layers(linear)),
        "## What the founding notes claim",
        "",
        "The notes are the plan that this library began as, "
        "[written before there was a kernel](PERFORMANCE.md#what-the-founding-notes-say-and-what-"
        "was-measured). For Stable Diffusion 1.5 they state this PSNR in dB.",
        "",
        *recording.markdown(list(CLAIMED_PSNR), [[f"{x}" for x in CLAIMED_PSNR.values()]]),
        "",
        "Their fall from 36.2 to 33.1 dB, 3.1 dB, doubles the squared error, but they call it "
        "0.63 dB and less than 1 %.",
        "",
        *recording.markdown(
            ["claim", "measured here", "verdict"], claims(record, tuned, memory, linear)
        ),
        "",
        "This model normalises q and k (QK-norm), so their size hardly depends on the noise. The "
        "table above shows the gain of scales by timestep, which can be larger in models without "
        "it. A verdict is \"undecided\" if the interval contains both answers.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _linear_layers(record: Record) -> list[str]:
    """Return the section on INT8 linear layers."""
    return [
        "## INT8 linear layers",
        "",
        "The same images with the linear layers of all blocks in INT8 "
        "(`python -m experiments.dit.linear`, "
        "[dit_linear.json](../experiments/results/dit_linear.json)). "
        f"Every mode made {record['images']} images in {record['steps']} steps on "
        f"{device_of(record)}.",
        "",
        *recording.markdown(*_table(record["rows"], None)),
        "",
    ]


def device_of(record: Record) -> str:
    """Name what a record was made on."""
    device = record["environment"].get("device")
    return "the mirror, without a device" if device is None else str(device["name"])


def _table(rows: Sequence[Record], memory: Record | None) -> tuple[list[str], list[list[str]]]:
    """Return header and cells, without the columns that no mode has a figure for."""
    figures = (
        ("PSNR to 32-bit", f"psnr to {modes.REFERENCE}", 2),
        ("PSNR to 16-bit", f"psnr to {modes.FULL}", 2),
        ("SSIM to 16-bit", f"ssim to {modes.FULL}", 4),
        ("Frechet", "frechet", 3), ("over 16-bit", "frechet over 16-bit", 4),
    )  # fmt: skip
    columns: dict[str, list[str]] = {"mode": [row["mode"] for row in rows]}
    for title, key, digits in figures:
        columns[title] = [with_interval(row[key], digits) if key in row else "" for row in rows]
    times = [row["seconds of an image"] for row in rows]
    columns["an image"] = ["" if took is None else format_seconds(took[0]) for took in times]
    peaks = [None if memory is None else memory["peak_bytes"][row["mode"]] for row in rows]
    columns["memory"] = ["" if one is None else f"{one / 2**20:,.0f} MiB" for one in peaks]
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    return list(shown), [list(cells) for cells in zip(*shown.values(), strict=True)]


def figure(trained: Record, record: Record, tuned: Record | None) -> Any:
    """Return the figure of errors by step and of losses."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.4, 3.6), layout="constrained", facecolor="none")
    errors, losses = drawn.subplots(1, 2)
    colours = iter(plots.COLOURS)
    for row in record["rows"]:
        if row["latent error"] and row["mode"] != modes.REFERENCE:
            errors.plot(row["latent error"], color=next(colours), linewidth=1, label=row["mode"])
    errors.set_yscale("log")
    errors.set_xlabel("step", fontsize=8, color=plots.TEXT)
    errors.set_title("relative error of the latents", fontsize=9, color=plots.TEXT)
    errors.legend(fontsize=6, frameon=False, labelcolor=plots.TEXT)
    each = trained["steps_of_a_figure"]
    steps = each * np.arange(len(trained["losses"]))
    first, *others = plots.COLOURS
    losses.plot(steps, trained["losses"], color=first, linewidth=1, label="training, 16-bit")
    if tuned is not None:
        for (name, curve), colour in zip(tuned["losses"].items(), others, strict=False):
            start = steps[-1] + tuned["steps_of_a_figure"] * np.arange(len(curve))
            losses.plot(start, curve, color=colour, linewidth=1, label=f"fine-tuning, {name}")
    losses.set_xlabel("step", fontsize=8, color=plots.TEXT)
    losses.set_title("loss", fontsize=9, color=plots.TEXT)
    losses.legend(fontsize=6, frameon=False, labelcolor=plots.TEXT)
    for axis in (errors, losses):
        plots.bare(axis)
        axis.grid(color=plots.TEXT, alpha=0.25, linewidth=0.5)
    return drawn


def stored(name: str, folder: Path = recording.RESULTS) -> dict[str, Any]:
    """Return a record, or raise OSError with the command that makes it."""
    path = folder / f"dit_{name}.json"
    if not path.is_file():
        raise OSError(f"there is no {path}: python -m experiments.dit.{name} makes it")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def optional(name: str, folder: Path = recording.RESULTS) -> dict[str, Any] | None:
    """Return a record, None where it was not made."""
    return stored(name, folder) if (folder / f"dit_{name}.json").is_file() else None


def write(results: Path = recording.RESULTS, docs: Path = DOCS) -> int:
    """Write the page and its curves from the records; return an exit status.

    Raises
    ------
    OSError
        Where a record of training or sampling is missing.
    """
    trained, record = stored("train", results), stored("quality", results)
    tuned, memory, linear = (optional(n, results) for n in ("fine_tune", "memory", "linear"))
    curves = docs / CURVES.name
    plot.check(str(curves))
    plot.save(figure(trained, record, tuned), str(curves), source=device_of(record))
    (docs / PAGE.name).write_text(page(trained, record, tuned, memory, linear), encoding="utf-8")
    print(f"wrote {docs / PAGE.name} and {curves.name}")
    return 0
