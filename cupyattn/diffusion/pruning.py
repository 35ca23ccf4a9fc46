"""Token pruning: keys that get little attention are dropped before the kernel runs.

Importance is estimated from a few query rows. Kept keys are moved together, equally many in each
head. So the kernel gets shorter keys and values, and dropped keys cost nothing. On a device kernels
do both (`cupyattn.diffusion.key_passes`), in one launch or two each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.described import Described, check_together
from cupyattn.arrays.interchange import is_cupy, operand
from cupyattn.arrays.kinds import STORAGE, Array, array_namespace
from cupyattn.arrays.memory import data_address
from cupyattn.compiler.architectures import check_arch
from cupyattn.compiler.target import choose, own_arch
from cupyattn.diffusion.arguments import check_count, check_number
from cupyattn.diffusion.key_passes import (
    IMPORTANCE_DTYPES,
    MOST_HEAD_DIM,
    key_sums_shape,
    plan_compact,
    plan_key_importance,
    reads_keys_once,
    row_states_shape,
    sampled_rows,
)
from cupyattn.diffusion.products import product
from cupyattn.diffusion.ranking import largest_of_rows
from cupyattn.ops.operation import Operation, run
from cupyattn.plans.records import Work
from cupyattn.problem.problem import Problem, Result

#: Query rows of each head that importance is estimated from.
SAMPLE_ROWS = 32
#: Bytes of keys from which they are not moved before they are quantised.
LEAST_BYTES = 2**26


def key_importance(
    q: Array,
    k: Array,
    *,
    scale: float | None = None,
    rows: int = SAMPLE_ROWS,
    backend: str | None = None,
    arch: str | None = None,
) -> Array:
    """Estimate how much attention each key gets.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
        NumPy or CuPy.
    k : array, (batch, heads_kv, len_kv, head_dim)
    scale : float, optional
        Softmax scale; ``head_dim ** -0.5`` when omitted.
    rows : int
        Query rows to look at, at even distances, or fewer; all where there are no more.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `cupyattn.attention`. The kernels take q and k in float16 or in bfloat16, head_dim up
        to 256; others take the functions of their own library, on a device, too.
    arch : str, optional
        Architecture that the kernels are compiled for: that of the device when omitted.

    Returns
    -------
    array, float32, (batch, heads_kv, len_kv)
        Mean of the probabilities that those rows, in all query heads of a key head, give to the
        key: they sum to 1 over the keys.

    Raises
    ------
    TypeError, ValueError
        For an unusable `rows`, `scale` or `backend`, for heads that key heads do not divide, and
        for q and k that differ in batch, head_dim or dtype.
    UnsupportedError
        For more than 2^30 keys, or heads than blocks can be counted, on the kernels.

    Notes
    -----
    The cost is ``2 * rows / len_q`` of Q.K^T, and the keys are read twice; on compute capability
    9.0, or where `arch` is ``"sm_90a"``, half as much, and once, for up to 8,192 keys (4,096 beyond
    head_dim 128). ``arch="sm_90"`` asks for the other form, whose bits differ. Without the kernels
    scaled rows are rounded to the type of q once more: docs/MATH_REFERENCE.md [L52].

    Examples
    --------
    >>> round(float(key_importance(np.ones((1, 2, 4, 8)), np.ones((1, 1, 5, 8)))[0, 0, 0]), 6)
    0.2
    """
    importance, _ = weigh_keys(q, k, scale=scale, rows=rows, backend=backend, arch=arch)
    return importance


def weigh_keys(
    q: Array,
    k: Array,
    *,
    scale: float | None,
    rows: int,
    backend: str | None,
    arch: str | None,
    key_sums: bool = False,
) -> tuple[Array, Array | None]:
    """Return the result of `key_importance`, and with `key_sums` the sums of the keys that it
    reads.

    Parameters
    ----------
    q, k, scale, rows, backend, arch
        As for `key_importance`.
    key_sums : bool
        Whether to add up the keys, too, if kernels read them once.

    Returns
    -------
    importance : array, float32, (batch, heads_kv, len_kv)
    key_sums : array, float32, (batch, heads_kv, parts, head_dim), or None
        The sum over all keys of a head is the sum of its parts. None if the kernel does not add
        them up.
    """
    settings = ImportanceSettings(scale, rows, backend, arch, key_sums)
    arrays = {"q": q, "k": k}
    made = run(IMPORTANCE, settings, arrays)
    return made["importance"], made.get("partial_sum")


class ImportanceSettings(NamedTuple):
    """Settings for weighing keys: arguments of `weigh_keys`, except arrays."""

    scale: float | None
    rows: int
    backend: str | None
    arch: str | None
    key_sums: bool


class _Importance(Operation):
    """Weighing keys as an operation."""

    name = "key_importance"

    def resolve(self, settings: ImportanceSettings, arrays: Mapping[str, Described]) -> Problem:
        """Check queries and keys, and settle which rows are sampled."""
        check_arch(settings.arch)
        check_together(**arrays)
        q, k = arrays["q"], arrays["k"]
        backend, rows = choose(settings.backend, q.device >= 0), check_count("rows", settings.rows)
        scale = _check_operands(q, k, settings.scale)
        sampled = sampled_rows(q.shape[2], rows) if q.shape[2] else range(0)
        of_mirror = 0 in q.shape or 0 in k.shape or not _kernels_weigh(backend, q, k)
        if of_mirror:
            return Problem(
                what=self.name, backend="mirror", operands=arrays, results={},
                settled=(scale, sampled),
            )  # fmt: skip
        given = {name: x.with_whole_rows() for name, x in arrays.items()}
        of_k, arch = given["k"].place, settings.arch or own_arch(backend, q)
        shapes: dict[str, tuple[int, ...]] = {"importance": k.shape[:3]}
        once = reads_keys_once(of_k, arch)
        sums = settings.key_sums and once
        if not once:
            states = row_states_shape(of_k, q.shape[1] // k.shape[1], len(sampled))
            shapes |= {"row_M": states, "row_l": states}
        elif sums:
            shapes["partial_sum"] = key_sums_shape(of_k)
        return Problem(
            what=self.name, backend=backend, arch=arch, operands=given,
            results={name: Result(shape, STORAGE["float32"]) for name, shape in shapes.items()},
            settled=(q.dtype.name, scale, sampled, once, sums),
        )  # fmt: skip

    def plan(self, problem: Problem) -> Work:
        """Return the launches."""
        of_q, of_k = (x.place for x in problem.operands.values())
        return Work.of(plan_key_importance(of_q, of_k, *problem.settled))

    def mirror(self, problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Return the importance by the functions of the arrays' own library."""
        (q, k), (scale, sampled) = arrays.values(), problem.settled
        if 0 in q.shape or 0 in k.shape:
            share = 1 / max(k.shape[2], 1)
            return {"importance": array_namespace(q, k).full(k.shape[:3], share, np.float32)}
        return {"importance": _mean_probabilities(q, k, scale, sampled)}


