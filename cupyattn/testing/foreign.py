"""`numerics`: the rounding points of another library's kernel, in the words of its documents."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from cupyattn.bounds.foreign import ACCUMULATORS, CODES, OPERANDS
from cupyattn.errors import shown
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.numerics import EX2_APPROX_ERROR, TANH_APPROX_ERROR, Foreign, Numerics

#: Short names of types, by the name that the bounds know.
_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_LONG = {short: name for name, short in _SHORT.items()} | {"fp8": "e4m3", "half": "float16"}


def numerics(
    p: str,
    *,
    accumulate: str = "fp32",
    promote: int | None = None,
    scores: str = "fp32",
    exponential: float = EX2_APPROX_ERROR,
    order: str = "sequential",
    qk: str | None = None,
    v: str | None = None,
    out: str | None = None,
    tanh: float = TANH_APPROX_ERROR,
    scaled_q: str | None = None,
) -> Numerics:
    """Describe the roundings of another library's kernel, for `judge` and `assert_within_bound`.

    Types are ``"fp32"``, ``"fp16"``, ``"bf16"`` or their long names, and ``"e4m3"``.

    Parameters
    ----------
    p : str
        Type of P, the weights, where they multiply V: ``"fp16"``, or ``"fp16 P"``. Weights are
        summed before that rounding.
    accumulate : {"fp32", "fp16", "fp22"}
        Type in which both products are summed. ``"fp22"`` is the accumulator of Hopper's tensor
        cores for 8-bit floats.
    promote : int, optional
        Keys after which partial sums of P.V are added up in float32, if `accumulate` is narrower.
    scores : {"fp32", "fp16", "bf16"}
        Type in which scores are stored, before and after the scale and a bias.
    exponential : float
        Largest relative error of one exponential, 2^-22 for ``ex2.approx.ftz.f32``.
    order : {"sequential", "any"}
        ``"sequential"``: keys are taken from first to last or from last to first, in steps of any
        size. ``"any"``: in any order, or in up to 128 slices that are merged, in steps of at least
        16 keys; the bound is wider.
    qk, v : {"int8", "e4m3"}, optional
        Codes that the kernel makes of q and k, and of v: symmetric, with a scale for each head at
        the coarsest (INT8) or for each tensor (e4m3). The mean of the keys may be subtracted first.
    out : {"fp32", "fp16", "bf16"}, optional
        Type of the result. The default is q's type.
    tanh : float
        Largest relative error of the tanh of a softcap, 2^-11 for ``tanh.approx.f32`` and 2^-21 for
        ``tanhf``.
    scaled_q : {"fp32", "fp16", "bf16"}, optional
        Type in which q is stored after its multiplication by the scale. The scores are scaled when
        omitted.

    Returns
    -------
    Numerics
        Argument of the bounds. docs/MATH_REFERENCE.md, §14, proves the bound.

    Raises
    ------
    ValueError
        For a word that is not listed here.

    Examples
    --------
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> flash = numerics("fp16 P", accumulate="fp32")
    >>> flash.foreign.name
    'fp16 P, fp32 sums'
    >>> from cupyattn.testing import judge
    >>> judge(x, x, x, x, numerics=flash).passed
    True
    """
    if not isinstance(p, str):
        raise ValueError(f"p must be a type such as 'fp16 P', got {shown(p)}")
    p_type = _known("p", p.removesuffix("P").strip(), OPERANDS)
    sums = _known("accumulate", accumulate, ACCUMULATORS)
    score_type = _known("scores", scores, DTYPES)
    qk_codes = None if qk is None else _known("qk", qk, CODES)
    v_codes = None if v is None else _known("v", v, CODES)
    out_type = None if out is None else _known("out", out, DTYPES)
    if order not in ("sequential", "any"):
        raise ValueError(f"order must be 'sequential' or 'any', got {shown(order)}")
    try:
        steps = None if promote is None else operator.index(promote)
    except TypeError:
        steps = 0
    if steps is not None and steps < 1:
        raise ValueError(f"promote must be a positive number of keys or None, got {shown(promote)}")
    scaled_type = None if scaled_q is None else _known("scaled_q", scaled_q, DTYPES)
    for name, error in (("exponential", exponential), ("tanh", tanh)):
        if isinstance(error, bool) or not isinstance(error, (int, float)) or not 0 <= error < 0.5:
            raise ValueError(
                f"{name} must be a relative error of at least 0 and less than 0.5, such as "
                f"2**-22, got {shown(error)}"
            )
    parts = [f"{_short(p_type)} P", f"{_short(sums)} sums"]
    parts += [] if steps is None else [f"promoted after {steps} keys"]
    parts += [] if score_type == "float32" else [f"{_short(score_type)} scores"]
    parts += [] if scaled_type is None else [f"Q scaled in {_short(scaled_type)}"]
    parts += [] if qk_codes is None else [f"{qk_codes} Q and K"]
    parts += [] if v_codes is None else [f"{v_codes} V"]
    foreign = Foreign(
        ", ".join(parts), sums, steps, score_type, float(exponential), order == "sequential",
        qk_codes, v_codes, out_type, float(tanh), scaled_type,
    )  # fmt: skip
    return Numerics(
        "float32", "float32", "float32", out_type or "float32", "fma", "natural", p_type, "fma",
        False, foreign=foreign,
    )  # fmt: skip


def check_no_codes(**operands: Any) -> None:
    """Raise TypeError for operands in 8 bits, which are numbers only together with their scales."""
    for name, x in operands.items():
        kind = str(getattr(x, "dtype", "")).rpartition(".")[2]
        if kind in ("int8", "uint8") or kind.startswith("float8"):
            raise TypeError(
                f"{name} has 8 bits ({kind}): give the numbers that it stands for, {name} times "
                "its scale in float32, beside the roundings, as in numerics('bf16 P')"
            )


def _short(name: str) -> str:
    return _SHORT.get(name, name)


def _known(argument: str, given: Any, known: Collection[str]) -> str:
    """Return the name of a type in the bounds. Raise ValueError if it is not in `known`."""
    word = given.strip().lower() if isinstance(given, str) else ""
    name = _LONG.get(word, word)
    if name not in known:
        words = ", ".join(repr(_short(one)) for one in known)
        raise ValueError(f"{argument} must be one of {words}, got {shown(given)}")
    return name
