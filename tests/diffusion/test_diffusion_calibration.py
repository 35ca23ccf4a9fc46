"""Calibration: percentiles against NumPy's, bins, files, and calibrations that do not fit."""

from __future__ import annotations

import copy
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.diffusion import Calibrations, SnrBins, storage
from cupyattn.diffusion.calibration import Calibration
from cupyattn.diffusion.recordings import RecordedCall, Recording
from cupyattn.quant.quantizers import scale_of_absmax

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32)
calibrate = ca.calibrate_quantization_scales


def batches(count: int, seed: int = 0, dtype: Any = np.float16, heads_kv: int = 2) -> list[Any]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        sizes = np.exp(rng.standard_normal((1, 4, 1, 1)))
        q = rng.standard_normal((2, 4, 9, 8)) * sizes
        k = rng.standard_normal((2, heads_kv, 7, 8)) + 3
        found.append((q.astype(dtype), k.astype(dtype)))
    return found


@given(
    count=st.integers(1, 12),
    seed=st.integers(0, 999),
    percentile=st.floats(1, 100, exclude_min=True),
    dtype=st.sampled_from(DTYPES),
    smooth=st.booleans(),
)
def test_percentiles_of_maxima(count, seed, percentile, dtype, smooth) -> None:
    data = batches(count, seed, dtype)
    found = calibrate(data, percentile, smooth_k=smooth)
    for name, scale, at in (("q", found.q_scale, 0), ("k", found.k_scale, 1)):
        maxima = []
        for batch in data:
            x = batch[at].astype(np.float32)
            if smooth and name == "k":
                x = x - x.mean(axis=2, keepdims=True, dtype=np.float32)
            maxima.append(np.abs(x).max(axis=(0, 2, 3)))
        ranked = np.sort(maxima, axis=0)
        level = ranked[max(0, int(np.ceil(percentile / 100 * count * (1 - 1e-12))) - 1)]
        np.testing.assert_array_equal(scale[0], scale_of_absmax(level)[0])
    assert found.batches == (count,) and (found.heads, found.heads_kv) == (4, 2)


@given(
    count=st.integers(1, 4),
    seed=st.integers(0, 999),
    percentile=st.floats(1, 100, exclude_min=True),
    dtype=st.sampled_from(DTYPES),
)
def test_percentiles_of_values_to_eight_bits(count, seed, percentile, dtype) -> None:
    data = batches(count, seed, dtype)
    found = calibrate(data, percentile, "values")
    q = np.abs(np.concatenate([q for q, _ in data]).astype(np.float32)).swapaxes(0, 1)
    exact = np.percentile(q.reshape(4, -1), percentile, axis=1, method="inverted_cdf")
    ratio = found.q_scale[0] * 127 / exact
    assert (ratio >= 1 - 1e-6).all() and (ratio <= 1 + 2**-7).all()


@pytest.mark.parametrize("of", ["maxima", "values"])
def test_the_rank_of_a_percentile_is_exact(of: str) -> None:
    """99.9 of 1,000 is 999, which a product of floats misses: the largest would be the scale."""
    x = np.ones((1, 1, 1, 1), np.float32)
    data = [(127 * (2 if i == 500 else 1) * x,) * 2 for i in range(1000)]
    assert calibrate(data, 99.9, of).q_scale.item() == 1
    assert calibrate(data, 99.91, of).q_scale.item() == 2


def test_scales_of_maxima_never_saturate_what_was_seen() -> None:
    data = batches(5)
    found = calibrate(data, 100)
    scales = tuple(s[0][None, :, None] for s in (found.q_scale, found.k_scale))
    quant = ca.QuantConfig("head", "head", smooth_k=False, scales=scales)
    codes = [ca.quantize(q, k, k, quant=quant) for q, k in data]
    for name in ("q", "k"):
        every = np.stack([np.abs(getattr(z, f"{name}_codes").astype(int)) for z in codes])
        assert (every.max(axis=(0, 1, 3, 4)) == 127).all()  # and the largest is the largest code
        for z, batch in zip(codes, data, strict=True):
            x, scale = batch["qk".index(name)], getattr(z, f"{name}_scale")[..., None]
            back = getattr(z, f"{name}_codes") * scale
            assert (np.abs(back - x) <= 0.501 * scale).all()


def test_scales_of_many_smoothed_keys_are_those_of_the_mean_that_is_subtracted() -> None:
    """Rows that are not of the mean lie elsewhere: less the mean of all rows no key would reach as
    far, and they would saturate."""
    q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 1100, 8)).astype(np.float32)
    k[:, :, np.arange(1100) % 128 >= 32] += 20
    found = calibrate([(q, k)], 100, smooth_k=True)
    scales = tuple(s[0][None, :, None] for s in (found.q_scale, found.k_scale))
    z = ca.quantize(q, k, k, quant=ca.QuantConfig("head", "head", scales=scales))
    assert z.k_mean is not None
    assert (np.abs(z.k_codes.astype(int)).max(axis=(0, 2, 3)) == 127).all()
    back = z.k_codes[..., :8] * z.k_scale[..., None]
    assert (np.abs(back + z.k_mean[:, :, None] - k) <= 0.501 * z.k_scale[..., None]).all()


