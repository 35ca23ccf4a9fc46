"""Layers in 16 bits and as INT8: time, memory and error of their products.

Of one visual block of Kandinsky 5 (`cupyattn kandinsky --benchmark`), and of the linear layers of
any checkpoint (`cupyattn benchmark`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host
from cupyattn.arrays.kinds import STORAGE, Array, array_namespace, as_float64
from cupyattn.checkpoints.analysis import check_patterns, has_codes
from cupyattn.checkpoints.choosing import choose
from cupyattn.checkpoints.companions import read_config
from cupyattn.checkpoints.kandinsky import KandinskyModel
from cupyattn.checkpoints.quantised import check_full_width
from cupyattn.checkpoints.roles import INT8_ROLES, family_of, role_of
from cupyattn.checkpoints.shards import Source
from cupyattn.errors import UnsupportedError
from cupyattn.measure import rungs, timing
from cupyattn.measure.words import format_bytes, format_seconds
from cupyattn.ops.attention import attention, plan
from cupyattn.ops.explain import kernel_form
from cupyattn.ops.linear import Int8Linear
from cupyattn.ops.quantize import quantize
from cupyattn.problem.settings import check_attention
from cupyattn.quant.blocks import Int8Config
from cupyattn.testing import verdict

#: The work of a block: numbers of video tokens and of text tokens that they attend to.
TOKENS, TEXT_TOKENS = 16_384, 256
#: Number of rows of a layer that are compared with float64, and the tolerance of 16 bits. It
#: follows from a rounding of bfloat16, 2^-9 of a number, with sums in float32.
JUDGED_ROWS, ERROR_16 = 64, 2.0**-8

_BLOCK = "visual_transformer_blocks.0"
_ATTENTION = ("self-attention", "cross-attention")
#: Layers of one shape on as many rows: label, weights, whether they take text, activation.
_LAYERS: tuple[tuple[str, tuple[str, ...], bool, str], ...] = (
    (
        "projections of tokens",
        (
            *(f"self_attention.{x}" for x in ("to_query", "to_key", "to_value", "out_layer")),
            "cross_attention.to_query", "cross_attention.out_layer",
        ),
        False, "",
    ),
    ("projections of text", ("cross_attention.to_key", "cross_attention.to_value"), True, ""),
    ("feed-forward, in and GELU", ("feed_forward.in_layer",), False, "gelu"),
    ("feed-forward, out", ("feed_forward.out_layer",), False, ""),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Time and memory of a part of a block, in 16 bits and as INT8.

    Parameters
    ----------
    name : str
    count : int
        How often a block has it; all other figures are of one.
    bytes_16, bytes_int8 : int
        Bytes of weights, or of attention's scratch memory.
    error_16, error_int8 : float
        Relative L2 error of the output against float64.
    ok : bool
        Whether INT8 holds its bound and 16 bits their rounding. No time is told otherwise.
    seconds_16, seconds_int8 : float or None
        Medians; None without a device.
    """

    name: str
    count: int
    bytes_16: int
    bytes_int8: int
    error_16: float
    error_int8: float
    ok: bool
    seconds_16: float | None = None
    seconds_int8: float | None = None

    @property
    def cells(self) -> list[str]:
        """A row of the table under `HEADER`."""
        times = ["-"] * 3
        if self.seconds_16 and self.seconds_int8:
            times = [format_seconds(self.seconds_16), format_seconds(self.seconds_int8)]
            times.append(f"{self.seconds_16 / self.seconds_int8:.2f}")
        return [
            f"{self.count} x {self.name}", *times, format_bytes(self.bytes_16),
            format_bytes(self.bytes_int8), f"{self.error_16:.1e}", f"{self.error_int8:.1e}",
            "yes" if self.ok else "NO",
        ]  # fmt: skip


HEADER = (
    "part", "16 bits", "INT8", "faster by", "memory, 16 bits", "INT8", "error, 16 bits", "INT8",
    "holds",
)  # fmt: skip

Call = Callable[[], Array]


