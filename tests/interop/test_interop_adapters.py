"""Adapters of PEFT and diffusers around INT8 layers, put there before and after replacing."""

from __future__ import annotations

import copy
import functools
import importlib
import re
import warnings
from collections.abc import Callable
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
#: The error for writing adapters into codes.
REFUSED = r"restore\(\), then .*, then replace_linear_with_int8 again$"


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(256, 512), nn.Linear(512, 256)
        self.to_v = nn.Linear(256, 128)

    def forward(self, x: Any) -> Any:
        return self.to_v(torch.tanh(self.to_k(torch.tanh(self.to_q(x)))))


def model() -> Any:
    torch.manual_seed(0)
    return Model().eval()


X = torch.randn(17, 256, generator=torch.Generator().manual_seed(1))
LORA = {"r": 8, "target_modules": ["to_q", "to_k"]}


def result(module: Any, x: Any = X) -> Any:
    with torch.no_grad():
        return module(x)


def replace(module: Any, **options: Any) -> Any:
    return interop.replace_linear_with_int8(module, config=ALL, backend="mirror", **options)


def off(found: Any, exact: Any) -> float:
    return float((found - exact).norm() / exact.norm())


def adapted(module: Any, config: Any) -> Any:
    """Return a model with an adapter of some numbers, as training gives it."""
    torch.manual_seed(2)
    module = peft.get_peft_model(module, config)
    generator = torch.Generator().manual_seed(3)
    for name, x in module.named_parameters():
        if x.requires_grad and "magnitude" not in name:
            with torch.no_grad():
                x.add_(torch.randn(x.shape, generator=generator), alpha=0.03)
    return module.eval()


@functools.cache
def error_alone() -> float:
    module = model()
    exact = result(module)
    replace(module)
    return off(result(module), exact)


# ---- before --------------------------------------------------------------------------------------

ALL_LAYERS = ["to_q", "to_k", "to_v"]
#: Adapters, and the layers that become INT8 beneath them.
BEFORE: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "lora, as wide as a multiple of 16": (
        lambda: peft.LoraConfig(r=16, target_modules=["to_q"]), ALL_LAYERS),
    "lora": (lambda: peft.LoraConfig(**LORA), ALL_LAYERS),
    "pissa": (lambda: peft.LoraConfig(**LORA, init_lora_weights="pissa"), ALL_LAYERS),
    "dora": (lambda: peft.LoraConfig(r=8, target_modules=["to_q"], use_dora=True), ALL_LAYERS[1:]),
    "hra": (lambda: peft.HRAConfig(r=8, target_modules=["to_q"]), ALL_LAYERS[1:]),
    "ia3": (lambda: peft.IA3Config(target_modules=["to_q"], feedforward_modules=[]), ALL_LAYERS),
    "loha": (lambda: peft.LoHaConfig(r=4, target_modules=["to_q"]), ALL_LAYERS),
    "lokr": (lambda: peft.LoKrConfig(r=4, target_modules=["to_q"]), ALL_LAYERS),
    "oft": (
        lambda: peft.OFTConfig(r=0, oft_block_size=32, target_modules=["to_q"]), ALL_LAYERS),
    "modules_to_save": (
        lambda: peft.LoraConfig(r=8, target_modules=["to_q"], modules_to_save=["to_k"]),
        ["to_q", "to_v"]),
}  # fmt: skip


SLOW = {"pissa": pytest.param("pissa", marks=pytest.mark.slow)}  # decomposes the weight


@pytest.mark.parametrize("kind", [SLOW.get(kind, kind) for kind in BEFORE])
def test_of_a_layer_with_an_adapter_its_base_layer_becomes_int8(kind: str) -> None:
    config, layers = BEFORE[kind]
    plain = result(model())
    module = adapted(model(), config())
    exact = result(module)
    parameters = {n: (p, p.requires_grad) for n, p in module.named_parameters()}
    handle = replace(module)
    assert [*handle.replaced] == layers and {*handle.kept} == {*ALL_LAYERS} - {*layers}
    assert off(exact, plain) > 0.01  # the adapter has an effect
    assert 0 < off(result(module), exact) <= FACTOR * error_alone()
    left = {n: (p, p.requires_grad) for n, p in module.named_parameters()}
    assert left.items() <= parameters.items()
    assert any(grad for _, grad in left.values())
    assert [n for n, (_, grad) in parameters.items() if grad and n not in left] == []
    handle.restore()
    assert torch.equal(result(module), exact)


