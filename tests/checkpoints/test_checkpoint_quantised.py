"""Models that are quantised already, of whatever kind; VAEs; patterns that fit no name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.checkpoints import analyze, convert, dequantize, open_checkpoint, role_of
from cupyattn.errors import UnsupportedError
from tests.checkpoints.checkpoint_files import SMALL, model, tensors, write
from tests.checkpoints.test_checkpoint_schemes import made

TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
BACK = "dequantize it first with `cupyattn dequantize`"
RUN = rf"run it with cupyattn\.interop\.torch\.load_int8, or {BACK}"


def of_others(folder: Path, strategy: str, activations: dict[str, Any] | None, **more: Any) -> Path:
    """Write a folder in the format of compressed-tensors, with this description of activations."""
    made(folder, strategy, symmetric=True, **more)
    config = json.loads((folder / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = activations
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_quantised(
    path: Path, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Neither command makes anything of it, and both say the same."""
    found = tmp_path / "found.json"
    for arguments in (["analyze", str(path), "--json", str(found)],
                      ["convert", str(path), "--output", str(tmp_path / "out")]):  # fmt: skip
        assert cli.main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"cupyattn: {path} is quantised already: ")
        assert re.search(said, err), err
    assert not found.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_what_convert_wrote_is_named(
    tmp_path: Path, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ca.Int8Config(min_elements_for_int8=100, strategy=strategy)
    convert(write(tmp_path / "model.safetensors", model()), tmp_path / "int8", config)
    coded = sum(x.dtype == np.int8 for x in tensors(tmp_path / "int8").values())
    kind = "scales of blocks of 128 x 128" if strategy == "block" else "scales of channels"
    said = rf"{RUN} \({coded} weights in codes of 8 bits, {kind}\)"
    assert_quantised(tmp_path / "int8", said, capsys, tmp_path)
    assert_quantised(tmp_path / "int8" / "model.safetensors", said, capsys, tmp_path)
    dequantize(tmp_path / "int8", tmp_path / "back")  # which the sentence names
    assert analyze(tmp_path / "back").tensors


@pytest.mark.parametrize(
    ("strategy", "activations", "more", "said"),
    [
        ("channel", TOKENS, {}, rf"{RUN} \(1 weight in codes of 8 bits, scales of channels\)"),
        ("tensor", TOKENS, {}, rf"{RUN} \(1 weight in codes of 8 bits, one scale\)"),
        ("channel", None, {}, f"{BACK}, since its codes do not run as they are .*16 bits"),
        ("group", None, {"packed": True, "bits": 4}, rf"{BACK}, .* \(.* 4 bits, scales of "
         "blocks of 1 x 16, activations of 16 bits"),
        ("channel", TOKENS, {"config": {"quant_method": "gptq"}}, "quant_method 'gptq' is not read"
         ".*: give the model as it was before that"),
    ],
    ids=["W8A8", "one scale", "W8A16", "W4A16", "gptq"],
)  # fmt: skip
def test_models_of_others_are_named(
    tmp_path: Path, strategy, activations, more, said, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    folder = of_others(tmp_path / "x", strategy, activations, **more)
    assert_quantised(folder, said, capsys, tmp_path)
    (folder / "config.json").unlink()  # a file by itself is known by its codes and scales
    if "quant_method" not in more.get("config", {}):
        assert_quantised(folder, "say which rows and columns of a weight share", capsys, tmp_path)


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("method", "settings"),
    [("compressed-tensors", None), ("compressed-tensors", "left out"), ("blockwise_int8", None)],
)
def test_activations_of_16_bits_do_not_become_8(
    tmp_path: Path, method: str, settings: Any
) -> None:
    """W8A16: the files ask for no quantisation of activations."""
    nn = pytest.importorskip("torch.nn")
    from cupyattn.interop.torch import load_int8

    folder = of_others(tmp_path / "x", "channel", None, shape=(24, 64))
    if settings == "left out":
        config = json.loads((folder / "config.json").read_text())
        (group,) = config["quantization_config"]["config_groups"].values()
        del group["input_activations"]
        (folder / "config.json").write_text(json.dumps(config))
    if method == "blockwise_int8":
        arrays = {
            "a.fc.weight": np.ones((24, 64), np.int8), "other.bias": np.ones(3, np.float32),
            "a.fc.weight_scale_inv": np.ones((1, 1), np.float32),
        }  # fmt: skip
        write(folder / "model.safetensors", arrays)
        config = {"quant_method": method, "weight_block_size": [128, 128]}
        config["activation_scheme"] = settings
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    fc = nn.ModuleDict({"fc": nn.Linear(64, 24, bias=False)})
    module = nn.ModuleDict({"a": fc, "other": nn.ParameterDict({"bias": nn.Parameter(_ones(3))})})
    with pytest.raises(UnsupportedError, match="of 'a.fc.weight' must have 16 bits, but"):
        load_int8(module, folder)
    assert type(fc["fc"]) is nn.Linear
    dequantize(folder, tmp_path / "back")


def _ones(count: int) -> Any:
    return pytest.importorskip("torch").ones(count)


# ---- patterns ------------------------------------------------------------------------------------


def test_a_pattern_that_fits_no_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "model.safetensors", model())
    first = next(iter(open_checkpoint(path).tensors))
    wrong = ca.Int8Config(fp32_patterns=("visual_*", "blocks.9.*"))
    said = (
        r"'blocks.9.\*' of fp32_patterns \(--fp32-pattern\) is the name of no tensor, the first is "
        rf"'{first}': correct it, or leave it out"
    )
    with pytest.raises(ValueError, match=said):
        analyze(path, wrong)
    known = analyze(path, SMALL)
    for options in ({}, {"analysis": known}):
        with pytest.raises(ValueError, match=said):
            convert(path, tmp_path / "out", wrong, **options)
    arguments = [str(path), "--fp32-pattern", "blocks.9.*"]
    assert cli.main(["analyze", *arguments]) == 2
    assert cli.main(["convert", *arguments, "--output", str(tmp_path / "out")]) == 2
    assert "is the name of no tensor" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert analyze(path, ca.Int8Config(fp32_patterns=("visual_*", "?ime*"))).tensors


