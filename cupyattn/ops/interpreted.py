"""One call of attention in the interpreter, with everything that can be watched."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from cupyattn.interpret.observer import Observer, observe
from cupyattn.interpret.profile import Profile
from cupyattn.interpret.stops import Break, Stop
from cupyattn.interpret.trace import Trace


def attention(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    profile: Profile | None = None,
    trace: Trace | str | os.PathLike[str] | None = None,
    break_at: tuple[str, int] | None = None,
    callback: Callable[[Stop], object] | None = None,
    **options: Any,
) -> tuple[Any, Any, Profile]:
    """Run attention in the interpreter and count, trace or stop at instructions.

    Parameters
    ----------
    q, k, v, **options
        As for `cupyattn.attention`: NumPy arrays, `variant` and so on. This function sets `backend`
        and `return_lse`.
    profile : Profile, optional
        The profile to add to; a new one when omitted.
    trace : Trace or path, optional
        Writes the instructions of block 0, warp 0, with the values of lane 0, or as the `Trace`
        says.
    break_at : (str, int), optional
        File and line to stop at, for example ``("attn_fa.cu", 83)``.
    callback : callable, optional
        Called with a `Stop` each time.

    Returns
    -------
    o, lse : numpy.ndarray
        As `cupyattn.attention` returns them.
    profile : Profile
        Profile of all kernels that ran.

    Raises
    ------
    KernelFault
        At a kernel's first hazard.
    ValueError
        For `break_at` without `callback`, for a line without instructions, and as for
        `cupyattn.attention`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 1, 16, 16)).astype(np.float16)
    >>> seen = []
    >>> o, lse, profile = attention(
    ...     q, k, v, variant="fa", break_at=("online_softmax.cuh", 31), callback=seen.append
    ... )
    >>> seen[0].kernel, profile.kinds["fma"] > 0
    ('attn_fa', True)
    """
    # NOTE: imported here, because `cupyattn.ops.attention` imports the interpreter, too.
    from cupyattn.ops import attention as api

    if (break_at is None) != (callback is None):
        raise ValueError("break_at and callback belong together: give both or neither")
    profile = Profile() if profile is None else profile
    observers: list[Observer] = [profile]
    if trace is not None:
        observers.append(trace if isinstance(trace, Trace) else Trace(trace))
    if break_at is not None and callback is not None:
        observers.append(Break(*break_at, callback))
    with observe(*observers):
        o, lse = api.attention(q, k, v, backend="interpret", return_lse=True, **options)
    return o, lse, profile
