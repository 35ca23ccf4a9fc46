"""What do masks, a bias and a softcap cost in the Hopper forms, and how far are other libraries?

Varies       the feature: key padding (27 % of the keys of three entries of four) as a mask and as
             lengths of the entries; a half-true mask (len, len); a float16 bias (heads, len, len)
             shared over the batch, or one for each entry and head; softcap 30; head_dim in {64,
             128}; length in {1024, 4096, 16384}; float16 and bfloat16; rung: fa_tc, and fa_int8 of
             the accuracy class "balanced"
Holds fixed  16,384 tokens in all, heads x head_dim = 2048, N(0, 1)
Measures     J2 of two heads; time of a prepared call, including packing of masks; in the same
             rounds its ratio to the plain call and to the fastest other library, and of fa_int8 to
             fa_tc
Beside       torch's scaled_dot_product_attention with its cuDNN and memory-efficient backends,
             FlexAttention compiled for each case, its block mask made beforehand, and
             FlashAttention-4 where it can be imported
Expect       of the plain time at most: 1.08 for key padding, by admitted keys, as a mask and as
             lengths; 1.35 for the mask;
             1.5 for the shared bias, and for softcap at head_dim 128, 1.9 at 64; 1.25 of the larger
             of plain and its bytes at copy bandwidth for a bias of each entry and head. At least
             1.5 times the speed of the fastest library with a mask or bias, 1.6 with a softcap
Run          python -m experiments.speed.scores [--quick] [--json FILE] [--rounds N]
             [--cells 64:4096:bfloat16 ...] [--seconds N] [--update-docs]
             [--stored [--merge FILE ...]]

A cell is HEAD_DIM:LENGTH:DTYPE. After four fifths of ``--seconds`` no other library is compiled.
After all of them no cell begins, and the remaining cells are printed. ``--cells`` measures them,
and ``--merge`` puts their record into the committed one. The record is written after each.
``--update-docs`` writes its part of docs/FEATURES.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import array_namespace
from cupyattn.cli import output
from cupyattn.measure import rungs, timing, words
from cupyattn.problem.choose import QUANT
from cupyattn.quant import QuantConfig
from cupyattn.testing import verdict
from experiments._harness import merging, others, recording
from experiments._harness.cells import REFUSALS, Problem, rotating
from experiments._harness.others import FLASH_4, refusing

PAGE = recording.ROOT / "docs" / "FEATURES.md"
BEGIN, END = "<!-- scores: begin -->", "<!-- scores: end -->"
TOKENS, WIDTH = 16_384, 2048
PLAIN, PADDING, LENGTHS, MASK, BIAS, OWN_BIAS, SOFTCAP = FEATURES = (
    "plain", "key padding", "lengths", "mask", "bias", "own bias", "softcap",
)  # fmt: skip
#: The record of a run that had FlashAttention-4 beside it, should the last one not have had it.
WITH_FLASH_4 = "scores_h100"
#: Features that admit a share of the keys alone.
PADDED = (PADDING, LENGTHS)
#: Names of libraries on pages.
LIBRARIES = {
    "cuDNN": "cuDNN", "efficient": "torch's memory-efficient attention",
    "FlexAttention": "compiled FlexAttention", FLASH_4: FLASH_4,
}  # fmt: skip
RUNGS = ("fa_tc", "fa_int8")
#: Share of the keys that an entry with padding keeps, of three entries of four.
KEPT = 0.73
CAP = 30.0
#: The largest time of a feature, as a multiple of plain: at head_dim 64 and at 128.
AIMS = {
    **dict.fromkeys(PADDED, (1.08, 1.08)), MASK: (1.35, 1.35), BIAS: (1.5, 1.5),
    SOFTCAP: (1.9, 1.5),
}  # fmt: skip
OWN_AIM = 1.25
#: A library whose result is further from ours is not timed: bfloat16 of values around 4.
MOST_DIFFERENCE = 0.06


@dataclass(frozen=True)
class ScoreCell:
    """One head_dim, length and dtype."""

    head_dim: int
    length: int
    dtype: str

    @classmethod
    def parse(cls, text: str) -> ScoreCell:
        """Read ``"64:4096:bfloat16"``."""
        try:
            head_dim, length, dtype = text.split(":")
            return cls(int(head_dim), int(length), dtype)
        except ValueError:
            raise ValueError(
                f"a cell is HEAD_DIM:LENGTH:DTYPE, such as 64:4096:bfloat16, got {text!r}"
            ) from None

    def __str__(self) -> str:
        return f"{self.head_dim}:{self.length}:{self.dtype}"

    def problem(self, args: argparse.Namespace) -> Problem:
        """Return the inputs drawn for it, small ones with ``--quick``."""
        batch, heads, length = TOKENS // self.length, WIDTH // self.head_dim, self.length
        if args.quick:
            batch, heads, length = 2, 2, recording.quick_length(args, length)
        return Problem(batch, heads, length, self.head_dim, dtype=self.dtype, seed=args.seed)


#: The middle length first, should time run out.
CELLS = tuple(
    ScoreCell(head_dim, length, dtype)
    for length in (4096, 16_384, 1024)
    for dtype in ("bfloat16", "float16")
    for head_dim in (64, 128)
)


def lengths_of(problem: Problem) -> np.ndarray:
    """Return how many keys each entry has with key padding."""
    lengths = np.full(problem.batch, problem.length)
    lengths[np.arange(problem.batch) % 4 != 0] = int(KEPT * problem.length)
    return lengths if problem.batch > 1 else np.array([int(KEPT * problem.length)])


def options_of(feature: str, problem: Problem, xp: Any) -> dict[str, Any]:
    """Return what a feature adds to the plain call, arrays in `xp`."""
    n, rng = problem.length, xp.random.default_rng(problem.seed)
    if feature == PADDING:
        ends = xp.asarray(lengths_of(problem))[:, None, None, None]
        return {"mask": xp.arange(n) < ends}
    if feature == LENGTHS:
        return {"lengths_kv": xp.asarray(lengths_of(problem), np.int32)}
    if feature == MASK:
        return {"mask": rng.random((n, n), dtype=np.float32) < 0.5}
    if feature in (BIAS, OWN_BIAS):
        entries = problem.batch if feature == OWN_BIAS else 1
        bias = xp.empty((entries, problem.heads, n, n), np.float16)
        one = rng.standard_normal((n, n), dtype=np.float32).astype(np.float16)
        for i, (entry, head) in enumerate(np.ndindex(bias.shape[:2])):
            bias[entry, head] = xp.roll(one, 37 * i, axis=1)
        return {"bias": bias}
    return {"softcap": CAP} if feature == SOFTCAP else {}


def features_of(problem: Problem) -> tuple[str, ...]:
    """Return the features of a problem: of one entry a bias is its own and shared."""
    return tuple(one for one in FEATURES if one != OWN_BIAS or problem.batch > 1)


# ---- our calls -----------------------------------------------------------------------------------


def corner(x: Any) -> Any:
    """Return two heads of the last entry, the one that padding shortens, of what has heads."""
    return x[-1:, :2] if x.ndim == 4 else x


def quant_of(rung: str, options: Mapping[str, Any]) -> QuantConfig | None:
    """Return how the accuracy class "balanced" quantises; a softcap takes keys as they are."""
    if rung != "fa_int8":
        return None
    return replace(QUANT["balanced"], smooth_k="softcap" not in options)


def judged(
    rung: str,
    problem: Problem,
    inputs: Any,
    options: Mapping[str, Any],
    arch: str | None,
    tiles: ca.Tiles | None = None,
) -> tuple[ca.ops.prepared.Prepared, dict[str, Any]]:
    """Return a prepared call, and what judging some rows of two heads of its result came to."""
    quant = quant_of(rung, options)
    prepared = ca.plan(*inputs, variant=rung, quant=quant, arch=arch, tiles=tiles, **options)
    plan, o = prepared.plans[-1], prepared(*inputs)
    if "lengths_kv" in options:
        heads = [x[:, :2] for x in (o, *inputs)]
        o, few, quantized = last_entry(heads, lengths_of(problem), quant, arch)
        scored: dict[str, Any] = {}
    else:
        o, *few = (corner(x) for x in (o, *inputs))
        quantized = None
        if quant is not None:
            quantized = ca.quantize(*few, quant=quant, tiles=tiles, arch=arch)
        scored = {name: x if name == "softcap" else corner(x) for name, x in options.items()}
    call = replace(problem.call, batch=1, heads=2)
    report = verdict.judge(
        o, *few, variant=rung, quantized=quantized, form=plan.form, tiles=plan.tiles,
        rows=rungs.judged_rows(call, problem.seed), **scored,
    )  # fmt: skip
    facts = {"form": plan.form, "tiles": vars(plan.tiles), "note": plan.note}
    return prepared, {**facts, "j2": report.ratio, "ok": report.passed}


def last_entry(
    given: Sequence[Any], lengths: np.ndarray, quant: QuantConfig | None, arch: str | None
) -> tuple[Any, list[Any], Any]:
    """Return O, operands and codes of the last entry of a padded batch, cut to the keys that count.

    Codes are made of all entries together, packed: their means have the bits of the padded call.
    """
    o, q, k, v = given
    xp, (batch, heads, length, head_dim) = array_namespace(q), q.shape
    codes = None
    if quant is not None:
        keys = [
            xp.concatenate([x[i, :, :n].swapaxes(0, 1) for i, n in enumerate(lengths)])
            for x in (k, v)
        ]
        ends = np.arange(batch + 1) * length, np.append(0, np.cumsum(lengths))
        rows = q.swapaxes(1, 2).reshape(batch * length, heads, head_dim)
        z = ca.quantize(
            rows, *keys, quant=quant, arch=arch, max_len_q=length, max_len_k=length,
            **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True)),
        )  # fmt: skip
        *_, codes = z.sequences()
    return o[-1:], [q[-1:], *(x[-1:, :, : lengths[-1]] for x in (k, v))], codes


# ---- other libraries -----------------------------------------------------------------------------


def tensor(x: Any) -> Any:
    """Return a CuPy array as a torch tensor of the same memory."""
    import torch

    if x.dtype == bool:
        return torch.from_dlpack(x.view(np.uint8)).view(torch.bool)
    return torch.from_dlpack(x)


def sdpa(backend: str, problem: Problem, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return torch's attention with a mask or a bias, which it takes in the type of q."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask = next(map(tensor, options.values()), None)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(getattr(torch, problem.dtype))

    def run(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return run


def flex_attention(
    feature: str, problem: Problem, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return FlexAttention, compiled for the case, its block mask made beforehand."""
    import torch
    from torch.nn.attention import flex_attention as flex

    given: dict[str, Any] = {}
    n = problem.length
    if feature == PADDING:
        ends = torch.from_numpy(lengths_of(problem)).cuda()
        given["block_mask"] = flex.create_block_mask(
            lambda b, h, q, kv: kv < ends[b], problem.batch, None, n, n, "cuda"
        )
    elif feature == MASK:
        mask = tensor(options["mask"])
        given["block_mask"] = flex.create_block_mask(
            lambda b, h, q, kv: mask[q, kv], None, None, n, n, "cuda"
        )
    elif feature == BIAS:
        bias = tensor(options["bias"])[0]
        given["score_mod"] = lambda score, b, h, q, kv: score + bias[h, q, kv]
    elif feature == OWN_BIAS:
        own = tensor(options["bias"])
        given["score_mod"] = lambda score, b, h, q, kv: score + own[b, h, q, kv]
    elif feature == SOFTCAP:
        given["score_mod"] = lambda score, b, h, q, kv: CAP * torch.tanh(score / CAP)
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, **given)


