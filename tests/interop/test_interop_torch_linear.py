"""INT8 weights in models of torch: replaced layers and the way back, checkpoints."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca
from cupyattn import Int8Config, UnsupportedError
from tests.checkpoints.checkpoint_files import write

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")
bridge = importlib.import_module("cupyattn.interop.torch.bridge")
linear_module = importlib.import_module("cupyattn.interop.torch.linear")

nn = torch.nn
DTYPES = ("float16", "bfloat16", "float32")


pytestmark = pytest.mark.usefixtures("seeded")


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.attn_q = nn.Linear(128, 128)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(128, 256), "fc2": nn.Linear(256, 128)})
        self.small = nn.Linear(128, 4)

    def forward(self, x: Any) -> Any:
        h = self.attn_q(self.norm(x))
        h = x + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](h)))
        return h + self.small(h).sum(-1, keepdim=True)


class Model(nn.Module):  # type: ignore[misc, name-defined]
    """Two blocks and a last layer, all but it named as transformers name theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.proj_out = nn.Linear(128, 128)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.proj_out(x)


def model(dtype: str = "bfloat16") -> Any:
    return Model().to(getattr(torch, dtype))


def save(module: Any, folder: Path) -> Path:
    """Write a state dict as safetensors."""
    arrays = {name: bridge.as_array(x.contiguous()) for name, x in module.state_dict().items()}
    return write(folder / "model.safetensors", arrays).parent


@pytest.fixture
def converted(tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    """A model, and the folder of its INT8 checkpoint."""
    module = model()
    ca.checkpoints.convert(save(module, tmp_path / "model"), tmp_path / "int8")
    yield module, tmp_path / "int8"


# ---- the page ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "INTEROP.md").read_text(encoding="utf-8")
PAGE = PAGE.split("## torch\n")[1].split("\n## ")[0]


def test_the_examples_of_the_page_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", own)  # put back after
    torch._dynamo.reset()
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    assert names["o"].shape == names["o8"].shape == names["y"].shape == names["q"].grad.shape
    assert names["packed"].shape == (256, 8, 64) and names["z"].shape == (4, 8)
    assert "0: INT8, linear" in capsys.readouterr().out
    assert type(names["model"][0]) is nn.Linear


def test_the_page_names_what_there_is() -> None:
    table = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))))
    assert table == set(interop.__all__)


# ---- layers of a model ---------------------------------------------------------------------------

LAYERS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn_q", "mlp.fc1", "mlp.fc2")]


def test_layers_are_replaced_and_restored() -> None:
    module, x = model(), torch.randn(9, 128, dtype=torch.bfloat16)
    before, linears = module(x), {n: m for n, m in module.named_modules() if type(m) is nn.Linear}
    handle = interop.replace_linear_with_int8(module, backend="mirror")
    assert list(handle.replaced) == LAYERS
    kept = {name: reason.partition(":")[0] for name, reason in handle.kept.items()}
    assert kept == {"blocks.0.small": "small", "blocks.1.small": "small", "proj_out": "final"}
    after = module(x)
    error = (after - before).norm() / before.norm()
    assert 0 < error < 0.05
    report = handle.report().splitlines()
    held = [
        sum(x.numel() * x.element_size() for x in one.state_dict().values())
        for one in (model(), module)
    ]
    assert report[0] == f"6 INT8, 3 kept, weights {100 * held[1] / held[0] - 100:.0f} %"
    assert report[0].endswith("weights -45 %")
    assert report[1].startswith("scales by block: no activations were given")
    assert report[2] == "blocks.0.attn_q: INT8, attention" and "proj_out: kept, final" in report
    handle.restore()
    assert all(module.get_submodule(name) is m for name, m in linears.items())
    assert torch.equal(module(x), before)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("originals", ["cpu", "device"])
