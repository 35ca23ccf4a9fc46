"""`replace_attention_with_int8` and `replace_linear_with_int8` in code that torch compiles.

Graphs run as they are traced (``backend="eager"``, or by way of autograd), so that what differs
from eager calls is tracing: results are equal to the bit. One test has Inductor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from cupyattn.interop import diffusers as interop  # noqa: E402 - imports diffusers
from cupyattn.interop import torch as interop_torch  # noqa: E402
from cupyattn.interop.diffusers import operator  # noqa: E402
from cupyattn.interop.torch import inductor_calls  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402
from tests.interop.test_interop_diffusers import (  # noqa: E402
    SHARE,
    SHORT,
    attention,
    distance,
    without,
)
from tests.support.marks import slow  # noqa: E402

NAME = "diffusers_attention"
LENGTH, WIDTH = 64, 32


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """One thread, and no code that another test compiled."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


class Graphs(list[int]):
    """A backend that runs graphs as they are, and how many operators of ours each has."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.append(count(graph))
        return graph


def count(graph: Any, name: str = NAME) -> int:
    return sum(name in str(node.target) for node in graph.graph.nodes)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = attention()

    def forward(self, x: Any) -> Any:
        return x + self.attn(x)


class Model(torch.nn.Module):
    """Two blocks, called for a step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: Any, timestep: Any = None) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def rows(length: int = LENGTH, seed: int = 0) -> Any:
    return torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def compiled(way: str, model: Any, backend: Any, **options: Any) -> Any:
    """Compile a model in one of the possible ways; return the object to call."""
    options = {"backend": backend, "fullgraph": True, **options}
    if way == "torch.compile":
        return torch.compile(model, **options)
    if way == "function":
        return torch.compile(lambda *args: model(*args), **options)
    if way == "blocks":
        for block in model.blocks:
            block.compile(**options)
    elif way == "layers":
        for block in model.blocks:
            block.attn.compile(**options)
    else:
        model.compile(**options)
    return model


WAYS = ("torch.compile", "method", "function", "blocks", "layers")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_compiling_has_our_operator(way: str, when: str) -> None:
    """Before and after: what was compiled and run for the model's own attention is left."""
    model, x, graphs = Model(), rows(), Graphs()
    native = model(x)
    with interop.replace_attention_with_int8(copy.deepcopy(model), policy="balanced", **SHORT) as h:
        expected = h(x)
    call = model
    if when == "before":
        call = compiled(way, model, graphs)
        assert torch.equal(call(x), native) and not sum(graphs)
        given = call if way == "torch.compile" else model
        handle = interop.replace_attention_with_int8(given, policy="balanced", **SHORT)
    else:
        handle = interop.replace_attention_with_int8(model, policy="balanced", **SHORT)
        call = compiled(way, model, graphs)
    start = len(graphs)
    assert handle.replaced == ("blocks.0.attn", "blocks.1.attn")
    assert torch.equal(call(x), expected) and not torch.equal(expected, native)
    assert graphs[start:] == ([1] if way in ("blocks", "layers") else [2])  # blocks share a graph
    report = handle.report()
    assert [layer.compiled for layer in report.layers] == [("balanced",)] * 2
    assert not report.modes and not report.native
    first, second, _ = str(report).splitlines()
    assert first == "2 attention modules: 2 modules in compiled code, whose calls are not counted"
    assert second == "blocks.0.attn: in compiled code: balanced"
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(call(rows(seed=1)), call(rows(seed=1)))
    handle.restore()
    assert torch.equal(call(x), native)
    if when == "before":
        assert len(graphs) == start + 1  # the graph from before is used again
    assert type(model.blocks[0].attn) is type(attention())
    once = len(graphs)
    again = interop.replace_attention_with_int8(model, policy="balanced", **SHORT)
    assert "attn: not called" in str(again.report())
    assert torch.equal(call(x), expected)
    if way != "function":  # whose graph asks which hooks the model has
        assert len(graphs) == once  # that of the first replacement, which the report knows of
    assert [layer.compiled for layer in again.report().layers] == [("balanced",)] * 2


def steps(count: int) -> Any:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(count)
    return scheduler


