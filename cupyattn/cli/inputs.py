"""Sources of Q, K and V for commands: a file, a distribution, or the included real data."""

from __future__ import annotations

import argparse
import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn import distributions
from cupyattn.arrays.kinds import STORAGE
from cupyattn.checkpoints.header import FLOATS
from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.cli import flags
from cupyattn.files import data_file, read_npz
from cupyattn.kernels.features import DTYPES

#: Q, K, V of three layers of a text encoder, described in README.md in the same folder.
SAMPLE = "qkv_text_encoder.npz"
SAMPLE_LAYER = "layer5"


@dataclass(frozen=True)
class Input:
    """Named operands, and the options of the call."""

    name: str
    q: Any
    k: Any
    v: Any

    def on_device(self) -> Input:
        """Return a copy on the current CuPy device."""
        import cupy

        return Input(self.name, *(cupy.asarray(a) for a in (self.q, self.k, self.v)))


def add_arguments(
    parser: argparse.ArgumentParser, default: str = "Q, K, V of a text encoder"
) -> None:
    """Add options for the input and the call; `default` describes the default input in the help."""
    source = parser.add_argument_group(f"input (default: {default})")
    source.add_argument("--qkv", metavar="FILE", help=".npz or .safetensors with q, k and v")
    source.add_argument(
        "--layer", metavar="NAME", help=f"prefix of the arrays in the file (default {SAMPLE_LAYER})"
    )
    source.add_argument(
        "--distribution", choices=distributions.NAMES, help="random input (of a shape: normal)"
    )
    source.add_argument(
        "--seed", type=int, metavar="N", default=0, help="of random input and of judged rows (0)"
    )
    for name, what in (
        ("batch", "batch entries"),
        ("heads", "query heads"),
        ("heads-kv", "key heads, a divisor of --heads"),
        ("len", "length of queries and keys"),
        ("len-q", "query rows, if their number differs"),
        ("len-kv", "keys, where they differ"),
        ("head-dim", "head size, 1 to 256"),
    ):
        source.add_argument(f"--{name}", type=int, metavar="N", help=what)
    source.add_argument(
        "--dtype", choices=DTYPES,
        help="of random input (float16); what a file's arrays are converted to",
    )  # fmt: skip
    call = parser.add_argument_group("call")
    call.add_argument("--causal", action="store_true", help="a causal mask")
    call.add_argument(
        "--causal-align", choices=("bottom-right", "top-left"), default="bottom-right",
        help="corner at which its diagonal ends or begins (bottom-right)",
    )  # fmt: skip
    call.add_argument(
        "--scale", type=float, metavar="X", help="softmax scale (default head_dim^-1/2)"
    )


