"""Draw docs/tiles_RUNG.svg: which thread holds which scores of a tile, for each rung.

Sizes come from the rung's tiles, fragments from the interpreter's tensor cores, and groups of codes
from `QuantConfig`. Hence the pictures cannot differ from the kernels.

    python -m docs.write_tiles
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.files import replacing
from cupyattn.interpret.tensor_core import fragment_c
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant.config import QuantConfig

#: The head size whose tiles are drawn.
HEAD_DIM = 64
#: The thread whose scores are dark: lane 5 of warp 1.
THREAD = 37
WARP = 32
#: The lines of a kernel that say which thread computes which score, and which reduce a row.
SAID = {
    "unfused": (
        "for (int i = thread_id(); i < BLOCK_Q * BLOCK_KV; i += NUM_THREADS) {",
        "const int row = i / BLOCK_KV, key = i % BLOCK_KV;",
        "const int row = blockIdx.x % row_blocks * NUM_WARPS + warp_id();",
    ),
    "fa": (
        "for (int i = thread_id(); i < BLOCK_Q * BLOCK_KV; i += NUM_THREADS) {",
        "const int row = i / BLOCK_KV, key = i % BLOCK_KV;",
        "if (thread_id() < BLOCK_Q) {",
        "float* S = smem.S + thread_id() * (BLOCK_KV + 1);  // [BLOCK_KV]",
    ),
    "fa_warps": (
        "const int row0 = warp_id() * WARP_Q;             // first row of this warp in the block",
        "float S_acc[WARP_Q][LANE_KEYS] = {};  // keys lane_id() + 32 c",
    ),
    "fa_tc": (
        "const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh",
        "float S_acc[MMA_ROWS][MMA_KEYS][4] = {};",
    ),
    "fa_int8": (
        "const int g = lane_id() / 4, t = lane_id() % 4;  // fragment coordinates, see mma.cuh",
        "int32_t dot[MMA_ROWS][MMA_KEYS][4] = {};",
    ),
}
_LEFT, _TOP, _CELL, _STRIP = 34, 24, 10, 26
_STYLE = (
    "text{font:12px sans-serif;fill:#1b2a38}.e{text-anchor:end}"
    ".w0{fill:#cfe3f5}.w1{fill:#f6dcc0}.w2{fill:#d5ecd1}.w3{fill:#e6d6f0}"
    ".own{fill:#1b3a57}.group{stroke:#b03a2e;stroke-width:1.2;fill:none}"
    ".edge{fill:none;stroke:#4a6785}"
    "@media(prefers-color-scheme:dark){text{fill:#e6eef5}.w0{fill:#24445f}.w1{fill:#6a4a25}"
    ".w2{fill:#2d5530}.w3{fill:#523866}.own{fill:#fff}.edge{stroke:#8fb0d0}"
    ".group{stroke:#ff8a7a}}"
)


def tiles_of(rung: str) -> Tiles:
    """Return the tiles of a rung's portable form."""
    return VARIANTS[rung].default_tiles(HEAD_DIM)


def score_owners(rung: str) -> npt.NDArray[np.intp]:
    """Return the thread that computes each score of a tile, (block_q, block_kv)."""
    tiles = tiles_of(rung)
    shape = tiles.block_q, tiles.block_kv
    rows, keys = np.indices(shape)
    if rung in ("unfused", "fa"):
        return np.asarray((rows * tiles.block_kv + keys) % tiles.num_threads)
    warps = rows // (tiles.block_q // tiles.num_warps)
    if rung == "fa_warps":
        return np.asarray(warps * WARP + keys % WARP)
    fragment = fragment_c(32)
    lanes = fragment.place // fragment.registers  # of the 16 x 8 scores of one product
    return np.asarray(warps * WARP + lanes[rows % 16, keys % 8])


def row_owners(rung: str) -> npt.NDArray[np.intp]:
    """Return the threads that reduce each row together, (block_q, threads)."""
    tiles = tiles_of(rung)
    rows = np.arange(tiles.block_q)[:, None]
    if rung == "unfused":  # a separate launch, in which each warp has a row
        return np.asarray(rows % tiles.num_warps * WARP + np.arange(WARP))
    if rung == "fa":
        return np.asarray(rows)
    return np.stack([np.unique(row) for row in score_owners(rung)])


def groups(rung: str) -> tuple[int, int]:
    """Return how many rows of Q, and how many keys, share a scale; 0 without codes."""
    if VARIANTS[rung].family != "int8":
        return 0, 0
    config, tiles = QuantConfig(), tiles_of(rung)
    return config.group_q(tiles), config.group_kv(tiles)


