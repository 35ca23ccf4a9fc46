"""Products with a scale for each row and column on a device: the mirror's bits, the bound."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.ops.act_quant import ACT_QUANT, ActQuantSettings
from cupyattn.ops.gemm import GEMM, GemmSettings, plan_together, settle_together
from cupyattn.ops.operation import problem_of
from cupyattn.ops.operation import run as run_call
from cupyattn.plans.gemm import buffer_of
from cupyattn.problem.gemm_form import HOPPER_TILES, PORTABLE_TILES
from cupyattn.quant.blocks import BLOCK_SIZE
from cupyattn.reference.gemm import activate
from cupyattn.runtime.ready import run as run_plan
from tests.gpu.support import arch_of, cupy, on_device
from tests.gpu.test_gemm import FORMS, run
from tests.quant.gemm_cases import Product, product
from tests.quant.quant_inputs import operand
from tests.quant.test_gemm_channel import activations, by_channel
from tests.quant.test_gemm_layers import layers_of


@pytest.mark.parametrize("form", FORMS)
def test_many_tiles_give_the_same_bits_a_hundred_times(form: str) -> None:
    """Several waves: the ring of stages goes on, and the last wave is shared or not."""
    p = by_channel(1, (3000, 3200, 1104), out_dtype="float16", bias=True)
    expected = p.mirror().tobytes()
    operands = on_device(*p.operands, p.bias)
    for tiles in HOPPER_TILES[:2] if form == "sm90" else PORTABLE_TILES[:1]:
        arch = arch_of("gemm@sm90" if form == "sm90" else "gemm")
        for _ in range(100):
            c = ca.int8_gemm(*operands[:4], "float16", bias=operands[4], tiles=tiles, arch=arch)
            assert c.get().tobytes() == expected


@pytest.mark.parametrize("form", FORMS)
def test_the_largest_sums(form: str) -> None:
    """All codes 127 or -127 over the longest k: int32 wraps nowhere."""
    k = 131_056
    a, b = (np.where(np.arange(s)[:, None] % 3 == 0, -127, 127) for s in (70, 136))
    a, b = (np.broadcast_to(x.astype(np.int8), (len(x), k)).copy() for x in (a, b))
    scales = [np.full((len(x), 1), 2.0**-15, np.float32) for x in (a, b)]
    p = Product(a, scales[0], b, scales[1], "float32")
    assert run(p, form).tobytes() == p.mirror().tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_are_quantised_as_numpy_does(dtype: str) -> None:
    for shape in ((1000, 3072), (7, 129), (3, 5, 1000), (20, 40_000), (3, 33_001)):
        for regime in ("wide", "subnormal", "huge", "signed zeros"):
            lead = (1,) * (4 - len(shape))
            x = operand(2, STORAGE[dtype], (*lead, *shape), regime)[(0,) * len(lead)]
            expected = ca.act_quant(x, strategy="channel")
            for function in (ca.act_quant, *([ca.weight_quant] if x.ndim == 2 else [])):
                for mine, theirs in zip(
                    function(*on_device(x), strategy="channel"), expected, strict=True
                ):
                    assert mine.get().tobytes() == theirs.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_of_two_tensors_are_quantised_as_their_concatenation(dtype: str) -> None:
    """Two contiguous tensors, then parts of wider rows; a first and a repeated call."""
    how = ActQuantSettings(BLOCK_SIZE, "cuda", strategy="channel")
    for count, left, right in (
        (4608, 3072, 12_288), (7, 64, 200), (33, 129, 31), (5, 5000, 35_000), (3, 33_001, 64),
    ):  # fmt: skip
        wide = operand(3, STORAGE[dtype], (1, 1, count, left + right + 8), "wide")[0, 0]
        (moved,) = on_device(wide)
        apart = moved[:, :left].copy(), moved[:, 8 + left :].copy()
        for x, y in (apart, (moved[:, :left], moved[:, 8 + left :])):
            expected = ca.act_quant(np.hstack((x.get(), y.get())), strategy="channel")
            for _ in range(2):
                found = run_call(ACT_QUANT, how, {"x": x, "right": y}).values()
                for mine, theirs in zip(found, expected, strict=True):
                    assert mine.get().tobytes() == theirs.tobytes()


@pytest.mark.parametrize("kind", ["normal", "outlier", "sparse", "constant"])
def test_a_layer_holds_its_bound(kind: str) -> None:
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((300, 1000)) / 32).astype(ml_dtypes.bfloat16)
    x = activations(kind, 300, 1000, 1).astype(ml_dtypes.bfloat16).reshape(2, 150, 1000)
    for activation in ("", "gelu"):
        options = {"strategy": "channel", "activation": activation or None}
        host = ca.Int8Linear.from_weight(w, w[:, 0], **options)
        layer = ca.Int8Linear.from_weight(*on_device(w, w[:, 0]), **options)
        for _ in range(2):  # the second is a call that came again
            y = layer(*on_device(x)).get()
            exact = activate(as_float64(x) @ as_float64(w).T + as_float64(w[:, 0]), activation)
            assert (np.abs(as_float64(y) - exact) <= host.error(x, w)).all()
            assert activation or y.tobytes() == host(x).tobytes()
        back = ca.weight_dequant(layer.codes, layer.scales, strategy="channel").get()
        mine = ca.weight_dequant(host.codes, host.scales, strategy="channel")
        assert back.tobytes() == mine.tobytes()


def test_layers_of_torch() -> None:
    """A first and a repeated call equal NumPy's; so does a call captured in a graph."""
    torch = pytest.importorskip("torch")
    from cupyattn.interop.torch import Int8Linear

    linear = torch.nn.Linear(512, 304, dtype=torch.bfloat16)
    host = Int8Linear.from_linear(linear, strategy="channel", backend="mirror")
    layer = Int8Linear(host.weight_codes.cuda(), host.weight_scale.cuda(), linear.bias.cuda())
    x = torch.randn(3, 40, 512, dtype=torch.bfloat16)
    given = x.cuda()
    with torch.no_grad():
        expected = host(x)
        for _ in range(3):
            assert torch.equal(layer(given).cpu(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(given)
        given.copy_(2 * x)
        graph.replay()
        assert torch.equal(y.cpu(), host(2 * x))


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_that_is_added_to_another(form: str, strategy: str) -> None:
    for seed, (out_dtype, gates, activation) in enumerate(
        (("float16", 2, ""), ("bfloat16", 0, ""), ("float32", 1, ""), ("bfloat16", 5, "gelu"))
    ):
        p = product(
            seed, (500, 712, 1040), out_dtype=out_dtype, bias=True, activation=activation,
            strategy=strategy, gates=gates,
        )  # fmt: skip
        arch = arch_of("gemm@sm90" if form == "sm90" else "gemm")
        names = ("a", "a_scales", "b", "b_scales", "bias", "residual", "gate")
        given = {name: getattr(p, name) for name in names if getattr(p, name) is not None}
        moved = dict(zip(given, on_device(*given.values()), strict=True))
        for _ in range(2):  # the second is a call that came again
            c = p.but(**moved).run(arch=arch).get()
            assert p.share_of_bound(c) <= 1
            if not activation and strategy == "channel":
                assert c.tobytes() == p.mirror().tobytes()
        assert moved["residual"].get().tobytes() == p.residual.tobytes()


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(4608, (3072, 3072, 3072), 3072), (512, (3072, 1024), 3072), (333, (2432,) * 3, 2432),
     (1000, (96, 40, 3200, 8), 1104)],
)  # fmt: skip
def test_layers_of_one_launch_have_the_bits_of_separate_calls(m, n, k) -> None:
    """Twenty times, into rows of joint arrays; the second layer has no bias."""
    arch_of("gemm@sm90")
    products = layers_of(3, m, n, k, out_dtype="bfloat16")
    expected = [p.mirror() for p in products]
    joint = [
        cupy.full((m + 7, len(p.b)), 0x7FC0, np.uint16).view(ml_dtypes.bfloat16) for p in products
    ]
    results = [x[5 : 5 + m] for x in joint]
    a, a_scales = on_device(products[0].a, products[0].a_scales)
    codes = {"a": a, "a_scales": a_scales}
    settings = GemmSettings("bfloat16", "", None, "sm_90a", "cuda")
    problems, buffers = [], dict(codes)
    for i, (p, c) in enumerate(zip(products, results, strict=True)):
        own = {"b": p.b, "b_scales": p.b_scales} | ({} if p.bias is None else {"bias": p.bias})
        moved = dict(zip(own, on_device(*own.values()), strict=True)) | {"c": c}
        problems.append(problem_of(GEMM, settings, codes | moved))
        buffers |= {buffer_of(name, i): x for name, x in moved.items()}
    kernel = settle_together(problems)
    assert kernel is not None and kernel.tiles in HOPPER_TILES
    plan = plan_together(kernel, problems)
    for _ in range(20):
        for c in results:
            c.view(np.uint16)[...] = 0x7FC0
        run_plan(plan, buffers, "sm_90a")
        for c, wanted in zip(results, expected, strict=True):
            assert c.get().tobytes() == wanted.tobytes()
    for x in joint:  # the other rows stay
        around = np.concatenate([x.view(np.uint16)[:5].get(), x.view(np.uint16)[5 + m :].get()])
        assert (around == 0x7FC0).all()


def test_layers_of_torch_in_one_call() -> None:
    """An operator of several layers, behind a norm too: launches, a first and repeated calls."""
    torch = pytest.importorskip("torch")
    from cupyattn.interop.torch import Int8Linear, linear_parts

    torch.manual_seed(0)
    linears = [torch.nn.Linear(512, out, bias=out != 96, dtype=torch.bfloat16)
               for out in (304, 96, 640)]  # fmt: skip
    host = [Int8Linear.from_linear(one, strategy="channel", backend="mirror") for one in linears]
    x = torch.randn(1, 400, 512, dtype=torch.bfloat16)

    def call(layers: Any, x: Any, backend: Any) -> Any:
        given = linear_parts.NormedLayers(
            x, None, None, None, None, "layer", 1e-6, "", None, [y.weight_codes for y in layers],
            [y.weight_scale for y in layers], [y.bias for y in layers], None, None, [""] * 3, None,
            backend,
        )  # fmt: skip
        return linear_parts.normed_layers(*given)

    with torch.no_grad():
        expected = call(host, x, "mirror")
        device = [one.cuda() for one in host]
        for _ in range(3):
            for y, wanted in zip(call(device, x.cuda(), None), expected, strict=True):
                assert torch.equal(y.cpu(), wanted)
