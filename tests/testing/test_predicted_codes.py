"""The judge holds outputs to predicted codes of P where it knows the tiles of the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import distributions
from cupyattn.kernels.numerics import numerics
from cupyattn.problem.attention import KernelCall, kernel_call
from cupyattn.problem.settings import Settings
from cupyattn.testing import judge
from cupyattn.testing.expected import PREDICTED, expectation
from cupyattn.testing.judged import judge_kernel
from experiments.accuracy.predicted_codes import FORMS

INTEGERS = [name for name in FORMS if "e4m3" not in name and "fp8" not in name]
FLOATS = [name for name in FORMS if name not in INTEGERS]


@dataclass(frozen=True)
class Call:
    """A call on the mirror: its operands, and what the judge needs to know of it."""

    arrays: tuple[Any, ...]
    quantized: Any
    form: str
    options: dict[str, Any]

    @classmethod
    def of(cls, name: str, *arrays: Any, **options: Any) -> Call:
        form, quant, arch = FORMS[name]
        options = {"arch": arch, "backend": "mirror", **options}
        z = ca.quantize(*arrays, quant=quant, arch=arch, backend="mirror")
        assert ca.kernel_form(z, **options)["form"] == form
        return cls(arrays, z, form, options)

    def output(self, quantized: Any = None, **changed: Any) -> Any:
        """O, of these operands or others, with options changed."""
        z = self.quantized if quantized is None else quantized
        return ca.attention(z, **{**self.options, **changed})

    @property
    def judged(self) -> dict[str, Any]:
        """Options of `judge`, all of them."""
        tiles = ca.kernel_form(self.quantized, **self.options)["tiles"]
        rest = {n: x for n, x in self.options.items() if n not in ("arch", "backend")}
        return {"variant": "fa_int8", "quantized": self.quantized, "form": self.form,
                "tiles": tiles, **rest}  # fmt: skip

    def judge(self, o: Any, **changed: Any) -> Any:
        return judge(o, *self.arrays, **{**self.judged, **changed})


def normal(name: str, length: int = 256, dtype: str = "float16", **options: Any) -> Call:
    drawn = distributions.make("normal", 1, 2, 96, length, 64, dtype, seed=0)
    return Call.of(name, *drawn, **options)


def truncated(o: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Stores that cut off, of numbers that a kernel has in float32."""
    nearest = exact.astype(o.dtype)
    outward = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    return np.where(outward, np.nextafter(nearest, o.dtype.type(0)), nearest)


def without_a_key(call: Call) -> np.ndarray:
    """O of which one row of each head has lost a key with a weight just above 1e-3."""
    q, k, _ = (x.astype(np.float64) for x in call.arrays)
    scores = q @ k.swapaxes(-1, -2) / 8
    P = np.exp(scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True)))
    mask = np.ones(P.shape, bool)
    lost = np.where(P > 1.05e-3, P, 1.0).argmin(axis=-1)
    for head in range(2):
        mask[0, head, 17, lost[0, head, 17]] = False
    return np.asarray(call.output(mask=mask))


