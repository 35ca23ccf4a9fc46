"""The judge: the error of an output against exact attention, as a fraction of its bound.

`judge` compares an output with exact attention as a fraction of a derived bound, element by
element; `assert_within_bound` raises where the fraction exceeds 1. `cupyattn.strategies` draws the
arrays, with Hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cupyattn.arrays.interchange import take, taken, taken_pair, unchanged
from cupyattn.arrays.kinds import Array, check_real
from cupyattn.errors import shown
from cupyattn.kernels import ladder
from cupyattn.kernels.numerics import Numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.row_preparation import PAIRS
from cupyattn.problem.settings import ProblemOptions, Unpack, of_arguments, takes_options
from cupyattn.quant.operand_protocol import Quantized
from cupyattn.reference.exact import attention_exact
from cupyattn.testing import judged
from cupyattn.testing.counterexamples import keep
from cupyattn.testing.foreign import check_no_codes
from cupyattn.testing.judged import Further
from cupyattn.testing.parts import kernels_tried, parts_of, problem_of_call, with_longest
from cupyattn.testing.report import Report as Report
from cupyattn.testing.report import merged
from cupyattn.testing.signed import SignedRun
from cupyattn.testing.watching import WATCHED

#: A rung that takes any call. Beside `numerics` of another library it only chooses rows.
_ANY_RUNG = "unfused"


@explains_foreign_arguments
@takes_options
def judge(
    o: Array,
    q: Array | None,
    k: Array | None,
    v: Array | None,
    *,
    variant: str | None = None,
    lse: Array | None = None,
    quantized: Any = None,
    numerics: Numerics | None = None,
    tiles: Tiles | None = None,
    form: str | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    rows: Array | None = None,
    seed: int = 0,
    exact: Callable[..., Any] = attention_exact,
    signed: SignedRun | None = None,
    draws: int = 1,
    sums: bool = False,
    sinks: Array | None = None,
    **options: Unpack[ProblemOptions],
) -> Report:
    """Compare an output with exact attention, as a fraction of the derived bound.

    Parameters
    ----------
    o : (batch, heads, len_q, head_dim) array
        The output, all of it, as the call returns it: with `cu_seqlens_q` (total_q, heads,
        head_dim). All arrays: NumPy, CuPy, or anything with DLPack.
    q, k, v : array
        The caller's arrays. With `quantized` they may be None; J3 is then left out.
    variant : str, optional
        The rung that made `o`. "auto": the rung that `cupyattn.attention` takes by itself for these
        arguments where they lie, of accuracy class "full"; ``fa_int8`` with `quantized`. It may be
        left out with the `numerics` of a kernel of another library.
    lse : (batch, heads, len_q) array, optional
        Log-sum-exp, natural logarithm, to be judged too; of packed sequences (heads, total_q).
    quantized : QuantizedQKV, optional
        The INT8 operands that the rung worked on. J2 is then against exact attention of these.
        ``attention(q, k, v, lengths_kv=...)`` makes its codes of the rows that count alone: to
        judge such a call, quantise first, and give the codes to the call and to the judge.
    numerics
        As for `cupyattn.bounds.attention`. Where `o` comes from another library, `numerics` is what
        `cupyattn.testing.numerics` makes of the words of its documents.
    tiles, form
        Those of the call, as `cupyattn.kernel_form` returns them: the judge then holds `o` to the
        bound of that kernel. Of one that is left out it tries those that this version runs for such
        operands on each architecture, of the arrays' own first, and passes with the first whose
        bound holds. If none holds, but the widest of their bounds does, the verdict is *undecided*,
        which is not passed. With P in 8 bits form and tiles settle every code, and the output is
        held to the codes, too (docs/MATH_REFERENCE.md, §13).
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for the call that made `o`.
    rope, rope_interleaved, rope_offset_q, qk_norm, qk_norm_eps, qk_norm_split
        As for the call that made `o`: q and k are prepared as the kernels prepare them, and
        everything else is about those. `quantized` has prepared operands already; J3 is then
        against attention of q and k prepared in float64.
    lengths_q, lengths_kv, layout
        As for `cupyattn.attention`. Rows behind the lengths must be 0, with lse = -inf.
    cu_seqlens_q, cu_seqlens_k
        As for `cupyattn.attention_varlen`: each sequence is judged by itself, and `Report.index`
        names it in place of the batch entry. A packed `quantized` has its own.
    rows : 1-D integer array, optional
        Query rows to look at; by default all of a small cell, else those of `sample_rows`.
    seed : int
        Seed of that sample.
    exact : callable
        Function that computes exact attention: `cupyattn.reference.attention_exact`, or a cache of
        it.
    signed : callable, optional
        Runs the same call on other values: ``signed(v)``, or ``signed(quantized)``, returns O. It
        gets `v` as the kind of array that the caller's is. The values of each key then have a
        random sign, from `seed`. Errors of P cannot hide behind those of other keys, so the bound
        is narrower. It is random: right outputs fail with a probability of at most 1e-12 a
        judgement. For P in 16 or 32 bits.
    draws : int
        How many times signs are drawn, at least once.
    sums : bool
        Hold sums over the channels of a row to their bounds, too: along exact attention, the
        softmax scale, a group of keys, one key. These bounds are certain, and show faults that
        each element hides (docs/MATH_REFERENCE.md, §15). For P in 16 or 32 bits.
    sinks : (heads,) array, optional
        Attention sinks, beside the `numerics` of another library: the exponential of a head's sink
        is part of the sum of exponentials in each of its rows, and of lse. A softcap does not
        apply to it.

    Returns
    -------
    Report

    Raises
    ------
    TypeError
        If neither `variant` nor the `numerics` of another library say what made `o`.
    ValueError
        If `o` or `lse` does not have the shape that the inputs ask for, the rung has no such
        `form`, P or V are codes where `signed` is given, `signed` or `sums` is given beside the
        `numerics` of another library, `signed` or `rows` beside packed sequences, or `sinks`
        without the `numerics` of another library.

    Examples
    --------
    >>> from cupyattn.reference import attention_mirror
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> report = judge(attention_mirror(x, x, x, variant="fa"), x, x, x, variant="fa")
    >>> report.passed, report.rows
    (True, 8)
    """
    layout = options.get("layout", "BHSD")
    if quantized is not None and not isinstance(quantized, Quantized):
        raise TypeError(f"quantized must be a cupyattn.QuantizedQKV, got {shown(quantized)}")
    cu_seqlens_q, cu_seqlens_k = taken(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise TypeError("packed sequences need cu_seqlens_q and cu_seqlens_k: give both")
    packed = cu_seqlens_q is not None
    packed = packed or getattr(quantized, "cu_seqlens_q", None) is not None
    if packed and (signed is not None or rows is not None):
        raise ValueError(
            "signed and rows are of one sequence: leave them out, or judge each sequence by itself"
        )
    if signed is not None and (quantized is not None or v is not None):
        run, (_, restore) = signed, take("v", v) if quantized is None else (None, unchanged)

        def signed(values: Any) -> Array:  # of the caller's kind and layout, torch's for example
            operand = values if quantized is not None else to_bhsd(values, layout)
            return to_bhsd(take("what signed returns", run(restore(operand)))[0], layout)

    if isinstance(numerics, Numerics) and numerics.foreign is not None:
        check_no_codes(q=q, k=k, v=v)
    o, q, k, v, lse = taken(o=o, q=q, k=k, v=v, lse=lse)
    for name, result in (("o", o), ("lse", lse)):
        if result is not None:
            check_real(name, result)
    options["mask"], options["bias"] = taken(mask=options.get("mask"), bias=options.get("bias"))
    options["rope"] = taken_pair(PAIRS["rope"], options.get("rope"))
    options["qk_norm"] = taken_pair(PAIRS["qk_norm"], options.get("qk_norm"))
    (sinks,) = taken(sinks=sinks)
    rows = take("rows", rows)[0] if hasattr(rows, "__dlpack__") else rows
    if quantized is None and (q is None or k is None or v is None):
        raise TypeError("q, k and v may only be None where quantized is given")
    if numerics is not None and not isinstance(numerics, Numerics):
        raise TypeError(
            f"numerics must be what cupyattn.testing.numerics returns, got {shown(numerics)}"
        )
    if variant is None:
        if numerics is None or numerics.foreign is None:
            raise TypeError(
                "judge needs the rung that made o, such as variant='fa_tc', 'auto' if the call "
                "named none, or for a kernel of another library "
                "numerics=cupyattn.testing.numerics('fp16 P')"
            )
        variant = _ANY_RUNG
    if numerics is not None and numerics.foreign is not None and (signed is not None or sums):
        raise ValueError(
            "signed and sums hold this library's kernels to narrower bounds, and numerics is of "
            "another's: leave them out"
        )
    if sinks is not None:
        if numerics is None or numerics.foreign is None:
            raise ValueError(
                "sinks belong to kernels of other libraries: give numerics, such as "
                "cupyattn.testing.numerics('bf16 P'), or leave sinks out"
            )
        numerics = replace(numerics, foreign=replace(numerics.foreign, sinks=True))
    if variant != "auto":
        ladder.lookup(variant, also=("auto",))  # whose refusal lists auto, too
    if layout not in ("BHSD", "BSHD"):
        raise ValueError(f"layout must be 'BHSD' or 'BSHD', got {shown(layout)}")
    settings, arrays = of_arguments(locals())
    settings = settings._replace(return_lse=lse is not None)
    if packed and quantized is None:
        settings = with_longest(settings, arrays)
    if variant == "auto":
        settings = settings._replace(
            variant=problem_of_call(settings, arrays, quantized).variant.name
        )
    parts = parts_of(settings, arrays, quantized, o, lse, sinks)
    settled = form is not None and settings.tiles is not None
    looks: dict[str, Any] = {"rows": rows, "seed": seed, "exact": exact}
    further = Further(signed, draws, sums, codes=settled)
    if settled or numerics is not None:
        reports = [
            judged.judge_kernel(
                part.received(form, settings.tiles), part.o, part.lse, numerics=numerics,
                further=further, **looks,
            )
            for part in parts
        ]  # fmt: skip
    else:
        tried = kernels_tried(settings, arrays, quantized, form)
        reports = judged.judge_parts(parts, tried, further=further, **looks)
    return merged(reports, [part.entry for part in parts])


@explains_foreign_arguments
def assert_within_bound(
    o: Array, q: Array | None, k: Array | None, v: Array | None, **options: Any
) -> Report:
    """Raise unless an output is within its bound.

    Under pytest, the plugin of this package keeps the arrays of a test's last failure in a file.
    The report of the test ends with the line that replays it.

    Parameters
    ----------
    o, q, k, v, **options
        As for `judge`.

    Returns
    -------
    Report

    Raises
    ------
    AssertionError
        Naming coordinate, value, expected value, bound, ratio and rounding point.

    Examples
    --------
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> try:
    ...     assert_within_bound(0 * x, x, x, x, variant="fa")
    ... except AssertionError as error:
    ...     print(str(error)[:27])
    fa: O is OUTSIDE its bound,
    """
    __tracebackhide__ = True  # what a test shows is the line that called, and the verdict
    report = judge(o, q, k, v, **options)
    if not report.passed:
        message = str(report)
        if WATCHED.test:
            WATCHED.failure = keep(o, q, k, v, options, test=WATCHED.test, message=message)
        raise AssertionError(message)
    return report
