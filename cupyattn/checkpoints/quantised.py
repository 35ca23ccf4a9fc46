"""Models that are already quantised: their kind, and the next command."""

from __future__ import annotations

from cupyattn.checkpoints import layout
from cupyattn.checkpoints.companions import read_config
from cupyattn.checkpoints.schemes import OWN_METHOD, ROTATION, Codes, find_codes
from cupyattn.checkpoints.shards import Source
from cupyattn.checkpoints.source import SafetensorsCheckpoint
from cupyattn.errors import UnsupportedError
from cupyattn.measure.words import counted
from cupyattn.quant.blocks import BLOCK_SIZE

_DEQUANTIZE = "dequantize it first with `cupyattn dequantize`"
_RUN = f"run it with cupyattn.interop.torch.load_int8, or {_DEQUANTIZE}"


def layout_of(source: Source) -> layout.Layout:
    """Return the facts in the files of a model of codes.

    Raises
    ------
    ValueError
        As `layout.read_layout`, and if scales or all marks of rotated weights are missing.
    UnsupportedError
        As `layout.read_layout`.
    """
    config = read_config(source)
    found = layout.read_layout(config, _records(source), str(source.path))
    for name in found.dtypes.keys() & source.tensors.keys():
        of_codes = name.endswith(layout.WEIGHT) and source.tensors[name].dtype == "I8"
        if of_codes and not _is_coded(source, name):
            raise ValueError(
                f"{source.path}: {name!r} is INT8 and has no scales: convert the model again"
            )
    told = config.get(layout.QUANTIZATION)
    rotated = isinstance(told, dict) and told.get("quant_method") == OWN_METHOD
    if rotated and not any(name.endswith(f".{ROTATION}") for name in source.tensors):
        raise ValueError(
            f"{source.path}: weights are rotated, says quant_method {OWN_METHOD!r}, but there is "
            f"no tensor X.{ROTATION}: convert the model again"
        )
    return found


def check_full_width(source: Source) -> None:
    """Raise ValueError for a model that is quantised already, and name the way on.

    It is one by its ``config.json``, by the record of `convert`, or by weights of codes that have
    scales.
    """
    told = layout.QUANTIZATION in read_config(source) or bool(_records(source))
    if told or any(_is_coded(source, name) for name in source.tensors):
        raise ValueError(f"{source.path} is quantised already: {_what_next(source)}")


def _records(source: Source) -> list[str]:
    headers = source.headers.values() if isinstance(source, SafetensorsCheckpoint) else ()
    return [h.metadata[layout.RECORD] for h in headers if layout.RECORD in h.metadata]


def _is_coded(source: Source, name: str) -> bool:
    """Whether a tensor holds codes, as far as names and types tell."""
    layer, _, last = name.rpartition(".")
    coded = (last, source.tensors[name].dtype) in (("weight", "I8"), ("weight_packed", "I32"))
    return coded and any(f"{layer}.{end}" in source.tensors for end in layout.SCALE_NAMES.values())


def _what_next(source: Source) -> str:
    try:
        known = layout_of(source)
        found, _ = find_codes(source, known.schemes, ours=known.ours, rotated=known.rotated)
    except (ValueError, UnsupportedError) as error:
        why = str(error).removeprefix(f"{source.path}: ")
        return f"{why}: give the model as it was before that"
    if not found:
        return _RUN
    kinds = sorted({_kind(one) for one in found.values()})
    what = f"{counted(len(found), 'weight')} in codes of {' and of '.join(kinds)}"
    if all(map(_runs, found.values())):
        return f"{_RUN} ({what})"
    return f"{_DEQUANTIZE}, since its codes do not run as they are ({what})"


def _kind(codes: Codes) -> str:
    """Say how a weight is stored."""
    scheme = codes.scheme
    parts = [f"{scheme.bits} bits"]
    if scheme.strategy in ("block", "group"):
        parts.append(f"scales of blocks of {codes.block[0]} x {codes.block[1]}")
    else:
        parts.append("one scale" if scheme.strategy == "tensor" else "scales of channels")
    if codes.rotate:
        parts.append("rotated")
    if codes.zero_points:
        parts.append("zero points")
    if scheme.activations:
        parts.append(f"activations of {scheme.activations}")
    return ", ".join(parts)


def _runs(codes: Codes) -> bool:
    """Whether products take the codes of a weight unchanged."""
    scheme = codes.scheme
    blocks = scheme.strategy in ("block", "group")
    if scheme.packed or scheme.bits != 8 or codes.zero_points or scheme.activations:
        return False
    return not blocks or (scheme.rows, scheme.columns) == (BLOCK_SIZE, BLOCK_SIZE)
