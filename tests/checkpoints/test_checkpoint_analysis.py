"""Results of `analyze` for a model: roles, errors, verdicts, totals, memory; and the command."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.checkpoints import Analysis, analyze, convert, open_checkpoint, role_of
from tests.checkpoints.checkpoint_files import BF16, SMALL, model, write, write_shards


def of(tmp_path: Path, config: ca.Int8Config = SMALL, **arrays: np.ndarray) -> Analysis:
    path = write(tmp_path / "x.safetensors", {n.replace("__", "."): a for n, a in arrays.items()})
    return analyze(path, config)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("attention", [
            "visual_transformer_blocks.3.self_attention.to_query.weight",
            "text_transformer_blocks.0.self_attention.out_layer.weight",
            "transformer_blocks.0.attn.to_out.0.weight",
            "transformer_blocks.0.attn.add_q_proj.weight",
            "blocks.0.attn1.to_k.weight", "double_blocks.0.img_attn.qkv.weight",
        ]),
        ("feed_forward", [
            "visual_transformer_blocks.3.feed_forward.in_layer.weight",
            "transformer_blocks.0.ff.net.0.proj.weight",
            "transformer_blocks.0.ff_context.net.2.weight", "blocks.0.ffn.net.2.weight",
            "single_transformer_blocks.0.proj_mlp.weight",
            "double_blocks.0.txt_mlp.0.weight", "transformer.blocks.7.mlp.fc1.weight",
        ]),
        ("linear", ["single_transformer_blocks.0.proj_out.weight", "single_blocks.1.fc.weight"]),
        ("modulation", [
            "visual_transformer_blocks.0.visual_modulation.out_layer.weight",
            "out_layer.modulation.out_layer.weight", "blocks.0.norm1_context.linear.weight",
            "single_transformer_blocks.0.norm.linear.weight", "norm_out.linear.weight",
            "adaln_single.linear.weight", "scale_shift_table", "blocks.0.scale_shift_table",
            "double_blocks.0.img_mod.lin.weight", "final_layer.adaLN_modulation.1.weight",
            "av_cross_attn_video_scale_shift.linear.weight",
            "av_cross_attn_audio_v2a_gate.linear.weight",
        ]),
        ("time", [
            "time_embeddings.in_layer.weight", "condition_embedder.time_proj.weight",
            "time_text_embed.guidance_embedder.linear_1.weight", "guidance_in.out_layer.weight",
        ]),
        ("norm", [
            "visual_transformer_blocks.0.self_attention.query_norm.weight", "blocks.0.norm2.weight",
            "text_embeddings.norm.bias", "transformer_blocks.0.attn.norm_added_k.weight",
        ]),
        ("embedding", [
            "visual_embeddings.in_layer.weight", "x_embedder.weight", "patch_embedding.weight",
            "context_embedder.weight", "pos_embed.proj.weight",
            "caption_projection.linear_1.weight", "txt_in.weight", "shared.weight",
        ]),
        ("final", [
            "proj_out.weight", "audio_proj_out.weight", "out_layer.out_layer.weight",
            "final_layer.linear.weight",
        ]),
        ("adapter", [
            "transformer_blocks.0.attn.to_q.lora_A.weight", "ffn.net.2.lora_B.default.weight",
            "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "attn.to_k_lora.up.weight",
            "blocks.0.attn.to_v.lokr_w1", "blocks.0.attn.to_v.hada_w2_a", "fc.oft_R.default.weight",
        ]),
        ("other", ["blocks.0.attn.in_proj", "anything"]),
    ],
)  # fmt: skip
def test_roles(role: str, names: list[str]) -> None:
    assert {name: role_of(name, (64, 64)) for name in names} == dict.fromkeys(names, role)


def test_roles_by_shape() -> None:
    assert role_of("down.0.conv1.weight", (8, 8, 3, 3)) == "convolution"
    assert role_of("down.0.conv1.bias", (8,)) == "vector"
    assert role_of("gain.weight", ()) == "other"


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(270, 150), (133, 25, 3, 3), (20, 5000)], ids=str)
def test_errors_are_those_of_the_way_there_and_back(tmp_path: Path, dtype, shape) -> None:  # type: ignore[no-untyped-def]
    w = normal(*shape).astype(dtype)
    w.flat[7] = 30
    t = of(tmp_path, x__weight=w).tensors[0]
    x = w.astype(np.float64)
    back = ca.weight_dequant(*ca.weight_quant(w)).astype(np.float64)
    error = np.abs(x - back)
    assert t.max_error == pytest.approx(error.max(), rel=1e-6)
    assert t.mean_error == pytest.approx(error.mean(), rel=1e-6)
    assert t.sqnr_db == pytest.approx(10 * np.log10((x**2).sum() / (error**2).sum()), rel=1e-6)
    assert t.largest == 30 and t.nonfinite == 0
    matrix, outliers, outlier_power = np.abs(x.reshape(shape[0], -1)), 0, 0.0
    for i in range(0, matrix.shape[0], 128):
        for j in range(0, matrix.shape[1], 128):
            block = matrix[i : i + 128, j : j + 128]
            far = block > 4 * np.sqrt((block**2).mean())
            outliers += far.sum()
            outlier_power += (block[far] ** 2).sum()
    assert 0 < t.outlier_ratio == outliers / w.size  # type: ignore[operator]
    inlier = 10 * np.log10(((x**2).sum() - outlier_power) / (error**2).sum())
    assert t.inlier_sqnr_db == pytest.approx(inlier, rel=1e-6)
    assert t.nbytes == w.nbytes
    if len(shape) == 2:
        assert (t.verdict, t.dtype_out) == ("int8", "I8")
        blocks = -(-shape[0] // 128) * -(-shape[1] // 128)
        assert t.nbytes_out == w.size + 4 * blocks
    else:  # a convolution
        assert t.verdict in ("16bit", "keep") and t.nbytes_out == 2 * w.size


def test_exact_weights_have_no_noise(tmp_path: Path) -> None:
    t = of(tmp_path, x__weight=np.full((20, 20), 127, np.float32), z__weight=np.zeros((20, 20)))
    assert t.tensors[1].max_error == 0 and t.tensors[1].sqnr_db is None
    assert t.tensors[1].verdict == "int8"


def test_totals(tmp_path: Path) -> None:
    arrays = model()
    found = analyze(write(tmp_path / "x.safetensors", arrays), SMALL)
    totals = found.totals
    assert totals["bytes"] == sum(a.nbytes for a in arrays.values())
    assert totals["elements"] == sum(a.size for a in arrays.values())
    parts = [totals[v] for v in ("int8", "16bit", "keep")]
    for name in ("tensors", "elements", "bytes", "bytes_out"):
        assert totals[name] == sum(part[name] for part in parts)
    assert totals["savings"] == 1 - totals["bytes_out"] / totals["bytes"]
    assert totals["int8"]["tensors"] == 4 and totals["16bit"]["tensors"] == 4
    assert 0.4 < totals["savings"] < 0.75


# ---- verdicts ------------------------------------------------------------------------------------


def heavy() -> np.ndarray:
    """Return a weight of which about 3 % are large, half of them beyond 4 times the RMS."""
    w = normal(64, 64)
    w.flat[:: 64 * 64 // 123] *= 20
    return w


def far() -> np.ndarray:
    w = normal(64, 64)
    w.flat[:: 16 * 64] = 1000
    return w


@pytest.mark.parametrize(
    ("name", "w", "config", "verdict", "dtype", "reason"),
    [
        ("blocks.0.fc.weight", normal(64, 64), {}, "int8", "I8", "linear"),
        ("conv.weight", normal(64, 8, 3, 3), {}, "16bit", "BF16", "convolution: "),
        ("blocks.0.fc.weight", normal(9, 9), {}, "16bit", "BF16", "small: 81 elements"),
        ("blocks.0.fc.weight", normal(9, 9), {"fallback_dtype": "fp16"}, "16bit", "F16", "small"),
        ("fc.weight", 1e6 * normal(9, 9), {"fallback_dtype": "fp16"}, "keep", "F32", "too large"),
        ("fc.weight", normal(9, 9).astype(BF16), {}, "keep", "BF16", "small"),
        ("fc.weight", normal(9, 9).astype(np.float16), {}, "keep", "F16", "small"),
        ("fc.weight", heavy(), {}, "16bit", "BF16", "outliers: 1.5 %, more than 1 %"),
        ("fc.weight", heavy(), {"max_outlier_ratio": 0.1}, "int8", "I8", "linear"),
        ("fc.weight", far(), {}, "16bit", "BF16", "noisy codes: "),
        ("fc.weight", far(), {"min_sqnr_db": 0}, "int8", "I8", "linear"),
        ("norm1.linear.weight", normal(64, 64), {}, "keep", "F32", "modulation"),
        ("norm1.weight", normal(640), {}, "keep", "F32", "norm"),
        ("fc.bias", normal(640), {}, "keep", "F32", "no weight of a layer"),
        ("a.1.fc.weight", normal(64, 64), {"fp32_patterns": ["a.*"]}, "keep", "F32", "fp32"),
        ("b.1.fc.weight", normal(64, 64), {"fp32_patterns": ["a.*"]}, "int8", "I8", "linear"),
        ("fc.weight", normal(64, 64).astype(np.float64), {}, "keep", "F64", "no 16- or 32-bit"),
        ("fc.weight", np.ones((64, 64), np.int8), {}, "keep", "I8", "no 16- or 32-bit"),
        ("fc.weight", np.zeros((0, 64), np.float32), {}, "16bit", "BF16", "small"),
        ("steps", np.float32(3).reshape(()), {}, "keep", "F32", "no weight"),
    ],
)  # fmt: skip
def test_verdicts(tmp_path: Path, name, w, config, verdict, dtype, reason) -> None:  # type: ignore[no-untyped-def]
    path = write(tmp_path / "x.safetensors", {name: w, "a.bias": np.ones(3, np.float32)})
    t = {t.name: t for t in analyze(path, replace(SMALL, **config)).tensors}[name]
    assert (t.verdict, t.dtype_out) == (verdict, dtype) and t.reason.startswith(reason)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float64, "F8_E4M3"], ids=str)
def test_what_is_not_finite_is_counted(tmp_path: Path, value: float, dtype) -> None:  # type: ignore[no-untyped-def]
    from cupyattn.checkpoints.header import DTYPES

    w = normal(40, 40).astype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    w[3, 4] = w[39, 39] = value
    found = of(tmp_path, fc__weight=w, other__weight=normal(40, 40))
    assert [(t.name, t.nonfinite) for t in found.nonfinite] == [("fc.weight", 2)]
    t = found.nonfinite[0]
    assert t.verdict == "keep" and t.sqnr_db is None and 1 < t.largest < 10


def mixed(dtype: np.dtype) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """Return a model with layers of every kind, odd shapes, and one weight under two names."""
    tied = normal(300, 130, seed=1).astype(dtype)
    return {
        "wte.weight": tied, "lm_head.weight": tied, "decoder.3.tied.weight": tied,
        "blocks.0.fc.weight": normal(257, 129).astype(dtype),
        "blocks.0.attn.qkv.weight": normal(1, 4099).astype(dtype),
        "blocks.0.norm1.weight": normal(129).astype(dtype),
        "blocks.0.norm1.bias": normal(129).astype(dtype),
        "blocks.0.fc.bias": normal(257).astype(dtype),
        "encoder.0.conv1d.weight": normal(128, 65, 3).astype(dtype),
        "encoder.1.conv1x1.weight": normal(128, 129, 1).astype(dtype),
        "encoder.2.conv2d.weight": normal(66, 35, 3, 3).astype(dtype),
        "encoder.3.conv3d.weight": normal(34, 17, 3, 2, 2).astype(dtype),
        "stft.forward_basis_buffer": normal(258, 1, 256).astype(dtype),
        "rnn.weight_ih_l0": normal(512, 128).astype(dtype),
        "patch_embed.proj.weight": normal(96, 3, 14, 14).astype(dtype),
        "heavy.weight": heavy().astype(dtype), "far.weight": far().astype(dtype),
        "empty.weight": np.zeros((0, 8), dtype), "steps": np.arange(7),
        "scale": normal().reshape(()),
        "double.weight": normal(80, 80).astype(np.float64),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("export", ["compressed-tensors", "deepseek"])
def test_what_analysis_promises_is_what_conversion_writes(tmp_path: Path, dtype, export) -> None:  # type: ignore[no-untyped-def]
    """Sizes of all tensors and the saved share, to the byte; each tensor's type by its name."""
    path = write(tmp_path / "x.safetensors", mixed(np.dtype(dtype)))
    found = analyze(path)
    done = convert(path, tmp_path / "int8", export=export)
    written = open_checkpoint(tmp_path / "int8").tensors
    assert found == done.analysis
    size = sum(info.nbytes for info in written.values())
    before = sum(a.nbytes for a in mixed(np.dtype(dtype)).values())
    assert found.totals["bytes_out"] == size and found.totals["savings"] == 1 - size / before
    assert {t.name: t.dtype_out for t in found.tensors} == {
        name: info.dtype for name, info in written.items() if "weight_scale" not in name
    }
    assert {t.name for t in found.tensors if t.verdict == "int8"} == {
        "decoder.3.tied.weight", "blocks.0.fc.weight", "blocks.0.attn.qkv.weight",
    }  # fmt: skip
    headers = sum(f.stat().st_size for f in (tmp_path / "int8").glob("*.safetensors")) - size
    assert 0 < headers < 20_000


