"""What a caller asks for: the options of one call, checked and resolved against its arrays."""

from __future__ import annotations

import numbers
from dataclasses import replace
from typing import Any

import numpy as np

from cupyattn.arrays import interchange
from cupyattn.arrays.kinds import array_namespace
from cupyattn.compiler import target
from cupyattn.compiler.architectures import capability_of, check_arch
from cupyattn.kernels import ladder, limits
from cupyattn.kernels.tiles import check_kind
from cupyattn.problem import checks, choose
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.request import Options, Request
from cupyattn.problem.rope import check_turned_before
from cupyattn.problem.row_preparation import Preparation
from cupyattn.problem.scoring import check_smoothing
from cupyattn.problem.sequences import Sequences, one_entry, take_sequences
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.static_scales import check_packed_quant


def resolve(q: Any, k: Any, v: Any, options: Options) -> Request:
    """Check a call and choose rung and backend.

    Parameters
    ----------
    q, k, v : array, or q a QuantizedQKV and k, v None
    options : Options

    Returns
    -------
    Request

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `cupyattn.attention` says.
    """
    check_kind(options.tiles)
    _check_kind("quant", options.quant, QuantConfig, "a cupyattn.QuantConfig or None")
    _check_kind("block_mask", options.block_mask, BlockMask, "a cupyattn.BlockMask or None")
    _check_kind("causal", options.causal, (bool, np.bool_), "True or False")
    _check_kind("scale", options.scale, numbers.Real, "a number or None")
    check_arch(options.arch)
    if options.layout not in ("BHSD", "BSHD"):
        raise ValueError(f"layout must be 'BHSD' or 'BSHD', got {options.layout!r}")
    if isinstance(q, QuantizedQKV):
        return _resolve_quantized(q, k, v, options)
    packed = options.cu_seqlens_q is not None or options.cu_seqlens_k is not None
    if not packed and (options.max_len_q, options.max_len_k) != (None, None):
        raise TypeError("max_len_q and max_len_k go with cu_seqlens_q and cu_seqlens_k")
    named = zip("qkv", (q, k, v), strict=True)
    (q, restore), (k, _), (v, _) = (interchange.take(name, array) for name, array in named)
    array_namespace(q, k, v)
    given = tuple(tuple(x.shape) for x in (q, k, v))
    if packed:
        options = replace(options, layout="BSHD")  # with a batch axis before, that is their order
        q, k, v = (one_entry(n, a) for n, a in zip("qkv", (q, k, v), strict=True))
    q, k, v = (interchange.contiguous_last_axis(to_bhsd(a, options.layout)) for a in (q, k, v))
    sizes = limits.check_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape), given)
    sequences = None
    if packed:
        sequences = take_sequences(q, sizes[3:5], vars(options), look=options.check_finite)
        options = replace(options, max_len_q=sequences.max_len_q, max_len_k=sequences.max_len_k)
    call, mask, bias = _check_options(sizes, checks.check_dtype(q, k, v), q, options, sequences)
    preparation = _take_preparation(q, call, options)
    if preparation is not None:
        call = replace(call, qk_norm=preparation.norm is not None)
        if (rope := preparation.rope) is not None:
            call = replace(call, rope=rope.pairs, rope_offset_q=rope.offset_q)
    if options.variant == "auto":
        choice = _choose(options, call, _capability(q, options.arch))
        options = replace(options, quant=choice.quant)
        variant, why = ladder.lookup(choice.variant), choice.why
    else:
        variant, why = ladder.lookup(options.variant), "asked for by name"
    variant.check_dtype(call.dtype)
    interchange.check_one_device(
        q=q, k=k, v=v, mask=mask, bias=bias, **(preparation.buffers if preparation else {}),
        **_offsets(sequences),
    )  # fmt: skip
    if options.quant is not None and variant.family != "int8":
        raise ValueError(f"quant is for fa_int8, got variant {variant.name!r}")
    if packed and options.quant is not None:
        check_packed_quant(options.quant)
    if options.check_finite:
        _check_finite(q, k, v)
    if call.softcap and variant.family == "int8":
        options = replace(options, quant=replace(options.quant or QuantConfig(), smooth_k=False))
        why += "; keys are not smoothed, since a softcap would feel their mean"
    return Request(
        options, variant, why, call, target.choose(options.backend, q), q, k, v, mask, bias,
        _kept_blocks(options, q), preparation, None,
        _receiver(options, call, (q, k, v, mask, bias)),
        lambda o: restore(as_given(o, options.layout, packed=packed)), restore,
        **_offsets(sequences),
    )  # fmt: skip


