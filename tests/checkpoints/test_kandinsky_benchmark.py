"""`cupyattn kandinsky --benchmark` without a device: the parts of a block, held to their bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import cli
from cupyattn.checkpoints import benchmark, open_kandinsky
from cupyattn.cli import kandinsky
from cupyattn.measure import device
from cupyattn.quant import Int8Linear
from tests.checkpoints.checkpoint_files import write
from tests.checkpoints.test_checkpoint_kandinsky import transformer


def block(tmp_path: Path) -> Path:
    """A transformer whose blocks have norms of the keys, too."""
    arrays = transformer()
    norms = {n.replace("query_norm", "key_norm"): a for n, a in arrays.items() if "query_n" in n}
    return write(tmp_path / "x.safetensors", {**arrays, **norms})


def measured(path: Path) -> list[benchmark.Part]:
    return benchmark.benchmark_block(*open_kandinsky(path), np, tokens=150, text_tokens=20)


def test_every_part_holds_and_says_what_it_takes(tmp_path: Path) -> None:
    parts = measured(block(tmp_path))
    assert [(p.name.split()[0], p.count) for p in parts] == [
        ("projections", 6), ("projections", 2), ("feed-forward,", 1), ("feed-forward,", 1),
        ("self-attention", 1), ("cross-attention", 1),
    ]  # fmt: skip
    assert all(p.ok and p.seconds_16 is None for p in parts)
    assert all(p.error_16 < p.error_int8 < 0.03 for p in parts)
    tokens, text, up, down = parts[:4]
    assert tokens.bytes_16 == text.bytes_16 == 2 * 32 * 32 and tokens.bytes_int8 == 32 * 32 + 4
    assert up.bytes_16 == down.bytes_16 == 2 * 32 * 64
    weights = 2 * (8 * 32 * 32 + 2 * 32 * 64)
    assert f"weights of the block: {weights / 1024:.1f} KiB in 16 bits" in benchmark.total(parts)
    assert all(len(p.cells) == len(benchmark.HEADER) for p in parts)
    timed = [replace(p, seconds_16=2e-3, seconds_int8=1e-3) for p in parts]
    assert timed[0].cells[3] == "2.00" and "24 ms, as INT8 12 ms" in benchmark.total(timed)


def test_a_part_that_misses_its_bound_has_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of another weight, and 16-bit products of other columns."""
    path = block(tmp_path)
    wrong = {
        "error": lambda *_: np.zeros(()), "product16": lambda x, w: (x @ w[::-1].T).astype(x.dtype),
    }  # fmt: skip
    for name, planted in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(Int8Linear if name == "error" else benchmark, name, planted)
            patch.setattr(benchmark, "_timed", lambda *_: (1.0, 1.0))
            layers = measured(path)[:4]
        assert not any(p.ok or p.seconds_16 for p in layers)
        assert all(p.cells[-1] == "NO" for p in layers)


def test_without_norms_of_keys_there_is_nothing_to_attend_with(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", transformer())
    with pytest.raises(ValueError, match="has no visual_transformer_blocks.0.self_attention.key_n"):
        measured(path)


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["kandinsky", "--model-path", str(block(tmp_path)), "--min-elements", "100"]
    given += ["--output-path", str(tmp_path / "out"), "--benchmark"]
    monkeypatch.setattr(device, "device_missing", lambda: "there is no driver")
    assert cli.main(given) == 2
    error = capsys.readouterr().err
    assert "--benchmark needs a CUDA device (there is no driver): leave it out" in error
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()
    pytest.importorskip("cupy")
    monkeypatch.setattr(device, "device_missing", lambda: "")

    def on_host(source: Any, found: Any, _: Any, **options: Any) -> list[benchmark.Part]:
        assert options["strategy"] == "channel"
        return benchmark.benchmark_block(source, found, np, text_tokens=20, **options)

    monkeypatch.setattr(kandinsky, "benchmark_block", on_host)
    said = tmp_path / "said.json"
    options = ["--tokens", "50", "--strategy", "channel", "--json", str(said)]
    assert cli.main([*given, *options]) == 0
    printed = capsys.readouterr().out
    assert "Wrote and checked" in printed and "6 x projections of tokens" in printed
    assert [p["count"] for p in json.loads(said.read_text())["benchmark"]] == [6, 2, 1, 1, 1, 1]
