"""Kandinsky 5: its transformer is found and described, and nothing else is touched."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import cli
from cupyattn.checkpoints import open_checkpoint, open_kandinsky, optimize_kandinsky
from cupyattn.errors import UnsupportedError
from tests.checkpoints.checkpoint_files import SMALL, Arrays, write

#: The publishers' configuration, with other sizes.
YAML = """
model:
  checkpoint_path: "./weights/model/lite_10s.safetensors"
  dit_params: {model_dim: 32, ff_dim: 64, time_dim: 16, num_text_blocks: 2, num_visual_blocks: 3}
  attention: {type: nabla, P: 0.9, wT: 11, wH: 3, wW: 3, add_sta: true, method: topcdf}
  vae:
    checkpoint_path: "./weights/vae/"
"""
NABLA = {
    "type": "nabla", "P": 0.9, "wT": 11, "wH": 3, "wW": 3, "add_sta": True, "method": "topcdf",
}  # fmt: skip
DIFFUSERS = {
    "_class_name": "Kandinsky5Transformer3DModel", "model_dim": 32, "ff_dim": 64, "time_dim": 16,
    "num_text_blocks": 2, "num_visual_blocks": 3, "attention_type": "nabla", "attention_P": 0.9,
    "attention_wT": 11, "attention_causal": None,
}  # fmt: skip


def transformer() -> Arrays:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"out_layer.out_layer.weight": (16, 32)}
    for kind, count in (("text", 2), ("visual", 3)):
        for i in range(count):
            block = f"{kind}_transformer_blocks.{i}"
            shapes[f"{block}.{kind}_modulation.out_layer.weight"] = (192, 16)
            shapes[f"{block}.feed_forward.in_layer.weight"] = (64, 32)
            shapes[f"{block}.feed_forward.out_layer.weight"] = (32, 64)
            for attention in ("self", "cross") if kind == "visual" else ("self",):
                for layer in ("to_query", "to_key", "to_value", "out_layer"):
                    shapes[f"{block}.{attention}_attention.{layer}.weight"] = (32, 32)
                shapes[f"{block}.{attention}_attention.query_norm.weight"] = (8,)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def pipeline(folder: Path) -> Path:
    """Write the folders that the publishers have."""
    write(folder / "model" / "lite_10s.safetensors", transformer())
    write(folder / "model" / "lite_5s.safetensors", transformer())
    write(folder / "vae" / "vae.safetensors", {"decoder.conv.weight": np.ones((9, 9), np.float32)})
    (folder / "config.yaml").write_text(YAML)
    return folder


def test_the_publishers_files(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = pipeline(tmp_path / "weights")
    vae = (path / "vae" / "vae.safetensors").read_bytes()
    found, done = optimize_kandinsky(path, tmp_path / "int8", path / "config.yaml", SMALL)
    assert (found.text_blocks, found.visual_blocks, found.heads) == (2, 3, 4)
    assert (found.model_dim, found.ff_dim, found.time_dim, found.head_dim) == (32, 64, 16, 8)
    assert found.attention == NABLA
    assert "2 text and 3 visual blocks" in str(found) and "type nabla, P 0.9" in str(found)
    assert sorted(done.files) == ["config.json", "lite_10s.safetensors"]
    source = open_checkpoint(tmp_path / "int8")
    codes = {n for n, t in source.tensors.items() if t.dtype == "I8"}
    assert len(codes) == 2 * 6 + 3 * 10
    assert not any("modulation" in n or n.startswith("out_layer") for n in codes)
    (header,) = source.headers.values()  # type: ignore[attr-defined]
    record = json.loads(header.metadata["cupyattn"])
    assert record["kandinsky"]["attention"] == NABLA
    assert (path / "vae" / "vae.safetensors").read_bytes() == vae


def test_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    name = "diffusion_pytorch_model.safetensors"
    write(tmp_path / "pipe" / "transformer" / name, transformer())
    write(tmp_path / "pipe" / "vae" / name, {"conv.weight": np.ones((9, 9), np.float32)})
    (tmp_path / "pipe" / "transformer" / "config.json").write_text(json.dumps(DIFFUSERS))
    for path in (tmp_path / "pipe", tmp_path / "pipe" / "transformer"):
        source, found = open_kandinsky(path)
        assert source.files == (tmp_path / "pipe" / "transformer" / name,)
        assert found.attention == {"type": "nabla", "P": 0.9, "wT": 11}


def test_a_file_alone(tmp_path: Path) -> None:
    _, found = open_kandinsky(write(tmp_path / "x.safetensors", transformer()))
    assert found.attention == {} and "attention: not configured" in str(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_dim": 64}, "it says model_dim 64, the tensors 32"),
        ({"num_visual_blocks": 32}, "num_visual_blocks 32, the tensors 3"),
    ],
)
def test_a_configuration_of_another_model(tmp_path: Path, change: Any, said: str) -> None:
    path = write(tmp_path / "x.safetensors", transformer())
    (tmp_path / "other.json").write_text(json.dumps(DIFFUSERS | change))
    with pytest.raises(ValueError, match=said):
        optimize_kandinsky(path, tmp_path / "out", tmp_path / "other.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("visual_transformer_blocks.", "no tensor is called visual_transformer_blocks.0"),
        ("visual_transformer_blocks.1.", "visual_transformer_blocks.1 has no cross_attention"),
        (
            "text_transformer_blocks.1.self_attention.to_key",
            "text_transformer_blocks.1 has no self",
        ),
    ],
)
def test_other_and_incomplete_models(tmp_path: Path, missing: str, said: str) -> None:
    arrays = {n: a for n, a in transformer().items() if not n.startswith(missing)}
    with pytest.raises(ValueError, match=said):
        open_kandinsky(write(tmp_path / "x.safetensors", arrays))


def test_shapes_that_cannot_be(tmp_path: Path) -> None:
    arrays = transformer()
    arrays["visual_transformer_blocks.0.self_attention.query_norm.weight"] = np.ones((2, 4))
    with pytest.raises(ValueError, match=r"must have 1 axes, got shape \(2, 4\)"):
        open_kandinsky(write(tmp_path / "x.safetensors", arrays))


@pytest.mark.parametrize(
    "text", ["[", "- 1", "model: 3", "model: {dit_params: 3}", "!!python/object/apply:os.getcwd []"]
)
def test_a_damaged_configuration(tmp_path: Path, text: str) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"x\.yaml is no configuration of Kandinsky 5"):
        open_kandinsky(write(tmp_path / "x.safetensors", transformer()), tmp_path / "x.yaml")


def test_yaml_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = pipeline(tmp_path)
    message = r"pip install pyyaml \(the extra cli has it\), or save it as JSON"
    with pytest.raises(UnsupportedError, match=message):
        open_kandinsky(path, path / "config.yaml")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "x.safetensors", transformer())
    (tmp_path / "x.json").write_text(json.dumps(DIFFUSERS))
    given = ["kandinsky", "--model-path", str(path), "--config-path", str(tmp_path / "x.json")]
    given += ["--output-path", str(tmp_path / "out"), "--min-elements", "100"]
    said = tmp_path / "said.json"
    assert cli.main([*given, "--dry-run", "--json", str(said)]) == 0
    assert json.loads(said.read_text())["written"] is False
    printed = capsys.readouterr().out
    assert (
        printed.startswith("Kandinsky 5: 2 text and 3 visual blocks") and "Would write" in printed
    )
    assert not (tmp_path / "out").exists()
    assert cli.main(given) == 0
    assert "Wrote and checked 2 files" in capsys.readouterr().out
    assert cli.main([*given[:2], str(tmp_path), *given[3:]]) == 2  # the output is there
