"""`save_pretrained` of models with INT8 layers is refused: its files would load wrong weights."""

from __future__ import annotations

import copy
import importlib
import io
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca
from cupyattn.errors import UnsupportedError

torch = pytest.importorskip("torch")
interop = pytest.importorskip("cupyattn.interop.torch")
diffusers = pytest.importorskip("diffusers")
cases = pytest.importorskip("tests.interop.diffusers_cases")
SMALL = ca.Int8Config(min_elements_for_int8=256)
REFUSED = r"save_pretrained of a {} with INT8 linear layers is refused, .*: {}"
RESTORE = r"call cupyattn.interop.restore\(model\) first, or let `cupyattn convert` write"
KEEP = r"its layers have no weights to restore, so keep the folder that load_int8 takes, or torch.s"


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=64,
        num_attention_heads=2, joint_attention_dim=128, caption_projection_dim=128,
        pooled_projection_dim=128, out_channels=4, pos_embed_max_size=8,
    ).eval().bfloat16()  # fmt: skip


def replaced(model: Any, **options: Any) -> Any:
    return interop.replace_linear_with_int8(model, config=SMALL, backend="mirror", **options)


def is_refused(
    model: Any, folder: Path, kind: str = "SD3Transformer2DModel", way: str = RESTORE
) -> bool:
    with pytest.raises(UnsupportedError, match=REFUSED.format(kind, way)):
        model.save_pretrained(folder)
    return not folder.exists()


def test_a_model_is_saved_before_and_after_but_not_within(model: Any, tmp_path: Path) -> None:
    with replaced(model) as handle:
        for one in (handle, model, torch.compile(model)):
            assert is_refused(one, tmp_path / "within")
        assert is_refused(copy.deepcopy(model), tmp_path / "within", way=KEEP)
        torch.save(model, io.BytesIO())  # has the codes, their scales and the classes
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path / "after")
    again = type(model).from_pretrained(tmp_path / "after", torch_dtype=torch.bfloat16)
    assert all(torch.equal(x, again.state_dict()[n]) for n, x in model.state_dict().items())


def test_it_is_refused_until_the_last_layer_is_restored(model: Any, tmp_path: Path) -> None:
    first = replaced(model, include="blocks.0")
    second = replaced(model, exclude="blocks.0")
    first.restore()
    assert is_refused(model, tmp_path / "within")
    second.restore()
    model.save_pretrained(tmp_path / "after")


def test_a_pipeline_does_not_save_it_either(tmp_path: Path) -> None:
    pipe = cases.make("flux")
    with replaced(pipe.transformer):
        assert is_refused(pipe, tmp_path / "within" / "transformer", "FluxTransformer2DModel")
    pipe.save_pretrained(tmp_path / "after")
    assert (tmp_path / "after" / "transformer" / "config.json").exists()


def test_a_loaded_checkpoint_is_not_saved(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    ca.checkpoints.convert(tmp_path / "model", tmp_path / "int8")
    found = interop.load_int8(type(model), tmp_path / "int8", backend="mirror")
    assert is_refused(found, tmp_path / "again", way=KEEP)
    dropped = replaced(model, originals="drop")
    assert is_refused(dropped, tmp_path / "again", way=KEEP)


def test_the_way_that_is_named_is_one(model: Any, tmp_path: Path) -> None:
    replaced(model)
    assert is_refused(model, tmp_path / "within")
    interop_of_all = importlib.import_module("cupyattn.interop")
    interop_of_all.restore(model)
    model.save_pretrained(tmp_path / "after")
    model.save_pretrained(tmp_path / "model")
    ca.checkpoints.convert(tmp_path / "model", tmp_path / "int8")
    found = interop.load_int8(type(model), tmp_path / "int8", backend="mirror")
    torch.save(found.state_dict(), tmp_path / "codes.pt")
    again = interop.load_int8(type(model), tmp_path / "int8", backend="mirror")
    for layer in again.modules():
        if isinstance(layer, interop.Int8Linear):
            layer.weight_codes.zero_()
    again.load_state_dict(torch.load(tmp_path / "codes.pt"))
    assert all(torch.equal(x, again.state_dict()[n]) for n, x in found.state_dict().items())


def test_models_within_a_module_are_refused_and_those_of_peft_are_not(
    model: Any, tmp_path: Path
) -> None:
    class Adapted(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.base, self.other = model, copy.deepcopy(model.norm_out)

        def save_pretrained(self, folder: Path) -> str:
            return "adapters"

    Adapted.save_pretrained.__module__ = "peft.peft_model"
    adapted = Adapted()
    handle = replaced(adapted)
    assert adapted.save_pretrained(tmp_path) == "adapters"
    assert is_refused(model, tmp_path / "within")
    handle.restore()
    assert "save_pretrained" not in vars(model)
