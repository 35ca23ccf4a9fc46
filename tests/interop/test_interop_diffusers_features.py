"""What `cupyattn.Int8Attention` has for diffusion, in models of diffusers, eager and compiled.

Pruned keys, windows, block masks and scales by step give what the bare layer gives on the operands
of the module, at every step; graphs give what eager calls give, to the bit.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.diffusion import Calibration, Calibrations, calibrate

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from cupyattn.interop import diffusers as interop  # noqa: E402 - imports diffusers
from cupyattn.interop import torch as interop_torch  # noqa: E402
from tests.interop import diffusers_cases as cases  # noqa: E402
from tests.interop.test_interop_diffusers import SHORT, attention  # noqa: E402
from tests.interop.test_interop_diffusers_compiled import (  # noqa: E402
    Graphs,
    Model,
    compiled,
    count,
    rows,
    steps,
)

HEADS, HEAD_DIM, STEPS = 2, 16, 4
HOST = "diffusers_layer"
#: A configuration, so that INT8 runs and not the fastest rung of a class.
PLAIN = ca.QuantConfig()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """One thread, no gradients, and no code that another test compiled."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


class Hosted(Graphs):
    """A backend that counts the operators that the host decides."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.append(count(graph, HOST))
        return graph


def recording(model: Any, scheduler: Any, x: Any) -> Any:
    with interop_torch.record(model, layers="attn$", scheduler=scheduler) as recorder:
        for t in scheduler.timesteps:
            model(x * float(t) / 500, t.expand(1))
    return recorder.recording


def static() -> ca.QuantConfig:
    return ca.QuantConfig("tensor", "tensor", scales=(0.02, 0.02))


def scales(heads: int = HEADS, bins: int = 2) -> Calibration:
    """Scales so different by step that codes of another bin show."""
    q = np.random.default_rng(0).standard_normal((1, heads, 40, HEAD_DIM)).astype(np.float32)
    sigmas = [np.inf, 3.0, 1.0, 0.3]
    batches = [(q * 2.0**-n, q * 2.0**-n, n) for n in range(4)]
    return ca.calibrate_quantization_scales(batches, 100.0, sigmas=sigmas, num_bins=bins)


#: Options of layers; whether a graph has them by the host.
OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "pruning": ({"enable_pruning": True, "pruning_ratio": 0.3}, True),
    "pruning by step": ({"enable_pruning": True, "pruning_threshold": 0.9}, True),
    "local": ({"attention_type": "local", "window_size": 16, "quant": PLAIN}, False),
    "block-sparse": (
        {"attention_type": "block_sparse", "window_size": 16, "block_size": 64, "quant": PLAIN},
        True,
    ),
    "a block mask": (
        {"attention_type": "block_sparse", "quant": PLAIN,
         "block_mask": ca.BlockMask.from_window(200, 200, (20, 20), block_q=64, block_kv=64)}, True
    ),
    "static scales": ({"quant": static()}, True),
    "static scales, factors": (
        {"quant": static(), "timestep_scales": np.float32([4, 3, 2, 1])}, True
    ),
    "one static scale": ({"quant": static(), "use_adaptive_scaling": False}, True),
    "a calibration": ({"quant": scales()}, True),
    "a calibration, as factors": ({"timestep_scales": scales()}, True),
}  # fmt: skip


def bare(options: dict[str, Any], sigmas: Any, policy: str) -> ca.Int8Attention:
    given = dict(options)
    if isinstance(given.get("quant"), Calibration):
        given["timestep_scales"] = given.pop("quant")
    return ca.Int8Attention(
        HEADS, HEAD_DIM, STEPS, sigmas=sigmas, precision_policy=policy, scale=HEAD_DIM**-0.5,
        **given,
    )  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_a_module_gives_what_the_bare_layer_gives_at_every_step(name: str) -> None:
    options, _ = OPTIONS[name]
    model, scheduler, x = Model(), steps(STEPS), rows(200)
    found = recording(model, scheduler, x).of("blocks.0.attn")
    seen: list[Any] = []
    model.blocks[0].attn.to_out[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    handle = interop.replace_attention_with_int8(
        model, policy="balanced", scheduler=scheduler, **SHORT, **options
    )
    for t in scheduler.timesteps:
        model(x * float(t) / 500, t.expand(1))
    layer = bare(options, found.sigmas, "balanced")
    dense = ca.Int8Attention(HEADS, HEAD_DIM, STEPS, precision_policy="balanced")
    exact = []
    for call, o in zip(found.calls, seen, strict=True):
        expected = layer(call.q, call.k, call.v, call.timestep)
        got = o.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2).numpy()
        assert np.allclose(got, expected, rtol=0, atol=1e-3), call.timestep
        exact.append(np.abs(expected - dense(call.q, call.k, call.v, call.timestep)).max())
    assert max(exact) > 2e-3  # options that change nothing would pass, too
    report = handle.report()
    assert report.modes == {"balanced": 2 * STEPS} and not report.native and not report.fallbacks


@pytest.mark.parametrize("name", OPTIONS)
def test_graphs_have_them_and_give_what_eager_calls_give(name: str) -> None:
    options, on_host = OPTIONS[name]
    scheduler, x = steps(STEPS), rows(200)
    given = {"scheduler": scheduler, "policy": "balanced", **SHORT, **options}
    eager = Model()
    interop.replace_attention_with_int8(eager, **given)
    expected = [eager(x, t.expand(1)) for t in scheduler.timesteps]
    model, graphs = Model(), Hosted() if on_host else Graphs()
    handle = interop.replace_attention_with_int8(model, **given)
    call = compiled("method", model, graphs)
    for t, o in zip(scheduler.timesteps, expected, strict=True):
        assert torch.equal(call(x, t.expand(1)), o)
    assert graphs == [2]  # one graph for all steps
    assert [layer.compiled for layer in handle.report().layers] == [("balanced",)] * 2
    changes = any(not torch.equal(expected[0], o) for o in expected[1:])
    by_step = name not in ("pruning", "local", "block-sparse", "a block mask", "one static scale")
    assert changes == by_step


@pytest.mark.slow
def test_inductor_keeps_scales_by_step_in_its_graph() -> None:
    scheduler, x, model, eager = steps(STEPS), rows(200), Model(), Model()
    given = {"scheduler": scheduler, "policy": "balanced", "quant": scales(), **SHORT}
    for one in (model, eager):
        interop.replace_attention_with_int8(one, **given)
    model.compile(fullgraph=True)
    for t in scheduler.timesteps:
        expected = eager(x, t.expand(1))
        assert torch.allclose(model(x, t.expand(1)), expected, rtol=0, atol=1e-5)


def test_blocks_share_a_graph_although_each_has_scales_of_its_own() -> None:
    model, scheduler, x, graphs = Model(), steps(STEPS), rows(200), Hosted()
    torch.nn.init.normal_(model.blocks[1].attn.to_q.weight, std=1.0)
    own = calibrate(recording(model, scheduler, x), 100.0, num_bins=2)
    assert [*own] == ["blocks.0.attn", "blocks.1.attn"]
    given = {"scheduler": scheduler, "quant": own, "policy": "balanced", **SHORT}
    eager = copy.deepcopy(model)
    with interop.replace_attention_with_int8(eager, **given):
        expected = [eager(x, t.expand(1)) for t in scheduler.timesteps]
    swapped = {"blocks.0.attn": own["blocks.1.attn"], "blocks.1.attn": own["blocks.0.attn"]}
    with interop.replace_attention_with_int8(eager, **{**given, "quant": swapped}):
        assert not torch.equal(eager(x, scheduler.timesteps[0].expand(1)), expected[0])
    interop.replace_attention_with_int8(model, **given)
    call = compiled("blocks", model, graphs)
    for t, o in zip(scheduler.timesteps, expected, strict=True):
        assert torch.equal(call(x, t.expand(1)), o)
    assert graphs == [1]


def test_layers_get_what_their_patterns_say() -> None:
    model, x = Model(), rows(200)
    pruned = {"enable_pruning": {"blocks.0": True}, "pruning_ratio": 0.5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = interop.replace_attention_with_int8(model, policy="balanced", **SHORT, **pruned)
    first, second = handle._handle_layers
    assert first._options["pruning_ratio"] == 0.5 and "pruning_ratio" not in second._options
    handle.restore()
    local = {"attention_type": {r"[.]1[.]": "local"}, "window_size": 16}
    handle = interop.replace_attention_with_int8(model, policy="balanced", **SHORT, **local)
    first, second = handle._handle_layers
    assert second._options == {**second._options, "attention_type": "local", "window_size": 16}
    assert "window_size" not in first._options
    model(x)
    assert handle.report().modes == {"balanced": 2}
    handle.restore()
    of_one = Calibrations({"blocks.0.attn": scales()})
    other = torch.nn.ModuleList([copy.deepcopy(model.blocks[0])])
    more = torch.nn.ModuleDict({"blocks": model.blocks, "more_blocks": other})
    handle = interop.replace_attention_with_int8(
        more, policy="balanced", quant=of_one, scheduler=steps(STEPS), **SHORT
    )
    have = {x.name for x in handle._handle_layers if "timestep_scales" in x._options}
    assert have == {"blocks.0.attn"}  # and not more_blocks.0.attn


def test_a_pipeline_runs_with_scales_that_were_recorded_from_it() -> None:
    pipe = cases.make("flux", torch.bfloat16)
    with interop_torch.record(pipe, layers="attn$") as recorder:
        native = cases.generate(pipe, "flux", steps=3)
    own = calibrate(recorder.recording, 100.0, num_bins=2)
    with interop.replace_attention_with_int8(pipe, quant=own, policy="balanced", **SHORT) as handle:
        found = cases.generate(handle, "flux", steps=3)
    report = handle.report()
    assert report.modes and not report.native and not report.fallbacks
    off = float(torch.linalg.vector_norm((found - native).float()) / native.float().norm())
    assert 0 < off < 0.05
    with (
        interop.replace_attention_with_int8(
            pipe, quant=scales(heads=3), policy="balanced", **SHORT
        ),
        pytest.raises(ValueError, match=r"^transformer\.\S+: the calibration is of 3 heads .*: "),
    ):
        cases.generate(pipe, "flux", steps=3)


# ---- what stays native, and what is refused ------------------------------------------------------


def test_the_report_says_what_cannot_be_pruned_or_windowed() -> None:
    for options, other, reason in (
        ({"enable_pruning": True}, {"attention_mask": torch.zeros(1, 1, 64)},
         "token pruning, which takes no attention mask"),
        ({"attention_type": "local", "window_size": 8}, {"encoder_hidden_states": rows(40)},
         "local attention, with fewer or more keys than queries"),
    ):  # fmt: skip
        module = torch.nn.ModuleDict({"attn": attention()})
        native = module["attn"](rows(), **other)
        handle = interop.replace_attention_with_int8(module, policy="balanced", **SHORT, **options)
        assert torch.equal(module["attn"](rows(), **other), native)
        assert handle.report().layers[0].native == {reason: 1}
        graphs = Graphs()
        call = torch.compile(module["attn"], backend=graphs, fullgraph=True)
        assert torch.equal(call(rows(), **other), native) and graphs == [0]
        assert handle.report().layers[0].compiled == (f"native: {reason}",)


def test_programs_and_functions_that_see_no_step_say_so() -> None:
    x, scheduler, graphs = rows(200), steps(STEPS), Hosted()
    model = Model()
    handle = interop.replace_attention_with_int8(
        model, policy="balanced", quant=static(), scheduler=scheduler, **SHORT
    )
    call = compiled("function", model, graphs)
    call(x, scheduler.timesteps[0].expand(1))
    assert graphs == [0]
    reason = "native: the step of a model within a compiled function is not known"
    assert handle.report().layers[0].compiled == (reason,)
    module = torch.nn.Sequential(attention())
    handle = interop.replace_attention_with_int8(
        module, policy="balanced", enable_pruning=True, **SHORT
    )
    program = torch.export.export(module, (x,))
    assert not count(program, HOST)
    (said,) = handle.report().layers[0].compiled
    assert said == "native: token pruning in an exported program, which has no layers"


def test_compiled_code_of_torch_2_11_is_no_exported_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There torch says of all code that it compiles that it exports it."""
    module, graphs = torch.nn.Sequential(attention()), Hosted()
    handle = interop.replace_attention_with_int8(
        module, policy="balanced", enable_pruning=True, **SHORT
    )
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: torch.compiler.is_compiling())
    torch.compile(module, backend=graphs, fullgraph=True)(rows(200))
    assert handle.report().layers[0].compiled == ("balanced",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant": static()}, "blocks.0.attn has static scales, for which the noise level of each"),
        ({"quant": scales()}, "blocks.0.attn has a calibration by step, for which the noise"),
        ({"quant": {"attn9": static()}}, "'attn9' of quant is found in the name of no attention"),
        ({"quant": Calibrations({"blocks.9.attn": scales()})},
         r"quant has a calibration of blocks.9.attn, which is no attention module of this model"),
        ({"enable_pruning": {"x": True}}, "'x' of enable_pruning is found in the name of no atten"),
        ({"enable_pruning": {}}, "enable_pruning is an empty mapping"),
        ({"quant": scales(), "timestep_scales": scales()}, "blocks.0.attn has a calibration as qu"),
        ({"attention_type": "local"}, "attention_type='local' takes window_size"),
        ({"pruning_ratio": 2.0, "enable_pruning": True}, "pruning_ratio must be"),
    ],
)  # fmt: skip
def test_bad_options_get_a_sentence_before_anything_changes(
    options: dict[str, Any], message: str
) -> None:
    model = Model()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        interop.replace_attention_with_int8(model, policy="balanced", **SHORT, **options)
    assert "\n" not in str(caught.value) and kinds == [type(module) for module in model.modules()]