IMPORTANCE = _Importance()


def _check_operands(q: Array, k: Array, scale: float | None) -> float:
    """Raise unless queries and keys belong together; return the scale of their scores."""
    got = f"got q.shape={tuple(q.shape)} k.shape={tuple(k.shape)}"
    if not q.ndim == k.ndim == 4:
        raise ValueError(f"q and k must have four axes (batch, heads, len, head_dim), {got}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree on batch and head_dim, {got}")
    if q.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(f"the heads of k must divide the heads of q, {got}")
    if q.dtype != k.dtype or q.dtype.name not in (*STORAGE, "float64"):
        raise TypeError(
            f"q and k must both be one of {', '.join(STORAGE)} or float64, got {q.dtype} and "
            f"{k.dtype}"
        )
    if scale is None:
        return float(max(q.shape[3], 1) ** -0.5)
    if not math.isfinite(scale):  # zero and negative ones weigh keys, too
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def _kernels_weigh(backend: str, q: Any, k: Any) -> bool:
    """Whether the kernels find the importance of these keys."""
    return (
        backend != "mirror"
        and q.dtype == k.dtype
        and q.dtype.name in IMPORTANCE_DTYPES
        and k.shape[3] <= MOST_HEAD_DIM
    )


def _mean_probabilities(q: Array, k: Array, scale: float, sampled: range) -> Array:
    """Return the result of `key_importance`, computed by the arrays' library."""
    xp = array_namespace(q, k)
    batch, heads_kv, _, head_dim = k.shape
    rows = q[:, :, sampled.start :: sampled.step]
    # NOTE: scaled before the product, which a device stores in 16 bits.
    rows = (rows.astype(np.float32) * np.float32(scale)).astype(q.dtype)
    rows = rows.reshape(batch, heads_kv, -1, head_dim).swapaxes(2, 3)
    weights = product(k, rows).astype(np.float32)
    weights -= weights.max(axis=2, keepdims=True)
    xp.exp(weights, out=weights)
    rows_seen = weights.shape[3]
    share: Array = weights @ (1 / (rows_seen * weights.sum(axis=2)))[..., None]
    return share[..., 0]