def _offsets(sequences: Sequences | None) -> dict[str, Any]:
    if sequences is None:
        return {}
    return {name: getattr(sequences, name) for name in ("cu_seqlens_q", "cu_seqlens_k")}


def _resolve_quantized(quantized: QuantizedQKV, k: Any, v: Any, options: Options) -> Request:
    if k is not None or v is not None or options.quant is not None:
        raise ValueError(
            "a QuantizedQKV carries q, k, v and their config: give no k, v or quant beside it"
        )
    if options.rope is not None or options.qk_norm is not None:
        check_turned_before(quantized)
    if options.layout != "BHSD" and quantized.cu_seqlens_q is None:
        raise ValueError(f"a QuantizedQKV has layout 'BHSD', got layout={options.layout!r}")
    variant = ladder.lookup("fa_int8" if options.variant == "auto" else options.variant)
    if variant.family != "int8":
        raise ValueError(f"a QuantizedQKV runs on fa_int8, got variant={options.variant!r}")
    quantized, sequences = _contiguous(quantized), _sequences_of(quantized, options)
    if sequences is not None:
        options = replace(
            options, layout="BSHD", max_len_q=sequences.max_len_q, max_len_k=sequences.max_len_k
        )
    v = quantized.v if quantized.v_codes is None else quantized.v_codes
    operands = quantized.q_codes, quantized.k_codes, v
    keys = (*quantized.k_codes.shape[:3], quantized.head_dim)
    sizes = limits.check_shapes(quantized.shape, keys, keys)
    call, mask, bias = _check_options(sizes, quantized.out_dtype, operands[0], options, sequences)
    scales = {"q_scale": quantized.q_scale, "k_scale": quantized.k_scale}
    codes = dict(zip(("q_codes", "k_codes", "v"), operands, strict=True))
    interchange.check_one_device(**codes, **scales, mask=mask, bias=bias, **_offsets(sequences))
    check_smoothing(call.softcap, quantized.k_mean)
    return Request(
        options, variant, "the rung for quantised operands", call,
        target.choose(options.backend, operands[0]), *operands, mask, bias,
        _kept_blocks(options, operands[0]), None, quantized,
        _receiver(options, call, (*operands, mask, bias)),
        lambda o: as_given(o, options.layout, packed=sequences is not None), lambda lse: lse,
        **_offsets(sequences),
    )  # fmt: skip


def _sequences_of(quantized: QuantizedQKV, options: Options) -> Sequences | None:
    """Return the sequences of quantised operands, whose limits a caller may only raise."""
    if options.cu_seqlens_q is not None or options.cu_seqlens_k is not None:
        raise ValueError(
            "a QuantizedQKV says itself where its sequences begin: give no cu_seqlens_q or "
            "cu_seqlens_k beside it"
        )
    if quantized.cu_seqlens_q is None:
        if (options.max_len_q, options.max_len_k) != (None, None):
            raise ValueError(
                "this QuantizedQKV holds no packed sequences: give no max_len_q or max_len_k, or "
                "quantize with cu_seqlens_q and cu_seqlens_k"
            )
        return None
    longest = {}
    for name in ("max_len_q", "max_len_k"):
        own, limit = getattr(quantized, name), getattr(options, name)
        longest[name] = own if limit is None else limits.check_length(name, limit)
        if longest[name] < own:
            raise ValueError(f"{name}={limit} is less than that of the QuantizedQKV, {own}")
    return Sequences(quantized.cu_seqlens_q, quantized.cu_seqlens_k, **longest)


def _check_options(
    sizes: tuple[int, int, int, int, int, int],
    dtype: str,
    q: Any,
    options: Options,
    sequences: Sequences | None,
) -> tuple[AttentionSpec, Any, Any]:
    """Return the call, and mask and bias as the kernels take them (None where absent).

    `sizes` are those of the arrays, packed or not.
    """
    totals = sizes[3:5]
    if sequences is not None:
        longest = sequences.max_len_q, sequences.max_len_k
        sizes = (sequences.batch, *sizes[1:3], *longest, sizes[5])
    given = {}
    for name in ("mask", "bias"):
        array = getattr(options, name)
        if array is not None:
            array, _ = interchange.take(name, array)
            array_namespace(q, array)
        given[name] = array
    call = checks.check_options(
        sizes, dtype, scale=options.scale, causal=options.causal,
        causal_align=options.causal_align, return_lse=options.return_lse, window=options.window,
        softcap=options.softcap, block_mask=options.block_mask, **given,
    )  # fmt: skip
    mask, bias = (
        None if x is None else interchange.broadcast(x, call.score_shape) for x in given.values()
    )
    if sequences is not None:
        call = checks.check_packed(
            call, totals, causal=options.causal, causal_align=options.causal_align,
            window=options.window,
        )  # fmt: skip
    return call, mask, bias


