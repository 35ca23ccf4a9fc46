"""The page on pipelines has the table of the record of accelerated models."""

from __future__ import annotations

from experiments._harness import recording
from experiments.diffusion import accelerated_models


def test_the_table_is_what_the_record_says() -> None:
    page = accelerated_models.PAGE.read_text(encoding="utf-8")
    inside = page.split(accelerated_models.BEGIN)[1].split(accelerated_models.END)[0]
    record = recording.stored(accelerated_models.NAME)
    assert inside == f"\n{accelerated_models.section(record)}\n", (
        "run python -m experiments.diffusion.accelerated_models --stored"
    )
