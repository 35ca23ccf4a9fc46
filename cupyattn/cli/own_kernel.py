"""A user's kernel in a ``.cu`` file, registered as a rung while a command runs.

`from_file` finds the name in the source. The nearest rung provides the options that are not given.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from cupyattn.cli import output
from cupyattn.compiler import devices, target
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.architectures import shared_memory_of
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.tiles import Tiles
from cupyattn.measure import device
from cupyattn.ops.own_rungs import own_launches, register

#: The rung that provides the default family, types and tiles.
NEAREST = {"unfused": "unfused", "float32": "fa", "tensor_core": "fa_tc"}
#: The entry point of a kernel, whose name follows ``attn_``.
ENTRY_POINT = re.compile(r'extern\s+"C"\s+__global__\s+[^;{]*?\battn_(\w+)\s*\(')
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a kernel in a file."""
    group = parser.add_argument_group("a copy of a rung in a .cu file")
    group.add_argument("--name", metavar="NAME", help="its entry point is attn_NAME")
    group.add_argument(
        "--family", choices=tuple(NEAREST), help="its rounding (default: float32, as fa)"
    )
    group.add_argument("--dtypes", nargs="+", metavar="DTYPE", help="types that it takes")
    group.add_argument(
        "--tiles", nargs=3, type=int, metavar=("BLOCK_Q", "BLOCK_KV", "NUM_WARPS"),
        help="its tiles, at every head_dim up to 256",
    )  # fmt: skip


def is_file(text: str | None) -> bool:
    """Whether an argument names a source file rather than a rung."""
    return text is not None and (text.endswith(".cu") or "/" in text)


def refuse_options(args: argparse.Namespace) -> None:
    """Raise ValueError if options describe a kernel in a file, and no file is given."""
    for option in ("name", "family", "dtypes", "tiles"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{option} describes a kernel in a .cu file: give its path")


@contextlib.contextmanager
def variant_of(args: argparse.Namespace) -> Iterator[Variant]:
    """Yield the rung of that name, or the kernel in that file, which is registered within the
    context.

    Raises
    ------
    ValueError
        If an option describes a kernel in a file, but a rung is named; and as `from_file`.
    """
    if not is_file(args.variant):
        refuse_options(args)
        yield ladder.lookup(args.variant)
        return
    before = dict(ladder.VARIANTS)
    try:
        variant, assumed = from_file(args)
        if assumed:
            output.say(f"Assumed: {'; '.join(assumed)}.")
        yield variant
    finally:
        ladder.VARIANTS.clear()
        ladder.VARIANTS.update(before)


def from_file(args: argparse.Namespace) -> tuple[Variant, list[str]]:
    """Return the variant that the arguments describe, and its assumed properties in words.

    Raises
    ------
    ValueError
        If the file cannot be read, or if its entry point cannot be determined.
    """
    path = Path(args.variant)
    try:
        source = COMMENT.sub(" ", path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {args.variant}: {error}") from None
    found = list(dict.fromkeys(ENTRY_POINT.findall(source)))
    assumed = []
    name = args.name
    if name is None:
        if len(found) != 1:
            has = f"has {', '.join('attn_' + n for n in found)}" if found else "has none"
            raise ValueError(
                f'{args.variant} must have one entry point extern "C" __global__ ... attn_NAME(, '
                f"and {has}: give --name NAME, or describe its launch in "
                f"{path.with_suffix('.toml').name} (cupyattn docs your_kernel)"
            )
        name = found[0]
        assumed.append(f"entry point attn_{name}")
    family = args.family or "float32"
    nearest = ladder.lookup(NEAREST[family])
    if args.family is None:
        assumed.append("family float32 (--family)")
    if args.dtypes is None:
        assumed.append(f"types {', '.join(nearest.dtypes)} (--dtypes)")
    if args.tiles is None:
        assumed.append(f"the tiles of {nearest.name} (--tiles)")
    tiles = nearest.tiles if args.tiles is None else {256: Tiles(*args.tiles)}
    if name in ladder.VARIANTS:
        raise ValueError(
            f"{args.variant} has the entry point of the rung {name!r}: give its kernel another "
            "name, attn_NAME"
        )
    dtypes = nearest.dtypes if args.dtypes is None else tuple(args.dtypes)
    variant = Variant(name, f"from {path.name}", family, tiles, dtypes=dtypes)
    return register(variant, source=path), assumed


def compile_everywhere(variant: Variant) -> tuple[str, ...]:
    """Compile a registered kernel for every architecture that NVRTC supports; return these.

    Raises
    ------
    UnsupportedError
        If there is no NVRTC.
    KernelCompileError
        If it does not compile; the message has the compiler's first error.
    KernelLaunchError
        If its tiles need more shared memory than one of them allows.
    """
    missing = device.compiler_missing()
    if missing:
        raise UnsupportedError(f"{variant.source} was not compiled or run: {missing}")
    archs = target.supported_architectures()
    for launch in own_launches(variant):
        for arch in archs:
            compiler.build(launch.module, arch)
    for head_dim in variant.tiles:  # the largest for which its tiles are meant
        for launch in own_launches(variant, head_dim):
            binary = compiler.translate(launch.module, launch.module.least_arch)
            for arch in archs:
                devices.check_shared_memory(
                    binary.smem_bytes, shared_memory_of(arch),
                    f"{launch.entry} at head_dim {head_dim}", arch,
                )  # fmt: skip
    return archs
