"""Rotated layers on a device: NumPy's codes, the mirror's bits, torch's operators and graphs."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import as_float64
from tests.gpu.support import cupy, on_device

#: Channels of Flux, of Wan's feed-forward, and groups of 128 and 64.
CHANNELS = [3072, 13_824, 1152, 1600]
ROTATIONS = ["hadamard", "hadamard_contiguous"]


def operands(rows: int, out: int, channels: int) -> tuple[Any, Any]:
    """Draw rows with outlier channels, and a weight."""
    rng = np.random.default_rng(channels)
    x = rng.standard_normal((rows, channels)).astype(np.float16)
    x[:, rng.permutation(channels)[: max(1, channels // 200)]] *= 30
    return x, (rng.standard_normal((out, channels)) / np.sqrt(channels)).astype(np.float16)


@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("rows", [1, 33, 2048])
def test_a_device_has_the_bits_of_numpy(rows: int, channels: int, rotate: str) -> None:
    x, w = operands(rows, 256, channels)
    plain = ca.Int8Linear.from_weight(w, w[:, 0], strategy="channel", rotate=rotate)
    own = ca.Int8Linear.from_weight(
        *on_device(w, w[:, 0]), strategy="channel", rotate=rotate
    )
    assert own.codes.get().tobytes() == plain.codes.tobytes()
    assert own.scales.get().tobytes() == plain.scales.tobytes()
    y = own(*on_device(x))
    assert isinstance(y, cupy.ndarray) and y.get().tobytes() == plain(x).tobytes()
    exact = as_float64(x) @ as_float64(w).T + as_float64(w[:, 0])
    assert (np.abs(as_float64(y.get()) - exact) <= plain.error(x, w)).all()


@pytest.mark.parametrize("channels", [3072, 13_824])
def test_a_rotation_errs_less_than_blocks(channels: int) -> None:
    x, w = operands(512, 256, channels)
    exact = as_float64(x) @ as_float64(w).T

    def away(**options: Any) -> float:
        (rows, weight) = on_device(x, w)
        y = ca.Int8Linear.from_weight(weight, **options)(rows, out_dtype="float32")
        return float(np.linalg.norm(y.get() - exact) / np.linalg.norm(exact))

    rotated = away(strategy="channel", rotate="hadamard")
    assert rotated <= (0.013 if channels == 3072 else 0.015)
    assert rotated <= 1.3 * away(strategy="block") and rotated < away(strategy="channel")


@pytest.mark.parametrize("kind", ["gelu", "silu of a norm", "swiglu"])
def test_activations_in_front_of_a_layer_are_in_its_pass(kind: str) -> None:
    torch = pytest.importorskip("torch")
    interop = importlib.import_module("cupyattn.interop.torch")
    torch.manual_seed(0)
    linear = torch.nn.Linear(3072, 512, dtype=torch.bfloat16).requires_grad_(False).cuda()
    own = interop.Int8Linear.from_linear(linear, strategy="channel", rotate="hadamard")
    norm = torch.nn.RMSNorm(3072, dtype=torch.bfloat16).requires_grad_(False).cuda()
    wide = 2 if kind == "swiglu" else 1
    x = torch.randn(2, 300, wide * 3072, dtype=torch.bfloat16, device="cuda")

    def function(x: Any) -> Any:
        if kind == "swiglu":
            gate, other = x.chunk(2, -1)
            return own(torch.nn.functional.silu(gate) * other)
        act = torch.nn.functional.gelu if kind == "gelu" else torch.nn.functional.silu
        return own(act(x if kind == "gelu" else norm(x)))

    torch._dynamo.reset()
    with torch.no_grad():
        found, eager = torch.compile(function, fullgraph=True)(x), function(x)
    assert (found - eager).double().norm() < 0.01 * eager.double().norm()


@pytest.mark.parametrize("rotate", [None, *ROTATIONS])
@pytest.mark.parametrize("channels", CHANNELS)
def test_factors_of_channels_have_the_bits_of_numpy(channels: int, rotate: str | None) -> None:
    x, w = operands(33, 256, channels)
    options = {"strategy": "channel", "rotate": rotate}
    factors = ca.quant.smoothing_factors(x, w)
    plain = ca.Int8Linear.from_weight(w, smooth=factors, **options)
    weight, rows, smooth = on_device(w, x, factors)
    own = ca.Int8Linear.from_weight(weight, smooth=smooth, **options)
    assert own.codes.get().tobytes() == plain.codes.tobytes()
    assert own(rows).get().tobytes() == plain(x).tobytes()


def exact_of(linear: Any, norm: Any, x: Any, s: Any, t: Any) -> Any:
    """Modulated rows of a norm by a layer, in float64 on the rows' device."""
    rows = norm(x.double()) * (1 + s.double()) + t.double()
    weight, bias = (one.to(x.device).double() for one in (linear.weight, linear.bias))
    return rows @ weight.T + bias


