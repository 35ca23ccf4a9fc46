"""``cupyattn interpret FILE``: kernels that are no rungs, launched as a TOML file says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import cli

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
EXAMPLE = Path(__file__).parents[2] / "examples" / "your_kernel"
SMALL = """
entry = "add"
grid = 2
block = 4

[[args]]
name = "x"
array = [6]
dtype = "float32"
fill = "arange"
input = true

[[args]]
name = "y"
array = [6]
dtype = "float32"
fill = "nan"

[[args]]
name = "n"
scalar = 6
dtype = "int32"

[[args]]
name = "nothing"
null = true
"""
ADD = """__global__ void add(const float* x, float* y, int n, const float* nothing) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + (nothing ? nothing[i] : 1.0f);
}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "add.cu").write_text(ADD)
    (tmp_path / "add.toml").write_text(SMALL)
    return tmp_path


def test_a_kernel_runs_and_its_arrays_are_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, counts = folder / "out.npz", folder / "counts.json"
    command = ["interpret", str(folder / "add.cu"), "--save", str(kept), "--json", str(counts)]
    assert cli.main(command) == 0
    assert "No findings." in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(kept)["y"], np.arange(6) + 1)
    record = json.loads(counts.read_text())
    assert record["entry"] == "add" and list(record["kernels"]) == ["_Z3addPKfPfiS0_"]


def test_arrays_are_kept_whole_or_not_at_all(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["interpret", str(folder / "add.cu"), "--save"]
    for place, said in ((folder / "no" / "x.npz", "there is no folder"), (folder, "is a folder")):
        assert cli.main([*command, str(place)]) == 2
        told = capsys.readouterr()
        assert "--save: " in told.err and said in told.err and not told.out  # nothing has run
    kept = folder / "out.npz"
    assert cli.main([*command, str(kept.with_suffix(""))]) == 0
    whole = kept.read_bytes()

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full)
    assert cli.main([*command, str(kept)]) == 2
    assert kept.read_bytes() == whole


