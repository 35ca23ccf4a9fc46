"""Write one self-contained HTML page from records of measurements. Give files, or folders for all
their records. Without any, the ladder runs now on a small input. The page needs no network,
follows the reader's colour scheme and can be read on a phone."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from cupyattn.cli import ladder, output
from cupyattn.files import check_folder, replacing
from cupyattn.measure import records
from cupyattn.measure import report as pages
from cupyattn.measure.words import counted

#: Settings of the ladder run that replaces missing records.
SMALL = ["--heads", "1", "--len", "128", "--head-dim", "64"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "records", nargs="*", type=Path, metavar="FILE|FOLDER", help="what --json wrote"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=Path("report.html"),
        help="the page (default report.html)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    check_folder("--out", args.out)
    found = given(args.records) if args.records else run_ladder()
    with replacing(args.out) as file:
        file.write(pages.page(found).encode())
    count = len(found)
    output.say(f"wrote {args.out}: {counted(count, 'record')}")
    return 0


def given(paths: list[Path]) -> list[tuple[str, dict[str, Any]]]:
    """Return names and records of files, and of all files in folders.

    Raises
    ------
    ValueError
        If a folder has no record, or a file is not a record.
    """
    found = []
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} has no record: a record is a .json that a command wrote")
        with output.progress("reading", len(files)) as advance:
            for file in files:
                found.append((file.stem, records.read(file)))
                advance(file.stem)
    return found


def run_ladder() -> list[tuple[str, dict[str, Any]]]:
    """Run the ladder on a small input now, and return its record."""
    with tempfile.TemporaryDirectory(prefix="cupyattn-report-") as folder:
        file = Path(folder) / "ladder.json"
        parser = argparse.ArgumentParser()
        ladder.configure(parser)
        arguments = [*SMALL, "--json", str(file)]
        args = parser.parse_args(arguments)
        args.arguments = ["ladder", *arguments]
        ladder.run(args)
        return [("ladder", records.read(file))]
