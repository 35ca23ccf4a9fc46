"""Photographs to learn from, and random crops of them.

The file that is read lies in experiments/data/photographs, with its licences. If scikit-image and
scikit-learn, the sources of the photographs, are installed, ``python -m experiments.dit.data``
makes it again.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.files import replacing
from experiments._harness import recording

FOLDER = recording.ROOT / "experiments" / "data" / "photographs"
FILE = FOLDER / "photographs.npz"
#: Source of each photograph, and its kept rows and columns.
SOURCES = {
    "brick": ("skimage", "data/brick.png", (512, 512)),
    "grass": ("skimage", "data/grass.png", (512, 512)),
    "gravel": ("skimage", "data/gravel.png", (512, 512)),
    "chelsea": ("skimage", "data/chelsea.png", (300, 451)),
    "coffee": ("skimage", "data/coffee.png", (400, 600)),
    "hubble": ("skimage", "data/hubble_deep_field.jpg", (512, 512)),
    "china": ("sklearn", "datasets/images/china.jpg", (427, 640)),
    "flower": ("sklearn", "datasets/images/flower.jpg", (427, 640)),
}
#: Names of photographs by number, the label of the model.
NAMES = tuple(SOURCES)
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


def from_packages() -> dict[str, UInt8]:
    """Read the photographs from the packages that brought them.

    Returns
    -------
    dict of str to array, uint8, (rows, columns, 1 or 3)

    Raises
    ------
    OSError
        Where one of the packages is not installed, or has no such file.
    """
    from PIL import Image

    found = {}
    for name, (package, place, (rows, columns)) in SOURCES.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise OSError(f"{package} is not installed, which brings {name}: pip install {package}")
        pixels = np.asarray(Image.open(Path(spec.origin).parent / place))
        found[name] = np.atleast_3d(pixels)[:rows, :columns]
    return found


@functools.cache
def photographs() -> dict[str, UInt8]:
    """Return the photographs of `FILE`, by name: (rows, columns, 1 or 3), uint8; never written."""
    with np.load(FILE) as file:
        found = {name: file[name] for name in NAMES}
    for pixels in found.values():
        pixels.flags.writeable = False
    return found


def crops(rng: np.random.Generator, count: int, size: int) -> tuple[Float32, npt.NDArray[np.intp]]:
    """Draw random crops, each of any photograph, half of them mirrored left to right.

    Parameters
    ----------
    rng : Generator
    count : int
    size : int
        Rows and columns of a crop.

    Returns
    -------
    images : array, float32, (count, size, size, 3)
        -1 to 1; grey photographs have three equal channels.
    labels : array, (count,)
        Index into `NAMES`.
    """
    labels = rng.integers(len(NAMES), size=count)
    images = np.empty((count, size, size, 3), np.float32)
    for image, label in zip(images, labels, strict=True):
        pixels = photographs()[NAMES[label]]
        top, left = (rng.integers(n - size + 1) for n in pixels.shape[:2])
        crop = pixels[top : top + size, left : left + size]
        image[...] = crop[:, ::-1] if rng.random() < 0.5 else crop
    return images / 127.5 - 1, labels


def as_pixels(images: Any) -> UInt8:
    """Return images of -1 to 1 as uint8 on the host, what lies beyond cut off.

    Examples
    --------
    >>> as_pixels(np.array([-2.0, -1.0, 0.0, 1.0])).tolist()
    [0, 0, 128, 255]
    """
    host = images.get() if hasattr(images, "get") else images
    return np.rint(np.clip((host + 1) * 127.5, 0, 255)).astype(np.uint8)


def main() -> int:
    """Write the file from the packages."""

    def write(_: Any) -> int:
        found = from_packages()
        with replacing(FILE) as file:
            np.savez_compressed(file, **found)
        print(f"wrote {FILE}, {FILE.stat().st_size:,} bytes")
        return 0

    return recording.guarded(write, None)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