def bytes_needed(
    q: Array, k: Array, v: Array, rows: int, backend: str | None = None
) -> dict[str, int]:
    """Return the bytes of memory that pruning needs beside its operands, by name.

    Parameters
    ----------
    q, k, v, rows, backend
        As for `key_importance` and `compact`.
    """
    keys = math.prod(k.shape[:3])
    if _kernels_weigh(choose(backend, is_cupy(q)), q, k):
        of_keys = {"importance, marks and places of the keys": (4 + 1 + 4) * keys}
    else:
        seen = min(rows, q.shape[2]) * q.shape[1] // max(k.shape[1], 1)
        of_keys = {"weights of the keys": 4 * keys * seen}
    return {**of_keys, "k and v that are kept": k.nbytes + v.nbytes}


def kept_count(len_kv: int, ratio: float) -> int:
    """Return how many of so many keys are kept when a share of them is dropped: at least one.

    Examples
    --------
    >>> kept_count(4096, 0.2), kept_count(3, 0.9), kept_count(0, 0.5)
    (3277, 1, 0)
    """
    return max(min(len_kv, 1), len_kv - math.floor(ratio * len_kv))


def count_above(importance: Array, threshold: float) -> int:
    """Return how many keys the head with most of them has at or above a threshold.

    Parameters
    ----------
    importance : array, (batch, heads_kv, len_kv)
    threshold : float
        In multiples of the uniform share of a key.

    Notes
    -----
    Heads keep equally many keys, so that one launch serves all of them: others keep some more.
    On a device this number is waited for.
    """
    len_kv = int(importance.shape[2])
    if not importance.size:
        return len_kv
    counts = (~(importance < threshold / len_kv)).sum(axis=2)  # a NaN counts as important
    return max(1, int(counts.max()))


def compact(
    k: Array, v: Array, importance: Array, count: int, *, backend: str | None = None
) -> tuple[Array, Array, Array]:
    """Move the most important keys together.

    Parameters
    ----------
    k, v : array, (batch, heads_kv, len_kv, head_dim)
        NumPy or CuPy.
    importance : array, float32, (batch, heads_kv, len_kv)
        0 or more. A NaN counts as most important.
    count : int
        Keys to keep in each head. Of equal ones the later.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `cupyattn.attention`. The kernels take k and v in float16, bfloat16 or float32, both
        of one type and shape, head_dim up to 256; others take the functions of their own library,
        on a device, too. The result is the same to the bit.

    Returns
    -------
    k, v : array, (batch, heads_kv, count, head_dim)
        In the order that they had.
    kept : array, bool, (batch, heads_kv, len_kv)

    Raises
    ------
    TypeError
        For an importance of another type.
    ValueError
        For one of another shape, and for more keys than there are.
    UnsupportedError
        For more than 2^30 keys, or rows than blocks can be counted, on the kernels.
    """
    named = {"k": k, "v": v, "importance": importance}
    k, v, importance = (operand(name, array) for name, array in named.items())
    array_namespace(k, v, importance)
    backend = choose(backend, is_cupy(k))
    if not _kernels_move(backend, k, v, count):
        backend = "mirror"
    made = _moved({"k": k, "v": v}, importance, count, backend)
    return made["kept_k"], made["kept_v"], made["kept"]


def compact_values(
    k: Array, v: Array, importance: Array, count: int, *, backend: str
) -> tuple[Array, Array, Array]:
    """Choose keys as `compact` does, and move their values; the keys stay in place.

    Parameters
    ----------
    k, v, importance, count
        As for `compact`, of a form that the kernels move: see `quantises_in_place`.
    backend : {"cuda", "interpret"}

    Returns
    -------
    v : array, (batch, heads_kv, count, head_dim)
    kept : array, bool, (batch, heads_kv, len_kv)
    places : array, int32, (batch, heads_kv, count)
        Which keys these are, rising.
    """
    _check_choice(k, v, importance, count)
    made = _moved({"v": v}, importance, count, backend)
    return made["kept_v"], made["kept"], made["places"]


def quantises_in_place(backend: str | None, k: Array, v: Array, count: int) -> bool:
    """Whether keys that become codes are read by their places, in place of being moved first.

    Moving them costs a write and a read of them. Below `LEAST_BYTES` of keys, the host is what
    calls wait for, and its way is shorter where they are moved.
    """
    return k.nbytes >= LEAST_BYTES and _kernels_move(choose(backend, is_cupy(k)), k, v, count)


