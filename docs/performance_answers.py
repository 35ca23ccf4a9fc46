"""Measurements that answer the founding notes' figures, each in one cell of a table.

Every function turns the records that `docs.performance_claims` names beside it into a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cupyattn.compiler.contracts import least_shared_bytes
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels import ladder
from cupyattn.kernels.tiles import Tiles
from cupyattn.measure.words import format_bytes, format_rate, format_seconds, format_share
from docs.performance_tables import range_of, rows_of
from experiments._harness.others import CUDNN, FLASH_2, geometric_mean
from experiments.speed.peers import TOKENS
from experiments.tuning.breakdown import NAMES, PARTS

Record = Mapping[str, Any]
INT8, CODES = "fa_int8 balanced", "fa_int8 balanced, codes given"


def _at(record: Record, length: int, head_dim: int = 128, **others: int) -> dict[str, Record]:
    """Return the rows of the problem of one length without a mask, by name."""
    wanted = {"length": length, "head_dim": head_dim, "causal": False, **others}
    return rows_of(next(p for p in record["problems"] if wanted.items() <= p["problem"].items()))


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


def int8_speed(ladder: Record, record: Record) -> str:
    whole, codes = (range_of(_ratios(record, name)) for name in (INT8, CODES))
    return (
        f"{range_of(_ratios(ladder, 'fa_int8', FLASH_2))} times FlashAttention-2, {whole} times "
        f"our own 16-bit fa_tc, quantising included; {codes} with codes given"
    )


def int8_by_length(record: Record) -> str:
    ratios = {}
    for found in record["problems"]:
        problem, row = found["problem"], rows_of(found)[INT8]
        square = not problem["causal"] and not problem["length_kv"]
        if problem["head_dim"] == 128 and square and "speed_ratio" in row:
            of_many = problem["batch"] * problem["length"] == TOKENS
            if of_many or problem["length"] not in ratios:
                ratios[problem["length"]] = row["speed_ratio"][0]
    said = (f"{ratio:.2f} at {length:,}" for length, ratio in sorted(ratios.items()))
    return f"{INT8} beside fa_tc: {', '.join(said)}"


def flash_2(record: Record) -> str:
    rows = _at(record, 4096)
    return (
        f"{rows[FLASH_2]['seconds'] / rows['fa_int8']['seconds']:.2f} times FlashAttention-2 at "
        f"4,096 and head_dim 128; over all, fa_int8 "
        f"{range_of(_ratios(record, 'fa_int8', FLASH_2))} and fa_tc "
        f"{range_of(_ratios(record, 'fa_tc', FLASH_2))} times FlashAttention-2 in one run; fa_int8 "
        f"{range_of(_ratios(record, 'fa_int8', CUDNN))} times cuDNN in 16 bits"
    )


def rates_at_4096(record: Record) -> str:
    rows = _at(record, 4096)
    said = ", ".join(f"{name} {format_rate(rows[name]['tflops'])}"
                     for name in ("fa_tc", "fa_int8", "fa_int8, codes given"))  # fmt: skip
    return f"TFLOP/s at 4,096: {said}; FlashAttention-2 {format_rate(rows[FLASH_2]['tflops'])}"


def step_time(record: Record) -> str:
    seconds = {row["mode"]: row["seconds of an image"][0] / record["steps"]
               for row in record["rows"]}  # fmt: skip
    return (
        f"{format_seconds(seconds['16-bit'])} in 16 bits and "
        f"{format_seconds(seconds['INT8, static by timestep'])} as INT8 for a step of an image, "
        f"{seconds['16-bit'] / seconds['INT8, static by timestep']:.2f} times as fast, of a small "
        "transformer of our own"
    )


def psnr_lost(record: Record) -> str:
    psnr = {row["mode"]: row.get("psnr to 32-bit") for row in record["rows"]}
    full, int8 = (psnr[name][0] for name in ("16-bit", "INT8, static by timestep"))
    return (
        f"{format_share(1 - int8 / full)}, from {full:.1f} to {int8:.1f} dB, both to images of 32 "
        "bits; the notes' own fall is of 8.6 %"
    )


def by_length(record: Record) -> str:
    said = []
    for length in (512, 1024, 2048, 4096, 8192, 16_384):
        rows = _at(record, length, batch=TOKENS // length, heads=16)
        times = " and ".join(format_seconds(rows[name]["seconds"]) for name in ("fa_tc", INT8))
        said.append(f"{times} at {length:,}")
    return (
        f"{TOKENS:,} tokens in all, of 16 heads, fa_tc and {INT8}: {', '.join(said)}. At one "
        "batch, as in the notes, work goes with the square of the length; their times go with the "
        "length"
    )


def _batch_16(shapes: Record) -> Record:
    """Return the problem of 32 heads of 4,096 at batch 16."""
    return next(p for p in shapes["problems"] if shapes["models"][p["problem"]["name"]]
                == "batch 16")  # fmt: skip


def _taken_apart(breakdown: Record) -> Record:
    """Return the problem whose parts were left out in turn in the Hopper form."""
    return next(p for p in breakdown["problems"] if p["form"] == "sm90" and "parts" in p)


def _analysis(checkpoints: Record) -> Record:
    """Return the sums of the made-up checkpoint."""
    totals: Record = next(row["totals"] for row in checkpoints["rows"] if row["step"] == "analyze")
    return totals


def _gain(record: Record, way: str, mode: str = "balanced") -> Record:
    """Return the row of a way of diffusion at batch 16, 32 heads of 4,096."""
    return next(row for row in record["rows"] if row["way"] == way and row["mode"] == mode
                and row.get("batch") == 16)  # fmt: skip


def adaptive(record: Record) -> str:
    seconds = _gain(record, "calibrated scales")["seconds"]
    return (
        f"{format_seconds(seconds['dynamic'])} with scales of its own for each call, "
        f"{format_seconds(seconds['way'])} with static ones by timestep (batch 16, 32 heads of "
        "4,096)"
    )


def guidance(record: Record) -> str:
    row = _gain(record, "guidance in one launch")
    seconds = row["seconds"]
    work = 2 * 4 * row["batch"] * row["heads"] * row["length"] ** 2 * 128
    return (
        f"{format_seconds(seconds['way'])} for both branches in one launch, "
        f"{format_seconds(seconds['two calls'])} in two (batch 16, 32 heads of 4,096, INT8): "
        f"{format_rate(work / seconds['way'] / 1e12)} TFLOP/s"
    )


def latency(record: Record, batches: Record) -> str:
    int8 = _at(batches, 4096)[INT8]["seconds"]
    found = _batch_16(record)
    rows = rows_of(found)
    return (
        f"{format_seconds(rows['fa_tc']['seconds'])} for fa_tc, {format_seconds(int8)} for {INT8} "
        f"in another run, {format_seconds(rows[FLASH_2]['seconds'])} for FlashAttention-2 and "
        f"{format_seconds(rows[CUDNN]['seconds'])} for cuDNN; the notes' 7.2 ms would be "
        f"{found['rows'][0]['operations'] / 7.2e-3 / 1e12:.0f} TFLOP/s, twice an A100's peak"
    )


def parts_alone(record: Record, ladder: Record) -> str:
    found = _taken_apart(record)
    alone, problem = found["parts"]["alone"], found["problem"]
    said = ", ".join(f"{NAMES[part]} {format_share(alone[part])}" for part in PARTS)
    seconds = {frozenset(row["left_out"]): row["seconds"] for row in found["rows"]}
    work = 4 * problem["batch"] * problem["heads"] * problem["length"] ** 2 * problem["head_dim"]
    rates = [work / 2 / seconds[frozenset(PARTS) - {part}] / 1e12 for part in ("scores", "output")]
    whole = work / seconds[frozenset()] / 1e12
    return (
        f"alone, of the whole 16-bit kernel: {said}; overlap {found['parts']['overlap']:.2f}. With "
        f"one product alone, its copies included, {format_rate(rates[0])} (Q K^T) and "
        f"{format_rate(rates[1])} (P V) TFLOP/s, the whole {format_rate(whole)}; fa_int8, whose "
        f"parts were not measured, {format_rate(_at(ladder, 4096)['fa_int8']['tflops'])}"
    )


def bottleneck(record: Record) -> str:
    found = _taken_apart(record)
    saved = found["parts"]["saved"]
    said = ", ".join(f"{NAMES[part]} {format_share(saved[part])}" for part in PARTS)
    return f"time that the Hopper form loses without it: {said}"


def footprint(record: Record) -> str:
    found = next(p for p in record["problems"] if p["problem"]["length"] == 4096)
    rows = rows_of(found)
    taken = {n: rows[n]["pool_bytes"] for n in ("fa_tc", "fa_int8")}
    return (
        f"beside Q, K and V (16 heads of 4,096): fa_tc {format_bytes(taken['fa_tc'])}, fa_int8 "
        f"{format_bytes(taken['fa_int8'])}: codes are made beside what the caller has, so INT8 "
        "takes more, not less"
    )


def workspace(record: Record) -> str:
    rows = _at(record, 4096)
    taken = {n: format_bytes(rows[n]["workspace_bytes"]) for n in ("fa_tc", "fa_int8")}
    return (
        f"none for the softmax nor for scores, which stay in registers. Of 16 heads fa_tc takes "
        f"{taken['fa_tc']}, partial results of a last wave of tiles, and fa_int8 "
        f"{taken['fa_int8']}, these and codes"
    )


def a_head(record: Record) -> str:
    taken = _at(record, 4096)["fa_int8"]["pool_bytes"]
    return f"{format_bytes(taken // 16)} a head of 4,096, O included"


def shared_memory(record: Record) -> str:
    said = {found["form"]: found["rows"][0]["shared_bytes"] for found in record["problems"]
            if found["problem"]["head_dim"] == 128}  # fmt: skip
    tiles = replace(ladder.lookup("fa_int8").default_tiles(128, "portable"), block_q=64,
                    block_kv=64)  # fmt: skip
    as_in_the_notes = _at_least("attn_fa_int8.cu", tiles, head_dim=128, vec=8, dtype=0)
    return (
        f"a block of fa_tc has {format_bytes(said['sm90'])} in its Hopper form, "
        f"{format_bytes(said['portable'])} in the portable one; one of fa_int8 with 64 rows and 64 "
        f"keys, as in the notes, {format_bytes(as_in_the_notes)} at least"
    )


def pool_peak(record: Record) -> str:
    peak = record["peak_bytes"]
    less = 1 - peak["INT8, dynamic"] / peak["16-bit"]
    return f"{format_share(less)} less than 16 bits at the peak of sampling a small transformer"


def bytes_moved(record: Record) -> str:
    (found,) = record["problems"]
    least = found["least_bytes"]
    said = []
    for row in found["rows"]:
        moved = sum(sum(k.get(f"dram__bytes_{w}.sum", 0.0) for w in ("read", "write"))
                    for k in row["device"])  # fmt: skip
        if row["form"] == "sm90":
            said.append(f"{row['rung']} {moved / least:.2f}")
    return f"DRAM bytes as a multiple of Q, K, V and O once, cold: {', '.join(said)}"


def conflicts(record: Record) -> str:
    (found,) = record["problems"]
    of_form = {(row["rung"], row["form"]): row for row in found["rows"]}
    kernel = of_form["fa_tc", "portable"]["interpreter"]["attn_fa_tc"]
    return (
        f"a swizzle in place of padding: {kernel['conflicts']} of {kernel['passes']:,} passes of "
        "fa_tc are conflicts, and no byte is spent"
    )


def fastest_products(gemm: Record, layers: Record) -> str:
    best = {name: max(row["tops"].get(name, 0.0) for row in gemm["rows"])
            for name in ("torch FP16", "int8_gemm")}  # fmt: skip
    return (
        f"the fastest products seen: {best['torch FP16']:,.0f} TFLOP/s in FP16 (torch), "
        f"{best['int8_gemm']:,.0f} TOP/s in INT8 with scales of blocks, "
        f"{layers['product']['tops']['channel']:,.0f} with scales of rows and columns"
    )


def of_peak(gemm: Record, layers: Record, ladder: Record, quantise: Record) -> str:
    own = _at(ladder, 4096)["fa_tc"]
    top = own["tflops"] / own["share"]
    fp16 = max(row["tops"].get("torch FP16", 0.0) for row in gemm["rows"])
    int8 = layers["product"]["tops"]["channel"]
    copies = [row["share of copy"][0] for row in quantise["rows"]]
    return (
        f"of what the units could do at the highest clock, which they do not hold: "
        f"{format_share(fp16 / top)} for the fastest product in FP16, "
        f"{format_share(int8 / (2 * top))} in INT8, "
        f"{format_share(own['share'])} for fa_tc; quantising moves {range_of(copies)} of the bytes "
        "of a copy"
    )


def memory_rate(record: Record) -> str:
    rates = [2 * row["kv_bytes"] / row["seconds"][row["copy"]] for row in record["problems"]]
    return f"{max(rates) / 1e12:.2f} TB/s, a copy that reads and writes"


def conflict_rate(record: Record) -> str:
    (found,) = record["problems"]
    said = []
    for row in found["rows"]:
        kernel = row["interpreter"].get(f"attn_{row['rung']}")
        if kernel and row["form"] == "portable" and row["rung"] in ("fa_warps", "fa_tc"):
            said.append(f"{row['rung']} {format_share(kernel['conflicts'] / kernel['passes'])}")
    return (
        f"passes that only conflicts cause: {', '.join(said)}. Bytes per second of shared memory "
        "were not measured; the notes' two figures are 6 times apart, not 9"
    )


def psnr(record: Record) -> str:
    psnr = {row["mode"]: row.get("psnr to 16-bit") for row in record["rows"]}
    return (
        "PSNR of images to those of 16 bits: "
        + ", ".join(
            f"{name} {psnr[name][0]:.1f} dB"
            for name in ("INT8, one static scale", "INT8, static by timestep", "INT8, dynamic",
                         "INT8, late steps in 16 bits", "INT4")
        )
        + "; of a small transformer of our own, from the same noise"
    )


def likeness(record: Record) -> str:
    ssim = {row["mode"]: row.get("ssim to 16-bit") for row in record["rows"]}
    said = ", ".join(f"{mode} {ssim[mode][0]:.4f}" for mode in
                     ("INT8, one static scale", "INT8, static by timestep", "INT4"))  # fmt: skip
    return f"LPIPS not measured: its weights would have to be downloaded. SSIM to 16 bits: {said}"


def fine_tuning(record: Record) -> str:
    more = record["held-out loss over 16-bit"]
    return f"{format_share(more[0])} more held-out loss than in 16 bits, of a small transformer"


def frechet(record: Record) -> str:
    rows = {row["mode"]: row["frechet"][0] for row in record["rows"]}
    return (
        f"Fréchet distance to real crops {rows['16-bit']:.2f} in 16 bits, "
        f"{rows['INT8, dynamic']:.2f} as INT8, {rows['INT4']:.2f} as INT4"
    )


def energy_used(record: Record) -> str:
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


def energy_gain(record: Record) -> str:
    said = []
    for found in record["problems"]:
        rows = rows_of(found)
        names = ("fa_int8", FLASH_2, "fa_tc")
        if all("gflops_per_watt" in rows.get(name, {}) for name in names):
            ours, theirs, sixteen = (rows[name]["gflops_per_watt"] for name in names)
            said.append(
                f"{ours / theirs:.2f} times FlashAttention-2 and {ours / sixteen:.2f} times our "
                f"own 16-bit fa_tc at {found['problem']['length']:,}"
            )
    return "; ".join(said)


def _at_least(source: str, tiles: Tiles, **config: int) -> int:
    """Return the bytes of shared memory that a source asks for: no device is needed."""
    defines = tiles.defines() | {f"CFG_{name.upper()}": value for name, value in config.items()}
    return least_shared_bytes(ModuleSpec(source, tuple(sorted(defines.items()))))


def fa_shared_memory() -> str:
    """Return what the source of fa says, for float32 and head_dim 64."""
    own = ladder.lookup("fa").default_tiles(64, "portable")
    said = []
    for rows, keys in ((32, 32), (64, 64), (128, 64)):
        tiles = replace(own, block_q=rows, block_kv=keys)
        taken = _at_least("attn_fa.cu", tiles, head_dim=64, vec=1, dtype=2)
        said.append(f"{taken:,} for {rows} rows of {keys} keys")
    return (
        f"bytes for head_dim 64 in float32: {', '.join(said)}. More than a device has is refused "
        "in a sentence before a launch"
    )


def intensity(record: Record) -> str:
    found = next(p for p in record["problems"] if p["problem"]["length"] == 4096
                 and p["problem"]["head_dim"] == 128 and not p["problem"]["causal"])  # fmt: skip
    problem = found["problem"]
    least = 8 * problem["batch"] * problem["heads"] * problem["length"] * problem["head_dim"]
    row = rows_of(found)["fa_tc"]
    return (
        f"{row['operations'] / least:,.0f} FLOP per byte that must move: attention of this length "
        f"is bound by arithmetic, and fa_tc reaches {row['tflops']:.0f} TFLOP/s"
    )


def share_of_roof(record: Record) -> str:
    rows = _at(record, 4096)
    full, int8 = (format_share(rows[name]["share"]) for name in ("fa_tc", "fa_int8"))
    return (
        f"memory sets no ceiling here; of that of the units fa_tc reaches {full} and fa_int8 {int8}"
        ". The notes' 235 TFLOP/s lie above the 220 that they call a ceiling"
    )


def tensor_cores(record: Record) -> str:
    rows = _at(record, 4096)
    ratio = rows["fa_warps"]["seconds"] / rows["fa_tc, sm_90"]["seconds"]
    rates = [format_rate(rows[name]["tflops"]) for name in ("fa_int8, sm_90", "fa_int8")]
    return (
        f"the whole {ratio:.1f} times as fast, from fa_warps, whose products are scalar, to the "
        f"portable fa_tc; fa_int8 reaches {rates[0]} TFLOP/s in the portable form and {rates[1]} "
        "in Hopper's"
    )


def more_stages(record: Record) -> str:
    times: dict[tuple[str, str], dict[str, float]] = {}
    for found in record["problems"]:
        for row in found["rows"]:
            tiles, _, stages = row["variant"].rpartition(" s")
            if "seconds" in row and found["problem"]["head_dim"] == 128:
                times.setdefault((found["problem"]["name"], tiles), {})[stages] = row["seconds"]
    ratios = [by["3"] / by["2"] for by in times.values() if {"2", "3"} <= set(by)]
    return (
        f"fa_tc is never without: two stages are its least. Three take {range_of(ratios)} times "
        f"the time of two, over {len(ratios)} tiles of its portable form"
    )


def causal_share(record: Record) -> str:
    said = []
    for name in ("fa_tc", "fa_int8"):
        plain, causal = (
            next(rows_of(p)[name]["seconds"] for p in record["problems"]
                 if p["problem"]["head_dim"] == 128 and p["problem"]["causal"] == masked)
            for masked in (False, True)
        )  # fmt: skip
        said.append(f"{name} {causal / plain:.2f}")
    return f"of the time without a mask: {', '.join(said)}"


def four_bits(record: Record) -> str:
    rows = rows_of(next(p for p in record["problems"]
                        if p["problem"]["distribution"] == "normal"))  # fmt: skip
    four, eight = rows["4 bits"], rows["default"]
    errors = [f"{row['judgement']['relative_error']:.1e}" for row in (four, eight)]
    rate = format_rate(four["operations"] / four["seconds"] / 1e12)
    return (
        f"{eight['seconds'] / four['seconds']:.2f} times the speed of INT8, {rate} TFLOP/s: INT8 "
        f"codes of fewer values; relative error {errors[0]} where INT8 has {errors[1]}"
    )


def four_bits_kept(record: Record) -> str:
    peak = record["peak_bytes"]
    return (
        f"{format_bytes(peak['INT4'])} at the peak of sampling as INT4, "
        f"{format_bytes(peak['INT8, dynamic'])} as INT8: packed codes save where they are kept, "
        "half a byte a number, and are unpacked for a call"
    )


def by_batch(long: Record, ladder: Record, shapes: Record) -> str:
    found = _batch_16(shapes)
    one, four, sixteen = (
        rows["fa_tc"]["seconds"] for rows in (_at(long, 4096), _at(ladder, 4096), rows_of(found))
    )
    return (
        f"{format_seconds(one)} at batch 1 and {format_seconds(four)} at 4, of 16 heads, "
        f"{format_seconds(sixteen)} at 16, of 32: {four / one:.1f} and {sixteen / one:.0f} times "
        "for 4 and 32 times the work, in three runs"
    )


def checkpoint(record: Record) -> str:
    total = _analysis(record)
    return (
        f"{format_share(total['savings'])} of a made-up checkpoint of "
        f"{total['elements'] / 1e9:.1f} billion parameters in 16 bits, of which 8 bits can save "
        "half; 75 % is of 32"
    )


def kandinsky(record: Record, block: Record) -> str:
    total = _analysis(record)
    pro = next(row for row in block["rows"] if row["name"] == "Pro")
    weights = [sum(p["count"] * p[key] for p in pro["parts"] if "attention" not in p["name"])
               for key in ("bytes_16", "bytes_int8")]  # fmt: skip
    return (
        f"{total['bytes'] / 1e9:.1f} to {total['bytes_out'] / 1e9:.1f} GB, of a made-up checkpoint "
        f"with the shapes of Kandinsky 5 Lite and {total['elements'] / 1e9:.1f} billion "
        f"parameters; weights of a block of Pro {format_bytes(weights[0])} to "
        f"{format_bytes(weights[1])}. Whole models were not run"
    )


def eligible(record: Record, block: Record) -> str:
    total = _analysis(record)
    share = total["int8"]["elements"] / total["elements"]
    errors = [part["error_int8"] for row in block["rows"] for part in row["parts"]
              if "attention" not in part["name"]]  # fmt: skip
    return (
        f"{format_share(share)} of the parameters of that checkpoint become INT8; relative error "
        f"of a product, activations quantised as well, {range_of(errors, '{:.4f}')}"
    )


def weak(record: Record) -> str:
    return _scaling(record, "weak") + "; not run on more than two"


def strong(record: Record) -> str:
    dealt = [row["share"] for row in record["rows"]
             if row["axis"] == "heads" and row["ranks"] == 2]  # fmt: skip
    return (
        f"{_scaling(record, 'strong')}, heads dealt out beforehand "
        f"{range_of([100 * x for x in dealt], '{:.0f}')} %, at 32,768 and 65,536 tokens; not run "
        "on more than two"
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


def long_sequence(record: Record) -> str:
    found = next(p for p in record["problems"] if p["problem"]["length"] == 32_760)
    row = rows_of(found)["fa_tc"]
    each = row["seconds"] / found["problem"]["heads"]
    return f"{format_seconds(each)} a head in 16 bits, {format_seconds(32 * each)} for 32"


def codes_lost(record: Record) -> str:
    said = [
        f"{format_share(row['codes'])} of codes and {format_share(row['scores'])} of scores "
        f"({row['distribution']} data, a scale for each {row['granularity']})"
        for row in record["codes"]
    ]
    return "; ".join(said)


def half_a_step(record: Record) -> str:
    normal = next(row for row in record["codes"]
                  if (row["granularity"], row["distribution"]) == ("tensor", "normal"))  # fmt: skip
    return (
        "half a step is what rounding does at most, by definition; absolute errors of scores have "
        f"no record, relative to the scores they are {format_share(normal['scores'])}"
    )


def timesteps(record: Record) -> str:
    said = []
    for model in dict.fromkeys(row["activations"] for row in record["rows"]):
        mine = [row for row in record["rows"] if row["activations"] == model]
        worst = {
            name: max((row["error"] for row in mine if row["scales"] == name), default=0.0)
            for name in ("uniform static", "static by bin", "dynamic")
        }
        said.append(f"{model}: {', '.join(f'{n} {x:.2g}' for n, x in worst.items())}")
    return "largest relative error over the steps; " + "; ".join(said)


def range_reached(record: Record) -> str:
    said = []
    for model in dict.fromkeys(row["activations"] for row in record["rows"]):
        for name in ("uniform static", "static by bin"):
            mine = [row["range"] for row in record["rows"]
                    if (row["activations"], row["scales"]) == (model, name)]  # fmt: skip
            early, late = (format_share(mine[at]) for at in (0, -1))
            said.append(f"{model}, {name} {early} and {late}")
    return "share of the range that the largest code reaches, first and last step; " + "; ".join(
        said
    )


def way(way: str) -> Callable[[Record], str]:
    def measured(record: Record) -> str:
        rows = [row for row in record["rows"] if row["way"] == way and "speed_ratio" in row]
        errors = [r["error against all keys"] for r in rows if "error against all keys" in r]
        lost = f", and {range_of(errors)} of relative error on random data" if errors else ""
        return f"{range_of([row['speed_ratio'][0] for row in rows])} times the plain way{lost}"

    return measured


def sparse(record: Record) -> str:
    rows = [r for r in record["rows"] if "density" in r and "speed_ratio" in r]
    said = [f"{format_share(r['density'])} kept, {r['mode']}: {r['speed_ratio'][0]:.1f}"
            for r in rows]  # fmt: skip
    return f"block masks at 32,768 tokens, times dense: {'; '.join(said)}"


def products(record: Record) -> str:
    said = []
    for strategy in ("channel", "block"):
        name = f"{strategy} over torch BF16"
        ratios = [row["ratios"][name][0] for row in record["rows"] if name in row["ratios"]]
        said.append(
            f"scales of {strategy}s {range_of(ratios)} times torch's BF16 product, "
            f"{geometric_mean(ratios):.2f} in the geometric mean"
        )
    return f"{'; '.join(said)}, quantising of activations included"


def blocks(record: Record) -> str:
    said = []
    for row in record["rows"]:
        names = "native", "both INT8", "both INT8, compiled"
        native, both, compiled = (row["ways"][name] for name in names)
        less = 1 - both["weight_bytes"] / native["weight_bytes"]
        said.append(
            f"{row['model']} {both['ratio'][0]:.2f} times as fast, "
            f"{compiled['ratio'][0]:.2f} where both models are compiled, weights "
            f"{format_share(less)} smaller"
        )
    return f"one block of each kind, attention and linear layers INT8: {'; '.join(said)}"
