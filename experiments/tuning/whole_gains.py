"""What do attention and linear layers win in the whole models that were measured?

Varies       nothing: it reads the record of diffusion/whole_models.py.
Holds fixed  the record, experiments/results/whole_models.json.
Measures     the gain of each part of a model, compiled by blocks and as one CUDA graph. Parts are
             linear layers in INT8, attention of each accuracy class, and both. Gains are ratios
             of native speed with 95 % intervals. Beside them, the error of INT8 layers by channel.
Run          python -m experiments.tuning.whole_gains [--check]

It measures nothing, so that there is no ``--quick`` and no record: it is a generator. It writes
cupyattn/measure/whole_gains.json, by which ``accelerate`` chooses; ``--check`` writes nothing and
says whether that file is what the record says. It needs torch and diffusers for the widths of the
models, which are made without memory.

A part alone follows from three ways that took turns. Our 16-bit attention saves, in each round, the
time by which FP8 layers with it are faster than FP8 layers alone. INT8 attention saves more than
that: the time by which INT8 layers with it are faster than INT8 layers with 16-bit attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cupyattn.measure import timing
from cupyattn.measure.whole_gains import usual_width
from experiments._harness import recording
from experiments._harness.diffusers_models import libraries
from experiments._harness.recording import ROOT
from experiments._harness.whole_families import FAMILIES, Family
from experiments.diffusion import whole_models
from experiments.diffusion.whole_models import FP8, FP8_OURS, FULL, NATIVE

TARGET = ROOT / "cupyattn" / "measure" / "whole_gains.json"
#: Cells of the record, by how a model was compiled.
CELLS = {"blocks": "passes", "graphs": "graphs"}
#: Ways with INT8 layers, by their accuracy class of attention.
CLASSES = {
    "full": FULL, "balanced": whole_models.BALANCED, "aggressive": whole_models.AGGRESSIVE,
}  # fmt: skip


def width_of(family: Family) -> int:
    """Return how many channels most linear layers of a family take, as `accelerate` does."""
    torch, diffusers = libraries()
    with torch.device("meta"):
        model = getattr(diffusers, family.cls)(**family.shallow().config)
    from cupyattn.interop.torch.candidates import linear_layers

    return usual_width(layer.in_features for _, layer, _ in linear_layers(model))


def gains(ways: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gain of each part of a cell, each with its interval."""
    needed = (NATIVE, FP8, FP8_OURS, *CLASSES.values())
    samples = {name: ways[name]["samples"] for name in needed}

    def gain(saved: Sequence[float]) -> list[float]:
        left = [own - less for own, less in zip(samples[NATIVE], saved, strict=True)]
        found = timing.paired_ratio(samples[NATIVE], left)
        return [round(x, 4) for x in found.to_list()]

    def less(a: str, b: str) -> list[float]:
        return [x - y for x, y in zip(samples[a], samples[b], strict=True)]

    of_16_bits = less(FP8, FP8_OURS)
    attention = {
        accuracy: [a + b for a, b in zip(of_16_bits, less(FULL, way), strict=True)]
        for accuracy, way in CLASSES.items()
    }
    layers = [all_ - a for all_, a in zip(less(NATIVE, FULL), of_16_bits, strict=True)]
    return {
        "linear": gain(layers),
        "attention": {accuracy: gain(saved) for accuracy, saved in attention.items()},
        "both": {
            accuracy: [round(x, 4) for x in ways[way]["ratio"]] for accuracy, way in CLASSES.items()
        },
    }


def table(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file holds: the models of a record that were timed."""
    rows = []
    for row in record["rows"]:
        cells = {how: row["cells"][cell] for how, cell in CELLS.items() if cell in row["cells"]}
        if "blocks" not in cells:
            continue
        error = row["cells"]["errors"]["ways"]
        rows.append({
            "model": row["model"], "class": row["class"], "width": width_of(FAMILIES[row["model"]]),
            "tokens": row["tokens"], "prompt": row["prompt"],
            "device": cells["blocks"]["device"], "revision": cells["blocks"]["revision"][:10],
            "error": {
                name: round(error[way], 5)
                for name, way in (("native", NATIVE), ("channel", FULL), ("fp8", FP8_OURS))
            },
            "native_seconds": {
                how: round(cell["ways"][NATIVE]["seconds"], 6) for how, cell in cells.items()
            },
            "gains": {how: gains(cell["ways"]) for how, cell in cells.items()},
        })  # fmt: skip
    return {
        "written_by": "python -m experiments.tuning.whole_gains",
        "record": f"experiments/results/{whole_models.NAME}.json",
        "capability": record["environment"]["device"]["capability"],
        "models": rows,
    }


def text() -> str:
    """Return the text of the file for the stored record."""
    found = json.dumps(table(recording.stored(whole_models.NAME)), indent=1)
    return f"{found}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and write the file, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args(argv).check:
        current = TARGET.read_text(encoding="utf-8") == text()
        print(f"{TARGET} is {'what the record says' if current else 'out of date'}")
        return 0 if current else 1
    TARGET.write_text(text(), encoding="utf-8")
    print(f"wrote {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
