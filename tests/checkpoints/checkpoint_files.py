"""Small checkpoints: files of arrays, and a model with the names of Kandinsky 5."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import cupyattn as ca
from cupyattn.checkpoints import open_checkpoint
from cupyattn.checkpoints.header import DTYPES, TensorInfo, encode_header

Arrays = dict[str, npt.NDArray[Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)
#: Rules by which the small models here have weights to quantise.
SMALL = ca.Int8Config(min_elements_for_int8=100)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def file_content(
    arrays: Mapping[str, npt.NDArray[Any]], metadata: dict[str, str] | None = None
) -> bytes:
    """Return a safetensors file."""
    infos = {name: TensorInfo(_NAMES[a.dtype], a.shape) for name, a in arrays.items()}
    start, placed = encode_header(infos, {"format": "pt"} if metadata is None else metadata)
    return start + b"".join(arrays[name].tobytes() for name in placed)


def write(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> Path:
    """Write a safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_content(arrays))
    return path


def raw(header: Any, data: bytes = b"") -> bytes:
    """Return a file with any header: text, or what becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_shards(folder: Path, shards: Mapping[str, Arrays]) -> Path:
    """Write several files and their index."""
    weight_map = {}
    for file, arrays in shards.items():
        write(folder / file, arrays)
        weight_map.update(dict.fromkeys(arrays, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def model(seed: int = 0, dtype: Any = np.float32, *, blocks: int = 2, width: int = 72) -> Arrays:
    """Return tensors with the names of Kandinsky 5, sizes that no block of 128 or 16 divides."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> npt.NDArray[Any]:
        return (0.02 * rng.standard_normal(shape)).astype(np.float32).astype(dtype)

    arrays = {
        "time_embeddings.in_layer.weight": normal(32, width),
        "visual_embeddings.in_layer.weight": normal(width, 16),
        "out_layer.out_layer.weight": normal(16, width),
        "out_layer.modulation.out_layer.weight": normal(2 * width, 32),
        "patch.weight": normal(width, 3, 5, 5),  # a convolution
        "steps": np.arange(4, dtype=np.int64),
        "temperature": np.array(0.5, np.float32),
        "unused.weight": np.zeros((0, 8), dtype),
    }
    for i in range(blocks):
        block = f"visual_transformer_blocks.{i}"
        arrays |= {
            f"{block}.self_attention.to_query.weight": normal(width, width),
            f"{block}.self_attention.to_query.bias": normal(width),
            f"{block}.self_attention.query_norm.weight": normal(16),
            f"{block}.feed_forward.in_layer.weight": normal(2 * width + 1, width),
            f"{block}.visual_modulation.out_layer.weight": normal(2 * width, 32),
            f"{block}.small.weight": normal(8, 8),
        }
    return arrays


def source(folder: Path, arrays: Arrays | None = None, **more: str) -> Path:
    """Write a model in two files, with small files beside it."""
    arrays = model() if arrays is None else arrays
    names = list(arrays)
    middle = len(names) // 2
    shards = {
        f"diffusion_pytorch_model-0000{i}-of-00002.safetensors": {n: arrays[n] for n in half}
        for i, half in enumerate((names[:middle], names[middle:]), 1)
    }
    write_shards(folder, shards)
    for name, text in {"config.json": '{"width": 72}', "LICENSE": "MIT", **more}.items():
        (folder / name).write_text(text)
    return folder


def content(folder: Path) -> dict[str, str]:
    """Return hashes of all files below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tensors(folder: Path) -> Arrays:
    found = open_checkpoint(folder)
    return {name: found.read(name) for name in found.tensors}
