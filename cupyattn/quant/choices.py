"""Every choice of INT8 arithmetic, each as one change of the default, and valid combinations."""

from __future__ import annotations

from typing import Any

from cupyattn.quant.config import GRANULARITIES

#: Fields of QuantConfig that differ from the default, by the subject and the name of a choice.
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "granularity": {
        **{f"Q per {g}": {"granularity_q": g} for g in GRANULARITIES if g != "thread"},
        **{f"K per {g}": {"granularity_k": g} for g in GRANULARITIES if g != "thread"},
        **{
            f"Q and K per {g}": {"granularity_q": g, "granularity_k": g}
            for g in GRANULARITIES
            if g != "thread"
        },
    },
    "offsets of Q and K": {
        "K not smoothed": {"smooth_k": False},
        "zero points": {"symmetric": False},
        "zero points, K not smoothed": {"symmetric": False, "smooth_k": False},
    },
    "P and V in 8 bits": {
        "INT8 P and V": {"pv": "int8"},
        "INT8 P and V, P to 127": {"pv": "int8", "p_type": "s8"},
        "INT8 P and V, V per channel": {"pv": "int8", "granularity_v": "channel"},
        "INT8 P and V, V per tensor": {"pv": "int8", "granularity_v": "tensor"},
        "INT8 P and V, V not smoothed": {"pv": "int8", "smooth_v": False},
        "INT8 P and V, zero points": {"pv": "int8", "symmetric": False},
        "INT8 P and V, Q and K per token": {
            "pv": "int8", "granularity_q": "token", "granularity_k": "token",
        },
        "INT8 V, P in 16 bits": {"pv": "int8", "p_type": "16bit"},
        "e4m3 P and V": {"pv": "fp8"},
        "e4m3 P and V, V per channel": {"pv": "fp8", "granularity_v": "channel"},
        "e4m3 P and V, V not smoothed": {"pv": "fp8", "smooth_v": False},
    },
    "bits of Q and K": {
        "4 bits": {"qk_bits": 4},
        "4 bits, Q and K per token": {
            "qk_bits": 4, "granularity_q": "token", "granularity_k": "token",
        },
        "Q and K rotated": {"rotate": "hadamard"},
        "4 bits, Q and K rotated": {"qk_bits": 4, "rotate": "hadamard"},
    },
    "where codes come from": {
        "in the kernel, K not smoothed": {"smooth_k": False, "fused": True},
    },
}  # fmt: skip
