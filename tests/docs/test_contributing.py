"""CONTRIBUTING.md does what it says, CITATION.cff has what its format asks for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cupyattn.kernels import ladder
from tests.docs.test_packaging import configuration

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_four_lines_add_a_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, code = blocks("sh")[0], blocks("python")[0]
    assert len((copy + code).splitlines()) == 4
    (tmp_path / "kernels_cu").symlink_to(ROOT / "kernels_cu")
    subprocess.run(["sh", "-ec", copy], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "VARIANTS", dict(ladder.VARIANTS))
    exec(code, {})
    printed = capsys.readouterr().out
    row = r"^mine +(interpreter +)?0\.\d+ .*the one idea"
    assert re.search(row, printed, re.MULTILINE), printed


def test_its_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = "".join(blocks("sh")[2:])
    targets = re.findall(r"^make (\S+)", commands, re.MULTILINE)
    assert len(targets) >= 4
    for target in targets:
        assert re.search(rf"^{target}[: ]", makefile, re.MULTILINE), target
    helped = subprocess.run([ROOT / ".ci" / "run", "--help"], capture_output=True, text=True)
    for option in re.findall(r"^\.ci/run (--\w+)", commands, re.MULTILINE):
        assert option in helped.stdout
    for module in re.findall(r"`python -m ((?:docs|experiments)[.\w]+)", PAGE):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def test_the_three_judgements_have_a_sentence_each() -> None:
    found = re.findall(r"^- \*\*(J\d), [\w ]+\*\*: (.*)$", PAGE, re.MULTILINE)
    assert [name for name, _ in found] == ["J1", "J2", "J3"]
    assert all(sentence.count(". ") == 0 and sentence.endswith(".") for _, sentence in found)


def test_the_citation_has_the_keys_of_its_format() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    keys = dict(re.findall(r"^([a-z][\w-]*):[ \t]*(.*)$", text, re.MULTILINE))
    assert {"cff-version", "message", "title", "authors"} <= keys.keys()  # what 1.2.0 requires
    known = {"abstract", "keywords", "license", "type", "version"}
    assert keys.keys() <= {"cff-version", "message", "title", "authors"} | known
    assert keys["cff-version"] == "1.2.0" and keys["type"] in ("software", "dataset")
    metadata = configuration()["metadata"]
    assert keys["version"] == metadata["version"] and keys["license"] == metadata["license"]
    (author,) = re.findall(r"^authors:\n  - name: (.+)$", text, re.MULTILINE)
    assert author in (ROOT / "LICENSE").read_text()
    assert not re.search(r"\t", text)