def test_restored_weights_have_the_type_that_the_model_was_converted_to(
    bias: bool, originals: str
) -> None:
    layers = (nn.Linear(256, 256, bias=bias), nn.GELU(), nn.Linear(256, 256, bias=bias))
    module = nn.Sequential(*layers, nn.LayerNorm(256))
    if bias:
        layers[2].bias.data = layers[2].bias.data.double()
    layers[0].weight.grad = torch.ones(256, 256)
    weight, names = layers[0].weight, [name for name, _ in module.named_parameters()]
    handle = interop.replace_linear_with_int8(module, originals=originals, backend="mirror")
    saved = set(module.state_dict())
    codes = {f"{i}.{name}" for i in (0, 2) for name in ("weight_codes", "weight_scale")}
    assert saved == {*names} - {"0.weight", "2.weight"} | codes
    handle.restore()
    assert weight.dtype == torch.float32 and (not bias or layers[2].bias.dtype == torch.float64)
    handle = interop.replace_linear_with_int8(module, originals=originals, backend="mirror")
    expected = weight.detach().bfloat16()
    handle.to(torch.bfloat16).restore()
    assert module[0].weight is weight and torch.equal(weight, expected)
    assert weight.grad.dtype == torch.bfloat16
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    module(torch.randn(3, 256, dtype=torch.bfloat16)).sum().backward()


def test_restored_weights_are_frozen_as_the_model_was() -> None:
    def trained() -> dict[str, bool]:
        return {name: p.requires_grad for name, p in module.named_parameters()}

    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256, bias=False), nn.LayerNorm(256))
    for flag in (False, True, False):
        handle = interop.replace_linear_with_int8(module, backend="mirror")
        module.requires_grad_(flag)
        handle.restore()
        assert trained() == dict.fromkeys(trained(), flag)
    module.requires_grad_(True)
    handle = interop.replace_linear_with_int8(module, backend="mirror")
    module[0].requires_grad_(False)
    handle.restore()
    assert trained() == {name: not name.startswith("0.") for name in trained()}
    with interop.replace_linear_with_int8(module, backend="mirror"):
        pass
    assert trained() == {name: not name.startswith("0.") for name in trained()}


def test_patterns_configuration_and_the_context() -> None:
    module = model("float32")
    with interop.replace_linear_with_int8(
        module, include=[r"^blocks\.0\.", "fc2"], exclude="attn", backend="mirror"
    ) as handle:
        assert set(handle.replaced) == {"blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "blocks.1.mlp.fc2"}
        assert handle.kept["blocks.0.attn_q"] == handle.kept["blocks.1.mlp.fc1"] == "excluded"
    assert not any(isinstance(m, interop.Int8Linear) for m in module.modules())
    config = Int8Config(min_elements_for_int8=0, fp32_patterns=["*.fc1.*"])
    handle = interop.replace_linear_with_int8(module, config=config, originals="drop")
    assert "blocks.0.small" in handle.replaced
    assert handle.kept["blocks.0.mlp.fc1"] == "fp32_patterns: *.fc1.*"
    with pytest.raises(RuntimeError, match="the layers were dropped: .* originals='cpu'"):
        handle.restore()


def test_layers_that_are_shared_hooked_or_another_kind() -> None:
    class Own(nn.Linear):  # type: ignore[misc, name-defined]
        pass

    shared = nn.Linear(128, 128)
    hooked = nn.Linear(128, 128)
    hooked.register_forward_hook(lambda *_: None)
    patched = nn.Linear(128, 128)
    patched.forward = lambda x: x
    module = nn.Sequential(
        shared, shared, Own(128, 128), hooked, nn.Linear(128, 128, device="meta"), patched
    )
    handle = interop.replace_linear_with_int8(module, backend="mirror")
    assert module[0] is module[1] and isinstance(module[0], interop.Int8Linear)
    assert handle.kept == {
        "2": "a Own", "3": "has hooks", "4": "holds no numbers, on the meta device",
        "5": "has its own forward",
    }  # fmt: skip
    own, module[1] = module[1], nn.Identity()
    handle.restore()
    assert module[0] is shared and type(module[1]) is nn.Identity
    module[1] = own
    handle.restore()
    assert module[0] is module[1] is shared


def test_a_model_with_int8_layers_is_fine_tuned() -> None:
    """Gradients reach the trainable rest."""
    module = model("float32")
    interop.replace_linear_with_int8(module, backend="mirror")
    module(torch.randn(9, 128)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    names = [name for name, _ in module.named_parameters()]
    assert "blocks.0.norm.weight" in names and "blocks.0.attn_q.weight" not in names


def test_what_replacing_refuses(tmp_path: Path) -> None:
    small = nn.ModuleDict({"time": nn.Linear(8, 8), "0": nn.Linear(8, 8), "1": nn.Linear(8, 8)})
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "must be a torch.nn.Module, got SimpleNamespace|got dict", {"model": {}}),
        (ValueError, "originals must be cpu or device or drop", {"originals": "disk"}),
        (ValueError, r"include must be a regular expression or", {"include": "("}),
        (ValueError, r"no linear layer of the model becomes INT8 \(0: small: 64 elements, \D+4096; "
                     r"time: time\)", {"model": small}),
        (ValueError, "no linear layer of the model becomes INT8", {"exclude": "."}),
        (ValueError, r"'\^9' of include is found in the name of no linear layer, there are "
                     "blocks.0.attn_q, ", {"include": ["fc2", "^9"]}),
        (ValueError, r"'fc3' of exclude is found in the name of no", {"exclude": ["fc2", "fc3"]}),
        (FileNotFoundError, "no checkpoint '.*nowhere': `cupyattn convert MODEL --output FOLDER` "
                            "makes", {"checkpoint": tmp_path / "nowhere"}),
    ]  # fmt: skip
    for error, message, changed in cases:
        with pytest.raises(error, match=message):
            interop.replace_linear_with_int8(**{"model": model(), **changed})