def test_bins_gather_the_timesteps_of_like_noise() -> None:
    sigmas = ca.compute_sigma_schedule(10)
    data = [(q, k, t) for t, (q, k) in enumerate(batches(10))]
    found = calibrate(data, 100, sigmas=sigmas, num_bins=3)
    bins = found.bins.index(sigmas)
    assert found.batches == tuple(np.bincount(bins))
    for row in range(3):
        alone = calibrate([b[:2] for b in data if bins[b[2]] == row], 100)
        np.testing.assert_array_equal(found.q_scale[row], alone.q_scale[0])
        np.testing.assert_array_equal(found.k_scale[row], alone.k_scale[0])
    q_scale, k_scale = found.uniform()
    everything = calibrate([b[:2] for b in data], 100)
    np.testing.assert_array_equal(q_scale, everything.q_scale)
    np.testing.assert_array_equal(k_scale, everything.k_scale)


# ---- files ---------------------------------------------------------------------------------------


@given(count=st.integers(1, 4), bins=st.integers(1, 4), of=st.sampled_from(["maxima", "values"]))
def test_a_file_gives_back_what_was_saved(tmp_path_factory, count, bins, of) -> None:
    path = tmp_path_factory.mktemp("calibration") / "scales.safetensors"
    every = np.linspace(0, 9, 2 * bins).astype(int)
    data = [(q, k, int(every[i % every.size])) for i, (q, k) in enumerate(batches(count * 8))]
    sigmas = np.geomspace(10, 0.1, 10)
    found = calibrate(data, 97.5, of, sigmas=sigmas, num_bins=bins, source="DiT-XL/2, 3 prompts")
    found.save(path)
    again = Calibration.load(path, source_hash=found.source_hash)
    for name in vars(found):
        a, b = getattr(found, name), getattr(again, name)
        if isinstance(a, np.ndarray):
            assert a.tobytes() == b.tobytes() and a.shape == b.shape
        else:
            assert a == b, name
    assert os.listdir(path.parent) == [path.name]


def test_the_file_is_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    found = calibrate(batches(2), source="a model")
    found.save(path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert metadata["kind"] == "cupyattn.calibration" and metadata["version"] == "1"
    assert metadata["source"] == "a model" and metadata["source_hash"] == found.source_hash
    assert length % 8 == 0 and {"F32", "F64", "I64"} == {e["dtype"] for e in header.values()}
    ends = sorted(e["data_offsets"] for e in header.values())
    assert ends[0][0] == 0 and ends[-1][1] == len(content) - 8 - length
    assert all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))
    numpy_reader = pytest.importorskip("safetensors.numpy")
    np.testing.assert_array_equal(numpy_reader.load_file(path)["q_scale"], found.q_scale)


def test_equal_data_have_one_hash() -> None:
    one, same, other = (calibrate(batches(3, seed)) for seed in (0, 0, 1))
    assert one.source_hash == same.source_hash != other.source_hash
    assert calibrate(batches(3), 50).source_hash != one.source_hash


