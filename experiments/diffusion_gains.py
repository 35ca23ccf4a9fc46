"""What do guidance fusion, static scales, token pruning and block masks win over the plain call?

Varies       the way (both guidance branches in one launch; calibrated scales; a fifth of the keys
             dropped, selection included; blocks of a random mask kept), the mode, the length
Holds fixed  head_dim 128, float16, N(0, 1), self-attention; batch x heads as the length allows
Measures     time against the plain ways of the same mode in the same rounds: two calls, dynamic
             scales of the same granularity, all keys, all blocks; for masks as a share of 1 /
             density; for pruning also the relative error against all keys
Run          python -m experiments.diffusion_gains [--quick] [--json FILE]

Each way is first held to what it promises: the bits of two calls, those of attention over the keys
that were kept, or the bound J2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import device, distributions, testing, timing
from cupyattn import measure as measuring
from cupyattn.api import kernel_form
from cupyattn.checks import check_attention
from cupyattn.cli import output
from cupyattn.rounding import array_namespace, as_float64
from experiments import common

HEAD_DIM, RATIO, DENSITIES, BLOCK = 128, 0.2, (0.5, 0.25, 0.1), 64
#: Batch, heads, length.
SHAPES = ((1, 32, 256), (1, 32, 1024), (16, 32, 4096), (1, 32, 16_384), (1, 8, 32_768))
MODES = ("balanced", "precision")

Way = Callable[..., Any]


def layer(heads: int, **options: Any) -> ca.Int8Attention:
    """Return attention of one mode at every step; calls name the mode."""
    return ca.Int8Attention(heads, HEAD_DIM, 50, **options)


def holds_bound(o: Any, qkv: Sequence[Any], mode: str, **options: Any) -> float:
    """Return the largest error of an output as a share of its bound."""
    xp, quant = array_namespace(o), options.pop("quant", None)
    given = {**options, "variant": "fa_tc" if mode == "precision" else "fa_int8"}
    kernel = {"quant": quant} if mode != "precision" else {}
    form = kernel_form(*qkv, **given, **kernel)
    z = ca.quantize(*qkv, quant=quant, tiles=form["tiles"]) if mode != "precision" else None
    rows = xp.asarray(measuring.judged_rows(check_attention(*qkv)))
    return float(testing.judge(o, *qkv, quantized=z, rows=rows, **given, **form).ratio)


def guidance(qkv: Sequence[Any], mode: str) -> tuple[Way, Way, dict[str, Any]]:
    """Two calls, and both branches in one launch."""
    attend = layer(qkv[0].shape[1])

    def two(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, 0, mode=mode), attend(q[:, ::-1], k, v, 0, mode=mode)

    def one(q: Any, k: Any, v: Any) -> Any:
        return attend.fused_cfg(q, q[:, ::-1], k, v, 0, mode=mode)

    same = all(bool((a == b).all()) for a, b in zip(two(*qkv), one(*qkv), strict=True))
    return two, one, {"ok": same}


def static(qkv: Sequence[Any], mode: str) -> tuple[Way, Way, dict[str, Any]]:
    """Scales of each call's own per head, and calibrated ones: Q and K are read once less."""
    q, k, _ = qkv
    found = ca.calibrate_quantization_scales([(q, k)], 100.0)
    dynamic = layer(q.shape[1], quant=ca.QuantConfig("head", "head", smooth_k=False))
    fixed = layer(q.shape[1], timestep_scales=found)
    j2 = holds_bound(
        fixed(*qkv, 0, mode=mode), qkv, mode, quant=fixed.quant_config(q, k, 0, mode=mode)
    )
    return (
        lambda q, k, v: dynamic(q, k, v, 0, mode=mode),
        lambda q, k, v: fixed(q, k, v, 0, mode=mode),
        {"ok": j2 <= 1, "j2": j2},
    )


