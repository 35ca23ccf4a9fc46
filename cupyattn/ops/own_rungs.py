"""Registered rungs: `register` compiles a user's source and adds it, `unregister` removes it."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.compiler import modules as compiler
from cupyattn.compiler import nvrtc
from cupyattn.errors import KernelCompileError, UnsupportedError, shown
from cupyattn.kernels import ladder
from cupyattn.kernels.ladder import Variant
from cupyattn.ops.attention import ATTENTION, resolved
from cupyattn.plans.records import Launch

#: Head size for which `register` compiles a source.
HEAD_DIM = 64

_log = logging.getLogger("cupyattn")


def register(
    variant: Variant, source: str | Path, *, replace: bool = False, head_dim: int = HEAD_DIM
) -> Variant:
    """Add a rung from your ``.cu`` file, and compile it at once.

    On NumPy arrays the rung runs in the interpreter. Without NVRTC it is registered without being
    compiled, and a warning says so.

    Parameters
    ----------
    variant : Variant
        Its name, idea, family and tiles. The entry point must be ``attn_<name>``; if the family has
        several kernels, each of them adds its suffix.
    source : path
        The ``.cu`` file; it may include ``prims/*.cuh``.
    replace : bool
        Replace a rung that was registered under this name.
    head_dim : int
        Head size to compile for now. Calls compile the rung for other head sizes.

    Returns
    -------
    Variant
        The registered variant, now in `VARIANTS` and accepted by `cupyattn.attention`.

    Raises
    ------
    TypeError
        If `variant` is not a `Variant`.
    ValueError
        If the name is taken, the file does not exist, or its contracts refuse the tiles.
    KernelCompileError
        If it does not compile, or has no entry point of that name. Nothing is registered then.
    """
    if not isinstance(variant, Variant):
        raise TypeError(f"variant must be a cupyattn.Variant, got {shown(variant)}")
    path, before = Path(source).resolve(), ladder.VARIANTS.get(variant.name)
    if variant.name == "auto":
        raise ValueError("'auto' means that a call chooses its rung: give the variant another name")
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 1:
        raise ValueError(f"head_dim must be a positive int, got {shown(head_dim)}")
    if before is not None and before.source is None:
        raise ValueError(
            f"{variant.name!r} is a rung of the library: give the variant another name"
        )
    if before is not None and not replace:
        raise ValueError(
            f"a variant called {variant.name!r} is already registered: add replace=True, or call "
            f"cupyattn.unregister({variant.name!r}) first"
        )
    if not path.is_file():
        raise ValueError(f"source must be an existing .cu file, got {str(path)!r}")
    added = dataclasses.replace(variant, source=path)
    ladder.VARIANTS[added.name] = added
    try:
        _compile(added, head_dim)
    except BaseException:
        del ladder.VARIANTS[added.name]
        if before is not None:
            ladder.VARIANTS[added.name] = before
        raise
    finally:
        compiler.renew()
    return added


def unregister(name: str) -> Variant:
    """Take a rung away that `register` added.

    Parameters
    ----------
    name : str

    Returns
    -------
    Variant
        The one that was registered.

    Raises
    ------
    ValueError
        If there is no such rung, or it belongs to the library.
    """
    variant = ladder.lookup(name)
    if variant.source is None:
        raise ValueError(f"{name!r} is a rung of the library: only registered ones can be removed")
    compiler.renew()
    return ladder.VARIANTS.pop(name)


def own_launches(variant: Variant, head_dim: int = HEAD_DIM) -> Iterator[Launch]:
    """Yield the launches of a registered rung's source in a small call.

    Parameters
    ----------
    variant : Variant
    head_dim : int

    Raises
    ------
    ValueError
        If the source's contracts refuse the tiles.
    """
    x = np.ones((1, 1, 8, head_dim), STORAGE[variant.dtypes[0]])
    request = resolved(x, x, x, function="register", variant=variant.name, backend="interpret")
    for plan in ATTENTION.plan(request).plans:
        yield from (one for one in plan.launches if one.module.path == variant.source)


def _compile(variant: Variant, head_dim: int) -> None:
    """Compile a rung and find its entry points, or warn that there is no compiler."""
    launches = list(own_launches(variant, head_dim))
    try:
        nvrtc.headers(nvrtc.load())
    except UnsupportedError as error:
        _log.warning("%s is registered, but nothing was compiled: %s", variant.name, error)
        return
    for one in launches:
        ptx = compiler.translate(one.module, one.module.least_arch).ptx
        found = re.findall(r"\.entry\s+(\w+)", ptx)
        if one.entry not in found:
            raise KernelCompileError(
                f'{variant.source} must have the entry point extern "C" __global__ void '
                f"{one.entry}(...), got {', '.join(found) or 'none'}"
            )