def test_a_damaged_or_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    calibrate(batches(2)).save(path)
    whole = path.read_bytes()
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "nowhere.safetensors")
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    newer = whole.replace(b'"version":"1"', b'"version":"2"')
    for content, said in (
        (b"", "is cut short: 0 bytes"),
        (whole[:20], "is cut short: a header"),
        (whole[:-1], "is cut short or damaged"),
        (b"\x02" + bytes(7) + b"[]", "has no safetensors header: at offset 8"),
        (flipped, "its arrays have changed since they were written"),
        (newer, "version 2 is later than 1"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"scales.safetensors' holds no usable .*{said}"):
            Calibration.load(path)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="it is of the data .*, not 0123456789ab"):
        Calibration.load(path, source_hash="0123456789abcdef")
    storage.write(path, {"w": np.ones(2, np.float32)}, {})
    with pytest.raises(ValueError, match="its kind is None"):
        Calibration.load(path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "scales.safetensors"
    found = calibrate(batches(2))
    found.save(path)
    before = path.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        replace(found, source="other").save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_codes_of_four_bits_have_scales_of_their_own() -> None:
    """The value of code 127 becomes code 7."""
    data = batches(2)
    found = calibrate(data, 100)
    eight, four = (
        ca.Int8Attention(4, 8, timestep_scales=found, quant=ca.QuantConfig(qk_bits=bits))
        for bits in (8, 4)
    )
    per_code = [x.quant_config(*data[0], 0).scales for x in (eight, four)]
    for one, other in zip(*per_code, strict=True):
        np.testing.assert_allclose(other, one * np.float32(127 / 7), 2.0**-22)
    z = ca.quantize(*data[0], data[0][1], quant=four.quant_config(*data[0], 0))
    codes = np.abs(z.unpacked().q_codes).max(axis=(0, 2, 3))
    assert ((codes > 2) & (codes <= 7)).all()


def test_a_calibration_of_another_model_says_so(tmp_path: Path) -> None:
    found = calibrate(batches(2), source="DiT-S")
    with pytest.raises(
        ValueError, match=r"of 4 heads of head_dim 8 \(DiT-S\), this .* num_heads=2"
    ):
        ca.Int8Attention(2, 8, timestep_scales=found)
    quant = ca.QuantConfig("tensor", "tensor", scales=(0.1, 0.1))
    with pytest.raises(ValueError, match="a calibration gives static, symmetric scales"):
        ca.Int8Attention(4, 8, timestep_scales=found, quant=quant)


# ---- what cannot be calibrated -------------------------------------------------------------------


def test_arguments_of_calibration() -> None:
    (q, k), *_ = data = batches(2)
    with_nan = q.copy()
    with_nan[0, 1, 2, 3] = np.nan
    for arguments, options, said in (
        (([],), {}, "batches is empty"),
        ((data, 99.0, "means"), {}, "of must be 'maxima' or 'values'"),
        (([(q,)],), {}, r"batch 0 must be \(q, k\) or"),
        (([(q, k), (q[:, :2], k)],), {}, "batch 1 has .*, the first had"),
        (([(q, k[..., :4])],), {}, "q and k of batch 0 must be"),
        (([(q, k), (with_nan, k)],), {}, "q of batch 1 holds a NaN"),
        ((data,), {"num_bins": 2}, "batch 0 needs a timestep"),
        (([(q, k, 0)],), {"num_bins": 2}, r"bin 1 of 2 .*batches per bin: \[1, 0\]"),
        (([(q, k, 1000)],), {}, "the timestep of batch 0 must be 0 to num_timesteps - 1"),
    ):
        with pytest.raises(ValueError, match=said):
            calibrate(*arguments, **options)
    with pytest.raises(TypeError, match="the timestep of batch 0 must be an index"):
        calibrate([(q, k, k)])


def test_a_record_that_does_not_fit_together() -> None:
    found = calibrate(batches(1))
    for changed, said in (
        ({"bins": SnrBins((0.0,))}, "q_scale must be float32 of shape"),
        ({"q_scale": -found.q_scale}, "q_scale must be positive"),
        ({"batches": (1, 2)}, "1 bins have 2 counts"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(found, **changed)


def test_silence_has_scales_too() -> None:
    silent = np.zeros((1, 2, 3, 4), np.float16)
    for of in ("maxima", "values"):
        found = calibrate([(silent, silent)], of=of)
        assert (found.q_scale == 1).all()
        nothing = calibrate([(silent[:, :, :0], silent[:, :, :0])], of=of)
        assert (nothing.q_scale == 1).all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_calibrated_layer_is_copied_and_pickled(copied: Any) -> None:
    data = batches(2)
    layer = ca.Int8Attention(4, 8, 10, timestep_scales=calibrate(data))
    q, k = data[0]
    o, other = (x(q, k, k, 3, mode="balanced") for x in (layer, copied(layer)))
    assert o.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("[" * 100_000, "recursion"), ('[["a", "x"]]', "call 0 is of 'a' at step 'x'"),
        ('[[["a"], 0]]', r"call 0 is of \['a'\]"), ('[["a", 1.5]]', "at step 1.5"),
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_recording_is_named(tmp_path: Path, calls: str, said: str) -> None:
    path, q = tmp_path / "x.safetensors", np.ones((1, 2, 3, 4), np.float16)
    Recording([RecordedCall("a", 0, q, q, q)]).save(path)
    arrays, metadata = storage.read(path)
    storage.write(path, arrays, {**metadata, "calls": calls})
    with pytest.raises(ValueError, match=f"holds no usable recording: .*{said}"):
        Recording.load(path)
    storage.write(path, {**arrays, "attention:0:k": q[0]}, metadata)
    with pytest.raises(ValueError, match="q, k and v of call 0 must have four axes"):
        Recording.load(path)
    kind = {"kind": "cupyattn.calibrations", "version": "1"}
    storage.write(path, {}, {**kind, "layers": "[" * 100_000})
    with pytest.raises(ValueError, match="holds no usable calibrations"):
        Calibrations.load(path)


def test_a_name_that_a_file_takes_for_attention_is_refused(tmp_path: Path) -> None:
    inputs = {"attention:x": np.ones((2, 3), np.float32)}  # which loading left out
    with pytest.raises(ValueError, match="'attention:x' is no name of a layer in a file"):
        Recording(inputs=inputs).save(tmp_path / "x.safetensors")


@pytest.mark.parametrize("sigmas", [3.0, [], [[2.0, 1.0]]], ids=str)
def test_a_schedule_has_one_axis(sigmas: Any) -> None:
    with pytest.raises(ValueError, match=r"sigmas must be \(steps,\)"):
        calibrate(batches(1), sigmas=sigmas)
