"""The parts of docs/PERFORMANCE.md on 8-bit kernels, ours and others': rates and errors."""

from __future__ import annotations

import itertools

from cupyattn.measure.words import format_bytes, format_seconds, format_share
from cupyattn.quant.blocks import STRATEGIES
from docs.performance_tables import Record, interval, rate, rows_of
from experiments._harness.others8 import BY_TORCH, GIVEN, SAGE_2
from experiments._harness.others_linear import COMFY
from experiments._harness.recording import markdown
from experiments.speed import peers_int8
from experiments.speed.int8_layers import BF16, INT_MM


def in_8_bits(peers_int8: Record) -> list[str]:
    """Rate and error of fa_int8 beside 8-bit kernels of other libraries."""
    names: dict[str, None] = {}
    for found in peers_int8["problems"]:
        names |= dict.fromkeys(row["variant"] for row in found["rows"])
    lines = [
        "TFLOP/s of all kernels of a call, and in brackets the relative error of its result.",
        "*Codes given* leaves quantising out; elsewhere it is part of the time.",
    ]
    if not {SAGE_2, f"{SAGE_2}{GIVEN}"} & names.keys():
        lines.append(
            f"{SAGE_2} is not among them: PyPI has version 1 alone, and version 2 is compiled from"
            " its sources."
        )
    else:
        lines.append(
            f"{SAGE_2} is compiled from its sources, with its launches on torch's current stream,"
            " for graphs ([how](../experiments/README.md))."
        )
    if any("device" in found for found in peers_int8["problems"]):
        lines.append(
            "Shapes behind which a device stands were measured on that one: compare within a row."
        )
    if any(found.get("in_graphs") for found in peers_int8["problems"]):
        lines.append(
            "*In graphs*: short calls, timed as CUDA graphs, ours and theirs. What Python takes for"
            " them is left out; it is more than their kernels take where operands are cast first."
        )
    ordered = sorted(peers_int8["problems"], key=_place)
    for head_dim, group in itertools.groupby(ordered, lambda found: found["problem"]["head_dim"]):
        some = list(group)
        timed = [n for n in names if any("tflops" in rows_of(found).get(n, {}) for found in some)]
        table = [[_shape(found), *(_rate_and_error(found, n) for n in timed)] for found in some]
        lines += ["", f"**head_dim {head_dim}**", ""]
        lines += markdown(["batch x heads x length", *timed], table)
    return lines


def _place(found: Record) -> tuple[int, ...]:
    """Return where a problem stands: by head_dim, keys as many as queries first, by length."""
    problem = found["problem"]
    return (
        problem["head_dim"], bool(problem["length_kv"]), problem["causal"], problem["length"],
        -problem["batch"],
    )  # fmt: skip


def _shape(found: Record) -> str:
    """Return what to call a problem among others of its head_dim."""
    problem = found["problem"]
    parts = ["{batch} x {heads} x {length:,}".format(**problem)]
    parts += ["causal"] if problem["causal"] else []
    parts += [f"{problem['length_kv']} keys"] if problem["length_kv"] else []
    parts += ["in graphs"] if found.get("in_graphs") else []
    parts += [found["device"].split()[1]] if "device" in found else []
    return ", ".join(parts)


def _rate_and_error(found: Record, name: str) -> str:
    """Return a rate, and in brackets an error; "-" where there was no time."""
    row = rows_of(found).get(name)
    if not row or "tflops" not in row:
        return "-"
    return f"{rate(row)} ({row['judgement']['relative_error']:.1e})"


def errors_by_distribution(accuracy_int8: Record) -> list[str]:
    """Relative error of every 8-bit kernel by what inputs are drawn from."""
    names: dict[str, None] = {}
    for one in accuracy_int8["compared"]:
        names |= dict.fromkeys(one["errors"])
    names = {name: None for name in names if not name.endswith((GIVEN, BY_TORCH))}
    shape = "{batch} x {heads} heads, head_dim {head_dim}".format(
        **accuracy_int8["problems"][0]["problem"]
    )
    lines = [
        f"Relative error of the result against float64, {shape}. *outlier* is N(0, 1) with",
        "N(0, 100) added to 0.1 % of the entries of Q, K and V. *key-bias* and *value-bias* have",
        "channels with means of N(0, 4), and *tripled* has Q and K times three. Outliers of V",
        "increase the error of scales for whole channels; scales by tile limit it.",
        "",
    ]
    table = []
    for found, one in zip(accuracy_int8["problems"], accuracy_int8["compared"], strict=True):
        problem = found["problem"]
        errors = [f"{one['errors'][n]:.1e}" if n in one["errors"] else "-" for n in names]
        table.append([problem["distribution"], f"{problem['length']:,}", *errors])
    table.sort(key=lambda cells: peers_int8.DISTRIBUTIONS.index(cells[0]))
    return [*lines, *markdown(["inputs", "keys", *names], table)]


