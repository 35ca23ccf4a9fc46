"""Triton kernels of wheels: Liger, SageAttention, flash-linear-attention, bitsandbytes."""

from __future__ import annotations

import numpy as np

from cupyattn.testing import numerics
from experiments._harness.foreign import (
    APPROXIMATE,
    HALF,
    HALF_STEP,
    LOG2_E,
    SINGLE,
    TINY,
    Case,
    Launcher,
    importing,
    share,
)
from experiments._harness.foreign_attention import judged
from experiments._harness.foreign_triton import launch, normal, unset


def rms_norm(run: Launcher, rng: np.random.Generator) -> float:
    """Forward, all in float32 (casting mode of Gemma)."""
    with importing("liger_kernel"):
        from liger_kernel.ops.rms_norm import _rms_norm_forward_kernel
    rows, columns, eps = 3, 300, 1e-6
    x, w = normal(rng, rows, columns), normal(rng, columns)
    y, rstd = unset(rows, columns), unset(rows, dtype=np.float32)
    stride = np.int32(columns)
    launch(
        run, _rms_norm_forward_kernel, rows,
        {
            "Y_ptr": y, "Y_row_stride": stride, "X_ptr": x, "X_row_stride": stride, "W_ptr": w,
            "W_row_stride": 1, "RSTD_ptr": rstd, "RSTD_row_stride": 1, "n_cols": stride,
            "eps": np.float32(eps), "offset": np.float32(1), "casting_mode": 1,
            "elementwise_affine": True, "BLOCK_SIZE": 512,
        },
    )  # fmt: skip
    x, w = x.astype(np.float64), w.astype(np.float64)
    scale = 1 / np.sqrt((x**2).mean(-1) + eps)
    relative = (columns + 4) * SINGLE + 2 * APPROXIMATE
    exact = x * scale[:, None] * (1 + w)
    bound = np.abs(exact) * (relative + 4 * SINGLE + HALF)
    bound += np.abs(x) * scale[:, None] * 2 * SINGLE + HALF_STEP
    return max(share(y, exact, bound), share(rstd, scale, relative * scale))


def cross_entropy(run: Launcher, rng: np.random.Generator) -> float:
    """Losses, and gradients in place of the logits; one label is ignored."""
    with importing("liger_kernel"):
        from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel
    rows, columns, ignored = 4, 300, -100
    given = rng.standard_normal((rows, columns)).astype(np.float32)
    x, loss = given.copy(), np.zeros(rows, np.float32)
    label = np.array([7, ignored, 0, 299], np.int64)
    counted = int((label != ignored).sum())
    launch(
        run, liger_cross_entropy_kernel, rows,
        {
            "X_ptr": x, "X_stride": np.int32(columns), "Y_ptr": label, "Y_stride": 1,
            "weight_ptr": None, "loss_ptr": loss, "z_loss_ptr": None, "loss_stride": 1,
            "token_accuracy_ptr": None, "token_accuracy_stride": 0, "predicted_tokens_ptr": None,
            "predicted_tokens_stride": 0, "n_cols": np.int32(columns),
            "n_non_ignore": np.float32(counted), "sum_non_ignore_weight": np.float32(counted),
            "weight_sum": np.float32(0), "ignore_index": np.int32(ignored),
            "lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "mean",
            "softcap": None, "RETURN_Z_LOSS": 0, "RETURN_TOKEN_ACCURACY": 0,
            "RETURN_PREDICTED_TOKENS": 0, "BLOCK_SIZE": 256, "HAS_WEIGHT": False,
            "HAS_SOFTCAPPING": False, "HAS_GRADIENTS": True,
        },
        num_warps=8,
    )  # fmt: skip
    logits = given.astype(np.float64)
    below = logits - logits.max(-1, keepdims=True)
    total = np.exp(below).sum(-1, keepdims=True)
    p = np.exp(below) / total
    in_p = 4 * SINGLE * (np.abs(below) + (p * np.abs(below)).sum(-1, keepdims=True))
    in_p += columns * SINGLE + 4 * APPROXIMATE
    hot = np.zeros_like(p)
    used = label != ignored
    hot[used, label[used]] = 1
    gradient = np.where(used[:, None], p - hot, 0) / counted
    bound = (p * in_p + 4 * SINGLE * (p + hot)) / counted + TINY
    at_label = np.where(used, logits[np.arange(rows), label.clip(0)], 0)
    sums = np.log(total)[:, 0] + logits.max(-1)
    exact = np.where(used, sums - at_label, 0) / counted
    in_loss = (np.max(in_p, -1) + 4 * SINGLE * (1 + np.abs(sums) + np.abs(at_label))) / counted
    return max(share(x, gradient, bound), share(loss, exact, in_loss))


