"""Draw docs/timeline_fa_tc.svg: who waits for whom in the Hopper form of fa_tc.

The interpreter runs one block and traces three of its warps, one of each warpgroup. The order of
their copies, turns, products and exponentials comes from those traces, and so do the barriers that
hold them back. Widths are no times: the interpreter has no clock.

    python -m docs.write_timeline
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from cupyattn.compiler.modules import KERNELS
from cupyattn.files import replacing
from cupyattn.interpret import Trace, observe
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.ops.attention import attention

PICTURE = Path(__file__).with_name("timeline_fa_tc.svg")
SOURCE = "sm90/attn_fa_tc.cu"
#: One block, whose loop takes three steps.
LEN_Q, LEN_KV, HEAD_DIM, HEADS = 128, 384, 64, 1
#: The first warp of each warpgroup: the one that copies, and two that compute.
WARPS = {"copies": 0, "computes 1": 4, "computes 2": 8}
LINE = re.compile(r"([\w./]+:\d+(?:, in [\w./]+:\d+)*) +(.*)")
#: Units of width of each kind of event; a wait or a turn has none.
WIDTHS = {"copy": 2, "scores": 3, "output": 3, "softmax": 5, "store": 2}
#: Kind, name or warp, and number.
Signal = tuple[str, str, int]
_UNIT, _LEFT, _LANE, _TALL = 15, 92, 46, 30
_STYLE = (
    "text{font:12px sans-serif;fill:#1b2a38}.m{text-anchor:middle}path{stroke:#b8c6d3}"
    "rect{stroke:#4a6785}.copy{fill:#d5ecd1}.scores,.output{fill:#cfe3f5}.softmax{fill:#f6dcc0}"
    ".store{fill:#e6d6f0}@media(prefers-color-scheme:dark){text{fill:#e6eef5}path{stroke:#44586b}"
    "rect{stroke:#8fb0d0}.copy{fill:#2d5530}.scores,.output{fill:#24445f}.softmax{fill:#6a4a25}"
    ".store{fill:#523866}}"
)


@dataclass(frozen=True)
class Event:
    """An event of a warp: its kind, and the number of its tile or barrier."""

    kind: str
    name: str
    number: int


@cache
def kernel_lines() -> list[str]:
    """Return the lines of the kernel; the first has number 0."""
    return ["", *(KERNELS / SOURCE).read_text("utf-8").splitlines()]


def traces() -> dict[str, str]:
    """Return what the interpreter's traces of the three warps say."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, HEADS, LEN_Q, HEAD_DIM)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, HEADS, LEN_KV, HEAD_DIM)).astype(np.float16)
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{warp}.txt" for name, warp in WARPS.items()}
        watching = [Trace(path, warp=WARPS[name]) for name, path in paths.items()]
        with observe(*watching):
            attention(q, k, v, variant="fa_tc", arch="sm_90a", backend="interpret")
        return {name: path.read_text("utf-8") for name, path in paths.items()}


def events(trace: str) -> list[Event]:
    """Return the events of a trace, in the order in which the warp executes them."""
    found: list[Event] = []
    counts: defaultdict[str, int] = defaultdict(int)

    def add(kind: str, name: str) -> None:
        found.append(Event(kind, name, counts[kind + name]))
        counts[kind + name] += 1

    for line in trace.splitlines():
        match = LINE.match(line)
        if match is None or line.endswith("not executed"):
            continue
        places, text = match.groups()
        numbers = [int(n) for n in re.findall(rf"{SOURCE}:(\d+)", places)]
        said = [" ".join(kernel_lines()[n : n + 2]) for n in numbers]
        if text.startswith("cp.async.bulk.tensor") and "_map, smem." in said[-1]:
            add("copy", re.findall(r"(\w)_map, smem\.", said[-1])[0])
        elif text.startswith("mbarrier.try_wait") and text.endswith("= true"):
            name = re.findall(r"smem\.(\w+)\[", said[-1])[0]
            last = found[-1] if found else None  # a wait asks until all lanes have the answer
            if last is None or (last.kind, last.name) != ("wait", name):
                add("wait", name)
        elif text.startswith("mbarrier.arrive.shared"):
            # What change_scores gets is the barrier of the K that it no longer needs.
            if "change_scores" in said[0] or "smem.empty" in said[0]:
                add("arrive", "empty")
        elif re.match(r"bar\.(sync|arrive) ", text) and "turn." in said[0]:
            barrier = re.findall(r"= 0x0*(\d+)", text)[0]
            add("take" if text.startswith("bar.sync") else "pass", barrier)
        elif text.startswith("wgmma.commit_group"):
            add("scores" if "start_scores" in said[0] else "output", "")
        elif text.startswith("ex2.approx") and "softmax(" in said[0]:
            if found[-1].kind != "softmax":
                add("softmax", "")
        elif text.startswith("wgmma.wait_group"):
            add("finish", "")
        elif re.match(r"(stmatrix|st\.global)", text) and "store" not in {e.kind for e in found}:
            add("store", "")
    return found


@dataclass(frozen=True)
class Box:
    """An event with its place: the lane, and where it begins and ends in units of width."""

    lane: str
    event: Event
    start: float
    end: float