def flash_attention_4(softcap: float) -> Callable[..., Any] | None:
    """Return FlashAttention-4, with its softcap or plain; None where it cannot be imported."""
    attend = others.flash_attention_4()
    if attend is None:
        return None

    def run(q: Any, k: Any, v: Any) -> Any:
        o = attend(*(x.transpose(1, 2) for x in (q, k, v)), softcap=softcap)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return run


def peers(
    feature: str, problem: Problem, options: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], Callable[..., Any] | None]]]:
    """Yield the libraries that take a feature, and what makes each call."""
    if feature == LENGTHS:  # they are beside it as a mask
        return
    if feature != SOFTCAP:
        yield "cuDNN", lambda: sdpa("CUDNN_ATTENTION", problem, options)
        yield "efficient", lambda: sdpa("EFFICIENT_ATTENTION", problem, options)
    if feature in (PLAIN, SOFTCAP):
        yield FLASH_4, lambda: flash_attention_4(options.get("softcap", 0.0))
    if feature != PLAIN:
        yield "FlexAttention", lambda: flex_attention(feature, problem, options)


# ---- measuring -----------------------------------------------------------------------------------


def measure_feature(
    feature: str,
    problem: Problem,
    inputs: Any,
    plain: Mapping[str, Callable[[int], Any]],
    args: argparse.Namespace,
    peers_end: float,
) -> list[dict[str, Any]]:
    """Judge a feature in every rung, and on a device time it beside plain and other libraries."""
    options = options_of(feature, problem, array_namespace(inputs[0]))
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[int], Any]] = {}
    sets = [] if args.quick else timing.rotated(inputs)
    for rung in RUNGS:
        prepared, facts = judged(rung, problem, inputs, options, "sm_90a" if args.quick else None)
        rows.append({"feature": feature, "name": rung, "peer": False, **facts})
        if facts["ok"] and not args.quick:
            calls[rung] = rotating(prepared, sets)
    if args.quick:
        return rows
    ours = ca.attention(*inputs, variant="fa_tc", **options).astype(np.float32)
    for name, make in peers(feature, problem, options):
        if time.monotonic() > peers_end:
            print(f"no time left for {name} with {feature}")
            continue
        row: dict[str, Any] = {"feature": feature, "name": name, "peer": True}
        try:
            call = make()
            if call is None:
                continue
            difference = _difference(refusing(name, call), sets[0], ours)
        except (*REFUSALS, ImportError, RuntimeError, TypeError, ValueError) as error:
            row["refused"] = str(error)[:200]
            rows.append(row)
            continue
        rows.append(row | {"difference": difference})
        if difference <= MOST_DIFFERENCE:
            laid = [tuple(map(tensor, one)) for one in sets]
            calls[name] = rotating(call, laid)
    beside = {f"plain {rung}": call for rung, call in plain.items() if feature != PLAIN}
    samples = timing.time_interleaved({**calls, **beside}, rounds=args.rounds)
    bandwidth = _bandwidth() if feature == OWN_BIAS else 0.0
    for row in rows:
        found = samples.get(row["name"])
        if found is None:
            continue
        row |= {"seconds": timing.median(found).to_list(), "samples": found}
        reference = samples.get(f"plain {row['name']}", samples.get("plain fa_tc"))
        if reference is not None:
            row["of_plain"] = timing.paired_ratio(found, reference).to_list()
        if bandwidth:
            row["copy_seconds"] = options["bias"].nbytes / bandwidth
        if row["name"] == "fa_int8" and "fa_tc" in samples:
            row["speed_of_fa_tc"] = timing.paired_ratio(samples["fa_tc"], found).to_list()
    _compare_with_peers(rows, samples)
    return rows