def test_smoothed_layers_of_torch_have_the_bits_of_the_mirror() -> None:
    torch = pytest.importorskip("torch")
    interop = importlib.import_module("cupyattn.interop.torch")
    torch.manual_seed(0)
    linear = torch.nn.Linear(3072, 512, dtype=torch.bfloat16).requires_grad_(False)
    norm = torch.nn.LayerNorm(3072, eps=1e-6, elementwise_affine=False, dtype=torch.bfloat16)
    x, (s, t) = torch.randn(2, 300, 3072).bfloat16(), torch.randn(2, 2, 1, 3072).bfloat16()
    factors = 2.0 ** torch.randint(-3, 3, (3072,))
    options = {"strategy": "channel", "rotate": "hadamard"}
    host = interop.Int8Linear.from_linear(linear, smooth=factors, backend="mirror", **options)
    moved = copy.deepcopy(linear).cuda()  # `cuda` moves in place the bias that `host` shares
    own = interop.Int8Linear.from_linear(moved, smooth=factors.cuda(), **options)
    assert torch.equal(own.weight_codes.cpu(), host.weight_codes)
    assert torch.equal(own(x.cuda()).cpu(), host(x))

    def function(x: Any, s: Any, t: Any) -> Any:
        return own(norm(x) * (1 + s) + t)

    torch._dynamo.reset()
    given = [one.cuda() for one in (x, s, t)]
    with torch.no_grad():
        found, eager = torch.compile(function, fullgraph=True)(*given), function(*given)
        exact = exact_of(linear, norm, *given)
    # These factors make the error seven times what it is without them.
    assert (found - exact).norm() < 1.02 * (eager - exact).norm() < 0.1 * exact.norm()


def test_layers_and_norms_of_torch_have_the_bits_of_the_mirror() -> None:
    """Eager, compiled with its norm in the pass, and as a replaced model."""
    torch = pytest.importorskip("torch")
    interop = importlib.import_module("cupyattn.interop.torch")
    torch.manual_seed(0)
    linear = torch.nn.Linear(3072, 512, dtype=torch.bfloat16).requires_grad_(False)
    norm = torch.nn.LayerNorm(3072, eps=1e-6, elementwise_affine=False, dtype=torch.bfloat16)
    x = torch.randn(2, 300, 3072, dtype=torch.bfloat16)
    s, t = torch.randn(2, 2, 1, 3072, dtype=torch.bfloat16)
    for rotate in (None, *ROTATIONS):
        host = interop.Int8Linear.from_linear(
            linear, strategy="channel", rotate=rotate, backend="mirror"
        )
        own = interop.Int8Linear.from_linear(
            copy.deepcopy(linear).cuda(), strategy="channel", rotate=rotate
        )  # `cuda` moves a module in place, and with it the bias that `host` shares
        assert torch.equal(own.weight_codes.cpu(), host.weight_codes)
        assert torch.equal(own(x.cuda()).cpu(), host(x))

        def function(x: Any, s: Any, t: Any, own: Any = own) -> Any:
            return own(norm(x) * (1 + s) + t)

        torch._dynamo.reset()
        given = [one.cuda() for one in (x, s, t)]
        with torch.no_grad():
            found = torch.compile(function, fullgraph=True)
            first, again = found(*given), found(*given)
            eager, exact = function(*given), exact_of(linear, norm, *given)
        assert torch.equal(first, again)
        # The pass rounds its rows to codes alone, eager torch to bfloat16 three times before.
        assert (first - exact).norm() < 1.02 * (eager - exact).norm() < 0.02 * exact.norm()
    config = ca.Int8Config(rotate="hadamard")
    model = torch.nn.Sequential(torch.nn.Linear(3072, 512, dtype=torch.bfloat16)).cuda()
    with interop.replace_linear_with_int8(model, config=config) as handle:
        assert model[0].rotate == "hadamard" and "rotated" in handle.report()
