"""Which rung is the fastest for a shape, on the devices that were measured?

Varies       nothing: it reads what experiments/ladder.py measured
Holds fixed  the record, experiments/results/ladder.json
Measures     the median time of every rung, in the form that it takes by itself
Run          python -m experiments.fastest [--check]

It writes cupyattn/measured.py, from which ``variant="auto"`` chooses; ``--check`` writes nothing
and says whether that file is what the record says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cupyattn as ca
from experiments import common
from experiments.common import ROOT

TARGET = ROOT / "cupyattn" / "measured.py"
RECORD = "experiments/results/ladder.json"
HEADER = '''"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.fastest`` from {record}:
{device}, revision {revision}.
"""

RECORD = "{record}"

#: Compute capability times ten, dtype, head_dim, length, causal, and the microseconds of each rung.
MEASURED: tuple[tuple[int, str, int, int, bool, dict[str, float]], ...] = (
'''


def module_text(record: Mapping[str, Any]) -> str:
    """Return the text of cupyattn/measured.py for a record of experiments/ladder.py.

    Raises
    ------
    ValueError
        If the record has no times.
    """
    if record["backend"] != "cuda":
        raise ValueError("the record has no times: it was not made on a device")
    device, revision = record["environment"]["device"], record["environment"]["revision"]
    lines = [HEADER.format(record=RECORD, device=device["name"], revision=revision[:10])]
    for found in record["problems"]:
        problem = found["problem"]
        key = (
            device["capability"], problem["dtype"], problem["head_dim"], problem["length"],
            problem["causal"],
        )  # fmt: skip
        lines.append(f"    ({', '.join(map(_literal, key))}, {{\n")
        for row in found["rows"]:
            if row["variant"] in ca.VARIANTS and "seconds" in row:
                lines.append(f'        "{row["variant"]}": {1e6 * row["seconds"]:.1f},\n')
        lines.append("    }),\n")
    return "".join([*lines, ")  # fmt: skip\n"])


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main(argv: Sequence[str] | None = None, target: Path = TARGET) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args(argv)
    text = module_text(common.stored("ladder"))
    if args.check:
        same = target.read_text(encoding="utf-8") == text
        print(f"{target.name} {'is' if same else 'is NOT'} what {RECORD} says")
        return 0 if same else 1
    target.write_text(text, encoding="utf-8")
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
