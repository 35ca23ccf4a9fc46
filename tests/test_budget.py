"""The budget of quick tests: only a test that repeatedly exceeds it fails, by its name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.support.budget import Budget
def pytest_configure(config):
    config.addinivalue_line("markers", "slow: longer")
    config.pluginmanager.register(Budget(0.05))
"""
TESTS = """
import subprocess, sys, time
import pytest
from cupyattn.compiler.nvrtc import Nvrtc

def burn(seconds=0.07):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture
def costly():
    burn()

def test_always(): burn()
def test_in_a_fixture(costly): pass
def test_in_a_child():
    code = "import time\\nwhile time.process_time() < 0.08: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
def test_wrong(): burn(); assert "its own failure" == ""
@pytest.mark.slow
def test_marked(): burn()
def test_first(seen=[]):
    seen or burn()
    seen.append(1)
def test_compiling(monkeypatch):
    Nvrtc.compile(None)
def test_waiting(): time.sleep(0.1)
"""
#: A compiler that takes long, in place before the budget looks at it.
COMPILER = """
import time
from cupyattn.compiler.nvrtc import Nvrtc
def compile(self):
    end = time.process_time() + 0.07
    while time.process_time() < end:
        pass
Nvrtc.compile = compile
"""


def test_what_keeps_exceeding_the_budget_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(COMPILER + CONFTEST)
    (tmp_path / "test_costs.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rfER"]
    command += ["-p", "pytest_rerunfailures", "--reruns", "1", "--only-rerun", "OverBudget"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "test_costs.py"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    failed = re.findall(r"^FAILED test_costs.py::(\w+) - (.*)", done.stdout, re.MULTILINE)
    over = ["test_always", "test_in_a_fixture", "test_in_a_child"]
    assert [name for name, _ in failed] == [*over, "test_wrong"], done.stdout
    assert all("OverBudget" in why for _, why in failed[:-1]) and "assert" in failed[-1][1]
    assert re.search(
        r"test_costs.py::test_always took 0\.\d s of CPU, compiling apart; a quick test takes at "
        r"most 1 s and fails beyond 0.05 s: make its input smaller, or mark it slow",
        done.stdout,
    )
    again = re.findall(r"^RERUN test_costs.py::(\w+)", done.stdout, re.MULTILINE)
    assert sorted(again) == sorted([*over, "test_first"])
    assert "4 failed, 4 passed, 4 rerun" in done.stdout
