"""The Hopper form of the backward pass: its calls, and its kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import attention_varlen, attention_varlen_backward, explain_backward, interpret
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import devices
from cupyattn.compiler import modules as kc
from cupyattn.gradients import Gradients
from cupyattn.kernels.backward_tiles import SUMMED
from cupyattn.plans.backward import BackwardOperands, plan_backward
from cupyattn.problem.backward_form import settle_backward
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.checks import Packed
from tests.backward.backward_cases import (
    FORMS,
    HOPPER_FORMS,
    BackwardRun,
    admitting,
    interpreted_as,
    received,
    revealing_hopper_backward,
    revealing_wide_backward,
    run_backward,
    run_packed_backward,
    sparse,
)
from tests.backward.coarse_cases import biased, check, defined, large_products
from tests.backward.test_backward_kernels import call_of, plan_of, run_into
from tests.faults.fault_patches import put_a_line_in_place
from tests.support.marks import slow_rows
from tests.support.runs import bits, embedded, normal, packed

#: Places of a bias or mask of `call_of(200, 300)`.
BIAS = Operand.contiguous((1, 4, 200, 300), 4)
NARROW_BIAS = Operand((1, 4, 200, 300), (243200, 60800, 304, 1), 2, 2)
ROWS_BIAS = Operand((1, 4, 200, 300), (800, 200, 1, 0), 2, 0)
#: Biases that the copy engine moves, and one for all query rows.
DENSE_BIAS = Operand((1, 4, 200, 300), (243200, 60800, 304, 1), 2, 0)
FLOAT32_BIAS = Operand((1, 4, 200, 300), (243200, 60800, 304, 1), 4, 0)
KEYS_BIAS = Operand((1, 4, 200, 300), (0, 0, 0, 1), 2, 0)
#: Kernels of 512 registers for four threads must not wait for each product separately.
SERIALISED = "wgmma.mma_async instructions are serialized"


def hopper_plan(call: Any, *, deterministic: bool | None = False, **changed: Operand) -> Any:
    """The plan of a call on an sm_90a device, its arrays contiguous but for those given."""
    q = Operand.contiguous((call.batch, call.heads, call.len_q, call.head_dim), 2)
    k = Operand.contiguous((call.batch, call.heads_kv, call.len_kv, call.head_dim), 2)
    named = {"q": q, "k": k, "v": k, "o": q, "d_out": q, "dq": q, "dk": k, "dv": k}
    kept = None if call.block_mask == (0, 0) else Operand.contiguous((1, 1, 5, 6), 4)
    if call.mask:
        named["mask"] = Operand.contiguous(call.score_shape, 1)
    operands = BackwardOperands(**{**named, **changed}, kept_blocks=kept, kept_rows=kept)
    settled = settle_backward(call, vars(operands), deterministic=deterministic, arch="sm_90a")
    return plan_backward(settled, operands)


# ---- what is compiled and planned ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "dtype", "features"),
    [
        (128, "bfloat16", {"causal": True}),
        (128, "float16", {"mask": True, "causal": True}),
        (256, "bfloat16", {"mask": True, "causal": True}),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                (64, "float16", {}),
                (40, "float16", {"causal": True, "packed": Packed(900, 900, True)}),
                (96, "float16", {"window": True, "causal": True}),
                (128, "float16", {"packed": Packed(900, 900, True)}),
                (64, "bfloat16", {"block_mask": (128, 128), "causal": True}),
                (160, "bfloat16", {"causal": True, "packed": Packed(900, 900, True)}),
                (256, "float16", {"block_mask": (64, 64)}),
                (64, "float16", {"softcap": 2.0, "causal": True}),
                (128, "bfloat16", {"softcap": 2.0, "packed": Packed(900, 900, True)}),
                (256, "float16", {"softcap": 2.0, "window": True, "causal": True}),
                (64, "bfloat16", {"mask": True}),
                (64, "float16", {"mask": True, "window": True}),
                (128, "float16", {"mask": True, "window": True}),
                (128, "bfloat16", {"softcap": 2.0, "block_mask": (128, 128)}),
                (96, "float16", {"mask": True, "softcap": 2.0, "causal": True}),
                (256, "float16", {"mask": True}),
                (160, "float16", {"mask": True, "window": True}),
                (256, "bfloat16", {"mask": True, "window": True}),
                (256, "bfloat16", {"mask": True, "softcap": 2.0}),
                (256, "float16", {"mask": True, "window": True, "causal": True}),
                (160, "float16", {"mask": True, "softcap": 2.0, "causal": True}),
                (256, "bfloat16", {"mask": True, "softcap": 2.0, "window": True}),
            )
        ),
    ],
)
def test_kernels_spill_nothing_and_multiply_in_the_background(
    head_dim: int, dtype: str, features: dict[str, Any]
) -> None:
    check_kernels(call_of(200, 300, head_dim, **features, dtype=dtype))


@pytest.mark.parametrize(
    ("head_dim", "bias", "features"),
    [
        (64, DENSE_BIAS, {"causal": True}),
        (128, DENSE_BIAS, {}),
        (256, DENSE_BIAS, {"causal": True}),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                *((n, x, {}) for n in (64, 128, 256) for x in (DENSE_BIAS, KEYS_BIAS)),
                *(
                    (n, x, {"window": True})
                    for n in (64, 128, 160) for x in (DENSE_BIAS, KEYS_BIAS)
                ),
                *((n, DENSE_BIAS, {"causal": True}) for n in (40, 96, 128)),
                *((n, DENSE_BIAS, {"block_mask": (128, 128)}) for n in (64, 128, 256)),
                *((n, x, {"softcap": 2.0}) for n in (64, 128) for x in (DENSE_BIAS, KEYS_BIAS)),
                *((n, DENSE_BIAS, {"softcap": 2.0, "causal": True}) for n in (64, 128, 256)),
                (256, KEYS_BIAS, {"softcap": 2.0, "window": True, "causal": True}),
                *((n, DENSE_BIAS, {"packed": Packed(900, 900, True)}) for n in (64, 128, 256)),
                (128, KEYS_BIAS, {"packed": Packed(900, 900, True), "softcap": 2.0}),
                *((n, x, {"mask": True, "causal": True}) for n, x in (
                    (64, KEYS_BIAS), (64, DENSE_BIAS), (128, DENSE_BIAS), (256, DENSE_BIAS),
                    (256, KEYS_BIAS),
                )),
            )
        ),
    ],
)
def test_kernels_with_a_bias_spill_nothing(
    head_dim: int, bias: Operand, features: dict[str, Any]
) -> None:
    """Every combination of features by itself: registers are short in each."""
    other = "bfloat16" if bias is DENSE_BIAS else "float32"
    for dtype, of_bias in (("float16", "float16"), ("bfloat16", other)):
        call = call_of(200, 300, head_dim, **features, dtype=dtype, bias=of_bias)
        check_kernels(call, bias=bias)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "features"),
    [
        *((n, x) for n in (64, 128, 256) for x in ({}, {"window": True}, {"causal": True})),
        *((n, {"block_mask": (128, 128)}) for n in (64, 128)), (256, {"softcap": 2.0}),
        (40, {"causal": True}), (96, {"causal": True}), (128, {"mask": True, "causal": True}),
    ],
)  # fmt: skip
def test_kernels_with_a_float32_bias_spill_next_to_nothing(
    head_dim: int, features: dict[str, Any]
) -> None:
    """NVRTC 13.5 stores 12 bytes a step in the plain form with turns, NVRTC 13.0 none."""
    call = call_of(200, 300, head_dim, **features, dtype="bfloat16", bias="float32")
    most = 12 if head_dim == 128 and not features else 0
    check_kernels(call, most, bias=FLOAT32_BIAS)


def check_kernels(call: Any, most_spilled: int = 0, **changed: Operand) -> None:
    """Compile the Hopper kernels of a call, and raise for what they must not do.

    Past head_dim 128 of calls that pairs of blocks do not take (the others: test_backward_pair.py).
    """
    forms = FORMS.values() if call.head_dim <= SUMMED else [True]
    plans = [hopper_plan(call, deterministic=form, **changed) for form in forms]
    modules = {x.module: x.entry for plan in plans for x in plan.launches}
    hopper = {m: entry for m, entry in modules.items() if m.path.parent.name == "sm90"}
    narrow = ["backward_keys", "backward_keys", "backward_sums"]  # no sums behind turns
    wide = ["backward_keys_wide", "backward_queries_wide"]
    assert sorted(hopper.values()) == (narrow if call.head_dim <= SUMMED else wide)
    for module, entry in hopper.items():
        binary = kc.build(module, "sm_90a")
        taken = binary.kernels[entry]
        assert max(taken.spill_stores, taken.spill_loads) <= most_spilled, f"{module}: {taken}"
        assert SERIALISED not in binary.log, module
        devices.check_shared_memory(binary.smem_bytes, 227 * 1024, entry)


@pytest.mark.parametrize(
    ("options", "changed", "reason"),
    [
        ({"head_dim": 136, "block_mask": (64, 96)}, {}, "multiples of 64 x 64, got 64 x 96"),
        (
            {"bias": "float32", "mask": True}, {"bias": BIAS, "mask": BIAS},
            "takes a mask with a float32 bias from head_dim 65 to 128",
        ),
        (
            {"head_dim": 136, "bias": "float32", "mask": True}, {"bias": BIAS, "mask": BIAS},
            "takes a mask with a float32 bias from head_dim 65 to 128",
        ),
        ({"bias": "float16"}, {"bias": NARROW_BIAS}, "multiples of 16 bytes, got 16 n + 2"),
        ({"bias": "float16"}, {"bias": ROWS_BIAS}, "takes no bias that is the same for all keys"),
        (
            {
                "head_dim": 136, "bias": "float32", "softcap": 2.0,
                "packed": Packed(900, 900, True),
            }, {"bias": BIAS}, "takes no float32 bias of packed sequences with softcap",
        ),
        (
            {"mask": True, "block_mask": (128, 128)}, {"mask": BIAS},
            "takes no mask with a block mask or of packed sequences",
        ),
        ({"block_mask": (64, 128)}, {}, "multiples of 128 x 128, got 64 x 128"),
        ({"head_dim": 36}, {}, "multiples of 16 bytes, got q at 16 n + 0"),
        ({}, {"dq": Operand((1, 4, 200, 64), (51200, 12800, 64, 1), 2, 2)}, "got dq at 16 n + 2"),
    ],
)
def test_what_it_does_not_take_goes_to_the_portable_form(
    options: dict[str, Any], changed: dict[str, Operand], reason: str
) -> None:
    head_dim = options.pop("head_dim", 64)
    plan = hopper_plan(call_of(200, 300, head_dim, **options), **changed)
    assert plan.form == "atomic" and plan.note.startswith("portable form: "), plan.note
    assert reason in plan.note
    assert {x.module.path.parent.name for x in plan.launches} == {"backward"}


def test_other_architectures_take_the_portable_form_without_a_word() -> None:
    plan = plan_of(call_of(200, 300), deterministic=False)
    assert (plan.form, plan.note) == ("atomic", "")


def test_explain_names_the_form() -> None:
    inputs = received(*normal((1, 1, 40, 64), (1, 1, 70, 64)))
    for deterministic, form in (
        (False, "sm90_atomic: blocks of"),
        (True, "sm90_deterministic: asked for; blocks of keys take turns"),
        (None, "sm90_deterministic: faster here; blocks of keys take turns"),
    ):
        text = explain_backward(
            *inputs, deterministic=deterministic, arch="sm_90a", backend="interpret"
        )
        assert text.startswith(form) and "backward/sm90/backward_keys.cu" in text


@pytest.mark.parametrize(
    ("head_dim", "len_kv", "causal", "form"),
    [
        (64, 511, False, "sm90_deterministic"), (64, 512, False, "sm90_atomic"),
        (40, 511, True, "sm90_deterministic"), (40, 512, True, "sm90_atomic"),
        (72, 4095, True, "sm90_deterministic"), (72, 4096, True, "sm90_atomic"),
        (128, 1024, False, "sm90_atomic"), (256, 50, False, "sm90_atomic"),
        (256, 4096, True, "sm90_deterministic"), (256, 4097, True, "sm90_atomic"),
    ],
)  # fmt: skip
def test_where_no_form_is_asked_for_the_faster_one_is_taken(
    head_dim: int, len_kv: int, causal: bool, form: str
) -> None:
    call = replace(call_of(2048, len_kv, head_dim, causal=causal), heads_kv=4)
    assert hopper_plan(call, deterministic=None).form == form


def test_causal_heads_that_share_keys_take_additions() -> None:
    shared = call_of(2048, 1024, 128, causal=True)
    calls = {"shared": shared, "own": replace(shared, heads_kv=shared.heads)}
    found = {x: hopper_plan(call, deterministic=None).form for x, call in calls.items()}
    assert found == {"shared": "sm90_atomic", "own": "sm90_deterministic"}


def test_sums_are_no_more_memory_than_a_tile_and_a_box_round_up_to() -> None:
    plan = hopper_plan(call_of(118_800, 118_800, 72))
    taken = {one.name: one.nbytes for one in plan.workspace}
    assert taken["dQ_sum"] == 4 * 4 * 118_912 * 128  # heads, bytes, rows, columns


# ---- in the interpreter --------------------------------------------------------------------------


def test_gradients_of_fewer_rows_are_within_their_bound() -> None:
    """It has the first of the problems below, whose rows do not depend on their number."""
    (d_out, q, k, v, o, lse), options = next(iter(revealing_hopper_backward()))
    inputs = (d_out[:, :, :200], q[:, :, :200], k, v, o[:, :, :200])
    few: Any = (*map(embedded, inputs), lse[..., :200])
    assert options == {"causal": True, "causal_align": "top-left"}
    run_backward(few, **interpreted_as("sm90_deterministic"), **options).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "form"),
    [
        *((number, form) for number in range(15) for form in HOPPER_FORMS),
        *((number, "sm90_deterministic") for number in range(15, 27)),
    ],
)
def test_gradients_are_within_their_bound(number: int, form: str) -> None:
    """Amid NaN: what lies outside of the arrays has no influence."""
    inputs, options = [*revealing_hopper_backward(), *revealing_wide_backward()][number]
    amid_nan: Any = (*map(embedded, inputs[:5]), inputs[5])
    run_backward(amid_nan, **interpreted_as(form), **options).check()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_explain_says_which_kernel_makes_the_gradient_of_a_bias(dtype: str) -> None:
    """Also that the bias is copied where the copy engine cannot move it."""
    options = {"bias": admitting((40, 70), dtype)}
    inputs = received(*normal((1, 1, 40, 64), (1, 1, 70, 64)), **options)
    text = explain_backward(*inputs, arch="sm_90a", backend="interpret", grad_bias=True, **options)
    assert "backward/sm90/backward_keys.cu" in text and "backward/backward_bias.cu" in text
    assert "note      the gradient of the bias comes from a portable kernel" in text
    assert "bias of shape (40, 70), copied into rows of whole 16 bytes" in text


@pytest.mark.parametrize(
    ("form", "shape", "dtype"),
    [
        ("sm90_atomic", (1, 2, 40, 70), "bfloat16"),
        *slow_rows((
            ("sm90_deterministic", (1, 2, 40, 70), "float16"),
            ("sm90_atomic", (70,), "float32"),
            ("sm90_deterministic", (1, 2, 40, 70), "float32"),
            ("sm90_deterministic", (1, 70), "bfloat16"),
        )),
    ],
)  # fmt: skip
def test_a_bias_of_every_kind(form: str, shape: tuple[int, ...], dtype: str) -> None:
    """One for each score, which masks all keys of a row, or one for all rows."""
    q, k, v = normal((1, 2, 40, 16), (1, 1, 70, 16))
    bias = admitting(shape, dtype)
    if shape[-2:] == (40, 70):
        bias[..., 3, :] = -np.inf
    inputs = received(q, k, v, bias=bias)
    run_backward(inputs, **interpreted_as(form), bias=bias).check()


def test_products_begin_at_a_large_delta() -> None:
    """Of an O that is larger than any mean of V: Delta is most of dP - Delta."""
    d_out, q, k, v, o, lse = received(*normal((1, 1, 70, 128), (1, 1, 140, 128), "bfloat16"))
    large = (o.astype(np.float32) * 1024).astype(o.dtype)
    for form in HOPPER_FORMS:
        run_backward((d_out, q, k, v, large, lse), **interpreted_as(form)).check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["even", "steps", "masked", "padded"])
def test_large_biases(kind: str) -> None:
    """Rows whose log-sum-exp is coarse, in the whole batch or in one entry."""
    inputs, options = biased(-1500, kind)  # in float16 these are whole numbers
    bias = options["bias"].astype(np.float16)
    for form in HOPPER_FORMS:
        run = run_backward(inputs, **interpreted_as(form), bias=bias)
        check(run.gradients, defined(inputs, bias.astype(np.float32)))


@pytest.mark.parametrize("form", HOPPER_FORMS)
def test_a_mask_and_a_softcap(form: str) -> None:
    """Each by itself and both; one mask for all heads and keys of an entry, one for each row."""
    q, k, v = normal((1, 1, 40, 16), (1, 1, 70, 16))
    for options in (
        {"mask": sparse((1, 1, 40, 70)), "softcap": 1.5},
        {"mask": sparse((40, 1))},
        {"softcap": 0.5, "causal": True},
    ):
        inputs = received(q, k, v, **options)
        run_backward(inputs, **interpreted_as(form), **options).check()
        plan = explain_backward(*inputs, arch="sm_90a", **options)
        assert plan.startswith("sm90") and ("pack_mask<<<" in plan) == ("mask" in options)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_with_a_softcap(head_dim: int) -> None:
    options = {"softcap": 2.0, **interpreted_as("sm90_deterministic")}
    for one in run_packed_backward(PACKED, head_dim=head_dim, **options):
        one.check()


#: Of calls past head_dim 128 with 40 query rows and 70 keys, with their dtype.
WIDE_SCORES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bfloat16", {"mask": sparse((1, 2, 40, 70)), "causal": True}),
    ("float16", {"mask": sparse((1, 70)), "window": (25, 5), "softcap": 1.5}),
    ("float16", {"bias": admitting((1, 2, 40, 70), "float16"), "causal": True}),
    ("bfloat16", {"bias": admitting((40, 70), "bfloat16"), "softcap": 1.5}),
    ("float16", {"bias": admitting((2, 40, 70), "float32")}),
    ("bfloat16", {"bias": admitting((2, 1, 70), "float32"), "mask": sparse((40, 70))}),
)


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_masks_and_biases_past_head_dim_128(number: int) -> None:
    """Within their bound amid NaN, into NaN, and with the same bits if warps run otherwise."""
    dtype, options = WIDE_SCORES[number]
    inputs = received(*normal((1, 2, 40, 136), (1, 1, 70, 136), dtype), **options)
    text = explain_backward(*inputs, arch="sm_90a", backend="interpret", **options)
    assert text.startswith("sm90_deterministic") and "backward_queries_wide" in text
    amid_nan: Any = (*map(embedded, inputs[:5]), inputs[5])
    one = run_backward(amid_nan, **interpreted_as("sm90_deterministic"), **options)
    one.check()
    padded = {n: in_whole_rows(x) if n == "bias" else x for n, x in options.items()}
    results = Gradients(*(np.full_like(x, np.nan) for x in inputs[1:4]))
    with interpret.schedule(3):
        run_into(inputs, results, deterministic=True, arch="sm_90a", **padded)
    assert [bits(x) for x in results] == [bits(x) for x in one.gradients]


@pytest.mark.parametrize("softcap", [1.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_nan_bias_of_an_excluded_key_has_no_influence(softcap: float) -> None:
    """Past head_dim 128: of keys that a causal mask or a mask excludes."""
    mask, bias = sparse((20, 30)), np.zeros((20, 30), np.float16)
    options: dict[str, Any] = {"softcap": softcap, "mask": mask, "causal": True}
    inputs = received(*normal((1, 1, 20, 136), (1, 1, 30, 136)), bias=bias, **options)
    found = []
    for fill in (0.0, np.nan):
        filled = np.where(mask & np.tri(20, 30, 10, bool), bias, np.float16(fill))
        one = run_backward(inputs, **interpreted_as("sm90_deterministic"), bias=filled, **options)
        found.append([bits(x) for x in one.gradients])
    assert found[0] == found[1]


def in_whole_rows(bias: np.ndarray) -> np.ndarray:
    """Return a bias in memory whose rows begin at multiples of 16 bytes, NaN between them."""
    memory = np.full((*bias.shape[:-1], bias.shape[-1] + 10), np.nan, bias.dtype)
    memory[..., : bias.shape[-1]] = bias
    return memory[..., : bias.shape[-1]]


@pytest.mark.slow
def test_large_products_with_a_mask() -> None:
    """Coarse rows are normalised over the keys that the mask leaves."""
    inputs = large_products(64)
    mask = sparse((1, 1, 70, 150))
    d_out, q, k, v, *_ = inputs
    masked = received(q, k, v, scale=1 / 8, mask=mask)
    for form in HOPPER_FORMS:
        run = run_backward((d_out, *masked[1:]), scale=1 / 8, mask=mask, **interpreted_as(form))
        bias = np.where(mask, 0.0, -np.inf).astype(np.float32)
        check(run.gradients, defined((d_out, *masked[1:]), bias, scale=1 / 8), columns=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "len_q", "len_kv"), [(0, 1, 1), (1, 129, 127), (2, 64, 257)]
)  # fmt: skip
def test_lengths_around_the_edges_of_tiles(number: int, len_q: int, len_kv: int) -> None:
    """Each form takes each length and each head size, and every second one of both together."""
    for other, head_dim in enumerate((64, 80, 136)):
        inputs = received(*normal((1, 1, len_q, head_dim), (1, 1, len_kv, head_dim), "bfloat16"))
        form = tuple(HOPPER_FORMS)[(number + other) % len(HOPPER_FORMS)]
        run_backward(inputs, **interpreted_as(form)).check()


@pytest.mark.slow
def test_dk_and_dv_of_both_forms_have_the_same_bits() -> None:
    """Turns are taken at dQ alone."""
    inputs = received(*normal((1, 2, 140, 64), (1, 1, 100, 64)))
    atomic, deterministic = (
        run_backward(inputs, **interpreted_as(form)).gradients for form in HOPPER_FORMS
    )
    assert bits(atomic.dk) == bits(deterministic.dk) and bits(atomic.dv) == bits(deterministic.dv)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        pytest.param({"window": (0, 5), "causal_align": "top-left"}, marks=pytest.mark.slow),
        pytest.param(
            {"block_mask": BlockMask(np.array([[1], [0], [1]], bool)[None, None], 128, 128)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rows_without_keys_have_no_gradient(options: dict[str, Any]) -> None:
    """No block of keys comes by them, and yet their dQ is written: there was NaN."""
    inputs = received(*normal((1, 2, 330, 64), (1, 1, 60, 64)), **options)
    results = Gradients(*(np.full_like(x, np.nan) for x in inputs[1:4]))
    run_into(inputs, results, deterministic=True, arch="sm_90a", **options)
    BackwardRun(inputs, options, results).check()
    without = np.isneginf(inputs[5])
    assert without.sum() >= 2 * 128 and not np.asarray(results.dq, np.float32)[without].any()


@pytest.mark.slow
def test_keys_that_no_row_attends_to_have_no_gradient() -> None:
    """A block of keys without a step waits for no copy, and none is begun for it."""
    inputs = received(*normal((1, 1, 5, 64), (1, 1, 300, 64)), window=(2, 0))
    for form in HOPPER_FORMS:
        one = run_backward(inputs, **interpreted_as(form), window=(2, 0))
        one.check()
        assert not np.asarray(one.gradients.dk, np.float32)[:, :, :256].any()


@pytest.mark.parametrize(
    ("head_dim", "form", "of_scores"),
    [
        (72, "sm90_atomic", ""),
        *slow_rows((
            (72, "sm90_deterministic", ""), (256, "sm90_deterministic", ""),
            (64, "sm90_atomic", "bias"), (128, "sm90_atomic", "bias"),
            (256, "sm90_deterministic", "bias"), (256, "sm90_deterministic", "mask"),
        )),
    ],
)  # fmt: skip
def test_shared_memory_has_no_bank_conflicts(head_dim: int, form: str, of_scores: str) -> None:
    made = {"bias": admitting((130, 70), "float16"), "mask": sparse((130, 70))}
    options = {name: x for name, x in made.items() if name == of_scores}
    profile = interpret.Profile()
    with interpret.observe(profile):
        inputs = received(*normal((1, 1, 130, head_dim), (1, 1, 70, head_dim)), **options)
        run_backward(inputs, **interpreted_as(form), **options)
    past_128 = "_wide" if of_scores else "_pair"
    kernel = "backward_keys" + (past_128 if head_dim > SUMMED else "")
    assert profile.excess == 0 and kernel in profile.kernels


#: Lengths of q and k: one without rows, one without keys, one longer than a block of either.
PACKED = ((5, 9), (0, 20), (150, 140), (7, 0), (40, 70))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "head_dim"),
    [("sm90_atomic", 72), ("sm90_deterministic", 64), ("sm90_deterministic", 192)],
)
def test_packed_sequences_are_within_their_bound(form: str, head_dim: int) -> None:
    runs = list(
        run_packed_backward(
            PACKED, head_dim=head_dim, **interpreted_as(form), causal=True, window=(60, -1)
        )
    )
    assert len(runs) == len(PACKED)
    for one in runs:
        one.check()


#: Kinds of a bias of packed sequences: head_dim, shape behind the heads, dtype, softcap, form.
PACKED_BIASES = (
    (64, True, "float16", 0.0, "sm90_atomic"), (128, True, "bfloat16", 1.5, "sm90_deterministic"),
    (192, True, "float16", 1.5, "sm90_deterministic"), (72, True, "float32", 0.0, "sm90_atomic"),
    (192, False, "float32", 0.0, "sm90_deterministic"), (64, False, "float16", 1.5, "sm90_atomic"),
)  # fmt: skip


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_packed_sequences_take_the_corners_of_a_bias(number: int) -> None:
    """Each its own; past its end there is NaN."""
    for one in runs_with_a_packed_bias(number):
        one.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "line", "mistake"),
    [
        (0, "if constexpr (BIAS_OF_OTHERS) placed &= q0 + BLOCK_Q <= p.len_q;", ""),
        (2, "if constexpr (BIAS_OF_OTHERS) bits[h] &= bits_below(p.len_q - row);", ""),
        (1, "BIAS_OF_OTHERS ? biased_capped(S, bias)", "false ? 0.0f"),
    ],
)
def test_the_bias_of_a_longer_sequence_is_noticed(
    number: int, line: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = "backward/sm90/backward_keys"
    file = (f"{keys}.cu", "prims/score/gradient_bias.cuh", f"{keys}_wide.cu")[number]
    put_a_line_in_place(file, line, mistake, tmp_path, monkeypatch)
    assert not all(one.judge().passed for one in runs_with_a_packed_bias(number))


def packed_bias(number: int) -> tuple[tuple[tuple[int, int], ...], int, str, dict[str, Any]]:
    """Return lengths, head_dim, form and options of a call; behind each sequence NaN biases it."""
    head_dim, of_rows, dtype, softcap, form = PACKED_BIASES[number]
    lengths = PACKED if number else ((5, 30), (0, 20), (40, 70))
    len_q, len_k = (max(x) for x in zip(*lengths, strict=True))
    bias = admitting((len(lengths), 4, len_q if of_rows else 1, len_k), dtype)
    for one, (rows, keys) in zip(bias, lengths, strict=True):
        one[:, rows if of_rows else 1 :] = one[..., keys:] = np.nan
    options = {"bias": bias, "softcap": softcap, "causal": bool(number % 2)}
    return lengths, head_dim, form, options


def runs_with_a_packed_bias(number: int) -> Iterator[BackwardRun]:
    lengths, head_dim, form, options = packed_bias(number)
    return run_packed_backward(lengths, head_dim=head_dim, **interpreted_as(form), **options)


def with_a_sequence_of(fill: float, form: str, head_dim: int = 64) -> list[bytes]:
    """Gradients of the first of two packed sequences, the other one filled."""
    (q, k, v), ends = packed(((40, 70), (30, 90)), 2, 1, head_dim)
    out, lse = attention_varlen(q, k, v, *ends, variant="fa_tc", return_lse=True, backend="mirror")
    d_out = (q * 0.5 + out).astype(q.dtype)
    for x, where in ((q, ends[0]), (k, ends[1]), (v, ends[1]), (d_out, ends[0])):
        x[where[1] :] = fill
    found = attention_varlen_backward(d_out, q, k, v, out, lse, *ends, **interpreted_as(form))
    lengths = (ends[0], ends[1], ends[1])
    return [
        bits(np.ascontiguousarray(x[slice(*next(pairwise(where)))]))
        for x, where in zip(found, lengths, strict=True)
    ]


@cache
def with_zeros(form: str, head_dim: int) -> list[bytes]:
    return with_a_sequence_of(0.0, form, head_dim)


@pytest.mark.parametrize(
    ("form", "head_dim"),
    slow_rows((("sm90_deterministic", 64), ("sm90_atomic", 64), ("sm90_deterministic", 136))),
)
def test_a_nan_of_the_next_sequence_has_no_influence(form: str, head_dim: int) -> None:
    """The copy engine brings its rows, too."""
    assert with_a_sequence_of(np.nan, form, head_dim) == with_zeros(form, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("backward/sm90/backward_keys.cu", "<CONSUMER_THREADS>(smem.V, keys, BLOCK_KV);"),
        ("backward/sm90/backward_keys.cu", "<CONSUMER_THREADS>(smem.dO[at.stage], rows, BLOCK_Q);"),
        (
            "backward/sm90/backward_keys_wide.cu",
            "<CONSUMER_THREADS>(smem.Q[next_at.stage], rows, BLOCK_Q);",
        ),
        ("backward/sm90/backward_queries_wide.cu", "<WARPGROUP>(smem.V[own], rows, BLOCK_KV);"),
    ],
)
def test_without_zeros_a_nan_of_the_next_sequence_would(
    file: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = "sm90_atomic" if file == "backward/sm90/backward_keys.cu" else "sm90_deterministic"
    head_dim = 136 if "_wide" in file else 64
    clean = with_zeros(form, head_dim)
    put_a_line_in_place(file, f"      zero_rows{line}\n", "", tmp_path, monkeypatch)
    assert with_a_sequence_of(np.nan, form, head_dim) != clean
