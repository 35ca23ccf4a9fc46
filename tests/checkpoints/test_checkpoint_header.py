"""The safetensors header: accepted headers, refused headers, and their messages."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.checkpoints.header import (
    DTYPES,
    MAX_HEADER_BYTES,
    Header,
    TensorInfo,
    encode_header,
    parse_header,
    read_header,
)
from cupyattn.checkpoints.source import open_checkpoint
from tests.checkpoints.checkpoint_files import entry, file_content, model, raw

FILE = Path("model.safetensors")
GOOD = file_content({"a": np.ones((2, 3), np.float16), "b": np.zeros((0, 4), np.int8)})


def of(tmp_path: Path, data: bytes) -> Header:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    return read_header(path)


def test_every_type_comes_back(tmp_path: Path) -> None:
    arrays = {f"x.{n}": np.zeros((3, i % 3), t) for i, (n, t) in enumerate(DTYPES.items())}
    arrays["scalar"] = np.zeros((), np.float32)
    header = of(tmp_path, file_content(arrays, {"format": "pt", "more": "text"}))
    assert header.metadata == {"format": "pt", "more": "text"}
    assert {n: (t.dtype, t.shape) for n, t in header.tensors.items()} == {
        n: (n.removeprefix("x.") if n != "scalar" else "F32", a.shape) for n, a in arrays.items()
    }
    assert all(t.begin % DTYPES[t.dtype].itemsize == 0 for t in header.tensors.values())
    assert header.data_start % 8 == 0


def test_the_safetensors_library_reads_what_is_written_here(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    arrays = model()
    (tmp_path / "x.safetensors").write_bytes(file_content(arrays))
    with library.safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert set(file.keys()) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def test_what_the_safetensors_library_writes_is_read_here(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    arrays = {name: array for name, array in model().items() if array.size}
    library.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {n: t.shape for n, t in found.tensors.items()} == {n: a.shape for n, a in arrays.items()}


def many(folder: Path, count: int) -> Path:
    """Write a file of so many tensors of one byte."""
    start, _ = encode_header({f"t.{i}": TensorInfo("I8", (1,)) for i in range(count)}, {})
    (folder / "many.safetensors").write_bytes(start + bytes(count))
    return folder / "many.safetensors"


def test_the_time_of_a_header_grows_as_its_tensors_do(tmp_path: Path) -> None:
    """Python's collector of cycles would look at all tensors that there are, again and again."""
    path, seen = many(tmp_path, 20_000), []

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(look)
    try:
        header = read_header(path)
    finally:
        gc.callbacks.remove(look)
    assert len(header.tensors) == 20_000 and not seen and gc.isenabled()


def test_reading_a_tensor_looks_at_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 400
    source, ends = open_checkpoint(many(tmp_path, count)), []
    end = TensorInfo.end.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(TensorInfo, "end", property(lambda t: ends.append(t) or end(t)))
    for name in source.tensors:
        assert source.read(name).shape == (1,)
    assert len(ends) <= 2 * count, "each tensor is looked at for each that is read"


def test_the_same_tensors_give_the_same_bytes() -> None:
    names = [f"x{i}" for i in range(20)]
    infos = {name: TensorInfo(("F32", "I8", "F16")[i % 3], (i,)) for i, name in enumerate(names)}
    first = encode_header(infos, {"b": "1", "a": "2"})
    random.Random(0).shuffle(names)
    assert first == encode_header({n: infos[n] for n in names}, {"a": "2", "b": "1"})


