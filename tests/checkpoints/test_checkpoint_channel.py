"""Checkpoints with a scale for each channel are analysed, converted, read back, or refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.arrays.kinds import as_float64
from cupyattn.checkpoints import analyze, convert, dequantize, open_checkpoint
from cupyattn.checkpoints.analysis import Analysis, TensorReport
from cupyattn.checkpoints.choosing import CHANNEL_LIMIT
from tests.checkpoints.checkpoint_files import model, source, tensors, write
from tests.checkpoints.test_checkpoint_schemes import made

CHANNEL = ca.Int8Config(min_elements_for_int8=100, strategy="channel")
NAME = "visual_transformer_blocks.0.feed_forward.in_layer.weight"


def test_a_model_is_converted_by_channel_and_back(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    found = analyze(path, CHANNEL)
    done = convert(path, tmp_path / "int8", analysis=found)
    int8 = open_checkpoint(tmp_path / "int8")
    for t in found.tensors:
        if t.verdict == "int8":
            codes, scales = ca.weight_quant(model()[t.name], strategy="channel")
            assert int8.read(t.name).tobytes() == codes.tobytes()
            assert int8.read(f"{t.name}_scale").tobytes() == scales.tobytes()
    total = sum(info.nbytes for info in int8.tensors.values())
    assert total == found.totals["bytes_out"] and done.analysis is not None
    record = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    group = record["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "channel" and group["weights"]["dynamic"] is False
    assert group["input_activations"]["strategy"] == "token"
    assert group["input_activations"]["dynamic"] is True
    assert record["format"] == "int-quantized"
    dequantize(tmp_path / "int8", tmp_path / "back")
    back, before = tensors(tmp_path / "back"), model()
    assert back.keys() == before.keys()
    for t in found.tensors:
        if t.verdict == "int8":
            error = np.abs(as_float64(back[t.name]) - as_float64(before[t.name]))
            scales = int8.read(f"{t.name}_scale")
            assert (error <= ca.quant.weight_error(before[t.name], scales)).all()
            assert t.max_error == pytest.approx(error.max(), rel=1e-5)


def test_blocks_stay_the_default_and_their_bytes(tmp_path: Path) -> None:
    """A record of blocks is one that earlier versions read."""
    convert(source(tmp_path / "model"), tmp_path / "int8", ca.Int8Config(min_elements_for_int8=100))
    for file in (tmp_path / "int8").glob("*.safetensors"):
        text = file.read_bytes()[:100_000].decode("utf-8", "replace")
        assert "strategy" not in text.partition("__metadata__")[2][:2000]
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["weights"]["strategy"] == "block"


def test_the_command_takes_the_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(source(tmp_path / "model"))
    options = ["--strategy", "channel", "--min-elements", "100"]
    assert cli.main(["convert", path, "--output", str(tmp_path / "int8"), *options]) == 0
    assert open_checkpoint(tmp_path / "int8").tensors[f"{NAME}_scale"].shape == (145, 1)
    deepseek = ["--output", str(tmp_path / "other"), "--export", "deepseek"]
    assert cli.main(["convert", path, *deepseek, *options]) == 2
    assert "'deepseek' has scales of blocks alone" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


# ---- what is recommended -------------------------------------------------------------------------


def layers(seed: int = 0) -> dict[str, np.ndarray]:
    """Return a layer whose rows are alike, and one of which some columns are large."""
    rng = np.random.default_rng(seed)
    plain, uneven = (rng.standard_normal((256, 512)).astype(np.float32) for _ in range(2))
    uneven[:, :64] *= 30
    return {"a.fc.weight": plain, "b.fc.weight": uneven}


def test_channels_are_recommended_by_their_error(tmp_path: Path) -> None:
    weights, rng = layers(), np.random.default_rng(1)
    path = write(tmp_path / "x.safetensors", weights)
    x = rng.standard_normal((3, 20, 512)).astype(np.float32)
    few = np.where(np.arange(512) < 64, np.float32(1e-3), np.float32(1))
    found = analyze(path, ca.Int8Config(min_sqnr_db=0), activations={
        "a.fc": x, "b.fc.weight": x * few,  # large columns meet small numbers
    })  # fmt: skip
    for t in found.tensors:
        w, own = weights[t.name], x if t.name.startswith("a") else x * few
        exact = as_float64(own).reshape(-1, 512) @ as_float64(w).T
        for strategy, error in (("block", t.block_error), ("channel", t.channel_error)):
            layer = ca.Int8Linear.from_weight(w, strategy=strategy)
            y = as_float64(layer(own, out_dtype="float32")).reshape(exact.shape)
            expected = np.linalg.norm(y - exact) / np.linalg.norm(exact)
            assert error == pytest.approx(expected, rel=1e-3)
    plain, uneven = found.tensors
    assert uneven.channel_error > 1.5 * uneven.block_error and uneven.recommended == "block"
    ratio = plain.channel_error / plain.block_error
    assert plain.recommended == ("channel" if ratio <= CHANNEL_LIMIT else "block")
    text = found.summary()
    assert re.search(r"at most 1.05 times as much as scales of blocks in \d of 2 layers", text)
    rows = {row[1]: row for row in found.cells(every=True)}
    assert rows["b.fc.weight"][-2].startswith("block: ")
    (tmp_path / "x.json").write_text(json.dumps(found.to_dict()))
    again = Analysis.load(tmp_path / "x.json")
    assert again == found and [t.recommended for t in again.tensors][1] == "block"


def test_the_limit_decides() -> None:
    """At 1.05 times the error of blocks channels are recommended, past it blocks."""
    report = TensorReport(
        "a.weight", "F32", (256, 512), "linear", "", 0, 1.0, 0.0, 0.0, 0.0, 50.0, 50.0,
        verdict="int8", block_error=0.01,
    )  # fmt: skip
    for error, expected in ((0.0105, "channel"), (0.01051, "block"), (0.002, "channel")):
        assert replace(report, channel_error=error).recommended == expected
    assert replace(report, channel_error=0.01, verdict="keep").recommended == ""
    assert report.recommended == ""


@pytest.mark.parametrize(
    ("activations", "said"),
    [
        ({"c.fc": np.ones((2, 512))}, "'c.fc', which is no linear layer of x.safetensors"),
        ({"a.fc": np.ones((2, 511))}, r"must be \(..., 512\) with a row or more, got \(2, 511\)"),
        ({"a.fc": np.ones((0, 512))}, r"got \(0, 512\)"),
        ({"a.fc": np.full((2, 512), np.nan)}, "activations of 'a.fc' are NaN or infinite"),
        ({"a.fc": np.full((2, 512), 1e300)}, "infinite in float32: record others"),
    ],
)
def test_activations_that_do_not_fit_are_refused(tmp_path: Path, activations, said: str) -> None:  # type: ignore[no-untyped-def]
    path = write(tmp_path / "x.safetensors", layers())
    with np.errstate(all="raise"), pytest.raises(ValueError, match=said):
        analyze(path, activations=activations)


def test_the_command_takes_activations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "x.safetensors", layers())
    x = np.random.default_rng(2).standard_normal((9, 512)).astype(np.float32)
    samples = write(tmp_path / "samples.safetensors", {"a.fc": x})
    assert cli.main(["analyze", str(path), "--activations", str(samples)]) == 0
    out = capsys.readouterr().out
    assert "scales by" in out and "x the error of blocks" in out and "of 1 layers" in out


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["channel", "group"])
def test_group_sizes_that_do_not_divide_are_refused(tmp_path: Path, strategy: str) -> None:
    options = {} if strategy == "channel" else {"shape": (24, 72), "symmetric": True}
    made(tmp_path / "x", strategy, **options)  # groups of 16 columns
    if strategy == "channel":
        dequantize(tmp_path / "x", tmp_path / "back")
        return
    with pytest.raises(ValueError, match="group_size 16 does not divide the 72 columns of 'a.fc'"):
        dequantize(tmp_path / "x", tmp_path / "back")
    assert not (tmp_path / "back").exists() and not (tmp_path / "back.partial").exists()


def test_files_that_mix_strategies_are_refused(tmp_path: Path) -> None:
    """Two parts of one model, converted in two ways."""
    for name, config in (("a", CHANNEL), ("b", ca.Int8Config(min_elements_for_int8=100))):
        path = source(tmp_path / f"model-{name}")
        convert(path, tmp_path / name, config, max_shard_bytes=20_000)
    shard = sorted((tmp_path / "a").glob("*.safetensors"))[0]
    shard.write_bytes((tmp_path / "b" / shard.name).read_bytes())
    with pytest.raises(ValueError, match="its files mix the strategies block and channel"):
        dequantize(tmp_path / "a", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    more = {"a.fc.weight_scale": np.ones((23, 1), np.float32)}
    made(tmp_path / "x", "channel", symmetric=True, more=more)
    with pytest.raises(ValueError, match=r"must have scales \(24, 1\) .* got 'a.fc.weight_scale'"):
        dequantize(tmp_path / "x", tmp_path / "back")
    assert not (tmp_path / "back").exists()
