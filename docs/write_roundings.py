"""Draw docs/roundings.svg: the values that a kernel computes, and the roundings between them.

The filled and empty dots come from the table of rounding points in docs/MATH_REFERENCE.md.

    python -m docs.write_roundings
"""

from __future__ import annotations

import re
from pathlib import Path

from cupyattn.files import replacing

PAGE = Path(__file__).with_name("MATH_REFERENCE.md")
PICTURE = Path(__file__).with_name("roundings.svg")
#: Values from top to bottom. The tags of the roundings that lead to a value stand above it.
VALUES = (
    ("", "Q, K, V of the caller"),
    ("R0 R1", "operands of the products"),
    ("R2", "S = Q·Kᵀ"),
    ("R3", "scores, in log2 units"),
    ("R4", "weights of keys, 2^(score − M)"),
    ("R5", "P, operand of P·V"),
    ("R6", "l and O, sums over keys"),
    ("R7", "stored output O / l"),
)
#: Short description of each rounding point.
POINTS = {
    "R0": "rotary embedding, normalisation",
    "R1": "codes of Q and K, V to 16 bits",
    "R2": "sums of q·k over the channels",
    "R3": "scaling, softcap, bias",
    "R4": "exp2 and alpha",
    "R5": "P to the type of the product",
    "R6": "l, P·V, and their rescaling by alpha",
    "R7": "times 1/l, store",
}
RUNGS = ("unfused", "fa, fa_warps", "fa_tc", "fa_int8")
_LEFT, _WIDTH, _HEIGHT, _STEP, _DOTS, _COLUMN = 20, 230, 28, 72, 520, 90


def rounded() -> dict[str, list[bool]]:
    """Return for each tag whether each of `RUNGS` rounds there, by the table of the page."""
    found: dict[str, list[bool]] = {}
    table = PAGE.read_text(encoding="utf-8").partition("| tag | where | unfused |")[2]
    for row in re.findall(r"^\| (R\d) \|(.*)\|$", table.partition("\n\n")[0], re.MULTILINE):
        cells = [cell.strip() for cell in row[1].split("|")][1 : 1 + len(RUNGS)]
        here = [cell != "–" and not cell.startswith("exact") for cell in cells]
        before = found.get(row[0], here)
        found[row[0]] = [a or b for a, b in zip(before, here, strict=True)]
    return found


def picture() -> str:
    """Return the drawing: values in a column, and a line of text and dots for each rounding."""
    dots, middle = rounded(), _LEFT + _WIDTH / 2
    head = [
        f'<text class="rung" x="{_DOTS + _COLUMN * i}" y="22">{name}</text>'
        for i, name in enumerate(RUNGS)
    ]
    body = []
    y = 14
    for tags, value in VALUES:
        if tags:
            names = tags.split()
            gap = _STEP - _HEIGHT + 14 * (len(names) - 1)
            body.append(f'<path d="M{middle} {y} V{y + gap - 7}" marker-end="url(#head)"/>')
            for number, tag in enumerate(names):
                line = y + gap / 2 + 5 + 20 * (number - (len(names) - 1) / 2)
                body.append(
                    f'<text class="tag" x="{middle + 14}" y="{line}">{tag}</text>'
                    f'<text x="{middle + 44}" y="{line}">{POINTS[tag]}</text>'
                )
                body += [
                    f'<circle class="{"on" if on else "off"}" cx="{_DOTS + _COLUMN * i}" '
                    f'cy="{line - 5}" r="6"/>'
                    for i, on in enumerate(dots[tag])
                ]
            y += gap
        body.append(
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4"/>'
            f'<text x="{_LEFT + 10}" y="{y + 19}">{value}</text>'
        )
        y += _HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 850 {y + 14}" role="img">',
            "<title>Values of an attention kernel and the rounding points between them. "
            "A filled dot: this rung rounds there</title>",
            "<style>rect{fill:#eef3f8;stroke:#4a6785}text{font:14px sans-serif;fill:#1b2a38}"
            ".tag{font-weight:bold}.rung{text-anchor:middle}path{fill:none;stroke:#4a6785}"
            ".on{fill:#4a6785;stroke:#4a6785}.off{fill:none;stroke:#4a6785}"
            "@media(prefers-color-scheme:dark){rect{fill:#22303d;stroke:#8fb0d0}"
            "text{fill:#e6eef5}path,.off{stroke:#8fb0d0}.on{fill:#8fb0d0;stroke:#8fb0d0}}</style>",
            '<defs><marker id="head" viewBox="0 0 6 6" refX="1" refY="3" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L6 3L0 6z" '
            'style="fill:#4a6785;stroke:none"/></marker></defs>',
            *head,
            *body,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    with replacing(PICTURE) as file:
        file.write(picture().encode("utf-8"))