def benchmark_block(
    source: Source,
    model: KandinskyModel,
    xp: Any,
    *,
    tokens: int = TOKENS,
    text_tokens: int = TEXT_TOKENS,
    rounds: int = 15,
    seed: int = 0,
    strategy: str = "block",
) -> list[Part]:
    """Run the layers and the attention of the first visual block in 16 bits and as INT8.

    Parameters
    ----------
    source : Source
        Weights in float16, bfloat16 or float32; all are taken as bfloat16.
    model : KandinskyModel
    xp : module
        ``cupy``: parts are timed, in turns. ``numpy``: on the mirror, without times.
    tokens, text_tokens : int
    rounds : int
        Samples of each time.
    seed : int
        Standard deviation of the inputs, N(0, 1), as after a norm without weights.
    strategy : {"block", "channel"}
        Groups of the layers that share a scale.

    Returns
    -------
    list of Part

    Raises
    ------
    ValueError
        If the block has no weights for the norms of its keys.
    UnsupportedError
        On a device without cuBLAS.

    Notes
    -----
    Modulation, norms of tokens, sums and, in 16 bits, GELU are element by element and not in it.
    """
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return xp.asarray(rng.standard_normal(shape, np.float32).astype(STORAGE["bfloat16"]))

    def weight(name: str) -> Array:
        full = f"{_BLOCK}.{name}.weight"
        if full not in source.tensors:
            raise ValueError(f"{source.path} has no {full}, which the benchmark needs")
        return xp.asarray(source.read(full).astype(np.float32).astype(STORAGE["bfloat16"]))

    found = []
    for name, weights, of_text, activation in _LAYERS:
        w = weight(weights[0])
        x = draw(text_tokens if of_text else tokens, w.shape[1])
        found.append(_layer((name, len(weights)), x, w, (activation, strategy), rounds))
    for name, length in zip(_ATTENTION, (tokens, text_tokens), strict=True):
        kind = name.replace("-", "_")
        norms = weight(f"{kind}.query_norm"), weight(f"{kind}.key_norm")
        q = draw(1, model.heads, tokens, model.head_dim)
        k, v = (draw(1, model.heads, length, model.head_dim) for _ in "kv")
        options: dict[str, Any] = {"qk_norm": norms}
        if kind == "self_attention":
            half = model.head_dim // 2
            angles = xp.arange(tokens)[:, None] * 10000.0 ** (-xp.arange(half) / half)
            options["rope"] = tuple(f(angles).astype(np.float32) for f in (xp.cos, xp.sin))
        found.append(_attention(name, (q, k, v), options, rounds))
    return found


def benchmark_layers(
    source: Source,
    config: Int8Config | None = None,
    xp: Any = np,
    *,
    tokens: int = TOKENS,
    rounds: int = 15,
    seed: int = 0,
    advance: Callable[[str], None] | None = None,
) -> list[Part]:
    """Run the linear layers of a checkpoint in 16 bits and as INT8, one of each shape.

    Parameters
    ----------
    source : Source
        Weights in float16, bfloat16 or float32; all are taken as bfloat16.
    config : Int8Config, optional
        `min_elements_for_int8` and `fp32_patterns` say which layers, `strategy` what shares a
        scale (`cupyattn.checkpoints.choosing`). Layers are chosen by name and size; outliers are
        not looked for.
    xp : module
        ``cupy``: layers are timed, in turns. ``numpy``: on the mirror, without times.
    tokens : int
        Rows that each layer gets, N(0, 1).
    rounds, seed
        As for `benchmark_block`.
    advance : callable, optional
        Called with the name of each layer that was run.

    Returns
    -------
    list of Part
        In the order of the file; the name is the shape, and the layers of a kind that have it.

    Raises
    ------
    ValueError
        For a checkpoint that is quantised already, one without linear layers to quantise, and a
        pattern that fits no name.
    UnsupportedError
        On a device without cuBLAS.
    """
    config = config or Int8Config()
    check_full_width(source)
    check_patterns(config, source.tensors)
    model = str(read_config(source).get("_class_name", ""))
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, info in source.tensors.items():
        kept = any(fnmatch.fnmatchcase(name, pattern) for pattern in config.fp32_patterns)
        is_linear = role_of(name, info.shape, model) in INT8_ROLES and has_codes(info)
        if is_linear and not kept and info.elements >= config.min_elements_for_int8:
            groups.setdefault(info.shape, []).append(name)
    if not groups:
        raise ValueError(
            f"{source.path} has no linear layer of {config.min_elements_for_int8} elements or "
            "more that INT8 takes: cupyattn analyze says what each tensor is"
        )
    rng, found = np.random.default_rng(seed), []
    widths = (info.shape[1] for info in map(source.tensors.get, sum(groups.values(), [])) if info)
    strategy = choose(config.strategy, model, widths).strategy
    for shape, names in groups.items():
        w = xp.asarray(source.read(names[0]).astype(np.float32).astype(STORAGE["bfloat16"]))
        x = rng.standard_normal((tokens, shape[1]), np.float32).astype(STORAGE["bfloat16"])
        families = [*dict.fromkeys(family_of(name).removesuffix(".weight") for name in names)]
        more = f" and {len(families) - 1} more" if len(families) > 1 else ""
        label = f"{shape[0]} x {shape[1]}: {families[0]}{more}"
        found.append(_layer((label, len(names)), xp.asarray(x), w, ("", strategy), rounds))
        if advance is not None:
            advance(names[0])
    return found