def test_a_saved_analysis_of_another_judgement_is_judged_again(tmp_path: Path) -> None:
    """Files of earlier versions promised INT8 for convolutions."""
    path = write(tmp_path / "x.safetensors", mixed(np.dtype(np.float32)))
    found = analyze(path)
    old = replace(found, tensors=tuple(replace(t, verdict="int8") for t in found.tensors))
    file = tmp_path / "analysis.json"
    file.write_text(json.dumps(old.to_dict()))
    assert Analysis.load(file) == found


# ---- the whole -----------------------------------------------------------------------------------


def test_files_do_not_matter(tmp_path: Path) -> None:
    arrays = model(dtype=BF16)
    names = list(arrays)
    one = analyze(write(tmp_path / "x.safetensors", arrays), SMALL)
    shards = {"b.safetensors": {n: arrays[n] for n in names[:5]},
              "a.safetensors": {n: arrays[n] for n in names[5:]}}  # fmt: skip
    two = analyze(write_shards(tmp_path / "shards", shards), SMALL)
    assert one.sha256 == two.sha256 and one.totals == two.totals
    assert {t.name: t for t in one.tensors} == {t.name: t for t in two.tensors}
    arrays["steps"] = arrays["steps"] + 1
    changed = analyze(write(tmp_path / "x.safetensors", arrays), SMALL)
    assert changed.sha256 != one.sha256


