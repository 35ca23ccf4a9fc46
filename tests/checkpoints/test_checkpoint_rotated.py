"""Rotated weights in files: written by `convert`, read by loaders, and converted back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.checkpoints import analyze, convert, dequantize, open_checkpoint
from cupyattn.checkpoints import rotated as files
from cupyattn.checkpoints.analysis import Analysis
from cupyattn.checkpoints.header import read_header
from cupyattn.errors import UnsupportedError
from tests.checkpoints.checkpoint_files import BF16, file_content, write

CONFIG = ca.Int8Config(min_elements_for_int8=100, rotate="hadamard", strategy="channel")
#: Two layers of which 64 divides the channels, and one of which it does not.
SHAPES = {"a.to_q": (40, 384), "a.to_k": (24, 192), "a.to_v": (24, 200)}


def model(folder: Path, dtype: Any = np.float16) -> Path:
    rng = np.random.default_rng(0)
    arrays = {f"{n}.weight": rng.standard_normal(s).astype(dtype) for n, s in SHAPES.items()}
    return write(folder / "model.safetensors", arrays).parent


def written(folder: Path) -> dict[str, Any]:
    source = open_checkpoint(folder)
    return {name: source.read(name) for name in source.tensors}


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32])
def test_files_have_the_codes_of_the_layer_and_come_back(tmp_path: Path, dtype: Any) -> None:
    before = written(model(tmp_path / "model", dtype))
    done = convert(tmp_path / "model", tmp_path / "int8", CONFIG)
    found = written(tmp_path / "int8")
    assert done.analysis is not None
    assert sum(x.nbytes for x in found.values()) == done.analysis.totals["bytes_out"]
    for name, shape in SHAPES.items():
        rotate = "hadamard" if shape[1] % 64 == 0 else None
        layer = ca.Int8Linear.from_weight(
            before[f"{name}.weight"], strategy="channel", rotate=rotate
        )
        assert (found[f"{name}.weight"] == layer.codes).all()
        assert (found[f"{name}.weight_scale"] == layer.scales).all()
        marked = found.get(f"{name}.weight_rotation")
        assert (marked is None) == (rotate is None)
    assert found["a.to_q.weight_rotation"].tolist() == [128, 8]
    dequantize(tmp_path / "int8", tmp_path / "back")
    for name, w in written(tmp_path / "back").items():
        exact = before[name].astype(np.float64)
        assert w.dtype == before[name].dtype
        assert np.linalg.norm(w.astype(np.float64) - exact) < 0.012 * np.linalg.norm(exact)


def test_other_readers_are_told_that_it_is_no_format_of_theirs(tmp_path: Path) -> None:
    convert(model(tmp_path / "model"), tmp_path / "int8", CONFIG)
    config = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "cupyattn"
    (file,) = (tmp_path / "int8").glob("*.safetensors")
    record = json.loads(read_header(file).metadata["cupyattn"])
    assert record["version"] == 3 and record["config"]["rotate"] == "hadamard"


def test_without_a_rotation_files_are_as_they_were(tmp_path: Path) -> None:
    """Readers of the versions before take them."""
    convert(model(tmp_path / "model"), tmp_path / "int8", ca.Int8Config(strategy="channel"))
    (file,) = (tmp_path / "int8").glob("*.safetensors")
    record = json.loads(read_header(file).metadata["cupyattn"])
    assert record["version"] == 2 and "rotate" not in record["config"]
    config = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"


def test_a_damaged_rotation_is_found(tmp_path: Path) -> None:
    convert(model(tmp_path / "model"), tmp_path / "int8", CONFIG)
    (file,) = (tmp_path / "int8").glob("*.safetensors")
    metadata, arrays = read_header(file).metadata, written(tmp_path / "int8")
    arrays["a.to_k.weight_rotation"] = np.int32([256, 8])
    file.write_bytes(file_content(arrays, metadata))
    with pytest.raises(UnsupportedError, match=r"is \(256, 8\), .* not read for 192 channels"):
        dequantize(tmp_path / "int8", tmp_path / "back")
    del arrays["a.to_k.weight_rotation"]
    file.write_bytes(file_content(arrays, metadata))
    with pytest.raises(ValueError, match="'a.to_k.weight' is rotated.*_rotation' is missing"):
        dequantize(tmp_path / "int8", tmp_path / "back")


def test_files_without_their_marks_or_scales_are_refused(tmp_path: Path) -> None:
    """As other tools leave them, which drop tensors or the record that they do not know."""
    convert(model(tmp_path / "model"), tmp_path / "int8", CONFIG)
    (file,) = (tmp_path / "int8").glob("*.safetensors")
    found, metadata = written(tmp_path / "int8"), read_header(file).metadata
    file.write_bytes(file_content({n: x for n, x in found.items() if "rotation" not in n}))
    with pytest.raises(ValueError, match="quant_method 'cupyattn', but there is no tensor X.weig"):
        dequantize(tmp_path / "int8", tmp_path / "back")
    del found["a.to_v.weight_scale"]
    file.write_bytes(file_content(found, metadata))
    with pytest.raises(ValueError, match="'a.to_v.weight' is INT8 and has no scales"):
        dequantize(tmp_path / "int8", tmp_path / "back")


@pytest.mark.parametrize("rotate", ["hadamard", "hadamard_contiguous"])
def test_checks_find_a_code_and_a_number_that_are_off(rotate: str) -> None:
    w = np.random.default_rng(0).standard_normal((6, 192), np.float32)
    codes, scales = files.rotated_codes(w, rotate)
    assert files.check_rotated(w, codes, scales, rotate) is None
    other = "hadamard_contiguous" if rotate == "hadamard" else "hadamard"
    assert files.check_rotated(w, codes, scales, other) is not None
    back = files.unrotated_weight(codes, scales, rotate, "bfloat16", "w")
    assert files.check_unrotated(codes, scales, rotate, back) is None
    assert files.check_unrotated(codes, scales, other, back) is not None
    codes[3, 100] += 1 if codes[3, 100] < 0 else -1
    assert "further off" in str(files.check_rotated(w, codes, scales, rotate))
    assert files.check_unrotated(codes, scales, rotate, back) is not None
    with pytest.raises(ValueError, match="w does not fit into float16"):
        files.unrotated_weight(codes, scales * 1e6, rotate, "float16", "w")


def test_an_analysis_keeps_which_layers_are_rotated(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((32, 384), np.float32)
    x[:, 5] *= 50
    found = analyze(model(tmp_path / "model"), ca.Int8Config(min_elements_for_int8=100),
                    activations={"a.to_q": x})  # fmt: skip
    assert [t.rotate for t in found.tensors] == ["hadamard", "hadamard", None]
    (tmp_path / "found.json").write_text(json.dumps(found.to_dict()))
    again = Analysis.load(tmp_path / "found.json")
    assert again == found
    plain = again.with_config(ca.Int8Config(min_elements_for_int8=100, rotate=None))
    assert {t.rotate for t in plain.tensors} == {None}


def test_refusals_of_a_configuration() -> None:
    with pytest.raises(ValueError, match="rotate must be 'auto' or None or 'hadamard', got 'x'"):
        ca.Int8Config(rotate="x")
    with pytest.raises(UnsupportedError, match="rotate='hadamard' goes with strategy='channel'"):
        ca.Int8Config(rotate="hadamard", strategy="block")


def test_the_command_rotates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = model(tmp_path / "model"), tmp_path / "int8"
    options = ["--rotate", "hadamard", "--min-elements", "100", "--output", str(target)]
    assert cli.main(["convert", str(source), *options]) == 0
    assert "Scales by channel: as asked for, rotated" in capsys.readouterr().out
    assert "a.to_q.weight_rotation" in open_checkpoint(target).tensors
