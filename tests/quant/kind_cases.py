"""One row for every function of codes: its arrays, and a call that gives arrays back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.ops.linear import outlier_columns
from cupyattn.testing import judge

Arrays = Mapping[str, Any]

_RNG = np.random.default_rng(3)
Q, K, V = _RNG.standard_normal((3, 1, 2, 20, 16)).astype(np.float16)
QKV = {"q": Q, "k": K, "v": V}
W = _RNG.standard_normal((5, 200)).astype(np.float32)
X = _RNG.standard_normal((3, 200)).astype(np.float32)
BIAS = W[:, 0].copy()
A, A_SCALES = ca.act_quant(X)
B, B_SCALES = ca.weight_quant(W)
OUT, LSE = ca.attention(Q, K, V, return_lse=True)
ANGLES = _RNG.standard_normal((20, 8))
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)
MASK = np.tri(20, dtype=bool)
LAYER = {"codes": B, "scales": B_SCALES, "bias": BIAS, "x": X}


def _turned(g: Arrays) -> Any:
    z = ca.quantize(g["q"], g["k"], g["v"], rope=(g["cos"], g["sin"]))
    return ca.attention(z, causal=True, return_lse=True)


def _static(g: Arrays) -> str:
    quant = ca.QuantConfig("head", "head", scales=(g["q_scale"], g["k_scale"]))
    return str(ca.quantize(Q, K, V, quant=quant).q_codes)


def _wrapped(g: Arrays) -> ca.QuantizedQKV:
    operands = dict(g)
    codes = [operands.pop(name) for name in ("q_codes", "k_codes", "v", "q_scale", "k_scale")]
    return ca.QuantizedQKV.from_codes(*codes, **operands)


_CODED = ca.quantize(**QKV, quant=ca.QuantConfig("head", "head", symmetric=False))
CODES = {
    name: getattr(_CODED, name)
    for name in ("q_codes", "k_codes", "v", "q_scale", "k_scale", "q_zero", "k_zero", "k_mean")
}  # fmt: skip
OF_VALUES = {
    "q_codes": CODES["q_codes"], "k_codes": CODES["k_codes"], "v": CODES["k_codes"],
    "q_scale": CODES["q_scale"], "k_scale": CODES["k_scale"],
    "v_scale": np.full((1, 2, 1, 16), 0.02, np.float32), "v_mean": CODES["k_mean"],
    "v_zero": np.full((1, 1, 1, 1), 3, np.int32),
}  # fmt: skip

#: Functions of arrays, the arrays by name, and the result or results.
CASES: dict[str, tuple[Arrays, Callable[[Arrays], Any]]] = {
    "act_quant": ({"x": X}, lambda g: ca.act_quant(g["x"])),
    "act_quant, other blocks": ({"x": X}, lambda g: ca.act_quant(g["x"], 32)),
    "norm_quant": (
        {"x": X, "weight": X[0], "scale": X[1:2]},
        lambda g: ca.norm_quant(g["x"], norm="rms", weight=g["weight"], scale=g["scale"]),
    ),
    "weight_quant": ({"w": W}, lambda g: ca.weight_quant(g["w"])),
    "weight_dequant": (
        {"codes": B, "scales": B_SCALES},
        lambda g: ca.weight_dequant(g["codes"], g["scales"]),
    ),
    "int8_gemm": (
        {"a": A, "a_scales": A_SCALES, "b": B, "b_scales": B_SCALES, "bias": BIAS},
        lambda g: ca.int8_gemm(*list(g.values())[:4], "float32", bias=g["bias"]),
    ),
    "Int8Linear": (
        LAYER,
        lambda g: ca.Int8Linear(g["codes"], g["scales"], g["bias"])(g["x"]),
    ),
    "act_quant by channel": ({"x": X}, lambda g: ca.act_quant(g["x"], strategy="channel")),
    "Int8Linear by channel": (
        {"w": W, "bias": BIAS, "x": X},
        lambda g: ca.Int8Linear.from_weight(g["w"], g["bias"], strategy="channel")(g["x"]),
    ),
    "Int8Linear.from_weight": (
        {"w": W, "x": X},
        lambda g: ca.Int8Linear.from_weight(
            g["w"], outlier_columns=[3], outlier_dtype="float16"
        )(g["x"]),
    ),
    "quantize": (QKV, lambda g: ca.attention(ca.quantize(**g), return_lse=True)),
    "quantize, rope": (QKV | {"cos": COS, "sin": SIN}, _turned),
    "quantize, plan": (QKV, lambda g: ca.plan(z := ca.quantize(**g))(z)),
    "QuantizedQKV.dequantize": (QKV, lambda g: ca.quantize(**g).dequantize()),
    "quantize_kv": (
        QKV,
        lambda g: ca.attention(ca.quantize_kv(g["k"], g["v"]).with_q(g["q"])),
    ),
    "from_codes": (CODES, lambda g: ca.attention(_wrapped(g), return_lse=True)),
    "from_codes, V too": (OF_VALUES, lambda g: ca.attention(_wrapped(g))),
    "from_codes, dequantize": (CODES, lambda g: _wrapped(g).dequantize()),
    "with_q": ({"q": Q}, lambda g: ca.attention(ca.quantize_kv(K, V).with_q(g["q"]))),
}  # fmt: skip

#: Functions whose results are no arrays: they must say the same of arrays of every kind.
TOLD: dict[str, tuple[Arrays, Callable[[Arrays], str]]] = {
    "judge": (
        QKV | {"o": OUT, "lse": LSE},
        lambda g: str(judge(g["o"], g["q"], g["k"], g["v"], lse=g["lse"], variant="auto")),
    ),
    "judge, masked": (
        QKV | {"mask": MASK, "o": ca.attention(**QKV, mask=MASK)},
        lambda g: str(
            judge(g["o"], g["q"], g["k"], g["v"], mask=g["mask"], variant="auto")
        ),
    ),
    "QuantConfig.scales": ({name: CODES[name] for name in ("q_scale", "k_scale")}, _static),
    "outlier_columns": ({"x": X}, lambda g: str(outlier_columns(g["x"], 2.0))),
}  # fmt: skip


def flat(results: Any) -> tuple[Any, ...]:
    """Return one result or several as a tuple."""
    return results if isinstance(results, tuple) else (results,)


def check(case: str, made_of: Callable[[np.ndarray], Any], back: Callable[[Any], Any]) -> None:
    """Check that a function gives back the kind that it is given, with the bits of NumPy's.

    `made_of` makes an array of the kind, `back` a NumPy array of one.
    """
    arrays, call = CASES[case]
    given = {name: made_of(array) for name, array in arrays.items()}
    expected, found = flat(call(arrays)), flat(call(given))
    kind = type(made_of(X))
    for left, right in zip(found, expected, strict=True):
        assert type(left) is kind
        np.testing.assert_array_equal(back(left), right)
        assert back(left).dtype == right.dtype