def linear_layers(int8_layers: Record) -> list[str]:
    """Time of every INT8 linear layer beside BF16 and comfy-kitchen, and of the product alone."""
    ours = STRATEGIES[::-1]
    found = {name for row in int8_layers["rows"] for name in row.get("ratios", {})}
    compared = [(s, other) for other in (BF16, COMFY) for s in ours if f"{s} over {other}" in found]
    lines = [
        "A call of `Int8Linear` in torch, with a scale for each row and column (*channel*) or for",
        "blocks of 128 x 128. The call quantises x, and its time includes Python's.",
        f"Ratios compare its speed with `torch.nn.functional.linear` in BF16 and {COMFY}'s",
        "`int8_linear`, which gets the codes and scales of *channel*.",
    ]
    refused = [why for row in int8_layers["rows"] for why in row.get("refused", {}).values()]
    if refused:
        lines.append(f"Missing: {'; '.join(dict.fromkeys(refused))}.")
    elif not any(other == COMFY for _, other in compared):
        lines.append(f"{COMFY} took no part in this record.")
    header = ["layer", "m x n x k", *ours, BF16, *(f"{s}, x {other}" for s, other in compared)]
    table = [
        [
            row["label"], "{m:,} x {n:,} x {k:,}".format(**row),
            *(format_seconds(row["seconds"][name]) for name in (*ours, BF16)),
            *(interval(row["ratios"][name]) if (name := f"{s} over {other}") in row["ratios"]
              else "-" for s, other in compared),
        ]
        for row in int8_layers["rows"]
        if "seconds" in row
    ]  # fmt: skip
    means: dict[str, list[str]] = {}
    for s, other in compared:
        if summary := int8_layers["summary"].get(f"{s} over {other}"):
            shown = f"{s} {summary['geometric mean']:.2f} ({summary['least']:.2f})"
            means.setdefault(other, []).append(shown)
    over = " ".join(f"Over {other}: {', '.join(some)}." for other, some in means.items())
    host = [
        f"{name} {format_seconds(seconds[0])}"
        for name, seconds in int8_layers.get("host", {}).get("seconds", {}).items()
    ]
    of_host = ["", f"The host's time for a call, 16 rows: {', '.join(host)}."] if host else []
    product = int8_layers["product"]
    rates = ", ".join(f"{name} {tops:,.0f}" for name, tops in product["tops"].items())
    beside = product["ratios"][f"channel over {INT_MM}"]
    return [
        *lines, "", *markdown(header, table), "",
        f"Geometric mean of each ratio, with the least in brackets. {over}",
        "",
        "The product of codes alone, {m:,} x {n:,} x {k:,}, in TOP/s: ".format(**product)
        + f"{rates}. The speed of channel is {interval(beside)} of `{INT_MM}`. Just after the "
        + "last round, {sm_clock_mhz:,.0f} MHz and {power_w:.0f} W were read.".format(
            **product["clocks"]
        ),
        *of_host,
    ]  # fmt: skip


def large_batches(record: Record) -> str:
    """Times of 512 heads by length, in one cell of the table of claims."""
    said = []
    for problem in record["problems"]:
        rows = rows_of(problem)
        times = (format_seconds(rows[name]["seconds"]) for name in ("fa_tc", peers_int8.BALANCED))
        said.append(f"{' and '.join(times)} at {problem['problem']['length']:,}")
    return f"fa_tc and {peers_int8.BALANCED}: {', '.join(said)}"


def handed_over(record: Record) -> str:
    """Bytes of operands where projections hand over codes, in one such cell."""
    rows = rows_of(record["problems"][-1])
    whole = rows["fa_tc"]["operand_bytes"]
    shares = [
        f"{format_share(1 - rows[f'{name}, codes given']['operand_bytes'] / whole)} fewer in mode "
        f"{name.rpartition(' ')[2]}"
        for name in (peers_int8.BALANCED, peers_int8.AGGRESSIVE)
    ]
    return f"of {format_bytes(whole)} of Q, K and V in 16 bits {', '.join(shares)}"


def linear_frechet(record: Record) -> str:
    """Fréchet distances with INT8 linear layers, in one such cell."""
    rows = {row["mode"]: row for row in record["rows"]}
    full = rows["16-bit"]["frechet"][0]
    others = [
        "{} {:+.2f} % [{:.2f}, {:.2f}]".format(
            name, *(100 * x / full for x in row["frechet over 16-bit"])
        )
        for name, row in rows.items()
        if name not in ("32-bit", "16-bit")
    ]
    return (
        f"Fréchet distance to real crops {full:.2f} in 16 bits, and with 95 % intervals "
        f"{', '.join(others)}"
    )
