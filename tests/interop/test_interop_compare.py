"""`handle.compare` and `cupyattn trial`: ways in turns, resumable, and everything back in place."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from cupyattn import cli  # noqa: E402
from cupyattn.cli import output  # noqa: E402
from cupyattn.interop import diffusers as interop  # noqa: E402 - imports diffusers
from cupyattn.interop import restore  # noqa: E402
from cupyattn.interop.diffusers.replace import attention_modules, models_of  # noqa: E402
from cupyattn.interop.torch import Int8Linear, comparing  # noqa: E402
from cupyattn.interop.torch.candidates import linear_layers  # noqa: E402
from cupyattn.interop.torch.forwards import substitute_of  # noqa: E402
from cupyattn.interop.torch.ways import ways_of  # noqa: E402
from cupyattn.measure import trial  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402
from tests.interop.test_accelerate import run, transformer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")

QUIET: dict[str, Any] = {"log": None}


def call(**options: Any) -> dict[str, Any]:
    """A call of the small pipeline."""
    given = {"num_inference_steps": 3, "output_type": "latent", "height": 96, "width": 96}
    return {**cases.CASES["sd3"].call(), **given, **options}


@pytest.fixture
def handle() -> Any:
    """Return a pipeline whose layers of one block are INT8, with INT8 attention."""
    pipe = cases.make("sd3")
    made = interop.accelerate(pipe, "balanced", compile=False, include="blocks.1", **QUIET)
    yield made
    made.restore()


def seen_by(bars: list[Any], own: Any) -> Any:
    """Keep how a pipeline's bar of progress is made."""

    def progress_bar(self: Any, *args: Any, **kwargs: Any) -> Any:
        bars.append(dict(self._progress_bar_config))
        return own(self, *args, **kwargs)

    return progress_bar


