"""How much do INT8 linear layers change the images of a diffusion transformer?

Varies       The linear layers of the blocks: 16 bits, INT8 with scales of blocks of 128 x 128, INT8
             with a scale for each channel. Each meets attention in 16 bits and in INT8.
Holds fixed  Weights, seeds, labels, 50 steps of Euler, as in `experiments.dit.quality`. Attention
             in INT8 runs in its mode "INT8, dynamic". Layers outside the blocks keep 16 bits.
Measures     PSNR and SSIM against 32-bit and 16-bit arithmetic, image by image. Frechet distance to
             real crops, in features of a small network trained here. Seconds of sampling.
Expect       Layers lose more than attention. Scales of channels lose less than scales of blocks.
             No mode adds 0.5 % to the Frechet distance.
Run          python -m experiments.dit.linear [--images N] [--quick] [--json FILE]

All products take float16 and return float16. ``--stored`` measures nothing and writes
docs/QUALITY.md from the records.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import array_namespace
from experiments.dit import modes, quality, report
from experiments.dit.model import Model
from experiments.dit.parameters import Parameters

#: Layers of a block, by the end of their name.
LAYERS = ("qkv", "out", "mlp.0", "mlp.1")
#: Modes beside 32 and 16 bits: strategy of the linear layers, mode of attention.
MODES: dict[str, tuple[str | None, str]] = {
    "INT8 layers by block": ("block", modes.FULL),
    "INT8 layers by channel": ("channel", modes.FULL),
    "INT8 attention": (None, modes.DYNAMIC),
    "INT8 layers by block, and attention": ("block", modes.DYNAMIC),
    "INT8 layers by channel, and attention": ("channel", modes.DYNAMIC),
}
Array = Any


def int8_layers(
    model: Model, weights: Parameters, strategy: str
) -> dict[str, Callable[[Array], Array]]:
    """Return the linear layers of all blocks with INT8 weights, by name.

    Parameters
    ----------
    model : Model
    weights : Parameters
        float16.
    strategy : {"block", "channel"}
        Which weights share a scale.
    """
    names = [f"{i}.{name}" for i in range(model.shape.depth) for name in LAYERS]
    return {name: _int8(weights, name, strategy, model.wide) for name in names}


def _int8(
    weights: Parameters, name: str, strategy: str, wide: np.dtype[Any]
) -> Callable[[Array], Array]:
    weight = weights[f"{name}.weight"].T
    xp = array_namespace(weight)
    layer = ca.Int8Linear.from_weight(
        xp.ascontiguousarray(weight), weights[f"{name}.bias"], strategy=strategy
    )
    return lambda x: layer(x.astype(np.float16)).astype(wide)


def models_of(model: Model, weights: Parameters) -> dict[str, Model]:
    """Return the transformer of every mode."""
    own: Mapping[str | None, Model] = {
        None: model,
        **{
            strategy: Model(
                model.shape, model.xp, model.wide.name, int8_layers(model, weights, strategy)
            )
            for strategy in ("block", "channel")
        },
    }
    found = {modes.REFERENCE: model, modes.FULL: model}
    return found | {name: own[strategy] for name, (strategy, _) in MODES.items()}


def run(args: argparse.Namespace) -> int:
    """Measure, print, record, and write the page."""
    if args.stored:
        return report.write()
    model, weights, network, accuracy = quality.prepared(args)
    of_attention = {modes.REFERENCE: modes.REFERENCE, modes.FULL: modes.FULL}
    of_attention |= {name: attention for name, (_, attention) in MODES.items()}
    at = {
        name: modes.attention_of(attention, model, args.steps)
        for name, attention in of_attention.items()
    }
    rows, least, _ = quality.compared(models_of(model, weights), weights, network, at, args)
    quality.keep(args, "dit_linear", network, accuracy, least, rows)
    return 0 if args.quick else report.write()


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return quality.start(run, quality.arguments(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
