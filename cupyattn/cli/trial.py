"""Run your pipeline native and accelerated in turns, and compare time, memory and quality.

FILE.py:NAME is a function without arguments that returns the pipeline (or a model) and the
arguments of its call: ``def flux(): return pipe, {"prompt": "a cat", "num_inference_steps": 28}``.
Each run is recorded when it ends, so the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from cupyattn.cli import flags, output
from cupyattn.errors import UnsupportedError
from cupyattn.files import check_folder
from cupyattn.interop.handle import target_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("function", metavar="FILE.py:NAME", help="returns a pipeline and a call")
    parser.add_argument("--accuracy", choices=("full", "balanced", "aggressive"), default="full",
                        help="class of attention (full: 16 bits)")  # fmt: skip
    parser.add_argument("--compile", choices=("blocks", "graphs", "off"), default="blocks",
                        help="compilation of all models, native ones, too (blocks)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, metavar="N",
                        help="timed runs of each way (7)")  # fmt: skip
    parser.add_argument("--checkpoint", metavar="DIR", help="INT8 codes, in place of quantising")
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
    check_folder("--html", page)
    accelerate = accelerate_of(target)
    handle = accelerate(
        target, args.accuracy, compile=False if args.compile == "off" else args.compile,
        checkpoint=args.checkpoint, log=output.say,
    )  # fmt: skip
    try:
        _check_call(handle, call)
        found = handle.compare(
            rounds=args.rounds, record=record, page=page, seed=args.seed, log=_progress, **call
        )
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        is_of_call, below = _below_the_call(error)
        if not (is_of_call or isinstance(error, KeyboardInterrupt)):
            raise
        if record.exists():
            _progress(f"{record} has the runs so far: the same command continues after them")
        if isinstance(error, KeyboardInterrupt):
            raise
        _say_traceback(error, below, args.function.rpartition(":")[0])
        is_memory = "out of memory" in str(error)
        raise ValueError(
            f"the call of {name}() failed: {_named(error)}"
            + ": native weights and codes must fit on the device together" * is_memory
        ) from error
    finally:
        handle.restore()
    output.say(found)
    output.say(f"Wrote {record} and {page}")
    return 0


def _progress(line: str) -> None:
    output.say(line, flush=True, error=True)


def _check_call(handle: Any, call: Mapping[str, Any]) -> None:
    """Raise ValueError if nothing can be compared, or a call has arguments of `compare` itself."""
    report = handle.report()
    if not report.layers and report.attention is None:
        raise ValueError(
            f"nothing of the {type(handle.target).__name__} was replaced, so that there is nothing "
            "to compare: the line \"left native\" says why"
        )
    own = inspect.signature(handle.compare).parameters.values()
    options = {one.name for one in own if one.kind is one.KEYWORD_ONLY}
    if taken := sorted(options & call.keys()):
        raise ValueError(
            f"the call has {taken[0]!r}, which is an argument of the comparison: leave it out, and "
            "give it as an option of the command if there is one"
        )


def given(text: str) -> tuple[str, Any, dict[str, Any]]:
    """Return name, pipeline and arguments of ``FILE.py:NAME``.

    Raises
    ------
    ValueError
        If it has another form, if the file has no such function, or if that needs arguments or
        returns something else; also for any exception in the file, whose traceback is printed.
    OSError
        If the file cannot be read.
    """
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name:
        raise ValueError(f"give FILE.py:NAME, a function of a file, got {text!r}")
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no file {file!r}")
    module = _loaded(Path(file))
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            n for n, x in vars(module).items()
            if inspect.isfunction(x) and x.__module__ == module.__name__
        ]  # fmt: skip
        has = f": it has {', '.join(own)}" if own else ""
        raise ValueError(f"{file} has no function {name!r}{has}")
    if needed := _needed(function):
        raise ValueError(
            f"{name} of {file} must be a function without arguments, and needs {needed}: write "
            f"one that calls {name}(...) with them"
        )
    made = _called(function, file)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        raise ValueError(
            f"{name}() of {file} must return a pipeline and a dict, the arguments of its call, got "
            f"{type(made).__name__}"
        )
    if wrong := [key for key in made[1] if not isinstance(key, str)]:
        raise ValueError(
            f"the dict that {name}() of {file} returns must have names of arguments as keys, got "
            f"{wrong[0]!r}"
        )
    return name, target_of(made[0]), dict(made[1])


def _loaded(file: Path) -> Any:
    """Return a file as a module, which may import modules from its folder."""
    spec = importlib.util.spec_from_file_location(f"cupyattn_trial_of_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    sys.path.insert(0, str(file.parent.resolve()))
    load = spec.loader.exec_module
    _called(lambda: load(module), str(file))
    return module


def _needed(function: Callable[..., Any]) -> str:
    """Return the arguments without a default that a function takes, in words."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function in C
        return ""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(
        p.name for p in parameters if p.default is p.empty and p.kind not in optional
    )


def _called(function: Callable[[], Any], file: str) -> Any:
    """Call a function of a file; its exceptions become a ValueError with the line."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        _say_traceback(error, None, file)
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__)
            if _is_file(frame.filename, file)
        ]  # fmt: skip
        where = f"{file}, line {lines[-1]}" if lines else file
        raise ValueError(f"{where}: {_named(error)}") from error


# ---- the caller's errors -------------------------------------------------------------------------


def _named(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _say_traceback(error: BaseException, below: TracebackType | None, file: str) -> None:
    """Print an exception without the frames of this command.

    Parameters
    ----------
    error : BaseException
    below : traceback or None
        Frames to print if none of them is in the file.
    file : str
        The caller's file, from whose first frame on all frames are printed.
    """
    shown = _within(error.__traceback__ if below is None else below, file) or below
    text = traceback.TracebackException(type(error), error, shown).format()
    output.say("".join(text).rstrip(), flush=True, error=True)


def _within(found: TracebackType | None, file: str) -> TracebackType | None:
    """Return a traceback from its first frame in a file on; None if no frame is there."""
    while found is not None and not _is_file(found.tb_frame.f_code.co_filename, file):
        found = found.tb_next
    return found


def _is_file(given: str, file: str) -> bool:
    return Path(given).resolve() == Path(file).resolve()


def _below_the_call(error: BaseException) -> tuple[bool, TracebackType | None]:
    """Return whether the call of the pipeline raised an exception, and the frames below it."""
    from cupyattn.interop.torch.comparing import called

    found = error.__traceback__
    while found is not None and found.tb_frame.f_code is not called.__code__:
        found = found.tb_next
    return found is not None, None if found is None else found.tb_next


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
