"""`QuantizedQKV`: checks of its fields, files, and codes that were made elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupyattn.quant import GROUP_ALL, QuantConfig, QuantizedQKV, quantize

ARRAYS = ("q_codes", "k_codes", "v", "q_scale", "k_scale", "k_mean")


def record(dtype: type = np.float16, **config: object) -> QuantizedQKV:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 9, 8)).astype(dtype)
    k, v = rng.standard_normal((2, 2, 2, 33, 8)).astype(dtype)
    return quantize(q, k, v, quant=QuantConfig(**config))


def codes(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(np.int8)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"smooth_k": False, "granularity_q": "tensor", "granularity_k": "head"},
        {"granularity_q": "tensor", "granularity_k": "tensor", "scales": (0.02, 0.03)},
    ],
)
def test_a_file_gives_back_what_was_saved(tmp_path: Path, dtype, config) -> None:
    x = record(dtype, **config)
    path = tmp_path / "operands.npz"
    x.save(path)
    assert list(tmp_path.iterdir()) == [path]
    y = QuantizedQKV.load(path)
    for name in ARRAYS:
        a, b = getattr(x, name), getattr(y, name)
        assert (a is None and b is None) or (a.dtype == b.dtype and np.array_equal(a, b)), name
    assert (x.config, x.group_q, x.group_kv) == (y.config, y.group_q, y.group_kv)
    assert (x.out_dtype, x.shape, x.nbytes) == (y.out_dtype, y.shape, y.nbytes)


def test_static_arrays_survive_a_file(tmp_path: Path) -> None:
    pair = np.full((1, 4, 1), 0.02, np.float32), np.full((1, 1, 1), 0.03, np.float32)
    x = record(granularity_q="head", granularity_k="head", scales=pair)
    x.save(tmp_path / "x.npz")
    scales = QuantizedQKV.load(tmp_path / "x.npz").config.scales
    assert all(np.array_equal(a, b) for a, b in zip(scales, pair, strict=True))


def test_facts_change_without_a_look_at_the_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with static scales would check arrays again which the library has just made."""
    x = record()
    monkeypatch.setattr(QuantizedQKV, "__post_init__", lambda _: pytest.fail("checked again"))
    y = x.with_facts(prepared=("rope",), has_queries=False)
    assert (y.prepared, y.has_queries, x.prepared, x.has_queries) == (("rope",), False, (), True)
    assert all(getattr(x, name) is getattr(y, name) for name in ARRAYS)
    rows = np.ones((3, 1, 1, 8, 8), np.float16)
    given = QuantConfig(granularity_q="tensor", granularity_k="tensor", scales=(0.02, 0.03))
    assert quantize(*rows, quant=given, backend="interpret").config is given


