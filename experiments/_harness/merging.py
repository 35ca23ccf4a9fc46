"""Records that were measured in parts: read, and brought together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from cupyattn.measure import records
from experiments._harness import recording


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
    """Return a record of problems, and those of another that it lacks, by head_dim.

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
    """Return what to say behind a record's revision of problems that have another; often nothing.

    Examples
    --------
    >>> some = [{"problem": {"head_dim": 64}}, {"problem": {"head_dim": 256}, "revision": "0a"}]
    >>> of_another_revision({"problems": some})
    ', but head_dim 256 of revision 0a'
    """
    others: dict[str, list[int]] = {}
    environment = record.get("environment", {})
    own, own_device = environment.get("revision"), (environment.get("device") or {}).get("name")
    for found in record.get("problems", ()):
        device = found.get("device", own_device)
        if found.get("revision", own) != own:
            at = found["revision"][:10] + ("" if device == own_device else f" on {device}")
            others.setdefault(at, []).append(found["problem"]["head_dim"])
    return "".join(
        f", but {_some_of(dims, record)} of revision {at}" for at, dims in others.items()
    )


def _some_of(dims: Sequence[int], record: Mapping[str, Any]) -> str:
    """Return what to call problems of a record: by head_dim where that tells them from the others.

    Examples
    --------
    >>> whole = {"problems": [{"problem": {"head_dim": dim}} for dim in (64, 64, 128)]}
    >>> _some_of([128], whole), _some_of([64], whole)
    ('head_dim 128', '1 of 3 problems')
    """
    every = [found["problem"]["head_dim"] for found in record["problems"]]
    if sum(dim in dims for dim in every) == len(dims):
        return f"head_dim {' and '.join(map(str, sorted(set(dims))))}"
    return f"{len(dims)} of {len(every)} problems"


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
