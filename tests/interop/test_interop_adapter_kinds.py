"""Adapters of PEFT that need more of a layer than its product, and those of language models."""

from __future__ import annotations

import copy
import functools
import importlib
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca
from cupyattn import UnsupportedError

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
interop = importlib.import_module("cupyattn.interop.torch")

nn = torch.nn
ALL = ca.Int8Config(min_elements_for_int8=0)
#: Largest error of a model with an adapter, relative to the model without one.
FACTOR = 1.1
X = torch.randn(17, 128, generator=torch.Generator().manual_seed(1))


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128)).eval()


def replace(module: Any, **options: Any) -> Any:
    return interop.replace_linear_with_int8(module, config=ALL, backend="mirror", **options)


def result(module: Any, x: Any = X) -> Any:
    with torch.no_grad():
        return module(x)


def off(found: Any, exact: Any) -> float:
    return float((found - exact).norm() / exact.norm())


@functools.cache
def error_alone() -> float:
    exact, module = result(model()), model()
    replace(module)
    return off(result(module), exact)


def trained(module: Any) -> Any:
    """Return a model whose adapter has some numbers, as training gives it."""
    generator = torch.Generator().manual_seed(3)
    for x in module.parameters():
        if x.requires_grad:
            with torch.no_grad():
                x.add_(torch.randn(x.shape, generator=generator), alpha=0.03)
    return module.eval()


# ---- the weight's numbers ------------------------------------------------------------------------

KEPT = {
    "osf": (peft.OSFConfig, {"effective_rank": 100}, "begins with a decomposition of the weight"),
    "psoft": (peft.PsoftConfig, {"r": 8}, "begins with a decomposition of the weight"),
    "ln_tuning": (peft.LNTuningConfig, {}, "trains a copy of the layer"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_layers_of_adapters_that_begin_with_the_weight_have_16_bits(kind: str) -> None:
    """A file of such an adapter belongs to the decomposition of that very weight."""
    config, options, reason = KEPT[kind]
    exact_model = trained(peft.get_peft_model(model(), config(target_modules=["0"], **options)))
    exact, state = result(exact_model), peft.get_peft_model_state_dict(exact_model)
    assert off(exact, result(model())) > 0.01

    handle = replace(exact_model)
    assert handle.kept == {"0": f"its adapter ({kind}) {reason}"}
    assert 0 < off(result(exact_model), exact) <= FACTOR * error_alone()

    module = model()
    handle = replace(module)
    adapted = peft.get_peft_model(module, config(target_modules=["0"], **options)).eval()
    peft.set_peft_model_state_dict(adapted, state)
    assert 0 < off(result(adapted), exact) <= FACTOR * error_alone()
    handle.restore()
    assert torch.equal(result(adapted), exact)


@pytest.mark.parametrize("kind", KEPT)
def test_they_are_refused_where_the_weight_is_lost(kind: str) -> None:
    config, options, reason = KEPT[kind]
    module = model()
    replace(module, originals="drop")
    said = rf"^the layer is INT8 without .*, but its adapter \({kind}\) {reason}: load the"
    with pytest.raises(UnsupportedError, match=said):
        peft.get_peft_model(module, config(target_modules=["0"], **options))


def test_an_adapter_of_all_weights_is_refused_before_it_changes_the_model() -> None:
    module = model()
    replace(module)
    before = result(module)
    said = r"^the model has INT8 layers, but its adapter \(frod\) begins with a decomposition of"
    with pytest.raises(UnsupportedError, match=said):
        peft.get_peft_model(module, peft.FrodConfig(target_modules=["0"], progressbar=False))
    assert torch.equal(result(module), before) and type(module[0]) is interop.Int8Linear


def test_an_adapter_that_is_a_linear_layer_itself_is_no_layer_of_the_model() -> None:
    """The report had its layer twice: as INT8, and as kept."""
    module = peft.get_peft_model(model(), peft.RandLoraConfig(r=8, target_modules=["0"]))
    handle = replace(module)
    assert [*handle.replaced] == ["0", "2"] and not handle.kept


UNLOADED = {
    "ia3": (peft.IA3Config, {"feedforward_modules": []}),
    "loha": (peft.LoHaConfig, {"r": 4}),
    "lokr": (peft.LoKrConfig, {"r": 4}),
    "oft": (peft.OFTConfig, {"oft_block_size": 32}),
    "vera": (peft.VeraConfig, {"r": 4}),
}


@pytest.mark.parametrize("kind", UNLOADED)
@pytest.mark.parametrize("before", [False, True], ids=["adapter after", "adapter before"])
def test_adapters_are_unloaded_from_int8_layers(before: bool, kind: str) -> None:
    """PEFT assigns a layer's weight and bias to the layer itself."""
    cls, options = UNLOADED[kind]
    config = cls(target_modules=["0"], **options)
    exact, module = result(model()), model()
    replace(module)
    int8 = result(module)
    module = model()
    if before:
        adapted = trained(peft.get_peft_model(module, config))
        handle = replace(adapted)
    else:
        handle = replace(module)
        adapted = trained(peft.get_peft_model(module, config))
    assert not torch.equal(result(adapted), int8)
    unloaded = adapted.unload()
    assert type(unloaded[0]) is interop.Int8Linear
    assert torch.equal(result(unloaded), int8)
    handle.restore()
    assert torch.equal(result(unloaded), exact)


def test_only_a_layers_own_weight_may_be_assigned_to_it() -> None:
    one, other = (interop.Int8Linear.from_linear(model()[0], backend="mirror") for _ in range(2))
    int8 = result(one)
    one.weight = one.weight
    assert torch.equal(result(one), int8)
    for weight in (other.weight, one.weight[:], one.weight.clone(), None):
        with pytest.raises(RuntimeError, match="cannot be written"):
            one.weight = weight


# ---- parameters that an adapter replaces ---------------------------------------------------------


@pytest.mark.parametrize("by", ["get_peft_model", "add_adapter", "tuner before"])
@pytest.mark.parametrize("target", ["weight", "0.weight"])
def test_an_adapter_of_an_int8_weight_is_refused(target: str, by: str) -> None:
    """PEFT names modules by their parameters, finds none, and would go on without that one."""
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=[target])
    first = peft.LoraConfig(r=4, target_modules=["2"], init_lora_weights=False)
    module = model()
    if by == "tuner before":
        module = peft.get_peft_model(module, first).eval()
    handle = replace(module)
    if by == "add_adapter":
        module = peft.get_peft_model(module, first).eval()
    int8, kinds = result(module), [*map(type, module.modules())]
    said = (
        r"^target_parameters names '0.weight', whose layer is INT8, so that it is no parameter: "
        r"call restore\(\), add the adapter, then replace_linear_with_int8 again$"
    )
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=said):
            if by == "get_peft_model":
                peft.get_peft_model(module, config)
            else:
                module.add_adapter("second", config)
    assert kinds == [*map(type, module.modules())] and torch.equal(result(module), int8)
    handle.restore()
    if by == "get_peft_model":
        assert "ParamWrapper" in str(peft.get_peft_model(module, config))
    else:
        assert [*module.peft_config] == ["default"]