def test_ways_take_turns_and_the_pipeline_is_as_before(
    handle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, model = handle.target, handle.target.transformer
    expected = cases.generate(pipe, "sd3", 2)
    pipe.set_progress_bar_config(desc="mine")
    bars: list[Any] = []
    monkeypatch.setattr(type(pipe), "progress_bar", seen_by(bars, type(pipe).progress_bar))
    said: list[str] = []
    found = handle.compare(
        rounds=2, record=tmp_path / "r.json", page=tmp_path / "p.html", log=said.append, **call()
    )
    assert list(found.ways) == ["native", "linear layers", "attention", "accelerated"]
    assert all([len(steps) for steps in way["rounds"]] == [2, 2] for way in found.ways.values())
    assert [line.split(", ")[1] for line in said[4:]] == [*found.ways, *reversed(found.ways)]
    assert said[-2].endswith("left") and not said[-1].endswith("1 s left")
    assert set(found.verdicts()) == {"linear layers", "attention", "accelerated"}
    assert json.loads((tmp_path / "r.json").read_text()) == found.record
    assert (tmp_path / "p.html").read_text() == found.page()
    assert pipe.transformer is model and "step" not in vars(pipe.scheduler)
    assert bars == [{"desc": "mine", "disable": True}] * len(bars) and len(bars) == 4 * 3
    assert pipe._progress_bar_config == {"desc": "mine"}
    assert torch.equal(cases.generate(pipe, "sd3", 2), expected)


def test_latents_of_each_way_are_those_of_the_part_alone(handle: Any) -> None:
    found = handle.compare(rounds=1, **QUIET, **call(generator=torch.Generator().manual_seed(3)))
    pipe = handle.target

    def latents() -> Any:
        return pipe(**call(generator=torch.Generator().manual_seed(3))).images

    both = latents()
    handle.restore()
    native = latents()
    with interop.accelerate(pipe, "balanced", compile=False, include=r"blocks.1.attn$", **QUIET):
        attention = latents()

    def distance(x: Any) -> float:
        return float((x - native).norm() / native.norm())

    assert found.ways["accelerated"]["latents"][-1] == pytest.approx(distance(both), rel=1e-3)
    assert found.ways["attention"]["latents"][-1] == pytest.approx(distance(attention), rel=1e-3)
    assert len(found.ways["attention"]["latents"]) == 3


def test_an_interrupted_comparison_goes_on_and_leaves_nothing_behind(
    handle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pipe, model = tmp_path / "r.json", handle.target, handle.target.transformer
    own, runs = comparing._Bench.run, []

    def interrupted(self: Any, way: Any, *, follow: bool = False) -> Any:
        runs.append(way.said)
        if len(runs) == 7:
            raise KeyboardInterrupt
        return own(self, way, follow=follow)

    monkeypatch.setattr(comparing._Bench, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.compare(rounds=2, record=path, **QUIET, **call())
    assert pipe.transformer is model
    assert sum(len(w["rounds"]) for w in json.loads(path.read_text())["ways"].values()) == 2
    before = json.loads(path.read_text())["ways"]["native"]["rounds"]
    runs[:] = [""] * 10  # past the interruption
    found = handle.compare(rounds=2, record=path, **QUIET, **call())
    assert len(runs) == 10 + 4 + 6 and found.rounds == 2
    assert found.ways["native"]["rounds"][:1] == before
    with pytest.raises(ValueError, match="record of another comparison"):
        handle.compare(rounds=2, record=path, **QUIET, **call(guidance_scale=2.0))


@pytest.mark.parametrize("how", ["assigned", "in place", "blocks"])
def test_a_model_that_the_caller_compiled_is_not_compared(how: str, handle: Any) -> None:
    """Its native copies would not be compiled, and the gain of compiling would count as ours."""
    pipe, model = handle.target, handle.target.transformer
    if how == "assigned":
        pipe.transformer = torch.compile(model, backend="eager")
    else:
        (model if how == "in place" else model.transformer_blocks[0]).compile(backend="eager")
    with pytest.raises(ValueError, match="SD3Transformer2DModel was compiled by the caller, and"):
        handle.compare(rounds=1, **QUIET, **call())


def test_a_comparison_leaves_random_numbers_and_code_of_the_caller(handle: Any) -> None:
    scheduler, before = handle.target.scheduler, torch.get_rng_state()
    own = scheduler.step
    mine = scheduler.step = lambda *args, **kwargs: own(*args, **kwargs)
    handle.compare(rounds=1, **QUIET, **call(num_inference_steps=1, height=64, width=64))
    assert vars(scheduler)["step"] is mine
    assert torch.equal(torch.get_rng_state(), before)


def test_a_record_of_another_device_is_not_continued(handle: Any, tmp_path: Path) -> None:
    path, given = tmp_path / "r.json", call(num_inference_steps=1, height=64, width=64)
    handle.compare(rounds=1, record=path, **QUIET, **given)
    found = json.loads(path.read_text())
    assert found["what"]["device"] == "a CPU"
    found["what"]["device"] = "NVIDIA H100"
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="is the record of another comparison"):
        handle.compare(rounds=1, record=path, **QUIET, **given)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rounds": 0}, ValueError, "rounds must be 1 or more, got 0"),
        ({"rounds": "3"}, TypeError, "rounds must be a whole number, got '3'"),
        ({"seed": "x"}, TypeError, "seed must be a whole number, got 'x'"),
        ({"seed": 2**64}, ValueError, "seed must be from 0 to 2.64 - 1, got 18446744073709551616"),
        ({"record": "no/x.json"}, OSError, "record must be a file in a folder that exists, got"),
        ({"page": "."}, OSError, "page must be a file in a folder that exists, got '.'"),
        ({"page": 3}, TypeError, "page must be the path of a file, got 3"),
        ({"log": 3}, TypeError, "log must take a line, as print does, or be None, got 3"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_first_run(
    options: dict[str, Any], error: type[Exception], message: str, handle: Any
) -> None:
    def never(*_: Any) -> dict[str, Any]:
        raise AssertionError("a step was run")

    with pytest.raises(error, match=message):
        handle.compare(**{**QUIET, **options}, **call(callback_on_step_end=never))


def test_results_without_numbers_are_written_as_json_has_it(handle: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        handle.target.transformer.proj_out.bias.fill_(float("nan"))
    found = handle.compare(rounds=1, record=tmp_path / "r.json", **QUIET, **call())

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads((tmp_path / "r.json").read_text(), parse_constant=refuse) == found.record
    assert found.ways["accelerated"]["latents"] == [None] * 3
    assert "accelerated, latents to native by step: 1: not finite" in str(found)
    assert found.verdicts()["accelerated"].endswith("; its result is not finite")


def test_equal_pictures_and_some_that_are_not() -> None:
    x = np.zeros((4, 4, 3), np.uint8)
    same = comparing._quality([], [x, x], [], [x, x])
    assert same == {"latents": [], "psnr": None, "ssim": 1.0}
    half = comparing._quality([], [x, x], [], [x, x + np.uint8(255)])
    assert half["psnr"] == pytest.approx(10 * np.log10(2))


def test_a_model_is_compared_by_calls() -> None:
    model = transformer()
    native = run(model)
    given = {
        "hidden_states": cases.noise(1, 4, 12, 12), "encoder_hidden_states": cases.noise(1, 8, 32),
        "pooled_projections": cases.noise(1, 32), "timestep": torch.tensor([500.0]),
    }  # fmt: skip
    with interop.accelerate(model, compile=False, exclude="attn$", **QUIET) as handle:
        int8 = run(model)
        found = handle.compare(rounds=2, **QUIET, **given)
    assert list(found.ways) == ["native", "accelerated"]
    assert found.ways["native"]["weights"] > found.ways["accelerated"]["weights"]
    expected = float((int8 - native).norm() / native.norm())
    assert found.ways["accelerated"]["latents"] == [pytest.approx(expected, rel=1e-3)]


def test_native_is_compiled_as_the_accelerated_model_is() -> None:
    pipe = cases.make("sd3")
    own = pipe.transformer
    seen: list[tuple[bool, bool]] = []

    def look(pipe: Any, *_: Any) -> dict[str, Any]:
        block = pipe.transformer.transformer_blocks[0]
        seen.append((pipe.transformer is own, substitute_of(block) is not None))
        return {}

    with interop.accelerate(pipe, "balanced", **QUIET) as handle:
        with torch.compiler.set_stance("force_eager"):
            found = handle.compare(rounds=1, **QUIET, **call(
                num_inference_steps=1, callback_on_step_end=look))  # fmt: skip
        assert list(found.ways) == [
            "native", "native, not compiled", "linear layers", "attention", "accelerated"
        ]
    assert seen[:5] == [(False, True), (False, False), (False, True), (False, True), (True, True)]


def test_graphs_are_recorded_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    passes: list[str] = []
    own = comparing._Bench.run

    def counted(self: Any, way: Any, **options: Any) -> Any:
        passes.append(way.said)
        return own(self, way, **options)

    monkeypatch.setattr(comparing._Bench, "run", counted)
    given = {
        "hidden_states": cases.noise(1, 4, 12, 12), "encoder_hidden_states": cases.noise(1, 8, 32),
        "pooled_projections": cases.noise(1, 32), "timestep": torch.tensor([500.0]),
    }  # fmt: skip
    with interop.accelerate(model, compile="graphs", exclude="attn$", **QUIET) as handle:
        with torch.compiler.set_stance("force_eager"):
            handle.compare(rounds=1, **QUIET, **given)
        assert "without a graph: 4 for arguments on the host" in handle.report().lines[0]
    assert passes[:3] == ["native"] * 3 and len(passes) == 3 * (3 + 1)


def test_a_step_cache_is_in_all_ways_but_one(tmp_path: Path) -> None:
    pipe = cases.make("flux")
    model = pipe.transformer
    given = {**cases.CASES["flux"].call(), "true_cfg_scale": 1.0, "num_inference_steps": 3}
    given |= {"height": 64, "width": 64, "output_type": "latent"}
    given = {name: x for name, x in given.items() if "negative" not in name}
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=10.0))
    with interop.accelerate(pipe, "balanced", compile=False, **QUIET) as handle:
        found = handle.compare(rounds=1, record=tmp_path / "r.json", **QUIET, **given)
        assert model.is_cache_enabled
        assert [*found.ways][:2] == ["native", "native, no step cache"]
        assert found.ways["native, no step cache"]["said"] == (
            "native without FirstBlockCacheConfig(threshold=10.0)"
        )
        alone, far = found.seconds("native, no step cache"), found.ways["native, no step cache"]
        assert far["latents"][0] == 0 and far["latents"][-1] > 1e-4  # the first step runs
        assert found.ways["accelerated"]["latents"][-1] < far["latents"][-1]
        assert alone == [pytest.approx(np.mean(far["rounds"][0]))]
        assert "step cache alone: " in str(found) and "is the mean of a run" in found.page()
        model.disable_cache()
        with pytest.raises(ValueError, match="is the record of another comparison"):
            handle.compare(rounds=1, record=tmp_path / "r.json", **QUIET, **given)
        diffusers.hooks.apply_first_block_cache(model, diffusers.FirstBlockCacheConfig())
        with pytest.raises(ValueError, match=r"blocks.0 has the hook '.*' of diffusers, which cop"):
            handle.compare(rounds=1, **QUIET, **given)


def test_native_weights_are_on_the_device_once(handle: Any) -> None:
    ways = ways_of(handle._handle_parts, handle._handle_request)
    layer = "transformer_blocks.1.ff.net.2"
    natives = {ways[name].models["transformer."].get_submodule(layer).weight.data_ptr()
               for name in ("native", "attention")}  # fmt: skip
    codes = [ways[name].models["transformer."].get_submodule(layer).weight_codes.data_ptr()
             for name in ("linear layers", "accelerated")]  # fmt: skip
    assert len(natives) == 1 and codes[0] == codes[1]


@pytest.mark.parametrize("family", cases.CASES)
def test_a_part_is_left_native_as_the_verdict_says(family: str) -> None:
    """In each family the expression is found in the attention modules, and in no linear layer."""
    pipe = cases.make(family)
    (found,) = models_of(pipe, None)[1].items()
    pattern = re.compile(trial.ATTENTION_NAMES)
    modules = [name for name, _ in attention_modules(*found)]
    layers = [f"{found[0]}{name}" for name, *_ in linear_layers(found[1])]
    assert modules and all(map(pattern.search, modules)) and not any(map(pattern.search, layers))


def test_arguments_without_a_name_are_those_of_the_call() -> None:
    """As of ``pipe("a cat")``."""
    model = transformer()
    x, rest = cases.noise(1, 4, 12, 12), (cases.noise(1, 8, 32), cases.noise(1, 32))
    with interop.accelerate(model, compile=False, exclude="attn$", **QUIET) as handle:
        given = {"timestep": torch.tensor([500.0]), "rounds": 1, **QUIET}
        found = handle.compare(x, *rest, **given)
        assert list(found.record["what"]["call"]) == [
            "encoder_hidden_states", "hidden_states", "pooled_projections", "timestep"
        ]
        with pytest.raises(TypeError, match="'hidden_states' is given twice, with and without its"):
            handle.compare(x, hidden_states=x, **given)
        with pytest.raises(TypeError, match=r"takes \d+ arguments without a name, got 99"):
            handle.compare(*[x] * 99, **given)
    handle = interop.accelerate(cases.make("sd3"), compile=False, **QUIET)
    with handle, pytest.raises(TypeError, match="'prompt' is given twice"):
        handle.compare("a cat", prompt="a dog")


@pytest.mark.parametrize("how", ["deleted", "None", "another"])
def test_a_pipeline_without_its_model_is_not_compared(how: str, handle: Any) -> None:
    pipe, model = handle.target, handle.target.transformer
    if how == "deleted":
        del pipe.transformer
    else:
        pipe.transformer = None if how == "None" else transformer()
    said = r"transformer of the StableDiffusion3Pipeline is not the model any more .* pipe\.transf"
    with pytest.raises(ValueError, match=said):
        handle.compare(**QUIET, **call())
    if how != "another":
        with pytest.raises(ValueError, match="Diffusion3Pipeline has no model any more: give"):
            restore(pipe)
    assert handle.report().layers
    handle.restore()
    assert not any(isinstance(m, Int8Linear) for m in model.modules())
    pipe.transformer = model


def test_nothing_replaced_is_nothing_to_compare(handle: Any) -> None:
    handle.restore()
    with pytest.raises(RuntimeError, match="there is nothing to compare"):
        handle.compare(**call())


def test_pictures_of_all_kinds_of_results() -> None:
    image = pytest.importorskip("PIL.Image")
    x = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    frames = torch.from_numpy(x / 255).movedim(-1, 0)[None, None].repeat(1, 9, 1, 1, 1)
    for result in (
        SimpleNamespace(images=[image.fromarray(x)]), (x[None] / 255,),
        SimpleNamespace(frames=[[image.fromarray(x)]]), SimpleNamespace(frames=frames),
    ):  # fmt: skip
        found = comparing.pictures_of(result)
        assert 1 <= len(found) <= comparing.MOST_PICTURES
        assert all(np.array_equal(one, x) for one in found)
    assert comparing.pictures_of(SimpleNamespace(images=torch.zeros(1, 16, 8, 8))) == []


# ---- the command ---------------------------------------------------------------------------------

SCRIPT = """
from tests.interop import diffusers_cases as cases

def small():
    call = dict(cases.CASES["sd3"].call(), num_inference_steps=1, output_type="latent")
    return cases.make("sd3"), call

def wrong():
    return 3

def fails():
    raise RuntimeError("no weights")

def keys():
    return 3, {1: 2}

def taken():
    return cases.make("sd3"), {"page": 1}

def tiny():
    import torch
    return torch.nn.Sequential(torch.nn.Linear(8, 8)), {"input": torch.ones(2, 8)}

def done():
    from cupyattn.interop.diffusers import accelerate
    return accelerate(cases.make("sd3"), compile=False, log=None), {}

def full():
    def fail(*_):
        raise RuntimeError("CUDA out of memory")
    pipe, call = small()
    return pipe, dict(call, callback_on_step_end=fail)

def lost(*_):
    return {}["lost"]

def callback():
    pipe, call = small()
    return pipe, dict(call, callback_on_step_end=lost)

def argument():
    pipe, call = small()
    return pipe, dict(call, prmpt="a cat")

def needs(prompt, *, steps, seed=0, **options):
    return small()

def leaves():
    raise SystemExit(0)

def chained():
    try:
        lost()
    except KeyError as error:
        raise ArithmeticError("one line" + chr(10) + "and another") from error

def slow():
    def interrupt(*_):
        raise KeyboardInterrupt
    pipe, call = small()
    return pipe, dict(call, callback_on_step_end=interrupt)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with a file of functions."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("script")
def test_the_command_runs_a_function_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["trial", "mine.py:small", "--rounds", "1", "--compile", "off"]
    assert cli.main([*given, "--accuracy", "balanced"]) == 0
    out, err = capsys.readouterr()
    assert "INT8 linear layers and attention in balanced INT8: " in out and "round 1 of 1" in err
    assert (tmp_path / "small.trial.json").exists() and (tmp_path / "small.trial.html").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mine.py", "give FILE.py:NAME"), ("none.py:small", "there is no file 'none.py'"),
        ("mine.py:other", "mine.py has no function 'other': it has small, wrong, fails, keys, "),
        ("mine.py:wrong", "must return a pipeline"),
        ("mine.py:needs", "must be a function without arguments, and needs prompt, steps: write"),
        ("mine.py:fails", "mine.py, line 12: RuntimeError: no weights"),
        ("mine.py:keys", "must have names of arguments as keys, got 1"),
        ("mine.py:taken", "the call has 'page', which is an argument of the comparison"),
        ("mine.py:full", "the call of full() failed: RuntimeError: CUDA out of memory: native"),
        ("mine.py:done", "is replaced already: restore() that first"),
        ("mine.py:tiny", "nothing of the Sequential was replaced"),
        ("half.py:f", "half.py: SyntaxError: "), ("lost.py:f", "lost.py, line 2: ModuleNotFound"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("script")
def test_what_is_no_such_function_is_said(
    function: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("half.py").write_text("def f(:")
    Path("lost.py").write_text("import mine\nimport no_such_package\n")  # the first lies beside it
    assert cli.main(["trial", function, "--compile", "off"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "first", "last", "said"),
    [
        ("mine.py:callback", 'return {}["lost"]', "KeyError: 'lost'",
         "the call of callback() failed: KeyError: 'lost'"),
        ("mine.py:argument", "", "keyword argument 'prmpt'", "the call of argument() failed: Type"),
        ("mine.py:leaves", "raise SystemExit(0)", "SystemExit: 0", "mine.py, line 49: SystemExit"),
        ("mine.py:chained", "lost()", "ArithmeticError: one line\nand another",
         "mine.py, line 55: ArithmeticError: one line\n"),
        ("ends.py:f", "sys.exit()", "SystemExit", "ends.py, line 2: SystemExit\n"),
        ("half.py:f", "def f(:", "SyntaxError: invalid syntax", "half.py: SyntaxError: invalid"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("script")
def test_an_error_of_the_caller_has_the_callers_traceback_and_a_sentence(
    function: str, first: str, last: str, said: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "ends.py").write_text("import sys\nsys.exit()\n")
    (tmp_path / "half.py").write_text("def f(:\n")
    made: list[Any] = []
    monkeypatch.setattr(interop, "accelerate", recorded(interop.accelerate, made))
    before = {*tmp_path.iterdir()}
    assert cli.main(["trial", function, "--compile", "off"]) == 2
    trace, _, sentence = capsys.readouterr().err.partition("\ncupyattn: ")
    assert trace.endswith(last)
    assert sentence.startswith(said) and sentence.count("\n") == 1
    assert str(Path(cli.__file__).parents[1]) not in trace  # no frame of ours
    if first:
        frame, line = trace[trace.index("  File ") :].split("\n")[:2]
        assert frame.startswith(f'  File "{tmp_path / function.partition(":")[0]}", line ')
        assert line.strip() == first
    assert {*tmp_path.iterdir()} - before <= {tmp_path / "__pycache__"}
    for handle in made:
        assert handle.report().lines[0].endswith("; restored since")


def recorded(own: Any, made: list[Any]) -> Any:
    """Keep the handles that a function returns."""

    def accelerate(*args: Any, **options: Any) -> Any:
        made.append(own(*args, **options))
        return made[-1]

    return accelerate


@pytest.mark.usefixtures("script")
def test_an_interrupted_command_says_how_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["trial", "mine.py:slow", "--compile", "off"]
    assert cli.main(given) == 130
    assert "goes on" not in capsys.readouterr().err  # nothing was written yet
    assert cli.main([*given, "--html", "no/page.html"]) == 2
    assert "--html: there is no folder 'no'" in capsys.readouterr().err


@pytest.mark.usefixtures("script")
def test_a_command_that_is_interrupted_later_names_its_record(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(line: str) -> None:
        output.say(line, error=True)
        if line.startswith("round 1"):
            raise KeyboardInterrupt

    monkeypatch.setattr("cupyattn.cli.trial._progress", interrupted)
    assert cli.main(["trial", "mine.py:small", "--compile", "off"]) == 130
    said = "small.trial.json has the runs so far: the same command continues after them"
    assert said in capsys.readouterr().err


# ---- the experiment ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_experiment_on_accelerated_models_runs_in_small(tmp_path: Path) -> None:
    from experiments._harness.whole_families import FAMILIES
    from experiments.diffusion import accelerated_models

    file = tmp_path / "record.json"
    given = ["--quick", "--rounds", "1", "--models", "Wan 2.1 14B", "--json", str(file)]
    assert accelerated_models.main(given) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["bits_equal"] and row["codes_equal"] and len(row["verdicts"]) == 3
    short = accelerated_models.shortened(FAMILIES["Flux"], 3)
    assert short.blocks == {"num_layers": 3, "num_single_layers": 3}
    assert short.tokens == FAMILIES["Flux"].tokens


@pytest.mark.slow
def test_the_experiment_on_step_caches_runs_in_small(tmp_path: Path) -> None:
    from experiments.diffusion import cached_models

    file = tmp_path / "record.json"
    given = ["--quick", "--rounds", "1", "--models", "Wan 2.1 14B", "--json", str(file)]
    assert cached_models.main([*given, "--steps", "6"]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["bits_equal"] and "step cache alone" in row["verdicts"]["native, no step cache"]
    assert 0 < row["left_out"]["native"] < 1 and row["threshold"] > 0
