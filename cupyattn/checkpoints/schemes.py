"""Find the tensors of a quantised checkpoint that are codes, with the scheme of each.

A weight is ``(codes - zero points) * scales``. In every strategy a block of rows and columns shares
a scale. It is the whole weight per tensor, one row per channel, and a part of a row per group.
Unknown settings are refused by name, because ignoring one would give wrong numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.checkpoints import comfy
from cupyattn.checkpoints.companions import CONFIG
from cupyattn.checkpoints.header import FLOATS, TensorInfo
from cupyattn.checkpoints.shards import Source
from cupyattn.checkpoints.source import folder_of
from cupyattn.errors import UnsupportedError
from cupyattn.quant.blocks import BLOCK_SIZE, strategy_of_weight
from cupyattn.quant.rotation import LAYER_ROTATIONS, marker, rotation_of

METHOD = "compressed-tensors"
#: The same with weights of which some are rotated: `convert` writes it, and no other reader knows.
OWN_METHOD = "cupyattn"
#: Formats of compressed-tensors by whether the codes are packed into int32 words.
FORMATS = {"int-quantized": False, "naive-quantized": False, "pack-quantized": True}
#: Bits of packed codes. Libraries disagree on the layout of widths that do not divide 32.
PACKED_BITS = (2, 4, 8)
WORD_BITS = 32
STRATEGIES = ("tensor", "channel", "group", "block")
#: Settings of the weights of a group. Settings of the observer describe the calibration, not the
#: files.
_OF_WEIGHTS = {
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic",
    "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip
#: Settings of a whole quantization_config.
_OF_CONFIG = {
    "quant_method", "format", "config_groups", "ignore", "quantization_status",
    "global_compression_ratio", "sparsity_config", "version",
}  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """Storage scheme of the weights of one group of layers.

    Parameters
    ----------
    rows, columns : int or None
        How many of a weight share a scale; None stands for all.
    bits : int
    symmetric : bool
        Without zero points.
    packed : bool
        Codes lie in int32 words as ``weight_packed``.
    packed_zeros : bool
        Zero points lie in int32 words, too.
    targets : tuple of str
        Names of layers, ``re:`` and a pattern of names, or classes; empty for every layer.
    activations : str
        Quantisation of activations that the files require and our products do not support, such as
        ``"static scales"``; "" if none. Numbers do not depend on it.
    whole_groups : bool
        Whether `columns` must divide a weight's.
    """

    rows: int | None
    columns: int | None
    bits: int = 8
    symmetric: bool = True
    packed: bool = False
    packed_zeros: bool = False
    targets: tuple[str, ...] = ()
    activations: str = ""
    whole_groups: bool = False

    @property
    def strategy(self) -> str:
        """The strategy of scales: one of `STRATEGIES`."""
        if self.rows is None:
            return "tensor"
        if self.rows > 1:
            return "block"
        return "channel" if self.columns is None else "group"

    @property
    def storage(self) -> tuple[Any, ...]:
        """Everything but the layers that it is for."""
        return (
            self.rows, self.columns, self.bits, self.symmetric, self.packed, self.packed_zeros
        )  # fmt: skip


@dataclass(frozen=True)
class Codes:
    """One weight that is stored as codes.

    Parameters
    ----------
    weight : str
        The name that the weight gets.
    codes, scales : str
        Tensors.
    zero_points : str or None
    shape : (int, int)
        Shape of the weight.
    block : (int, int)
        Rows and columns that share a scale.
    scheme : Scheme
    rotate : str or None
        As for `cupyattn.Int8Linear`: the codes belong to the rotated weight.
    of_comfy : bool
        Whether rotated numbers lie in ComfyUI's order (`cupyattn.checkpoints.comfy.our_codes`).
    """

    weight: str
    codes: str
    scales: str
    zero_points: str | None
    shape: tuple[int, int]
    block: tuple[int, int]
    scheme: Scheme
    rotate: str | None = None
    of_comfy: bool = False

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Number of blocks, down and across."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])


def square(size: int) -> Scheme:
    """Return the scheme of blocks of `size` x `size`."""
    return Scheme(size, size)


def by_channel() -> Scheme:
    """Return the scheme of a scale for each row, an output channel."""
    return Scheme(1, None)


def read_schemes(config: Any, where: str) -> tuple[Scheme, ...]:
    """Return the schemes of a ``quantization_config``; none where it names no blocks.

    Parameters
    ----------
    config : object
        Value of ``config.json`` under that name.
    where : str
        The model's name, for messages.

    Raises
    ------
    ValueError
        If a setting is malformed.
    UnsupportedError
        For a setting that `dequantize` does not implement.
    """
    if not isinstance(config, dict):
        return ()
    method = config.get("quant_method")
    if method in (METHOD, OWN_METHOD) or (method is None and "config_groups" in config):
        return tuple(_groups(config, f"{where}: {METHOD}"))
    if method not in (None, "blockwise_int8"):
        raise UnsupportedError(
            f"{where}: quant_method {method!r:.60} is not read, only {METHOD!r} and "
            "'blockwise_int8'"
        )
    if "weight_block_size" not in config:
        return ()
    rows, columns = _pair(config["weight_block_size"], f"{where}: weight_block_size")
    asked = config.get("activation_scheme", "dynamic")
    others = {"dynamic": "", "static": "static scales", None: "16 bits"}
    activations = others[asked] if asked in tuple(others) else f"the scheme {asked!r:.40}"
    return (Scheme(rows, columns, activations=activations),)


def _groups(config: dict[str, Any], where: str) -> Iterator[Scheme]:
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise UnsupportedError(f"{where}: sparsity_config {sparsity!r:.80} is not read")
    _check_known(config, _OF_CONFIG, where)
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        raise ValueError(f"{where}: config_groups must be an object, got {groups!r:.60}")
    for name, group in groups.items():
        here = f"{where}: config_groups[{name!r:.60}]"
        if not isinstance(group, dict):
            raise UnsupportedError(f"{here} is not an object that lists targets and weights")
        weights = group.get("weights")
        if weights is None:
            continue  # only activations are quantised
        if not isinstance(weights, dict):
            raise ValueError(f"{here}.weights must be an object, got {weights!r:.60}")
        form = group.get("format") or config.get("format")
        if form not in tuple(FORMATS):
            raise UnsupportedError(
                f"{here}: format {form!r:.60} is not read, only {', '.join(FORMATS)}"
            )
        targets = group.get("targets", [])
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise ValueError(f"{here}.targets must be a list of names, got {targets!r:.60}")
        scheme = _scheme(weights, FORMATS[form], tuple(targets), f"{here}.weights")
        yield replace(scheme, activations=_activations(group.get("input_activations"), scheme))


def _activations(settings: Any, scheme: Scheme) -> str:
    """Return the quantisation of activations that a group requires and no product supports; "" if
    none."""
    if settings is None:  # W8A16
        return "16 bits"
    if not isinstance(settings, dict):
        return f"settings {settings!r:.60}"
    if settings.get("type", "int") != "int" or settings.get("num_bits", 8) != 8:
        bits, kind = settings.get("num_bits", 8), settings.get("type", "int")
        return f"{bits!r:.20} bits of type {kind!r:.20}"
    if not settings.get("symmetric", True):
        return "zero points"
    if settings.get("dynamic") is not True:
        return "static scales"
    strategy = settings.get("strategy")
    wanted = "group" if scheme.strategy == "block" else "token"
    return "" if strategy in (None, wanted) else f"the strategy {strategy!r:.40}"


def _scheme(weights: dict[str, Any], packed: bool, targets: tuple[str, ...], where: str) -> Scheme:
    """Return the scheme that the settings of a group's weights describe."""
    _check_known(weights, _OF_WEIGHTS, where)
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if kind != "int":
        raise UnsupportedError(f"{where}: type {kind!r:.40} is not read, only 'int'")
    allowed = PACKED_BITS if packed else tuple(range(2, 9))
    if type(bits) is not int or bits not in allowed:
        raise UnsupportedError(
            f"{where}: num_bits {bits!r:.40} is not read in this format, only "
            f"{', '.join(map(str, allowed))}"
        )
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise ValueError(f"{where}: symmetric must be true or false, got {symmetric!r:.40}")
    if weights.get("dynamic"):
        raise UnsupportedError(f"{where}: dynamic weights have no scales in the files")
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):
        raise UnsupportedError(
            f"{where}: actorder {order!r:.40} is not read: it needs the order of columns in "
            "weight_g_idx"
        )
    strategy = weights.get("strategy") or _strategy(weights.get("group_size"))
    if strategy not in STRATEGIES:
        raise UnsupportedError(
            f"{where}: strategy {strategy!r:.40} is not read, only {', '.join(STRATEGIES)}"
        )
    rows: int | None = None
    columns: int | None = None
    if strategy == "channel":
        rows = 1
    elif strategy == "group":
        rows, columns = 1, weights.get("group_size")
        if not _is_size(columns):
            raise ValueError(f"{where}: group_size must be 1 or more, got {columns!r:.40}")
    elif strategy == "block":
        rows, columns = _pair(weights.get("block_structure"), f"{where}: block_structure")
    zeros = packed and not symmetric and strategy in ("channel", "group")
    return Scheme(
        rows, columns, bits, symmetric, packed, zeros, targets, whole_groups=strategy == "group"
    )


