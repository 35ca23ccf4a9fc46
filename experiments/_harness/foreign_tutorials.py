"""The kernels of Triton's tutorials: python/tutorials of a checkout of triton-lang/triton."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.interpret import TensorMap
from cupyattn.testing import numerics
from experiments._harness.foreign import (
    APPROXIMATE,
    CUT,
    HALF,
    HALF_STEP,
    SINGLE,
    TINY,
    Case,
    Launcher,
    share,
)
from experiments._harness.foreign_attention import Gradients, attention, judged
from experiments._harness.foreign_triton import functions, launch, normal, unset

REPOSITORY = "triton"
#: Triton 3.9 initialises an mbarrier and lets the copy engine signal it with no fence in between.
FENCE = [
    (
        "no fence.mbarrier_init",
        r"^(.*mbarrier\.init\.shared.*)$",
        r"\1\n\tfence.mbarrier_init.release.cluster;",
    )
]
LN2 = float(np.log(2))


def _kernels(run: Launcher, name: str) -> Any:
    return functions(run.sources.path(REPOSITORY, "python", "tutorials", name))


def vector_add(run: Launcher, rng: np.random.Generator) -> float:
    """One rounding for each sum."""
    count = 1000
    x, y = (normal(rng, count, dtype=np.float32) for _ in range(2))
    o = unset(count, dtype=np.float32)
    launch(
        run, _kernels(run, "01-vector-add.py").add_kernel, 2,
        {"x_ptr": x, "y_ptr": y, "output_ptr": o, "n_elements": np.int32(count), "BLOCK_SIZE": 512},
    )  # fmt: skip
    exact = x.astype(np.float64) + y
    return share(o, exact, SINGLE * np.abs(exact) + TINY)


def softmax(run: Launcher, rng: np.random.Generator) -> float:
    """Rows of 200 columns, four of them for two programs."""
    rows, columns = 4, 200
    x, o = normal(rng, rows, columns, dtype=np.float32), unset(rows, columns, dtype=np.float32)
    launch(
        run, _kernels(run, "02-fused-softmax.py").softmax_kernel, 2,
        {
            "output_ptr": o, "input_ptr": x, "input_row_stride": np.int32(columns),
            "output_row_stride": np.int32(columns), "n_rows": np.int32(rows),
            "n_cols": np.int32(columns), "BLOCK_SIZE": 256, "num_stages": 2,
        },
    )  # fmt: skip
    below = x.astype(np.float64) - x.max(-1, keepdims=True)
    exact = np.exp(below) / np.exp(below).sum(-1, keepdims=True)
    exponent = 4 * SINGLE * (np.abs(below) + (exact * np.abs(below)).sum(-1, keepdims=True))
    return share(o, exact, exact * (exponent + columns * SINGLE + 4 * APPROXIMATE) + TINY)


def matmul(run: Launcher, rng: np.random.Generator) -> float:
    """wgmma, with tiles that end within the matrix."""
    m, n, k = 100, 72, 96
    a, b, c = normal(rng, m, k), normal(rng, k, n), unset(m, n)
    launch(
        run, _kernels(run, "03-matrix-multiplication.py").matmul_kernel, 4,
        {
            "a_ptr": a, "b_ptr": b, "c_ptr": c, "M": np.int32(m), "N": np.int32(n),
            "K": np.int32(k), "stride_am": np.int32(k), "stride_ak": 1, "stride_bk": np.int32(n),
            "stride_bn": 1, "stride_cm": np.int32(n), "stride_cn": 1, "BLOCK_SIZE_M": 64,
            "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8, "ACTIVATION": "",
        },
        capability=90, num_stages=3,
    )  # fmt: skip
    left, right = a.astype(np.float64), b.astype(np.float64)
    exact = left @ right
    return share(c, exact, k * CUT * np.abs(left) @ np.abs(right) + HALF * np.abs(exact))


def layer_norm(run: Launcher, rng: np.random.Generator) -> float:
    """Forward: three rows of 300 columns in blocks of 256."""
    rows, columns, eps = 3, 300, 1e-5
    x, w, b = normal(rng, rows, columns), normal(rng, columns), normal(rng, columns)
    y, mean, rstd = unset(rows, columns), *(unset(rows, dtype=np.float32) for _ in range(2))
    launch(
        run, _kernels(run, "05-layer-norm.py")._layer_norm_fwd_fused, rows,
        {
            "X": x, "Y": y, "W": w, "B": b, "Mean": mean, "Rstd": rstd,
            "stride": np.int32(columns), "N": np.int32(columns), "eps": np.float32(eps),
            "BLOCK_SIZE": 256,
        },
    )  # fmt: skip
    x, w, b = (one.astype(np.float64) for one in (x, w, b))
    centre = x.mean(-1, keepdims=True)
    away = x - centre
    variance = (away**2).mean(-1, keepdims=True) + eps
    in_mean = columns * SINGLE * np.abs(x).mean(-1, keepdims=True)
    in_away = in_mean + 2 * SINGLE * np.abs(away)
    in_variance = 2 * (in_away * np.abs(away)).mean(-1, keepdims=True) / variance
    in_rstd = (columns + 4) * SINGLE + in_variance + 2 * APPROXIMATE
    exact = away / np.sqrt(variance) * w + b
    bound = np.abs(w) * (in_away + np.abs(away) * (in_rstd + 2 * SINGLE)) / np.sqrt(variance)
    bound += 2 * SINGLE * np.abs(b) + HALF * np.abs(exact) + HALF_STEP
    given = [centre[:, 0], 1 / np.sqrt(variance)[:, 0]]
    return max(
        share(y, exact, bound),
        share(mean, given[0], in_mean[:, 0]),
        share(rstd, given[1], in_rstd[:, 0] * given[1]),
    )


def layer_norm_backward(run: Launcher, rng: np.random.Generator) -> float:
    """Both kernels: rows that take turns at a lock, and the sums of what these leave."""
    rows, columns, groups = 5, 200, 2
    x, dy, w = normal(rng, rows, columns), normal(rng, rows, columns), normal(rng, columns)
    mean, rstd = np.float32(rng.standard_normal(rows)), np.float32(rng.uniform(0.5, 2, rows))
    dx = unset(rows, columns)
    lock = np.zeros(2 * groups, np.int32)
    dw, db = (np.zeros((groups, columns), np.float16) for _ in range(2))
    kernels = _kernels(run, "05-layer-norm.py")
    launch(
        run, kernels._layer_norm_bwd_dx_fused, rows,
        {
            "DX": dx, "DY": dy, "DW": dw, "DB": db, "X": x, "W": w, "Mean": mean, "Rstd": rstd,
            "Lock": lock, "stride": np.int32(columns), "N": np.int32(columns),
            "GROUP_SIZE_M": groups, "BLOCK_SIZE_N": 256,
        },
    )  # fmt: skip
    final_dw, final_db = unset(columns), unset(columns)
    launch(
        run, kernels._layer_norm_bwd_dwdb, 2,
        {
            "DW": dw, "DB": db, "FINAL_DW": final_dw, "FINAL_DB": final_db,
            "M": np.int32(groups), "N": np.int32(columns), "BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 128,
        },
    )  # fmt: skip
    x, dy, w = (one.astype(np.float64) for one in (x, dy, w))
    xhat = (x - mean[:, None]) * rstd[:, None]
    wdy = w * dy
    c1, c2 = (xhat * wdy).mean(-1, keepdims=True), wdy.mean(-1, keepdims=True)
    exact = (wdy - (xhat * c1 + c2)) * rstd[:, None]
    sums = (columns + 8) * SINGLE
    in_sums = np.abs(xhat) * np.abs(xhat * wdy).mean(-1, keepdims=True)
    in_sums += np.abs(wdy).mean(-1, keepdims=True)
    bound = rstd[:, None] * (sums * in_sums + 4 * SINGLE * np.abs(wdy)) + HALF * np.abs(exact)
    turns = (rows + 2) * HALF  # each row that adds to a sum rounds it
    return max(
        share(dx, exact, bound + HALF_STEP),
        share(final_dw, (dy * xhat).sum(0), turns * np.abs(dy * xhat).sum(0)),
        share(final_db, dy.sum(0), turns * np.abs(dy).sum(0)),
    )


def fused_attention(run: Launcher, rng: np.random.Generator) -> float:
    """Forward on Hopper: tensor maps and wgmma; two heads, length 128."""
    heads, length, channels = 2, 128, 64
    q, k, v = (normal(rng, heads * length, channels) for _ in range(3))
    o, m = unset(heads * length, channels), unset(heads, length, dtype=np.float32)
    maps = {
        f"desc_{name}": TensorMap(array, (64, channels))
        for name, array in (("q", q), ("k", k), ("v", v), ("o", o))
    }
    kernel = _kernels(run, "06-fused-attention.py")._attn_fwd
    args = {
        "sm_scale": np.float32(channels**-0.5), "M": m, "Z": np.int32(1), "H": np.int32(heads),
        **maps, "N_CTX": np.int32(length), "HEAD_DIM": channels, "BLOCK_M": 64, "BLOCK_N": 64,
        "FP8_OUTPUT": False, "STAGE": 1, "warp_specialize": False, "IS_HOPPER": True,
    }  # fmt: skip
    known = {name: args[name] for name in kernel.arg_names}
    run.mends = FENCE
    launch(run, kernel, (2, heads), known, capability=90, aligned=("N_CTX",), num_stages=2)
    shape = (1, heads, length, channels)
    lse = (m.astype(np.float64) * LN2).astype(np.float32)[None]
    arrays = [x.reshape(shape) for x in (o, q, k, v)]
    return judged(*arrays, numerics("fp16", accumulate="fp32"), lse=lse)


def fused_attention_backward(run: Launcher, rng: np.random.Generator) -> float:
    """Both kernels, causal: the sums of dO times O, and the gradients."""
    heads, length, channels = 2, 128, 64
    shape, scale = (heads, length, channels), channels**-0.5
    q, k, v, do = (normal(rng, *shape) for _ in range(4))
    scaled = (k * np.float32(scale / LN2)).astype(np.float16)  # as its caller does
    o, _ = attention(q, scaled, v, LN2)  # any O and sums will do
    s = np.where(np.tri(length) > 0, q.astype(np.float64) @ _t(scaled.astype(np.float64)), -np.inf)
    m = np.log2(np.exp2(s).sum(-1)).astype(np.float32)
    delta = unset(heads, length, dtype=np.float32)
    kernels = _kernels(run, "06-fused-attention.py")
    launch(
        run, kernels._attn_bwd_preprocess, (2, heads),
        {
            "O": o, "DO": do, "Delta": delta, "Z": np.int32(1), "H": np.int32(heads),
            "N_CTX": np.int32(length), "BLOCK_M": 64, "HEAD_DIM": channels,
        },
        aligned=("N_CTX",),
    )  # fmt: skip
    dq, dk, dv = (unset(*shape) for _ in range(3))
    strides = [np.int32(n) for n in (heads * length * channels, length * channels, channels)]
    launch(
        run, kernels._attn_bwd, (2, 1, heads),
        {
            "Q": q, "K": scaled, "V": v, "sm_scale": np.float32(scale), "DO": do, "DQ": dq,
            "DK": dk, "DV": dv, "M": m, "D": delta, "stride_z": strides[0],
            "stride_h": strides[1], "stride_tok": strides[2], "stride_d": 1,
            "H": np.int32(heads), "N_CTX": np.int32(length), "BLOCK_M1": 32, "BLOCK_N1": 64,
            "BLOCK_M2": 64, "BLOCK_N2": 32, "BLK_SLICE_FACTOR": 2, "HEAD_DIM": channels,
            "CAUSAL": True,
        },
        aligned=("N_CTX", "stride_z", "stride_h", "stride_tok"), num_stages=2,
    )  # fmt: skip
    exact = Gradients.of(q, scaled, v, o, m.astype(np.float64) * LN2, do, LN2, causal=True)
    of_scaled = dk.astype(np.float64) * (LN2 / scale)
    return max(
        exact.share(dq, of_scaled, dv), share(delta, exact.delta, exact.bound_delta)
    )


def _t(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)


CASES = tuple(
    Case(f"{name}, Triton tutorial", REPOSITORY, run)
    for name, run in (
        ("vector addition", vector_add),
        ("fused softmax", softmax),
        ("matrix multiplication, sm_90", matmul),
        ("layer norm", layer_norm),
        ("layer norm, backward", layer_norm_backward),
        ("fused attention, sm_90", fused_attention),
        ("fused attention, backward", fused_attention_backward),
    )
)
