"""Layers of one input that a compiled model runs as one launch of Hopper's product.

Products are interpreted, and graphs run as in `test_interop_torch_epilogues`. A launch of several
layers changes no number, so results have the bits of separate launches.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import cupyattn as ca
from cupyattn.runtime.recent import CALLS

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
prologues = importlib.import_module("tests.interop.test_interop_torch_prologues")
epilogues = importlib.import_module("tests.interop.test_interop_torch_epilogues")
joint = importlib.import_module("tests.interop.test_interop_torch_joint_rows")
interop = importlib.import_module("cupyattn.interop.torch")
layers = importlib.import_module("cupyattn.ops.layers")
operation = importlib.import_module("cupyattn.ops.operation")

fresh = epilogues.fresh  # runs by itself
HOPPER = {"backend": "interpret", "arch": "sm_90a"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count products by the number of their layers."""
    found: Counter[int] = Counter()
    interpret = operation.interpret

    def counted(problem: Any, work: Any, bound: Any) -> Any:
        for stage in work.stages[1:]:
            found[sum(inner.startswith("b_scales") for inner in stage.names)] += 1
        return interpret(problem, work, bound)

    monkeypatch.setattr(operation, "interpret", counted)
    return found


def both_ways(
    function: Callable[..., Any], launched: Counter[int], *given: Any, **named: Any
) -> Counter[int]:
    """Return how products were launched, with the bits of separate launches."""
    results, counts = [], []
    compiled = torch.compile(function, backend=epilogues.Graphs())
    for apart in (False, True):
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            if apart:
                patch.setattr(layers, "settle_together", lambda products: None)
            launched.clear()
            CALLS.clear()
            made = compiled(*given, **named)
        results.append(made if isinstance(made, (tuple, list)) else (made,))
        counts.append(Counter(launched))
    assert {*counts[1]} == {1}
    assert sum(counts[0].values()) < sum(counts[1].values())
    assert all(map(torch.equal, *results))
    return counts[0]


def test_two_streams_write_joint_rows_in_two_launches(launched: Counter[int]) -> None:
    """Six layers, of text and image, into q, k and v of joint attention."""
    text, image = joint.streams(**HOPPER)

    def function(*given: Any) -> list[Any]:
        return [torch.cat(pair, 1) + 1 for pair in joint.pairs(text, image, given)]

    assert both_ways(function, launched, *joint.inputs()) == {3: 2}


class WithAdapter(torch.nn.Module):
    """A layer to whose result a low-rank product is added, as PEFT does."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = (
            torch.nn.Linear(*sizes, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            for sizes in ((joint.CHANNELS, 2), (2, joint.CHANNELS))
        )

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(self.down(x))


def test_layers_with_adapters_have_the_bits_of_separate_launches(launched: Counter[int]) -> None:
    """The layer with a sum has a separate launch."""
    torch.manual_seed(0)
    stream = joint.Stream("qkvw", **HOPPER)
    stream.q, given = WithAdapter(stream.q), joint.inputs()[0]
    assert both_ways(stream, launched, given) == {3: 1, 1: 1}


#: Blocks of diffusers, and their launches by number of layers: q, k and v of each stream, k and v
#: of cross-attention. The feed-forward in Flux's single block has an activation.
BLOCKS = {
    "Flux": {3: 2, 1: 6}, "Flux, single": {3: 1, 1: 1}, "Wan": {3: 1, 2: 1, 1: 5},
    "Kandinsky": {3: 1, 2: 1, 1: 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_projections_of_a_block_are_one_launch(name: str, launched: Counter[int]) -> None:
    torch.manual_seed(0)
    block, given = prologues.BLOCKS[name][0]()
    block = block.to(torch.bfloat16).requires_grad_(False)
    given = {n: x.bfloat16() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    config = ca.Int8Config(strategy="channel", min_elements_for_int8=1024, max_outlier_ratio=1.0)
    interop.replace_linear_with_int8(block, config=config, **HOPPER)
    assert both_ways(block, launched, **given) == BLOCKS[name]
