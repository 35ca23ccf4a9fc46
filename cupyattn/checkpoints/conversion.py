"""Convert a model to INT8, and back: plan each tensor, and check the result."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.checkpoints import layout, writer
from cupyattn.checkpoints.analysis import Analysis, TensorReport, analyze, check_patterns, sha256_of
from cupyattn.checkpoints.codes import check_codes, dequantize_codes
from cupyattn.checkpoints.companions import read_config
from cupyattn.checkpoints.header import DTYPES, FLOATS, TensorInfo
from cupyattn.checkpoints.layout import (
    QUANTIZATION,
    RECORD,
    RECORD_VERSIONS,
    ROTATED_VERSION,
    SCALE_NAMES,
)
from cupyattn.checkpoints.quantised import check_full_width
from cupyattn.checkpoints.quantised import layout_of as layout_of
from cupyattn.checkpoints.rotated import check_rotated, rotated_codes
from cupyattn.checkpoints.schemes import ROTATION, find_codes
from cupyattn.checkpoints.shards import Array, Source
from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.checkpoints.writer import MAX_SHARD_BYTES, Item, Plan
from cupyattn.measure.words import counted, format_bytes, printable
from cupyattn.quant.blocks import (
    AUTO,
    Int8Config,
    block_max,
    by_line,
    panels,
    row_strips,
    scale_shape,
    strips,
)
from cupyattn.quant.rotation import marker
from cupyattn.reference.weights import dequantize_blocks, quantize_blocks
from cupyattn.version import __version__

#: Types that a tensor has in a converted model and had before: `convert` narrows no other.
_WIDENED = (("BF16", "F32"), ("F16", "F32"))
#: The bound of a code's error in units of its scale, 1/2 + 2^-16 [L14]. It includes 2^-17 for
#: rounding a float32 product of at most 128 units [L20], and 2^-25 for a difference of at most one.
HALF_STEP = np.float32(0.5 + 2.0**-15)

LOG = logging.getLogger("cupyattn")

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Conversion:
    """Files that `convert` or `dequantize` wrote, or would write.

    Parameters
    ----------
    target : Path
    files : dict of str to int
        Names and sizes.
    analysis : Analysis or None
        Verdict on each tensor; None for `dequantize`.
    written : bool
        False for a dry run.
    left_out : dict of str to str
        Entries of the model's folder that are not copied, links out of it for one, and why.
    """

    target: Path
    files: dict[str, int]
    analysis: Analysis | None
    written: bool
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(self.files.values())

    def summary(self) -> str:
        """Return one line about the written model."""
        verb = "Wrote and checked" if self.written else "Would write"
        files = counted(len(self.files), "file")
        return f"{verb} {files}, {format_bytes(self.nbytes)}: {self.target}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything, JSON-ready."""
        return {
            "target": str(self.target), "files": self.files, "bytes": self.nbytes,
            "written": self.written, "left_out": self.left_out,
            "analysis": None if self.analysis is None else self.analysis.to_dict(),
        }  # fmt: skip