def _strategy(group_size: Any) -> str:
    """Return the strategy that compressed-tensors infers where none is named."""
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _check_known(settings: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raise UnsupportedError where a setting says something that is not known here."""
    for name, value in settings.items():
        if name not in known and value not in (None, False, [], {}):
            raise UnsupportedError(f"{where}: the setting {name!r:.60} is not read")


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _pair(value: Any, what: str) -> tuple[int, int]:
    """Return rows and columns of a block."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", value):
        value = [int(size) for size in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_size, value)):
        raise ValueError(f"{what} must be two sizes, [rows, columns], got {value!r:.60}")
    return value[0], value[1]


# ---- the tensors ---------------------------------------------------------------------------------

#: Suffixes after the name of a layer; the last is used in state dicts of our torch module.
_CODES = ("weight", "weight_packed", "weight_codes")
_SCALES = ("weight_scale", "weight_scale_inv")
_SHAPE, _ZEROS = "weight_shape", "weight_zero_point"
#: Name of the tensor that marks a rotated weight (`cupyattn.quant.rotation.marker`), in files and
#: in state dicts.
ROTATION = "weight_rotation"
#: Fields of the quantisation of activations, which a weight in 16 bits does not have.
ACTIVATIONS = frozenset(
    f"{of}_{what}"
    for of in ("input", "output")
    for what in ("scale", "zero_point", "global_scale")
)  # fmt: skip


