"""The ladder on one input: how far each rung is from exact attention, how fast, how much memory.

`ladder` is behind ``cupyattn ladder``. On CuPy arrays it runs the kernels and times them. On NumPy
arrays it runs the mirror and times nothing. On request it also runs the kernels in the interpreter,
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from cupyattn.arrays import interchange
from cupyattn.arrays.kinds import STORAGE, array_namespace, as_float64
from cupyattn.kernels.ladder import VARIANTS, Variant, lookup
from cupyattn.measure import device, timing
from cupyattn.measure.words import (
    align,
    format_bytes,
    format_rate,
    format_ratio,
    format_seconds,
    format_share,
)
from cupyattn.ops.attention import attention, resolved
from cupyattn.ops.explain import kernel_form
from cupyattn.ops.quantize import quantize
from cupyattn.plans.stages import stages
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.settings import check_attention
from cupyattn.quant.config import QuantConfig
from cupyattn.reference import exact as reference
from cupyattn.testing import expected, verdict

#: Period of the sampled rows next to tile edges. The block_q of every portable form divides it, and
#: every second edge of the Hopper form's tiles of 192 rows is a multiple of it.
EDGE_ROWS = 128
#: Approximate limit of the scores (batch heads rows len_kv) of a sample of rows, each computed in
#: float64. A sample has at least LEAST_SAMPLED drawn rows, and as many at edges.
SAMPLED_SCORES, LEAST_SAMPLED = 2**27, 8

#: ``exact(q, k, v, rows=..., return_lse=True, **options) -> o, lse``:
#: `cupyattn.reference.attention_exact`, or a cache before it.
Exact = Callable[..., tuple[Any, Any]]

#: Rows of queries and keys, of one head, that `ladder` runs in the interpreter.
INTERPRETED_ROWS = 64
#: Beginning of the note of a rung that could not be run.
NOT_RUN = "not run: "


@dataclass(frozen=True)
class Judgement:
    """One output, judged per element against float64.

    Parameters
    ----------
    j2 : float
        Largest error against exact attention of the operands that the kernel received, as a
        share of its bound: up to 1 is a pass. Infinite if the output is not finite and the exact
        result is.
    j3 : float or None
        Largest effect of quantisation as a share of its bound; None without quantisation.
    relative_error : float
        ``||o - exact|| / ||exact||`` against the caller's arrays; it decides nothing.
    """

    j2: float
    j3: float | None
    relative_error: float

    @property
    def ok(self) -> bool:
        """Whether both judgements are passed."""
        return self.j2 <= 1 and (self.j3 is None or self.j3 <= 1)


@dataclass(frozen=True)
class Interpreted:
    """The kernels of a rung, run once in the interpreter.

    Parameters
    ----------
    judgement : Judgement
        Judgement of their results.
    instructions : int
        Number of executed warp instructions.
    global_bytes, shared_bytes : int
        Bytes moved to and from global and shared memory.
    """

    judgement: Judgement
    instructions: int
    global_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Rung:
    """One row of the table.

    Parameters
    ----------
    variant, idea : str
    judgement : Judgement or None
        None if the rung does not take the input; `note` says why.
    memory_bytes : int
        Device memory that a call needs besides q, k and v: output, workspace, codes and scales.
    seconds : float or None
        Median time of a call; None if it was not timed.
    seconds_interval : (float, float) or None
        95 % bootstrap interval of that median.
    operations : int
        Operations of both products: ``4 head_dim`` for every unmasked (query, key) pair.
    ceiling : float or None
        Peak operations per second of the units that the rung uses.
    note : str
    interpreted : Interpreted or None
        A run of the kernels on the first rows of the input.
    ran : {"", "device", "mirror", "interpreter"}
        Where the judged run took place; "interpreter" runs only the first rows. "" without a run.
    """

    variant: str
    idea: str
    judgement: Judgement | None
    memory_bytes: int = 0
    seconds: float | None = None
    seconds_interval: tuple[float, float] | None = None
    operations: int = 0
    ceiling: float | None = None
    note: str = ""
    interpreted: Interpreted | None = None
    ran: str = ""

    @property
    def tflops(self) -> float | None:
        """Operations per second, in units of 10^12."""
        return self.operations / self.seconds / 1e12 if self.seconds else None

    @property
    def share(self) -> float | None:
        """`tflops` as a share of the ceiling."""
        if self.tflops is None or not self.ceiling:
            return None
        return self.tflops * 1e12 / self.ceiling

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {**asdict(self), "tflops": self.tflops, "share": self.share}


@dataclass(frozen=True)
class Ladder:
    """The table: every rung on one input.

    Parameters
    ----------
    rungs : tuple of Rung
    call : AttentionSpec
    backend : {"cuda", "mirror"}
    quant : QuantConfig
    judged_rows : int
        Rows of each head.
    interpreted : bool
        Whether the kernels ran in the interpreter too.
    """

    rungs: tuple[Rung, ...]
    call: AttentionSpec
    backend: str
    quant: QuantConfig = field(default_factory=QuantConfig)
    judged_rows: int = 0
    interpreted: bool = False

    @property
    def ok(self) -> bool:
        """Whether every rung that takes the input was run and passes J2 and J3."""
        judged = [r.judgement for r in self.rungs]
        judged += [r.interpreted.judgement for r in self.rungs if r.interpreted]
        if any(r.note.startswith(NOT_RUN) for r in self.rungs):
            return False
        return all(judgement is None or judgement.ok for judgement in judged)

    @property
    def header(self) -> tuple[str, ...]:
        """Names of the columns."""
        measured: tuple[str, ...] = ()
        if self.backend == "cuda":
            measured = ("time", "TFLOP/s", "ceiling")
        elif any(rung.interpreted for rung in self.rungs):
            measured = ("PTX J2", "instructions", "global", "shared")
        ran = () if self.backend == "cuda" else ("run by",)
        return ("rung", *ran, "J2", "J3", "rel. error", *measured, "memory", "one idea")

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text."""
        return [self._row(rung) for rung in self.rungs]

    def _row(self, rung: Rung) -> tuple[str, ...]:
        judged = rung.judgement
        if judged is None:
            blank = len(self.header) - 2
            return (rung.variant, *("-",) * blank, rung.note)
        measured: tuple[str, ...] = ("-",) * (len(self.header) - 6 - (self.backend != "cuda"))
        if self.backend == "cuda":
            measured = (
                "-" if rung.seconds is None else format_seconds(rung.seconds),
                "-" if rung.tflops is None else format_rate(rung.tflops),
                "-" if rung.share is None else format_share(rung.share),
            )
        if rung.interpreted is not None:
            measured = (
                format_ratio(rung.interpreted.judgement.j2),
                f"{rung.interpreted.instructions:,}",
                format_bytes(rung.interpreted.global_bytes),
                format_bytes(rung.interpreted.shared_bytes),
            )
        return (
            rung.variant,
            *(() if self.backend == "cuda" else (rung.ran,)),
            format_ratio(judged.j2),
            "-" if judged.j3 is None else format_ratio(judged.j3),
            f"{judged.relative_error:.2e}",
            *measured,
            format_bytes(rung.memory_bytes),
            rung.note or rung.idea,
        )

    @property
    def legend(self) -> str:
        """Meaning of the columns."""
        lines = [
            "J2: largest error against exact attention of what the kernel received, as a share of",
            "its bound. J3: the same for quantisation alone. Both must be at most 1.",
            "Memory: what a call needs beside Q, K and V.",
        ]
        if self.backend == "cuda":
            lines += [
                "Time: median of a whole call, quantisation included, and the host's part where",
                "that is the slower one. Ceiling: share of what the units that do the rung's two",
                "products could do at the device's highest clock.",
            ]
        elif any(rung.interpreted for rung in self.rungs):
            lines += [
                "PTX J2, instructions, global, shared:",
                "the kernels themselves, run by the interpreter on the first "
                f"{INTERPRETED_ROWS} rows of one head:",
                "J2 of the result, warp instructions executed, bytes moved to and from memory.",
            ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{align([self.header, *self.cells])}\n\n{self.legend}"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "call": asdict(self.call),
            "backend": self.backend,
            "judged_rows": self.judged_rows,
            "interpreted": self.interpreted,
            "ok": self.ok,
            "rungs": [rung.to_dict() for rung in self.rungs],
        }


