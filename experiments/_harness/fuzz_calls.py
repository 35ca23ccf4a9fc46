"""The calls that `experiments.accuracy.fuzz` makes, and what judges them.

Every expected value is computed here in float64. The library's own bound is the tolerance of INT8
attention alone, against attention of the codes as they are dequantised here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import unfused
from cupyattn.diffusion import key_importance
from cupyattn.ops.explain import kernel_form
from experiments._harness.fuzz_cases import DTYPES, Case, Wrong
from experiments._harness.fuzz_own_rungs import OWN
from experiments._harness.fuzz_scores import (
    ROUNDING,
    Scoring,
    by_query_head,
    check_hull,
    dequantised,
    draw_quant,
    draw_scoring,
    draw_turning,
    f64,
    limits,
    near,
    on_host,
    row_error,
    softmax,
)

#: The library, whose calls are made with arguments of any kind.
api: Any = ca
#: Options that the bound takes as the call does.
BY_NAME = ("scale", "causal", "causal_align", "window", "softcap", "block_mask")
VARIANTS = (
    "auto", "unfused", "fa", "fa_warps", "fa_tc", "fa_tc", "fa_int8", "fa_int8", *OWN,
)  # fmt: skip
HEAD_DIMS = (8, 16, 33, 64, 80, 128, 64, 128)
LENGTHS_Q = (0, 1, 7, 16, 33, 65, 100, 130)
LENGTHS_KV = (0, 1, 5, 17, 64, 70, 129, 200)


def lengths(case: Case) -> tuple[int, int]:
    """Draw how many queries and keys there are."""
    count = 6 if case.small else 8
    return case.pick(*LENGTHS_Q[:count]), case.pick(*LENGTHS_KV[:count])


def operands(
    case: Case, dtypes: Sequence[str] = tuple(DTYPES), dims: Sequence[int] = HEAD_DIMS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw Q, K and V."""
    dtype = case.config.pick(*dtypes)
    dim = case.config.pick(*(dims[:4] if case.small else dims))
    batch, heads_kv, group = case.pick(1, 2), case.pick(1, 2), case.pick(1, 1, 3)
    len_q, len_kv = lengths(case)
    size = case.pick(1.0, 1.0, 4.0)
    q = case.normal(batch, heads_kv * group, len_q, dim, dtype=dtype, size=size)
    k = case.normal(batch, heads_kv, len_kv, dim, dtype=dtype, size=size)
    return q, k, case.normal(batch, heads_kv, len_kv, dim, dtype=dtype)


