"""`cupyattn.interop.diffusers` on pipelines of the true classes, with small random weights."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from cupyattn.interop import diffusers as interop  # noqa: E402 - imports diffusers
from cupyattn.interop.diffusers import backends  # noqa: E402
from cupyattn.interop.diffusers.noise import Noise, kind_of  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

#: Calls of these tests are short.
SHORT = {"min_length": 32}
#: What INT8 may change, as a share of what the replaced attention contributes at all. Codes of 8
#: bits for numbers whose largest is 4 standard deviations are off by 4 / 127 / sqrt(12) = 0.9 % of
#: their norm; those of Q, of K and of V or P are independent: 1.6 % together.
SHARE = 0.02


@pytest.fixture(scope="module")
def flux() -> Any:
    return cases.make("flux", torch.bfloat16)


def modules(pipe: Any) -> dict[str, Any]:
    """Every module of a pipeline by its name in reports."""
    return {
        f"{part}.{name}": module
        for part, model in pipe.components.items()
        if isinstance(model, torch.nn.Module)
        for name, module in model.named_modules()
    }


def zeros(module: Any, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(None if x is None else torch.zeros_like(x) for x in output)
    return torch.zeros_like(output)


def without(pipe: Any, family: str, names: Any) -> Any:
    """Latents of a pipeline whose attention modules of these names contribute nothing."""
    found = modules(pipe)
    hooks = [found[name].register_forward_hook(zeros) for name in names]
    latents = cases.generate(pipe, family)
    for hook in hooks:
        hook.remove()
    return latents


def distance(x: Any, y: Any) -> float:
    return float(torch.linalg.vector_norm(x.double() - y.double()))


def check_family(family: str, tmp_path: Path) -> Any:
    """Close to native with INT8, the same bits before and after, the same files."""
    pipe = cases.make(family)
    native = cases.generate(pipe, family)
    pipe.save_pretrained(tmp_path / "before")
    handle = interop.replace_attention_with_int8(pipe, **SHORT)
    latents = cases.generate(pipe, family)
    pipe.save_pretrained(tmp_path / "within")
    handle.restore()
    assert torch.equal(cases.generate(pipe, family), native)
    files = [p.relative_to(tmp_path / "before") for p in (tmp_path / "before").rglob("*.*")]
    assert any(path.suffix == ".safetensors" for path in files)
    for path in files:
        saved = [(tmp_path / when / path).read_bytes() for when in ("before", "within")]
        assert saved[0] == saved[1], path
    report = handle.report()
    ran = [layer.name for layer in report.layers if layer.modes]
    assert all(sum(x.modes.values()) + sum(x.native.values()) for x in report.layers)
    assert not report.fallbacks and native.isfinite().all()
    if ran:
        change, contribution = (
            distance(latents, native),
            distance(without(pipe, family, ran), native),
        )
        assert 0 < change <= SHARE * contribution
    return report


def test_stable_diffusion(tmp_path: Path) -> None:
    """Through torch's function; a batch of both branches; a scheduler that counts no steps."""
    report = check_family("sd15", tmp_path)
    self_attention = [x for x in report.layers if x.name.endswith("attn1")]
    assert all(x.modes == {"balanced": 4, "precision": 1} for x in self_attention)
    crossed = [x for x in report.layers if x.name.endswith("attn2")]
    assert len(self_attention) == len(crossed) == 4
    assert all(x.native == {"fewer than 32 queries or keys": 5} for x in crossed)


def test_flux(tmp_path: Path) -> None:
    """Through the table of backends; two passes a step, both at the noise level of the step."""
    report = check_family("flux", tmp_path)
    assert [x.modes for x in report.layers] == [{"aggressive": 2, "balanced": 6}] * 2
    assert not report.native


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(cases.CASES) - {"sd15", "flux"}))
def test_family(family: str, tmp_path: Path) -> None:
    """Masks among them: of HunyuanVideo, Qwen-Image, Chroma, Z-Image, of PixArt's look at prompts.

    Native is a look at a short prompt alone, and HunyuanVideo's refinement of it.
    """
    report = check_family(family, tmp_path)
    assert report.modes and set(report.native) <= {"fewer than 32 queries or keys"}
    assert bool(report.native) == (family in ("hunyuan_video", "kandinsky5", "sdxl", "wan"))


