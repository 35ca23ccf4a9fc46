"""The parts of docs/PERFORMANCE.md: each turns the records that it names into lines.

A part has the records as arguments and is left out of the page where one of them is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cupyattn.measure.words import (
    format_bytes,
    format_rate,
    format_ratio,
    format_seconds,
    format_share,
)
from docs.performance_int8 import errors_by_distribution, in_8_bits, linear_layers
from docs.performance_tables import Record, interval, range_of, rate, rows_of
from experiments._harness.others import CUDNN, FLASH_2, FLASH_3, FLASH_4, geometric_mean
from experiments._harness.recording import RESULTS, markdown
from experiments.accuracy import precision_ablation
from experiments.speed.backward import (
    ATOMIC,
    BESIDE_BEST,
    BESIDE_DETERMINISTIC,
    DETERMINISTIC,
)
from experiments.speed.backward_scores import BESIDE_PEERS, TAKEN
from experiments.speed.ladder import called
from experiments.tuning import breakdown, counters

#: Ways whose energy of a backward pass is shown.
COUNTED = (ATOMIC, DETERMINISTIC, FLASH_4, CUDNN)


@dataclass(frozen=True)
class Part:
    """One part of the page.

    Parameters
    ----------
    title : str
    needs : tuple of str
        Names of records, without the ending.
    write : callable
        ``write(*records)``, the lines below the title and the sources.
    plots : tuple of (name, alternative text)
        Drawings in docs/, without the ending.
    """

    title: str
    needs: tuple[str, ...]
    write: Callable[..., list[str]]
    plots: tuple[tuple[str, str], ...] = ()


# ---- latency and throughput ----------------------------------------------------------------------


def by_length(peers: Record) -> list[str]:
    """Time and rate of fa_tc by length, beside the other libraries."""
    lines = [
        "Time of a call and TFLOP/s, by length. The ratio compares the speed with the faster of",
        "cuDNN and FlashAttention-3 in the same rounds, and has a 95 % interval. Tokens times",
        "heads times head_dim are the same in every cell.",
    ]
    ratios = {cell["problem"]: cell["ratio"] for cell in peers["against_rival"]["cells"]}
    for head_dim in sorted({found["problem"]["head_dim"] for found in peers["problems"]}):
        table = []
        for found in peers["problems"]:
            problem = found["problem"]
            if problem["head_dim"] != head_dim:
                continue
            rows = rows_of(found)
            own = rows["fa_tc"]
            table.append([
                f"{problem['length']:,}{' causal' if problem['causal'] else ''}",
                format_seconds(own["seconds"]), rate(own), rate(rows.get(CUDNN)),
                rate(rows.get(FLASH_3)), rate(rows.get(FLASH_2)),
                interval(ratios[problem["name"]]) if problem["name"] in ratios else "-",
            ])  # fmt: skip
        header = ["length", "fa_tc", "TFLOP/s", "cuDNN", "FlashAttention-3", "FlashAttention-2"]
        lines += ["", f"**head_dim {head_dim}**", ""]
        lines += markdown([*header, "beside the faster"], table)
    means = peers["against_rival"]["geometric_mean"]
    said = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    return [*lines, "", f"Geometric means of the ratios: {said}."]


def shapes(diffusion_shapes: Record) -> list[str]:
    """Time on shapes of diffusion models."""
    table = []
    for found in diffusion_shapes["problems"]:
        problem, rows = found["problem"], rows_of(found)
        model = diffusion_shapes["models"][problem["name"]]
        times = [
            format_seconds(rows[n]["seconds"]) if "seconds" in rows.get(n, {}) else "-"
            for n in ("fa_tc", CUDNN, FLASH_3, FLASH_2)
        ]
        table.append([model, problem["name"].rsplit(" ", 2)[0], *times, rate(rows["fa_tc"])])
    header = ["", "shape", "fa_tc", "cuDNN", "FlashAttention-3", "FlashAttention-2", "TFLOP/s"]
    return markdown(header, table)


def rungs(ladder: Record) -> list[str]:
    """Gain of each rung, by head_dim."""
    lines = []
    for found in ladder["problems"]:
        problem = found["problem"]
        table = []
        for row in found["rows"]:
            judged = row["judgement"]
            if judged is None or "seconds" not in row:
                continue
            table.append([
                called(row["variant"]), format_seconds(row["seconds"]), format_rate(row["tflops"]),
                "-" if row.get("share") is None else format_share(row["share"]),
                format_ratio(judged["j2"]), f"{judged['relative_error']:.1e}",
            ])  # fmt: skip
        lines += ["", f"**{problem['name']}**", ""]
        lines += markdown(["", "time", "TFLOP/s", "ceiling", "J2", "rel. error"], table)
    return lines[1:]


def gradients(backward: Record, energy_backward: Record, backward_scores: Record) -> list[str]:
    """Rate of the backward pass beside other libraries, its energy, and scores that change."""
    compared = (BESIDE_BEST, "beside cuDNN", BESIDE_DETERMINISTIC)
    groups: dict[tuple[int, bool], list[Record]] = {}
    for found in backward["problems"]:
        if found.get(BESIDE_BEST):
            key = found["problem"]["head_dim"], found["problem"]["causal"]
            groups.setdefault(key, []).append(found)
    table = []
    for (head_dim, causal), some in sorted(groups.items()):
        means = [geometric_mean(one[name][0] for one in some) for name in compared]
        best = sorted(one[BESIDE_BEST] for one in some)
        table.append([
            f"{head_dim}{' causal' if causal else ''}", str(len(some)), f"{means[0]:.3f}",
            interval(best[0]), interval(best[-1]), *(f"{mean:.3f}" for mean in means[1:]),
        ])  # fmt: skip
    header = ["head_dim", "cells", "geometric mean", "least", "most", "cuDNN", "deterministic"]
    lengths = sorted({found["problem"]["length"] for found in backward["problems"]})
    return [
        "Speed of the form that a call takes beside the best library, over lengths of",
        f"{lengths[0]:,} to {lengths[-1]:,}, both types. *cuDNN* is the mean beside cuDNN,",
        "*deterministic* that of both deterministic forms, ours and FlashAttention-4's.",
        "",
        *markdown(header, table),
        "",
        "Joules of a call and TFLOP/s, sustained at the limit of power:",
        "",
        *markdown(
            ["", *(name.removeprefix("torch SDPA, ") for name in COUNTED)],
            joules_of(energy_backward),
        ),
        "",
        "With masks, a bias and a softcap, in bfloat16, beside the fastest of cuDNN, FlexAttention",
        "and torch's memory-efficient kernels:",
        "",
        *markdown(
            ["head_dim, keys", "feature", "time", "TFLOP/s", "fastest", "beside it"],
            changed_scores(backward_scores),
        ),
    ]


def changed_scores(record: Record) -> list[list[str]]:
    """Return rows with the rate of each feature of scores, and the fastest library beside it."""
    table = []
    for found in record["cells"]:
        head_dim, keys, _ = found["cell"].split(":")
        ours = next(row for row in found["rows"] if row["variant"] == TAKEN)
        peers = [row for row in found["rows"] if row["peer"] and "seconds" in row]
        table.append([
            f"{head_dim}, {int(keys):,}", found["feature"], format_seconds(ours["seconds"]),
            f"{ours['tflops']:.0f}", min(peers, key=lambda row: row["seconds"])["variant"],
            interval(found[BESIDE_PEERS]),
        ])  # fmt: skip
    return table


def joules_of(energy_backward: Record) -> list[list[str]]:
    """Return rows with joules of a call and the sustained rate of each way, by problem."""
    table = []
    for found in energy_backward["problems"]:
        counted = {row["variant"]: row["energy"] for row in found["rows"] if "energy" in row}
        table.append([
            found["problem"]["name"],
            *(f"{counted[name]['joules_per_call']:.2f} J, {counted[name]['sustained_tflops']:.0f}"
              if name in counted else "-" for name in COUNTED),
        ])  # fmt: skip
    return table


# ---- where the time goes -------------------------------------------------------------------------


def components(record: Record) -> list[str]:
    """Time of each part alone, the time saved without it, and their overlap."""
    lines = [
        "*Alone* is the time of the kernel without the other two parts, less its time without all",
        "three, when copies, barriers and stores remain. All are shares of the whole kernel's",
        "time.",
        "With an overlap of 1.5, the parts one after the other would take one and a half times as",
        "long as together. Below 1 they wait for each other, and take longer together than apart.",
        "P V includes rounding P to 16 bits. Patches of a kernel's source leave parts out, and",
        "[tuning/left_out](../experiments/tuning/left_out) has patches only for fa_tc.",
        "",
    ]
    table = []
    for found in record["problems"]:
        if "parts" not in found:
            continue
        parts, whole = found["parts"], found["rows"][0]["seconds"]
        table.append([
            found["problem"]["name"], found["form"], format_seconds(whole),
            *(f"{parts['alone'][p]:.2f} / {parts['saved'][p]:.2f}" for p in breakdown.PARTS),
            f"{parts['copies']:.2f}", f"{parts['overlap']:.2f}",
        ])  # fmt: skip
    names = [f"{breakdown.NAMES[p]}: alone / saved" for p in breakdown.PARTS]
    return [*lines, *markdown(["problem", "form", "whole", *names, "copies", "overlap"], table)]


def critical_path(record: Record) -> list[str]:
    """The part for which the whole waits, by the time saved without it."""
    lines = [
        "The part whose removal saves most time is on the critical path. A part that is long alone",
        "and saves little is hidden behind the others. A part that saves more time than it takes",
        "alone is not hidden: others wait for it.",
        "",
    ]
    table = []
    for found in record["problems"]:
        if "parts" not in found:
            continue
        saved, alone = found["parts"]["saved"], found["parts"]["alone"]
        first = max(saved, key=lambda part: saved[part])
        hidden = [
            f"{breakdown.NAMES[part]}, {format_share(alone[part])} alone and "
            f"{format_share(saved[part])} saved"
            for part in sorted(alone, key=lambda part: saved[part] - alone[part])
            if alone[part] > saved[part]
        ]
        table.append([
            found["problem"]["name"], found["form"],
            f"{breakdown.NAMES[first]}, {format_share(saved[first])}", *(hidden or ["none"])[:1],
        ])  # fmt: skip
    return [*lines, *markdown(["problem", "form", "gains most without", "best hidden"], table)]


# ---- memory --------------------------------------------------------------------------------------


def footprint(record: Record) -> list[str]:
    """Memory that a call takes from the pool, beside the memory that its plan states."""
    lines = [
        "Bytes that the memory pool grows by over one call, O among them, beside what",
        "`cupyattn.plan` states beforehand: workspace and O. A pool that still holds free memory",
        "of earlier calls grows by less, or not at all. *All scores* is what a matrix S in 16 bits",
        "would take.",
        "",
    ]
    table = []
    for found in record["problems"]:
        problem = found["problem"]
        scores = 2 * problem["batch"] * problem["heads"] * problem["length"] ** 2
        for row in found["rows"]:
            if "pool_bytes" not in row:
                continue
            stated = row["workspace_bytes"] + row["output_bytes"]
            table.append([
                f"{problem['heads']} x {problem['length']:,}", row["variant"],
                format_bytes(row["pool_bytes"]), format_bytes(stated),
                format_bytes(row["workspace_bytes"]), format_bytes(scores),
            ])  # fmt: skip
    return [
        *lines,
        *markdown(["heads x length", "", "pool", "stated", "workspace", "all scores"], table),
    ]


def bandwidth_of_decode(decode: Record) -> list[str]:
    """Bytes of K and V per second if few queries attend many keys."""
    lines = [
        "Bytes of K and V per second of a prepared call with few queries and many keys. The unit",
        "is the bytes that a copy of K and V reads and writes per second in the same rounds.",
        "",
    ]
    table = []
    for row in decode["problems"]:
        if "fa_tc" not in row["seconds"]:
            continue
        moved = row["kv_bytes"] / row["seconds"]["fa_tc"]
        table.append([
            f"{row['batch']} x {row['heads_kv']} x {row['len_kv']:,}, {row['head_dim']}",
            f"{row['group']} x {row['len_q']}", format_bytes(row["kv_bytes"]),
            format_seconds(row["seconds"]["fa_tc"]), f"{moved / 1e12:.2f} TB/s",
            format_share(row["share of copy"]["fa_tc"][0]),
        ])  # fmt: skip
    header = ["batch x key heads x keys, head_dim", "query heads x rows", "K and V", "time"]
    return [*lines, *markdown([*header, "rate", "of a copy"], table)]


def bandwidth_of_quantising(quantise: Record) -> list[str]:
    """Bytes per second of quantising, beside a copy."""
    table = [
        [
            row["mode"], f"{row['batch']} x {row['heads']} x {row['length']:,}, {row['head_dim']}",
            format_bytes(row["bytes"]), format_seconds(row["seconds"]),
            f"{row['bytes'] / row['seconds'] / 1e12:.2f} TB/s",
            format_share(row["share of copy"][0]),
        ]
        for row in quantise["rows"]
    ]  # fmt: skip
    header = ["mode", "batch x heads x length, head_dim", "bytes", "time", "rate", "of a copy"]
    return [
        "Quantising Q, K and V: bytes that it must read and write, per second.",
        "",
        *markdown(header, table),
    ]


def bank_conflicts(record: Record) -> list[str]:
    """Passes of shared memory and conflicts, by the interpreter and by the device."""
    (found,) = record["problems"]
    lines = [
        "Passes of loads and stores through shared memory, and the share caused by bank conflicts.",
        "The interpreter counts them in the PTX, Nsight Compute on the device.",
        "DRAM is the traffic of the call with cold caches. Attention of this shape moves at least",
        f"{format_bytes(found['least_bytes'])}, but results may still be in the L2 cache",
        "when a kernel ends. Quantising is listed with the rung.",
        "",
    ]
    header = ["", "kernel", "passes", "conflicts", "device: passes", "conflicts", "DRAM"]
    table = [[a, name, *rest] for a, _, name, *rest, _ in counters.table(found)]
    return [*lines, *markdown(header, table)]


def busy_pipes(record: Record) -> list[str]:
    """Use of the units of a multiprocessor."""
    (found,) = record["problems"]
    metrics = [
        metric for metric in counters.BUSY
        if any(metric in kernel for row in found["rows"] for kernel in row.get("device", ()))
    ]  # fmt: skip
    table = [
        [counters.called(row["rung"], row["form"]), kernel["kernel"],
         *(f"{kernel[m]:.0f} %" if m in kernel else "-" for m in metrics)]
        for row in found["rows"]
        for kernel in row.get("device", ())
    ]  # fmt: skip
    names = [metric.split(".")[0].partition("__")[2].replace("_", " ") for metric in metrics]
    text = "Use of each unit, as a share of its sustained rate."
    return [text, "", *markdown(["", "kernel", *names], table)]


# ---- energy, scaling, long sequences -------------------------------------------------------------


def format_joules(joules: float) -> str:
    """Return energy as people read it.

    Examples
    --------
    >>> format_joules(31.54), format_joules(0.5959)
    ('31.5 J', '596 mJ')
    """
    return f"{joules:.3g} J" if joules >= 1 else f"{1e3 * joules:.3g} mJ"


def energy(record: Record) -> list[str]:
    """Joules of a call and operations per watt."""
    idle = record["idle"]["watts"]
    lines = [
        f"By the device's own counter, over windows of {record['window_seconds']:g} s or more of",
        f"nothing but the call. At rest the device draws {idle:.0f} W; *above rest* leaves that",
        "out.",
        "",
    ]
    table = []
    for found in record["problems"]:
        problem = found["problem"]
        for row in found["rows"]:
            if "watts" in row:
                table.append([
                    f"{problem['batch']} x {problem['heads']} x {problem['length']:,}",
                    row["variant"], format_joules(row["joules_per_call"]),
                    format_joules(row["joules_above_idle"]), f"{row['watts']:.0f}",
                    f"{row['gflops_per_watt']:.0f}",
                    f"{row['clocks'].get('sm_clock_mhz', 0):.0f}",
                ])  # fmt: skip
    header = ["batch x heads x length", "", "a call", "above rest", "W", "GFLOP/s per W", "SM MHz"]
    return [*lines, *markdown(header, table)]


def scaling(record: Record) -> list[str]:
    """Several devices beside one, a line for each way; weak scaling is by batch entries."""
    ways: dict[tuple[str, ...], list[Record]] = {}
    for row in record["rows"]:
        if row["ranks"] > 1 and row.get("samples") and "share" in row:
            axis = "weak" if row["axis"] == "batch" else "strong"
            ways.setdefault((axis, row["name"], str(row["ranks"])), []).append(row)
    table = [
        [*way, str(len(rows)), *(f"{range_of([100 * row[key] for row in rows], '{:.0f}')} %"
                                 for key in ("share", "predicted_share"))]
        for way, rows in ways.items()
    ]  # fmt: skip
    header = ["scaling", "way", "devices", "problems", "of so many times one", "on paper"]
    return [
        "The speed of several devices, as a share of so many times one;",
        "[DISTRIBUTED.md](DISTRIBUTED.md#predicted-and-measured-cost) has every problem.",
        "",
        *markdown(header, table),
    ]


def long_sequences(record: Record) -> list[str]:
    """Time and rate from a thousand tokens to a million."""
    table = []
    for found in record["problems"]:
        problem, rows = found["problem"], rows_of(found)
        table.append([
            f"{problem['length']:,}", str(problem["heads"]),
            *(format_seconds(rows[n]["seconds"]) if "seconds" in rows.get(n, {}) else "-"
              for n in ("fa_tc", "fa_int8", CUDNN)),
            *(rate(rows.get(n)) for n in ("fa_tc", "fa_int8", CUDNN)),
        ])  # fmt: skip
    names = ["fa_tc", "fa_int8", "cuDNN"]
    header = ["length", "heads", *names, *(f"{name}, TFLOP/s" for name in names)]
    return markdown(header, table)


def diffusion(gains: Record) -> list[str]:
    """Gain of the ways of diffusion over the plain call, a line for each way and mode."""
    ways: dict[tuple[str, ...], list[float]] = {}
    for row in gains["rows"]:
        if "speed_ratio" in row:
            way = row["way"], row["mode"], row["against"]
            ways.setdefault(way, []).append(row["speed_ratio"][0])
    table = [
        [*way, str(len(ratios)), f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
        for way, ratios in ways.items()
    ]
    return [
        "Speed beside the plain way in the same rounds;",
        "[DIFFUSION.md](DIFFUSION.md#measured-gains) has every shape.",
        "",
        *markdown(["way", "mode", "against", "shapes", "least", "most"], table),
    ]


# ---- ablations -----------------------------------------------------------------------------------


def tile_choices(*sweeps: Record) -> list[str]:
    """The library's tiles beside the fastest others."""
    lines = ["The library's tiles beside the fastest others of a sweep, in the same rounds.", ""]
    table = []
    for sweep in sweeps:
        for found in sweep["problems"]:
            own, *others = (row for row in found["rows"] if "seconds" in row)
            best = min(others, key=lambda row: float(row["seconds"]))
            table.append([
                own["rung"], called(sweep["arch"]), found["problem"]["name"], str(len(others)),
                format_seconds(own["seconds"]), best["variant"].partition(" ")[2],
                format_seconds(best["seconds"]),
            ])  # fmt: skip
    header = ["rung", "form", "problem", "others", "own tiles", "fastest other", "its time"]
    return [*lines, *markdown(header, table)]


