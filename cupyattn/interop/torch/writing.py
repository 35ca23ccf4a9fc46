"""Write a model with INT8 layers to a folder that `load_int8` and ``checkpoint=`` read.

The files have the layout of `cupyattn.checkpoints.convert`, so that other readers take them, too.
The folder appears whole or not at all, and is read back before it gets its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cupyattn.checkpoints import layout, writer
from cupyattn.checkpoints.analysis import sha256_of
from cupyattn.checkpoints.header import DTYPES, FLOATS, TensorInfo
from cupyattn.checkpoints.layout import (
    MIXED,
    MIXED_VERSION,
    QUANTIZATION,
    RECORD,
    RECORD_VERSIONS,
    ROTATED_VERSION,
    WEIGHT,
)
from cupyattn.checkpoints.schemes import ROTATION
from cupyattn.checkpoints.writer import MAX_SHARD_BYTES, Item
from cupyattn.errors import UnsupportedError
from cupyattn.interop.handle import uncompiled
from cupyattn.interop.torch.bridge import as_array
from cupyattn.interop.torch.candidates import int8_layers, linear_layers
from cupyattn.interop.torch.linear import CODES, Int8Linear
from cupyattn.interop.torch.offloading import check_not_offloaded
from cupyattn.quant.blocks import Int8Config
from cupyattn.version import __version__

_EXPORT = "compressed-tensors"
_SHORT = {str(dtype): name for name, dtype in DTYPES.items()}
#: Names of the weights' original types in files.
_FORMER = {f"torch.{name}": short for short, name in FLOATS.items()}


def write_int8(
    model: nn.Module, folder: str | os.PathLike[str], advance: Callable[[str], None] | None = None
) -> Path:
    """Write a model with INT8 layers: codes, scales, all other tensors, and its configuration.

    Parameters
    ----------
    model : Module
    folder : path
        Must not exist, or must be empty; its parent folder must exist.
    advance : callable, optional
        Called with the name of each tensor when it was written, and again when it was checked.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    OSError
        If something cannot be written, or `folder` exists.
    ValueError
        If no layer of the model is INT8, or if its weights are offloaded.
    UnsupportedError
        For a model with adapters, because files of a model do not have their names.
    """
    model = uncompiled(model)
    target = Path(os.path.abspath(folder))
    writer.check_target(target)
    check_writable(model)
    work = _Codes(model)
    config = {**_config_of(model), QUANTIZATION: work.quantization_config()}
    plan = writer.plan(work, work.items(), work, config, MAX_SHARD_BYTES)
    writer.write(plan, work, target, advance or (lambda name: None))
    return target


def check_writable(model: nn.Module) -> None:
    """Raise the errors of `write_int8` for the state of a model, before anything is written."""
    check_not_offloaded(model, "remove its hooks, save, then offload again")
    if getattr(model, "peft_config", None):
        raise UnsupportedError(
            f"the {type(model).__name__} has adapters: unload them, save the INT8 codes, and load "
            "the adapters again"
        )


def _config_of(model: Any) -> dict[str, Any]:
    """Return a model's configuration as its library writes it; an empty dict for other modules."""
    if hasattr(model, "to_json_string"):  # diffusers
        return dict(json.loads(model.to_json_string()))
    config: Any = getattr(model, "config", None)
    return dict(config.to_dict()) if hasattr(config, "to_dict") else {}


class _Codes:
    """The tensors of a model in the form of files: both the source and the work of `writer`."""

    def __init__(self, model: nn.Module) -> None:
        layers = dict(int8_layers(model))
        if not layers:
            raise ValueError(
                f"the {type(model).__name__} has no INT8 layers, so there are no codes to write: "
                "replace its layers first"
            )
        self.rotated = any(layer.rotate for layer in layers.values())
        self.dtypes: dict[str, str] = {}
        self.layers: dict[str, list[str]] = {}  # by strategy
        for name, layer in sorted(layers.items(), key=lambda item: (item[1].strategy, item[0])):
            self.layers.setdefault(layer.strategy, []).append(name)
        self.others = sorted(name for name, *_ in linear_layers(model))
        # Which gives its files the name that diffusers looks for.
        self.files: tuple[Path, ...] = (Path("diffusion_pytorch_model.safetensors"),)
        self.path = self.files[0]
        self._tensors = _named_tensors(model, layers)
        for name, layer in layers.items():
            former = _FORMER.get(str(layer.weight_dtype))
            if former is not None:
                self.dtypes[f"{name}{WEIGHT}"] = former
        self.tensors = {name: _info(x) for name, x in self._tensors.items()}
        self._digests: dict[str, str] = {}

    def file_of(self, name: str) -> Path:
        return self.files[0]

    def read(self, name: str) -> Any:
        return as_array(self._tensors[name].detach().to("cpu").contiguous())

    def items(self) -> list[Item]:
        return [Item(name, {name: info}) for name, info in self.tensors.items()]

    def quantization_config(self) -> dict[str, Any]:
        return layout.quantization_config(
            _EXPORT, Int8Config().block_size, self.layers, self.others, rotated=self.rotated
        )

    def metadata(self, items: Sequence[Item]) -> dict[str, str]:
        strategy = MIXED if len(self.layers) > 1 else next(iter(self.layers))
        config = {**asdict(Int8Config()), "strategy": strategy}
        version = MIXED_VERSION if strategy == MIXED else RECORD_VERSIONS[strategy]
        if strategy == "block":  # the record of version 1
            del config["strategy"]
        if not self.rotated:
            del config["rotate"]
        names = {item.name for item in items}
        record = {
            "version": max(version, ROTATED_VERSION if self.rotated else 0),
            "tool": f"cupyattn {__version__}",
            "export": _EXPORT, "config": config, "source_sha256": self.sha256(names),
            "dtypes": {name: x for name, x in self.dtypes.items() if name in names},
        }  # fmt: skip
        marks = {name for name in names if name.endswith(f".{ROTATION}")}
        if marks:
            record["rotated"] = sorted(name.removesuffix(ROTATION) + "weight" for name in marks)
        return {RECORD: json.dumps(record, sort_keys=True, separators=(",", ":"))}

    def sha256(self, names: set[str]) -> str:
        """Return a hash of tensors, by which an interrupted run recognises its files."""
        digest = hashlib.sha256()
        for name in sorted(names):
            self._digests[name] = sha256_of(self.read(name))
            digest.update(self._digests[name].encode())
        return digest.hexdigest()

    def make(self, item: Item) -> dict[str, Any]:
        return {item.name: self.read(item.name)}

    def check(self, item: Item, found: Mapping[str, Any]) -> str | None:
        # NOTE: by the hash, so that a device is read once for that and once to write.
        same = sha256_of(found[item.name]) == self._digests[item.name]
        return None if same else "its bytes changed while it was written"


def _named_tensors(model: nn.Module, layers: Mapping[str, Int8Linear]) -> dict[str, Tensor]:
    """Return the tensors of a state dict: codes under ``weight``, tied tensors once."""
    codes = {f"{name}.{CODES}": f"{name}{WEIGHT}" for name in layers}
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, x in model.state_dict(keep_vars=True).items():
        if id(x) not in seen:
            found[codes.get(name, name)] = x
            seen.add(id(x))
    return found


def _info(x: Tensor) -> TensorInfo:
    array = as_array(x.detach()[:0].cpu()) if x.ndim else as_array(x.detach().cpu())
    return TensorInfo(_SHORT[str(array.dtype)], tuple(x.shape))