# ---- which modules, which arithmetic -------------------------------------------------------------


def run(pipe: Any, **options: Any) -> Any:
    with interop.replace_attention_with_int8(pipe, **SHORT, **options) as handle:
        latents = cases.generate(pipe, "flux", steps=3)
    return handle.report(), latents


def test_modules_and_policies_are_chosen_by_name_and_step(flux: Any) -> None:
    steps: list[tuple[int, float]] = []

    class Policy:
        def mode(self, timestep: int, ratio: float) -> str:
            steps.append((timestep, ratio))
            return "precision" if timestep == 2 else "aggressive"

    report, _ = run(flux, policy={r"single": "balanced", r"\.0\.attn$": Policy()})
    joint, single = report.layers
    assert joint.name == "transformer.transformer_blocks.0.attn"
    assert joint.modes == {"aggressive": 4, "precision": 2} and single.modes == {"balanced": 6}
    # Two passes a step; 1 of 3 is the middle, sigma = 2 / 3 and so noise twice the signal.
    assert [step for step, _ in steps] == [0, 0, 1, 1, 2, 2]
    assert [ratio for _, ratio in steps[::2]] == pytest.approx([math.inf, 1, 0.25], rel=1e-6)
    report, _ = run(flux, include=("single", "^transformer.single"), policy="balanced")
    assert [layer.name for layer in report.layers] == [
        "transformer.single_transformer_blocks.0.attn"
    ]
    report, _ = run(flux, exclude="single")
    assert [layer.name for layer in report.layers] == ["transformer.transformer_blocks.0.attn"]


@pytest.mark.parametrize("mode", ["aggressive", "balanced", "precision"])
def test_bfloat16_is_close_to_native(flux: Any, mode: str) -> None:
    """Latents round at each of three steps, by 2^-8 at most; INT8 changes less than that."""
    native = cases.generate(flux, "flux", steps=3)
    report, latents = run(flux, policy=mode)
    assert report.modes == {mode: 12}
    assert distance(latents, native) <= 3 * 2.0**-8 * float(native.double().norm())


def test_what_int8_does_not_take_is_native_to_the_bit_and_counted(flux: Any) -> None:
    native = cases.generate(flux, "flux", steps=3)
    with interop.replace_attention_with_int8(flux, min_length=1000) as handle:
        assert torch.equal(cases.generate(flux, "flux", steps=3), native)
    assert handle.report().native == {"fewer than 1000 queries or keys": 12}
    assert "native: 6 (fewer than 1000 queries or keys)" in str(handle.report())


def attention(**changed: Any) -> Any:
    from diffusers.models.attention_processor import Attention

    torch.manual_seed(0)
    return Attention(**{"query_dim": 32, "heads": 2, "dim_head": 16, **changed})


@pytest.mark.parametrize(
    ("module", "call", "reason"),
    [
        ({"dim_head": 300}, {}, "head size 300"),
        ({}, {"dtype": torch.float64}, "dtype float64"),
        ({}, {"grad": True}, "gradients"),
        ({}, {"length": 31}, "fewer than 32 queries or keys"),
        ({"plain": True}, {}, "AttnProcessor calls no attention function of torch or diffusers"),
    ],
    ids=["head", "dtype", "grad", "length", "processor"],
)  # fmt: skip
def test_reasons(module: dict[str, Any], call: dict[str, Any], reason: str) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    dtype, sizes = (
        call.get("dtype", torch.float32),
        {k: v for k, v in module.items() if k != "plain"},
    )
    model = torch.nn.ModuleDict({"attn": attention(**sizes)}).to(dtype)
    if "plain" in module:
        model["attn"].set_processor(AttnProcessor())
    x = torch.randn(1, call.get("length", 64), 32, dtype=dtype)
    with torch.set_grad_enabled(call.get("grad", False)):
        expected = model["attn"](x)
        with interop.replace_attention_with_int8(model, policy="balanced", **SHORT) as handle:
            assert torch.equal(model["attn"](x), expected)
    (layer,) = handle.report().layers
    assert layer.native == {reason: 1} and not layer.modes


