"""How INT8 weights are called in files that others read, and what config.json says of them.

``compressed-tensors`` is the library of that name (0.20: `int-quantized`, strategy `block`), which
vLLM and transformers read; ``deepseek`` has the names of DeepSeek's own files, which SGLang reads
as `blockwise_int8`. In both a weight is ``codes * scale``: `weight_scale_inv` is no inverse.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupyattn.checkpoints.source import Source
from cupyattn.quant.blocks import BLOCK_SIZE, scale_shape

#: What is added to the name of a layer for its scales, by export.
SCALE_NAMES = {"compressed-tensors": "weight_scale", "deepseek": "weight_scale_inv"}
WEIGHT = ".weight"
QUANTIZATION = "quantization_config"
#: The name of our own record among a file's strings, and its version.
RECORD, RECORD_VERSION = "cupyattn", 1


def scale_name(weight: str, export: str) -> str:
    """Return the name of a weight's scales.

    Examples
    --------
    >>> scale_name("blocks.0.fc.weight", "compressed-tensors")
    'blocks.0.fc.weight_scale'
    """
    return f"{weight.removesuffix(WEIGHT)}.{SCALE_NAMES[export]}"


def pair_scales(source: Source, block_size: int) -> dict[str, str]:
    """Return the name of the scales of every weight that is codes.

    Parameters
    ----------
    source : Source
        A model in one of the two layouts.
    block_size : int

    Raises
    ------
    ValueError
        Where there is none, or codes and scales do not fit together.
    """
    found = {}
    for name, info in source.tensors.items():
        for export in SCALE_NAMES:
            scales = scale_name(name, export)
            if not name.endswith(WEIGHT) or scales not in source.tensors:
                continue
            of_scales = source.tensors[scales]
            expected = scale_shape(info.shape, block_size) if len(info.shape) == 2 else None
            if (info.dtype, of_scales.dtype, of_scales.shape) != ("I8", "F32", expected):
                raise ValueError(
                    f"{source.path}: {name!r} must be INT8 codes in blocks of {block_size} with "
                    f"F32 scales {expected}, got {info.dtype} {info.shape} and {scales!r}, "
                    f"{of_scales.dtype} {of_scales.shape}"
                )
            found[name] = scales
    if not found:
        raise ValueError(
            f"{source.path} has no weights with scales, X.weight and "
            f"{' or '.join(f'X.{name}' for name in SCALE_NAMES.values())}"
        )
    return found


def quantization_config(
    export: str, block_size: int, layers: Sequence[str], ignore: Sequence[str]
) -> dict[str, Any]:
    """Return what ``config.json`` says of the quantisation.

    Parameters
    ----------
    export : str
        One of `SCALE_NAMES`.
    block_size : int
    layers : sequence of str
        Linear layers whose weights are codes. They are named one by one: readers that see files and
        no model take every ``weight`` for one of a linear layer.
    ignore : sequence of str
        Other linear layers; vLLM wants to be told of each.
    """
    if export == "deepseek":
        return {
            "quant_method": "blockwise_int8",
            "activation_scheme": "dynamic",
            "weight_block_size": [block_size, block_size],
            "ignored_layers": list(ignore),
        }
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    blocks = {"strategy": "block", "block_structure": [block_size, block_size], "dynamic": False}
    activations = {"strategy": "group", "group_size": block_size, "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": list(layers),
                "weights": {**int8, **blocks},
                "input_activations": {**int8, **activations},
            }
        },
        "ignore": list(ignore),
    }


@dataclass(frozen=True)
class Layout:
    """What a model of codes says of itself.

    Parameters
    ----------
    block_size : int
    dtypes : dict of str to str
        The types that tensors had before they were converted, where that is known.
    """

    block_size: int
    dtypes: dict[str, str]


def read_layout(config: dict[str, Any], records: Sequence[str], where: str) -> Layout:
    """Return block size and former types by ``config.json`` and our own records.

    Parameters
    ----------
    config : dict
    records : sequence of str
        JSON, from the strings of each file; none where others wrote them.
    where : str
        The model's name, for messages.

    Raises
    ------
    ValueError
        If a record is damaged or of a later version, or no block size can be found.
    """
    dtypes: dict[str, str] = {}
    sizes = set()
    for text in records:
        try:
            record = json.loads(text)
            if record["version"] > RECORD_VERSION:
                raise ValueError(f"version {record['version']} is later than {RECORD_VERSION}")
            dtypes |= record["dtypes"]
            sizes.add(record["config"]["block_size"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{where}: its record of {RECORD!r} is damaged: {error}") from error
    if not sizes:
        sizes = _block_sizes(config.get(QUANTIZATION))
    if len(sizes) != 1 or not isinstance(size := sizes.pop(), int) or size < 1:
        raise ValueError(
            f"{where}: neither its files nor {QUANTIZATION} in config.json name square blocks, "
            f"e.g. of {BLOCK_SIZE} x {BLOCK_SIZE}"
        )
    return Layout(size, dtypes)


def _block_sizes(config: Any) -> set[Any]:
    """Return what a quantization_config names as the sizes of blocks."""
    try:
        if "weight_block_size" in config:
            return set(config["weight_block_size"])
        groups = config["config_groups"].values()
        return {size for group in groups for size in group["weights"]["block_structure"]}
    except (KeyError, TypeError, AttributeError):
        return set()
