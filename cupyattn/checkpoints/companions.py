"""The small files beside a model's weights: its configuration, and files that are copied along."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cupyattn.checkpoints.shards import Source
from cupyattn.checkpoints.source import INDEX, PICKLES, SAFETENSORS, folder_of
from cupyattn.files import open_regular

#: The file that describes a model, in the convention of transformers and diffusers.
CONFIG = "config.json"
#: Endings of weights in other formats, which are not taken along.
_OTHER_WEIGHTS = (".gguf", ".h5", ".msgpack", ".onnx")


def read_config(source: Source) -> dict[str, Any]:
    """Return the ``config.json`` of a model's folder, an empty dict for a file or if it is missing.

    Raises
    ------
    OSError
        If it cannot be read, or is no regular file.
    ValueError
        If it is no JSON object, or a link out of the folder.
    """
    folder = folder_of(source)
    if folder is None or not os.path.lexists(path := folder / CONFIG):
        return {}
    if _leads_out(path):
        raise ValueError(
            f"{path} is a link out of the folder, to {os.path.realpath(path)}, and its content "
            "would be copied: replace the link by the file"
        )
    try:
        with open_regular(path) as file:
            found = json.loads(file.read())
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no configuration of a model: {error}") from error


def companions(source: Source) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the small files of a model's folder by name, and which entries stay behind and why.

    Small files are tokens, schedules and licences; weights of any format are not among them. Files
    of weights stay behind if an index of their format leaves them out.
    """
    copies: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    folder = folder_of(source)
    if folder is None:
        return copies, left_out
    read = {file.name for file in source.files}
    kinds = tuple({file.suffix for file in source.files})
    weights = (SAFETENSORS, *PICKLES, *_OTHER_WEIGHTS, INDEX, CONFIG)
    for file in sorted(folder.iterdir()):
        if file.name.startswith("."):
            continue
        if file.name.endswith(weights):
            if file.name.endswith(kinds) and file.name not in read:
                left_out[file.name] = "the index of the model does not name it"
            continue
        if _leads_out(file):
            left_out[file.name] = f"it is a link out of the folder, to {os.path.realpath(file)}"
        elif file.is_file():
            copies[file.name] = Path(os.path.realpath(file))
        elif not file.is_dir():
            left_out[file.name] = "it is no regular file"
    return copies, left_out


def _leads_out(file: Path) -> bool:
    """Whether a file is a link to a place outside of its folder.

    A snapshot in the cache of Hugging Face consists of links to the folder ``blobs`` of the same
    model. That folder therefore counts as a part of the snapshot.
    """
    folder, real = Path(os.path.realpath(file.parent)), Path(os.path.realpath(file))
    homes = [folder]
    if folder.parent.name == "snapshots":
        homes.append(folder.parent.parent / "blobs")
    return not any(real.is_relative_to(home) for home in homes)
