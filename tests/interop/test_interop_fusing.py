"""`fuse_qkv_projections` of diffusers where the projections are INT8, and back."""

from __future__ import annotations

import copy
import importlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")
from experiments._harness import small_transformers as small  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
interop = importlib.import_module("cupyattn.interop.torch")

#: Layers that diffusers makes, by family.
FUSED = {
    "flux": {"to_qkv", "to_added_qkv"},
    "sd3": {"to_qkv", "to_added_qkv"},
    "wan": {"to_qkv", "to_kv"},
}


def int8(model: Any, strategy: str = "block", **options: Any) -> Any:
    config = ca.Int8Config(strategy=strategy, min_elements_for_int8=0)
    return interop.replace_linear_with_int8(model, config=config, backend="mirror", **options)


def layers(model: Any, kind: type) -> set[str]:
    named = model.named_modules()
    found = {name.rpartition(".")[2] for name, layer in named if type(layer) is kind}
    return {name for name in found if name in ("to_qkv", "to_kv", "to_added_qkv")}


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("family", FUSED)
def test_projections_are_fused_to_int8_and_back(family: str, strategy: str) -> None:
    """Results equal a model that was fused first, and after restoring a model without INT8."""
    model, call = small.transformer(family), small.caller(family)
    native, other = call(model), copy.deepcopy(model)
    other.fuse_qkv_projections()
    fused = call(other)
    handle = int8(model, strategy)
    found = call(model)
    model.fuse_qkv_projections()
    assert layers(model, interop.Int8Linear) == FUSED[family] and not layers(model, torch.nn.Linear)
    int8(other, strategy)
    assert torch.equal(call(model), call(other))
    if strategy == "channel":
        assert torch.allclose(call(model), found, rtol=0, atol=1e-5)
    model.unfuse_qkv_projections()
    assert torch.equal(call(model), found)
    model.fuse_qkv_projections()
    handle.restore()
    assert layers(model, torch.nn.Linear) == FUSED[family]
    assert torch.equal(call(model), fused)
    model.unfuse_qkv_projections()
    assert torch.equal(call(model), native)
    assert not any("fuse_projections" in vars(module) for module in model.modules())


def test_fused_layers_that_are_gone_are_not_missed() -> None:
    """They replaced none of the model's own."""
    model, call = small.transformer("wan"), small.caller("wan")
    native, handle = call(model), int8(model)
    model.fuse_qkv_projections()
    model.unfuse_qkv_projections()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        handle.restore()
    assert torch.equal(call(model), native)


def test_codes_of_whole_blocks_are_kept() -> None:
    """This holds for codes of a checkpoint, too, which has no other weights."""
    attention = small.transformer("sd3").transformer_blocks[0].attn
    for name in ("to_q", "to_k", "to_v"):
        setattr(attention, name, torch.nn.Linear(64, 128))
    attention.use_bias = True
    handle = int8(attention, originals="drop")
    parts = [attention.get_submodule(name).weight_codes for name in ("to_q", "to_k", "to_v")]
    attention.fuse_projections()
    assert torch.equal(attention.to_qkv.weight_codes, torch.cat(parts))
    with pytest.raises(RuntimeError, match="the layers were dropped"):
        handle.restore()


def test_a_loaded_checkpoint_is_fused(tmp_path: Path) -> None:
    model, call = small.transformer("wan"), small.caller("wan")
    model.save_pretrained(tmp_path / "model")
    config = ca.Int8Config(min_elements_for_int8=0)
    ca.checkpoints.convert(tmp_path / "model", tmp_path / "int8", config=config)
    with torch.inference_mode():  # whose tensors could be neither trained nor loaded
        loaded = interop.load_int8(type(model), tmp_path / "int8", backend="mirror")
    found = call(loaded)
    with torch.inference_mode():
        loaded.fuse_qkv_projections()
    assert layers(loaded, interop.Int8Linear) == FUSED["wan"]
    assert not any(x.is_inference() for x in loaded.state_dict().values())
    assert (call(loaded) - found).norm() / found.norm() < 0.01
    loaded.unfuse_qkv_projections()
    assert torch.equal(call(loaded), found)