def call_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `cupyattn.attention` that were given."""
    return {"causal": args.causal, "causal_align": args.causal_align, "scale": args.scale}


_SHAPE = ("batch", "heads", "heads_kv", "len", "len_q", "len_kv", "head_dim")


def check_numbers(args: argparse.Namespace) -> None:
    """Raise ValueError for an invalid size, seed or scale."""
    flags.check_whole(args, *_SHAPE)
    flags.check_whole(args, "seed", least=0)
    if args.scale is not None and not 0 < args.scale < math.inf:
        raise ValueError(f"--scale must be positive and finite, got {args.scale}")


def is_default(args: argparse.Namespace) -> bool:
    """Whether no option chooses an input."""
    return not args.qkv and not _is_random(args)


def _is_random(args: argparse.Namespace) -> bool:
    return args.distribution is not None or any(getattr(args, n) is not None for n in _SHAPE)


def choose(args: argparse.Namespace, *, large: bool) -> Input:
    """Return the input chosen by the options, as NumPy arrays.

    Parameters
    ----------
    args : argparse.Namespace
    large : bool
        Defaults of a random shape: for a device (batch 4, 16 heads, 4096 rows, head_dim 128), or
        for NumPy (batch 1, 4 heads, 512 rows, head_dim 64).

    Raises
    ------
    ValueError
        For invalid numbers, for options that exclude each other, and for files without the needed
        arrays.
    """
    check_numbers(args)
    if _is_random(args):
        if args.qkv or args.layer:
            raise ValueError(
                "--qkv and --layer name a file's arrays: give no --distribution or shape too"
            )
        return random(args, large=large)
    if args.qkv == "":
        raise ValueError("--qkv must name a .npz or .safetensors file, got an empty name")
    path = Path(args.qkv) if args.qkv else sample_path()
    layer = args.layer or (None if args.qkv else SAMPLE_LAYER)
    found, prefix = _find(read_arrays(path), layer, path)
    for letter, array in zip("qkv", found, strict=True):
        _check_type(letter, array, args.dtype, path)
    if args.dtype:
        # NOTE: float16 is converted to bfloat16 through float32, which contains both.
        found = [a.astype(np.float32).astype(STORAGE[args.dtype]) for a in found]
    for letter, array in zip("qkv", found, strict=True):
        if not array.size:
            raise ValueError(
                f"{letter} of {path} holds nothing, as its shape is {array.shape}: give arrays of "
                "1 or more rows"
            )
        if not np.isfinite(array.astype(np.float32)).all():
            raise ValueError(
                f"{letter} of {path} holds a NaN or an infinity, for which no error is a number: "
                "give finite arrays"
            )
    name = f"{path.name if args.qkv else 'text encoder'}{f', {prefix}' if prefix else ''}"
    return Input(name, *found)


def random(args: argparse.Namespace, *, large: bool) -> Input:
    """Return a random input of the shape and distribution chosen by the options."""
    batch, heads, length, head_dim = (4, 16, 4096, 128) if large else (1, 4, 512, 64)
    length = length if args.len is None else args.len
    sizes = {
        "batch": batch if args.batch is None else args.batch,
        "heads": heads if args.heads is None else args.heads,
        "len_q": length if args.len_q is None else args.len_q,
        "len_kv": length if args.len_kv is None else args.len_kv,
        "head_dim": head_dim if args.head_dim is None else args.head_dim,
        "heads_kv": args.heads_kv,
    }
    flags.check_elements(
        sizes["batch"], sizes["heads"], max(sizes["len_q"], sizes["len_kv"]), sizes["head_dim"]
    )
    name = args.distribution or "normal"
    drawn = distributions.make(name, **sizes, dtype=args.dtype or "float16", seed=args.seed)
    return Input(f"{name}, seed {args.seed}", *drawn)


def sample_path() -> Path:
    """Return the file of real Q, K, V, in the installed package or in the checkout."""
    return data_file(SAMPLE)


def _find(arrays: dict[str, Any], layer: str | None, path: Path) -> tuple[list[Any], str]:
    """Return q, k and v of a file, with four axes each, and the prefix of their names."""
    prefixes = sorted(
        name[:-1] for name in arrays if name.endswith("q") and name[:-1] + "k" in arrays
    )
    prefixes = [prefix for prefix in prefixes if prefix + "v" in arrays]
    shown = [prefix.rstrip("_.") for prefix in prefixes]
    if not prefixes:
        raise ValueError(
            f"{path} holds no arrays q, k and v (or PREFIX_q, PREFIX_k, PREFIX_v), only "
            + (", ".join(sorted(arrays)[:8]) or "nothing of these names")
            + ": save them as numpy.savez('qkv.npz', q=q, k=k, v=v), each of shape (batch, heads, "
            "len, head_dim)"
        )
    if layer is None and len(prefixes) > 1:
        raise ValueError(f"{path} holds several layers: choose --layer among {', '.join(shown)}")
    if layer is not None and not any(shown):
        raise ValueError(f"--layer {layer}: q, k and v of {path} have no prefix: leave --layer out")
    if layer is not None and layer not in shown:
        raise ValueError(f"--layer must be one of {', '.join(shown)} in {path}, got {layer!r}")
    index = 0 if layer is None else shown.index(layer)
    found = [arrays[prefixes[index] + letter] for letter in "qkv"]
    if any(a.ndim not in (3, 4) for a in found):
        shapes = ", ".join(str(a.shape) for a in found)
        raise ValueError(
            f"q, k and v of {path} must be (batch, heads, len, head_dim), got {shapes}"
        )
    return [a[None] if a.ndim == 3 else a for a in found], shown[index]


def _check_type(letter: str, array: Any, converted: str | None, path: Path) -> None:
    """Raise ValueError unless an array has a type of the rungs, or can be converted to one."""
    name = array.dtype.name
    if name in DTYPES or (converted and array.dtype.kind in "fiu"):
        return
    ways = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
    if array.dtype.kind in "fiu":
        raise ValueError(
            f"{letter} of {path} is {name}, and rungs take {ways}: add --dtype float16, which "
            "converts q, k and v"
        )
    raise ValueError(f"{letter} of {path} must be {ways}, got {name}: save real numbers")


def read_arrays(path: Path) -> dict[str, Any]:
    """Read every array of a ``.npz`` or ``.safetensors`` file.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is another kind of file, damaged or truncated; the message has its name.
    """
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix != ".npz":
        raise ValueError(f"--qkv takes a .npz or a .safetensors file, got {path}")
    try:
        return read_npz(path)
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is no usable .npz file: {error}") from error


def _read_safetensors(path: Path) -> dict[str, Any]:
    source = open_checkpoint(path)
    arrays = {}
    for name, info in source.tensors.items():
        if name.rpartition("_")[2].rpartition(".")[2] not in ("q", "k", "v"):
            continue
        if info.dtype not in (*FLOATS, "F64"):
            raise ValueError(
                f"{path}: {name!r} has type {info.dtype}, not one of {', '.join(FLOATS)}, F64"
            )
        arrays[name] = source.read(name)
    return arrays