def test_why_layers_beneath_adapters_are_kept() -> None:
    said = {
        "dora": r"its adapter \(dora\) may read the weight in each call, which is slow on codes",
        "hra": r"its adapter \(hra\) may read the weight in each call, which is slow on codes",
        "modules_to_save": "modules_to_save: peft trains a copy of it",
    }
    for kind, reason in said.items():
        handle = replace(peft.get_peft_model(model(), BEFORE[kind][0]()))
        (found,) = handle.kept.values()
        assert re.fullmatch(reason, found) and f": kept, {found}" in handle.report()


def test_a_layer_that_an_adapter_is_merged_into_is_kept_and_unmerged_after() -> None:
    module = adapted(model(), peft.LoraConfig(**LORA))
    exact = result(module)
    module.merge_adapter()
    handle = replace(module)
    reason = "an adapter is merged into its weight: unmerge it to replace the layer"
    assert [*handle.replaced] == ["to_v"] and handle.kept == dict.fromkeys(("to_q", "to_k"), reason)
    assert off(result(module), exact) <= FACTOR * error_alone()
    module.unmerge_adapter()
    assert off(result(module), exact) <= FACTOR * error_alone()


def test_patterns_and_checkpoints_see_the_names_without_adapters(tmp_path: Any) -> None:
    bridge = importlib.import_module("cupyattn.interop.torch.bridge")
    files = importlib.import_module("tests.checkpoints.checkpoint_files")
    arrays = {n: bridge.as_array(x.contiguous()) for n, x in model().state_dict().items()}
    folder = files.write(tmp_path / "model" / "model.safetensors", arrays).parent
    ca.checkpoints.convert(folder, tmp_path / "int8", ALL)
    module = adapted(model(), peft.LoraConfig(**LORA))
    with replace(module):
        expected = result(module)
    handle = replace(module, checkpoint=tmp_path / "int8", include=r"^to_[qkv]$")
    assert [*handle.replaced] == ALL_LAYERS and torch.equal(result(module), expected)
    with pytest.raises(ValueError, match="'lora_A' of exclude is found in the name of no linear"):
        replace(module, exclude="lora_A")


# ---- after ---------------------------------------------------------------------------------------


#: Adapters that neither write the weight nor train a copy of it.
AFTER = [kind for kind in BEFORE if kind not in ("pissa", "modules_to_save")]


@pytest.mark.parametrize("kind", AFTER)
def test_adapters_are_added_to_int8_layers(kind: str) -> None:
    """Adapters that read the weight get the dequantised weight."""
    module, config = model(), BEFORE[kind][0]
    handle = replace(module)
    module, exact = adapted(module, config()), result(adapted(model(), config()))
    assert isinstance(module.base_model.model.to_q.base_layer, interop.Int8Linear)
    assert off(exact, result(model())) > 0.01
    assert 0 < off(result(module), exact) <= FACTOR * error_alone()
    handle.restore()
    # DoRA began with the norms of the weight that it read.
    assert torch.equal(result(module), exact) == (kind != "dora")