def _layer(
    named: tuple[str, int], x: Array, w: Array, options: tuple[str, str], rounds: int
) -> Part:
    """Compare one linear layer; the activation belongs to INT8 alone, whose kernel has it."""
    activation, strategy = options
    layer, plain = (
        Int8Linear.from_weight(w, strategy=strategy, activation=a)
        for a in (activation or None, None)
    )
    rows = x[:: max(1, x.shape[0] // JUDGED_ROWS)]
    host_rows, host_w = on_host(rows), on_host(w)
    exact = as_float64(host_rows) @ as_float64(host_w).T
    off_16 = rungs.relative_error(as_float64(on_host(product16(rows, w))), exact)
    coded = as_float64(on_host(plain(rows)))
    bound = Int8Linear.from_weight(host_w, strategy=strategy).error(host_rows, host_w)
    off_8 = rungs.relative_error(coded, exact)
    ok = bool((abs(coded - exact) <= bound).all()) and off_16 <= ERROR_16
    seconds = _timed(lambda: product16(x, w), lambda: layer(x), rounds, x) if ok else (None, None)
    size = layer.codes.nbytes + layer.scales.nbytes
    return Part(*named, w.nbytes, size, off_16, off_8, ok, *seconds)


def _attention(
    name: str, qkv: tuple[Array, Array, Array], options: dict[str, Any], rounds: int
) -> Part:
    """Compare attention of normalised heads: the fastest rung of 16 bits, and INT8 Q.K^T."""
    xp = array_namespace(*qkv)
    rows = xp.asarray(rungs.judged_rows(check_attention(*qkv)))
    errors, memory, held, plain = [], [], [], {}
    for variant in ("fa_tc", "fa_int8"):
        form = kernel_form(*qkv, variant=variant, **options)
        judge_options: dict[str, Any] = {**form, **options, "variant": variant, "rows": rows}
        if variant == "fa_int8":
            judge_options["quantized"] = quantize(*qkv, tiles=form["tiles"], **options)
        o = attention(*qkv, variant=variant, **options)
        report = verdict.judge(o, *qkv, **judge_options)
        held.append(report.passed and (report.quantisation or 0) <= 1)
        if variant == "fa_tc":
            plain = judge_options
        else:  # that of its codes says nothing of what they cost: as if it were the other's output
            report = verdict.judge(o, *qkv, **plain)
        errors.append(float(report.relative_l2))
        memory.append(int(plan(*qkv, variant=variant, **options).workspace_bytes))
    seconds: tuple[float | None, float | None] = (None, None)
    if all(held):
        seconds = _timed(
            lambda: attention(*qkv, variant="fa_tc", **options),
            lambda: attention(*qkv, variant="fa_int8", **options), rounds, qkv[0],
        )  # fmt: skip
    return Part(name, 1, memory[0], memory[1], errors[0], errors[1], all(held), *seconds)


def product16(x: Array, w: Array) -> Array:
    """Return x wᵀ in bfloat16, summed in float32: (rows, in), (out, in) to (rows, out)."""
    if isinstance(x, np.ndarray):
        return (x.astype(np.float32) @ w.astype(np.float32).T).astype(x.dtype)
    import cupy

    try:
        from cupy_backends.cuda.libs import cublas  # type: ignore[import-untyped]
    except ImportError as error:
        raise UnsupportedError(
            "products of bfloat16 to compare with need cuBLAS: pip install 'cupy-cuda13x[ctk]'"
        ) from error
    # NOTE: CuPy's own matmul takes no bfloat16. cuBLAS counts by columns, so that rows of w and x
    # are columns there: yᵀ = w xᵀ.
    x, w = cupy.ascontiguousarray(x), cupy.ascontiguousarray(w)
    (rows, inner), columns = x.shape, w.shape[0]
    y = cupy.empty((rows, columns), x.dtype)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    bfloat16, float32_sums, default_algorithm = 14, 68, -1  # CUDA_R_16BF, CUBLAS_COMPUTE_32F
    cublas.gemmEx(
        cupy.cuda.device.get_cublas_handle(), cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, columns,
        rows, inner, one.ctypes.data, w.data.ptr, bfloat16, inner, x.data.ptr, bfloat16, inner,
        zero.ctypes.data, y.data.ptr, bfloat16, columns, float32_sums, default_algorithm,
    )  # fmt: skip
    return y


def _timed(one: Call, other: Call, rounds: int, x: Array) -> tuple[float | None, float | None]:
    """Return the medians of two calls on a device, which take turns."""
    if isinstance(x, np.ndarray):
        return None, None
    calls = {"one": lambda _: one(), "other": lambda _: other()}
    samples = timing.time_interleaved(calls, rounds=rounds)
    return float(np.median(samples["one"])), float(np.median(samples["other"]))


def total(layers: list[Part], whole: str = "the block") -> str:
    """Return one sentence about a whole block or model."""
    weights = [p for p in layers if p.name not in _ATTENTION]
    bytes_16 = sum(p.count * p.bytes_16 for p in weights)
    bytes_8 = sum(p.count * p.bytes_int8 for p in weights)
    said = f"weights of {whole}: {format_bytes(bytes_16)} in 16 bits, {format_bytes(bytes_8)}"
    if any(p.seconds_16 is None for p in layers):
        return said
    time_16 = sum(p.count * (p.seconds_16 or 0) for p in layers)
    time_8 = sum(p.count * (p.seconds_int8 or 0) for p in layers)
    return f"{said}; its products {format_seconds(time_16)}, as INT8 {format_seconds(time_8)}"
