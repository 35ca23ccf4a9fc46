"""One self-contained page of HTML from records: times as bars, other results as tables."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from cupyattn.measure import records
from cupyattn.measure.records import Cell
from cupyattn.measure.words import counted, format_ratio, format_seconds, printable

#: Rows and columns of a table of numbers beyond which the rest is counted.
MOST_ROWS, MOST_COLUMNS = 60, 10
#: Width and height of a bar's drawing, and the width of the shortest bar, in SVG units.
_WIDTH, _HEIGHT, _THIN = 200, 12, 0.5

_STYLE = """
:root { --paper: #fff; --ink: #1b1b1b; --faint: #6a6a6a; --line: #d8d8d8; --bar: #0072b2;
        --span: #d55e00; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e8e8e8; --faint: #a2a2a2; --line: #3a3d42; --bar: #56b4e9;
          --span: #e69f00; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--paper);
       color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.2; overflow-wrap: anywhere; }
h2 { border-top: 1px solid var(--line); padding-top: 1rem; }
p.facts, nav { color: var(--faint); overflow-wrap: anywhere; }
nav ul { columns: 14rem; padding-left: 1.2rem; }
a { color: var(--bar); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem .15rem 0; text-align: left; vertical-align: middle; }
thead th, thead td { border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: normal; }
.chart td:not(.name) { white-space: nowrap; }
td.name { min-width: 5rem; }
td.bar { min-width: 7rem; width: 40%; }
svg { display: block; width: 100%; height: .8rem; }
rect { fill: var(--bar); }
line { stroke: var(--span); stroke-width: 2; }
summary { cursor: pointer; }
.pictures img { max-width: 100%; height: auto; }
"""


def page(found: Sequence[tuple[str, Mapping[str, Any]]], title: str = "cupyattn report") -> str:
    """Return the page of some records.

    Parameters
    ----------
    found : sequence of (str, mapping)
        Names and records, as `cupyattn.measure.records.read` returns them.
    title : str

    Returns
    -------
    str
        HTML without external files and scripts, which follows the reader's colour scheme and fits
        any width.

    Examples
    --------
    >>> record = {"environment": {}, "rows": [{"variant": "fa", "samples": [2.0, 1.0, 3.0]}]}
    >>> "fa" in page([("small", record)])
    True
    """
    names = [escape(name) for name, _ in found]
    links = "".join(f'<li><a href="#{i}">{name}</a></li>' for i, name in enumerate(names))
    parts = "\n".join(
        f'<h2 id="{i}">{name}</h2>\n{_facts(record)}\n{_body(record)}'
        for i, (name, (_, record)) in enumerate(zip(names, found, strict=True))
    )
    return document(
        title,
        f"""<p class="facts">Bars are times of a call, medians of rounds; the line on a bar is the
95 % interval, which numbers have in brackets. J2 is the largest error as a share of its bound.</p>
<nav><ul>{links}</ul></nav>
{parts}""",
    )


def document(title: str, body: str) -> str:
    """Return a page of HTML in our style, from its title and its body."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text."""
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return _table(header, [f"<tr>{line}</tr>" for line in lines])


def escape(text: str) -> str:
    """Return text as HTML shows it, without characters that a reader does not see."""
    return html.escape(printable(text))


def _facts(record: Mapping[str, Any]) -> str:
    """Return where a record is from."""
    environment = record["environment"]
    device = environment.get("device") or {}
    said = {
        "": record.get("command", ""), "device": device.get("name", "none"),
        **{name: environment.get(name) for name in ("nvrtc", "cupy", "torch")},
        "revision": (environment.get("revision") or "")[:10],
    }  # fmt: skip
    told = (f"{name} {value}".strip() for name, value in said.items() if value)
    return f'<p class="facts">{escape(" · ".join(told))}</p>'


