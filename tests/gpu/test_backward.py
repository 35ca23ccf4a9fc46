"""Gradients on a device: within their bound at every length, memory, bits, streams, large calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn import attention, attention_backward, explain_backward
from cupyattn.arrays.kinds import as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.gradients import Gradients, judge_backward
from cupyattn.plans.backward import BackwardOperands, plan_backward
from cupyattn.problem.backward_form import settle_backward
from cupyattn.problem.settings import check_attention
from cupyattn.runtime.ready import run as run_plan
from tests.backward import test_backward_bias as of_bias
from tests.backward import test_backward_qk_norm as of_norm
from tests.backward.backward_cases import (
    FORMS,
    HOPPER_FORMS,
    BackwardRun,
    Received,
    admitting,
    file_of,
    gradients_of_lse,
    received,
    revealing_backward,
    revealing_hopper_backward,
    revealing_of,
    revealing_pair_backward,
    revealing_wide_backward,
    run_backward,
    run_packed_backward,
    sparse,
)
from tests.backward.coarse_cases import LOWEST, biased, check, defined, large_products
from tests.backward.test_backward_faults import FAULTS
from tests.backward.test_backward_kernels import PACKED
from tests.gpu.support import arch_of, embedded, guarded, moved, on_device
from tests.kernels.test_all_lengths import MOST, SHAPES
from tests.support.runs import bits, column_tables, normal, on_host, rope_tables

cupy = pytest.importorskip("cupy")

HEAD_DIMS = (64, 128, 256, 1, 7, 40, 72, 96, 160, 200)


def forward(q: Any, k: Any, v: Any, variant: str = "fa_tc", **options: Any) -> Received:
    """Return operands of a backward pass on the device, whose forward ran there."""
    d_out = cupy.asarray(np.random.default_rng(1).standard_normal(q.shape)).astype(q.dtype)
    out, lse = attention(q, k, v, variant=variant, return_lse=True, **options)
    return d_out, q, k, v, out, lse


@pytest.fixture(params=[*FORMS, *HOPPER_FORMS])
def how(request: Any) -> dict[str, Any]:
    """The options that ask for a form: on Hopper the portable ones are compiled for ``"sm_90"``."""
    return options_of(request.param)


def options_of(form: str) -> dict[str, Any]:
    """Return the options that ask for a form; skip where the device has none."""
    deterministic = (FORMS | HOPPER_FORMS)[form]
    return {"deterministic": deterministic, "arch": arch_of(f"backward@{form}")}


@pytest.mark.parametrize("causal", [False, True])
def test_every_length(how: dict[str, Any], causal: bool) -> None:
    q, k, v = on_device(*normal((1, 2, MOST, 64), (1, 1, MOST, 64), seed=1))
    for len_q, len_kv in SHAPES:
        operands = (q[:, :, :len_q], k[:, :, :len_kv], v[:, :, :len_kv])
        inputs = forward(*operands, causal=causal)
        report = run_backward(inputs, **how, causal=causal).judge()
        assert report.passed, f"{(len_q, len_kv)}: {report}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size(head_dim: int, dtype: str) -> None:
    for form in FORMS.values():  # the device's own: of Hopper where that takes the size
        for causal in (False, True):
            operands = on_device(*normal((2, 4, 200, head_dim), (2, 2, 333, head_dim), dtype))
            inputs = forward(*operands, causal=causal)
            run_backward(inputs, deterministic=form, causal=causal).check()


def test_features_are_within_their_bound_amid_nan(how: dict[str, Any]) -> None:
    for head_dim in (32, 64, 128):
        of_hopper = (*revealing_hopper_backward(), *revealing_wide_backward())
        for inputs, options in (*revealing_backward(head_dim), *of_hopper):
            amid_nan: Any = (*map(embedded, inputs[:5]), *on_device(inputs[5]))
            options = moved(options)
            run_backward(amid_nan, **how, **options).check()


@pytest.mark.usefixtures("planted_kernels")
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.caught_by == "J2"], ids=lambda f: f.name)
def test_a_mistake_is_noticed(fault: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(kc, "KERNELS", fault.plant(tmp_path))
    for form in fault.variants:
        if fault.shown_by == "varlen":
            runs = run_packed_backward(PACKED, **options_of(form), move=on_device)
        else:
            runs = (
                run_backward(
                    (*map(embedded, inputs[:5]), *on_device(inputs[5])),
                    **options_of(form), **moved(options),
                )
                for inputs, options in revealing_of(file_of(fault), form)
            )  # fmt: skip
        assert any(not one.judge().passed for one in runs), f"{form}: {fault.sentence}"


def test_pairs_of_blocks() -> None:
    """Gradients within their bound; gradients of K and V have the same bits on every run."""
    how = options_of("sm90_atomic")
    for inputs, options in revealing_pair_backward():
        amid_nan: Any = (*map(embedded, inputs[:5]), *on_device(inputs[5]))
        run_backward(amid_nan, **how, **moved(options)).check()
    inputs = forward(*on_device(*normal((2, 8, 700, 256), (2, 2, 900, 256), "bfloat16")))
    run_backward(inputs, **how).check()
    first = attention_backward(*inputs, **how)
    for _ in range(100):
        _, dk, dv = attention_backward(*inputs, **how)
        assert bits(dk) == bits(first.dk) and bits(dv) == bits(first.dv)


def test_rotary_embeddings_are_as_on_the_host(how: dict[str, Any]) -> None:
    """Both round alike but for the order of sums."""
    host = received(*normal((1, 4, 150, 64), (1, 2, 200, 64)))
    by_column = tuple(x / 2 for x in column_tables(200, 64))
    for rope, interleaved in ((rope_tables(200, 64), False), (by_column, False), (by_column, True)):
        asked = {
            "rope_offset_q": 50, "rope_interleaved": interleaved, "causal": True,
            "deterministic": how["deterministic"],
        }  # fmt: skip
        wanted = attention_backward(*host, rope=rope, **asked)
        asked["arch"] = how["arch"]
        found = attention_backward(*on_device(*host), rope=on_device(*rope), **asked)
        for x, y in zip(found, wanted, strict=True):
            off = np.linalg.norm(as_float64(on_host(x)) - as_float64(y))
            assert off < 2e-3 * np.linalg.norm(as_float64(y))


def test_packed_sequences(how: dict[str, Any]) -> None:
    for head_dim in (64, 128):
        for one in run_packed_backward(
            PACKED, head_dim=head_dim, **how, move=on_device, of_lse=head_dim == 64, causal=True
        ):
            one.check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_written_in_full_and_nothing_beside_them(
    how: dict[str, Any], dtype: str
) -> None:
    for head_dim in (64, 36, 9):
        host = received(*normal((2, 4, 130, head_dim), (2, 2, 77, head_dim), dtype), causal=True)
        inputs = on_device(*host)
        before = [bits(x) for x in inputs]
        results = [guarded(x.shape, dtype) for x in inputs[1:4]]
        arrays = dict(zip(("d_out", "q", "k", "v", "o", "lse"), inputs, strict=True))
        arrays |= {n: x.array for n, x in zip(Gradients._fields, results, strict=True)}
        operands = BackwardOperands(**{n: Operand.of(x) for n, x in arrays.items() if n != "lse"})
        call = check_attention(*inputs[1:4], return_lse=True, causal=True)
        plan = plan_backward(settle_backward(call, vars(operands), **how), operands)
        run_plan(plan, arrays, how["arch"])
        for one in results:
            one.check()
        found = Gradients(*(x.array for x in results))
        BackwardRun(inputs, {"causal": True}, found).check()
        assert [bits(x) for x in inputs] == before, "an input was modified"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_deterministic_form_has_the_same_bits_a_thousand_times(head_dim: int) -> None:
    shape = (2, 4, 700, head_dim), (2, 2, 900, head_dim)
    inputs = forward(*on_device(*normal(*shape)), causal=True)
    first = attention_backward(*inputs, causal=True, deterministic=True)
    for _ in range(1000):
        again = attention_backward(*inputs, causal=True, deterministic=True)
        assert all(bool((x == y).all()) for x, y in zip(first, again, strict=True))


def test_dk_and_dv_of_the_atomic_form_have_the_same_bits_a_hundred_times() -> None:
    inputs = forward(*on_device(*normal((2, 8, 700, 128), (2, 2, 900, 128))))
    first = attention_backward(*inputs)
    assert [bits(x) for x in first[1:]] == [
        bits(x) for x in attention_backward(*inputs, deterministic=True)[1:]
    ]
    for _ in range(100):
        _, dk, dv = attention_backward(*inputs)
        assert bits(dk) == bits(first.dk) and bits(dv) == bits(first.dv)


#: Options of a call of 2 entries, 4 heads, 700 rows and 904 keys, which is more than five tiles.
OF_SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0, "causal": True},
    "mask": {"mask": sparse((1, 4, 700, 904))},
    "causal mask": {"mask": sparse((2, 1, 700, 904)), "causal": True},
    "bias": {"bias": admitting((2, 4, 700, 904), "float16")},
    "bias of keys": {"bias": admitting((2, 1, 1, 904), "float32"), "causal": True},
    "bias and mask": {"bias": admitting((700, 904), "bfloat16"), "mask": sparse((2, 1, 1, 904))},
    "bias in float32": {"bias": admitting((4, 700, 904), "float32")},
    "softcap and bias": {"softcap": 2.0, "bias": admitting((700, 904), "bfloat16")},
    "gradient of lse": {"d_lse": gradients_of_lse(np.random.default_rng(0), (2, 4, 700))},
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("feature", OF_SCORES)
def test_features_have_the_same_bits_a_hundred_times(feature: str, head_dim: int) -> None:
    """In the deterministic form; within their bound in both forms."""
    options = OF_SCORES[feature]
    host = received(*normal((2, 4, 700, head_dim), (2, 2, 904, head_dim)), **options)
    inputs: Any = on_device(*host)
    own = moved(options)
    text = explain_backward(*inputs, **own)
    assert text.startswith("sm90") == (arch_of("backward") is not None), text
    for form in FORMS.values():
        run_backward(inputs, deterministic=form, **own).check()
    first = attention_backward(*inputs, deterministic=True, **own)
    for _ in range(100):
        again = attention_backward(*inputs, deterministic=True, **own)
        assert all(bool((x == y).all()) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("form", HOPPER_FORMS)
@pytest.mark.parametrize("kind", ["even", "steps", "masked", "padded"])
def test_large_biases_on_hopper(kind: str, form: str) -> None:
    inputs, options = biased(-1500, kind)  # in float16 these are whole numbers
    bias = options["bias"].astype(np.float16)
    one = run_backward(on_device(*inputs), bias=on_device(bias)[0], **options_of(form))
    check([on_host(x) for x in one.gradients], defined(inputs, bias.astype(np.float32)))


@pytest.mark.parametrize("shape", of_bias.SHAPES, ids=str)
def test_the_gradient_of_a_bias_is_within_its_bound_and_has_the_same_bits(
    shape: tuple[int, ...],
) -> None:
    inputs, options = of_bias.problem(shape, causal=True)
    on_gpu: Any = on_device(*inputs)
    options = moved(options)
    one = run_backward(on_gpu, **options)
    one.check()
    expected = bits(on_host(one.gradients[3]))
    for _ in range(100):
        assert bits(on_host(attention_backward(*on_gpu, **options)[3])) == expected


def test_two_streams_do_not_disturb_each_other(how: dict[str, Any]) -> None:
    options = {"causal": True, **how}
    problems = [
        forward(*on_device(*normal((2, 4, 300, 64), (2, 2, 300, 64), seed=i)), causal=True)
        for i in range(4)
    ]
    expected = [attention_backward(*inputs, **options) for inputs in problems]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in problems]
    results: list[Gradients] = []
    for _ in range(5):
        for inputs, stream in zip(problems, streams, strict=True):
            with stream:
                results.append(attention_backward(*inputs, **options))
    cupy.cuda.Device().synchronize()
    for number, found in enumerate(results):
        wanted = expected[number % len(problems)]
        assert bits(found.dk) == bits(wanted.dk) and bits(found.dv) == bits(wanted.dv)
        if how["deterministic"]:
            assert bits(found.dq) == bits(wanted.dq)
        else:  # whoever adds first decides the last bits
            BackwardRun(problems[number % 4], {"causal": True}, found).check()


def test_a_forward_pass_in_int8_has_gradients_near_the_true_ones() -> None:
    q, k, v = on_device(*normal((1, 4, 300, 128), (1, 4, 400, 128)))
    inputs = forward(q, k, v, "fa_int8")
    run_backward(inputs).check()
    found, true = attention_backward(*inputs), attention_backward(*forward(q, k, v))
    for x, y in zip(map(as_float64, found), map(as_float64, true), strict=True):
        assert float(cupy.linalg.norm((x - y).ravel()) / cupy.linalg.norm(y.ravel())) < 0.05


def test_the_layouts_have_the_same_bits() -> None:
    inputs = forward(*on_device(*normal((2, 4, 100, 64), (2, 4, 130, 64))))
    expected = attention_backward(*inputs, deterministic=True)
    exchanged = [cupy.ascontiguousarray(x.swapaxes(1, 2)) for x in inputs[:5]]
    found = attention_backward(*exchanged, inputs[5], layout="BSHD", deterministic=True)
    assert [bits(x.swapaxes(1, 2)) for x in found] == [bits(x) for x in expected]
    assert all(x.flags.c_contiguous for x in found)


def test_a_video_of_118800_tokens(how: dict[str, Any]) -> None:
    """Memory grows with the length alone; keys of one block are looked at, dO elsewhere being 0."""
    length, rows = 118_800, 256
    rng = cupy.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((1, 1, length, 128), dtype=cupy.float32).astype(cupy.float16)
        for _ in range(3)
    )
    inputs = list(forward(q, k, v))
    inputs[0][:, :, rows:] = 0  # what those rows add to dK and dV is exactly 0
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    found = attention_backward(*inputs, **how)
    assert pool.used_bytes() - before < 4 * q.nbytes
    few = [x[:, :, :rows] for x in (inputs[0], inputs[1], inputs[4], inputs[5])]
    judged = Gradients(found.dq[:, :, :rows], found.dk, found.dv)
    report = judge_backward(judged, few[0], few[1], k, v, few[2], few[3])
    assert report.passed, str(report)
    assert not bool(found.dq[:, :, rows:].any())


def test_more_than_two_to_the_31_elements_of_a_head_stride() -> None:
    """Heads that lie far apart in one buffer."""
    step = 2**31 + 64
    if cupy.cuda.runtime.memGetInfo()[0] < 3 * step * 2:
        pytest.skip("needs 13 GB")
    q, k, v = normal((1, 2, 40, 64), (1, 2, 70, 64))
    buffer = cupy.zeros(step + 70 * 64, cupy.float16)
    far = cupy.lib.stride_tricks.as_strided(buffer, (1, 2, 70, 64), (0, 2 * step, 128, 2))
    far[...] = cupy.asarray(k)
    inputs = forward(*on_device(q), far, *on_device(v))
    one = run_backward(inputs, causal=False)
    near = [on_host(x) for x in inputs]
    report = judge_backward([on_host(x) for x in one.gradients], *near)
    assert report.passed, str(report)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["even", "masked", "padded"])
@pytest.mark.parametrize("value", [-1e4, -1e6, -1e7, -1e9, LOWEST])
def test_rows_under_a_large_negative_bias(value: float, kind: str, deterministic: bool) -> None:
    inputs, options = biased(value, kind)
    bias = options["bias"]
    one = run_backward(on_device(*inputs), bias=on_device(bias)[0], deterministic=deterministic)
    check([on_host(x) for x in one.gradients], defined(inputs, bias))
    one.check()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_rows_of_large_products(head_dim: int, deterministic: bool) -> None:
    inputs = large_products(head_dim)
    one = run_backward(on_device(*inputs), scale=1 / 8, deterministic=deterministic)
    check([on_host(x) for x in one.gradients], defined(inputs, scale=1 / 8), columns=1)


@pytest.mark.parametrize("shapes", of_norm.SHAPES, ids=str)
def test_gradients_of_normalised_rows_and_their_weights(shapes: Any) -> None:
    """Within their bounds, and with the same bits again."""
    inputs, options = of_norm.problem(shapes, ("f4", "float16"), causal=True)
    on_gpu: Any = on_device(*inputs)
    options = moved(options)
    one, again = (run_backward(on_gpu, deterministic=True, **options) for _ in range(2))
    one.check()
    assert [bits(on_host(x)) for x in one.gradients] == [bits(on_host(x)) for x in again.gradients]
