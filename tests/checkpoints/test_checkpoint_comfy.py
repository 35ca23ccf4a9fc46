"""INT8 weights of ComfyUI's files, with and without its rotation (ConvRot).

The fixture follows the description in `cupyattn.checkpoints.comfy`, which names its sources.
"""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupyattn.checkpoints import comfy, convert, dequantize, open_checkpoint
from cupyattn.errors import UnsupportedError
from cupyattn.quant.rotation import CONTIGUOUS, rotated
from tests.checkpoints.checkpoint_files import file_content, write

Floats = npt.NDArray[np.float64]
#: The matrix of which powers rotate a group.
FOUR = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])


def turn(w: Floats, group: int) -> Floats:
    """Rotate groups of neighbours as comfy-kitchen does; twice gives the same numbers."""
    matrix = reduce(np.kron, [FOUR] * round(np.log2(group) / 2)) / np.sqrt(group)
    return (w.reshape(-1, group) @ matrix.T).reshape(w.shape)


def settings(**told: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(told).encode(), np.uint8)


def layer(
    name: str, w: Floats, group: int | None, **told: Any
) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a layer: codes by row, rounded to the nearest even, and settings."""
    if group:
        w, told = turn(w, group), {"convrot": True, "convrot_groupsize": group, **told}
    scales = (np.abs(w).max(axis=1, keepdims=True) / 127).astype(np.float32)
    codes = np.clip(np.rint(w / scales), -128, 127).astype(np.int8)
    return {
        f"{name}.weight": codes, f"{name}.weight_scale": scales,
        f"{name}.comfy_quant": settings(format="int8_tensorwise", **told),
    }  # fmt: skip


def model(folder: Path) -> tuple[Path, dict[str, Floats]]:
    """Write a model of two rotated layers, one that is not, one of one scale, and a norm."""
    rng = np.random.default_rng(0)
    weights = {
        "a.to_q": rng.standard_normal((24, 512)), "a.to_k": rng.standard_normal((16, 192)),
        "a.to_v": rng.standard_normal((8, 100)),
    }  # fmt: skip
    groups = {"a.to_q": 256, "a.to_k": 64, "a.to_v": None}
    arrays: dict[str, Any] = {"a.norm.weight": np.ones(8, np.float16)}
    for name, w in weights.items():
        arrays |= layer(name, w, groups[name])
    return write(folder / "model.safetensors", arrays), weights


def test_weights_come_back_as_they_were_before_the_rotation(tmp_path: Path) -> None:
    path, weights = model(tmp_path)
    dequantize(path, tmp_path / "back", dtype="float32")
    back = open_checkpoint(tmp_path / "back")
    assert sorted(back.tensors) == sorted(["a.norm.weight", *(f"{n}.weight" for n in weights)])
    source = open_checkpoint(path)
    for name, w in weights.items():
        found = back.read(f"{name}.weight").astype(np.float64)
        told = json.loads(bytes(source.read(f"{name}.comfy_quant")))
        numbers = source.read(f"{name}.weight") * source.read(f"{name}.weight_scale").astype(float)
        if told.get("convrot"):
            numbers = turn(numbers, told["convrot_groupsize"])
        assert np.abs(found - numbers).max() < 1e-6
        assert np.linalg.norm(found - w) < 0.012 * np.linalg.norm(w)


@pytest.mark.parametrize(("channels", "group"), [(512, 256), (256, 256), (192, 64)])
def test_codes_are_those_of_our_rotation(channels: int, group: int) -> None:
    w = np.random.default_rng(channels).standard_normal((5, channels))
    codes = np.clip(np.rint(turn(w, group) * 20), -127, 127)
    ours = np.clip(np.rint(rotated(w, CONTIGUOUS) * 20), -127, 127)
    found = comfy.our_codes(codes.astype(np.int8))
    assert found.dtype == np.int8 and (found != ours).mean() < 1e-3  # ties of rounding


def test_a_weight_may_have_no_rows() -> None:
    found = comfy.our_codes(np.zeros((0, 512), np.int8))
    assert found.shape == (0, 512) and found.dtype == np.int8


def test_a_code_without_a_counterpart_is_kept() -> None:
    codes = np.zeros((1, 64), np.int8)
    codes[0, 3] = -128
    found = comfy.our_codes(codes)
    assert found.dtype == np.int16 and found.max() == 128


@pytest.mark.frameworks
def test_a_model_runs_on_the_codes(tmp_path: Path) -> None:
    """comfy-kitchen rotates rows, makes codes by row, sums integers, and scales at the end."""
    torch = pytest.importorskip("torch")
    from cupyattn.interop.torch import load_int8
    from cupyattn.interop.torch.writing import write_int8

    def made() -> Any:
        block = torch.nn.Module()
        block.to_q = torch.nn.Linear(512, 24, bias=False)
        block.to_k = torch.nn.Linear(192, 16, bias=False)
        block.to_v = torch.nn.Linear(100, 8, bias=False)
        block.norm = torch.nn.RMSNorm(8, dtype=torch.float16)
        return torch.nn.ModuleDict({"a": block})

    path, weights = model(tmp_path)
    found, source = load_int8(made(), path, backend="mirror"), open_checkpoint(path)
    for name, w in weights.items():
        x = np.random.default_rng(1).standard_normal((7, w.shape[1]), np.float32)
        x[:, 5] *= 40
        own = found["a"].get_submodule(name[2:])
        told = json.loads(bytes(source.read(f"{name}.comfy_quant")))
        turned = x.astype(np.float64)
        if told.get("convrot"):
            turned = turn(turned, told["convrot_groupsize"])
        scales = np.abs(turned).max(axis=1, keepdims=True) / 127
        codes, of_w = np.rint(turned / scales), source.read(f"{name}.weight").astype(np.float64)
        expected = codes @ of_w.T * scales * source.read(f"{name}.weight_scale")[:, 0]
        y = own(torch.from_numpy(x)).numpy()
        assert np.linalg.norm(y - expected) < 2e-4 * np.linalg.norm(expected)
        assert own.rotate == (CONTIGUOUS if told.get("convrot") else None)
    write_int8(found, tmp_path / "ours")  # in our own layout it is the same model
    again = load_int8(made(), tmp_path / "ours", backend="mirror")
    for name, own in again["a"].named_children():
        if name != "norm":
            x = torch.randn(3, own.in_features)
            assert torch.equal(own(x), found["a"].get_submodule(name)(x))


def test_settings_may_stand_in_the_header(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((8, 256))
    arrays = layer("x", w, 256)
    told = {"layers": {"x": json.loads(bytes(arrays.pop("x.comfy_quant")))}}
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_content(arrays, {"_quantization_metadata": json.dumps(told)}))
    dequantize(path, tmp_path / "back", dtype="float32")
    found = open_checkpoint(tmp_path / "back").read("x.weight")
    assert np.linalg.norm(found - w) < 0.012 * np.linalg.norm(w)
    with pytest.raises(ValueError, match=r"quantised already: .*scales of channels, rotated"):
        convert(path, tmp_path / "again")


@pytest.mark.parametrize(
    ("told", "error", "said"),
    [
        ({"format": "convrot_w4a4"}, UnsupportedError, "'convrot_w4a4' of 'x' is not read"),
        ({"convrot_groupsize": 64}, UnsupportedError, "groups of 64, and has 256 channels"),
        ({"convrot_groupsize": 16}, UnsupportedError, "groups of 256 are read"),
        ({"convrot": "false"}, ValueError, "convrot of 'x' must be true or false, got 'false'"),
        ({"params": [{"convrot": True}]}, ValueError, "params of 'x' must be an object, got"),
        ({"extra": "pre_quant_scale"}, UnsupportedError, "'x.pre_quant_scale' is not read"),
        ({"text": b"{"}, ValueError, "'x.comfy_quant' holds no settings"),
        ({"text": b"[]"}, ValueError, "it is no object"),
        ({"rename": "y.weight"}, ValueError, "'x' has no weight with codes"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, told: dict, error: Any, said: str) -> None:
    text, extra, rename = told.pop("text", None), told.pop("extra", None), told.pop("rename", None)
    arrays = layer("x", np.random.default_rng(0).standard_normal((8, 256)), 256)
    made = {"format": "int8_tensorwise", "convrot": True, **told}
    arrays["x.comfy_quant"] = settings(**made) if text is None else np.frombuffer(text, np.uint8)
    if extra:
        arrays[f"x.{extra}"] = np.ones(256, np.float32)
    if rename:
        arrays[rename] = arrays.pop("x.weight").astype(np.float32)
    path = write(tmp_path / "m.safetensors", arrays)
    with pytest.raises(error, match=said):
        dequantize(path, tmp_path / "back")


@pytest.mark.frameworks
def test_layers_in_16_bits_are_dequantised_only(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from cupyattn.interop.torch import load_int8

    w = np.random.default_rng(0).standard_normal((8, 256))
    path = write(tmp_path / "m.safetensors", layer("0", w, 256, full_precision_matrix_mult=True))
    with pytest.raises(UnsupportedError, match="'0.weight' must have 16 bits"):
        load_int8(torch.nn.Sequential(torch.nn.Linear(256, 8, bias=False)), path)
    path = write(tmp_path / "o.safetensors", layer("0", w, 256, full_precision_matrix_mult="no"))
    with pytest.raises(ValueError, match="full_precision_matrix_mult of '0' must be true or false"):
        load_int8(torch.nn.Sequential(torch.nn.Linear(256, 8, bias=False)), path)
    arrays = layer("0", w, 256)
    arrays["0.weight"][:] = -128
    path = write(tmp_path / "n.safetensors", arrays)
    with pytest.raises(ValueError, match="has codes of -128 where our rotation has the other sign"):
        load_int8(torch.nn.Sequential(torch.nn.Linear(256, 8, bias=False)), path)
    dequantize(path, tmp_path / "back")
