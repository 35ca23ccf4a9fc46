"""docs/TUTORIAL.md is current, climbs the whole ladder, and its sentences fit the record."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from cupyattn.kernels.ladder import VARIANTS
from docs import write_tutorial
from experiments._harness import recording
from tests.kernels.test_kernel_sources import changed

PAGE = write_tutorial.PAGE.read_text(encoding="utf-8")
STEPS = list(pairwise(VARIANTS))


def test_the_page_is_current() -> None:
    assert write_tutorial.renewed(PAGE) == PAGE, "run python -m docs.write_tutorial"


def test_a_stale_page_is_found() -> None:
    for stale in (
        PAGE.replace("mma_m16n8k32_s8(dot", "mma_m16n8k64_s4(dot", 1),
        re.sub(r"(\d+) lines removed", lambda m: f"{int(m[1]) + 1} lines removed", PAGE, count=1),
        PAGE.replace(" ms |", " s |", 1),
        re.sub(r"−(\d+) \+(\d+) \| (\d+) \|", r"−\1 +\2 | 1\3 |", PAGE, count=1),
    ):
        assert stale != PAGE and write_tutorial.renewed(stale) == PAGE


def test_it_climbs_the_ladder_in_order() -> None:
    titles = re.findall(r"^## (\d)\. `(\w+)` → `(\w+)`: (.*)$", PAGE, re.MULTILINE)
    assert [(int(n), left, right) for n, left, right, _ in titles] == [
        (n, *step) for n, step in enumerate(STEPS, 1)
    ]
    assert [idea for *_, idea in titles] == [VARIANTS[right].idea for _, right in STEPS]


@pytest.mark.parametrize("step", STEPS, ids="-".join)
def test_a_step_shows_ideas_and_counts_the_rest(step: tuple[str, str]) -> None:
    left, right = step
    part = PAGE.split(f"`{left}` → `{right}`:")[1].split("\n## ")[0]
    shown = re.findall(rf"<!-- diff {left} {right} (\w+) -->", part)
    counts = write_tutorial.changed(left, right)
    assert len(shown) >= 3 and set(shown) <= set(counts)
    ideas = re.findall(r"\*\*(.+?)\.\*\* (\S.*)", part)
    titles = [write_tutorial.TITLES[section] for section in shown]
    assert [title.lower() for title, _ in ideas] == [title.lower() for title in titles]
    rest = re.findall(r"−(\d+) \+(\d+)", part)
    assert len(rest) == len(counts) - len(shown)
    assert f"<!-- times {left} {right} -->" in part and "\n```sh\ncupyattn " in part


@pytest.mark.parametrize("step", STEPS, ids="-".join)
def test_no_line_is_lost_between_sections(step: tuple[str, str]) -> None:
    """The number of additional lines does not depend on how the diff is cut."""
    left, right = step
    counts = write_tutorial.changed(left, right).values()
    gone, come = (sum(count[i] for count in counts) for i in (0, 1))
    whole_gone, whole_come = changed(f"attn_{left}.cu", f"attn_{right}.cu")
    assert come - gone == whole_come - whole_gone
    assert f"{gone} lines removed, {come} added" in PAGE


@pytest.mark.parametrize("number", range(1, 8))
def test_every_chapter_ends_with_an_exercise_and_its_answer(number: int) -> None:
    """The answers are blocks of code: test_docs_blocks.py runs them."""
    part = PAGE.split(f"\n## {number}. ")[1].split("\n## ")[0]
    _, exercise = part.split("\n### Exercise\n")
    assert re.search(r"^```python\n.*?^```\n\n```\n.+?^```$", exercise, re.DOTALL | re.MULTILINE)


def test_the_sentences_fit_the_times() -> None:
    """The page's sentences about numbers that a new record could change."""
    record = recording.stored("ladder")
    gains = {
        (left, right): {d: s[left] / s[right] for d, s in write_tutorial.times(record).items()}
        for left, right in STEPS
    }
    assert max(gains["unfused", "fa"].values()) < 1.2, "memory, not time"
    assert min(gains["fa", "fa_warps"].values()) > 1.5
    for head_dim, gain in gains["fa_warps", "fa_tc"].items():
        assert gain == max(step[head_dim] for step in gains.values()), "the most of all steps"
    by_size = gains["fa_tc", "fa_int8"]
    assert by_size[max(by_size)] == max(by_size.values()), "the larger the head size, the more"
    assert f"revision {record['environment']['revision'][:10]}" in PAGE
    shown = record["problems"][0]["problem"]
    scores = 4 * shown["batch"] * shown["heads"] * shown["length"] ** 2
    assert f"{scores / 1e9:.1f} GB" in PAGE
