"""Resolve the settings and descriptions of a call to a checked and settled `AttentionProblem`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cupyattn.arrays.described import Described, check_receiver, check_together
from cupyattn.arrays.kinds import array_namespace
from cupyattn.compiler import target
from cupyattn.compiler.architectures import (
    capability_of,
)
from cupyattn.kernels import ladder, limits
from cupyattn.problem import checks
from cupyattn.problem.attention import AttentionProblem, results_of
from cupyattn.problem.block_mask import Blocks
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.problem import ValueCheck
from cupyattn.problem.row_preparation import BUFFERS_OF, Preparation
from cupyattn.problem.sequences import (
    LENGTHS,
    LENGTHS_OF,
    SEQUENCES,
    Sequences,
    describe_lengths,
    describe_sequences,
    one_entry,
)
from cupyattn.problem.settings import Asked, Settings, check_settings
from cupyattn.problem.support import BIAS_ALIGNMENT, can_copy_bias
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.operand_protocol import check_queries
from cupyattn.quant.quantized import CodeFacts, QuantizedQKV
from cupyattn.quant.static_scales import check_packed_quant, described_scales

if TYPE_CHECKING:
    from cupyattn.problem.choose import Choice

_AUTO = ("auto",)


def resolve(asked: Asked, arrays: Mapping[str, Described]) -> AttentionProblem:
    """Check a call and choose rung and backend.

    Parameters
    ----------
    asked : Asked
    arrays : mapping of str to Described
        The caller's, by the buffers of plans.

    Returns
    -------
    AttentionProblem

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `cupyattn.attention` says.
    """
    check_settings(asked.of_call)
    problem = (
        _of_rows(asked, arrays)
        if asked.codes is None
        else _of_codes(asked, asked.codes, arrays)
    )
    return _with_bias_in_reach(problem, arrays)


def _with_bias_in_reach(
    problem: AttentionProblem, arrays: Mapping[str, Described]
) -> AttentionProblem:
    """Return a call with a padded copy of its bias, where a Hopper form takes it then alone.

    The copy costs 4 bytes a number, or 8 of float32; the portable form three to four times the
    whole call.
    """
    if "bias" not in arrays or problem.architecture != "sm_90a":
        return problem
    place = problem.operands["bias"].place
    if place.steps[-1] == 0 or can_copy_bias(place):
        return problem
    padded = arrays["bias"].with_padded_rows(BIAS_ALIGNMENT)
    operands = {**problem.operands, "bias": padded.broadcast_to(problem.call.score_shape)}
    found = replace(problem, operands=operands)
    return found if found.kernel.row.on_hopper else problem


def _of_rows(asked: Asked, arrays: Mapping[str, Described]) -> AttentionProblem:
    settings, packed = asked.of_call, bool({*SEQUENCES} & arrays.keys())
    if not packed and (settings.max_len_q, settings.max_len_k) != (None, None):
        raise TypeError("max_len_q and max_len_k go with cu_seqlens_q and cu_seqlens_k")
    if packed and {*LENGTHS} & arrays.keys():
        raise TypeError(
            "lengths_q and lengths_kv are of padded batches, cu_seqlens_q and cu_seqlens_k of "
            "packed sequences: give one of both pairs"
        )
    rows = {name: arrays[name] for name in "qkv"}
    given = tuple(x.shape for x in rows.values())
    if packed:
        settings = settings._replace(layout="BSHD")  # with a batch axis before, their order
        rows = {name: one_entry(name, x) for name, x in rows.items()}
    rows = {n: to_bhsd(x, settings.layout).with_whole_rows() for n, x in rows.items()}
    q, k, v = rows.values()
    sizes = limits.check_shapes(q.shape, k.shape, v.shape, given)
    sequences: Sequences | None = None
    looks: tuple[ValueCheck, ...] = ()
    if packed:
        sequences, looks = describe_sequences(
            q, sizes[3:5], arrays, (settings.max_len_q, settings.max_len_k),
            look=settings.check_finite,
        )  # fmt: skip
        settings = settings._replace(
            max_len_q=sequences.max_len_q, max_len_k=sequences.max_len_k
        )
    dtype = checks.check_dtype(q, k, v)
    call, of_scores = _check_options(
        sizes, dtype, asked._replace(of_call=settings), arrays, sequences
    )
    call, lengths = _padded(call, q, settings, arrays)
    preparation = _preparation(call, settings, arrays)
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
    operands = {
        **rows, **(preparation.buffers if preparation else {}), **of_scores,
        **(sequences.offsets if sequences else {}), **lengths,
    }  # fmt: skip
    check_together(**operands)
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
    if settings.check_finite:
        counts = {name: operands.get(LENGTHS_OF[name]) for name in rows}
        looks += tuple(
            ValueCheck(
                check_finite, (x,) if (count := counts[name]) is None else (x, count), (name,)
            )
            for name, x in rows.items()
        )
    received = _received(call, settings.layout, q, arrays)
    scales = settings.quant if settings.quant is not None and settings.quant.static else None
    problem = AttentionProblem(
        what=variant.name, backend=_backend(settings, variant, q), arch=settings.arch,
        operands=operands, results=results_of(call, settings.layout, receives=bool(received)),
        received=received, looks=looks, settings=settings, variant=variant, why=why, call=call,
        preparation=preparation,
    )  # fmt: skip
    return problem if scales is None else _with_scales(problem, scales, arrays)


def _with_scales(
    problem: AttentionProblem, quant: QuantConfig, arrays: Mapping[str, Described]
) -> AttentionProblem:
    """Return a call with the scales that the caller gives among its operands."""
    call, rows = problem.call, problem.rows
    scales = described_scales(
        quant, arrays, rows, problem.scale_tiles, sequences=call.batch if call.packed else None,
        entries=1 if call.padded is None else call.batch,  # a kernel may write NaN over one only
    )  # fmt: skip
    if problem.backend == "mirror":
        scales = {name: arrays[name] for name in scales}
    return replace(problem, operands={**problem.operands, **scales})


def _of_codes(
    asked: Asked, codes: CodeFacts, arrays: Mapping[str, Described]
) -> AttentionProblem:
    settings = asked.of_call
    z = QuantizedQKV.of_buffers(codes, _tidy(arrays))
    check_queries(z)
    if settings.quant is not None:
        raise ValueError(
            "a QuantizedQKV carries q, k, v and their config: give no k, v or quant beside it"
        )
    if settings.layout != "BHSD" and z.cu_seqlens_q is None:
        raise ValueError(f"a QuantizedQKV has layout 'BHSD', got layout={settings.layout!r}")
    name = "fa_int8" if settings.variant == "auto" else settings.variant
    variant = ladder.lookup(name, also=_AUTO)
    if variant.family != "int8":
        raise ValueError(f"a QuantizedQKV runs on fa_int8, got variant={settings.variant!r}")
    sequences = _sequences_of(z, settings)
    if sequences is not None:
        settings = settings._replace(
            layout="BSHD", max_len_q=sequences.max_len_q, max_len_k=sequences.max_len_k
        )
    keys = (*z.k_codes.shape[:3], z.head_dim)
    sizes = limits.check_shapes(z.shape, keys, keys)
    call, of_scores = _check_options(
        sizes, z.out_dtype, asked._replace(of_call=settings), arrays, sequences
    )
    if sequences is not None and {*LENGTHS} & arrays.keys():
        raise TypeError(
            "this QuantizedQKV holds packed sequences: give no lengths_q or lengths_kv beside it"
        )
    call, lengths = _padded(call, z.q_codes, settings, arrays)
    operands = {**z.buffers, **of_scores, **lengths}
    check_together(**operands)
    checks.check_smoothing(call.softcap, z.k_mean)
    received = _received(call, settings.layout, z.q_codes, arrays)
    return AttentionProblem(
        what=variant.name, backend=_backend(settings, variant, z.q_codes), arch=settings.arch,
        operands=operands, results=results_of(call, settings.layout, receives=bool(received)),
        received=received, settings=settings, variant=variant,
        why="the rung for quantised operands", call=call, quantized=z,
    )  # fmt: skip


def _padded(
    call: AttentionSpec, q: Described, settings: Settings, arrays: Mapping[str, Described]
) -> tuple[AttentionSpec, dict[str, Described]]:
    """Return a call with the lengths of its batch entries, and their operands, if there are any."""
    lengths = describe_lengths(q, arrays)
    if lengths:
        of_q, of_kv = (name in lengths for name in LENGTHS)
        call = checks.check_padded(call, (of_q, of_kv), **settings.places)
    return call, lengths


def _backend(settings: Settings, variant: ladder.Variant, q: Described) -> str:
    """Return where a rung runs."""
    return target.choose(settings.backend, q.device >= 0, registered=variant.source is not None)


def _sequences_of(z: QuantizedQKV, settings: Settings) -> Sequences | None:
    """Return the sequences of quantised operands; a caller may only raise their limits."""
    if z.cu_seqlens_q is None:
        if (settings.max_len_q, settings.max_len_k) != (None, None):
            raise ValueError(
                "this QuantizedQKV holds no packed sequences: give no max_len_q or max_len_k, or "
                "quantize with cu_seqlens_q and cu_seqlens_k"
            )
        return None
    longest = {}
    for name in ("max_len_q", "max_len_k"):
        own, limit = getattr(z, name), getattr(settings, name)
        longest[name] = own if limit is None else limits.check_length(name, limit)
        if longest[name] < own:
            raise ValueError(f"{name}={limit} is less than the limit of the QuantizedQKV, {own}")
    return Sequences(z.cu_seqlens_q, z.cu_seqlens_k, **longest)


def _check_options(
    sizes: tuple[int, int, int, int, int, int],
    dtype: str,
    asked: Asked,
    arrays: Mapping[str, Described],
    sequences: Sequences | None,
) -> tuple[AttentionSpec, dict[str, Described]]:
    """Return the call, and mask, bias and lists of blocks as the kernels take them.

    `sizes` are the sizes of the arrays, packed or not.
    """
    totals, settings = sizes[3:5], asked.of_call
    if sequences is not None:
        longest = sequences.max_len_q, sequences.max_len_k
        sizes = (sequences.batch, *sizes[1:3], *longest, sizes[5])
    given: dict[str, Any] = {n: arrays[n] for n in ("mask", "bias") if n in arrays}
    found = {}
    if "kept_blocks" in arrays:
        kept = found["kept_blocks"] = arrays["kept_blocks"]
        given["block_mask"] = Blocks(asked.blocks, (*kept.shape[:3], kept.shape[3] - 1))
    call = checks.check_options(
        sizes, dtype, settings.scale, settings.scores(given), return_lse=settings.return_lse
    )
    found |= {n: arrays[n].broadcast_to(call.score_shape) for n in ("mask", "bias") if n in arrays}
    if sequences is not None:
        call = checks.check_packed(call, totals, **settings.places)
    return call, found


def _preparation(
    call: AttentionSpec, settings: Settings, arrays: Mapping[str, Described]
) -> Preparation | None:
    """Return the caller's tables and weights, checked against the arrays."""
    pairs = {
        option: tuple(arrays[name] for name in names)
        for option, names in BUFFERS_OF.items()
        if names[0] in arrays
    }
    sizes = call.heads, call.heads_kv, call.len_q, call.len_kv, call.head_dim
    rotate = settings.quant.rotate if settings.quant else None
    return Preparation.of(settings.rows(pairs), sizes, rotate)


