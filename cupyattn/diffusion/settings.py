"""Settings that may change between calls of `Int8Attention`: the computed scores, and how."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from cupyattn.arrays.kinds import Array
from cupyattn.diffusion import pruning
from cupyattn.diffusion.arguments import check_count, warn_without_effect
from cupyattn.diffusion.guidance import BRANCHES, for_both_branches
from cupyattn.diffusion.policy import MODES, check_mode
from cupyattn.diffusion.unused import of_pruning
from cupyattn.errors import UnsupportedError, shown
from cupyattn.problem.block_mask import BLOCK_SIZES, BlockMask

ATTENTION_TYPES = ("dense", "local", "block_sparse")


@dataclass(frozen=True)
class Int8AttentionSettings:
    """Arguments of `Int8Attention` that a call may override; it documents them.

    Raises
    ------
    ValueError, TypeError
        For values that mean nothing or do not go together.
    UnsupportedError
        For pruning with anything but dense attention.
    """

    attention_type: str = "dense"
    window_size: Any = None
    block_size: int = 64
    block_mask: BlockMask | Callable[[Array, Array], BlockMask] | None = None
    enable_pruning: bool = False
    pruning_ratio: float = 0.2
    pruning_threshold: float | None = None
    pruning_rows: int = pruning.SAMPLE_ROWS
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.attention_type not in ATTENTION_TYPES:
            raise ValueError(
                f"attention_type must be one of {ATTENTION_TYPES}, got {self.attention_type!r}"
            )
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be 64 or 128, got {self.block_size!r}")
        self._check_sparsity()
        if self.mode is not None:
            check_mode(self.mode)
        pruning.check_ratio(self.pruning_ratio)
        pruning.check_threshold(self.pruning_threshold)
        check_count("pruning_rows", self.pruning_rows)
        if self.enable_pruning and self.attention_type != "dense":
            raise UnsupportedError(
                "token pruning moves the kept keys, so it requires attention_type='dense', got "
                f"{self.attention_type!r}"
            )

    def _check_sparsity(self) -> None:
        given = {"window_size": self.window_size, "block_mask": self.block_mask}
        present = [name for name, value in given.items() if value is not None]
        wanted = {
            "dense": ([],),
            "local": (["window_size"],),
            "block_sparse": (["window_size"], ["block_mask"]),
        }[self.attention_type]
        if present not in wanted:
            takes = " or ".join(" and ".join(names) or "neither" for names in wanted)
            raise ValueError(
                f"attention_type={self.attention_type!r} takes {takes} of window_size and "
                f"block_mask, got {' and '.join(present) or 'neither'}"
            )
        if self.window_size is not None:
            check_window_size(self.window_size)
        if self.block_mask is not None and not (
            isinstance(self.block_mask, BlockMask) or callable(self.block_mask)
        ):
            raise TypeError(
                "block_mask must be a cupyattn.BlockMask or a function of (q, k) that makes one, "
                f"got {shown(self.block_mask)}"
            )

    def changed(self, overrides: dict[str, Any]) -> Int8AttentionSettings:
        """Return the settings with the overrides of one call.

        Raises
        ------
        TypeError
            For a name that is none of them.
        """
        if not overrides:
            return self
        mode = overrides.get("mode")
        if len(overrides) == 1 and isinstance(mode, str) and mode in MODES:
            return self._of_modes[mode]
        known = [field.name for field in fields(self)]
        for name in overrides:
            if name not in known:
                raise TypeError(
                    f"Int8Attention got an unexpected keyword argument {name!r}: a call may "
                    f"override {', '.join(known)}"
                )
        found = replace(self, **overrides)
        if overrides.get("enable_pruning", True):
            warn_without_effect(found.unused(overrides))
        return found

    @property
    def given(self) -> list[str]:
        """Names of the settings that are not the default."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def unused(self, given: Collection[str]) -> list[str]:
        """Return a sentence for each of the settings `given` that has no effect."""
        found = of_pruning(given, enabled=self.enable_pruning, threshold=self.pruning_threshold)
        if "block_size" in given and (
            self.attention_type != "block_sparse" or self.block_mask is not None
        ):
            found.append(
                "block_size has no effect without attention_type='block_sparse' and window_size: "
                "give both, or leave it out"
            )
        return found

    @functools.cached_property
    def _of_modes(self) -> dict[str, Int8AttentionSettings]:
        """These settings with each mode: a model may name one in every call."""
        return {mode: replace(self, mode=mode) for mode in MODES}

    def of_scores(self, q: Array, k: Array, branches: int) -> dict[str, Any]:
        """Return the options that select scores, as arguments of `cupyattn.attention`.

        Parameters
        ----------
        q, k : array
            Operands of the call; heads of several `branches` are stacked in q.
        branches : {1, 2}
        """
        if self.attention_type == "dense":
            return {}
        if self.attention_type == "local":
            return {"window": check_window_size(self.window_size)}
        if isinstance(self.block_mask, BlockMask):
            mask = self.block_mask
            return {"block_mask": for_both_branches(mask) if branches == BRANCHES else mask}
        if self.block_mask is not None:
            return {"block_mask": self.block_mask(q, k)}
        window = check_window_size(self.window_size)
        return {"block_mask": _blocks_of_window(q.shape[2], k.shape[2], window, self.block_size)}


@functools.lru_cache(maxsize=64)
def _blocks_of_window(
    len_q: int, len_kv: int, window: tuple[int, int], block_size: int
) -> BlockMask:
    """Return the same mask for equal windows, because it stores the arrays for kernels."""
    return BlockMask.from_window(len_q, len_kv, window, block_q=block_size, block_kv=block_size)


def wants_mask(return_mask: bool | None, overrides: dict[str, Any]) -> bool:
    """Return whether a call returns which keys were kept.

    Parameters
    ----------
    return_mask : bool or None
        As the caller gave it. None: with ``enable_pruning=True`` among the overrides.
    overrides : dict
        Settings of this call alone.
    """
    if "return_lse" in overrides:
        raise TypeError(
            "Int8Attention has no return_lse: cupyattn.attention(q, k, v, quant=..., "
            "return_lse=True) returns the log-sum-exp"
        )
    return bool(overrides.get("enable_pruning") if return_mask is None else return_mask)


def check_window_size(window_size: Any) -> tuple[int, int]:
    """Return how many keys on either side a row attends to.

    Examples
    --------
    >>> check_window_size(512), check_window_size((100, 0))
    ((256, 256), (100, 0))
    """
    pair = window_size if isinstance(window_size, (tuple, list)) else None
    try:
        if pair is None:
            half = operator.index(window_size) // 2
            pair = half, half
        left, right = map(operator.index, pair)
    except (TypeError, ValueError):
        raise TypeError(
            "window_size must be a number of keys or a pair (left, right), got "
            f"{shown(window_size)}"
        ) from None
    if min(left, right) < 0:
        raise ValueError(f"window_size must be 0 or more, got {window_size!r}")
    return left, right
