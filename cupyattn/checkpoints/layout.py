"""Names and descriptions of INT8 weights in files that other libraries read.

``compressed-tensors`` is the format of that library (0.20: `int-quantized`, strategy `block`),
which vLLM and transformers read. ``deepseek`` has the names of DeepSeek's files, which SGLang
reads as `blockwise_int8`. In both a weight is ``codes * scale``: `weight_scale_inv` is no inverse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cupyattn.checkpoints.schemes import (
    METHOD,
    OWN_METHOD,
    Scheme,
    by_channel,
    read_schemes,
    square,
)

#: Suffixes of the names of scales, by export.
SCALE_NAMES = {"compressed-tensors": "weight_scale", "deepseek": "weight_scale_inv"}
WEIGHT = ".weight"
QUANTIZATION = "quantization_config"
#: The name of our record among a file's strings, and its versions by the groups that share a scale.
#: Readers of the first version alone know only blocks. Files with rotated weights have a version,
#: and files with both strategies, whose layers ``config.json`` names by strategy.
RECORD, RECORD_VERSIONS = "cupyattn", {"block": 1, "channel": 2}
ROTATED_VERSION, MIXED_VERSION = 3, 4
MIXED = "mixed"
#: Bytes of the tensor that says how a weight is rotated (`cupyattn.quant.rotation.marker`), I32.
MARKER_BYTES = 8


def scale_name(weight: str, export: str) -> str:
    """Return the name of a weight's scales.

    Examples
    --------
    >>> scale_name("blocks.0.fc.weight", "compressed-tensors")
    'blocks.0.fc.weight_scale'
    """
    return f"{weight.removesuffix(WEIGHT)}.{SCALE_NAMES[export]}"


def quantization_config(
    export: str,
    block_size: int,
    layers: Mapping[str, Sequence[str]],
    ignore: Sequence[str],
    *,
    rotated: bool = False,
) -> dict[str, Any]:
    """Return the quantisation settings in ``config.json``.

    Parameters
    ----------
    export : str
        One of `SCALE_NAMES`.
    block_size : int
    layers : mapping of str to sequence of str
        Linear layers whose weights are codes, by the groups that share a scale, ``"block"`` or
        ``"channel"``; ``"deepseek"`` has a name for blocks alone. They are named one by one:
        readers that see files and no model take every ``weight`` for one of a linear layer.
    ignore : sequence of str
        Other linear layers; vLLM wants to be told of each.
    rotated : bool
        Whether some weights are rotated. The method then has a name of this library, since readers
        that do not rotate activations must not take the codes for codes of plain weights.
    """
    if export == "deepseek":
        return {
            "quant_method": "blockwise_int8",
            "activation_scheme": "dynamic",
            "weight_block_size": [block_size, block_size],
            "ignored_layers": list(ignore),
        }
    return {
        "quant_method": OWN_METHOD if rotated else METHOD,
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": _group(strategy, block_size, names)
            for i, (strategy, names) in enumerate(layers.items())
        },
        "ignore": list(ignore),
    }


def _group(strategy: str, block_size: int, layers: Sequence[str]) -> dict[str, Any]:
    """Return the group of ``config.json`` for layers of one strategy."""
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    weights: dict[str, Any] = {"strategy": "channel"}
    activations: dict[str, Any] = {"strategy": "token"}
    if strategy == "block":
        weights = {"strategy": "block", "block_structure": [block_size, block_size]}
        activations = {"strategy": "group", "group_size": block_size}
    return {
        "targets": list(layers),
        "weights": {**int8, **weights, "dynamic": False},
        "input_activations": {**int8, **activations, "dynamic": True},
    }


@dataclass(frozen=True)
class Layout:
    """Layout of a model of codes, as its files describe it.

    Parameters
    ----------
    schemes : tuple of Scheme
        How weights are stored; empty where nothing says it.
    dtypes : dict of str to str
        The types that tensors had before they were converted, where that is known.
    ours : bool
        Whether `convert` wrote the model.
    rotated : frozenset of str
        Weights that its files say are rotated.
    """

    schemes: tuple[Scheme, ...]
    dtypes: dict[str, str]
    ours: bool
    rotated: frozenset[str] = frozenset()


def read_layout(config: dict[str, Any], records: Sequence[str], where: str) -> Layout:
    """Return schemes and former types by ``config.json`` and our own records.

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
        If a record or a setting is damaged, or a record is of a later version.
    UnsupportedError
        As `read_schemes`.
    """
    dtypes: dict[str, str] = {}
    stored, rotated = set(), set()
    for text in records:
        try:
            record = json.loads(text)
            if record["version"] > MIXED_VERSION:
                raise ValueError(f"version {record['version']} is later than {MIXED_VERSION}")
            dtypes |= record["dtypes"]
            if not all(isinstance(x, str) for x in dtypes.values()):
                raise ValueError("its types are no names")
            rotated |= {*record.get("rotated", ())}
            config_of = record["config"]
            stored.add((config_of["block_size"], config_of.get("strategy", "block")))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{where}: its record of {RECORD!r} is damaged: {error}") from error
    if not records:
        return Layout(read_schemes(config.get(QUANTIZATION), where), dtypes, ours=False)
    if len(strategies := {strategy for _, strategy in stored}) > 1:
        names = " and ".join(sorted(map(str, strategies)))
        raise ValueError(f"{where}: its files mix the strategies {names}: convert the model again")
    size, strategy = stored.pop()
    if stored or type(size) is not int or size < 1:
        raise ValueError(f"{where}: its record of {RECORD!r} is damaged: it names no block_size")
    if strategy == MIXED:
        schemes = read_schemes(config.get(QUANTIZATION), where)
        return Layout(schemes, dtypes, ours=True, rotated=frozenset(rotated))
    if strategy not in RECORD_VERSIONS:
        raise ValueError(f"{where}: its record of {RECORD!r} is damaged: strategy {strategy!r:.40}")
    scheme = by_channel() if strategy == "channel" else square(size)
    # config.json may have been edited since: its settings of activations hold.
    asked = [one.activations for one in read_schemes(config.get(QUANTIZATION), where)]
    activations = next(filter(None, asked), "")
    scheme = replace(scheme, activations=activations)
    return Layout((scheme,), dtypes, ours=True, rotated=frozenset(rotated))
