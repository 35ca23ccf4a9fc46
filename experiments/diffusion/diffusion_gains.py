"""What do guidance fusion, static scales, token pruning and block masks win over the plain call?

Varies       the way (both guidance branches in one launch; calibrated scales; a fifth of the keys
             dropped, selection included, the selection alone, and their weights alone; blocks of a
             random mask kept; q and k normalised and turned as they are quantised; INT8 at 118,800
             and 131,072 tokens), the mode, the length
Holds fixed  head_dim 128, float16, N(0, 1), self-attention; batch x heads as the length allows
Measures     time against the plain ways in the same rounds; these are two calls, dynamic scales of
             the same granularity, all keys, copies of K and V; weights of keys that are read twice,
             dense attention in 16 bits and in INT8, a pass before, 16 bits; for masks also against
             dense attention with the same tiles, as a share of 1 / density; for pruning also the
             relative error against all keys; for long sequences the bytes of scratch memory
Run          python -m experiments.diffusion.diffusion_gains [--quick] [--only WAY] [--seconds N]
             [--json FILE] [--update-docs] [--stored] [--merge FILE ...]

Each way is first checked: its result has the bits of attention over the kept keys, or holds the
bounds J2 and J3. No comparison begins after --seconds; the record says which are missing.
``--update-docs`` writes the table of docs/DIFFUSION.md: from the record alone with ``--stored``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import distributions
from cupyattn.arrays.described import describe
from cupyattn.arrays.interchange import is_cupy
from cupyattn.arrays.kinds import array_namespace, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.cli import output
from cupyattn.compiler import target
from cupyattn.diffusion import key_importance
from cupyattn.diffusion.importance_bounds import importance_bound
from cupyattn.diffusion.pruning import (
    SAMPLE_ROWS,
    compact,
    compact_values,
    kept_count,
    weigh_keys,
)
from cupyattn.measure import device, timing, words
from cupyattn.measure import rungs as measuring
from cupyattn.ops.explain import kernel_form
from cupyattn.ops.quantize import QuantizeSettings, quantize_at
from cupyattn.plans.prepare_rows import plan_preparation, prepares_of
from cupyattn.problem.row_preparation import EPS, Preparation
from cupyattn.problem.row_preparation import OPTIONS as PREPARATION
from cupyattn.problem.settings import check_attention
from cupyattn.runtime import ready
from cupyattn.testing import verdict
from experiments._harness import merging, recording
from experiments._harness.cells import rotating

PAGE = recording.ROOT / "docs" / "DIFFUSION.md"
BEGIN, END = "<!-- gains: begin -->", "<!-- gains: end -->"
HEADER = ["batch", "heads", "length", "mode", "way", "holds", "time", "against", "faster by",
          "of 1 / density"]  # fmt: skip
HEAD_DIM, RATIO, DENSITIES, BLOCK = 128, 0.2, (0.5, 0.25, 0.1), 128
SAME_TILES = "dense, the same tiles"
MODES = ("balanced", "precision")

Shape = tuple[int, int, int]
Way = Callable[..., Any]
#: The ways of comparison, by name; the way that is compared; its facts, with "ok".
Comparison = tuple[dict[str, Way], Way, dict[str, Any]]


def layer(heads: int, **options: Any) -> ca.Int8Attention:
    """Return attention of one mode at every step; calls name the mode."""
    return ca.Int8Attention(heads, HEAD_DIM, 50, **options)


def holds_bound(o: Any, qkv: Sequence[Any], mode: str, **options: Any) -> float:
    """Return the largest error of an output as a share of its bounds, J2 and J3.

    The bound is for the codes `quantized` if they are given, otherwise for codes by `quant`.
    """
    xp, quant, z = array_namespace(o), options.pop("quant", None), options.pop("quantized", None)
    rows = xp.asarray(measuring.judged_rows(check_attention(*qkv)))
    if mode == "precision":
        given = {**options, "variant": "fa_tc"}
        form = kernel_form(*qkv, **given)
        return float(verdict.judge(o, *qkv, rows=rows, **given, **form).ratio)
    given = {**options, "variant": "fa_int8"}
    form = kernel_form(*qkv, quant=quant, **given)
    prepared = {name: options[name] for name in PREPARATION if name in options}
    z = z or ca.quantize(*qkv, quant=quant, tiles=form["tiles"], **prepared)
    report = verdict.judge(o, *qkv, quantized=z, rows=rows, **given, **form)
    return max(float(report.ratio), float(report.quantisation or 0.0))


def guidance(qkv: Sequence[Any], mode: str) -> Comparison:
    """Two calls, and both branches in one launch; v serves as the queries of the other branch."""
    attend = layer(qkv[0].shape[1])

    def two(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, 0, mode=mode), attend(v, k, v, 0, mode=mode)

    def one(q: Any, k: Any, v: Any) -> Any:
        return attend.fused_cfg(q, v, k, v, 0, mode=mode)

    q, k, v = qkv
    found = one(q, k, v)
    given = {} if mode == "precision" else {"quant": attend.quant_config(q, k, 0, mode=mode)}
    ratio = max(
        holds_bound(o, (rows, k, v), mode, **given) for o, rows in zip(found, (q, v), strict=True)
    )
    # The bits may differ where twice the heads leave another last wave, whose tiles are cut.
    same = all(bool((a == b).all()) for a, b in zip(two(q, k, v), found, strict=True))
    return {"two calls": two}, one, {"ok": ratio <= 1, "of bound": ratio, "same bits": same}


def static(qkv: Sequence[Any], mode: str) -> Comparison:
    """Scales of each call's own per head, and calibrated ones: Q and K are read once less."""
    q, k, _ = qkv
    found = ca.calibrate_quantization_scales([(q, k)], 100.0)
    dynamic = layer(q.shape[1], quant=ca.QuantConfig("head", "head", smooth_k=False))
    fixed = layer(q.shape[1], timestep_scales=found)
    ratio = holds_bound(
        fixed(*qkv, 0, mode=mode), qkv, mode, quant=fixed.quant_config(q, k, 0, mode=mode)
    )
    plain = {"dynamic": lambda q, k, v: dynamic(q, k, v, 0, mode=mode)}
    known = {"ok": ratio <= 1, "of bound": ratio}
    return plain, lambda q, k, v: fixed(q, k, v, 0, mode=mode), known