def test_quant_of_another_kind_and_factors_of_other_steps() -> None:
    model, scheduler = Model(), steps(STEPS)
    with pytest.raises(TypeError, match=r"^quant must be a cupyattn.QuantConfig, a Calibrat"):
        interop.replace_attention_with_int8(model, quant="static", scheduler=scheduler)
    options = {"quant": static(), "timestep_scales": np.ones(7, np.float32)}
    interop.replace_attention_with_int8(
        model, policy="balanced", scheduler=scheduler, **SHORT, **options
    )
    with pytest.raises(
        ValueError,
        match=r"^blocks.0.attn: timestep_scales must have num_timesteps=4 entries, one for each",
    ):
        model(rows(), scheduler.timesteps[0].expand(1))


def test_the_page_on_calibration_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "CALIBRATION.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    *_, ten = blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for block in blocks:
        exec(block, names)
    statements = [line for line in ten.splitlines() if line and not line.startswith("from ")]
    assert len(statements) <= 10
    report = names["pipe"].report()
    assert len(report.layers) == 2 and not report.native and not report.fallbacks
    assert sum(report.modes.values()) == 16 and names["latents"].isfinite().all()
    assert (tmp_path / "scales.safetensors").is_file()
    layer = names["pipe"]._handle_layers[0]
    assert layer._options["timestep_scales"].bins.count == 4


def test_options_without_effect_are_warned_of_once() -> None:
    with pytest.warns(UserWarning, match="^pruning_ratio has no effect while enable_pruning") as w:
        interop.replace_attention_with_int8(Model(), policy="balanced", pruning_ratio=0.5, **SHORT)
    assert len(w) == 1 and w[0].filename == __file__
