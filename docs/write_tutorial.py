"""Write the diffs, counts and times of docs/TUTORIAL.md between its marks.

The page climbs the ladder by the diffs of neighbouring kernels. Its sentences are written by hand.
The diffs come from the files in kernels_cu/, the times from experiments/results/ladder.json.

    python -m docs.write_tutorial
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from cupyattn.compiler.modules import KERNELS
from cupyattn.files import replacing
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.measure.words import format_seconds
from experiments._harness import merging, recording

PAGE = Path(__file__).with_name("TUTORIAL.md")
#: A mark, what stands after it, and the end of that.
MARK = re.compile(r"(<!-- (\w+)((?: [\w/]+)*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
#: The problems of the record whose times are shown, by head_dim.
SHOWN = {"length": 4096, "causal": False, "dtype": "float16", "distribution": "normal"}
#: The parts of a kernel's file (`sections`).
TITLES = {
    "sizes": "includes and sizes", "storage": "shared memory", "entry": "entry points",
    "S0": "S0 locate", "S1": "S1 load Q, and the start of the loop", "S2": "S2 load K, V",
    "S3": "S3 scores", "S4": "S4 softmax", "S5": "S5 output", "S6": "S6 store",
}  # fmt: skip


def file_of(rung: str) -> str:
    """Return the file of a rung, or of a form of one: ``"forms/fa_int8_pv8"``."""
    folder, slash, name = rung.rpartition("/")
    return f"{folder}{slash}attn_{name}.cu"


@cache
def sections(rung: str) -> dict[str, list[str]]:
    """Return the lines of a kernel's body by where they stand, blank ones left out.

    ``sizes`` holds includes and constants, ``storage`` the shared memory and its assertions, and
    ``entry`` the entry points. ``S0`` to ``S6`` hold the lines behind each tag, of all kernels.
    """
    found: dict[str, list[str]] = {name: [] for name in TITLES}
    lines = (KERNELS / file_of(rung)).read_text(encoding="utf-8").splitlines()
    at = "sizes"
    for line in lines[next(i for i, line in enumerate(lines) if not line.startswith("//")) :]:
        tag = re.match(r" *// (S\d) ", line)
        if tag:
            at = tag[1]
        elif re.match(r"(union|struct) SharedStorage", line):
            at = "storage"
        elif line.startswith('extern "C" __global__'):
            at = "entry"
        if line.strip():
            found[at].append(line)
        if line == "}":
            at = "entry"
    return found


def differences(left: str, right: str, section: str, context: int) -> list[str]:
    """Return the lines of a unified diff of one section, the places of its hunks cut to ``@@``."""
    both = sections(left)[section], sections(right)[section]
    lines = list(difflib.unified_diff(*both, lineterm="", n=context))[2:]
    return ["@@" if line.startswith("@@") else line for line in lines][1:]


def changed(left: str, right: str) -> dict[str, tuple[int, int]]:
    """Return how many lines of each section of two rungs go and come, where any do."""
    counts = {}
    for section in TITLES:
        lines = differences(left, right, section, 0)
        gone, come = (sum(line.startswith(sign) for line in lines) for sign in "-+")
        if gone or come:
            counts[section] = gone, come
    return counts


def times(record: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Return the seconds of each rung's portable form, the file of the diff, by head_dim."""
    return {
        cell["problem"]["head_dim"]: {
            row["rung"]: row["seconds"]
            for row in cell["rows"]
            if row["variant"] in (row["rung"], f"{row['rung']}, sm_90")  # not of codes given
            and row.get("form") == "portable"
            and row["ok"]
        }
        for cell in record["problems"]
        if SHOWN.items() <= cell["problem"].items()
    }


def written_provenance(page: str, record: Mapping[str, Any]) -> list[str]:
    """Description of the timed problem."""
    environment = record["environment"]
    (problem, *_) = (
        cell["problem"] for cell in record["problems"] if SHOWN.items() <= cell["problem"].items()
    )
    return [
        f"Times are of [ladder.json](../experiments/results/ladder.json) "
        f"(`{recording.command_now(record)}`), {environment['device']['name']},",
        f"NVRTC {environment['nvrtc']}, revision {environment['revision'][:10]}"
        f"{merging.of_another_revision(record)}: batch "
        f"{problem['batch']}, {problem['heads']} heads, length {problem['length']:,}, "
        f"{problem['dtype']}, no mask.",
    ]


def written_count(page: str, record: Mapping[str, Any], left: str, right: str) -> list[str]:
    """Size of the whole diff."""
    counts = changed(left, right).values()
    gone, come = (sum(count[i] for count in counts) for i in (0, 1))
    names = f"`{file_of(left)}` and `{file_of(right)}`"
    return [
        f"The diff of {names}, section by section, without headers and blank lines: {gone} lines "
        f"removed, {come} added."
    ]


def written_steps(page: str, record: Mapping[str, Any]) -> list[str]:
    """A table of all steps: how many lines each changes, and how many lines the kernel has then."""
    rows = []
    for left, right in pairwise(VARIANTS):
        counts = changed(left, right).values()
        gone, come = (sum(count[i] for count in counts) for i in (0, 1))
        whole = sum(map(len, sections(right).values()))
        rows.append([f"`{left}` → `{right}`", f"−{gone} +{come}", f"{whole}"])
    return recording.markdown(["step", "lines changed", "lines of the kernel"], rows)


def written_diff(
    page: str, record: Mapping[str, Any], left: str, right: str, section: str
) -> list[str]:
    """The diff of one section."""
    return ["```diff", *differences(left, right, section, 1), "```"]


def written_rest(page: str, record: Mapping[str, Any], left: str, right: str) -> list[str]:
    """Number of lines of sections that the page does not show."""
    rest = [
        f"| {TITLES[section]} | −{gone} +{come} |"
        for section, (gone, come) in changed(left, right).items()
        if f"<!-- diff {left} {right} {section} -->" not in page
    ]
    return ["| not shown | lines |", "| --- | --- |", *rest]


def written_times(page: str, record: Mapping[str, Any], left: str, right: str) -> list[str]:
    """A table of what the step is worth."""
    rows = [
        [
            str(head_dim),
            format_seconds(seconds[left]),
            format_seconds(seconds[right]),
            f"{seconds[left] / seconds[right]:.2f}",
        ]
        for head_dim, seconds in times(record).items()
    ]
    return recording.markdown(["head_dim", f"`{left}`", f"`{right}`", "times as fast"], rows)


WRITERS = {
    "provenance": written_provenance,
    "count": written_count,
    "steps": written_steps,
    "diff": written_diff,
    "rest": written_rest,
    "times": written_times,
}


def renewed(page: str) -> str:
    """Return a page with what stands between its marks as it is now."""
    record = recording.stored("ladder")

    def write(mark: re.Match[str]) -> str:
        lines = WRITERS[mark[2]](page, record, *mark[3].split())
        return f"{mark[1]}{chr(10).join(lines)}\n{mark[5]}"

    return MARK.sub(write, page)


def main() -> None:
    """Renew the page."""
    page = renewed(PAGE.read_text(encoding="utf-8"))
    with replacing(PAGE) as file:
        file.write(page.encode())


if __name__ == "__main__":
    main()
