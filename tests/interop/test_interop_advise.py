"""`cupyattn advise`: predictions beside the record, and what the command reads and refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from cupyattn import cli  # noqa: E402
from cupyattn.diffusion import advice  # noqa: E402
from cupyattn.diffusion.work import MASKED, Work, kind_of_attention, work_of  # noqa: E402
from experiments._harness import recording  # noqa: E402
from experiments._harness.whole_families import FAMILIES  # noqa: E402
from experiments.tuning import advice_rates  # noqa: E402
from tests.support.marks import slow_unless  # noqa: E402

#: Largest relative difference of a predicted gain from the measured one, in models that rates are
#: fitted to or not, and in pairs of models that are held out, as docs/INTEROP.md says; more for the
#: model that is predicted worst.
MOST, MOST_OF_PAIRS, WORST = 0.08, 0.08, "LTX"
MOST_OF_WORST, MOST_OF_ITS_PAIRS = 0.115, 0.12
#: Grid of Wan's 32,760 tokens, in a record that no rate was fitted to.
WAN_GRID = (21, 30, 52)


@pytest.mark.slow
def test_the_rates_are_what_the_record_says() -> None:
    assert advice.FILE.read_text(encoding="utf-8") == advice_rates.text(), (
        "run python -m experiments.tuning.advice_rates"
    )


@pytest.mark.parametrize(
    "family", slow_unless(lambda _, family: family in advice_rates.HELD_OUT, FAMILIES)
)
def test_a_predicted_gain_is_near_the_measured_one(family: str) -> None:
    """In families that were held out, and no part that gains a twentieth is declined."""
    (found,) = advice_rates.predictions(family).values()
    most = MOST_OF_WORST if family == WORST else MOST
    assert len(advice_rates.HELD_OUT) == 3 and len(found) == 9
    for part, (said, was) in found.items():
        assert said >= advice.LEAST_GAIN or was < 1.05, f"{part}: declined, {was:.3f} measured"
        assert abs(said / was - 1) <= most, f"{part}: {said:.3f} predicted, {was:.3f} measured"


@pytest.mark.slow
def test_errors_of_each_pair_of_families_that_is_held_out() -> None:
    found = advice_rates.worst_of_pairs()
    assert len(found) == 36
    for pair, (error, _) in found.items():
        assert error < (MOST_OF_ITS_PAIRS if WORST in pair else MOST_OF_PAIRS), pair


def test_rates_of_attention_are_those_of_single_calls() -> None:
    """With a mask of keys torch's attention takes much longer, and ours a little."""
    plain, ours = advice_rates.single_calls(128, 4096, masked=False)
    masked, ours_masked = advice_rates.single_calls(128, 4096, masked=True)
    assert 1.6 < masked / plain < 1.75 and 1.0 < ours_masked["full"] / ours["full"] < 1.15
    assert plain > ours["full"] > ours["balanced"] >= ours["aggressive"]
    assert advice_rates.ratio_of_8_bit_pv(64, 4096) == 1.0  # the kernel without it is faster
    assert advice_rates.ratio_of_8_bit_pv(128, 16_384) < 0.96
    (of,) = advice.stored_rates().values()
    for kind, rate, our in (("head_dim 128, 4,096 keys", plain, ours),
                            ("head_dim 128, masked, 4,096 keys", masked, ours_masked)):  # fmt: skip
        assert of.attention[kind] == pytest.approx(rate, rel=1e-5)
        for accuracy, saved in of.saved_attention.items():
            assert of.attention[kind] - saved[kind] == pytest.approx(our[accuracy], rel=1e-4)


def test_every_kind_of_attention_has_a_rate() -> None:
    (of,) = advice.stored_rates().values()
    kinds = {
        kind_of_attention(head_dim, keys, cls)
        for head_dim in (40, 64, 96, 128, 256) for keys in (1, 77, 2300, 9000, 118_800)
        for cls in ("", *MASKED)
    }  # fmt: skip
    assert kinds == of.attention.keys() and len(kinds) == 12
    assert all(saved.keys() == kinds for saved in of.saved_attention.values())


