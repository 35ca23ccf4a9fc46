"""The header of a checkpoint under coverage-guided fuzzing, where atheris is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cupyattn.checkpoints.header import MAX_AXES, TensorInfo, encode_header, parse_header

ROOT = Path(__file__).parents[2]


def seeds() -> list[bytes]:
    """Headers of files with tensors of several types, and with none."""
    tensors = {"a.weight": TensorInfo("BF16", (3, 5)), "b": TensorInfo("I8", ()),
               "c": TensorInfo("F64", (0, 7)), "d": TensorInfo("F8_E4M3", (9,))}  # fmt: skip
    found = []
    for chosen, metadata in (
        (tensors, {"format": "pt"}),
        ({"x": tensors["a.weight"]}, {}),
        ({}, {}),
    ):
        start, placed = encode_header(chosen, metadata)
        size = sum(info.nbytes for info in placed.values())
        found.append(size.to_bytes(2, "little") + start[8:])
    return found


def fuzz(corpus: Path, *options: str, source: str = "") -> subprocess.CompletedProcess[str]:
    """Run the fuzzer; `source` plants a mistake first."""
    corpus.mkdir()
    for number, seed in enumerate(seeds()):
        (corpus / str(number)).write_bytes(seed)
    code = f"import tests.checkpoints.fuzz_header as fuzzer\n{source}\nfuzzer.main()"
    command = [sys.executable, "-c", code, *options, f"-artifact_prefix={corpus}/", str(corpus)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_no_bytes_break_the_parser(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    # NOTE: a process begins with the peak of memory of the one that started it, so a limit on that
    # would be one on pytest; what the parser asks for at a time is held to 2 GB all the same.
    memory = "-rss_limit_mb=0", "-malloc_limit_mb=2048"
    done = fuzz(tmp_path / "corpus", "-max_total_time=12", "-seed=1", "-max_len=600", *memory)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Done" in done.stderr


@pytest.mark.slow
def test_the_fuzzer_finds_a_planted_mistake(tmp_path: Path) -> None:
    """A parser that takes an entry for a dictionary without looking: a TypeError, soon."""
    pytest.importorskip("atheris")
    planted = (
        "import cupyattn.checkpoints.header as h\n"
        "h._tensor = lambda path, name, entry: h.TensorInfo("
        "entry['dtype'], tuple(entry['shape']), entry['data_offsets'][0])"
    )
    done = fuzz(tmp_path / "corpus", "-max_total_time=30", "-seed=1", source=planted)
    assert done.returncode != 0 and "Uncaught Python exception" in done.stderr + done.stdout


def test_a_shape_of_many_axes_is_refused_before_it_is_multiplied() -> None:
    """The product of a million sizes near 2^63 would take hours."""
    sizes = ",".join(["9223372036854775807"] * 1_000_000)
    text = f'{{"x":{{"dtype":"I8","shape":[{sizes}],"data_offsets":[0,1]}}}}'.encode()
    with pytest.raises(ValueError, match=f"'x' has 1000000 axes, more than {MAX_AXES}"):
        parse_header(text, 9 + len(text), "some file")