@pytest.mark.parametrize("damage", ["truncated", "flipped", "text", "empty", "foreign", "version"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "operands.npz"
    record().save(path)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[200] ^= 0xFF  # inside the data of the first array
        path.write_bytes(content)
    elif damage == "text":
        path.write_text("q_codes")
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "foreign":
        np.savez(path, a=np.zeros(3))
    else:
        with np.load(path) as file:
            arrays = dict(file)
        header = re.sub(rb'"version": \d+', b'"version": 9', arrays["header"].tobytes())
        np.savez(path, **{**arrays, "header": np.frombuffer(header, np.uint8)})
    said = "it has no header, but arrays called a" if damage == "foreign" else ""
    match = rf"operands\.npz' holds no usable QuantizedQKV: {said}"
    with pytest.raises(ValueError, match=match):
        QuantizedQKV.load(path)


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        QuantizedQKV.load(tmp_path / "none.npz")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x.npz"
    record().save(path)
    before = path.read_bytes()

    def fail(file: object, **arrays: object) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        record(smooth_k=False).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_from_codes_with_one_scale() -> None:
    q, k = codes(1, 4, 5, 8), codes(1, 2, 6, 8)
    v = np.ones((1, 2, 6, 8), ml_dtypes.bfloat16)
    x = QuantizedQKV.from_codes(q, k, v, 0.5, 0.25)
    assert (x.group_q, x.group_kv, x.out_dtype) == (GROUP_ALL, GROUP_ALL, "bfloat16")
    assert x.config.granularity_q == x.config.granularity_k == "tensor" and not x.config.smooth_k
    q_hat, k_hat, v_hat = x.dequantize("float64")
    assert np.array_equal(q_hat, q * 0.5) and np.array_equal(k_hat, k * 0.25) and (v_hat == 1).all()


def test_from_codes_with_groups_and_a_mean() -> None:
    q = k = codes(2, 2, 6, 4)
    v = np.ones((2, 2, 6, 4), np.float16)
    q_scale = np.arange(1, 13, dtype=np.float32).reshape(2, 2, 3)
    mean = np.full((2, 2, 4), 7, np.float32)
    k_scale = np.ones((1, 2, 1), np.float32)
    x = QuantizedQKV.from_codes(q, k, v, q_scale, k_scale, group_q=2, k_mean=mean)
    assert (x.config.granularity_q, x.config.granularity_k) == ("thread", "head")
    assert x.config.smooth_k
    q_hat, k_hat, _ = x.dequantize("float64")
    assert q_hat[1, 0, 5, 1] == q[1, 0, 5, 1] * 9.0
    assert np.array_equal(k_hat, k + 7.0)


def test_from_codes_errors() -> None:
    q = codes(1, 2, 4, 8)
    v = np.ones((1, 2, 4, 8), np.float16)
    three = np.ones((1, 1, 3), np.float32)
    with pytest.raises(ValueError, match="q_zero must be integers, got float32"):
        QuantizedQKV.from_codes(q, q, v, 1.0, 1.0, np.zeros((1, 1, 1), np.float32))
    with pytest.raises(ValueError, match="positive float, got -1"):
        QuantizedQKV.from_codes(q, q, v, -1.0, 1.0)
    with pytest.raises(ValueError, match="group_q, the rows per q_scale, is needed for 3 groups"):
        QuantizedQKV.from_codes(q, q, v, three, 1.0)
    with pytest.raises(ValueError, match=r"q_scale must have shape .* 4 rows in groups of 4"):
        QuantizedQKV.from_codes(q, q, v, three, 1.0, group_q=4)
    with pytest.raises(ValueError, match="q_codes must be int8, got float16"):
        QuantizedQKV.from_codes(v, q, v, 1.0, 1.0)
    with pytest.raises(ValueError, match="v must be float16 or bfloat16, got float32"):
        QuantizedQKV.from_codes(q, q, v.astype(np.float32), 1.0, 1.0)
    with pytest.raises(ValueError, match="length"):
        QuantizedQKV.from_codes(q, codes(1, 2, 3, 8), v, 1.0, 1.0)
    with pytest.raises(ValueError, match="k_mean must have shape"):
        QuantizedQKV.from_codes(q, q, v, 1.0, 1.0, k_mean=np.zeros((1, 8), np.float32))
    with pytest.raises(ValueError, match="out_dtype"):
        QuantizedQKV.from_codes(q, q, v, 1.0, 1.0, out_dtype="float64")


def test_the_record_is_frozen() -> None:
    x = record()
    with pytest.raises(AttributeError):
        x.group_q = 4  # type: ignore[misc]


def test_given_scales_become_operands_of_one_form() -> None:
    """Scales of one head or entry are repeated for all; numbers become arrays of one element."""
    q = np.zeros((2, 4, 8, 16), np.float16)
    heads = np.linspace(0.1, 0.4, 4, dtype=np.float32).reshape(1, 4, 1)
    quant = QuantConfig("head", "tensor", scales=(heads, 0.5))
    found = quant.scales_beside(q, ((2, 4), (2, 2)))
    assert {name: x.shape for name, x in found.items()} == {
        "q_static_scale": (2, 4, 1), "k_static_scale": (1, 1, 1)
    }  # fmt: skip
    assert (found["q_static_scale"] == heads).all() and found["k_static_scale"] == np.float32(0.5)
    assert quant.scales_beside(q, ((2, 4), (2, 2))) is found, "made once"
    other = QuantConfig("head", "tensor", scales=(2 * heads, 0.25))
    assert quant != other and quant.described == other.described
    back = quant.described.with_scales(found)
    assert (back.scales[0] == heads).all() and back.scales[1] == np.float32(0.5)
    assert QuantConfig().described.with_scales({}) == QuantConfig()
