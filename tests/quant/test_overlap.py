"""A product begins while its codes are made: its reads before the wait, and its launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.interpret import KernelFault
from cupyattn.ops.layers import LAYERS, LayersSettings
from cupyattn.ops.norm_quant import NormQuantSettings
from cupyattn.ops.operation import problem_of, run
from cupyattn.quant.blocks import STRATEGIES
from cupyattn.runtime import launches, overlapping
from tests.faults.fault_patches import put_a_line_in_place

FORMS = {"portable": "sm_90", "hopper": "sm_90a"}


def layers(strategy: str, arch: str) -> tuple[LayersSettings, Any]:
    """Return settings and arrays of two layers that read one input."""
    rng = np.random.default_rng(1)
    arrays: dict[str, Any] = {"x": rng.standard_normal((40, 272)).astype(np.float16)}
    for number in range(2):
        w = rng.standard_normal((64, 272)).astype(np.float32)
        codes, scales = ca.weight_quant(w, strategy=strategy)
        arrays |= {f"b{number}": codes, f"b_scales{number}": scales}
        arrays[f"c{number}"] = np.full((40, 64), np.nan, np.float16)
    return LayersSettings("float16", ("", ""), arch, "interpret"), arrays


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_product_alone_waits_for_the_codes(strategy: str) -> None:
    settings, arrays = layers(strategy, "sm_90a")
    plans = LAYERS.plan(problem_of(LAYERS, settings, arrays)).plans
    found = [one.awaits for plan in plans for one in plan.launches]
    apart = strategy == "block"  # layers by channel are one product
    assert found == [(), ("a", "a_scales"), *[()] * apart]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_are_their_products(strategy: str, form: str) -> None:
    settings, arrays = layers(strategy, FORMS[form])
    run(LAYERS, settings, arrays)
    codes = ca.act_quant(arrays["x"], strategy=strategy)
    for number in range(2):
        weight = arrays[f"b{number}"], arrays[f"b_scales{number}"]
        alone = ca.int8_gemm(*codes, *weight, "float16", backend="interpret", arch=FORMS[form])
        assert arrays[f"c{number}"].tobytes() == alone.tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", ["layer", None])
def test_layers_behind_a_norm_are_their_products(norm: str | None, form: str) -> None:
    """With vectors and a norm, or with a rotation: codes come from `norm_quant`."""
    settings, arrays = layers("channel", FORMS[form])
    rotate = None if norm else "hadamard"
    arrays = {name: x[:, :256].copy() if x.shape[-1] == 272 else x for name, x in arrays.items()}
    vectors = {"scale": arrays["x"][:2], "shift": arrays["x"][2:4]} if norm else {}
    before = NormQuantSettings(norm, None, rotate, 1e-6, "channel", None)
    run(LAYERS, settings._replace(before=before), {**arrays, **vectors})
    codes = ca.norm_quant(arrays["x"], norm=norm, rotate=rotate, **vectors)
    for number in range(2):
        weight = arrays[f"b{number}"], arrays[f"b_scales{number}"]
        alone = ca.int8_gemm(*codes, *weight, "float16", backend="interpret", arch=FORMS[form])
        assert arrays[f"c{number}"].tobytes() == alone.tobytes()


WAIT = "griddepcontrol_wait();"
#: File, by strategy and form.
SOURCES = {
    ("block", "portable"): "linear/gemm_int8.cu",
    ("channel", "portable"): "linear/gemm_int8_channel.cu",
    ("block", "hopper"): "linear/sm90/gemm_int8.cu",
    ("channel", "hopper"): "linear/sm90/gemm_int8_channel.cu",
}


@pytest.mark.parametrize(
    ("strategy", "form", "line"),
    [
        ("block", "portable", f"  {WAIT}  // A,"), ("channel", "portable", f"  {WAIT}  // A,"),
        ("block", "hopper", f"    {WAIT}  // A,"), ("channel", "hopper", f"    {WAIT}  // A,"),
        ("block", "hopper", f"  {WAIT}  // scales"), ("channel", "hopper", f"  {WAIT}  // scales"),
    ],
)  # fmt: skip
def test_a_wait_less_is_found(
    strategy: str, form: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCES[strategy, form]
    put_a_line_in_place(source, line, line.replace(WAIT, ""), tmp_path, monkeypatch)
    settings, arrays = layers(strategy, FORMS[form])
    with pytest.raises(KernelFault, match="before it waits for the launch before it"):
        run(LAYERS, settings, arrays)


def test_a_launch_that_does_not_overlap_needs_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCES["channel", "portable"]
    put_a_line_in_place(source, f"  {WAIT}  // A,", "  // A,", tmp_path, monkeypatch)
    _, arrays = layers("channel", "sm_90")
    codes = ca.act_quant(arrays["x"], strategy="channel")
    ca.int8_gemm(*codes, arrays["b0"], arrays["b_scales0"], "float16", backend="interpret")


def test_the_drivers_structs_are_those_of_its_header() -> None:
    """``CUlaunchConfig`` and ``CUlaunchAttribute`` of cuda.h, on machines of 64 bits."""
    config, attribute = overlapping._Config, overlapping._Attribute
    assert (overlapping.ctypes.sizeof(config), overlapping.ctypes.sizeof(attribute)) == (56, 72)
    assert config.shared_bytes.offset == 24 and config.stream.offset == 32
    assert config.attributes.offset == 40 and config.num_attributes.offset == 48
    assert attribute.value.offset == 8 and overlapping._ATTRIBUTES[0].value == 1


def check_status(status: int) -> None:
    if status:
        raise RuntimeError(f"status {status}")


def test_the_driver_gets_what_an_ordinary_launch_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, block, stream and parameters; its errors are reported as for any launch."""
    settings, arrays = layers("channel", "sm_90a")
    _, first = LAYERS.plan(problem_of(LAYERS, settings, arrays)).plans
    (one,) = first.launches
    ready = object.__new__(launches.ReadyLaunch)
    words = memoryview(bytearray(8)).cast("Q")
    ready._per_thread = SimpleNamespace(buffer=(words, 4096, []))
    ready._driver = SimpleNamespace(check_status=check_status, CUDADriverError=RuntimeError)
    ready._launch, ready._pointers, ready._overlaps = one, [], True
    ready._function, ready._shared, ready.waits = 77, 1024, False
    seen: list[tuple[int, ...]] = []

    def launch(*given: int) -> int:
        seen.append(given)
        return len(seen) - 1

    monkeypatch.setattr(overlapping, "launch", launch)
    ready((), 5)
    assert seen == [(77, one.grid, one.block, 1024, 5, 4096)]
    with pytest.raises(ca.KernelLaunchError, match=f"grid {one.grid}, .*status 1"):
        ready((), 5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_layer_is_interpreted_as_models_launch_it(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain call of `Int8Linear`, and one on NumPy: the result, and the need for the wait."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 5, 144)).astype(np.float16)
    given: dict[str, Any] = {"bias": rng.standard_normal(64).astype(np.float32)}
    layer = ca.Int8Linear.from_weight(
        rng.standard_normal((64, 144)).astype(np.float32), strategy=strategy, **given
    )
    beside = {"residual": rng.standard_normal((3, 5, 64)).astype(np.float16)}
    for options in ({}, beside | {"gate": np.ones(64, np.float16)}):
        codes = ca.act_quant(x, strategy=strategy)
        alone = ca.int8_gemm(
            *codes, layer.codes, layer.scales, "float16", backend="interpret", **given, **options
        )
        found = layer(x, backend="interpret", **options)
        assert found.shape == (3, 5, 64) and found.tobytes() == alone.tobytes()
    source = SOURCES[strategy, "portable"]
    put_a_line_in_place(source, f"  {WAIT}  // A,", "  // A,", tmp_path, monkeypatch)
    with pytest.raises(KernelFault, match="before it waits for the launch before it"):
        layer(x, backend="interpret")


def test_layers_make_what_nothing_receives() -> None:
    settings, arrays = layers("block", None)
    alone = {name: x for name, x in arrays.items() if not name.startswith("c")}
    for backend in ("mirror", "interpret"):
        found = run(LAYERS, settings._replace(backend=backend), alone)
        run(LAYERS, settings._replace(backend=backend), arrays)
        assert [x.tobytes() for x in found] == [arrays[f"c{n}"].tobytes() for n in range(2)]