def group_of_k_off(call: Call) -> np.ndarray:
    """O of codes of K of which one group has a scale that is off by 1 %."""
    z = call.quantized
    scale = np.array(z.k_scale)
    scale[:, :, scale.shape[2] // 2] *= np.float32(1.01)
    return np.asarray(call.output(replace(z, k_scale=scale)))


FAULTS: dict[str, Callable[[Call], np.ndarray]] = {
    "O x 1.0005": lambda call: (call.output().astype(np.float64) * 1.0005).astype(np.float16),
    "truncated stores": lambda call: truncated(
        call.output(), expectation(received(call)).predicted.o  # type: ignore[union-attr]
    ),
    "scale + 0.1 %": lambda call: call.output(scale=1.001 / 8),
    "a key less": without_a_key,
    "a group of K": group_of_k_off,
}


def received(call: Call) -> KernelCall:
    settings = Settings("fa_int8", tiles=call.judged["tiles"])
    arrays = dict(zip("qkv", call.arrays, strict=True))
    rest = dict.fromkeys(("mask", "bias", "block_mask", "rope", "qk_norm"))
    return kernel_call(settings, arrays | rest, quantized=call.quantized, form=call.form)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_small_faults_are_found_in_codes(fault: str, name: str) -> None:
    call = normal(name)
    assert call.judge(call.output()).passed
    report = call.judge(FAULTS[fault](call))
    assert report.ratio > 1 and report.tag == PREDICTED
    # The wider bound, which any tiles meet, does not see it.
    alone = call.judge(FAULTS[fault](call), tiles=None)
    assert alone.undecided and not alone.passed and "UNDECIDED" in str(alone)


@pytest.mark.parametrize("name", FLOATS)
def test_faults_of_one_percent_are_found_in_8_bit_floats(name: str) -> None:
    call = normal(name)
    o = call.output()
    assert call.judge(o).passed
    assert call.judge((o.astype(np.float64) * 1.01).astype(np.float16)).tag == PREDICTED
    assert not call.judge((o.astype(np.float64) * 1.01).astype(np.float16)).passed
    assert not call.judge(group_of_k_off(call)).passed


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("distribution", distributions.NAMES)
def test_right_outputs_never_fail(distribution: str, name: str) -> None:
    for dtype, options in (("float16", {}), ("bfloat16", {"causal": True})):
        drawn = distributions.make(distribution, 1, 1, 96, 300, 32, dtype, seed=1)
        call = Call.of(name, *drawn, **options)
        report = call.judge(call.output())
        assert report.passed, str(report)


def test_the_report_tells_of_the_prediction() -> None:
    call = normal("pv8, u8")
    o = call.output()
    report = call.judge(np.float16(1.01) * o)
    known = expectation(received(call))
    at = report.index
    assert report.expected == known.predicted.o[at] != known.o[at]  # type: ignore[union-attr]
    assert report.bound == known.predicted.bound[at] < 0.1 * known.bound.total[at]  # type: ignore[union-attr]
    assert report.ratio == abs(report.value - report.expected) / report.bound
    assert "(mostly predicted codes)" in str(report)
    n = numerics("int8", "pv8", "float16", call.quantized.config)
    assert report.tightness < 0.1 * call.judge(o, numerics=n).tightness


def test_codes_are_predicted_where_the_tiles_are_those_of_the_call() -> None:
    """Form and tiles, "auto", the record of a plan; where one is left out they are assumed."""
    call = normal("pv8, u8")
    wrong = (call.output().astype(np.float64) * 1.002).astype(np.float16)
    assert not call.judge(wrong).passed
    assert not judge_kernel(received(call), wrong).passed
    auto = {"variant": "auto", "form": None, "tiles": None}
    assert call.judge(call.output(), **auto).passed and not call.judge(wrong, **auto).passed
    # With one alone other tiles may have made it.
    for changed in ({"form": None}, {"tiles": None}, {"form": None, "tiles": None}):
        assert call.judge(call.output(), **changed).passed
        report = call.judge(wrong, **changed)
        assert report.undecided and not report.passed
    # Numerics that are given may be another kernel's.
    n = numerics("int8", "pv8", "float16", call.quantized.config)
    assert call.judge(wrong, numerics=n).passed


@pytest.mark.parametrize("name", FORMS)
def test_other_tiles_than_those_assumed_are_undecided(name: str) -> None:
    """If the caller names only the form, the tiles of the call may differ."""
    call = normal(name, 600)
    own = call.judged["tiles"]
    other = replace(own, block_kv=own.block_kv // 2 if own.block_kv > 32 else 64)
    o = ca.reference.attention_mirror(
        call.quantized, variant="fa_int8", form=call.form, tiles=other
    )
    assert call.judge(o, tiles=None).undecided
    assert call.judge(o, tiles=other).passed
    assert not call.judge(o).passed  # and given tiles are taken at their word


def test_rows_that_are_left_are_held_to_the_wider_bound() -> None:
    """Scores so large that no code is certain."""
    q, k, v = distributions.make("normal", 1, 1, 8, 200, 32, "float32", seed=0)
    call = Call.of("pv8, u8", 4000 * q, 400 * k, v)
    known = expectation(received(call))
    left = np.isinf(known.predicted.bound)  # type: ignore[union-attr]
    assert left.any() and np.isfinite(known.bound.total[left]).any()
    o = call.output()
    assert call.judge(o).passed
    assert not call.judge(o + np.float32(100)).passed
