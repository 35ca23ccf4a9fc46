"""Zero points, strategies and packed codes of compressed-tensors: right numbers, or a refusal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupyattn import cli
from cupyattn.checkpoints import codes, dequantize, open_checkpoint
from cupyattn.errors import UnsupportedError
from tests.checkpoints.checkpoint_files import BF16, tensors, write
from tests.support.marks import slow

conversion = sys.modules["cupyattn.checkpoints.conversion"]
Array = npt.NDArray[Any]
STRATEGIES = ("tensor", "channel", "group", "block")


def pack(codes: Array, bits: int) -> Array:
    """Return rows of codes as int32 words, one Python integer for each row."""
    rows, columns = codes.shape
    words = -(-columns * bits // 32)
    packed = np.zeros((rows, words), np.int32)
    for i, row in enumerate(codes.tolist()):
        number = sum((q + 2 ** (bits - 1)) << (bits * j) for j, q in enumerate(row))
        packed[i] = np.frombuffer(number.to_bytes(4 * words, "little"), "<i4")
    return packed


def made(
    folder: Path,
    strategy: str,
    *,
    shape: tuple[int, int] = (24, 64),
    symmetric: bool = False,
    bits: int = 8,
    packed: bool = False,
    scale_type: Any = np.float32,
    weights: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    without: str = "",
    more: dict[str, Array] | None = None,
) -> Array:
    """Write a folder as compressed-tensors does; return its weight, float64, element by element."""
    rng = np.random.default_rng(len(strategy) + bits)
    rows, columns = shape
    height, width = {
        "tensor": shape, "channel": (1, columns), "group": (1, 16), "block": (10, 24)
    }[strategy]  # fmt: skip
    down, across = -(-rows // height), -(-columns // width)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    q = rng.integers(low, high, shape).astype(np.int8)
    zeros = rng.integers(low, high, (down, across)).astype(np.int8)
    scales = rng.uniform(0.001, 0.1, (down, across)).astype(scale_type)
    expected = np.zeros(shape)
    for i in range(rows):
        for j in range(columns):
            block = i // height, j // width
            zero = 0 if symmetric else int(zeros[block])
            expected[i, j] = (int(q[i, j]) - zero) * float(scales[block])
    arrays: dict[str, Array] = {"other.bias": np.ones(3, np.float32)}
    if strategy == "tensor":
        scales, zeros = scales.reshape(1), zeros.reshape(1)
    arrays["a.fc.weight_scale"] = scales
    if not symmetric:
        arrays["a.fc.weight_zero_point"] = zeros
    if packed:
        arrays["a.fc.weight_packed"] = pack(q, bits)
        arrays["a.fc.weight_shape"] = np.array(shape, np.int64)
        if not symmetric and strategy in ("channel", "group"):
            arrays["a.fc.weight_zero_point"] = np.ascontiguousarray(pack(zeros.T, bits).T)
    else:
        arrays["a.fc.weight"] = q
    arrays = {n: a for n, a in arrays.items() if n != without} | (more or {})
    write(folder / "model.safetensors", arrays)
    settings = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    if strategy == "group":
        settings["group_size"] = 16
    if strategy == "block":
        settings["block_structure"] = [height, width]
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "int-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": settings | (weights or {})}},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip
    text = json.dumps({"quantization_config": quantization | (config or {})})
    (folder / "config.json").write_text(text)
    return expected


# ---- the right numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True], ids=["zero points", "symmetric"])
@pytest.mark.parametrize("scale_type", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_int8_codes_are_read(tmp_path: Path, strategy: str, scale_type, symmetric: bool) -> None:  # type: ignore[no-untyped-def]
    expected = made(tmp_path / "x", strategy, scale_type=scale_type, symmetric=symmetric)
    dequantize(tmp_path / "x", tmp_path / "back", dtype="float32")
    back = tensors(tmp_path / "back")
    assert set(back) == {"a.fc.weight", "other.bias"}
    np.testing.assert_array_equal(back["a.fc.weight"], expected.astype(np.float32))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {}


@pytest.mark.parametrize("symmetric", [False, True], ids=["zero points", "symmetric"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_codes_are_read(tmp_path: Path, strategy: str, bits: int, symmetric: bool) -> None:
    """Rows that end within a word, and numbers of channels that do."""
    shape = (21, 48 if strategy == "group" else 53)
    expected = made(
        tmp_path / "x", strategy, bits=bits, packed=True, symmetric=symmetric, shape=shape
    )
    dequantize(tmp_path / "x", tmp_path / "back", dtype="float32")
    back = tensors(tmp_path / "back")
    assert set(back) == {"a.fc.weight", "other.bias"}
    np.testing.assert_array_equal(back["a.fc.weight"], expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", *slow(("float16", "float32"))])
def test_wide_weights_are_read_in_parts(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of codes are longer than a part of the work, and than a part of the check."""
    monkeypatch.setattr(codes, "_PART", 2**10)
    monkeypatch.setattr(codes, "_CHECKED", 2**9)
    rng = np.random.default_rng(0)
    q = rng.integers(-8, 8, (2, 2**10 + 40)).astype(np.int8)
    scales = rng.uniform(0.01, 0.1, (2, 1)).astype(np.float32)
    zeros = np.array([[3], [-5]], np.int8)
    made(
        tmp_path / "x", "channel", bits=4, packed=True,
        more={
            "a.fc.weight_packed": pack(q, 4), "a.fc.weight_shape": np.array(q.shape),
            "a.fc.weight_scale": scales, "a.fc.weight_zero_point": pack(zeros.T, 4).T.copy(),
        },
    )  # fmt: skip
    dequantize(tmp_path / "x", tmp_path / "back", dtype=dtype)
    expected = ((q.astype(np.float64) - zeros) * scales).astype(np.float32)
    w = tensors(tmp_path / "back")["a.fc.weight"]
    assert w.dtype.name == dtype
    np.testing.assert_array_equal(w, expected.astype(w.dtype))