def quantising(qkv: Sequence[Any], mode: str) -> Comparison:
    """The same without attention: the passes over Q and K alone."""
    q, k, _ = qkv
    fixed = layer(q.shape[1], timestep_scales=ca.calibrate_quantization_scales([(q, k)], 100.0))
    quant, dynamic = fixed.quant_config(q, k, 0), ca.QuantConfig("head", "head", smooth_k=False)
    z = ca.quantize(*qkv, quant=quant)
    bound = z.q_scale.repeat(q.shape[2], axis=2) * np.float32(0.5 + 2**-15)
    off = abs(z.dequantize()[0] - q.astype(np.float32)).max(axis=-1)
    plain = {"dynamic": lambda q, k, v: ca.quantize(q, k, v, quant=dynamic)}
    known = {"ok": bool((off <= bound).all())}
    return plain, lambda q, k, v: ca.quantize(q, k, v, quant=quant), known


def pruning(qkv: Sequence[Any], mode: str) -> Comparison:
    """All keys, and the kept keys, as the call selects them."""
    q, k, v = qkv
    plain = layer(q.shape[1])
    pruned = layer(q.shape[1], enable_pruning=True, pruning_ratio=RATIO)
    o, kept = pruned(q, k, v, 0, mode=mode, return_mask=True)
    few = [x[kept].reshape(*k.shape[:2], -1, HEAD_DIM) for x in (k, v)]
    known: dict[str, Any] = {"ok": bool((plain(q, *few, 0, mode=mode) == o).all())}
    if not known["ok"] and mode != "precision":  # smoothed by the mean of all keys
        z = kept_codes(qkv, few[0].shape[2], pruned.quant_config(q, k, 0, mode=mode))
        ratio = holds_bound(o, (q, *few), mode, quantized=z)
        known = {"ok": ratio <= 1 and bool((ca.attention(z) == o).all()), "of bound": ratio}
    every_key = as_float64(plain(q, k, v, 0, mode=mode)[:1])
    known["error against all keys"] = measuring.relative_error(o[:1], every_key)
    every = {"all keys": lambda q, k, v: plain(q, k, v, 0, mode=mode)}
    return every, lambda q, k, v: pruned(q, k, v, 0, mode=mode), known


