"""Attention problems to draw: sizes, masks, distributions and seeds, never whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cupyattn import distributions, strategies


@dataclass(frozen=True)
class Problem:
    """Arguments of one attention call, small enough to print when a test fails."""

    name: str
    dtype: str
    batch: int
    heads_kv: int
    group: int
    len_q: int
    len_kv: int
    head_dim: int
    causal: bool
    causal_align: str
    scale: float | None
    seed: int

    def arrays(self) -> tuple[Any, Any, Any]:
        """Draw q, k and v."""
        return distributions.make(
            self.name,
            self.batch,
            self.heads_kv * self.group,
            self.len_q,
            self.len_kv,
            self.head_dim,
            self.dtype,
            self.seed,
            self.heads_kv,
        )

    @property
    def options(self) -> dict[str, Any]:
        """Keywords that every attention function takes."""
        return {"scale": self.scale, "causal": self.causal, "causal_align": self.causal_align}

    def admitted(self) -> Any:
        """(len_q, len_kv) bool by the definition: row i attends to key j iff j <= i + shift."""
        shift = self.len_kv - self.len_q if self.causal_align == "bottom-right" else 0
        pairs = [[j <= i + shift for j in range(self.len_kv)] for i in range(self.len_q)]
        mask = np.array(pairs, bool).reshape(self.len_q, self.len_kv)
        return mask if self.causal else np.ones_like(mask)


def problems(
    *,
    names: tuple[str, ...] = distributions.NAMES,
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32"),
    min_len: int = 0,
) -> st.SearchStrategy[Problem]:
    """Draw problems whose lengths straddle small tile sizes."""
    lengths = st.integers(min_len, 40) | st.sampled_from([1, 15, 16, 17, 31, 32, 33])
    return st.builds(
        Problem,
        name=st.sampled_from(names),
        dtype=st.sampled_from(dtypes),
        batch=st.integers(1, 2),
        heads_kv=st.integers(1, 2),
        group=st.integers(1, 3),
        len_q=lengths,
        len_kv=lengths,
        head_dim=st.sampled_from([1, 2, 7, 16, 33]),
        causal=st.booleans(),
        causal_align=st.sampled_from(["bottom-right", "top-left"]),
        scale=st.none() | st.floats(0.01, 2.0),
        seed=st.integers(0, 2**32 - 1),
    )


def drawn_values(
    data: st.DataObject, lengths: st.SearchStrategy[int], head_dims: Sequence[int], dtype: str,
    *, batches: int = 1, groups: int = 2,
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:  # fmt: skip
    """Draw q, k and v of one regime of values, and the options of a call without further arrays."""
    batch = data.draw(st.integers(1, batches))
    heads_kv, group = (data.draw(st.integers(1, groups)) for _ in range(2))
    len_q, len_kv = data.draw(lengths), data.draw(lengths)
    head_dim = data.draw(st.sampled_from(head_dims))
    inputs = strategies.make_regime(
        data.draw(st.sampled_from(strategies.REGIMES)),
        (batch, heads_kv * group, len_q, head_dim),
        (batch, heads_kv, len_kv, head_dim),
        dtype,
        data.draw(st.integers(0, 2**32 - 1)),
    )
    options = {
        "causal": data.draw(st.booleans()),
        "causal_align": data.draw(st.sampled_from(["bottom-right", "top-left"])),
        "scale": data.draw(st.none() | st.floats(0.01, 1.0)),
    }
    return inputs, options
