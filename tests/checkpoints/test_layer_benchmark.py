"""`cupyattn benchmark`: the linear layers of any checkpoint, one of each shape, held to a bound."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cupyattn import cli
from cupyattn.checkpoints import open_checkpoint
from cupyattn.checkpoints.benchmark import benchmark_layers, total
from cupyattn.quant.blocks import Int8Config
from tests.checkpoints.checkpoint_files import write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two blocks of an attention that no Kandinsky has, and tensors that are no linear layers."""
    rng = np.random.default_rng(0)
    arrays = {"norm_out.linear.weight": (64, 64), "conv_in.weight": (64, 8, 3, 3)}
    for block in range(2):
        arrays |= {
            f"blocks.{block}.attn.to_q.weight": (64, 96),
            f"blocks.{block}.attn.to_out.0.weight": (96, 64),
            f"blocks.{block}.ff.net.0.proj.weight": (64, 96), f"blocks.{block}.norm.weight": (96,),
        }  # fmt: skip
    made = {name: rng.standard_normal(s).astype(np.float32) for name, s in arrays.items()}
    return write(tmp_path / "model.safetensors", made)


def test_layers_of_a_shape_are_run_once_and_counted(model: Path) -> None:
    seen: list[str] = []
    config = Int8Config(min_elements_for_int8=1000)
    parts = benchmark_layers(open_checkpoint(model), config, tokens=40, advance=seen.append)
    assert [(p.count, p.name) for p in parts] == [
        (2, "96 x 64: blocks.*.attn.to_out.*"), (4, "64 x 96: blocks.*.attn.to_q and 1 more"),
    ]  # fmt: skip
    assert seen == ["blocks.0.attn.to_out.0.weight", "blocks.0.attn.to_q.weight"]
    assert all(p.ok and p.error_16 < p.error_int8 < 0.03 and p.seconds_16 is None for p in parts)
    size = 6 * 64 * 96 * 2 / 1024
    assert total(parts, "these layers").startswith(f"weights of these layers: {size:.1f} KiB in 16")


def test_the_command_prints_a_table_and_writes_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "times.json"
    words = ["benchmark", str(model), "--tokens", "40", "--strategy", "channel", "--json", str(out)]
    assert cli.main([*words, "--fp32-pattern", "blocks.0.*"]) == 0
    assert "2 x 64 x 96: blocks.*.attn.to_q and 1 more" in (said := capsys.readouterr().out)
    assert "weights of these layers" in said
    assert [row["count"] for row in json.loads(out.read_text())["layers"]] == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--min-elements", "1000000"], "has no linear layer of 1000000 elements or more"),
        (["--fp32-pattern", "blocks.7.*"], "'blocks.7.*' of fp32_patterns (--fp32-pattern) is"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    words: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["benchmark", str(model), *words]) == 2
    assert message in (said := capsys.readouterr().err) and said.count("\n") == 1
