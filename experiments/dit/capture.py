"""Record Q, K and V of the trained transformer, for ablations and calibrations on real data.

    python -m experiments.dit.capture [--output FILE]

One image's, of a few blocks, steps and heads, normalised and turned as attention gets them, go to
experiments/data/qkv_dit.npz, a few megabytes of float16. ``--quick`` records an untrained one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host
from cupyattn.files import replacing
from experiments._harness import captures, recording
from experiments.dit import modes
from experiments.dit.attention import Kernels, Recorder
from experiments.dit.model import Model
from experiments.dit.parameters import Parameters
from experiments.dit.sampler import STEPS, sample
from experiments.dit.train import WEIGHTS, loaded

#: Heads that are kept, the first ones: all would be twice the size.
HEADS = 2


def blocks_of(depth: int) -> tuple[int, ...]:
    """Return the second block and the last but one.

    Examples
    --------
    >>> blocks_of(6), blocks_of(2)
    ((1, 4), (0, 1))
    """
    return tuple(sorted({min(1, depth - 2), max(depth - 2, 1)}))


def capture(model: Model, weights: Parameters) -> dict[str, np.ndarray]:
    """Return Q, K and V by name: ``layer1_step25_q`` and so on, (1, heads, len, head_dim), float16.

    Parameters
    ----------
    model : Model
    weights : Parameters
        float16.
    """
    found: list[Any] = []
    blocks, kept = blocks_of(model.shape.depth), captures.captured_steps(STEPS)

    def at(step: int) -> Any:
        return Recorder(Kernels(), step, blocks if step in kept else (), found)

    sample(model, weights, modes.CALIBRATION_SEEDS[:1], at)
    return {
        f"layer{layer}_step{step}_{name}": np.ascontiguousarray(on_host(x)[:, :HEADS])
        for step, layer, *operands in found
        for name, x in zip("qkv", operands, strict=True)
    }


def run(args: argparse.Namespace) -> int:
    """Record and write."""
    xp, shape, weights = loaded(args)
    arrays = capture(Model(shape, xp), weights)
    with replacing(args.output) as file:
        np.savez_compressed(file, **arrays)
    print(f"wrote {args.output}: {len(arrays)} arrays, {args.output.stat().st_size:,} bytes")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", metavar="FILE", type=Path, default=captures.CAPTURED)
    parser.add_argument("--weights", metavar="FILE", type=Path, default=WEIGHTS)
    parser.add_argument("--quick", action="store_true", help="untrained and tiny, without a device")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
