"""Convolutions as linear layers: the same numbers, INT8 in their places, and the way back."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from cupyattn.interop.torch import (  # noqa: E402
    Int8Linear,
    LinearConvolution,
    linear_convolutions,
    replace_linear_with_int8,
)

#: Convolutions of each kind with an input: 1 x 1, with strides, patches, and remainders.
SAME: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1 x 1": (nn.Conv2d(6, 5, 1), (2, 6, 4, 3)),
    "1 x 1, every other pixel": (nn.Conv2d(6, 5, 1, stride=(2, 3)), (2, 6, 5, 7)),
    "patches": (nn.Conv2d(3, 8, 2, stride=2, bias=False), (1, 3, 6, 4)),
    "patches with a rest": (nn.Conv2d(3, 8, (2, 3), stride=(2, 3)), (2, 3, 7, 8)),
    "one axis": (nn.Conv1d(3, 4, 4, stride=4), (2, 3, 9)),
    "three axes": (nn.Conv3d(2, 4, (1, 2, 2), stride=(1, 2, 2)), (2, 2, 3, 4, 4)),
    "same, which pads nothing": (nn.Conv2d(3, 4, 1, padding="same"), (1, 3, 2, 2)),
    "no batch": (nn.Conv2d(6, 5, 1), (6, 4, 3)),
}
KEPT: dict[str, tuple[nn.Module, str]] = {
    "3 x 3": (nn.Conv2d(3, 4, 3, stride=2), "3 x 3 windows overlap, and rows of them take 2.25 t"),
    "padding": (nn.Conv2d(3, 4, 2, stride=2, padding=1), "reach past the edge, padding=\\(1, 1\\)"),
    "groups": (nn.Conv2d(4, 4, 1, groups=2), "it has 2 groups"),
    "gaps": (nn.Conv2d(3, 4, 2, stride=2, dilation=2), "its windows have gaps"),
    "transposed": (nn.Conv2d(3, 4, 2, padding="same"), "past the edge, padding='same'"),
    "far apart": (nn.Conv2d(3, 4, 2, stride=3), "2 x 2 windows overlap|take 1 times"),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    found = nn.Sequential()
    found.proj_in = nn.Conv2d(128, 256, 1)
    found.act = nn.ReLU()
    found.down = nn.Conv2d(256, 128, 2, stride=2)
    found.out = nn.Conv2d(128, 8, 3, padding=1)
    return found


@pytest.mark.parametrize("case", SAME)
def test_numbers_are_those_of_the_convolution(case: str) -> None:
    convolution, shape = SAME[case]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layer = LinearConvolution(convolution)
    y, expected = layer(x), convolution(x)
    assert y.shape == expected.shape and y.is_contiguous()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert layer.weight.shape == convolution.weight.shape
    assert layer.weight.data_ptr() == convolution.weight.data_ptr()  # no copy
    assert layer.bias is convolution.bias


@pytest.mark.parametrize("case", KEPT)
def test_other_convolutions_stay_with_the_reason(case: str) -> None:
    convolution, reason = KEPT[case]
    with pytest.raises(ValueError, match=f"must stay as it is: .*({reason})"):
        LinearConvolution(convolution)
    whole = nn.ModuleDict({"a": convolution, "b": nn.Conv2d(4, 4, 1)})
    handle = linear_convolutions(whole)
    assert handle.replaced == ("b",) and [*handle.kept] == ["a"] and whole["a"] is convolution


def test_int8_takes_the_place_of_their_layers_and_gives_it_back() -> None:
    original, x = model(), torch.randn(2, 128, 6, 6)
    expected = original(x)
    one = copy.deepcopy(original)
    handle = linear_convolutions(one)
    assert handle.replaced == ("proj_in", "down")
    assert handle.kept["out"].startswith("its windows reach past the edge")
    with replace_linear_with_int8(one, backend="mirror") as int8:
        assert {*int8.replaced} == {"proj_in.linear", "down.linear"}
        assert type(one.down.linear) is Int8Linear and one.down.weight.shape == (128, 256, 2, 2)
        off = (one(x) - expected).norm() / expected.norm()
        assert 1e-4 < off < 0.03
        with pytest.raises(RuntimeError, match=r"proj_in.linear is a Int8Linear: call cupyattn"):
            handle.restore()
    handle.restore()
    handle.restore()
    assert type(one.down) is nn.Conv2d and [*one.state_dict()] == [*original.state_dict()]
    assert torch.equal(one(x), expected)


def test_weights_go_where_the_model_goes() -> None:
    one = model()
    handle = linear_convolutions(one)
    handle.to(torch.bfloat16)
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16}
    assert len([*one.parameters()]) == 6
    handle.restore()
    assert one.down.weight.dtype == torch.bfloat16 and one.down.weight.shape == (128, 256, 2, 2)


def test_gradients_reach_weight_and_input() -> None:
    convolution = nn.Conv2d(3, 4, 2, stride=2)
    layer, x = LinearConvolution(convolution), torch.randn(1, 3, 4, 4, requires_grad=True)
    layer(x).square().sum().backward()
    by_layer, d_x = layer.linear.weight.grad.reshape(4, 3, 2, 2), x.grad.clone()
    x.grad = None
    convolution(x).square().sum().backward()
    torch.testing.assert_close(by_layer, convolution.weight.grad)
    torch.testing.assert_close(d_x, x.grad)


@pytest.mark.slow
def test_they_compile_whole() -> None:
    one, x = model(), torch.randn(1, 128, 4, 4)
    linear_convolutions(one)
    replace_linear_with_int8(one, backend="mirror")
    torch._dynamo.reset()
    compiled = torch.compile(one, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), one(x))


def test_a_convolution_in_two_places_stays_one() -> None:
    shared = nn.Conv2d(4, 4, 1)
    one = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    handle = linear_convolutions(one)
    assert handle.replaced == ("a",) and one["a"] is one["b"][0]
    handle.restore()
    assert one["a"] is shared and one["b"][0] is shared and shared.weight.shape == (4, 4, 1, 1)


def test_patterns_choose_and_misspelt_ones_are_refused() -> None:
    one = model()
    handle = linear_convolutions(one, include="^down$")
    assert handle.replaced == ("down",) and handle.kept["proj_in"] == "excluded"
    with pytest.raises(ValueError, match="'upp' of include is found in the name of no convolution"):
        linear_convolutions(one, include="upp")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, TypeError, "model must be a torch.nn.Module, got int"),
        (nn.Sequential(nn.Linear(2, 2)), ValueError, r"becomes a linear layer \(it has none\)"),
        (nn.Sequential(nn.Conv2d(2, 2, 3)), ValueError, "0: its 3 x 3 windows overlap"),
    ],
)
def test_what_it_refuses(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_convolutions(given)


def test_inputs_of_other_shapes_are_refused_in_one_sentence() -> None:
    layer = LinearConvolution(nn.Conv2d(4, 4, 1))
    with pytest.raises(RuntimeError, match=r"\(batch, 4, \*, \*\), got \(1, 3, 2, 2\)"):
        layer(torch.zeros(1, 3, 2, 2))
    with pytest.raises(TypeError, match="Conv1d, Conv2d or Conv3d, got Linear"):
        LinearConvolution(nn.Linear(2, 2))


def test_an_input_smaller_than_a_window_is_an_error_as_it_was() -> None:
    convolution = nn.Conv2d(3, 4, (1, 2), stride=(1, 2))
    for layer in (convolution, LinearConvolution(convolution)):
        with pytest.raises(RuntimeError, match=r"Kernel size can't be|one window, \(1, 2\), got"):
            layer(torch.ones(2, 3, 5, 1))


def test_an_embedding_of_patches_becomes_int8_by_itself() -> None:
    """By its name it keeps 16 bits in a whole model."""
    torch.manual_seed(0)
    patches, product = nn.Conv2d(32, 256, 2, stride=2), nn.Conv2d(256, 256, 1)
    one = nn.ModuleDict({"patch_embed": patches, "p": product})
    linear_convolutions(one)
    handle = replace_linear_with_int8(one, backend="mirror")
    assert [*handle.replaced] == ["p.linear"] and "embedding" in handle.kept["patch_embed.linear"]
    x = torch.randn(1, 32, 8, 8)
    layer = one["patch_embed"]
    expected = layer(x)
    layer.linear = Int8Linear.from_linear(layer.linear, backend="mirror")
    assert 1e-4 < (layer(x) - expected).norm() / expected.norm() < 0.03


@pytest.mark.slow
def test_the_convolutions_of_a_unet_of_diffusers() -> None:
    """Projections of attention and shortcuts become INT8, and 3 x 3 convolutions stay."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=32,
        attention_head_dim=32, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip
    call = torch.randn(1, 4, 8, 8), torch.tensor([10]), torch.randn(1, 7, 32)
    with torch.no_grad():
        expected = unet(*call).sample
        handle = linear_convolutions(unet)
        assert "down_blocks.0.attentions.0.proj_in" in handle.replaced
        assert all("overlap" in why or "past the edge" in why for why in handle.kept.values())
        torch.testing.assert_close(unet(*call).sample, expected, rtol=1e-4, atol=1e-5)
        int8 = replace_linear_with_int8(unet, backend="mirror")
        assert {f"{name}.linear" for name in handle.replaced} <= {*int8.replaced}
        assert (unet(*call).sample - expected).norm() < 0.03 * expected.norm()
        int8.restore()
        handle.restore()
        assert torch.equal(unet(*call).sample, expected)
