"""What a caller says of the scores, as it was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupyattn.problem.block_mask import BlockMask


@dataclass(frozen=True, eq=False)
class ScoreOptions:
    """What changes and masks scores: options of `cupyattn.attention`, which documents them."""

    causal: bool = False
    causal_align: str = "bottom-right"
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    mask: Any = None
    bias: Any = None
    block_mask: BlockMask | None = None

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and keys of a block of the block mask; (0, 0): there is none."""
        return (0, 0) if self.block_mask is None else self.block_mask.blocks
