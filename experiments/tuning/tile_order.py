"""In which order should the blocks of a Hopper kernel take the tiles of a causal call?

Varies       the order; the rung, whose tiles differ; (batch x heads, length, head_dim)
Holds fixed  132 blocks, the registry's tiles, a causal mask, an overhead of 1.5 steps a tile
Measures     on paper: when the last block ends, over the mean work of a block; 1 is perfect
Expect       near 1 where heads come in large groups of about one size, longest tiles first
Run          python -m experiments.tuning.tile_order [--quick] [--json FILE]

Needs no device: blocks take tiles as they become free, and a step lasts as long as any other. What
an order does to the L2 cache is not in the model.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Sequence

from cupyattn.cli import output
from cupyattn.kernels import ladder
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans import assemble
from experiments._harness import recording

#: batch x heads, length, head_dim
SHAPES = (
    (256, 512, 256), (128, 1024, 256), (64, 2048, 256), (16, 8192, 256), (64, 4096, 128),
    (32, 8192, 128), (24, 4608, 128), (32, 16_384, 64),
)  # fmt: skip
#: Bytes of K and V for an element of a row: float16 both; codes and float16.
BYTES = {"fa_tc": 4, "fa_int8": 3}
#: Orders by groups of heads. A group has at most as many heads as have their K and V in so many MB.
#: The last has the rest, or sizes differ by one.
ORDERS = {
    "16 MB, the rest last": (16, False), "32 MB, alike": (32, True), "16 MB, alike": (16, True),
    "8 MB, alike": (8, True), "head by head": (0, True),
}  # fmt: skip
#: Cost of a tile beside its steps, in steps.
OVERHEAD = 1.5


def group_sizes(heads: int, head_bytes: int, megabytes: int, alike: bool) -> list[int]:
    """Return how many heads come together, group by group.

    Examples
    --------
    >>> group_sizes(32, 3 << 20, 16, False), group_sizes(32, 3 << 20, 16, True)
    ([5, 5, 5, 5, 5, 5, 2], [5, 5, 5, 5, 4, 4, 4])
    """
    fitting = min(heads, max(1, (megabytes << 20) // head_bytes))
    groups = -(-heads // fitting)
    if not alike:
        return [min(fitting, heads - first) for first in range(0, heads, fitting)]
    size, larger = divmod(heads, groups)
    return [size + 1] * larger + [size] * (groups - larger)


def work(length: int, tiles: Tiles, sizes: Sequence[int]) -> Iterator[float]:
    """Yield the work of each tile in the order in which they are begun, in steps."""
    for heads in sizes:
        for q0 in reversed(range(0, length, tiles.block_q)):
            steps = -(-min(length, q0 + tiles.block_q) // tiles.block_kv)
            yield from [steps + OVERHEAD] * heads


def imbalance(tiles: Sequence[float], blocks: int = assemble.HOPPER_BLOCKS) -> float:
    """Return when the last block ends, over the mean work of a block.

    Examples
    --------
    >>> imbalance([1.0, 1.0, 2.0], 2)
    1.5
    """
    ends = [0.0] * blocks
    for one in tiles:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends) / (sum(tiles) / blocks)


def run(args: argparse.Namespace) -> int:
    """Run the model, print its table and write the record."""
    rows, table = [], []
    for heads, length, head_dim in SHAPES[: 2 if args.quick else None]:
        for rung, size in BYTES.items():
            tiles = ladder.lookup(rung).tiles_for(
                head_dim, form="sm90", lengths=(length, length), causal=True
            )
            found = {}
            for name, (megabytes, alike) in ORDERS.items():
                sizes = group_sizes(heads, length * head_dim * size, megabytes, alike)
                found[name] = imbalance(list(work(length, tiles, sizes)))
            shape = {"heads": heads, "length": length, "head_dim": head_dim, "rung": rung}
            rows.append({**shape, "imbalance": found})
            table.append([*map(str, shape.values()), *(f"{x:.3f}" for x in found.values())])
    output.print_table(["batch x heads", "length", "head_dim", "rung", *ORDERS], table)
    recording.keep(args, "tile_order", "mirror", {"rows": rows})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    return run(recording.parser(__doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
