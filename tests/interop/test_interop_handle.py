"""The handle that stands in for a pipeline or a model whose layers were replaced."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from cupyattn import Int8Config
from cupyattn.interop.handle import Handle, target_of


class Pipeline:
    """A pipeline's behaviour, without a library."""

    def __init__(self) -> None:
        self.steps, self.device, self.report = 20, "cpu", "the pipeline's own"
        self._private = 1

    def __call__(self, prompt: str, *, steps: int | None = None) -> str:
        return f"{prompt} in {steps or self.steps} steps on {self.device}"

    def to(self, device: str) -> Pipeline:
        self.device = device
        return self

    def clone(self) -> Pipeline:
        return Pipeline()

    @property
    def itself(self) -> Pipeline:
        return self


class Blocks(list[int]):
    """A target with the protocols of a container."""


class Replaced(Handle):
    __slots__ = ("_handle_count",)

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        object.__setattr__(self, "_handle_count", 0)

    def report(self) -> str:
        return f"restored {self._handle_count} times"

    def restore(self) -> None:
        object.__setattr__(self, "_handle_count", self._handle_count + 1)


def test_calls_and_attributes_go_to_the_target() -> None:
    pipe = Pipeline()
    handle = Replaced(pipe)
    assert handle("a cat", steps=3) == "a cat in 3 steps on cpu"
    handle.steps, handle.added, handle._private = 5, "new", 2
    assert (pipe.steps, pipe.added, pipe._private) == (5, "new", 2)  # type: ignore[attr-defined]
    assert (handle.steps, handle.added, handle._private) == (5, "new", 2)
    del handle.added
    assert not hasattr(pipe, "added") and not hasattr(handle, "added")
    with pytest.raises(AttributeError, match="'Pipeline' object has no attribute 'missing'"):
        handle.missing  # noqa: B018
    assert {"steps", "to", "report", "restore", "target"} <= set(dir(handle))
    assert repr(handle) == f"Replaced of {pipe!r}" and bool(handle)
    assert str(inspect.signature(handle.to)) == "(device: 'str') -> 'Pipeline'"


def test_what_returns_the_target_returns_the_handle() -> None:
    handle = Replaced(Pipeline())
    assert handle.to("cuda") is handle and handle.device == "cuda" and handle.itself is handle
    assert type(handle.clone()) is Pipeline and not isinstance(handle, Pipeline)
    assert target_of(handle) is handle.target and target_of(3) == 3


def test_the_names_of_the_handle_are_its_own() -> None:
    pipe = Pipeline()
    handle = Replaced(pipe)
    with handle as inner:
        assert inner is handle and inner("a cat").startswith("a cat")
    assert handle.report() == "restored 1 times" and pipe.report == "the pipeline's own"
    assert handle.target.report == "the pipeline's own"
    for name in ("report", "restore", "target", "_handle_count"):
        said = f"'{name}' belongs to the Replaced: set handle.target.{name} for the attribute of"
        with pytest.raises(AttributeError, match=said):
            setattr(handle, name, 1)
        with pytest.raises(AttributeError, match=f"'{name}' belongs to the Replaced: delete"):
            delattr(handle, name)
    handle.mro = 3  # a name of `type` alone
    assert pipe.mro == 3  # type: ignore[attr-defined]


def test_protocols_of_a_container_are_those_of_the_target() -> None:
    handle = Replaced(Blocks([1, 2, 3]))
    assert len(handle) == 3 and [*handle] == [1, 2, 3] and 2 in handle and handle[-1] == 3
    handle[0] = 7
    del handle[1]
    assert handle.target == [7, 3] and not Replaced(Blocks())
    with pytest.raises(TypeError, match="has no len"):
        len(Replaced(Pipeline()))
    with pytest.raises(TypeError, match="not iterable"):
        iter(Replaced(Pipeline()))


def test_copies_and_pickles_are_refused() -> None:
    handle = Replaced(Pipeline())
    for call, what in ((copy.copy, "copied"), (copy.deepcopy, "copied"), (pickle.dumps, "pickled")):
        said = f"Replaced cannot be {what}, since one handle restores one Pipeline: use handle.targ"
        with pytest.raises(TypeError, match=said):
            call(handle)
    assert pickle.loads(pickle.dumps(handle.target)).steps == 20


# ---- pipelines and models ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def diffusers() -> Any:
    pytest.importorskip("diffusers")
    return importlib.import_module("cupyattn.interop.diffusers")