def find_codes(
    source: Source,
    schemes: tuple[Scheme, ...],
    *,
    ours: bool,
    rotated: frozenset[str] = frozenset(),
) -> tuple[dict[str, Codes], frozenset[str]]:
    """Return the weights that are stored as codes, by name, and the tensors that go with them.

    Parameters
    ----------
    source : Source
    schemes : tuple of Scheme
    ours : bool
        Whether cupyattn wrote the files; tensors of others whose names speak of quantisation must
        all be understood.
    rotated : frozenset of str
        Weights that the files' record says are rotated.

    Returns
    -------
    codes : dict of str to Codes
        Empty where there are none.
    parts : frozenset of str
        Scales, zero points and the like: everything that ends in the weights.

    Raises
    ------
    ValueError
        If codes and scales do not fit together.
    UnsupportedError
        For tensors that `dequantize` does not understand.
    """
    found: dict[str, Codes] = {}
    told = comfy.settings_of(source)
    companions: set[str] = {f"{layer}.{comfy.SETTINGS}" for layer in told}
    for name in source.tensors:
        layer, dot, last = name.rpartition(".")
        scales = [f"{layer}.{end}" for end in _SCALES if f"{layer}.{end}" in source.tensors]
        if not dot or last not in _CODES or not scales:
            continue
        if last == "weight_codes":
            scheme = _scheme_of_module(source.tensors[name], source.tensors[scales[0]])
        elif layer in told:
            asked = comfy.activations_told(source, layer, told[layer])
            scheme = replace(_by_scales(source.tensors[scales[0]]), activations=asked)
        else:
            scheme = _scheme_of(layer, schemes, source)
        codes = _codes(source, layer, name, scales[0], scheme)
        if layer in told:
            rotate = comfy.rotation_told(source, layer, told.pop(layer), codes.shape[1])
            codes = replace(codes, rotate=rotate, of_comfy=True)
        else:
            codes = replace(codes, rotate=_rotation(source, layer, codes.shape[1]))
        if codes.weight in rotated and codes.rotate is None:
            raise ValueError(
                f"{source.path}: {codes.weight!r} is rotated, says the record of the file, but "
                f"{f'{layer}.{ROTATION}'!r} is missing: convert the model again"
            )
        if codes.weight in found:
            first = found[codes.weight].codes.rpartition(".")[2]
            raise ValueError(f"{source.path}: {layer!r} has both {first} and {last}")
        found[codes.weight] = codes
        companions |= {scales[0], *(f"{layer}.{end}" for end in (_ZEROS, _SHAPE, ROTATION))}
        companions |= {f"{layer}.{end}" for end in ACTIVATIONS}
    for layer, settings in told.items():  # of layers without codes: settings that are not read
        comfy.check_format(source, layer, settings)
        raise ValueError(f"{source.path}: {layer!r} has no weight with codes and scales")
    companions &= set(source.tensors)
    if not ours:
        _check_nothing_is_left(source, found, companions)
    return found, frozenset(companions)


