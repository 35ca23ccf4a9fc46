""".ci/run reads its options, and what could not be run is never counted as ok."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.test_packaging import configuration

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "run"
#: What the script calls beside make and Python.
TOOLS = ["bash", "cat", "dirname", "env", "grep", "mktemp", "rm", "tail", "tee", "timeout", "tr"]
TOOLS += ["mkdir", "chmod"]
#: A make that does nothing, but fails where the file `fail` has the name of a target.
MAKE = '#!/usr/bin/env bash\ngrep -qsxF "$1" "$(dirname "$0")/fail" && exit 1\necho "7 passed"\n'
#: A Python that makes environments whose pip fails where there is a file `no-pip`.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"-m pip"*) test ! -e no-pip ;;
  *"-m venv"*) mkdir -p "$4/bin" && cat "$0" > "$4/bin/python" && chmod +x "$4/bin/python" ;;
esac
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the script alone, with a make and tools of its own on the path, and no Python."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (tmp_path / "bin" / tool).symlink_to(found)
    executable(tmp_path / "bin" / "make", MAKE)
    return tmp_path


def start(checkout: Path, *options: str) -> tuple[int, str]:
    """Run it there: exit status, and the table at the end."""
    environment = {"PATH": str(checkout / "bin"), "HOME": str(checkout)}
    done = subprocess.run(
        [checkout / ".ci" / "run", *options],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "command not found" not in done.stderr, done.stderr
    return done.returncode, done.stdout.rpartition("==== time of each part\n")[2]


def test_it_parses() -> None:
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("option", "status"), [("--help", 0), ("-h", 0), ("--al", 2), ("x", 2)])
def test_options(option: str, status: int) -> None:
    done = subprocess.run([SCRIPT, option], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert "usage: .ci/run [--all]" in (done.stderr if status else done.stdout)


def test_without_all_there_is_one_python(checkout: Path) -> None:
    status, table = start(checkout)
    assert status == 0 and "NOT RUN" not in table and "Python 3" not in table
    assert re.findall(r" s +(\w+)", table) == ["ok"] * 7


@pytest.mark.parametrize("target", [".venv/.ready-browser", ".venv/.ready-frameworks"])
@pytest.mark.parametrize(("options", "status"), [((), 0), (("--all",), 3)])
def test_a_part_that_cannot_be_installed_is_not_run(
    checkout: Path, target: str, options: tuple[str, ...], status: int
) -> None:
    """Nor is it ok with --all, though every interpreter and package be there."""
    (checkout / "bin" / "fail").write_text(f"{target}\n")
    for version in ("3.10", "3.11", "3.12", "3.13"):
        executable(checkout / "bin" / f"python{version}", PYTHON)
    found, table = start(checkout, *options)
    assert found == status and table.count("NOT RUN, could not be installed") == 1
    assert table.count(" ok ") == 6 + 8 * len(options)


def test_what_is_not_there_is_not_run(checkout: Path) -> None:
    status, table = start(checkout, "--all")
    cells = [line for line in table.splitlines() if line.startswith("Python ")]
    assert status == 3
    named = dict.fromkeys(re.match(r"Python (\S+),", line)[1] for line in cells)  # type: ignore[index]
    classifiers = configuration()["metadata"]["classifiers"]
    assert list(named) == re.findall(r"Python :: (3\.\d+)", classifiers)
    assert len(cells) == 2 * len(named)
    assert all("NOT RUN" in line and " ok " not in line for line in cells)


def test_what_is_there_is_run(checkout: Path) -> None:
    executable(checkout / "bin" / "python3.10", PYTHON)
    status, table = start(checkout, "--all")
    assert status == 3
    assert len(re.findall(r"^Python 3\.10, .* ok .* 7 passed", table, re.MULTILINE)) == 2
    assert table.count("NOT RUN") == 6


def test_a_package_that_cannot_be_had_is_not_run(checkout: Path) -> None:
    executable(checkout / "bin" / "python3.10", PYTHON)
    (checkout / "no-pip").touch()
    status, table = start(checkout, "--all")
    assert status == 3 and table.count("NOT RUN") == 8
    assert re.search(r"3\.10.*cupy-cuda12x==14\.0\.\* .*could not be installed", table)


def test_a_failure_goes_before_what_was_not_run(checkout: Path) -> None:
    executable(checkout / "bin" / "python3.10", PYTHON)
    (checkout / "bin" / "fail").write_text("test-quick\n")
    status, table = start(checkout, "--all")
    assert status == 1 and table.count("FAILED") == 2


def test_the_packages_of_all_are_within_setup_cfg() -> None:
    text = SCRIPT.read_text()
    extras = configuration()["options.extras_require"]
    for name, minimum in (("OLDEST", "==14.0.*"), ("NEWEST", "")):
        (words,) = re.findall(rf'^{name}="(.*)"$', text, re.MULTILINE)
        extra, cupy, nvrtc = words.split()
        wanted = {re.split(r"[=<>]", line)[0] for line in extras[extra].split("\n")}
        assert {re.split("==", package)[0] for package in (cupy, nvrtc)} <= wanted
        assert cupy.endswith(minimum or "x")
        assert re.search(r"^cupy-cuda\d+x>=14$", extras[extra].strip(), re.MULTILINE)
