"""Records of measurements: their cells by name, and two records of one experiment side by side.

A record is the JSON of an experiment or a command: measurements, ``environment`` and ``command``. A
cell is any object in it with ``samples`` or ``seconds``. Its name consists of its identifying keys
and the keys of the objects around it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from cupyattn.files import open_regular
from cupyattn.measure import timing
from cupyattn.measure.timing import Estimate

#: Keys that identify a cell, in the order of its name; all other keys are results.
IDENTITY = (
    "input", "problem", "part", "kind", "name", "label", "variant", "rung", "way", "mode",
    "feature", "framework", "batch", "heads", "heads_kv", "group", "length", "len_q", "len_kv",
    "head_dim", "m", "n", "k", "axis", "ranks", "left_out", "filled",
)  # fmt: skip
#: Keys of the environment whose differences may explain a difference in time.
COMPARED = (
    "device", "driver", "nvrtc", "cupy", "cupyattn", "revision", "dirty", "torch", "cudnn", "numpy",
    "python",
)  # fmt: skip
#: Times of a call, seconds, that a record may have: ratios of any two are finite.
LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e9
#: Largest depth of nested lists and objects in a record; records of experiments are 8 deep.
DEPTH = 64
VERDICTS = ("faster", "slower", "same", "undecided")


@dataclass(frozen=True)
class Cell:
    """One thing that was timed.

    Parameters
    ----------
    names : tuple of str
        Identifying keys of the objects around it and of itself, from the outside in.
    estimate : Estimate
        Median seconds of a call with their 95 % interval.
    samples : tuple of float
        Seconds, one for each round; empty if the record has none.
    judgement : mapping or None
        ``j2``, ``j3`` and ``relative_error``, if the record has them.
    """

    names: tuple[str, ...]
    estimate: Estimate
    samples: tuple[float, ...] = ()
    judgement: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """All of its names in one."""
        return ", ".join(self.names)


@dataclass(frozen=True)
class Compared:
    """One cell of two records.

    Parameters
    ----------
    name : str
    first, second : float
        Median seconds.
    speed : Estimate
        How many times as fast the second is, with its 95 % interval.
    verdict : {"faster", "slower", "same", "undecided"}
        Verdict on the second: the whole interval is past the margin, within it, or neither.
    """

    name: str
    first: float
    second: float
    speed: Estimate
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return asdict(self)


def read(path: Path) -> dict[str, Any]:
    """Read a record, and check all that `cells` and the reports rely on.

    Raises
    ------
    OSError
        If it cannot be read, or is no regular file.
    ValueError
        If it is no JSON, or no record.
    """
    try:
        with open_regular(path) as file:
            record = json.loads(file.read().decode("utf-8"))
        _check_depth(record)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON that a record could be: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("environment"), dict):
        raise ValueError(f'{path} is no record: it has no "environment"')
    environment = record["environment"]
    for name, value, kind in (
        ("environment.device", environment.get("device"), dict),
        ("environment.revision", environment.get("revision"), str),
        ("command", record.get("command"), str),
    ):
        if value is not None and not isinstance(value, kind):
            wanted = "an object" if kind is dict else "text"
            raise ValueError(f"{path} is no record: {name} must be {wanted}, got {value!r:.60}")
    try:
        cells(record)
    except ValueError as error:
        raise ValueError(f"{path} is no record: {error}") from error
    return record


def _check_depth(node: Any, left: int = DEPTH) -> None:
    """Raise ValueError if lists and objects are nested deeper than in any record."""
    if isinstance(node, (dict, list)):
        if not left:
            raise ValueError(f"its lists and objects are more than {DEPTH} deep")
        for item in node.values() if isinstance(node, dict) else node:
            _check_depth(item, left - 1)


def cells(record: Mapping[str, Any]) -> dict[str, Cell]:
    """Return the cells of a record by name; of two with one name the second has `` #2``.

    Raises
    ------
    ValueError
        For a time that is no number of seconds within `LEAST_SECONDS` and `MOST_SECONDS`, or a
        malformed interval or judgement.

    Examples
    --------
    >>> row = {"variant": "fa", "samples": [2.0, 1.0, 3.0]}
    >>> found = cells({"problems": [{"problem": {"name": "small"}, "rows": [row]}]})
    >>> [(name, cell.estimate.median) for name, cell in found.items()]
    [('small, fa', 2.0)]
    """
    found: dict[str, Cell] = {}
    numbers: dict[str, int] = {}
    for cell in _cells(record):
        named, number = cell, numbers.get(cell.name, 1)
        while named.name in found:
            number += 1
            numbers[cell.name] = number
            *above, last = cell.names or ("",)
            named = replace(cell, names=(*above, f"{last} #{number}"))
        found[named.name] = named
    return found


def _cells(record: Any) -> Iterator[Cell]:
    for names, node in named_objects(record):
        judgement = node.get("judgement")
        judgement = judgement if isinstance(judgement, dict) else None
        samples, seconds = node.get("samples"), node.get("seconds")
        if isinstance(samples, dict):
            for name, some in samples.items():
                if _is_samples(some):
                    yield _timed((*names, name), some, None)
        elif isinstance(samples, list) and _is_samples(samples):
            yield _timed(names, samples, judgement)
        elif is_number(seconds):
            estimate = _estimate(names, seconds, node.get("seconds_interval"))
            yield Cell(names, estimate, (), judgement)


def named_objects(
    node: Any, also: Sequence[str] = (), above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the objects of a record, each with its names behind the names of its parents.

    `also` are keys whose text is a name, beside `own_names`.
    """
    if isinstance(node, list):
        for item in node:
            yield from named_objects(item, also, above)
    elif isinstance(node, dict):
        further = (node.get(key) for key in also)
        own = (*own_names(node), *(x for x in further if isinstance(x, str) and x))
        names = (*above, *own)
        yield names, node
        for key, item in node.items():
            if key not in ("samples", "environment", "clocks", "judgement"):
                yield from named_objects(item, also, names)


