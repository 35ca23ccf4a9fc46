"""What the command prints: rich on a terminal that has it, plain text elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cupyattn.files import replacing
from cupyattn.measure.words import align


def _rich(stream: Any) -> Any:
    """Return a rich console on a terminal; None where it is none or rich is missing."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, markup=False, highlight=False)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table at once: aligned columns, or rich's where there is a terminal."""
    console = _rich(sys.stdout)
    if console is None:
        print(align([header, *rows]), flush=True)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, no_wrap=name != header[-1])
    for row in rows:
        failed = any(cell.endswith("> 1") for cell in row)
        table.add_row(*row, style="red" if failed else None)
    console.print(table)


def print_facts(facts: dict[str, Any]) -> None:
    """Print names and values, one line each."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {value}")


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on standard error where that is a terminal with rich.

    Parameters
    ----------
    what : str
    total : int or None
        Steps; None where nobody knows how many.

    Yields
    ------
    advance : callable
        Takes one step; its argument says what was done.
    """
    console = _rich(sys.stderr)
    if console is None:
        yield lambda done: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, advance=1, description=f"{what}: {done}")


def write_json(path: str | os.PathLike[str], record: Any) -> None:
    """Write a record as JSON, whole or not at all; infinities become the strings of their names."""
    text = json.dumps(_finite(record), indent=1, allow_nan=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value
