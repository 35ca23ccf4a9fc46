"""Shared fixtures: GPU tests skip without a device, one compile cache per run, search profiles."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cupyattn.compiler import modules as kc
from cupyattn.interpret.program import program
from cupyattn.measure.device import device_missing
from tests.support.budget import Budget
from tests.support.runs import hopper_blocks

#: Tests that need a device.
GPU = Path(__file__).parent / "gpu"

# How far Hypothesis searches: CUPYATTN_TEST_PROFILE=deep before a release or over night. CI draws
# the same examples each time, so more of them would find nothing that the first run did not.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=20, **_COMMON)
settings.register_profile("ci", max_examples=25, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("deep", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("CUPYATTN_TEST_PROFILE", "quick"))


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a compile cache of its own, shared by its workers, unless one is named.

    And to each of several workers one thread of NumPy's and one of torch's: more would take turns
    on the same cores.
    """
    # NOTE: first runs in a process import frameworks, so that the budget holds where pytest runs
    # what exceeds it again, as `make test` asks for.
    if config.getoption("only_rerun", None):
        config.pluginmanager.register(Budget(), "budget of quick tests")
    # NOTE: workers are children of this process and inherit its variables.
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # The interpreter makes and drops arrays all the time: with glibc, given back each time,
        # their pages cost 5 % of the run.
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
    if "CUPYATTN_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="cupyattn-test-cache-")
        os.environ["CUPYATTN_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop("CUPYATTN_CACHE_DIR", None))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave tests/gpu out where no device is: thousands of tests that would all be skipped."""
    return True if collection_path == GPU and device_missing() else None


def pytest_report_header() -> str:
    """Say so."""
    missing = device_missing()
    return f"{GPU.name}: left out, {missing}" if missing else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything under tests/gpu, and skip what is marked where no device is."""
    missing = device_missing()
    for item in items:
        if GPU in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if missing and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def planted_kernels() -> Iterator[None]:
    """For a test that plants kernels of its own: nothing loaded before is used, nor this after."""
    kc.cache_clear(disk=False)
    yield
    kc.cache_clear(disk=False)


@pytest.fixture
def one_block() -> Iterator[None]:
    """All tiles of a Hopper form belong to one block, which takes one after the other."""
    with hopper_blocks(1):
        yield


def pytest_collection_finish() -> None:
    """Let the garbage collector look less often, and not at what was collected, which stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 1_000)


def pytest_sessionfinish() -> None:
    """Drop the programs of the interpreter, which pytest's last collections would all visit."""
    program.cache_clear()


@pytest.fixture
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Compile as a new user would: an empty cache folder, nothing in memory."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(folder))
    monkeypatch.delenv("CUPYATTN_CACHE_SIZE", raising=False)
    kc.cache_clear(disk=False)
    yield folder
    kc.cache_clear(disk=False)