def rectangles(labels: npt.NDArray[Any]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (label, row, column, rows, columns) of rectangles that cover a table of labels."""
    runs: dict[tuple[int, int, int], tuple[int, int]] = {}  # open ones: first row, rows
    for row in range(len(labels) + 1):
        found = []
        if row < len(labels):
            ends = np.flatnonzero(np.diff(labels[row])) + 1
            starts = [0, *ends.tolist()]
            widths = np.diff([*starts, labels.shape[1]]).tolist()
            found = [(int(labels[row, c]), c, w) for c, w in zip(starts, widths, strict=True)]
        for key in [key for key in runs if key not in found]:
            first, count = runs.pop(key)
            yield key[0], first, key[1], count, key[2]
        for key in found:
            first, count = runs.get(key, (row, 0))
            runs[key] = first, count + 1


def caption(rung: str) -> list[str]:
    """Return the sentences below a picture."""
    tiles, owners, reducers = tiles_of(rung), score_owners(rung), row_owners(rung)
    lines = [
        f"Tile of {tiles.block_q} query rows and {tiles.block_kv} keys, {tiles.num_warps} warps.",
        f"Dark: the {int((owners == THREAD).sum())} scores of lane {THREAD % WARP} of warp "
        f"{THREAD // WARP}.",
    ]
    who = f"{reducers.shape[1]} lanes of a warp reduce"
    if reducers.shape[1] == 1:
        who = "one thread of warp 0 reduces"
    lines.append(f"Strip, step S4: {who} each row.")
    by_q, by_kv = groups(rung)
    if by_q:
        lines.append(f"Red: {by_q} rows share a scale of Q, and {by_kv} keys a scale of K.")
    return lines


def picture(rung: str) -> str:
    """Return the drawing of a rung's tile."""
    owners, reducers = score_owners(rung), row_owners(rung)
    rows, keys = owners.shape
    tall = max(4, 320 // rows)  # pixels of a row
    wide, high = keys * _CELL, rows * tall
    strip = _LEFT + wide + 12
    body = []
    for warp, row, key, count, width in rectangles(owners // WARP):
        body.append(
            f'<rect class="w{warp}" x="{_LEFT + key * _CELL}" y="{_TOP + row * tall}" '
            f'width="{width * _CELL}" height="{count * tall}"/>'
        )
    for warp, row, _, count, _ in rectangles(reducers[:, :1] // WARP):
        body.append(
            f'<rect class="w{warp}" x="{strip}" y="{_TOP + row * tall}" '
            f'width="{_STRIP}" height="{count * tall}"/>'
        )
    for own, row, key, count, width in rectangles(owners == THREAD):
        if own:
            body.append(
                f'<rect class="own" x="{_LEFT + key * _CELL + 1}" y="{_TOP + row * tall + 0.5}" '
                f'width="{width * _CELL - 2}" height="{count * tall - 1}"/>'
            )
    for row in np.flatnonzero((reducers == THREAD).any(axis=1)).tolist():
        body.append(
            f'<rect class="own" x="{strip + 1}" y="{_TOP + row * tall + 0.5}" '
            f'width="{_STRIP - 2}" height="{tall - 1}"/>'
        )
    by_q, by_kv = groups(rung)
    if by_q:
        lines = "".join(f"M{_LEFT} {_TOP + r * tall}h-5" for r in range(0, rows + 1, by_q))
        lines += "".join(
            f"M{_LEFT + k * _CELL} {_TOP - 4}v{high + 4}" for k in range(0, keys + 1, by_kv)
        )
        body.append(f'<path class="group" d="{lines}"/>')
    for x, width in ((_LEFT, wide), (strip, _STRIP)):
        body.append(
            f'<rect class="edge" x="{x}" y="{_TOP}" width="{width}" height="{high}"/>'
        )
    body += [
        f'<text x="{_LEFT}" y="14">keys 0 to {keys - 1}</text>',
        f'<text x="{strip}" y="14">S4</text>',
        f'<text class="e" x="{_LEFT - 8}" y="{_TOP + 10}">0</text>',
        f'<text class="e" x="{_LEFT - 8}" y="{_TOP + high}">{rows - 1}</text>',
    ]
    lines = caption(rung)
    for number, line in enumerate(lines):
        body.append(f'<text x="4" y="{_TOP + high + 22 + 17 * number}">{line}</text>')
    width, height = max(400, strip + _STRIP + 10), _TOP + high + 17 * len(lines) + 14
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" role="img">',
            f"<title>Who owns the scores of a tile of {rung}</title>",
            f"<style>{_STYLE}</style>",
            *body,
            "</svg>\n",
        ]
    )


def path_of(rung: str) -> Path:
    """Return the file of a rung's picture."""
    return Path(__file__).with_name(f"tiles_{rung}.svg")


def main() -> None:
    """Draw all rungs."""
    for rung in VARIANTS:
        with replacing(path_of(rung)) as file:
            file.write(picture(rung).encode("utf-8"))


if __name__ == "__main__":
    main()
