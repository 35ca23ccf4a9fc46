"""A pass as one CUDA graph: when it is recorded, replayed, and called as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.exc import Unsupported  # noqa: E402

from cupyattn.interop.torch import whole_graph  # noqa: E402 - imports torch
from cupyattn.interop.torch.whole_graph import WholeGraph  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.ran = 0

    def forward(self, x: Any, scale: float = 1.0, extra: dict[str, Any] | None = None) -> Any:
        self.ran += 1
        return {"sample": self.inner(x) * scale}


class Recorder:
    """Stands in for torch's graphs: a replay calls again what was recorded, on its own tensors."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        self.recorded += 1
        result = call()

        def replay() -> None:
            self.replayed += 1
            result["sample"].copy_(call()["sample"])

        return type("Graph", (), {"replay": staticmethod(replay)}), result


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(whole_graph, "_on_device", lambda x: True)
    return Model().eval().requires_grad_(False)


def test_the_third_call_of_a_form_is_recorded_and_replayed(model: Model) -> None:
    record = Recorder()
    graph = WholeGraph(model, record)
    for i in range(5):
        x = torch.randn(2, 4)
        y = model(x, scale=2.0)
        assert torch.equal(y["sample"], model.inner(x) * 2.0)
        assert (record.recorded, record.replayed) == (i > 1, max(0, i - 1))
    last = model(torch.zeros(2, 4), scale=2.0)["sample"]
    kept = last.clone()
    model(torch.ones(2, 4), scale=2.0)
    assert torch.equal(last, kept)  # a result is the caller's
    for _ in range(3):
        model(torch.randn(3, 4), scale=2.0)
        model(torch.randn(2, 4), scale=3.0)
    assert record.recorded == 3 and not graph.reasons


def test_undone_the_model_has_its_own_forward(model: Model) -> None:
    own = inspect.signature(model.forward)
    graph = WholeGraph(model, Recorder())
    assert inspect.signature(model.forward) == own
    graph.undo()
    graph.undo()
    assert "forward" not in vars(model)
    assert graph(torch.zeros(1, 4))["sample"].shape == (1, 4)  # as a hook that kept it may call


def test_only_so_many_forms_have_graphs(model: Model) -> None:
    record = Recorder()
    graph = WholeGraph(model, record)
    for rows in range(1, whole_graph.MOST_GRAPHS + 3):
        for _ in range(3):
            assert model(torch.randn(rows, 4))["sample"].shape == (rows, 4)
    assert record.recorded == whole_graph.MOST_GRAPHS
    assert dict(graph.reasons) == {f"more than {whole_graph.MOST_GRAPHS} forms of a pass": 2}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: m.train(), "a model that is being trained"),
        (lambda m: m.requires_grad_(True), "gradients"),
        (lambda m: setattr(m, "peft_config", {"a": 1}), "adapters"),
        (lambda m: setattr(m.inner, "_hf_hook", 1), "hooks of step caches or offloading"),
        (
            lambda m: setattr(m.inner, "_diffusers_hook", SimpleNamespace(hooks={"cache": 1})),
            "hooks of step caches or offloading",
        ),
    ],
)
def test_what_host_code_decides_is_called_as_it_is(
    model: Model, spoil: Callable[[Any], Any], reason: str
) -> None:
    record = Recorder()
    graph = WholeGraph(model, record)
    for _ in range(3):
        model(torch.randn(2, 4))
    spoil(model)
    x = torch.randn(2, 4)
    assert torch.equal(model(x)["sample"], model.inner(x))
    assert record.recorded == 1 and record.replayed == 1 and dict(graph.reasons) == {reason: 1}
    if "cache" in str(vars(model.inner).get("_diffusers_hook")):
        model.inner._diffusers_hook.hooks.clear()  # as disabling a cache leaves it
        model(x)
        assert record.replayed == 2


def test_arguments_of_the_host_are_not_frozen(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Recorder()
    graph = WholeGraph(model, record)
    for _ in range(3):
        model(torch.randn(2, 4), extra={"a": object()})
    monkeypatch.undo()
    for _ in range(3):
        model(torch.randn(2, 4))
    assert not record.recorded
    assert dict(graph.reasons) == {"an argument of type object": 3, "arguments on the host": 3}


def test_weights_that_moved_are_not_read_where_they_were(model: Model) -> None:
    record = Recorder()
    graph = WholeGraph(model, record)
    for _ in range(4):
        model(torch.randn(2, 4))
    model.inner.weight.data = torch.zeros(4, 4)
    x = torch.randn(2, 4)
    assert torch.equal(model(x)["sample"], model.inner.bias.expand(2, 4))
    assert graph.reasons["weights or layers that were moved or replaced since"] == 1
    model(x)
    assert record.recorded == 2  # for where they are now


def test_a_layer_that_another_took_the_place_of_is_not_run(model: Model) -> None:
    record = Recorder()
    WholeGraph(model, record)
    for _ in range(4):
        model(torch.randn(2, 4))
    model.inner = nn.Linear(4, 4).requires_grad_(False)
    x = torch.randn(2, 4)
    for _ in range(3):
        assert torch.equal(model(x)["sample"], model.inner(x))
    assert record.recorded == 2


class Scaled(nn.Linear):
    """A layer whose code is another, as a replaced attention module's is."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * vars(self)["_int8_layer"]


def test_code_that_was_replaced_in_place_is_not_replayed(model: Model) -> None:
    """As by a second handle, which replaces or restores attention of the model."""
    pytest.importorskip("diffusers")
    from cupyattn.interop.diffusers import interception

    assert interception.ATTRIBUTE == "_int8_layer"
    record = Recorder()
    graph = WholeGraph(model, record)
    x = torch.randn(2, 4)
    for recorded, (cls, factor) in enumerate(((Scaled, 0.25), (Scaled, 0.5), (nn.Linear, 0.5)), 1):
        for _ in range(4):
            model(x)
        assert record.recorded == recorded
        model.inner.__class__ = cls
        setattr(model.inner, interception.ATTRIBUTE, factor)
        assert torch.equal(model(x)["sample"], model.inner(x))
    assert graph.reasons["weights or layers that were moved or replaced since"] == 3


def test_a_pass_that_waits_for_the_device_runs_without_a_graph(model: Model) -> None:
    def fails(call: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    graph = WholeGraph(model, fails)
    for _ in range(4):
        assert model(torch.randn(2, 4))["sample"].shape == (2, 4)
    assert model.ran == 4
    assert any("not permitted" in reason for reason in graph.reasons)


def test_code_that_is_compiled_around_a_graph_calls_it(model: Model) -> None:
    record = Recorder()
    WholeGraph(model, record)
    model.compile(backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match=r"accelerate\(\.\.\., compile='graphs'\) runs this pass"):
        model(torch.randn(2, 4))
    model.compile(backend="eager")
    for _ in range(4):
        x = torch.randn(2, 4)
        assert torch.equal(model(x)["sample"], model.inner(x))
    assert record.recorded == 1 and record.replayed == 2
