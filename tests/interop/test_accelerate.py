"""`accelerate`: what it composes, what it leaves native, its handle, and the way back."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from torch import nn  # noqa: E402

from cupyattn.interop import diffusers as interop  # noqa: E402 - imports diffusers
from cupyattn.interop import restore  # noqa: E402
from cupyattn.interop import torch as interop_torch  # noqa: E402
from cupyattn.interop.torch import accelerated_parts, forwards  # noqa: E402
from cupyattn.interop.torch.compiling import restore_compiled  # noqa: E402
from cupyattn.measure import whole_gains  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")

EAGER: dict[str, Any] = {"compile": False, "log": None}


def transformer(**config: Any) -> Any:
    """A small model whose linear layers are large enough for INT8."""
    model = diffusers.SD3Transformer2DModel(**{
        "sample_size": 16, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1,
        "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 32,
        "caption_projection_dim": 128, "pooled_projection_dim": 32, "pos_embed_max_size": 16,
        **config,
    }).eval()  # fmt: skip
    return model.requires_grad_(False)


def run(model: Any) -> Any:
    given = cases.noise(1, 4, 12, 12), cases.noise(1, 8, 32), cases.noise(1, 32)
    with torch.no_grad():
        return model(*given, timestep=torch.tensor([500.0]), return_dict=False)[0]


def compiled(model: Any) -> list[Any]:
    """Return the modules that `accelerate` compiled."""
    found = {m: forwards.substitute_of(m) for m in model.modules() if m is not model}
    return [module for module, substitute in found.items() if substitute is not None]


def record(**gains: tuple[float, float, float]) -> whole_gains.WholeModel:
    """A measured model with gains by part, or by part and class: ``linear``, ``balanced``."""
    sure = (1.2, 1.1, 1.3)
    of = {name: gains.get(name, sure) for name in accelerated_parts.ACCURACIES}
    blocks = {"linear": gains.get("linear", sure), "attention": of, "both": of}
    return whole_gains.WholeModel(
        "Small", "SD3Transformer2DModel", 128, 256, 8, "NVIDIA H200", 90, 5e-3, 5e-3, 5e-3,
        {}, {"blocks": blocks, "graphs": {**blocks, "linear": sure}},
    )  # fmt: skip


def given_record(monkeypatch: pytest.MonkeyPatch, found: whole_gains.WholeModel) -> None:
    monkeypatch.setattr(
        "cupyattn.interop.diffusers.accelerating.part_of",
        lambda prefix, model: accelerated_parts.Part(prefix, model, found),
    )


# ---- what it composes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracy", "policy"), [("full", "precision"), ("aggressive", "aggressive")]
)
def test_it_is_both_replacements_and_goes_back_to_the_bit(accuracy: str, policy: str) -> None:
    model = transformer()
    native = run(model)
    with interop_torch.replace_linear_with_int8(model), interop.replace_attention_with_int8(
        model, policy=policy
    ):
        expected = run(model)
    handle = interop.accelerate(model, accuracy, **EAGER)
    assert torch.equal(run(handle), expected) and not torch.equal(expected, native)
    assert handle.report().attention.modes == {policy: 1}
    handle.restore()
    handle.restore()
    assert torch.equal(run(model), native)


def test_a_pipeline_is_taken_with_its_components_in_names() -> None:
    pipe = cases.make("sd3")
    native = cases.generate(pipe, "sd3", 1)
    with interop.accelerate(pipe, "balanced", exclude="blocks.0", **EAGER) as handle:
        assert not torch.equal(cases.generate(handle, "sd3", 1), native)
        report = handle.report()
    assert [layer.name for layer in report.attention.layers] == [
        "transformer.transformer_blocks.1.attn"
    ]
    int8 = [name for name, what in report.layers.items() if what.startswith("INT8")]
    assert int8 and all(name.startswith("transformer.transformer_blocks.1.") for name in int8)
    assert torch.equal(cases.generate(pipe, "sd3", 1), native)


def test_five_lines_say_what_was_done_and_what_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    handle = interop.accelerate(transformer(), "balanced", compile=False)
    lines = capsys.readouterr().out.splitlines()
    assert tuple(lines) == handle.report().lines and len(lines) == 5
    int8 = "linear layers: 9 of 18 in INT8 with a scale for each block, "
    assert lines[1].startswith(int8) and lines[1].endswith(" % less memory for weights")
    assert lines[2] == "attention: 1 module by cupyattn, in balanced INT8"
    assert "compare(...)" in lines[3]
    kept = "less accurate (1 embedding, 3 modulation, 4 time, 1 final)"
    assert lines[4] == f"left native: linear layers that INT8 would make {kept}"
    assert repr(handle.report()) == str(handle.report())
    assert str(handle.report()).splitlines()[:5] == lines
    interop.accelerate(handle, again=True, **EAGER)
    assert not capsys.readouterr().out


def test_each_of_two_models_is_named_with_its_blocks() -> None:
    """As a Wan 2.2 pipeline has them."""
    pipe = cases.make("wan")
    second = copy.deepcopy(pipe.transformer)
    pipe = diffusers.WanPipeline(
        **{**pipe.components, "transformer_2": second}, boundary_ratio=0.5
    )
    handle = interop.accelerate(pipe, log=None)
    assert handle.report().lines[0] == (
        "WanPipeline: attention's accuracy 'full', transformer and transformer_2: "
        "2 WanTransformerBlock compiled with fullgraph=True"
    )
    handle.restore()
    only = interop.accelerate(pipe, exclude="^transformer_2[.]", log=None)
    assert "'full', transformer: 2 WanTransformerBlock compiled" in only.report().lines[0]
    assert not compiled(second)
    only.restore()


def test_blocks_are_compiled_and_run_their_own_code_afterwards() -> None:
    model = transformer(num_layers=2)
    own, other = model.transformer_blocks
    own.compile(backend="eager")
    before = own._compiled_call_impl
    handle = interop.accelerate(model, log=None)
    assert compiled(model) == [other] and own._compiled_call_impl is before
    assert "2 JointTransformerBlock compiled with fullgraph=True" in handle.report().lines[0]
    handle.restore()
    assert not compiled(model) and own._compiled_call_impl is before


@pytest.mark.parametrize("how", ["blocks", "graphs"])
@pytest.mark.parametrize("assigned", [True, False])
def test_a_model_that_the_caller_compiled_is_compiled_once(assigned: bool, how: str) -> None:
    pipe = cases.make("sd3")
    model = pipe.transformer
    if assigned:
        pipe.transformer = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.compile(backend="eager", fullgraph=True)
    with interop.accelerate(pipe, compile=how, log=None) as handle:
        assert handle.report().lines[0].endswith("accuracy 'full', compiled by the caller")
        assert not compiled(model) and "forward" not in vars(model)


@pytest.mark.slow
def test_compiled_blocks_are_close_to_eager_ones() -> None:
    model = transformer()
    with interop.accelerate(model, "balanced", **EAGER):
        eager = run(model)
    with interop.accelerate(model, "balanced", log=None) as handle:
        compiled = run(handle)
        layers = handle.report().attention.layers
    assert [layer.compiled for layer in layers] == [("balanced",)]
    assert (compiled - eager).norm() < 1e-2 * eager.norm()


def test_a_module_without_diffusers_gets_int8_layers() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    x = torch.randn(3, 128)
    native = model(x)
    said: list[str] = []
    handle = interop_torch.accelerate(model, compile=False, log=said.append)
    assert type(model[0]).__name__ == "Int8Linear" and len(said) == 5
    assert "attention: native" in said and "attention (cupyattn.interop.diffusers" in said[4]
    handle.restore()
    assert torch.equal(model(x), native)


# ---- by the record -------------------------------------------------------------------------------


def test_a_part_whose_interval_includes_one_stays_native(monkeypatch: pytest.MonkeyPatch) -> None:
    given_record(monkeypatch, record(linear=(1.03, 0.98, 1.09)))
    model = transformer()
    handle = interop.accelerate(model, **EAGER)
    report = handle.report()
    assert not report.layers and report.lines[1] == "linear layers: native"
    why = "1.03 [0.98, 1.09] times as fast, undecided; with compile='graphs' 1.20 [1.10, 1.30]"
    assert f"linear layers ({why}" in report.lines[4]
    assert report.lines[3] == (
        "gain: 1.20 [1.10, 1.30] times as fast as compiled native, measured in a whole Small of "
        "256 tokens on an NVIDIA H200, which was compiled by blocks"
    )
    assert len(handle._handle_attention.replaced) == 1
    handle.restore()
    with interop.accelerate(model, compile="graphs", log=None) as handle:
        assert handle.report().layers
        assert handle.report().lines[3].endswith("on an NVIDIA H200")


@pytest.mark.parametrize("include", ["blocks[.]0", "blocks[.]0[.]attn$"])
def test_a_gain_of_the_whole_is_not_promised_for_some_blocks(
    include: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_record(monkeypatch, record())
    with interop.accelerate(transformer(num_layers=2), include=include, **EAGER) as handle:
        assert handle.report().lines[3].startswith("gain: not measured with such a selection: comp")
    with interop.accelerate(transformer(), exclude=r"attn$", **EAGER) as handle:
        assert handle.report().lines[3].startswith("gain: 1.20 [1.10, 1.30] times as fast")


def test_attention_takes_a_more_accurate_class_where_that_is_the_faster_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsure = (1.0, 0.9, 1.1)
    given_record(monkeypatch, record(aggressive=unsure, balanced=unsure))
    handle = interop.accelerate(transformer(), "aggressive", **EAGER)
    assert handle.report().lines[2] == "attention: 1 module by cupyattn, in 16 bits"
    run(handle)
    assert handle.report().attention.modes == {"precision": 1}


def test_nothing_is_replaced_or_compiled_where_all_was_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slower = (0.8, 0.7, 0.9)
    given_record(monkeypatch, record(linear=slower, full=slower))
    model = transformer()
    native = run(model)
    handle = interop.accelerate(model, log=None)
    lines = handle.report().lines
    assert "not compiled" in lines[0]
    assert lines[1:4] == (
        "linear layers: native", "attention: native", "gain: none, since nothing was replaced"
    )  # fmt: skip
    assert not compiled(model)
    assert torch.equal(run(handle), native)


def test_the_record_decides_between_channels_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    layer = "transformer_blocks.0.attn.to_q"
    with interop.accelerate(model, **EAGER):  # of a width that was not measured
        assert model.get_submodule(layer).strategy == "block"
    monkeypatch.setattr("cupyattn.checkpoints.choosing.nearest", lambda cls, width: record())
    with interop.accelerate(model, **EAGER) as handle:
        assert model.get_submodule(layer).strategy == "channel"
        assert "a scale for each channel" in handle.report().lines[1]


@pytest.mark.parametrize("how", whole_gains.COMPILED)
def test_no_part_that_gained_a_twentieth_is_left_native(how: str) -> None:
    gained = 0
    for one in whole_gains.measured():
        for part in ("linear", "attention"):
            for accuracy in accelerated_parts.ACCURACIES:
                if one.gain(part, accuracy, how).median >= 1.05:
                    request = accelerated_parts.Request(accuracy, how)
                    assert accelerated_parts.Part("", nn.Linear(1, 1), one).settle(part, request)
                    gained += 1
    assert gained > 40


def test_the_nearest_width_of_a_class_stands_for_a_model() -> None:
    found = [
        whole_gains.nearest(*given)
        for given in (("WanTransformer3DModel", 5120), ("WanTransformer3DModel", 2560),
                      ("WanTransformer3DModel", 1536), ("FluxTransformer2DModel", 0),
                      ("UNet2DConditionModel", 3072))
    ]  # fmt: skip
    names = [one and one.name for one in found]
    assert names == ["Wan 2.1 14B", "Wan 2.2 5B", None, None, None]


def test_gains_are_what_the_record_of_whole_models_says() -> None:
    from experiments.tuning import whole_gains as script

    assert script.TARGET.read_text(encoding="utf-8") == script.text(), (
        "run python -m experiments.tuning.whole_gains"
    )


# ---- refusals, and nothing half-done -------------------------------------------------------------


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    model = transformer()
    native = run(model)
    attention = interop.replace_attention_with_int8(model, policy="balanced")
    with pytest.raises(ValueError, match="is replaced already"):
        interop.accelerate(model, log=None)
    attention.restore()
    assert not any(isinstance(m, interop_torch.Int8Linear) for m in model.modules())
    assert not compiled(model)
    assert torch.equal(run(model), native)


def test_an_error_while_compiling_takes_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    native = run(model)

    def fails(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(KeyboardInterrupt):
        interop.accelerate(model, log=None)
    assert torch.equal(run(model), native)
    assert not any(isinstance(m, interop_torch.Int8Linear) for m in model.modules())


def test_a_log_that_fails_takes_everything_back() -> None:
    model = transformer()
    native = run(model)

    def fails(_: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        interop.accelerate(model, compile=False, log=fails)
    assert torch.equal(run(model), native)
    assert not any(isinstance(m, interop_torch.Int8Linear) for m in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log": 3}, "log must take a line, as print does, or be None, got 3"),
        ({"checkpoint": 3}, "checkpoint must be the path of saved codes, got 3"),
        ({"activations": 3}, r"tensors or arrays, as record\(\.\.\.\)\.recording\.inputs does, g"),
        ({"activations": {"a": 1}}, "activations must map names of layers to .*, got {'a': 1"),
    ],
)
def test_arguments_of_another_type_are_refused(options: dict[str, Any], message: str) -> None:
    model = transformer()
    with pytest.raises(TypeError, match=message):
        interop.accelerate(model, **{**EAGER, **options})
    assert not any(isinstance(m, interop_torch.Int8Linear) for m in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accuracy": "fast"}, "accuracy must be 'full', 'balanced', 'aggressive', got 'fast'"),
        ({"compile": True}, "compile must be 'blocks', 'graphs' or False, got True"),
        ({"include": "atn"}, "'atn' of include is found in the name of no linear layer or attent"),
        (
            {"activations": {"to_q": torch.ones(2, 128)}},
            "of 'to_q', which is no linear layer, there are .* of the same object, as names in a "
            "pipeline begin with that of the component$",
        ),
        (
            {"activations": {}, "checkpoint": "int8"},
            "a checkpoint has its codes already: give one of",
        ),
    ],
)
def test_arguments_that_there_are_not_are_refused(options: dict[str, Any], message: str) -> None:
    model = transformer()
    with pytest.raises(ValueError, match=message):
        interop.accelerate(model, **{"log": None, **options})
    with pytest.raises(TypeError, match=r"give a pipeline to cupyattn\.interop\.diffusers"):
        interop_torch.accelerate(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"from_pretrained\(NAME\) returns one, got str"):
        interop.accelerate("black-forest-labs/FLUX.1-dev")


def test_no_module_hides_the_package_accelerate() -> None:
    package = Path(interop.__file__).parents[2]
    assert not [*package.rglob("accelerate.py")]


def test_restore_without_the_handle_takes_compiled_code_back_too() -> None:
    model = transformer()
    native = run(model)
    interop.accelerate(model, compile="graphs", log=None)
    assert "forward" in vars(model)
    assert not compiled(copy.deepcopy(model))
    other = copy.deepcopy(model)
    for x in other.proj_out.parameters():
        nn.init.zeros_(x)
    with torch.compiler.set_stance("force_eager"):
        assert not run(other).any()  # it has its own weights, not the model's graph
    restore(model)
    assert "forward" not in vars(model)
    assert not compiled(model)
    assert torch.equal(run(model), native)
    interop.accelerate(model, log=None)
    handle = interop.accelerate(model, again=True, log=None)
    assert "fullgraph=True" in handle.report().lines[0]
    handle.restore()
    assert torch.equal(run(model), native)


@pytest.mark.parametrize("how", ["blocks", "graphs"])
@pytest.mark.parametrize("by_handles", [True, False])
def test_two_handles_of_one_model_leave_nothing_compiled(by_handles: bool, how: str) -> None:
    whole = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    for model, parts in ((transformer(), ("attn", "ff")), (whole, ("0", "1"))):
        code = vars(model).get("forward"), model._compiled_call_impl
        handles = [
            interop_torch.accelerate(model, include=part, compile=how, log=None) for part in parts
        ]
        said = handles[1].report().lines[0]
        assert "fullgraph=True" in said or "compiled as a whole" in said
        if by_handles:
            for handle in handles:
                handle.restore()
        else:
            restore(model)
        assert not compiled(model)
        assert (vars(model).get("forward"), model._compiled_call_impl) == code


@pytest.mark.parametrize("how", ["blocks", "graphs"])
def test_code_that_two_handles_share_stays_for_the_second(how: str) -> None:
    model = transformer(num_layers=2)
    native = run(model)
    first = interop.accelerate(model, include="attn", compile=how, log=None)
    second = interop.accelerate(model, include="ff", log=None)
    first.restore()
    first.restore()
    assert first.report().lines[0].endswith("; restored since")
    lines = second.report().lines
    assert lines[0].endswith("2 JointTransformerBlock compiled with fullgraph=True")
    assert "a scale for each block" in lines[1] and compiled(model) == [*model.transformer_blocks]
    assert "forward" not in vars(model)  # only the first asked for graphs
    with torch.compiler.set_stance("force_eager"):
        both = run(model)
    second.restore()
    assert second.report().lines[0].endswith("; restored since")
    assert not compiled(model) and torch.equal(run(model), native)
    with interop.accelerate(model, include="ff", **EAGER):
        assert torch.equal(run(model), both)


@pytest.mark.parametrize("how", ["blocks", "graphs"])
def test_all_handles_say_that_a_model_is_native_again(how: str) -> None:
    model = transformer(num_layers=2)
    handles = [
        interop.accelerate(model, include=part, compile=how, log=None)
        for part in ("0.attn$", "1.attn$", "ff")
    ]
    restore(model)
    assert not compiled(model) and "forward" not in vars(model)
    for handle in handles:
        assert handle.report().lines[0].endswith("; restored since")


def test_a_handle_of_what_is_replaced_again_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    first = interop.accelerate(model, **EAGER)
    widths: list[int] = []
    monkeypatch.setattr(accelerated_parts, "nearest", lambda cls, width: widths.append(width))
    second = interop.accelerate(model, "balanced", again=True, **EAGER)
    assert widths == [128]  # of all layers, INT8 or not
    assert first.report().lines[0].endswith("; restored since")
    with pytest.raises(RuntimeError, match="or belongs to a later handle since again=True, so"):
        first.compare()
    first.restore()
    lines = second.report().lines
    assert lines[0].endswith("'balanced', not compiled") and "for each block" in lines[1]


@pytest.mark.parametrize(
    ("include", "native"), [("attn$", "linear layers: native"), (r"ff\.net", "attention: native")]
)
def test_again_first_undoes_parts_that_are_not_selected(include: str, native: str) -> None:
    model = transformer()
    first = interop.accelerate(model, **EAGER)
    handle = interop.accelerate(model, include=include, again=True, **EAGER)
    assert native in handle.report().lines
    found = run(model)
    assert first.report().lines[0].endswith("; restored since")
    handle.restore()
    with interop.accelerate(model, include=include, **EAGER):
        assert torch.equal(run(model), found)


def test_again_leaves_a_model_native_if_it_fails(tmp_path: Path) -> None:
    model = transformer()
    native = run(model)
    first = interop.accelerate(model, **EAGER)
    for options in ({"arch": "sm_10"}, {"backend": "torch"}, {"include": "nothing"}):
        with pytest.raises(ValueError, match="must be|is found in the name of no"):
            interop.accelerate(model, again=True, **EAGER, **options)
        assert "restored" not in first.report().lines[0]
    with pytest.raises(FileNotFoundError):
        interop.accelerate(model, again=True, checkpoint=tmp_path / "none", **EAGER)
    assert first.report().lines[0].endswith("; restored since")
    assert torch.equal(run(model), native)


def test_a_report_says_which_parts_are_native_since() -> None:
    """As after an error in the middle of a restore, or a call by the caller."""
    model = transformer()
    handle = interop.accelerate(model, log=None)
    interop.replace_attention_with_int8(model, again=True, policy="balanced").restore()
    lines = handle.report().lines
    assert lines[0].endswith("fullgraph=True") and lines[1].endswith("memory for weights")
    assert lines[2] == "attention: 1 module by cupyattn, in 16 bits; native since"
    restore_compiled(model)
    assert handle.report().lines[0].endswith("fullgraph=True; not compiled any more")
    handle.restore()
    assert handle.report().lines[0].endswith("fullgraph=True; restored since")
    assert handle.report().lines[2].endswith("in 16 bits")


def test_parts_of_another_handle_are_not_compared() -> None:
    model = transformer()
    first = interop.accelerate(model, include="attn", **EAGER)
    second = interop.accelerate(model, include="ff", **EAGER)
    mine = "linear layers and 1 attention module of the same"
    for handle, said in ((first, "2 linear layers of the same models"), (second, f"7 {mine}")):
        with pytest.raises(ValueError, match=f"another handle replaced {said}"):
            handle.compare()
    first.restore()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        second.compare()  # which calls the model


def test_an_error_in_the_middle_of_compiling_leaves_no_compiled_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = transformer(num_layers=2)
    own, calls = torch.compile, []

    def fails(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(*args, **options)

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(KeyboardInterrupt):
        interop.accelerate(model, log=None)
    assert not compiled(model)


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["guard", "place_activated_layers", "_saved"])
def test_an_interruption_after_layers_were_placed_takes_them_back(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformer()
    native = run(model)
    monkeypatch.setattr(f"cupyattn.interop.torch.models.{where}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        interop.accelerate(model, **EAGER)
    assert torch.equal(run(model), native)
    assert not any(isinstance(m, interop_torch.Int8Linear) for m in model.modules())


def test_a_restore_that_was_interrupted_is_completed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = transformer(num_layers=2)
    native = run(model)
    handle = interop.accelerate(model, compile="graphs", log=None)
    for cls, name in (
        (forwards.Substitute, "undo"), (interop_torch.models.Replacement, "restore"),
        (interop.Int8Replacement, "restore"),
    ):  # fmt: skip
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(cls, name, interrupt)
            handle.restore()
    assert "in INT8 with a scale for each block" in handle.report().lines[1]
    handle.restore()
    assert handle.report().lines[0].endswith("; restored since")
    assert not compiled(model) and "forward" not in vars(model)
    assert torch.equal(run(model), native)


@pytest.mark.parametrize("how", ["blocks", "graphs"])
def test_a_model_that_nobody_has_any_more_is_freed(how: str) -> None:
    gc.freeze()  # the collection below passes over what the process had before
    model = transformer()
    interop.accelerate(model, compile=how, log=None)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_activations_decide_on_channels_and_their_rotation() -> None:
    pipe = cases.make("sd3")
    pipe.transformer = transformer()
    name = "transformer_blocks.0.ff.net.2"
    x = torch.randn(16, 512)
    for outliers, expected in ((1.0, None), (30.0, "hadamard")):
        x[:, [5, 200, 300]] *= outliers
        given = {f"transformer.{name}": x}
        with interop.accelerate(pipe, activations=given, **EAGER) as handle:
            layer = pipe.transformer.get_submodule(name)
            assert (layer.strategy, layer.rotate) == ("channel", expected)
            line, report = handle.report().lines[1], handle.report().layers
            assert (" rotated" in line) == (expected is not None)
            assert report[f"transformer.{name}"].endswith(", rotated") == (expected is not None)
