"""`Int8Linear.weight`: reads by other libraries, and writes, each of which is refused."""

from __future__ import annotations

import copy
import importlib
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.checkpoints.layout import quantization_config
from tests.checkpoints.checkpoint_files import write
from tests.interop.torch_cases import same_bits

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")
bridge = importlib.import_module("cupyattn.interop.torch.bridge")
linear_module = importlib.import_module("cupyattn.interop.torch.linear")
read_only = importlib.import_module("cupyattn.interop.torch.read_only")

nn = torch.nn
ALL = ca.Int8Config(min_elements_for_int8=0)
WRITE = (
    r"^the weight of an Int8Linear cannot be written, since the layer computes with INT8 codes: "
    r"call restore\(\), then write it or fuse the adapter, then replace_linear_with_int8 again$"
)
TRAIN = "^the weight of an Int8Linear cannot be trained, .* weight.clone\\(\\)$"
MEMORY = "^the weight of an Int8Linear has no memory, .* weight.clone\\(\\)$"


pytestmark = pytest.mark.usefixtures("seeded")


def made(dtype: Any = None, strategy: str = "block", **options: Any) -> Any:
    linear = nn.Linear(160, 136, dtype=dtype or torch.bfloat16)
    return interop.Int8Linear.from_linear(linear, strategy=strategy, backend="mirror", **options)


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_weight_has_the_numbers_that_the_codes_stand_for(dtype: str, strategy: str) -> None:
    layer = made(getattr(torch, dtype), strategy)
    assert isinstance(layer, nn.Linear) and not dict(layer.named_parameters()).keys() - {"bias"}
    w = layer.weight
    assert (w.dtype, w.device.type, w.shape) == (getattr(torch, dtype), "cpu", (136, 160))
    assert isinstance(w, torch.Tensor) and not w.requires_grad and w.is_contiguous()
    codes, scales = (bridge.as_array(x) for x in (layer.weight_codes, layer.weight_scale))
    exact = ca.weight_dequant(codes, scales, out_dtype=dtype, strategy=strategy)
    assert same_bits(w.clone(), exact) and type(w.clone()) is torch.Tensor
    x = torch.randn(3, 160, dtype=w.dtype, requires_grad=True)
    numbers = w.clone()
    expected = x @ numbers.T
    d_y = torch.randn(3, 136, dtype=w.dtype)
    for y in (x @ layer.weight.T, nn.functional.linear(x, layer.weight),
              x @ layer.weight.T.to(x.dtype), (layer.weight @ x.T).T):  # fmt: skip
        assert torch.allclose(y, expected, rtol=0.01, atol=0.02)  # sums in another order
        (gradient,) = torch.autograd.grad(y, x, d_y)
        assert torch.allclose(gradient, d_y @ numbers, rtol=0.01, atol=0.02)
    assert x.to(layer.weight.dtype).dtype == w.dtype


def test_the_weight_is_converted_and_moved_with_the_layer() -> None:
    layer = made()
    assert layer.half().weight.dtype == torch.float16 == layer.weight_dtype
    assert layer.to(torch.float32).weight.dtype == torch.float32
    assert copy.deepcopy(layer).weight.dtype == torch.float32
    assert pickle.loads(pickle.dumps(layer)).weight.dtype == torch.float32
    codes, scales = layer.weight_codes, layer.weight_scale
    assert interop.Int8Linear(codes, scales).weight.dtype == torch.float32
    assert interop.Int8Linear(codes, scales, torch.ones(136).half()).weight.dtype == torch.float16


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_layers_own_product_never_reads_it(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = made().requires_grad_(False), torch.randn(3, 160, dtype=torch.bfloat16)
    expected = layer(x)

    def fails(*_: Any) -> Any:
        raise AssertionError("the weight was read")

    monkeypatch.setattr(linear_module, "dequantised", fails)
    torch._dynamo.reset()
    call = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    assert torch.equal(call(x), expected)


def test_code_that_reads_it_is_compiled_as_one_graph() -> None:
    layer, x = made(), torch.randn(3, 160, dtype=torch.bfloat16)

    def function(x: Any) -> Any:
        return layer(x.to(layer.weight.dtype)) + x @ layer.weight.T

    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))