@pytest.mark.parametrize("originals", ["cpu", "drop"])
@pytest.mark.parametrize("whole", [False, True], ids=["a layer", "a module of layers"])
def test_modules_to_save_get_16_bits_again(whole: bool, originals: str) -> None:
    """A copy of them is trained, which codes cannot be."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": model(), "b": nn.Linear(128, 128)})
    weight = module["a"].to_k.weight
    handle = replace(module, originals=originals)
    stands_for = module["a"].to_k.weight.clone()
    saved = ["a"] if whole else ["to_k"]
    config = peft.LoraConfig(r=4, target_modules=["b"], modules_to_save=saved)
    tuned = peft.get_peft_model(module, config)
    kept = tuned.base_model.model["a"]
    kept = kept.original_module.to_k if whole else kept.to_k.original_module
    assert type(kept) is nn.Linear and not kept.weight.requires_grad
    assert torch.equal(kept.weight, weight if originals == "cpu" else stands_for)
    trained = [n for n, p in tuned.named_parameters() if p.requires_grad and "to_k" in n]
    assert [n.rpartition(".")[2] for n in trained] == ["weight", "bias"]
    assert isinstance(tuned.base_model.model["b"].base_layer, interop.Int8Linear)
    if originals == "cpu":
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no layer is missing
            handle.restore()
        assert not any(isinstance(m, interop.Int8Linear) for m in tuned.modules())


def test_an_adapter_is_trained() -> None:
    module = model()
    replace(module).requires_grad_(False)
    module = peft.get_peft_model(module, peft.LoraConfig(**LORA))
    wanted, losses = X[:, :128] / 2, []
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, 1e-2)
    codes = module.base_model.model.to_q.base_layer.weight_codes.clone()
    for _ in range(5):
        loss = (module(X) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert len(parameters) == 4 and losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(module.base_model.model.to_q.base_layer.weight_codes, codes)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_compiled_with_the_layers(dora: bool) -> None:
    module = model()
    replace(module)
    config = peft.LoraConfig(**LORA, use_dora=dora)
    module = adapted(module, config).requires_grad_(False)
    expected = result(module)
    torch._dynamo.reset()
    assert torch.allclose(
        result(torch.compile(module, backend="eager", fullgraph=True)), expected, atol=1e-6
    )


MERGES: dict[str, Callable[[Any], Any]] = {
    "merge": lambda m: m.merge_adapter(),
    "safe merge": lambda m: m.merge_adapter(safe_merge=True),
    "merge and unload": lambda m: m.merge_and_unload(),
    "safe merge and unload": lambda m: m.merge_and_unload(safe_merge=True),
}


@pytest.mark.parametrize("before", [False, True], ids=["adapter after", "adapter before"])
@pytest.mark.parametrize("way", MERGES)
def test_merging_is_refused_and_the_model_computes_as_before(way: str, before: bool) -> None:
    """Also where an adapter has layers of 16 bits, which come first."""
    module, config = model(), peft.LoraConfig(r=8, target_modules=ALL_LAYERS)
    exact = result(adapted(model(), config))
    if before:
        module = adapted(module, config)
    handle = replace(module, exclude="to_q")
    if not before:
        module = adapted(module, config)
    expected = result(module)
    with pytest.raises(UnsupportedError, match=REFUSED):
        MERGES[way](module)
    assert torch.equal(result(module), expected)
    handle.restore()
    assert off(result(module.merge_and_unload()), exact) < 1e-5


def test_adapters_of_several_kinds_on_one_layer() -> None:
    """One adapter around another: the layer beneath both becomes INT8."""
    torch.manual_seed(2)
    options = {"target_modules": ["to_q"], "r": 4}
    module = peft.get_peft_model(
        model(), peft.LoraConfig(**options, init_lora_weights=False), mixed=True
    )
    module.add_adapter("b", peft.LoHaConfig(**options, init_weights=False))
    module.set_adapter(["default", "b"])
    exact = result(module.eval())
    handle = replace(module)
    assert [*handle.replaced] == ALL_LAYERS
    assert 0 < off(result(module), exact) <= FACTOR * error_alone()


@pytest.mark.parametrize("init", [SLOW["pissa"], "olora"])
def test_adapters_that_would_write_the_weight_are_refused(init: str) -> None:
    module = model()
    replace(module)
    expected = result(module)
    with pytest.raises(RuntimeError, match=REFUSED):
        peft.get_peft_model(module, peft.LoraConfig(**LORA, init_lora_weights=init))
    assert off(result(module), expected) < 1e-6


# ---- models of diffusers -------------------------------------------------------------------------

#: A layer of each kind that people train.
FLUX = [
    "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_out.0",
    "transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.ff.net.2",
    "single_transformer_blocks.0.proj_mlp", "single_transformer_blocks.0.attn.to_v",
]  # fmt: skip


def flux_pipelines(replaced: bool = True) -> list[Any]:
    """Return two equal pipelines, INT8 and not."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=32, num_layers=1, num_single_layers=1, attention_head_dim=32,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
    ).eval().requires_grad_(False)  # fmt: skip
    absent = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipes = [
        diffusers.FluxPipeline(
            **dict.fromkeys(absent), transformer=one,
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        )
        for one in (transformer, copy.deepcopy(transformer))
    ]  # fmt: skip
    if replaced:
        replace(pipes[0].transformer)
    return pipes


