"""Checkpoints on a disk: the files that are read, and the refusals."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyattn.checkpoints import convert, open_checkpoint
from cupyattn.errors import UnsupportedError
from tests.checkpoints.checkpoint_files import BF16, file_content, model, write, write_shards

ARRAYS = model(dtype=BF16)


def halves() -> dict[str, dict[str, np.ndarray]]:
    names = list(ARRAYS)
    return {
        "model-00001-of-00002.safetensors": {n: ARRAYS[n] for n in names[::2]},
        "model-00002-of-00002.safetensors": {n: ARRAYS[n] for n in names[1::2]},
    }


def index_of(folder: Path) -> Path:
    return next(folder.glob("*.index.json"))


def reindex(folder: Path, change: dict[str, str | None]) -> Path:
    """Change what an index says; None takes a name out."""
    path = index_of(folder)
    record = json.loads(path.read_text())
    record["weight_map"].update(change)
    record["weight_map"] = {n: f for n, f in record["weight_map"].items() if f is not None}
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("kind", ["file", "folder of one", "folder of two", "folder", "index"])
def test_every_layout_gives_the_same_tensors(tmp_path: Path, kind: str) -> None:
    path = tmp_path
    if kind == "file":
        path = write(tmp_path / "x.safetensors", ARRAYS)
    elif kind == "folder of one":
        write(tmp_path / "model.safetensors", ARRAYS)
    else:
        write_shards(tmp_path, halves())
        if kind == "folder of two":
            index_of(tmp_path).unlink()
        elif kind == "index":
            path = index_of(tmp_path)
    source = open_checkpoint(path)
    assert set(source.tensors) == set(ARRAYS)
    for name, array in ARRAYS.items():
        found = source.read(name)
        assert found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == array.tobytes() and found.flags.writeable


def test_what_an_index_does_not_name_and_hidden_files_are_left_alone(tmp_path: Path) -> None:
    write_shards(tmp_path, halves())
    write(tmp_path / "consolidated.safetensors", ARRAYS)
    (tmp_path / ".x.safetensors").write_bytes(b"no")
    assert len(open_checkpoint(tmp_path).files) == 2


def test_links_out_of_the_folder_are_how_caches_store_models(tmp_path: Path) -> None:
    write(tmp_path / "blobs" / "1f", ARRAYS)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/1f")
    assert set(open_checkpoint(tmp_path / "snapshot").tensors) == set(ARRAYS)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "..", ".", "", "x\0"]
)
def test_an_index_that_climbs_out_is_refused(tmp_path: Path, file: str) -> None:
    write(tmp_path / "x.safetensors", ARRAYS)
    write_shards(tmp_path / "model", halves())
    path = reindex(tmp_path / "model", {"steps": file})
    with pytest.raises(ValueError, match="index.json names") as caught:
        open_checkpoint(path)
    assert repr(file) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": "other.safetensors"}, "names 'other.safetensors', which is no file in"),
        ({"steps": "config.json"}, "which is no checkpoint"),
        ({"more": "model-00001-of-00002.safetensors"}, "says that 'more' is in .*: it is in no"),
        ({"steps": "model-00001-of-00002.safetensors"}, "'steps' is in model-00001.*in model-0000"),
        ({"steps": None}, "does not name 'steps', which is in model"),
    ],
)
def test_an_index_and_its_files_must_agree(tmp_path: Path, change, said: str) -> None:  # type: ignore[no-untyped-def]
    shards = halves()
    if change.get("steps") == "model-00001-of-00002.safetensors":
        assert "steps" in shards["model-00002-of-00002.safetensors"]
    write_shards(tmp_path, shards)
    reindex(tmp_path, change)
    with pytest.raises(ValueError, match=said):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {}}', "\xff", "[" * 100_000]
)
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.safetensors.index.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="x.safetensors.index.json"):
        open_checkpoint(tmp_path)


def test_shards_that_are_missing_without_an_index_are_missed(tmp_path: Path) -> None:
    write_shards(tmp_path, halves())
    index_of(tmp_path).unlink()
    first, second = sorted(tmp_path.glob("*.safetensors"))
    second.unlink()
    with pytest.raises(ValueError, match="has 1 of the 2 shards of 'model', and no index"):
        open_checkpoint(tmp_path)
    assert len(open_checkpoint(first).files) == 1


def test_a_model_without_a_name_is_not_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model.safetensors", ARRAYS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the model must be a path, got ''"):
        open_checkpoint("")
    with pytest.raises(ValueError, match="output must be a path, got ''"):
        convert(tmp_path, "")


def test_an_index_has_the_configuration_and_the_small_files_of_its_folder(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "model", halves())
    (path / "config.json").write_text('{"_class_name": "AutoencoderX"}')
    (path / "LICENSE").write_text("mine")
    write(path / "other.safetensors", ARRAYS)
    made = [convert(x, tmp_path / "out", dry_run=True) for x in (path, index_of(path))]
    assert made[0].files == made[1].files and {"LICENSE", "config.json"} <= made[1].files.keys()
    assert made[1].left_out == {"other.safetensors": "the index of the model does not name it"}
    (path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(ValueError, match="is quantised already"):
        convert(index_of(path), tmp_path / "out")


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("x.weight", "sparse", "'x.weight' is sparse_coo, and only dense tensors are read"),
        ("x.weight", "meta", "'x.weight' is without numbers, and only dense"),
        ("__metadata__", "cpu", "'__metadata__' is no name of a tensor in safetensors"),
        ("\ud800", "cpu", r"'\\ud800' is no name of a tensor in safetensors"),
    ],
)
def test_pickled_tensors_that_no_file_holds_are_named(
    tmp_path: Path, name: str, kind: str, said: str
) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 2, device="meta" if kind == "meta" else "cpu")
    torch.save({name: x.to_sparse() if kind == "sparse" else x}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=f"model.pt: {said}"):
        open_checkpoint(tmp_path / "model.pt")


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    write(tmp_path / "model.fp16.safetensors", ARRAYS)
    write(tmp_path / "model.safetensors", ARRAYS)
    with pytest.raises(ValueError, match="model.fp16.safetensors and in model.safetensors"):
        open_checkpoint(tmp_path)


def test_two_indices(tmp_path: Path) -> None:
    write_shards(tmp_path, halves())
    (tmp_path / "other.safetensors.index.json").write_bytes(index_of(tmp_path).read_bytes())
    with pytest.raises(ValueError, match="several checkpoints"):
        open_checkpoint(tmp_path)


def test_a_pipeline_names_its_parts(tmp_path: Path) -> None:
    write(tmp_path / "transformer" / "model.safetensors", ARRAYS)
    (tmp_path / "scheduler").mkdir()
    with pytest.raises(ValueError, match="its folders transformer do: name one"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("denoisers", [("transformer", "transformer_2"), ("unet",)])
def test_a_pipeline_of_diffusers_names_the_folder_to_give(
    tmp_path: Path, denoisers: tuple[str, ...]
) -> None:
    for name in (*denoisers, "text_encoder", "vae"):
        write(tmp_path / name / "model.safetensors", ARRAYS)
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    models = " or ".join(str(tmp_path / name) for name in denoisers)
    with pytest.raises(ValueError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} is a pipeline, whose models are read one at a time: give {models} "
        "(text_encoder, vae can be read in the same way)"
    )


def test_a_folder_of_nothing_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.safetensors files$"):
        open_checkpoint(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="x.gguf is no checkpoint"):
        open_checkpoint(tmp_path / "x.gguf")
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("inside", [False, True])
def test_links_that_lead_to_themselves(tmp_path: Path, inside: bool) -> None:
    loop = tmp_path / "model.safetensors"
    loop.symlink_to("model.safetensors")
    with pytest.raises(OSError, match="model.safetensors|symbolic links"):
        open_checkpoint(tmp_path if inside else loop)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", ARRAYS)
    source = open_checkpoint(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="has changed while it was read"):
        source.read("steps")


# ---- what torch pickled --------------------------------------------------------------------------


class Code:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.frameworks
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("ending", [".bin", ".pt", ".ckpt"])
def test_code_in_a_pickle_is_never_run(tmp_path: Path, protocol: int, ending: str) -> None:
    pytest.importorskip("torch")
    trace = tmp_path / "executed"
    path = tmp_path / f"model{ending}"
    path.write_bytes(pickle.dumps({"x": Code(trace)}, protocol=protocol))
    why = r"it asks for \w+\.mkdir" if protocol == 2 else "torch reads no tensors from it"
    with pytest.raises(ValueError, match=f"more than tensors; nothing in it was executed: {why}$"):
        open_checkpoint(path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists(), "the trap works"


@pytest.mark.frameworks
def test_code_in_a_file_of_torch_is_never_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    trace = tmp_path / "executed"
    torch.save({"x": Code(trace)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="nothing in it was executed"):
        open_checkpoint(tmp_path)
    assert not trace.exists()


@pytest.mark.frameworks
@pytest.mark.parametrize("zipped", [False, True])
def test_tensors_that_torch_pickled(tmp_path: Path, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        "a.weight": torch.randn(5, 7).T, "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.randn(4).to(torch.bfloat16), "d": torch.zeros(0, 3, dtype=torch.bfloat16),
        "e": torch.tensor([True, False]), "f": torch.nn.Parameter(torch.randn(2)),
    }  # fmt: skip
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    source = open_checkpoint(tmp_path)
    assert list(source.tensors) == list(tensors) and source.file_of("b") == path
    for name, tensor in tensors.items():
        found = source.read(name)
        assert found.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(
            found.astype(np.float32), tensor.detach().to(torch.float32).numpy()
        )
    assert source.read("c").dtype == BF16


@pytest.mark.frameworks
@pytest.mark.parametrize("ending", [".safetensors", ".bin"])
def test_a_name_that_two_files_hold(tmp_path: Path, ending: str) -> None:
    for path in (tmp_path / f"one{ending}", tmp_path / f"two{ending}"):
        if ending == ".bin":
            torch = pytest.importorskip("torch")
            torch.save({"x": torch.ones(2)}, path)
        else:
            write(path, {"x": np.ones(2, np.float32)})
    with pytest.raises(
        ValueError, match=r"'x' is in one\.\w+ and in two\.\w+ of .*: name one file"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.frameworks
@pytest.mark.parametrize("what", ["a list", "nested", "damaged", "empty"])
def test_other_things_that_torch_pickled(tmp_path: Path, what: str) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "model.pt"
    tensor = torch.ones(2)
    torch.save([tensor] if what == "a list" else {"model": {"x": tensor}}, path)
    if what in ("damaged", "empty"):
        path.write_bytes(path.read_bytes()[:200] if what == "damaged" else b"")
    with pytest.raises(ValueError, match="model.pt") as found:
        open_checkpoint(path)
    assert "weights_only" not in str(found.value)


def test_without_torch_nothing_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    trace = tmp_path / "executed"
    (tmp_path / "model.bin").write_bytes(pickle.dumps({"x": Code(trace)}))
    with pytest.raises(UnsupportedError, match="install torch, or save the model as safetensors"):
        open_checkpoint(tmp_path)
    assert not trace.exists()


def test_the_header_alone_is_read_to_open(tmp_path: Path) -> None:
    """The file's tensors take no room on the disk, because they were not written."""
    data = file_content({"x.weight": np.zeros((1024, 1024), np.float32)})
    path = tmp_path / "sparse.safetensors"
    start = data[: len(data) - 2**22].replace(b"[1024,1024]", b"[1048576,1024]")
    text = start[8:].rstrip(b" ").replace(b"[0,4194304]", b"[0,4294967296]")
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + 2**32)
    assert open_checkpoint(path).tensors["x.weight"].nbytes == 2**32