class Attention:
    """A call of attention that has been drawn, and its judgement."""

    def __init__(self, case: Case) -> None:
        self.case = case
        # NOTE: one rung after another, so that a small pool has all of them.
        self.variant = VARIANTS[case.slot % len(VARIANTS)]
        case.rung = self.variant
        dtypes = tuple(DTYPES)
        if self.variant in ("fa_tc", "fa_warps", *OWN) and case.config.chance(0.97):
            known = ca.VARIANTS[self.variant].dtypes
            dtypes = tuple(d for d in dtypes if d in known)
        self.q, self.k, self.v = operands(case, dtypes)
        shape = (*self.q.shape[:3], self.k.shape[2])
        self.scoring = draw_scoring(case, shape, self.q.shape[3])
        self.turning = draw_turning(case, self.q.shape, self.k.shape)
        self.given: dict[str, Any] = {**self.scoring.given, **self.turning.given}
        if self.variant == "fa_int8":
            prepared = self.turning.of(f64(self.q), f64(self.k))
            self.quant = draw_quant(case, *prepared, bool(self.scoring.softcap))
            self.given["quant"] = self.quant
        self.bshd = case.chance(0.2)
        self.sent = [case.sent(x, turned=self.bshd) for x in (self.q, self.k, self.v)]
        self.options = {"variant": self.variant, "return_lse": True, **self.given,
                        **case.options()}  # fmt: skip
        self.lengths: dict[str, Any] = {}

    def bhsd(self, x: Any) -> Any:
        """Return a view in the layout of the judgement, or back."""
        return x.swapaxes(1, 2) if self.bshd else x

    def codes(self, sent: Sequence[Any]) -> Any:
        """Return the operands quantised by the library, as the call does it."""
        names = ("quant", "rope", "rope_offset_q", "rope_interleaved", "qk_norm")
        options = {n: self.given[n] for n in names if n in self.given}
        # NOTE: NumPy sums a mean in the order of memory, and attention copies such operands.
        tidy = [x if self.case.backend == "cuda" or x.strides[-1] == x.itemsize
                else np.ascontiguousarray(x) for x in map(self.bhsd, sent)]  # fmt: skip
        return api.quantize(*tidy, **options, **self.case.options())

    def takes_codes(self) -> dict[str, Any]:
        """Return the options of a call on operands that are quantised."""
        without = ("quant", "rope", "rope_offset_q", "rope_interleaved", "qk_norm")
        return {n: x for n, x in self.options.items() if n not in without}

    def judge(self, o: Any, lse: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray,
              z: Any = None) -> None:  # fmt: skip
        """Raise Wrong unless these are attention of q, k and v, or of codes z."""
        case, dtype = self.case, self.q.dtype.name
        found, found_lse = self.bhsd(case.host(o)), case.host(lse)
        Q, K = self.turning.of(f64(q), f64(k))
        if self.lengths:
            self.judge_entries(found, found_lse, Q, K, f64(v))
            return
        V = by_query_head(f64(v), q.shape[1])
        S, size, _ = self.scoring.scores(Q, K)
        off: Any = 0.0
        if self.turning.changes:
            off = 4 * ROUNDING[dtype] * size
        if z is None:
            P, exact_lse = softmax(S)
            near("o", found, P @ V, limits(S, size, V, dtype, off, self.scoring.alone))
            check_hull(found, S, V, 8 * ROUNDING[dtype] + 2.0**-18)
        else:
            off = self.judge_codes(found, z, Q, K) + off
            P, exact_lse = softmax(S)
            much = {"16bit": 2.0**-8, "int8": 0.2, "fp8": 0.2}[self.quant.pv]
            slack = much * abs(V).max(initial=0)
            limit = limits(S, size, V, dtype, off) + slack
            near("o of the caller's arrays", found, P @ V, limit)
        largest = np.where(np.isfinite(S), abs(S), 0).max(-1, initial=0)
        near("lse", found_lse, exact_lse, 2.0**-18 * (largest + size) + off + 2.0**-7)

    def judge_entries(
        self, o: np.ndarray, lse: np.ndarray, Q: np.ndarray, K: np.ndarray, v: np.ndarray
    ) -> None:
        """Judge each entry of a padded batch as attention of its rows and keys alone."""
        counts = [np.full(len(Q), Q.shape[2]), np.full(len(Q), K.shape[2])]
        for at, name in enumerate(("lengths_q", "lengths_kv")):
            if name in self.lengths:
                counts[at] = np.clip(self.case.values(self.lengths[name]), 0, counts[at])
        dtype = self.q.dtype.name
        for i, (rows, keys) in enumerate(zip(*counts, strict=True)):
            if o[i, :, rows:].any() or (lse[i, :, rows:] > -np.inf).any():
                raise Wrong(f"rows of entry {i} behind its length are not 0 and -inf")
            x, y = Q[i : i + 1, :, :rows], K[i : i + 1, :, :keys]
            V = by_query_head(v[i : i + 1, :, :keys], x.shape[1])
            one = self.scoring.entry(i, rows, keys)
            S, size, _ = one.scores(x, y)
            P, exact_lse = softmax(S)
            off = 4 * ROUNDING[dtype] * size if self.turning.changes else 0.0
            limit = limits(S, size, V, dtype, off, one.alone)
            near(f"o of entry {i}", o[i : i + 1, :, :rows], P @ V, limit)
            largest = np.where(np.isfinite(S), abs(S), 0).max(-1, initial=0)
            much = 2.0**-18 * (largest + size) + off + 2.0**-7
            near(f"lse of entry {i}", lse[i : i + 1, :, :rows], exact_lse, much)

    def judge_codes(self, o: np.ndarray, z: Any, Q: np.ndarray, K: np.ndarray) -> float:
        """Judge O by the codes, within the library's bound; return what scores lose by them."""
        form = {}
        if self.case.backend == "cuda":
            form = kernel_form(z, **self.takes_codes())
        z = on_host(z)
        options = {n: self.given[n] for n in BY_NAME if n in self.given}
        options |= {n: self.case.values(self.given[n]) for n in ("mask", "bias") if n in self.given}
        q, k = check_codes(o, z, self.scoring, {**options, **form})
        steps = []
        for x, prepared, codes in ((q, Q, z.q_scale), (k, K, z.k_scale)):
            steps.append(0.51 * float(codes.max(initial=0)) * (1 + (not z.config.symmetric)))
            loss = 2 * ROUNDING[self.q.dtype.name] if z.config.fused else 2.0**-18
            much = steps[-1] + loss * (abs(prepared) + 1e-3)
            near("dequantised operands", x, prepared, much)
        sums = [abs(x).sum(-1).max(initial=0) for x in (Q, K)]
        cost = steps[0] * sums[1] + steps[1] * sums[0] + Q.shape[3] * steps[0] * steps[1]
        return float(cost * abs(self.scoring.scale))


