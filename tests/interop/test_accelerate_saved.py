"""`accelerate` with saved codes: what `save` writes, what `checkpoint=` takes, what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from cupyattn.checkpoints import choosing, dequantize  # noqa: E402
from cupyattn.checkpoints.source import open_checkpoint  # noqa: E402
from cupyattn.interop import diffusers as interop  # noqa: E402 - imports diffusers
from cupyattn.interop import restore  # noqa: E402
from cupyattn.interop import torch as interop_torch  # noqa: E402
from cupyattn.interop.torch import accelerated_parts, models  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402
from tests.interop.test_accelerate import EAGER, record, run, transformer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")


def test_saved_codes_give_the_same_bits_and_nothing_is_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformer()
    with interop.accelerate(model, **EAGER) as handle:
        expected = run(model)
        folder = handle.save(tmp_path / "int8")
        with pytest.raises(FileExistsError):
            handle.save(folder)
    monkeypatch.delattr(models, "quantised")
    with interop.accelerate(model, checkpoint=folder, **EAGER) as handle:
        assert torch.equal(run(model), expected)
        assert "codes of int8" in str(handle.report())
    loaded = interop_torch.load_int8(diffusers.SD3Transformer2DModel, folder)
    with interop.replace_attention_with_int8(loaded, policy="precision"):
        assert torch.equal(run(loaded), expected)


def test_a_pipeline_is_saved_by_components(tmp_path: Path) -> None:
    pipe = cases.make("sd3")
    with interop.accelerate(pipe, **EAGER) as handle:
        expected = cases.generate(pipe, "sd3", 1)
        handle.save(tmp_path / "int8")
    assert (tmp_path / "int8" / "transformer" / "config.json").exists()
    handle = interop.accelerate(pipe, checkpoint=tmp_path / "int8", **EAGER)
    assert torch.equal(cases.generate(pipe, "sd3", 1), expected)
    restore(pipe)
    handle.restore()


def test_no_model_is_saved_if_the_folder_of_another_is_taken(tmp_path: Path) -> None:
    pipe = cases.make("wan")
    pipe.transformer, pipe.transformer_2 = transformer(), transformer()
    taken = tmp_path / "transformer_2"
    taken.mkdir()
    (taken / "mine.txt").touch()
    with interop.accelerate(pipe, **EAGER) as handle:
        with pytest.raises(FileExistsError, match="transformer_2 exists already"):
            handle.save(tmp_path)
        assert [*tmp_path.iterdir()] == [taken]


@pytest.mark.parametrize("may_rotate", [True, False])
def test_layers_with_outliers_come_back_rotated_or_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_rotate: bool
) -> None:
    """Planted in what a layer takes, and seen in the activations that were recorded."""
    monkeypatch.setattr(choosing, "ROTATED_LIMIT", 1.3 if may_rotate else 0)
    model, outliers = transformer(), "transformer_blocks.0.ff.net.2"
    model.get_submodule("transformer_blocks.0.ff.net.0.proj").weight[[3, 40, 300]] *= 30
    with interop_torch.record(model) as recorder:
        native = run(model)
    given = recorder.recording.inputs
    with interop.accelerate(model, activations=given, exclude="context|add", **EAGER) as handle:
        expected, report, layer = run(model), handle.report(), model.get_submodule(outliers)
        assert (layer.strategy, layer.rotate) == (
            ("channel", "hadamard") if may_rotate else ("block", None)
        )
        assert ("rotated" in report.layers[outliers]) == may_rotate
        assert model.get_submodule("transformer_blocks.0.attn.to_q").strategy == "channel"
        if may_rotate:
            assert report.scales[""].startswith("scales by channel: rotated in 1 of")
        else:
            assert report.scales[""].endswith(f"times as much on the activations of {outliers}")
        assert f"\n{report.scales['']}\n" in str(report)
        handle.save(tmp_path / "int8")
    assert torch.equal(run(model), native)
    with interop.accelerate(model, checkpoint=tmp_path / "int8", **EAGER) as handle:
        assert torch.equal(run(model), expected)
        assert handle.report().layers[outliers].endswith(", rotated") == may_rotate
        dequantize(tmp_path / "int8", tmp_path / "back")
        back = open_checkpoint(tmp_path / "back").read(f"{outliers}.weight")
        weight = model.get_submodule(outliers).weight
        assert (torch.tensor(back) - weight).norm() <= 1e-6 * weight.norm()
    loaded = interop_torch.load_int8(diffusers.SD3Transformer2DModel, tmp_path / "int8")
    with interop.replace_attention_with_int8(loaded, policy="precision"):
        assert torch.equal(run(loaded), expected)


def test_codes_of_other_weights_are_refused(tmp_path: Path) -> None:
    model = transformer()
    with interop.accelerate(model, **EAGER) as handle:
        handle.save(tmp_path / "int8")
    with torch.no_grad():  # a fine-tune, or an adapter that was fused
        layer = model.transformer_blocks[0].ff.net[2]
        layer.weight += 0.02 * layer.weight.std() * torch.randn_like(layer.weight)
    native = run(model)
    with pytest.raises(ValueError, match=r"ff\.net\.2\.weight' is of another weight, \d"):
        interop.accelerate(model, checkpoint=tmp_path / "int8", **EAGER)
    assert torch.equal(run(model), native)
    half = transformer().bfloat16()
    half.load_state_dict(transformer().state_dict())
    with interop.accelerate(half, **EAGER) as handle:
        handle.save(tmp_path / "of 16 bits")
    interop.accelerate(half.float(), checkpoint=tmp_path / "of 16 bits", **EAGER)


def test_codes_of_no_layer_are_refused(tmp_path: Path) -> None:
    """Rather than to leave the linear layers native, which the caller would have to read."""
    other = interop_torch.accelerate(torch.nn.Sequential(torch.nn.Linear(128, 128)), **EAGER)
    other.save(tmp_path / "int8")
    model = transformer()
    native = run(model)
    with pytest.raises(ValueError, match=r"has codes of 0\.weight, and of no layer that is to be"):
        interop.accelerate(model, checkpoint=tmp_path / "int8", **EAGER)
    assert torch.equal(run(model), native)


def test_each_of_two_models_gets_its_own_codes(tmp_path: Path) -> None:
    pipe = cases.make("wan")
    torch.manual_seed(1)
    two = [diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=32, in_channels=16,
        out_channels=16, text_dim=32, freq_dim=32, ffn_dim=128, num_layers=1, rope_max_seq_len=32,
    ) for _ in range(2)]  # fmt: skip
    pipe.register_modules(transformer=two[0], transformer_2=two[1])
    with interop.accelerate(pipe, **EAGER) as handle:
        codes = [m.blocks[0].ffn.net[2].weight_codes for m in two]
        handle.save(tmp_path / "both")
    with interop.accelerate(two[0], **EAGER) as handle:
        handle.save(tmp_path / "first")
    with pytest.raises(ValueError, match="first has no folder 'transformer'"):
        interop.accelerate(pipe, checkpoint=tmp_path / "first", **EAGER)
    with interop.accelerate(pipe, checkpoint=tmp_path / "both", **EAGER):
        found = [m.blocks[0].ffn.net[2].weight_codes for m in two]
        assert all(map(torch.equal, found, codes)) and not torch.equal(*codes)
    shutil.rmtree(tmp_path / "both" / "transformer")
    with pytest.raises(ValueError, match=r"'transformer': .*exclude='\^transformer\[\.\]'"):
        interop.accelerate(pipe, checkpoint=tmp_path / "both", **EAGER)
    with interop.accelerate(
        pipe, checkpoint=tmp_path / "both", exclude="^transformer[.]", **EAGER
    ) as handle:
        assert {name.partition(".")[0] for name in handle.report().layers} == {"transformer_2"}


def test_a_device_is_read_twice_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyattn.interop.torch import writing

    reads: Counter[str] = Counter()
    own = writing._Codes.read

    def counted(self: Any, name: str) -> Any:
        reads[name] += 1
        return own(self, name)

    monkeypatch.setattr(writing._Codes, "read", counted)
    with interop.accelerate(transformer(), **EAGER) as handle:
        handle.save(tmp_path / "int8")
    assert set(reads.values()) == {2}


def test_after_restore_it_says_so_and_saves_nothing(tmp_path: Path) -> None:
    pipe = cases.make("sd3")
    handle = interop.accelerate(pipe, **EAGER)
    assert "restored" not in handle.report().lines[0]
    handle.restore()
    assert handle.report().lines[0].endswith("; restored since")
    again = interop.accelerate(pipe, **EAGER)
    restore(pipe)  # without the handle
    attention = interop.accelerate(pipe, include=r"attn$", **EAGER)
    restore(pipe)
    for one in (handle, again):
        with pytest.raises(ValueError, match=r"no codes to save: after restore\(\)"):
            one.save(tmp_path / "int8")
    assert not (tmp_path / "int8").exists()
    for one in (handle, again, attention):
        assert one.report().lines[0].endswith("; restored since")
        with pytest.raises(RuntimeError, match=r"native since restore\(\), or belongs to"):
            one.compare(prompt="")


def test_a_model_that_is_there_twice_is_refused() -> None:
    pipe = cases.make("wan")
    pipe.register_modules(transformer_2=pipe.transformer)
    with pytest.raises(ValueError, match="transformer and transformer_2 of WanPipeline are the sa"):
        interop.accelerate(pipe, **EAGER)
    pipe.register_modules(transformer=None, transformer_2=None)
    with pytest.raises(ValueError, match="WanPipeline has no model that takes a timestep"):
        interop.accelerate(pipe, **EAGER)


def test_offloaded_weights_are_neither_saved_nor_compared(tmp_path: Path) -> None:
    hooks = pytest.importorskip("accelerate")
    pipe = cases.make("sd3")
    handle = interop.accelerate(pipe, **EAGER)
    hooks.cpu_offload(pipe.transformer, torch.device("cpu"))
    with pytest.raises(ValueError, match="remove its hooks, save, then offload again"):
        handle.save(tmp_path / "int8")
    assert not (tmp_path / "int8").exists()
    with pytest.raises(ValueError, match="remove its hooks, compare, then offload again"):
        handle.compare(prompt="")


def test_a_model_that_is_moved_as_a_whole_has_the_record_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks = pytest.importorskip("accelerate")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(accelerated_parts, "nearest", lambda cls, width: record())
    model = transformer()
    assert accelerated_parts.part_of("", model).record is None  # on the host
    hooks.cpu_offload_with_hook(model, torch.device("cuda", 0))
    assert accelerated_parts.part_of("", model).record == record()


def test_a_model_that_is_moved_as_a_whole_is_saved_and_not_compared(tmp_path: Path) -> None:
    hooks = pytest.importorskip("accelerate")
    pipe = cases.make("sd3")
    native = cases.generate(pipe, "sd3", 1)
    hooks.cpu_offload_with_hook(pipe.transformer, torch.device("cpu"))
    with interop.accelerate(pipe, "balanced", **EAGER) as handle:
        assert not torch.equal(cases.generate(handle, "sd3", 1), native)
        handle.save(tmp_path / "int8")
        with pytest.raises(ValueError, match="moved to the device in each call, and native"):
            handle.compare(prompt="")
    assert torch.equal(cases.generate(pipe, "sd3", 1), native)


KILLED = """
import os, signal, sys
from cupyattn.interop.torch import accelerate
from torch import nn

