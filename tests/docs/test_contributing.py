"""The commands of CONTRIBUTING.md work, and CITATION.cff has the fields of its format."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from cupyattn.kernels import ladder
from docs import write_experiments
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


def test_every_experiment_is_listed() -> None:
    text = write_experiments.PAGE.read_text(encoding="utf-8")
    for (begin, end), table in write_experiments.tables().items():
        inside = text.split(begin)[1].split(end)[0]
        assert inside == f"\n{table}\n", "run python -m docs.write_experiments"
    folders = {path.parent.name for path in write_experiments.PAGE.parent.glob("*/*.py")}
    assert folders == {*write_experiments.FOLDERS, write_experiments.SHARED, "dit"}


def files_that_name(option: str) -> set[str]:
    """Files whose code has an option's name, documentation and messages aside."""

    def names(node: ast.AST) -> set[object]:
        return {getattr(node, field, None) for field in ("id", "arg", "attr", "value")
                if isinstance(getattr(node, field, None), str)}  # fmt: skip

    found = {
        path
        for path in (ROOT / "cupyattn").rglob("*.py")
        if option in (text := path.read_text())
        and any(option in names(node) for node in ast.walk(ast.parse(text)))
    }
    word = re.compile(rf"\b{option}\b")
    found |= {
        path
        for path in (ROOT / "kernels_cu").rglob("*.cu*")
        if word.search(re.sub(r"//.*", "", path.read_text()))
    }
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_an_option_stands_in_ten_files_at_most() -> None:
    """The page lists these files for the latest option, and for others with arrays or numbers."""
    section = PAGE.split("## Add an option of attention")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([\w/.]+)` \|", section, re.MULTILINE)
    assert len(listed) <= 10 and {*listed} == files_that_name("lengths_kv")
    for option in ("lengths_q", "qk_norm_eps", "check_finite"):
        assert 2 < len(files_that_name(option)) <= 10, option


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
