"""Records that were measured in parts: read, and brought together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyattn import records
from cupyattn.cli import output
from experiments import common


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

    Each of these says at which revision, and by which command, it was measured.
    """
    known = {found["problem"]["name"] for found in record["problems"]}
    of_part = {"command": part["command"], "revision": part["environment"].get("revision")}
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
    ', but head_dim 256, which is of revision 0a'
    """
    others: dict[str, list[int]] = {}
    own = record.get("environment", {}).get("revision")
    for found in record.get("problems", ()):
        if found.get("revision", own) != own:
            others.setdefault(found["revision"][:10], []).append(found["problem"]["head_dim"])
    return "".join(
        f", but head_dim {' and '.join(map(str, sorted(set(dims))))}, which is of revision {at}"
        for at, dims in others.items()
    )


def record_with(
    name: str,
    files: Sequence[Path],
    merged: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Return the committed record of an experiment; those in files are merged into it first."""
    record = common.stored(name)
    for file in files:
        record = merged(record, record_of(name, file))
    if files:
        output.write_json(common.RESULTS / f"{name}.json", record)
    return record
