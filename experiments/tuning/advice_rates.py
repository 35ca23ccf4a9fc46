"""Which rates say what whole models gain?

Varies       nothing: it reads the gains of whole models, and the shapes of their weights.
Holds fixed  cupyattn/measure/whole_gains.json and single calls of attention in
             experiments/results/scores.json. LTX, Wan 2.2 5B and HunyuanVideo are held out, and
             the number of tokens of Wan 14B in experiments/results/diffusers_blocks.json.
Measures     seconds for each operation and element of a native pass, and seconds that each part
             saves. They are fitted by least squares of relative errors, and not negative.
Run          python -m experiments.tuning.advice_rates [--check | --pairs]

It measures nothing, so that there is no ``--quick`` and no record: it is a generator. It writes
cupyattn/diffusion/advice_rates.json, by which ``cupyattn advise`` predicts; ``--check`` writes
nothing and prints each prediction beside the record. ``--pairs`` writes nothing either: it fits
without each pair of families, and prints the largest error of that pair. Passes are CUDA graphs
where they were measured as such, so that the host has no part in them.

Rates of attention are not fitted: they are single calls in bfloat16. Torch's rate is cuDNN's, and
ours is the rate of the fastest kernel that an accuracy class allows. HunyuanVideo has a mask of
keys, which makes torch's attention slower. Its rates are calls with such a mask, ours by admitted
key. For 8-bit P.V the factor to the balanced class comes from calls on an H100, in
experiments/results/peers_int8.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from cupyattn.diffusion import advice
from cupyattn.diffusion.work import HEAD_DIMS, KEYS, MASKED, Work, kind_of_attention, work_of
from cupyattn.measure import whole_gains
from experiments._harness import recording
from experiments._harness.diffusers_models import libraries
from experiments._harness.whole_families import FAMILIES, Family
from experiments.tuning.whole_gains import CLASSES

#: Families that the rates are not fitted to.
HELD_OUT = ("LTX", "Wan 2.2 5B", "HunyuanVideo")


def work(family: Family) -> Work:
    """Return what a pass of a family computes; the model is made without memory."""
    torch, diffusers = libraries()
    with torch.device("meta"):
        model = getattr(diffusers, family.cls)(**family.config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    config = {**model.config, "_class_name": family.cls}
    return work_of(shapes, config, family.tokens, family.prompt)


@functools.cache
def work_of_family(name: str) -> Work:
    """Return what a pass of a family of this name computes."""
    return work(FAMILIES[name])


def measured(one: whole_gains.WholeModel) -> tuple[float, float, dict[str, float]]:
    """Return seconds of a native pass, and what INT8 layers and each class of attention save."""
    how = "graphs" if "graphs" in one.gains else "blocks"
    seconds = one.native_seconds[how]

    def saved(part: str, accuracy: str) -> float:
        return seconds * (1 - 1 / one.gain(part, accuracy, how).median)

    return seconds, saved("linear", "full"), {name: saved("attention", name) for name in CLASSES}


def fitted(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], known: Sequence[float] | None = None
) -> list[float]:
    """Return non-negative coefficients of columns that sum to the seconds of each row.

    `known` seconds of each row are no column's.
    """
    from scipy.optimize import nnls

    of = np.asarray(seconds)
    left = of if known is None else of - known
    found, _ = nnls(np.asarray(rows) / of[:, None], left / of)
    return [rounded(x) for x in found]


def rounded(x: float) -> float:
    """Return a number with the digits that the file has."""
    return float(f"{x:.6g}")


def single_calls(head_dim: int, keys: int, masked: bool) -> tuple[float, dict[str, float]]:
    """Return seconds of 10^12 operations of torch's attention, and of ours by accuracy class."""
    (cell,) = (
        cell for cell in recording.stored("scores")["problems"]
        if is_of(cell, head_dim, keys) and cell["problem"]["dtype"] == "bfloat16"
    )  # fmt: skip
    given = cell["problem"]
    feature, admitted = ("key padding", cell["admitted"]) if masked else ("plain", 1.0)
    flops = 4e-12 * given["batch"] * given["heads"] * keys**2 * head_dim
    rates = {
        row["name"]: row["seconds"][0] / flops
        for row in cell["rows"] if row["feature"] == feature and row.get("seconds")
    }  # fmt: skip
    full = rates["fa_tc"] / admitted
    balanced = min(full, rates["fa_int8"] / admitted)
    aggressive = balanced * ratio_of_8_bit_pv(head_dim, keys)
    return rates["cuDNN"], {"full": full, "balanced": balanced, "aggressive": aggressive}


@functools.cache
def ratio_of_8_bit_pv(head_dim: int, keys: int) -> float:
    """Return the time of the fastest kernel with 8-bit P.V allowed, over that without it."""
    ratios = []
    for cell in recording.stored("peers_int8")["problems"]:
        if is_of(cell, head_dim, keys):
            seconds = {row["variant"]: row.get("seconds") for row in cell["rows"]}
            others = min(seconds["fa_tc"], seconds["fa_int8 balanced"])
            ratios.append(min(others, seconds["fa_int8 aggressive"]) / others)
    return median(ratios)


