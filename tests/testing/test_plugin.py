"""The pytest plugin: counterexamples in files, whole or not at all, and the line that replays."""

from __future__ import annotations

import configparser
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.numerics import numerics as of_rung
from cupyattn.testing import (
    Counterexample,
    assert_within_bound,
    counterexamples,
    judge,
    load_counterexample,
    numerics,
    plugin,
)

ROOT = Path(__file__).parents[2]
#: A kernel with a fault in long rows, its test, and one that expects the judge to refuse.
BROKEN = """
import numpy as np
import pytest
from hypothesis import given, settings
from cupyattn.reference import attention_exact
from cupyattn.strategies import attention_inputs
from cupyattn.testing import assert_within_bound, numerics

FAULT = 1.02

@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(attention_inputs(dtypes=["bfloat16"], max_scores=2**12, features=["bias", "block_mask"]))
def test_kernel(case):
    q, k, v, options = case
    o = attention_exact(q, k, v, **options)
    o = o * FAULT if k.shape[2] > 12 else o
    assert_within_bound(
        o.astype(np.float32), q, k, v, numerics=numerics("fp32 P", out="fp32"), **options
    )

@pytest.mark.parametrize("way", ["a b", "c"])
def test_zeros(way):
    x = np.ones((1, 1, 8, 16), np.float16)
    with pytest.raises(AssertionError):
        assert_within_bound(0 * x, x, x, x, variant="fa")
    if FAULT != 1:
        assert_within_bound(2 * x, x, x, x, variant="fa", seed=5, window=(3, 3))

def test_expected():
    x = np.ones((1, 1, 8, 16), np.float16)
    with pytest.raises(AssertionError):
        assert_within_bound(0 * x, x, x, x, variant="fa")

@pytest.mark.xfail
def test_known():
    x = np.ones((1, 1, 8, 16), np.float16)
    assert_within_bound(0 * x, x, x, x, variant="fa")
"""


Run = Callable[..., tuple[int, str]]


