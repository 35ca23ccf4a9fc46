"""Misuses of public functions: each raises an error of one sentence that names the problem."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from tests.cli.test_misuses import MISUSES as OF_COMMANDS

#: Calls, and the beginning of the sentence; names are defined in `given`.
MISUSES: dict[str, list[tuple[str, str]]] = {
    "attention": [
        ("ca.attention(q, k)", "v must be a NumPy or CuPy array, or have __dlpack__, got NoneType"),
        ("ca.attention(q, k, v[:, :, :4])", "k and v must agree on length, got q.shape=(1, 2, 8,"),
        ("ca.attention(q, k[..., :4], v)", "q and k must agree on head_dim, got q.shape=(1, 2, 8,"),
        ("ca.attention(q[0], k, v)", "q, k and v must have four axes (batch, heads, len,"),
        (
            "ca.attention(q[0], k[0], v[0])",
            "q, k and v must have four axes (batch, heads, len, head_dim), got q.shape=(2, 8, 16) "
            "k.shape=(2, 8, 16) v.shape=(2, 8, 16): give q[None, ...] and so on",
        ),
        (
            "ca.attention(*rows, cu_seqlens_q=ends, cu_seqlens_k=ends)",
            "attention takes no cu_seqlens_q: attention_varlen and attention_varlen_backward take",
        ),
        ("ca.attention(q[:, :, :, None], k, v)", "q, k and v must have four axes (batch, heads,"),
        (
            "ca.attention(q, k[:, :1].repeat(3, 1), v[:, :1].repeat(3, 1))",
            "the heads of k and v must divide the heads of q, got q.shape=(1, 2,",
        ),
        ("ca.attention(q.repeat(2, 0), k, v)", "q, k and v must agree on batch, got q.shape=(2,"),
        (
            "ca.attention(q.astype('f8'), k.astype('f8'), v.astype('f8'))",
            "q, k and v must be of one type, float16, bfloat16 or float32, got",
        ),
        (
            "ca.attention(q.astype('i4'), k.astype('i4'), v.astype('i4'))",
            "q, k and v must be of one type, float16, bfloat16 or float32, got",
        ),
        ("ca.attention(q, k.astype('f4'), v)", "q, k and v must be of one type, float16,"),
        (
            "ca.attention(q.tolist(), k, v)",
            "q must be a NumPy or CuPy array, or have __dlpack__, got list: give numpy.array(q, dt",
        ),
        ("ca.attention(q, k, None)", "v must be a NumPy or CuPy array, or have __dlpack__, got"),
        ("ca.attention('q', k, v)", "q must be a NumPy or CuPy array, or have __dlpack__, got str"),
        ("ca.attention(None, k, v)", "q must be a NumPy or CuPy array, or have __dlpack__, got"),
        ("ca.attention(np.ma.array(q), k, v)", "q must not be masked, because the mask"),
        ("ca.attention(q.astype('>f2'), k, v)", "q must be in this machine's byte order, got"),
        (
            "ca.attention(q.repeat(40, 3), k.repeat(40, 3), v.repeat(40, 3))",
            "head_dim must be 1 to 256, got q.shape=(1, 2, 8, 640) k.shape=(1, 2,",
        ),
        ("ca.attention(q, k, v, variant='flash')", "variant must be one of unfused, fa, fa_warps,"),
        ("ca.attention(q, k, v, variant=3)", "variant must be one of unfused, fa, fa_warps,"),
        ("ca.attention(q, k, v, variant=['fa'])", "variant must be one of unfused, fa, fa_warps,"),
        ("ca.attention(q, k, v, accuracy='best')", "accuracy must be 'full', 'balanced' or"),
        ("ca.attention(q, k, v, variant='fa', accuracy=3)", "accuracy must be 'full', 'balanced'"),
        ("ca.attention(q, k, v, causal=1)", "causal must be True or False, got 1"),
        ("ca.attention(q, k, v, causal='yes')", "causal must be True or False, got 'yes'"),
        ("ca.attention(q, k, v, causal=True, causal_align='left')", "causal_align must be"),
        ("ca.attention(q, k, v, scale=0)", "scale must be positive and finite, got 0"),
        ("ca.attention(q, k, v, scale=float('nan'))", "scale must be positive and finite, got nan"),
        ("ca.attention(q, k, v, scale='1')", "scale must be a number or None, got '1'"),
        ("ca.attention(q, k, v, softcap=-1)", "softcap must be 0 (none) or between 2**-120 and"),
        ("ca.attention(q, k, v, softcap='30')", "softcap must be a number, got '30'"),
        ("ca.attention(q, k, v, window=128)", "window must be a pair (left, right) of whole"),
        ("ca.attention(q, k, v, window=(1, 2, 3))", "window must be a pair (left, right) of whole"),
        ("ca.attention(q, k, v, window=(-2, 0))", "window must hold numbers of keys below"),
        ("ca.attention(q, k, v, window=(1.5, 0))", "window must be a pair (left, right) of whole"),
        ("ca.attention(q, k, v, window='near')", "window must be a pair (left, right) of whole"),
        ("ca.attention(q, k, v, mask=np.ones((8, 7), bool))", "mask must broadcast to (batch,"),
        (
            "ca.attention(q, k, v, mask=np.ones((8, 8)))",
            "mask must be bool (True: attend), got mask.dtype=float64: give numbers that are added",
        ),
        (
            "ca.attention(q, k, v, mask=np.ones((8, 8), int))",
            "mask must be bool (True: attend), got mask.dtype=int64: give mask != 0",
        ),
        ("ca.attention(q, k, v, mask=True)", "mask must be a NumPy or CuPy array, or have"),
        ("ca.attention(q, k, v, mask=[[True]])", "mask must be a NumPy or CuPy array, or have"),
        ("ca.attention(q, k, v, bias=np.ones((8, 7), 'f4'))", "bias must broadcast to (batch,"),
        (
            "ca.attention(*(x.repeat(2, 0) for x in (q, k, v)), mask=np.ones((2, 8), bool))",
            "mask must broadcast to (batch, heads, len_q, len_kv) = (2, 2, 8, 8), got "
            "mask.shape=(2, 8): give mask[:, None, None]",
        ),
        (
            "ca.attention(q, k, v, bias=np.ones((8, 8)))",
            "bias must be float16, bfloat16 or float32, got bias.dtype=float64: give bias.astype('",
        ),
        (
            "ca.attention(q, k, v, bias=np.ones((8, 8), bool))",
            "bias must be float16, bfloat16 or float32, got bias.dtype=bool: give it as mask=",
        ),
        ("ca.attention(q, k, v, bias=1.0)", "bias must be a NumPy or CuPy array, or have"),
        (
            "ca.attention(q, k, v, block_mask=np.ones((1, 1, 1, 1), bool))",
            "block_mask must be a cupyattn.BlockMask or None, got an array of shape (1, 1, 1, 1)",
        ),
        (
            "ca.attention(q, k, v, block_mask=ca.BlockMask(np.ones((1, 1, 2, 2), bool), 64, 64))",
            "a block mask of blocks 64 x 64 for len_q=8 and len_kv=8 must have 1 x",
        ),
        ("ca.BlockMask(np.ones((2, 2), int), 64, 64)", "a block mask must be bool, got"),
        ("ca.BlockMask(np.ones((2, 2), bool), 60, 64)", "a block mask must have four axes (batch"),
        ("ca.BlockMask([[[[True]]]], 64, 64)", "mask must be a NumPy or CuPy array, or have"),
        ("ca.BlockMask.from_dense([[True]])", "mask must be a NumPy or CuPy array, or have"),
        ("ca.BlockMask.from_window(8, 8, 3)", "window must be a pair (left, right) of whole"),
        ("ca.attention(q, k, v, rope=np.ones((8, 8), 'f4'))", "rope must be a pair (cos, sin) of"),
        (
            "ca.attention(q, k, v, rope=(np.ones((8, 7), 'f4'), np.ones((8, 7), 'f4')))",
            "cos and sin of rope must both have shape (positions, head_dim / 2 =",
        ),
        (
            "ca.attention(q, k, v, rope=(np.ones((8, 8), 'f4'), np.ones((7, 8), 'f4')))",
            "cos and sin of rope must both have shape (positions, head_dim / 2 =",
        ),
        ("ca.attention(q, k, v, rope_offset_q=3)", "rope_interleaved=False and rope_offset_q=3"),
        ("ca.attention(q, k, v, rope=tables, rope_offset_q=-1)", "rope_offset_q must be 0 to"),
        ("ca.attention(q, k, v, rope=tables, rope_interleaved='yes')", "rope_interleaved must be"),
        ("ca.attention(q, k, v, qk_norm=np.ones(16, 'f4'))", "qk_norm must be a pair (q_weight,"),
        (
            "ca.attention(q, k, v, qk_norm=(np.ones(8, 'f4'), np.ones(8, 'f4')))",
            "q_weight of qk_norm must have shape (16,), (2, 16) or (32,), got",
        ),
        ("ca.attention(q, k, v, qk_norm=weights, qk_norm_eps=-1)", "qk_norm_eps must be a number"),
        ("ca.attention(q, k, v, layout='SHD')", "layout must be 'BHSD' or 'BSHD', got 'SHD'"),
        ("ca.attention(q, k, v, out=np.ones((1, 2, 8, 8), 'f2'))", "out must have shape (1, 2, 8,"),
        ("ca.attention(q, k, v, out=q)", "out must not share memory with q"),
        ("ca.attention(q, k, v, out=q.tolist())", "out must be a NumPy or CuPy array, or have"),
        ("ca.attention(q, k, v, backend='cuda')", "backend='cuda' takes CuPy arrays, got NumPy"),
        ("ca.attention(q, k, v, backend='numpy')", "backend must be 'cuda', 'mirror' or"),
        ("ca.attention(q, k, v, arch='hopper')", "arch must be sm_80, sm_86, sm_87, sm_88, sm_89,"),
        ("ca.attention(q, k, v, arch='sm_70')", "compute capability 7.0 is not supported, 8.0 and"),
        ("ca.attention(q, k, v, tiles=(64, 64))", "tiles must be a cupyattn.Tiles or None, got"),
        (
            "ca.attention(q, k, v, variant='fa_tc', tiles=ca.Tiles(60, 64, 4))",
            "fa_tc (portable) does not take Tiles(block_q=60, block_kv=64,",
        ),
        ("ca.attention(q, k, v, return_lse='yes')", "return_lse must be True or False, got 'yes'"),
        (
            "ca.attention(q * np.float16(np.inf), k, v, check_finite=True)",
            "q holds a NaN or an infinity",
        ),
        ("ca.attention(q, k, v, quant=ca.QuantConfig())", "quant is for fa_int8, got variant"),
        ("ca.attention(q, k, v, variant='fa_int8', quant='token')", "quant must be a"),
        ("ca.attention(q, k, v, colour='red')", "attention() got an unexpected keyword argument"),
        ("ca.plan(q, k, v, variant='none')", "variant must be one of unfused, fa, fa_warps,"),
        ("ca.plan(q, k, v)(q, k, v[:, :, :4])", "k and v must agree on length, got q.shape=(1, 2,"),
        ("ca.plan(q, k, v)(q, k)", "v must be a NumPy or CuPy array, or have __dlpack__, got"),
        (
            "ca.attention(q, k, v, out=np.lib.stride_tricks.as_strided(q.copy(), strides=(0, 2,"
            " 32, 2)))", "out must not overlap itself, got shape (1, 2, 8,",
        ),
        ("ca.plan(q, k, v)(q, k, v, out=q.copy())", "out was not given when the call was planned:"),
        ("ca.plan(q, k, v)(q, k, v, mask=np.ones((8, 8), bool))", "mask was not given when the"),
        ("ca.Tiles(0, 64, 4)", "tiles.block_q must be a positive integer up to 2**20, got 0"),
        ("ca.Tiles(64, 64, 3.5)", "tiles.num_warps must be a positive integer"),
        ("ca.attention(q, k, v, check_finite='yes')", "check_finite must be True or False, got"),
        ("ca.attention(q, k, v, rope=np.ones((8, 8, 8), 'f4'))", "rope must be a pair (cos, sin)"),
    ],
    "packed sequences": [
        ("ca.attention_varlen(q, k, v, ends, ends)", "q must have three axes (total, heads,"),
        ("ca.attention_varlen(*rows, ends, ends[:2])", "cu_seqlens_k must rise from 0 to 8, the"),
        ("ca.attention_varlen(*rows, ends[::-1], ends)", "cu_seqlens_q must rise from 0 to 8, the"),
        ("ca.attention_varlen(*rows, ends + 1, ends)", "cu_seqlens_q must rise from 0 to 8, the"),
        ("ca.attention_varlen(*rows, ends.astype('f4'), ends)", "cu_seqlens_q must be int32 or"),
        ("ca.attention_varlen(*rows, [0, 8], ends)", "cu_seqlens_q must be a NumPy or CuPy array,"),
        (
            "ca.attention_varlen(*rows, ends, ends, max_len_q=4, max_len_k=8)",
            "max_len_q=4 is less than the longest sequence of cu_seqlens_q, 5",
        ),
        ("ca.attention_varlen(*rows, ends, ends, max_len_q=-1)", "max_len_q must be between 0 and"),
        ("ca.attention_varlen(*rows, ends, ends, max_len_q=1.5)", "max_len_q must be a whole"),
        ("ca.attention_varlen(*rows)", "attention_varlen needs cu_seqlens_q and cu_seqlens_k"),
        ("ca.attention_varlen(z)", "this QuantizedQKV holds no packed sequences: call attention,"),
    ],
    "quantising": [
        ("ca.attention(z, k, v)", "a QuantizedQKV carries q, k, v and their config: give no k, v"),
        ("ca.attention(z, variant='fa_tc')", "a QuantizedQKV runs on fa_int8, got variant='fa_tc'"),
        ("ca.attention(z, quant=ca.QuantConfig())", "a QuantizedQKV carries q, k, v and their"),
        ("ca.attention(packed)", "this QuantizedQKV holds packed sequences: call attention_varlen"),
        ("ca.QuantConfig('row')", "quant.granularity_q must be 'tensor' or 'head' or 'block' or"),
        ("ca.QuantConfig(pv='fp4')", "quant.pv must be '16bit' or 'int8' or 'fp8', got 'fp4'"),
        ("ca.QuantConfig(granularity_v='channel')", "quant.granularity_v must be 'none' with"),
        ("ca.QuantConfig(symmetric=1)", "quant.symmetric must be True or False, got 1"),
        ("ca.QuantConfig(qk_bits=2)", "quant.qk_bits must be 8 or 4, got 2"),
        ("ca.QuantConfig(rotate=True)", "quant.rotate must be None or 'hadamard', got True"),
        ("ca.QuantConfig(qk_bits=4, symmetric=False)", "quant.qk_bits=4 needs"),
        ("ca.QuantConfig(fused=True)", "quant.fused=True needs quant.smooth_k=False, got True: a"),
        ("ca.QuantConfig(scales=(1.0,))", "quant.scales must be 'dynamic' or a pair (q_scale,"),
        ("ca.QuantConfig(scales='static')", "quant.scales must be 'dynamic', got 'static'"),
        ("ca.QuantConfig(scales=(1.0, 1.0))", "a single static q_scale needs"),
        ("ca.QuantConfig('tensor', 'tensor', scales=(0, 1.0))", "the static q_scale must be an"),
        ("ca.QuantConfig('head', 'head', scales=(q, q))", "the static q_scale must have shape"),
        (
            "ca.QuantConfig('head', 'head', scales=(q[0].astype('c8'),) * 2)",
            "the static q_scale must hold real numbers, got dtype complex64: convert",
        ),
        ("ca.QuantConfig(granularity_q=np.ones(2))", "quant.granularity_q must be 'tensor' or"),
        ("ca.QuantConfig(p_type='u8')", "quant.p_type must be '16bit' with pv='16bit', got 'u8'"),
        ("ca.quantize(q, k, v, quant=8)", "quant must be a cupyattn.QuantConfig or None, got 8"),
        ("ca.quantize(q, k, v, tiles=ca.Tiles(24, 64, 4))", "fa_int8 does not take"),
        ("ca.quantize(q, k, v, max_len_q=8)", "max_len_q and max_len_k go with cu_seqlens_q and"),
        (
            "ca.quantize(q, k, v, scale=1.0)",
            "quantize() got an unexpected keyword argument 'scale'",
        ),
        ("ca.QuantizedQKV.from_codes(q, q, q, 1.0, 1.0)", "q_codes must be int8, got float16"),
        ("ca.QuantizedQKV.from_codes(codes, codes, q, 0.0, 1.0)", "q_scale must be an array or a"),
        ("ca.QuantizedQKV.from_codes(codes, codes, q, 1e39, 1.0)", "q_scale must be an array or a"),
        ("ca.QuantizedQKV.from_codes(codes, codes, q, 1.0, 1e-50)", "k_scale must be an array or"),
        (
            "ca.QuantizedQKV.from_codes(codes, codes, q, np.ones(3, 'f4'), 1.0)",
            "q_scale must have shape (batch or 1, heads or 1, groups), got",
        ),
        ("ca.QuantizedQKV.from_codes(codes, codes, codes, 1.0, 1.0)", "v_scale is needed where v"),
        (
            "ca.QuantizedQKV.from_codes(codes, codes, q, 1.0, 1.0, v_scale=1.0)",
            "v_scale, v_mean, group_v, p_type and v_zero go with 8-bit codes of V,",
        ),
        (
            "ca.QuantizedQKV.from_codes(codes, codes, q, 1.0, 1.0, k_mean=np.ones(3, 'f4'))",
            "k_mean must have shape (1, 2, 16), got",
        ),
        ("z.dequantize('float16')", "dtype must be 'float32' or 'float64', got 'float16'"),
        ("ca.attention(kv)", "this QuantizedQKV holds keys and values only: give it queries, as"),
        ("ca.plan(kv)", "this QuantizedQKV holds keys and values only: give it queries, as"),
        ("ca.explain(kv)", "this QuantizedQKV holds keys and values only: give it queries, as"),
        ("z.with_q(q[0])", "q must be (batch, heads, len_q, head_dim) = (1, a multiple of 2, *,"),
        ("z.with_q(q, colour='red')", "with_q() got an unexpected keyword argument 'colour': it"),
    ],
    "gradients": [
        ("ca.attention_backward(q, q, k, v, q, lse[..., :4])", "lse must have shape (1, 2, 8), to"),
        ("ca.attention_backward(q, q, k, v, q, lse.astype('f2'))", "lse must be float32, got"),
        ("ca.attention_backward(q[:, :1], q, k, v, q, lse)", "d_out must have shape (1, 2, 8,"),
        ("ca.attention_backward(q, q, k, v, q, lse, variant='fa')", "attention_backward() got an"),
        (
            "ca.attention_backward(q, q, k, v, q, lse, deterministic='yes')",
            "deterministic must be True, False or None, got",
        ),
        ("ca.attention_backward(q, q, k, v, q, None)", "lse must be a NumPy or CuPy array, or"),
    ],
    "linear layers": [
        ("ca.act_quant(q.astype('i4'))", "x must be float16, bfloat16, float32, got int32"),
        ("ca.act_quant(x, block_size=0)", "block_size must be an integer of at least 1, got 0"),
        ("ca.act_quant(x[0, 0])", "x must have 1 or more axes, got shape ()"),
        ("ca.weight_quant(x.astype('i8'))", "w must be float16, bfloat16, float32, got int64"),
        ("ca.weight_quant(x[0])", "w must have 2 or more axes, got shape (256,)"),
        ("ca.weight_dequant(x, x)", "codes must be int8 with two axes or more and scales float32,"),
        ("ca.weight_dequant(b, b_scales[:, :0])", "scales of codes (4, 256) in blocks of 128 must"),
        ("ca.weight_dequant(b, b_scales, out_dtype='int8')", "out_dtype must be float16 or"),
        ("ca.int8_gemm(a, a_scales, b[:, :4], b_scales)", "a must be (..., k) and b (n, k), got"),
        ("ca.int8_gemm(x, a_scales, b, b_scales)", "a must be int8, got float32"),
        ("ca.int8_gemm(a, a_scales[:, :0], b, b_scales)", "a_scales must have shape (4, 2) for"),
        ("ca.int8_gemm(a, a_scales, b, b_scales, 'int8')", "out_dtype must be float16 or bfloat16"),
        ("ca.int8_gemm(a, a_scales, b, b_scales, bias=x)", "bias must have shape (4,) for"),
        ("ca.int8_gemm(a, a_scales, b, b_scales, activation='tanh')", "activation must be 'gelu'"),
        (
            "ca.int8_gemm(a, a_scales, b, b_scales, tiles=ca.Tiles(64, 64, 4))",
            "tiles must be a cupyattn.GemmTiles or None, got Tiles(block_q=64,",
        ),
        ("ca.Int8Linear.from_weight(x, outlier_columns=[1000])", "outlier_columns must be 0 to"),
        ("ca.Int8Linear.from_weight(x, activation='swish2')", "activation must be 'gelu' or"),
        ("ca.Int8Linear.from_weight(x)(x[:, :4])", "x must have shape (..., 256), got (4, 4)"),
        ("ca.Int8Linear(128, 128)", "codes must be an array, got 128: Int8Linear takes codes and"),
        ("ca.Int8Linear(None, b_scales)", "codes must be an array, got None: Int8Linear takes"),
        ("ca.Int8Linear(b, 128)", "scales must be an array, got 128: Int8Linear takes codes and"),
        ("ca.Int8Config(block_size=64)", "block_size must be 128, got 64: the INT8 products take"),
    ],
    "diffusion": [
        ("ca.Int8Attention(2, 16, num_timesteps=0)", "num_timesteps must be 1 or more, got 0"),
        ("ca.Int8Attention(2, 16)(q, k, v, 1000)", "timestep must be 0 to num_timesteps - 1 ="),
        ("ca.Int8Attention(2, 16)(q, k, v, 1.5)", "timestep must be an index into the schedule,"),
        ("ca.Int8Attention(2, 16)(q, k, v)", "give either timestep or sigma, got timestep=None"),
        ("ca.Int8Attention(2, 16, precision_policy='fast')", "precision_policy must be 'adaptive'"),
        ("ca.Int8Attention(2, 16, attention_type='sparse')", "attention_type must be one of"),
        (
            "ca.Int8Attention(2, 16, enable_pruning=True, pruning_ratio=1.0)",
            "pruning_ratio must be 0 to less than 1, got",
        ),
        ("ca.Int8Attention(2, 16, block_q=60)", "fa_tc (portable) does not take Tiles(block_q=60,"),
        ("ca.Int8Attention(2, 16, block_mask='near')", "attention_type='dense' takes neither of"),
        ("ca.Int8Attention(2, 16, sigmas='linear')", "kind must be 'edm', 'flow' or 'ddpm', got"),
        ("ca.Int8Attention(2, 16, softmax_eps=1e-5)", "softmax_eps=1e-05 is not supported: a sum"),
        ("ca.Int8Attention(3, 16)(q, k, v, 0)", "q must have num_heads=3 and head_dim=16, got 2"),
        ("ca.compute_sigma_schedule(0)", "timesteps must be 1 or more, got 0"),
        ("ca.compute_sigma_schedule(10, 'linear')", "kind must be 'edm', 'flow' or 'ddpm', got"),
        ("ca.compute_adaptive_scales([-1.0, 2.0])", "sigmas must be noise-to-signal ratios, 0 or"),
        ("ca.calibrate_quantization_scales([])", "batches is empty: give at least one (q, k)"),
        ("ca.calibrate_quantization_scales(len, [(q, k)])", "batches must be recorded (q, k) or"),
        ("ca.calibrate_quantization_scales(3)", "batches must be recorded (q, k) or (q, k, times"),
        ("ca.calibrate_quantization_scales([3])", "batch 0 must be (q, k) or (q, k,"),
        ("ca.calibrate_quantization_scales([{'q': q, 'k': k}])", "batch 0 must be (q, k) or (q,"),
        ("ca.calibrate_quantization_scales([(q,)])", "batch 0 must be (q, k) or (q, k, timestep),"),
        ("ca.calibrate_quantization_scales([(q, k)], percentile=101)", "percentile is in per"),
        ("ca.Int8Attention(2, block_q=64)", "Int8Attention needs head_dim, which q.shape ="),
    ],
    "judging and the rest": [
        ("ca.explain(q, k)", "v must be a NumPy or CuPy array, or have __dlpack__, got NoneType"),
        ("ca.register('mine', 'mine.cu')", "variant must be a cupyattn.Variant, got 'mine'"),
        ("ca.ladder(q, k, v, variants='fa')", "variants must be names of rungs, as ['fa'], got"),
        ("ca.ladder(q, k, v, scale='1')", "scale must be a number or None, got '1'"),
        ("ca.reference.attention_exact(q, k, v, scale=[1])", "scale must be a number or None, got"),
        ("ca.reference.attention_exact(q, k, v, block_mask=3)", "block_mask must be a cupyattn"),
        ("ca.bounds.attention(q, k, v, block_mask=3)", "block_mask must be a cupyattn.BlockM"),
        ("ca.bounds.attention(q, k, v, quantized=3)", "quantized must be a cupyattn.QuantizedQKV,"),
        ("ca.unfused.scores(q, None)", "k must be a NumPy or CuPy array, or have __dlpack__, got"),
        ("ca.attention(q, k, v, variant=ca.VARIANTS['fa'])", "variant must be one of unfused, fa,"),
        ("ca.QuantizedQKV.load(True)", "expected str, bytes or os.PathLike object, not bool"),
        ("ca.ladder(q, k, v, variants=['fa', 'flash'])", "variant must be one of unfused, fa,"),
        ("ca.testing.judge(q[:, :, :4], q, k, v, variant='fa')", "o must have q's shape (1, 2, 8,"),
        ("ca.testing.judge(q, q, k, v, variant='flash')", "variant must be one of unfused, fa,"),
        (
            "ca.testing.judge(q, q, k, v, lse=lse[..., :2], variant='fa')",
            "lse must have shape (1, 2, 8), got (1, 2,",
        ),
        ("ca.testing.judge(q, q, k, v, variant='fa_int8')", "fa_int8 works on quantised operands:"),
        ("ca.bounds.attention(q, k, v, variant='fa_int8')", "fa_int8 works on quantised operands:"),
        ("ca.reference.attention_mirror(q, k, v, variant='nothing')", "variant must be one of"),
        ("ca.reference.attention_exact(q, k, v, rows=[100])", "rows must lie in [0, 8), got [100]"),
        ("ca.unfused.scores(q, k[..., :4])", "q and k must agree on head_dim, got q.shape=(1, 2,"),
        ("ca.unfused.softmax(q[0])", "S must be float32, got float16"),
        ("ca.unfused.weighted_sum(q, v[:, :, :4])", "P must be float32, got float16"),
        ("ca.distributions.make('gauss', 1, 2, 8, 8, 16)", "distribution must be one of normal,"),
        ("ca.TritonInt8Config", "TritonInt8Config is not in cupyattn: use cupyattn.Int8Config,"),
        ("ca.quantize_kv(k, v, quant='int8')", "quant must be a cupyattn.QuantConfig or None, got"),
        ("ca.quantize_kv(k, v[:, :1])", "k and v must both be (batch, heads_kv, len_kv,"),
        ("packed.with_q(rows[0][:3])", "q has 3 rows, and these codes are of 8 packed rows: give"),
        ("ca.TritonInt8LinearLayer", "TritonInt8LinearLayer is not in cupyattn: use"),
        ("ca.KandinskyInt8Optimizer", "KandinskyInt8Optimizer is not in cupyattn: use"),
        ("ca.adaptive_precision_attention", "adaptive_precision_attention is not in cupyattn: use"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 8, 16)).astype(np.float16)
    rows, ends = [x[0].swapaxes(0, 1).copy() for x in (q, k, v)], np.int32([0, 3, 8])
    z = ca.quantize(q, k, v)
    packed = ca.quantize(*rows, cu_seqlens_q=ends, cu_seqlens_k=ends)
    _, lse = ca.attention(q, k, v, return_lse=True)
    x = rng.standard_normal((4, 256)).astype(np.float32)
    kv = ca.quantize_kv(k, v)
    names = {"np": np, "ca": ca, "q": q, "k": k, "v": v, "rows": rows, "ends": ends, "z": z}
    names |= {"packed": packed, "codes": z.q_codes.copy(), "lse": lse, "x": x, "kv": kv}
    names |= {"tables": (np.ones((8, 8), "f4"),) * 2, "weights": (np.ones(16, "f4"),) * 2}
    names |= zip(("a", "a_scales"), ca.act_quant(x), strict=True)
    return names | dict(zip(("b", "b_scales"), ca.weight_quant(x), strict=True))


@pytest.mark.parametrize("function", MISUSES)
def test_a_misuse_is_answered_by_one_sentence(function: str, given: dict[str, Any]) -> None:
    for call, says in MISUSES[function]:
        said = "nothing"
        try:
            eval(call, dict(given))
        except (ValueError, TypeError, ca.UnsupportedError) as error:
            said = str(error)
        assert said.startswith(says), f"{call} is answered: {said}"
        assert "\n" not in said and len(said) < 300, f"{call} is answered: {said}"


#: Functions and what they are called with: each argument is tried as a thing of another kind.
FUNCTIONS = {
    "ca.attention": "q=q, k=k, v=v, variant='fa_int8', scale=1.0, causal=False, window=(-1, -1), "
    "mask=None, bias=None, rope=None, qk_norm=None, block_mask=None, layout='BHSD', out=None, "
    "quant=None, tiles=None, arch=None, backend=None",
    "ca.attention_varlen": "q=rows[0], k=rows[1], v=rows[2], cu_seqlens_q=ends, cu_seqlens_k=ends, "
    "max_len_q=None, mask=None",
    "ca.attention_backward": "d_out=q, q=q, k=k, v=v, out=q, lse=lse, deterministic=None",
    "ca.quantize": "q=q, k=k, v=v, quant=None, tiles=None, backend=None, rope=None",
    "ca.quantize_kv": "k=k, v=v, quant=None, cu_seqlens_k=None",
    "kv.with_q": "q=q, backend='mirror', rope=None",
    "ca.QuantizedQKV.from_codes": "q_codes=codes, k_codes=codes, v=q, q_scale=1.0, k_scale=1.0, "
    "q_zero=None, k_mean=None, v_scale=None",
    "ca.act_quant": "x=x, block_size=128, backend=None",
    "ca.norm_quant": "x=x, norm='rms', weight=None, scale=None, shift=None, eps=1e-6, rotate=None",
    "ca.weight_quant": "w=x, block_size=128",
    "ca.weight_dequant": "codes=b, scales=b_scales, block_size=128",
    "ca.int8_gemm": "a=a, a_scales=a_scales, b=b, b_scales=b_scales, bias=None, out=None",
    "ca.Int8Linear": "codes=b, scales=b_scales, bias=None, activation=None, outlier_columns=()",
    "ca.Int8Linear.from_weight": "weight=x, bias=None, activation=None, outlier_columns=()",
    "ca.BlockMask": "mask=np.ones((1, 1, 1, 1), bool), block_q=64, block_kv=64",
    "ca.BlockMask.from_dense": "mask=np.ones((8, 8), bool)",
    "ca.BlockMask.from_window": "len_q=8, len_kv=8, window=(3, 3)",
    "ca.QuantConfig": "granularity_q='token', pv='16bit', scales='dynamic'",
    "ca.Tiles": "block_q=64, block_kv=64, num_warps=4",
    "ca.Int8Attention": "num_heads=2, head_dim=16, num_timesteps=10, timestep_scales=None, "
    "precision_policy='adaptive', window_size=None, out_proj=None, quant=None, scale=None",
    "ca.Int8Attention(2, 16)": "q=q, k=k, v=v, timestep=3, mask=None, rope=None",
    "ca.calibrate_quantization_scales": "batches=[(q, k)], percentile=99.0, of='maxima'",
    "ca.testing.judge": "o=q, q=q, k=k, v=v, variant='auto', lse=lse, quantized=None, mask=None, "
    "block_mask=None, rope=None",
    "ca.bounds.attention": "q=q, k=k, v=v, variant='fa', tiles=None, block_mask=None, scale=1.0, "
    "quantized=None",
    "ca.reference.attention_exact": "q=q, k=k, v=v, scale=1.0, mask=None, block_mask=None",
    "ca.reference.attention_mirror": "q=q, k=k, v=v, variant='fa', tiles=None, block_mask=None",
    "ca.ladder": "q=q[:, :1], k=k[:, :1], v=v[:, :1], variants=['fa'], scale=1.0",
    "ca.unfused.scores": "q=q, k=k, scale=1.0, mask=None, bias=None, block_mask=None",
    "ca.unfused.softmax": "S=lse[..., None]", "ca.unfused.weighted_sum": "P=x[None, None], v=v",
}  # fmt: skip
OTHERS = (None, 3, "x", [1], object(), {})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_thing_of_another_kind_ends_in_no_error_of_the_inside(
    name: str, given: dict[str, Any]
) -> None:
    """It is taken, or refused in one line; a str may be the name of a file."""
    function, arguments = (eval(text, dict(given)) for text in (name, f"dict({FUNCTIONS[name]})"))
    refused = 0
    for argument in arguments:
        for other in OTHERS:
            try:
                function(**{**arguments, argument: other})
            except (ValueError, TypeError, FileNotFoundError, ca.UnsupportedError) as error:
                refused += 1
                assert "\n" not in str(error) and "has no attribute" not in str(error)
    assert refused > len(arguments)


def test_with_those_of_the_command_they_are_at_least_220() -> None:
    calls = [pair[0] for of in (MISUSES, OF_COMMANDS) for some in of.values() for pair in some]
    assert len(calls) == len(set(calls)) >= 220
