"""Several handles of `replace_attention_with_int8` on one model, copies of it, and refusals."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from cupyattn.diffusion import TablePolicy  # noqa: E402
from cupyattn.interop import diffusers as interop  # noqa: E402 - imports diffusers
from cupyattn.interop.diffusers.report import LayerReport, Report  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402
from tests.interop.test_interop_diffusers import SHORT  # noqa: E402

STEPS = 6
#: Modes of the default policy in 6 steps of the small pipeline's scheduler.
ADAPTIVE = {"aggressive": 2, "balanced": 3, "precision": 1}


@pytest.fixture
def pipe() -> Any:
    """Return a pipeline whose model has two attention modules."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield cases.make("sd3")
    torch.set_num_threads(before)


def replaced(target: Any, **options: Any) -> Any:
    return interop.replace_attention_with_int8(target, **{**SHORT, **options})


# ---- two handles ---------------------------------------------------------------------------------


def test_handles_of_other_modules_follow_the_steps_by_themselves(pipe: Any) -> None:
    first, second = replaced(pipe, include="blocks.0"), replaced(pipe, include="blocks.1")
    latents = cases.generate(pipe, "sd3", STEPS)
    assert first.report().modes == ADAPTIVE and not first.report().native
    assert second.report().modes == ADAPTIVE and not second.report().native
    first.restore()
    second.restore()
    with replaced(pipe) as both:
        assert torch.equal(cases.generate(pipe, "sd3", STEPS), latents)
    assert both.report().modes == {mode: 2 * n for mode, n in ADAPTIVE.items()}


@pytest.mark.parametrize("leaves", ["first", "second"])
def test_restoring_one_handle_leaves_the_other_as_it_is(pipe: Any, leaves: str) -> None:
    handles = {
        "first": replaced(pipe, include="blocks.0"),
        "second": replaced(pipe, include="blocks.1", policy="balanced"),
    }
    handles.pop(leaves).restore()
    (stays,) = handles.values()
    latents = cases.generate(pipe, "sd3", STEPS)
    expected = ADAPTIVE if leaves == "second" else {"balanced": STEPS}
    assert stays.report().modes == expected and not stays.report().native
    stays.restore()
    options = {"include": "blocks.0"} if leaves == "second" else {"include": "blocks.1"}
    if leaves == "first":
        options["policy"] = "balanced"
    with replaced(pipe, **options):
        assert torch.equal(cases.generate(pipe, "sd3", STEPS), latents)


