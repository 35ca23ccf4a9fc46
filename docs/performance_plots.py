"""The drawings of docs/PERFORMANCE.md, each of records, on no background of their own.

Text is grey and lines have the colours of `experiments._harness.plots`, so that they can be read on
white and on black.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import plot
from cupyattn.measure.words import format_rate
from experiments._harness import plots
from experiments.accuracy import precision_ablation
from experiments.diffusion import timestep_ablation
from experiments.speed import ladder as ladder_experiment

Record = Mapping[str, Any]
FORMATS = (".svg", ".png")
COLOURS = plots.COLOURS[:-1]
OURS, PEER, LIMIT = COLOURS[0], plots.GREY, COLOURS[1]


def figure_of(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a transparent figure and its axes, flat."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor="none")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        plots.bare(axis)
    return figure, axes


def labelled(axis: Any, title: str, x: str, y: str = "") -> None:
    """Name an axis' panel and directions."""
    axis.set_title(title, fontsize=10, color=plots.TEXT)
    axis.set_xlabel(x, fontsize=8, color=plots.TEXT)
    axis.set_ylabel(y, fontsize=8, color=plots.TEXT)


def called(name: str) -> str:
    """Return what drawings call a row of the ladder, in few letters.

    Examples
    --------
    >>> called("torch SDPA, cuDNN"), called("fa_tc, sm_90")
    ('cuDNN', 'fa_tc, portable form')
    """
    return ladder_experiment.called(name).replace("torch SDPA, ", "")


def plain(record: Record, length: int = 4096) -> list[Record]:
    """Return the problems without a mask at one length, by head_dim."""
    found = [p for p in record["problems"] if p["problem"]["length"] == length
             and not p["problem"]["causal"]]  # fmt: skip
    return sorted(found, key=lambda p: int(p["problem"]["head_dim"]))


def timed(found: Record) -> list[Record]:
    """Return the rows of a problem that have times."""
    return [row for row in found["rows"] if "seconds" in row]


def bars(record: Record, value: Callable[[Record], float], axis_title: str, *, limit: bool) -> Any:
    """Return a figure of bars, one for each row, a panel for each head_dim."""
    problems = plain(record)
    figure, axes = figure_of(1, len(problems), (3.6 * len(problems), 3.4))
    for axis, found in zip(axes, problems, strict=True):
        rows = timed(found) if not limit else [r for r in found["rows"] if r["judgement"]]
        heights = range(len(rows))
        values = [value(row) for row in rows]
        axis.barh(heights, values, 0.7, color=[PEER if r["peer"] else OURS for r in rows])
        names = [called(row["variant"]) for row in rows]
        axis.set_yticks(heights, names if axis is axes[0] else [""] * len(names))
        axis.invert_yaxis()
        for y, x in zip(heights, values, strict=True):
            axis.annotate(f" {format_rate(x)}", (x, y), va="center", fontsize=7, color=plots.TEXT)
        axis.margins(x=0.2)
        if limit:
            axis.axvline(1.0, color=LIMIT, linewidth=1.2)
            axis.set_xlim(0, 1.15)
        labelled(axis, f"head_dim {found['problem']['head_dim']}", axis_title)
    return figure


def ladder(record: Record) -> Any:
    """Rate of every rung and peer."""
    return bars(record, lambda r: float(r["tflops"]), "TFLOP/s", limit=False)


def errors(record: Record) -> Any:
    """Largest error as a share of its bound: the red line is what may not be crossed."""

    def largest(row: Record) -> float:
        judged = row["judgement"]
        return float(max(judged["j2"], judged["j3"] or 0.0))

    return bars(record, largest, "largest error / bound", limit=True)


