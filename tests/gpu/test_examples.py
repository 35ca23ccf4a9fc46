"""The examples on a device: the example of CuPy, and the examples that run on any backend."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_examples import SCRIPTS, run


def test_the_script_of_cupy_runs() -> None:
    printed = run("cupy_script")
    assert "the graph's bits are those of the call: True" in printed
    assert printed.count("CPU:") == 2


@pytest.mark.parametrize(
    "name",
    ["calibrate_then_sample", "calibrate_recorded", "torch_module", "diffusers_pipeline"],
)
def test_an_example_runs_on_the_device(name: str) -> None:
    library, _, printed = SCRIPTS[name]
    pytest.importorskip(library)
    assert re.search(printed, run(name))