def run_apart(folder: Path, *arguments: str, line: str = "", **more: str) -> tuple[int, str]:
    """Run pytest in a folder, in a process of its own; or a line that it printed."""
    kept = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    words = f"-p {plugin.__name__} -p no:cacheprovider --tb=short --rootdir={folder}"
    done = subprocess.run(
        line or [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": words} | more,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        shell=bool(line), timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run_apart` within this process, which has imported everything."""
    monkeypatch.setattr(plugin.WATCHED, "test", plugin.WATCHED.test)
    monkeypatch.setattr(plugin.WATCHED, "failure", None)

    def run_here(folder: Path, *arguments: str, line: str = "") -> tuple[int, str]:
        # NOTE: at its end that plugin of pytest's visits all objects of this process, in seconds.
        words = f"-p {plugin.__name__} -p no:cacheprovider -p no:timeout --tb=short"
        words += " -p no:unraisableexception"
        monkeypatch.setenv("PYTEST_ADDOPTS", f"{words} --rootdir={folder} --capture=sys")
        monkeypatch.chdir(folder)
        if line:
            *python, _, _ = words_of = shlex.split(line)
            assert python == ["python", "-m", "pytest"], line
            arguments = tuple(words_of[3:])
        with contextlib.redirect_stdout(text := io.StringIO()), contextlib.redirect_stderr(text):
            status = pytest.main(["--import-mode=importlib", *arguments])
        sys.modules.pop("test_mine", None)  # the next run reads its file again
        return int(status), text.getvalue()

    return run_here


def replays(text: str) -> list[str]:
    return re.findall(r"^python -m pytest .*--cupyattn-replay=.*$", text, re.MULTILINE)


def check_its_line_replays_it(run: Run, folder: Path, python: str) -> None:
    """Let a test fail, replay the line that it printed, and once more with the fault mended."""
    file = folder / "test_mine.py"
    file.write_text(BROKEN)
    status, text = run(folder, "-k", "test_kernel")
    assert status == 1 and "OUTSIDE its bound" in text, text
    (line,) = replays(text)
    (saved,) = (folder / ".cupyattn").iterdir()
    assert f".cupyattn/{saved.name}" in line and "test_mine.py::test_kernel" in line
    found = load_counterexample(saved)
    assert found.test == "test_mine.py::test_kernel" and found.message in text.replace("E   ", "")
    assert found.k.shape[2] == 13 and found.q.dtype == STORAGE["bfloat16"]  # shrunk
    report = judge(found.o, found.q, found.k, found.v, **found.options)
    assert str(report) == found.message and found.options["seed"] == 0
    # The line as it stands, then the same once the fault is mended.
    again = line.replace("python", python, 1)
    status, text = run(folder, line=again)
    assert status == 1 and found.message.splitlines()[0] in text and "1 failed" in text, text
    file.write_text(BROKEN.replace("FAULT = 1.02", "FAULT = 1"))
    status, text = run(folder, line=again)
    assert status == 0 and "1 passed" in text and not replays(text), text


def test_a_failure_leaves_its_smallest_example_and_the_line_that_replays_it(
    tmp_path: Path, run: Run
) -> None:
    check_its_line_replays_it(run, tmp_path, "python")


@pytest.mark.slow
def test_the_line_replays_in_a_shell(tmp_path: Path) -> None:
    check_its_line_replays_it(run_apart, tmp_path, sys.executable)


def check_refusals_that_a_test_expects(run: Run, folder: Path, *arguments: str) -> None:
    (folder / "test_mine.py").write_text(BROKEN)
    given = folder / "kept here"
    arguments = (*arguments, "-k", "not test_kernel", f"--cupyattn-folder={given}")
    status, text = run(folder, *arguments)
    assert status == 1 and re.search("2 failed, 1 passed,.* 1 xfailed", text), text
    assert len(replays(text)) == 2, text
    assert "'test_mine.py::test_zeros[a b]'" in text and "'--cupyattn" not in text
    files = list(given.iterdir())
    assert len(files) == 2 and not (folder / ".cupyattn").exists()
    for one in map(load_counterexample, files):  # the last refusal, none that was expected
        assert (one.o == 2).all() and one.options["seed"] == 5
        assert one.options["window"] == (3, 3)
    assert run(folder, *arguments)[0] == 1 and sorted(given.iterdir()) == sorted(files)


def test_refusals_that_a_test_expects(tmp_path: Path, run: Run) -> None:
    check_refusals_that_a_test_expects(run, tmp_path)


@pytest.mark.slow
def test_several_workers(tmp_path: Path) -> None:
    check_refusals_that_a_test_expects(run_apart, tmp_path, "-n", "2")


def test_a_run_that_judges_nothing_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import sys\n\ndef test_it():\n    assert not [m for m in sys.modules if m == 'numpy' or "
        "m.startswith('cupyattn.') and m.count('.') < 2 and m != 'cupyattn.testing' "
        "and m not in ('cupyattn.version', 'cupyattn.collector', 'cupyattn.lazy_face')]\n"
    )
    status, text = run_apart(tmp_path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert status == 0, text


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, run: Run) -> None:
    status, text = run(tmp_path, "--cupyattn-replay=gone.npz")
    assert status == 4 and "must name a counterexample, got no file at 'gone.npz'" in text


def test_a_folder_that_cannot_be_made_leaves_the_failure_as_it_is(
    tmp_path: Path, run: Run
) -> None:
    (tmp_path / "test_mine.py").write_text(BROKEN)
    (tmp_path / "file").write_text("")
    status, text = run(tmp_path, "-k", "zeros and c", "--cupyattn-folder=file")
    assert status == 1 and "the counterexample is not kept" in text and "OUTSIDE" in text


def test_the_wheel_registers_it_with_what_it_needs() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    entry = f"{plugin.__name__} = {plugin.__name__}"
    assert entry in parser["options.entry_points"]["pytest11"].splitlines()
    needed = {re.split("[>=]", x)[0] for x in parser["options.extras_require"]["test"].split()}
    assert needed == {"pytest", "hypothesis"}


# ---- files ---------------------------------------------------------------------------------------


def example(**options: Any) -> Counterexample:
    x = np.arange(24, dtype=np.float32).reshape(1, 1, 3, 8)
    return Counterexample(x, x + 1, x + 2, x + 3, options, "test_it", "said")


def test_everything_comes_back(tmp_path: Path) -> None:
    mask = ca.BlockMask(np.ones((1, 1, 1, 1), bool), 64, 128)
    options = {
        "variant": "fa", "lse": np.ones((1, 1, 3), np.float32), "scale": 0.1 + 0.2, "mask": None,
        "bias": np.array(3.0).astype(STORAGE["bfloat16"]), "window": (-1, 7), "block_mask": mask,
        "tiles": ca.Tiles(32, 64, 4), "rope": (np.ones(3), np.zeros(3)), "causal": True,
        "numerics": of_rung("int8", "sm90_pv8", "float16"), "other": numerics("e4m3", qk="int8"),
    }  # fmt: skip
    example(**options).save(tmp_path / "a.npz")
    found = load_counterexample(tmp_path / "a.npz")
    assert (found.test, found.message) == ("test_it", "said")
    for name, x in vars(example()).items():
        if isinstance(x, np.ndarray):
            np.testing.assert_array_equal(getattr(found, name), x)
    got = dict(found.options)
    block = got.pop("block_mask")
    assert (block.mask == mask.mask).all() and (block.block_q, block.block_kv) == (64, 128)
    assert got["bias"].dtype == STORAGE["bfloat16"] and got["bias"].shape == ()
    for name, x in got.items():
        if name in ("lse", "bias", "rope"):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(options[name]))
        else:
            assert x == options[name] and type(x) is type(options[name]), name
    assert set(got) | {"block_mask"} == set(options)


def test_arrays_are_kept_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyattn.testing.verdict.WATCHED.test", "test_it")
    monkeypatch.setattr("cupyattn.testing.verdict.WATCHED.failure", None)
    x = np.ones((1, 1, 8, 16), np.float16)
    o = 2 * x
    with pytest.raises(AssertionError) as raised:
        assert_within_bound(o, x, x, x, variant="fa")
    o[...], x[...] = 0, 0
    kept = plugin.WATCHED.failure
    assert kept is not None and (kept.o == 2).all() and (kept.q == 1).all()
    assert kept.message == str(raised.value) and dict(kept.options) == {"seed": 0, "variant": "fa"}


def test_a_write_that_fails_leaves_what_stood_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npz"
    example(variant="fa").save(path)

    def half(file: Any, **arrays: Any) -> None:
        file.write(b"PK half a file")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", half)
    with pytest.raises(OSError, match="no space left"):
        example(variant="fa_tc").save(path)
    assert load_counterexample(path).options == {"variant": "fa"}
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counterexamples, "MOST_BYTES", 383)
    with pytest.raises(ValueError, match="must not exceed 383 bytes, got 384"):
        example().save(tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())


