"""The output of one call as parts that are judged one by one, and the kernels that may have run.

A part is attention of arrays of layout (batch, heads, len, head_dim): the call itself, or one of
its packed sequences. Lengths of padded entries become a mask, which admits the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.arrays.described import Described
from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.compiler import target
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.attention import described
from cupyattn.problem.attention import AttentionProblem, KernelCall, kernel_call
from cupyattn.problem.form import FORM_ARCHITECTURES, fresh_rows, settle_each
from cupyattn.problem.operands import Codes
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.sequences import LENGTHS as COUNTS
from cupyattn.problem.sequences import SEQUENCES, describe_lengths, longest, one_entry
from cupyattn.problem.settings import NO_WINDOW, Settings
from cupyattn.problem.support import within_reach
from cupyattn.testing.sinks import with_sinks

#: Arrays with the lengths of sequences or entries.
LENGTHS = (*SEQUENCES, *COUNTS)


@dataclass(frozen=True, eq=False)
class Part:
    """An output, and the operands of its attention.

    Parameters
    ----------
    settings : Settings
        Settings of attention on these operands alone.
    arrays : mapping
        As `cupyattn.problem.settings.parse` names them.
    quantized : QuantizedQKV or None
    o : (batch, heads, len_q, head_dim) array
    lse : (batch, heads, len_q) array or None
    given : array
        The caller's output, of which `o` is all or a part.
    entry : int, optional
        Number of the packed sequence.
    """

    settings: Settings
    arrays: Mapping[str, Any]
    quantized: Any
    o: Array
    lse: Array | None
    given: Array
    entry: int | None = None

    def received(self, form: str | None, tiles: Tiles | None) -> KernelCall:
        """Return the call that a kernel of a form and tiles received."""
        settings = self.settings._replace(tiles=tiles)
        return kernel_call(settings, self.arrays, quantized=self.quantized, form=form)


def parts_of(
    settings: Settings,
    arrays: Mapping[str, Any],
    quantized: Any,
    o: Array,
    lse: Array | None,
    sinks: Array | None = None,
) -> list[Part]:
    """Return the parts of a call, each to be judged by itself.

    Parameters
    ----------
    settings, arrays
        Settings and arrays of the call, as NumPy or CuPy arrays.
    quantized : QuantizedQKV or None
    o, lse
        As the call returns them.
    sinks : (heads,) array, optional
        Sinks of a kernel of another library.
    """
    given = o
    packed = "cu_seqlens_q" in arrays or "cu_seqlens_k" in arrays
    if packed or (quantized is not None and quantized.cu_seqlens_q is not None):
        parts = _sequences(settings, arrays, quantized, o, lse)
        return [part if sinks is None else _sinking(part, sinks, None) for part in parts]
    if settings.layout == "BSHD":
        o = to_bhsd(o, "BSHD")
        arrays = {n: to_bhsd(a, "BSHD") if n in "qkv" and a is not None else a
                  for n, a in arrays.items()}  # fmt: skip
        settings = settings._replace(layout="BHSD")
    counts = arrays.get("lengths_q")
    if {*COUNTS} & arrays.keys():
        settings, arrays = _masked(settings, arrays, quantized)
    part = Part(settings, arrays, quantized, o, lse, given)
    return [part if sinks is None else _sinking(part, sinks, counts)]


def _sinking(part: Part, sinks: Array, counts: Array | None) -> Part:
    """Return a part with sinks as one without. `counts` are its rows, if fewer count."""
    settings, arrays = with_sinks(part.settings, part.arrays, sinks, counts)
    return replace(part, settings=settings, arrays=arrays)


def _masked(
    settings: Settings, arrays: Mapping[str, Any], quantized: Any
) -> tuple[Settings, dict[str, Any]]:
    """Return a call on padded entries as one whose mask admits the keys within their lengths."""
    q, k, v = (arrays[name] for name in "qkv")
    like = q if quantized is None else quantized.q_codes
    shape = tuple(like.shape) if quantized is None else quantized.shape
    len_q, len_kv = shape[2], (k if quantized is None else quantized.k_codes).shape[2]
    own = {name: arrays[name] for name in COUNTS if arrays.get(name) is not None}
    described = {name: Described.of(name, x) for name, x in own.items()}
    xp, lengths = array_namespace(like), describe_lengths(Described.of("q", like), described)
    lengths = {name: x.bound(own[name]) for name, x in lengths.items()}
    full = dict(zip(COUNTS, (len_q, len_kv), strict=True))
    counts = [xp.clip(lengths[n], 0, most) if n in lengths else xp.full(shape[0], most)
              for n, most in full.items()]  # fmt: skip
    of_q, of_kv = (count[:, None, None, None] for count in counts)
    row, key = xp.arange(len_q)[:, None], xp.arange(len_kv)
    at = key - row - (of_kv - of_q if settings.causal_align == "bottom-right" else 0)
    left, right = settings.window
    right = 0 if settings.causal else right
    mask = (row < of_q) & (key < of_kv)
    mask &= (at >= -left) if left >= 0 else True
    mask &= (at <= right) if right >= 0 else True
    rest = {n: a for n, a in arrays.items() if n not in LENGTHS}
    if rest.get("mask") is not None:
        mask = mask & xp.asarray(rest["mask"])
    if rest.get("bias") is not None:  # behind the lengths it may be anything
        rest["bias"] = _kept((key < of_kv) & (row < of_q), xp.asarray(rest["bias"]))
    for name, count in zip("qkv", (of_q, of_kv, of_kv), strict=True):
        if (x := rest[name]) is not None:
            rest[name] = _kept(xp.arange(x.shape[2])[:, None] < count, x)
    return settings._replace(causal=False, window=NO_WINDOW), {**rest, "mask": mask}


def _kept(where: Array, x: Array) -> Array:
    """Return x with 0 elsewhere."""
    # NOTE: CuPy's where makes float32 of bfloat16; its values stay, and become bfloat16 again.
    zeroed: Array = array_namespace(x).where(where, x, x.dtype.type(0))
    return zeroed.astype(x.dtype, copy=False)


def _sequences(
    settings: Settings, arrays: Mapping[str, Any], quantized: Any, o: Array, lse: Array | None
) -> list[Part]:
    """Return the packed sequences of a call, one by one."""
    rest = {n: a for n, a in arrays.items() if n not in LENGTHS}
    alone = settings._replace(layout="BHSD", max_len_q=None, max_len_k=None)
    if quantized is None:
        total_q, total_k = arrays["q"].shape[0], arrays["k"].shape[0]
        ends_q, ends_k, records = (*(arrays[name] for name in SEQUENCES), None)
        most = longest("q", ends_q, total_q), longest("k", ends_k, total_k)
        limits = zip((settings.max_len_q, settings.max_len_k), most, strict=True)
        of_q, of_k = (found if limit is None else limit for limit, found in limits)
        most = of_q, of_k
    else:
        ends_q, ends_k, records = (
            quantized.cu_seqlens_q, quantized.cu_seqlens_k, list(quantized.sequences()),
        )  # fmt: skip
        most = quantized.max_len_q, quantized.max_len_k
        total_q = int(on_host(ends_q)[-1])
    if o.ndim != 3 or o.shape[0] != total_q:
        raise ValueError(
            f"o of packed sequences must be (total_q, heads, head_dim) with total_q={total_q}, got "
            f"shape {tuple(o.shape)}"
        )
    if lse is not None and tuple(lse.shape) != (o.shape[1], total_q):
        raise ValueError(
            f"lse of packed sequences must be (heads, total_q) = {(o.shape[1], total_q)}, got "
            f"shape {tuple(lse.shape)}"
        )
    parts = []
    of_q, of_k = (on_host(ends).tolist() for ends in (ends_q, ends_k))
    for i, (a, b, c, d) in enumerate(zip(of_q, of_q[1:], of_k, of_k[1:], strict=False)):
        if a == b:  # no rows
            continue
        own = dict(rest)
        for name, (first, last) in {"q": (a, b), "k": (c, d), "v": (c, d)}.items():
            if own[name] is not None:
                own[name] = one_entry(name, own[name][first:last]).swapaxes(1, 2)
        for name in ("mask", "bias"):
            if own.get(name) is not None:
                own[name] = _corner(own[name], i, (b - a, d - c), most)
        if own.get("block_mask") is not None:
            own["block_mask"] = own["block_mask"].corner(i, b - a, d - c)
        rows = slice(a, b)
        parts.append(
            Part(
                alone, own, None if records is None else records[i],
                one_entry("o", o[rows]).swapaxes(1, 2),
                None if lse is None else lse[None, :, rows], o, i,
            )
        )  # fmt: skip
    return parts


def with_longest(settings: Settings, arrays: Mapping[str, Any]) -> Settings:
    """Return settings of packed sequences whose longest lengths fit mask, bias and block mask.

    Parameters
    ----------
    settings : Settings
    arrays : mapping
        Arrays of the call, by name.
    """
    blocks = arrays.get("block_mask")
    longest: list[int | None] = []
    for axis, name in ((-2, "cu_seqlens_q"), (-1, "cu_seqlens_k")):
        shapes = [arrays[n].shape for n in ("mask", "bias") if arrays.get(n) is not None]
        found = int(np.diff(on_host(arrays[name])).max(initial=1))
        most = max([found, *(shape[axis] for shape in shapes if len(shape) >= -axis)])
        if blocks is not None and blocks.form.shape[axis] > -(-most // blocks.blocks[axis]):
            most = blocks.form.shape[axis] * blocks.blocks[axis]
        longest.append(most if most > found else None)
    return settings._replace(max_len_q=longest[0], max_len_k=longest[1])


def _corner(
    x: Array, entry: int, lengths: tuple[int, int], longest: tuple[int, int]
) -> Array:
    """Return the part of a mask or bias for one sequence: its top left corner."""
    x = x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    first = slice(entry, entry + 1) if x.shape[0] > 1 else slice(None)
    ends = (slice(n if size > 1 or most == 1 else None)
            for n, size, most in zip(lengths, x.shape[2:], longest, strict=True))  # fmt: skip
    return x[(first, slice(None), *ends)]


def kernels_tried(
    settings: Settings, arrays: Mapping[str, Any], quantized: Any, form: str | None
) -> list[tuple[str, Tiles]]:
    """Return the kernels that this version may run a call with, on any architecture.

    Parameters
    ----------
    settings, arrays, quantized
        As for `parts_of`. If the settings have tiles, the call ran with them.
    form : str, optional
        Form of the call, if known.

    Returns
    -------
    list of (str, Tiles)
        Form and tiles on each architecture, the arrays' device first. Operands count as aligned,
        with their strides and with the strides of new arrays: copies on a host may be aligned
        otherwise than the arrays of the call.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        If no kernel takes the call.
    """
    problem = problem_of_call(settings, arrays, quantized)
    z, q = problem.quantized, problem.rows["q"]
    own = target.own_arch("cuda", q) if q.device >= 0 else None
    codes = None if z is None else Codes.of(z)
    asked = [(codes, form, arch) for arch in (own, *FORM_ARCHITECTURES)]
    if z is not None and codes is not None and z.config.fused and form is None:
        asked.append((codes._replace(fused=True), "fused", None))
    as_they_lie = {n: replace(x, misalignment=0) for n, x in problem.places.rows.items()}
    fresh = {n: fresh_rows(x) for n, x in problem.places.rows.items()}
    bias = problem.places.bias
    bias = None if bias is None else within_reach(bias)
    places = [problem.places._replace(**rows, bias=bias) for rows in (as_they_lie, fresh)]
    kernels = settle_each(problem.variant, problem.attended, places, asked, settings.tiles)
    return [(kernel.form, kernel.tiles) for kernel in kernels]


def problem_of_call(
    settings: Settings, arrays: Mapping[str, Any], quantized: Any
) -> AttentionProblem:
    """Return a call as `cupyattn.attention` resolves it on the device of its arrays."""
    if quantized is None:
        present = {n: a for n, a in arrays.items() if a is not None or n in "qkv"}
    else:  # whose rows were prepared before
        names = ("mask", "bias", "block_mask", *COUNTS)
        present = {"q": quantized, "k": None, "v": None}
        present |= {n: arrays[n] for n in names if arrays.get(n) is not None}
        settings = settings._replace(layout="BHSD")
    return described(settings, present)