def test_layers_that_are_replaced_already_are_named() -> None:
    """As for attention, they are named even if other linear layers of the model were kept."""
    module = model("float32")
    handle = interop.replace_linear_with_int8(module, backend="mirror")
    assert handle.kept
    for again in (module, handle, nn.Sequential(module.blocks[0].attn_q)):
        with pytest.raises(ValueError, match=r"^[\w.]+ is replaced already: restore\(\) that"):
            interop.replace_linear_with_int8(again, backend="mirror")
    handle.restore()
    with interop.replace_linear_with_int8(module, exclude="fc2", backend="mirror"):
        rest = interop.replace_linear_with_int8(module, exclude="attn", backend="mirror")
        assert [*rest.replaced] == ["blocks.0.mlp.fc2", "blocks.1.mlp.fc2"]
        with pytest.raises(ValueError, match=r"no linear layer .*\(.*proj_out: final"):
            interop.replace_linear_with_int8(module, include="proj_out", backend="mirror")


def test_a_folder_that_is_not_there_is_told_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="^there is no checkpoint '.*int8': `cupyattn conv"):
        interop.load_int8(model(), tmp_path / "int8")


# ---- checkpoints ---------------------------------------------------------------------------------


def test_codes_of_a_checkpoint_replace_those_layers(converted: tuple[Any, Path]) -> None:
    module, folder = converted
    x = torch.randn(9, 128, dtype=torch.bfloat16)
    with interop.replace_linear_with_int8(module, backend="mirror"):
        expected = module(x)
    handle = interop.replace_linear_with_int8(module, folder, exclude="fc2", backend="mirror")
    assert list(handle.replaced) == [name for name in LAYERS if "fc2" not in name]
    assert handle.kept["proj_out"] == "no codes in the checkpoint"
    handle.restore()
    interop.replace_linear_with_int8(module, folder, backend="mirror")
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("export", ["compressed-tensors", "deepseek"])
def test_a_checkpoint_is_loaded_into_a_model(tmp_path: Path, meta: bool, export: str) -> None:
    source = model()
    ca.checkpoints.convert(save(source, tmp_path / "model"), tmp_path / "int8", export=export)
    x = torch.randn(9, 128, dtype=torch.bfloat16)
    with interop.replace_linear_with_int8(source, backend="mirror"):
        expected = source(x)
    with torch.device("meta" if meta else "cpu"):
        module = Model()
    assert interop.load_int8(module, tmp_path / "int8", backend="mirror") is module
    found = [n for n, m in module.named_modules() if isinstance(m, interop.Int8Linear)]
    assert found == LAYERS and module.proj_out.weight.dtype == torch.bfloat16
    assert torch.equal(module(x), expected)


