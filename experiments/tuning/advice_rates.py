"""Which rates say what whole models gain?

Varies       nothing: it reads the gains of whole models, and the shapes of their weights.
Holds fixed  cupyattn/measure/whole_gains.json. LTX, Wan 2.2 5B and HunyuanVideo are held out, and
             the number of tokens of Wan 14B in experiments/results/diffusers_blocks.json.
Measures     seconds for each operation and element of a native pass, and seconds that each part
             saves. They are fitted by least squares of relative errors, and not negative.
Run          python -m experiments.tuning.advice_rates [--check | --pairs]

It measures nothing, so that there is no ``--quick`` and no record: it is a generator. It writes
cupyattn/diffusion/advice_rates.json, by which ``cupyattn advise`` predicts; ``--check`` writes
nothing and prints each prediction beside the record. ``--pairs`` writes nothing either: it fits
without each pair of families, and prints the largest error of that pair. Passes are CUDA graphs
where they were measured as such, so that the host has no part in them.

HunyuanVideo gives torch's attention a mask of keys, which makes it slower. No other family does, so
its own record cannot say how much. Rates of such attention are multiples of the rates without a
mask. The factors are of single calls with a mask of keys in experiments/results/scores.json:
cuDNN's for torch, and ours by admitted key.
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
from cupyattn.diffusion.work import HEAD_DIMS, MASKED, Work, kind_of_attention, work_of
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


def fitted(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return non-negative coefficients of columns that sum to the seconds of each row."""
    from scipy.optimize import nnls

    of = np.asarray(seconds)
    found, _ = nnls(np.asarray(rows) / of[:, None], np.ones(of.size))
    return [rounded(x) for x in found]


def rounded(x: float) -> float:
    """Return a number with the digits that the file has."""
    return float(f"{x:.6g}")


def ratios_of_masks(head_dim: int) -> tuple[float, float]:
    """Return how much longer torch's attention and ours take with a mask that admits all keys."""
    ratios = []
    for cell in recording.stored("scores")["problems"]:
        problem = cell["problem"]
        if problem["head_dim"] != head_dim or problem["dtype"] != "bfloat16":
            continue
        rows = {(row["feature"], row["name"]): row for row in cell["rows"]}
        torch, ours = (
            rows["key padding", name]["seconds"][0] / rows["plain", name]["seconds"][0]
            for name in ("cuDNN", "fa_tc")
        )  # fmt: skip
        ratios.append((torch, ours / cell["admitted"]))
    return median(torch for torch, _ in ratios), median(ours for _, ours in ratios)


def with_masks(row: dict[str, Any]) -> dict[str, Any]:
    """Add the rates of attention with a mask of keys."""
    attention = dict(row["attention"])
    saved = {accuracy: dict(of) for accuracy, of in row["saved_attention"].items()}
    for head_dim in HEAD_DIMS:
        plain = kind_of_attention(head_dim)
        masked = kind_of_attention(head_dim, MASKED[0])
        torch, ours = ratios_of_masks(head_dim)
        attention[masked] = rounded(torch * attention[plain])
        for of in saved.values():
            of[masked] = rounded(attention[masked] - ours * (attention[plain] - of[plain]))
    return {**row, "attention": attention, "saved_attention": saved}


def table(
    models: Sequence[whole_gains.WholeModel], held_out: Sequence[str] = HELD_OUT
) -> dict[str, Any]:
    """Return what the file holds, fitted without some of the families."""
    fit = [one for one in models if one.name not in held_out]
    works = {one.name: work_of_family(one.name) for one in fit}
    times = {one.name: measured(one) for one in fit}
    kinds = [kind_of_attention(head_dim) for head_dim in HEAD_DIMS]
    fit = [one for one in fit if not works[one.name].attention.keys() - kinds]

    def attention(one: whole_gains.WholeModel) -> list[float]:
        return [works[one.name].attention.get(kind, 0.0) / 1e12 for kind in kinds]

    def layers(one: whole_gains.WholeModel) -> float:
        return works[one.name].linear / 1e12

    native = fitted(
        [[layers(m), works[m.name].traffic / 1e9, *attention(m)] for m in fit],
        [times[m.name][0] for m in fit],
    )
    (saved_linear,) = fitted([[layers(m)] for m in fit], [times[m.name][1] for m in fit])
    saved = {
        accuracy: dict(zip(kinds, fitted(
            [attention(m) for m in fit], [times[m.name][2][accuracy] for m in fit]
        ), strict=True))
        for accuracy in CLASSES
    }  # fmt: skip
    device = fit[0].device
    row = {
        "device": device, "linear": native[0], "traffic": native[1],
        "attention": dict(zip(kinds, native[2:], strict=True)), "saved_linear": saved_linear,
        "saved_attention": saved,
    }  # fmt: skip
    return {
        "written_by": "python -m experiments.tuning.advice_rates",
        "held_out": list(held_out), "rates": {device.split()[-1].lower(): with_masks(row)},
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
    """Return the largest error of each pair of families that rates are fitted without, and where.

    Rates of attention with a mask are fitted to no family, so any pair may have it.
    """
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
