"""Convert a model to INT8 and back: the written files, which are whole, and the refusals."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import tracemalloc
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.arrays.kinds import as_float64
from cupyattn.checkpoints import analyze, convert, dequantize, open_checkpoint
from cupyattn.quant import weight_error
from tests.checkpoints.checkpoint_files import BF16, SMALL, content, model, source, tensors, write

conversion = sys.modules["cupyattn.checkpoints.conversion"]
writer = sys.modules["cupyattn.checkpoints.writer"]


# ---- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("export", ["compressed-tensors", "deepseek"])
def test_there_and_back(tmp_path: Path, dtype: Any, export: str) -> None:
    arrays = model(dtype=dtype, width=200)
    path = source(tmp_path / "model", arrays)
    done = convert(path, tmp_path / "int8", SMALL, export=export)
    found = tensors(tmp_path / "int8")
    suffix = "weight_scale" if export == "compressed-tensors" else "weight_scale_inv"
    scales_of = {n: f"{n.removesuffix('.weight')}.{suffix}" for n in arrays}
    quantised = [n for n in arrays if scales_of[n] in found]
    assert quantised == [n for n in arrays if "to_query.weight" in n or "feed_forward" in n]
    for name, w in arrays.items():
        scales = found.pop(scales_of[name], None)
        out = found.pop(name)
        if name in quantised:
            codes, expected = ca.weight_quant(w)
            assert out.tobytes() == codes.tobytes() and scales.tobytes() == expected.tobytes()
        elif dtype == np.float32 and ("small" in name or name in ("patch.weight", "unused.weight")):
            assert out.tobytes() == w.astype(BF16).tobytes()
        else:
            assert out.dtype == w.dtype and out.tobytes() == w.tobytes()
    assert not found and done.written and done.nbytes == sum(done.files.values())

    dequantize(tmp_path / "int8", tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert {n: (a.dtype, a.shape) for n, a in back.items()} == {
        n: (a.dtype, a.shape) for n, a in arrays.items()
    }
    for name, w in arrays.items():
        if name in quantised:
            bound = weight_error(w, ca.weight_quant(w)[1], out_dtype=w.dtype.name)
            assert (np.abs(as_float64(back[name]) - as_float64(w)) <= bound).all()
        elif dtype == np.float32 and w.dtype == np.float32:
            np.testing.assert_allclose(back[name], w, rtol=2**-8)
        else:
            assert back[name].tobytes() == w.tobytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {"width": 72}
    assert (tmp_path / "back" / "LICENSE").read_text() == "MIT"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_type_that_is_asked_for(tmp_path: Path, dtype: str) -> None:
    convert(source(tmp_path / "model"), tmp_path / "int8", SMALL)
    dequantize(tmp_path / "int8", tmp_path / "back", dtype=dtype)
    found = tensors(tmp_path / "back")
    assert found["visual_transformer_blocks.0.feed_forward.in_layer.weight"].dtype.name == dtype
    assert found["patch.weight"].dtype == np.float32


def test_the_configuration_says_what_was_done(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    for export in ("compressed-tensors", "deepseek"):
        convert(path, tmp_path / export, SMALL, export=export)
    theirs = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())
    assert theirs["width"] == 72
    quantization = theirs["quantization_config"]
    assert quantization["format"] == "int-quantized"
    group = quantization["config_groups"]["group_0"]
    assert (
        len(group["targets"]) == 4
        and "visual_transformer_blocks.0.feed_forward.in_layer" in (group["targets"])
    )
    weights = group["weights"]
    assert weights["strategy"] == "block" and weights["block_structure"] == [128, 128]
    assert set(quantization["ignore"]) == {
        n.removesuffix(".weight") for n, a in model().items()
        if n.endswith(".weight") and a.ndim == 2
        and "to_query" not in n and "feed_forward" not in n
    }  # fmt: skip
    deepseek = json.loads((tmp_path / "deepseek" / "config.json").read_text())
    assert deepseek["quantization_config"] == {
        "quant_method": "blockwise_int8", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "ignored_layers": quantization["ignore"],
    }  # fmt: skip


def test_the_record_of_a_file(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    config = replace(SMALL, fp32_patterns=["*.0.*"])
    convert(path, tmp_path / "int8", config)
    (header,) = open_checkpoint(tmp_path / "int8").headers.values()  # type: ignore[attr-defined]
    assert header.metadata["format"] == "pt"
    record = json.loads(header.metadata["cupyattn"])
    assert record["version"] == 1 and record["tool"] == f"cupyattn {ca.__version__}"
    assert record["source_sha256"] == analyze(path, config).sha256
    assert record["config"]["fp32_patterns"] == ["*.0.*"]
    assert "visual_transformer_blocks.0.feed_forward.in_layer.weight" not in record["dtypes"]
    assert record["dtypes"]["visual_transformer_blocks.1.feed_forward.in_layer.weight"] == "F32"


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    convert(path, tmp_path / "one", SMALL, max_shard_bytes=20_000)
    shutil.copytree(path, tmp_path / "copy" / "model")
    convert(tmp_path / "copy" / "model", tmp_path / "two", SMALL, max_shard_bytes=20_000)
    assert content(tmp_path / "one") == content(tmp_path / "two")


@pytest.mark.parametrize("limit", [1, 20_000, 10**9])
def test_files_have_the_size_that_was_asked_for(tmp_path: Path, limit: int) -> None:
    arrays = model()
    done = convert(source(tmp_path / "model"), tmp_path / "int8", SMALL, max_shard_bytes=limit)
    found = open_checkpoint(tmp_path / "int8")
    files = sorted(path.name for path in found.files)
    if limit == 10**9:
        assert files == ["diffusion_pytorch_model.safetensors"]
    else:
        assert len(files) == (len(arrays) if limit == 1 else 7)
        assert files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors"
        index = json.loads(
            (tmp_path / "int8" / "diffusion_pytorch_model.safetensors.index.json").read_text()
        )
        total = sum(t.nbytes for t in found.tensors.values())
        assert index["metadata"]["total_size"] == total
        assert {n: found.file_of(n).name for n in found.tensors} == index["weight_map"]
    assert done.files == {p.name: p.stat().st_size for p in (tmp_path / "int8").iterdir()}
    for file in found.files if limit > 1 else ():
        held = [n for n in found.tensors if found.file_of(n) == file]
        assert sum(found.tensors[n].nbytes for n in held) <= limit or len(held) == 1


def test_small_files_come_along_and_other_weights_do_not(tmp_path: Path) -> None:
    path = source(
        tmp_path / "model", **{"scheduler.json": "{}", "x.gguf": "", "old.bin": "", ".hidden": ""}
    )
    (path / "folder").mkdir()
    convert(path, tmp_path / "int8", SMALL)
    assert set(content(tmp_path / "int8")) == {
        "diffusion_pytorch_model.safetensors", "config.json", "LICENSE", "scheduler.json",
    }  # fmt: skip


def test_matrices_of_adapters_stay_as_they_are(tmp_path: Path) -> None:
    """A file of LoRA alone has no INT8 then, and a model that holds some keeps them."""
    rng = np.random.default_rng(0)
    sizes = {"lora_A": (16, 256), "lora_B": (256, 16)}
    adapters = {
        f"blocks.0.attn.to_q.{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in sizes.items()
    }
    base = {"blocks.0.attn.to_q.weight": rng.standard_normal((256, 256)).astype(np.float32)}
    convert(write(tmp_path / "lora.safetensors", adapters), tmp_path / "adapter", SMALL)
    convert(write(tmp_path / "both.safetensors", adapters | base), tmp_path / "int8", SMALL)
    for folder in ("adapter", "int8"):
        found = tensors(tmp_path / folder)
        assert all(found[name].tobytes() == x.tobytes() for name, x in adapters.items())
        assert ("blocks.0.attn.to_q.weight_scale" in found) == (folder == "int8")
    assert not (tmp_path / "adapter" / "config.json").exists()


def test_a_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.safetensors", model())
    convert(path, tmp_path / "int8", SMALL)
    assert set(content(tmp_path / "int8")) == {"mine.safetensors", "config.json"}
    convert(path, tmp_path / "other", replace(SMALL, min_elements_for_int8=10**9))


@pytest.mark.frameworks
def test_what_torch_pickled(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    arrays = {n: a for n, a in model().items() if a.size}
    (tmp_path / "model").mkdir()
    torch.save(
        {n: torch.from_numpy(a.copy()) for n, a in arrays.items()},
        tmp_path / "model" / "pytorch_model.bin",
    )
    convert(tmp_path / "model", tmp_path / "int8", SMALL)
    assert set(content(tmp_path / "int8")) == {"model.safetensors", "config.json"}
    write(tmp_path / "same" / "model.safetensors", arrays)
    convert(tmp_path / "same", tmp_path / "other", SMALL)
    mine, other = tensors(tmp_path / "int8"), tensors(tmp_path / "other")
    assert {n: a.tobytes() for n, a in mine.items()} == {n: a.tobytes() for n, a in other.items()}


def test_a_dry_run_says_the_sizes_and_writes_nothing(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    for limit in (20_000, 10**9):
        said = convert(path, tmp_path / "int8", SMALL, dry_run=True, max_shard_bytes=limit)
        assert [p.name for p in tmp_path.iterdir()] == ["model"] and not said.written
        done = convert(path, tmp_path / "int8", SMALL, max_shard_bytes=limit)
        assert said.files == done.files and said.analysis == done.analysis
        shutil.rmtree(tmp_path / "int8")


def test_an_analysis_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = source(tmp_path / "model")
    known = analyze(path, SMALL)
    convert(path, tmp_path / "one", SMALL)
    monkeypatch.setattr(conversion, "analyze", None)
    convert(path, tmp_path / "two", analysis=known)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    changed = convert(path, tmp_path / "3", replace(SMALL, max_outlier_ratio=0), analysis=known)
    assert changed.analysis is not None and changed.analysis.totals["int8"]["tensors"] < 4


@pytest.mark.parametrize("shape", [(2048, 1024), (64, 32768)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path, shape, dtype) -> None:  # type: ignore[no-untyped-def]
    w = np.ones(shape, dtype)
    arrays = {"0.fc.weight": w, "1.fc.weight": w, "norm.weight": w}
    path = write(tmp_path / "x.safetensors", arrays)
    tracemalloc.start()
    convert(path, tmp_path / "int8")
    dequantize(tmp_path / "int8", tmp_path / "back")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * w.nbytes


# ---- whole or not at all -------------------------------------------------------------------------


def kill_after(events: int, work: Any) -> bool:
    """Run `work` in a child that dies at the n-th time it touches a file; whether it died."""
    child = os.fork()
    if child == 0:
        left = [events]

        def hook(event: str, arguments: Any) -> None:
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)  # as SIGKILL: nothing is flushed, nothing is tidied up

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("direction", ["convert", "dequantize"])
def test_a_kill_at_any_point_leaves_nothing_half_written(
    tmp_path: Path, direction: str, stride: int
) -> None:
    """Killed once after every so many steps in turn, then again and again in one attempt."""
    arrays = dict(list(model(blocks=1).items())[3:11])
    path = source(tmp_path / "model", arrays)
    known = analyze(path, SMALL)
    if direction == "convert":

        def work(target: Path = tmp_path / "out") -> None:
            convert(path, target, analysis=known, max_shard_bytes=15_000)

    else:
        convert(path, tmp_path / "int8", analysis=known)

        def work(target: Path = tmp_path / "out") -> None:
            dequantize(tmp_path / "int8", target, max_shard_bytes=25_000)

    before = content(path)
    work(tmp_path / "whole")
    whole = content(tmp_path / "whole")
    assert sum(name.endswith(".safetensors") for name in whole) >= 3
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    resumed = 0
    for step in range(0, 1000, stride):
        if not kill_after(step, work):
            break
        if out.exists():
            assert content(out) == whole
            with pytest.raises(FileExistsError):
                work()
        else:
            resumed += any(partial.glob("model/*.safetensors"))
            work()
        assert content(out) == whole and not partial.exists()
        shutil.rmtree(out)
    else:
        pytest.fail("it never ended")
    assert step > 30 and resumed > 3 and content(path) == before
    shutil.rmtree(out)
    steps = 1
    while kill_after(steps, work) and not out.exists():
        steps += 17  # an attempt goes a little further each time
    if partial.exists():
        with pytest.raises(FileExistsError):
            work()
    assert content(out) == whole and not partial.exists()


def test_shards_that_were_finished_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source(tmp_path / "model")
    known = analyze(path, SMALL)
    made: list[str] = []
    make = conversion._ToInt8.make

    def counted(self: Any, item: Any) -> Any:
        made.append(item.name)
        if len(made) == 12:
            raise KeyboardInterrupt
        return make(self, item)

    monkeypatch.setattr(conversion._ToInt8, "make", counted)
    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "out", analysis=known, max_shard_bytes=20_000)
    assert not (tmp_path / "out").exists()
    done = {p.name for p in (tmp_path / "out.partial" / "model").glob("*.safetensors")}
    steps: list[str] = []
    convert(path, tmp_path / "out", analysis=known, max_shard_bytes=20_000, advance=steps.append)
    assert done and 12 < len(made) < 12 + len(known.tensors)
    assert sorted(steps) == sorted(2 * [t.name for t in known.tensors])


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-8], lambda b: b[:20] + b"?" + b[21:], lambda b: b[:-9] + b"four" + b[-5:],
        lambda b: b[:-1] + bytes([b[-1] ^ 1]),
    ],
    ids=["short", "a byte of the header", "four bytes of a tensor", "the last bit"],
)  # fmt: skip
@pytest.mark.parametrize("forgetful", [False, True], ids=["", "without checksums"])
def test_shards_that_were_damaged_are_made_again(
    tmp_path: Path, damage: Any, forgetful: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path, shards = source(tmp_path / "model"), tmp_path / "out.partial" / "model"
    convert(path, tmp_path / "whole", SMALL, max_shard_bytes=20_000)

    def stop(_: str) -> None:
        if any(shards.glob("*.safetensors")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "out", SMALL, max_shard_bytes=20_000, advance=stop)
    (shard,) = shards.glob("*.safetensors")
    shard.write_bytes(damage(shard.read_bytes()))
    if forgetful:  # as an earlier version, which kept none
        state = shards.parent / "state.json"
        state.write_text(json.dumps({"key": json.loads(state.read_bytes())["key"]}))
    convert(path, tmp_path / "out", SMALL, max_shard_bytes=20_000)
    assert f"{shard} is damaged: it is written again" in caplog.text
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_an_attempt_at_something_else_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = source(tmp_path / "model")
    monkeypatch.setattr(writer, "_check_whole", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(path, tmp_path / "out", SMALL)
    monkeypatch.undo()
    other = replace(SMALL, fallback_dtype="fp16")
    convert(path, tmp_path / "out", other)
    assert "starting again" in caplog.text
    convert(path, tmp_path / "whole", other)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_what_an_attempt_left_beside_its_shards_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file that the source has no more, and half of a shard."""
    path = source(tmp_path / "model", **{"old.json": "{}"})
    known = analyze(path, SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(writer, "_check_whole", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(path, tmp_path / "out", analysis=known)
    assert (tmp_path / "out.partial" / "model" / "old.json").exists()
    (tmp_path / "out.partial" / "model" / "x.safetensors.tmp").write_bytes(b"half")
    (path / "old.json").unlink()
    convert(path, tmp_path / "out", analysis=known)
    convert(path, tmp_path / "whole", analysis=known)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_two_at_once(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    (tmp_path / "out.partial").mkdir()
    with open(tmp_path / "out.partial" / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another process is writing"):
            convert(path, tmp_path / "out", SMALL)
    convert(path, tmp_path / "out", SMALL)


@pytest.mark.parametrize("what", ["a file", "a folder", "a link to nothing", "the source"])
def test_nothing_is_overwritten(tmp_path: Path, what: str) -> None:
    path = source(tmp_path / "model")
    out = path if what == "the source" else tmp_path / "out"
    if what == "a file":
        out.write_text("mine")
    elif what == "a folder":
        out.mkdir()
        (out / "x").write_text("mine")
    elif what == "a link to nothing":
        out.symlink_to("nowhere")
    before = content(tmp_path)
    for work in (convert, dequantize):
        with pytest.raises(FileExistsError, match="exists already: nothing is overwritten"):
            work(path, out)
    assert content(tmp_path) == before


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(source(tmp_path / "model"), tmp_path / "out", SMALL)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_folder_of_someone_else(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="'notes', which no conversion left there"):
        convert(source(tmp_path / "model"), tmp_path / "out", SMALL)
    (tmp_path / "out.partial" / "notes").unlink()
    write(tmp_path / "out.partial" / "model" / "mine.safetensors", model())
    with pytest.raises(FileExistsError, match="'model/mine.safetensors', which no conversion"):
        convert(source(tmp_path / "model"), tmp_path / "out", SMALL)
    assert (tmp_path / "out.partial" / "model" / "mine.safetensors").exists()


# ---- what is read back ---------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["a code up", "a code down", "scales", "a NaN scale"])
def test_wrong_codes_are_found(tmp_path: Path, monkeypatch, fault: str) -> None:  # type: ignore[no-untyped-def]
    seen: list[Any] = []

    def wrong(w: Any, block_size: int, strategy: str) -> Any:
        codes, scales = ca.weight_quant(w, block_size, strategy=strategy)
        seen.append(w)
        if len(seen) > 1:
            return codes, scales
        if "code" in fault:  # one step up is off by less than a step, or one step down is
            inner = np.argmax(np.abs(codes[0]) < 100)
            codes[0, inner] += 1 if fault == "a code up" else -1
        else:
            scales[-1, -1] *= 1.5 if fault == "scales" else np.nan
        return codes, scales

    monkeypatch.setattr(conversion, "quantize_blocks", wrong)
    with pytest.raises(ValueError, match=r"out.partial.*was read back, and its codes are further"):
        convert(source(tmp_path / "model"), tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", [20, -1])
def test_a_disk_that_forgets_is_found(tmp_path: Path, monkeypatch, place: int) -> None:  # type: ignore[no-untyped-def]
    """A byte of the header, and the last byte of the file, change after they were written."""
    path = source(tmp_path / "model")
    known = analyze(path, SMALL)
    fsync = os.fsync

    def forget(descriptor: int) -> None:
        fsync(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith(".safetensors.tmp"):
            data = bytearray(Path(name).read_bytes())
            data[place] ^= 1
            Path(name).write_bytes(data)

    monkeypatch.setattr(os, "fsync", forget)
    with pytest.raises(ValueError, match=r"safetensors.tmp"):
        convert(path, tmp_path / "out", analysis=known)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    convert(path, tmp_path / "out", analysis=known)


# ---- what is refused -----------------------------------------------------------------------------


def refused(
    tmp_path: Path, path: Path, error: type[BaseException], said: str, **options: Any
) -> None:
    """Nothing is written, and the source is as it was."""
    before = content(tmp_path)
    with pytest.raises(error, match=said):
        convert(path, tmp_path / "out", SMALL, **options)
    assert content(tmp_path) == before and not (tmp_path / "out").exists()


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    arrays = model()
    for name in ("patch.weight", "temperature"):
        arrays[name] = np.full_like(arrays[name], np.nan)
    said = "'patch.weight' has 5400 elements that are NaN or infinite, and 1 more"
    refused(tmp_path, source(tmp_path / "model", arrays), ValueError, said)
    arrays = {"x": np.array([3e38 + 3e38j, complex(0, np.inf)], np.complex64)}
    path = source(tmp_path / "complex", arrays)
    refused(tmp_path, path, ValueError, "'x' has 1 elements that are NaN or infinite")


def test_models_that_are_quantised_already(tmp_path: Path) -> None:
    path = source(tmp_path / "model", **{"config.json": '{"quantization_config": {}}'})
    said = "is quantised already: run it with .*load_int8, or dequantize it first"
    refused(tmp_path, path, ValueError, said)
    (path / "config.json").unlink()
    arrays = model()
    arrays["visual_transformer_blocks.0.feed_forward.in_layer.weight_scale"] = np.ones((1, 1))
    source(path, arrays)
    refused(tmp_path, path, ValueError, "would both become.*quantised already")


def test_a_damaged_configuration(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        path = source(tmp_path / "model", **{"config.json": text})
        refused(tmp_path, path, ValueError, "config.json is no configuration")


def test_an_analysis_of_another_model(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    known = analyze(write(tmp_path / "x.safetensors", model(width=40)), SMALL)
    refused(tmp_path, path, ValueError, "is of another model than", analysis=known)


def test_a_model_that_changed_since_its_analysis(tmp_path: Path) -> None:
    known = analyze(source(tmp_path / "model"), SMALL)
    path = source(tmp_path / "model", model(seed=1))
    with pytest.raises(ValueError, match="has changed since it was analysed"):
        convert(path, tmp_path / "out", analysis=known)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"export": "gguf"}, {"max_shard_bytes": 0}])
def test_options_that_are_not_there(tmp_path: Path, options: dict[str, Any]) -> None:
    refused(tmp_path, source(tmp_path / "model"), ValueError, next(iter(options)), **options)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        convert(source(tmp_path / "model"), tmp_path / "a" / "out", SMALL)


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 5, 5))
    with pytest.raises(OSError, match="KiB are needed and 5 B are free.*out.partial") as caught:
        convert(source(tmp_path / "model"), tmp_path / "out", SMALL)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # not even OUTPUT.partial


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = source(tmp_path / "model")
    before = content(path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            convert(path, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists() and content(path) == before
    convert(path, tmp_path / "out", SMALL)


def test_a_target_that_cannot_be_written_to(tmp_path: Path) -> None:
    path = source(tmp_path / "model")
    before = content(tmp_path)
    with pytest.raises(OSError, match="/sys/out.partial"):
        convert(path, "/sys/out", SMALL)  # not even the superuser makes folders there
    assert content(tmp_path) == before


# ---- the commands --------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, found = source(tmp_path / "model"), str(tmp_path / "analysis.json")
    limits = ["--min-elements", "100", "--max-outliers", "0.02", "--fallback-dtype", "fp16"]
    assert cli.main(["analyze", str(path), *limits, "--output", found]) == 0
    out, back = str(tmp_path / "int8"), str(tmp_path / "back")
    capsys.readouterr()
    assert cli.main(["convert", str(path), "--output", out, "--analysis", found, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "to_query.weight" in printed and "Would write 3 files" in printed
    assert "convolution" in printed and not os.path.exists(out)
    said = tmp_path / "said.json"
    given = ["--output", out, "--analysis", found, "--json", str(said)]
    assert cli.main(["convert", str(path), *given]) == 0
    record = json.loads(said.read_text())
    assert record["files"] == {p.name: p.stat().st_size for p in Path(out).iterdir()}
    assert record["bytes"] == sum(record["files"].values()) and record["written"] is True
    assert record["analysis"]["tensors"] and record["target"] == out
    assert "Wrote and checked 3 files" in capsys.readouterr().out
    assert tensors(Path(out))["patch.weight"].dtype == np.float16
    given = ["--output", back, "--dtype", "bfloat16", "--json", str(said)]
    assert cli.main(["dequantize", out, *given]) == 0
    assert json.loads(said.read_text())["target"] == back
    assert set(tensors(Path(back))) == set(model())
    assert cli.main(["convert", str(path), "--output", out]) == 2
    error = capsys.readouterr().err
    assert "nothing is overwritten" in error and error.count("\n") == 1
    other = ["convert", str(path), "--output", f"{out}2", "--export", "deepseek", *limits]
    assert cli.main([*other, "--max-shard-bytes", "20000"]) == 0
    assert any(n.endswith("weight_scale_inv") for n in tensors(Path(f"{out}2")))
