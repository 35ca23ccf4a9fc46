"""Write the figures of the README's first screen from the records in experiments/results.

    python -m docs.write_readme
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments._harness import recording
from experiments._harness.recording import ROOT

README = ROOT / "README.md"
SPEED = "<!-- speed: begin -->", "<!-- speed: end -->"
INT8 = "<!-- int8: begin -->", "<!-- int8: end -->"
#: Ways of a block's record, in the order of the table.
WAYS = ("attention in 16 bits", "INT8 attention", "INT8 linear layers", "both INT8")


def _device(record: Mapping[str, Any]) -> str:
    return str(record["environment"]["device"]["name"])


def _link(name: str) -> str:
    return f"[{name}.json](experiments/results/{name}.json)"


def lower(ratio: float) -> str:
    """Return the end of a range with three digits, none of them rounded up.

    Examples
    --------
    >>> lower(0.9985), lower(1.3349)
    ('0.998', '1.334')
    """
    return f"{math.floor(1e3 * ratio) / 1e3:.3f}"


def speed(peers: Mapping[str, Any]) -> str:
    """Return how fast `fa_tc` is beside the faster of its rivals, and on which shapes."""
    ratios = [cell["ratio"][0] for cell in peers["against_rival"]["cells"]]
    problems = [found["problem"] for found in peers["problems"]]
    lengths = sorted({problem["length"] for problem in problems})
    sizes = sorted({problem["head_dim"] for problem in problems})
    rivals = sorted({cell["rival"] for cell in peers["against_rival"]["cells"]}, reverse=True)
    return (
        f"On an {_device(peers)}, forward attention in float16 is {lower(min(ratios))} to "
        f"{lower(max(ratios))} times as fast\nas the faster of {' and '.join(rivals)} (median "
        f"{median(ratios):.2f}). These are {len(ratios)} shapes:\nlengths {lengths[0]:,} to "
        f"{lengths[-1]:,}, head_dim {sizes[0]} to {sizes[-1]}, causal and not "
        f"({_link('peers')})."
    )


def int8(blocks: Mapping[str, Any], ladder: Mapping[str, Any]) -> str:
    """Return the table of blocks of models, and what INT8 does to attention alone."""
    rows = []
    for row in blocks["rows"]:
        ways = {way: row["ways"][f"{way}, compiled"] for way in ("native", *WAYS)}
        native, both = ways["native"], ways["both INT8"]
        saved = 1 - both["weight_bytes"] / native["weight_bytes"]
        rows.append([
            row["model"], f"{row['tokens'] + row['prompt']:,}", f"{1e3 * native['seconds']:.1f} ms",
            *(f"{native['seconds'] / ways[way]['seconds']:.2f}" for way in WAYS),
            f"{saved:.0%}", f"{row['ways']['both INT8']['to_native']:.1e}",
        ])  # fmt: skip
    header = ["block of", "tokens", "its own time", *WAYS, "weights saved", "rel. change"]
    pairs = []
    for found in ladder["problems"]:
        problem, rates = found["problem"], {r["variant"]: r.get("tflops") for r in found["rows"]}
        if not problem["causal"]:
            ratio = rates["fa_int8"] / rates["fa_tc"]
            pairs.append(f"{ratio:.2f} at head_dim {problem['head_dim']}")
    length = ladder["problems"][0]["problem"]["length"]
    return "\n".join([
        f"Times as fast as the block itself, all of them under `torch.compile`, on an "
        f"{_device(blocks)} ({_link('diffusers_blocks')}).",
        "*rel. change* is the change of the block's output, with both and without compiling.", "",
        *recording.markdown(header, rows), "",
        f"Attention alone, at length {length:,}: `fa_int8` with quantising is this many times as "
        "fast as `fa_tc`:",
        f"{', '.join(pairs)}. Measured on an {_device(ladder)} ({_link('ladder')}).",
    ])  # fmt: skip


def figures() -> dict[tuple[str, str], str]:
    """Return the texts by the marks that they stand between."""
    stored = recording.stored
    return {
        SPEED: speed(stored("peers")),
        INT8: int8(stored("diffusers_blocks"), stored("ladder")),
    }


if __name__ == "__main__":
    for (begin, end), text in figures().items():
        recording.replace_between(README, begin, end, text)
    print(f"wrote {README}")
