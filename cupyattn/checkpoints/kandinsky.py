"""Kandinsky 5: the transformer found among a pipeline's parts, described, and written as INT8.

Its publishers' files and diffusers' `Kandinsky5Transformer3DModel` have the same names. Attention's
own settings (NABLA's share of probability, STA's windows) stand in diffusers' ``config.json``, or
in the YAML file that goes with the publishers' files.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cupyattn.checkpoints.companions import read_config
from cupyattn.checkpoints.conversion import Advance, Conversion, convert
from cupyattn.checkpoints.shards import Source
from cupyattn.checkpoints.source import SAFETENSORS, open_checkpoint
from cupyattn.checkpoints.writer import MAX_SHARD_BYTES
from cupyattn.errors import UnsupportedError
from cupyattn.files import open_regular
from cupyattn.quant.blocks import Int8Config

#: Folders of a pipeline that may hold the transformer: diffusers', and the publishers'.
_FOLDERS = ("transformer", "model")
_BLOCK = re.compile(r"^(text|visual)_transformer_blocks\.(\d+)\.(.+)$")
_ATTENTION = [f"{x}.weight" for x in ("to_query", "to_key", "to_value", "out_layer", "query_norm")]
_FEED_FORWARD = ["feed_forward.in_layer.weight", "feed_forward.out_layer.weight"]
#: Tensors that every block has. Other tensors (biases) are optional.
_PARTS = {
    "text": {
        "text_modulation.out_layer.weight", *_FEED_FORWARD,
        *(f"self_attention.{name}" for name in _ATTENTION),
    },
    "visual": {
        "visual_modulation.out_layer.weight", *_FEED_FORWARD,
        *(f"{kind}_attention.{name}" for kind in ("self", "cross") for name in _ATTENTION),
    },
}  # fmt: skip
#: Sizes that have names: model_dim, ff_dim.
_NAMES = {(1792, 7168): "Lite", (4096, 16384): "Pro"}


@dataclass(frozen=True)
class KandinskyModel:
    """Sizes of a transformer from the names and shapes of its tensors and its configuration.

    Parameters
    ----------
    text_blocks, visual_blocks : int
    model_dim, ff_dim, time_dim, head_dim : int
    attention : dict
        ``type`` ("regular", "nabla"), ``P``, ``wT``, ``wH``, ``wW``, ``add_sta``, ``method`` and
        whatever else a configuration names; empty where there is none.
    """

    text_blocks: int
    visual_blocks: int
    model_dim: int
    ff_dim: int
    time_dim: int
    head_dim: int
    attention: dict[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        """Query heads of each attention."""
        return self.model_dim // self.head_dim

    def __str__(self) -> str:
        name = _NAMES.get((self.model_dim, self.ff_dim))
        attention = ", ".join(f"{key} {value}" for key, value in self.attention.items())
        return (
            f"Kandinsky 5{f' {name}' if name else ''}: {self.text_blocks} text and "
            f"{self.visual_blocks} visual blocks, model_dim {self.model_dim}, "
            f"ff_dim {self.ff_dim}, {self.heads} heads of {self.head_dim}; "
            f"attention: {attention or 'not configured'}"
        )


def open_kandinsky(
    model_path: str | os.PathLike[str], config_path: str | os.PathLike[str] | None = None
) -> tuple[Source, KandinskyModel]:
    """Find and describe the transformer of Kandinsky 5.

    Parameters
    ----------
    model_path : path
        Its file or folder, or the folder of a pipeline, of whose other parts nothing is read.
    config_path : path, optional
        YAML of the publishers or JSON of diffusers. Where `model_path` holds several files it says
        which one. When omitted: the ``config.json`` beside the weights, if there is one.

    Returns
    -------
    Source, KandinskyModel

    Raises
    ------
    OSError, ValueError
        If there is none, or the configuration is of another model.
    UnsupportedError
        For YAML where PyYAML is not installed.
    """
    if not os.fspath(model_path):
        raise ValueError("model_path must be a path, got ''")
    given = _read(Path(config_path)) if config_path is not None else {}
    source = open_checkpoint(_transformer(Path(model_path), given))
    return source, describe(source, given or read_config(source))


def optimize_kandinsky(
    model_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    config_path: str | os.PathLike[str] | None = None,
    config: Int8Config | None = None,
    *,
    export: str = "compressed-tensors",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dry_run: bool = False,
    advance: Advance | None = None,
) -> tuple[KandinskyModel, Conversion]:
    """Write the transformer of Kandinsky 5 with INT8 weights, and nothing of its VAE and encoders.

    Parameters
    ----------
    model_path, config_path
        As for `open_kandinsky`.
    output_path : path
        A folder that does not exist, or is empty; it gets the transformer.
    config, export, max_shard_bytes, dry_run, advance
        As for `convert`.

    Returns
    -------
    KandinskyModel
        It is also in the record of the files.
    Conversion

    Raises
    ------
    OSError, ValueError, UnsupportedError
        As `open_kandinsky` and `convert`.
    """
    source, found = open_kandinsky(model_path, config_path)
    done = convert(
        source, output_path, config, export=export, max_shard_bytes=max_shard_bytes,
        dry_run=dry_run, advance=advance, notes={"kandinsky": asdict(found)},
    )  # fmt: skip
    return found, done


def describe(source: Source, config: dict[str, Any]) -> KandinskyModel:
    """Return a description of a model from names, shapes and a configuration.

    Raises
    ------
    ValueError
        If it is no Kandinsky 5, blocks are incomplete, or the configuration is of another model.
    """
    parts: dict[str, dict[int, set[str]]] = {"text": defaultdict(set), "visual": defaultdict(set)}
    for name in source.tensors:
        matched = _BLOCK.match(name)
        if matched:
            parts[matched[1]][int(matched[2])].add(matched[3])
    for kind, blocks in parts.items():
        if not blocks:
            raise ValueError(
                f"{source.path} holds no transformer of Kandinsky 5: no tensor is called "
                f"{kind}_transformer_blocks.0.*"
            )
        for i in range(max(blocks) + 1):
            missing = sorted(_PARTS[kind] - blocks.get(i, set()))
            if missing:
                raise ValueError(
                    f"{source.path}: {kind}_transformer_blocks.{i} has no {missing[0]}"
                )
    first = "visual_transformer_blocks.0"
    ff_dim, model_dim = _shape(source, f"{first}.feed_forward.in_layer.weight", 2)
    _, time_dim = _shape(source, f"{first}.visual_modulation.out_layer.weight", 2)
    (head_dim,) = _shape(source, f"{first}.self_attention.query_norm.weight", 1)
    found = KandinskyModel(
        len(parts["text"]), len(parts["visual"]), model_dim, ff_dim, time_dim, head_dim,
        _attention(config),
    )  # fmt: skip
    _check_sizes(source, found, config)
    return found


def _shape(source: Source, name: str, axes: int) -> tuple[int, ...]:
    shape = source.tensors[name].shape
    if len(shape) != axes or 0 in shape:
        raise ValueError(f"{source.path}: {name!r} must have {axes} axes, got shape {shape}")
    return shape


def _attention(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of attention, by the publishers' names."""
    theirs = config.get("model", {}).get("attention") if "model" in config else None
    if isinstance(theirs, dict):
        return dict(theirs)
    start = "attention_"
    return {
        name.removeprefix(start): value
        for name, value in config.items()
        if name.startswith(start) and value is not None
    }


