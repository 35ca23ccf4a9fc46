"""Count breaches of the style of this project in each file: words, fragments, long sentences.

Without options, it prints the breaches of each file. The options are::

    python -m docs.style --update   # write tests/docs/style_counts.json
    python -m docs.style --words    # print the words of each page that is written by hand

A file may break a rule only as often as that list says. `--update` refuses a list whose sums have
grown, but allows breaches that move from one file to another.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COUNTS = ROOT / "tests" / "docs" / "style_counts.json"
#: Words that a reader stumbles over, and phrases in which a noun is missing.
AVOIDED = re.compile(
    r"\b(?:(?:anew|lest|nobody|no say|comes by|comes to|whereof|thereof|of late)\b|likewise\.)",
    re.IGNORECASE,
)
MISSING_NOUN = re.compile(
    r"\b(those (?:of|that|which|with|whose)|that which|what (?:is|it|there)|of its own)\b",
    re.IGNORECASE,
)
#: First words of a fragment without subject and verb, unless it is a question or says how to do it.
FRAGMENT = re.compile(r"(?:Of|What|How(?! to)|Which|Where|Who|Whose|That|Those)\b(?![^.]*\?)")
WORDS_A_SENTENCE = 25
RULES = ("avoided words", "missing nouns", "long sentences", "fragments")
#: Pages that a command writes, and the notebook, which is a diary.
WRITTEN = {"docs/API.md", "tests/README.md", "experiments/results/NOTES.md"}
SUFFIXES = (".py", ".md", ".cu", ".cuh")
FOLDERS = ("cupyattn", "kernels_cu", "docs", "experiments", "examples")
#: The most words that all pages written by hand may have together.
PAGE_WORDS = 75_000
#: Beginning of a field of a kernel's header, and the fields that are lists of tags and names.
_FIELD = re.compile(r"^ (?=[A-Z][\w ,]{3,11} {2,}\S|Differs from )", re.MULTILINE)
#: Fields of an experiment's docstring: lists of items, between semicolons, and commands.
_ITEMS = re.compile(r"^(?:Varies|Holds fixed|Measures|Beside|Timing|Expect|Run) +", re.MULTILINE)
_LISTS = ("Rounding", "Mirror", "Bound", "Steps")
#: Beginning of a page that a command writes, and text between marks that a command writes.
GENERATED_PAGE = re.compile(r"Written by `?python -m ")
_MARKED = re.compile(
    r"<!-- ([\w ]+): begin -->.*?<!-- \1: end -->"
    r"|<!-- (?:steps|provenance|count|diff|rest|times)\b[^>]*-->.*?<!-- end -->",
    re.DOTALL,
)


def files() -> list[Path]:
    """Return all files that have prose of ours, by name."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for folder in FOLDERS:
        found += (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    return sorted(path for path in found if path.relative_to(ROOT).as_posix() not in WRITTEN)


def prose(path: Path) -> Iterator[str]:
    """Yield the paragraphs of a page, or the comments and docstrings of a source."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _paragraphs(text)
    elif path.suffix == ".py":
        yield from _of_python(text)
    else:
        blocks = re.findall(r"(?:^[ \t]*//.*\n)+|//.*", text, re.MULTILINE)
        for block in blocks:
            fields = _FIELD.split(re.sub(r"^[ \t]*//", "", block, flags=re.MULTILINE))
            if len(fields) == 1:  # no header: indented lines are formulas and layouts
                fields = [re.sub(r"^ {3,}\S.*$", "", fields[0], flags=re.MULTILINE)]
            yield from (field for field in fields if not field.startswith(_LISTS))


def _paragraphs(text: str) -> Iterator[str]:
    skipped = r"^```.*?^```$|<!--.*?-->|^\$\$.*?\$\$"
    text = re.sub(skipped, "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(#|\||!\[).*$", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.MULTILINE):
        paragraph = re.sub(r"\]\([^)]*\)", "]", paragraph)
        yield re.sub(r"\$[^$]*\$|`[^`]*`", "X", paragraph)


def _of_python(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            paragraphs = re.split(r"\n\s*\n", ast.get_docstring(node) or "")
            for before, paragraph in itertools.pairwise(["", *paragraphs]):
                if before.endswith("::") and paragraph.startswith(" "):
                    continue  # formulas and commands, a literal block
                if paragraph.startswith("Varies "):
                    fields = _ITEMS.split(re.sub(r"^Run .*", "", paragraph, flags=re.M | re.S))
                    yield from (item for field in fields for item in field.split(";"))
                elif not re.search(r"^\s*(?:>>>|\.\. math)|^-+$| : ", paragraph, re.MULTILINE):
                    yield re.sub(r"``?[^`]*``?", "X", paragraph)
    block: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            behind_code = not token.line.lstrip().startswith("#")
            if block and (behind_code or token.start[0] != last + 1):
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]
    if block:
        yield " ".join(block)


def beginnings(path: Path) -> Iterator[str]:
    """Yield the text of each docstring, and each line of comments behind ``#:``."""
    if path.suffix == ".py":
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
        yield from re.findall(r"^[ \t]*#: (.*)", text, re.MULTILINE)


def sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph.

    Examples
    --------
    >>> sentences("It runs, e.g. here. So does 2.5 of it! ")
    ['It runs, e.g. here.', 'So does 2.5 of it!']
    """
    return [one for one in re.split(r"(?<=[.!?])\s+(?=[A-Z`*(\[])", paragraph.strip()) if one]


def counts(path: Path) -> dict[str, int]:
    """Return how often a file breaks each rule, rules that it keeps left out."""
    found = dict.fromkeys(RULES, 0)
    for paragraph in prose(path):
        found["avoided words"] += len(AVOIDED.findall(paragraph))
        found["missing nouns"] += len(MISSING_NOUN.findall(paragraph))
        found["long sentences"] += sum(
            len(one.split()) > WORDS_A_SENTENCE for one in sentences(paragraph)
        )
    found["fragments"] = sum(FRAGMENT.match(text) is not None for text in beginnings(path))
    return {rule: count for rule, count in found.items() if count}


def all_counts(part: int = 0, parts: int = 1) -> dict[str, dict[str, int]]:
    """Return what each file breaks, files that keep all rules left out.

    Parameters
    ----------
    part, parts : int
        Every `parts`-th file, from the one of number `part` on.
    """
    some = files()[part::parts]
    found = {path.relative_to(ROOT).as_posix(): counts(path) for path in some}
    return {name: of_file for name, of_file in found.items() if of_file}


def totals(found: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return how often each rule is broken in all files."""
    return {rule: sum(of_file.get(rule, 0) for of_file in found.values()) for rule in RULES}


def page_words() -> dict[str, int]:
    """Return how many words each page has that is written by hand.

    Tables and blocks of code count, text between the marks of a command does not. The notebook is
    a diary of trials, to which pages link: it is no page that a reader goes through.
    """
    found = {}
    for path in files():
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md" and not GENERATED_PAGE.search(text[:400]):
            found[path.relative_to(ROOT).as_posix()] = len(_MARKED.sub("", text).split())
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the counts, or write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help=f"write {COUNTS.name}")
    parser.add_argument("--words", action="store_true", help="count the words of pages")
    args = parser.parse_args(argv)
    if args.words:
        pages = page_words()
        for name, words in sorted(pages.items(), key=lambda item: item[1]):
            print(f"{words:7,} {name}")
        print(f"{sum(pages.values()):7,} of {PAGE_WORDS:,} words")
        return 0
    found = all_counts()
    sums = totals(found)
    if args.update:
        allowed = totals(json.loads(COUNTS.read_text("utf-8"))) if COUNTS.exists() else sums
        if grown := [rule for rule in RULES if sums[rule] > allowed[rule]]:
            print(f"not written: more {' and '.join(grown)} than before ({sums} over {allowed})")
            return 1
        COUNTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
    else:
        for name, of_file in found.items():
            print(name, ", ".join(f"{count} {rule}" for rule, count in of_file.items()))
    print(", ".join(f"{count:,} {rule}" for rule, count in sums.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
