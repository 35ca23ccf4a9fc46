"""Effect of INT8 on a model: the role, outliers and error of every tensor, and a verdict."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import FINITE_MAX
from cupyattn.checkpoints.choosing import CHANNEL_LIMIT, Choice, choose
from cupyattn.checkpoints.companions import read_config
from cupyattn.checkpoints.header import DTYPES, FLOATS, TensorInfo
from cupyattn.checkpoints.layout import MARKER_BYTES, WEIGHT
from cupyattn.checkpoints.predicted_errors import power_to_unit, predicted_errors
from cupyattn.checkpoints.quantised import check_full_width
from cupyattn.checkpoints.roles import INT8_ROLES, LAYER_ROLES, PRECISE_ROLES, family_of, role_of
from cupyattn.checkpoints.shards import Array, Source
from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.checkpoints.weight_errors import (
    PART_ELEMENTS,
    WeightErrors,
    magnitudes,
    weight_errors,
)
from cupyattn.errors import UnsupportedError, shown
from cupyattn.files import open_regular
from cupyattn.measure.words import counted, format_bytes, format_share
from cupyattn.quant.blocks import AUTO, STRATEGIES, Int8Config, scale_shape, strips
from cupyattn.quant.rotation import rotation_of
from cupyattn.reference.act_quant import quantize_rows
from cupyattn.reference.weights import dequantize_blocks, quantize_blocks

#: Verdicts on a tensor: INT8 codes, 16 bits, or unchanged.
VERDICTS = ("int8", "16bit", "keep")
#: Names of 16-bit types by the names of `Int8Config.fallback_dtype`.
_FALLBACKS = {"bf16": "BF16", "fp16": "F16"}
#: Why layers of these roles do not become INT8.
_NOT_INT8 = {
    "convolution": "convolution: the files have INT8 for linear layers only",
    "vae": "vae: errors of its decoder are errors of the picture",
}
_KIND, _VERSION = "cupyattn analysis", 1


@dataclass(frozen=True)
class TensorReport:
    """Analysis of one tensor.

    Parameters
    ----------
    name, dtype, shape, role
        `dtype` by its name in safetensors files; `role` as of `role_of`.
    sha256 : str
        Hash of its bytes.
    nonfinite : int
        Elements that are NaN or infinite.
    largest : float
        Largest magnitude; 0 where there is none.
    outlier_ratio : float or None
        Share of outliers. None, as all that follows, where no INT8 was tried: for other than
        float16, bfloat16 and float32, for fewer than two axes, and where `nonfinite` is not 0.
    max_error, mean_error : float or None
        Largest and mean difference between the weight and what its codes stand for.
    sqnr_db : float or None
        Signal to quantisation noise, decibels; None where there is no error at all, too.
    inlier_sqnr_db : float or None
        The same with the signal of all but the outliers, which would hide that the others are lost.
    verdict : {"int8", "16bit", "keep"}
    dtype_out : str
        Type that it gets.
    nbytes, nbytes_out : int
        Size, and what is left of it, scales included.
    reason : str
        Why.
    block_error, channel_error : float or None
        Relative error of the layer on activations that were given, both quantised, with scales of
        blocks and of channels: ``|y - y_exact| / |y_exact|``. None where there were none.
    rotate : str or None
        How the weight is rotated before it is quantised. Other figures are those without.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    sha256: str
    nonfinite: int
    largest: float
    outlier_ratio: float | None
    max_error: float | None
    mean_error: float | None
    sqnr_db: float | None
    inlier_sqnr_db: float | None
    verdict: str = "keep"
    dtype_out: str = ""
    nbytes: int = 0
    nbytes_out: int = 0
    reason: str = ""
    block_error: float | None = None
    channel_error: float | None = None
    rotate: str | None = None

    @property
    def recommended(self) -> str:
        """``"channel"`` where it errs at most `CHANNEL_LIMIT` times as much as ``"block"``.

        "" where no activations were given, or the weight does not become INT8.
        """
        if self.block_error is None or self.channel_error is None or self.verdict != "int8":
            return ""
        return "channel" if self.channel_error <= CHANNEL_LIMIT * self.block_error else "block"

    @property
    def info(self) -> TensorInfo:
        """Type and shape."""
        return TensorInfo(self.dtype, self.shape)


