"""Plots of records: the rate of fa_tc and of the other libraries by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import plot
from experiments._harness.others import CUDNN, FLASH_2, FLASH_3, FLASH_4

#: The plots have a transparent background. Their colours are visible on white and on black, and
#: people with any colour vision can distinguish them. Colours of Okabe and Ito that are neither too
#: light nor too dark for this, two more, and grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#5A3CFF", "#D2003C", "#8A8A8A")
GREY = COLOURS[-1]
#: Colour, marker and width of each line.
LINES = {
    "fa_tc": (COLOURS[0], "o", 2.2),
    CUDNN: (COLOURS[1], "s", 1.3),
    FLASH_3: (COLOURS[2], "^", 1.3),
    FLASH_2: (GREY, "v", 1.0),
}
#: The same of the backward pass.
BACKWARD_LINES = {
    "atomic": LINES["fa_tc"],
    "deterministic": (COLOURS[3], "D", 1.3),
    CUDNN: LINES[CUDNN],
    FLASH_4: LINES[FLASH_3],
    FLASH_2: LINES[FLASH_2],
}
#: Colour of text and axes.
TEXT = "#7A7A7A"


def path_of(folder: Path, head_dim: int, name: str = "peers") -> Path:
    """Return the file of one head_dim's plot."""
    return folder / f"{name}_hd{head_dim}.svg"


def check(folder: Path) -> None:
    """Raise where `draw_by_length` could not write, as `cupyattn.cli.plot.check` does."""
    plot.check(str(path_of(folder, 64)))


def source(record: Mapping[str, Any]) -> str:
    """Return in one line where the numbers of a record come from."""
    environment = record["environment"]
    facts = environment["device"]
    where = "in the interpreter" if record.get("backend") == "interpret" else "on the mirror"
    parts = [f"{where}, without a device"]
    if facts is not None:
        parts = [facts["name"], f"driver {facts['driver']}"]
    parts += [
        f"{x} {environment[x.lower()]}" for x in ("NVRTC", "torch") if x.lower() in environment
    ]
    return f"{', '.join(parts)}, revision {environment.get('revision', 'unknown')[:10]}"


def draw_by_length(
    record: Mapping[str, Any],
    folder: Path,
    name: str = "peers",
    lines: Mapping[str, tuple[str, str, float]] = LINES,
) -> list[Path]:
    """Draw TFLOP/s by length, plain and causal side by side, one file for each head_dim.

    Parameters
    ----------
    record : mapping
        Of `experiments.speed.peers` or `experiments.speed.backward`, with times.
    folder : Path
        Where peers_hd64.svg and so on go.
    name : str
        What the files' names begin with.
    lines : mapping
        Colour, marker and width by the name of a row; the first lies above the others.

    Returns
    -------
    list of Path
        What was written.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    ValueError
        If the record has no times.
    OSError
        If the folder does not exist.
    """
    check(folder)
    if record["backend"] != "cuda":
        raise ValueError(f"only a device's record can be drawn, this is of the {record['backend']}")
    written = []
    for head_dim in sorted({found["problem"]["head_dim"] for found in record["problems"]}):
        some = [p for p in record["problems"] if p["problem"]["head_dim"] == head_dim]
        file = path_of(folder, head_dim, name)
        plot.save(_figure(some, source(record), lines), str(file), source=source(record))
        written.append(file)
    return written


def _figure(
    problems: Sequence[Mapping[str, Any]],
    caption: str,
    styles: Mapping[str, tuple[str, str, float]] = LINES,
) -> Any:
    """Return the figure of one head_dim: a panel without and one with the causal mask."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.9), layout="constrained", facecolor="none")
    axes = figure.subplots(1, 2, sharey=True)
    one = problems[0]["problem"]
    for axis, causal in zip(axes, (False, True), strict=True):
        panel(axis, [p for p in problems if p["problem"]["causal"] == causal], styles)
        title = f"head_dim {one['head_dim']}, {'causal' if causal else 'not causal'}"
        axis.set_title(title, fontsize=10, color=TEXT)
    axes[0].set_ylabel("TFLOP/s", fontsize=9, color=TEXT)
    axes[0].set_ylim(bottom=0)
    lines = {line.get_label(): line for axis in axes for line in axis.get_lines()}
    figure.legend(
        lines.values(), lines, loc="outside upper center", ncols=len(lines), frameon=False,
        fontsize=9, labelcolor=TEXT,
    )  # fmt: skip
    tokens = min(p["problem"]["batch"] * p["problem"]["length"] for p in problems)
    fixed = f"{tokens:,} tokens of {one['heads']} heads, {one['dtype']}"
    figure.supxlabel(f"length ({fixed})\n{caption}", fontsize=8, color=TEXT)
    return figure


def panel(
    axis: Any,
    problems: Sequence[Mapping[str, Any]],
    styles: Mapping[str, tuple[str, str, float]],
) -> None:
    """Draw a line for each row's name through its rates by length."""
    lengths = sorted({p["problem"]["length"] for p in problems})
    for name, (colour, marker, width) in styles.items():
        points = [
            (p["problem"]["length"], row["tflops"])
            for p in problems
            for row in p["rows"]
            if row["variant"] == name and "tflops" in row
        ]
        if points:
            axis.plot(
                *zip(*sorted(points), strict=True), color=colour, marker=marker, markersize=4.5,
                linewidth=width, label=name, zorder=3 if name == next(iter(styles)) else 2,
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    bare(axis)
    axis.grid(axis="y", color=TEXT, alpha=0.3, linewidth=0.6)


def bare(axis: Any) -> None:
    """Leave a panel no background, and of its frame the left and the lower side, in grey."""
    axis.set_facecolor("none")
    axis.tick_params(labelsize=8, colors=TEXT, which="both")
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(TEXT)
