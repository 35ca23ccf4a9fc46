"""The mirror of operands past every limit: infinities and NaN, and no warning on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn as ca

#: Operands filled with one value, by the kind of value.
VALUES = {"largest": None, "inf": np.inf, "nan": np.nan, "subnormal": 1e-40, "zero": 0.0}
TYPES = {
    "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}  # fmt: skip
QUANTS = {
    "int8": ca.QuantConfig(), "zero points": ca.QuantConfig(symmetric=False),
    "int8 values": ca.QuantConfig(pv="int8"), "fp8 values": ca.QuantConfig(pv="fp8"),
    "4 bits": ca.QuantConfig(qk_bits=4),
}  # fmt: skip


def calls(x: Any) -> dict[str, Callable[[], object]]:
    """Calls on an operand, by name."""
    found: dict[str, Callable[[], object]] = {}
    for variant in ("unfused", "fa", *(() if x.dtype == np.float32 else ("fa_tc",))):
        for name, options in {
            "alone": {}, "softcap": {"softcap": 2.0}, "largest scale": {"scale": 2.0**100},
            "masked": {"mask": np.zeros((9, 9), bool)},
        }.items():  # fmt: skip
            found[f"{variant}, {name}"] = lambda v=variant, o=options: ca.attention(
                x, x, x, variant=v, backend="mirror", **o
            )
    for name, quant in QUANTS.items():
        found[f"quantize, {name}"] = lambda quant=quant: ca.quantize(x, x, x, quant=quant)
        found[f"fa_int8, {name}"] = lambda quant=quant: ca.attention(
            x, x, x, variant="fa_int8", quant=quant, backend="mirror"
        )
    rows = x.reshape(-1, 32)
    found["act_quant"] = lambda: ca.act_quant(rows)
    found["weight_quant"] = lambda: ca.weight_quant(rows)
    return found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", VALUES)
def test_no_call_warns(value: str, dtype: str) -> None:
    kind, number = TYPES[dtype], VALUES[value]
    number = float(ml_dtypes.finfo(kind).max) if number is None else number
    x = np.full((1, 2, 9, 16), number, kind)
    for name, call in calls(x).items():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
        assert not seen, (name, [str(one.message) for one in seen])


def test_values_that_float16_does_not_hold_become_infinite() -> None:
    x = np.full((1, 1, 4, 16), 1e6, np.float32)
    v = ca.quantize(x, x, -x).v
    assert v is not None and v.dtype == np.float16 and (v == -np.inf).all()
