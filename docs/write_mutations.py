"""Write the tables of planted faults in docs/TESTING.md from their records.

    python -m docs.write_mutations
"""

from __future__ import annotations

from experiments._harness import recording
from experiments.accuracy import mutation_score, static_verifier


def main() -> None:
    """Write both tables."""
    for module in (mutation_score, static_verifier):
        lines = module.table(recording.stored(module.NAME))
        recording.replace_between(module.PAGE, module.BEGIN, module.END, "\n".join(lines))


if __name__ == "__main__":
    main()
