"""Static INT8 scales by timestep from recorded activations, saved, loaded and used.

Run it with ``python examples/calibrate_recorded.py [--data FILE] [--quick]``. With CuPy and a CUDA
device it runs on the device.

The default file ships with cupyattn. It has Q, K and V of two blocks of a trained diffusion
transformer, at three of its 50 steps. A file of your own model needs arrays of the same names.
"""

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.files import data_file
from cupyattn.measure.device import device_missing

STEPS = 50
#: Block and step -> Q, K, V.
Records = dict[tuple[int, int], list[Any]]


def load(xp: Any, path: Path, length: int) -> Records:
    """Read the first tokens of arrays (1, heads, tokens, head_dim) named ``layer1_step25_q``."""
    with np.load(path) as file:
        places = {tuple(map(int, re.findall(r"\d+", name))) for name in file.files}
        return {
            (block, step): [
                xp.asarray(file[f"layer{block}_step{step}_{x}"][:, :, :length]) for x in "qkv"
            ]
            for block, step in sorted(places)
        }


def main() -> None:
    """Calibrate each block, save, load, and compare with dynamic scales."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", metavar="FILE", type=Path, default=data_file("qkv_dit.npz"))
    parser.add_argument("--quick", action="store_true", help="few tokens")
    args = parser.parse_args()
    if device_missing():
        xp: Any = np
    else:
        import cupy as xp
    records = load(xp, args.data, 128 if args.quick else 1024)
    sigmas = ca.compute_sigma_schedule(STEPS, "flow")
    for block in sorted({block for block, _ in records}):
        batches = [(q, k, step) for (of, step), (q, k, _) in records.items() if of == block]
        found = ca.calibrate_quantization_scales(
            batches, 100.0, sigmas=sigmas, num_bins=len(batches), source=f"block {block}"
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "scales.safetensors"
            found.save(path)
            scales = ca.Calibration.load(path)
        heads, head_dim = batches[0][0].shape[1], batches[0][0].shape[3]
        options: dict[str, Any] = {"sigmas": "flow", "precision_policy": "balanced"}
        layers = {
            "static": ca.Int8Attention(heads, head_dim, STEPS, timestep_scales=scales, **options),
            "dynamic": ca.Int8Attention(heads, head_dim, STEPS, **options),
        }
        for (of, step), (q, k, v) in records.items():
            if of != block:
                continue
            exact = ca.attention(q, k, v).astype(np.float32)
            off = {
                name: float(xp.linalg.norm(layer(q, k, v, step).astype(np.float32) - exact))
                for name, layer in layers.items()
            }
            said = ", ".join(f"{n} {x / float(xp.linalg.norm(exact)):.1e}" for n, x in off.items())
            print(f"block {block}, step {step:2}: relative error with scales that are {said}")


if __name__ == "__main__":
    main()