def test_an_encoder_of_torch_runs_in_eval_mode() -> None:
    """Its fast path reads the weights of its layers."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).eval()
    x = torch.randn(2, 7, 128)
    with torch.no_grad():
        expected = layer(x)
        handle = interop.replace_linear_with_int8(
            nn.ModuleDict({"layer": layer}), config=ALL, backend="mirror"
        )
        assert [*handle.replaced] == ["layer.linear1", "layer.linear2"]
        assert 0 < (layer(x) - expected).norm() < 0.01 * expected.norm()


def test_reads_of_other_kinds() -> None:
    w = made().float().weight
    numbers = w.clone()
    assert type(w.T) is type(w[1:3]) is type(w.detach()) is type(w.data) is type(w)
    assert torch.equal(w.T[2:5].clone(), numbers.T[2:5])
    parts = zip(w.split(50), numbers.split(50), strict=True)
    assert all(type(a) is type(w) and torch.equal(a.clone(), b) for a, b in parts)
    assert torch.equal(torch.cat([w.data, w.data]), torch.cat([numbers, numbers]))
    assert torch.allclose(torch.linalg.svdvals(w), torch.linalg.svdvals(numbers), rtol=1e-4)
    assert w[0].tolist() == numbers[0].tolist() and w[0, 0].item() == float(numbers[0, 0])
    assert not w.numpy().flags.writeable and np.array_equal(np.asarray(w), numbers.numpy())
    assert np.array_equal(np.asarray(w, dtype=np.float16), numbers.half().numpy())
    assert torch.equal(torch.from_dlpack(w), numbers)
    with pytest.raises(BufferError, match="is made when it is read: allow a copy"):
        w.__dlpack__(copy=False)
    for copied in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert type(copied) is torch.Tensor and torch.equal(copied, numbers)
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    assert torch.equal(torch.load(file), numbers)
    assert repr(w).startswith("read from INT8 codes: tensor([[")
    x = torch.randn(4, 160)
    mapped = torch.func.vmap(lambda row: w @ row)(x)
    assert torch.allclose(mapped, x @ numbers.T, atol=1e-5)
    gradient = torch.func.grad(lambda x: (x @ w.T).sum())(x)
    assert torch.allclose(gradient, numbers.sum(0).expand(4, -1), atol=1e-4)
    plain = torch.zeros(136, 160)
    assert plain.add_(w) is plain and torch.equal(plain, numbers)
    assert torch.add(w, w, out=plain) is plain and torch.equal(plain, 2 * numbers)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "+=": lambda layer, x: layer.weight.__iadd__(x),
    "data +=": lambda layer, x: layer.weight.data.__iadd__(x),
    "data =": lambda layer, x: setattr(layer.weight, "data", x),
    "copy_": lambda layer, x: layer.weight.copy_(x),
    "item": lambda layer, x: layer.weight.__setitem__(0, 1.0),
    "view": lambda layer, x: layer.weight.T[2:5].zero_(),
    "part": lambda layer, x: layer.weight.split(50)[1].fill_(1.0),
    "row": lambda layer, x: layer.weight.unbind()[1].fill_(1.0),
    "detached": lambda layer, x: layer.weight.detach().mul_(2),
    "out=": lambda layer, x: torch.add(x, x, out=layer.weight),
    "out= a view": lambda layer, x: torch.add(x, x, out=layer.weight[:]),
    "several": lambda layer, x: torch._foreach_add_([x.clone(), layer.weight], 1.0),
    "set_": lambda layer, x: layer.weight.set_(x),
    "resize_": lambda layer, x: layer.weight.resize_(3),
    "index": lambda layer, x: layer.weight.index_put_((torch.tensor([0]),), x[0]),
    "init": lambda layer, x: nn.init.normal_(layer.weight),
    "reset": lambda layer, x: layer.reset_parameters(),
    "attribute": lambda layer, x: setattr(layer, "weight", x),
    "parameter": lambda layer, x: setattr(layer, "weight", nn.Parameter(x)),
    "swap": lambda layer, x: torch.utils.swap_tensors(layer.weight, x),
    "swapped": lambda layer, x: torch.utils.swap_tensors(x, layer.weight),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_every_write_is_refused_and_changes_nothing(name: str, inference: bool) -> None:
    layer, x = made().requires_grad_(False), torch.randn(3, 160, dtype=torch.bfloat16)
    before, other = layer(x), torch.ones(136, 160, dtype=torch.bfloat16)
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match=WRITE):
        WRITES[name](layer, other)
    assert torch.equal(layer(x), before) and torch.equal(other, torch.ones_like(other))


@pytest.mark.parametrize("name", WRITES)
def test_every_write_in_compiled_code_is_refused(name: str) -> None:
    layer, x = made().requires_grad_(False), torch.randn(3, 160, dtype=torch.bfloat16)
    before, other = layer(x), torch.ones(136, 160, dtype=torch.bfloat16)

    def function(other: Any) -> Any:
        WRITES[name](layer, other)
        return other + 1

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=WRITE.strip("^$")):
        torch.compile(function, backend="aot_eager")(other)
    assert torch.equal(layer(x), before) and torch.equal(other, torch.ones_like(other))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_weight_that_leaves_compiled_code_cannot_be_written(backend: str) -> None:
    layer, x = made(), torch.randn(3, 160, dtype=torch.bfloat16)

    def function(x: Any) -> Any:
        w = layer.weight.T
        torch._dynamo.graph_break()
        return w, x @ w

    torch._dynamo.reset()
    w, y = torch.compile(function, backend=backend)(x)
    assert torch.equal(y, x @ layer.weight.T) and torch.equal(w.clone(), layer.weight.T.clone())
    with pytest.raises(RuntimeError, match=WRITE):
        w.zero_()
    with pytest.raises(RuntimeError, match=WRITE):
        w.data = x


@pytest.mark.parametrize("strict", [False, True])
def test_code_that_reads_it_is_exported(strict: bool) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = made()

        def forward(self, x: Any) -> Any:
            return self.fc(x) + x @ self.fc.weight.T

    module, x = Reads(), torch.randn(3, 160, dtype=torch.bfloat16)
    exported = torch.export.export(module, (x,), strict=strict).module()
    assert torch.equal(exported(x), module(x))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_becomes_no_other_tensors_memory(device: str) -> None:
    """It has none: what reads the other tensor would read at the address 0."""
    layer = made()
    other = nn.Parameter(torch.ones(136, 160, dtype=torch.bfloat16, device=device))
    for w in (layer.weight, layer.weight.data, layer.weight[:]):
        with pytest.raises(RuntimeError, match="have incompatible tensor type"):
            other.data = w
    w = layer.weight
    assert (w.is_cpu, w.is_meta, w.device.type) == (True, False, "cpu")
    other = nn.Parameter(w, requires_grad=False)  # a parameter that is read so, too
    assert torch.equal(other + 0, w.clone())


def test_what_is_no_write_and_refused() -> None:
    layer = made()
    cases: list[tuple[str, Callable[[Any], Any]]] = [
        (TRAIN, lambda w: w.requires_grad_()),
        (TRAIN, lambda w: setattr(w, "requires_grad", True)),
        (TRAIN, lambda w: setattr(w, "grad", torch.ones(136, 160))),
        (TRAIN, nn.Parameter),
        (MEMORY, lambda w: w.data_ptr()),
        (MEMORY, lambda w: w.untyped_storage()),
        (MEMORY, lambda w: w.storage()),
        (MEMORY, lambda w: w.share_memory_()),
        ("^Cannot access data pointer of Tensor", torch.utils.dlpack.to_dlpack),  # not a crash
    ]
    for said, function in cases:
        with pytest.raises(RuntimeError, match=said):
            function(layer.weight)
    assert layer.weight.requires_grad_(False).shape == (136, 160) and layer.weight.grad is None


# ---- libraries -----------------------------------------------------------------------------------


def test_layers_that_are_int8_are_skipped_by_type() -> None:
    """Though they are linear layers: of a model of which a part was replaced, the rest is."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    first = interop.replace_linear_with_int8(model, include="0", config=ALL, backend="mirror")
    second = interop.replace_linear_with_int8(model, config=ALL, backend="mirror")
    assert [*first.replaced] == ["0"] and [*second.replaced] == ["1"] and not second.kept
    with pytest.raises(TypeError, match="linear is an Int8Linear already: use it as it is"):
        interop.Int8Linear.from_linear(model[0])


