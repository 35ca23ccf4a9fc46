"""Restore replaced layers: with a handle, without one, again, and after others moved them."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca
from cupyattn import interop

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
from experiments._harness import small_transformers as small  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
of_torch = importlib.import_module("cupyattn.interop.torch")
of_diffusers = importlib.import_module("cupyattn.interop.diffusers")

nn = torch.nn
SMALL = ca.Int8Config(min_elements_for_int8=0)
LORA = {"r": 4, "target_modules": ["to_q", "to_v"], "init_lora_weights": False}


def int8(model: Any, **options: Any) -> Any:
    return of_torch.replace_linear_with_int8(model, config=SMALL, backend="mirror", **options)


def int8_attention(model: Any, **options: Any) -> Any:
    options = {"min_length": 1, "policy": "balanced"} | options
    return of_diffusers.replace_attention_with_int8(model, **options)


def int8_layers(model: Any) -> list[str]:
    return [n for n, layer in model.named_modules() if isinstance(layer, of_torch.Int8Linear)]


def make(family: str = "wan") -> tuple[Any, Any, Any]:
    """Return a model, what calls it, and its output."""
    model, call = small.transformer(family), small.caller(family)
    return model, call, call(model)


def test_a_weight_that_another_module_has_stays_where_that_needs_it() -> None:
    """An embedding on a device would have been moved to the host with the original."""
    placing = importlib.import_module("cupyattn.interop.torch.placing")
    originals = importlib.import_module("cupyattn.interop.torch.originals")
    codes = torch.zeros(128, 128, dtype=torch.int8), torch.ones(1, 1)

    def put(names: str) -> Any:
        model = nn.ModuleDict({name: nn.Linear(128, 128, bias=False) for name in names})
        model.to("meta")  # nothing can be moved from there
        for layer in model.values():
            layer.weight = model[names[0]].weight
        layers = {name: model[name] for name in "ab"}
        made = ((name, of_torch.Int8Linear(*codes), "") for name in "ab")
        placing.place_layers(model, layers, made, originals.Call("cpu", {}))
        return model

    model = put("eab")
    assert int8_layers(model) == ["a", "b"] and model["e"].weight.is_meta
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        put("ab")  # moved with the last of them


def test_what_was_moved_to_the_meta_device_is_not_restored() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    handle = int8(model)
    model.to("meta")
    said = r"^'0' is on the meta device, .*: make the model again, or call restore\(\) before to"
    for restore in (handle.restore, lambda: interop.restore(model)):
        with pytest.raises(RuntimeError, match=said):
            restore()
    assert model[0].weight.device.type == "meta" and (model[0].weight + 0).is_meta


# ---- adapters that come and go -------------------------------------------------------------------


def test_layers_are_restored_after_an_adapter_was_unloaded() -> None:
    """It stood round the layers when they were replaced, and takes its place with it."""
    model, call, native = make()
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    handle = int8(adapted)
    model = adapted.unload()
    assert int8_layers(model)
    handle.restore()
    assert not int8_layers(model) and torch.equal(call(model), native)


def test_layers_are_restored_under_an_adapter_that_came_later() -> None:
    model, call, native = make()
    config = peft.LoraConfig(**LORA)
    torch.manual_seed(1)
    own = peft.get_peft_model(copy.deepcopy(model), config)
    handle = int8(model)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config)
    handle.restore()
    assert not int8_layers(adapted) and torch.equal(call(adapted), call(own))
    layer = model.blocks[0].attn1.to_q.base_layer
    assert type(layer) is nn.Linear and not layer.weight.requires_grad  # as peft froze the model
    assert torch.equal(call(adapted.unload()), native)


def test_an_adapter_of_an_activated_layer_stays() -> None:
    model, call, _ = make("sd3")
    handle = int8(model)
    config = peft.LoraConfig(r=4, target_modules=["net.0.proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    found = call(model)
    handle.restore()
    adapted = model.transformer_blocks[0].ff.net[0].proj
    assert isinstance(adapted, peft.tuners.lora.Linear) and not int8_layers(model)
    assert 0 < (call(model) - found).norm() / found.norm() < 0.05


@pytest.mark.parametrize("place", ["net.0", "net.0.proj"])
def test_hooks_that_came_after_replacing_stay(place: str) -> None:
    """``net.0`` is a module of diffusers, GELU, which is replaced together with its layer."""
    model, call, native = make("sd3")
    handle = int8(model)
    ff, seen = model.transformer_blocks[0].ff, []
    module = ff.get_submodule(place)
    hooks = [
        module.register_forward_hook(lambda *_, **__: seen.append("after"), with_kwargs=True),
        module.register_forward_pre_hook(lambda *_: seen.append("before")),
    ]
    call(model)
    handle.restore()
    assert ff.get_submodule(place) is not module and seen == ["before", "after"]
    assert torch.equal(call(model), native) and seen == ["before", "after"] * 2
    for hook in hooks:
        hook.remove()
    assert torch.equal(call(model), native) and len(seen) == 4


def test_an_activation_with_hooks_of_its_backward_pass_is_not_replaced() -> None:
    model, _, _ = make("sd3")
    unit = model.transformer_blocks[0].ff.net[0]
    unit.register_full_backward_pre_hook(lambda *_: None)
    handle = int8(model)
    assert model.transformer_blocks[0].ff.net[0] is unit
    assert type(unit.proj) is of_torch.Int8Linear
    handle.restore()


# ---- layers that are gone ------------------------------------------------------------------------


def test_layers_that_are_gone_are_named_and_the_others_restored() -> None:
    model, call, native = make()
    model.fuse_qkv_projections()
    handle = int8(model)
    model.unfuse_qkv_projections()
    said = "^2 of the layers that were replaced are not in the model .*: blocks.0.attn1.to_qkv, bl"
    with pytest.warns(UserWarning, match=said):
        handle.restore()
    assert not int8_layers(model) and torch.equal(call(model), native)
    handle.restore()  # there is nothing left to say


def test_a_layer_that_moved_is_restored_where_it_is() -> None:
    linear = nn.Linear(256, 256)
    model = nn.ModuleDict({"blocks": nn.Sequential(linear), "other": nn.Sequential()})
    handle = int8(model)
    model["other"].append(model["blocks"].pop(0))
    handle.restore()
    assert model["other"][0] is linear


# ---- without the handle --------------------------------------------------------------------------


def test_both_kinds_are_restored_without_their_handles() -> None:
    model, call, native = make("sd3")
    handles = int8(model), int8_attention(model)
    assert not torch.equal(call(model), native)
    interop.restore(model)
    assert torch.equal(call(model), native) and not int8_layers(model)
    assert not model._forward_pre_hooks and "save_pretrained" not in vars(model)
    for handle in handles:
        handle.restore()  # nothing is left to do
    interop.restore(model)
    assert torch.equal(call(model), native)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_pipeline_is_restored(compiled: bool) -> None:
    pipe = cases.make("sd3")
    native = cases.generate(pipe, "sd3", 1)
    int8_attention(pipe)
    pipe.transformer = int8(pipe.transformer)  # a handle in the model's place
    interop.restore(pipe)
    pipe.transformer = pipe.transformer.target
    assert torch.equal(cases.generate(pipe, "sd3", 1), native)
    if compiled:
        own, pipe.transformer = pipe.transformer, torch.compile(pipe.transformer, backend="eager")
        int8(own)
        interop.restore(pipe)
        assert not int8_layers(own)


def test_what_cannot_be_restored_is_said_and_nothing_is_taken_back(tmp_path: Path) -> None:
    model, call, _ = make()
    int8_attention(model)
    int8(model, exclude="ffn")
    int8(model, include="ffn", originals="drop")
    found, said = call(model), "^'blocks.0.ffn.net.0.proj' is INT8 without the layer that it rep"
    for again in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=said if again is model else "is INT8 without the"):
            interop.restore(again)
        assert torch.equal(call(again), found)
    with pytest.raises(RuntimeError, match=said):
        int8(model, again=True)
    source = small.transformer("wan")
    source.save_pretrained(tmp_path / "model")
    ca.checkpoints.convert(tmp_path / "model", tmp_path / "int8", config=SMALL)
    loaded = of_torch.load_int8(type(source), tmp_path / "int8", backend="mirror")
    with pytest.raises(RuntimeError, match="is INT8 without the .* as layers from load_int8, "):
        interop.restore(loaded)
    said = "is INT8 already: make the model again, and load into that$"
    with pytest.raises(ValueError, match=said):
        of_torch.load_int8(loaded, tmp_path / "int8")
    handle = int8(source, include="blocks.0")
    with pytest.raises(ValueError, match=r"INT8 already: call cupyattn.interop.restore\(model\) f"):
        of_torch.load_int8(source, tmp_path / "int8")
    handle.restore()
    of_torch.load_int8(source, tmp_path / "int8", backend="mirror")
    assert torch.equal(call(source), call(loaded))


@pytest.mark.parametrize("export", ["compressed-tensors", "deepseek"])
def test_a_folder_of_ours_that_asks_for_16_bit_activations_is_refused(
    export: str, tmp_path: Path
) -> None:
    source = small.transformer("wan")
    source.save_pretrained(tmp_path / "model")
    ca.checkpoints.convert(tmp_path / "model", tmp_path / "int8", SMALL, export=export)
    path = tmp_path / "int8" / "config.json"
    config = json.loads(path.read_text())
    asked = config["quantization_config"]
    if export == "deepseek":
        asked["activation_scheme"] = None
    else:
        asked["config_groups"]["group_0"]["input_activations"] = None
    path.write_text(json.dumps(config))
    for load in (of_torch.load_int8, lambda *given: int8(given[0], checkpoint=given[1])):
        with pytest.raises(ca.UnsupportedError, match="must have 16 bits, but products make"):
            load(source, tmp_path / "int8")
    ca.checkpoints.dequantize(tmp_path / "int8", tmp_path / "back")


def test_what_is_neither_a_pipeline_nor_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a DiffusionPipeline or a torch.nn.Module, got di"):
        interop.restore({})
    interop.restore(nn.Linear(3, 3))


def test_the_face_names_it() -> None:
    assert "restore" in dir(interop)


def test_the_package_has_it_after_one_import() -> None:
    """And imports no framework for it."""
    code = (
        "import sys, cupyattn as ca; ca.interop.restore; assert 'interop' in dir(ca); "
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("replace", [int8, int8_attention])
def test_a_cell_runs_twice(replace: Any) -> None:
    model, call, native = make("sd3")
    names = {int8: ("ff", "attn"), int8_attention: ("blocks.0", "blocks.1")}[replace]
    both = [replace(model, include=name) for name in names]
    with pytest.raises(ValueError, match=r"is replaced already: restore\(\) that first, call cup"):
        replace(model)
    last = replace(model, include=names[0], again=True)
    found = call(model)
    assert all(names[0] in name for name in last.replaced)
    for handle in both:
        handle.restore()  # of layers that are not its own any more
    assert torch.equal(call(model), found)
    last.restore()
    assert torch.equal(call(model), native)
    with replace(model, include=names[0], again=True):  # nothing to take back
        assert torch.equal(call(model), found)
    assert torch.equal(call(model), native)


def test_a_pattern_that_is_wrong_takes_nothing_back() -> None:
    model, call, _ = make()
    int8(model)
    int8_attention(model)
    found = call(model)
    for replace in (int8, int8_attention):
        with pytest.raises(ValueError, match="'nowhere' of include is found in the name of no"):
            replace(model, include="nowhere", again=True)
    assert torch.equal(call(model), found)


def test_codes_of_another_model_are_not_taken_for_those_of_the_originals() -> None:
    """Nor is anything modified: old weights would stand beside the new biases."""
    models = [torch.nn.Sequential(torch.nn.Linear(256, 256)) for _ in range(2)]
    for one in models:
        of_torch.replace_linear_with_int8(one)
    loaded, other = models
    loaded.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="^scales of '0' have other numbers than when it was"):
        interop.restore(loaded)
    assert isinstance(loaded[0], of_torch.Int8Linear)
    interop.restore(other)
    assert type(other[0]) is torch.nn.Linear


def test_all_models_of_a_pipeline_are_looked_at_before_one_is_restored() -> None:
    kept, dropped = (torch.nn.Sequential(torch.nn.Linear(256, 256)) for _ in range(2))
    of_torch.replace_linear_with_int8(kept)
    of_torch.replace_linear_with_int8(dropped, originals="drop")
    pipe = type("Pipe", (), {"components": {"one": kept, "two": dropped}})()
    with pytest.raises(RuntimeError, match="INT8 without the layer that it replaced"):
        interop.restore(pipe)
    assert isinstance(kept[0], of_torch.Int8Linear)
