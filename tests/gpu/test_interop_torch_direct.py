"""Calls made for their place in Inductor's code, on a device: bits, replays, streams, CUDA graphs.

tests/interop/test_interop_torch_places.py and test_interop_torch_inductor_calls.py have the tests
without a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cupyattn.compiler import modules as compiler
from cupyattn.runtime import replay

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this torch has no CUDA device", allow_module_level=True)
interop = importlib.import_module("cupyattn.interop.torch")
epilogues = importlib.import_module("cupyattn.interop.torch.epilogues")
inductor_calls = importlib.import_module("cupyattn.interop.torch.inductor_calls")
places = importlib.import_module("cupyattn.interop.torch.places")

WIDTH, HEADS = 512, 4
#: Calls until every operator is launched from its place, at addresses that come again.
WARM = 6


class Block(torch.nn.Module):  # type: ignore[misc]
    """Attention, three layers of one input, one with GELU, one that adds."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        heads = [
            one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v)
        ]
        attended = interop.attention(*heads, variant="fa_int8").transpose(1, 2).flatten(2)
        x = x + self.o(attended)
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block() -> Any:
    torch.manual_seed(0)
    model = Block().to("cuda", torch.bfloat16).eval().requires_grad_(False)
    interop.replace_linear_with_int8(model)
    return model


def rows(length: int = 200, seed: int = 1) -> Any:
    made = torch.randn(2, length, WIDTH, generator=torch.manual_seed(seed))
    return made.to("cuda", torch.bfloat16)


def by_dispatcher(model: Any, x: Any, **how: Any) -> Any:
    """The result of a compiled model whose operators go by torch's dispatcher."""
    from torch._inductor import config
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN

    epilogues.register()
    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True):
        for name in inductor_calls.OPERATORS:
            patch.delitem(CUSTOM_EXTERN_KERNEL_CODEGEN, f"torch.ops.cupyattn.{name}.default")
        return torch.compile(model, fullgraph=True, **how)(x)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls that are not launched from their place, by one entry each: all of them renew it."""
    found: list[int] = []
    own = places.Place._renew

    def noted(self: Any) -> None:
        found.append(1)
        own(self)

    monkeypatch.setattr(places.Place, "_renew", noted)
    return found


def warm(call: Callable[[Any], Any], x: Any) -> None:
    for _ in range(WARM):
        call(x)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_bits_are_those_of_operators_and_calls_are_direct(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other numbers at the same addresses give their own results."""
    model, x = block(), rows()
    expected = by_dispatcher(model, x, dynamic=dynamic).clone()
    torch._dynamo.reset()
    misses = counted(monkeypatch)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for _ in range(WARM):
        assert torch.equal(compiled(x), expected)
    assert misses
    misses.clear()
    for _ in range(3):
        assert torch.equal(compiled(x), expected)
    assert not misses
    other = rows(seed=2)
    of_other = compiled(other).clone()
    x.copy_(other)
    assert torch.equal(compiled(x), of_other) and not torch.equal(of_other, expected)


@torch.no_grad()
def test_lengths_that_are_symbols() -> None:
    model = block()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    given = [rows(length) for length in (200, 136, 264)]
    expected = [compiled(x).clone() for x in given]
    for _ in range(WARM):
        for x, y in zip(given, expected, strict=True):
            assert torch.equal(compiled(x), y)


@torch.no_grad()
def test_another_stream_and_another_thread() -> None:
    model, x = block(), rows()
    compiled = torch.compile(model, fullgraph=True)
    expected = compiled(x).clone()
    warm(compiled, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            assert torch.equal(compiled(x), expected)
    torch.cuda.current_stream().wait_stream(stream)

    @torch.no_grad()
    def work() -> bool:
        same = all(torch.equal(compiled(x), expected) for _ in range(WARM))
        torch.cuda.synchronize()
        return same

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda _: work(), range(4)))


@torch.no_grad()
def test_a_cuda_graph_of_the_caller_has_the_kernels() -> None:
    model, x = block(), rows()
    compiled = torch.compile(model, fullgraph=True)
    warm(compiled, x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = compiled(x)
    x.copy_(rows(seed=2))
    expected = compiled(x).clone()
    graph.replay()
    assert torch.equal(y, expected)


@torch.no_grad()
def test_the_cuda_graphs_of_the_compiler() -> None:
    """Its warm-up, recording and replays, which own the memory of results."""
    model, x = block(), rows()
    expected = torch.compile(model, fullgraph=True)(x).clone()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(WARM):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(x), expected)


@torch.no_grad()
def test_what_is_stale_is_not_launched() -> None:
    model, x = block(), rows()
    compiled = torch.compile(model, fullgraph=True)
    expected = compiled(x).clone()
    warm(compiled, x)
    compiler.cache_clear(disk=False)
    for _ in range(WARM):
        assert torch.equal(compiled(x), expected)
    replay.graphs(0).clear()
    for _ in range(WARM):
        assert torch.equal(compiled(x), expected)


@torch.no_grad()
def test_a_profiler_sees_operators() -> None:
    model, x = block(), rows()
    compiled = torch.compile(model, fullgraph=True)
    expected = compiled(x).clone()
    warm(compiled, x)
    with torch.profiler.profile() as profile:
        assert torch.equal(compiled(x), expected)
    names = [event.name for event in profile.events()]
    assert "cupyattn::int8_layers" in names and "cupyattn::attention_qkv" in names


@torch.no_grad()
def test_many_blocks_share_code_and_are_all_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 blocks of the same code, 200 calls of operators in graphs that all stay.

    Layers have 160 graphs, one for each pair of weights. The attention of all blocks may share one,
    where the allocator gives them the same memory.
    """
    misses = counted(monkeypatch)
    models = [block() for _ in range(40)]
    for model in models:
        model.compile(fullgraph=True)

    def run(x: Any) -> Any:
        for model in models:
            x = model(x)
        return x

    x = rows()
    expected = run(x).clone()
    assert 160 < len(misses) <= 200
    warm(run, x)
    misses.clear()
    assert torch.equal(run(x), expected)
    assert not misses and len(replay.graphs(0)) > 160
