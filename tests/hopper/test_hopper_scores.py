"""Softcap, bias and masks in the Hopper form of fa_tc, in the interpreter and on the mirror."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyattn import (
    BlockMask,
    attention,
    attention_varlen,
    bounds,
    interpret,
    kernel_form,
    quantize,
)
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.compiler import modules as compiler
from cupyattn.kernels.softcap import LARGEST_Y, SOFTCAP_ERROR
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from cupyattn.plans.records import Plan
from cupyattn.reference.exact import attention_exact
from cupyattn.reference.rounding import small_and_large_softcap
from cupyattn.testing import judge
from tests.faults.fault_patches import put_a_line_in_place
from tests.support import runs
from tests.support.marks import slow_unless
from tests.support.runs import Arrays, bits, normal, packed

RUNG = "fa_tc@sm90"
#: Two tiles of rows and three of keys, both with tails; keys of a bias are whole 16 bytes.
LEN_Q, LEN_KV = 200, 264


def arrays(dtype: str = "float16", head_dim: int = 64, heads_kv: int = 1) -> Arrays:
    return normal((1, 2, LEN_Q, head_dim), (1, heads_kv, LEN_KV, head_dim), dtype)


def run(inputs: Arrays, *, backend: str = "interpret", **options: Any) -> runs.Run:
    one = runs.run(RUNG, inputs, arch="sm_90a", backend=backend, **options)
    assert one.form == "sm90"
    return one


def planned(inputs: Arrays | None = None, **options: Any) -> Plan:
    asked = {"variant": "fa_tc", "arch": "sm_90a", "backend": "interpret", **options}
    return explain.plans(resolved(*(inputs or arrays()), **asked))[-1]


def row_mask() -> np.ndarray:
    """A full tile, an empty one and mixed ones; rows without a key, and with one."""
    mask = np.random.default_rng(1).random((1, 1, LEN_Q, LEN_KV)) < 0.5
    mask[..., :192, :128] = True
    mask[..., :192, 128:256] = False
    mask[..., 192:, :128] = False
    mask[..., 5, :] = False
    mask[..., 7, :] = False
    mask[..., 7, 259] = True
    return mask


def key_mask() -> np.ndarray:
    mask = np.ones((1, 1, 1, LEN_KV), bool)
    mask[..., 100:140] = mask[..., 190:] = False
    return mask


def bias_of(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    """N(0, 9), some of it -inf, amid NaN."""
    rng = np.random.default_rng(2)
    bias = 3 * rng.standard_normal(shape)
    bias[rng.random(shape) < 0.05] = -np.inf
    return runs.embedded(bias.astype(dtype), pad=8)


def dense(dtype: Any = np.float16) -> np.ndarray:
    return bias_of(2, LEN_Q, LEN_KV, dtype=dtype)


BFLOAT16 = ml_dtypes.bfloat16
QUICK: list[dict[str, Any]] = [
    {"softcap": 2.5, "causal": True},
    {"mask": row_mask()},
    {"mask": key_mask(), "window": (100, 20)},
    {"bias": dense(), "causal": True},
    {"softcap": 20.0, "bias": dense(BFLOAT16), "mask": row_mask()},
    {"bias": dense(np.float32), "window": (100, 40)},
]
SLOW: list[dict[str, Any]] = [
    {"softcap": 2.5}, {"softcap": 30.0, "window": (50, 30)}, {"mask": key_mask()},
    {"mask": row_mask(), "causal": True}, {"mask": row_mask(), "window": (90, -1)},
    {"bias": bias_of(1, LEN_KV)}, {"bias": bias_of(1, LEN_KV), "mask": key_mask()},
    {"bias": bias_of(2, LEN_Q, 1, dtype=np.float32)},
    {"bias": bias_of(1, LEN_Q, 1), "mask": row_mask(), "softcap": 9.0},
    {"bias": dense(BFLOAT16), "window": (9, 70)},
    {"bias": dense(np.float32), "mask": row_mask(), "softcap": 9.0},
    {"bias": bias_of(1, LEN_KV, dtype=np.float32), "causal": True},
    {"bias": dense(np.float32),
     "block_mask": BlockMask(np.array([[1, 0, 1], [0, 1, 1]], bool)[None, None], 128, 128)},
    {"mask": row_mask(), "block_mask": BlockMask(np.array([[1, 0, 1], [0, 1, 1]], bool)[None, None],
                                                 128, 128)},
    {"mask": key_mask(), "causal": True,
     "block_mask": BlockMask(np.array([[[1, 0, 1, 1, 1], [0, 1, 1, 0, 1]],
                                       [[0, 0, 0, 0, 0], [1, 1, 0, 1, 1]]], bool)[None], 128, 64)},
    {"bias": dense(), "softcap": 5.0,
     "block_mask": BlockMask(np.array([[1, 0, 1], [0, 1, 1]], bool)[None, None], 128, 128)},
]  # fmt: skip


# ---- judged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", QUICK, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("backend", ["interpret", "mirror"])
def test_the_judgements_hold(backend: str, options: dict[str, Any]) -> None:
    one = run(arrays(), backend=backend, **options)
    one.check()
    if "mask" in options and options["mask"].shape[2] > 1:
        assert (one.o[:, :, 5] == 0).all() and (one.lse[:, :, 5] == -np.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "options"), [((64, 128)[i % 2], options) for i, options in enumerate(SLOW)]
)
def test_they_hold_together(head_dim: int, options: dict[str, Any]) -> None:
    run(arrays("bfloat16", head_dim, heads_kv=2), **options).check()


@pytest.mark.parametrize(
    "left_out",
    [{"block_mask": BlockMask(np.zeros((1, 1, 1, 5), bool), 128, 128)}, {"window": (9, 9)}],
    ids=lambda options: "-".join(options),
)
def test_steps_read_behind_a_list_of_none_are_written(left_out: dict[str, Any]) -> None:
    """The interpreter reports a read of memory that no pass wrote."""
    inputs = normal((1, 1, 64, 64), (1, 1, 640, 64))
    mask = np.ones((1, 1, 1, 640), bool)
    if "window" in left_out:
        mask[..., 128:] = False  # queries are at the end of the keys
    one = run(inputs, mask=mask, **left_out)
    assert not one.o.any() and np.isneginf(one.lse).all()


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [80, 160, 256])
@pytest.mark.parametrize("options", QUICK, ids=lambda options: "-".join(options))
def test_they_hold_at_other_head_sizes(head_dim: int, options: dict[str, Any]) -> None:
    inputs = arrays("bfloat16", head_dim)
    if head_dim == 256 and {"mask", "bias"} <= set(options):
        assert "mask and bias together up to head_dim 192" in planned(inputs, **options).note
    elif head_dim == 256 and "bias" in options and options["bias"].dtype == np.float32:
        reason = "takes a float32 bias up to head_dim 192, got 256: convert it to 16 bits"
        assert reason in planned(inputs, **options).note
    else:
        run(inputs, **options).check()


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sequences_that_are_packed(bias: bool) -> None:
    """Numbers past the end of a sequence, in mask and bias too, change no bit."""
    inputs, ends = packed(((60, 70), (37, 100), (0, 9), (150, 0)), 2, 1, 64)
    rng = np.random.default_rng(3)
    options: dict[str, Any] = {"mask": rng.random((4, 1, 150, 104)) < 0.6, "max_len_k": 104}
    if bias:
        options = {"bias": bias_of(4, 1, 150, 104), "softcap": 8.0, "max_len_k": 104}
    given = {"variant": "fa_tc", "arch": "sm_90a", "backend": "interpret"}
    found = []
    for spoilt in (False, True):
        if spoilt:
            changed = {n: x.copy() for n, x in options.items() if n in ("mask", "bias")}
            for name, x in changed.items():
                for i, (rows, keys) in enumerate(((60, 70), (37, 100), (0, 9), (150, 0))):
                    x[i, :, rows:] = x[i, :, :, keys:] = False if name == "mask" else np.nan
            options |= changed
        o, lse = attention_varlen(*inputs, *ends, return_lse=True, **given, **options)
        found.append((bits(o), bits(lse)))
    assert found[0] == found[1]
    name = "bias" if bias else "mask"
    for i, (rows, one) in enumerate(runs.sequences(inputs, ends)):
        len_q, len_kv = one[0].shape[2], one[1].shape[2]
        own = {name: options[name][i : i + 1, :, :len_q, :len_kv]}
        expected = attention_exact(*one, softcap=options.get("softcap", 0.0), **own)
        np.testing.assert_allclose(
            o[rows].astype(float), expected[0].swapaxes(0, 1), rtol=0, atol=4e-3
        )


# ---- exact ---------------------------------------------------------------------------------------


def counted() -> tuple[Arrays, np.ndarray, np.ndarray]:
    """Operands whose scores are 0, a mask of as many keys as a power of two, and O."""
    q, k, v = arrays()
    q[:] = 0
    v[:] = np.random.default_rng(4).integers(-8, 9, v.shape)
    mask = np.zeros((1, 1, LEN_Q, LEN_KV), bool)
    for i, row in enumerate(mask[0, 0]):
        row[np.random.default_rng(i).permutation(LEN_KV)[: 2 ** (i % 9)]] = True
    expected = mask.astype(float) @ v.astype(float) / mask.sum(axis=-1, keepdims=True)
    return (q, k, v), mask, expected.repeat(2, 1).astype(np.float16)


@pytest.mark.parametrize(
    ("kind", "softcap"),
    [("mask", 0.0), ("bias", 3.0), pytest.param("bias", 0.0, marks=pytest.mark.slow)],
)
def test_counts_come_out_exact(kind: str, softcap: float) -> None:
    """Scores of 0, as many keys as a power of two, whole values: no rounding but the last."""
    operands, mask, expected = counted()
    bias = np.where(mask, np.float16(0), np.float16(-np.inf))
    one = run(operands, softcap=softcap, **({"mask": mask} if kind == "mask" else {"bias": bias}))
    assert bits(one.o) == bits(expected)


def test_a_bias_chooses_a_key() -> None:
    q, k, v = arrays()
    key = np.random.default_rng(5).integers(0, LEN_KV, LEN_Q)
    bias = np.zeros((1, 1, LEN_Q, LEN_KV), np.float16)
    bias[0, 0, np.arange(LEN_Q), key] = 1000
    assert bits(run((q, k, v), bias=bias).o) == bits(v[:, :, key].repeat(2, 1))


@pytest.mark.slow
def test_what_is_masked_has_no_influence() -> None:
    """NaN in keys that mask or bias keep out, and in values of steps that no row takes."""
    mask = row_mask()
    mask[..., 130] = mask[..., 17] = False
    clean = [run(arrays(), mask=mask)]
    bias = dense()
    bias[..., 17] = bias[..., 130] = -np.inf
    clean.append(run(arrays(), bias=bias))
    for one, options in zip(clean, ({"mask": mask}, {"bias": bias}), strict=True):
        q, k, v = (x.copy() for x in arrays())
        k[:, :, 17], k[:, :, 130] = np.nan, np.inf
        other = run((q, k, v), **options)
        assert bits(one.o) == bits(other.o) and bits(one.lse) == bits(other.lse)
    empty = np.zeros((1, 1, LEN_Q, LEN_KV), bool)
    empty[..., :128] = True
    q, k, v = (x.copy() for x in arrays())
    v[:, :, 128:] = np.nan
    for backend in ("interpret", "mirror"):
        one = run((q, k, v), mask=empty, backend=backend)
        assert np.isfinite(one.o.astype(float)).all()


def test_a_very_negative_bias_masks() -> None:
    """In whole steps too, over which M is coarse; a row of nothing else gets some finite mean."""
    bias = np.zeros((1, 1, LEN_Q, LEN_KV), BFLOAT16)
    bias[..., :200] = bias[:, :, 7] = -1e9
    inputs = arrays("bfloat16")
    one = run(inputs, bias=bias)
    one.check()
    assert np.isfinite(one.o.astype(float)).all()
    bound = bounds.attention(
        *inputs, variant="fa_tc", form="sm90", tiles=planned(inputs, bias=bias).tiles, bias=bias,
        rows=np.array([6, 8]),
    )  # fmt: skip
    assert (bound.total < 0.1).all()


@pytest.mark.parametrize("backend", ["interpret", "mirror"])
@pytest.mark.parametrize(
    ("variant", "scale", "units"),
    [("fa_tc", 0.125, 0.125), ("fa_tc", 2.0, math.log(2)), ("fa_int8", 0.125, math.log(2))],
)
def test_a_bias_whose_product_overflows_counts_as_minus_infinity(
    variant: str, scale: float, units: float, backend: str
) -> None:
    """Times 1/scale or log2(e): rows of nothing else are zeros, and have no bound."""
    inputs = normal((1, 1, 6, 64), (1, 1, 72, 64), "bfloat16")
    limit = np.float32(-units * float(np.finfo(np.float32).max))
    kept, lost = (limit.view(np.uint32) >> 16 << 16) + np.array([0, 1 << 16], np.uint32)
    bias = np.zeros((1, 1, 6, 72), np.float32)
    bias[..., 1, :], bias[..., 2, :], bias[..., 3, :] = kept.view("f4"), lost.view("f4"), -1e4
    bias[..., 4, :] = float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)
    bias[..., 4, 7] = 0
    bias = bias.astype(ml_dtypes.bfloat16)
    options: dict[str, Any] = {"bias": bias, "variant": variant, "scale": scale}
    asked = {"backend": backend, "return_lse": True, **options}
    assert kernel_form(*inputs, arch="sm_90a", **options)["form"] == "sm90"
    o, lse = attention(*inputs, arch="sm_90a", **asked)
    assert np.isneginf(lse[0, 0, 2]) and not as_float64(o)[0, 0, 2].any()
    assert np.isfinite(np.delete(lse, 2, axis=2)).all()
    mean = as_float64(inputs[2])[0, 0].mean(axis=0)
    assert np.abs(as_float64(o)[0, 0, 4] - as_float64(inputs[2])[0, 0, 7]).max() < 0.02
    codes = {"quantized": quantize(*inputs, backend="mirror")} if variant == "fa_int8" else {}
    report = judge(o, *inputs, lse=lse, form="sm90", **codes, **options)
    assert report.passed and report.unbounded_rows == ((0, 0, 1), (0, 0, 2))
    portable, portable_lse = attention(*inputs, arch="sm_80", **asked)
    assert np.abs(as_float64(portable)[0, 0, 2] - mean).max() < 0.02
    assert np.isfinite(portable_lse).all()


def test_a_softcap_errs_by_less_than_it_says() -> None:
    for unit in (2.0**-10, 0.3, 40.0, 2.0**14):
        y = np.concatenate([np.geomspace(1e-6, 60, 200_000), np.linspace(0.9, 1.3, 100_000)])
        S = (y * unit).astype(np.float32)
        exact = unit * np.tanh(S.astype(float) / unit)
        error = np.abs(small_and_large_softcap(S, unit) / exact - 1)
        assert error.max() <= SOFTCAP_ERROR
        assert error[S / unit > LARGEST_Y].max() < 2.0**-19


# ---- the passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rows", "keys", "strided", "all", "nearly all", "of blocks"])
def test_bits_and_steps_of_a_mask(kind: str) -> None:
    """Steps that admit every key come first where the list says so, before whatever follows."""
    mask = {
        "rows": row_mask,
        "keys": key_mask,
        "strided": lambda: row_mask()[..., ::-1],
        "all": lambda: np.ones((1, 1, 1, LEN_KV), bool),
        "nearly all": lambda: (np.arange(LEN_KV) != 200)[None, None, None],
        "of blocks": lambda: (np.arange(LEN_KV) // 64 % 3 != 1)[None, None, None],
    }[kind]()
    by_keys = mask.shape[2] == 1
    plan = planned(mask=mask)
    block_q, block_kv = plan.tiles.block_q, plan.tiles.block_kv
    passes = tuple(one for one in plan.launches if one.module.source == "prepare/pack_mask.cu")
    assert [one.entry for one in passes] == (
        ["pack_keys"] if by_keys else ["pack_mask", "list_steps"]
    )
    held = {work.name: np.zeros(work.shape, work.dtype) for work in plan.workspace}
    alone = replace(plan, launches=passes, workspace=())
    whole = np.broadcast_to(mask, (1, 2, LEN_Q, LEN_KV))
    interpret.run(alone, {**held, "mask": whole, **dict.fromkeys("qkvo", mask)}, "sm_90a")
    rows = 1 if by_keys else LEN_Q
    for q0 in range(0, rows, block_q):
        tile = mask[0, 0, q0 : q0 + block_q]
        steps, wholes = [], []
        for kv0 in range(0, LEN_KV, block_kv):
            of_step = tile[:, kv0 : kv0 + block_kv]
            if of_step.any():
                steps.append(2 * (kv0 // block_kv) + (not of_step.all()))
                wholes.append(of_step.all() and of_step.shape[1] == block_kv)
            words = held["mask_bits"][q0 // block_q, kv0 // block_kv]
            for row, key in np.ndindex(of_step.shape):
                lane, place = key % 8 // 2, key // 8 * 2 + key % 2
                word = (
                    words[lane] if by_keys
                    else words.reshape(-1, 8, 4, 2)[row // 16, row % 8, lane, row % 16 // 8]
                )  # fmt: skip
                assert (int(word) >> place & 1) == of_step[row, key]
        found = held["tile_steps"][q0 // block_q]
        head = [len(steps), [*wholes, False].index(False)]
        assert found[: 2 + len(steps)].tolist() == [*head, *steps]


@pytest.mark.parametrize("mixed", [(), (0,), (31,), (32, 40), (5, 69)])
def test_whole_steps_are_counted_warp_by_warp(mixed: tuple[int, ...]) -> None:
    """There are 70 steps, some of them empty, and the last one is not whole."""
    steps, empty, block_kv = 70, (3, 33), 128
    mask = np.ones((steps, block_kv), bool)
    mask[list(empty)] = mask[list(mixed), 7] = False
    mask = mask.reshape(1, 1, 1, -1)[..., :-8]
    plan = planned(normal((1, 1, 64, 64), (1, 1, mask.size, 64)), mask=mask)
    assert plan.tiles.block_kv == block_kv
    launches = tuple(one for one in plan.launches if one.entry == "pack_keys")
    held = {work.name: np.zeros(work.shape, work.dtype) for work in plan.workspace}
    given = {**held, "mask": mask, **dict.fromkeys("qkvo", mask)}
    interpret.run(replace(plan, launches=launches, workspace=()), given, "sm_90a")
    listed = [n for n in range(steps) if n not in empty]
    words = [2 * n + (n in mixed) for n in listed]
    wholes = listed.index(min([*mixed, steps - 1]))
    assert held["tile_steps"][0].tolist()[: 2 + len(listed)] == [len(listed), wholes, *words]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 1e6}, "takes softcap/scale from 2**-10 to 2**14"),
        ({"bias": dense(), "scale": 2.0**20}, "takes a bias with scale"),
    ],
)
def test_what_the_portable_form_takes(options: dict[str, Any], reason: str) -> None:
    plan = planned(**options)
    assert plan.form == "portable" and reason in plan.note


def odd_biases() -> dict[str, np.ndarray]:
    """Biases of one content that the copy engine cannot move."""
    whole = dense()[..., : LEN_KV - 3]
    held = np.zeros((2, LEN_Q, LEN_KV), np.float16)
    held[..., 1:-2] = whole
    return {
        "a row length of no 8": np.ascontiguousarray(whole), "an odd address": held[..., 1:-2],
        "keys apart": np.ascontiguousarray(whole.swapaxes(1, 2)).swapaxes(1, 2),
        "rows from the end": np.ascontiguousarray(whole[:, ::-1])[:, ::-1],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, np.float16) for name in odd_biases()), ("keys apart", np.float32)],
)
def test_a_bias_out_of_reach_is_copied_and_changes_no_bit(name: str, dtype: Any) -> None:
    """Padded rows, in the Hopper form; what lies between them is not read."""
    q, k, v = arrays()
    inputs = q, k[..., : LEN_KV - 3, :], v[..., : LEN_KV - 3, :]
    bias = odd_biases()[name].astype(dtype)
    before, padded = bias.tobytes(), np.full((2, LEN_Q, LEN_KV), np.nan, dtype)
    aligned = padded[..., : LEN_KV - 3]
    aligned[...] = bias
    assert resolved(*inputs, variant="fa_tc", arch="sm_90a", bias=bias).copies.keys() == {"bias"}
    assert not resolved(*inputs, variant="fa_tc", arch="sm_90a", bias=aligned).copies
    asked = {"variant": "fa_tc", "arch": "sm_90a", "backend": "interpret"}
    assert "copied into rows of whole 16 bytes" in explain.explain(*inputs, bias=bias, **asked)
    found, expected = (run(inputs, bias=one) for one in (bias, aligned))
    assert found.o.tobytes() == expected.o.tobytes() and bias.tobytes() == before


def test_a_bias_is_not_copied_for_a_portable_form() -> None:
    """Another option keeps it out, or float32 beside a large head_dim."""
    bias = odd_biases()["an odd address"]
    q, k, v = arrays()
    inputs = q, k[..., : LEN_KV - 3, :], v[..., : LEN_KV - 3, :]
    wide = tuple(x[..., : LEN_KV - 3, :] if i else x for i, x in enumerate(arrays(head_dim=256)))
    for given, options in (
        (wide, {"bias": bias.astype(np.float32)}), (inputs, {"bias": bias, "scale": 2.0**20}),
    ):  # fmt: skip
        one = resolved(*given, variant="fa_tc", arch="sm_90a", **options)
        assert not one.copies and one.kernel.form == "portable"
    assert not resolved(*inputs, variant="fa_tc", arch="sm_80", bias=bias).copies


# ---- mistakes ------------------------------------------------------------------------------------

MISTAKES = {
    "bias of the neighbouring row": (
        "prims/score/score_bias.cuh", "const int r = row + lane_id() % 16;",
        "const int r = row + (lane_id() + 1) % 16;", {"bias": dense()},
    ),
    "mask word shifted by one": (
        "prims/score/mask_bits.cuh", "words + row / MASK_GROUP * MASK_GROUP_WORDS + lane_id() * 2",
        "words + row / MASK_GROUP * MASK_GROUP_WORDS + (lane_id() + 1) % 32 * 2",
        {"mask": row_mask()},
    ),
    "softcap after the bias": (
        "prims/score/score_hook.cuh",
        "    if (mixed) apply_mask(S_acc, bits);",
        "    if constexpr (SOFTCAP) softcap(s, S_acc);\n    if (mixed) apply_mask(S_acc, bits);",
        {"bias": bias_of(1, LEN_KV), "softcap": 2.0},
    ),
    "an empty tile taken for a full one": (
        "prepare/pack_mask.cu", "return !some ? EMPTY : full ? FULL : MIXED;",
        "return !some ? FULL : full ? FULL : MIXED;", {"mask": row_mask()},
    ),
}  # fmt: skip


#: A mistake in a form that the other rungs do not all have.
WIDE_MISTAKES = {
    "float32 bias of another row": (
        "prims/score/score_bias.cuh", "i % 2 * 8 * 128 + (chunk ^ g) * 16", "(chunk ^ g) * 16",
        {"bias": dense(np.float32)},
    ),
}  # fmt: skip
#: The mistakes that are planted at once; the others are slow.
AT_ONCE = ("softcap after the bias", "an empty tile taken for a full one")


@pytest.mark.parametrize(
    "name", slow_unless(lambda _, x: x in AT_ONCE, [*MISTAKES, *WIDE_MISTAKES])
)
def test_a_mistake_leaves_the_bound(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, line, instead, options = {**MISTAKES, **WIDE_MISTAKES}[name]
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    assert not run(arrays(), **options).judge().passed


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["softcap", "rows", "bias", "all", "float32"])
def test_default_tiles_spill_nothing_and_fit(name: str, head_dim: int) -> None:
    """Past head_dim 192 shared memory has no room for a mask beside a bias, or one in float32."""
    every = {"softcap": 9.0, "mask": row_mask(), "bias": dense(), "causal": True}
    if name == "float32":
        head_dim, every["bias"] = min(head_dim, 192), dense(np.float32)
    of_name = {"softcap": ["softcap"], "rows": ["mask"], "bias": ["bias"]}
    one = of_name.get(name, [*every])
    options = {n: every[n] for n in one if not (n == "mask" and name == "all" and head_dim > 192)}
    plan = planned(arrays("bfloat16", head_dim), return_lse=True, **options)
    (launch,) = (one for one in plan.launches if one.entry == "attn_fa_tc")
    binary = compiler.build(launch.module, "sm_90a")
    taken = binary.kernels["attn_fa_tc"]
    assert plan.form == "sm90" and "serialized" not in binary.log
    assert taken.spill_stores + taken.spill_loads == 0
    assert binary.smem_bytes <= 227 * 1024


def test_plain_calls_compile_nothing_of_it() -> None:
    plan = planned()
    assert not plan.features.scored and [one.entry for one in plan.launches] == ["attn_fa_tc"]
    assert not any(name.startswith(("CFG_SCORED", "CFG_MASK_KIND", "CFG_BIAS_KIND"))
                   for name, _ in plan.launches[0].module.defines)  # fmt: skip
    assert STORAGE["float16"] == arrays()[0].dtype


# ---- at random -----------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[Arrays, dict[str, Any]]:
    """Sizes, options and broadcast shapes of a call, all of them at random."""
    rng = np.random.default_rng(seed)
    batch, heads_kv, group = (int(rng.integers(1, 3)) for _ in range(3))
    heads, head_dim = heads_kv * group, int(rng.choice([8, 64, 72, 128, 136, 256]))
    len_q, len_kv = int(rng.integers(1, 300)), int(rng.integers(1, 300))
    len_kv = -(-len_kv // 8) * 8 if rng.random() < 0.7 else len_kv
    dtype = str(rng.choice(["float16", "bfloat16"]))
    inputs = normal(
        (batch, heads, len_q, head_dim), (batch, heads_kv, len_kv, head_dim), dtype, seed
    )

    def shape() -> tuple[int, ...]:
        whole = (batch, heads, len_q, len_kv)
        return tuple(n if rng.random() < 0.6 else 1 for n in whole)[int(rng.integers(0, 4)) :]

    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["causal"] = True
        options["causal_align"] = str(rng.choice(["bottom-right", "top-left"]))
    elif rng.random() < 0.3:
        options["window"] = (int(rng.integers(0, 200)), int(rng.integers(0, 200)))
    if rng.random() < 0.5:
        options["softcap"] = float(rng.choice([0.5, 5.0, 50.0]))
    if rng.random() < 0.6:
        options["mask"] = rng.random(shape()) < rng.choice([0.02, 0.5, 0.98])
    if rng.random() < 0.6:
        bias = 3 * rng.standard_normal(shape())
        bias[rng.random(bias.shape) < 0.1] = -np.inf
        options["bias"] = bias.astype(STORAGE[str(rng.choice(["float16", "bfloat16"]))])
    if rng.random() < 0.3:
        blocks = batch, heads, -(-len_q // 128), -(-len_kv // 64)
        kept = rng.random(tuple(n if rng.random() < 0.6 else 1 for n in blocks[:2]) + blocks[2:])
        options["block_mask"] = BlockMask(kept < 0.6, 128, 64)
    return inputs, options


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_call_is_within_its_bound(seed: int) -> None:
    inputs, options = drawn(seed)
    runs.run(RUNG, inputs, arch="sm_90a", backend="interpret", **options).check()


@pytest.mark.parametrize("length", [72, 70], ids=["bytes by eights", "byte by byte"])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "keys"])
def test_every_byte_but_zero_admits(rows: bool, length: int) -> None:
    """A bool array that is a view of bytes may hold others than 0 and 1."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 1, length, 64)).astype(np.float16) for _ in range(3))
    shape = (1, 1, length if rows else 1, length)
    admits = rng.random(shape) < 0.5
    mask = np.where(admits, rng.choice([1, 2, 16, 128, 255], shape), 0).astype(np.uint8)
    options = {"variant": "fa_tc", "backend": "interpret", "arch": "sm_90a"}
    found = attention(q, k, v, mask=mask.view(np.bool_), **options)
    assert found.tobytes() == attention(q, k, v, mask=admits, **options).tobytes()
