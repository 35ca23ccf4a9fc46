"""Linear layers whose weights are no plain tensors of floats: kept, each with its reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
prune = importlib.import_module("torch.nn.utils.prune")
interop = importlib.import_module("cupyattn.interop.torch")

nn = torch.nn
ALL = ca.Int8Config(min_elements_for_int8=0)


def with_weight(change: Callable[[Any], Any]) -> Any:
    linear = nn.Linear(128, 128).requires_grad_(False)
    linear.weight = nn.Parameter(change(linear.weight.detach()), requires_grad=False)
    return linear


#: Changes of a weight, and the reason in the report.
KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "float8": (
        lambda w: w.to(torch.float8_e4m3fn),
        "its weight is torch.float8_e4m3fn, no 16- or 32-bit float"),
    "int8": (lambda w: w.to(torch.int8), "its weight is torch.int8, no 16- or 32-bit float"),
    "float64": (lambda w: w.double(), "its weight is torch.float64, no 16- or 32-bit float"),
    "sparse": (lambda w: w.to_sparse(), "its weight is sparse, torch.sparse_coo"),
    "sparse rows": (lambda w: w.to_sparse_csr(), "its weight is sparse, torch.sparse_csr"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_layers_of_other_types_are_kept_and_the_rest_is_replaced() -> None:
    layers = {name: with_weight(change) for name, (change, _) in KINDS.items()}
    model = nn.ModuleDict({**layers, "plain": nn.Linear(128, 128)})
    handle = interop.replace_linear_with_int8(model, config=ALL, backend="mirror")
    assert [*handle.replaced] == ["plain"]
    assert handle.kept == {name: reason for name, (_, reason) in KINDS.items()}
    assert all(model[name] is layer for name, layer in layers.items())
    handle.restore()
    with pytest.raises(ValueError, match=r"becomes INT8 \(float8: its weight is torch.float8_e4m3"):
        del model["plain"]
        interop.replace_linear_with_int8(model, config=ALL, backend="mirror")


@pytest.fixture
def mesh(tmp_path: Any) -> Iterator[Any]:
    """A mesh of one process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_distributed_weights_are_kept(mesh: Any) -> None:
    placed = torch.distributed.tensor.distribute_tensor
    rows = torch.distributed.tensor.Shard(0)
    sharded = with_weight(lambda w: placed(w, mesh, [rows]))
    model = nn.Sequential(sharded, nn.Linear(128, 128))
    handle = interop.replace_linear_with_int8(model, config=ALL, backend="mirror")
    assert handle.kept == {"0": "its weight is a DTensor"} and [*handle.replaced] == ["1"]


#: Weights that are made in each call, and why their layers are kept.
MADE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weight_norm": (nn.utils.parametrizations.weight_norm, "is parametrised, so that its weight is "
                    "made in each call"),
    "spectral_norm": (nn.utils.parametrizations.spectral_norm, "is parametrised, so that its "
                      "weight is made in each call"),
    "former spectral_norm": (nn.utils.spectral_norm, "has hooks"),
    "pruned": (lambda linear: prune.l1_unstructured(linear, "weight", 0.3), "has hooks"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_layers_whose_weight_is_made_in_each_call_are_kept(kind: str) -> None:
    change, reason = MADE[kind]
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)).eval()
    change(model[0])
    x = torch.randn(5, 128)
    expected = model(x)
    with interop.replace_linear_with_int8(model, config=ALL, backend="mirror") as handle:
        assert handle.kept == {"0": reason} and [*handle.replaced] == ["1"]
        found = model(x)
        assert 0 < (found - expected).norm() < 0.02 * expected.norm()
        with torch.no_grad():
            for p in model[0].parameters():
                p.mul_(0.5)  # as training changes it
        assert not torch.equal(model(x), found)