def calling(function: Any) -> Any:
    """A model of one module with four heads, whose processor is a function of its inputs."""

    class Processor:
        def __call__(
            self, attn: Any, x: Any, encoder_hidden_states: Any, attention_mask: Any
        ) -> Any:
            return function(x.unflatten(-1, (4, 8)).transpose(1, 2))

    return torch.nn.ModuleDict({"attn": attention(processor=Processor())})


def test_strides_scales_and_grouped_heads_of_the_call_are_kept() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    model = calling(
        lambda q: attend(q, q[:, ::2], q[:, ::2] * 2, None, 0.0, scale=0.5, enable_gqa=True)
    )
    x = torch.randn(1, 64, 32).half()
    with interop.replace_attention_with_int8(model, policy="balanced", **SHORT) as handle:
        o = model["attn"](x)
    q = x.numpy().reshape(1, 64, 4, 8).swapaxes(1, 2)
    expected = ca.attention(
        q, q[:, ::2], q[:, ::2] * 2, variant="auto", accuracy="balanced", scale=0.5
    )
    assert np.array_equal(o.numpy(), expected)
    assert handle.report().modes == {"balanced": 1}


@pytest.mark.parametrize(
    ("given", "rung"),
    [
        ({}, {"variant": "fa_tc"}),
        ({"quant": ca.QuantConfig()}, {"variant": "fa_int8", "quant": ca.QuantConfig()}),
    ],
)
def test_a_mode_is_an_accuracy_class_unless_quant_is_named(
    given: dict[str, Any], rung: dict[str, Any]
) -> None:
    """On an H100 quantising does not pay for 64 keys."""
    model = calling(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    x = torch.randn(1, 64, 32).half()
    on = {"backend": "mirror", "arch": "sm_90a"}
    with interop.replace_attention_with_int8(model, policy="balanced", **SHORT, **given, **on):
        o = model["attn"](x)
    q = x.numpy().reshape(1, 64, 4, 8).swapaxes(1, 2)
    assert np.array_equal(o.numpy(), ca.attention(q, q, q, **rung, **on))


def test_a_name_is_no_scheduler() -> None:
    model = calling(lambda q: q)
    with pytest.raises(TypeError, match="scheduler must be one of diffusers, got 'ddpm'"):
        interop.replace_attention_with_int8(model, scheduler="ddpm", **SHORT)


def test_what_broadcasts_stays_native() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    model, x = calling(lambda q: attend(q, q[:1], q[:1])), torch.randn(2, 64, 32)
    expected = model["attn"](x)
    with interop.replace_attention_with_int8(model, policy="balanced", **SHORT) as handle:
        assert torch.equal(model["attn"](x), expected)
    assert handle.report().native == {"operands that broadcast": 1}


def test_tangents_are_those_of_the_models_own_attention() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    model, x = calling(lambda q: attend(q, q, q)), torch.randn(1, 64, 32)

    def tangent() -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), torch.no_grad():
            return torch.func.jvp(model["attn"], (x,), (torch.ones_like(x),))[1]

    expected = tangent()
    with interop.replace_attention_with_int8(model, policy="balanced", **SHORT) as handle:
        assert torch.equal(tangent(), expected) and expected.abs().sum() > 0
    reason = "a transform of torch.func, or forward-mode derivatives"
    assert handle.report().native == {reason: 1}


# ---- the noise level -----------------------------------------------------------------------------

DDPM = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULERS = {
    "FlowMatchEulerDiscreteScheduler": {"shift": 3.0},
    "FlowMatchHeunDiscreteScheduler": {},
    "EulerDiscreteScheduler": DDPM,
    "EulerAncestralDiscreteScheduler": DDPM,
    "HeunDiscreteScheduler": DDPM,
    "DPMSolverMultistepScheduler": DDPM | {"use_karras_sigmas": True},
    "UniPCMultistepScheduler": {
        "prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0,
    },
    "EDMEulerScheduler": {},
    "LCMScheduler": DDPM,
    "DDIMScheduler": DDPM,
    "DDPMScheduler": DDPM,
    "PNDMScheduler": DDPM | {"skip_prk_steps": True},
    "CogVideoXDDIMScheduler": DDPM | {"snr_shift_scale": 3.0, "rescale_betas_zero_snr": True},
    "CogVideoXDPMScheduler": DDPM,
}  # fmt: skip
EXPECTED = {
    "FlowMatch": "flow",
    "UniPC": "flow",
    "LTX": "flow",
    "EDM": "edm",
    "Euler": "edm",
    "Heun": "edm",
    "DPMSol": "edm",
}


