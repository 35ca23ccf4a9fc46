"""What the founding notes say of performance, and what was measured: a table of PERFORMANCE.md.

The notes speak of an A100 and of kernels that were to be written; everything measured here is of
the device that the records name. A line whose records are missing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cupyattn.measure import format_bytes, format_seconds, format_share
from docs.performance_parts import range_of, rows_of
from experiments.breakdown import NAMES, PARTS
from experiments.others import CUDNN, FLASH_2, geometric_mean

Record = Mapping[str, Any]
INT8, CODES = "fa_int8 balanced", "fa_int8 balanced, codes given"


@dataclass(frozen=True)
class Claim:
    """One figure of the notes.

    Parameters
    ----------
    part : str
        Of the notes.
    says : str
    needs : tuple of str
        Names of records.
    measured : callable
        ``measured(*records)``: what is there instead, in one cell of a table.
    """

    part: str
    says: str
    needs: tuple[str, ...]
    measured: Callable[..., str]


def _ratios(record: Record, name: str, over: str | None = None) -> list[float]:
    """Return how much faster a row is than fa_tc, or than another row, in every problem."""
    found = []
    for problem in record["problems"]:
        rows = rows_of(problem)
        if "seconds" not in rows.get(name, {}):
            continue
        if over is None:
            found.append(rows[name]["speed_ratio"][0])
        elif "seconds" in rows.get(over, {}):
            found.append(rows[over]["seconds"] / rows[name]["seconds"])
    return found


def _int8(record: Record) -> str:
    whole, codes = (range_of(_ratios(record, name)) for name in (INT8, CODES))
    return f"{whole} times our own 16-bit fa_tc, quantising included; {codes} with codes given"


def _int8_by_length(record: Record) -> str:
    ratios = {}
    for found in record["problems"]:
        problem, row = found["problem"], rows_of(found)[INT8]
        square = not problem["causal"] and not problem["length_kv"]
        if problem["head_dim"] == 128 and square and "speed_ratio" in row:
            ratios[problem["length"]] = row["speed_ratio"][0]
    said = (f"{ratio:.2f} at {length:,}" for length, ratio in sorted(ratios.items()))
    return f"fa_int8 beside fa_tc: {', '.join(said)}"


def _flash_2(record: Record) -> str:
    return (
        f"fa_int8 {range_of(_ratios(record, 'fa_int8', FLASH_2))} and fa_tc "
        f"{range_of(_ratios(record, 'fa_tc', FLASH_2))} times FlashAttention-2 in one run; fa_int8 "
        f"{range_of(_ratios(record, 'fa_int8', CUDNN))} times cuDNN in 16 bits"
    )


def _latency(record: Record) -> str:
    found = next(p for p in record["problems"] if record["models"][p["problem"]["name"]]
                 == "batch 16")  # fmt: skip
    rows = rows_of(found)
    return (
        f"{format_seconds(rows['fa_tc']['seconds'])} for fa_tc, "
        f"{format_seconds(rows[FLASH_2]['seconds'])} for FlashAttention-2 and "
        f"{format_seconds(rows[CUDNN]['seconds'])} for cuDNN; the notes' 7.2 ms would be "
        f"{found['rows'][0]['operations'] / 7.2e-3 / 1e12:.0f} TFLOP/s, twice an A100's peak"
    )


def _parts(record: Record) -> str:
    found = next(p for p in record["problems"] if p["form"] == "sm90" and "parts" in p)
    alone = found["parts"]["alone"]
    said = ", ".join(f"{NAMES[part]} {format_share(alone[part])}" for part in PARTS)
    return f"alone, of the whole 16-bit kernel: {said}; overlap {found['parts']['overlap']:.2f}"


def _bottleneck(record: Record) -> str:
    found = next(p for p in record["problems"] if p["form"] == "sm90" and "parts" in p)
    saved = found["parts"]["saved"]
    said = ", ".join(f"{NAMES[part]} {format_share(saved[part])}" for part in PARTS)
    return f"time that the Hopper form loses without it: {said}"


def _footprint(record: Record) -> str:
    found = next(p for p in record["problems"] if p["problem"]["length"] == 4096)
    rows = rows_of(found)
    taken = {n: rows[n]["pool_bytes"] for n in ("fa_tc", "fa_int8")}
    return (
        f"beside Q, K and V (16 heads of 4,096): fa_tc {format_bytes(taken['fa_tc'])}, fa_int8 "
        f"{format_bytes(taken['fa_int8'])}: codes are made beside what the caller has, so INT8 "
        "takes more, not less"
    )


def _pool(record: Record) -> str:
    peak = record["peak_bytes"]
    less = 1 - peak["INT8, dynamic"] / peak["16-bit"]
    return f"{format_share(less)} less than 16 bits at the peak of sampling a small transformer"


def _bytes(record: Record) -> str:
    (found,) = record["problems"]
    least = found["least_bytes"]
    said = []
    for row in found["rows"]:
        moved = sum(sum(k.get(f"dram__bytes_{w}.sum", 0.0) for w in ("read", "write"))
                    for k in row["device"])  # fmt: skip
        if row["form"] == "sm90":
            said.append(f"{row['rung']} {moved / least:.2f}")
    return f"DRAM bytes as a multiple of Q, K, V and O once, cold: {', '.join(said)}"


def _conflicts(record: Record) -> str:
    (found,) = record["problems"]
    of_form = {(row["rung"], row["form"]): row for row in found["rows"]}
    kernel = of_form["fa_tc", "portable"]["interpreter"]["attn_fa_tc"]
    return (
        f"a swizzle in place of padding: {kernel['conflicts']} of {kernel['passes']:,} passes of "
        "fa_tc are conflicts, and no byte is spent"
    )


def _peak(record: Record) -> str:
    best = {name: max(row["tops"].get(name, 0.0) for row in record["rows"])
            for name in ("torch FP16", "int8_gemm")}  # fmt: skip
    return (
        f"the fastest products seen: {best['torch FP16']:.0f} TFLOP/s in FP16 (torch), "
        f"{best['int8_gemm']:.0f} TOP/s in INT8, scales applied"
    )


def _memory_rate(record: Record) -> str:
    rates = [2 * row["kv_bytes"] / row["seconds"][row["copy"]] for row in record["problems"]]
    return f"{max(rates) / 1e12:.2f} TB/s, a copy that reads and writes"


def _quality(record: Record) -> str:
    psnr = {row["mode"]: row.get("psnr to 16-bit") for row in record["rows"]}
    return (
        "PSNR of images to those of 16 bits: "
        + ", ".join(
            f"{name} {psnr[name][0]:.1f} dB"
            for name in ("INT8, one static scale", "INT8, static by timestep", "INT8, dynamic")
        )
        + "; of a small transformer of our own, from the same noise"
    )


def _frechet(record: Record) -> str:
    rows = {row["mode"]: row["frechet"][0] for row in record["rows"]}
    return (
        f"Fréchet distance to real crops {rows['16-bit']:.2f} in 16 bits, "
        f"{rows['INT8, dynamic']:.2f} as INT8, {rows['INT4']:.2f} as INT4"
    )


def _energy(record: Record) -> str:
    said = []
    for found in record["problems"]:
        rows = rows_of(found)
        for name in ("fa_tc", "fa_int8"):
            if "watts" in rows.get(name, {}):
                row = rows[name]
                said.append(
                    f"{name} at {found['problem']['length']:,}: {row['gflops_per_watt']:.0f} "
                    f"at {row['watts']:.0f} W"
                )
    return "GFLOP/s per W: " + "; ".join(said)


def _intensity(record: Record) -> str:
    found = next(p for p in record["problems"] if p["problem"]["length"] == 4096
                 and p["problem"]["head_dim"] == 128 and not p["problem"]["causal"])  # fmt: skip
    problem = found["problem"]
    least = 8 * problem["batch"] * problem["heads"] * problem["length"] * problem["head_dim"]
    row = rows_of(found)["fa_tc"]
    return (
        f"{row['operations'] / least:,.0f} FLOP per byte that must move: attention of this length "
        f"is bound by arithmetic, and fa_tc reaches {row['tflops']:.0f} TFLOP/s"
    )


def _scaling(record: Record, axis: str) -> str:
    rows = [r for r in record["rows"] if (r["axis"] == "batch") == (axis == "weak")
            and r["ranks"] > 1 and "share" in r]  # fmt: skip
    by_ranks: dict[int, list[float]] = {}
    for row in rows:
        by_ranks.setdefault(row["ranks"], []).append(row["share"])
    return "of as many times one device: " + ", ".join(
        f"{ranks} devices {range_of([100 * x for x in shares], '{:.0f}')} %"
        for ranks, shares in sorted(by_ranks.items())
    )


def _long(record: Record) -> str:
    found = next(p for p in record["problems"] if p["problem"]["length"] == 32_760)
    row = rows_of(found)["fa_tc"]
    each = row["seconds"] / found["problem"]["heads"]
    return f"{format_seconds(each)} a head in 16 bits, {format_seconds(32 * each)} for 32"


def _codes(record: Record) -> str:
    said = [
        f"{format_share(row['codes'])} of codes and {format_share(row['scores'])} of scores "
        f"({row['distribution']} data, a scale for each {row['granularity']})"
        for row in record["codes"]
    ]
    return "; ".join(said)


def _timesteps(record: Record) -> str:
    said = []
    for model in dict.fromkeys(row["activations"] for row in record["rows"]):
        mine = [row for row in record["rows"] if row["activations"] == model]
        worst = {
            name: max((row["error"] for row in mine if row["scales"] == name), default=0.0)
            for name in ("uniform static", "static by bin", "dynamic")
        }
        said.append(f"{model}: {', '.join(f'{n} {x:.2g}' for n, x in worst.items())}")
    return "largest relative error over the steps; " + "; ".join(said)


def _way(way: str) -> Callable[[Record], str]:
    def measured(record: Record) -> str:
        rows = [row for row in record["rows"] if row["way"] == way and "speed_ratio" in row]
        errors = [r["error against all keys"] for r in rows if "error against all keys" in r]
        lost = f", and {range_of(errors)} of relative error on random data" if errors else ""
        return f"{range_of([row['speed_ratio'][0] for row in rows])} times the plain way{lost}"

    return measured


def _sparse(record: Record) -> str:
    rows = [r for r in record["rows"] if "density" in r and "speed_ratio" in r]
    said = [f"{format_share(r['density'])} kept, {r['mode']}: {r['speed_ratio'][0]:.1f}"
            for r in rows]  # fmt: skip
    return f"block masks at 32,768 tokens, times dense: {'; '.join(said)}"


def _gemm(record: Record) -> str:
    ratios = [row["seconds"]["torch FP16"] / row["seconds"]["act_quant and int8_gemm"]
              for row in record["rows"] if row["m"] >= 1024
              and {"torch FP16", "act_quant and int8_gemm"} <= set(row["seconds"])]  # fmt: skip
    return (
        f"{range_of(ratios)} times torch's FP16 product, {geometric_mean(ratios):.2f} in the "
        "geometric mean, quantising of activations included (1,024 rows and more)"
    )


def _block(record: Record) -> str:
    said = []
    for row in record["rows"]:
        native, both = (row["ways"][n] for n in ("native", "both INT8"))
        less = 1 - both["weight_bytes"] / native["weight_bytes"]
        said.append(
            f"{row['model']} block: {native['seconds'] / both['seconds']:.2f} times as fast, "
            f"weights {format_share(less)} smaller"
        )
    return "; ".join(said)


CLAIMS = (
    Claim("summary", "1.7 to 2.2 times FP16 FlashAttention", ("peers_int8",), _int8),
    Claim("summary", "INT8 beats FlashAttention-2 by 68 %", ("ladder",), _flash_2),
    Claim("summary", "32 to 40 % less memory", ("dit_memory",), _pool),
    Claim("1.1", "Q and K as codes: 37 % fewer bytes read", ("counters",), _bytes),
    Claim("2.1", "312 TFLOP/s FP16 and 625 TOP/s INT8 to be had", ("gemm",), _peak),
    Claim("2.2", "memory moves 2 TB/s", ("decode",), _memory_rate),
    Claim("2.3", "rows padded by 8 bytes against 32-way conflicts", ("counters",), _conflicts),
    Claim("4.1", "batch 16, 32 heads of 4,096 x 128 in 7.2 ms, INT8 in 4.2", ("diffusion_shapes",),
          _latency),
    Claim("4.1", "INT8 from 1.1 times at 512 to 2.0 at 16,384", ("peers_int8",), _int8_by_length),
    Claim("4.2", "Q K^T 85, softmax 15, P V 72 TFLOP/s", ("breakdown",), _parts),
    Claim("4.3", "311 MB at the peak in FP16, 134 MB as INT8", ("long_sequences",), _footprint),
    Claim("4.4", "PSNR 31.8 dB uniform, 33.1 dB by timestep", ("dit_quality",), _quality),
    Claim("4.4", "FID 12.4 in FP16, 12.7 to 15.1 as INT8", ("dit_quality",), _frechet),
    Claim("4.5", "368 GFLOP/s per W in FP16, 671 as INT8", ("energy",), _energy),
    Claim("5.1", "110 FLOP per byte, so memory sets the ceiling", ("peers",), _intensity),
    Claim("5.2", "Q K^T is the bottleneck: 1,000 of 3,100 cycles of a tile", ("breakdown",),
          _bottleneck),
    Claim("6.1", "weak scaling 99 %", ("scaling",), lambda r: _scaling(r, "weak")),
    Claim("6.2", "strong scaling 99 % to four devices", ("scaling",),
          lambda r: _scaling(r, "strong")),
    Claim("6.3", "32,768 tokens: 1.6 ms a head, 50 ms for 32", ("diffusion_shapes",), _long),
    Claim("7.1", "0.4 % by rounding to codes, 4.5 % of scores", ("numerics_claims",), _codes),
    Claim("7.2", "one scale uses 0.002 % of the codes late; by timestep 85 %",
          ("timestep_ablation",), _timesteps),
    Claim("README", "both branches of guidance in one launch: 1.8 times", ("diffusion_gains",),
          _way("guidance in one launch")),
    Claim("README, 10.2", "a fifth of the keys pruned saves 20 to 40 %", ("diffusion_gains",),
          _way("20% of keys pruned")),
    Claim("README", "sparse attention makes long sequences linear", ("diffusion_gains",), _sparse),
    Claim("linear layers", "INT8 products 1.5 to 2 times", ("gemm",), _gemm),
    Claim("linear layers", "models 1.7 to 1.9 times as fast, 45 to 50 % smaller",
          ("diffusers_blocks",), _block),
)  # fmt: skip
