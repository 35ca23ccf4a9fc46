"""Modules of diffusers that apply an activation to an INT8 layer: one product, compiled or not."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import as_float64
from tests.checkpoints.checkpoint_files import write

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
interop = importlib.import_module("cupyattn.interop.torch")
activated = importlib.import_module("cupyattn.interop.torch.activated")
bridge = importlib.import_module("cupyattn.interop.torch.bridge")
epilogues = importlib.import_module("tests.interop.test_interop_torch_epilogues")
from diffusers.models import activations, attention  # noqa: E402

fresh = epilogues.fresh
#: What `FeedForward` of diffusers is told, the class that it makes, and the layer's activation.
KINDS = {
    "gelu": (activations.GELU, "gelu"),
    "gelu-approximate": (activations.GELU, "gelu_tanh"),
    "geglu": (activations.GEGLU, "geglu_gate_last"),
    "swiglu": (activations.SwiGLU, "swiglu_gate_last"),
}
WIDTH, INNER = 128, 72  # of which two halves do not end with a block of scales


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.ff = attention.FeedForward(WIDTH, inner_dim=INNER, activation_fn=kind)

    def forward(self, x: Any) -> Any:
        return x + self.ff(x)


def model(kind: str = "geglu", dtype: Any = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"blocks": torch.nn.Sequential(Block(kind), Block(kind))}).to(dtype)


def int8(module: Any, strategy: str = "channel", **options: Any) -> Any:
    config = ca.Int8Config(strategy=strategy, min_elements_for_int8=0)
    return interop.replace_linear_with_int8(module, config=config, backend="mirror", **options)


def rows(dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def first(module: Any) -> Any:
    return module["blocks"][0].ff.net[0]


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_is_part_of_the_product_and_within_its_bound(
    kind: str, strategy: str
) -> None:
    """Beside the layer and the module of diffusers, one after the other, which round more often."""
    module = model(kind)
    names, replaced = set(module.state_dict()), first(module)
    int8(module, strategy)
    unit, x, (cls, activation) = first(module), rows(), KINDS[kind]
    assert type(replaced) is cls and type(unit) is activated.ActivatedInt8Linear
    assert unit.activation == activation and unit.proj.activation is None
    assert {
        n.replace("weight_codes", "weight") for n in module.state_dict() if "weight_scale" not in n
    } == names
    with torch.no_grad():
        found, apart, plain = unit(x), replaced(x), unit.proj(x)
        assert replaced.proj is unit.proj
        assert torch.equal(found, unit.proj(x, activation=activation))
    codes = (
        *ca.act_quant(bridge.as_array(x.reshape(-1, WIDTH)), strategy=strategy),
        *map(bridge.as_array, (unit.proj.weight_codes, unit.proj.weight_scale)),
    )
    after = {"bias": bridge.as_array(unit.proj.bias.detach()), "activation": activation}
    exact = ca.quant.gemm_exact(*codes, **after)
    error = ca.quant.gemm_error(*codes, "bfloat16", **after)
    off = [np.abs(as_float64(bridge.as_array(y.reshape(exact.shape))) - exact)
           for y in (found, apart)]  # fmt: skip
    assert (off[0] <= error).all()
    # The layer's result is rounded before the function, and the function's before the product.
    halves = plain.double().reshape(len(exact), -1).numpy()
    if "_gate_last" in activation:
        halves = np.abs(np.multiply(*np.split(halves, 2, axis=1)))
    unit_roundoff = torch.finfo(torch.bfloat16).eps / 2
    assert (off[1] <= error + 3 * 1.13 * unit_roundoff * np.abs(halves) * 1.01 + 1e-6).all()
    assert off[0].mean() < off[1].mean()


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_has_the_same_products(kind: str) -> None:
    module, x = model(kind, torch.float16), rows(torch.float16)
    int8(module)
    layers = module["blocks"][0].ff
    found, graphs = epilogues.run(layers, x)
    assert [one["activation"] for one in graphs.products()] == [KINDS[kind][1], ""]
    assert graphs.names() == [epilogues.LAYER] * 2
    with torch.no_grad():
        assert torch.equal(found, layers(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_those_of_the_module_of_diffusers(kind: str, compiled: bool) -> None:
    module, x = model(kind, torch.float32), rows(torch.float32)
    replaced = first(module)
    int8(module)
    unit = first(module)
    call = torch.compile(unit, backend="eager", fullgraph=True) if compiled else unit
    found = []
    for one in (call, replaced):
        leaf = x.clone().requires_grad_()
        replaced.proj.bias.grad = None
        one(leaf).square().sum().backward()
        found.append((leaf.grad, replaced.proj.bias.grad))
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*found, strict=True))
    unit.proj.bias.requires_grad_(False)
    assert torch.equal(call(x), unit.proj(x, activation=unit.activation))


def test_modules_are_restored_and_a_copy_stays() -> None:
    module, x = model(), rows()
    modules, before = dict(module.named_modules()), module["blocks"](x)
    handle = int8(module)
    copied = copy.deepcopy(module)
    after = module["blocks"](x)
    module.eval()
    handle.restore()
    assert dict(module.named_modules()) == modules and torch.equal(module["blocks"](x), before)
    assert not first(module).training
    assert torch.equal(copied["blocks"](x), after)
    dropped = int8(module, originals="drop")
    assert type(first(module)) is activated.ActivatedInt8Linear
    with pytest.raises(RuntimeError, match="the layers were dropped"):
        dropped.restore()


def test_hooks_and_adapters_see_the_layers_own_result() -> None:
    module, x = model(), rows()
    replaced = first(module)
    handle = int8(module)
    unit, seen = first(module), []
    hook = unit.proj.register_forward_hook(lambda _, given, y: seen.append(y))
    with torch.no_grad():
        expected = replaced(x)
        assert torch.equal(unit(x), expected) and seen[0].shape[-1] == 2 * INNER
        hook.remove()
        assert not torch.equal(unit(x), expected)

        class Adapter(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self, base: Any) -> None:
                super().__init__()
                self.base = base

            def forward(self, x: Any) -> Any:
                return self.base(x) + 1

        layer, unit.proj = unit.proj, Adapter(unit.proj)
        other, gate = (layer(x) + 1).chunk(2, dim=-1)
        assert torch.equal(unit(x), other * torch.nn.functional.gelu(gate))
    handle.restore()
    assert first(module) is replaced and type(replaced.proj) is Adapter
    assert type(replaced.proj.base) is torch.nn.Linear


def test_other_modules_are_left_as_they_are() -> None:
    class Own(activations.GEGLU):  # type: ignore[misc]
        pass

    hooked, patched = (activations.GEGLU(WIDTH, INNER) for _ in range(2))
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x
    other = activations.SwiGLU(WIDTH, INNER)
    other.activation = torch.nn.ReLU()
    shared = activations.GELU(WIDTH, INNER)
    module = torch.nn.ModuleList([
        Own(WIDTH, INNER), hooked, patched, other, activations.ApproximateGELU(WIDTH, INNER),
        shared, shared,
    ])  # fmt: skip
    handle = int8(module, exclude=())
    kinds = [type(one) is activated.ActivatedInt8Linear for one in module]
    assert kinds == [False] * 5 + [True] * 2 and module[5] is module[6]
    assert all(type(one.proj) is interop.Int8Linear for one in module)
    handle.restore()
    assert module[5] is module[6] is shared
    kept = activations.GEGLU(WIDTH, INNER)
    int8(module := torch.nn.ModuleList([kept, torch.nn.Linear(128, 128)]), exclude="^0")
    assert module[0] is kept


def converted(module: Any, folder: Path) -> Path:
    """Return the folder of a checkpoint whose layers by channel are INT8."""
    arrays = {n: bridge.as_array(y.contiguous()) for n, y in module.state_dict().items()}
    source = write(folder / "model" / "model.safetensors", arrays).parent
    config = ca.Int8Config(strategy="channel", min_elements_for_int8=0)
    ca.checkpoints.convert(source, folder / "int8", config=config)
    return folder / "int8"


@pytest.mark.parametrize("guarded", [False, True])
def test_an_interrupted_load_leaves_the_model_as_it_was(
    guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes when all layers are in place, before or after they are guarded."""
    module = model()
    folder = converted(module, tmp_path)
    before = [(one, {*vars(one)}) for one in module.modules()]
    loading = importlib.import_module("cupyattn.interop.torch.loading")
    guard = loading.guard

    def interrupted(given: Any) -> None:
        assert type(first(given)) is activated.ActivatedInt8Linear
        if guarded:
            guard(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "guard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        interop.load_int8(module, folder, backend="mirror")
    assert [(one, {*vars(one)}) for one in module.modules()] == before


def test_a_checkpoint_keeps_the_order_of_rows(tmp_path: Path) -> None:
    """Codes of a converted model, of a replaced one and of its state dict are the same."""
    module, x = model(), rows()
    checkpoint = converted(module, tmp_path)
    loaded = interop.load_int8(model(), checkpoint, backend="mirror")
    int8(module)
    assert type(first(loaded)) is activated.ActivatedInt8Linear
    assert first(loaded).activation == "geglu_gate_last"
    state = loaded.state_dict()
    assert all(torch.equal(y, state[n]) for n, y in module.state_dict().items())
    with torch.no_grad():
        assert torch.equal(loaded["blocks"](x), module["blocks"](x))
        replaced = model()
        interop.replace_linear_with_int8(replaced, checkpoint=checkpoint, backend="mirror")
        assert torch.equal(replaced["blocks"](x), module["blocks"](x))
