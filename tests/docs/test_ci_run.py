""".ci/run reads its options, finds what changed, and counts nothing as ok that was not run."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.test_packaging import configuration

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "run"
FOLDERS = ROOT / ".ci" / "slow_folders.py"
#: Programs that the script calls beside make and Python.
TOOLS = ["bash", "cat", "dirname", "env", "git", "grep", "mktemp", "rm", "tail", "tee", "timeout"]
TOOLS += ["tr", "mkdir", "chmod"]
#: A make that does nothing but note its arguments; it fails where `fail` has the name of a target.
MAKE = """#!/usr/bin/env bash
echo "$*" >> calls
grep -qsxF "$1" "$(dirname "$0")/fail" && exit 1
echo "7 passed"
"""
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
    for path in (SCRIPT, FOLDERS):
        shutil.copy(path, tmp_path / ".ci")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for folder in ("docs", "kernels", "quant"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / "test_one.py").touch()
    (tmp_path / ".gitignore").write_text("/bin/\n/.venv/\n/calls\n")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (tmp_path / "bin" / tool).symlink_to(found)
    executable(tmp_path / "bin" / "make", MAKE)
    return tmp_path


def repository(checkout: Path) -> None:
    """Make the copy a repository with one commit."""
    git(checkout, "init", "--quiet")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "all of it")


def git(checkout: Path, *words: str) -> str:
    """Run git in the copy, as somebody."""
    who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *who, *words], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(checkout: Path, *paths: str) -> str:
    """Write files there and commit them; return the commit."""
    for path in paths:
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(f"# {path}\n")
        git(checkout, "add", path)
    git(checkout, "commit", "--quiet", "--message", "one more")
    return git(checkout, "rev-parse", "HEAD")


def slow_tests(checkout: Path) -> list[str]:
    """Return what the run of slow tests was asked for, ``"all"`` for all of them."""
    (call,) = re.findall(r"^test-slow *(.*)$", (checkout / "calls").read_text(), re.MULTILINE)
    return call.removeprefix("SLOW_TESTS=").split() if call else ["all"]


def start(checkout: Path, *options: str, **variables: str) -> tuple[int, str]:
    """Run it there: exit status, and the table at the end."""
    environment = {"PATH": str(checkout / "bin"), "HOME": str(checkout), **variables}
    (checkout / "calls").write_text("")
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
    assert "usage: .ci/run [--full | --all]" in (done.stderr if status else done.stdout)


def test_without_all_there_is_one_python(checkout: Path) -> None:
    """Nor a base: all slow tests are run."""
    status, table = start(checkout)
    assert status == 0 and "NOT RUN" not in table and "Python 3" not in table
    assert re.findall(r" s +(\w+)", table) == ["ok"] * 8
    assert re.findall(r"^(.*?) +left out, ", table, re.MULTILINE) == ["report in a browser"]
    assert slow_tests(checkout) == ["all"]


def test_full_leaves_nothing_out(checkout: Path) -> None:
    repository(checkout)
    commit(checkout, "docs/PAGE.md")
    status, table = start(checkout, "--full")
    assert status == 0 and "left out" not in table and slow_tests(checkout) == ["all"]
    assert re.findall(r" s +(\w+)", table) == ["ok"] * 9


def test_slow_tests_are_those_of_what_changed(checkout: Path) -> None:
    repository(checkout)
    first = commit(checkout, "cupyattn/quant/record.py")
    base = commit(checkout, "cupyattn/kernels/ladder.py")
    assert start(checkout)[0] == 0  # on the main branch: since the commit before
    assert slow_tests(checkout) == ["tests/kernels"]
    git(checkout, "checkout", "--quiet", "-b", "mine")
    commit(checkout, "docs/PAGE.md")
    commit(checkout, "cupyattn/quant/other.py", "tests/docs/test_two.py")
    status, table = start(checkout)  # on a branch: since it left the main branch
    assert (status, slow_tests(checkout)) == (0, ["tests/docs", "tests/quant"])
    assert "other slow tests" in table and f"is that of {base[:12]}: .ci/run --full" in table
    (checkout / "cupyattn" / "quant" / "new.py").touch()
    assert start(checkout, CI_BASE="HEAD")[0] == 0  # not committed yet
    assert slow_tests(checkout) == ["tests/quant"]
    assert start(checkout, CI_BASE=first)[0] == 0
    assert slow_tests(checkout) == ["tests/docs", "tests/kernels", "tests/quant"]


def test_without_a_change_no_slow_tests_are_run(checkout: Path) -> None:
    repository(checkout)
    status, table = start(checkout, CI_BASE="HEAD")
    assert status == 0 and "other slow tests" in table
    assert "test-slow" not in (checkout / "calls").read_text()


def test_a_base_that_is_no_commit_is_refused(checkout: Path) -> None:
    repository(checkout)
    command = [checkout / ".ci" / "run"]
    environment = {"PATH": str(checkout / "bin"), "HOME": str(checkout), "CI_BASE": "no-such"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "CI_BASE=no-such is no commit of this checkout: give one, or leave it out\n"
    )


# ---- which folders a file asks for ---------------------------------------------------------------


def slow_folders() -> ModuleType:
    """Load .ci/slow_folders.py."""
    spec = importlib.util.spec_from_file_location("slow_folders", FOLDERS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_of_the_checkout_has_a_rule() -> None:
    """A package has tests of its name, or the script says where they are."""
    script = slow_folders()
    known = script.all_folders()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    shared = ("tests/conftest.py", "tests/__init__.py", "tests/support/", "tests/test_")
    paths = listed.stdout.splitlines()
    asking_for_all = {path for path in paths if script.folders_of(path, known) == known}
    assert asking_for_all == {path for path in paths if path.startswith(shared)}
    assert set(script.asked_for(paths)) == set(known)
    assert {*script.KERNELS, *sum(script.ELSEWHERE.values(), ())} <= set(known)


@pytest.mark.parametrize(
    ("path", "folders"),
    [
        ("cupyattn/quant/record.py", ("quant",)),
        ("cupyattn/gradients/exact.py", ("backward",)),
        ("cupyattn/errors.py", ("problem",)),
        ("tests/hopper/test_hopper_rings.py", ("hopper",)),
        ("tests/gpu/test_attention.py", ()),
        ("tests/README.md", ()),
        ("README.md", ("docs",)),
        ("experiments/results/NOTES.md", ("docs",)),
    ],
)
def test_folders_of_a_file(path: str, folders: tuple[str, ...]) -> None:
    script = slow_folders()
    assert script.folders_of(path, script.all_folders()) == folders


@pytest.mark.parametrize(
    "path", ["kernels_cu/sm90/attn_fa_tc.cu", "cupyattn/compiler/x.py", "cupyattn/interpret/x.py"]
)
def test_kernels_compiler_and_interpreter_are_under_all_that_runs_kernels(path: str) -> None:
    script = slow_folders()
    known = script.all_folders()
    assert script.folders_of(path, known) == script.KERNELS
    assert script.folders_of("a_new_folder/file.py", known) == known


@pytest.mark.parametrize(
    "target", [".venv/.ready-browser", ".venv/.ready-docs", ".venv/.ready-frameworks"]
)
@pytest.mark.parametrize(("options", "status"), [(("--full",), 0), (("--all",), 3)])
def test_a_part_that_cannot_be_installed_is_not_run(
    checkout: Path, target: str, options: tuple[str, ...], status: int
) -> None:
    """Nor is it ok with --all, though every interpreter and package be there."""
    (checkout / "bin" / "fail").write_text(f"{target}\n")
    for version in ("3.10", "3.11", "3.12", "3.13"):
        executable(checkout / "bin" / f"python{version}", PYTHON)
    found, table = start(checkout, *options)
    assert found == status and table.count("NOT RUN, could not be installed") == 1
    lost = 1 + (target == ".venv/.ready-frameworks")  # the site needs them
    assert table.count(" ok ") == 9 - lost + 8 * ("--all" in options)


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
    assert status == 1 and table.count("FAILED") == 3


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