def arithmetic(record: Record) -> list[str]:
    """Every choice of INT8 arithmetic: error and time."""
    table = [
        [
            found["problem"]["distribution"], row["variant"],
            f"{row['judgement']['relative_error']:.2e}", format_ratio(row["judgement"]["j2"]),
            "-" if row["judgement"]["j3"] is None else format_ratio(row["judgement"]["j3"]),
            format_seconds(row["seconds"]) if "seconds" in row else "-",
            interval(row["speed_ratio"]) if row.get("speed_ratio") else "-",
        ]
        for found in record["problems"]
        for row in precision_ablation.rows_of(found)
        if row["judgement"] is not None
    ]  # fmt: skip
    header = ["input", "choice", "rel. error", "J2", "J3", "time", "speed beside the default"]
    return markdown(header, table)


#: The diary of measurements, lost trials too.
NOTEBOOK = RESULTS / "NOTES.md"


def tried() -> list[str]:
    """Return the table of trials in kernels from the notebook."""
    text = NOTEBOOK.read_text(encoding="utf-8")
    section = text.split("\n## What was tried in the kernels\n")[1].split("\n## ")[0]
    lines = section.split("\n\n")[1].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return [
        "A ratio is the speed relative to the kernel that ships: below 1 the idea lost.",
        "[NOTES.md](../experiments/results/NOTES.md#what-was-tried-in-the-kernels) has more.",
        "",
        *markdown(header, rows),
    ]


