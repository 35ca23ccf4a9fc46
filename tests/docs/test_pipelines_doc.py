"""The page on pipelines has the tables of the records of accelerated models and step caches."""

from __future__ import annotations

from types import ModuleType

import pytest

from experiments._harness import recording
from experiments.diffusion import accelerated_models, cached_models


@pytest.mark.parametrize("module", [accelerated_models, cached_models])
def test_a_table_is_what_its_record_says(module: ModuleType) -> None:
    page = accelerated_models.PAGE.read_text(encoding="utf-8")
    inside = page.split(module.BEGIN)[1].split(module.END)[0]
    assert inside == f"\n{module.section(recording.stored(module.NAME))}\n", (
        f"run python -m {module.__name__} --stored"
    )
