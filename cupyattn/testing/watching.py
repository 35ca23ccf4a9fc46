"""State that the pytest plugin and the judge share. It needs the standard library alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupyattn.testing.counterexamples import Counterexample


@dataclass
class Watched:
    """The run of pytest that is under way in this process, if one is.

    Parameters
    ----------
    test : str
        Name of the test that runs; empty between tests, and where no plugin watches.
    failure : Counterexample, optional
        The last output that `cupyattn.testing.assert_within_bound` refused during that test.
        Hypothesis runs its smallest example last.
    replay : Path, optional
        File whose arrays `cupyattn.strategies.attention_inputs` draws, and nothing else.
    """

    test: str = ""
    failure: Counterexample | None = None
    replay: Path | None = None


WATCHED = Watched()