@dataclass(frozen=True)
class Analysis:
    """Result of `analyze`.

    Parameters
    ----------
    source : str
        Name of the file or folder.
    config : Int8Config
        Its strategy is "block" or "channel".
    tensors : tuple of TensorReport
    choice : str
        Groups that share a scale, and the reason.
    """

    source: str
    config: Int8Config
    tensors: tuple[TensorReport, ...]
    choice: str = field(default="", compare=False)

    @property
    def nonfinite(self) -> tuple[TensorReport, ...]:
        """The tensors that hold NaN or infinities: no conversion takes them."""
        return tuple(t for t in self.tensors if t.nonfinite)

    @property
    def sha256(self) -> str:
        """A hash of every name, type, shape and number, however they are spread over files."""
        digest = hashlib.sha256()
        for t in sorted(self.tensors, key=lambda t: t.name):
            digest.update(json.dumps([t.name, t.dtype, t.shape, t.sha256]).encode())
        return digest.hexdigest()

    @property
    def totals(self) -> dict[str, Any]:
        """Tensors, elements and bytes before and after, in all and by verdict.

        Bytes are of the tensors, to the byte as `convert` writes; headers of files and small files
        come on top.
        """

        def total(some: Sequence[TensorReport]) -> dict[str, int]:
            return {
                "tensors": len(some),
                "elements": sum(t.info.elements for t in some),
                "bytes": sum(t.nbytes for t in some),
                "bytes_out": sum(t.nbytes_out for t in some),
            }

        everything = total(self.tensors)
        before, after = everything["bytes"], everything["bytes_out"]
        return {
            **everything,
            "savings": 1 - after / before if before else 0.0,
            **{v: total([t for t in self.tensors if t.verdict == v]) for v in VERDICTS},
        }

    @property
    def recommended(self) -> str:
        """``"channel"`` where that is recommended for all layers tried, else ``"block"``.

        "" where no activations were given.
        """
        tried = {t.recommended for t in self.tensors if t.recommended}
        return min(tried, default="")  # of several, "block"

    def with_config(self, config: Int8Config) -> Analysis:
        """Return the same findings judged by another configuration; "auto" keeps the strategy.

        Raises
        ------
        ValueError
            For the other strategy, whose codes have other errors.
        """
        own = self.config.strategy
        if config.strategy == AUTO:
            config = replace(config, strategy=own)
        if config.strategy != own:
            raise ValueError(
                f"the analysis of {self.source!r} is of scales by {own}, whose errors are not "
                f"those of strategy={config.strategy!r}: analyze the model by that strategy, or "
                "leave it out"
            )
        judged = (judge(t, config) for t in self.tensors)
        return replace(self, config=config, tensors=tuple(judged))

    # ---- as text

    header = (
        "", "tensor", "shape", "role", "type", "becomes", "outliers", "SQNR", "scales by", "why",
    )  # fmt: skip

    def cells(self, *, every: bool = False) -> list[tuple[str, ...]]:
        """Return the table's rows: one for each tensor, or for the tensors of all blocks alike."""
        groups: dict[tuple[Any, ...], list[TensorReport]] = {}
        for t in self.tensors:
            name = t.name if every else family_of(t.name)
            reason = t.reason.partition(":")[0]
            alike = (name, t.dtype, t.shape, t.dtype_out, reason, t.recommended)
            groups.setdefault(alike, []).append(t)
        rows: list[tuple[str, ...]] = []
        for (name, dtype, shape, dtype_out, reason, recommended), some in groups.items():
            ratios = [t.outlier_ratio for t in some if t.outlier_ratio is not None]
            sqnr = [t.sqnr_db for t in some if t.sqnr_db is not None]
            rows.append(
                (
                    str(len(some)), name, "x".join(map(str, shape)) or "scalar", some[0].role,
                    dtype, dtype_out, format_share(max(ratios)) if ratios else "",
                    f"{min(sqnr):.1f} dB" if sqnr else "",
                    f"{recommended}: {_errors(some)}" if recommended else "",
                    some[0].reason if len(some) == 1 else reason,
                )
            )  # fmt: skip
        return rows

    def summary(self) -> str:
        """Return totals and savings in a few lines."""
        totals = self.totals
        elements = max(totals["elements"], 1)
        lines = [
            f"{counted(totals['tensors'], 'tensor')}, {counted(totals['elements'], 'element')}, "
            f"{format_bytes(totals['bytes'])}"
        ]
        names = {"int8": "INT8", "16bit": "16 bits", "keep": "as it is"}
        for verdict in VERDICTS:
            part = totals[verdict]
            lines.append(
                f"{names[verdict]}: {counted(part['tensors'], 'tensor')}, "
                f"{format_share(part['elements'] / elements)} of the elements, "
                f"{format_bytes(part['bytes'])} become {format_bytes(part['bytes_out'])}"
            )
        if self.choice:
            lines.append(self.choice[:1].upper() + self.choice[1:])
        tried = [t for t in self.tensors if t.recommended]
        if tried:
            of_channels = sum(t.recommended == "channel" for t in tried)
            lines.append(
                f"On the activations given, scales of channels err at most {CHANNEL_LIMIT} times "
                f"as much as scales of blocks in {of_channels} of {len(tried)} layers"
            )
        lines.append(
            f"In all {format_bytes(totals['bytes'])} become {format_bytes(totals['bytes_out'])}: "
            f"{100 * totals['savings']:.1f} % saved"
        )
        return "\n".join(lines)

    # ---- as JSON

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record of everything."""
        return {
            "kind": _KIND,
            "version": _VERSION,
            "source": self.source,
            "sha256": self.sha256,
            "config": asdict(self.config),
            "choice": self.choice,
            "totals": self.totals,
            "tensors": [asdict(t) for t in self.tensors],
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Analysis:
        """Read a file of ``cupyattn analyze --output``, and check it.

        Raises
        ------
        OSError
            If it cannot be read.
        ValueError
            If it is something else, damaged, or of a later version.
        """
        try:
            with open_regular(path) as file:
                record = json.loads(file.read())
            if record["kind"] != _KIND or record["version"] > _VERSION:
                raise ValueError(f"it is {record['kind']!r}, version {record['version']!r}")
            tensors = tuple(
                TensorReport(**{**t, "shape": tuple(t["shape"])}) for t in record["tensors"]
            )
            given = {"strategy": "block", **record["config"]}  # which the first version left out
            if given["strategy"] not in STRATEGIES:
                raise ValueError(f"its strategy is {given['strategy']!r:.40}")
            found = cls(
                record["source"], Int8Config(**given), tensors, str(record.get("choice", ""))
            )
            if found.sha256 != record["sha256"]:
                raise ValueError("its tensors do not match its hash")
            # An earlier version may have judged the same findings in another way.
            return found.with_config(found.config)
        except (
            ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError,
            UnsupportedError,
        ) as error:  # fmt: skip
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} holds no usable analysis: {why}") from error


def analyze(
    model: str | os.PathLike[str] | Source,
    config: Int8Config | None = None,
    *,
    activations: Mapping[str, Array] | None = None,
    advance: Callable[[str], None] | None = None,
) -> Analysis:
    """Look at every tensor of a model, one at a time.

    Parameters
    ----------
    model : path or Source
        As for `open_checkpoint`.
    config : Int8Config, optional
    activations : mapping of str to array, optional
        Inputs of layers, (..., in) in a float type, by the name of the layer, with or without
        ``.weight``: for each of them the errors of scales of blocks and of channels are compared.
    advance : callable, optional
        Called with each name when its tensor is done.

    Returns
    -------
    Analysis

    Raises
    ------
    OSError, ValueError, UnsupportedError
        As `open_checkpoint`, and where a file changes while it is read; ValueError for a model that
        is quantised already, and for a pattern of the configuration that fits no name.
    TypeError
        For a `model` that is neither, or another `config`.
    ValueError
        For activations of a layer that the model does not have, of another width, or not finite.

    Notes
    -----
    Memory: one tensor, and a few megabytes for each processor.
    """
    if not (isinstance(model, (str, os.PathLike)) or hasattr(model, "tensors")):
        raise TypeError(f"model must be a path or a Source of open_checkpoint, got {model!r:.60}")
    if not isinstance(config, Int8Config | None):
        raise TypeError(f"config must be a cupyattn.Int8Config or None, got {config!r:.60}")
    source = open_checkpoint(model) if isinstance(model, (str, os.PathLike)) else model
    config = config or Int8Config()
    if config.smooth is True:
        raise UnsupportedError(
            "smooth=True goes with layers that replace_linear_with_int8 quantises, files have no "
            "place for factors: leave it out"
        )
    check_full_width(source)
    check_patterns(config, source.tensors)
    model = str(read_config(source).get("_class_name", ""))
    samples = _samples(source, {} if activations is None else activations)
    choice = _chosen(source, config, model, samples)
    config = replace(config, strategy=choice.strategy)
    reports = []
    for name, info in source.tensors.items():
        tensor = source.read(name)
        report = _examine(name, info, tensor, config, model)
        if name in samples and report.outlier_ratio is not None:
            of_block, of_channel = layer_errors(tensor, samples[name], config.block_size)
            report = replace(report, block_error=of_block, channel_error=of_channel)
        report = replace(report, rotate=choice.way_of(name).rotate)
        reports.append(judge(report, config))
        if advance is not None:
            advance(name)
    return Analysis(source.path.name, config, tuple(reports), str(choice))


def _chosen(
    source: Source, config: Int8Config, model: str, samples: Mapping[str, Array]
) -> Choice:
    """Return the strategy of scales, by activations, or by the family and width of a model."""
    if config.strategy != AUTO or config.rotate not in (AUTO, None):
        return choose(config.strategy, rotate=config.rotate)
    errors = {
        name: predicted_errors(source.read(name), x, config.block_size)
        for name, x in samples.items()
        if role_of(name, source.tensors[name].shape, model) in INT8_ROLES
    }
    errors = {n: one for n, one in errors.items() if math.isfinite(one.block)}  # or it stays
    widths = (
        info.shape[1] for name, info in source.tensors.items()
        if name.endswith(WEIGHT) and len(info.shape) == 2
    )  # fmt: skip
    return choose(AUTO, model, widths, errors, config.rotate)


def check_patterns(config: Int8Config, names: Collection[str]) -> None:
    """Raise ValueError for a pattern of a configuration that no tensor has the name of."""
    for pattern in config.fp32_patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{pattern!r} of fp32_patterns (--fp32-pattern) is the name of no tensor, the "
                f"first is {next(iter(names), 'missing')!r}: correct it, or leave it out"
            )


def judge(report: TensorReport, config: Int8Config) -> TensorReport:
    """Return a report with verdict, reason and size by a configuration.

    `analyze` prints this verdict and `convert` executes it, so that both give the same sizes.
    """
    verdict, dtype_out, reason = _verdict(report, config)
    info, rotate = report.info, None
    nbytes_out = info.elements * DTYPES[dtype_out].itemsize
    if verdict == "int8":
        rows, columns = scale_shape(info.shape, config.block_size, config.strategy)
        nbytes_out += 4 * rows * columns
        if config.strategy == "channel":
            wanted = report.rotate if config.rotate == AUTO else config.rotate
            rotate = rotation_of(wanted, info.shape[1])
        nbytes_out += MARKER_BYTES if rotate else 0
    return replace(
        report, verdict=verdict, dtype_out=dtype_out, nbytes=info.nbytes, nbytes_out=nbytes_out,
        reason=reason, rotate=rotate,
    )  # fmt: skip


def _verdict(report: TensorReport, config: Int8Config) -> tuple[str, str, str]:
    """Return verdict, type and reason; the text before a colon in a reason is its kind."""
    dtype = report.dtype
    if dtype not in FLOATS:
        return "keep", dtype, "no 16- or 32-bit float"
    if report.nonfinite:
        return "keep", dtype, f"not finite: {report.nonfinite} elements are NaN or infinite"
    for pattern in config.fp32_patterns:
        if fnmatch.fnmatchcase(report.name, pattern):
            return "keep", dtype, f"fp32_patterns: {pattern}"
    if report.role in PRECISE_ROLES:
        return "keep", dtype, report.role
    if report.role not in LAYER_ROLES:
        return "keep", dtype, "no weight of a layer"
    elements = report.info.elements
    ratio, sqnr = report.outlier_ratio, report.inlier_sqnr_db
    if elements < config.min_elements_for_int8 or ratio is None:
        why = f"small: {elements} elements, fewer than {config.min_elements_for_int8}"
    elif ratio > config.max_outlier_ratio:
        why = f"outliers: {format_share(ratio)}, more than {format_share(config.max_outlier_ratio)}"
    elif sqnr is not None and sqnr < config.min_sqnr_db:
        why = f"noisy codes: {sqnr:.1f} dB without outliers, below {config.min_sqnr_db:g}"
    elif report.role not in INT8_ROLES:
        why = _NOT_INT8[report.role]
    else:
        return "int8", "I8", report.role
    return _in_16_bits(report, config, why)


def _in_16_bits(report: TensorReport, config: Int8Config, why: str) -> tuple[str, str, str]:
    """Return the verdict on a weight that does not become INT8 for the reason given."""
    dtype, fallback = report.dtype, _FALLBACKS[config.fallback_dtype]
    if dtype != "F32":
        return "keep", dtype, why
    if report.largest > FINITE_MAX[FLOATS[fallback]]:
        return "keep", dtype, f"too large for {fallback}: {report.largest:.3g}; {why}"
    return "16bit", fallback, why


def _examine(
    name: str, info: TensorInfo, tensor: Array, config: Int8Config, model: str
) -> TensorReport:
    """Return the facts that do not depend on the limits of a configuration."""
    errors = None
    if has_codes(info) and tensor.size:
        errors = weight_errors(tensor, config.block_size, config.strategy)
    elif tensor.dtype.kind in "fVc" and tensor.size:
        errors = magnitudes(tensor)
    return report_of(name, info, errors, model, sha256_of(tensor))


def has_codes(info: TensorInfo) -> bool:
    """Whether INT8 is tried: for two axes or more of 16- or 32-bit floats."""
    return info.dtype in FLOATS and len(info.shape) > 1


def report_of(
    name: str,
    info: TensorInfo,
    errors: WeightErrors | None,
    model: str = "",
    sha256: str = "",
) -> TensorReport:
    """Return the report of a tensor before it is judged.

    Parameters
    ----------
    name : str
    info : TensorInfo
    errors : WeightErrors, optional
        None for a tensor without numbers.
    model : str
        As for `role_of`.
    sha256 : str
        Left out where nothing is written.
    """
    nonfinite, largest = (errors.nonfinite, errors.largest) if errors else (0, 0.0)
    report = TensorReport(
        name, info.dtype, info.shape, role_of(name, info.shape, model), sha256, nonfinite, largest,
        None, None, None, None, None,
    )  # fmt: skip
    if errors is None or nonfinite or not has_codes(info):
        return report
    figures: dict[str, Any] = errors.figures()
    return replace(report, **figures)


def sha256_of(tensor: Array) -> str:
    """Return the hash of a tensor's bytes."""
    return hashlib.sha256(tensor.reshape(-1).view(np.uint8).data).hexdigest()


