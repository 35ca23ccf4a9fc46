"""INT8 linear layers of torch on a device: the bits of `cupyattn.Int8Linear`, models, weights.

tests/interop/test_interop_torch_layer.py has the tests without a device.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest

import cupyattn as ca
from tests.interop import torch_cases

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this torch has no CUDA device", allow_module_level=True)
interop = importlib.import_module("cupyattn.interop.torch")


def same_bits(x: Any, y: Any) -> bool:
    """Whether a tensor has the numbers of a CuPy array."""
    return torch_cases.same_bits(x.cpu(), cupy.asnumpy(y))


@pytest.mark.parametrize("rows", [5, 200])
def test_int8_linear(rows: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 384, dtype=torch.bfloat16).cuda()
    layer = interop.Int8Linear.from_linear(linear)
    weight, bias = (cupy.from_dlpack(x.detach()) for x in (linear.weight, linear.bias))
    core = ca.Int8Linear.from_weight(weight, bias)
    for _ in range(2):
        x = torch.randn(rows, 512, dtype=torch.bfloat16).cuda()
        with torch.no_grad():
            assert same_bits(layer(x), core(cupy.from_dlpack(x)))
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad.isfinite().all() and linear.bias.grad is not None
    last = torch.nn.Linear(384, 512, dtype=torch.bfloat16).cuda()
    model = torch.nn.Sequential(linear, torch.nn.ReLU(), last)
    with interop.replace_linear_with_int8(model) as handle:
        assert set(handle.replaced) == {"0", "2"}
        assert not linear.weight.is_cuda and linear.bias.is_cuda
        y = model(x)
    assert linear.weight.is_cuda and (y - model(x)).norm() < 0.05 * model(x).norm()


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_the_weight_of_a_layer_is_read_on_its_device(strategy: str) -> None:
    linear = torch.nn.Linear(512, 384, dtype=torch.bfloat16).cuda()
    layer = interop.Int8Linear.from_linear(linear, strategy=strategy)
    weight, codes = layer.weight, cupy.from_dlpack(layer.weight_codes)
    scales = cupy.from_dlpack(layer.weight_scale)
    exact = ca.weight_dequant(codes, scales, out_dtype="bfloat16", strategy=strategy)
    numbers = weight.clone()
    assert weight.is_cuda and weight.dtype == torch.bfloat16 and same_bits(numbers, exact)
    x = torch.randn(5, 512, dtype=torch.bfloat16).cuda()
    assert torch.equal(torch.nn.functional.linear(x, weight), x @ numbers.T)
    assert all(map(torch.equal, ca.weight_quant(weight), ca.weight_quant(numbers)))
    with pytest.raises(RuntimeError, match="cannot be written"):
        weight.data += 1
    with pytest.raises(RuntimeError, match="has no memory"):
        weight.data_ptr()


def test_a_single_block_reads_attention_and_mlp_where_they_lie() -> None:
    """Compiled, the layer behind both has the bits of eager calls on their concatenation."""
    torch.manual_seed(0)
    width, wide = 3072, 12_288
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    linears = [torch.nn.Linear(n, m, **options).requires_grad_(False)
               for n, m in ((width, wide), (width + wide, width))]  # fmt: skip
    up, down = (interop.Int8Linear.from_linear(one, strategy="channel") for one in linears)
    operator = torch.ops.cupyattn.int8_layer

    def function(x: Any, a: Any, gate: Any) -> Any:
        y = torch.nn.functional.gelu(up(x), approximate="tanh")
        return x + gate * down(torch.cat([a.flatten(2), y], dim=2))

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for rows in (300, 4608):
        x, gate = (torch.randn(1, n, width, **options) for n in (rows, 1))
        a = torch.randn(1, rows, 24, 128, **options)
        with torch.no_grad():
            y = up(x, activation="gelu_tanh")
            expected = down(torch.cat([a.flatten(2), y], dim=2), residual=x, gate=gate)
            weight = down.weight_codes, down.weight_scale, down.bias, x, gate
            own = operator(a.flatten(2), *weight, "", None, None, None, None, y)
            assert torch.equal(own, expected)
            for _ in range(4):  # the last are launches of a graph
                assert torch.equal(compiled(x, a, gate), expected)


def test_a_single_block_reads_text_and_image_where_they_lie() -> None:
    """Compiled, two tensors and slices of one give the bits of a block that is given their rows."""
    torch.manual_seed(0)
    width, wide = 3072, 12_288
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    linears = [torch.nn.Linear(n, m, **options).requires_grad_(False)
               for n, m in ((width, wide), (wide, width))]  # fmt: skip
    up, down = (interop.Int8Linear.from_linear(one, strategy="channel") for one in linears)

    def block(x: Any, gate: Any) -> Any:
        y = torch.nn.functional.layer_norm(x, (width,), eps=1e-6) * (1 + gate)
        return x + gate * down(torch.nn.functional.gelu(up(y), approximate="tanh"))

    def joint(text: Any, image: Any, gate: Any) -> Any:
        return block(torch.cat([text, image], 1), gate)

    torch._dynamo.reset()
    run, alone = (torch.compile(one, fullgraph=True, dynamic=False) for one in (joint, block))
    with torch.no_grad():
        for batch, tokens in ((1, (512, 4096)), (2, (77, 300)), (1, (300, 3)), (3, (1, 130))):
            x, gate = (torch.randn(batch, n, width, **options) for n in (sum(tokens), 1))
            expected, slices = alone(x, gate), x.split(tokens, 1)
            for parts in (slices, [one.clone() for one in slices]):
                for _ in range(4):  # the last are launches of a graph
                    assert torch.equal(run(*parts, gate), expected)


def test_two_streams_write_where_joint_attention_reads() -> None:
    """Compiled, rows of both have the bits of the streams' own results."""
    torch.manual_seed(0)
    width, tokens = 3072, (512, 4096)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    streams = [
        [interop.Int8Linear.from_linear(
            torch.nn.Linear(width, width, **options).requires_grad_(False), strategy="channel"
        ) for _ in "qkv"] for _ in tokens
    ]  # fmt: skip

    def parts(given: Any) -> Any:
        rows = [torch.nn.functional.layer_norm(x, (width,), eps=1e-6) for x in given]
        return [[own(x) for own in layers] for layers, x in zip(streams, rows, strict=True)]

    def joint(*given: Any) -> Any:
        text, image = parts(given)
        return [torch.cat(pair, 1) for pair in zip(text, image, strict=True)]

    def separate(*given: Any) -> Any:
        text, image = parts(given)
        return *text, *image

    torch._dynamo.reset()
    with torch.no_grad():
        run, alone = (torch.compile(one, fullgraph=True) for one in (joint, separate))
        for _ in range(2):
            given = [torch.randn(1, n, width, **options) for n in tokens]
            own = alone(*given)
            for _ in range(4):  # the last are launches of a graph
                for x, text, image in zip(run(*given), own[:3], own[3:], strict=True):
                    assert torch.equal(x, torch.cat((text, image), 1))


def test_the_pass_in_front_of_a_product_is_captured_and_compiled() -> None:
    x = torch.randn(512, 3072, device="cuda").to(torch.bfloat16)
    shift = torch.randn(1, 3072, device="cuda").to(torch.bfloat16)
    call = functools.partial(interop.norm_quant, norm="layer", shift=shift, rotate="hadamard")
    expected = call(x)
    compiled = torch.compile(call, fullgraph=True)(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(x)
    graph.replay()
    for one in (compiled, found):
        assert all(torch.equal(a, b) for a, b in zip(one, expected, strict=True))