def _difference(call: Callable[..., Any], inputs: Sequence[Any], ours: Any) -> float:
    """Return how far a library's result is from ours at most."""
    import cupy

    theirs = cupy.from_dlpack(call(*map(tensor, inputs)).detach().float().contiguous())
    return float(cupy.abs(theirs - ours).max())


def _bandwidth() -> float:
    """Return how many bytes a second a copy reads and writes."""
    import cupy

    here, there = (cupy.zeros(2**30, np.uint8) for _ in range(2))
    samples = timing.time_interleaved({"copy": lambda _: cupy.copyto(there, here)})
    return float(2 * here.nbytes / timing.median(samples["copy"]).median)


def _compare_with_peers(rows: list[dict[str, Any]], samples: Mapping[str, list[float]]) -> None:
    """Add to each of our rows the fastest library and its time as a multiple of ours."""
    timed = [row for row in rows if row["peer"] and row["name"] in samples]
    if not timed:
        return
    best = min(timed, key=lambda row: row["seconds"][0])["name"]
    for row in rows:
        if not row["peer"] and row["name"] in samples:
            speed = timing.paired_ratio(samples[best], samples[row["name"]])
            row |= {"best_peer": best, "speed_of_best_peer": speed.to_list()}


def aim_of(row: Mapping[str, Any], head_dim: int, share: float) -> tuple[float, float] | None:
    """Return what a row of ours has and is to have at most; None where nothing is asked."""
    if row["peer"] or "of_plain" not in row:
        return None
    if row["feature"] == OWN_BIAS:
        least = max(row["copy_seconds"], row["seconds"][0] / row["of_plain"][0])
        return row["seconds"][0] / least, OWN_AIM
    found = row["of_plain"][0] / (share if row["feature"] in PADDED else 1.0)
    return found, AIMS[row["feature"]][head_dim > 64]


