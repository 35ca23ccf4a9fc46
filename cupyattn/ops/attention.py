"""`attention` and `explain`: the two functions that most callers need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn.arrays.interchange import imported, unchanged
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.call_operands import arguments_of, named
from cupyattn.ops.operation import Operation, problem_of, run
from cupyattn.ops.prepared import Prepared
from cupyattn.plans.records import Work
from cupyattn.plans.stages import stages
from cupyattn.problem.attention import AttentionProblem
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.resolve import resolve
from cupyattn.problem.row_preparation import EPS
from cupyattn.problem.settings import (
    NO_WINDOW,
    CallOptions,
    Settings,
    Unpack,
    interned,
    parse,
    takes_options,
)
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import QuantizedQKV


@explains_foreign_arguments
def attention(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    variant: str = "auto",
    accuracy: str = "full",
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    mask: Any = None,
    bias: Any = None,
    rope: Any = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: Any = None,
    qk_norm_eps: float = EPS,
    qk_norm_split: int = 0,
    block_mask: BlockMask | None = None,
    lengths_q: Any = None,
    lengths_kv: Any = None,
    layout: str = "BHSD",
    return_lse: bool = False,
    out: Any = None,
    quant: QuantConfig | None = None,
    tiles: Tiles | None = None,
    arch: str | None = None,
    backend: str | None = None,
    check_finite: bool = False,
) -> Any:
    """Scaled dot-product attention, ``softmax(scale * Q K^T) V``.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim), or QuantizedQKV
        Queries, float16, bfloat16 or float32: CuPy, NumPy, or anything with DLPack. Any strides. An
        array is copied if its last axis is not contiguous or its elements are misaligned.
        `numpy.memmap` is the only supported subclass of NumPy arrays. A `QuantizedQKV` contains all
        three operands and runs ``fa_int8`` on them.
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        Keys and values; `heads_kv` divides `heads` (grouped heads).
    variant : {"auto", "unfused", "fa", "fa_warps", "fa_tc", "fa_int8"} or a registered name
        The rung. A rung chosen by name is never replaced.
    accuracy : {"full", "balanced", "aggressive"}
        Arithmetic that ``variant="auto"`` may choose: only the 16/32-bit arithmetic of the input;
        INT8 Q.K^T, too; or 8-bit P.V, too. The fastest one in measurements runs
        (`cupyattn.problem.choose.choose`); `explain` names the measurement.
    scale : float, optional
        Softmax scale; ``head_dim ** -0.5`` when omitted.
    causal : bool
        Query i attends key j only if ``j <= i + shift``.
    causal_align : {"bottom-right", "top-left"}
        ``shift = len_kv - len_q``, or 0.
    window : (int, int)
        Query i attends key j only if ``i + shift - left <= j <= i + shift + right``; -1: no limit
        on that side. With `causal`, right is 0.
    softcap : float
        If not 0, scores become ``softcap * tanh(score / softcap)``, before bias and masks.
        ``fa_int8`` then does not smooth the keys.
    mask : array, bool, optional
        True: attend. Broadcasts to (batch, heads, len_q, len_kv), in any layout of q, without a
        copy; combined with `causal` and `window` by AND.
    bias : array, optional
        float16, bfloat16 or float32, added to the scores in natural units; broadcasts as `mask`
        does. -inf masks the key. The Hopper form takes 16 bits, or any type if all keys have one
        bias. It copies a bias whose rows do not begin at multiples of 16 bytes, 4 bytes a number.
        Hopper forms multiply the bias by log2(e), and `fa_tc` also by 1/scale. If the product
        overflows float32, as with ``finfo.min`` of bfloat16 and float32, the bias counts as -inf.
        A row whose biases all overflow is then zeros, with lse = -inf; other forms return the mean
        of v. For padding give `mask`, or a bias of about -1e4.
    rope : (array, array), optional
        Cosines and sines in float32, float16 or bfloat16: ``(positions, head_dim / 2)``, a number
        for each pair of channels, or ``(positions, head_dim)``, one for each channel. They rotate
        rows of Q and K by their positions; key i has position i. The result is attention of the
        rotated operands, rounded to their type
        (`cupyattn.problem.row_preparation.Rope.turned`). q and k are not modified.
    rope_interleaved : bool
        Angle d rotates channels 2 d and 2 d + 1; otherwise d and d + head_dim / 2.
    rope_offset_q : int
        Position of query row 0: ``len_kv - len_q`` if the queries are the last of the keys.
    qk_norm : (array, array), optional
        Weights of Q and of K, ``(head_dim,)`` or ``(heads, head_dim)``, in float32, float16 or
        bfloat16. Rows of Q and K are divided by their root mean square and multiplied by these
        weights, before `rope` (`cupyattn.problem.row_preparation.Preparation`). ``fa_int8`` does
        both while it quantises, without a rounding to 16 bits between. Weights
        ``(heads * head_dim,)`` divide the rows of all heads of a token by their common root mean
        square, as models do that normalise before they split heads. They have no gradients.
    qk_norm_eps : float
        Added to the mean square.
    qk_norm_split : int
        With weights ``(2, head_dim)``: rows of Q and of K before this one take the first vector,
        all others the second, as text and image of joint attention. There are no gradients then.
    block_mask : BlockMask, optional
        Which blocks of 64 or 128 keys a block of query rows attends to, combined with all of the
        above by AND. Dropped blocks are neither loaded nor computed, so cost is proportional to
        the kept blocks. The Hopper forms take blocks of 128 query rows.
    lengths_q, lengths_kv : array, (batch,), int32 or int64, optional
        Valid rows of padded batches: entry b has ``lengths_q[b]`` queries and ``lengths_kv[b]``
        keys, which come first; without an array all rows are valid. Padded keys are masked and may
        have any contents, even NaN. Padded query rows give ``o = 0`` and ``lse = -inf``. Kernels
        read the numbers, without a synchronisation or a mask, and skip tiles of padding. A number
        below 0 counts as 0, and a number past the arrays as their length. `causal`, `window` and
        `causal_align` use the lengths of each entry. Mask, bias and block mask keep their
        positions. int32 on the device of q needs no copy. ``fa_int8`` quantises only valid rows,
        and "tensor" means all heads of an entry. The padding of a `QuantizedQKV` must be finite.
    layout : {"BHSD", "BSHD"}
        Order of the axes of q, k, v and the result.
    return_lse : bool
        Also return the log-sum-exp.
    out : array, optional
        Receives O; shape and dtype of the result, aligned elements and a contiguous last axis,
        sharing memory with no input.
    quant : QuantConfig, optional
        How ``fa_int8`` quantises.
    tiles : Tiles, optional
        Tile sizes in place of the rung's defaults, for its portable form.
    arch : str, optional
        Architecture to compile for, for example ``"sm_90"``; that of the device when omitted. On
        ``"sm_90a"`` (H100 and H200) a rung runs in its Hopper form if it has one that takes the
        call; `explain` says so.
    backend : {"cuda", "mirror", "interpret"}, optional
        ``cuda`` for CuPy arrays. For NumPy arrays ``mirror`` (same blocks and rounding points), or
        ``interpret``: the kernels themselves, compiled and executed on NumPy, every access
        checked. ``CUPYATTN_INTERPRET=1`` makes this the default. A registered rung runs in the
        interpreter by default, because the mirror cannot read its source.
    check_finite : bool
        Raise if q, k or v contains a NaN or an infinity (waits for the device).

    Returns
    -------
    o : array, (batch, heads, len_q, head_dim)
        Dtype and kind of q, on its device and the current stream.
    lse : array, float32, (batch, heads, len_q)
        With `return_lse`: natural logarithm of the sum of ``exp(score)``. A row without any
        unmasked key has ``o = 0`` and ``lse = -inf``.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit together; the message gives the values.
    UnsupportedError
        If the rung does not support the call; the message says what is supported.
    KernelFault
        With ``backend="interpret"``: a kernel's first hazard.

    Notes
    -----
    docs/MATH_REFERENCE.md derives the error bound that every rung is held to, per element.

    Examples
    --------
    >>> import numpy as np, cupyattn as ca
    >>> q = k = v = np.ones((1, 1, 4, 8), np.float16)
    >>> ca.attention(q, k, v, causal=True)[0, 0, :, 0]
    array([1., 1., 1., 1.], dtype=float16)
    """
    if isinstance(q, QuantizedQKV) and q.cu_seqlens_q is not None:
        raise ValueError("this QuantizedQKV holds packed sequences: call attention_varlen")
    settings = interned(
        variant, accuracy, scale, causal, causal_align, window, softcap, rope_interleaved,
        rope_offset_q, qk_norm_eps, layout, return_lse, quant, tiles, arch, backend, check_finite,
        None, None, qk_norm_split,
    )  # fmt: skip
    arrays = named(
        q, k, v, mask=mask, bias=bias, rope=rope, qk_norm=qk_norm, block_mask=block_mask, out=out,
        lengths_q=lengths_q, lengths_kv=lengths_kv,
    )  # fmt: skip
    return run_attention(settings, arrays)


@explains_foreign_arguments
def attention_varlen(
    q: Any,
    k: Any = None,
    v: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    *,
    max_len_q: int | None = None,
    max_len_k: int | None = None,
    variant: str = "auto",
    accuracy: str = "full",
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    mask: Any = None,
    bias: Any = None,
    rope: Any = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: Any = None,
    qk_norm_eps: float = EPS,
    block_mask: Any = None,
    return_lse: bool = False,
    out: Any = None,
    quant: QuantConfig | None = None,
    tiles: Tiles | None = None,
    arch: str | None = None,
    backend: str | None = None,
    check_finite: bool = False,
) -> Any:
    """Attention within each of several sequences, packed one behind the other without padding.

    The result equals that of `attention` on each sequence, bit for bit in the same form and tiles.
    The exception is the mean that ``fa_int8`` subtracts from the keys: its last bits depend on
    `max_len_k`. The tiles of the Hopper form of ``fa_tc`` depend on the mean lengths.

    Parameters
    ----------
    q : array, (total_q, heads, head_dim), or QuantizedQKV
        Queries of all sequences; kinds of arrays, dtypes and strides as for `attention`. A
        `QuantizedQKV` that `quantize` made of packed sequences carries all operands and offsets.
    k, v : array, (total_k, heads_kv, head_dim)
        Keys and values; `heads_kv` divides `heads`.
    cu_seqlens_q, cu_seqlens_k : array, (batch + 1,), int32 or int64
        Sequence i has rows ``cu_seqlens_q[i]`` up to ``cu_seqlens_q[i + 1]`` of q, and the same of
        k and v. Offsets start at 0, never fall, and end with the totals. A sequence may be empty in
        q, in k or in both. On the host or on the device; int32 on the device needs no copy.
    max_len_q, max_len_k : int, optional
        Upper limits of the lengths, which set the number of thread blocks and the scratch memory
        (``unfused`` needs ``4 batch heads max_len_q max_len_k`` bytes). Without one of them the
        offsets are read, which synchronises if they are on a device. A `QuantizedQKV` has limits.
    causal, causal_align, window
        As for `attention`, with the lengths of each sequence: ``shift = len_kv - len_q`` or 0.
    rope, rope_interleaved, rope_offset_q
        As for `attention`. Positions start again in each sequence, and `rope_offset_q` is that of
        its first query. The tables must cover the longest sequence.
    qk_norm, qk_norm_eps
        As for `attention`.
    mask, bias, block_mask
        As for `attention` on a padded batch with ``len_q = max_len_q`` and ``len_kv = max_len_k``.
        Sequence i uses the top left corner of entry i, up to its lengths. Without limits, the sizes
        are the longest lengths.
    out : array, optional
        Receives O; shape and dtype of the result, aligned elements and a contiguous last axis,
        sharing memory with no input.
    check_finite : bool
        Raise if q, k or v contains a NaN or an infinity, or if the offsets are wrong, on any device
        (waits for the device).
    quant : QuantConfig, optional
        How ``fa_int8`` quantises. Each sequence has separate means and scales ("tensor": one scale
        for all heads of a sequence). Given scales need granularity "tensor" or "head" and have one
        entry for each sequence.
    variant, accuracy, scale, softcap, return_lse, tiles, arch, backend
        As for `attention`.

    Returns
    -------
    o : array, (total_q, heads, head_dim)
        Dtype and kind of q, on its device and the current stream.
    lse : array, float32, (heads, total_q)
        With `return_lse`: natural logarithm of the sum of ``exp(score)``.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit together; the message gives the values.
    UnsupportedError
        For unsupported options; the message says what is supported.
    KernelFault
        With ``backend="interpret"``: a kernel's first hazard.

    Notes
    -----
    Offsets on the host are always checked. On a device they are checked without `max_len_q` or
    `max_len_k`, or with `check_finite`. Otherwise the call does not synchronise, and offsets that
    do not end with the totals make a kernel read and write past the arrays. A sequence longer than
    its limit is cut: rows of O past the limit are not written. ``CUPYATTN_DEBUG=1`` stops the
    kernel in that case.

    `cupyattn.plan` and `cupyattn.explain` take `cu_seqlens_q`, `cu_seqlens_k`, `max_len_q` and
    `max_len_k` by name.

    Examples
    --------
    >>> import numpy as np, cupyattn as ca
    >>> q = k = v = np.ones((5, 1, 8), np.float16)
    >>> ends = np.array([0, 2, 2, 5])
    >>> o, lse = ca.attention_varlen(q, k, v, ends, ends, scale=1.0, return_lse=True)
    >>> o.shape, (lse[0] - 8).round(2).tolist()
    ((5, 1, 8), [0.6899999976158142, 0.6899999976158142, 1.100000023841858, ...])
    """
    coded = isinstance(q, QuantizedQKV)
    if coded and q.cu_seqlens_q is None:
        raise ValueError(
            "this QuantizedQKV holds no packed sequences: call attention, or quantize with "
            "cu_seqlens_q and cu_seqlens_k"
        )
    if not coded and cu_seqlens_q is cu_seqlens_k is None:
        raise TypeError("attention_varlen needs cu_seqlens_q and cu_seqlens_k beside arrays")
    settings = interned(
        variant, accuracy, scale, causal, causal_align, window, softcap, rope_interleaved,
        rope_offset_q, qk_norm_eps, "BHSD", return_lse, quant, tiles, arch, backend, check_finite,
        max_len_q, max_len_k,
    )  # fmt: skip
    arrays = named(
        q, k, v, mask=mask, bias=bias, rope=rope, qk_norm=qk_norm, block_mask=block_mask, out=out,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    return run_attention(settings, arrays)


def run_attention(settings: Settings, given: Mapping[str, Any]) -> Any:
    """Run `attention` or, with offsets among the arrays, `attention_varlen`.

    Parameters
    ----------
    settings, given
        As `cupyattn.problem.settings.parse` tells them apart.
    """
    q, (asked, arrays, facts) = given["q"], arguments_of(settings, given)
    as_given = q.as_given if isinstance(q, QuantizedQKV) else unchanged
    return run(ATTENTION, asked, arrays, facts, as_given)


class _Attention(Operation):
    """Attention as an operation, of sequences that are packed or not."""

    name = "attention"
    receives = ("o",)

    resolve = staticmethod(resolve)  # type: ignore[assignment]

    def plan(self, problem: AttentionProblem) -> Work:
        """Return the passes that prepare and quantise, and the rung's kernels."""
        return stages(problem)

    def mirror(self, problem: AttentionProblem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return O and the log-sum-exp, as the caller has them."""
        # NOTE: kernels run without the mirror, and answer 4 ms sooner.
        from cupyattn.reference.problem import run_mirror

        return run_mirror(problem, arrays)

    def restore(self, facts: None, arrays: Mapping[str, Any], results: dict[str, Any]) -> Any:
        """Return O, or the ``out`` that received it, and with `return_lse` the log-sum-exp."""
        o = results["o"] if "o" in results else arrays["o"]
        return (o, results["lse"]) if "lse" in results else o


ATTENTION = _Attention()


def resolved(
    q: Any, k: Any = None, v: Any = None, *, function: str = "attention", **options: Any
) -> AttentionProblem:
    """Check a call and settle its kernels, without running it.

    Parameters
    ----------
    q, k, v, **options
        As for `attention` or, with `cu_seqlens_q` and `cu_seqlens_k`, `attention_varlen`.
    function : str
        Name of the called function, for messages.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `attention`.
    """
    return described(*parse(function, q, k, v, options))


def described(settings: Settings, given: Mapping[str, Any]) -> AttentionProblem:
    """Check a call of arrays or descriptions, and settle its kernels.

    Parameters
    ----------
    settings, given
        As `cupyattn.problem.settings.parse` tells them apart.
    """
    asked, arrays, _ = arguments_of(settings, given)
    problem: AttentionProblem = problem_of(ATTENTION, asked, imported(arrays)[0])
    return problem


@explains_foreign_arguments
@takes_options
def plan(q: Any, k: Any = None, v: Any = None, **options: Unpack[CallOptions]) -> Prepared:
    """Prepare a call of `attention` once, to run it many times.

    Parameters
    ----------
    q, k, v, **options
        As for `attention`, or with `cu_seqlens_q` and `cu_seqlens_k` for `attention_varlen`. Only
        their shapes, strides, dtypes, addresses modulo 16 and device count; with ``out=`` each
        call is given one.

    Returns
    -------
    Prepared
        Call it with ``(q, k, v)`` of the same form. It makes few checks and no plans, and owns its
        scratch memory, so a CUDA graph may capture it. ``str()`` describes the launches.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `attention`. `Prepared` raises ValueError in a capture if an operand must be copied.

    Notes
    -----
    Misaligned arrays are copied at every call, so changes of their values have an effect. A CUDA
    graph cannot capture such a copy, because its memory would return to the pool while the graph
    still writes to it. Copy such arrays before the capture.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.ones((1, 1, 4, 8), np.float16)
    >>> prepared = plan(q, q, q, causal=True)
    >>> prepared(q, q, q)[0, 0, :, 0]
    array([1., 1., 1., 1.], dtype=float16)
    """
    return Prepared(ATTENTION, *parse("plan", q, k, v, options))