def _kept_blocks(options: Options, q: Any) -> Any:
    return None if options.block_mask is None else options.block_mask.kept_blocks(q)


def _take_preparation(q: Any, call: AttentionSpec, options: Options) -> Preparation | None:
    """Return the caller's tables and weights, checked against his arrays."""
    given = dict(vars(options))
    for option, names in (("rope", ("cos", "sin")), ("qk_norm", ("q_weight", "k_weight"))):
        if isinstance(given[option], (tuple, list)):
            taken = zip(names, given[option], strict=False)
            given[option] = tuple(interchange.take(name, a)[0] for name, a in taken)
            array_namespace(q, *given[option])
    sizes = call.heads, call.heads_kv, call.len_q, call.len_kv, call.head_dim
    return Preparation.of(given, sizes)


def _contiguous(quantized: QuantizedQKV) -> QuantizedQKV:
    """Return the operands with contiguous last axes, copied where they were not."""
    by_row = ("q_codes", "k_codes", "v")
    whole_too = ("k_mean", "v_codes", "v_scale", "v_mean", "q_scale", "k_scale")
    zeros = ("q_zero", "k_zero", "v_zero", "q_code_sum", "k_code_sum")
    offsets = ("cu_seqlens_q", "cu_seqlens_k")
    tidy = {}
    for name in (*by_row, *whole_too, *zeros, *offsets):
        a = getattr(quantized, name)
        if a is not None:  # aligned since __post_init__
            whole = array_namespace(a).ascontiguousarray
            tidy[name] = (interchange.contiguous_last_axis if name in by_row else whole)(a)
    changed = {name: a for name, a in tidy.items() if a is not getattr(quantized, name)}
    return replace(quantized, **changed) if changed else quantized


def to_bhsd(array: Any, layout: str) -> Any:
    """Return a view with heads before length, or back: the exchange is its own inverse."""
    return array.swapaxes(1, 2) if layout == "BSHD" and array.ndim == 4 else array


def as_given(o: Any, layout: str, *, packed: bool) -> Any:
    """Return a result of layout BHSD in the caller's layout, packed where his arrays are."""
    o = to_bhsd(o, layout)
    return o[0] if packed else o


def _check_kind(name: str, value: Any, kinds: Any, wanted: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {value!r:.60}")


def _receiver(options: Options, call: AttentionSpec, inputs: tuple[Any, ...]) -> Any:
    if options.out is None:
        return None
    out = interchange.take_receiver("out", options.out)
    array_namespace(out, *(x for x in inputs if x is not None))
    if call.packed is not None:
        _, heads, rows, head_dim = call.output_shape
        given, out = tuple(out.shape), one_entry("out", out)
        if given != (rows, heads, head_dim):
            raise ValueError(f"out must have shape {(rows, heads, head_dim)}, got shape {given}")
    out = to_bhsd(out, options.layout)
    interchange.check_one_device(q=inputs[0], out=out)
    checks.check_out(out, call, inputs)
    return out


def _choose(options: Options, call: AttentionSpec, capability: int | None) -> choose.Choice:
    """Choose the rung of an accuracy class, or take fa_int8 quantising as the caller says."""
    quant, accuracy = options.quant, options.accuracy
    seen = call.len_kv  # by a row
    if call.window and call.causal:  # a window of two sides
        seen = min(seen, max(1, call.causal_shift - call.window_shift + 1))
    choice = choose.choose(
        accuracy, call.dtype, call.head_dim, seen, call.causal, capability, call.len_q
    )
    wanted = {"balanced": ("16bit",), "aggressive": ("int8", "fp8")}.get(accuracy)
    if quant is None or wanted is None:
        return replace(choice, quant=quant or choice.quant)
    if quant.pv not in wanted:
        raise ValueError(
            f"accuracy={accuracy!r} takes quant.pv={' or '.join(map(repr, wanted))}, "
            f"got {quant.pv!r}: name variant='fa_int8' to choose for yourself"
        )
    return choose.Choice("fa_int8", "the rung that quantises, as quant asks", quant)


def _capability(q: Any, arch: str | None) -> int | None:
    """Return the compute capability that a call runs on, times ten; None on the host."""
    if arch is not None:
        return capability_of(arch)
    return int(q.device.compute_capability) if interchange.is_cupy(q) else None


def _check_finite(q: Any, k: Any, v: Any) -> None:
    for name, array in zip("qkv", (q, k, v), strict=True):
        if not bool(array_namespace(array).isfinite(array.astype("float32")).all()):
            raise ValueError(f"{name} holds a NaN or an infinity (check_finite=True)")
