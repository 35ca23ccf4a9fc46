"""Write docs/PERFORMANCE.md and its drawings from the records in experiments/results.

A part whose records are not there is left out, and so is a line of the table of claims.

    python -m docs.write_performance [--no-plots]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cupyattn.files import replacing
from docs import performance_plots
from docs.performance_claims import CLAIMS
from docs.performance_parts import PARTS, Part
from docs.performance_plots import FIGURES, FILES
from experiments._harness import merging, recording

PAGE = Path(__file__).with_name("PERFORMANCE.md")
HEAD = (
    "<!-- Written by python -m docs.write_performance from experiments/results: run that. -->",
    "",
    "# Performance, measured",
    "",
    "Every table and drawing is written by one command, `python -m docs.write_performance`, from",
    "the records in [experiments/results](../experiments/results); each names its record, device",
    "and revision. A cell held its error bound before it was timed. Times are medians of rounds in",
    "which all calls of a problem take turns. Inputs rotate through more memory than the L2 cache.",
    "Intervals are 95 %, by bootstrap. [experiments](../experiments/README.md) explains how to",
    "repeat each measurement.",
    "",
    "Of the ladder and of the features, `fa_int8` alone quantises by its default,",
    "`QuantConfig()`, with scales of K for each thread. *balanced* and *aggressive* are accuracy",
    "classes; balanced has scales of K for each block of keys.",
    "",
)
#: Every drawing is a part's own but this, which has a part of the page for itself.
ROOFLINE = "book_roofline"
CLAIMS_TITLE = "What the founding notes say, and what was measured"
ROOFLINE_TITLE = "Roofline"


@cache
def stored(name: str) -> dict[str, Any] | None:
    """Return a committed record; None where there is none."""
    file = recording.RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def records(names: Iterable[str]) -> list[dict[str, Any]] | None:
    """Return committed records; None unless all are there."""
    found = [stored(name) for name in names]
    return None if None in found else [record for record in found if record is not None]


def source(name: str, record: Mapping[str, Any]) -> str:
    """Return one line about a record: its file, command, device and revisions."""
    environment = record["environment"]
    facts = environment.get("device") or {}
    device = facts.get("name", "no device")
    if facts.get("driver"):
        device += f", driver {facts['driver']}"
    revision = environment.get("revision") or "unknown"
    others = merging.other_revisions(record).items()
    return (
        f"[{name}.json](../experiments/results/{name}.json): `{recording.command_now(record)}`, "
        f"{device}, revision {revision[:10]}"
        + "".join(f". Revision {at}: {what}" for at, what in others)
    )


def images(names: Sequence[tuple[str, str]], *, drawn: Sequence[str]) -> list[str]:
    """Return the lines that show the drawings that can be made."""
    shown = [(name, text) for name, text in names if name in drawn]
    return [f"![{text}]({name}.svg) ([PNG]({name}.png))" for name, text in shown]


def drawable() -> list[str]:
    """Return the names of the drawings whose records are there."""
    return [name for name, (needs, _) in {**FIGURES, **FILES}.items() if records(needs)]


def part_lines(part: Part) -> list[str]:
    """Return the lines of one part; none where a record is missing or holds nothing for it."""
    found = records(part.needs)
    body = part.write(*found) if found is not None else []
    if not body or found is None:
        return []
    sources = [
        f"From {source(name, record)}." for name, record in zip(part.needs, found, strict=True)
    ]
    drawn = [line for image in images(part.plots, drawn=drawable()) for line in (image, "")]
    return [f"## {part.title}", "", *drawn, *sources, *([""] if sources else []), *body, ""]


def claims_lines() -> list[str]:
    """Return the table of what the founding notes say and what was measured."""
    rows = []
    for claim in CLAIMS:
        found = records(claim.needs)
        if found is None:
            continue
        links = ", ".join(f"[{n}](../experiments/results/{n}.json)" for n in claim.needs)
        record = links or claim.source or "none"
        rows.append([claim.part, claim.says, claim.measured(*found), claim.verdict, record])
    header = ["of the notes", "they say", "measured", "verdict", "record"]
    return [
        f"## {CLAIMS_TITLE}",
        "",
        "This library began as a plan, the founding notes, which is not in this repository. It had",
        "text and pseudo-code with figures for an A100, before there was a kernel. The record of",
        "each line names the device of the measurement.",
        "A figure *of another device* cannot be compared with a measurement on ours.",
        "",
        *recording.markdown(header, rows),
        "",
    ]


def roofline_lines() -> list[str]:
    """Return the part on ceilings that were measured, with its drawing."""
    needs, _ = FIGURES[ROOFLINE]
    found = records(needs)
    if found is None:
        return []
    _, peers, gemm, decode = found
    top = performance_plots.ceilings(gemm, decode)
    best = max(
        (row for p in peers["problems"] for row in p["rows"] if row["variant"] == "fa_tc"),
        key=lambda row: float(row["tflops"]),
    )
    return [
        f"## {ROOFLINE_TITLE}",
        "",
        *images([(ROOFLINE, "Rates against operations per byte, under measured ceilings")],
                drawn=[ROOFLINE]),
        "",
        *(f"From {source(name, record)}." for name, record in zip(needs, found, strict=True)),
        "",
        "The ceilings are measured. The fastest product of two matrices in 16 bits has",
        f"{top['fp16'] / 1e12:.0f} TFLOP/s (torch), the fastest in INT8 with scales of "
        f"blocks {top['int8'] / 1e12:,.0f} TOP/s. The fastest copy has "
        f"{top['bytes'] / 1e12:.2f} TB/s.",
        f"They meet at {top['fp16'] / top['bytes']:.0f} operations per byte. Attention of n "
        "queries and n keys",
        "has n / 2 operations per byte, so memory bounds only calls with few queries. The largest",
        f"rate of fa_tc is {best['tflops']:.0f} TFLOP/s, "
        f"{best['tflops'] * 1e12 / top['fp16']:.2f} of the "
        "fastest product. Each byte that must",
        "move counts once.",
        "",
    ]


def page() -> str:
    """Return the whole page."""
    parts = {CLAIMS_TITLE: claims_lines()}
    parts |= {part.title: part_lines(part) for part in PARTS}
    parts |= {ROOFLINE_TITLE: roofline_lines()}
    lines = [line for body in parts.values() for line in body]
    titles = [title for title, body in parts.items() if body]
    contents = [f"- [{title}](#{anchor(title)})" for title in titles]
    return "\n".join([*HEAD, *contents, "", *lines]).rstrip("\n") + "\n"


def anchor(title: str) -> str:
    """Return what a heading is linked by.

    Examples
    --------
    >>> anchor("Ablation: INT8 arithmetic")
    'ablation-int8-arithmetic'
    """
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, and the drawings unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-plots", action="store_true", help="the page alone")
    args = parser.parse_args(argv)
    with replacing(PAGE) as file:
        file.write(page().encode())
    print(f"wrote {PAGE}")
    for name in () if args.no_plots else drawable():
        needs, _ = {**FIGURES, **FILES}[name]
        for path in performance_plots.draw(name, records(needs) or [], PAGE.parent):
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