def pruning(qkv: Sequence[Any], mode: str) -> tuple[Way, Way, dict[str, Any]]:
    """All keys, and those that are kept, found by the call itself."""
    q, k, v = qkv
    plain = layer(q.shape[1])
    pruned = layer(q.shape[1], enable_pruning=True, pruning_ratio=RATIO)
    o, kept = pruned(q, k, v, 0, mode=mode, return_mask=True)
    few = (x[kept].reshape(*k.shape[:2], -1, HEAD_DIM) for x in (k, v))
    same = bool((plain(q, *few, 0, mode=mode) == o).all())
    every = as_float64(plain(q, k, v, 0, mode=mode))
    lost = measuring.relative_error(as_float64(o), every)
    return (
        lambda q, k, v: plain(q, k, v, 0, mode=mode),
        lambda q, k, v: pruned(q, k, v, 0, mode=mode),
        {"ok": same, "error against all keys": lost},
    )


def sparse(density: float) -> Callable[..., tuple[Way, Way, dict[str, Any]]]:
    """Return the comparison of a mask of this density with all blocks, kept by a mask as well."""

    def compare(qkv: Sequence[Any], mode: str) -> tuple[Way, Way, dict[str, Any]]:
        blocks = -(-qkv[0].shape[2] // BLOCK)
        kept = np.random.default_rng(0).random((blocks, blocks)) < density
        masks = [ca.BlockMask(m[None, None], BLOCK, BLOCK) for m in (np.ones_like(kept), kept)]
        every, few = (
            layer(qkv[0].shape[1], attention_type="block_sparse", block_mask=m) for m in masks
        )
        j2 = holds_bound(few(*qkv, 0, mode=mode), qkv, mode, block_mask=masks[1])
        return (
            lambda q, k, v: every(q, k, v, 0, mode=mode),
            lambda q, k, v: few(q, k, v, 0, mode=mode),
            {"ok": j2 <= 1, "j2": j2, "density": masks[1].density},
        )

    return compare


WAYS: dict[str, Callable[..., tuple[Way, Way, dict[str, Any]]]] = {
    "guidance in one launch": guidance,
    "calibrated scales": static,
    f"{RATIO:.0%} of keys pruned": pruning,
    **{f"{density:.0%} of blocks kept": sparse(density) for density in DENSITIES},
}


def rows(
    shape: tuple[int, int, int], rounds: int, seed: int, *, on_device: bool
) -> Iterator[dict[str, Any]]:
    """Judge every way on one problem, and on a device time it beside the plain one."""
    batch, heads, length = shape
    qkv: tuple[Any, ...] = distributions.make(
        "normal", batch, heads, length, length, HEAD_DIM, "float16", seed
    )
    if on_device:
        import cupy

        qkv = tuple(cupy.asarray(x) for x in qkv)
    for mode in MODES:
        for name, compare in WAYS.items():
            if compare is static and mode == "precision":
                continue
            plain, way, row = compare(qkv, mode)
            row |= {"batch": batch, "heads": heads, "length": length, "mode": mode, "way": name}
            if on_device and row["ok"]:
                sets = timing.rotated(qkv)
                calls = {
                    "plain": common.rotating(plain, sets), "way": common.rotating(way, sets),
                }  # fmt: skip
                samples = timing.time_interleaved(calls, rounds=rounds)
                ratio = timing.paired_ratio(samples["plain"], samples["way"])
                row["speed_ratio"] = ratio.to_list()
                row |= {"samples": samples, "clocks": device.clocks()}
            yield row


def run(args: argparse.Namespace) -> int:
    """Measure every problem, print the table, write the record."""
    shapes = ((1, 2, 100),) if args.quick else SHAPES
    found = [
        row
        for shape in shapes
        for row in rows(shape, args.rounds, args.seed, on_device=not args.quick)
    ]
    titles = ["batch", "heads", "length", "mode", "way"]
    output.print_table(
        [*titles, "holds", "faster by", "of 1 / density"],
        [[*(str(r[t]) for t in titles), "yes" if r["ok"] else "NO", *_gain(r)] for r in found],
    )
    common.keep(args, "diffusion_gains", "mirror" if args.quick else "cuda", {"rows": found})
    return 0 if all(row["ok"] for row in found) else 1


def _gain(row: dict[str, Any]) -> list[str]:
    if "speed_ratio" not in row:
        return ["-", "-"]
    middle, low, high = row["speed_ratio"]
    share = f"{middle * row['density']:.0%}" if "density" in row else "-"
    return [f"{middle:.2f} [{low:.2f}, {high:.2f}]", share]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return common.main(run, common.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