def image(pipe: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    states, prompt, pooled = (
        torch.randn(s, generator=generator) for s in ((1, 32, 32), (1, 7, 32), (1, 32))
    )
    with torch.no_grad():
        return pipe.transformer(
            hidden_states=states, encoder_hidden_states=prompt, pooled_projections=pooled,
            timestep=torch.tensor([0.5]), img_ids=torch.zeros(32, 3), txt_ids=torch.zeros(7, 3),
            return_dict=False,
        )[0]  # fmt: skip


def lora_file(pipe: Any, seed: int, rank: int = 8, layers: list[str] | None = None) -> Any:
    """Return what a file of an adapter holds."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name in layers or FLUX:
        layer = pipe.transformer.get_submodule(name)
        shapes = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
        for part, shape in shapes.items():
            numbers = torch.randn(shape, generator=generator) * 0.05
            found[f"transformer.{name}.lora_{part}.weight"] = numbers
    return found


STEPS: dict[str, Callable[[Any], Any]] = {
    "load a": lambda p: p.load_lora_weights(lora_file(p, 1), adapter_name="a"),
    "load b": lambda p: p.load_lora_weights(lora_file(p, 2, 4), adapter_name="b"),
    "both": lambda p: p.set_adapters(["a", "b"], [0.7, 0.5]),
    "b": lambda p: p.set_adapters("b", 1.5),
    "off": lambda p: p.disable_lora(),
    "on": lambda p: p.enable_lora(),
    "delete": lambda p: p.delete_adapters("b"),
    "unload": lambda p: p.unload_lora_weights(),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "compiled before", "compiled by blocks"])
def test_adapters_of_a_pipeline_come_and_go(way: str) -> None:
    int8, plain = flux_pipelines()
    torch._dynamo.reset()
    if way == "compiled before":
        int8.transformer.compile(backend="eager", fullgraph=True)
    elif way == "compiled by blocks":
        int8.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    before = image(plain)
    alone = off(image(int8), before)
    for name, step in STEPS.items():
        step(int8)
        step(plain)
        exact = image(plain)
        assert off(image(int8), exact) <= FACTOR * alone, name
        assert (off(exact, before) > 0.003) == (name not in ("off", "unload")), name


def test_an_adapter_is_loaded_into_an_int8_pipeline_and_another_beside_it() -> None:
    int8, plain = flux_pipelines()
    before = image(plain)
    alone = off(image(int8), before)
    layer = ["transformer_blocks.0.ff.net.2"]
    for name in "ab":
        for pipe in (int8, plain):
            file = lora_file(pipe, ord(name), 4, layer)
            pipe.load_lora_weights(file, adapter_name=name)
    for pipe in (int8, plain):
        pipe.set_adapters(["a", "b"], [1.0, 2.0])
    exact = image(plain)
    assert off(exact, before) > 0.003 and off(image(int8), exact) <= FACTOR * alone


@pytest.mark.slow
def test_an_adapter_is_swapped_in_place_and_compiles_nothing() -> None:
    int8, plain = flux_pipelines()
    alone = off(image(int8), image(plain))
    for pipe in (int8, plain):
        pipe.enable_lora_hotswap(target_rank=16)
        pipe.load_lora_weights(lora_file(pipe, 1), adapter_name="a")
    torch._dynamo.reset()
    int8.transformer.compile(backend="eager", fullgraph=True)
    assert off(image(int8), image(plain)) <= FACTOR * alone
    for pipe in (int8, plain):
        pipe.load_lora_weights(lora_file(pipe, 2, 16), adapter_name="a", hotswap=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert off(image(int8), image(plain)) <= FACTOR * alone


@pytest.mark.parametrize("safe", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fusing_is_refused_and_the_model_computes_as_before(safe: bool) -> None:
    """Nothing is scaled or fused, also no layer of 16 bits before the first INT8 one."""
    int8, plain = flux_pipelines(replaced=False)
    handle = replace(int8.transformer, exclude=r"^transformer_blocks")
    layers = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_v"]
    for pipe in (int8, plain):
        pipe.load_lora_weights(lora_file(pipe, 1, 4, layers), adapter_name="a")
    expected = image(int8)
    said = (
        r"^fuse_lora of a FluxTransformer2DModel is refused, since the layer of 'single_transformer"
        r"_blocks.0.attn.to_v' is INT8, and codes cannot take in an adapter: call restore\(\), "
        r"then fuse_lora, then replace_linear_with_int8 again$"
    )
    with pytest.raises(UnsupportedError, match=said):
        int8.fuse_lora(lora_scale=0.5, safe_fusing=safe)
    assert torch.equal(image(int8), expected)
    handle.restore()
    for pipe in (int8, plain):
        pipe.fuse_lora(lora_scale=0.5, safe_fusing=safe)
    assert torch.equal(image(int8), image(plain))
    again = replace(int8.transformer, exclude=r"^transformer_blocks")
    assert "single_transformer_blocks.0.attn.to_q" in again.replaced
    assert again.kept["single_transformer_blocks.0.attn.to_v"].startswith("an adapter is merged")


def test_fusing_adapters_of_16_bit_layers_alone_works() -> None:
    int8, plain = flux_pipelines(replaced=False)
    replace(int8.transformer, exclude=r"^transformer_blocks")
    alone = off(image(int8), image(plain))
    layers = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_v"]
    for pipe in (int8, plain):
        for name, layer in zip("ab", layers, strict=True):
            pipe.load_lora_weights(lora_file(pipe, 1, 4, [layer]), adapter_name=name)
        pipe.fuse_lora(adapter_names=["a"])
    with pytest.raises(UnsupportedError, match="the layer of 'single_transformer_blocks.0.attn.to"):
        int8.fuse_lora(adapter_names=["b"])
    for pipe in (int8, plain):
        pipe.unload_lora_weights()
    assert 0 < off(image(int8), image(plain)) <= FACTOR * alone


def test_a_state_dict_answers_for_weights_that_it_does_not_hold() -> None:
    """Loaders of diffusers read them, but a file has only codes."""
    int8, plain = flux_pipelines()
    state = int8.transformer.state_dict()
    name = "transformer_blocks.0.attn.to_q.weight"
    assert name not in state and name.replace("weight", "weight_codes") in state
    assert state[name].shape == (64, 64) and state[name].dtype == torch.float32
    assert state._metadata == plain.transformer.state_dict()._metadata
    with pytest.raises(KeyError, match="nowhere"):
        state["nowhere.weight"]
    for copied in (copy.copy(state), copy.deepcopy(state)):
        assert name not in copied and copied.keys() == state.keys()
        assert copied._metadata == state._metadata
        with pytest.raises(KeyError, match=re.escape(name)):
            copied[name]
    assert type(plain.transformer.state_dict()) is type(copy.copy(state))


def test_layers_whose_parameters_an_adapter_replaces_keep_16_bits() -> None:
    """With ``target_parameters`` PEFT looks for a parameter of the base layer in each call."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q, self.to_k = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)

        def forward(self, x: Any) -> Any:
            return self.to_q(x)

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["to_q.weight"])
    model = peft.get_peft_model(Two(), config)
    x = torch.randn(3, 256)
    expected = model(x)
    handle = interop.replace_linear_with_int8(model)
    assert torch.equal(model(x), expected)
    assert "target_parameters" in str(handle.report())