def first_tile(found: list[Event]) -> list[Event]:
    """Return the events up to the wait for a second Q, of which there is none."""
    ends = [i for i, event in enumerate(found) if event.name[:2] == "Q_" and event.number == 1]
    return found[: ends[0]] if ends else found


def signals(lane: str, found: list[Event]) -> list[tuple[list[Signal], Signal | None]]:
    """Return the signals that each event waits for, and the signal that it gives."""
    stages = VARIANTS["fa_tc"].default_tiles(HEAD_DIM, "sm90").num_stages
    pairs: list[tuple[list[Signal], Signal | None]] = []
    stage = -1
    for event, following in pairwise([*found, Event("wait", "end", 0)]):
        needs: list[Signal] = []
        gives: Signal | None = None
        if event.kind == "take":
            needs = [("turn", event.name, event.number)]
        elif event.kind == "pass":
            gives = "turn", event.name, event.number
        elif event.kind == "wait" and event.name == "empty":  # the first stages are empty
            stage = event.number
            computing = [name for name in WARPS if name != lane]
            needs = [("empty", name, stage - stages) for name in computing if stage >= stages]
        elif event.kind == "wait" and event.name in ("full", "Q_full"):
            needs = [(event.name, "", event.number)]
        elif event.kind == "arrive" and event.name == "empty":
            gives = "empty", lane, event.number
        elif event.kind == "copy" and event.name == "Q":
            gives = "Q_full", "", event.number
        elif event.kind == "copy" and following.kind != "copy":  # the last one of its stage
            gives = "full", "", stage
        pairs.append((needs, gives))
    return pairs


def placed(lanes: dict[str, list[Event]]) -> list[Box]:
    """Place events as early as their warp, the barriers and the tensor cores allow.

    Raises
    ------
    ValueError
        If the warps would wait for each other without end.
    """
    left = {
        lane: list(zip(found, signals(lane, found), strict=True)) for lane, found in lanes.items()
    }
    at = dict.fromkeys(lanes, 0.0)
    products = dict.fromkeys(lanes, 0.0)  # when those under way end
    given: dict[Signal, float] = {}
    tensor_cores = 0.0
    boxes: list[Box] = []
    while any(left.values()):
        able = [
            lane
            for lane, queue in left.items()
            if queue and all(signal in given for signal in queue[0][1][0])
        ]
        if not able:
            raise ValueError(f"waits without end: {[queue[0] for queue in left.values() if queue]}")
        lane = min(able, key=lambda name: at[name])
        event, (needs, gives) = left[lane].pop(0)
        start = end = max([at[lane], *(given[signal] for signal in needs)])
        if event.kind in ("scores", "output"):  # the warp goes on while they run
            end = start = max(start, tensor_cores)
            tensor_cores = products[lane] = start + WIDTHS[event.kind]
            boxes.append(Box(lane, event, start, tensor_cores))
        elif event.kind in WIDTHS:
            end = start + WIDTHS[event.kind]
            boxes.append(Box(lane, event, start, end))
        elif event.kind == "finish":
            end = max(start, products[lane])
        at[lane] = end
        if gives:
            given[gives] = end
    return boxes


def label(box: Box) -> str:
    """Return what stands in a box."""
    names = {"scores": "QK", "output": "PV", "softmax": "softmax ", "store": "O"}
    event = box.event
    if event.kind == "copy":
        return event.name + ("" if event.name == "Q" else f"{event.number}")
    return names[event.kind] + ("" if event.kind == "store" else f"{event.number}")


def picture(boxes: list[Box]) -> str:
    """Return the drawing."""
    rows = {lane: 20 + _LANE * number for number, lane in enumerate(WARPS)}
    width = _LEFT + round(max(box.end for box in boxes) * _UNIT) + 12
    body = [
        f'<text x="4" y="{y + 19}">{lane}</text>'
        f'<path d="M{_LEFT} {y + _TALL + 5}H{width - 8}"/>'
        for lane, y in rows.items()
    ]
    for box in boxes:
        x, wide = _LEFT + box.start * _UNIT, (box.end - box.start) * _UNIT
        y = rows[box.lane]
        body.append(
            f'<rect class="{box.event.kind}" x="{x:g}" y="{y}" width="{wide:g}" '
            f'height="{_TALL}"/>'
            f'<text class="m" x="{x + wide / 2:g}" y="{y + 19}">{label(box)}</text>'
        )
    low = 20 + _LANE * len(rows) + 16
    lines = (
        "QK and PV run on the tensor cores, which one warpgroup uses at a time.",
        "The order is the trace's. Widths are not times.",
    )
    body += [f'<text x="4" y="{low + 18 * i}">{line}</text>' for i, line in enumerate(lines)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {low + 30}" '
            f'width="{width}" role="img">',
            "<title>Copies, products and softmax of a block of the Hopper form of fa_tc</title>",
            f"<style>{_STYLE}</style>",
            *body,
            "</svg>\n",
        ]
    )


def current() -> str:
    """Return the drawing of what the interpreter traces now."""
    return picture(placed({lane: first_tile(events(text)) for lane, text in traces().items()}))


if __name__ == "__main__":
    with replacing(PICTURE) as file:
        file.write(current().encode("utf-8"))
