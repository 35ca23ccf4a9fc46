"""Static INT8 scales by timestep: recorded in one run of a sampler, used in the next.

Run it with ``python examples/calibrate_then_sample.py [--quick]``. With CuPy and a CUDA device it
runs on the device.

The denoiser needs no training. If the data are a list of points y of equal length, the best
denoiser is attention over the points, ``sum_j softmax_j(x . y_j / sigma^2) y_j``. Each head has its
own points, and its samples converge to one of them.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.measure.device import device_missing

HEADS, HEAD_DIM = 4, 64
#: Denoises x of (1, heads, samples, head_dim) at a step.
Denoiser = Callable[[Any, int], Any]


def points(xp: Any, count: int) -> Any:
    """Return data: (1, heads, count, head_dim), float16, all of length sqrt(head_dim)."""
    y = np.random.default_rng(0).standard_normal((1, HEADS, count, HEAD_DIM))
    y *= HEAD_DIM**0.5 / np.linalg.norm(y, axis=-1, keepdims=True)
    return xp.asarray(y.astype(np.float16))


def sample(xp: Any, denoise: Denoiser, sigmas: Any, samples: int, seed: int) -> Any:
    """Integrate the probability flow from noise to data with Euler's method."""
    noise = np.random.default_rng(seed).standard_normal((1, HEADS, samples, HEAD_DIM))
    x = xp.asarray((sigmas[0] * noise).astype(np.float32))
    for step, (sigma, after) in enumerate(zip(sigmas, (*sigmas[1:], 0.0), strict=True)):
        x += (after - sigma) / sigma * (x - denoise(x, step))
    return x


def main() -> None:
    """Record, calibrate, sample, compare with 16 bits from the same noise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, points and samples")
    quick = parser.parse_args().quick
    steps, count = (10, 128) if quick else (50, 512)
    if device_missing():
        xp: Any = np
    else:
        import cupy as xp

    sigmas = ca.compute_sigma_schedule(steps, "edm", sigma_min=0.2, sigma_max=20.0)
    y, recorded = points(xp, count), []

    def queries(x: Any, step: int) -> Any:
        return (x / sigmas[step] ** 2).astype(np.float16)

    def in_16_bits(x: Any, step: int) -> Any:
        recorded.append((queries(x, step), y, step))
        return ca.attention(queries(x, step), y, y, scale=1.0).astype(np.float32)

    sample(xp, in_16_bits, sigmas, count, seed=1)
    scales = ca.calibrate_quantization_scales(
        recorded, 100.0, sigmas=sigmas, num_bins=5, source="calibrate_then_sample"
    )
    attend = ca.Int8Attention(
        HEADS, HEAD_DIM, steps, timestep_scales=scales, sigmas=sigmas, scale=1.0
    )

    def in_int8(x: Any, step: int) -> Any:
        return attend(queries(x, step), y, y, step).astype(np.float32)

    ends = [sample(xp, denoise, sigmas, count, seed=2) for denoise in (in_16_bits, in_int8)]
    nearest = [(end @ y.astype(np.float32).swapaxes(-1, -2)).argmax(axis=-1) for end in ends]
    modes = [attend.mode(step) for step in range(steps)]
    print({mode: modes.count(mode) for mode in ca.diffusion.MODES})
    print(f"{float((nearest[0] == nearest[1]).mean()):.1%} of samples end at the same point")


if __name__ == "__main__":
    main()
