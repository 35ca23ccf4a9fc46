"""What a caller says of the scores, as it was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cupyattn.errors import shown

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

    def __post_init__(self) -> None:
        # NOTE: by an attribute, as its module imports others that import this one.
        if self.block_mask is not None and not hasattr(self.block_mask, "blocks"):
            raise TypeError(
                f"block_mask must be a cupyattn.BlockMask or None, got {shown(self.block_mask)}"
            )

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and keys of a block of the block mask; (0, 0): there is none."""
        return (0, 0) if self.block_mask is None else self.block_mask.blocks
