"""``cupyattn docs``: the pages of a checkout and of an unpacked wheel, and docstrings by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.cli import docs

ROOT = Path(__file__).parents[2]
EXAMPLE = {"attention.cu", "attention.toml", "launched.py", "library.py"}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["docs", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], topic: str) -> str:
    assert cli.main(["docs", topic]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_every_page_is_a_topic_with_its_question(capsys: pytest.CaptureFixture[str]) -> None:
    pages = {path.stem.lower() for path in (ROOT / "docs").glob("*.md")} - {"readme", "api"}
    assert set(docs.topics()) == pages, "docs/README.md lists every page"
    lines = printed(capsys).splitlines()
    for name, (_, answer) in docs.topics().items():
        assert any(re.fullmatch(rf"{name} +{re.escape(answer)}", line) for line in lines)


@pytest.mark.parametrize("topic", ["tutorial", "Tutorial", "TUTORIAL.md"])
def test_a_page_is_printed_without_its_marks(
    topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = printed(capsys, topic)
    assert page.startswith("# The ladder, rung by rung\n") and "<!--" not in page
    assert "```diff" in page


def test_what_stands_in_code_stays(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text("<!-- mark -->\n![a plot](a.svg)\n\n```html\n<!-- kept -->\n```\n")
    assert docs.page_text(page) == "[picture: a plot]\n\n```html\n<!-- kept -->\n```"


@pytest.mark.parametrize("name", ["attention", "cupyattn.attention"])
def test_a_function_prints_its_call_and_docstring(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, name)
    assert text.startswith(f"{name}(q, k=None, v=None, *, variant='auto'")
    assert "Scaled dot-product attention" in text and "Parameters\n----------" in text


def test_a_value_prints_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "quant.GROUP_ALL") == f"quant.GROUP_ALL = {ca.quant.GROUP_ALL}\n"


def test_a_name_that_is_a_page_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "ladder").startswith("# The ladder: five rungs")
    assert printed(capsys, "cupyattn.ladder").startswith("cupyattn.ladder(q")


def test_classes_and_modules_list_their_members(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\n  from_weight: Quantise" in printed(capsys, "Int8Linear")
    assert "\n  judge: " in printed(capsys, "cupyattn.testing")
    assert "\nMembers:" not in printed(capsys, "testing.judge")


@pytest.mark.parametrize(
    ("topic", "told"),
    [
        ("tutoral", "no page and no public name 'tutoral', did you mean tutorial? run cupyattn"),
        ("Atention", "did you mean attention"),
        ("testing.juge", "'testing.juge'"),
        ("_lazy", "'_lazy': run cupyattn docs for a list"),
        ("os.path", "'os.path'"),
        ("switches.os", "'switches.os', did you mean switches"),
        ("", "''"),
        ("../README", "'../README'"),
    ],
)
def test_an_unknown_topic_gets_one_sentence(
    topic: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, topic)


def test_a_module_whose_library_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("cupyattn.interop.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(ca.interop, "torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    told = "cupyattn.interop.torch needs torch, which is not installed: install it"
    assert told in refused(capsys, "interop.torch.Recorder")


def test_help_names_pages_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(cli.PAGES) <= set(cli.COMMANDS) and set(cli.PAGES.values()) <= set(docs.topics())
    with pytest.raises(SystemExit):
        cli.main(["trial", "--help"])
    assert "cupyattn docs pipelines explains more." in capsys.readouterr().out


def test_what_the_sources_name_are_topics() -> None:
    named = {
        name
        for path in (ROOT / "cupyattn").rglob("*.py")
        for name in re.findall(r"[(\" `]cupyattn docs\s+([a-z_]+)[)` ]", path.read_text("utf-8"))
    }
    of_no_page = {"lists", "for"}  # "cupyattn docs lists ...", "run cupyattn docs for ..."
    assert {"testing", "troubleshooting"} <= named - of_no_page <= set(docs.topics())


def test_an_installed_package_has_the_pages_and_none_of_their_modules(tmp_path: Path) -> None:
    """The step that fills a wheel copies the pages, and the command finds them there."""
    build = [sys.executable, "setup.py", "-q", "build_py", "--no-compile", "--build-lib", tmp_path]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    packed = {path.name for path in (tmp_path / "cupyattn" / "docs").glob("*.*")}
    assert packed == {path.name for path in (ROOT / "docs").glob("*.md")} - {"API.md"}
    example = {path.name for path in (tmp_path / "cupyattn" / "docs" / "your_kernel").iterdir()}
    assert example == EXAMPLE
    done = subprocess.run(
        [sys.executable, "-m", "cupyattn", "docs", "glossary"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == docs.page_text(ROOT / "docs" / "GLOSSARY.md")


def test_an_example_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "mine/attention.cu, " in printed(capsys, "your_kernel", "--example", "mine")
    assert {path.name for path in Path("mine").iterdir()} == EXAMPLE
    for topic, says in (
        ("your_kernel", "mine exists"), ("ladder", "ladder has no example folder"),
        (".", "--example needs a page, got '.'"), (str(tmp_path), "--example needs a page"),
    ):  # fmt: skip
        assert cli.main(["docs", topic, "--example", "mine"]) == 2
        assert says in capsys.readouterr().err
    assert cli.main(["docs", "--example", "other"]) == 2
    assert "cupyattn docs your_kernel --example DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    "page", ["YOUR_KERNEL", "TESTING", "INTERPRETER", "INSTRUCTIONS", "MATH_REFERENCE"]
)
def test_pages_about_any_kernel_lead_to_pages_that_a_wheel_has(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / "docs" / f"{page}.md").read_text("utf-8"),
                  flags=re.DOTALL | re.MULTILINE)  # fmt: skip
    links = re.findall(r"\]\((?!http|#)([^)#]+\.md)", text)
    assert links and {link.removesuffix(".md").lower() for link in links} <= set(docs.topics())
