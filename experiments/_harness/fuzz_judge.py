"""Right outputs that the judge must pass, for `experiments.accuracy.fuzz`: no false alarm.

The judge is told as much as a caller knows who names no form and no tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import cupyattn as ca
from experiments._harness.fuzz_calls import Attention, api, draw_lengths, draw_packed
from experiments._harness.fuzz_cases import DTYPES, Case, Wrong

#: Options of calls that say where they run, which the judge does not take.
WHERE = ("backend", "return_lse", "quant")


def check(report: ca.testing.Report) -> None:
    """Raise Wrong unless a report is of a right output."""
    if not report.passed:
        raise Wrong(str(report).replace("\n", ";"))


def judge(case: Case) -> None:
    """`testing.judge` of attention, in any layout, with lengths of padded entries."""
    call = Attention(case)
    options: dict[str, Any] = {n: x for n, x in call.options.items() if n not in WHERE}
    if case.config.chance(0.3):
        options |= draw_lengths(case, call.q.shape, call.k.shape)
    z = None
    if call.variant == "fa_int8":
        z, call.bshd = call.codes(call.sent), False
        call.sent = [case.sent(x) for x in (call.q, call.k, call.v)]
    options["layout"] = "BSHD" if call.bshd else "BHSD"
    without = ("layout", "rope", "rope_offset_q", "rope_interleaved", "qk_norm")
    where = {"return_lse": True, **case.options()}
    if z is None:
        o, lse = api.attention(*call.sent, **options, **where)
    else:
        of_codes = {n: x for n, x in options.items() if n not in without}
        o, lse = api.attention(z, **of_codes, **where)
    if not o.size:
        return
    check(api.testing.judge(o, *call.sent, lse=lse, quantized=z, **options))


def judge_varlen(case: Case) -> None:
    """`testing.judge` of packed sequences."""
    variant = case.config.pick("fa", "fa_tc", "fa_int8", "own_fa")
    case.rung = variant
    known = tuple(DTYPES) if variant == "fa_int8" else ca.VARIANTS[variant].dtypes
    q, k, v, ends, scoring = draw_packed(case, known)
    sent, places = [case.sent(x) for x in (q, k, v)], [case.sent(e) for e in ends]
    named: dict[str, Any] = {"cu_seqlens_q": places[0], "cu_seqlens_k": places[1]}
    options: dict[str, Any] = {"variant": variant, **scoring.given}
    where = {"return_lse": True, **case.options()}
    z = None
    if variant == "fa_int8":
        quant = ca.QuantConfig(
            pv=case.config.pick("16bit", "int8", "fp8"), smooth_k=not scoring.softcap
        )
        z = api.quantize(*map(np.ascontiguousarray, sent), quant=quant, **named, **case.options()
                         ) if case.backend != "cuda" else api.quantize(*sent, quant=quant, **named)
        o, lse = api.attention_varlen(z, **options, **where)
    else:
        o, lse = api.attention_varlen(*sent, *places, **options, **where)
    if o.size:
        check(api.testing.judge(o, *sent, lse=lse, quantized=z, **options, **named))