ONE = {"x": entry("F32", [2], 0, 8)}
DATA = bytes(8)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cut short: 0 bytes"),
        (b"\x02\0\0", "cut short: 3 bytes"),
        ((2**63).to_bytes(8, "little") + b"{}", "length at offset 0 is 9223372036854775808"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "the format ends at 100000000"),
        ((50).to_bytes(8, "little") + b"{}", "a header of 50 bytes in a file of 10"),
        (raw(b"[1, 2]"), "at offset 8 stands no '{'"),
        (raw(b" {}"), "at offset 8 stands no '{'"),
        (raw(b"{\xff}"), "no safetensors header: .*utf-8"),
        (raw(b'{"x": NaN}'), "NaN is no JSON"),
        (raw(b'{"x":' * 100_000), "no safetensors header"),
        (raw(b'{"x": ' + b"1" * 5000 + b"}"), "no safetensors header"),
        (raw(b'{"\\ud800": {}}'), "no safetensors header: .*surrogates"),
        (raw(b'{"x": {}, "x": {}}'), "'x' comes twice"),
        (raw({"__metadata__": {"a": 1}}), "must hold strings alone"),
        (raw({"__metadata__": []}), "must hold strings alone"),
        (raw({"x": 3}), "the entry of 'x' is malformed"),
        (raw({"x": {"dtype": "F32", "shape": [2]}}), "malformed: it must have"),
        (raw({"x": {**ONE["x"], "more": 1}}, DATA), "malformed: it must have"),
        (raw({"x": entry("F7", [2], 0, 8)}, DATA), "'x' has the unknown type 'F7'"),
        (raw({"x": {**ONE["x"], "dtype": ["F32"]}}, DATA), "unknown type"),
        (raw({"x": entry("F32", [-2], 0, 8)}, DATA), "malformed shape"),
        (raw({"x": {**ONE["x"], "shape": [True, 2]}}, DATA), "malformed shape"),
        (raw({"x": {**ONE["x"], "shape": [2.0]}}, DATA), "malformed shape"),
        (raw({"x": {**ONE["x"], "shape": 2}}, DATA), "malformed shape"),
        (raw({"x": {**ONE["x"], "data_offsets": [0]}}, DATA), "malformed shape or place"),
        (raw({"x": entry("F32", [3], 0, 8)}, DATA), "needs 12 bytes and has offsets 0 to 8"),
        (raw({"x": entry("F32", [2**62, 2**62], 0, 8)}, DATA), "needs .* bytes"),
        (raw({"x": entry("F32", [0, 2**62, 2], 0, 0)}), "'x' has the shape .* no array can have"),
        (raw({"x": entry("F32", [2], 8, 0)}, DATA), "has offsets 8 to 0"),
        (raw({**ONE, "y": entry("F32", [1], 4, 8)}, DATA), "'y' at offset .* overlaps 'x'"),
        (raw({**ONE, "y": entry("F32", [1], 12, 16)}, bytes(16)), "'y' .* leaves a gap after 'x'"),
        (raw({"x": entry("F32", [1], 4, 8)}, DATA), "leaves a gap after the header"),
        (raw(ONE, bytes(7)), "cut short or damaged: 'x' should end the file"),
        (raw(ONE, bytes(9)), "is damaged: 'x' should end the file"),
    ],
)  # fmt: skip
def test_damage_is_named_with_its_file(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        of(tmp_path, data)
    assert "x.safetensors" in str(caught.value) and len(str(caught.value)) < 400


def sound(header: Header, size: int) -> None:
    """Everything that the reader of tensors relies on."""
    end = 0
    for info in header.tensors.values():
        assert info.begin == end and info.dtype in DTYPES and info.nbytes >= 0
        end = info.end
    assert header.file_size == size == header.data_start + end


@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_are_refused_or_sound(text: bytes, size: int) -> None:
    try:
        header = parse_header(text, size, FILE)
    except ValueError as error:
        assert str(FILE) in str(error)
    else:
        sound(header, size)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)))
def test_a_good_file_with_one_byte_changed_or_cut_short(where: int, byte: int, end: int) -> None:
    data = bytearray(GOOD)
    data[where] = byte
    for changed in (bytes(data), GOOD[:end], bytes(data[:end])):
        length = int.from_bytes(changed[:8], "little")
        if len(changed) < 8 or 8 + length > len(changed):
            continue
        try:
            header = parse_header(changed[8 : 8 + length], len(changed), FILE)
        except ValueError as error:
            assert str(FILE) in str(error)
        else:
            sound(header, len(changed))


_sizes = st.integers(-1, 2**64) | st.integers(0, 4) | st.booleans() | st.none() | st.floats()
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", ""]) | st.none(),
        "shape": st.lists(_sizes, max_size=3) | st.none(),
        "data_offsets": st.lists(_sizes, max_size=3) | st.none(),
    }
)


@given(st.dictionaries(st.text(max_size=4), _entries | st.none() | st.text(max_size=3), max_size=3))
def test_any_entries_are_refused_or_sound(entries: dict[str, object]) -> None:
    text = json.dumps(entries).encode()
    for data in (0, 1, 8):
        try:
            header = parse_header(text, 8 + len(text) + data, FILE)
        except ValueError as error:
            assert str(FILE) in str(error)
        else:
            sound(header, 8 + len(text) + data)


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=5).filter(lambda n: n != "__metadata__"),
        st.builds(
            TensorInfo,
            st.sampled_from(list(DTYPES)),
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
        ),
        max_size=6,
    )
)
def test_what_is_written_is_read(infos: dict[str, TensorInfo]) -> None:
    start, placed = encode_header(infos, {})
    size = len(start) + max((t.end for t in placed.values()), default=0)
    header = parse_header(start[8:], size, FILE)
    assert header.tensors == placed and int.from_bytes(start[:8], "little") == len(start) - 8
    sound(header, size)


@given(
    st.dictionaries(
        st.sampled_from("abc"),
        st.tuples(
            st.sampled_from(["F16", "I8"]), st.lists(st.integers(0, 3), max_size=2),
            st.integers(0, 12), st.integers(0, 12),
        ),
        max_size=3,
    ),
    st.integers(0, 24),
)  # fmt: skip
def test_nothing_is_taken_that_the_safetensors_library_refuses(entries, count) -> None:  # type: ignore[no-untyped-def]
    library = pytest.importorskip("safetensors")
    data = raw({name: entry(*e) for name, e in entries.items()}, bytes(count))
    length = int.from_bytes(data[:8], "little")
    try:
        parse_header(data[8 : 8 + length], len(data), FILE)
    except ValueError:
        return
    assert len(library.deserialize(data)) == len(entries)
