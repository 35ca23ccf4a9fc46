"""Which tiles of a Hopper form are fastest with a bias, a mask or a softcap?

Varies       tiles, for each feature of experiments.speed.scores; rung: fa_tc, and fa_int8 of the
             accuracy class "balanced"
Holds fixed  16,384 tokens in all, heads x head_dim = 2048, bfloat16, N(0, 1)
Measures     J2 of two heads; time, and in the same rounds its ratio to the form's own tiles
Expect       the tiles of cupyattn/kernels/ladder.py at the top: a bias of each entry and head waits
             for memory, so more of it in flight is faster
Run          python -m experiments.tuning.score_tiles [--quick] [--json FILE] [--rounds N]
             [--cells 64:4096:bfloat16 ...] [--features NAME ...] [--seconds N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import cupyattn as ca
from cupyattn.arrays.kinds import array_namespace
from cupyattn.cli import output
from cupyattn.measure import timing, words
from experiments._harness import recording
from experiments._harness.cells import REFUSALS, rotating
from experiments.speed import scores

CELLS = ("64:4096:bfloat16", "128:4096:bfloat16", "64:1024:bfloat16", "128:1024:bfloat16")
OWN = "own"
#: Tiles by rung, feature and largest head size; a bias of one kind or the other has the same.
_BIAS_TC = {
    64: ((192, 128, 16, 2), (192, 64, 16, 2), (192, 64, 16, 3), (192, 64, 16, 4),
         (128, 128, 12, 2), (128, 128, 12, 3), (128, 64, 12, 4)),
    128: ((192, 64, 16, 2), (128, 64, 12, 3), (128, 64, 12, 4), (128, 128, 12, 2)),
}  # fmt: skip
_BIAS_INT8 = {
    64: ((192, 64, 16, 3), (192, 64, 16, 4), (192, 64, 16, 5), (128, 64, 12, 5)),
    128: ((192, 64, 16, 2), (192, 64, 16, 3), (192, 64, 16, 4), (128, 64, 12, 4),
          (128, 128, 12, 2)),
}  # fmt: skip
TILES: dict[tuple[str, str], dict[int, tuple[tuple[int, ...], ...]]] = {
    ("fa_tc", scores.BIAS): _BIAS_TC,
    ("fa_tc", scores.OWN_BIAS): _BIAS_TC,
    ("fa_int8", scores.BIAS): _BIAS_INT8,
    ("fa_int8", scores.OWN_BIAS): _BIAS_INT8,
    ("fa_tc", scores.PADDING): {
        64: ((192, 128, 16, 2), (192, 112, 16, 2), (192, 96, 16, 3), (128, 128, 12, 3)),
        128: ((192, 80, 16, 2), (128, 128, 12, 2)),
    },
    ("fa_int8", scores.PADDING): {
        64: ((192, 128, 16, 3), (128, 128, 12, 4)),
        128: ((192, 80, 16, 2), (192, 64, 16, 3), (128, 128, 12, 3)),
    },
}


def named(tiles: ca.Tiles) -> str:
    """Return tiles in few letters."""
    return f"{tiles.block_q}x{tiles.block_kv}, {tiles.num_stages} stages"


def measure(
    rung: str, feature: str, cell: scores.ScoreCell, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Judge every tile of a feature in a rung, and time in turns the tiles that pass."""
    problem = cell.problem(args)
    inputs = problem.draw(on_device=not args.quick)
    options = scores.options_of(feature, problem, array_namespace(inputs[0]))
    sets = [] if args.quick else timing.rotated(inputs)
    rows: list[dict[str, Any]] = []
    calls = {}
    candidates = [ca.Tiles(*sizes) for sizes in TILES[rung, feature][cell.head_dim]]
    for tiles in (None, *candidates[: 1 if args.quick else None]):
        name = OWN if tiles is None else named(tiles)
        row: dict[str, Any] = {"rung": rung, "feature": feature, "name": name}
        try:
            prepared, facts = scores.judged(rung, problem, inputs, options, "sm_90a", tiles)
        except (*REFUSALS, ValueError) as error:
            rows.append(row | {"refused": str(error)[:200]})
            continue
        rows.append(row | facts)
        if facts["ok"] and not args.quick:
            calls[name] = rotating(prepared, sets)
    samples = timing.time_interleaved(calls, rounds=args.rounds) if calls else {}
    for row in rows:
        if found := samples.get(row["name"]):
            row["seconds"] = timing.median(found).to_list()
            row["of_own"] = timing.paired_ratio(samples[OWN], found).to_list()
    return rows


def run(args: argparse.Namespace) -> int:
    """Measure cell after cell, and write the record after each."""
    recording.check_rounds(args)
    began, passed = time.monotonic(), True
    content: dict[str, Any] = {"rounds": 0 if args.quick else args.rounds, "problems": []}
    for cell in map(scores.ScoreCell.parse, args.cells):
        rows = []
        for rung, feature in TILES:
            if feature not in args.features or time.monotonic() - began > args.seconds:
                continue
            rows += measure(rung, feature, cell, args)
        print(f"\n{cell.problem(args).name}")
        output.print_table(
            ["", "rung", "tiles", "time", "speed of own", "J2"],
            [
                [
                    row["feature"], row["rung"], row["name"],
                    words.format_seconds(row["seconds"][0]) if "seconds" in row else "-",
                    f"{row['of_own'][0]:.3f}" if "of_own" in row else row.get("refused", "")[:50],
                    f"{row['j2']:.2f}" if "j2" in row else "",
                ]
                for row in rows
            ],
        )  # fmt: skip
        content["problems"].append({"problem": str(cell), "rows": rows})
        recording.keep(args, "score_tiles", "mirror" if args.quick else "cuda", content)
        passed &= all(row.get("ok", True) for row in rows)
    return 0 if passed else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    features = tuple(dict.fromkeys(feature for _, feature in TILES))
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="CELL", help="of these alone")
    parser.add_argument("--features", nargs="+", default=features, choices=features)
    parser.add_argument("--seconds", type=float, default=200.0, help="nothing begins later")
    parser.set_defaults(rounds=recording.LEAST_ROUNDS)
    return recording.main(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