def kept_codes(qkv: Sequence[Any], count: int, quant: ca.QuantConfig, **where: Any) -> Any:
    """Return what a pruned call attends to where it quantises kept keys from where they lie."""
    q, k, v = qkv
    where = {"backend": target.choose(None, is_cupy(q)), "arch": None} | where
    settings = QuantizeSettings(quant, **where)
    weighed, sums = weigh_keys(q, k, scale=None, rows=SAMPLE_ROWS, key_sums=True, **where)
    few_v, _, places = compact_values(k, v, weighed, count, backend=where["backend"])
    return quantize_at(q, k, few_v, places, settings, sums)


def choosing(qkv: Sequence[Any], mode: str) -> Comparison:
    """The same without attention, beside a copy of K and V."""
    q, k, v = qkv
    count = kept_count(k.shape[2], RATIO)

    def chosen(q: Any, k: Any, v: Any) -> Any:
        return compact(k, v, key_importance(q, k), count)

    *few, kept = chosen(*qkv)
    rows = (x[kept].reshape(*k.shape[:2], count, HEAD_DIM) for x in (k, v))
    same = all(bool((x == y).all()) for x, y in zip(few, rows, strict=True))
    return {"k and v copied": lambda q, k, v: (k.copy(), v.copy())}, chosen, {"ok": same}


def weighing(qkv: Sequence[Any], mode: str) -> Comparison:
    """The importance of keys alone: read once where the device can, beside read twice."""
    q, k, _ = qkv
    backend = target.choose(None, is_cupy(q))
    twice = {"arch": "sm_90"} if target.own_arch(backend, describe({"q": q})["q"]) else {}
    exact, bound = importance_bound(
        *(as_float64(x[:1]) for x in (q, k)), scale=HEAD_DIM**-0.5, rows=SAMPLE_ROWS,
        rounded_to="float16" if backend == "mirror" else "",
    )  # fmt: skip
    ratio = float((np.abs(as_float64(key_importance(q, k)[:1]) - exact) / bound).max())
    plain = {"keys read twice": lambda q, k, v: key_importance(q, k, **twice)}
    return plain, lambda q, k, v: key_importance(q, k), {"ok": ratio <= 1, "of bound": ratio}


def dense_in_the_same_tiles(qkv: Sequence[Any], mode: str, **options: Any) -> Way:
    """Return dense attention of a mode with the tiles that a call with a block mask takes."""
    given: dict[str, Any] = {"variant": "fa_tc"}
    if mode != "precision":
        quant = layer(qkv[0].shape[1]).quant_config(*qkv[:2], 0, mode=mode)
        given = {"variant": "fa_int8", "quant": quant}
    plan = ca.plan(*qkv, **given, **options).plans[-1]
    given |= {"tiles": plan.tiles} | ({"arch": "sm_90a"} if plan.form.startswith("sm90") else {})
    return lambda q, k, v: ca.attention(q, k, v, **given)