@explains_foreign_arguments
def ladder(
    q: Any,
    k: Any,
    v: Any,
    *,
    variants: Sequence[str] | None = None,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    quant: QuantConfig | None = None,
    seed: int = 0,
    rounds: int = 15,
    interpret: bool = False,
    advance: Callable[[str], None] | None = None,
) -> Ladder:
    """Run every rung on one input; judge it, then time it.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
        CuPy arrays run on their device and are timed; NumPy arrays run on the mirror. A rung from
        `cupyattn.register` then runs in the interpreter, on the rows that `interpret` names,
        because the mirror cannot read its source.
    k, v : array, (batch, heads_kv, len_kv, head_dim)
    variants : sequence of str, optional
        Rungs to run; all registered rungs when omitted.
    scale, causal, causal_align
        As for `cupyattn.attention`.
    quant : QuantConfig, optional
        How the INT8 rung quantises.
    seed : int
        Seed of the drawn rows, if there are too many rows to judge all.
    rounds : int
        Timed samples of each rung; 0 times nothing.
    interpret : bool
        With NumPy arrays: also run the kernels once in the interpreter, on the first
        INTERPRETED_ROWS rows of the first head; judge and count them.
    advance : callable, optional
        Called with a description of each finished step, for a progress bar.

    Returns
    -------
    Ladder
        ``print`` it for the table. A rung that misses its bound has no time.

    Raises
    ------
    KernelFault
        At the first hazard of a kernel that is interpreted.
    KernelCompileError
        If a kernel that is interpreted or runs on a device does not compile.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 64, 32)).astype(np.float16)
    >>> table = ladder(q, k, v)
    >>> table.ok, [rung.variant for rung in table.rungs]
    (True, ['unfused', 'fa', 'fa_warps', 'fa_tc', 'fa_int8'])
    """
    (q, _), (k, _), (v, _) = (
        interchange.take(name, array) for name, array in zip("qkv", (q, k, v), strict=True)
    )
    options: dict[str, Any] = {"scale": scale, "causal": causal, "causal_align": causal_align}
    call = check_attention(q, k, v, **options)
    if 0 in (*q.shape, *k.shape):
        raise ValueError(
            "q, k and v must hold 1 or more of every axis to be judged, got "
            f"q.shape={tuple(q.shape)} and k.shape={tuple(k.shape)}"
        )
    backend = "cuda" if interchange.is_cupy(q) else "mirror"
    if isinstance(variants, str) or not isinstance(variants, Iterable | None):
        raise TypeError(f"variants must be names of rungs, as ['fa'], got {variants!r:.60}")
    chosen = [lookup(n) for n in (VARIANTS if variants is None else variants)]
    rows = judged_rows(call, seed)
    rows = array_namespace(q).asarray(rows)
    exact = remembered()
    interpreted = interpret and backend == "mirror"
    rungs: list[Rung] = []
    for variant in chosen:
        if call.dtype not in variant.dtypes:
            note = f"takes {', '.join(variant.dtypes)}"
            rungs.append(Rung(variant.name, variant.idea, None, note=note))
            continue
        if backend == "mirror" and variant.source is not None:
            rungs.append(_registered(variant, (q, k, v), quant, options))
            if advance is not None:
                advance(f"{variant.name} interpreted")
            continue
        z = None
        if variant.family == "int8":
            z = quantize(q, k, v, quant=quant, backend=backend)
        operands = (q, k, v) if z is None else (z,)
        o, lse = attention(
            *operands, variant=variant.name, return_lse=True, backend=backend, **options
        )
        form = kernel_form(*operands, variant=variant.name, backend=backend, **options)
        judged = judge(
            o, q, k, v, variant=variant.name, lse=lse, quantized=z, rows=rows, exact=exact,
            **form, **options,
        )  # fmt: skip
        asked = options if z is None else {**options, "quant": quant}
        memory = _memory_bytes((q, k, v), variant, call, asked)
        operations = 4 * call.head_dim * call.batch * call.heads * admitted_pairs(call)
        ran = "device" if backend == "cuda" else "mirror"
        rung = Rung(variant.name, variant.idea, judged, memory, operations=operations, ran=ran)
        del o, z, operands
        if advance is not None:
            advance(f"{variant.name} judged")
        if interpreted:
            rung = replace(rung, interpreted=_interpreted(variant, (q, k, v), quant, options))
            if advance is not None:
                advance(f"{variant.name} interpreted")
        rungs.append(rung)
    if backend == "cuda" and rounds > 0:
        with q.device:
            rungs = _timed(rungs, (q, k, v), {**options, "quant": quant}, rounds, advance)
    quant = quant or QuantConfig()
    return Ladder(tuple(rungs), call, backend, quant, int(rows.size), interpreted)


