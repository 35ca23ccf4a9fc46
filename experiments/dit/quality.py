"""What does INT8 attention cost in the images of a diffusion transformer, and what does it win?

Varies       arithmetic of attention: 32 and 16 bits; INT8 with one static scale, static by
             timestep, dynamic, with late steps in 16 bits; INT8 by the adaptive policy, aggressive;
             INT4
Holds fixed  weights, linear layers in 16 bits, seeds, labels, 50 steps of Euler
Measures     PSNR and SSIM against 32-bit and 16-bit attention, image by image; relative error of
             the latents after each step against 16-bit; Frechet distance to real crops, in features
             of a small network trained here; seconds of sampling
Run          python -m experiments.dit.quality [--images N] [--quick] [--json FILE]

Intervals are 95 % bootstrap intervals over seeds. The Frechet distance is not the FID, and there is
no LPIPS: both take weights of networks that would have to be downloaded. ``--stored`` measures
nothing: it rewrites docs/QUALITY.md from the records.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.kinds import array_namespace
from cupyattn.cli import output
from cupyattn.measure import timing
from cupyattn.measure.words import format_seconds
from experiments._harness import recording
from experiments.dit import data, features, metrics, modes, pictures, report
from experiments.dit.model import Model
from experiments.dit.parameters import Parameters
from experiments.dit.sampler import BATCH, STEPS, sample
from experiments.dit.train import WEIGHTS, loaded

#: Real crops that samples are held to, and resamples of a distance, which takes longer than a mean.
REAL, DISTANCE_RESAMPLES = 4096, 200
#: Images of each mode that the grid shows: one for each photograph.
SHOWN = len(data.NAMES)
#: Stages of the network of features in a quick run.
QUICK_STAGES = features.Stages(size=8, stages=((4, 8), (2, 6)))
Array = Any


class Sampled:
    """Results of sampling in one mode; a new record is empty.

    Attributes
    ----------
    images : list of array
        Batches, 0 to 1, on the host.
    errors : list of list of float
        For each batch, relative error of the latents after each step, against 16-bit.
    seconds : list of float
        Of an image, for each batch.
    """

    def __init__(self) -> None:
        self.images: list[np.ndarray] = []
        self.errors: list[list[float]] = []
        self.seconds: list[float] = []


def distance(x: Array, from_: Array) -> Array:
    """Return the relative L2 distance of x, without a device synchronisation."""
    xp = array_namespace(x)
    return xp.linalg.norm((x - from_).ravel()) / xp.linalg.norm(from_.ravel())


def noting(path: list[Array]) -> Callable[[int, Array], None]:
    """Return what keeps the images after each step."""
    return lambda step, x: path.append(x)


def comparing(path: list[Array], errors: list[Array]) -> Callable[[int, Array], None]:
    """Return a callback that notes the distance of images from the kept ones at each step."""
    return lambda step, x: errors.append(distance(x, path[step]))


def sample_modes(
    models: Mapping[str, Model],
    weights: Parameters,
    seeds: Sequence[int],
    at: Mapping[str, modes.At],
    steps: int,
    advance: Callable[[str], None],
) -> dict[str, Sampled]:
    """Sample the same seeds in every mode, batch by batch, modes in turns.

    Parameters
    ----------
    models : mapping of str to Model
        Of each mode.
    weights : Parameters
    seeds : sequence of int
    at : mapping of str to callable
        Attention of each mode by step, `modes.FULL` among them.
    steps : int
    advance : callable
        Told of each mode of a batch.
    """
    found = {name: Sampled() for name in at}
    order = (modes.FULL, *(name for name in at if name != modes.FULL))
    for first in range(0, len(seeds), BATCH):
        some = seeds[first : first + BATCH]
        path: list[Array] = []  # of the latents in 16 bits
        for name in order:
            result, errors = found[name], []
            seen = noting(path) if name == modes.FULL else comparing(path, errors)
            start = time.perf_counter()
            images = on_host(
                sample(models[name], weights, some, at[name], steps=steps, seen=seen)
            )
            result.seconds.append((time.perf_counter() - start) / len(some))
            result.images.append(np.clip((images + 1) / 2, 0, 1))
            result.errors.append([float(error) for error in errors])
            advance(name)
    return found


def judged(
    found: Mapping[str, Sampled], distances: Callable[[np.ndarray], np.ndarray]
) -> list[dict[str, Any]]:
    """Return a row for each mode: what its images are held to, with intervals.

    Parameters
    ----------
    found : mapping of str to Sampled
    distances : callable
        Returns the distance of images, -1 to 1, to real ones, and that of every resample.
    """
    images = {name: np.concatenate(one.images) for name, one in found.items()}
    count = len(images[modes.FULL])
    to_real = {name: distances(2 * x - 1) for name, x in images.items()}
    rows = []
    for name, x in images.items():
        row: dict[str, Any] = {"mode": name, "images": count}
        for other in (modes.REFERENCE, modes.FULL):
            if name == other:
                continue
            per_image = metrics.psnr(x, images[other]), metrics.ssim(x, images[other])
            for metric, values in zip(("psnr", "ssim"), per_image, strict=True):
                row[f"{metric} to {other}"] = metrics.mean_interval(values)
                row[f"{metric}s to {other}"] = [round(float(value), 4) for value in values]
        over = to_real[name] - to_real[modes.FULL]
        for key, (value, *resampled) in (
            ("frechet", to_real[name]), ("frechet over 16-bit", over)
        ):  # fmt: skip
            row[key] = metrics.deviation_interval(float(value), resampled)
        errors = found[name].errors
        row["latent error"] = np.mean(errors, axis=0).tolist() if errors[0] else []
        rows.append(row)
    return rows


def compared(
    models: Mapping[str, Model],
    weights: Parameters,
    network: features.FeatureNet,
    at: Mapping[str, modes.At],
    args: argparse.Namespace,
) -> tuple[list[dict[str, Any]], list[float], dict[str, Sampled]]:
    """Sample and judge every mode.

    Returns
    -------
    rows : list of dict
    least : list of float
        Distance of as many real crops to the others, and its interval.
    found : dict of str to Sampled
    """
    model = models[modes.FULL]
    real, more = (
        data.crops(np.random.default_rng([0x4EA1 + i, args.seed]), crops, model.shape.size)[0]
        for i, crops in enumerate((256 if args.quick else REAL, args.images))
    )
    to_real = metrics.ToReal(features.features_of(network, real))
    resamples = [np.arange(args.images), *metrics.draws(args.images, DISTANCE_RESAMPLES)]

    def distances(images: np.ndarray) -> np.ndarray:
        """Distances for all images and for every resample, which are the same in every mode."""
        return to_real(features.features_of(network, images), resamples)

    batches = -(-args.images // BATCH)
    with output.progress("sampling", batches * len(at)) as advance:
        found = sample_modes(models, weights, range(args.images), at, args.steps, advance)
    rows = judged(found, distances)
    for row in rows:
        name = row["mode"]
        row["seconds of an image"] = (
            None if model.xp is np else timing.median(found[name].seconds).to_list()
        )
        row["fallbacks"] = modes.fallbacks(at[name])
    least, *resampled = distances(more)
    return rows, metrics.deviation_interval(float(least), resampled), found


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the printed table."""
    header = ["", "PSNR to 32-bit", "to 16-bit", "SSIM to 16-bit", "Frechet", "an image"]
    cells = []
    for row in rows:
        figures = [
            "-" if key not in row else report.with_interval(row[key], digits)
            for key, digits in (
                (f"psnr to {modes.REFERENCE}", 2), (f"psnr to {modes.FULL}", 2),
                (f"ssim to {modes.FULL}", 4), ("frechet", 3),
            )
        ]  # fmt: skip
        took = row["seconds of an image"]
        cells.append([row["mode"], *figures, "-" if took is None else format_seconds(took[0])])
    return header, cells


