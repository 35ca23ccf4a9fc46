"""One row for every public function that takes arrays: a small call, its arrays by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import bounds, diffusion, distributed, gradients, quant, reference, testing, unfused
from cupyattn.diffusion import pruning
from cupyattn.ops import linear
from cupyattn.problem.row_preparation import Preparation, Rope

Arrays = Mapping[str, Any]
Call = Callable[[dict[str, Any]], Any]

_RNG = np.random.default_rng(5)
Q, K, V, D_OUT = _RNG.standard_normal((4, 1, 2, 8, 16)).astype(np.float16)
MASK = _RNG.random((1, 1, 8, 8)) < 0.8
BIAS = _RNG.standard_normal((1, 2, 8, 8)).astype(np.float32)
COS, SIN = np.cos(BIAS[0, 0]), np.sin(BIAS[0, 0])
WEIGHTS = _RNG.standard_normal((2, 16)).astype(np.float32)
OFFSETS = np.array([0, 3, 8], np.int32)
OUT, LSE = ca.attention(Q, K, V, return_lse=True)
PACKED = {n: x[0].swapaxes(0, 1).copy() for n, x in (("q", Q), ("k", K), ("v", V))}
PACKED |= {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
O_PACKED, LSE_PACKED = ca.attention_varlen(*PACKED.values(), return_lse=True)
W = _RNG.standard_normal((5, 200)).astype(np.float32)
X = _RNG.standard_normal((3, 200)).astype(np.float16)
A, A_SCALES = ca.act_quant(X)
B, B_SCALES = ca.weight_quant(W)
_AFFINE = ca.AffineInt8Linear.from_weight(W)
CHANNELS, CHANNEL_SCALES, CHANNEL_ZEROS = _AFFINE.codes, _AFFINE.scales, _AFFINE.zeros
S = unfused.scores(Q, K)
P = unfused.softmax(S)
IMPORTANCE = diffusion.key_importance(Q, K)
QKV = {"q": Q, "k": K, "v": V}
SCORED = (
    QKV
    | {"mask": MASK, "bias": BIAS, "cos": COS, "sin": SIN}
    | {"q_weight": WEIGHTS[0], "k_weight": WEIGHTS[1]}
)
GRADIENT = {"d_out": D_OUT, **QKV, "out": OUT, "lse": LSE}
CODES = ca.quantize(Q, K, V)
OUT_OF_FA = ca.attention(Q, K, V, variant="fa")
GRADIENTS = dict(zip(("dq", "dk", "dv"), ca.attention_backward(**GRADIENT), strict=True))
ERRORS = {"out_error": np.full(OUT.shape, 1e-4), "lse_error": np.full(LSE.shape, 1e-4)}
PRODUCT = {"a": A, "a_scales": A_SCALES, "b": B, "b_scales": B_SCALES, "bias": W[:, 0].copy()}
OUTLIERS = {"of_x": X[:, :3].copy(), "of_w": W[:, :3].astype(np.float16)}
ROWS = {"rows": np.array([0, 3, 7])}
MASKED = QKV | {"mask": MASK, "bias": BIAS}
WEIGHT = np.float64([[0.5, 0.25, 0.25], [1, 0, 0]])
SIGMAS = np.float64([8, 2, 0.5, 0.25])
SCALES = {"q_scale": abs(WEIGHTS[:1, :2]), "k_scale": abs(WEIGHTS[1:, :2])}
HALVES = distributed.Partition.contiguous(8, 2)
SHARED = distributed.Shared(distributed.Mesh(1, 1), *[distributed.Partition.contiguous(8, 1)] * 2)


def _options(given: Arrays) -> dict[str, Any]:
    """Return tables and weights as the pairs that calls take."""
    options = dict(given)
    options["rope"] = options.pop("cos"), options.pop("sin")
    options["qk_norm"] = options.pop("q_weight"), options.pop("k_weight")
    return options


def _planned(given: dict[str, Any]) -> Any:
    return ca.plan(**_options(given))(*(given[n] for n in "qkv"))


def _product(function: Callable[..., Any]) -> Call:
    """Return a call of a function of products, with outliers."""

    def call(given: dict[str, Any]) -> Any:
        given = dict(given)
        outliers = given.pop("of_x"), given.pop("of_w")
        return function(**given, outliers=outliers)

    return call


def _bound(function: Callable[..., Any]) -> Call:
    """Return a call of a function whose result is a bound, as arrays."""
    return lambda given: (lambda found: (found.total, found.lse))(function(**given))


def _gradient_bound(given: dict[str, Any]) -> Any:
    found = gradients.backward_bound(**given)
    return tuple(found.total(name) for name in ("dq", "dk", "dv"))


def _prepared_bound(given: dict[str, Any]) -> Any:
    options = {"rope": (given["cos"], given["sin"]), "rope_interleaved": False}
    options |= {"rope_offset_q": 0, "qk_norm": (given["q_weight"], given["k_weight"])}
    how = Preparation.of_arrays({**options, "qk_norm_eps": 1e-6}, (2, 2, 8, 8, 16))
    assert how is not None
    return bounds.preparation(how, given["q"], given["k"])


def _rotation_bound(given: dict[str, Any]) -> Any:
    rope = Rope.of_arrays((given["cos"], given["sin"]), False, 0, 8, 8, 16)
    assert rope is not None
    return bounds.rotation(given["x"], rope, 0)


def _judged(given: dict[str, Any]) -> str:
    return str(testing.judge(**given, variant="fa"))


def _judged_gradients(given: dict[str, Any]) -> str:
    given = dict(given)
    return str(gradients.judge_backward([given.pop(name) for name in GRADIENTS], **given))


def _judged_foreign_gradients(given: dict[str, Any]) -> str:
    given = dict(given)
    found = [given.pop(name) for name in GRADIENTS]
    return str(testing.judge_backward(found, **given, numerics=testing.numerics("fp16")))


def _calibration(given: dict[str, Any]) -> Any:
    found = ca.Calibration(
        **given, bins=diffusion.SnrBins(), head_dim=16, smooth_k=False, percentile=99.0,
        of="maxima", batches=(1,), source="", source_hash="",
    )  # fmt: skip
    return found.q_scale, found.k_scale


def _factors(given: dict[str, Any]) -> Any:
    layer = ca.Int8Attention(
        2, 16, num_timesteps=4, sigmas=given["sigmas"], timestep_scales=given["timestep_scales"],
        quant=ca.QuantConfig(
            granularity_q="tensor", granularity_k="tensor", scales=(1.0, 1.0), smooth_k=False
        ),
    )  # fmt: skip
    return layer(Q, K, V, 1)


def _run(function: Callable[[Any], Any], like: Any, ranks: int) -> Any:
    """Return what each rank returns: of CuPy arrays there is one, on the first device."""
    on_host = isinstance(like, np.ndarray)
    return tuple(distributed.run(function, ranks if on_host else [0]))


def _ring(given: dict[str, Any]) -> Any:
    """Return attention on two ranks, which have the same rows each."""

    def on_rank(group: Any) -> Any:
        own = {name: given[name] for name in "qkv"}
        return distributed.parallel_attention(**own, group=group)

    return _run(on_rank, given["q"], 2)


def _ring_backward(given: dict[str, Any]) -> Any:
    def on_rank(group: Any) -> Any:
        return tuple(distributed.parallel_attention_backward(**given, group=group))

    return _run(on_rank, given["q"], 1)[0]


def _ring_varlen(given: dict[str, Any]) -> Any:
    def on_rank(group: Any) -> Any:
        return distributed.parallel_attention_varlen(**given, group=group)

    return _run(on_rank, given["q"], 1)[0]


def _ring_varlen_backward(given: dict[str, Any]) -> Any:
    def on_rank(group: Any) -> Any:
        return tuple(distributed.parallel_attention_varlen_backward(**given, group=group))

    return _run(on_rank, given["q"], 1)[0]


def _shared(given: dict[str, Any]) -> Any:
    shared = distributed.Shared(SHARED.mesh, SHARED.rows_q, SHARED.rows_kv, **given)
    return str(list(shared.sequences()))


def _gathered(given: dict[str, Any]) -> Any:
    return _run(lambda group: distributed.gather(given["x"], group), given["x"], 2)


def _with_static_scales(given: dict[str, Any]) -> Any:
    scales = given["q_scale"], given["k_scale"]
    quant = ca.QuantConfig(granularity_q="tensor", granularity_k="tensor", scales=scales)
    return ca.quantize(*[given[n] for n in "qkv"], quant=quant)


def _unpruned(given: dict[str, Any]) -> Any:
    return ca.Int8Attention(2, 16, num_timesteps=4)(given["q"], given["k"], given["v"], 1)


#: (arrays by name, call). A name stands for a function of `cupyattn`, or of one of its modules.
CALLS: dict[str, tuple[Arrays, Call]] = {
    "attention": (SCORED, lambda g: ca.attention(**_options(g))),
    "attention_varlen": (PACKED, lambda g: ca.attention_varlen(**g)),
    "plan": (SCORED, _planned),
    "explain": (SCORED, lambda g: ca.explain(**_options(g))),
    "ablate": (QKV, lambda g: ca.ablate(**g, parts=["bits"]).rows),
    "kernel_form": (SCORED, lambda g: ca.kernel_form(**_options(g))),
    "quantize": (QKV, lambda g: ca.quantize(**g)),
    "quantize_kv": ({"k": K, "v": V}, lambda g: ca.quantize_kv(**g)),
    "QuantizedQKV": (
        {
            "q_codes": CODES.q_codes,
            "k_codes": CODES.k_codes,
            "v": V,
            "q_scale": WEIGHTS[:1, None, :1],
            "k_scale": WEIGHTS[1:, None, :1],
        },
        lambda g: ca.attention(ca.QuantizedQKV.from_codes(**g)),
    ),
    "QuantConfig": (
        QKV | {"q_scale": abs(WEIGHTS[:1, None, :1]), "k_scale": abs(WEIGHTS[1:, None, :1])},
        _with_static_scales,
    ),
    "act_quant": ({"x": X}, lambda g: ca.act_quant(**g)),
    "norm_quant": (
        {"x": X, "weight": X[0], "shift": X[1:2]}, lambda g: ca.norm_quant(norm="layer", **g)
    ),
    "quant.rotated": ({"x": X[:, :192].copy()}, lambda g: ca.quant.rotated(**g)),
    "quant.smoothing_factors": (
        {"x": X[:, :192].copy(), "weights": X[:8, :192].copy()},
        lambda g: ca.quant.smoothing_factors(**g),
    ),
    "weight_quant": ({"w": W}, lambda g: ca.weight_quant(**g)),
    "weight_dequant": ({"codes": B, "scales": B_SCALES}, lambda g: ca.weight_dequant(**g)),
    "int8_gemm": (
        {"a": A, "a_scales": A_SCALES, "b": B, "b_scales": B_SCALES, "bias": W[:, 0].copy()},
        lambda g: ca.int8_gemm(**g, out_dtype="float16"),
    ),
    "Int8Linear": (
        {"codes": B, "scales": B_SCALES, "bias": W[:, 0].copy(), "x": X},
        lambda g: ca.Int8Linear(*list(g.values())[:3])(g["x"]),
    ),
    "Int8Linear.from_weight": (
        {"weight": W.astype(np.float16), "x": X},
        lambda g: ca.Int8Linear.from_weight(g["weight"], outlier_columns=[3, 9])(g["x"]),
    ),
    "Int8Linear.from_weight.rotated": (
        {"weight": W[:, :192].copy(), "x": X[:, :192].copy()},
        lambda g: ca.Int8Linear.from_weight(
            g["weight"], strategy="channel", rotate="hadamard_contiguous"
        )(g["x"]),
    ),
    "AffineInt8Linear": (
        {"codes": CHANNELS, "scales": CHANNEL_SCALES, "zeros": CHANNEL_ZEROS,
         "bias": W[:, 0].copy(), "x": X},
        lambda g: ca.AffineInt8Linear(*list(g.values())[:4])(g["x"]),
    ),
    "AffineInt8Linear.from_weight": (
        {"weight": W.astype(np.float16), "x": X},
        lambda g: ca.AffineInt8Linear.from_weight(g["weight"])(g["x"]),
    ),
    "quant.outlier_columns": ({"x": X}, lambda g: linear.outlier_columns(g["x"], 2.0)),
    "attention_backward": (
        {**GRADIENT, "d_lse": LSE, "bias": BIAS},
        lambda g: tuple(ca.attention_backward(**g, grad_bias=True)),
    ),
    "explain_backward": (GRADIENT, lambda g: ca.explain_backward(**g)),
    "attention_varlen_backward": (
        {"d_out": O_PACKED, **PACKED, "out": O_PACKED, "lse": LSE_PACKED},
        lambda g: ca.attention_varlen_backward(**g),
    ),
    "BlockMask": (
        QKV | {"mask": MASK[:, :, :1, :1]},
        lambda g: ca.attention(*[g[n] for n in "qkv"], block_mask=ca.BlockMask(g["mask"], 64, 64)),
    ),
    "unfused.scores": ({"q": Q, "k": K, "mask": MASK, "bias": BIAS}, lambda g: unfused.scores(**g)),
    "unfused.softmax": ({"S": S}, lambda g: unfused.softmax(**g)),
    "unfused.weighted_sum": ({"P": P, "v": V}, lambda g: unfused.weighted_sum(**g)),
    "diffusion.key_importance": ({"q": Q, "k": K}, lambda g: diffusion.key_importance(**g)),
    "diffusion.pruning.compact": (
        {"k": K, "v": V, "importance": IMPORTANCE},
        lambda g: pruning.compact(g["k"], g["v"], g["importance"], 3),
    ),
    "Int8Attention": (QKV, _unpruned),
    "Int8Attention.timestep_scales": (
        {"sigmas": SIGMAS, "timestep_scales": np.float32([1, 2, 3, 4])},
        _factors,
    ),
    "Int8Linear.outlier_columns": (
        {"outlier_columns": np.array([3, 9])},
        lambda g: ca.Int8Linear.from_weight(W.astype(np.float16), **g)(X),
    ),
    "Calibration": (SCALES, _calibration),
    "calibrate_quantization_scales.sigmas": (
        {"sigmas": SIGMAS},
        lambda g: ca.calibrate_quantization_scales([(Q, K, 0), (Q, K, 3)], num_bins=2, **g).q_scale,
    ),
    "compute_adaptive_scales": ({"sigmas": SIGMAS}, lambda g: ca.compute_adaptive_scales(**g)),
    "BlockMask.from_dense": (
        QKV | {"mask": MASK},
        lambda g: ca.attention(
            *[g[n] for n in "qkv"], block_mask=ca.BlockMask.from_dense(g["mask"])
        ),
    ),
    "quant.gemm_exact": (PRODUCT | OUTLIERS, _product(quant.gemm_exact)),
    "quant.gemm_mirror": (PRODUCT | OUTLIERS, _product(quant.gemm_mirror)),
    "quant.gemm_mirror.shared": (
        {"shared": np.arange(15).reshape(3, 5) % 2 == 0},
        lambda g: quant.gemm_mirror(A, A_SCALES, B, B_SCALES, splits=2, **g),
    ),
    "quant.gemm_error": (PRODUCT | OUTLIERS, _product(quant.gemm_error)),
    "quant.weight_error": ({"w": W, "scales": B_SCALES}, lambda g: quant.weight_error(**g)),
    "diffusion.TablePolicy": (
        {"modes": np.array(["balanced", "precision"])},
        lambda g: diffusion.TablePolicy(g["modes"]).mode(1, 1.0),
    ),
    "diffusion.SnrBins": (
        {"edges": np.float64([-1, 1])},
        lambda g: diffusion.SnrBins(g["edges"]).index(SIGMAS),
    ),
    "diffusion.SnrBins.even": (
        {"sigmas": SIGMAS},
        lambda g: diffusion.SnrBins.even(g["sigmas"], 2).edges,
    ),
    "diffusion.SnrBins.index": (
        {"sigmas": SIGMAS},
        lambda g: diffusion.SnrBins((0.0,)).index(g["sigmas"]),
    ),
    "diffusion.log_snr": ({"sigmas": SIGMAS}, lambda g: diffusion.log_snr(**g)),
    "diffusion.noise_to_signal": (
        {"sigmas": SIGMAS},
        lambda g: diffusion.noise_to_signal(g["sigmas"], "edm"),
    ),
    "diffusion.guided": (
        {"o_cond": Q, "o_uncond": K},
        lambda g: diffusion.guided(**g, guidance_scale=2.0),
    ),
    "diffusion.top_cdf": (
        {"probabilities": WEIGHT},
        lambda g: diffusion.top_cdf(g["probabilities"], 0.7),
    ),
    "diffusion.VideoMask": (
        {"q": np.tile(Q, (1, 1, 16, 1)), "k": np.tile(K, (1, 1, 16, 1))},
        lambda g: diffusion.VideoMask((2, 1, 1), (1, 1, 1), 0.5)(g["q"], g["k"]).mask,
    ),
    "reference.attention_exact": (
        MASKED | ROWS,
        lambda g: reference.attention_exact(**g, return_lse=True),
    ),
    "reference.attention_exact.rope": (
        QKV | {"cos": COS, "sin": SIN},
        lambda g: reference.attention_exact(*[g[n] for n in "qkv"], rope=(g["cos"], g["sin"])),
    ),
    "reference.attention_mirror": (
        MASKED,
        lambda g: reference.attention_mirror(**g, return_lse=True),
    ),
    "reference.score_blocks": (
        MASKED | ROWS,
        lambda g: tuple(b.S for b in reference.score_blocks(**g)),
    ),
    "reference.scores_mirror": (
        {"q": Q, "k": K, "mask": MASK, "bias": BIAS},
        lambda g: reference.scores_mirror(**g),
    ),
    "reference.softmax_exact": ({"S": S}, lambda g: reference.softmax_exact(**g)),
    "reference.softmax_mirror": ({"S": S}, lambda g: reference.softmax_mirror(**g)),
    "reference.weighted_sum_mirror": (
        {"P": P, "v": V},
        lambda g: reference.weighted_sum_mirror(**g),
    ),
    "bounds.attention": (MASKED | ROWS, _bound(bounds.attention)),
    "bounds.quantisation": (
        QKV | ROWS,
        _bound(lambda **g: bounds.quantisation(**g, quantized=CODES)),
    ),
    "bounds.preparation": (
        {n: x for n, x in SCORED.items() if n not in ("v", "mask", "bias")},
        _prepared_bound,
    ),
    "bounds.rotation": ({"x": Q, "cos": COS, "sin": SIN}, _rotation_bound),
    "bounds.half_ulp": ({"x": abs(BIAS)}, lambda g: bounds.half_ulp(g["x"], "float16")),
    "bounds.softmax_perturbation": (
        {"P": WEIGHT, "d": WEIGHT / 8, "v": WEIGHT.T.copy(), "o": WEIGHT @ WEIGHT.T},
        lambda g: bounds.softmax_perturbation(**g),
    ),
    "testing.judge": ({"o": OUT.copy(), **MASKED, "lse": LSE, **ROWS}, _judged),
    "testing.judge_backward": (
        GRADIENTS | {"d_out": D_OUT, **MASKED, "d_lse": LSE}, _judged_foreign_gradients,
    ),
    "testing.assert_within_bound": (
        {"o": OUT_OF_FA.copy(), **QKV},
        lambda g: str(testing.assert_within_bound(**g, variant="fa")),
    ),
    "testing.ratio_to_bound": (
        {"value": OUT.astype("f8"), "expected": OUT.astype("f8") + 0.5, "bound": abs(K) + 1.0},
        lambda g: testing.ratio_to_bound(**g),
    ),
    "gradients.backward_exact": (
        GRADIENT | {"mask": MASK, "bias": BIAS},
        lambda g: tuple(gradients.backward_exact(**g)),
    ),
    "gradients.backward_mirror": (
        GRADIENT | {"mask": MASK, "bias": BIAS},
        lambda g: tuple(gradients.backward_mirror(**g)),
    ),
    "gradients.backward_bound": (
        GRADIENT | {"mask": MASK, "bias": BIAS} | ERRORS,
        _gradient_bound,
    ),
    "gradients.judge_backward": (GRADIENTS | GRADIENT, _judged_gradients),
    "distributed.Partition": (
        {"array": Q},
        lambda g: HALVES.join([HALVES.take(g["array"], rank) for rank in range(2)]),
    ),
    "distributed.Partition.join": (
        {"first": Q[:, :, :4].copy(), "second": K[:, :, :4].copy()},
        lambda g: HALVES.join(list(g.values())),
    ),
    "distributed.Partition.contiguous": (
        {"length": np.array([3, 5])},
        lambda g: distributed.Partition.contiguous(**g).ranges,
    ),
    "distributed.Partition.zigzag_varlen": (
        {"cu_seqlens": OFFSETS},
        lambda g: distributed.Partition.zigzag_varlen(**g, size=2).ranges,
    ),
    "distributed.Shared": ({"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}, _shared),
    "distributed.gather": ({"x": Q}, _gathered),
    "distributed.share": (
        QKV,
        lambda g: _run(lambda group: distributed.share(**g, group=group), g["q"], 1)[0],
    ),
    "distributed.judge": (
        {"o": OUT_OF_FA, **QKV},
        lambda g: distributed.judge(**g, shared=SHARED, variant="fa"),
    ),
    "distributed.judge_backward": (
        GRADIENTS | GRADIENT,
        lambda g: distributed.judge_backward(
            [g[n] for n in GRADIENTS], **{n: g[n] for n in GRADIENT}, shared=SHARED
        ),
    ),
    "distributed.parallel_attention": (QKV, _ring),
    "distributed.parallel_attention_backward": (GRADIENT, _ring_backward),
    "distributed.parallel_attention_varlen": (PACKED, _ring_varlen),
    "distributed.parallel_attention_varlen_backward": (
        {"d_out": O_PACKED, **PACKED, "out": O_PACKED, "lse": LSE_PACKED},
        _ring_varlen_backward,
    ),
    "calibrate_quantization_scales": (
        {"q": Q, "k": K},
        lambda g: ca.calibrate_quantization_scales([tuple(g.values())], sigmas=None).q_scale,
    ),
    "ladder": (QKV, lambda g: ca.ladder(**g, variants=["fa"]).ok),
}

#: Modules whose public functions have a row each, under the name of the module.
MODULES = (
    "bounds",
    "diffusion",
    "distributed",
    "gradients",
    "quant",
    "reference",
    "testing",
    "unfused",
)

#: Rows of functions that read NumPy arrays alone, or that keep NumPy arrays beside those given.
ON_THE_HOST = {
    "Calibration", "Int8Attention.timestep_scales", "Int8Linear.outlier_columns",
    "bounds.quantisation", "calibrate_quantization_scales.sigmas", "compute_adaptive_scales",
    "diffusion.SnrBins", "diffusion.SnrBins.even", "diffusion.SnrBins.index",
    "diffusion.TablePolicy", "diffusion.log_snr", "diffusion.noise_to_signal",
    "distributed.Partition.contiguous", "distributed.Partition.zigzag_varlen",
    "distributed.Shared", "distributed.judge", "distributed.judge_backward",
    "quant.gemm_error", "quant.gemm_exact", "quant.gemm_mirror", "quant.gemm_mirror.shared",
    "reference.attention_mirror",
    "reference.scores_mirror", "reference.softmax_mirror", "reference.weighted_sum_mirror",
    "gradients.backward_mirror",
}  # fmt: skip

#: Public names that take no array.
WITHOUT_ARRAYS = {
    "DeviceMemoryError", "GemmTiles", "Int8Config", "KernelCompileError", "KernelLaunchError",
    "Tiles", "UnsupportedError", "VARIANTS", "Variant", "__version__", "compute_sigma_schedule",
    "register", "unregister",
    # Modules:
    "bounds", "checkpoints", "diffusion", "distributed", "distributions", "gradients", "interop",
    "quant", "reference", "strategies", "testing", "unfused",
    # Numbers, sizes and names alone:
    "bounds.gamma", "diffusion.block_order", "diffusion.window_3d", "diffusion.SigmaPolicy",
    "diffusion.Step", "testing.load_counterexample", "testing.numerics", "testing.sample_rows",
    "distributed.from_torch",
    # Constants:
    "bounds.TERMS", "diffusion.MODES", "quant.GROUP_ALL",
    # What functions return, or callers define:
    "bounds.Bound", "diffusion.PrecisionPolicy", "gradients.GradientBounds",
    "gradients.GradientReport", "gradients.Gradients", "gradients.GradientsWithBias",
    "gradients.GradientsWithBiasAndNorm", "gradients.GradientsWithNorm",
    "reference.ScoreBlock", "reference.Step",
    "testing.Counterexample", "testing.Report",
    # What a running model recorded, on files, and what that makes:
    "diffusion.Calibrations", "diffusion.RecordedCall", "diffusion.Recording",
    "diffusion.calibrate",
    # Groups of ranks, and how they find each other:
    "distributed.CopyGroup", "distributed.Group", "distributed.HostGroup", "distributed.Mesh",
    "distributed.NcclGroup", "distributed.RankError", "distributed.Work", "distributed.connect",
    "distributed.from_environment", "distributed.from_mpi", "distributed.run",
}  # fmt: skip