@pytest.mark.parametrize("way", ["torch.compile", "method", "blocks"])
def test_steps_through_three_modes_compile_three_graphs(way: str) -> None:
    """Each mode in turns, so that a step of a mode that was seen is no reason to compile."""
    scheduler, x, graphs = steps(9), rows(), Graphs()
    table = [("aggressive", "balanced", "precision")[n % 3] for n in range(9)]
    model = Model()
    own = copy.deepcopy(model)
    options = {"policy": table, "scheduler": scheduler, **SHORT}
    eager = interop.replace_attention_with_int8(own, **options)
    handle = interop.replace_attention_with_int8(model, **options)
    call = compiled(way, model, graphs)
    expected = [eager(x, t.expand(1)) for t in scheduler.timesteps]
    assert len({float(o.sum()) for o in expected}) == 3
    for n in range(3):
        call(x, scheduler.timesteps[n].expand(1))
    assert len(graphs) == 3
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t, o in zip(scheduler.timesteps, expected, strict=True):
            assert torch.equal(call(x, t.expand(1)), o)
    assert len(graphs) == 3 and eager.report().native == {}
    assert handle.report().layers[0].compiled == ("aggressive", "balanced", "precision")


def test_a_policy_that_follows_noise_is_native_where_no_step_is_seen() -> None:
    """Within a compiled function of the caller's, whose graph has no place for the host."""
    scheduler, model, x = steps(4), Model(), rows()
    native, graphs, t = model(x), Graphs(), scheduler.timesteps[0].expand(1)
    handle = interop.replace_attention_with_int8(model, scheduler=scheduler, **SHORT)
    eager = model(x, t)
    call = compiled("function", model, graphs)
    for _ in range(2):  # a step that was seen before and after is not taken for this one
        assert torch.equal(call(x, t), native) and not sum(graphs)
        assert torch.equal(model(x, t), eager)
    assert handle.report().layers[0].compiled == (
        "native: the step of a model within a compiled function is not known",
    )


@pytest.mark.parametrize("way", ["blocks", *slow(("torch.compile", "method"))])
def test_handles_of_one_compiled_model_follow_their_own_policies(way: str) -> None:
    scheduler, model, x, graphs = steps(4), Model(), rows(), Graphs()
    own = copy.deepcopy(model)
    table = ["aggressive", "balanced", "precision", "balanced"]
    options = {"scheduler": scheduler, **SHORT}
    mapping = {"0": table, "": table[::-1]}
    eager = interop.replace_attention_with_int8(own, policy=mapping, **options)
    first = interop.replace_attention_with_int8(
        model, include="0", policy=table, count_compiled=True, **options
    )
    second = interop.replace_attention_with_int8(model, include="1", policy=table[::-1], **options)
    call = compiled(way, model, graphs)
    for t in scheduler.timesteps:
        assert torch.equal(call(x, t.expand(1)), eager(x, t.expand(1)))
    assert eager.report().native == {}
    counted = {"aggressive": 1, "balanced": 2, "precision": 1}
    assert first.report().layers[0].compiled_calls == counted
    assert second.report().layers[0].compiled == ("balanced", "precision", "aggressive")
    second.restore()
    for t in scheduler.timesteps:
        call(x, t.expand(1))
    assert first.report().layers[0].compiled_calls == {n: 2 * c for n, c in counted.items()}


@pytest.mark.parametrize("way", ["torch.compile", "function"])
def test_torch_says_how_to_compile_what_a_handle_stands_for(way: str) -> None:
    said = r"a handle is no module: give torch.compile handle.target, and call that in functions"
    linear = torch.nn.Sequential(torch.nn.Linear(256, 256))
    handles = (
        (interop.replace_attention_with_int8(Model(), policy="balanced", **SHORT), rows()),
        (interop_torch.replace_linear_with_int8(linear, backend="mirror"), torch.zeros(2, 256)),
    )
    for handle, x in handles:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
            compiled(way, handle, "eager")(x)
        expected, graphs = handle(x), Graphs()
        assert torch.equal(compiled(way, handle, "eager", fullgraph=False)(x), expected)
        handle.compile(backend=graphs, fullgraph=True)
        assert torch.equal(handle(x), expected) and len(graphs) == 1  # its call is not in the way


def test_lengths_may_be_symbols() -> None:
    model, graphs = Model(), Graphs()
    own = interop.replace_attention_with_int8(copy.deepcopy(model), policy="balanced", **SHORT)
    handle = interop.replace_attention_with_int8(model, policy="balanced", **SHORT)
    call = compiled("method", model, graphs, dynamic=True)
    for length in (64, 65, 100, 33):
        assert torch.equal(call(rows(length)), own(rows(length)))
    assert graphs == [2]
    native = Model()
    assert torch.equal(call(rows(31)), native(rows(31)))
    assert graphs == [2, 0] and len(handle.report().layers[0].compiled) == 2


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_program_has_the_operator(strict: bool) -> None:
    model, x, scheduler = Model(), rows(), steps(4)
    with interop.replace_attention_with_int8(model, policy="aggressive", **SHORT) as handle:
        expected = model(x)
        lengths = {"x": {1: torch.export.Dim("length", min=32, max=256)}}
        program = torch.export.export(model, (x,), dynamic_shapes=lengths, strict=strict)
        assert count(program.graph_module) == 2
        assert torch.equal(program.module()(x), expected)
        assert torch.equal(program.module()(rows(80)), model(rows(80)))
        assert handle.report().layers[0].compiled == ("aggressive",)
    with interop.replace_attention_with_int8(model, scheduler=scheduler, **SHORT) as handle:
        t = scheduler.timesteps[0].expand(1)
        model(x, t)
        program = torch.export.export(model, (x, t), strict=strict)
        assert not count(program.graph_module)
        (said,) = handle.report().layers[0].compiled
    assert said.startswith("native: the ")


