"""Pictures as arrays: how far two are apart, and how a page without other files shows them."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from typing import Any

import numpy as np

#: Standard deviation of the window of `ssim` in pixels, its cut in units of that (11 x 11 pixels),
#: and two constants. Source: Wang et al., Image quality assessment, IEEE Transactions on Image
#: Processing 13(4), 2004.
_SIGMA, _CUT, _K1, _K2 = 1.5, 3.5, 0.01, 0.03

Picture = Any


def psnr(a: Picture, b: Picture, *, peak: float = 255.0) -> float:
    """Return the peak signal-to-noise ratio of two pictures in decibels, infinity if equal.

    Parameters
    ----------
    a, b : array, (height, width, channels)
    peak : float
        The largest number that a pixel may have; 255 of uint8.

    Examples
    --------
    >>> x = np.zeros((2, 2, 3), np.uint8)
    >>> psnr(x, x), round(psnr(x, x + np.uint8(255)), 6)
    (inf, 0.0)
    """
    _check(a, b)
    error = float(np.mean(np.square(np.asarray(a, np.float64) - b)))
    return math.inf if error == 0 else 10 * math.log10(peak**2 / error)


def ssim(a: Picture, b: Picture, *, peak: float = 255.0) -> float:
    """Return the mean structural similarity of two pictures, 1 if equal.

    Parameters
    ----------
    a, b, peak
        As for `psnr`.

    Notes
    -----
    Of each channel with a Gaussian window of 1.5 pixels, cut off at 11 x 11, averaged.

    Examples
    --------
    >>> x = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    >>> round(ssim(x, x), 6)
    1.0
    """
    from scipy.ndimage import gaussian_filter

    _check(a, b)

    def local(x: Any) -> Any:
        return gaussian_filter(x, (_SIGMA, _SIGMA, 0), truncate=_CUT)

    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    mean_x, mean_y = local(x), local(y)
    variances = local(x * x) - mean_x**2 + local(y * y) - mean_y**2
    covariance = local(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * peak) ** 2, (_K2 * peak) ** 2
    of_means = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return float(np.mean(of_means * (2 * covariance + c2) / (variances + c2)))


def data_uri(picture: Picture) -> str:
    """Return a picture as a PNG within an address, ``data:image/png;base64,...``.

    Parameters
    ----------
    picture : array, (height, width, 3), uint8
    """
    height, width, _ = picture.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # a byte 0 before each: no filter
    lines[:, 1:] = picture.reshape(height, 3 * width)

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)) + chunk(b"IEND", b"")
    )  # fmt: skip
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _check(a: Picture, b: Picture) -> None:
    if a.shape != b.shape or a.ndim != 3:
        raise ValueError(
            f"pictures must have one shape (height, width, channels), got {a.shape} and {b.shape}"
        )
