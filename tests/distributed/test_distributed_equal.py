"""Settings that are equal in Python but of other types, after a call that ranks agreed on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn import distributed
from cupyattn.distributed import Group, Partition

X = np.ones((1, 2, 8, 16), np.float16)
ROWS = Partition.contiguous(8, 2)


def run(*calls: dict[str, Any]) -> list[int]:
    """Make calls one after the other on two ranks; return how many each has remembered."""

    def on_rank(group: Group) -> int:
        own = (ROWS.take(X, group.rank),) * 3
        for options in calls:
            distributed.parallel_attention(*own, group, "ulysses", **options)
        return len(group.agreed)

    return distributed.run(on_rank, 2, timeout=20)


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [("causal", True, 1), ("window", (3, 1), (3.0, 1.0)), ("scale", 1.0, 1 + 0j)],
)
def test_what_is_refused_alone_is_refused_after_its_equal(
    name: str, usual: Any, other: Any
) -> None:
    with pytest.raises((TypeError, ValueError)) as alone:
        run({name: other})
    with pytest.raises(type(alone.value)) as after:
        run({name: usual}, {name: other})
    assert str(after.value) == str(alone.value) and f"{name} must be" in str(alone.value)
    assert run({name: usual}, {name: usual}) == [1, 1]