def pareto(record: Record) -> Any:
    """Relative error against time, a panel for each head_dim."""
    problems = plain(record)
    figure, axes = figure_of(1, len(problems), (3.6 * len(problems), 3.8))
    names = list(dict.fromkeys(row["variant"] for found in problems for row in timed(found)))
    for axis, found in zip(axes, problems, strict=True):
        for row in timed(found):
            number = names.index(row["variant"])
            axis.plot(
                1e3 * row["seconds"], row["judgement"]["relative_error"],
                "os^Dv"[number // len(COLOURS)] if not row["peer"] else "X",
                color=COLOURS[number % len(COLOURS)], markersize=7,
                label=called(row["variant"]),
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.margins(0.15)
        labelled(axis, f"head_dim {found['problem']['head_dim']}", "time, ms", "relative error")
    below_title(figure, axes)
    return figure


def below_title(figure: Any, axes: Sequence[Any]) -> None:
    """Put one legend of all lines above the panels."""
    lines = {line.get_label(): line for axis in axes for line in axis.get_lines()}
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=min(5, len(lines)),
                  frameon=False, fontsize=8, labelcolor=plots.TEXT)  # fmt: skip


def lengths(record: Record) -> Any:
    """TFLOP/s by length, a row for each head_dim, without and with the causal mask."""
    dims = sorted({p["problem"]["head_dim"] for p in record["problems"]})
    figure, axes = figure_of(len(dims), 2, (8.4, 2.7 * len(dims)))
    for number, head_dim in enumerate(dims):
        for column, causal in enumerate((False, True)):
            axis = axes[2 * number + column]
            mine = [p for p in record["problems"] if p["problem"]["head_dim"] == head_dim
                    and p["problem"]["causal"] == causal]  # fmt: skip
            plots.panel(axis, mine, plots.LINES)
            axis.set_ylim(bottom=0)
            title = f"head_dim {head_dim}, {'causal' if causal else 'not causal'}"
            labelled(axis, title, "length", "TFLOP/s" if not column else "")
    below_title(figure, axes)
    return figure


def ceilings(gemm: Record, decode: Record) -> dict[str, float]:
    """Return what was measured at most: operations per second of products, bytes of memory.

    Returns
    -------
    dict
        ``fp16`` and ``int8`` operations per second, ``bytes`` per second.
    """

    def best(name: str) -> float:
        return 1e12 * max(float(row["tops"].get(name, 0.0)) for row in gemm["rows"])

    moved = max(2 * row["kv_bytes"] / row["seconds"][row["copy"]] for row in decode["problems"])
    return {"fp16": best("torch FP16"), "int8": best("int8_gemm"), "bytes": float(moved)}


def roofline(ladder: Record, peers: Record, gemm: Record, decode: Record) -> Any:
    """Rates against operations per byte that must move, under ceilings that were measured."""
    top = ceilings(gemm, decode)
    figure, (axis,) = figure_of(1, 1, (7.2, 4.2))
    xs = [2.0**i for i in range(-1, 15)]
    for name, colour in (("fp16", OURS), ("int8", COLOURS[2])):
        roof = [min(x * top["bytes"], top[name]) / 1e12 for x in xs]
        axis.plot(xs, roof, color=colour, linewidth=1.6,
                  label=f"{name} products and memory, measured")  # fmt: skip
    for row in decode["problems"]:
        call_rows = row["group"] * row["len_q"]
        work = 4 * row["head_dim"] * row["batch"] * row["heads_kv"] * call_rows * row["len_kv"]
        axis.plot(work / row["kv_bytes"], work / row["seconds"]["fa_tc"] / 1e12, ".",
                  color=COLOURS[3], markersize=5)  # fmt: skip
    for found in peers["problems"]:
        problem = found["problem"]
        if problem["causal"]:
            continue
        for row in timed(found):
            if row["variant"] in plots.LINES:
                colour, marker, _ = plots.LINES[row["variant"]]
                axis.plot(intensity(problem, row), row["tflops"], marker, color=colour,
                          markersize=4)  # fmt: skip
    for found in plain(ladder):
        for row in timed(found):
            if not row["peer"] and row["variant"] != "fa_tc":
                axis.plot(intensity(found["problem"], row), row["tflops"], "D", color=COLOURS[4],
                          markersize=4)  # fmt: skip
    for label, (colour, marker, _) in (
        *plots.LINES.items(), ("other rungs", (COLOURS[4], "D", 0)),
        ("fa_tc, few queries", (COLOURS[3], ".", 0)),
    ):  # fmt: skip
        axis.plot([], [], marker, color=colour, markersize=5, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.legend(fontsize=8, frameon=False, labelcolor=plots.TEXT)
    labelled(axis, "", "operations per byte that must move", "TFLOP/s")
    return figure


def intensity(problem: Record, row: Record) -> float:
    """Return operations per byte of Q, K, V and O, each moved once, in 16 bits."""
    rows = 4 * problem["batch"] * problem["heads"] * problem["length"]
    return float(row["operations"]) / (2 * rows * problem["head_dim"])


def timesteps(record: Record, path: str) -> None:
    """Draw error by timestep as `experiments.diffusion.timestep_ablation` does."""
    timestep_ablation.draw(record, path)


#: Name of a drawing: the records that it needs, and what draws them.
FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "book_ladder": (("ladder",), ladder),
    "book_pareto": (("ladder",), pareto),
    "book_errors": (("ladder",), errors),
    "book_lengths": (("peers",), lengths),
    "book_roofline": (("ladder", "peers", "gemm", "decode"), roofline),
}
#: The same of what other experiments draw to a file themselves.
FILES: dict[str, tuple[tuple[str, ...], Callable[[Record, str], None]]] = {
    "book_timesteps": (("timestep_ablation",), timesteps),
    "book_precision": (("precision_ablation",), precision_ablation.draw),
}


def draw(name: str, records: Sequence[Record], folder: Path) -> list[Path]:
    """Write one drawing in every format; return the files."""
    plot.check(str(folder / f"{name}.svg"))
    files = [folder / f"{name}{ending}" for ending in FORMATS]
    for file in files:
        if name in FILES:
            FILES[name][1](records[0], str(file))
        else:
            figure = FIGURES[name][1](*records)
            caption = plots.source(records[0])
            figure.supxlabel(caption, fontsize=7, color=plots.TEXT)
            plot.save(figure, str(file), source=caption)
    return files