def is_of(cell: Mapping[str, Any], head_dim: int, keys: int) -> bool:
    """Whether a cell of a record is attention of this head_dim and as many queries as keys."""
    given = cell["problem"]
    return not (given["causal"] or given["length_kv"]) and (
        (given["head_dim"], given["length"]) == (head_dim, keys)
    )


@functools.cache
def rates_of_attention() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return rates of torch's attention by kind, and what ours saves by accuracy class and kind."""
    native: dict[str, float] = {}
    saved: dict[str, dict[str, float]] = {accuracy: {} for accuracy in CLASSES}
    for masked, head_dim, keys in itertools.product((False, True), HEAD_DIMS, KEYS):
        kind = kind_of_attention(head_dim, keys, MASKED[0] if masked else "")
        torch, ours = single_calls(head_dim, keys, masked)
        native[kind] = rounded(torch)
        for accuracy in CLASSES:
            saved[accuracy][kind] = rounded(torch - ours[accuracy])
    return native, saved


def table(
    models: Sequence[whole_gains.WholeModel], held_out: Sequence[str] = HELD_OUT
) -> dict[str, Any]:
    """Return what the file holds, fitted without some of the families."""
    fit = [one for one in models if one.name not in held_out]
    works = [work_of_family(one.name) for one in fit]
    native, linear, attention = zip(*map(measured, fit), strict=True)
    rates, saved = rates_of_attention()

    def time(per: Mapping[str, float], of: Work) -> float:
        return sum(per[kind] * flops for kind, flops in of.attention.items()) / 1e12

    layers, traffic = fitted(
        [[of.linear / 1e12, of.traffic / 1e9] for of in works], native,
        [time(rates, of) for of in works],
    )  # fmt: skip
    (saved_linear,) = fitted([[of.linear / 1e12] for of in works], linear)
    copies = {}
    for accuracy in CLASSES:
        (copies[accuracy],) = fitted(
            [[of.copies / 1e9] for of in works], [one[accuracy] for one in attention],
            [time(saved[accuracy], of) for of in works],
        )  # fmt: skip
    device = fit[0].device
    row = {
        "device": device, "linear": layers, "traffic": traffic, "attention": rates,
        "saved_linear": saved_linear, "saved_attention": saved, "saved_copies": copies,
    }  # fmt: skip
    return {
        "written_by": "python -m experiments.tuning.advice_rates",
        "held_out": list(held_out), "rates": {device.split()[-1].lower(): row},
    }  # fmt: skip


def text() -> str:
    """Return the text of the file."""
    return json.dumps(table(whole_gains.measured()), indent=1) + "\n"


def predictions(
    *names: str, rates: Mapping[str, advice.Rates] | None = None
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return each gain as predicted and as measured, by family (all if none is named), and part."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for one in whole_gains.measured():
        if names and one.name not in names:
            continue
        of = work_of_family(one.name)
        seconds, linear, attention = measured(one)
        row = {}
        for accuracy in CLASSES:
            said = advice.advise(of, one.tokens, accuracy, rates=rates)
            saved: Mapping[str, float] = {"linear": linear, "attention": attention[accuracy]}
            for parts in (("linear",), ("attention",), ("linear", "attention")):
                left = seconds - sum(saved[part] for part in parts)
                name = f"{' and '.join(parts)}, {accuracy}"
                row[name] = (said.gain(*parts), seconds / left)
        found[one.name] = row
    return found


def worst_of_pairs() -> dict[tuple[str, str], tuple[float, str]]:
    """Return the largest error of each pair of families that is held out, and where."""
    models, found = whole_gains.measured(), {}
    for pair in itertools.combinations([one.name for one in models], 2):
        rows = table(models, pair)["rates"]
        rates = {name: advice.Rates(**row) for name, row in rows.items()}
        found[pair] = max(
            (abs(said / was - 1), f"{name}, {part}")
            for name, parts in predictions(*pair, rates=rates).items()
            for part, (said, was) in parts.items()
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and write the file, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--pairs", action="store_true", help="errors of each pair held out")
    args = parser.parse_args(argv)
    if args.pairs:
        for pair, (error, where) in worst_of_pairs().items():
            print(f"without {' and '.join(pair)}: at most {error:.1%} off, {where}")
        return 0
    if not args.check:
        advice.FILE.write_text(text(), encoding="utf-8")
        print(f"wrote {advice.FILE}")
        return 0
    for model, row in predictions().items():
        for part, (said, was) in row.items():
            print(f"{model}, {part}: {said:.3f} predicted, {was:.3f} measured, {said / was:.3f}")
    current = advice.FILE.read_text(encoding="utf-8") == text()
    print(f"{advice.FILE} is {'what the record says' if current else 'out of date'}")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