model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)))
nn.init.constant_(model[0].weight, 1), nn.init.eye_(model[1].weight), nn.init.eye_(model[2].weight)
handle = accelerate(model, compile=False, log=None)
seen = []

def advance(name):
    seen.append(name)
    if len(seen) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

handle.save(sys.argv[1], advance=advance)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills itself by a signal of POSIX")
def test_a_save_that_is_killed_leaves_no_checkpoint_and_is_gone_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "int8"

    def run(when: int) -> int:
        given = [sys.executable, "-c", KILLED, str(folder), str(when)]
        return subprocess.run(given, check=False, capture_output=True, timeout=120).returncode

    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(3)))
    torch.nn.init.constant_(model[0].weight, 1)
    torch.nn.init.eye_(model[1].weight), torch.nn.init.eye_(model[2].weight)
    for when in (1, 4, 8, 12):  # while it writes, and while it reads back
        assert run(when) == -signal.SIGKILL and not folder.exists()
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            interop_torch.accelerate(model, checkpoint=folder, **EAGER)
        with pytest.raises(ValueError, match=r"holds no \.safetensors files"):
            interop_torch.accelerate(model, checkpoint=tmp_path / "int8.partial", **EAGER)
    assert run(0) == 0 and [*tmp_path.iterdir()] == [folder]
    with interop_torch.accelerate(model, checkpoint=folder, **EAGER) as handle:
        assert len(handle.report().layers) == 3


def test_saving_without_codes_is_refused(tmp_path: Path) -> None:
    model = transformer()
    with interop.accelerate(model, include=r"attn$", **EAGER) as handle:
        assert len(handle._handle_attention.replaced) == 1
        with pytest.raises(ValueError, match="no linear layer is INT8"):
            handle.save(tmp_path / "int8")
