"""Output of commands: rich on a terminal if it is installed, plain text otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cupyattn.files import replacing
from cupyattn.measure.words import align, printable

#: Least time in seconds between two lines of progress without a terminal.
LINE_SECONDS = 5.0


def _rich(stream: Any) -> Any:
    """Return a rich console; None without a terminal or without rich."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, markup=False, highlight=False)


def say(text: object = "", *, flush: bool = False, error: bool = False) -> None:
    """Print lines; control characters except line ends become escapes.

    Parameters
    ----------
    text : object
    flush : bool
    error : bool
        Print on standard error.
    """
    lines = map(printable, str(text).split("\n"))
    print("\n".join(lines), file=sys.stderr if error else sys.stdout, flush=flush)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: rich's on a terminal, otherwise aligned columns."""
    console = _rich(sys.stdout)
    rows = [[printable(cell) for cell in row] for row in rows]
    if console is None:
        say(align([header, *rows]), flush=True)
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
        say(f"{name.ljust(width)}  {value}")


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show progress on standard error: a bar on a terminal with rich, lines elsewhere.

    Without a terminal, a line is printed at most every `LINE_SECONDS`, so short runs print none.

    Parameters
    ----------
    what : str
    total : int or None
        Steps, if the number is known.

    Yields
    ------
    advance : callable
        Counts one step; its argument describes the step.
    """
    console = _rich(sys.stderr)
    if console is None:
        yield _Lines(what, total)
        return
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(
            task, advance=1, description=escape(f"{what}: {printable(done)}")
        )


class _Lines:
    """Prints progress as lines, for pipes and log files."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._of = what, "" if total is None else f" of {total}"
        self._done, self._start = 0, time.monotonic()
        self._said = self._start

    def __call__(self, done: str) -> None:
        self._done, now = self._done + 1, time.monotonic()
        if now - self._said < LINE_SECONDS:
            return
        self._said = now
        say(
            f"{self._what}: step {self._done}{self._of}, {done}, {now - self._start:.0f} s",
            flush=True, error=True,
        )  # fmt: skip


def write_json(path: str | os.PathLike[str], record: Any) -> None:
    """Write a record as JSON, whole or not at all; infinities become strings."""
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
