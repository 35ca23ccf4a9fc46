"""`cupyattn.interop.torch.record`: what layers of a running model get, kept for calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.diffusion import Calibrations, Recording, calibrate

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from cupyattn.interop import torch as interop  # noqa: E402
from cupyattn.interop.torch.recorder import MIN_STEPS  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")

HEADS, HEAD_DIM, CHANNELS = 2, 8, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.out = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Any) -> Any:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Blocks of attention alone, which a loop calls for one step after the other."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(count))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x


def run(model: Any, steps: int, length: int = 40) -> None:
    with torch.no_grad():
        for step in range(steps):
            model(torch.full((1, length, CHANNELS), 1.0 + step))


def recorded(number: int = 3, count: int = 4, **options: Any) -> Any:
    model = Model(count)
    with interop.record(model, **options) as recorder:
        run(model, number)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return recorder


def test_operands_and_inputs_are_those_that_the_layers_got() -> None:
    model = Model(1)
    seen: list[str] = []
    with interop.record(model, advance=seen.append) as recorder, torch.no_grad():
        x = torch.randn(1, 100, CHANNELS)
        y = model(x)
    found = recorder.recording
    (call,) = found.calls
    q, k, v = model.blocks[0].qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    assert call.layer == "blocks.0" and call.timestep is None
    for kept, given in zip((call.q, call.k, call.v), (q, k, v), strict=True):
        assert np.array_equal(kept, given.detach().numpy())
    assert np.array_equal(found.inputs["blocks.0.qkv"], x[0, ::2].numpy())
    assert seen == ["blocks.0.qkv", "blocks.0", "blocks.0.out"]
    with torch.no_grad():
        assert torch.equal(model(x), y)


def test_layers_and_steps_that_are_chosen() -> None:
    found = recorded(5, layers=r"blocks\.[02]$", steps=[1, 3]).recording
    assert found.layers == ("blocks.0", "blocks.2") and len(found) == 4 and not found.inputs
    assert len(recorded(5, steps=2).recording.of("blocks.1")) == 2


@pytest.mark.parametrize(("share", "steps", "layers"), [(0.6, 8, 4), (0.2, 4, 3), (0.05, 2, 2)])
def test_what_is_kept_is_spread_evenly_when_memory_ends(
    share: float, steps: int, layers: int
) -> None:
    everything = recorded(16, layers=r"blocks\.\d$", count=8).recording
    nbytes = sum(3 * call.q.nbytes for call in everything.calls)
    most = int(share * nbytes)
    recorder = recorded(16, layers=r"blocks\.\d$", count=8, max_bytes=most)
    kept = recorder._kept["attention"]
    assert most / 4 < sum(k.nbytes for k in kept) <= most
    places = sorted({k.step for k in kept})
    assert len(places) >= 2 and len({b - a for a, b in zip(places, places[1:], strict=False)}) == 1
    numbers = sorted({k.number for k in kept})
    assert len({b - a for a, b in zip(numbers, numbers[1:], strict=False)}) <= 1
    assert len(places) >= min(steps, MIN_STEPS) / 2
    assert len(numbers) >= layers and "one step in" in repr(recorder)


def test_a_file_of_a_recording_is_read_by_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(2)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):  # rows so different that scales of channels win
            layer.weight.data *= torch.logspace(0, -1, layer.out_features)[:, None]
    with interop.record(model) as recorder:
        run(model, 3, length=130)
    path = tmp_path / "recorded.safetensors"
    recorder.save(path)
    found, kept = Recording.load(path), recorder.recording
    assert found.layers == kept.layers == ("blocks.0", "blocks.1") and len(found) == 6
    assert all(np.array_equal(a.q, b.q) for a, b in zip(found.calls, kept.calls, strict=True))
    assert "6 calls of 2 layers" in repr(found) and found.source == "Model"
    scales_q, scales_k = ca.calibrate_quantization_scales(path, 100.0)
    one = ca.calibrate_quantization_scales(found.of("blocks.1"), 100.0)
    largest = max(float(abs(call.q).max()) for call in kept.calls)
    assert scales_q.shape == scales_k.shape == (1, HEADS)
    assert float(scales_q.max()) == pytest.approx(largest / 127)
    of_layers = calibrate(path, 100.0)
    assert np.array_equal(of_layers["blocks.1"].k_scale, one.k_scale)
    of_layers.save(tmp_path / "scales.safetensors")
    again = Calibrations.load(tmp_path / "scales.safetensors")
    assert [*again] == ["blocks.0", "blocks.1"] and again["blocks.0"].source == "Model blocks.0"
    assert np.array_equal(again["blocks.1"].q_scale, one.q_scale)

    out = tmp_path / "again.safetensors"
    assert cli.main(["calibrate", str(path), "--output", str(out), "--percentile", "100"]) == 0
    assert "scales of 2 layers are in" in capsys.readouterr().out
    assert np.array_equal(Calibrations.load(out)["blocks.1"].q_scale, one.q_scale)

    checkpoint = tmp_path / "model.safetensors"
    from safetensors.torch import save_file

    save_file(model.state_dict(), str(checkpoint))
    words = [str(checkpoint), "--activations", str(path), "--min-elements", "100",
             "--min-sqnr", "5"]  # fmt: skip
    assert cli.main(["analyze", *words]) == 0
    assert "in 4 of 4 layers" in capsys.readouterr().out
    assert cli.main(["convert", *words, "--output", str(tmp_path / "int8")]) == 0
    said = capsys.readouterr().out
    assert "Scales by channel: " in said and "on the activations given" in said
    assert '"strategy": "channel"' in (tmp_path / "int8" / "config.json").read_text()


def test_a_pipelines_steps_are_those_of_its_scheduler(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from tests.interop import diffusers_cases as cases

    pipe = cases.make("flux", torch.bfloat16)
    native = cases.generate(pipe, "flux")
    with interop.record(pipe, layers="attn$", steps=3) as recorder:
        assert torch.equal(cases.generate(pipe, "flux"), native)
    found = recorder.recording
    assert found.sigmas is not None and found.sigmas.shape == (4,)
    assert sorted({call.timestep for call in found.calls}) == [0, 2, 3]
    assert all(name.startswith("transformer.") for name in found.layers) and len(found.layers) == 2
    assert found.calls[0].q.dtype.name == "bfloat16"
    scales = calibrate(found, num_bins=2)
    assert {one.bins.count for one in scales.values()} == {2}
    recorder.save(tmp_path / "x.safetensors")
    assert np.array_equal(Recording.load(tmp_path / "x.safetensors").sigmas, found.sigmas)
    with pytest.raises(ValueError, match=r"^the recording is of 4 steps, sigmas has 7: leave sig"):
        ca.calibrate_quantization_scales(found.of(found.layers[0]), sigmas=np.arange(7.0, 0, -1))
    other = found.sigmas * [1, 1, 1.5, 1]
    with pytest.raises(ValueError, match=r"^the recording has noise [\d.]+ at step 2, sigmas has"):
        ca.calibrate_quantization_scales(found.of(found.layers[0]), sigmas=other)
    ca.calibrate_quantization_scales(found.of(found.layers[0]), sigmas=found.sigmas)
    with (
        pytest.raises(ValueError, match=r"^the recording is of a schedule of 4 steps, this run "),
        recorder,
    ):
        cases.generate(pipe, "flux", steps=3)
    with (
        pytest.raises(ValueError, match=r"^steps names step 9, this run has 0 to 3: leave it out$"),
        interop.record(pipe, steps=[0, 9]),
    ):
        cases.generate(pipe, "flux")


# ---- one sentence --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": "attn9"}, ValueError, "'attn9' of layers is found in the name of no module"),
        ({"layers": "("}, ValueError, "layers must be a regular expression"),
        ({"steps": []}, ValueError, "steps must be indices of steps"),
        ({"steps": "all"}, TypeError, "steps must be a whole number"),
        ({"advance": 3}, TypeError, "advance must be a function of a layer's name, got 3"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be 1 or more"),
        ({"max_bytes": 100}, ValueError, "one call of .* takes .*, more than max_bytes=100"),
        # A call of each kind stays to the end: of linear layers and of attention.
        ({"max_bytes": 5000}, ValueError,
         "one call of blocks.0 and one of blocks.0.qkv takes 10.0 KiB, more than max_bytes=5000"),
    ],
)
def test_bad_arguments_get_a_sentence(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^{message}") as caught:
        recorded(1, **options)
    assert "\n" not in str(caught.value)


def test_a_recorder_stands_for_its_recording() -> None:
    recorder = recorded(2, layers=r"blocks\.\d$")
    assert calibrate(recorder).keys() == {"blocks.0", "blocks.1", "blocks.2", "blocks.3"}
    scales_q, scales_k = ca.calibrate_quantization_scales(recorder)
    of_recording = ca.calibrate_quantization_scales(recorder.recording)
    assert np.array_equal(scales_q, of_recording.q_scale)
    assert np.array_equal(scales_k, of_recording.k_scale)


def test_models_that_cannot_be_recorded_say_why() -> None:
    model = Model(1)
    cases: list[tuple[Any, type[Exception], str]] = [
        (torch.compile(model, backend="eager"), ValueError, "is compiled"), (3, TypeError, "must"),
        (interop.replace_linear_with_int8(
            nn.Sequential(nn.Linear(256, 256)), backend="mirror"), ValueError, "has replaced"),
    ]  # fmt: skip
    for given, error, message in cases:
        with pytest.raises(error, match=message):
            interop.record(given)
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="^Model is compiled, and runs no code"):
        interop.record(model)


def test_a_recorder_that_saw_nothing_says_so() -> None:
    with pytest.raises(ValueError, match="^nothing was recorded: no chosen layer ran"):
        recorded(0)
    recorder = interop.record(Model(1))
    with pytest.raises(ValueError, match="^nothing was recorded: run the model within"):
        recorder.save("x.safetensors")
    with pytest.raises(KeyError), recorder:  # the model's own error is the one that is seen
        raise KeyError


def test_recordings_that_mean_nothing_get_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = recorded(1).recording
    with pytest.raises(ValueError, match=r"^the recording has no attention of 'x', it has blocks"):
        found.of("x")
    with pytest.raises(ValueError, match="needs a timestep"):
        calibrate(found, num_bins=2)
    with pytest.raises(TypeError, match="^recording must be one of"):
        calibrate(3)  # type: ignore[arg-type]
    call = found.calls[0]
    other = type(call)("other", None, call.q[:, :1], call.k[:, :1], call.v[:, :1])
    with pytest.raises(ValueError, match="^the recording has layers of different heads, such as"):
        ca.calibrate_quantization_scales(Recording([call, other]))
    only_linear = Recording(inputs=found.inputs)
    for function in (calibrate, ca.calibrate_quantization_scales):
        with pytest.raises(ValueError, match="^the recording has no calls of attention"):
            function(only_linear)
    path = tmp_path / "x.safetensors"
    ca.calibrate_quantization_scales(found).save(path)
    with pytest.raises(ValueError, match="holds no usable recording: its kind is 'cupyattn.cal"):
        Recording.load(path)
    found.save(path)
    with pytest.raises(ValueError, match="holds no usable calibrations: its kind is"):
        Calibrations.load(path)
    for words, message in (
        (["--bins", "2"], "needs a timestep"), (["--percentile", "0.99"], "percentile is in per"),
    ):  # fmt: skip
        out = str(tmp_path / "y.safetensors")
        assert cli.main(["calibrate", str(path), "--output", out, *words]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1


def test_a_recording_of_another_model_is_refused_by_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    recorded(1).save(tmp_path / "x.safetensors")
    save_file({"a.weight": torch.ones(128, 128)}, str(tmp_path / "other.safetensors"))
    words = [str(tmp_path / "other.safetensors"), "--activations", str(tmp_path / "x.safetensors")]
    assert cli.main(["analyze", *words]) == 2
    said = capsys.readouterr().err
    assert "has inputs of no linear layer of other.safetensors" in said and said.count("\n") == 1
