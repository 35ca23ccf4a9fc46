"""One row for every public function that takes arrays: a small call, its arrays by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import diffusion, unfused
from cupyattn.diffusion import pruning
from cupyattn.ops import linear

Arrays = Mapping[str, Any]
Call = Callable[[dict[str, Any]], Any]

_RNG = np.random.default_rng(5)
Q, K, V, D_OUT = _RNG.standard_normal((4, 1, 2, 8, 16)).astype(np.float16)
MASK = _RNG.random((1, 1, 8, 8)) < 0.8
BIAS = _RNG.standard_normal((1, 2, 8, 8)).astype(np.float32)
COS, SIN = np.cos(BIAS[0, 0]), np.sin(BIAS[0, 0])
WEIGHTS = _RNG.standard_normal((2, 16)).astype(np.float32)
OFFSETS = np.array([0, 3, 8], np.int32)
OUT, LSE = ca.attention(Q, K, V, return_lse=True)
PACKED = {n: x[0].swapaxes(0, 1).copy() for n, x in (("q", Q), ("k", K), ("v", V))}
PACKED |= {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
O_PACKED, LSE_PACKED = ca.attention_varlen(*PACKED.values(), return_lse=True)
W = _RNG.standard_normal((5, 200)).astype(np.float32)
X = _RNG.standard_normal((3, 200)).astype(np.float16)
A, A_SCALES = ca.act_quant(X)
B, B_SCALES = ca.weight_quant(W)
S = unfused.scores(Q, K)
P = unfused.softmax(S)
IMPORTANCE = diffusion.key_importance(Q, K)
QKV = {"q": Q, "k": K, "v": V}
SCORED = (
    QKV
    | {"mask": MASK, "bias": BIAS, "cos": COS, "sin": SIN}
    | {"q_weight": WEIGHTS[0], "k_weight": WEIGHTS[1]}
)
GRADIENT = {"d_out": D_OUT, **QKV, "out": OUT, "lse": LSE}
CODES = ca.quantize(Q, K, V)


def _options(given: Arrays) -> dict[str, Any]:
    """Return tables and weights as the pairs that calls take."""
    options = dict(given)
    options["rope"] = options.pop("cos"), options.pop("sin")
    options["qk_norm"] = options.pop("q_weight"), options.pop("k_weight")
    return options


def _planned(given: dict[str, Any]) -> Any:
    return ca.plan(**_options(given))(*(given[n] for n in "qkv"))


def _unpruned(given: dict[str, Any]) -> Any:
    return ca.Int8Attention(2, 16, num_timesteps=4)(given["q"], given["k"], given["v"], 1)


#: (arrays by name, call). A name stands for a function of `cupyattn`, or of one of its modules.
CALLS: dict[str, tuple[Arrays, Call]] = {
    "attention": (SCORED, lambda g: ca.attention(**_options(g))),
    "attention_varlen": (PACKED, lambda g: ca.attention_varlen(**g)),
    "plan": (SCORED, _planned),
    "explain": (SCORED, lambda g: ca.explain(**_options(g))),
    "quantize": (QKV, lambda g: ca.quantize(**g)),
    "QuantizedQKV": (
        {
            "q_codes": CODES.q_codes,
            "k_codes": CODES.k_codes,
            "v": V,
            "q_scale": WEIGHTS[:1, None, :1],
            "k_scale": WEIGHTS[1:, None, :1],
        },
        lambda g: ca.attention(ca.QuantizedQKV.from_codes(**g)),
    ),
    "QuantConfig": (
        {"q_scale": abs(WEIGHTS[:1, None, :1]), "k_scale": abs(WEIGHTS[1:, None, :1])},
        lambda g: ca.quantize(
            Q,
            K,
            V,
            quant=ca.QuantConfig(
                granularity_q="tensor", granularity_k="tensor", scales=tuple(g.values())
            ),
        ),
    ),
    "act_quant": ({"x": X}, lambda g: ca.act_quant(**g)),
    "weight_quant": ({"w": W}, lambda g: ca.weight_quant(**g)),
    "weight_dequant": ({"codes": B, "scales": B_SCALES}, lambda g: ca.weight_dequant(**g)),
    "int8_gemm": (
        {"a": A, "a_scales": A_SCALES, "b": B, "b_scales": B_SCALES, "bias": W[:, 0].copy()},
        lambda g: ca.int8_gemm(**g, out_dtype="float16"),
    ),
    "Int8Linear": (
        {"codes": B, "scales": B_SCALES, "bias": W[:, 0].copy(), "x": X},
        lambda g: ca.Int8Linear(*list(g.values())[:3])(g["x"]),
    ),
    "Int8Linear.from_weight": (
        {"weight": W.astype(np.float16), "x": X},
        lambda g: ca.Int8Linear.from_weight(g["weight"], outlier_columns=[3, 9])(g["x"]),
    ),
    "quant.outlier_columns": ({"x": X}, lambda g: linear.outlier_columns(g["x"], 2.0)),
    "attention_backward": (GRADIENT, lambda g: ca.attention_backward(**g)),
    "explain_backward": (GRADIENT, lambda g: ca.explain_backward(**g)),
    "attention_varlen_backward": (
        {"d_out": O_PACKED, **PACKED, "out": O_PACKED, "lse": LSE_PACKED},
        lambda g: ca.attention_varlen_backward(**g),
    ),
    "BlockMask": (
        {"mask": MASK[:, :, :1, :1]},
        lambda g: ca.attention(Q, K, V, block_mask=ca.BlockMask(g["mask"], 64, 64)),
    ),
    "unfused.scores": ({"q": Q, "k": K, "mask": MASK, "bias": BIAS}, lambda g: unfused.scores(**g)),
    "unfused.softmax": ({"S": S}, lambda g: unfused.softmax(**g)),
    "unfused.weighted_sum": ({"P": P, "v": V}, lambda g: unfused.weighted_sum(**g)),
    "diffusion.key_importance": ({"q": Q, "k": K}, lambda g: diffusion.key_importance(**g)),
    "diffusion.pruning.compact": (
        {"k": K, "v": V, "importance": IMPORTANCE},
        lambda g: pruning.compact(g["k"], g["v"], g["importance"], 3),
    ),
    "Int8Attention": (QKV, _unpruned),
    "calibrate_quantization_scales": (
        {"q": Q, "k": K},
        lambda g: ca.calibrate_quantization_scales([tuple(g.values())], sigmas=None).q_scale,
    ),
    "ladder": (QKV, lambda g: ca.ladder(**g, variants=["fa"]).ok),
}

#: Public names that take no array, and why where that is not plain.
WITHOUT_ARRAYS = {
    "Calibration", "DeviceMemoryError", "GemmTiles", "Int8Config", "KernelCompileError",
    "KernelLaunchError", "Tiles", "UnsupportedError", "VARIANTS", "Variant", "__version__",
    "compute_adaptive_scales", "compute_sigma_schedule", "register",
    # Modules:
    "bounds", "checkpoints", "diffusion", "distributed", "distributions", "gradients", "quant",
    "reference", "testing", "unfused",
}  # fmt: skip