def test_a_second_handle_in_the_middle_of_a_run_changes_no_mode_of_the_first(pipe: Any) -> None:
    first, made = replaced(pipe, include="blocks.0"), []

    def after_step(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 1:
            made.append(replaced(pipe, include="blocks.1", policy="aggressive"))
        return {}

    call = cases.CASES["sd3"].call()
    pipe(**call, num_inference_steps=STEPS, output_type="latent", callback_on_step_end=after_step)
    assert first.report().modes == ADAPTIVE
    assert made[0].report().modes == {"aggressive": STEPS - 2}


def test_a_handle_restores_no_module_that_another_replaced_since(pipe: Any) -> None:
    native = cases.generate(pipe, "sd3", 1)
    first = replaced(pipe, policy="balanced")
    first.restore()
    second = replaced(pipe, policy="balanced")
    first.restore()
    assert not torch.equal(cases.generate(pipe, "sd3", 1), native)
    assert second.report().modes == {"balanced": 2}
    second.restore()
    assert torch.equal(cases.generate(pipe, "sd3", 1), native)


def test_control_characters_of_names_are_written_as_escapes(pipe: Any) -> None:
    handle = replaced(pipe)
    report = handle.report()
    layers = tuple(dataclasses.replace(layer, name="\x1b[31m\u202ea") for layer in report.layers)
    lines = str(dataclasses.replace(report, layers=layers)).split("\n")
    assert len(lines) > len(layers) and all(map(str.isprintable, lines))
    assert lines[1].startswith(r"\x1b[31m\u202ea: ")


# ---- copies --------------------------------------------------------------------------------------


def test_a_copy_follows_the_steps_and_is_refused_a_second_time(pipe: Any) -> None:
    handle = replaced(pipe)
    latents = cases.generate(pipe, "sd3", STEPS)
    own, pipe.transformer = pipe.transformer, copy.deepcopy(pipe.transformer)
    handle.restore()
    assert torch.equal(cases.generate(pipe, "sd3", STEPS), latents)
    said = r"0.attn is replaced already: restore\(\) that first, .*; a copy .* stays INT8, so co"
    with pytest.raises(ValueError, match=said):
        replaced(pipe)
    kind = type(pipe.transformer.transformer_blocks[0].attn)
    assert kind.__mro__[1] is type(own.transformer_blocks[0].attn)  # one class over its own
    pipe.transformer = copy.deepcopy(own)
    with replaced(pipe):
        assert torch.equal(cases.generate(pipe, "sd3", STEPS), latents)


def test_a_replaced_model_says_why_it_is_not_pickled(pipe: Any) -> None:
    model = pipe.transformer
    handle = replaced(pipe)
    said = (
        r"cannot be pickled, as torch.save\(model\) does: call restore\(\) of its handle first, or"
    )
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(TypeError, match=said):
            save(model)
    handle.restore()
    assert type(pickle.loads(pickle.dumps(model))) is type(model)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (
            {"include": 3},
            TypeError,
            "include must be a regular expression or several, as str, got 3",
        ),
        ({"exclude": ["x", 3]}, TypeError, r"exclude must be .* as str, got \['x', 3\]"),
        ({"include": 0}, TypeError, "include must be .* got 0"),
        ({"include": "("}, ValueError, r"include must be a regular .* got '\(': missing \)"),
        ({"policy": {3: "balanced"}}, TypeError, r"the names of policy must be .* got \[3\]"),
        ({"policy": {}}, ValueError, "policy={} is empty: give 'adaptive' or a policy for some"),
        ({"policy": []}, ValueError, r"policy=\[\] has an empty table: give a mode for each step"),
        ({"policy": {"0": ()}}, ValueError, r"policy={'0': \(\)} has an empty table"),
        ({"policy": TablePolicy(())}, ValueError, "has an empty table: give a mode for each step"),
    ],
)
def test_arguments_are_refused_by_their_values(
    pipe: Any, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        replaced(pipe, **given)


def test_a_table_may_be_an_object(pipe: Any) -> None:
    table = ("aggressive", "balanced", "precision", "balanced")
    with replaced(pipe, policy=TablePolicy(table)) as handle:
        cases.generate(pipe, "sd3", len(table))
    assert handle.report().modes == {"aggressive": 2, "balanced": 4, "precision": 2}


def test_a_pipeline_with_a_handle_in_a_models_place_is_told_so(pipe: Any) -> None:
    model = pipe.transformer
    pipe.transformer = replaced(model, policy="balanced", include="blocks.0")
    said = (
        "^transformer of StableDiffusion3Pipeline is a handle, Int8Replacement, and no model: "
        "assign pipe.transformer = pipe.transformer.target"
    )
    with pytest.raises(TypeError, match=said):
        replaced(pipe, include="blocks.1")
    pipe.transformer = pipe.transformer.target
    with replaced(pipe, include="blocks.1") as handle:
        assert handle.replaced == ("transformer.transformer_blocks.1.attn",)


# ---- reports -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([LayerReport("a", {}, {}, {})], "1 attention module: 0 calls by cupyattn, 0 native"),
        (
            [
                LayerReport(
                    "a", {"balanced": 3}, {}, {}, ("balanced",), {"balanced": 2, "native": 1}
                )
            ],
            "1 attention module: 3 calls by cupyattn (3 balanced), 0 native; 3 calls in compiled "
            "code (2 balanced, 1 native)",
        ),
        (
            [LayerReport("a", {}, {}, {}, ("balanced",)), LayerReport("b", {}, {"causal": 1}, {})],
            "2 attention modules: 0 calls by cupyattn, 1 native; 1 module in compiled code, whose "
            "calls are not counted",
        ),
    ],
)
def test_the_first_line_of_a_report_has_calls_in_compiled_code(
    layers: list[LayerReport], said: str
) -> None:
    assert str(Report(tuple(layers))).splitlines()[0] == said
