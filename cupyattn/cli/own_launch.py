"""Code shared by commands that run a kernel in a file, whose launch a TOML file describes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupyattn import distributions, interpret
from cupyattn.cli import launch_file
from cupyattn.cli.launch_file import LaunchFile
from cupyattn.interpret import fatbin
from cupyattn.kernels.features import DTYPES
from cupyattn.measure import rungs
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.settings import check_attention
from cupyattn.testing import judge, numerics
from cupyattn.testing.report import Report

#: Suffixes of files with kernels; a cubin is refused by name.
KERNEL_FILES = (".cu", ".ptx", ".fatbin", ".cubin")


def add_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the option that names the description, and return its group."""
    group = parser.add_argument_group("a kernel in a file, with a description of its launch")
    group.add_argument(
        "--launch", metavar="FILE", help="its launch in TOML (default: beside it, as NAME.toml)"
    )
    return group


def description_of(args: argparse.Namespace, options: Sequence[str]) -> Path | None:
    """Return the description of the launch of a kernel in a file.

    Parameters
    ----------
    args : argparse.Namespace
        ``variant``, ``launch`` and ``arguments``.
    options : sequence of str
        Options that the command accepts with a description.

    Returns
    -------
    Path or None
        None for a rung, and for a ``.cu`` file without a description, which is a copy of a rung.

    Raises
    ------
    ValueError
        For an option that applies only to rungs, a description without a file, or a cubin.
    """
    path = Path(args.variant or "")
    if path.suffix not in KERNEL_FILES:
        if args.launch:
            raise ValueError(f"--launch is for a kernel in a file, got {path}: leave it out")
        return None
    if path.suffix == ".cubin":
        raise ValueError(fatbin.NO_CUBIN)
    beside = path.with_suffix(".toml")
    if not args.launch and path.suffix == ".cu" and not beside.is_file():
        return None
    for text in args.arguments:
        name = text.partition("=")[0]
        if name.startswith("--") and not any(known.startswith(name) for known in options):
            raise ValueError(
                f"{name} is for a rung of the ladder: arrays and numbers of a kernel in a file "
                "are in its .toml"
            )
    return Path(args.launch) if args.launch else beside


def read(description: Path, arch: str | None = None) -> LaunchFile:
    """Read a description; `arch` replaces the architecture in it.

    Raises
    ------
    ValueError
        If it cannot be read, or naming the field that is wrong.
    """
    given = launch_file.read(description)
    if arch:
        given.settings["arch"] = arch
    return given


def run_interpreted(path: Path, given: LaunchFile) -> None:
    """Run a kernel in the interpreter; its arrays receive the results."""
    interpret.launch(path, given.entry, given.grid, given.block, given.args, **given.settings)


def judge_arrays(arrays: dict[str, Any], judged: dict[str, Any]) -> Report:
    """Compare the output of a kernel in a file with the bound of its stated rounding."""
    tensors = {name: arrays[judged[name]] for name in launch_file.TENSORS if name in judged}
    words = {name: judged[name] for name in launch_file.NUMERICS if name in judged}
    if "v_codes" in words:  # v is the array
        words["v"] = words.pop("v_codes")
    options = {name: judged[name] for name in launch_file.OPTIONS if name in judged}
    return judge(**tensors, numerics=numerics(**words), **options)


def judged_table(description: Path, given: LaunchFile) -> dict[str, Any]:
    """Return the table ``[judge]``, which `verify` requires."""
    if given.judged is None:
        raise ValueError(
            f"{description} has no table [judge], which names q, k, v, o and what the kernel "
            "rounds: add it, or look for faults of memory alone with cupyattn interpret"
        )
    return given.judged


def draw(given: LaunchFile, judged: dict[str, Any], distribution: str, seed: int) -> None:
    """Fill q, k and v of a launch with data of a distribution.

    Raises
    ------
    ValueError
        If they are not floats of one type, or do not have the shapes of attention.
    """
    arrays = [given.arrays[judged[name]] for name in "qkv"]
    dtypes = {x.dtype.name for x in arrays}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise ValueError(
            f"verify draws q, k and v of one type out of {', '.join(DTYPES)}, got "
            f"{', '.join(sorted(dtypes))}: cupyattn interpret runs the arrays as described"
        )
    shapes = [x.shape for x in arrays]
    if {x.ndim for x in arrays} != {4} or shapes[1] != shapes[2] or any(
        shapes[0][i] != shapes[1][i] for i in (0, 3)
    ):
        raise ValueError(
            "verify draws q, k and v of (batch, heads, length, head_dim), k and v alike, batch and "
            "head_dim the same in all, got "
            f"{' and '.join(map(str, shapes))}"
        )
    q, k, v = (to_bhsd(x, judged.get("layout", "BHSD")) for x in arrays)
    drawn = distributions.make(
        distribution, q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], q.dtype.name,
        seed, k.shape[1],
    )  # fmt: skip
    for array, view, values in zip(arrays, (q, k, v), drawn, strict=True):
        writeable = array.flags.writeable
        array.flags.writeable = view.flags.writeable = True
        view[...] = values
        array.flags.writeable = writeable


def operations(arrays: dict[str, Any], judged: dict[str, Any]) -> int:
    """Return the number of floating-point operations of attention, without masked pairs."""
    q, k, v = (arrays[judged[name]] for name in "qkv")
    layout = judged.get("layout", "BHSD")
    options = {n: judged[n] for n in launch_file.OPTIONS if n in judged and n != "layout"}
    call = check_attention(*(to_bhsd(x, layout) for x in (q, k, v)), **options)
    return 4 * call.head_dim * call.batch * call.heads * rungs.admitted_pairs(call)
