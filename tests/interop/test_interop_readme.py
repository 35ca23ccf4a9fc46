"""The README's Python blocks run as a reader does: one after the other, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cupyattn.kernels import ladder

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("diffusers")

from tests.interop import diffusers_cases as cases  # noqa: E402 - imports diffusers

ROOT = Path(__file__).parents[2]


def arguments() -> dict[str, Any]:
    """What the reader's pipeline is called with."""
    made = {n: x.bfloat16() for n, x in cases.CASES["flux"].call().items() if hasattr(x, "to")}
    made |= {"num_inference_steps": 1, "output_type": "latent", "true_cfg_scale": 2.0}
    return made | {"height": 256, "width": 256}


def test_the_blocks_of_the_readme_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) >= 14
    source = (ROOT / "kernels_cu" / "attn_fa.cu").read_text(encoding="utf-8")
    (tmp_path / "attn_mine.cu").write_text(source.replace("attn_fa(", "attn_mine("))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "VARIANTS", dict(ladder.VARIANTS))
    names: dict[str, Any] = {"pipe": cases.make("flux", torch.bfloat16), "arguments": arguments()}
    with torch.compiler.set_stance("force_eager"):  # what compiled blocks give is tested elsewhere
        for block in blocks:
            exec(block, names)
    assert "2 attention modules: 4 calls by cupyattn" in capsys.readouterr().out
    assert type(names["model"][0]).__name__ == "Int8Linear"
    assert names["o"].shape == names["q"].shape == (1, 8, 256, 64)
    assert "mine" in ladder.VARIANTS