def _rotation(source: Source, layer: str, channels: int) -> str | None:
    """Return how the weight of a layer is rotated."""
    name = f"{layer}.{ROTATION}"
    if name not in source.tensors:
        return None
    said = tuple(source.read(name).reshape(-1).tolist())
    for rotate in LAYER_ROTATIONS[1:]:
        if rotation_of(rotate, channels) and said == marker(rotate, channels):
            return rotate
    raise UnsupportedError(
        f"{source.path}: {name!r} is {said}, groups and runs of channels that are not read for "
        f"{channels} channels: write the model again with this version"
    )


def _check_nothing_is_left(source: Source, found: dict[str, Codes], companions: set[str]) -> None:
    """Raise for tensors of a quantised layer that no weight has used."""
    used = companions | {one.codes for one in found.values()}
    for name, info in source.tensors.items():
        last = name.rpartition(".")[2]
        if name in used:
            continue
        if last == "weight_g_idx":
            raise UnsupportedError(
                f"{source.path}: {name!r} is not read: weights whose columns are in another order "
                "(act-order) are not supported"
            )
        if last.startswith("weight_"):
            raise UnsupportedError(
                f"{source.path}: {name!r} is not read: no weight with codes and scales uses it"
            )
        if last == "weight" and info.dtype == "I8" and found:
            raise ValueError(f"{source.path}: {name!r} is INT8 and has no scales")


def _scheme_of_module(codes: TensorInfo, scales: TensorInfo) -> Scheme:
    """Return the scheme of a module's codes by the shape of their scales."""
    strategy = strategy_of_weight(codes.shape, scales.shape)
    return by_channel() if strategy == "channel" else square(BLOCK_SIZE)


def _by_scales(scales: TensorInfo) -> Scheme:
    """Return the scheme of codes with one scale, or else with a scale for each row."""
    return Scheme(None, None) if scales.elements == 1 else by_channel()


def _scheme_of(layer: str, schemes: tuple[Scheme, ...], source: Source) -> Scheme:
    """Return the scheme of a layer: by its name, by a pattern of names, or by its class."""
    if not schemes:
        alone = folder_of(source) is None and (source.path.parent / CONFIG).exists()
        raise ValueError(
            f"{source.path}: neither its files nor quantization_config in config.json say which "
            "rows and columns of a weight share a scale, e.g. blocks of 128 x 128"
            + (": give its folder, since of a file alone no config.json is read" if alone else "")
        )
    if len({scheme.storage for scheme in schemes}) == 1:
        return schemes[0]
    by_name = [s for s in schemes if layer in s.targets]
    by_pattern = [
        s for s in schemes
        if any(t.startswith("re:") and _matches(t[3:], layer, source) for t in s.targets)
    ]  # fmt: skip
    for some in (by_name, by_pattern, [s for s in schemes if "Linear" in s.targets]):
        if len({scheme.storage for scheme in some}) == 1:
            return some[0]
        if some:
            raise ValueError(f"{source.path}: several groups of quantization_config name {layer!r}")
    raise ValueError(f"{source.path}: no group of quantization_config names {layer!r}")


def _matches(pattern: str, layer: str, source: Source) -> bool:
    try:
        return re.match(pattern, layer) is not None
    except (re.error, RecursionError) as error:
        raise ValueError(f"{source.path}: the target 're:{pattern:.60}' is no pattern") from error


