"""The `cupyattn` command: one module for each sub-command, imported when it is needed."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

from cupyattn.cli.flags import check_outputs
from cupyattn.errors import KernelCompileError, KernelLaunchError, UnsupportedError
from cupyattn.files import check_folder
from cupyattn.measure.words import printable
from cupyattn.switches import is_on
from cupyattn.version import __version__

#: Sub-commands with their lines in ``cupyattn --help``; each is a module of this package with
#: ``configure(parser)`` and ``run(args) -> exit status``.
COMMANDS = {
    "ladder": "every rung on one input: error against its bound, time, memory",
    "ablate": "every rung and every choice of INT8 arithmetic on one input: error, bound, time",
    "compare": "two records of one experiment side by side: faster, slower, same, undecided",
    "report": "records as one page of HTML: bars of times, tables of numbers",
    "verify": "compare the rungs with float64 on every distribution; exit status 1 if one fails",
    "profile": "run one rung for a profiler: time, energy, NVTX range, Nsight Compute",
    "plan": "predict launches, scratch memory and memory of a call, on one device or several",
    "interpret": "run one rung without a device: findings, instructions, bytes, bank conflicts",
    "judge": "check any function for attention against its error bound, on drawn problems",
    "mutate": "plant faults in a CUDA source, one at a time, and see which your test notices",
    "advise": "predict the gain of INT8 in a diffusion transformer, from shapes and stored rates",
    "trial": "run your pipeline native and accelerated in turns: time, memory, pictures",
    "analyze": "predict the effect of INT8 on a model's weights, and the saved memory",
    "convert": "write a checkpoint whose large linear layers have INT8 weights",
    "dequantize": "convert an INT8 checkpoint to one that every loader reads",
    "kandinsky": "write the transformer of Kandinsky 5 with INT8 weights",
    "calibrate": "static INT8 scales for each layer of a recorded model",
    "benchmark": "time the linear layers of a checkpoint in 16 bits and as INT8",
    "info": "device, driver, NVRTC, supported architectures, folders",
    "cache": "show, clear or fill the cache of compiled kernels",
    "docs": "print a page of the documentation, or the docstring of a public name",
}
#: Pages of ``cupyattn docs`` that explain more than a command's help.
PAGES = {
    "ladder": "ladder", "ablate": "performance", "verify": "testing", "judge": "your_kernel",
    "trial": "pipelines", "mutate": "your_kernel",
    "interpret": "interpreter", "advise": "interop", "analyze": "checkpoints",
    "convert": "checkpoints", "dequantize": "checkpoints", "kandinsky": "checkpoints",
    "calibrate": "calibration", "plan": "distributed", "info": "limits",
}  # fmt: skip
#: Exceptions that a user can cause. They print one line without a traceback; the exit status is 2.
USER_ERRORS = (
    ValueError, TypeError, OSError, MemoryError, UnsupportedError, KernelCompileError,
    KernelLaunchError,
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Reports an invalid argument in one line, and names the help."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        unknown = re.match("argument COMMAND: invalid choice: '([^']*)'", message)
        if unknown:
            near = difflib.get_close_matches(unknown[1], COMMANDS, 1)
            guess = f", did you mean {near[0]}?" if near else ""
            message = f"there is no command {unknown[1]!r}{guess}"
        said = printable(" ".join(message.split()))
        self.exit(2, f"{self.prog}: {said} (see {self.prog} --help)\n")


def parser(arguments: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of a command line, with options of only the commands in it."""
    top = _Parser(
        prog="cupyattn",
        description="Attention kernels for CuPy and NumPy, checked against derived bounds.",
        epilog="cupyattn docs lists pages on all of this, and cupyattn docs TOPIC prints one.",
    )
    top.add_argument("--version", action="version", version=f"cupyattn {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in arguments:
            module = importlib.import_module(f"cupyattn.cli.{name}")
            command.description = module.__doc__
            module.configure(command)
            if name in PAGES:
                command.epilog = f"cupyattn docs {PAGES[name]} explains more."
    return top


def unknown_arguments(unknown: Sequence[str]) -> str:
    """Return the message for unknown arguments, with their replacements."""
    instead = {"--kernel": "give the rung's name, as in cupyattn profile fa"}
    hints = [f": {text}" for flag, text in instead.items() if unknown[0].startswith(flag)]
    return f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; without any, show the help.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process when omitted.

    Returns
    -------
    int
        0; 1 if a check failed; 2 for errors that the user can correct, with one line on standard
        error (``CUPYATTN_DEBUG=1`` shows the traceback); 130 when interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    top = parser(arguments)
    args, unknown = top.parse_known_args(arguments)
    if unknown:
        top.prog = " ".join(filter(None, [top.prog, args.command]))
        top.error(unknown_arguments(unknown))
    if args.command is None:
        top.print_help()
        return 0
    command = importlib.import_module(f"cupyattn.cli.{args.command}")
    try:
        if getattr(args, "json", None):
            check_folder("--json", args.json)
        check_outputs(args)
        args.arguments = arguments
        status = command.run(args)
        sys.stdout.flush()
        return int(status)
    except BrokenPipeError:
        # The reader has ended (``cupyattn info | head``), so the rest of the output is not needed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("cupyattn: interrupted", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        if is_on("CUPYATTN_DEBUG"):
            raise
        text = str(error)
        if isinstance(error, KernelCompileError):  # the whole log follows the first error
            text = text.partition("\n")[0]
        if isinstance(error, OSError) and error.filename and error.strerror:
            text = f"{error.filename}: {error.strerror}"
        print(f"cupyattn: {printable(' '.join(text.split()))}", file=sys.stderr)
        return 2