def features(feature_costs: Record) -> list[str]:
    """Link to the cost of every feature."""
    features = {row["feature"] for found in feature_costs["problems"] for row in found["rows"]}
    return [
        f"[FEATURES.md](FEATURES.md) has the time of each of {len(features)} features on each rung,"
        " beside the plain call."
    ]


def quality(dit_quality: Record, dit_memory: Record) -> list[str]:
    """Effect of INT8 attention on images."""
    table = [
        [
            row["mode"],
            "-" if row.get("psnr to 16-bit") is None else interval(row["psnr to 16-bit"]),
            interval(row["frechet"]), format_bytes(dit_memory["peak_bytes"][row["mode"]]),
        ]
        for row in dit_quality["rows"]
    ]  # fmt: skip
    header = ["mode", "PSNR to 16 bits, dB", "Fréchet distance to real crops", "memory"]
    return [
        "A diffusion transformer trained on our own kernels; [QUALITY.md](QUALITY.md) says how.",
        f"*Memory* is the peak in sampling {dit_memory['images']} images, without",
        "the weights.",
        "",
        *markdown(header, table),
    ]


PARTS = (
    Part("The ladder", ("ladder",), rungs,
         (("book_ladder", "Rate of every rung and of the peers, a bar each"),
          ("book_pareto", "Relative error against time of every rung and peer"),
          ("book_errors", "Largest error of every rung as a share of its bound"))),
    Part("Latency and throughput by length", ("peers",), by_length,
         (("book_lengths", "TFLOP/s by length beside cuDNN and FlashAttention"),)),
    Part("8 bits by length", ("peers_int8",), in_8_bits),
    Part("8 bits by distribution", ("accuracy_int8",), errors_by_distribution),
    Part("INT8 linear layers", ("int8_layers",), linear_layers),
    Part("Shapes of diffusion models", ("diffusion_shapes",), shapes),
    Part("Gradients", ("backward", "energy_backward", "backward_scores"), gradients),
    Part("Components: Q K^T, softmax, P V by leaving one out", ("breakdown",), components),
    Part("Critical path", ("breakdown",), critical_path),
    Part("Memory footprint", ("long_sequences",), footprint),
    Part("Bandwidth: a few queries", ("decode",), bandwidth_of_decode),
    Part("Bandwidth: quantising", ("quantise",), bandwidth_of_quantising),
    Part("Bank conflicts and bytes of DRAM", ("counters",), bank_conflicts),
    Part("Busy units", ("counters",), busy_pipes),
    Part("Energy", ("energy",), energy),
    Part("Weak and strong scaling", ("scaling",), scaling),
    Part("Very long sequences", ("long_sequences",), long_sequences),
    Part("What diffusion's ways win", ("diffusion_gains",), diffusion),
    Part("Ablation: INT8 arithmetic", ("precision_ablation",), arithmetic,
         (("book_precision", "Error against time of every choice of INT8 arithmetic"),)),
    Part("Ablation: tiles", ("tile_sweep_fa_tc", "tile_sweep_fa_int8"), tile_choices),
    Part("Ablation: what was tried and lost", (), tried),
    Part("Ablation: features", ("feature_costs",), features),
    Part("Quality of images", ("dit_quality", "dit_memory"), quality,
         (("book_timesteps", "Error of INT8 attention by timestep and source of scales"),)),
)  # fmt: skip