def _samples(source: Source, activations: Mapping[str, Array]) -> dict[str, Array]:
    """Return activations as float32 rows, by the name of the weight that they meet."""
    if not isinstance(activations, Mapping):
        raise TypeError(
            f"activations must map names of layers to arrays, got {shown(activations)}: give "
            "record(...).recording.inputs, for example"
        )
    found = {}
    for given, x in activations.items():
        name = given if given in source.tensors else f"{given}.weight"
        shape = source.tensors[name].shape if name in source.tensors else ()
        if len(shape) != 2:
            raise ValueError(
                f"activations are given for {given!r:.80}, which is no linear layer of "
                f"{source.path.name}"
            )
        x = np.asarray(x)
        if x.dtype.kind not in "fViu":
            raise ValueError(f"activations of {given!r:.80} must be real numbers, got {x.dtype}")
        if x.ndim < 1 or x.shape[-1] != shape[1] or not x.size:
            raise ValueError(
                f"activations of {given!r:.80} must be (..., {shape[1]}) with a row or more, got "
                f"{x.shape}"
            )
        with np.errstate(over="ignore"):
            rows = x.reshape(-1, shape[1]).astype(np.float32)
        if not np.isfinite(rows).all():
            raise ValueError(
                f"activations of {given!r:.80} are NaN or infinite in float32: record others"
            )
        found[name] = rows
    return found