def _registered(
    variant: Variant,
    inputs: tuple[Any, Any, Any],
    quant: QuantConfig | None,
    options: Mapping[str, Any],
) -> Rung:
    """Compile the kernel of a registered rung and run it in the interpreter."""
    missing = device.compiler_missing()
    if missing:
        return Rung(variant.name, variant.idea, None, note=f"{NOT_RUN}{missing}")
    found = _interpreted(variant, inputs, quant, options)
    asked = {**options, "quant": quant} if variant.family == "int8" else options
    corner = _corner(inputs)
    call = check_attention(*corner, **options)
    memory = _memory_bytes(corner, variant, call, asked)
    return Rung(
        variant.name, variant.idea, found.judgement, memory, interpreted=found, ran="interpreter"
    )


def _corner(inputs: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Return the first rows of the first head, which the interpreter runs on."""
    q, k, v = (a[:1, :1, :INTERPRETED_ROWS] for a in inputs)
    return q, k, v


def _interpreted(
    variant: Variant,
    inputs: tuple[Any, Any, Any],
    quant: QuantConfig | None,
    options: Mapping[str, Any],
) -> Interpreted:
    """Run the kernels of a rung in the interpreter on a corner of the input."""
    from cupyattn.interpret.observer import observe
    from cupyattn.interpret.profile import Profile

    corner = _corner(inputs)
    profile = Profile()
    with observe(profile):
        z = None
        if variant.family == "int8":
            z = quantize(*corner, quant=quant, backend="interpret")
        o, lse = attention(
            *(corner if z is None else (z,)), variant=variant.name, return_lse=True,
            backend="interpret", **options,
        )  # fmt: skip
    judged = judge(o, *corner, variant=variant.name, lse=lse, quantized=z, **options)
    return Interpreted(
        judged, profile.instructions.total(), profile.nbytes("global"), profile.nbytes("shared")
    )


def _timed(
    rungs: list[Rung],
    inputs: tuple[Any, Any, Any],
    options: Mapping[str, Any],
    rounds: int,
    advance: Callable[[str], None] | None,
) -> list[Rung]:
    """Return the rungs with times, measured in turns; a rung that misses J2 gets no time."""
    sets = timing.rotated(inputs)
    calls = {}
    for rung in rungs:
        if rung.judgement is not None and rung.judgement.j2 <= 1:
            int8 = lookup(rung.variant).family == "int8"
            asked = dict(options) if int8 else {n: x for n, x in options.items() if n != "quant"}
            calls[rung.variant] = _call(rung.variant, sets, asked)
    samples = timing.time_interleaved(calls, rounds=rounds, advance=advance) if calls else {}
    measured = []
    for rung in rungs:
        if rung.variant not in samples:
            note = rung.note or "missed its bound: not timed"
            measured.append(replace(rung, note=note))
            continue
        estimate = timing.median(samples[rung.variant])
        measured.append(
            replace(
                rung,
                seconds=estimate.median,
                seconds_interval=(estimate.low, estimate.high),
                ceiling=device.device_ceiling(lookup(rung.variant).family),
            )
        )
    return measured


def _call(
    variant: str, sets: Sequence[tuple[Any, ...]], options: Mapping[str, Any]
) -> Callable[[int], Any]:
    return lambda i: attention(*sets[i % len(sets)], variant=variant, **options)


def judge(
    o: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    variant: str,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    rows: Any = None,
    exact: Exact = reference.attention_exact,
    **options: Any,
) -> Judgement:
    """Judge an output, and measure its distance from exact attention of the caller's arrays.

    Parameters
    ----------
    o : array, (batch, heads, len_q, head_dim)
    q, k, v : array
        The caller's arrays.
    variant : str
        The rung that computed `o`.
    scale, causal, causal_align
        As for the call that computed `o`.
    rows : 1-D integer array, optional
        Query rows to judge; all when omitted.
    exact : callable
        Function that computes exact attention.
    **options
        lse, quantized, tiles, form: as for `cupyattn.testing.judge`.

    Returns
    -------
    Judgement
    """
    rows = array_namespace(o).arange(o.shape[2]) if rows is None else rows
    call = {"scale": scale, "causal": causal, "causal_align": causal_align, "rows": rows}
    report = verdict.judge(o, q, k, v, variant=variant, exact=exact, **call, **options)
    of_caller, _ = exact(q, k, v, return_lse=True, **call)
    j2 = max(report.ratio, report.lse_ratio or 0.0)
    return Judgement(j2, report.quantisation, relative_error(as_float64(o[:, :, rows]), of_caller))


def relative_error(o: Any, exact: Any) -> float:
    """Return ``||o - exact|| / ||exact||``, 0 where both vanish."""
    norm = float((exact**2).sum()) ** 0.5
    error = float(((o - exact) ** 2).sum()) ** 0.5
    return error / norm if norm else (0.0 if error == 0 else math.inf)


def judged_rows(call: AttentionSpec, seed: int = 0) -> Any:
    """Return the query rows to judge: all of a small input, else a sample with tile edges.

    One sample, with edges at multiples of EDGE_ROWS, serves every rung. If there are many heads or
    keys, it is smaller, to keep its scores below SAMPLED_SCORES.

    Examples
    --------
    >>> video = AttentionSpec(1, 24, 24, 118_800, 118_800, 128, "float16", 1.0)
    >>> judged_rows(video).size, judged_rows(replace(video, len_q=4096, len_kv=4096)).size
    (48, 127)
    """
    scores_of_row = call.batch * call.heads * call.len_kv
    if scores_of_row * call.len_q <= expected.SMALL_CELL:
        return np.arange(call.len_q)
    # Half of the sample is drawn, half is at edges.
    room = SAMPLED_SCORES // (2 * scores_of_row)
    count = min(expected.SAMPLED_ROWS, max(LEAST_SAMPLED, room))
    return expected.sample_rows(call.len_q, EDGE_ROWS, seed, count)


def remembered() -> Exact:
    """Return an `attention_exact` that computes the same arrays only once; rows must not vary."""
    known: dict[tuple[int, ...], tuple[Any, Any, tuple[Any, ...]]] = {}

    def exact(*operands: Any, rows: Any, return_lse: bool, **options: Any) -> tuple[Any, Any]:
        # NOTE: the entry keeps the operands alive, so that no id is given twice.
        key = tuple(map(id, operands))
        if key not in known:
            o, lse = reference.attention_exact(*operands, rows=rows, return_lse=True, **options)
            known[key] = o, lse, operands
        return known[key][:2]

    return exact


def admitted_pairs(call: AttentionSpec) -> int:
    """Return how many (query, key) pairs of one head are not masked by their place.

    Examples
    --------
    >>> admitted_pairs(AttentionSpec(1, 1, 1, 4, 4, 8, "float16", 1.0, causal=True))
    10
    """
    rows = np.arange(call.len_q, dtype=np.int64)
    first = np.clip(rows + call.window_shift, 0, call.len_kv) if call.window else 0
    end = np.clip(rows + 1 + call.causal_shift, 0, call.len_kv) if call.causal else call.len_kv
    return int(np.maximum(end - first + 0 * rows, 0).sum())


def _memory_bytes(
    operands: tuple[Any, ...], variant: Variant, call: AttentionSpec, options: Mapping[str, Any]
) -> int:
    """Return the bytes of a call besides q, k and v: output, workspace, codes and scales."""
    output: int = math.prod(call.output_shape) * np.dtype(STORAGE[call.dtype]).itemsize
    q, k, v = operands
    request = resolved(q, k, v, variant=variant.name, **options)
    return output + sum(work.nbytes for work in stages(request).workspace)


# ---- text ----------------------------------------------------------------------------------------