def test_what_loading_refuses(converted: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = converted

    def changed(change: Any) -> Any:
        module = Model()
        change(module)
        return module

    def smaller(module: Any) -> None:
        module.blocks[0].mlp["fc1"] = nn.Linear(128, 100)

    cases: list[tuple[str, Any]] = [
        ("'blocks.0.attn_q' is no torch.nn.Linear of the model",
         lambda m: setattr(m.blocks[0], "attn_q", nn.Identity())),
        (r"'blocks.0.mlp.fc1.weight' has shape \(256, 128\), the model's layer has \(100, 128\)",
         smaller),
        (r"the model's 'extra.bias' is not there \(2 missing, 0 unexpected\)",
         lambda m: setattr(m, "extra", nn.Linear(2, 2))),
        ("the model has no 'proj_out.bias'", lambda m: delattr(m, "proj_out")),
        (r"'proj_out.bias' has shape \(128,\), the model's has \(5,\)",
         lambda m: setattr(m, "proj_out", nn.Linear(128, 5))),
    ]  # fmt: skip
    for message, change in cases:
        module = changed(change)
        modules, before = dict(module.named_modules()), dict(module.state_dict(keep_vars=True))
        with pytest.raises(ValueError, match=message):
            interop.load_int8(module, folder)
        assert dict(module.named_modules()) == modules
        after = module.state_dict(keep_vars=True)
        assert after.keys() == before.keys() and all(after[n] is x for n, x in before.items())
    with pytest.raises(TypeError, match="Model cannot be made by a config.json"):
        interop.load_int8(Model, folder)
    with pytest.raises(ValueError, match="has no weights with scales"):
        interop.load_int8(Model(), save(model(), tmp_path / "plain"))


@pytest.mark.parametrize("kind", ["in blocks of 64 x 64", "with zero points"])
def test_codes_that_the_products_do_not_take_are_refused(tmp_path: Path, kind: str) -> None:
    size = 64 if "64" in kind else 128
    scales = torch.ones(256 // size, 256 // size)
    tensors = {"fc.weight": torch.ones(256, 256, dtype=torch.int8), "fc.weight_scale": scales}
    if "zero" in kind:
        tensors["fc.weight_zero_point"] = torch.ones(scales.shape, dtype=torch.int8)
    (tmp_path / "x").mkdir()
    torch.save(tensors, tmp_path / "x" / "model.bin")
    weights = {
        "strategy": "block",
        "block_structure": [size, size],
        "symmetric": "zero" not in kind,
    }
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    text = json.dumps({"quantization_config": {**config, "config_groups": {"g": group}}})
    (tmp_path / "x" / "config.json").write_text(text)
    with pytest.raises(UnsupportedError, match=f"products take .* 'fc.weight' are {kind}"):
        interop.load_int8(nn.ModuleDict({"fc": nn.Linear(256, 256)}), tmp_path / "x")


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def of_others(
    folder: Path, strategy: str, activations: dict[str, Any] | None, **more: Any
) -> tuple[Any, Any]:
    """Write a W8A8 model as LLM Compressor does, scales in BF16; return its weight and a model."""
    torch.manual_seed(3)
    codes = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
    shape = {"channel": (48, 1), "tensor": (1,), "group": (48, 2), "block": (1, 1)}[strategy]
    scales = (torch.rand(shape) / 100 + 0.001).bfloat16()
    bias = torch.randn(48, dtype=torch.bfloat16)
    tensors = {"fc.weight": codes, "fc.weight_scale": scales, "fc.bias": bias, **more}
    folder.mkdir()
    torch.save(tensors, folder / "model.bin")
    weights = {"strategy": strategy, "num_bits": 8, "type": "int", "symmetric": True}
    weights |= {"group": {"group_size": 32}, "block": {"block_structure": [128, 128]}}.get(
        strategy, {}
    )
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    groups = {"g": group, **({"h": more_group(strategy)} if "two.weight" in more else {})}
    text = json.dumps({"quantization_config": {**config, "config_groups": groups}})
    (folder / "config.json").write_text(text)
    layers = {"fc": nn.Linear(64, 48)}
    if "two.weight" in more:
        layers["two"] = nn.Linear(64, 48)
    return codes.float() * scales.float() if strategy != "group" else None, nn.ModuleDict(layers)


def more_group(strategy: str) -> dict[str, Any]:
    other = "tensor" if strategy == "channel" else "channel"
    return {
        "targets": ["two"], "weights": {"strategy": other, "symmetric": True},
        "input_activations": TOKENS,
    }  # fmt: skip


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_codes_of_others_are_loaded(tmp_path: Path, strategy: str) -> None:
    activations = TOKENS
    if strategy == "block":
        activations = {**TOKENS, "strategy": "group", "group_size": 128}
    weight, module = of_others(tmp_path / "x", strategy, activations)
    layer = interop.load_int8(module, tmp_path / "x", backend="mirror")["fc"]
    assert layer.strategy == ("block" if strategy == "block" else "channel")
    assert layer.weight_scale.dtype == torch.float32 and layer.weight.dtype == torch.bfloat16
    x = torch.randn(9, 64, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().T + layer.bias.double()
    assert (layer(x) - exact).norm() < 0.012 * exact.norm()


@pytest.mark.parametrize(
    ("strategy", "activations", "said"),
    [
        ("channel", {**TOKENS, "dynamic": False}, "of 'fc.weight' must have static scales"),
        ("channel", {**TOKENS, "strategy": "tensor"}, "have the strategy 'tensor'"),
        ("channel", {**TOKENS, "symmetric": False}, "must have zero points"),
        ("channel", {**TOKENS, "num_bits": 4}, "have 4 bits of type 'int'"),
        ("group", TOKENS, "the codes of 'fc.weight' are in blocks of 1 x 32"),
    ],
)
def test_what_products_do_not_do_is_refused(tmp_path: Path, strategy, activations, said) -> None:  # type: ignore[no-untyped-def]
    _, module = of_others(tmp_path / "x", strategy, activations)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    with pytest.raises(UnsupportedError, match=said):
        interop.load_int8(module, tmp_path / "x")
    assert type(module["fc"]) is nn.Linear
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_strategies_may_differ_and_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    two = {
        "two.weight": torch.ones(48, 64, dtype=torch.int8), "two.bias": torch.ones(48),
        "two.weight_scale": torch.full((1,), 0.5),
    }  # fmt: skip
    weight, module = of_others(tmp_path / "x", "channel", TOKENS, **two)
    loaded = interop.load_int8(module, tmp_path / "x")
    assert (loaded["two"].weight == 0.5).all()
    assert (loaded["fc"].weight.float() - weight).norm() < 0.004 * weight.norm()
    _, module = of_others(
        tmp_path / "y", "channel", TOKENS, **{"fc.weight_scale": torch.ones(47, 1)}
    )
    with pytest.raises(ValueError, match=r"must have scales \(48, 1\) .* got 'fc.weight_scale'"):
        interop.load_int8(module, tmp_path / "y")


def test_a_model_by_channel_there_and_back(tmp_path: Path) -> None:
    """Converted and loaded, or replaced in place: the same layers."""
    source, config = model(), ca.Int8Config(strategy="channel")
    ca.checkpoints.convert(save(source, tmp_path / "model"), tmp_path / "int8", config)
    x = torch.randn(9, 128, dtype=torch.bfloat16)
    with interop.replace_linear_with_int8(source, config=config, backend="mirror") as handle:
        expected = source(x)
        layers = [m for m in source.modules() if isinstance(m, interop.Int8Linear)]
        assert len(layers) == len(handle.replaced)
        assert {layer.strategy for layer in layers} == {"channel"}
    module = interop.load_int8(Model(), tmp_path / "int8", backend="mirror")
    assert torch.equal(module(x), expected)


@pytest.mark.slow
def test_a_class_of_diffusers_is_made_and_runs_in_int8(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    cls = diffusers.WanTransformer3DModel
    source = cls(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=64, in_channels=4,
        out_channels=4, text_dim=128, freq_dim=64, ffn_dim=256, num_layers=2, rope_max_seq_len=32,
    ).eval().bfloat16()  # fmt: skip
    source.save_pretrained(tmp_path / "model")
    done = ca.checkpoints.convert(tmp_path / "model", tmp_path / "int8")
    assert "quantization_config" in json.loads((tmp_path / "int8" / "config.json").read_text())
    found = interop.load_int8(cls, tmp_path / "int8", backend="mirror")
    assert isinstance(found, cls) and not found.training and done.analysis is not None
    int8 = [n for n, m in found.named_modules() if isinstance(m, interop.Int8Linear)]
    assert len(int8) == done.analysis.totals["int8"]["tensors"] >= 16
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8, dtype=torch.bfloat16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 6, 128, dtype=torch.bfloat16),
        "return_dict": False,
    }
    with torch.no_grad():
        expected, y = source(**inputs)[0], found(**inputs)[0]
    assert 0 < (y - expected).norm() < 0.1 * expected.norm()


@pytest.mark.slow
def test_a_model_of_kandinskys_names_takes_what_was_converted_from_its_publishers_files(
    tmp_path: Path,
) -> None:
    """Their folder, with a YAML configuration; a module of their names, made beforehand."""
    diffusers = pytest.importorskip("diffusers")
    sizes = {"model_dim": 128, "ff_dim": 256, "time_dim": 128, "num_text_blocks": 1}
    sizes |= {"num_visual_blocks": 2, "in_visual_dim": 4, "out_visual_dim": 4}
    made = {**sizes, "in_text_dim": 32, "in_text_dim2": 32, "axes_dims": (16, 24, 24)}
    source, found = (
        diffusers.Kandinsky5Transformer3DModel(patch_size=(1, 2, 2), **made).eval().bfloat16()
        for _ in range(2)
    )
    for x in source.parameters():
        torch.nn.init.normal_(x, std=0.05)
    weights = {name: bridge.as_array(x) for name, x in source.state_dict().items()}
    write(tmp_path / "model" / "lite.safetensors", weights)
    (tmp_path / "config.yaml").write_text(
        f"model:\n  checkpoint_path: ./model/lite.safetensors\n  dit_params: {json.dumps(sizes)}\n"
    )
    ca.checkpoints.optimize_kandinsky(tmp_path, tmp_path / "int8")
    interop.load_int8(found, tmp_path / "int8", backend="mirror")
    int8 = {n for n, m in found.named_modules() if isinstance(m, interop.Int8Linear)}
    assert {f"visual_transformer_blocks.{i}.feed_forward.in_layer" for i in range(2)} <= int8
    inputs = {
        "hidden_states": torch.randn(1, 2, 8, 8, 4), "encoder_hidden_states": torch.randn(1, 6, 32),
        "timestep": torch.tensor([500.0]), "pooled_projections": torch.randn(1, 32),
        "visual_rope_pos": [torch.arange(n) for n in (2, 4, 4)],
        "text_rope_pos": torch.arange(6), "return_dict": False,
    }  # fmt: skip
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, y = source(**inputs)[0], found(**inputs)[0]
    assert 0 < (y - expected).norm() < 0.1 * expected.norm()


@pytest.mark.slow
def test_a_class_of_transformers_with_tied_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=50, d_model=128, d_kv=64, d_ff=256, num_layers=2, num_heads=2
    )
    source = transformers.T5EncoderModel(config).eval().bfloat16()
    source.save_pretrained(tmp_path / "model")
    ca.checkpoints.convert(tmp_path / "model", tmp_path / "int8")
    found = interop.load_int8(transformers.T5EncoderModel, tmp_path / "int8", backend="mirror")
    assert sum(isinstance(m, interop.Int8Linear) for m in found.modules()) >= 12
    assert found.shared.weight is found.encoder.embed_tokens.weight
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected, y = (m(tokens).last_hidden_state for m in (source, found))
    assert 0 < (y - expected).norm() < 0.1 * expected.norm()
