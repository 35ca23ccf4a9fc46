"""The Dockerfiles, read and held to the facts of the repository: building them takes a network."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.test_packaging import configuration

ROOT = Path(__file__).parents[2]
FILES = ["Dockerfile", "Dockerfile.cpu"]


def instructions(name: str) -> list[tuple[str, str]]:
    """Instruction and argument, in order, without comments, lines that go on joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    found = [line.split(maxsplit=1) for line in lines]
    return [(word, argument.strip()) for word, argument in found]


@pytest.mark.parametrize("name", FILES)
def test_instructions_are_known_and_begin_with_a_base(name: str) -> None:
    words = [word for word, _ in instructions(name)]
    assert set(words) <= {"ARG", "FROM", "RUN", "USER", "WORKDIR", "ENV", "COPY", "CMD"}
    assert words.index("FROM") == 1 and words[0] == "ARG" and words[-1] == "CMD"


@pytest.mark.parametrize("name", FILES)
def test_what_runs_and_what_is_copied_is_no_root(name: str) -> None:
    found = instructions(name)
    (at,) = [i for i, (word, _) in enumerate(found) if word == "USER"]
    user = found[at][1]
    assert user not in ("root", "0")
    assert f"useradd --create-home {user}" in found[at - 1][1], "made before it is used"
    for i, (word, argument) in enumerate(found):
        assert word not in ("COPY", "CMD") or i > at
        if word == "COPY":
            assert f"--chown={user}:{user}" in argument
        assert "sudo" not in argument


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_in_the_repository(name: str) -> None:
    for word, argument in instructions(name):
        if word == "COPY":
            *sources, _ = [part for part in shlex.split(argument) if not part.startswith("--")]
            assert sources
            for source in sources:
                assert (ROOT / source).exists(), source


def test_what_git_ignores_is_not_sent() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    sent_not = (ROOT / ".dockerignore").read_text().split()
    assert {name.removeprefix("**/") for name in sent_not} == {".git", *ignored}


def test_versions_are_those_of_setup_cfg() -> None:
    extras = configuration()["options.extras_require"]
    for name in FILES:
        arguments = dict(a.split("=") for word, a in instructions(name) if word == "ARG")
        assert re.search(r"^cupy-cuda\d+x", extras[arguments["EXTRA"]].strip())
        assert "nvrtc" in extras[arguments["EXTRA"]], "what compiles the kernels"
        assert ("ENV", "EXTRA=${EXTRA}") in instructions(name), "make takes it from there"
        assert ("RUN", "make setup") in instructions(name)
    arguments = dict(a.split("=") for word, a in instructions("Dockerfile") if word == "ARG")
    assert arguments["EXTRA"] == f"cuda{arguments['CUDA'].split('.')[0]}", "one generation"
    (base,) = [a for word, a in instructions("Dockerfile") if word == "FROM"]
    assert base.startswith("nvidia/cuda:${CUDA}-runtime-")
    python = dict(a.split("=") for w, a in instructions("Dockerfile.cpu") if w == "ARG")["PYTHON"]
    assert f"Programming Language :: Python :: {python}" in configuration()["metadata"][
        "classifiers"
    ].split("\n")
    assert ("FROM", "python:${PYTHON}-slim") in instructions("Dockerfile.cpu")
    comment = (ROOT / "Dockerfile").read_text()
    other = re.search(r"--build-arg CUDA=(\d+)\S* --build-arg EXTRA=(\w+)", comment)
    assert other and other[2] == f"cuda{other[1]}" and other[2] in extras


@pytest.mark.parametrize("name", FILES)
def test_it_runs_the_readmes_command(name: str) -> None:
    command = instructions(name)[-1][1]
    assert command == '["make", "ladder"]'
    assert "make ladder " in (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^EXTRA \?= ", makefile, re.MULTILINE), "the environment's goes before it"
