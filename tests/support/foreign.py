"""Arrays of a library that cupyattn has never heard of: DLPack and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


class Foreign:
    """An array with DLPack alone; no library is known that it belongs to."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class ForeignWithNamespace(Foreign):
    """One whose library can be asked for, as the array API standard says."""

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return SimpleNamespace(
            from_dlpack=lambda x: ForeignWithNamespace(np.from_dlpack(x)), __name__="foreign"
        )
