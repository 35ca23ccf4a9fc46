"""`accelerate` with saved codes: what `save` writes, what `checkpoint=` takes, what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from cupyattn.interop import diffusers as interop  # noqa: E402 - imports diffusers
from cupyattn.interop import restore  # noqa: E402
from cupyattn.interop import torch as interop_torch  # noqa: E402
from cupyattn.interop.torch import models  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402
from tests.interop.test_accelerate import EAGER, run, transformer  # noqa: E402

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
        with pytest.raises(RuntimeError, match=r"native since restore\(\), so that there is noth"):
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


def test_saving_without_codes_is_refused(tmp_path: Path) -> None:
    model = transformer()
    with interop.accelerate(model, include=r"attn$", **EAGER) as handle:
        assert len(handle._handle_attention.replaced) == 1
        with pytest.raises(ValueError, match="no linear layer is INT8"):
            handle.save(tmp_path / "int8")
