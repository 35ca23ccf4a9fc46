"""The README's Python blocks run, each alone, as a reader pastes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from tests.interop import diffusers_cases as cases  # noqa: E402 - imports diffusers

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def small_pipeline() -> Any:
    """A pipeline of tiny models that takes a prompt, and stays on the CPU."""
    pipe = cases.make("flux", torch.bfloat16)
    given = {n: x.bfloat16() for n, x in cases.CASES["flux"].call().items() if hasattr(x, "to")}
    given |= {"output_type": "latent", "height": 256, "width": 256}
    flux = type(pipe)

    class Small(flux):  # type: ignore[misc, valid-type]
        def to(self, *_: Any) -> Any:
            return self

        def __call__(self, prompt: str, **arguments: Any) -> Any:
            assert isinstance(prompt, str)
            return super().__call__(**given, **arguments)

    pipe.__class__ = Small
    return pipe


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[1])
def test_a_block_of_the_readme_runs_alone(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = small_pipeline()
    weights = {name: x.clone() for name, x in pipe.transformer.state_dict().items()}
    loaded = classmethod(lambda cls, name, **how: pipe)
    monkeypatch.setattr(diffusers.FluxPipeline, "from_pretrained", loaded)
    names: dict[str, Any] = {}
    with torch.compiler.set_stance("force_eager"):
        exec(block, names)
    if "pipe" in names:
        assert names["image"].numel() and names["image"].isfinite().all()
        after = pipe.transformer.state_dict()
        assert after.keys() == weights.keys()
        assert all(torch.equal(after[name], x) for name, x in weights.items())
    else:
        assert names["o"].shape == (1, 8, 256, 64)
