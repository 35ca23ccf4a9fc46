"""docs/DISTRIBUTED.md runs, names what exists, and the examples of docstrings are true."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli, distributed
from cupyattn.measure.words import format_seconds, format_share
from experiments.speed import ring_timeline, scaling
from tests.support.ranks import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "DISTRIBUTED.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
#: The one that is a file of its own.
(ATTEND,) = (block for block in BLOCKS if "from_environment" in block)


def test_the_examples_run_one_after_the_other() -> None:
    names: dict[str, object] = {}
    for block in BLOCKS:
        if block is not ATTEND:
            exec(block, names)
    q, k, v = (names[name] for name in "qkv")
    whole = ca.attention(q, k, v, causal=True).astype(np.float64)
    assert np.abs(names["o"] - whole).max() < 2e-3  # type: ignore[operator]
    np.testing.assert_array_equal(names["whole"], ca.attention(q, k, v))  # type: ignore[arg-type]
    assert names["dq"].shape == names["dk"].shape == (1, 8, 256, 64)  # type: ignore[attr-defined]
    assert names["costs"].mesh.size == 64  # type: ignore[attr-defined]


def test_the_script_runs_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed.start, "device_missing", lambda: "none is asked for")
    exec(ATTEND.replace("4096", "64"), {})
    assert capsys.readouterr().out == "0 1 (1, 8, 64, 64)\n"


@pytest.mark.slow
def test_the_script_runs_in_several(tmp_path: Path) -> None:
    (tmp_path / "attend.py").write_text(ATTEND.replace("4096", "64"))
    port = str(free_port())
    running = []
    for rank in range(2):
        environ = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "MASTER_PORT": port}
        environ |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(tmp_path / "attend.py")]
        running.append(
            subprocess.Popen(
                command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True
            )
        )
    assert [p.communicate(timeout=90)[0] for p in running] == [
        f"{rank} 2 (1, 8, 32, 64)\n" for rank in range(2)
    ]


def test_commands_and_names_exist() -> None:
    lines = re.findall(r"^cupyattn (.*)$", PAGE, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        assert cli.main(shlex.split(line)) == 0
    for name in re.findall(r"`distributed\.(\w+)", PAGE):
        assert hasattr(distributed, name), name
    for name in re.findall(r"`(parallel_\w+|share|gather|judge\w*)`", PAGE):
        assert name in distributed.__all__
    extras = (ROOT / "setup.cfg").read_text()
    for extra in {"nccl12", "nccl13"}:
        assert extra in PAGE and f"\n{extra} =\n" in extras
    assert "mask" in PAGE.split("## Limits")[1] and "(120 seconds unless said)" in PAGE
    assert distributed.group.TIMEOUT == 120 and distributed.start.PORT == 29400


def test_the_page_has_what_is_predicted(tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    assert cli.main(["plan", "--heads", "24", "--all-sizes", "--json", str(file)]) == 0
    rows = {
        f"| {x['devices']} | {x['length']:,} | {x['ulysses']} x {x['ring']} | "
        f"{format_seconds(x['seconds'])} | {format_share(x['share'])} | "
        f"{format_seconds(x['ring_exposed'])} | {format_seconds(x['codes_exposed'])} |"
        for x in json.loads(file.read_text())["sizes"]
    }
    shown = re.findall(r"^\| \d+ \| [\d,]+ \| \d+ x \d+ \|.*$", PAGE, re.MULTILINE)
    assert len(shown) == 6 and set(shown) <= rows


def test_the_experiment_runs_in_small(tmp_path: Path) -> None:
    file, drawing = tmp_path / "scaling.json", tmp_path / "scaling.svg"
    given = ["--quick", "--devices", "1", "2", "--json", str(file), "--plot", str(drawing)]
    assert scaling.main(given) == 0
    record = json.loads(file.read_text())
    rows = record["rows"]
    assert all(row["ok"] and row["j2"] <= 1 and not row["samples"] for row in rows)
    assert {row["name"] for row in rows} >= {"ulysses", "ring", "ring of codes", "heads", "batch"}
    for row in rows:  # codes have scales, too
        if row["variant"] == "fa_tc":
            assert row["bytes_sent"] == row["predicted_bytes_sent"]
        assert row["predicted_share"] <= 1.001
        alone = row["ranks"] == 1 or row["axis"]
        assert row["transport"] == ("" if alone else "store")
    assert len(record["ahead"]) == 18 and drawing.stat().st_size > 1000


def test_the_page_has_what_was_measured(tmp_path: Path) -> None:
    record = scaling.recording.RESULTS / "scaling.json"
    said = PAGE.partition(scaling.BEGIN)[2].partition(scaling.END)[0].strip()
    if record.exists():
        assert said == scaling.section(json.loads(record.read_text()))
    else:
        assert said.startswith("It has not been measured yet")


def test_a_record_becomes_a_section_of_the_page(tmp_path: Path) -> None:
    """By transport: on one device nothing travels."""
    page, file = tmp_path / "page.md", tmp_path / "memory.json"
    page.write_text(f"before {scaling.BEGIN} nothing {scaling.END} after")
    assert scaling.main(["--quick", "--memory", "--devices", "2", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [(r["name"], r["causal"], r["transport"]) for r in record["rows"]] == [
        ("ulysses", False, "store"), ("ring", True, "store"),
    ]  # fmt: skip
    assert all(r["j2"] is None and r["bytes_sent"] == r["predicted_bytes_sent"]
               for r in record["rows"])  # fmt: skip
    scaling.update_page(record, page)
    written = page.read_text()
    assert written.startswith("before ") and written.endswith(" after")
    assert "| ulysses | 2 | store |" in written and "| transport |" in written
    assert record["environment"]["revision"][:10] in written


def test_stages_of_a_ring_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "timeline.json"
    assert ring_timeline.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 8 and {row["transport"] for row in rows} == {"store"}
    for row in rows:
        names = [name for name, *_ in row["stages"]]
        quantised = {"quantise K, V", "quantise Q"} if row["way"] == "ring of codes" else set()
        assert {"call", "attention", "merge"} | quantised <= set(names)
        assert all(0 <= begin <= end <= row["call_ms"] for _, begin, end, _ in row["stages"])
    assert "ring of codes, store, rank 1" in capsys.readouterr().out


def test_the_experiment_says_that_devices_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    if not scaling.device.device_missing():
        pytest.skip("there are devices")
    assert scaling.main(["--devices", "1", "2"]) == 2
    assert "2 devices are asked for, 0 are here" in capsys.readouterr().err
