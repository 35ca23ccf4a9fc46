"""Weights quantised on their device: verdicts of `analyze`, codes, originals, failures."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import cupyattn as ca
from cupyattn.checkpoints import analyze
from cupyattn.checkpoints.analysis import judge, report_of
from cupyattn.checkpoints.header import TensorInfo
from cupyattn.checkpoints.weight_errors import weight_errors
from cupyattn.interop.torch import Int8Linear, quantising, replace_linear_with_int8
from cupyattn.interop.torch.bridge import as_array
from cupyattn.interop.torch.device_errors import worst_errors
from cupyattn.interop.torch.quantising import coded
from tests.checkpoints.checkpoint_files import write

WEIGHTS: dict[str, Any] = {
    "blocks.0.attn.to_q.weight": lambda w: w,
    "blocks.0.attn.to_k.weight": lambda w: w.to(torch.bfloat16),
    "blocks.0.attn.to_v.weight": lambda w: w.half(),
    "blocks.0.ff.net.0.weight": lambda w: torch.where(torch.rand_like(w) < 0.03, 20 * w, w),
    "blocks.0.ff.net.2.weight": lambda w: w.index_fill(1, torch.tensor([3]), 4000.0),
    "blocks.1.ff.net.0.weight": lambda w: w.index_fill(0, torch.tensor([3]), torch.inf),
    "blocks.1.ff.net.2.weight": lambda w: w[:40, :40],
    "blocks.0.norm1.linear.weight": lambda w: w,
    "blocks.1.norm1.linear.weight": lambda w: w.index_fill(0, torch.tensor([3]), torch.nan),
    "blocks.2.attn.to_q.weight": lambda w: w * 1e-30,
    "blocks.2.attn.to_k.weight": lambda w: w.double(),
    "blocks.2.attn.to_v.weight": lambda w: torch.zeros_like(w),
    "blocks.2.skipped.weight": lambda w: w,
    "proj_out.weight": lambda w: w,
    "vae.decoder.mid_block.to_q.weight": lambda w: w,
    "vae.decoder.mid_block.to_k.weight": lambda w: w.index_fill(1, torch.tensor([3]), 4000.0),
}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: change(torch.randn(300, 200)) for name, change in WEIGHTS.items()}


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_verdicts_and_codes_are_those_of_analyze(tmp_path, strategy: str) -> None:  # type: ignore[no-untyped-def]
    config = ca.Int8Config(strategy=strategy, fp32_patterns=("*skipped*",))
    own = weights()
    path = write(tmp_path / "x.safetensors", {n: as_array(w.contiguous()) for n, w in own.items()})
    expected = {t.name: t for t in analyze(path, config).tensors}
    kinds = {t.reason.partition(":")[0] for t in expected.values()}
    assert {"attention", "outliers", "not finite", "small", "modulation", "vae"} <= kinds
    for name, w in own.items():
        report, made = coded(name, w, config)
        assert (report.verdict, report.reason) == (expected[name].verdict, expected[name].reason)
        assert (made is not None) == (report.verdict == "int8")
        if made is not None:
            quantised = ca.weight_quant(as_array(w), strategy=strategy)
            assert all(np.array_equal(a, b) for a, b in zip(made, quantised, strict=True))


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("shape", [(300, 200), (128, 256), (5, 130), (130, 1)], ids=str)
def test_errors_by_operations_of_torch_are_at_the_worst_those_of_the_host(shape, strategy) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        w = torch.randn(shape)
        w.view(-1)[::97] *= 11
        w = w.to(dtype)
        made = ca.weight_quant(as_array(w), strategy=strategy)
        worst = worst_errors(w, *map(torch.from_numpy, made), strategy)
        exact = weight_errors(as_array(w), 128, strategy)
        assert worst is not None and exact.outliers <= worst.outliers <= exact.outliers + 1
        assert (worst.elements, worst.largest) == (exact.elements, exact.largest)
        assert worst.max_error == exact.max_error
        for name in ("noise", "outlier_power", "total_error"):
            a, b = getattr(worst, name), getattr(exact, name)
            assert b <= a <= b * (1 + 1e-4)
        assert exact.signal * (1 - 1e-4) <= worst.signal <= exact.signal


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_what_a_device_decides_is_what_the_host_would(strategy: str) -> None:
    """The operations of the device, on the CPU: they answer for good weights, and for no other."""
    config, answered = ca.Int8Config(strategy=strategy), 0
    for name, w in weights().items():
        expected, codes = coded(name, w, config)
        if w.dtype == torch.float64:
            continue

        def judged(errors: Any, name: str = name, info: Any = expected.info) -> Any:
            return judge(report_of(name, info, errors), config)

        found = quantising._on_device(w, config, judged)
        if found is not None and codes is not None:
            answered += 1
            assert (found[0].verdict, found[0].reason) == ("int8", expected.reason)
            assert all(torch.equal(a, b) for a, b in zip(found[1], codes, strict=True))
        assert found is None or codes is not None
        largest = quantising._finite(w)
        assert largest == (None if expected.nonfinite else expected.largest)
    assert answered >= 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": "channel"}, r"config must be a cupyattn.Int8Config, as .*, got 'channel'"),
        ({"activations": [1.0]}, r"activations must map names of layers to .*, got \[1.0\]"),
        ({"advance": 3}, "advance must take the name of a layer, or be None, got 3"),
    ],
)
def test_arguments_of_another_type_are_refused_before_any_layer_is_dropped(
    options: dict[str, Any], message: str
) -> None:
    own = model()
    layers = list(own)
    with pytest.raises(TypeError, match=message):
        replace_linear_with_int8(own, originals="drop", backend="mirror", **options)
    assert list(own) == layers


def test_a_pattern_that_fits_no_layer_is_refused_before_any_is_replaced() -> None:
    own = model()
    layers = list(own)
    with pytest.raises(ValueError, match="'nothing' of fp32_patterns"):
        replace_linear_with_int8(own, config=ca.Int8Config(fp32_patterns=("nothing",)))
    assert list(own) == layers


@pytest.mark.parametrize("change", ["a NaN", "an infinity", "tiny", "huge"])
def test_the_host_looks_where_torch_cannot_tell(change: str) -> None:
    w = torch.randn(130, 140)
    if change in ("a NaN", "an infinity"):
        w[129, 139] = torch.nan if change == "a NaN" else -torch.inf
    else:
        w[128:] *= 1e-20 if change == "tiny" else 1e20
    made = map(torch.from_numpy, ca.weight_quant(w.numpy()))
    assert worst_errors(w, *made, "block") is None


def test_what_only_the_rounding_decides_is_no_verdict_of_the_device() -> None:
    """An element that is just no outlier counts as one, and the host has to look."""
    w = torch.ones(128, 128)
    limit = 4.0 * (16383 / 16368) ** 0.5  # its square is 16 times the mean with it
    w[0, 0] = float(np.nextafter(np.float32(limit), np.float32(0)))
    exact = weight_errors(w.numpy(), 128, "block")
    worst = worst_errors(w, *map(torch.from_numpy, ca.weight_quant(w.numpy())), "block")
    assert worst is not None and (worst.outliers, exact.outliers) == (1, 0)
    info, strict = TensorInfo("F32", (128, 128)), ca.Int8Config(max_outlier_ratio=0.0)
    verdicts = [judge(report_of("a.weight", info, x), strict).verdict for x in (worst, exact)]
    assert verdicts == ["16bit", "int8"]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 300), nn.Linear(300, 256))


def test_progress_names_each_layer() -> None:
    seen: list[str] = []
    replace_linear_with_int8(model(), exclude="^1$", backend="mirror", advance=seen.append)
    assert seen == ["0", "2"]


def test_originals_that_are_dropped_leave_memory_one_by_one() -> None:
    gc.freeze()  # collections below pass over what the process had before
    own, left = model(), []
    weak = [weakref.ref(layer.weight) for layer in own]

    def advance(name: str) -> None:
        gc.collect()
        left.append([ref() is not None for ref in weak])

    replace_linear_with_int8(own, originals="drop", backend="mirror", advance=advance)
    assert left == [[False, True, True], [False, False, True], [False, False, False]]


def test_what_fails_half_way_leaves_the_model_as_it_was() -> None:
    own = model()
    layers, x = list(own), torch.randn(4, 256)
    before = own(x)

    def advance(name: str) -> None:
        assert isinstance(own[int(name)], Int8Linear)
        if name == "1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_linear_with_int8(own, backend="mirror", advance=advance)
    assert list(own) == layers and torch.equal(own(x), before)
    with pytest.warns(UserWarning, match="2 layers of the model stayed INT8"), pytest.raises(
        KeyboardInterrupt
    ):
        replace_linear_with_int8(own, originals="drop", backend="mirror", advance=advance)
    assert [type(layer) for layer in own] == [Int8Linear, Int8Linear, nn.Linear]
