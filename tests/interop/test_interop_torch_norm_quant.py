"""The pass in front of a product as an operator of torch: NumPy's bits, compiled, no gradient."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.errors import UnsupportedError
from cupyattn.ops import operation as operations
from tests.quant.norm_quant_cases import ACTIVATED, CASES

torch = pytest.importorskip("torch")
norm_quant = importlib.import_module("cupyattn.interop.torch").norm_quant
as_tensor = importlib.import_module("cupyattn.interop.torch.bridge").as_tensor


def tensors_of(arrays: dict) -> dict:
    return {name: as_tensor(x) for name, x in arrays.items()}


@pytest.mark.parametrize("name", [*CASES, *ACTIVATED])
def test_tensors_have_the_codes_of_arrays(name: str) -> None:
    one = {**CASES, **ACTIVATED}[name]
    arrays = one.arrays()
    expected = ca.norm_quant(**arrays, **one.options)
    found = norm_quant(**tensors_of(arrays), **one.options)
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, torch.Tensor) and np.array_equal(mine.numpy(), theirs)


@pytest.mark.parametrize("name", ["rotated by 256", "blocks", "layer, modulated by token"])
def test_the_operator_keeps_torchs_contract(name: str) -> None:
    one = CASES[name]
    given = tensors_of(one.arrays())
    steps = one.settled
    tensors = [given.get(n) for n in ("x", "weight", "bias", "scale", "shift")]
    rest = steps.norm, None, steps.rotate, steps.eps, steps.strategy, None
    torch.library.opcheck(torch.ops.cupyattn.norm_quant.default, (*tensors, *rest))


def test_compiled_code_keeps_it_in_one_graph() -> None:
    one = CASES["layer, modulated"]
    given = tensors_of(one.arrays())

    def call(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> tuple:
        return norm_quant(x * 2, norm="layer", scale=scale, shift=shift)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(compiled(**given), call(**given), strict=True):
        assert torch.equal(mine, theirs)


def test_a_gradient_is_refused() -> None:
    x = torch.ones(2, 64, requires_grad=True)
    with pytest.raises(UnsupportedError, match="codes have none"):
        norm_quant(x, norm="rms")
    with torch.no_grad():
        assert norm_quant(x, norm="rms")[0].dtype == torch.int8


def test_its_mistakes_are_those_of_arrays() -> None:
    with pytest.raises(ValueError, match="norm must be None or 'layer' or 'rms', got 'batch'"):
        norm_quant(torch.ones(2, 64), norm="batch")
    with pytest.raises(TypeError, match="x must be float16, bfloat16, float32"):
        norm_quant(torch.ones(2, 64, dtype=torch.int32), norm="rms")
    for name, given in {"x": {"x": None}, "scale": {"scale": np.ones(64)}}.items():
        with pytest.raises(TypeError, match=f"argument '{name}' must be Tensor, not"):
            norm_quant(**{"x": torch.ones(2, 64), **given})


@pytest.mark.parametrize("name", ["rotated by 256", "blocks"])
def test_a_device_has_a_type_of_tensor_for_each_result(name: str) -> None:
    """`bridge` allocates results by the types that the problem gives."""
    module = importlib.import_module("cupyattn.interop.torch.norm_quant")
    types = importlib.import_module("cupyattn.interop.torch.bridge")._TYPES
    one = CASES[name]
    steps = one.settled
    settings = module.NormQuantSettings(
        steps.norm, None, steps.rotate, steps.eps, steps.strategy, "interpret"
    )
    problem = operations.problem_of(module.NORM_QUANT, settings, one.arrays())
    found = {key: types[np.dtype(made.dtype)] for key, made in problem.results.items()}
    assert found == {"codes": torch.int8, "scales": torch.float32}
