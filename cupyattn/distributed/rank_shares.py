"""Batch entries or heads divided among ranks, which exchange only results."""

from __future__ import annotations

from typing import Any

from cupyattn.arrays.interchange import take
from cupyattn.arrays.kinds import array_namespace, check_values
from cupyattn.distributed.group import Group, Message, check_group
from cupyattn.distributed.partition import Partition
from cupyattn.errors import shown

#: Axes of layout BHSD by name.
AXES = {"batch": 0, "heads": 1}


def share(q: Any, k: Any, v: Any, group: Group, axis: str = "batch") -> tuple[Any, Any, Any]:
    """Return this rank's batch entries, or heads, as `cupyattn.attention` takes them.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        Arrays of all ranks.
    group : Group
    axis : {"batch", "heads"}
        Axis that is cut into contiguous parts; the first ranks get one more if it does not divide.

    Returns
    -------
    q, k, v : array
        Views.

    Raises
    ------
    ValueError
        For another or a missing axis, or if `heads_kv` is not a multiple of the ranks.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import distributed
    >>> x = np.ones((3, 2, 4, 8), np.float16)
    >>> distributed.run(lambda group: share(x, x, x, group)[0].shape[0], 2)
    [2, 1]
    """
    check_group(group)
    number = _check_axis(axis)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_axes(name, x, number)
    if axis == "heads" and k.shape[1] % group.size:
        raise ValueError(
            f"heads_kv must be a multiple of the {group.size} ranks to be shared, got "
            f"k.shape={tuple(k.shape)}: parallel_attention(method='ulysses') shares any heads"
        )

    def own(name: str, x: Any) -> Any:
        check_values(name, x)
        ranges = Partition.contiguous(x.shape[number], group.size).ranges[group.rank]
        begin, end = ranges[0] if ranges else (0, 0)
        return x[begin:end] if axis == "batch" else x[:, begin:end]

    return own("q", q), own("k", k), own("v", v)


def gather(x: Any, group: Group, axis: str = "batch") -> Any:
    """Return the arrays of all ranks as one, on every rank.

    Parameters
    ----------
    x : array, (batch, heads, ...)
        This rank's array, of any library. Arrays of other ranks may differ only in the length of
        the axis.
    group : Group
    axis : {"batch", "heads"}

    Raises
    ------
    ValueError, TypeError
        For another axis, an array without one, or one that the group does not exchange; the other
        ranks then raise `RankError`.
    RankError
        If they differ in more, or a rank does not come.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import distributed
    >>> def on_rank(group):
    ...     return gather(np.full((group.rank + 1, 1), group.rank), group)
    >>> distributed.run(on_rank, 2)[0].ravel().tolist()
    [0, 1, 1]
    """
    check_group(group)
    found: list[Any] = []

    def facts() -> dict[str, Any]:
        number = _check_axis(axis)
        own, as_given = take("x", x, of_parameter=True)
        group.check_array("x", own)
        _check_axes("x", own, number)
        found.extend([own, as_given])
        shape = [None if i == number else n for i, n in enumerate(own.shape)]
        same = {"axis": axis, "shape": shape, "dtype": own.dtype.name}
        return {"same": same, "length": own.shape[number]}

    lengths = [said["length"] for said in group.agree("gather", facts)]
    (x, as_given), number = found, AXES[axis]
    with group.failing_together("gather"):
        xp = array_namespace(x)
        own = xp.ascontiguousarray(x)
        shapes = [(*x.shape[:number], length, *x.shape[number + 1 :]) for length in lengths]
        slices = [
            own if rank == group.rank else xp.empty(shape, x.dtype)
            for rank, shape in enumerate(shapes)
        ]
        others = [Message(rank, a) for rank, a in enumerate(slices) if rank != group.rank]
        group.exchange([message._replace(array=own) for message in others], others).wait()
        group.finish()
    return as_given(Partition.contiguous(lengths).join(slices, axis=number))


def _check_axes(name: str, x: Any, number: int) -> None:
    """Raise for an array without the axis."""
    if len(getattr(x, "shape", ())) <= number:
        raise ValueError(f"{name} must be an array (batch, heads, ...), got {shown(x)}")


def _check_axis(axis: Any) -> int:
    """Return the number of an axis of a name."""
    if not isinstance(axis, str) or axis not in AXES:
        raise ValueError(f"axis must be 'batch' or 'heads', got {axis!r}")
    return AXES[axis]