def _moved(rows: dict[str, Array], importance: Array, count: int, backend: str) -> dict[str, Array]:
    """Run the kernels that choose keys and move the `rows` given; return all that they make."""
    arrays = {**rows, "importance": importance}
    made: dict[str, Array] = run(COMPACT, (count, backend), arrays)
    return made


class _Compact(Operation):
    """Chooses keys and moves their rows, as an operation of (count, backend)."""

    name = "compact"

    def resolve(self, settings: tuple[int, str], arrays: Mapping[str, Described]) -> Problem:
        """Check rows and importance against each other."""
        count, backend = settings
        rows = {name: x for name, x in arrays.items() if name != "importance"}
        importance, v = arrays["importance"], arrays["v"]
        _check_choice(rows.get("k", v), v, importance, count)
        check_together(**arrays)
        if backend == "mirror":
            return Problem(
                what=self.name, backend=backend, operands=arrays, results={}, settled=count
            )
        given = {name: x.with_whole_rows() for name, x in rows.items()}
        given["importance"] = importance.whole()
        results = {
            f"kept_{name}": Result((*x.shape[:2], count, x.shape[3]), v.dtype)
            for name, x in rows.items()
        }
        results["kept"] = Result(importance.shape, np.dtype(np.bool_))
        results["places"] = Result((*importance.shape[:2], count), np.dtype(np.int32))
        return Problem(
            what=self.name, backend=backend, operands=given, results=results, settled=count
        )

    def plan(self, problem: Problem) -> Work:
        """Return the launches."""
        of = {name: x.place for name, x in problem.operands.items()}
        dtype = problem.operands["v"].dtype.name
        return Work.of(plan_compact(of.get("k"), of["v"], dtype, problem.settled))

    def mirror(self, problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Return rows of K and V and marks, by the functions of the arrays' own library."""
        k, v, importance = (arrays[name] for name in ("k", "v", "importance"))
        found = _indexed(k, v, importance, problem.settled)
        return dict(zip(("kept_k", "kept_v", "kept"), found, strict=True))


COMPACT = _Compact()


def _check_choice(k: Array, v: Array, importance: Array, count: int) -> None:
    if importance.dtype != np.float32:
        raise TypeError(f"importance must be float32, got {importance.dtype}")
    if not tuple(k.shape[:3]) == tuple(v.shape[:3]) == tuple(importance.shape):
        raise ValueError(
            "importance must be of the batch, heads and length of k and v, got "
            f"{tuple(importance.shape)} for {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not 0 <= count <= importance.shape[2]:
        raise ValueError(f"count must be 0 to the {importance.shape[2]} keys, got {count}")


def _kernels_move(backend: str, k: Array, v: Array, count: int) -> bool:
    """Whether the kernels choose keys and move these rows."""
    return (
        backend != "mirror"
        and count > 0
        and k.size > 0
        and (k.shape, k.dtype) == (v.shape, v.dtype)
        and k.dtype.name in STORAGE
        and k.shape[3] <= MOST_HEAD_DIM
    )


def _indexed(k: Array, v: Array, importance: Array, count: int) -> tuple[Array, Array, Array]:
    """Return the result of `compact`, computed by the arrays' library."""
    batch, heads_kv, len_kv = importance.shape
    order = largest_of_rows(importance, count)
    kept = array_namespace(k).zeros(batch * heads_kv * len_kv, bool)
    kept[order] = True

    def gathered(x: Array) -> Array:
        words = _as_words(x)
        rows = words.reshape(batch * heads_kv * len_kv, words.shape[3])
        return rows[order].view(x.dtype).reshape(batch, heads_kv, count, x.shape[3])

    return gathered(k), gathered(v), kept.reshape(importance.shape)


def _as_words(x: Array) -> Array:
    """Return rows as the widest integers that they consist of: fewer elements to move.

    A view where x is contiguous.
    """
    x = array_namespace(x).ascontiguousarray(x)
    places = data_address(x), x.shape[3] * x.dtype.itemsize
    width = next(w for w in (8, 4, 2) if not any(place % w for place in places))
    return x.view(np.dtype(f"u{width}"))


def check_ratio(ratio: Any) -> float:
    """Return the share of keys to drop."""
    return check_number("pruning_ratio", ratio, "0 to less than 1", lambda x: 0 <= x < 1)


def check_threshold(threshold: Any) -> float | None:
    """Return the threshold, None where there is none."""
    if threshold is None:
        return None
    said = "0 or more and finite, or None"
    return check_number("pruning_threshold", threshold, said, lambda x: 0 <= x < math.inf)