def test_groups_are_told_apart_by_their_targets(tmp_path: Path) -> None:
    """A name goes before a pattern, a pattern before a class."""
    groups = {
        name: {"targets": targets, "weights": {"strategy": strategy, "num_bits": 8}}
        for name, targets, strategy in (
            ("x", ["Linear"], "tensor"), ("y", ["re:.*fc$"], "block"), ("z", ["b.fc"], "channel"),
        )
    }  # fmt: skip
    groups["y"]["weights"]["block_structure"] = [2, 3]
    ones = np.ones((4, 6), np.int8)
    of_channels = np.arange(1, 5, dtype=np.float32).reshape(4, 1)
    of_blocks = np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    made(
        tmp_path / "x", "tensor", config={"config_groups": groups},
        without="a.fc.weight_zero_point",
        more={
            "a.fc.weight": ones, "a.fc.weight_scale": of_blocks, "b.fc.weight": ones,
            "b.fc.weight_scale": of_channels, "c.weight": ones,
            "c.weight_scale": np.ones(1, np.float32),
        },
    )  # fmt: skip
    dequantize(tmp_path / "x", tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert (back["b.fc.weight"] == of_channels).all() and (back["c.weight"] == 1).all()
    assert (back["a.fc.weight"] == of_blocks.repeat(2, axis=0).repeat(3, axis=1)).all()


def test_scales_of_activations_are_dropped(tmp_path: Path) -> None:
    more = {
        "a.fc.input_scale": np.ones(1, np.float32),
        "a.fc.input_zero_point": np.zeros(1, np.int8),
    }
    made(tmp_path / "x", "channel", more=more)
    dequantize(tmp_path / "x", tmp_path / "back")
    assert set(tensors(tmp_path / "back")) == {"a.fc.weight", "other.bias"}


# ---- the check -----------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", ["no zero points", "other scales", "one element"])
def test_wrong_numbers_are_not_called_checked(tmp_path: Path, monkeypatch, fault, strategy, packed):  # type: ignore[no-untyped-def]
    """The fault of the first way to the numbers is not in the second."""
    made(tmp_path / "x", strategy, packed=packed, bits=4 if packed else 8, shape=(24, 48))
    right = conversion.dequantize_codes

    def wrong(source: Any, codes: Any, dtype: str) -> Array:
        w: Array = right(source, codes, dtype)
        if fault == "no zero points":
            return right(source, type(codes)(**{**vars(codes), "zero_points": None}), dtype)
        if fault == "one element":
            w[-1, -1] = np.nextafter(w[-1, -1], np.inf, dtype=w.dtype) * 2
            return w
        return np.ascontiguousarray(w[::-1])

    monkeypatch.setattr(conversion, "dequantize_codes", wrong)
    if fault == "other scales" and strategy == "tensor":
        monkeypatch.setattr(conversion, "dequantize_codes", lambda *a: 2 * right(*a))
    with pytest.raises(ValueError, match=r"was read back, and it is not \(codes - zero points\)"):
        dequantize(tmp_path / "x", tmp_path / "back", dtype="float32")
    assert not (tmp_path / "back").exists()


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": {"format": "float-quantized"}}, "format 'float-quantized' is not read"),
        ({"config": {"format": "nvfp4-pack-quantized"}}, "format 'nvfp4-pack-quantized' is not"),
        ({"config": {"format": "marlin-24"}}, "format 'marlin-24' is not read, only int-quantized"),
        ({"config": {"quant_method": "gptq"}}, "quant_method 'gptq' is not read"),
        ({"config": {"quant_method": "awq"}}, "quant_method 'awq' is not read"),
        ({"config": {"sparsity_config": {"format": "sparse-24-bitmask"}}}, "sparsity_config"),
        ({"config": {"transform_config": {"config_groups": {}}}}, "setting 'transform_config'"),
        ({"config": {"kv_cache_scheme": {"num_bits": 8}}}, "setting 'kv_cache_scheme'"),
        ({"config": {"config_groups": {"W8A8": ["Linear"]}}}, r"\['W8A8'\] is not an object"),
        ({"weights": {"type": "float"}}, "type 'float' is not read, only 'int'"),
        ({"weights": {"num_bits": 16}}, "num_bits 16 is not read"),
        ({"weights": {"num_bits": 3}, "packed": True}, "num_bits 3 is not read.* only 2, 4, 8"),
        ({"weights": {"actorder": "group"}}, "actorder 'group' is not read"),
        ({"weights": {"strategy": "tensor_group"}}, "strategy 'tensor_group' is not read"),
        ({"weights": {"dynamic": True}}, "dynamic weights"),
        ({"weights": {"codebook": "x"}}, "the setting 'codebook' is not read"),
        ({"more": {"a.fc.weight_g_idx": np.zeros(64, np.int32)}}, "weight_g_idx.*act-order"),
        ({"more": {"a.fc.weight_global_scale": np.ones(1, np.float32)}}, "weight_global_scale' is"),
        ({"more": {"b.weight_scale": np.ones(1, np.float32)}}, "'b.weight_scale' is not read"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, options: Any, said: str) -> None:
    made(tmp_path / "x", "channel", **options)
    with pytest.raises(UnsupportedError, match=said):
        dequantize(tmp_path / "x", tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]
    assert cli.main(["dequantize", str(tmp_path / "x"), "--output", str(tmp_path / "back")]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"without": "a.fc.weight_zero_point"}, "is not symmetric .* no 'a.fc.weight_zero_point'"),
        ({"weights": {"symmetric": True}}, "is symmetric .* has values other than 0"),
        ({"weights": {"symmetric": "no"}}, "symmetric must be true or false, got 'no'"),
        ({"weights": {"strategy": "group"}}, "group_size must be 1 or more, got None"),
        ({"weights": {"strategy": "group", "group_size": 32}}, r"must have scales \(24, 2\)"),
        ({"weights": {"strategy": "block", "block_structure": "x"}}, "must be two sizes"),
        ({"more": {"a.fc.weight_zero_point": np.zeros((24, 2), np.int8)}}, r"must be I8 \(24, 1\)"),
        ({"more": {"a.fc.weight_zero_point": np.zeros((24, 1), np.int32)}}, "got .*I32"),
        ({"more": {"b.weight": np.zeros((2, 2), np.int8)}}, "'b.weight' is INT8 and has no scales"),
        ({"config": {"format": "pack-quantized"}}, "must have weight_packed"),
        ({"packed": True, "without": "a.fc.weight_shape"}, "must be two integers, it is missing"),
        ({"packed": True, "more": {"a.fc.weight_shape": np.array([24, 65])}}, "says 24 x 65"),
        ({"packed": True, "more": {"a.fc.weight_shape": np.array([-1, 2**62])}}, "says -1 x"),
        ({"config": {"config_groups": 3}}, "config_groups must be an object, got 3"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, options: Any, said: str) -> None:
    made(tmp_path / "x", "channel", **options)
    with pytest.raises(ValueError, match=said):
        dequantize(tmp_path / "x", tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]


@pytest.mark.frameworks
def test_a_pickled_model_of_the_same_names_is_no_exception(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    expected = made(tmp_path / "x", "group")
    found = open_checkpoint(tmp_path / "x")
    arrays = {name: torch.from_numpy(found.read(name)) for name in found.tensors}
    (tmp_path / "x" / "model.safetensors").unlink()
    torch.save(arrays, tmp_path / "x" / "pytorch_model.bin")
    dequantize(tmp_path / "x", tmp_path / "back", dtype="float32")
    w = tensors(tmp_path / "back")["a.fc.weight"]
    np.testing.assert_array_equal(w, expected.astype(np.float32))
