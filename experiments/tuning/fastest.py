"""Which rung is the fastest for a shape, on the devices that were measured?

Varies       nothing: it reads what speed/ladder.py and speed/peers_int8.py measured
Holds fixed  the records, experiments/results/ladder.json and peers_int8.json
Measures     the median time of every rung, in the form that it takes by itself; and beside fa_tc
             that of fa_int8 as the classes "balanced" and "aggressive" quantise, that included
Run          python -m experiments.tuning.fastest [--check]

It measures nothing, so that there is no ``--quick`` and no record: it is a generator. It writes
cupyattn/kernels/measured_times.py, from which ``variant="auto"`` chooses; ``--check`` writes
nothing and says whether that file is what the records say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cupyattn as ca
from experiments._harness import recording
from experiments._harness.recording import ROOT
from experiments.speed import peers_int8

TARGET = ROOT / "cupyattn" / "kernels" / "measured_times.py"
LADDER, EIGHT_BIT = "ladder", "peers_int8"
HEADER = '''"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.tuning.fastest``.
"""

#: Compute capability times ten, dtype, head_dim, queries, keys, causal, and microseconds by name.
Rows = tuple[tuple[int, str, int, int, int, bool, dict[str, float]], ...]
'''
TABLE = """
#: {what}:
{origins}
{name} = "experiments/results/{record}.json"
{rows}: Rows = (
"""
#: Names of peers_int8.json by the names of the table.
CLASSES = {
    peers_int8.FULL: "fa_tc", peers_int8.BALANCED: "balanced", peers_int8.AGGRESSIVE: "aggressive",
}  # fmt: skip


def module_text(ladder: Mapping[str, Any], eight_bit: Mapping[str, Any]) -> str:
    """Return the text of cupyattn/kernels/measured_times.py for the records of both experiments.

    Raises
    ------
    ValueError
        If a record has no times.
    """
    rungs = {name: name for name in ca.VARIANTS}
    return HEADER + "".join(
        _table(record, *names)
        for record, *names in (
            (ladder, "Every rung", LADDER, "RECORD", "MEASURED", rungs),
            (
                eight_bit, "fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise", EIGHT_BIT,
                "RECORD_8_BIT", "MEASURED_8_BIT", CLASSES,
            ),
        )
    )  # fmt: skip


def _table(
    record: Mapping[str, Any],
    what: str,
    source: str,
    name: str,
    rows: str,
    taken: Mapping[str, str],
) -> str:
    if record["backend"] != "cuda":
        raise ValueError("the record has no times: it was not made on a device")
    device, own = record["environment"]["device"], record["environment"]["revision"]
    origins = [
        f"{found.get('device', device['name'])}, revision {found.get('revision', own)[:10]}"
        for found in record["problems"]
    ]
    listed = ".\n".join(f"#: {origin}" for origin in dict.fromkeys(origins))
    lines = [TABLE.format(what=what, origins=f"{listed}.", name=name, record=source, rows=rows)]
    for found in record["problems"]:
        problem = found["problem"]
        key = (
            device["capability"], problem["dtype"], problem["head_dim"], problem["length"],
            problem.get("length_kv") or problem["length"], problem["causal"],
        )  # fmt: skip
        lines.append(f"    ({', '.join(map(_literal, key))}, {{\n")
        for row in found["rows"]:
            if row["variant"] in taken and "seconds" in row:
                lines.append(f'        "{taken[row["variant"]]}": {1e6 * row["seconds"]:.1f},\n')
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
    text = module_text(recording.stored(LADDER), recording.stored(EIGHT_BIT))
    if args.check:
        same = target.read_text(encoding="utf-8") == text
        print(f"{target.name} {'is' if same else 'is NOT'} what the records say")
        return 0 if same else 1
    target.write_text(text, encoding="utf-8")
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
