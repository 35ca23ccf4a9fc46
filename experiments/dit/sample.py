"""Sample images from the trained weights, with attention of any of the modes that are compared.

    python -m experiments.dit.sample [--plot FILE.png] [--images N] [--steps N] [--mode NAME]

Modes with static scales calibrate first, on other images. ``--quick`` samples from weights that
were not trained, on the mirror.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cupyattn.cli import output
from experiments._harness import recording
from experiments.dit import data, modes, pictures
from experiments.dit.model import Model
from experiments.dit.sampler import BATCH, STEPS, sample_all
from experiments.dit.train import WEIGHTS, loaded


def run(args: argparse.Namespace) -> int:
    """Sample, and write the grid."""
    if args.images < 1 or args.steps < 2:
        raise ValueError(
            f"--images must be positive and --steps at least 2, got {args.images} and {args.steps}"
        )
    xp, shape, weights = loaded(args)
    model, calibrations = Model(shape, xp), []
    if modes.INT8.get(args.mode, {}).get("static"):
        calibrations = modes.calibrate(model, weights, args.steps)
    seeds = range(args.seed, args.seed + args.images)
    with output.progress("sampling", -(-args.images // BATCH)) as advance:
        images = sample_all(
            model, weights, seeds, modes.attention_of(args.mode, model, args.steps, calibrations),
            steps=args.steps, advance=advance,
        )  # fmt: skip
    pictures.write_png(args.plot, pictures.grid(data.as_pixels(images), shape.classes))
    print(f"wrote {args.plot}: {len(images)} images, columns " + ", ".join(data.NAMES))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, default=Path("dit_samples.png"))
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0, help="of the first image")
    parser.add_argument(
        "--mode", metavar="NAME", choices=modes.NAMES, default=modes.FULL,
        help="; ".join(modes.NAMES),
    )  # fmt: skip
    parser.add_argument("--weights", metavar="FILE", type=Path, default=WEIGHTS)
    parser.add_argument("--quick", action="store_true", help="untrained and tiny, without a device")
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