def test_what_a_graph_leaves_to_the_model_is_said() -> None:
    """Known when it is traced: no watcher runs in the graph."""
    cases_of = {
        "gradients": ({}, {"policy": "balanced"}),
        "fewer than 100 queries or keys": ({}, {"policy": "balanced", "min_length": 100}),
        "no call of torch's attention function": ({"processor": Plain()}, {"policy": "balanced"}),
    }  # fmt: skip
    for reason, (sizes, options) in cases_of.items():
        model, x, graphs = torch.nn.ModuleDict({"attn": attention(**sizes)}), rows(), Graphs()
        with torch.set_grad_enabled(reason == "gradients"):
            native = model["attn"](x)
            handle = interop.replace_attention_with_int8(model, **{**SHORT, **options})
            found = torch.compile(model["attn"], backend=graphs, fullgraph=True)(x)
        assert torch.equal(found, native) and graphs == [0]
        assert handle.report().layers[0].compiled == (f"native: {reason}",)


class Plain:
    """A processor that calls no attention function."""

    def __call__(self, attn: Any, x: Any, *_: Any, **__: Any) -> Any:
        return torch.sin(attn.to_q(x))


@pytest.mark.parametrize("way", ["blocks", pytest.param("method", marks=pytest.mark.slow)])
def test_calls_in_graphs_are_counted_on_the_device_when_asked(way: str) -> None:
    """Each layer has its counts, even if layers share a graph; nothing is compiled twice for it."""
    model, scheduler, graphs = Model(), steps(4), Graphs()
    table = ["aggressive", "aggressive", "balanced", "precision"]
    options = {"policy": table, "scheduler": scheduler, **SHORT}
    handle = interop.replace_attention_with_int8(model, count_compiled=True, **options)
    call = compiled(way, model, graphs)
    for length in (LENGTH, 31):
        for t in scheduler.timesteps:
            call(rows(length), t.expand(1))
    once = len(graphs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in scheduler.timesteps:
            call(rows(), t.expand(1))
    assert len(graphs) == once
    counted = {"aggressive": 4, "balanced": 2, "precision": 2, "native": 4}
    assert [layer.compiled_calls for layer in handle.report().layers] == [counted] * 2
    said = "in compiled code: 4 aggressive, 2 balanced, 2 precision, 4 native"
    assert str(handle.report()).count(said) == 2
    total = "24 calls in compiled code (8 aggressive, 4 balanced, 4 precision, 8 native)"
    assert str(handle.report()).splitlines()[0] == f"2 attention modules: {total}"
    program = torch.export.export(model, (rows(),))
    program.module()(rows())
    assert handle.report().layers[0].compiled_calls == counted


def test_calls_that_int8_does_not_take_fall_back_and_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = operator.forward

    def refuses(settings: Any, *operands: Any) -> Any:
        if settings.of_call.accuracy == "balanced":
            raise ca.UnsupportedError("no such device")
        return own(settings, *operands)

    model, x = Model(), rows()
    with interop.replace_attention_with_int8(model, policy="precision", **SHORT):
        expected = model(x)
    monkeypatch.setattr(operator, "forward", refuses)
    monkeypatch.setattr(operator, "fallbacks", type(operator.fallbacks)())
    handle = interop.replace_attention_with_int8(model, policy="balanced", **SHORT)
    assert torch.equal(compiled("method", model, "eager")(x), expected)
    assert handle.report().compiled_fallbacks == {"no such device": 2}
    assert str(handle.report()).endswith("compiled code, in its own type: 2 (no such device)")
    assert caplog.text.count("fell back to 16 bits") == 1
    monkeypatch.setattr(inductor_calls, "obstacle", "no such table")
    said = "compiled code, by torch's dispatcher: no such table"
    assert f"{handle.report()}".splitlines()[-1] == said


@pytest.mark.parametrize("added", ["", "mask", "bias"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_operator_is_what_it_says(turned: bool, added: str) -> None:
    """Its fake kernel too: a result lies as the queries do."""
    shape = (1, 40, 2, 16) if turned else (1, 2, 40, 16)
    q, k, v = (torch.randn(shape).half() for _ in "qkv")
    if turned:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    text = operator.text_of(interop_torch.calls.TensorSettings.of(variant="fa_int8"))
    kept = torch.arange(40)[None] < 30
    scores = {"mask": kept, "bias": kept.float()}
    tensors = {"q": q, "k": k, "v": v} | {n: x for n, x in scores.items() if n == added}
    operands = [tensors.get(name) for name in ("q", "k", "v", "mask", "bias")]
    arguments = (*operands, *[None] * 4, 0.25, 0, False, text)
    torch.library.opcheck(torch.ops.cupyattn.diffusers_attention.default, arguments)
    assert operator.attend(tensors, 0.25, text).stride() == q.stride()


@pytest.mark.slow
def test_another_backend_of_the_module_is_taken_too() -> None:
    """Backends that call torch's function, such as cuDNN's; a quick test has eager modules."""
    pipe = cases.make("flux", torch.bfloat16)
    model, graphs = pipe.transformer, Graphs()
    model.set_attention_backend("_native_math")
    handle = interop.replace_attention_with_int8(pipe, policy="balanced", **SHORT)
    expected = cases.generate(pipe, "flux", steps=1)
    model.compile_repeated_blocks(backend=graphs, fullgraph=True)
    assert torch.equal(cases.generate(pipe, "flux", steps=1), expected)
    assert graphs == [1, 1]
    assert [layer.compiled for layer in handle.report().layers] == [("balanced",)] * 2


FAMILIES = (
    "flux", "wan", "kandinsky5", "sd3", "hunyuan_video", "qwen_image", "pixart", "cogvideox",
    "chroma",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_family_is_as_eager_and_close_to_native(family: str) -> None:
    """Graphs run by autograd's compiler, which passes the same operators as to Inductor."""
    pipe = cases.make(family)
    native = cases.generate(pipe, family, steps=2)
    handle = interop.replace_attention_with_int8(pipe, policy="balanced", **SHORT)
    expected = cases.generate(pipe, family, steps=2)
    pipe.transformer.compile(backend="aot_eager", fullgraph=True)
    latents = cases.generate(pipe, family, steps=2)
    ran = [layer.name for layer in handle.report().layers if "balanced" in layer.compiled]
    assert all(layer.compiled for layer in handle.report().layers)
    assert ran
    handle.restore()
    change = distance(latents, expected)
    assert change <= 1e-4 * distance(expected, 0 * expected)  # autograd's own decompositions
    contribution = distance(without(pipe, family, ran), native)
    assert 0 < distance(latents, native) <= SHARE * contribution


@pytest.mark.slow
def test_inductor_runs_both_replacements() -> None:
    """It rounds elsewhere in float32, which moves few codes: by far less than INT8 itself does."""
    pipe = cases.make("sd3")
    native = cases.generate(pipe, "sd3", steps=1)
    handle = interop.replace_attention_with_int8(pipe, policy="balanced", **SHORT)
    linear = interop_torch.replace_linear_with_int8(
        pipe.transformer, config=ca.Int8Config(min_elements_for_int8=1024, max_outlier_ratio=1.0)
    )
    assert linear.replaced
    expected = cases.generate(pipe, "sd3", steps=1)
    pipe.transformer.compile(fullgraph=True)
    latents = cases.generate(pipe, "sd3", steps=1)
    assert handle.report().layers[0].compiled == ("balanced",)
    assert distance(latents, expected) <= 0.1 * distance(expected, native)


# ---- linear layers -------------------------------------------------------------------------------


class FeedForward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 128), torch.nn.Linear(128, 256)

    def forward(self, x: Any) -> Any:
        return self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["torch.compile", "method", "function"])
def test_linear_layers_are_replaced_in_a_compiled_model(way: str, when: str) -> None:
    torch.manual_seed(0)
    model, x, counts = FeedForward(), torch.randn(3, 256), []

    def backend(graph: Any, inputs: Any) -> Any:
        counts.append(count(graph, "int8_linear"))
        return graph

    native, call = model(x), model
    with interop_torch.replace_linear_with_int8(copy.deepcopy(model)) as handle:
        expected = handle(x)
    if when == "before":
        call = compiled(way, model, backend)
        assert torch.equal(call(x), native) and counts == [0]
        given = call if way == "torch.compile" else model
        handle = interop_torch.replace_linear_with_int8(given)
    else:
        handle = interop_torch.replace_linear_with_int8(model)
        call = compiled(way, model, backend)
    assert set(handle.replaced) == {"up", "down"}
    assert torch.equal(call(x), expected) and counts[-1] == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        call(x)
    handle.restore()
    assert torch.equal(call(x), native)