def sage_attention(run: Launcher, rng: np.random.Generator) -> float:
    """Both its kernels: codes of Q and K, and attention with P in float16."""
    with importing("sageattention"):
        from sageattention.attn_qk_int8_per_block import _attn_fwd
        from sageattention.quant_per_block import quant_per_block_int8_kernel
    heads, length, channels, tile_q, tile_k = 2, 100, 64, 128, 64
    shape = (1, heads, length, channels)
    q, k, v = (normal(rng, *shape) for _ in range(3))
    strides = [np.int32(n) for n in (heads * length * channels, length * channels, channels)]
    codes = {}
    for name, x, tile, factor in (
        ("q", q, tile_q, channels**-0.5 * LOG2_E), ("k", k, tile_k, 1.0),
    ):  # fmt: skip
        tiles = -(-length // tile)
        made, scale = np.zeros(shape, np.int8), unset(1, heads, tiles, 1, dtype=np.float32)
        launch(
            run, quant_per_block_int8_kernel, (tiles, heads, 1),
            {
                "Input": x, "Output": made, "Scale": scale, "L": np.int32(length),
                **{f"stride_{side}{axis}": n for side in "io"
                   for axis, n in zip("zhn", strides, strict=True)},
                "stride_sz": np.int32(heads * tiles), "stride_sh": np.int32(tiles),
                "sm_scale": np.float32(factor), "C": channels, "BLK": tile,
            },
        )  # fmt: skip
        codes[name] = (made, scale)
    o = unset(*shape)
    launch(
        run, _attn_fwd, (1, heads, 1),
        {
            "Q": codes["q"][0], "K": codes["k"][0], "V": v, "Q_scale": codes["q"][1],
            "K_scale": codes["k"][1], "Out": o,
            **{f"stride_{side}{axis}": n for side in "qkvo"
               for axis, n in zip(("z", "h", "n"), strides, strict=True)},
            "qo_len": np.int32(length), "kv_len": np.int32(length), "H": heads,
            "num_kv_groups": 1, "HEAD_DIM": channels, "BLOCK_M": tile_q, "BLOCK_N": tile_k,
            "STAGE": 1,
        },
        num_stages=3,
    )  # fmt: skip
    rounded = numerics("fp16", accumulate="fp16", promote=tile_k, qk="int8")
    return judged(o, q, k, v, rounded)


def linear_attention(run: Launcher, rng: np.random.Generator) -> float:
    """A state that decays by a gate, one step after the other."""
    with importing("fla"):
        from fla.ops.common.fused_recurrent import fused_recurrent_fwd_kernel as kernel
    while type(kernel).__name__ != "JITFunction":  # behind its heuristics and tuning
        kernel = kernel.fn
    steps, heads, channels, scale = 12, 2, 32, 32**-0.5
    q, k, v = (normal(rng, 1, steps, heads, channels) for _ in range(3))
    gate = -np.abs(rng.standard_normal((1, steps, heads))).astype(np.float32)
    o, state = unset(1, 1, steps, heads, channels, dtype=np.float32), unset(
        1, heads, channels, channels, dtype=np.float32
    )
    launch(
        run, kernel, heads,
        {
            "q": q, "k": k, "v": v, "g": gate, "g_gamma": None, "gk": None, "gv": None, "o": o,
            "h0": None, "ht": state, "cu_seqlens": None, "scale": np.float32(scale),
            "B": np.int32(1), "T": np.int32(steps), "H": heads, "K": channels, "V": channels,
            "BK": channels, "BV": channels, "REVERSE": False, "USE_G": True,
            "USE_G_GAMMA": False, "USE_GK": False, "USE_GV": False, "USE_INITIAL_STATE": False,
            "STORE_FINAL_STATE": True, "IS_VARLEN": False, "STATE_V_FIRST": False,
        },
    )  # fmt: skip
    q, k, v, gate = (x[0].astype(np.float64) for x in (q, k, v, gate))
    exact, largest = np.zeros((steps, heads, channels)), np.zeros((steps, heads, channels))
    now, most = (np.zeros((heads, channels, channels)) for _ in range(2))
    for step in range(steps):
        decay = np.exp(gate[step])[:, None, None]
        added = k[step][:, :, None] * v[step][:, None, :]
        now, most = decay * now + added, decay * most + np.abs(added)
        exact[step] = scale * np.einsum("hk,hkv->hv", q[step], now)
        largest[step] = scale * np.einsum("hk,hkv->hv", np.abs(q[step]), most)
    one_step = APPROXIMATE + SINGLE * (4 + 2 * np.abs(gate).max() * LOG2_E)
    return max(
        share(o[0, 0], exact, largest * (steps * one_step + (channels + 2) * SINGLE) + TINY),
        share(state[0], now, most * steps * one_step + TINY),
    )


def dequantise(run: Launcher, rng: np.random.Generator) -> float:
    """NF4 codes of blocks of 64 to float32."""
    with importing("bitsandbytes"):
        from bitsandbytes.backends.triton.kernels_4bit import dequant_nf4_kernel
        from bitsandbytes.functional import get_4bit_type
    pairs, block = 500, 64
    codes = rng.integers(0, 256, pairs).astype(np.uint8)
    largest = rng.uniform(0.1, 3, -(-2 * pairs // block)).astype(np.float32)
    o = unset(2 * pairs, dtype=np.float32)
    launch(
        run, dequant_nf4_kernel, 2,
        {
            "a_ptr": codes, "c_ptr": o, "absmax_ptr": largest,
            "num_paired_elements": np.int32(pairs), "num_output_elements": np.int32(2 * pairs),
            "QUANT_BLOCK": block, "SPLIT_SIZE": 256,
        },
    )  # fmt: skip
    table = get_4bit_type("nf4", device="cpu").double().numpy()
    each = table[np.stack([codes >> 4, codes & 15], -1).ravel()]
    exact = each * np.repeat(largest.astype(np.float64), block)[: 2 * pairs]
    return share(o, exact, 2 * SINGLE * np.abs(exact))


CASES = (
    Case("RMS norm", "liger-kernel", rms_norm),
    Case("cross entropy with gradients", "liger-kernel", cross_entropy),
    Case("INT8 attention", "sageattention", sage_attention),
    Case("gated linear attention, recurrent", "fla-core", linear_attention),
    Case("NF4 codes to float32", "bitsandbytes", dequantise),
)
