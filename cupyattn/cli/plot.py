"""Draw the ladder with one bar for each rung, and an analysis as histograms over tensors."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from cupyattn.checkpoints.analysis import Analysis
from cupyattn.checkpoints.roles import INT8_ROLES
from cupyattn.errors import UnsupportedError
from cupyattn.files import replacing
from cupyattn.measure.words import format_rate, format_share, printable

#: Colours that are distinguishable with any colour vision (Okabe and Ito).
_RUNG, _PEER, _SECOND = "#0072B2", "#999999", "#E69F00"
_FORMATS = (".png", ".svg", ".pdf")


def check(path: str) -> None:
    """Raise, before anything is computed, if the plot cannot be written.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    ValueError
        If the name does not end in .png, .svg or .pdf.
    OSError
        If the folder does not exist.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "--plot needs matplotlib: pip install matplotlib (the extra cli has it), "
            "or leave --plot out"
        ) from error
    if os.path.splitext(path)[1] not in _FORMATS:
        raise ValueError(f"--plot must end in {', '.join(_FORMATS)}, got {path!r}")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise OSError(f"--plot: there is no folder {folder!r}")


def draw_ladder(ladders: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], path: str) -> None:
    """Draw ladders, one row of panels for each.

    Parameters
    ----------
    ladders : sequence of (title, rows)
        Each row as `cupyattn.measure.rungs.Rung.to_dict` makes it; rows with ``"peer": True`` are
        other libraries, drawn in grey below the rungs.
    path : str
        Ends in .png, .svg or .pdf.
    """
    from matplotlib.figure import Figure

    timed = any(row.get("tflops") for _, rows in ladders for row in rows)
    panels = 2 if timed else 1
    counts = [len(rows) for _, rows in ladders]
    figure = Figure(
        figsize=(5.2 * panels, sum(0.42 * n + 1.35 for n in counts)), layout="constrained"
    )
    grid = figure.subplots(
        len(ladders), panels, squeeze=False, height_ratios=[n + 2 for n in counts]
    )
    for axes, (title, rows) in zip(grid, ladders, strict=True):
        if timed:
            _draw_speed(axes[0], rows)
        _draw_error(axes[-1], rows, labels=not timed)
        wrapped = textwrap.fill(printable(title), 62 * panels)
        axes[0].set_title(wrapped, loc="left", fontsize=9)
    save(figure, path)


def draw_analysis(found: Analysis, path: str) -> None:
    """Draw histograms of SQNR and outliers over the weights that could become INT8.

    Parameters
    ----------
    found : Analysis
    path : str
        Ends in .png, .svg or .pdf.
    """
    from matplotlib.figure import Figure

    some = [t for t in found.tensors if t.role in INT8_ROLES]
    parts = [
        ("become INT8", _RUNG, [t for t in some if t.verdict == "int8"]),
        ("do not", _SECOND, [t for t in some if t.verdict != "int8"]),
    ]
    figure = Figure(figsize=(10.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axis, name, limit, label in (
        (left, "inlier_sqnr_db", found.config.min_sqnr_db, "signal without outliers to noise, dB"),
        (right, "outlier_ratio", found.config.max_outlier_ratio, "share of outliers"),
    ):
        values = [[getattr(t, name) for t in part] for _, _, part in parts]
        axis.hist(
            [[x for x in v if x is not None] for v in values], bins=40, stacked=True,
            color=[colour for _, colour, _ in parts], label=[label for label, _, _ in parts],
        )  # fmt: skip
        axis.axvline(limit, color="#D55E00", linewidth=1.2)
        axis.set_xlabel(f"{label} (red line: limit)", fontsize=8)
        axis.set_ylabel("tensors", fontsize=8)
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    left.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{printable(found.source)}: {len(some)} weights of layers", fontsize=9)
    save(figure, path)


def save(figure: Any, path: str, *, source: str | None = None) -> None:
    """Write a figure without date and random names, so that equal figures have equal bytes.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    path : str
        Ends in .png, .svg or .pdf.
    source : str, optional
        Source of its numbers, for the metadata of an .svg.
    """
    import matplotlib

    metadata = {"Date": None, "Source": source} if path.endswith(".svg") else None
    with matplotlib.rc_context({"svg.hashsalt": "cupyattn"}), replacing(path) as file:
        figure.savefig(file, format=path.rpartition(".")[2], dpi=150, metadata=metadata)


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], labels: bool) -> list[float]:
    """Prepare an axis with one line for each row, the first on top; return their heights."""
    heights = [float(i) for i in range(len(rows))]
    names = [printable(row["variant"]) if labels else "" for row in rows]
    axis.set_yticks(heights, names, fontsize=9)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    return heights


def _draw_speed(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    heights = _bars(axis, rows, labels=True)
    values = [row.get("tflops") or 0.0 for row in rows]
    axis.barh(heights, values, 0.7, color=[_PEER if r.get("peer") else _RUNG for r in rows])
    for y, row, value in zip(heights, rows, values, strict=True):
        share = row.get("share")
        text = f" {format_rate(value)}" if value else " not timed"
        axis.text(
            value,
            y,
            text + (f"  ({format_share(share)})" if share else ""),
            va="center",
            fontsize=8,
        )
    axis.set_xlim(0, 1.25 * max(values, default=1.0) or 1.0)
    axis.set_xlabel("TFLOP/s (share of the ceiling of its units)", fontsize=8)


def _draw_error(axis: Any, rows: Sequence[Mapping[str, Any]], labels: bool) -> None:
    heights = _bars(axis, rows, labels)
    for y, row in zip(heights, rows, strict=True):
        judged = row.get("judgement") or {}
        for name, offset, colour in (("j2", -0.18, _RUNG), ("j3", 0.18, _SECOND)):
            value = judged.get(name)
            if value is None:
                continue
            axis.barh(y + offset, min(float(value), 1.3), 0.33, color=colour)
            axis.text(
                min(float(value), 1.3), y + offset, f" {float(value):.2f}", va="center", fontsize=7
            )
        if judged:
            text = f"rel. error {judged['relative_error']:.1e}"
            axis.text(1.17, y, text, va="center", fontsize=7, color="#444444")
    axis.axvline(1.0, color="#D55E00", linewidth=1.2)
    axis.set_xlim(0, 1.5)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axis.set_xlabel(
        "largest error as a share of its bound (blue J2, orange J3; red line: limit)", fontsize=8
    )
