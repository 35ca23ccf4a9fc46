"""Which rates say what whole models gain?

Varies       nothing: it reads the gains of whole models, and the shapes of their weights.
Holds fixed  cupyattn/measure/whole_gains.json. LTX and Wan 2.2 5B are held out, and so is the
             number of tokens of Wan 14B in experiments/results/diffusers_blocks.json.
Measures     seconds for each operation and element of a native pass, and seconds that each part
             saves. They are fitted by least squares of relative errors, and not negative.
Run          python -m experiments.tuning.advice_rates [--check]

It measures nothing, so that there is no ``--quick`` and no record: it is a generator. It writes
cupyattn/diffusion/advice_rates.json, by which ``cupyattn advise`` predicts; ``--check`` writes
nothing and prints each prediction beside the record. Passes are CUDA graphs where they were
measured as such, so that the host has no part in them. HunyuanVideo gives torch's attention a mask
of keys, which makes it slower: that attention has separate rates.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupyattn.diffusion import advice
from cupyattn.diffusion.work import Work, work_of
from cupyattn.measure import whole_gains
from experiments._harness.diffusers_models import libraries
from experiments._harness.whole_families import FAMILIES, Family
from experiments.tuning.whole_gains import CLASSES

#: Families that the rates are not fitted to.
HELD_OUT = ("LTX", "Wan 2.2 5B")


def work(family: Family) -> Work:
    """Return what a pass of a family computes; the model is made without memory."""
    torch, diffusers = libraries()
    with torch.device("meta"):
        model = getattr(diffusers, family.cls)(**family.config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    config = {**model.config, "_class_name": family.cls}
    return work_of(shapes, config, family.tokens, family.prompt)


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
    return [float(f"{x:.6g}") for x in found]


def table(models: Sequence[whole_gains.WholeModel]) -> dict[str, Any]:
    """Return what the file holds."""
    fit = [one for one in models if one.name not in HELD_OUT]
    works = {one.name: work(FAMILIES[one.name]) for one in fit}
    times = {one.name: measured(one) for one in fit}
    kinds = sorted({kind for w in works.values() for kind in w.attention})

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
        "held_out": list(HELD_OUT), "rates": {device.split()[-1].lower(): row},
    }  # fmt: skip


def text() -> str:
    """Return the text of the file."""
    return json.dumps(table(whole_gains.measured()), indent=1) + "\n"


def predictions(*names: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Return each gain as predicted and as measured, by family (all if none is named), and part."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for one in whole_gains.measured():
        if names and one.name not in names:
            continue
        of = work(FAMILIES[one.name])
        seconds, linear, attention = measured(one)
        row = {}
        for accuracy in CLASSES:
            said = advice.advise(of, one.tokens, accuracy)
            saved: Mapping[str, float] = {"linear": linear, "attention": attention[accuracy]}
            for parts in (("linear",), ("attention",), ("linear", "attention")):
                left = seconds - sum(saved[part] for part in parts)
                name = f"{' and '.join(parts)}, {accuracy}"
                row[name] = (said.gain(*parts), seconds / left)
        found[one.name] = row
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and write the file, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args(argv).check:
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