def test_codes_that_accelerate_has_offloaded_are_not_read() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, x = nn.Sequential(made().requires_grad_(False)), torch.randn(3, 160).bfloat16()
    expected, weight = model(x), model[0].weight.clone()
    accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    assert model[0].weight_codes.is_meta
    said = "^the weight of this Int8Linear is offloaded, .*: remove the offloading hooks first"
    w = model[0].weight
    assert (w.device.type, w.dtype, w.shape) == ("cpu", torch.bfloat16, (136, 160))  # of its calls
    with pytest.raises(RuntimeError, match=said):
        w.clone()
    assert torch.equal(model(x), expected)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(model[0].weight.clone(), weight)


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("name", ["weight", "weight_codes"])
def test_a_file_of_a_state_dict_is_loaded_under_both_names(
    tmp_path: Path, name: str, strategy: str
) -> None:
    model = nn.ModuleDict({"fc": made(strategy=strategy)})
    state = {
        key.replace("weight_codes", name): bridge.as_array(x.contiguous())
        for key, x in model.state_dict().items()
    }
    folder = write(tmp_path / "model.safetensors", state).parent
    if name == "weight":
        config = quantization_config("compressed-tensors", 128, {strategy: ["fc"]}, [])
        text = json.dumps({"quantization_config": config})
        (folder / "config.json").write_text(text)
    found = interop.load_int8(nn.ModuleDict({"fc": nn.Linear(160, 136)}), folder, backend="mirror")
    assert found["fc"].strategy == strategy and found["fc"].weight.dtype == torch.bfloat16
    expected = model.state_dict()
    assert all(torch.equal(x, expected[key]) for key, x in found.state_dict().items())
    x = torch.randn(3, 160, dtype=torch.bfloat16)
    assert torch.equal(found["fc"](x), model["fc"](x))