def _body(record: Mapping[str, Any]) -> str:
    """Return the charts of a record that timed something, else its numbers."""
    timed = list(records.cells(record).values())
    if not timed:
        return "\n".join(_numbers(name, rows) for name, rows in _lists(record, ""))
    charts = []
    for problem, some in groupby(timed, lambda cell: cell.names[:-1]):
        charts.append(_chart(", ".join(problem), list(some)))
    opened = " open" if len(timed) <= MOST_ROWS else ""
    return (
        f"<details{opened}><summary>{counted(len(timed), 'cell')}</summary>\n"
        + "\n".join(charts)
        + ("\n</details>")
    )


def _chart(problem: str, cells: Sequence[Cell]) -> str:
    """Return a table with a bar for each cell of a problem, all to one scale."""
    most = max(cell.estimate.high for cell in cells)
    judged = any(cell.judgement for cell in cells)
    header = ["", "", "time", *(["J2"] if judged else []), "95 %"]
    lines = []
    for cell in cells:
        low, middle, high = (
            _WIDTH * x / most for x in (cell.estimate.low, cell.estimate.median, cell.estimate.high)
        )
        y = _HEIGHT / 2
        wide = max(middle, _THIN)
        bar = (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(format_seconds(cell.estimate.median))}">'
            f'<rect x="0" y="1" width="{wide:.1f}" height="{_HEIGHT - 2}"/>'
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y:g}" y2="{y:g}"/></svg>'
        )
        ends = " .. ".join(format_seconds(x) for x in (cell.estimate.low, cell.estimate.high))
        said = [format_seconds(cell.estimate.median), *([_j2(cell)] if judged else []), ends]
        name = escape(cell.names[-1] if cell.names else "all")
        row = "".join(f"<td>{escape(text)}</td>" for text in said)
        lines.append(f'<tr><td class="name">{name}</td><td class="bar">{bar}</td>{row}</tr>')
    return (f"<h3>{escape(problem)}</h3>" if problem else "") + _table(header, lines, "chart")


def _j2(cell: Cell) -> str:
    value = (cell.judgement or {}).get("j2")
    return format_ratio(value) if isinstance(value, float) else "-"


def _lists(
    node: Any, name: str, above: tuple[str, ...] = ()
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield lists of parts that say something in numbers or words, wherever they are.

    Their names are their keys, preceded by the names of the parts around them.
    """
    if isinstance(node, dict):
        above = (*above, *records.own_names(node))
        for key, value in node.items():
            if key not in ("environment", "clocks"):
                yield from _lists(value, ", ".join((*above, key)), above)
    elif isinstance(node, list):
        rows = [row for row in node if isinstance(row, dict) and _scalars(row)]
        if rows:
            yield name, rows
        for row in node:
            yield from _lists(row, name, above)


def _scalars(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalar entries of a part, including its judgement."""
    known = {**row, **(row["judgement"] if isinstance(row.get("judgement"), dict) else {})}
    return {
        k: v
        for k, v in known.items()
        if (isinstance(v, (str, int, float)) and v != "") or _is_estimate(v)
    }


def _is_estimate(value: Any) -> bool:
    """Whether a value is a median and its interval, as `Estimate.to_list` writes them."""
    if not (isinstance(value, list) and len(value) == 3):
        return False
    return all(isinstance(x, float) for x in value) and value[1] <= value[0] <= value[2]


def _numbers(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of parts, with at most as many rows and columns as a reader can survey."""
    columns = list(dict.fromkeys(key for row in rows for key in _scalars(row)))
    shown = columns[:MOST_COLUMNS]
    lines = []
    for row in rows[:MOST_ROWS]:
        values = _scalars(row)
        cells = (_text(values.get(key)) for key in shown)
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    left = [
        f"{count} more {what}"
        for count, what in ((len(rows) - MOST_ROWS, "rows"), (len(columns) - len(shown), "columns"))
        if count > 0
    ]
    more = f'<p class="facts">{escape(", ".join(left))} in the record</p>' if left else ""
    return f"<h3>{escape(name)}</h3>{_table(shown, lines)}{more}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        text = f"{value[0]:.4g} [{value[1]:.4g}, {value[2]:.4g}]"
        return text.replace(" ", "\N{NO-BREAK SPACE}")
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _table(header: Sequence[str], lines: Sequence[str], kind: str = "numbers") -> str:
    named = (f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in header)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{"".join(named)}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