def _codes(source: Source, layer: str, name: str, scales: str, scheme: Scheme) -> Codes:
    """Return how a weight is stored, once types and shapes agree with its scheme."""
    info = source.tensors[name]
    packed = name.endswith("_packed")
    wanted = "I32" if packed else "I8"
    if packed != scheme.packed or info.dtype != wanted or len(info.shape) != 2:
        kind = "weight_packed, I32 words," if scheme.packed else "weight, INT8 codes,"
        raise ValueError(
            f"{source.path}: {layer!r} must have {kind} of two axes by its quantization_config, "
            f"got {name!r}, {info.dtype} {info.shape}"
        )
    shape = _shape(source, layer, info, scheme)
    if scheme.whole_groups and scheme.columns and shape[1] % scheme.columns:
        raise ValueError(
            f"{source.path}: group_size {scheme.columns} does not divide the {shape[1]} columns of "
            f"{layer!r}"
        )
    block = tuple(
        max(1, size) if part is None else part
        for part, size in zip((scheme.rows, scheme.columns), shape, strict=True)
    )
    zeros = f"{layer}.{_ZEROS}"
    there = zeros in source.tensors
    if not there and not scheme.symmetric:
        raise ValueError(
            f"{source.path}: {layer!r} is not symmetric by its quantization_config, and there is "
            f"no {zeros!r}"
        )
    found = Codes(
        f"{layer}.weight", name, scales, zeros if there else None, shape, (block[0], block[1]),
        scheme,
    )  # fmt: skip
    _check_scales(source, found)
    if there and scheme.symmetric:
        if np.any(source.read(zeros)):
            raise ValueError(
                f"{source.path}: {layer!r} is symmetric by its quantization_config, and "
                f"{zeros!r} has values other than 0"
            )
        return Codes(**{**vars(found), "zero_points": None})
    return found


def _shape(source: Source, layer: str, info: TensorInfo, scheme: Scheme) -> tuple[int, int]:
    """Return the shape of a weight; packed codes store it in a separate tensor."""
    if not scheme.packed:
        return info.shape[0], info.shape[1]
    name = f"{layer}.{_SHAPE}"
    of_shape = source.tensors.get(name)
    if of_shape is None or of_shape.dtype not in ("I64", "I32") or of_shape.shape != (2,):
        said = "is missing" if of_shape is None else f"is {of_shape.dtype} {of_shape.shape}"
        raise ValueError(f"{source.path}: {name!r} must be two integers, it {said}")
    rows, columns = map(int, source.read(name))
    words = -(-columns * scheme.bits // WORD_BITS)
    if min(rows, columns) < 0 or (rows, words) != info.shape:
        raise ValueError(
            f"{source.path}: {name!r} says {rows} x {columns}, of which codes of {scheme.bits} "
            f"bits take {words} words a row, but the packed weight has shape {info.shape}"
        )
    return rows, columns


def _check_scales(source: Source, codes: Codes) -> None:
    """Raise ValueError unless scales and zero points fit a weight."""
    scheme, (down, across) = codes.scheme, codes.scale_shape
    shapes: list[tuple[int, ...]] = [(down, across)]
    if across == 1 and scheme.columns is None:
        shapes += [(down,)] if scheme.rows == 1 else [(), (1,)]
    info = source.tensors[codes.scales]
    if info.dtype not in FLOATS or info.shape not in shapes:
        raise ValueError(
            f"{source.path}: a weight {codes.shape} in blocks of {codes.block[0]} x "
            f"{codes.block[1]} must have scales {shapes[0]} of type {' or '.join(FLOATS)}, got "
            f"{codes.scales!r}, {info.dtype} {info.shape}"
        )
    if codes.zero_points is None:
        return
    info = source.tensors[codes.zero_points]
    if scheme.packed_zeros:
        shapes = [(-(-down * scheme.bits // WORD_BITS), across)]
    wanted = "I32" if scheme.packed_zeros else "I8"
    if info.dtype != wanted or info.shape not in shapes:
        raise ValueError(
            f"{source.path}: the zero points of a weight {codes.shape} in blocks of "
            f"{codes.block[0]} x {codes.block[1]} must be {wanted} {shapes[0]}, got "
            f"{codes.zero_points!r}, {info.dtype} {info.shape}"
        )