def sparse(density: float) -> Callable[..., Comparison]:
    """Return the comparison of a mask of this density with dense attention of either mode."""

    def compare(qkv: Sequence[Any], mode: str) -> Comparison:
        heads, blocks = qkv[0].shape[1], -(-qkv[0].shape[2] // BLOCK)
        kept = np.random.default_rng(0).random((blocks, blocks)) < density
        mask = ca.BlockMask(kept[None, None], BLOCK, BLOCK)
        every = layer(heads)
        few = layer(heads, attention_type="block_sparse", block_mask=mask)
        ratio = holds_bound(few(*qkv, 0, mode=mode), qkv, mode, block_mask=mask)
        dense = {f"dense, {m}": as_call(every, m) for m in MODES}
        dense[SAME_TILES] = dense_in_the_same_tiles(qkv, mode, block_mask=mask)
        known = {"ok": ratio <= 1, "of bound": ratio, "density": mask.density}
        return dense, as_call(few, mode), known

    return compare


def as_call(attend: ca.Int8Attention, mode: str) -> Way:
    """Return attention of one mode as a function of q, k and v."""
    return lambda q, k, v: attend(q, k, v, 0, mode=mode)


def prepared(qkv: Sequence[Any], mode: str) -> Comparison:
    """A pass that normalises and turns, then the call; and all of it as q and k are quantised."""
    q, k, _ = qkv
    xp, heads, length = array_namespace(q), q.shape[1], q.shape[2]
    angles = xp.arange(length)[:, None] * 10000.0 ** (-xp.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    options: dict[str, Any] = {
        "rope": tuple(f(angles).astype(np.float32) for f in (xp.cos, xp.sin)),
        "qk_norm": (xp.ones(HEAD_DIM, np.float32), xp.ones((heads, HEAD_DIM), np.float32)),
    }
    asked = {"rope_interleaved": False, "rope_offset_q": 0, "qk_norm_eps": EPS, **options}
    how = Preparation.of_arrays(asked, (heads, heads, length, length, HEAD_DIM))
    hows = prepares_of(how)

    def before(q: Any, k: Any, v: Any) -> Any:
        if xp is np or how is None:
            return ca.attention(*how.stored(q, k), v, variant="fa_int8")  # type: ignore[union-attr]
        turned = {name: xp.empty_like(x) for name, x in (("q", q), ("k", k))}
        for name, x in (("q", q), ("k", k)):
            plan = plan_preparation(Operand.of(x), "float16", hows[name])
            ready.run(plan, {"x": x, "turned": turned[name], **how.buffers})
        return ca.attention(turned["q"], turned["k"], v, variant="fa_int8")

    def fused(q: Any, k: Any, v: Any) -> Any:
        return ca.attention(q, k, v, variant="fa_int8", **options)

    ratio = holds_bound(fused(*qkv), qkv, mode, **options)
    near = measuring.relative_error(before(*qkv)[:1], as_float64(fused(*qkv)[:1]))
    known = {"ok": ratio <= 1 and near < 0.05, "of bound": ratio, "error of the other": near}
    return {"a pass before": before}, fused, known


def long(qkv: Sequence[Any], mode: str) -> Comparison:
    """INT8 beside 16 bits where a score for every pair would take tens of gigabytes."""
    q, k, v = qkv
    attend = layer(q.shape[1])
    ratio = holds_bound(
        attend(q, k, v, 0, mode=mode), qkv, mode, quant=attend.quant_config(q, k, 0, mode=mode)
    )
    plan = ca.plan(q, k, v, variant="fa_int8", quant=attend.quant_config(q, k, 0, mode=mode))
    known = {
        "ok": ratio <= 1, "of bound": ratio, "scratch_bytes": plan.workspace_bytes,
        "bytes of all scores": 2 * q.shape[1] * q.shape[2] * k.shape[2],
    }  # fmt: skip
    return {"16 bits": as_call(attend, "precision")}, as_call(attend, mode), known


WAYS: dict[str, Callable[..., Comparison]] = {
    "calibrated scales": static,
    "calibrated scales, quantising alone": quantising,
    "guidance in one launch": guidance,
    f"{RATIO:.0%} of keys pruned": pruning,
    "keys weighed, chosen and moved alone": choosing,
    "keys weighed alone": weighing,
    "norm and rope as q and k are quantised": prepared,
    **{f"{density:.0%} of blocks kept": sparse(density) for density in DENSITIES},
    "INT8 of a long sequence": long,
}
#: INT8 alone: there is nothing to compare in 16 bits.
ONE_MODE = (static, quantising, choosing, weighing, prepared, long)
#: Problems, the most informative first: batch, heads, length, and the ways.
CELLS: tuple[tuple[Shape, tuple[str, ...]], ...] = (
    ((16, 32, 4096), tuple(WAYS)[:7]),
    ((1, 8, 32_768), tuple(WAYS)[7:10]),
    ((1, 4, 118_800), tuple(WAYS)[10:]),
    *(((1, 32, length), tuple(WAYS)[:3]) for length in (256, 1024, 16_384)),
    ((1, 4, 131_072), tuple(WAYS)[10:]),
)


def cells(args: argparse.Namespace) -> Iterator[tuple[Shape, str, str]]:
    """Yield shape, way and mode of every comparison."""
    for shape, names in (((1, 1, 300), tuple(WAYS)),) if args.quick else CELLS:
        for name in (n for n in names if args.only is None or n.startswith(args.only)):
            for mode in MODES[: 1 if WAYS[name] in ONE_MODE else 2]:
                yield shape, name, mode


def inputs(shape: Shape, seed: int, *, on_device: bool) -> tuple[Any, ...]:
    """Draw q, k and v."""
    batch, heads, length = shape
    qkv = distributions.make("normal", batch, heads, length, length, HEAD_DIM, "float16", seed)
    if on_device:
        import cupy

        return tuple(cupy.asarray(x) for x in qkv)
    return qkv


def measured(
    qkv: tuple[Any, ...], shape: Shape, name: str, mode: str, rounds: int, *, on_device: bool
) -> dict[str, Any]:
    """Judge a way on one problem, and on a device time it beside the plain ones."""
    plain, way, row = WAYS[name](qkv, mode)
    row |= dict(zip(("batch", "heads", "length"), shape, strict=True))
    row |= {"mode": mode, "way": name}
    if on_device and row["ok"]:
        sets = timing.rotated(qkv)
        calls = {n: rotating(one, sets) for n, one in {**plain, "way": way}.items()}
        samples = timing.time_interleaved(calls, rounds=rounds)
        best = min(plain, key=lambda n: float(np.median(samples[n])))
        row["seconds"] = {n: float(np.median(x)) for n, x in samples.items()}
        row |= {"against": best, "samples": samples, "clocks": device.clocks()}
        row["speed_ratio"] = timing.paired_ratio(samples[best], samples["way"]).to_list()
        if SAME_TILES in plain:
            gain = timing.paired_ratio(samples[SAME_TILES], samples["way"]).to_list()
            row["of 1 / density"] = [x * row["density"] for x in gain]
    return row


def run(args: argparse.Namespace) -> int:
    """Measure every problem, print the table, write the record."""
    recording.check_rounds(args)
    found: list[dict[str, Any]] = []
    missing: list[list[Any]] = []
    drawn: dict[Shape, tuple[Any, ...]] = {}
    start = time.monotonic()
    for shape, name, mode in cells(args):
        if not args.quick and time.monotonic() - start > args.seconds:
            missing.append([*shape, name, mode])
            continue
        if shape not in drawn:
            drawn = {shape: inputs(shape, args.seed, on_device=not args.quick)}
        one = measured(drawn[shape], shape, name, mode, args.rounds, on_device=not args.quick)
        found.append(one)
        if not args.quick:
            said = map(str, (*shape, mode, name, *_gain(one)))
            print(" ".join(said), file=sys.stderr, flush=True)
    output.print_table(HEADER, table(found))
    content = {"rows": found, "missing": missing}
    if args.only is None or args.json is not None:  # some ways alone are no record of all
        record = recording.keep(
            args, "diffusion_gains", "mirror" if args.quick else "cuda", content
        )
        if args.update_docs and not args.quick:
            update_page(record)
    if missing:
        print(f"not measured within {args.seconds} s: {len(missing)} comparisons", file=sys.stderr)
    return 0 if found and all(row["ok"] for row in found) else 1


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells under `HEADER`."""
    known = HEADER[:5]
    return [[*(str(r[t]) for t in known), "yes" if r["ok"] else "NO", *_gain(r)] for r in rows]


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/DIFFUSION.md says was measured."""
    of_way: dict[str, int] = {name: i for i, name in enumerate(WAYS)}
    rows = sorted(record["rows"], key=lambda r: (of_way[r["way"]], r["batch"] * -1, r["length"]))
    named = [row for row in table(rows) if row[5] == "yes"]
    environment = record["environment"]
    where = f"{environment['device']['name']}, revision {environment['revision'][:10]}"
    return "\n".join([
        *recording.markdown([HEADER[4], *HEADER[:4], *HEADER[6:]],
                         [[row[4], *row[:4], *row[6:]] for row in named]),
        "", f"`{recording.command_now(record)}` on {where}{apart(rows)}.",
    ])  # fmt: skip


def apart(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what follows a record's command where rows were measured again by themselves."""
    later = dict.fromkeys((r["way"], r["revision"][:10]) for r in rows if "revision" in r)
    return "".join(f"; {way} at {revision}" for way, revision in later)


def merged(record: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in which another record's rows of its ways replace the old rows.

    Each of them says at which revision, and by which command, it was measured.
    """
    of_part = {"command": part["command"], "revision": part["environment"]["revision"]}
    rows = {_place(row): row for row in record["rows"]}
    rows |= {_place(row): {**row, **of_part} for row in part["rows"]}
    return {**record, "rows": list(rows.values())}


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("batch", "heads", "length", "mode", "way"))


def update_page(record: Mapping[str, Any]) -> None:
    """Write what was measured between the marks of docs/DIFFUSION.md."""
    recording.replace_between(PAGE, BEGIN, END, section(record))


def from_record(args: argparse.Namespace) -> int:
    """Write the page from the committed record, into which others are merged first."""
    update_page(merging.record_with("diffusion_gains", args.merge, merged))
    return 0


def _gain(row: Mapping[str, Any]) -> list[str]:
    if "speed_ratio" not in row:
        return ["-"] * 4
    middle, low, high = row["speed_ratio"]
    share = f"{row['of 1 / density'][0]:.0%}" if "of 1 / density" in row else "-"
    took = words.format_seconds(row["seconds"]["way"])
    return [took, row["against"], f"{middle:.2f} [{low:.2f}, {high:.2f}]", share]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.set_defaults(rounds=recording.LEAST_ROUNDS)
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="no comparison begins after so many"
    )
    parser.add_argument("--update-docs", action="store_true", help="write docs/DIFFUSION.md")
    parser.add_argument(
        "--stored",
        action="store_true",
        help="write it from the committed record, measuring nothing",
    )
    parser.add_argument("--only", metavar="WAY", help="ways that begin so, alone")
    parser.add_argument(
        "--merge",
        nargs="+",
        default=(),
        type=Path,
        metavar="FILE",
        help="put the rows of records of some ways alone into the committed one; measure nothing",
    )
    args = parser.parse_args(argv)
    if args.only is not None and not any(name.startswith(args.only) for name in WAYS):
        parser.error(f"--only must be how one of {', '.join(WAYS)} begins, got {args.only!r}")
    if args.stored or args.merge:
        return recording.guarded(from_record, args)
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
