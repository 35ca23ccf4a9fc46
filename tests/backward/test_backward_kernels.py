"""The backward kernels: compiled for every architecture, and run in the interpreter."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import interpret
from cupyattn.arrays import memory
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import devices, target
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.gradients import Gradients
from cupyattn.plans.backward import ROW_PAD, BackwardOperands, plan_backward
from cupyattn.plans.records import Plan
from cupyattn.problem.backward_form import settle_backward
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.checks import AttentionSpec, Packed
from cupyattn.problem.settings import check_attention
from cupyattn.reference.attention import attention_mirror
from tests.backward.backward_cases import (
    FORMS,
    BackwardRun,
    Received,
    received,
    revealing_backward,
    run_backward,
    run_packed_backward,
)
from tests.support.runs import ADDED, Guarded, bits, embedded, normal

SOURCES = sorted(kc.KERNELS.rglob("backward_*.cu"))
SMALLEST_LIMIT = 99 * 1024


def call_of(len_q: int, len_kv: int, head_dim: int = 64, **options: Any) -> AttentionSpec:
    """A call of four heads that share two key heads, its arrays never made."""
    sizes = (1, 4, 2, len_q, len_kv, head_dim)
    options = {"dtype": "float16", "causal": False, "causal_shift": 0, **options}
    return AttentionSpec(*sizes, scale=0.125, return_lse=True, **options)


def operands_of(call: AttentionSpec, **of_bias: Any) -> BackwardOperands:
    q = Operand.contiguous((call.batch, call.heads, call.len_q, call.head_dim), 2)
    k = Operand.contiguous((call.batch, call.heads_kv, call.len_kv, call.head_dim), 2)
    kept = None if call.block_mask == (0, 0) else Operand.contiguous((1, 1, 5, 6), 4)
    bias = Operand.contiguous(call.score_shape, 4) if call.bias else None
    return BackwardOperands(
        q, k, k, q, q, q, k, k, bias=bias, kept_blocks=kept, kept_rows=kept, **of_bias
    )


def plan_of(call: AttentionSpec, *, deterministic: bool) -> Plan:
    operands = operands_of(call)
    settled = settle_backward(call, vars(operands), deterministic=deterministic)
    return plan_backward(settled, operands)


# ---- what is compiled ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "dtype", "features"),
    [
        (128, "float16", {"causal": True}),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                (64, "float16", {"causal": True}),
                (128, "bfloat16", {"causal": True, "packed": Packed(900, 900, True)}),
                (128, "float16", {"block_mask": (64, 64), "window": True}),
                (256, "bfloat16", {"causal": False}),
                (7, "float16", {"causal": True}),
            )
        ),
    ],
)
def test_kernels_spill_nothing_and_fit_in_shared_memory(
    head_dim: int, dtype: str, features: dict[str, Any]
) -> None:
    call = call_of(200, 300, head_dim, **{"causal": False, **features}, dtype=dtype)
    specs = {
        launch.module: launch.entry
        for deterministic in (False, True)
        for launch in plan_of(call, deterministic=deterministic).launches
    }
    assert len(specs) == 6
    for module, entry in specs.items():
        binary = kc.build(module, "sm_80")
        taken = binary.kernels[entry]
        assert (taken.spill_stores, taken.spill_loads) == (0, 0), f"{module}: {taken}"
        devices.check_shared_memory(binary.smem_bytes, SMALLEST_LIMIT, entry)


@pytest.mark.parametrize("arch", ["sm_120", pytest.param("sm_90", marks=pytest.mark.slow)])
def test_kernels_compile_for_other_architectures(arch: str) -> None:
    if arch not in target.supported_architectures():
        pytest.skip(f"this NVRTC does not know {arch}")
    (_, _, launch, _) = plan_of(call_of(200, 300, 40), deterministic=False).launches
    assert launch.entry in kc.build(launch.module, arch).kernels


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_header_is_a_lab_notebook_whose_tags_are_those_of_the_body(path: Path) -> None:
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    header, body = "\n".join(lines[:end]), "\n".join(lines[end:])
    assert header.startswith(f"// {path.stem} -- ")
    places = [header.find(title) for title in ("Idea ", "Kept simple ", "Rounding ", "Mirror ")]
    assert -1 not in places and places == sorted(places)
    told = set(re.findall(r"R\d+", header[places[2] : places[3]]))
    in_body = set(re.findall(r"R\d+", " ".join(re.findall(r"//[^\n]*", body))))
    # R9 of the weights is in prims/score/gradient.cuh.
    assert told - {"R9"} == in_body - {"R9"}
    assert f"void {path.stem}(" in body


# ---- what is planned -----------------------------------------------------------------------------


def test_the_forms_launch_different_kernels() -> None:
    names = {
        form: [x.entry for x in plan_of(call_of(70, 80), deterministic=deterministic).launches]
        for form, deterministic in FORMS.items()
    }
    assert names == {
        "atomic": ["backward_delta", "backward_coarse", "backward_keys", "backward_sums"],
        "deterministic": ["backward_delta", "backward_coarse", "backward_keys", "backward_queries"],
    }
    assert "deterministic" in str(plan_of(call_of(70, 80), deterministic=True))


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    """A video of 118,800 tokens: 12.25 bytes a row beside the operands, and dQ in float32."""
    length, head_dim = 118_800, 128
    call = call_of(length, length, head_dim)
    rows = 4 * -(-length // ROW_PAD) * ROW_PAD
    for form, deterministic in FORMS.items():
        nbytes = sum(w.nbytes for w in plan_of(call, deterministic=deterministic).workspace)
        assert nbytes == 12.25 * rows + (4 * 4 * length * head_dim if form == "atomic" else 0)


def test_a_grid_past_what_a_launch_takes_is_told() -> None:
    call = call_of(2**30, 2**30)
    with pytest.raises(UnsupportedError, match="backward_delta takes .* blocks, more than"):
        plan_of(replace(call, heads=2**10), deterministic=True)


#: The cases of `revealing_backward` that are interpreted in every run of the tests.
AT_ONCE = (
    (0, "atomic"), (3, "atomic"), (4, "deterministic"), (6, "atomic"), (7, "atomic"),
    (8, "deterministic"),
)  # fmt: skip

# ---- in the interpreter --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "form"),
    [
        pytest.param(number, form, marks=[] if (number, form) in AT_ONCE else [pytest.mark.slow])
        for number in range(9)
        for form in FORMS
    ],
)
def test_gradients_are_within_their_bound(number: int, form: str) -> None:
    """Amid NaN: what lies outside of the arrays has no influence."""
    inputs, options = list(revealing_backward())[number]
    amid_nan: Any = (*map(embedded, inputs[:5]), inputs[5])
    one = run_backward(amid_nan, deterministic=FORMS[form], backend="interpret", **options)
    one.check()


@pytest.mark.parametrize(
    ("head_dim", "dtype", "form"),
    [
        (5, "bfloat16", "atomic"),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                (64, "float16", "deterministic"), (72, "bfloat16", "atomic"),
                (160, "float16", "atomic"), (256, "bfloat16", "deterministic"),
            )
        ),
    ],
)  # fmt: skip
def test_every_head_size_is_within_its_bound(head_dim: int, dtype: str, form: str) -> None:
    q, k, v = normal((1, 2, 35, head_dim), (1, 1, 70, head_dim), dtype)
    inputs = received(q, k, v, causal=True)
    one = run_backward(inputs, deterministic=FORMS[form], backend="interpret", causal=True)
    one.check()


@pytest.mark.parametrize("form", ["atomic", pytest.param("deterministic", marks=pytest.mark.slow)])
def test_shared_memory_has_no_bank_conflicts(form: str) -> None:
    profile = interpret.Profile()
    with interpret.observe(profile):
        inputs = received(*normal((1, 1, 40, 64), (1, 1, 70, 64)))
        run_backward(inputs, deterministic=FORMS[form], backend="interpret")
    assert profile.excess == 0 and "backward_keys" in profile.kernels


def run_into(
    inputs: Received,
    results: Gradients,
    *,
    deterministic: bool,
    arch: str | None = None,
    **options: Any,
) -> None:
    """Plan and run by hand, into the arrays given."""
    names = ("d_out", "q", "k", "v", "o", "lse")
    buffers = {n: memory.as_input(x) for n, x in zip(names, inputs, strict=True)}
    call = check_attention(*inputs[1:4], return_lse=True, **options)
    if (block_mask := options.get("block_mask")) is not None:
        buffers["kept_blocks"] = block_mask.kept_blocks(inputs[1])
        buffers["kept_rows"] = block_mask.transposed.kept_blocks(inputs[1])
    for name in ADDED:
        if name in options:
            buffers[name] = np.broadcast_to(options[name], call.score_shape)
    arrays = {**buffers, **results._asdict()}
    operands = BackwardOperands(**{n: Operand.of(x) for n, x in arrays.items() if n != "lse"})
    settled = settle_backward(call, vars(operands), deterministic=deterministic, arch=arch)
    plan = plan_backward(settled, operands)
    interpret.run(plan, arrays, arch)


@pytest.mark.parametrize("form", FORMS)
def test_results_are_written_in_full_and_nothing_beside_them(form: str) -> None:
    """Into NaN amid NaN; and the log-sum-exps of rows without keys are -inf, their gradients 0."""
    inputs = received(*normal((1, 2, 37, 32), (1, 1, 21, 32)), causal=True)
    assert np.isneginf(inputs[5]).sum() == 2 * 16
    guarded = [Guarded.empty(x.shape, "float16") for x in inputs[1:4]]
    results = Gradients(*(x.array for x in guarded))
    run_into(inputs, results, deterministic=FORMS[form], causal=True)
    for one in guarded:
        one.check()
    assert not as_float64(results.dq)[:, :, :16].any()
    BackwardRun(inputs, {"causal": True}, results).check()


def test_dk_and_dv_of_both_forms_have_the_same_bits_and_the_inputs_are_left_alone() -> None:
    inputs, options = next(iter(revealing_backward()))
    before = [bits(x) for x in inputs]
    atomic, deterministic = (
        run_backward(inputs, deterministic=form, backend="interpret", **options).gradients
        for form in (False, True)
    )
    assert bits(atomic.dk) == bits(deterministic.dk) and bits(atomic.dv) == bits(deterministic.dv)
    assert before == [bits(x) for x in inputs]


def test_keys_that_no_row_attends_to_have_no_gradient() -> None:
    inputs = received(*normal((1, 1, 5, 16), (1, 1, 150, 16)), window=(2, 0))
    one = run_backward(inputs, backend="interpret", window=(2, 0))
    one.check()
    assert not as_float64(one.gradients.dk)[:, :, :140].any()
    assert one.gradients.dq.dtype == STORAGE["float16"]


#: Lengths of q and k: one without rows, one without keys, one longer than a block of either.
PACKED = ((5, 9), (0, 20), (150, 140), (7, 0), (40, 70))


@pytest.mark.parametrize(
    ("form", "backend"),
    [
        ("atomic", "mirror"), ("deterministic", "interpret"),
        pytest.param("atomic", "interpret", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_packed_sequences_are_within_their_bound(form: str, backend: str) -> None:
    found = run_packed_backward(
        PACKED, deterministic=FORMS[form], backend=backend, causal=True, window=(60, -1),
        of_lse=form == "deterministic",
    )
    runs = list(found)
    assert len(runs) == len(PACKED)
    for one in runs:
        one.check()


@pytest.mark.slow
def test_a_packed_sequence_has_the_bits_of_a_call_of_its_own() -> None:
    *_, last = run_packed_backward(PACKED[:3], backend="interpret", causal=True, deterministic=True)
    alone = run_backward(last.received, backend="interpret", causal=True, deterministic=True)
    assert [bits(x) for x in last.gradients] == [bits(x) for x in alone.gradients]


@pytest.mark.slow
def test_packed_sequences_take_the_corners_of_masks_and_biases() -> None:
    rng = np.random.default_rng(0)
    shape = (len(PACKED), 4, 150, 140)
    options = {"mask": rng.random(shape) < 0.8, "softcap": 2.0}
    options |= {"bias": rng.standard_normal(shape).astype(np.float32), "grad_bias": True}
    for one in run_packed_backward(PACKED, backend="interpret", **options):
        one.check()


@pytest.mark.parametrize("form", FORMS)
def test_what_a_block_mask_drops_is_not_read(form: str) -> None:
    """NaN in rows and in keys whose blocks are dropped changes no bit, and has no gradient."""
    d_out, q, k, v, out, lse = received(*normal((1, 2, 130, 16), (1, 1, 140, 16)))
    mask = np.ones((1, 1, 3, 3), bool)
    mask[..., 1, :] = mask[..., :, 0] = False
    options = {"block_mask": BlockMask(mask, 64, 64)}
    out, lse = attention_mirror(q, k, v, variant="fa_tc", return_lse=True, **options)
    found = []
    for fill in (np.nan, 0.0):
        rows, keys = ([x.copy() for x in some] for some in ((d_out, q), (k, v)))
        for x in rows:
            x[:, :, 64:128] = fill
        for x in keys:
            x[:, :, :64] = fill
        inputs = (*rows, *keys, out, lse)
        one = run_backward(inputs, deterministic=FORMS[form], backend="interpret", **options)
        found.append([bits(x) for x in one.gradients])
    assert found[0] == found[1]
    assert not as_float64(one.gradients.dq)[:, :, 64:128].any()
    assert not as_float64(one.gradients.dk)[:, :, :64].any()


def test_packed_sequences_take_the_corners_of_block_masks() -> None:
    rng = np.random.default_rng(0)
    options = {"block_mask": BlockMask(rng.random((len(PACKED), 4, 3, 3)) < 0.6, 64, 64)}
    for one in run_packed_backward(PACKED, backend="interpret", **options):
        one.check()
