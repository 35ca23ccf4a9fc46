"""Dequantise checkpoints of codes by other libraries, and refuse unreadable ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import Int8Config, cli
from cupyattn.checkpoints import convert, dequantize, layout
from tests.checkpoints.checkpoint_files import BF16, SMALL, model, source, tensors, write

conversion = sys.modules["cupyattn.checkpoints.conversion"]


def codes(folder: Path, config: Any, **arrays: Any) -> Path:
    """Write what another library may have: no record of ours."""
    write(folder / "model.safetensors", {n.replace("__", "."): a for n, a in arrays.items()})
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


BLOCKS = {"weight_block_size": [16, 16]}
CODES, SCALES = np.ones((20, 30), np.int8), np.full((2, 2), 0.5, np.float32)


def test_codes_of_another_library(tmp_path: Path) -> None:
    path = codes(tmp_path / "x", BLOCKS, a__weight=CODES, a__weight_scale_inv=SCALES)
    dequantize(path, tmp_path / "back")
    (w,) = tensors(tmp_path / "back").values()
    assert w.dtype == BF16 and (w == 0.5).all() and w.shape == (20, 30)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {}
    with pytest.raises(ValueError, match="give its folder, since of a file alone no config.json"):
        dequantize(path / "model.safetensors", tmp_path / "other")


@pytest.mark.parametrize(
    ("config", "arrays", "options", "said"),
    [
        (BLOCKS, {"a__weight": CODES}, {}, "has no weights with scales"),
        (None, {"a__weight": CODES, "a__weight_scale": SCALES}, {}, "say which rows and columns"),
        ({"weight_block_size": [16, 32]}, {"a__weight": CODES, "a__weight_scale": SCALES}, {},
         r"blocks of 16 x 32 must have scales \(2, 1\)"),
        ({"weight_block_size": 3}, {"a__weight": CODES, "a__weight_scale": SCALES}, {},
         r"weight_block_size must be two sizes, \[rows, columns\], got 3"),
        (BLOCKS, {"a__weight": CODES, "a__weight_scale": SCALES[:1]}, {},
         r"must have scales \(2, 2\) of type F16 or BF16 or F32, got 'a.weight_scale', F32 \(1, 2"),
        (BLOCKS, {"a__weight": CODES.astype(np.int16), "a__weight_scale": SCALES}, {}, ", I16 "),
        (BLOCKS, {"a__weight": CODES[0], "a__weight_scale": SCALES}, {}, "INT8 codes, of two axes"),
        (BLOCKS, {"a__weight": CODES, "a__weight_scale": SCALES * np.nan}, {}, "is not finite"),
        (BLOCKS, {"a__weight": CODES, "a__weight_scale": SCALES * np.float32(1e6)},
         {"dtype": "float16"}, "'a.weight' does not fit into float16"),
        (BLOCKS, {"a__weight": CODES, "a__weight_scale": SCALES}, {"dtype": "int4"}, "dtype must"),
    ],
)  # fmt: skip
def test_codes_that_cannot_be_read(tmp_path: Path, config, arrays, options, said) -> None:  # type: ignore[no-untyped-def]
    path = codes(tmp_path / "x", config, **arrays)
    with pytest.raises(ValueError, match=said):
        dequantize(path, tmp_path / "back", **options)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("change", [{"version": 5}, {"dtypes": 3}, {"dtypes": {"x": []}},
                                    {"config": {}}, None])  # fmt: skip
def test_a_damaged_record(tmp_path: Path, monkeypatch, change) -> None:  # type: ignore[no-untyped-def]
    metadata = conversion._ToInt8.metadata

    def changed(self: Any, items: Any) -> dict[str, str]:
        text = metadata(self, items)["cupyattn"]
        return {"cupyattn": "{" if change is None else json.dumps(json.loads(text) | change)}

    monkeypatch.setattr(conversion._ToInt8, "metadata", changed)
    convert(source(tmp_path / "model"), tmp_path / "int8", SMALL)
    with pytest.raises(ValueError, match="its record of 'cupyattn' is damaged"):
        dequantize(tmp_path / "int8", tmp_path / "back")


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("export", ["compressed-tensors", "deepseek"])
def test_a_model_without_int8_layers_comes_back(tmp_path: Path, dtype: Any, export: str) -> None:
    """All its layers are too small; types, names and numbers equal the source."""
    arrays = model(dtype=dtype)
    path = source(tmp_path / "model", arrays)
    done = convert(path, tmp_path / "none", Int8Config(min_elements_for_int8=10**9), export=export)
    assert done.analysis is not None and done.analysis.totals["int8"]["tensors"] == 0
    assert json.loads((tmp_path / "none" / "config.json").read_text()) == {"width": 72}
    assert cli.main(["dequantize", str(tmp_path / "none"), "--output", str(tmp_path / "back")]) == 0
    back = tensors(tmp_path / "back")
    assert set(back) == set(arrays)
    for name, w in arrays.items():
        narrowed = any(t.name == name and t.verdict == "16bit" for t in done.analysis.tensors)
        expected = w.astype(BF16).astype(w.dtype) if narrowed else w
        assert back[name].dtype == w.dtype and back[name].tobytes() == expected.tobytes()


def test_a_configuration_of_no_layers_comes_back(tmp_path: Path) -> None:
    """Earlier versions wrote a group without targets if no layer became INT8."""
    convert(source(tmp_path / "model"), tmp_path / "int8", Int8Config(min_elements_for_int8=10**9))
    config = layout.quantization_config("compressed-tensors", 128, {"block": []}, [])
    (tmp_path / "int8" / "config.json").write_text(json.dumps({"quantization_config": config}))
    dequantize(tmp_path / "int8", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {}
    assert set(tensors(tmp_path / "back")) == set(model())


def test_a_record_that_would_narrow_a_tensor_is_damaged(tmp_path: Path, monkeypatch: Any) -> None:
    metadata = conversion._ToInt8.metadata

    def changed(self: Any, items: Any) -> dict[str, str]:
        record = json.loads(metadata(self, items)["cupyattn"])
        record["dtypes"]["temperature"] = "F16"
        return {"cupyattn": json.dumps(record)}

    monkeypatch.setattr(conversion._ToInt8, "metadata", changed)
    convert(source(tmp_path / "model"), tmp_path / "int8", SMALL)
    with pytest.raises(ValueError, match="'temperature' cannot have had type 'F16'"):
        dequantize(tmp_path / "int8", tmp_path / "back")
