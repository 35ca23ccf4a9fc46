"""Records that were measured in parts: read, and brought together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from cupyattn.measure import records
from experiments._harness import recording

#: More problems of another revision than these are counted, not named.
MOST_NAMED = 2


def record_of(name: str, file: Path) -> dict[str, Any]:
    """Return a record of an experiment from a file.

    Raises
    ------
    ValueError
        If it is a record of another.
    """
    record = records.read(file)
    if record.get("experiment") != name:
        raise ValueError(f"{file} is a record of {record.get('experiment')!r}, not of {name!r}")
    return record


def with_missing(record: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of problems with the problems of another that it lacks, by head_dim.

    Each of these says at which revision, by which command, and on which device it was measured.
    """
    known = {found["problem"]["name"] for found in record["problems"]}
    environment = part["environment"]
    of_part = {"command": part["command"], "revision": environment.get("revision")}
    if environment.get("device"):
        of_part["device"] = environment["device"]["name"]
    problems = list(record["problems"])
    problems += [
        {**of_part, **found} for found in part["problems"] if found["problem"]["name"] not in known
    ]
    problems.sort(key=lambda found: int(found["problem"]["head_dim"]))
    return {**record, "problems": problems}


def of_another_revision(record: Mapping[str, Any]) -> str:
    """Return text to put after a record's revision, on parts of another revision; often "".

    Examples
    --------
    >>> some = [{"problem": {"head_dim": 64}}, {"problem": {"head_dim": 256}, "revision": "0a"}]
    >>> of_another_revision({"problems": some})
    ', but head_dim 256 of revision 0a'
    >>> again = {"rung": "fa_tc", "revision": "0a", "device": "H200"}
    >>> of_another_revision({"problems": [{"rows": [again, {"rung": "fa"}]}]})
    ', but fa_tc of revision 0a on H200'
    """
    return "".join(f", but {what} of revision {at}" for at, what in other_revisions(record).items())


def other_revisions(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of a record that have another revision, by revision and device.

    Parts are whole problems, or rungs that were measured again.
    """
    problems: dict[str, list[Mapping[str, Any]]] = {}
    rungs: dict[str, list[str]] = {}
    environment = record.get("environment", {})
    own, own_device = environment.get("revision"), (environment.get("device") or {}).get("name")

    def other(found: Mapping[str, Any]) -> str:
        if found.get("revision", own) == own:
            return ""
        device = found.get("device", own_device)
        return str(found["revision"][:10]) + ("" if device == own_device else f" on {device}")

    for found in record.get("problems", ()):
        if at := other(found):
            problems.setdefault(at, []).append(found["problem"])
        rows = found.get("rows")
        for row in rows if isinstance(rows, list) else ():  # others count them
            if (at := other(row)) and row["rung"] not in rungs.setdefault(at, []):
                rungs[at].append(row["rung"])
    said = {at: _some_of(some, record) for at, some in problems.items()}
    return said | {at: " and ".join(some) for at, some in rungs.items()}


def _some_of(some: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> str:
    """Return what to call problems of a record: by head_dim where that tells them from the others.

    Examples
    --------
    >>> sizes = (64, 64, 64, 64, 128)
    >>> every = [{"head_dim": size, "name": f"no. {i}"} for i, size in enumerate(sizes)]
    >>> whole = {"problems": [{"problem": problem} for problem in every]}
    >>> _some_of(every[4:], whole), _some_of(every[:2], whole), _some_of(every[:3], whole)
    ('head_dim 128', 'no. 0 and no. 1', '3 of 5 problems')
    """
    dims = {problem["head_dim"] for problem in some}
    every = [found["problem"]["head_dim"] for found in record["problems"]]
    if sum(dim in dims for dim in every) == len(some):
        return f"head_dim {' and '.join(map(str, sorted(dims)))}"
    if len(some) <= MOST_NAMED:
        return " and ".join(problem["name"] for problem in some)
    return f"{len(some)} of {len(every)} problems"


def record_with(
    name: str,
    files: Sequence[Path],
    merged: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Return the committed record of an experiment; those in files are merged into it first."""
    record = recording.stored(name)
    for file in files:
        record = merged(record, record_of(name, file))
    if files:
        output.write_json(recording.RESULTS / f"{name}.json", record)
    return record