def _tidy(arrays: Mapping[str, Described]) -> dict[str, Described]:
    """Return operands with contiguous last axes, all but rows in C order."""
    by_row = ("q_codes", "k_codes", "v")
    return {n: x.with_whole_rows() if n in by_row else x.whole() for n, x in arrays.items()}


def to_bhsd(array: Any, layout: str) -> Any:
    """Return a view with heads and length exchanged; the same call restores the layout."""
    return array.swapaxes(1, 2) if layout == "BSHD" and array.ndim == 4 else array


def _received(
    call: AttentionSpec, layout: str, q: Described, arrays: Mapping[str, Described]
) -> dict[str, Described]:
    """Return the caller's ``out`` in layout BHSD, if there is one."""
    if "o" not in arrays:
        return {}
    out = arrays["o"]
    check_together(q=q, out=out)
    if call.packed is not None:
        _, heads, rows, head_dim = call.output_shape
        given, out = out.shape, one_entry("out", out)
        if given != (rows, heads, head_dim):
            raise ValueError(f"out must have shape {(rows, heads, head_dim)}, got shape {given}")
    out = to_bhsd(out, layout)
    check_receiver(out, call.output_shape, call.dtype)
    return {"o": out}


def _choose(settings: Settings, call: AttentionSpec, capability: int | None) -> Choice:
    """Choose the rung of an accuracy class, or take fa_int8 quantising as the caller says."""
    from cupyattn.problem import choose  # here, because calls that name a rung need no times

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


def _capability(q: Described, arch: str | None) -> int | None:
    """Return the compute capability that a call runs on, times ten; None on the host."""
    if arch is not None:
        return capability_of(arch)
    return q.capability if q.device >= 0 else None


def check_finite(array: Any, *others: Any) -> None:
    """Raise ValueError for a NaN or an infinity in rows; padding of batch entries may hold either.

    Parameters
    ----------
    array : array, (batch, heads, length, head_dim)
    *others
        Number of valid rows of each entry, or None for all; and the caller's name of the array.
    """
    *counts, name = others
    xp = array_namespace(array)
    finite = xp.isfinite(array.astype("float32"))
    for count in counts:
        finite |= (xp.arange(array.shape[2]) >= count[:, None])[:, None, :, None]
    if not bool(finite.all()):
        raise ValueError(f"{name} holds a NaN or an infinity (check_finite=True)")