def _check_sizes(source: Source, found: KandinskyModel, config: dict[str, Any]) -> None:
    """Raise unless a configuration names the sizes that the tensors have."""
    said = config.get("model", {}).get("dit_params", {}) if "model" in config else config
    for name, size in (
        ("num_text_blocks", found.text_blocks),
        ("num_visual_blocks", found.visual_blocks),
        ("model_dim", found.model_dim),
        ("ff_dim", found.ff_dim),
        ("time_dim", found.time_dim),
    ):
        if said.get(name, size) != size:
            raise ValueError(
                f"the configuration is of another model than {source.path}: it says {name} "
                f"{said[name]!r}, the tensors {size}"
            )


def _read(path: Path) -> dict[str, Any]:
    """Read a configuration, YAML or JSON; nothing that YAML names is built but plain data."""
    try:
        with open_regular(path) as file:
            text = file.read()
        if path.suffix == ".json":
            found = json.loads(text)
        else:
            yaml = importlib.import_module("yaml")
            try:
                found = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(str(error)) from error
        model = found.get("model", {})
        if not isinstance(model, dict) or not isinstance(model.get("dit_params", {}), dict):
            raise ValueError("its model is no mapping")
    except ImportError as error:
        raise UnsupportedError(
            f"{path} needs PyYAML: pip install pyyaml (the extra cli has it), or save it as JSON"
        ) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no configuration of Kandinsky 5: {error}") from error
    return dict(found)


def _transformer(path: Path, config: dict[str, Any]) -> Path:
    """Return the file or folder of the transformer, of a pipeline's folder where it is one."""
    if not path.is_dir():
        return path
    named = Path(str(config.get("model", {}).get("checkpoint_path", ""))).name
    folders = (path, *(path / name for name in _FOLDERS))
    for folder in folders:
        if named.endswith(SAFETENSORS) and (folder / named).is_file():
            return folder / named
    for folder in folders:
        if any(folder.glob(f"*{SAFETENSORS}")):
            return folder
    return path
