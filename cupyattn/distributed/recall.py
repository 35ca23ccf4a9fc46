"""Calls on which all ranks have agreed before: they agree again by a word.

What a rank asks for is known by the form of its arrays and by its options. Where every rank knows
the call, and all mean the same one, nothing is checked or planned anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import device_of, is_cupy
from cupyattn.distributed.call import Asked, ShardedCall
from cupyattn.distributed.group import Group

#: Calls that a group keeps.
MOST = 256


def recall(
    asked: Asked, group: Group, operands: Sequence[Any], return_lse: bool
) -> ShardedCall | None:
    """Return the call if every rank of the group has agreed on it before.

    Parameters
    ----------
    asked : Asked
    group : Group
    operands : sequence of array
        The caller's q, k and v.
    return_lse : bool

    Raises
    ------
    RankError
        If a rank has ended, or calls something else.
    """
    call: ShardedCall | None = group.known.get(_form(asked, operands, return_lse))
    said = group.gather(asked.what, "" if call is None else call.digest)
    return call if len(set(said)) == 1 else None


def remember(
    asked: Asked, group: Group, operands: Sequence[Any], return_lse: bool, call: ShardedCall
) -> None:
    """Keep a call on which all ranks have agreed, but not the arrays of its caller."""
    form = _form(asked, operands, return_lse)
    if form is None:
        return
    if len(group.known) >= MOST:
        group.known.pop(next(iter(group.known)))
    request = replace(call.request, q=None, k=None, v=None, given={})
    group.known[form] = replace(call, request=request)


def _form(asked: Asked, operands: Sequence[Any], return_lse: bool) -> Any:
    """Return what tells a call from others; None where its arrays or options do not say."""
    if asked.offsets is not None:
        return None  # their numbers count
    if not all(isinstance(x, np.ndarray) or is_cupy(x) for x in operands):
        return None
    form = (
        asked.what, asked.method, asked.ulysses, asked.partition, asked.layout, return_lse,
        tuple(asked.options.values()), tuple(asked.places.values()),
        *((type(x), x.shape, x.strides, x.dtype.name, device_of(x)) for x in operands),
    )  # fmt: skip
    try:
        hash(form)
    except TypeError:  # scales that are given as arrays
        return None
    return form
