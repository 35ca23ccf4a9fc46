"""Print a page of the documentation as Markdown, or the docstring of a public name.

Without TOPIC, the command lists all pages. TOPIC is a page such as tutorial or troubleshooting, or
a name such as attention, Int8Linear or testing.judge. If a page and a name are spelled alike, as
with ladder, TOPIC means the page, and cupyattn.ladder means the name. No network is needed. The
page your_kernel has an example: --example copies its files to a folder."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

from cupyattn.cli import output

#: Files that are not topics: the index of pages, and the generated page of docstrings.
NO_TOPICS = ("README", "API")
PACKAGE = Path(__file__).resolve().parents[1]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="a page, or a public name")
    parser.add_argument(
        "--example", metavar="DIR", help="copy the files of the page's example to a new folder"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    pages = topics()
    if args.topic is None and args.example is not None:
        raise ValueError("--example needs the page: cupyattn docs your_kernel --example DIR")
    if args.topic is None:
        output.print_table(["topic", "answers"], [[name, pages[name][1]] for name in pages])
        output.say("\nA public name, such as attention or testing.judge, prints its docstring.")
        return 0
    topic = args.topic.lower().removesuffix(".md").replace("-", "_")
    if args.example is not None:
        if topic not in pages:
            raise ValueError(
                f"--example needs a page, got {args.topic!r}: cupyattn docs your_kernel --example "
                "DIR"
            )
        copy_example(topic, Path(args.example))
        return 0
    if topic in pages:
        output.say(page_text(pages[topic][0]))
        return 0
    found = public_name(args.topic.removeprefix("cupyattn."))
    if found is None:
        public = dir(importlib.import_module(PACKAGE.name))
        names = [*pages, *(name for name in public if not name.startswith("_"))]
        spelled = {name.lower(): name for name in reversed(names)}
        near = difflib.get_close_matches(topic, spelled, 3)
        guess = f", did you mean {' or '.join(spelled[one] for one in near)}?" if near else ""
        raise ValueError(
            f"there is no page and no public name {args.topic!r}{guess or ':'} "
            "run cupyattn docs for a list"
        )
    output.say(described(args.topic, found))
    return 0


def folder() -> Path:
    """Return the folder of the pages: inside an installed package, or docs/ of the checkout.

    Raises
    ------
    OSError
        If it is in neither place.
    """
    places = PACKAGE / "docs", PACKAGE.parent / "docs"
    for place in places:
        if (place / "README.md").is_file():
            return place
    raise OSError(f"no pages are in {places[0]} or {places[1]}: reinstall cupyattn")


def copy_example(topic: str, to: Path) -> None:
    """Copy the files of a page's example, and print their names.

    Raises
    ------
    ValueError
        If the page has no example, or the folder exists.
    """
    places = folder() / topic, folder().parent / "examples" / topic
    example = next((place for place in places if place.is_dir()), None)
    if example is None:
        raise ValueError(f"the page {topic} has no example folder: your_kernel has one")
    if to.exists():
        raise ValueError(f"{to} exists: name a new folder for the example")
    shutil.copytree(example, to, ignore=shutil.ignore_patterns("__pycache__"))
    output.say(f"Wrote {', '.join(sorted(str(path) for path in to.iterdir()))}")


def topics() -> dict[str, tuple[Path, str]]:
    """Return the file of each topic and the question that it answers, in the index's order."""
    index = (folder() / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| (.*?) \|$", index, re.MULTILINE)
    return {
        name.lower(): (folder() / f"{name}.md", answer)
        for name, answer in rows
        if name not in NO_TOPICS
    }


def page_text(path: Path) -> str:
    """Return a page without its HTML comments, and with each picture as its description."""
    parts = re.split(r"(^```.*?^```$)", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for i in range(0, len(parts), 2):
        text = re.sub(r"<!--.*?-->\n?", "", parts[i], flags=re.DOTALL)
        parts[i] = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"[picture: \1]", text)
    return "".join(parts).strip()


def public_name(dotted: str) -> Any:
    """Return a public object of cupyattn by its dotted name, or None if there is none.

    Raises
    ------
    ValueError
        If its module needs a library that is not installed.
    """
    found: Any = importlib.import_module(PACKAGE.name)
    for part in dotted.split("."):
        if not part or part.startswith("_"):
            return None
        parent = found
        found = getattr(parent, part, None)
        if found is None and isinstance(parent, ModuleType):
            name = f"{parent.__name__}.{part}"
            try:
                found = importlib.import_module(name)
            except ImportError as error:
                if error.name is None or name.startswith(error.name):
                    return None
                raise ValueError(
                    f"{name} needs {error.name}, which is not installed: install it, and try again"
                ) from error
        kind = "__name__" if isinstance(found, ModuleType) else "__module__"
        home = getattr(found, kind, PACKAGE.name)
        if not home.startswith(PACKAGE.name):  # names that our modules imported from other packages
            return None
    return found


def described(name: str, found: Any) -> str:
    """Return an object's signature, docstring and first lines of its members, or a value."""
    if not hasattr(found, "__module__") and not isinstance(found, ModuleType):
        return f"{name} = {found!r}"
    lines = [name]
    if callable(found):
        try:
            signature = inspect.signature(found)
            bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
            signature = signature.replace(parameters=bare, return_annotation=signature.empty)
            lines = [f"{name}{signature}"]
        except (TypeError, ValueError):  # a class whose constructor has no signature
            pass
    lines += ["", inspect.getdoc(found) or "It has no docstring."]
    members = []
    if isinstance(found, type | ModuleType):
        listed = getattr(found, "__all__", None) or (vars(found) if isinstance(found, type) else ())
        for member in sorted(one for one in listed if not one.startswith("_")):
            text = inspect.getdoc(getattr(found, member, None)) or ""
            members.append(f"  {member}: {text.partition(chr(10))[0]}")
    return "\n".join([*lines, *(["", "Members:", *members] if members else [])])
