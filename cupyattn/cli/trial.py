"""Run a pipeline of your own native and accelerated in turns: time, memory, quality.

FILE.py:NAME is a function without arguments that returns the pipeline (or a model) and the
arguments of its call: ``def flux(): return pipe, {"prompt": "a cat", "num_inference_steps": 28}``.
Each run is written to the record when it ends: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cupyattn.cli import flags, output
from cupyattn.errors import UnsupportedError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("function", metavar="FILE.py:NAME", help="returns a pipeline and a call")
    parser.add_argument("--accuracy", choices=("full", "balanced", "aggressive"), default="full",
                        help="class of attention (full: 16 bits)")  # fmt: skip
    parser.add_argument("--compile", choices=("blocks", "graphs", "off"), default="blocks",
                        help="how models are compiled, native ones, too (blocks)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, metavar="N",
                        help="runs of each way that are timed (7)")  # fmt: skip
    parser.add_argument("--checkpoint", metavar="DIR", help="INT8 codes: nothing is quantised")
    parser.add_argument("--seed", type=int, default=0, help="of each run's generator (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record (NAME.trial.json)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the page (NAME.trial.html)")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "rounds")
    flags.check_whole(args, "seed", least=0)
    name, target, call = given(args.function)
    record = args.json or Path(f"{name}.trial.json")
    page = args.html or Path(f"{name}.trial.html")
    accelerate = accelerate_of(target)
    handle = accelerate(
        target, args.accuracy, compile=False if args.compile == "off" else args.compile,
        checkpoint=args.checkpoint, log=output.say,
    )  # fmt: skip
    try:
        found = handle.compare(
            rounds=args.rounds, record=record, page=page, seed=args.seed, log=_progress, **call
        )
    finally:
        handle.restore()
    output.say(found)
    output.say(f"Wrote {record} and {page}")
    return 0


def _progress(line: str) -> None:
    output.say(line, flush=True, error=True)


def given(text: str) -> tuple[str, Any, dict[str, Any]]:
    """Return name, pipeline and arguments of ``FILE.py:NAME``.

    Raises
    ------
    ValueError
        If it is not of that form, the file has no such function, or it returns something else.
    OSError
        If the file cannot be read.
    """
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name:
        raise ValueError(f"give FILE.py:NAME, a function of a file, got {text!r}")
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no file {file!r}")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{file} has no function {name!r}")
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        raise ValueError(
            f"{name}() of {file} must return a pipeline and a dict, the arguments of its call, got "
            f"{type(made).__name__}"
        )
    return name, made[0], dict(made[1])


def accelerate_of(target: Any) -> Any:
    """Return `accelerate` for pipelines and models of diffusers, or for other modules."""
    if any(cls.__module__.partition(".")[0] == "diffusers" for cls in type(target).__mro__):
        from cupyattn.interop.diffusers import accelerate

        return accelerate
    try:
        from cupyattn.interop import torch as interop
    except ImportError as error:
        raise UnsupportedError(f"this needs torch ({error}): pip install torch") from error
    return interop.accelerate