def table(
    rows: Sequence[Mapping[str, Any]], head_dim: int, share: float
) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of one cell."""
    header = ["", "call", "form", "time", "x plain", "is", "aim", "x best peer", "peer", "J2"]
    lines = []
    for row in rows:
        aim = aim_of(row, head_dim, share)
        lines.append([
            row["feature"], row["name"], row.get("form", ""),
            words.format_seconds(row["seconds"][0]) if "seconds" in row else "-",
            f"{row['of_plain'][0]:.3f}" if "of_plain" in row else "",
            f"{aim[0]:.3f}" if aim else "", f"{aim[1]:.2f}" if aim else "",
            f"{row['speed_of_best_peer'][0]:.2f}" if "best_peer" in row else "",
            row.get("best_peer", row.get("refused", "")[:40]),
            f"{row['j2']:.2f}" if "j2" in row else "",
        ])  # fmt: skip
    return header, lines


def beside_flash_4(record: Mapping[str, Any]) -> list[str]:
    """Return lines on the calls of a record that FlashAttention-4 takes, too: none with a mask."""
    environment, rows = record["environment"], []
    for found in record["problems"]:
        speeds = []
        for feature in (PLAIN, SOFTCAP):
            timed = {
                row["name"]: row["samples"]
                for row in found["rows"]
                if row["feature"] == feature and "samples" in row
            }
            speeds += [
                f"{timing.paired_ratio(timed[FLASH_4], timed[rung]).median:.2f}" for rung in RUNGS
            ]
        rows.append([found["problem"]["name"], *speeds])
    return [
        "", f"### Beside {FLASH_4}", "",
        f"The run above did not have it. An earlier one did, on {environment['device']['name']}, "
        f"revision {environment['revision'][:10]}: speed as a multiple of its.", "",
        *recording.markdown(
            ["", *(f"{feature}, {rung}" for feature in (PLAIN, SOFTCAP) for rung in RUNGS)], rows
        ),
    ]  # fmt: skip


def has_flash_4(record: Mapping[str, Any]) -> bool:
    """Return whether some call of a record was timed beside FlashAttention-4."""
    rows = (row for found in record["problems"] for row in found["rows"])
    return any(row["name"] == FLASH_4 and "samples" in row for row in rows)


def section(record: Mapping[str, Any]) -> str:
    """Return the part of docs/FEATURES.md that a record of a device gives."""
    environment = record["environment"]
    timed = {row["name"] for found in record["problems"] for row in found["rows"]
             if row["peer"] and "seconds" in row}  # fmt: skip
    libraries = ", ".join(text for name, text in LIBRARIES.items() if name in timed)
    lines = [
        f"Written by `python -m experiments.speed.scores --stored --update-docs`: "
        f"{environment['device']['name']}, revision {environment['revision'][:10]}"
        f"{merging.of_another_revision(record)}.",
        "",
        "A cell has three numbers of a call. They are the time, including the packing of masks, "
        "its ratio to the plain call's time, and the speed relative to the fastest other library. "
        "`fa_int8` quantises as the "
        'accuracy class "balanced" does, with scales of K for each block of keys. Libraries that '
        "take the call were "
        f"timed, of: {libraries}. FlashAttention-3 was not among them; "
        "[PERFORMANCE.md](PERFORMANCE.md#latency-and-throughput-by-length) has plain calls beside "
        "it.",
        "",
        "Key padding and lengths keep only the share of the keys that a title says. *of plain* "
        "divides their time by that share of the plain time: x 1.00 would be no overhead. A *bias* "
        "is float16, (heads, length, length), and the same for every batch entry; an *own bias* "
        "has one for each batch entry as well.",
        "",
        "These forms multiply a bias by log2(e), `fa_tc` by 1/scale, too. If that overflows "
        "float32, as with `finfo.min` of bfloat16, the bias counts as -inf. A row with only such "
        "biases is zeros, with lse = -inf, and not the mean of V. For padding give `mask=`, or a "
        "bias of about -1e4.",
    ]
    for found in record["problems"]:
        lines += ["", f"### {found['problem']['name']}, {found['admitted']:.2f} of the keys", ""]
        rows = []
        for row in found["rows"]:
            if row["peer"] or "seconds" not in row:
                continue
            share = found["admitted"] if row["feature"] in PADDED else 1.0
            ratio, speed = row.get("of_plain"), row.get("speed_of_best_peer")
            rows.append([
                row["feature"], row["name"], words.format_seconds(row["seconds"][0]),
                f"x {ratio[0] / share:.2f}" if ratio else "-",
                f"{speed[0]:.2f} ({row['best_peer']})" if speed else "no rival was timed",
            ])  # fmt: skip
        header = ["", "rung", "time", "of plain", "of the fastest other"]
        lines += recording.markdown(header, rows)
    if not has_flash_4(record):
        lines += beside_flash_4(recording.stored(WITH_FLASH_4))
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Measure cell after cell, and write the record after each."""
    recording.check_rounds(args)
    began, passed = time.monotonic(), True
    cells = [ScoreCell.parse(text) for text in args.cells] or CELLS[: 2 if args.quick else None]
    content: dict[str, Any] = {"rounds": 0 if args.quick else args.rounds, "problems": []}
    for i, cell in enumerate(cells):
        if time.monotonic() - began > args.seconds:
            print("no time left for --cells " + " ".join(map(str, cells[i:])))
            break
        problem = cell.problem(args)
        inputs = problem.draw(on_device=not args.quick)
        plain = {}
        if not args.quick:
            sets = timing.rotated(inputs)
            plain = {
                rung: rotating(ca.plan(*inputs, variant=rung, quant=quant_of(rung, {})), sets)
                for rung in RUNGS
            }
        rows: list[dict[str, Any]] = []
        for feature in features_of(problem):
            rows += measure_feature(
                feature, problem, inputs, plain, args, began + 0.8 * args.seconds
            )
        share = float(np.mean(lengths_of(problem))) / problem.length
        print(f"\n{problem.name}, {share:.3f} of the keys admitted with key padding")
        output.print_table(*table(rows, cell.head_dim, share))
        content["problems"].append(
            {"problem": vars(problem) | {"name": problem.name}, "admitted": share, "rows": rows}
        )
        recording.keep(args, "scores", "mirror" if args.quick else "cuda", content)
        passed &= all(row["ok"] for row in rows if not row["peer"])
    if args.update_docs and not args.quick:
        recording.replace_between(PAGE, BEGIN, END, section(recording.stored("scores")))
    return 0 if passed else 1


def again(args: argparse.Namespace) -> int:
    """Print the committed record, into which others are merged first."""
    record = merging.record_with("scores", args.merge, merging.with_missing)
    for found in record["problems"]:
        print(f"\n{found['problem']['name']}")
        share, head_dim = found["admitted"], found["problem"]["head_dim"]
        output.print_table(*table(found["rows"], head_dim, share))
    if args.update_docs:
        recording.replace_between(PAGE, BEGIN, END, section(record))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--cells", nargs="+", default=[], metavar="CELL", help="of these alone")
    parser.add_argument("--seconds", type=float, default=200.0, help="no cell begins later")
    recording.add_page_arguments(parser, merge=True)
    parser.set_defaults(rounds=recording.LEAST_ROUNDS)
    args = parser.parse_args(argv)
    return recording.guarded(again, args) if args.stored else recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
