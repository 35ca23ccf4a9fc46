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
    """Give the run a separate compile cache, shared by its workers, unless one is named.

    Each of several workers gets one thread of NumPy and one of torch, as more would share the same
    cores.
    """
    # NOTE: the first test in a process imports frameworks. It keeps the budget when pytest runs it
    # again, as `make test` does.
    if config.getoption("only_rerun", None):
        config.pluginmanager.register(Budget(), "budget of quick tests")
    # NOTE: workers are children of this process and inherit its variables.
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # The interpreter allocates and frees arrays all the time. If glibc returned their pages
        # each time, this would cost 5 % of the run.
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
    if "CUPYATTN_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="cupyattn-test-cache-")
        os.environ["CUPYATTN_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop("CUPYATTN_CACHE_DIR", None))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave tests/gpu out without a device: thousands of tests would all be skipped."""
    return True if collection_path == GPU and device_missing() else None


def pytest_report_header() -> str:
    """Report that tests/gpu is left out."""
    missing = device_missing()
    return f"{GPU.name}: left out, {missing}" if missing else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything under tests/gpu, and skip marked tests without a device."""
    missing = device_missing()
    for item in items:
        if GPU in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if missing and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def planted_kernels() -> Iterator[None]:
    """For a test that plants kernels: modules loaded before are not used in it, nor its modules
    after."""
    kc.cache_clear(disk=False)
    yield
    kc.cache_clear(disk=False)


@pytest.fixture
def one_block() -> Iterator[None]:
    """All tiles of a Hopper form belong to one block, which takes one after the other."""
    with hopper_blocks(1):
        yield


def pytest_collection_finish() -> None:
    """Let the garbage collector run less often; the collected tests count as old from now on."""
    # NOTE: not by gc.freeze, which `collector_paused` respects: each program of the interpreter
    # would then be visited by the next collections, a fifth of the time of its tests.
    gc.collect()
    gc.set_threshold(100_000, 20, 1_000)


def pytest_sessionfinish() -> None:
    """Drop the programs of the interpreter, which pytest's last collections would visit."""
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