def test_trace_and_break(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced = folder / "trace.txt"
    options = ["--trace", str(traced), "--break", "add.cu:3"]
    assert cli.main(["interpret", str(folder / "add.cu"), *options]) == 0
    assert "st.global.f32" in traced.read_text()
    assert "at add.cu:3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('entry = "add"\n', "", "add.toml: entry is missing"),
        ("grid = 2", "grid = 0", "grid must be 1 or more, got 0"),
        ("grid = 2", "grid = [1, 2, 3, 4]", "grid must have 1 to 3 numbers"),
        ("block = 4", 'block = "4"', "block must be a whole number, got '4'"),
        ("block = 4", "blocks = 4", "blocks must be left out: fields here are entry, grid"),
        ('name = "x"', "title = 1", r"args\[0\].name is missing"),
        ('name = "y"', 'name = "x"', r"args\[1\] \(x\).name must be different from the names of"),
        ('"float32"\nfill = "nan"', '"flaot32"', r"args\[1\] \(y\).dtype must be NumPy's name"),
        ('fill = "nan"', 'fill = "noise"', r"args\[1\] \(y\).fill must be .* got 'noise'"),
        ('fill = "nan"', 'fill = "no.npy"', r"args\[1\] \(y\).fill: cannot read .*no.npy"),
        ("scalar = 6", "scalar = 6.5", r"args\[2\] \(n\).scalar must be a whole number of type"),
        ("scalar = 6", "", r"args\[2\] \(n\) must have one of array, of, scalar and null"),
        ("null = true", 'of = "z"', r"args\[3\] \(nothing\).of must name an array before it \(x"),
        ("null = true", 'of = "x"\nbox = [3]', r"\(nothing\).box: the last extent of box"),
        ("null = true", 'null = true\n[judge]\no = "y"', "judge.q is missing"),
        ("block = 4", "block = ", "cannot read .*add.toml: "),
    ],
)
def test_errors_name_the_field(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, says: str
) -> None:
    assert old in SMALL
    (folder / "add.toml").write_text(SMALL.replace(old, new, 1))
    assert cli.main(["interpret", str(folder / "add.cu")]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_other_misuses_are_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(folder / "add.cu")
    (folder / "code.cubin").write_bytes(b"\x7fELF")  # it has no description, and needs none
    for command, says in (
        ([file, "--len", "40"], "--len is for a rung of the ladder"),
        (["fa", "--launch", "x.toml"], "--launch is for a kernel in a file, got fa"),
        ([file, "--launch", "x.toml"], "there is no x.toml, which describes the launch"),
        ([str(folder / "code.cubin")], "a cubin holds machine code"),
    ):
        assert cli.main(["interpret", *command]) == 2
        assert says in capsys.readouterr().err


# ---- the example of docs/YOUR_KERNEL.md ----------------------------------------------------------


def example(folder: Path, old: str = "", new: str = "") -> str:
    """Copy the example with a fault in it, and return its path."""
    text = (EXAMPLE / "attention.cu").read_text()
    assert old in text
    (folder / "attention.cu").write_text(text.replace(old, new, 1))
    description = (EXAMPLE / "attention.toml").read_text()
    smaller = {"[1, 2, 100, 64]": "[1, 1, 36, 64]", "scalar = 100": "scalar = 36"}
    for large, small in {**smaller, "grid = [2, 2]": "grid = 1"}.items():
        description = description.replace(large, small)
    (folder / "attention.toml").write_text(description)
    return str(folder / "attention.cu")


def test_the_example_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["interpret", example(tmp_path)]) == 0
    assert "O is within its bound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "    __syncthreads();  // the tile has been read before the next one replaces it\n", "",
            "FINDING: race: shared memory is written, and nothing orders that after the read",
        ),
        ("+ p * V[key][d]", "+ __half2float(__float2half(p)) * V[key][d]", "OUTSIDE its bound"),
        ("min(TILE, length - start)", "min(TILE, length - 1 - start)", "OUTSIDE its bound"),
        ("min(TILE, length - start)", "TILE", "FINDING: out of bounds: an access of 2 bytes"),
    ],
    ids=["race", "rounding", "edge", "bounds"],
)  # fmt: skip
def test_planted_faults_are_found(
    old: str, new: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["interpret", example(tmp_path, old, new)]) == 1
    assert says in capsys.readouterr().out


#: Attention of one row, whose scores a softcap limits, with a sink, and Q that is scaled first.
CAPPED = """__global__ void row(const float* q, const float* k, const float* v, const float* sinks,
                    float* o, float* lse, float cap) {
  float sum = 0, l = expf(sinks[0]);
  for (int key = 0; key < 5; ++key) {
    float p = expf(cap * tanhf(0.5f * q[0] * k[key] / cap));
    l += p;
    sum += p * v[key];
  }
  o[0] = sum / l;
  lse[0] = logf(l);
}
"""


def test_softcap_and_sinks_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row, keys = [1, 1, 1, 1], [1, 1, 5, 1]
    shapes = {"q": row, "k": keys, "v": keys, "sinks": [1], "o": row, "lse": [1, 1, 1]}
    args = "".join(
        f'[[args]]\nname = "{name}"\narray = {shape}\ndtype = "float32"\nfill = "normal"\n'
        for name, shape in shapes.items()
    )
    names = "".join(f'{name} = "{name}"\n' for name in shapes)
    words = 'p = "fp32"\ntanh = 1e-6\nscaled_q = "fp32"\nscale = 0.5\n'
    head = 'entry = "row"\ngrid = 1\nblock = 1\n'
    args += '[[args]]\nname = "cap"\nscalar = 0.25\ndtype = "float32"\n'
    (tmp_path / "row.cu").write_text(CAPPED)
    for cap, status in ((0.25, 0), (0.3, 1)):
        judged = f"[judge]\n{names}{words}softcap = {cap}\n"
        (tmp_path / "row.toml").write_text(head + args + judged)
        assert cli.main(["interpret", str(tmp_path / "row.cu")]) == status
        assert ("OUTSIDE" in capsys.readouterr().out) == bool(status)
