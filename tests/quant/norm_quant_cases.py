"""Calls of `cupyattn.norm_quant`, by name, for the interpreter and for devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.kinds import STORAGE
from cupyattn.quant.activation import GLU
from cupyattn.quant.row_steps import RowSteps
from cupyattn.reference.norm_quant import Vectors
from tests.quant.quant_inputs import operand


@dataclass(frozen=True)
class Case:
    """One call: the shape of its codes, what happens to rows, and types of arrays by name."""

    shape: tuple[int, ...]
    dtype: str = "float16"
    steps: tuple[tuple[str, Any], ...] = ()
    vectors: tuple[tuple[str, str], ...] = ()
    groups: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the call beside arrays."""
        return dict(self.steps)

    def arrays(self, seed: int = 0, regime: str = "normal") -> dict[str, npt.NDArray]:
        """Draw x and the vectors over its channels."""
        rng = np.random.default_rng(seed)
        doubled = 2 if self.options.get("activation") in GLU else 1
        shape = (*self.shape[:-1], doubled * self.shape[-1])
        flat = 1, 1, int(np.prod(shape[:-1])), shape[-1]
        found = {"x": operand(seed, STORAGE[self.dtype], flat, regime).reshape(shape)}
        for name, dtype in self.vectors:
            one = (self.groups, self.shape[-1]) if name in ("scale", "shift") else self.shape[-1:]
            found[name] = rng.standard_normal(one).astype(STORAGE[dtype])
        return found

    @property
    def settled(self) -> RowSteps:
        """Return the operations on rows, for mirror and bound."""
        given = {"norm": None, "rotate": None, "strategy": "channel", **self.options}
        activation, eps = given.get("activation") or "", float(np.float32(given.get("eps", 1e-6)))
        return RowSteps(given["norm"], activation, given["rotate"], eps, given["strategy"])


def case(
    *shape: int, dtype: str = "float16", vectors: str = "", groups: int = 1, **steps: Any
) -> Case:
    """Make a case; `vectors` has ``name:dtype``, apart by blanks."""
    named = tuple(tuple(one.split(":")) for one in vectors.split())
    return Case(shape, dtype, tuple(steps.items()), named, groups)  # type: ignore[arg-type]


def flat_vectors(arrays: dict[str, npt.NDArray]) -> Vectors:
    """Return the vectors as mirror and bound take them."""
    return Vectors.of(arrays)


def dequantised(codes: npt.NDArray, scales: npt.NDArray) -> npt.NDArray[np.float64]:
    """Return codes times their scales, by row."""
    flat = codes.reshape(-1, codes.shape[-1]).astype(np.float64)
    of = scales.reshape(len(flat), -1).astype(np.float64)
    every = flat.shape[1] if of.shape[1] == 1 else 128
    return flat * np.repeat(of, every, axis=1)[:, : flat.shape[1]]


MODULATED = "scale:float16 shift:float16"
#: Every step, type, width of access, and number of warps of a row, at least once.
CASES = {
    "layer, one warp": case(5, 192, norm="layer"),
    "layer, modulated": case(6, 384, norm="layer", vectors=MODULATED, groups=3),
    "layer, modulated by token": case(2, 3, 1536, norm="layer", vectors=MODULATED, groups=6),
    "layer, weight and bias": case(
        3, 1024, dtype="bfloat16", norm="layer", vectors="weight:bfloat16 bias:bfloat16"
    ),
    "rms, float32 weight": case(3, 3072, dtype="bfloat16", norm="rms", vectors="weight:float32"),
    "layer, four warps": case(
        3, 5120, dtype="bfloat16", norm="layer", vectors="scale:float32 shift:float32"
    ),
    "rms, all vectors": case(
        4, 640, norm="rms", vectors="weight:float32 bias:float32 scale:bfloat16 shift:bfloat16",
        groups=2,
    ),
    "shift alone": case(3, 264, dtype="float32", vectors="shift:float32"),
    "odd width": case(3, 333, norm="layer", vectors="weight:float16 scale:float32"),
    "four at a time": case(3, 1540, dtype="bfloat16", norm="rms", vectors="shift:bfloat16"),
    "blocks": case(3, 1152, norm="layer", strategy="block", vectors=MODULATED),
    "blocks, odd width": case(5, 300, dtype="float32", norm="rms", strategy="block"),
    "rotated by 256": case(3, 1536, norm="layer", rotate="hadamard", vectors=MODULATED),
    "rotated by 128": case(3, 1152, dtype="bfloat16", norm="rms", rotate="hadamard"),
    "rotated by 64": case(5, 192, dtype="float32", rotate="hadamard", vectors="weight:float32"),
    "rotated alone": case(3, 3072, rotate="hadamard"),
    "rotated, several rows of a warp": case(9, 256, norm="layer", rotate="hadamard"),
    "rotated, factors of a block": case(
        8, 1792, norm="rms", rotate="hadamard", vectors="scale:float16 shift:float16", groups=2
    ),
    "rotated, factors of each row": case(
        3, 3072, dtype="bfloat16", norm="layer", rotate="hadamard", vectors=MODULATED, groups=3
    ),
    "rotated, one warp of three sets": case(
        3, 3072, dtype="bfloat16", norm="layer", rotate="hadamard",
        vectors="scale:bfloat16 shift:bfloat16",
    ),
    "rotated, one warp of five sets": case(
        2, 5120, norm="layer", rotate="hadamard", vectors=MODULATED
    ),
    "rotated, six warps": case(2, 6144, norm="layer", rotate="hadamard", vectors=MODULATED),
    "rotated, idle lanes": case(
        3, 1792, dtype="bfloat16", norm="layer", rotate="hadamard", vectors="weight:bfloat16"
    ),
    "rotated, idle lanes of a warp": case(9, 320, norm="rms", rotate="hadamard"),
    "codes alone": case(3, 1536),
    "large eps": case(3, 256, norm="rms", eps=0.5),
}  # fmt: skip
#: With an activation, which devices approximate.
ACTIVATED = {
    "gelu": case(4, 512, activation="gelu"),
    "gelu_tanh, rotated": case(4, 768, activation="gelu_tanh", rotate="hadamard"),
    "silu behind a norm, rotated": case(
        4, 256, norm="rms", activation="silu", rotate="hadamard", vectors=MODULATED
    ),
    "swiglu": case(4, 384, dtype="bfloat16", activation="swiglu", strategy="block"),
    "geglu, gate last": case(4, 256, activation="geglu_gate_last", rotate="hadamard"),
}
#: The widest rows: 14 warps, whose factors stay in registers, and 32.
WIDE = {
    "14 warps": case(3, 13_824, norm="layer", rotate="hadamard", vectors=MODULATED),
    "32 warps": case(2, 20_480, norm="rms", vectors="weight:float16"),
}
