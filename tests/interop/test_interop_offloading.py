"""INT8 layers in models that accelerate and diffusers offload or cast, and restoring them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
accelerate = pytest.importorskip("accelerate")
from diffusers.hooks import HookRegistry  # noqa: E402

from experiments._harness import small_transformers as small  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
interop = importlib.import_module("cupyattn.interop.torch")

CPU = torch.device("cpu")
SMALL = ca.Int8Config(min_elements_for_int8=0)
Offload = Callable[[Any, Path], None]


def replaced(model: Any, **options: Any) -> Any:
    return interop.replace_linear_with_int8(model, config=SMALL, backend="mirror", **options)


def in_groups(kind: str, *, on_disk: bool = False) -> Offload:
    def offload(model: Any, folder: Path) -> None:
        path = str(folder / "groups") if on_disk else None
        model.enable_group_offload(CPU, CPU, kind, 1, offload_to_disk_path=path)

    return offload


def by_layer(*, with_buffers: bool) -> Offload:
    return lambda model, _: accelerate.cpu_offload(model, CPU, offload_buffers=with_buffers)


def whole(model: Any, _: Path) -> None:
    accelerate.cpu_offload_with_hook(model, CPU)


def remove_groups(model: Any) -> None:
    HookRegistry.check_if_exists_or_initialize(model).remove_hook("group_offloading", recurse=True)


def remove_accelerate(model: Any) -> None:
    accelerate.hooks.remove_hook_from_module(model, recurse=True)


#: Ways to offload, how each is undone, and what `restore` says while it is there.
WAYS: dict[str, tuple[Offload, Callable[[Any], None], str]] = {
    "blocks": (in_groups("block_level"), remove_groups, "in groups by diffusers: remove the offl"),
    "leaves": (in_groups("leaf_level"), remove_groups, "in groups by diffusers: remove the offloa"),
    "layers": (by_layer(with_buffers=False), remove_accelerate, "accelerate: remove the offloadi"),
    "buffers": (by_layer(with_buffers=True), remove_accelerate, "accelerate: remove the offloadi"),
}
ON_DISK = {
    "blocks": in_groups("block_level", on_disk=True),
    "leaves": in_groups("leaf_level", on_disk=True),
}


def relative(found: Any, expected: Any) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("family", small.FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_offloaded_after_and_restored_without_hooks(
    way: str, family: str, tmp_path: Path
) -> None:
    offload, remove, said = WAYS[way]
    model, call = small.transformer(family), small.caller(family)
    native = call(model)
    handle = replaced(model)
    int8 = call(model)
    offload(model, tmp_path)
    assert all(torch.equal(call(model), int8) for _ in range(2))
    with pytest.raises(RuntimeError, match=said):
        handle.restore()
    assert torch.equal(call(model), int8)
    remove(model)
    assert torch.equal(call(model), int8)
    handle.restore()
    assert torch.equal(call(model), native)
    with replaced(model):  # with what the hooks left behind
        assert torch.equal(call(model), int8)


@pytest.mark.parametrize("given", ["of the model", "of each layer"])
def test_codes_leave_the_device_without_offload_buffers(given: str) -> None:
    """diffusers leaves buffers on the device where a model computes; codes are what was saved."""
    model, call = small.transformer("wan"), small.caller("wan")
    native = call(model)
    handle = replaced(model)
    int8 = call(model)
    other = model.patch_embedding
    other.register_buffer("table", torch.ones(3))
    if given == "of the model":
        accelerate.cpu_offload(model, CPU, offload_buffers=False)
    else:
        accelerate.hooks.attach_align_device_hook(model, CPU, offload=True)
    layers = [layer for layer in model.modules() if isinstance(layer, interop.Int8Linear)]

    def resident() -> int:
        return sum(x.nbytes for m in layers for x in m.state_dict().values() if not x.is_meta)

    assert len(layers) == len(handle.replaced) and resident() == 0
    assert torch.equal(call(model), int8)
    assert resident() == 0 and not other.table.is_meta
    remove_accelerate(model)
    assert torch.equal(call(model), int8) and not any(x.weight_codes.is_meta for x in layers)
    handle.restore()
    assert torch.equal(call(model), native)


@pytest.mark.parametrize("way", WAYS)
def test_an_offloaded_model_is_replaced_before(way: str, tmp_path: Path) -> None:
    offload, remove, _ = WAYS[way]
    model, call = small.transformer("wan"), small.caller("wan")
    native = call(model)
    offload(model, tmp_path)
    said = "^the weights of .* are offloaded by .*: replace first, then offload$"
    with pytest.raises(ValueError, match=said):
        replaced(model)
    assert torch.equal(call(model), native)
    remove(model)
    with replaced(model):
        assert relative(call(model), native) > 0


LATER = {**{way: offload for way, (offload, *_) in WAYS.items()},
         **{f"{way} on disk": offload for way, offload in ON_DISK.items()}}  # fmt: skip


@pytest.mark.parametrize("way", LATER)
@pytest.mark.parametrize("loaded", [False, True], ids=["added", "loaded"])
def test_an_adapter_comes_after_offloading(loaded: bool, way: str, tmp_path: Path) -> None:
    """PEFT asks each weight for its type and device; its numbers may be on the disk."""
    peft = pytest.importorskip("peft")
    call = small.caller("wan")
    config = peft.LoraConfig(
        r=4, target_modules=["to_q", "to_k"], init_lora_weights=False, lora_alpha=16
    )

    def adapted(model: Any) -> Any:
        torch.manual_seed(0)
        if not loaded:
            model.add_adapter(config)
            return model
        source = small.transformer("wan")
        source.add_adapter(config)
        state = peft.get_peft_model_state_dict(source)
        model.load_lora_adapter(state, prefix=None, network_alphas=None)
        return model

    model, before = small.transformer("wan"), small.transformer("wan")
    replaced(model)
    replaced(before)
    int8 = call(model)
    expected = call(adapted(before))
    LATER[way](model, tmp_path)
    adapted(model)
    # What comes from a disk may lie at other addresses, so that torch sums in another order.
    assert all(relative(call(model), expected) < 1e-6 for _ in range(2))
    assert relative(int8, expected) > 0.01


def test_what_is_converted_is_loaded_before_offloading(tmp_path: Path) -> None:
    """Not into a model whose weights are somewhere else."""
    model = small.transformer("wan")
    model.save_pretrained(tmp_path / "model")
    ca.checkpoints.convert(tmp_path / "model", tmp_path / "int8", config=SMALL)
    in_groups("leaf_level")(model, tmp_path)
    with pytest.raises(ValueError, match="replace first, then offload"):
        interop.load_int8(model, tmp_path / "int8")


@pytest.mark.parametrize("before", [False, True])
def test_the_whole_model_may_be_moved(before: bool, tmp_path: Path) -> None:
    """As ``enable_model_cpu_offload`` of a pipeline does, in either order."""
    model, call = small.transformer("flux"), small.caller("flux")
    native = call(model)
    if before:
        whole(model, tmp_path)
    handle = replaced(model)
    if not before:
        whole(model, tmp_path)
    assert 0 < relative(call(model), native) < 0.05
    handle.restore()
    assert torch.equal(call(model), native)


@pytest.mark.parametrize("level", ON_DISK)
def test_a_bias_that_was_written_does_not_hide_that_memory_was_exchanged(
    level: str, tmp_path: Path
) -> None:
    """As loading a state dict writes it: then the scales tell."""
    model = small.transformer("flux")
    handle = replaced(model)
    model.load_state_dict(model.state_dict())
    ON_DISK[level](model, tmp_path)
    for x in (*model.parameters(), *model.buffers()):
        x.data.fill_(100)
    remove_groups(model)
    with pytest.raises(RuntimeError, match="'.*' ha(ve|s) other numbers than"):
        handle.restore()


@pytest.mark.parametrize("level", ON_DISK)
def test_groups_on_disk_work_and_are_not_restored_to_garbage(level: str, tmp_path: Path) -> None:
    """The memory of a bias holds other numbers there, also once the hooks are removed."""
    model, call = small.transformer("sd3"), small.caller("sd3")
    handle = replaced(model)
    int8 = call(model)
    ON_DISK[level](model, tmp_path)
    # Tensors of files begin at other addresses, so that torch adds in another order.
    assert all(relative(call(model), int8) < 1e-6 for _ in range(2))
    with pytest.raises(RuntimeError, match=r"to disk by diffusers, .*: call restore\(\) before en"):
        handle.restore()
    assert relative(call(model), int8) < 1e-6
    for module in model.modules():
        for x in module.parameters(recurse=False):
            x.data.fill_(-3940.0)  # what is left there is whatever the memory held
    remove_groups(model)
    with pytest.raises(RuntimeError, match="'.*' ha(ve|s) other numbers than"):
        handle.restore()


def test_a_bias_that_was_converted_or_trained_has_its_numbers() -> None:
    model, call = small.transformer("wan"), small.caller("wan")
    in_groups("leaf_level")(model, Path())
    remove_groups(model)
    handle = replaced(model)
    model.to(torch.bfloat16).to(torch.float32)
    handle.restore()
    expected = small.transformer("wan").to(torch.bfloat16).to(torch.float32)
    assert not torch.equal(call(model), call(expected))  # weights were kept in float32
    handle = replaced(model)
    bias = model.blocks[0].attn1.to_q.bias
    with torch.no_grad():
        bias.add_(1)
    handle.restore()
    assert model.blocks[0].attn1.to_q.bias is bias


def test_the_weight_of_an_offloaded_layer_is_not_read(tmp_path: Path) -> None:
    """Outside of calls there are no codes, or other numbers in their place."""
    offloads = (by_layer(with_buffers=True), "hooks first"), (ON_DISK["leaves"], "to disk by diff")
    for offload, said in offloads:
        model = small.transformer("wan")
        replaced(model)
        assert model.blocks[0].attn1.to_q.weight.isfinite().all()
        offload(model, tmp_path)
        with pytest.raises(RuntimeError, match=f"weight of this Int8Linear is offloaded.* {said}"):
            model.blocks[0].attn1.to_q.weight.clone()


# ---- layerwise casting ---------------------------------------------------------------------------


def cast(model: Any) -> None:
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)


@pytest.mark.parametrize("family", ["flux", "wan", "kandinsky", "sd3"])
def test_layers_are_cast_and_restored_as_the_model_is_cast(family: str) -> None:
    call = small.caller(family)
    native, model = (small.in_bfloat16(small.transformer(family)) for _ in range(2))
    cast(native)
    expected = call(native)
    handle = replaced(model)
    cast(model)
    assert all(0 < relative(call(model), expected) < 0.1 for _ in range(2))
    handle.restore()
    assert torch.equal(call(model), expected)
    weights = model.state_dict()
    assert all(torch.equal(x.float(), weights[n].float()) for n, x in native.state_dict().items())


def test_a_cast_model_is_replaced_before() -> None:
    model = small.in_bfloat16(small.transformer("wan"))
    cast(model)
    with pytest.raises(ValueError, match="cast by layerwise casting .*: load the model again, r"):
        replaced(model)


# ---- other hooks ---------------------------------------------------------------------------------


def test_hooks_of_torch_come_back_with_the_layer() -> None:
    model, call, seen = small.transformer("wan"), small.caller("wan"), []
    handle = replaced(model)
    name = "blocks.0.attn1.to_q"
    layer = model.get_submodule(name)
    hook = layer.register_forward_hook(lambda *_: seen.append(1))
    handle.restore()
    call(model)
    assert seen == [1] and model.get_submodule(name) is not layer
    hook.remove()
    call(model)
    assert seen == [1]


def test_a_forward_of_another_library_is_not_lost() -> None:
    model = small.transformer("wan")
    handle = replaced(model)
    layer = model.blocks[0].attn1.to_q
    layer.forward = lambda x: x * 2
    with pytest.raises(RuntimeError, match="^'blocks.0.attn1.to_q' has its own forward, whi"):
        handle.restore()
    del layer.forward
    handle.restore()


# ---- pipelines that load adapters ----------------------------------------------------------------


def test_a_pipeline_whose_groups_are_offloaded_loads_adapters() -> None:
    """The other ways need a device: tests/gpu/test_interop_offloading.py."""
    torch.manual_seed(0)
    own, pipe = cases.make("sd3"), cases.make("sd3")
    state = cases.adapter(
        own.transformer, "transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.0.proj"
    )
    for one in (own, pipe):
        replaced(one.transformer)
    pipe.enable_group_offload(CPU, CPU, "leaf_level")
    before = cases.generate(pipe, "sd3", 1)
    assert torch.equal(before, cases.generate(own, "sd3", 1))
    for one in (own, pipe):
        one.load_lora_weights(state)
    found = cases.generate(pipe, "sd3", 1)
    assert torch.equal(found, cases.generate(own, "sd3", 1)) and not torch.equal(found, before)