def test_another_configuration_needs_no_other_look(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", model())
    other = replace(SMALL, min_elements_for_int8=10**6, fallback_dtype="fp16")
    assert analyze(path, SMALL).with_config(other) == analyze(path, other)


@pytest.mark.parametrize(
    ("size_x", "size_w"), [(2.0**100, 2.0**30), (2.0**-90, 2.0**-70), (2.0**120, 1.0)]
)
@pytest.mark.filterwarnings("error")
def test_errors_of_layers_do_not_depend_on_units(
    tmp_path: Path, size_x: float, size_w: float
) -> None:
    """Products of these overflow or underflow float32, which said 0 or NaN."""
    x, w = np.random.default_rng(0).standard_normal((2, 64, 256)).astype(np.float32)

    def errors(of_x: float, of_w: float) -> list[object]:
        path = write(tmp_path / "x.safetensors", {"a.fc.weight": w * np.float32(of_w)})
        config = ca.Int8Config(min_elements_for_int8=1)
        found = analyze(path, config, activations={"a.fc": x * np.float32(of_x)})
        return [found.choice, found.tensors[0].block_error, found.tensors[0].channel_error]

    assert errors(size_x, size_w) == errors(1, 1)


def test_samples_that_are_no_numbers_by_name_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a.fc.weight": np.ones((8, 8), np.float32)})
    with pytest.raises(ValueError, match="'a.fc' must be real numbers, got complex64"):
        analyze(path, activations={"a.fc": np.ones((2, 8), np.complex64)})
    with pytest.raises(TypeError, match="activations must map names of layers to arrays"):
        analyze(path, activations=[np.ones((2, 8))])  # type: ignore[arg-type]


def test_another_strategy_needs_another_look(tmp_path: Path) -> None:
    """An outlier in each row of one block costs blocks one block, and channels all these rows."""
    w = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    w[:128, 5] = 3000
    path = write(tmp_path / "x.safetensors", {"a.fc.weight": w})
    config = ca.Int8Config(min_sqnr_db=9)
    known = [analyze(path, replace(config, strategy=x)) for x in ("block", "channel")]
    assert [one.tensors[0].verdict for one in known] == ["int8", "16bit"]
    with pytest.raises(ValueError, match="is of scales by block, .* of strategy='channel'"):
        convert(path, tmp_path / "out", known[1].config, analysis=known[0])
    record = known[0].to_dict()
    record["config"]["strategy"] = "auto"
    (tmp_path / "known.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="no usable analysis: its strategy is 'auto'"):
        Analysis.load(tmp_path / "known.json")


@pytest.mark.parametrize("shape", [(2048, 1024), (64, 32768), (2**19, 4)], ids=str)
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path, shape: tuple[int, int]) -> None:
    w = np.ones(shape, BF16)
    path = write(tmp_path / "x.safetensors", {f"{i}.fc.weight": w for i in range(3)})
    tracemalloc.start()
    analyze(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * w.nbytes


def test_the_record_is_read_again(tmp_path: Path) -> None:
    config = replace(SMALL, fp32_patterns=["*.0.*"])
    found = analyze(write(tmp_path / "x.safetensors", model()), config)
    path = tmp_path / "analysis.json"
    path.write_text(json.dumps(found.to_dict()))
    assert Analysis.load(path) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "something else"}, "'something else'"),
        ({"version": 2}, "version 2"),
        ({"sha256": "0"}, "hash"),
        ({"tensors": [{}]}, "analysis.json"),
        ({"config": {"block_size": -1}}, "block_size"),
        (None, "analysis.json"),
    ],
)
def test_a_damaged_record(tmp_path: Path, change, said: str) -> None:  # type: ignore[no-untyped-def]
    found = analyze(write(tmp_path / "x.safetensors", model()), SMALL).to_dict()
    path = tmp_path / "analysis.json"
    path.write_text("{" if change is None else json.dumps(found | change))
    with pytest.raises(ValueError, match=said):
        Analysis.load(path)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_shards(tmp_path / "model", {"a.safetensors": model(blocks=3)})
    out, plot = tmp_path / "analysis.json", tmp_path / "plot.svg"
    options = ["--block-size", "128", "--min-elements", "100", "--fp32-pattern", "*.0.feed*"]
    arguments = ["analyze", str(path), *options, "--output", str(out)]
    pytest.importorskip("matplotlib")
    assert cli.main([*arguments, "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "3  visual_transformer_blocks.*.self_attention.to_query.weight" in printed
    assert "2  visual_transformer_blocks.*.feed_forward.in_layer.weight" in printed
    assert "fp32_patterns: *.0.feed*" in printed and "% saved" in printed
    found = Analysis.load(out)
    assert found.config.fp32_patterns == ("*.0.feed*",) and found.summary() in printed
    assert plot.read_text().startswith("<?xml")
    assert cli.main([*arguments, "--tensors"]) == 0
    assert "visual_transformer_blocks.2.feed_forward.in_layer.weight" in capsys.readouterr().out


def test_the_command_fails_on_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    w = normal(40, 40)
    w[0, 0] = np.nan
    assert cli.main(["analyze", str(write(tmp_path / "x.safetensors", {"fc.weight": w}))]) == 1
    assert "FAILED: fc.weight has 1 elements that are NaN or infinite" in capsys.readouterr().out


def test_the_command_says_no_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\x09\0\0\0\0\0\0\0{")
    assert cli.main(["analyze", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["analyze", str(tmp_path / "nothing")]) == 2
    assert cli.main(["analyze", str(tmp_path), "--max-outliers", "-1"]) == 2
    assert "max_outlier_ratio" in capsys.readouterr().err