def test_a_projection_that_stayed_in_16_bits_lets_the_fused_layer_stay_so() -> None:
    model, call = small.transformer("wan"), small.caller("wan")
    other = copy.deepcopy(model)
    other.fuse_qkv_projections()
    handle = int8(model, exclude="to_v")
    model.fuse_qkv_projections()
    assert layers(model, torch.nn.Linear) == FUSED["wan"]
    handle.restore()
    assert torch.equal(call(model), call(other))


@pytest.mark.parametrize("family", ["sd15", "pixart"])
def test_models_of_the_older_kind_are_fused(family: str) -> None:
    """Their processors change, and their fused layers stay when fusing is undone."""
    pipe = cases.make(family)
    model = pipe.unet if family == "sd15" else pipe.transformer
    native = cases.generate(pipe, family, 1)
    handle = int8(model)
    found = cases.generate(pipe, family, 1)
    model.fuse_qkv_projections()
    assert "to_qkv" in layers(model, interop.Int8Linear)
    fused = cases.generate(pipe, family, 1)
    assert (fused - found).norm() / found.norm() < 0.05
    model.unfuse_qkv_projections()
    assert torch.equal(cases.generate(pipe, family, 1), found)
    handle.restore()
    assert torch.equal(cases.generate(pipe, family, 1), native)


def test_slices_and_fused_projections_of_a_vae() -> None:
    """A VAE keeps its weights, so the test makes its layers; fusing reads their kind."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, sample_size=16,
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 16, 16)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def call() -> Any:
        return vae(x).sample

    native = call()
    with pytest.raises(ValueError, match="no linear layer of the model becomes INT8 .*: vae"):
        int8(vae)
    for part in (vae.encoder, vae.decoder):
        attention = part.mid_block.attentions[0]
        for name in ("to_q", "to_k", "to_v"):
            linear = attention.get_submodule(name)
            setattr(attention, name, interop.Int8Linear.from_linear(linear, backend="mirror"))
    found = call()
    assert 0 < (found - native).norm() / native.norm() < 0.05
    vae.enable_slicing()
    with torch.no_grad():
        one_by_one = torch.cat([vae(one[None]).sample for one in x])
    assert torch.equal(call(), one_by_one)
    vae.fuse_qkv_projections()
    assert "to_qkv" in layers(vae, torch.nn.Linear)
    assert (call() - native).norm() / native.norm() < 0.05
    vae.unfuse_qkv_projections()
    vae.disable_slicing()
    assert torch.equal(call(), found)


def test_adapters_of_fused_projections_have_no_part_in_them() -> None:
    """The same holds without INT8: diffusers reads the base weights."""
    model, call = small.transformer("wan"), small.caller("wan")
    other, handle = copy.deepcopy(model), int8(model)
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    for one in (model, other):
        torch.manual_seed(1)
        peft.inject_adapter_in_model(config, one)
        one.fuse_qkv_projections()
    assert layers(model, interop.Int8Linear) == FUSED["wan"]
    expected = call(other)
    assert 0 < (call(model) - expected).norm() / expected.norm() < 0.05
    handle.restore()
    assert torch.equal(call(model), expected)


def test_copies_fuse_their_own_and_files_have_the_method() -> None:
    model, call = small.transformer("wan"), small.caller("wan")
    int8(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        copied.fuse_qkv_projections()
        assert layers(copied, interop.Int8Linear) == FUSED["wan"]
        assert not layers(model, interop.Int8Linear)
        copied.unfuse_qkv_projections()
        assert torch.equal(call(copied), call(model))


def test_an_offloaded_model_is_not_fused() -> None:
    model, call = small.transformer("wan"), small.caller("wan")
    int8(model)
    found = call(model)
    accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    said = "the weight of this Int8Linear is offloaded, .*: remove the offloading hooks first"
    with pytest.raises(RuntimeError, match=said):
        model.fuse_qkv_projections()
    assert torch.equal(call(model), found)