def mixture(scheduler: Any, t: Any) -> float:
    """Noise over signal as a scheduler itself mixes them, for one of its timesteps."""
    one, none = torch.ones(1, 1), torch.zeros(1, 1)
    mix = getattr(scheduler, "add_noise", None) or scheduler.scale_noise
    at = t[None]
    if mix.__name__ == "scale_noise":
        signal, noise = (scheduler.scale_noise(a, at, b) for a, b in ((one, none), (none, one)))
    else:
        signal, noise = (scheduler.add_noise(a, b, at) for a, b in ((one, none), (none, one)))
    return float(noise) / float(signal) if signal.any() else math.inf


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_noise_level_is_that_of_the_scheduler(name: str) -> None:
    """At every step, however the pipeline passes the timestep on."""
    scheduler = getattr(diffusers, name)(**SCHEDULERS[name])
    scheduler.set_timesteps(7)
    noise, sample = Noise(SimpleNamespace(scheduler=scheduler)), torch.zeros(1, 1, 4, 4)
    prefixes = [kind for prefix, kind in EXPECTED.items() if name.startswith(prefix)]
    assert kind_of(scheduler) == (prefixes or ["ddpm"])[0]
    for t in scheduler.timesteps:
        expected = mixture(scheduler, t)
        counts = getattr(scheduler, "step_index", None) is not None
        for given in (t, t.expand(2), *([t.clone() / 1000] if counts else [t.clone()])):
            schedule, ratio = noise.at(given)
            assert ratio == pytest.approx(expected, rel=1e-3)
        assert math.isfinite(schedule.falling[schedule.falling.size // 2])
        try:
            scheduler.step(sample, t, sample, return_dict=False)
        except TypeError:  # CogVideoX's DPM takes another argument first
            scheduler.step(sample, None, t, None, sample, return_dict=False)


def test_what_sigmas_mean_is_known_or_refused() -> None:
    assert kind_of(diffusers.FlowMatchLCMScheduler()) == "flow"
    assert kind_of(SimpleNamespace(config={}, sigmas=[1.0], alphas_cumprod=[0.5])) == "edm"
    for unknown in (diffusers.SCMScheduler(), SimpleNamespace(config={}, sigmas=[1.0])):
        with pytest.raises(ca.UnsupportedError, match="is not known: known are schedulers of flow"):
            kind_of(unknown)


def test_a_step_reads_nothing_from_a_tensor() -> None:
    """No step waits for a device; the list of a run is read once."""
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for scheduler in (diffusers.DDIMScheduler(), diffusers.FlowMatchEulerDiscreteScheduler()):
        noise = Noise(SimpleNamespace(scheduler=scheduler))
        for count in (4, 6):
            scheduler.set_timesteps(count)
            levels = [noise.at(t.expand(2)) for t in scheduler.timesteps[:1]]
            given = [t.expand(2) for t in scheduler.timesteps]
            with Watch():
                levels = [noise.at(t) for t in given]
            assert not seen and len({id(schedule) for schedule, _ in levels}) == 1
            assert len(levels[0][0].ratios) == count


def test_a_run_may_begin_later() -> None:
    """From an image, for example, the scheduler gets its first step."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    scheduler.set_begin_index(2)
    noise = Noise(SimpleNamespace(scheduler=scheduler))
    schedule, ratio = noise.at(scheduler.timesteps[2].clone() / 1000)
    assert ratio == schedule.ratios[2] < schedule.ratios[1]


def test_a_timestep_that_only_a_device_knows_is_not_waited_for() -> None:
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(4)
    elsewhere = torch.empty(1, device="meta")
    assert Noise(SimpleNamespace(scheduler=scheduler)).at(elsewhere) is None

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = attention()

        def forward(self, x: Any, timestep: Any) -> Any:
            return self.attn(x)

    model, x = Model(), torch.randn(1, 64, 32)
    with (
        interop.replace_attention_with_int8(model, scheduler=scheduler, **SHORT) as handle,
        torch.inference_mode(),
    ):
        model(x, elsewhere)
        model(x, scheduler.timesteps[0])
        model(x, timestep=int(scheduler.timesteps[2]))
    (layer,) = handle.report().layers
    assert layer.native == {
        "the timestep is only on the device, so the noise level is unknown": 1
    }
    assert layer.modes == {"aggressive": 1, "balanced": 1}


def test_a_scheduler_without_steps_says_what_to_do() -> None:
    noise = Noise(SimpleNamespace(scheduler=diffusers.PNDMScheduler()))
    with pytest.raises(ValueError, match="PNDMScheduler has no timesteps yet: call set_timesteps"):
        noise.at(torch.tensor(3))


def test_a_run_of_one_step_has_a_middle() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(1)
    schedule, ratio = Noise(SimpleNamespace(scheduler=scheduler)).at(scheduler.timesteps[0])
    assert ratio == math.inf
    layer = ca.Int8Attention(1, 16, schedule.falling.size, sigmas=schedule.falling)
    assert layer.mode(sigma=ratio) == "aggressive"


# ---- the handle ----------------------------------------------------------------------------------


def test_what_was_interrupted_leaves_nothing_behind(flux: Any) -> None:
    """Ctrl-C in a layer skips the hooks after it; attention elsewhere is torch's all the same."""
    native = cases.generate(flux, "flux", steps=3)
    block = flux.transformer.transformer_blocks[0].attn

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = interop.replace_attention_with_int8(flux, policy="balanced", **SHORT)
    expected = cases.generate(flux, "flux", steps=3)
    counted = handle.report().modes
    hook = block.to_k.register_forward_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            cases.generate(flux, "flux", steps=3)
    hook.remove()
    q = torch.randn(1, 2, 64, 16, dtype=torch.bfloat16)
    elsewhere = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert handle.report().modes == counted
    assert torch.equal(cases.generate(flux, "flux", steps=3), expected)
    handle.restore()
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.equal(elsewhere, torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert torch.equal(cases.generate(flux, "flux", steps=3), native)
    assert block.processor._attention_backend is None


def test_a_failure_in_a_layer_closes_its_call(flux: Any) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("seen")

    handle = interop.replace_attention_with_int8(flux, policy="balanced", **SHORT)
    hook = flux.transformer.transformer_blocks[0].attn.to_k.register_forward_hook(fail)
    with pytest.raises(ArithmeticError, match="seen"):
        cases.generate(flux, "flux", steps=3)
    hook.remove()
    handle.restore()
    assert not torch.overrides._get_current_function_mode_stack()
    assert flux.transformer.transformer_blocks[0].attn.processor._attention_backend is None


def test_a_copy_counts_for_itself(flux: Any) -> None:
    with interop.replace_attention_with_int8(flux, policy="balanced", **SHORT) as handle:
        cases.generate(flux, "flux", steps=3)
        counted = handle.report()
        copied = copy.deepcopy(flux.transformer)
        other = diffusers.FluxPipeline(**{**flux.components, "transformer": copied})
        other.set_progress_bar_config(disable=True)
        cases.generate(other, "flux", steps=3)
        assert handle.report() == counted


def test_the_table_of_backends_is_as_it_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models import attention_dispatch as dispatch

    assert diffusers.__version__.startswith(backends.TESTED)
    member = backends.backend()
    assert backends.backend() is member is dispatch.AttentionBackendName(backends.NAME)
    assert isinstance(member, dispatch.AttentionBackendName)
    assert backends.NAME in {x.value for x in dispatch.AttentionBackendName.__members__.values()}
    q = torch.randn(1, 64, 2, 16)
    with pytest.raises(ValueError, match="replace_attention_with_int8"):
        dispatch.dispatch_attention_fn(q, q, q, backend=member)
    monkeypatch.setattr(diffusers, "__version__", "0.99.1")
    with pytest.raises(ca.UnsupportedError, match=r"diffusers 0\.99\.1.*install one of 0\."):
        backends.backend()


def test_another_backend_of_the_module_is_what_native_means(flux: Any) -> None:
    flux.transformer.set_attention_backend("_native_math")
    try:
        native = cases.generate(flux, "flux", steps=3)
        with interop.replace_attention_with_int8(flux, min_length=1000):
            assert torch.equal(cases.generate(flux, "flux", steps=3), native)
        processor = flux.transformer.transformer_blocks[0].attn.processor
        assert processor._attention_backend == "_native_math"
    finally:
        flux.transformer.reset_attention_backend()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda p: interop.replace_attention_with_int8(3), TypeError, "DiffusionPipeline or a"),
        (
            lambda p: run(p, include=["single", "nothing"]), ValueError,
            "'nothing' of include is found in the name of no attention module, there are transf",
        ),
        (lambda p: run(p, exclude="."), ValueError, "no attention module is chosen"),
        (lambda p: run(p, include="("), ValueError, "include must be a regular expression"),
        (lambda p: run(p, exclude=[3]), TypeError, "exclude must be a regular expression"),
        (
            lambda p: run(p, exclude=["single", "attn2"]), ValueError,
            "'attn2' of exclude is found in the name of no attention module, there are transf",
        ),
        (lambda p: run(p, policy={"(": "balanced"}), ValueError, "the names of policy must be"),
        (
            lambda p: run(p, policy={"single": "balanced", "sinlge": "precision"}), ValueError,
            "'sinlge' of policy is found in the name of no attention module, there are transformer",
        ),
        (lambda p: run(p, policy="fast"), ValueError, "precision_policy must be"),
        (lambda p: run(p, policy={"x": 3}), TypeError, "precision_policy must be"),
        (lambda p: run(p, policy=["balanced"] * 5), ValueError, "num_timesteps=3 entries, got 5"),
        (
            lambda p: run(p.transformer, policy={"^single": "balanced"}), ValueError,
            "needs to know the noise level of a step for transformer_blocks.0.attn: give",
        ),
        (
            lambda p: run(p.transformer, scheduler=SimpleNamespace(config={})),
            ca.UnsupportedError, "noise level of a SimpleNamespace",
        ),
        (
            lambda p: interop.replace_attention_with_int8(p, min_length=0),
            ValueError, "min_length must be 1 or more",
        ),
    ],
)  # fmt: skip
def test_bad_input(flux: Any, call: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        call(flux)
    assert not flux.transformer._forward_pre_hooks


def test_twice_is_refused_and_restoring_twice_is_not(flux: Any) -> None:
    handle = interop.replace_attention_with_int8(flux)
    with pytest.raises(ValueError, match=r"attn is replaced already: restore\(\) that first"):
        interop.replace_attention_with_int8(flux)
    handle.restore()
    handle.restore()
    interop.replace_attention_with_int8(flux).restore()


def test_the_examples_of_the_page_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "INTEROP.md"
    section = page.read_text(encoding="utf-8").split("## diffusers\n")[1]
    for block, said in zip(
        section.split("```python\n")[1:3],
        ("linear layers: 21 of 32 in INT8 with", "2 attention modules: 8 calls by cupyattn"),
        strict=True,
    ):
        exec(block.split("```")[0], {})
        assert said in capsys.readouterr().out
    assert (tmp_path / "int8" / "transformer" / "config.json").exists()
    for function in (interop.accelerate, interop.replace_attention_with_int8):
        arguments = set(inspect.signature(function).parameters)
        assert arguments - {"pipe_or_model"} <= set(re.findall(r"`(\w+)`", section))
    assert all(f"0.{version}" in backends.TESTED for version in range(36, 43))


def test_masked_values_of_a_scheduler_are_refused() -> None:
    noise = importlib.import_module("cupyattn.interop.diffusers.noise")
    with pytest.raises(TypeError, match="scheduler's values must not be masked"):
        noise._on_host(np.ma.MaskedArray([1.0, 2.0], mask=[True, False]))