def convert(
    model: str | os.PathLike[str] | Source,
    output: str | os.PathLike[str],
    config: Int8Config | None = None,
    *,
    analysis: Analysis | None = None,
    export: str = "compressed-tensors",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dry_run: bool = False,
    advance: Advance | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Conversion:
    """Write a model whose large linear layers have INT8 weights.

    Parameters
    ----------
    model : path or Source
        As for `open_checkpoint`.
    output : path
        A folder that does not exist, or is empty.
    config : Int8Config, optional
        That of the analysis when omitted.
    analysis : Analysis, optional
        Analysis of the same model; made first when omitted.
    export : {"compressed-tensors", "deepseek"}
        Whose names: scales are ``weight_scale`` or ``weight_scale_inv``. Convolutions get 16 bits.
    max_shard_bytes : int
        Largest sum of tensors in a file.
    dry_run : bool
        Write nothing.
    advance : callable, optional
        Called with a name for each of at most three steps of each tensor: analysed (unless
        `analysis` is given), written, checked.
    notes : mapping, optional
        Goes into the record of the files, as JSON.

    Returns
    -------
    Conversion

    Raises
    ------
    OSError
        If something cannot be read or written, there is too little room, or `output` exists.
    ValueError
        If the model is damaged, quantised already, holds NaN or infinities, or is not the one that
        was analysed; or if the files that were read back differ from the plan.
    UnsupportedError
        As `open_checkpoint`.

    Notes
    -----
    The same model, configuration and version give the same bytes. Work that was interrupted, by
    whatever, leaves ``OUTPUT.partial`` beside the output, never a half-written output, and the same
    call goes on behind the last file that was finished; files that no longer have the checksum of
    what was written are written again. Memory: at most three times the largest
    tensor, or a few megabytes.
    """
    source = open_checkpoint(model) if isinstance(model, (str, os.PathLike)) else model
    target = _target(output)
    if export not in SCALE_NAMES:
        raise ValueError(f"export must be {' or '.join(map(repr, SCALE_NAMES))}, got {export!r}")
    record = read_config(source)
    check_full_width(source)
    if export == "deepseek" and analysis is None:  # which has blocks alone
        config = config or Int8Config()
        if config.strategy == AUTO:
            config = replace(config, strategy="block")
    if analysis is None:
        analysis = analyze(source, config, advance=advance)
    else:
        check_patterns(config or analysis.config, source.tensors)
    _same_tensors(source, analysis)
    analysis = analysis.with_config(config or analysis.config)
    if export == "deepseek" and analysis.config.strategy != "block":
        raise ValueError(
            "export 'deepseek' has scales of blocks alone, got "
            f"strategy={analysis.config.strategy!r}: use export='compressed-tensors'"
        )
    if analysis.nonfinite:
        first, *others = analysis.nonfinite
        raise ValueError(
            f"{source.path}: {first.name!r} has {first.nonfinite} elements that are NaN or infinite"
            + (f", and {len(others)} more tensors have such elements" if others else "")
        )
    work = _ToInt8(source, analysis, export, dict(notes or {}))
    items = [work.item(t) for t in analysis.tensors]
    int8 = work.layers(int8=True)
    if int8:  # else the model has no codes, and is none that was quantised
        record[QUANTIZATION] = layout.quantization_config(
            export, analysis.config.block_size, {analysis.config.strategy: int8},
            work.layers(int8=False), rotated=any(t.rotate for t in analysis.tensors),
        )  # fmt: skip
    plan = writer.plan(source, items, work, record or None, max_shard_bytes)
    return _write(plan, work, target, analysis, dry_run, advance)


def dequantize(
    model: str | os.PathLike[str] | Source,
    output: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dry_run: bool = False,
    advance: Advance | None = None,
) -> Conversion:
    """Write a quantised model as one that every loader takes.

    Parameters
    ----------
    model : path or Source
        What `convert` wrote, or another library in one of its two layouts: INT8 codes, with or
        without zero points, or codes of 2, 4 or 8 bits packed into words; a scale for each tensor,
        channel, group or block.
    output : path
        A folder that does not exist, or is empty.
    dtype : {"float32", "bfloat16", "float16"}, optional
        Of the weights that were codes. When omitted what they had before, where the files say so,
        otherwise bfloat16.
    max_shard_bytes, dry_run, advance
        As for `convert`; two steps of each tensor, scales aside.

    Returns
    -------
    Conversion

    Raises
    ------
    OSError
        As `convert`.
    ValueError
        If the model is damaged, has no codes, or contradicts its configuration.
    UnsupportedError
        For formats and settings that are not read, by name.

    Notes
    -----
    A weight is ``(codes - zero points) * scales``. Every weight is read back and compared with a
    second computation in float64. Scales of activations are dropped, as all that belongs to the
    quantisation.
    """
    source = open_checkpoint(model) if isinstance(model, (str, os.PathLike)) else model
    target = _target(output)
    wanted = {name: short for short, name in FLOATS.items()}
    if dtype is not None and dtype not in wanted:
        raise ValueError(f"dtype must be {' or '.join(map(repr, wanted))}, got {dtype!r}")
    record = read_config(source)
    work = _FromInt8(source, layout_of(source), None if dtype is None else wanted[dtype])
    had_config = bool(record)
    record.pop(QUANTIZATION, None)
    config = record if had_config else None
    plan = writer.plan(source, work.items(), work, config, max_shard_bytes)
    return _write(plan, work, target, None, dry_run, advance)


def _target(output: str | os.PathLike[str]) -> Path:
    if not os.fspath(output):  # abspath takes it for this folder
        raise ValueError("output must be a path, got '': name a new or empty folder")
    target = Path(os.path.abspath(output))
    if target.is_symlink() and target.is_dir():
        target = target.resolve()  # the folder takes the name, not the link
    writer.check_target(target)
    return target


def _write(
    plan: Plan,
    work: writer.Work,
    target: Path,
    analysis: Analysis | None,
    dry_run: bool,
    advance: Advance | None,
) -> Conversion:
    for name, why in plan.left_out.items():
        LOG.warning("%s is not copied: %s", printable(name), printable(why))
    done = Conversion(target, plan.files, analysis, not dry_run, plan.left_out)
    if not dry_run:
        writer.write(plan, work, target, advance or (lambda name: None))
    return done


def _same_tensors(source: Source, analysis: Analysis) -> None:
    """Raise unless an analysis is of these tensors, as far as their headers say."""
    there = {name: (info.dtype, info.shape) for name, info in source.tensors.items()}
    known = {t.name: (t.dtype, t.shape) for t in analysis.tensors}
    if there != known:
        other = sorted(set(there.items()) ^ set(known.items()))[0][0]
        raise ValueError(
            f"the analysis of {analysis.source!r} is of another model than {source.path}: "
            f"{other!r} differs"
        )


class _ToInt8:
    """Weights of linear layers as codes and scales, others narrowed, the rest unchanged."""

    def __init__(
        self, source: Source, analysis: Analysis, export: str, notes: dict[str, Any]
    ) -> None:
        self.source = source
        self.export = export
        self.notes = notes
        self.block_size, self.strategy = analysis.config.block_size, analysis.config.strategy
        self.config = asdict(analysis.config)
        del self.config["smooth"]  # of layers in memory
        self.version = RECORD_VERSIONS[self.strategy]
        if self.strategy == "block":  # the record of version 1, to the byte
            del self.config["strategy"]
        if any(t.rotate for t in analysis.tensors):
            self.version = ROTATED_VERSION
        else:
            del self.config["rotate"]
        self.sha256 = analysis.sha256
        self.reports = {t.name: t for t in analysis.tensors}

    def layers(self, *, int8: bool) -> list[str]:
        """Return the linear layers, as far as shapes tell, that have codes, or that have none."""
        return sorted(
            t.name.removesuffix(layout.WEIGHT)
            for t in self.reports.values()
            if t.name.endswith(layout.WEIGHT)
            and len(t.shape) == 2
            and (t.verdict == "int8") == int8
        )

    def item(self, t: TensorReport) -> Item:
        outputs = {t.name: TensorInfo(t.dtype_out, t.shape)}
        if t.verdict == "int8":
            shape = scale_shape(t.shape, self.block_size, self.strategy)
            outputs[layout.scale_name(t.name, self.export)] = TensorInfo("F32", shape)
        if t.rotate:
            outputs[f"{t.name.removesuffix(layout.WEIGHT)}.{ROTATION}"] = TensorInfo("I32", (2,))
        return Item(t.name, outputs)

    def metadata(self, items: Sequence[Item]) -> dict[str, str]:
        record = {
            **self.notes,
            "version": self.version,
            "tool": f"cupyattn {__version__}",
            "export": self.export,
            "config": self.config,
            "source_sha256": self.sha256,
            "dtypes": {
                item.name: self.reports[item.name].dtype
                for item in items
                if self.reports[item.name].verdict != "keep"
            },
        }
        if rotated := sorted(item.name for item in items if self.reports[item.name].rotate):
            record["rotated"] = rotated
        return {RECORD: json.dumps(record, sort_keys=True, separators=(",", ":"))}

    def make(self, item: Item) -> dict[str, Array]:
        t = self.reports[item.name]
        tensor = self.source.read(t.name)
        if sha256_of(tensor) != t.sha256:
            raise ValueError(f"{self.source.path}: {t.name!r} has changed since it was analysed")
        if t.verdict != "int8":
            return {t.name: tensor.astype(DTYPES[t.dtype_out], copy=False)}
        if t.rotate:
            made = rotated_codes(tensor, t.rotate)
            mark = np.array(marker(t.rotate, t.shape[1]), np.int32)
            return dict(zip(item.outputs, (*made, mark), strict=True))
        made = quantize_blocks(tensor, self.block_size, self.strategy)
        return dict(zip(item.outputs, made, strict=True))

    def check(self, item: Item, found: Mapping[str, Array]) -> str | None:
        t = self.reports[item.name]
        tensor = self.source.read(t.name)
        if t.verdict != "int8":
            narrowed = tensor.astype(DTYPES[t.dtype_out], copy=False)
            return None if _same_bytes(narrowed, found[t.name]) else "its bytes differ"
        codes, scales, *mark = (found[name] for name in item.outputs)
        if t.rotate:
            if mark[0].tolist() != [*marker(t.rotate, t.shape[1])]:
                return "it is not marked as rotated"
            return check_rotated(tensor, codes, scales, t.rotate)
        if self.strategy == "channel":
            return _check_channels(tensor, codes, scales)
        for part, blocks in panels(t.shape, self.block_size):
            scale = np.ascontiguousarray(scales[blocks])
            error = dequantize_blocks(codes[part], scale, self.block_size)
            error -= tensor[part].astype(np.float32)
            worst = block_max(
                by_line(np.abs(error, out=error), self.block_size).max(axis=1), self.block_size
            )
            # NOTE: a NaN in a scale is no number within the bound, hence not `worst > bound`.
            if not (worst <= HALF_STEP * scale).all():
                return "its codes are further off than their bound"
        return None


def _check_channels(tensor: Array, codes: Array, scales: Array) -> str | None:
    """Describe an error in the codes of a weight with a scale for each row."""
    for rows in row_strips(codes.shape):
        error = codes[rows].astype(np.float32) * scales[rows]
        error -= tensor[rows].astype(np.float32)
        if not (np.abs(error, out=error) <= HALF_STEP * scales[rows]).all():
            return "its codes are further off than their bound"
    return None


class _FromInt8:
    """Codes as numbers, in the type that weights had before; the rest as it was."""

    def __init__(self, source: Source, known: layout.Layout, dtype: str | None) -> None:
        self.source = source
        self.known = known
        self.dtype = dtype
        found, self.parts = find_codes(
            source, known.schemes, ours=known.ours, rotated=known.rotated
        )
        if not found and not known.ours:
            raise ValueError(
                f"{source.path} has no weights with scales, X.weight or X.weight_packed and "
                f"{' or '.join(f'X.{name}' for name in layout.SCALE_NAMES.values())}"
            )
        self.codes = {one.codes: one for one in found.values()}

    def items(self) -> list[Item]:
        """Return one item for each tensor of the model that is written."""
        return [self._item(name) for name in self.source.tensors if name not in self.parts]

    def _item(self, name: str) -> Item:
        info, codes = self.source.tensors[name], self.codes.get(name)
        if codes is None:
            dtype = self.known.dtypes.get(name, info.dtype)
            if dtype != info.dtype and (info.dtype, dtype) not in _WIDENED:
                raise ValueError(f"{self.source.path}: {name!r} cannot have had type {dtype!r}")
            return Item(name, {name: TensorInfo(dtype, info.shape)})
        dtype = self.dtype or self.known.dtypes.get(codes.weight, "BF16")
        if dtype not in FLOATS:
            raise ValueError(f"{self.source.path}: {name!r} cannot have had type {dtype!r}")
        return Item(name, {codes.weight: TensorInfo(dtype, codes.shape)})

    def metadata(self, items: Sequence[Item]) -> dict[str, str]:
        return {}

    def make(self, item: Item) -> dict[str, Array]:
        ((weight, info),) = item.outputs.items()
        codes = self.codes.get(item.name)
        if codes is not None:
            return {weight: dequantize_codes(self.source, codes, FLOATS[info.dtype])}
        return {weight: self.source.read(item.name).astype(DTYPES[info.dtype], copy=False)}

    def check(self, item: Item, found: Mapping[str, Array]) -> str | None:
        (w,) = found.values()
        codes = self.codes.get(item.name)
        if codes is not None:
            return check_codes(self.source, codes, w)
        tensor = self.source.read(item.name)  # types are only widened, which can be undone
        same = _same_bytes(w.astype(tensor.dtype, copy=False), tensor)
        return None if same else "its bytes differ"


def _same_bytes(a: Array, b: Array) -> bool:
    a, b = a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    return a.size == b.size and all(
        np.array_equal(a[part], b[part]) for part in strips(a.size, 2**20)
    )