def test_an_adapter_of_a_parameter_that_is_none_of_int8_is_added() -> None:
    module = model()
    replace(module, include="0")
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["2.weight"])
    assert "ParamWrapper" in str(peft.get_peft_model(module, config))


# ---- modules without parameters ------------------------------------------------------------------


def test_a_module_whose_parameters_are_all_codes_tells_type_and_device() -> None:
    plain = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Sequential(nn.Linear(128, 8)))
    model = plain.to(torch.bfloat16)
    handle = replace(model, exclude="^1")
    for module in (model[0], copy.deepcopy(model)[0]):
        (first,) = module.parameters()
        assert (first.dtype, first.device.type, first.numel()) == (torch.bfloat16, "cpu", 0)
        assert not first.requires_grad and not [*module.parameters(recurse=False)]
        assert first is next(module.parameters())  # offloading finds its copy by the parameter
        assert not dict(module.named_parameters()) and "weight_codes" in module.state_dict()
    assert [*model.parameters()] == [*model[1].parameters()]  # where there are any, those alone
    handle.restore()
    assert [*model[0].parameters()] == [model[0].weight] and "parameters" not in vars(model)


# ---- language models -----------------------------------------------------------------------------

TOKENS = torch.arange(9)[None]


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def logits(module: Any) -> Any:
    torch.manual_seed(0)
    return result(lambda tokens: module(tokens).logits, TOKENS)


@pytest.mark.parametrize("before", [False, True], ids=["adapter after", "adapter before"])
def test_prompts_are_put_into_attention_without_parameters(before: bool) -> None:
    """In a model without biases, attention has no parameter left, and PEFT reads its first one."""
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")

    def adapted(module: Any) -> Any:
        torch.manual_seed(3)
        module = peft.get_peft_model(module, config)
        for name, x in module.named_parameters():
            if "adaption_gate" in name:
                x.data.fill_(0.7)
        return module.eval()

    plain, module = logits(llama()), llama()
    replace(module)
    alone = off(logits(module), plain)
    exact = logits(adapted(llama()))
    assert off(exact, plain) > 0.05
    module = adapted(llama()) if before else llama()
    handle = replace(module)
    module = module if before else adapted(module)
    assert [*handle.kept] == ["lm_head"]
    assert "model.layers.0.self_attn.q_proj" in handle.replaced
    assert 0 < off(logits(module), exact) <= FACTOR * alone
    handle.restore()
    assert torch.equal(logits(module), exact)


def test_the_classifier_of_x_lora_is_no_layer_of_the_model(tmp_path: Path) -> None:
    adapters = {}
    for name in ("0", "1"):
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        peft.get_peft_model(llama(), config).save_pretrained(tmp_path / name)
        adapters[name] = str(tmp_path / name)
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=128, xlora_depth=2, xlora_size=128, adapters=adapters
    )
    module = peft.get_peft_model(llama(), config).eval()
    classifier = module.base_model.internal_xlora_classifier
    layers = [layer for layer in classifier.modules() if isinstance(layer, nn.Linear)]
    exact = logits(module)
    handle = replace(module)
    assert len(handle.replaced) == 7 and [*handle.kept] == ["lm_head"]
    assert all(name.startswith("model.layers.0.") for name in handle.replaced)
    assert layers == [layer for layer in classifier.modules() if isinstance(layer, nn.Linear)]
    assert all(type(layer) is nn.Linear for layer in layers)
    assert 0 < off(logits(module), exact) < 0.05
    handle.restore()
    assert torch.equal(logits(module), exact)