def own_names(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the identifying entries of a part of a record; numbers come with their names."""
    for key in IDENTITY:
        value = None if key == "rung" and "variant" in node else node.get(key)
        if key == "problem" and isinstance(value, dict):
            value = value.get("name")
        if isinstance(value, str) and value:
            yield value
        elif isinstance(value, bool):
            yield key if value else f"not {key}"
        elif isinstance(value, int):
            yield f"{key} {value}"
        elif key == "left_out" and isinstance(value, list):
            yield f"without {' and '.join(map(str, value))}" if value else "whole"


def _is_samples(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, float) for x in value)


def _estimate(names: tuple[str, ...], seconds: float, interval: Any) -> Estimate:
    """Return a time with its interval, both as a record has them."""
    low, high = (seconds, seconds) if not interval else interval if _is_pair(interval) else (0, 0)
    if not LEAST_SECONDS <= low <= seconds <= high <= MOST_SECONDS:
        raise ValueError(
            f"the time of {', '.join(names)!r:.80} must be seconds from {LEAST_SECONDS:g} to "
            f"{MOST_SECONDS:g} within an interval [low, high], got {seconds!r:.40} and "
            f"{interval!r:.60}"
        )
    return Estimate(float(seconds), float(low), float(high))


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(map(is_number, value))
    )


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a record is a number, which True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _timed(names: tuple[str, ...], samples: list[float], judgement: Any) -> Cell:
    for seconds in samples:
        if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            raise ValueError(
                f"the samples of {', '.join(names)!r:.80} must be seconds from {LEAST_SECONDS:g} "
                f"to {MOST_SECONDS:g}, got {seconds!r}"
            )
    return Cell(names, timing.median(samples), tuple(samples), judgement)


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], margin: float = 0.02
) -> list[Compared]:
    """Return the cells that two records have in common, side by side.

    Parameters
    ----------
    first, second : mapping
        Records of one experiment.
    margin : float
        Speeds within ``1 / (1 + margin)`` and ``1 + margin`` of each other are the same.

    Raises
    ------
    ValueError
        If the records are of two experiments, or have no timed cell in common.

    Notes
    -----
    The runs are not paired, so the interval does not include drift of clocks and temperature. If
    both records have samples, the interval is the bootstrap of the ratio of their medians.
    Otherwise it is the widest that the two intervals allow.
    """
    check_same_experiment(first, second)
    mine, other = cells(first), cells(second)
    common = [name for name in mine if name in other]
    if not common:
        raise ValueError(
            f"the records have no timed cell in common: the first has {len(mine)}, the second "
            f"{len(other)}"
        )
    found = []
    for name in common:
        a, b = mine[name], other[name]
        speed = _speed(a, b)
        found.append(
            Compared(name, a.estimate.median, b.estimate.median, speed, verdict(speed, margin))
        )
    return found


def check_same_experiment(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raise ValueError unless two records are of one experiment."""
    names = [record.get("experiment") for record in (first, second)]
    if names[0] != names[1]:
        raise ValueError(
            f"the records are of two experiments, {names[0]!r:.60} and {names[1]!r:.60}"
        )


def _speed(a: Cell, b: Cell) -> Estimate:
    if a.samples and b.samples:
        return timing.ratio_of_medians(a.samples, b.samples)
    one, two = a.estimate, b.estimate
    return Estimate(one.median / two.median, one.low / two.high, one.high / two.low)


def verdict(speed: Estimate, margin: float) -> str:
    """Return which of `VERDICTS` an interval of speed says.

    Examples
    --------
    >>> verdict(Estimate(1.1, 1.05, 1.2), 0.02), verdict(Estimate(1.0, 0.99, 1.01), 0.02)
    ('faster', 'same')
    >>> verdict(Estimate(0.9, 0.8, 0.95), 0.02), verdict(Estimate(1.0, 0.9, 1.1), 0.02)
    ('slower', 'undecided')
    """
    least, most = 1 / (1 + margin), 1 + margin
    if speed.low > most:
        return "faster"
    if speed.high < least:
        return "slower"
    return "same" if speed.low >= least and speed.high <= most else "undecided"


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the differences between the environments of two records, as text."""
    a, b = (_facts(record["environment"]) for record in (first, second))
    return {key: (a[key], b[key]) for key in a if a[key] != b[key]}


def _facts(environment: Mapping[str, Any]) -> dict[str, str]:
    device = environment.get("device") or {}
    facts = {**environment, "device": device.get("name"), "driver": device.get("driver")}
    return {key: "-" if facts.get(key) is None else str(facts[key]) for key in COMPARED}


def summary(speeds: list[Compared]) -> tuple[float, dict[str, int]]:
    """Return the geometric mean of the speeds, and how many cells have each verdict."""
    mean = math.exp(sum(math.log(one.speed.median) for one in speeds) / len(speeds))
    return mean, {name: sum(one.verdict == name for one in speeds) for name in VERDICTS}
