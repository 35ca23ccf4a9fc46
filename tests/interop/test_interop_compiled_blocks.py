"""Blocks that `accelerate` compiles, below the hooks of step caches and offloading."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers import hooks  # noqa: E402

from cupyattn.interop.diffusers import accelerate  # noqa: E402 - imports diffusers
from cupyattn.interop.torch import recorder  # noqa: E402
from cupyattn.interop.torch.compiling import compiled_blocks, restore_compiled  # noqa: E402
from cupyattn.interop.torch.forwards import substitute_of  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402
from tests.interop.test_interop_step_caches import CACHES, generate  # noqa: E402
from tests.interop.test_pipelines_page import in_fast_code  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")

Graphs = list[Any]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Return the graphs that are traced from now on."""
    return in_fast_code(monkeypatch)


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A block with a part that a hook may be put on."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.part(x).relu()


class Skip(hooks.ModelHook):  # type: ignore[misc]
    """Leaves out a module in each second call, as step caches do, by code of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def is_skipped(self) -> bool:
        self.calls += 1
        return self.calls % 2 == 0

    def new_forward(self, module: Any, x: Any) -> Any:
        return x if self.is_skipped() else self.fn_ref.original_forward(x)


def small(count: int = 1) -> Any:
    model = torch.nn.Sequential(*(Block() for _ in range(count))).requires_grad_(False)
    model._no_split_modules = ["Block"]
    return model


def put(module: Any) -> Any:
    hooks.HookRegistry.check_if_exists_or_initialize(module).register_hook(Skip(), "skip")
    return module._diffusers_hook


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_hook_decides_whether_a_compiled_block_runs(order: str, graphs: Graphs) -> None:
    model, x = small(), torch.randn(2, 4)
    native = model(x)
    registry = put(model[0]) if order == "before" else None
    done = compiled_blocks(model)
    registry = registry or put(model[0])
    assert [torch.equal(model(x), y) for y in (native, x, native, x)] == [True] * 4
    assert len(graphs) == 1
    done.undo()
    torch._dynamo.reset()
    assert torch.equal(model(x), native) and len(graphs) == 1  # below the hook, too
    assert registry._fn_refs[0].original_forward == Block.forward.__get__(model[0])
    again = compiled_blocks(model)
    assert torch.equal(model(x), x) and torch.equal(model(x), native) and len(graphs) == 2
    registry.remove_hook("skip")
    again.undo()
    assert substitute_of(model[0]) is None and torch.equal(model(x), native)


def test_a_hook_within_a_block_lets_it_run_its_own_code(graphs: Graphs) -> None:
    model, x = small(2), torch.randn(2, 4)
    native = model(x)
    done = compiled_blocks(model)
    registry = put(model[0].part)
    for _ in range(2):
        assert model(x).isfinite().all()
    assert len(graphs) == 1  # of the block without a hook
    assert done.said().endswith("; 2 Block calls not compiled, since hooks are within")
    registry.remove_hook("skip")
    assert torch.equal(model(x), native) and "2 Block calls" in done.said()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_cache_that_skips_blocks_leaves_the_others_compiled(order: str, graphs: Graphs) -> None:
    pipe = cases.make("flux")
    config = CACHES["first block"](pipe)
    pipe.transformer.enable_cache(config)
    eager = generate(pipe)
    if order == "after":
        pipe.transformer.disable_cache()
    done = compiled_blocks(pipe.transformer)
    if order == "after":
        pipe.transformer.enable_cache(config)
    assert torch.allclose(generate(pipe), eager, atol=1e-5) and len(graphs) == 2
    done.undo()  # while the cache is there
    assert torch.equal(generate(pipe), eager) and len(graphs) == 2
    pipe.transformer.disable_cache()
    assert not any(map(substitute_of, pipe.transformer.modules()))
    assert generate(pipe).isfinite().all() and len(graphs) == 2


@pytest.mark.slow
def test_blocks_with_hooks_within_run_their_own_code_until_those_are_gone(graphs: Graphs) -> None:
    pipe = cases.make("flux")
    pipe.transformer.enable_cache(CACHES["taylor"](pipe))
    eager = generate(pipe)
    done = compiled_blocks(pipe.transformer)
    assert torch.equal(generate(pipe), eager) and not graphs
    said = "; 4 FluxSingleTransformerBlock calls not compiled, since hooks are within"
    assert said in done.said()
    pipe.transformer.disable_cache()
    generate(pipe)
    assert len(graphs) == 2 and "4 FluxSingle" in done.said()


def test_past_the_limit_of_the_compiler_blocks_run_their_own_code(graphs: Graphs) -> None:
    model, x = small(2), torch.randn(2, 4)
    native, wide = model(x), model.double()(x.double())
    done = compiled_blocks(model.float())
    with torch._dynamo.config.patch(recompile_limit=1):
        assert torch.equal(model(x), native)
        with pytest.warns(UserWarning, match="recompile_limit = 1 allows, so its other adapters"):
            assert torch.allclose(model.double()(x.double()), wide)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x.double())
            assert torch.equal(model.float()(x), native)  # by the code that there is
    assert len(graphs) == 1 and done.said().endswith("; other forms of Block not compiled")


def test_layers_that_are_each_another_graph_run_past_the_limit(graphs: Graphs) -> None:
    """Examples are decoders of transformers with a cache of keys, which read their own number."""

    class Numbered(Block):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: Any) -> Any:
            return x + self.number

    model = torch.nn.Sequential(*map(Numbered, range(12)))
    model._no_split_modules = ["Numbered"]
    compiled_blocks(model)
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own; experiments set another
        with pytest.warns(UserWarning, match="torch has compiled Numbered as often as"):
            assert torch.equal(model(torch.zeros(1)), torch.tensor([66.0]))
        assert torch.equal(model(torch.ones(1)), torch.tensor([67.0]))
    assert len(graphs) <= 8


def test_an_error_of_the_compiler_without_hooks_is_not_hidden(graphs: Graphs) -> None:
    class Broken(Block):
        def forward(self, x: Any) -> Any:
            torch._dynamo.graph_break()
            return x

    model = torch.nn.Sequential(Broken())
    model._no_split_modules = ["Broken"]
    compiled_blocks(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        model(torch.ones(1))
    assert not graphs


def test_code_that_a_caller_put_there_is_compiled_and_comes_back(graphs: Graphs) -> None:
    model, x = small(), torch.randn(2, 4)
    model[0].forward = own = lambda x: x + 1
    done = compiled_blocks(model)
    assert torch.equal(model(x), x + 1) and len(graphs) == 1
    done.undo()
    assert vars(model[0])["forward"] is own


def test_a_caller_may_compile_all_of_the_model_later(graphs: Graphs) -> None:
    model, x = small(2), torch.randn(2, 4)
    native = model(x)
    done = compiled_blocks(model)
    model.compile(fullgraph=True)
    assert torch.equal(model(x), native) and len(graphs) == 1  # one graph of all of it
    done.undo()
    assert torch.equal(model(x), native)


@pytest.mark.slow
@pytest.mark.parametrize("family", cases.CASES)
def test_blocks_of_each_family_are_one_graph(family: str, graphs: Graphs) -> None:
    pipe = cases.make(family)
    native = cases.generate(pipe, family, 2)
    with accelerate(pipe, "balanced", compile=False, log=None):
        eager = cases.generate(pipe, family, 2)
    handle = accelerate(pipe, "balanced", log=None)
    assert torch.allclose(cases.generate(handle, family, 2), eager, atol=1e-4)
    assert graphs and "compiled with fullgraph=True" in handle.report().lines[0]
    assert "not compiled" not in handle.report().lines[0]
    handle.restore()
    assert torch.equal(cases.generate(pipe, family, 2), native)


def test_copies_and_files_have_their_own_code(graphs: Graphs) -> None:
    model = cases.make("flux").transformer
    compiled_blocks(model)
    with io.BytesIO() as file:
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), loaded):
        assert not any(map(substitute_of, other.modules()))
        block = other.transformer_blocks[0]
        assert block.forward.__self__ is block
    restore_compiled(model)
    assert "forward" not in vars(model.transformer_blocks[0])


def test_blocks_of_one_kind_share_a_graph(graphs: Graphs) -> None:
    model = small(12)
    compiled_blocks(model)
    assert model(torch.ones(2, 4)).shape == (2, 4) and len(graphs) == 1


def test_what_is_compiled_cannot_be_recorded() -> None:
    model = cases.make("flux").transformer
    done = compiled_blocks(model)
    with pytest.raises(ValueError, match="is compiled, and runs no code that could be recorded"):
        recorder.record(model, scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
    done.undo()
    recorder.record(model, scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
