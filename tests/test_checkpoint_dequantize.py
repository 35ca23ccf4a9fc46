"""Checkpoints of codes: those of other libraries, and those that cannot be read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn.checkpoints import convert, dequantize
from tests.checkpoint_files import BF16, SMALL, source, tensors, write

conversion = sys.modules["cupyattn.checkpoints.convert"]


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


@pytest.mark.parametrize(
    ("config", "arrays", "options", "said"),
    [
        (BLOCKS, {"a__weight": CODES}, {}, "has no weights with scales"),
        (None, {"a__weight": CODES, "a__weight_scale": SCALES}, {}, "name square blocks"),
        ({"weight_block_size": [16, 32]}, {"a__weight": CODES, "a__weight_scale": SCALES}, {},
         "name square blocks"),
        ({"weight_block_size": 3}, {"a__weight": CODES, "a__weight_scale": SCALES}, {}, "square"),
        (BLOCKS, {"a__weight": CODES, "a__weight_scale": SCALES[:1]}, {}, r"scales \(2, 2\), got"),
        (BLOCKS, {"a__weight": CODES.astype(np.int16), "a__weight_scale": SCALES}, {}, "got I16"),
        (BLOCKS, {"a__weight": CODES[0], "a__weight_scale": SCALES}, {}, "must be INT8 codes"),
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


@pytest.mark.parametrize("change", [{"version": 2}, {"dtypes": 3}, {"config": {}}, None])
def test_a_damaged_record(tmp_path: Path, monkeypatch, change) -> None:  # type: ignore[no-untyped-def]
    metadata = conversion._ToInt8.metadata

    def changed(self: Any, items: Any) -> dict[str, str]:
        text = metadata(self, items)["cupyattn"]
        return {"cupyattn": "{" if change is None else json.dumps(json.loads(text) | change)}

    monkeypatch.setattr(conversion._ToInt8, "metadata", changed)
    convert(source(tmp_path / "model"), tmp_path / "int8", SMALL)
    with pytest.raises(ValueError, match="its record of 'cupyattn' is damaged"):
        dequantize(tmp_path / "int8", tmp_path / "back")