#: Ways of records of a few blocks, by part: beside `native`, all are compiled.
BLOCKS = {
    "accelerated_models": ("native", {"linear": "linear layers", "attention": "attention"}),
    "diffusers_blocks": (
        "native, compiled",
        {"linear": "INT8 linear layers, compiled", "attention": "INT8 attention, compiled"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("record", BLOCKS)
def test_no_part_that_gained_a_twentieth_in_a_few_blocks_is_declined(record: str) -> None:
    """Of records that no rate was fitted to."""
    native, ways = BLOCKS[record]
    gained = []
    for row in recording.stored(record)["rows"]:
        family = FAMILIES["Wan 2.1 14B" if row["model"] == "Wan 14B" else row["model"]]
        config = {**family.shallow().config, **row.get("blocks", {})}
        grid = family.grid if row["tokens"] == family.tokens else WAN_GRID
        of = dataclasses.replace(family, config=config, grid=grid)
        assert of.tokens == row["tokens"]
        said = advice.advise(advice_rates.work(of), of.tokens, "balanced")
        measured = row.get("ways") or row["compared"]
        for part, way in ways.items():
            gain = seconds(measured[native]) / seconds(measured[way])
            if gain >= 1.05:
                gained.append(f"{row['model']}, {part}")
                assert said.replaces(part), f"{gained[-1]}: declined, {gain:.3f} measured"
    assert len(gained) >= 5


def seconds(way: dict[str, Any]) -> float:
    """Return the time of a pass in a record."""
    return way["seconds"] if "seconds" in way else median(map(sum, way["rounds"]))


def test_a_number_of_tokens_that_was_held_out() -> None:
    """One block of Wan 14B with 32,760 tokens, of a record that no rate was fitted to."""
    wan = FAMILIES["Wan 2.1 14B"].shallow()
    work = advice_rates.work(dataclasses.replace(wan, grid=WAN_GRID))
    (row,) = (r for r in recording.stored("diffusers_blocks")["rows"] if r["model"] == "Wan 14B")
    ways = row["ways"]
    native = ways["native, compiled"]["seconds"]
    said = advice.advise(work, row["tokens"], "balanced")
    assert row["tokens"] == 32_760 and row["tokens"] != wan.tokens
    for name, parts in (
        ("INT8 attention", ["attention"]), ("INT8 linear layers", ["linear"]),
        ("both INT8", ["linear", "attention"]),
    ):  # fmt: skip
        was = native / ways[f"{name}, compiled"]["seconds"]
        assert abs(said.gain(*parts) / was - 1) <= MOST, (name, said.gain(*parts), was)


def test_what_gains_too_little_or_was_not_measured_is_declined() -> None:
    family = FAMILIES["Wan 2.1 14B"].shallow()
    work = advice_rates.work(family)
    small = dataclasses.replace(work, width=128)
    assert advice.advise(small, 4096).refusal and not advice.advise(small, 4096).replaces("linear")
    assert advice.advise(work, 256).refusal.startswith("256 tokens are below 2,048, the")
    few = advice.Advice(1.0, {"linear": 0.3, "attention": 0.01})
    assert few.replaces("linear") and not few.replaces("attention")
    assert [row["replace"] for row in advice.as_rows(few)] == [True, False, True]
    least = advice.Advice(1.0, {"linear": 0.005, "attention": 0.01})
    assert not any(row["replace"] for row in advice.as_rows(least))
    with pytest.raises(ValueError, match="device must be h200, got 'a100'"):
        advice.advise(work, 4096, device="a100")


# ---- the command ---------------------------------------------------------------------------------


def config_of(name: str, tmp_path: Path, **config: Any) -> Path:
    family = FAMILIES[name].shallow()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": family.cls, **family.config, **config}))
    return path


def test_a_configuration_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_of("SD3.5 Large", tmp_path)
    record = tmp_path / "advice.json"
    given = ["advise", str(path), "--tokens", "4096", "--prompt", "333", "--json", str(record)]
    assert cli.main(given) == 0
    out = capsys.readouterr().out
    assert "On an H200 a compiled native pass of 4,096 tokens, beside 333 of the prompt, " in out
    assert "linear layers with" in out and "(head_dim 64), width 2,432" in out
    assert "Measured with graphs in a whole SD3.5 Large of 4,096 tokens" in out
    assert "The host may take longer" in out and "compile='graphs'" in out
    rows = json.loads(record.read_text())["balanced"]
    assert [row["part"] for row in rows] == ["linear", "attention", "both"]
    assert rows[2]["gain"] > rows[0]["gain"] > 1.1 and rows[0]["replace"]


def test_the_header_of_a_folder_gives_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=128,
        pooled_projection_dim=32, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr("cupyattn.cli.advise._made", None)
    assert cli.main(["advise", str(tmp_path / "model"), "--tokens", "4096"]) == 0
    out = capsys.readouterr().out
    assert "1 attention module with" in out
    assert "No advice: width 128 is below 1,024, the least" in out
    assert "measure with accelerate(pipe).compare(...) or cupyattn trial" in out


def test_attention_of_layers_that_make_more_than_queries_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of Flux 2, one block of each kind; its class was not measured."""
    config = {
        "_class_name": "Flux2Transformer2DModel", "num_layers": 1, "num_single_layers": 1,
        "num_attention_heads": 8, "axes_dims_rope": [32, 32, 32, 32], "joint_attention_dim": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["advise", str(tmp_path), "--tokens", "4096"]) == 0
    out = capsys.readouterr().out
    flops = 2 * 4 * (4096 + 512) ** 2 * 8 * 128
    assert f"2 attention modules with {flops / 1e12:.3g} TFLOP" in out
    assert "No such model was measured whole" in out


def work_of_one_block(cls: str, **config: Any) -> Work:
    with torch.device("meta"):
        model = getattr(diffusers, cls)(**config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    return work_of(shapes, {**model.config, "_class_name": cls}, 6144, 512)


def test_audio_is_left_out_since_its_tokens_are_unknown() -> None:
    """Attention between video and audio has layers of both."""
    said = work_of_one_block("LTX2VideoTransformer3DModel", num_layers=1)
    video, audio, tokens, prompt = 4096, 2048, 6144, 512
    own = 4 * video * video + 2 * video * 4 * video  # attn1 and ff
    crossing = 2 * video * video + 2 * video * audio + 2 * video * audio
    keys = 2 * prompt * (video * video + audio * audio)  # of both prompts
    assert said.linear == 2 * (tokens * (128 * video + own + crossing) + keys)
    assert said.attention == {
        "head_dim 128, 4,096 keys": 4 * tokens * tokens * video,
        "head_dim 128, 1,024 keys": 4 * tokens * prompt * video,
    }
    assert (said.layers, said.modules, said.left_out) == (17, 2, (13, 4))
    said = work_of_one_block("Kandinsky6Transformer3DModel", num_visual_blocks=1, num_text_blocks=1)
    assert (said.layers, said.modules, said.left_out) == (28, 4, (12, 4))


def test_the_command_says_that_audio_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"_class_name": "LTX2VideoTransformer3DModel", "num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    record = tmp_path / "advice.json"
    assert cli.main(["advise", str(tmp_path), "--tokens", "6144", "--json", str(record)]) == 0
    assert (
        "Left out: 13 linear layers and 4 attention modules of audio, whose tokens are not the "
        "video's"
    ) in capsys.readouterr().out
    assert json.loads(record.read_text())["left_out"] == {"layers": 13, "modules": 4}


def test_what_is_no_diffusion_transformer_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "transformer").mkdir()
    for config, message in (
        ('{"_class_name": "Nothing"}', "_class_name must be a model of diffusers"),
        ('{"_class_name": "DDIMScheduler"}', "must be a model of diffusers, got 'DDIMScheduler'"),
        ("[]", "holds no object"), ("", "config.json is no configuration of a model: Expecting"),
        ('{"_class_name": "UNet2DConditionModel", "block_out_channels": [32, 64, 64, 64]}',
         "UNet2DConditionModel is a U-Net, whose levels have different numbers of tokens"),
        ('{"_class_name": "SanaTransformer2DModel", "num_layers": 1}',
         "SanaTransformer2DModel has linear attention, which stays native"),
        ('{"_class_name": "FluxTransformer2DModel", "num_layers": "x"}',
         "diffusers makes no FluxTransformer2DModel of it: TypeError: 'str' object"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(config)
        assert cli.main(["advise", str(tmp_path), "--tokens", "4096"]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["advise", str(tmp_path / "config.json"), "--tokens", "0"]) == 2
    assert cli.main(["advise", str(tmp_path / "none"), "--tokens", "1"]) == 2
    # Not the config.json that lies beside it.
    assert f"there is no {str(tmp_path / 'none')!r}" in capsys.readouterr().err
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "config.json").rename(tmp_path / "transformer" / "config.json")
    for given in (tmp_path, tmp_path / "model_index.json"):
        assert cli.main(["advise", str(given), "--tokens", "4096"]) == 2
        error = capsys.readouterr().err
        assert "is the folder of a pipeline: give the folder of a model in it" in error
        assert str(tmp_path / "transformer") in error
    for config_, message in (({}, "none of attention_head_dim"),
                             ({"attention_head_dim": 64}, "no layer is named to_q")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            work_of({"blocks.0.ff.weight": (64, 64)}, config_, 4096, 512)
