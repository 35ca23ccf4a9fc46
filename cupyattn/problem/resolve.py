"""From what a caller asks for to a `Request`: checked, and settled against the arrays.

Some calls are refused before there is anything to run: JAX traces shapes, and ranks agree on a call
whose rows lie elsewhere. For them `describe_call` is the part of `resolve` that reads no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cupyattn.arrays import interchange, memory
from cupyattn.arrays.kinds import array_namespace
from cupyattn.compiler import target
from cupyattn.compiler.architectures import (
    E4M3_CAPABILITY,
    capability_of,
    check_arch,
    check_capability,
)
from cupyattn.errors import shown
from cupyattn.kernels import ladder, limits
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.tiles import Tiles, check_kind
from cupyattn.problem import checks, choose
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.request import Request
from cupyattn.problem.rope import check_turned_before
from cupyattn.problem.row_preparation import PAIRS, Preparation
from cupyattn.problem.scoring import check_smoothing
from cupyattn.problem.sequences import Sequences, one_entry, take_lengths, take_sequences
from cupyattn.problem.settings import Settings
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.operand_protocol import check_queries
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.static_scales import (
    check_packed_quant,
    check_static_scales,
    static_scales,
)

_AUTO = ("auto",)
_NO_OFFSETS = {"cu_seqlens_q": None, "cu_seqlens_k": None}


def resolve(settings: Settings, arrays: Mapping[str, Any]) -> Request:
    """Check a call and choose rung and backend.

    Parameters
    ----------
    settings : Settings
    arrays : mapping
        The caller's, as `cupyattn.problem.settings.parse` names them.

    Returns
    -------
    Request

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `cupyattn.attention` says.
    """
    if isinstance(arrays["q"], QuantizedQKV):
        return _resolve_quantized(settings, arrays)
    found = describe_call(settings, arrays)
    if settings.check_finite:
        _check_finite(found)
    request = replace(found, kept_blocks=_kept_blocks(found), receiver=_receiver(found))
    return _with_given_scales(request)


def _check_settings(settings: Settings, arrays: Mapping[str, Any]) -> None:
    """Raise for settings that no call has."""
    check_kind(settings.tiles)
    _check_kind("quant", settings.quant, QuantConfig, "a cupyattn.QuantConfig or None")
    _check_kind("block_mask", arrays.get("block_mask"), BlockMask, "a cupyattn.BlockMask or None")
    for name in ("causal", "return_lse", "check_finite"):
        checks.check_switch(name, getattr(settings, name))
    check_arch(settings.arch)
    if settings.arch is not None and settings.quant is not None and settings.quant.pv == "fp8":
        check_capability(settings.arch, E4M3_CAPABILITY)
    if settings.layout not in ("BHSD", "BSHD"):
        raise ValueError(f"layout must be 'BHSD' or 'BSHD', got {shown(settings.layout)}")


def describe_call(settings: Settings, arrays: Mapping[str, Any]) -> Request:
    """Check a call of arrays by shapes, types and options, and choose the rung.

    What `resolve` adds is left out: blocks that are kept, an ``out``, scales that are given.

    Parameters
    ----------
    settings, arrays
        As for `resolve`. No value of q, k, v, mask or bias is read.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `cupyattn.attention` says.
    """
    _check_settings(settings, arrays)
    packed = "cu_seqlens_q" in arrays or "cu_seqlens_k" in arrays
    if not packed and (settings.max_len_q, settings.max_len_k) != (None, None):
        raise TypeError("max_len_q and max_len_k go with cu_seqlens_q and cu_seqlens_k")
    if packed and ("lengths_q" in arrays or "lengths_kv" in arrays):
        raise TypeError(
            "lengths_q and lengths_kv are of padded batches, cu_seqlens_q and cu_seqlens_k of "
            "packed sequences: give one of both pairs"
        )
    (q, as_given), (k, _), (v, _) = (interchange.take(name, arrays[name]) for name in "qkv")
    array_namespace(q, k, v)
    given = tuple(tuple(x.shape) for x in (q, k, v))
    if packed:
        settings = settings._replace(layout="BSHD")  # with a batch axis before, their order
        q, k, v = (one_entry(n, a) for n, a in zip("qkv", (q, k, v), strict=True))
    q, k, v = (interchange.contiguous_last_axis(to_bhsd(a, settings.layout)) for a in (q, k, v))
    sizes = limits.check_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape), given)
    sequences = None
    if packed:
        asked = {**_NO_OFFSETS, **settings._asdict(), **arrays}
        sequences = take_sequences(q, sizes[3:5], asked, look=settings.check_finite)
        settings = settings._replace(
            max_len_q=sequences.max_len_q, max_len_k=sequences.max_len_k
        )
    dtype = checks.check_dtype(q, k, v)
    call, mask, bias = _check_options(sizes, dtype, q, settings, arrays, sequences)
    call, lengths = _padded(call, q, settings, arrays)
    preparation = _take_preparation(q, call, settings, arrays)
    if preparation is not None:
        call = replace(call, qk_norm=preparation.norm is not None)
        if (rope := preparation.rope) is not None:
            call = replace(call, rope=rope.pairs, rope_offset_q=rope.offset_q)
    if settings.variant == "auto":
        choice = _choose(settings, call, _capability(q, settings.arch))
        settings = settings._replace(quant=choice.quant)
        variant, why = ladder.lookup(choice.variant), choice.why
    else:
        variant, why = ladder.lookup(settings.variant, also=_AUTO), "asked for by name"
    variant.check_dtype(call.dtype)
    interchange.check_one_device(
        q=q, k=k, v=v, mask=mask, bias=bias, **(preparation.buffers if preparation else {}),
        **_offsets(sequences), **lengths,
    )  # fmt: skip
    if settings.quant is not None and variant.family != "int8":
        raise ValueError(
            f"quant is for fa_int8, got variant {settings.variant!r}: add variant='fa_int8'"
        )
    if call.own_lengths is not None and settings.quant is not None:
        check_packed_quant(settings.quant)
    if call.softcap and variant.family == "int8":
        quant = replace(settings.quant or QuantConfig(), smooth_k=False)
        settings = settings._replace(quant=quant)
        why += "; keys are not smoothed, since a softcap would feel their mean"
    return Request(
        settings, arrays, variant, why, call, _backend(settings, variant, q), q, k, v, mask, bias,
        preparation, as_given, **_offsets(sequences), **lengths,
    )  # fmt: skip


def _with_given_scales(request: Request) -> Request:
    """Add the scales that the caller gives, where kernels read them."""
    quant, call = request.settings.quant, request.call
    if quant is None or not quant.static:
        return request
    with memory.on_device_of(request.q):
        xp = array_namespace(request.q)
        given = static_scales(xp, quant, *_scaled(request))
        if call.padded is not None:  # a kernel may write NaN over the scale of an entry alone
            given = {
                name: xp.ascontiguousarray(xp.broadcast_to(x, (call.batch, *x.shape[1:])))
                for name, x in given.items()
                if x is not None
            }
    return replace(request, kept={f"{name}_static_scale": x for name, x in given.items()})


def check_given_scales(request: Request) -> None:
    """Raise for scales that the caller gives, if there are any, and that do not fit the operands.

    No value of an array on a device is read.
    """
    quant = request.settings.quant
    if quant is not None and quant.static:
        check_static_scales(quant, *_scaled(request))


def _scaled(request: Request) -> tuple[tuple[int, ...], tuple[int, ...], Tiles, int | None]:
    """Return what the shapes of given scales follow from, as `static_scales` takes it."""
    sequences = request.call.batch if request.call.packed else None
    return tuple(request.q.shape), tuple(request.k.shape), request.scale_tiles, sequences


def _padded(
    call: AttentionSpec, q: Any, settings: Settings, arrays: Mapping[str, Any]
) -> tuple[AttentionSpec, dict[str, Any]]:
    """Return a call with the lengths of its batch entries, and these; the call as it is without."""
    lengths = take_lengths(q, arrays)
    if lengths:
        given = "lengths_q" in lengths, "lengths_kv" in lengths
        call = checks.check_padded(call, given, **settings.places)
    return call, lengths


def _backend(settings: Settings, variant: Variant, q: Any) -> str:
    """Return where a rung runs."""
    return target.choose(settings.backend, q, registered=variant.source is not None)


def _offsets(sequences: Sequences | None) -> dict[str, Any]:
    if sequences is None:
        return {}
    return {name: getattr(sequences, name) for name in ("cu_seqlens_q", "cu_seqlens_k")}


def _resolve_quantized(settings: Settings, arrays: Mapping[str, Any]) -> Request:
    _check_settings(settings, arrays)
    quantized = arrays["q"]
    check_queries(quantized)
    if arrays["k"] is not None or arrays["v"] is not None or settings.quant is not None:
        raise ValueError(
            "a QuantizedQKV carries q, k, v and their config: give no k, v or quant beside it"
        )
    if "rope" in arrays or "qk_norm" in arrays:
        check_turned_before(quantized)
    if settings.layout != "BHSD" and quantized.cu_seqlens_q is None:
        raise ValueError(f"a QuantizedQKV has layout 'BHSD', got layout={settings.layout!r}")
    name = "fa_int8" if settings.variant == "auto" else settings.variant
    variant = ladder.lookup(name, also=_AUTO)
    if variant.family != "int8":
        raise ValueError(f"a QuantizedQKV runs on fa_int8, got variant={settings.variant!r}")
    quantized, sequences = _contiguous(quantized), _sequences_of(quantized, settings, arrays)
    if sequences is not None:
        settings = settings._replace(
            layout="BSHD", max_len_q=sequences.max_len_q, max_len_k=sequences.max_len_k
        )
    v = quantized.v if quantized.v_codes is None else quantized.v_codes
    operands = quantized.q_codes, quantized.k_codes, v
    keys = (*quantized.k_codes.shape[:3], quantized.head_dim)
    sizes = limits.check_shapes(quantized.shape, keys, keys)
    call, mask, bias = _check_options(
        sizes, quantized.out_dtype, operands[0], settings, arrays, sequences
    )
    if sequences is not None and ("lengths_q" in arrays or "lengths_kv" in arrays):
        raise TypeError(
            "this QuantizedQKV holds packed sequences: give no lengths_q or lengths_kv beside it"
        )
    call, lengths = _padded(call, operands[0], settings, arrays)
    of_entries = {**_offsets(sequences), **lengths}
    scales = {"q_scale": quantized.q_scale, "k_scale": quantized.k_scale}
    codes = dict(zip(("q_codes", "k_codes", "v"), operands, strict=True))
    interchange.check_one_device(
        **codes, **scales, mask=mask, bias=bias, **of_entries
    )
    check_smoothing(call.softcap, quantized.k_mean)
    request = Request(
        settings, arrays, variant, "the rung for quantised operands", call,
        _backend(settings, variant, operands[0]), *operands, mask, bias, None,
        quantized.as_given, quantized=quantized, **of_entries,
    )  # fmt: skip
    return replace(request, kept_blocks=_kept_blocks(request), receiver=_receiver(request))


def _sequences_of(
    quantized: QuantizedQKV, settings: Settings, arrays: Mapping[str, Any]
) -> Sequences | None:
    """Return the sequences of quantised operands, whose limits a caller may only raise."""
    if "cu_seqlens_q" in arrays or "cu_seqlens_k" in arrays:
        raise ValueError(
            "a QuantizedQKV says itself where its sequences begin: give no cu_seqlens_q or "
            "cu_seqlens_k beside it"
        )
    if quantized.cu_seqlens_q is None:
        if (settings.max_len_q, settings.max_len_k) != (None, None):
            raise ValueError(
                "this QuantizedQKV holds no packed sequences: give no max_len_q or max_len_k, or "
                "quantize with cu_seqlens_q and cu_seqlens_k"
            )
        return None
    longest = {}
    for name in ("max_len_q", "max_len_k"):
        own, limit = getattr(quantized, name), getattr(settings, name)
        longest[name] = own if limit is None else limits.check_length(name, limit)
        if longest[name] < own:
            raise ValueError(f"{name}={limit} is less than that of the QuantizedQKV, {own}")
    return Sequences(quantized.cu_seqlens_q, quantized.cu_seqlens_k, **longest)


def _check_options(
    sizes: tuple[int, int, int, int, int, int],
    dtype: str,
    q: Any,
    settings: Settings,
    arrays: Mapping[str, Any],
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
        array = arrays.get(name)
        if array is not None:
            array, _ = interchange.take(name, array)
            array_namespace(q, array)
        given[name] = array
    scores = settings.scores({**arrays, **given})
    call = checks.check_options(
        sizes, dtype, settings.scale, scores, return_lse=settings.return_lse
    )
    mask, bias = (
        None if x is None else interchange.broadcast(x, call.score_shape) for x in given.values()
    )
    if sequences is not None:
        call = checks.check_packed(
            call, totals, causal=settings.causal, causal_align=settings.causal_align,
            window=settings.window,
        )  # fmt: skip
    return call, mask, bias


def _kept_blocks(request: Request) -> Any:
    mask = request.block_mask
    return None if mask is None else mask.kept_blocks(request.q)


def _take_preparation(
    q: Any, call: AttentionSpec, settings: Settings, arrays: Mapping[str, Any]
) -> Preparation | None:
    """Return the caller's tables and weights, checked against the arrays."""
    given = settings.rows(arrays)
    for option, names in PAIRS.items():
        given[option] = interchange.taken_pair(names, given[option])
        if isinstance(given[option], tuple):
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


