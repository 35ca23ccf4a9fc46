"""Predict the gain of INT8 layers and attention in a diffusion transformer, without running it.

MODEL_OR_CONFIG is the folder or file of a transformer, of which only the header is read, or a
config.json of diffusers, which pipe.transformer.save_config(FOLDER) writes. The rates were fitted
to compiled whole models and predict device time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.cli import flags, output
from cupyattn.diffusion import advice
from cupyattn.diffusion.work import describes, work_of
from cupyattn.errors import UnsupportedError
from cupyattn.measure import whole_gains
from cupyattn.measure.timing import FASTER, judged
from cupyattn.measure.words import format_seconds

_CONFIG, _PIPELINE = "config.json", "model_index.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("model", metavar="MODEL_OR_CONFIG", type=Path)
    parser.add_argument("--tokens", type=int, required=True, metavar="N",
                        help="patches of the picture or video: 4096 for 1024 x 1024, 32760 for "
                             "81 frames of 832 x 480 in Wan 2.1; audio is left out")  # fmt: skip
    parser.add_argument("--prompt", type=int, default=512, metavar="N",
                        help="tokens of the prompt (512)")  # fmt: skip
    devices = tuple(advice.stored_rates())
    parser.add_argument("--device", type=str.lower, choices=devices, default="h200",
                        help="whose rates (h200)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "tokens", "prompt")
    shapes, config = described(args.model)
    work = work_of(shapes, config, args.tokens, args.prompt)
    known = whole_gains.nearest(str(config.get("_class_name", "")), work.width)
    output.say(describes(work))
    found: dict[str, Any] = {"tokens": args.tokens, "prompt": args.prompt, "device": args.device}
    found["left_out"] = dict(zip(("layers", "modules"), work.left_out, strict=True))
    table = []
    for accuracy in ("full", "balanced", "aggressive"):
        said = advice.advise(work, args.tokens, accuracy, args.device)
        if accuracy == "full":
            found |= {"seconds": said.seconds, "refusal": said.refusal}
            if said.refusal:
                output.say(
                    f"No advice: {said.refusal}; measure with accelerate(pipe).compare(...) or "
                    "cupyattn trial"
                )
        found[accuracy] = advice.as_rows(said)
        for row in found[accuracy]:
            table.append([accuracy, row["part"], f"{row['gain']:.2f}", _word(row, said.refusal)])
    if not found["refusal"]:
        output.say(
            f"On an {args.device.upper()} a compiled native pass of {args.tokens:,} tokens, beside "
            f"{args.prompt:,} of the prompt, takes {format_seconds(found['seconds'])}\n"
            "Accuracy is the arithmetic of attention: 16 bits, INT8, or INT8 with 8-bit P.V"
        )
        output.print_table(["accuracy", "part", "times as fast", "advice"], table)
        for line in notes(found, known):
            output.say(line)
        output.say("Next: accelerate(pipe, accuracy), then pipe.compare(...) or cupyattn trial")
    if args.json:
        output.write_json(args.json, found)
    return 0


def _word(row: dict[str, Any], refusal: str) -> str:
    return "-" if refusal else "replace" if row["replace"] else "leave native: too little to tell"


def notes(found: dict[str, Any], known: whole_gains.WholeModel | None) -> list[str]:
    """Return notes to print with the table."""
    lines = []
    if known is None:
        lines.append("No such model was measured whole, so the error of this prediction is unknown")
    else:
        for how in known.gains:
            gains = (known.gain("both", name, how) for name in ("full", "balanced", "aggressive"))
            said = ", ".join(f"{gain.median:.2f}" for gain in gains)
            lines.append(
                f"Measured with {how} in a whole {known.name} of {known.tokens:,} tokens on an "
                f"{known.device}, both, by accuracy: {said}"
            )
    slow = known is not None and judged(known.gain("linear", "full")) != FASTER
    fast = found["seconds"] / found["full"][-1]["gain"] < advice.HOST_SECONDS
    if slow or fast:
        lines.append(
            "The host may take longer than the device for so short a pass: "
            "accelerate(..., compile='graphs')"
        )
    return lines


def described(model: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes of a model's tensors and its configuration.

    Raises
    ------
    OSError, ValueError
        If there is no model, or no ``config.json`` in its folder.
    UnsupportedError
        For a configuration without weights if diffusers is missing.
    """
    if not model.exists():
        raise FileNotFoundError(
            f"there is no {str(model)!r}: give the folder of a transformer of diffusers, or its "
            f"{_CONFIG}, which pipe.transformer.save_config(FOLDER) writes"
        )
    folder = model if model.is_dir() else model.parent
    file = model if model.name.endswith(".json") else folder / _CONFIG
    if (folder / _PIPELINE).is_file() and (model.name == _PIPELINE or not file.is_file()):
        found = sorted(f"{one.parent}" for one in folder.glob(f"transformer*/{_CONFIG}"))
        raise ValueError(
            f"{str(folder)!r} is the folder of a pipeline: give the folder of a model in it, "
            f"{' or '.join(found) or 'which has a config.json'}"
        )
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no {_CONFIG} in {str(folder)!r}: give the folder of a transformer of "
            "diffusers, or its config.json"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no configuration of a model: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is no configuration of a model: it holds no object")
    if model.is_file() and model != file or any(folder.glob("*.safetensors")):
        tensors = open_checkpoint(folder if model == file else model).tensors
        return {name: info.shape for name, info in tensors.items()}, config
    return _made(config, file), config


def _made(config: dict[str, Any], file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model of diffusers, made from its configuration without memory."""
    try:
        import diffusers
        import torch
    except ImportError as error:
        raise UnsupportedError(
            f"{file} has no weights beside it, so that its model is made by diffusers ({error}): "
            "pip install torch diffusers, or give the folder with the weights"
        ) from error
    cls: Any = getattr(diffusers, str(config.get("_class_name")), None)
    is_model = isinstance(cls, type) and issubclass(cls, torch.nn.Module)
    if not (is_model and hasattr(cls, "from_config")):
        raise ValueError(f"{file}: _class_name must be a model of diffusers, got "
                         f"{config.get('_class_name')!r}")  # fmt: skip
    try:
        with torch.device("meta"):
            made = cls.from_config(config)
    except Exception as error:  # diffusers checks no configuration
        raise ValueError(
            f"{file}: diffusers makes no {cls.__name__} of it: {type(error).__name__}: {error}"
        ) from error
    config.update({name: value for name, value in made.config.items() if name not in config})
    return {name: tuple(x.shape) for name, x in made.state_dict().items()}