def layer_errors(weight: Array, x: Array, block_size: int) -> tuple[float, float]:
    """Return the relative errors of a layer on activations, by blocks and by channels.

    Parameters
    ----------
    weight : array, (out, in)
    x : array, (rows, in), float32
    """
    rounded = {}
    of_x, of_w = power_to_unit(x), power_to_unit(weight)  # after the codes are made
    for strategy in STRATEGIES:
        codes, scales = quantize_rows(x, block_size, strategy)
        across = scales.repeat(block_size, axis=1)[:, : x.shape[1]]
        numbers = codes * (scales if strategy == "channel" else across)
        rounded[strategy] = np.ldexp(numbers, of_x)
    x = np.ldexp(x, of_x)
    noise, signal = dict.fromkeys(STRATEGIES, 0.0), 0.0
    step = max(1, PART_ELEMENTS // (block_size * max(1, weight.shape[1]))) * block_size
    for rows in strips(weight.shape[0], step):  # whole blocks
        w = weight[rows].astype(np.float32)
        exact = x @ np.ldexp(w, of_w).T
        signal += float(np.square(exact, dtype=np.float64).sum())
        for strategy in STRATEGIES:
            coded = quantize_blocks(w, block_size, strategy)
            made = dequantize_blocks(*coded, block_size, strategy=strategy)
            error = rounded[strategy] @ np.ldexp(made, of_w).T - exact
            noise[strategy] += float(np.square(error, dtype=np.float64).sum())
    by_block, by_channel = (
        math.sqrt(noise[strategy] / signal) if signal else 0.0 for strategy in STRATEGIES
    )
    return by_block, by_channel


def _errors(some: Sequence[TensorReport]) -> str:
    """Compare the errors of channels with the errors of blocks, for the worst layers."""
    ratios = [
        (t.channel_error or 0.0) / t.block_error if t.block_error else 1.0 for t in some
    ]  # fmt: skip
    return f"{max(ratios):.3g} x the error of blocks"
