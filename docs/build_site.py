"""Build the documentation site from docs/*.md, docs/site and the docstrings, warnings as errors.

    python -m docs.build_site [FOLDER]

The pages read as plain Markdown, too. Sphinx gets a copy of them. There, a link to a file outside
of docs/ becomes the name of that file, since the site has no such page.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import cupyattn
from docs.write_api import MODULES, find, public

DOCS = Path(__file__).parent
ROOT = DOCS.parent
#: Pages that the site has in another form.
LEFT_OUT = ("README.md", "API.md")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def inside(match: re.Match[str]) -> str:
    """Return a link as it is if it leads to a page of the site, or else its text."""
    image, text, target = match.groups()
    path, _, anchor = target.partition("#")
    if path.removeprefix("./") == "API.md":
        return f"[{text}](../reference.md)"
    outside = path.startswith("../") or path == "README.md"
    if image or not outside or ":" in path:
        return match[0]
    name = (DOCS / path).resolve().relative_to(ROOT).as_posix()
    return text if text.strip("`") == name or anchor else f"{text} (`{name}`)"


def page(text: str) -> str:
    """Return a page of docs/ as the site has it."""
    parts = re.split(r"(^```.*?^```$)", COMMENT.sub("", text), flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [LINK.sub(inside, part) for part in parts[::2]]
    return "".join(parts)


def reference() -> dict[str, str]:
    """Return the pages of the reference: one that lists the modules, and one a module."""
    listed = "\n".join(f"reference/{name}" for name in MODULES)
    pages = {
        "reference.md": "# Reference\n\nEach module has a page, and each public name has one. "
        "[COMMANDS](pages/COMMANDS.md) describes the commands, and [LIMITS](pages/LIMITS.md) the "
        "devices, the environment variables and what is refused.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{listed}\npages/COMMANDS\npages/LIMITS\n```\n"
    }
    homes: dict[tuple[str, str], str] = {}
    for module in MODULES:
        names = [name for name in public(module) if f"{module}.{name}" not in MODULES]
        title = f"{module}\n{'=' * len(module)}\n\n"
        body = f".. automodule:: {module}\n   :no-members:\n\n.. currentmodule:: {module}\n\n"
        own, others = [], []
        for name in names:
            found = find(module, name)
            home = homes.setdefault((found.home, found.name), module)
            if home == module:
                own.append(f"   {name}")
            else:
                others.append(f"* :py:obj:`{home}.{name}`")
        body += ".. autosummary::\n   :toctree: names\n   :nosignatures:\n\n" + "\n".join(own)
        if others:
            body += "\n\nAlso here, for who imports from this module:\n\n" + "\n".join(others)
        pages[f"reference/{module}.rst"] = f"{title}{body}\n"
    return pages


def assemble(folder: Path) -> None:
    """Write the sources of the site into a folder, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS / "site", folder)
    pages = folder / "pages"
    pages.mkdir()
    for source in DOCS.iterdir():
        if source.suffix in (".svg", ".png"):
            shutil.copy(source, pages)
        elif source.suffix == ".md" and source.name not in LEFT_OUT:
            (pages / source.name).write_text(page(source.read_text("utf-8")), "utf-8")
    for name, text in reference().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site in a folder and return Sphinx's exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "docs")
    folder = parser.parse_args(argv).folder.resolve()
    sources = folder / "sources"
    assemble(sources)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    status = subprocess.run([*command, sources, folder / "html"], cwd=ROOT, check=False).returncode
    if not status:
        print(f"cupyattn {cupyattn.__version__}: {folder / 'html' / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