def _check_kind(name: str, value: Any, kinds: Any, wanted: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}")


def _receiver(request: Request) -> Any:
    if "out" not in request.given:
        return None
    call, inputs = request.call, (request.q, request.k, request.v, request.mask, request.bias)
    out = interchange.take_receiver("out", request.given["out"])
    array_namespace(out, *(x for x in inputs if x is not None))
    if call.packed is not None:
        _, heads, rows, head_dim = call.output_shape
        given, out = tuple(out.shape), one_entry("out", out)
        if given != (rows, heads, head_dim):
            raise ValueError(f"out must have shape {(rows, heads, head_dim)}, got shape {given}")
    out = to_bhsd(out, request.settings.layout)
    interchange.check_one_device(q=request.q, out=out)
    checks.check_out(out, call, inputs)
    return out


def _choose(settings: Settings, call: AttentionSpec, capability: int | None) -> choose.Choice:
    """Choose the rung of an accuracy class, or take fa_int8 quantising as the caller says."""
    quant, accuracy = settings.quant, settings.accuracy
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


def _check_finite(request: Request) -> None:
    """Raise ValueError for a NaN or an infinity; padding of batch entries may hold either."""
    counts = request.lengths_q, request.lengths_kv, request.lengths_kv
    for name, count in zip("qkv", counts, strict=True):
        array = getattr(request, name)
        xp = array_namespace(array)
        finite = xp.isfinite(array.astype("float32"))
        if count is not None:
            finite |= (xp.arange(array.shape[2]) >= count[:, None])[:, None, :, None]
        if not bool(finite.all()):
            raise ValueError(f"{name} holds a NaN or an infinity (check_finite=True)")
