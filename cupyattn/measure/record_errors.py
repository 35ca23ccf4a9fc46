"""Errors of two records side by side, for records that hold no times.

A judged part is anything in a record with ``judgement``: `cupyattn.measure.records` says how parts
are named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cupyattn.measure.records import is_number, named_objects

#: Keys that name a judged part, in addition to `cupyattn.measure.records.IDENTITY`.
_ALSO = ("distribution", "dtype", "shape", "form")
#: Keys of a judgement; the first is the largest error relative to its bound.
MEASURES = ("j2", "j3", "relative_error")
VERDICTS = ("more exact", "less exact", "same")


@dataclass(frozen=True)
class ComparedErrors:
    """The errors of one part in two records.

    Parameters
    ----------
    name : str
    first, second : dict
        The `MEASURES` that both records have.
    verdict : {"more exact", "less exact", "same"}
        Verdict on the second: its relative error is past the margin, or within it.
    """

    name: str
    first: dict[str, float]
    second: dict[str, float]
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return asdict(self)


def judged(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the errors of a record by the name of the part; of equal names the second has `` #2``.

    Examples
    --------
    >>> row = {"variant": "fa", "judgement": {"j2": 0.5, "j3": None, "relative_error": 1e-3}}
    >>> judged({"rungs": [row]})
    {'fa': {'j2': 0.5, 'relative_error': 0.001}}
    """
    found: dict[str, dict[str, float]] = {}
    numbers: dict[str, int] = {}
    for names, node in named_objects(record, _ALSO):
        if errors := _errors(node.get("judgement")):
            name = ", ".join(names)
            numbers[name] = numbers.get(name, 0) + 1
            found[name if numbers[name] == 1 else f"{name} #{numbers[name]}"] = errors
    return found


def _errors(judgement: Any) -> dict[str, float]:
    if not isinstance(judgement, dict):
        return {}
    found = {key: judgement[key] for key in MEASURES if is_number(judgement.get(key))}
    return {key: value for key, value in found.items() if 0 <= value < math.inf}


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], margin: float = 0.02
) -> list[ComparedErrors]:
    """Return the judged parts that two records have in common, side by side.

    Parameters
    ----------
    first, second : mapping
        Records of one experiment.
    margin : float
        Relative errors within ``1 / (1 + margin)`` and ``1 + margin`` of each other are the same.
    """
    mine, other = judged(first), judged(second)
    found = []
    for name in mine:
        if name not in other:
            continue
        keys = [key for key in MEASURES if key in mine[name] and key in other[name]]
        if keys:
            a, b = ({key: some[name][key] for key in keys} for some in (mine, other))
            found.append(ComparedErrors(name, a, b, _verdict(a[keys[-1]], b[keys[-1]], margin)))
    return found


def _verdict(first: float, second: float, margin: float) -> str:
    """Return which of `VERDICTS` two errors say, of the second.

    Examples
    --------
    >>> _verdict(1.0, 0.5, 0.02), _verdict(1.0, 1.01, 0.02), _verdict(0.0, 0.0, 0.02)
    ('more exact', 'same', 'same')
    """
    if second * (1 + margin) < first:
        return "more exact"
    return "less exact" if second > first * (1 + margin) else "same"