def test_other_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    example().save(path)
    whole = path.read_bytes()
    np.savez(tmp_path / "b.npz", q=np.ones(3))
    for content in (b"", b"PK", whole[: len(whole) // 2], (tmp_path / "b.npz").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="must be a counterexample that cupyattn's pytest"):
            load_counterexample(path)
    with pytest.raises(OSError, match="gone"):
        load_counterexample(tmp_path / "gone.npz")


def test_the_folder_does_not_grow_without_limit(tmp_path: Path) -> None:
    now = time.time()
    names = [plugin.file_name(f"test_{i}") for i in range(plugin.MOST_FILES + 7)]
    for age, name in enumerate(names):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (now - age, now - age))
    for age, name in ((2 * plugin.ABANDONED, "old"), (1, "young")):
        path = tmp_path / f".{name}-000000000000.npz.0123456789abcdef.tmp"
        path.write_text("")
        os.utime(path, (now - age, now - age))
    (tmp_path / "mine.npz").write_text("")  # a user's own
    plugin.prune(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    young = ".young-000000000000.npz.0123456789abcdef.tmp"
    assert left == {*names[: plugin.MOST_FILES], "mine.npz", young}


def test_names_of_files_are_short_plain_and_apart() -> None:
    names = {plugin.file_name(f"a.py::test[{text}]") for text in ("é/..", "x" * 500, "a b", "a_b")}
    assert len(names) == 4
    assert all(re.fullmatch(r"[\w.-]{1,77}", name) and "/" not in name for name in names)


@pytest.mark.parametrize("notes", ['{"fields": 5}', "[" * 5000, "null"])
def test_notes_of_another_form_are_refused(tmp_path: Path, notes: str) -> None:
    np.savez(tmp_path / "other.npz", notes=np.array(notes))
    with pytest.raises(ValueError, match="got another or a damaged file"):
        load_counterexample(tmp_path / "other.npz")


def test_a_compression_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """One flipped byte of the archive's directory names it."""
    path = tmp_path / "damaged.npz"
    x = np.ones((1, 1, 8, 16), np.float16)
    Counterexample(x, x, x, x, {"variant": "fa"}).save(path)
    found = bytearray(path.read_bytes())
    found[found.index(b"PK\x01\x02") + 10] ^= 0xFF
    path.write_bytes(found)
    with pytest.raises(ValueError, match="got another or a damaged file"):
        load_counterexample(path)
