"""The pytest plugin: an output outside its bound leaves a file, and the line that replays it.

pytest loads it by the entry point of an installed cupyattn; in a checkout, by
``-p cupyattn.testing.plugin``. It imports neither NumPy nor the rest of cupyattn before a test
fails. Where `cupyattn.testing.assert_within_bound` raises, the last counterexample of the test,
with Hypothesis the smallest, is written to ``.cupyattn`` in pytest's root folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyattn.testing.watching import WATCHED

if TYPE_CHECKING:
    import pytest

#: Largest number of counterexamples in the folder, one for each test. The oldest are removed.
MOST_FILES = 100
#: Seconds after which an unfinished file belongs to a run that was killed.
ABANDONED = 3600.0
_FOLDER, _REPLAY = "--cupyattn-folder", "--cupyattn-replay"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("cupyattn", "error bounds of attention")
    group.addoption(
        _FOLDER, metavar="DIR", default=None,
        help="where counterexamples of cupyattn.testing.assert_within_bound are written "
        "(.cupyattn in pytest's root folder)",
    )  # fmt: skip
    group.addoption(
        _REPLAY, metavar="FILE", default=None,
        help="let cupyattn.strategies.attention_inputs draw the arrays of this file alone",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Note which file is replayed during this run."""
    given, before = config.getoption(_REPLAY), WATCHED.replay
    if given is None:
        return
    path = Path(given).absolute()
    if not path.is_file():
        import pytest

        raise pytest.UsageError(f"{_REPLAY} must name a counterexample, got no file at {given!r}")
    WATCHED.replay = path
    config.add_cleanup(lambda: setattr(WATCHED, "replay", before))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Watch a test."""
    WATCHED.test, WATCHED.failure = item.nodeid, None


def _outermost(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let a hook run around the hooks that turn an expected failure into a pass."""
    with contextlib.suppress(ImportError):  # without pytest the module is looked at, and no more
        import pytest

        return pytest.hookimpl(wrapper=True, tryfirst=True)(hook)
    return hook


@_outermost
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the counterexample of a test that failed, and add its line to the report."""
    report = yield
    if call.when == "call" and report.failed and WATCHED.failure is not None and call.excinfo:
        report.sections.append(("Captured cupyattn call", _written(item, WATCHED.failure)))
    return report


def pytest_runtest_teardown() -> None:
    """Stop watching the test, and release its arrays."""
    WATCHED.test, WATCHED.failure = "", None


def _written(item: pytest.Item, failure: Any) -> str:
    """Write a counterexample. Return the line that replays it, or the reason why none was kept."""
    config = item.config
    folder = Path(config.getoption(_FOLDER) or config.rootpath / ".cupyattn")
    path = folder / file_name(item.nodeid)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        failure.save(path)
        prune(folder)
    except (OSError, ValueError) as error:
        return f"the counterexample is not kept: {error}"
    here = config.invocation_params.dir
    _, separator, rest = item.nodeid.partition("::")
    test = os.path.relpath(item.path, here) + separator + rest
    file = os.path.relpath(path.absolute(), here)
    return f"python -m pytest {shlex.quote(test)} {_REPLAY}={shlex.quote(file)}"


def file_name(test: str) -> str:
    """Return the name of a test's file: one for each, so that a run overwrites its last.

    Examples
    --------
    >>> file_name("tests/test_mine.py::test_it[causal-fp16]")
    'test_it_causal-fp16-1ab0e0ab2ffa.npz'
    """
    words = re.sub(r"[^\w.-]+", "_", test.rpartition("::")[2]).strip("_")[:60]
    return f"{words}-{hashlib.sha256(test.encode()).hexdigest()[:12]}.npz"


def prune(folder: Path) -> None:
    """Remove the oldest files past `MOST_FILES`, and unfinished files of killed runs."""
    kept = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another worker was faster
            changed = path.stat().st_mtime
            if re.fullmatch(r"[^.].*-[0-9a-f]{12}\.npz", path.name):
                kept.append((changed, path))
            unfinished = re.fullmatch(r"\..+\.npz\.[0-9a-f]{16}\.tmp", path.name)
            if unfinished and changed < time.time() - ABANDONED:
                path.unlink()
    for _, path in sorted(kept)[:-MOST_FILES]:
        path.unlink(missing_ok=True)