def prepared(args: argparse.Namespace) -> tuple[Model, Parameters, features.FeatureNet, float]:
    """Return the transformer and its weights, the network of features, and its accuracy."""
    sizes, steps = (QUICK_STAGES, 20) if args.quick else (features.Stages(), 1000)
    if args.images <= sizes.features or args.steps < 4:
        raise ValueError(
            f"--images must be more than {sizes.features} and --steps at least 4, got "
            f"{args.images} and {args.steps}"
        )
    xp, shape, weights = loaded(args, args.seed)
    with output.progress("training the network of features", steps) as advance:
        network, accuracy = features.train(
            sizes, xp, steps=steps, batch=16 if args.quick else 256, advance=advance
        )
    return Model(shape, xp), weights, network, accuracy


def keep(
    args: argparse.Namespace, name: str, network: features.FeatureNet, accuracy: float,
    least: list[float], rows: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Print the table of some modes and write their record."""
    output.print_table(*table(rows))
    content = {
        "steps": args.steps, "images": args.images, "features": network.sizes.features,
        "accuracy of the features": accuracy, "frechet of real crops": least, "rows": rows,
    }  # fmt: skip
    recording.keep(args, name, "mirror" if args.quick else "cuda", content)


def run(args: argparse.Namespace) -> int:
    """Measure, print, record, and write the page."""
    if args.stored:
        return report.write()
    model, weights, network, accuracy = prepared(args)
    with output.progress("calibrating") as advance:
        calibrations = modes.calibrate(model, weights, args.steps)
        advance("done")
    at = modes.attentions(model, args.steps, calibrations)
    rows, least, found = compared(dict.fromkeys(at, model), weights, network, at, args)
    keep(args, "dit_quality", network, accuracy, least, rows)
    grid = args.grid or (None if args.quick else report.GRID)
    if grid is not None:
        shown = np.concatenate([np.concatenate(found[n].images)[:SHOWN] for n in modes.NAMES])
        pictures.write_png(grid, pictures.grid(data.as_pixels(2 * shown - 1), SHOWN))
    return 0 if args.quick else report.write()


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of what comparisons of images take."""
    parser = recording.parser(about)
    parser.add_argument("--images", type=int, default=256, help="of each mode")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--weights", metavar="FILE", type=Path, default=WEIGHTS)
    parser.add_argument("--stored", action="store_true", help="write the page from the records")
    return parser


def start(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a comparison; without ``--stored`` it needs a device, or ``--quick``."""
    return (recording.guarded if args.stored else recording.main)(run, args)  # type: ignore[operator]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--grid", metavar="FILE", type=Path, help="picture, docs/quality_grid.png")
    return start(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