def draw_lengths(case: Case, q: Sequence[int], k: Sequence[int]) -> dict[str, Any]:
    """Draw how many rows and keys of each entry count, some of them none or too many."""
    found = {}
    for name, most in (("lengths_q", q[2]), ("lengths_kv", k[2])):
        if case.config.chance(0.7):
            counts = case.rng.integers(-1, most + 3, q[0]).astype(case.pick("int32", "int64"))
            found[name] = case.sent(counts)
    return found


def own_blocks(case: Case, quant: Any, given: dict[str, Any]) -> bool:
    """Whether a call may quantise in other blocks than `quantize` by itself.

    They are the tiles of the form that runs, which follow the device and a block mask.
    """
    if case.backend != "cuda" and "block_mask" not in given:
        return False
    return "block" in (quant.granularity_q, quant.granularity_k, quant.granularity_v)


def check_codes(
    o: np.ndarray, z: Any, scoring: Scoring, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Raise Wrong unless O is attention of codes within the bound; return Q and K of the codes."""
    q, k, v = dequantised(z)
    v = by_query_head(v, q.shape[1])
    S, size, _ = scoring.scores(q, k)
    bound = ca.bounds.attention(None, None, None, variant="fa_int8", quantized=z, **options).total
    exact = softmax(S)[0] @ v
    near("o of the codes", o, exact, bound * (1 + 1e-9) + 1e-12)
    if z.config.pv == "16bit":  # the bound promises little under a large bias
        limit = limits(S, size, v, z.out_dtype, 2.0**-10, scoring.alone)
        flat = row_error(S, size, scoring.alone) == 0
        near("o under one bias", o, exact, np.where(flat, limit, np.inf))
    return q, k


def attention(case: Case) -> None:
    """All rungs of `cupyattn.attention`."""
    call = Attention(case)
    shape = call.bhsd(call.q).shape
    if call.variant != "fa_int8" and case.config.chance(0.2):  # codes of rows that count alone
        call.lengths = draw_lengths(case, call.q.shape, call.k.shape)
    options = {**call.options, **call.lengths, "layout": "BSHD" if call.bshd else "BHSD"}
    z = None
    if call.variant == "fa_int8":
        z = call.codes(call.sent)
        if own_blocks(case, call.quant, call.given) or case.chance(0.3):
            call.bshd, shape = False, call.q.shape
            options = call.takes_codes()
            call.sent = [z]
    aligned = True
    if case.chance(0.25):
        options["out"], aligned = case.receiver(shape, call.q.dtype.name)
    try:
        found = api.attention(*call.sent, **options)
    except ValueError:
        if aligned:
            raise
        return  # as it must
    if not aligned:
        raise Wrong("an out with misaligned elements was taken")
    if "out" in options and found[0] is not options["out"]:
        raise Wrong("the result is another array than out")
    call.judge(*found, call.q, call.k, call.v, z)


def plan(case: Case) -> None:
    """A prepared call on two sets of values."""
    call = Attention(case)
    layout = "BSHD" if call.bshd else "BHSD"
    prepared = api.plan(*call.sent, layout=layout, **call.options)
    values, sent = (call.q, call.k, call.v), call.sent
    for _ in range(2):
        blocks = call.variant == "fa_int8" and own_blocks(case, call.quant, call.given)
        z = call.codes(sent) if call.variant == "fa_int8" and not blocks else None
        found = prepared(*sent)
        if not blocks:
            call.judge(*found, *values, z)
        again = [case.like(s, x[::-1, ::-1].swapaxes(1, 2) if call.bshd else x[::-1, ::-1])
                 for s, x in zip(sent, values, strict=True)]  # fmt: skip
        values = tuple(call.bhsd(case.values(s)) for s in again)  # type: ignore[assignment]
        if call.variant == "fa_int8" and call.quant.static:
            return  # scales that other values may exceed
        sent = again


def draw_packed(case: Case, dtypes: Sequence[str]) -> tuple[Any, ...]:
    """Draw packed operands, their ends, and what changes scores."""
    dtype, dim = case.config.pick(*dtypes), case.config.pick(8, 16, 64)
    counts = [case.rng.choice([0, 1, 5, 17, 33], size=3) for _ in "qk"]
    ends = [np.concatenate([[0], np.cumsum(n)]).astype(case.pick("int32", "int64")) for n in counts]
    heads_kv, group = case.pick(1, 2), case.pick(1, 2)
    q = case.normal(int(ends[0][-1]), heads_kv * group, dim, dtype=dtype)
    k, v = (case.normal(int(ends[1][-1]), heads_kv, dim, dtype=dtype) for _ in "kv")
    shape = (3, heads_kv * group, *(int(n.max()) for n in counts))
    scoring = draw_scoring(case, shape, dim, packed=True)
    return q, k, v, ends, scoring


def _sequences(ends: Sequence[np.ndarray]) -> Any:
    return enumerate(zip(*(zip(e[:-1], e[1:], strict=True) for e in ends), strict=True))


def _rows(x: np.ndarray, a: int, b: int) -> np.ndarray:
    return f64(x[a:b].swapaxes(0, 1)[None])


def varlen(case: Case) -> None:
    """`attention_varlen` on sequences of many lengths, some empty."""
    variant = VARIANTS[case.slot % len(VARIANTS)]
    case.rung = variant
    if variant == "fa_int8":
        _varlen_codes(case)
        return
    known = tuple(DTYPES) if variant == "auto" else ca.VARIANTS[variant].dtypes
    q, k, v, ends, scoring = draw_packed(case, known)
    options = {"max_len_q": 33, "max_len_k": 33} if case.chance(0.3) and not (
        {"mask", "bias", "block_mask"} & set(scoring.given)) else {}  # fmt: skip
    o, lse = api.attention_varlen(
        *map(case.sent, (q, k, v, *ends)), variant=variant, return_lse=True, **options,
        **scoring.given, **case.options(),
    )  # fmt: skip
    o, lse = case.host(o), case.host(lse)
    for i, ((a, b), (c, d)) in _sequences(ends):
        x, y, z = _rows(q, a, b), _rows(k, c, d), _rows(v, c, d)
        one = scoring.entry(i, b - a, d - c)
        S, size, _ = one.scores(x, y)
        P, exact_lse = softmax(S)
        z = by_query_head(z, x.shape[1])
        limit = limits(S, size, z, q.dtype.name, 0.0, one.alone)
        near(f"o of {i}", o[a:b].swapaxes(0, 1)[None], P @ z, limit)
        largest = np.where(np.isfinite(S), abs(S), 0).max(-1, initial=0)
        near(f"lse of {i}", lse[None, :, a:b], exact_lse, 2.0**-18 * (largest + size) + 2.0**-7)


def _varlen_codes(case: Case) -> None:
    """Packed sequences as INT8 codes."""
    q, k, v, ends, scoring = draw_packed(case, tuple(DTYPES))
    batch = [np.broadcast_to(f64(x).swapaxes(0, 1)[None], (3, x.shape[1], x.shape[0], x.shape[2]))
             for x in (q, k)]  # fmt: skip
    quant = draw_quant(case, *batch, bool(scoring.softcap))
    sent = [case.sent(x) for x in (q, k, v)]
    places = [case.sent(e) for e in ends]
    tidy = [x if case.backend == "cuda" or x.strides[-1] == x.itemsize
            else np.ascontiguousarray(x) for x in sent]  # fmt: skip
    z = api.quantize(*tidy, quant=quant, cu_seqlens_q=places[0], cu_seqlens_k=places[1],
                     **case.options())  # fmt: skip
    options = {"variant": "fa_int8", **scoring.given, **case.options()}
    if own_blocks(case, quant, scoring.given) or case.chance(0.3):
        o = case.host(api.attention_varlen(z, **options))
    else:
        o = case.host(api.attention_varlen(*sent, *places, quant=quant, **options))
    form = kernel_form(z, **options) if case.backend == "cuda" else {}
    for i, ((a, b), (c, d)) in _sequences(ends):
        one = list(z.sequences())[i]
        given = {n: scoring.given[n] for n in BY_NAME if n in scoring.given}
        if "block_mask" in given:
            given["block_mask"] = given["block_mask"].corner(i, b - a, d - c)
        part = scoring.entry(i, b - a, d - c)
        for name in ("mask", "bias"):
            if name in scoring.given:
                x = case.values(scoring.given[name])
                whole = np.broadcast_to(x, (3, q.shape[1], *(int(np.diff(e).max()) for e in ends)))
                given[name] = whole[i : i + 1, :, : b - a, : d - c]
        check_codes(o[a:b].swapaxes(0, 1)[None], on_host(one), part, {**given, **form})


def _check_gradients(
    scoring: Scoring, dtype: str, given: Sequence[np.ndarray], found: Sequence[np.ndarray]
) -> None:
    """Judge gradients of float64 operands (d_out, q, k, v), all (batch, heads, len, head_dim)."""
    G, Q, k, v = given
    S, size, slope = scoring.scores(Q, k)
    K, V = (by_query_head(x, Q.shape[1]) for x in (k, v))
    P, scale = softmax(S)[0], scoring.scale
    dP = G @ V.swapaxes(2, 3)
    dS = P * (dP - (P * dP).sum(-1, keepdims=True)) * slope * scale

    def summed(x: np.ndarray) -> np.ndarray:
        group = Q.shape[1] // k.shape[1]
        parts: np.ndarray = x.reshape(x.shape[0], k.shape[1], group, *x.shape[2:]).sum(2)
        return parts

    exact = dS @ K, summed(dS.swapaxes(2, 3) @ Q), summed(P.swapaxes(2, 3) @ G)
    error = row_error(S, size, scoring.alone)
    # NOTE: where float32 cannot tell scores apart, weights may be any.
    weights = np.where(error > 0.1, np.isfinite(S), P)
    error = 12 * ROUNDING[dtype] + np.expm1(3 * error)
    outer = (abs(G) @ (weights @ abs(V)).swapaxes(2, 3)).max(-1, keepdims=True, initial=0)
    means = (weights * abs(dP)).sum(-1, keepdims=True)
    spread = weights * (abs(dP) + means + outer) * abs(scale) * error
    sizes = (spread @ abs(K), summed(spread.swapaxes(2, 3) @ abs(Q)),
             summed((weights * error).swapaxes(2, 3) @ abs(G)))  # fmt: skip
    for name, one, want, much in zip(("dq", "dk", "dv"), found, exact, sizes, strict=True):
        near(name, one, want, much + 1e-5)


def backward(case: Case) -> None:
    """Gradients, with the output and lse of the forward pass."""
    q, k, v = operands(case, ("float16", "bfloat16"))
    d_out = case.normal(*q.shape, dtype=q.dtype.name)
    scoring = draw_scoring(case, (*q.shape[:3], k.shape[2]), q.shape[3])
    sent = [case.sent(x) for x in (d_out, q, k, v)]
    o, lse = api.attention(*sent[1:], return_lse=True, **scoring.given, **case.options())
    found = api.attention_backward(
        *sent, o, lse, deterministic=case.config.pick(None, True, False), **scoring.given,
        **case.options(),
    )  # fmt: skip
    _check_gradients(scoring, q.dtype.name, [f64(x) for x in (d_out, q, k, v)],
                     [case.host(x) for x in found])  # fmt: skip


def varlen_backward(case: Case) -> None:
    """Gradients of packed sequences."""
    q, k, v, ends, scoring = draw_packed(case, ("float16", "bfloat16"))
    d_out = case.normal(*q.shape, dtype=q.dtype.name)
    sent = [case.sent(x) for x in (d_out, q, k, v)]
    places = [case.sent(e) for e in ends]
    o, lse = api.attention_varlen(
        *sent[1:], *places, return_lse=True, **scoring.given, **case.options()
    )
    found = api.attention_varlen_backward(
        *sent, o, lse, *places, deterministic=case.config.pick(None, True, False),
        **scoring.given, **case.options(),
    )  # fmt: skip
    dq, dk, dv = (case.host(x) for x in found)
    for i, ((a, b), (c, d)) in _sequences(ends):
        given = [_rows(x, *at) for x, at in ((d_out, (a, b)), (q, (a, b)), (k, (c, d)),
                                             (v, (c, d)))]  # fmt: skip
        parts = [x[s:e].swapaxes(0, 1)[None] for x, (s, e) in ((dq, (a, b)), (dk, (c, d)),
                                                               (dv, (c, d)))]  # fmt: skip
        _check_gradients(scoring.entry(i, b - a, d - c), q.dtype.name, given, parts)


def quantize(case: Case) -> None:
    """Codes times scales are the operands, but for half a step."""
    q, k, v = operands(case)
    turning = draw_turning(case, q.shape, k.shape)
    Q, K = turning.of(f64(q), f64(k))
    quant = draw_quant(case, Q, K, False)
    made = api.quantize(*map(case.sent, (q, k, v)), quant=quant, **turning.given, **case.options())
    z = on_host(made)
    share = 0.501 if quant.symmetric else 1.001
    loss = 0.0 if not turning.changes else 2 * ROUNDING[q.dtype.name] if quant.fused else 2.0**-20
    found = dequantised(z)
    for name, x, exact, scale, group in (("q", found[0], Q, z.q_scale, z.group_q),
                                         ("k", found[1], K, z.k_scale, z.group_kv)):  # fmt: skip
        step = scale.astype(np.float64)[..., np.arange(x.shape[2]) // group][..., None]
        much = abs(exact) + abs(exact).max(-1, keepdims=True, initial=0) * turning.changes
        near(name, x, exact, share * step + (loss + 2.0**-21) * (much + 1e-6))
        if quant.static:
            continue
        tallest = 2.02 * abs(exact).max(initial=0) / quant.largest_code
        near(f"{name}_scale", np.where(step == 1, 1, np.minimum(step, tallest)), step, 1e-30)
    if quant.pv == "16bit":
        near("v", found[2], f64(v), 2.0**-11 * abs(f64(v)) + 2.0**-24)
        return
    step = z.v_scale.astype(np.float64)[:, :, np.arange(k.shape[2]) // z.group_v]
    centred = f64(v) - (0 if z.v_mean is None else z.v_mean.astype(np.float64)[:, :, None])
    limit = share * step if quant.pv == "int8" else 2.0**-4 * abs(centred) + 2.0**-9 * step
    near("v", found[2], f64(v), limit + 2.0**-20 * (abs(f64(v)) + abs(centred)))


def _spread(x: np.ndarray, shape: tuple[int, ...], *, across: bool) -> np.ndarray:
    x = x.repeat(128, axis=1)[:, : shape[1]]
    return x.repeat(128, axis=0)[: shape[0]] if across else x


def act_quant(case: Case) -> None:
    """Rows of activations in blocks of 128."""
    x = case.normal(case.pick(1, 3, 17), case.pick(1, 100, 128, 300), dtype=case.pick(*DTYPES))
    codes, scales = api.act_quant(case.sent(x), **case.options())
    step = _spread(case.host(scales), x.shape, across=False)
    near("x", case.host(codes) * step, f64(x), 0.501 * step)
    near("largest code", abs(case.host(codes)).max(), np.array(127.0), 0)


def _weight(case: Case) -> tuple[np.ndarray, Any, Any, np.ndarray]:
    """Draw a weight and quantise it; return it, codes, scales and steps."""
    w = case.normal(case.pick(1, 130, 200), case.pick(1, 100, 300), dtype=case.pick(*DTYPES))
    codes, scales = api.weight_quant(case.sent(w), **case.options())
    return w, codes, scales, _spread(case.host(scales), w.shape, across=True)


def weight_quant(case: Case) -> None:
    """A weight in blocks of 128 by 128."""
    w, codes, _, step = _weight(case)
    near("w", case.host(codes) * step, f64(w), 0.501 * step)
    near("largest code", abs(case.host(codes)).max(), np.array(127.0), 0)


def weight_dequant(case: Case) -> None:
    """Codes of a weight, back to numbers of every type."""
    shape = case.pick(1, 130, 200), case.pick(1, 100, 300)
    codes = case.rng.integers(-127, 128, shape).astype(np.int8)
    blocks = -(-shape[0] // 128), -(-shape[1] // 128)
    scales = abs(case.normal(*blocks, dtype="float32")) + np.float32(0.01)
    kind = case.pick(*DTYPES)
    again = api.weight_dequant(case.sent(codes), case.sent(scales), 128, kind, **case.options())
    exact = codes * _spread(f64(scales), shape, across=True)
    near("w", case.host(again), exact, (ROUNDING[kind] + 2.0**-24) * abs(exact) + 1e-30)


def int8_gemm(case: Case) -> None:
    """The product of codes."""
    rows, n, depth = case.pick(1, 5, 33), case.pick(1, 40, 130), case.pick(1, 100, 300)
    a, b = (case.rng.integers(-127, 128, (r, depth)).astype(np.int8) for r in (rows, n))
    blocks = -(-depth // 128)
    scales = [abs(case.normal(*s, dtype="float32")) + np.float32(0.01)
              for s in ((rows, blocks), (-(-n // 128), blocks))]  # fmt: skip
    kind = case.config.pick(*DTYPES)
    options: dict[str, Any] = {}
    added = np.zeros(n)
    if case.config.chance(0.3):
        bias = case.normal(n, dtype=case.config.pick("float32", kind))
        options["bias"], added = case.sent(bias), f64(bias)
    aligned = True
    if case.chance(0.2):
        options["out"], aligned = case.receiver((rows, n), kind)
        if not options["out"].flags.c_contiguous:
            aligned = False
    try:
        c = api.int8_gemm(*map(case.sent, (a, scales[0], b, scales[1])), kind, **options,
                          **case.options())  # fmt: skip
    except ValueError:
        if aligned:
            raise
        return  # as it must
    if not aligned:
        raise Wrong("an out with misaligned elements or rows apart was taken")
    A = f64(a) * _spread(f64(scales[0]), a.shape, across=False)
    B = f64(b) * _spread(f64(scales[1]), b.shape, across=True)
    size, exact = abs(A) @ abs(B).T + abs(added), A @ B.T + added
    with np.errstate(over="ignore"):
        exact = np.where(abs(exact) > 65000, exact.astype(DTYPES[kind]).astype(np.float64), exact)
    near("c", case.host(c), exact, 2.0**-20 * size + ROUNDING[kind] * 2 * size)


def int8_linear(case: Case) -> None:
    """A layer, beside the steps of its codes."""
    depth, kind = case.pick(100, 128, 300), case.config.pick(*DTYPES)
    w, x = case.normal(40, depth, dtype=kind), case.normal(case.pick(1, 7), depth, dtype=kind)
    layer = ca.Int8Linear.from_weight(case.sent(w))
    W, X = f64(w), f64(x)
    step_w, step_x = abs(W).max() / 254, abs(X).max() / 254
    limit = step_w * abs(X).sum(-1)[:, None] + step_x * abs(W).sum(-1) + depth * step_w * step_x
    exact = X @ W.T
    near("y", case.host(layer(case.sent(x), **case.options())), exact,
         1.01 * limit + 4 * ROUNDING[kind] * (abs(exact) + limit))  # fmt: skip


def importance(case: Case) -> None:
    """The mean share of every key, from all rows."""
    q, k, _ = operands(case)
    if not q.size or not k.size:
        return
    found = case.host(key_importance(case.sent(q), case.sent(k), rows=1000, **case.options()))
    Q, K = f64(q), by_query_head(f64(k), q.shape[1])
    S = Q @ K.swapaxes(2, 3) / np.sqrt(q.shape[3])
    size = (abs(Q) @ abs(K).swapaxes(2, 3)).max() / np.sqrt(q.shape[3])
    P = softmax(S)[0].mean(2)
    exact = P.reshape(k.shape[0], k.shape[1], -1, k.shape[2]).mean(2)
    # [L52] Scaled rows are rounded to the type of q once more.
    near("importance", found, exact, 1e-4 + np.expm1(4 * ROUNDING[q.dtype.name] * size))


def steps(case: Case) -> None:
    """The three steps of unfused attention."""
    before = os.environ.get("CUPYATTN_INTERPRET")
    os.environ["CUPYATTN_INTERPRET"] = str(int(case.backend == "interpret"))
    try:
        _steps(case)
    finally:
        if before is None:
            del os.environ["CUPYATTN_INTERPRET"]
        else:
            os.environ["CUPYATTN_INTERPRET"] = before


def _steps(case: Case) -> None:
    q, k, v = operands(case)
    scoring = draw_scoring(case, (*q.shape[:3], k.shape[2]), q.shape[3])
    S = unfused.scores(case.sent(q), case.sent(k), **scoring.given)
    exact, size, _ = scoring.scores(f64(q), f64(k))
    finite = np.where(np.isfinite(exact), abs(exact), 0)
    near("S", case.host(S), exact, 2.0**-18 * (size + finite) + 1e-6)
    P, lse = unfused.softmax(S, return_lse=True)
    want, want_lse = softmax(case.host(S))
    near("P", case.host(P), want, 2.0**-18 + np.expm1(row_error(case.host(S), 0.0)))
    near("lse", case.host(lse), want_lse, 2.0**-18 * (finite.max(-1, initial=0) + 1) + 2.0**-18)
    o = unfused.weighted_sum(P, case.sent(v))
    heads = by_query_head(f64(v), q.shape[1])
    most = abs(heads).max(initial=0)
    near("o", case.host(o), case.host(P) @ heads, 4 * ROUNDING[q.dtype.name] * most + 1e-5)


def block_mask(case: Case) -> None:
    """`BlockMask.from_dense` keeps a block if and only if any of its elements is True."""
    len_q, len_kv = lengths(case)
    dense = case.rng.random((case.pick(1, 2), case.pick(1, 3), len_q, len_kv)) < case.pick(
        1e-4, 0.01, 0.5)  # fmt: skip
    sizes = case.pick((64, 64), (128, 64), (64, 128), (128, 128))
    found = api.BlockMask.from_dense(case.sent(dense), *sizes)
    counts = [-(-n // b) for n, b in zip((len_q, len_kv), sizes, strict=True)]
    want = np.zeros((*dense.shape[:2], *counts), bool)
    for i in range(counts[0]):
        for j in range(counts[1]):
            part = dense[..., i * sizes[0] : (i + 1) * sizes[0], j * sizes[1] : (j + 1) * sizes[1]]
            want[..., i, j] = part.any((2, 3))
    near("blocks", case.host(found.mask), want.astype(np.float64), 0)
    whole = case.host(found.to_dense(len_q, len_kv))
    if (whole < dense).any() or whole.shape != dense.shape:
        raise Wrong("the blocks lack an element of the mask")
