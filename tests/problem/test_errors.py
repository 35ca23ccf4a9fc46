"""Every exception of the package goes through pickle whole: type, message and attributes."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import cupyattn
from cupyattn.interpret.findings import Finding

#: Values for parameters of exceptions, by name.
EXAMPLES: dict[str, Any] = {
    "rank": 3, "sequence": 7, "cause": "sent no number", "message": "a failure", "log": "line 1",
    "finding": Finding("race", "two writes", "fa", None, 1, 2, 3),
}  # fmt: skip


def exceptions() -> Iterator[type[BaseException]]:
    """Every class of exception that a module of the package defines."""
    for found in pkgutil.walk_packages(cupyattn.__path__, "cupyattn."):
        if found.name.endswith("__main__"):
            continue
        with contextlib.suppress(ImportError):  # of a library that is not installed
            module = importlib.import_module(found.name)
            for own in vars(module).values():
                is_error = inspect.isclass(own) and issubclass(own, BaseException)
                if is_error and own.__module__ == found.name:
                    yield own


def example(kind: type[BaseException]) -> BaseException:
    """An exception of a kind, with an argument for each parameter of its own constructor."""
    if "__init__" not in vars(kind):
        return kind("a message")
    return kind(*(EXAMPLES[name] for name in inspect.signature(kind).parameters))


FOUND = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in exceptions()}


def test_the_walk_finds_them() -> None:
    own = {
        "errors.RankError", "distributed.frames.BrokenFrameError", "interpret.findings.KernelFault",
    }  # fmt: skip
    assert {f"cupyattn.{name}" for name in own} <= FOUND.keys()


@pytest.mark.parametrize("name", FOUND)
def test_an_exception_survives_pickle(name: str) -> None:
    error = example(FOUND[name])
    error.__notes__ = ["what led to it"]  # type: ignore[attr-defined]  # as Python 3.11's add_note
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert vars(again) == vars(error)