@pytest.fixture
def flux(diffusers: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Return a small Flux pipeline and the arguments of a call."""
    torch = pytest.importorskip("torch")
    cases = importlib.import_module("tests.interop.diffusers_cases")
    torch.manual_seed(0)
    case = cases.CASES["flux"]
    pipe = case.make()
    pipe.set_progress_bar_config(disable=True)
    yield pipe, {**case.call(), "num_inference_steps": 2, "output_type": "latent"}


def test_a_pipeline_is_used_as_the_founding_notes_use_it(diffusers: Any, flux: Any) -> None:
    torch = pytest.importorskip("torch")
    original, arguments = flux

    def image_of(pipe: Any) -> Any:
        return pipe(**arguments, generator=torch.Generator().manual_seed(0)).images[0]

    native = image_of(original)
    pipe = diffusers.replace_attention_with_int8(original, min_length=1)
    image = image_of(pipe)
    assert image.shape == native.shape and not torch.equal(image, native)
    distance = (image.double() - native.double()).norm() / native.double().norm()
    assert distance < 0.05
    assert pipe.target is original and pipe.scheduler is original.scheduler
    assert "2 attention modules: 8 calls by cupyattn" in str(pipe.report())

    assert pipe.to("cpu") is pipe and pipe.to(torch.float32) is pipe
    own = type(original.scheduler).from_config(original.scheduler.config)
    pipe.scheduler = own
    assert original.scheduler is own
    assert [*pipe.components] == [*original.components]
    assert not isinstance(pipe, type(original))
    with pytest.raises(ValueError, match=r"replaced already: restore\(\) that first"):
        diffusers.replace_attention_with_int8(pipe)
    with pytest.raises(TypeError, match="Int8Replacement cannot be copied"):
        copy.deepcopy(pipe)
    pipe.restore()
    assert torch.equal(image_of(pipe), native)
    again = diffusers.replace_attention_with_int8(pipe, min_length=1)
    assert again.target is original and torch.equal(image_of(again), image)
    again.restore()


def test_arguments_of_a_replacement_are_not_set_on_the_handle(diffusers: Any, flux: Any) -> None:
    interop = importlib.import_module("cupyattn.interop.torch")
    pipe = flux[0]
    model = pipe.transformer
    with diffusers.accelerate(flux[0], compile=False, log=None) as handle:
        for name in ("accuracy", "compile", "arch", "backend"):
            said = rf"'{name}' is settled .*: call restore\(\), then accelerate\(\.\.\., {name}="
            with pytest.raises(AttributeError, match=said):
                setattr(handle, name, False)
    of_attention = diffusers.replace_attention_with_int8(model, policy="balanced")
    of_linear = interop.replace_linear_with_int8(
        model, config=Int8Config(min_elements_for_int8=256), backend="mirror"
    )
    for handle, maker in (
        (of_attention, diffusers.replace_attention_with_int8),
        (of_linear, interop.replace_linear_with_int8),
    ):
        _, *arguments = inspect.signature(maker).parameters
        for name in arguments:
            if hasattr(model, name):  # diffusers' own config
                continue
            said = rf"'{name}' is settled .*: call restore\(\), then {maker.__name__}\(..., {name}="
            with pytest.raises(AttributeError, match=said):
                setattr(handle, name, "precision")
            assert not hasattr(model, name)
        handle.restore()
    with diffusers.replace_attention_with_int8(pipe) as handle:
        handle.scheduler = scheduler = type(pipe.scheduler)()  # the pipeline's own
    assert pipe.scheduler is scheduler


def test_a_model_stays_a_model_in_both_handles(diffusers: Any, flux: Any) -> None:
    torch = pytest.importorskip("torch")
    interop = importlib.import_module("cupyattn.interop.torch")
    model = flux[0].transformer
    handle = diffusers.replace_attention_with_int8(model, policy="balanced")
    assert handle.eval() is handle and handle.train(False) is handle and handle.half() is handle
    assert handle.requires_grad_(False) is handle and handle.dtype == torch.float16
    assert [*handle.state_dict()] == [*model.state_dict()] and len([*handle.modules()]) > 10
    assert len(handle.replaced) == 2
    assert handle.float().training is False and handle.config is model.config
    both = interop.replace_linear_with_int8(
        handle, config=Int8Config(min_elements_for_int8=256), backend="mirror"
    )
    assert both.target is model and both.replaced
    both.restore()
    handle.restore()


def test_a_model_of_linear_layers_is_used_through_its_handle() -> None:
    torch = pytest.importorskip("torch")
    interop = importlib.import_module("cupyattn.interop.torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8))
    x = torch.randn(3, 256)
    native = model(x)
    handle = interop.replace_linear_with_int8(model, backend="mirror")
    y = handle(x)
    assert torch.equal(y, model(x)) and not torch.equal(y, native)
    assert (y - native).norm() < 0.05 * native.norm()
    assert handle.bfloat16() is handle and handle.to(torch.float32) is handle
    assert handle.eval() is handle and not model.training and handle.training is False
    assert type(handle[0]) is interop.Int8Linear and len(handle) == 2 and [*handle] == [*model]
    assert handle.replaced.keys() == {"0"} and "1" in handle.kept and "0: INT8" in handle.report()
    with pytest.raises(ValueError, match=r"0 is replaced already: restore\(\) that first"):
        interop.replace_linear_with_int8(handle)
    with pytest.raises(TypeError, match="Replacement cannot be pickled, since one handle restores"):
        pickle.dumps(handle)
    twice = copy.deepcopy(handle.target)
    assert torch.equal(twice(x), handle(x))
    handle.restore()
    assert type(model[0]) is torch.nn.Linear and handle[0] is model[0]


def test_control_characters_of_names_are_written_as_escapes() -> None:
    """A terminal would obey them, in reports and in errors."""
    torch = pytest.importorskip("torch")
    interop = importlib.import_module("cupyattn.interop.torch")
    names = ["\x1b[31mfc", "\u202eother"]
    model = torch.nn.ModuleDict({name: torch.nn.Linear(256, 256) for name in names})
    handle = interop.replace_linear_with_int8(model, include="fc", backend="mirror")
    lines = handle.report().split("\n")
    assert lines[2].startswith(r"\x1b[31mfc: INT8") and lines[3] == r"\u202eother: kept, excluded"
    assert [*handle.replaced] == names[:1]
    said = []
    none = Int8Config(min_elements_for_int8=10**9)
    for options in ({"include": "fc"}, {"include": "gone"}, {"include": "other", "config": none}):
        with pytest.raises(ValueError) as caught:
            interop.replace_linear_with_int8(model, **options)
        said.append(str(caught.value))
    model[names[0]] = torch.nn.Linear(256, 256)
    with pytest.warns(UserWarning) as warned:
        handle.restore()
    said.append(str(warned[0].message))
    assert r"\x1b[31mfc is replaced already" in said[0]
    assert all(text.isprintable() and r"\x1b[31mfc" in text for text in (said[1], said[3]))
    assert said[2].isprintable() and r"\u202eother: " in said[2]