# ---- the VAE of a pipeline -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "vae.decoder.mid_block.attentions.0.to_q.weight",
        "first_stage_model.decoder.mid.proj.weight",
        "decoder.mid_block.attentions.0.to_out.0.weight", "decoder.up_blocks.0.0.attn.to_q.weight",
        "encoder.down_blocks.2.attentions.0.to_k.weight", "decoder.up.1.attn.0.q.weight",
        "audio_vae.decoder.layers.0.fc.weight", "pipeline.vae.post.proj.weight",
        "decoder.block_out.attentions.0.to_q.weight",
    ],
)  # fmt: skip
def test_layers_of_a_vae(name: str) -> None:
    assert role_of(name, (512, 512)) == "vae"


@pytest.mark.parametrize(
    "name",
    [
        "decoder.block.0.layer.0.SelfAttention.q.weight",  # T5
        "encoder.layers.3.self_attn.q_proj.weight", "model.decoder.layers.0.fc1.weight",
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight",  # of a U-Net
        "down_blocks.1.attentions.0.proj_in.weight", "transformer_blocks.0.attn.to_q.weight",
    ],
)  # fmt: skip
def test_layers_of_no_vae(name: str) -> None:
    assert role_of(name, (512, 512)) in ("attention", "feed_forward", "linear")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("form", ["one file", "the folder of a VAE", "by its class"])
def test_the_vae_of_a_pipeline_keeps_16_bits(tmp_path: Path, form: str, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    vae = {
        "decoder.mid_block.attentions.0.to_q.weight": (96, 96),
        "decoder.up_blocks.0.attentions.0.to_out.0.weight": (96, 96),
        "encoder.mid_block.attentions.0.to_v.weight": (96, 96),
        "decoder.conv_in.weight": (96, 8, 3, 3),
    }  # fmt: skip
    if form == "by its class":
        vae = {f"decoder.transformer_blocks.{i}.attn.to_q.weight": (96, 96) for i in range(3)}
    prefix = "vae." if form == "one file" else ""
    arrays = {f"{prefix}{n}": rng.standard_normal(shape) for n, shape in vae.items()}
    if form == "one file":
        arrays["transformer.blocks.0.attn.to_q.weight"] = rng.standard_normal((96, 96))
    write(tmp_path / "x" / "x.safetensors", {n: a.astype(dtype) for n, a in arrays.items()})
    if form == "by its class":
        (tmp_path / "x" / "config.json").write_text('{"_class_name": "AutoencoderRAE"}')
    done = convert(tmp_path / "x", tmp_path / "out", SMALL)
    written = open_checkpoint(tmp_path / "out").tensors
    kept = {n: written[f"{prefix}{n}"].dtype for n in vae}
    assert set(kept.values()) == {"BF16" if dtype == np.float32 else "F16"}, kept
    assert done.analysis is not None
    reasons = {t.name: t.reason for t in done.analysis.tensors}
    assert reasons[f"{prefix}{next(iter(vae))}"].startswith("vae: errors of its decoder")
    if form == "one file":
        assert written["transformer.blocks.0.attn.to_q.weight"].dtype == "I8"
