"""Inputs to test attention with: a Hypothesis strategy of problems, and kinds of values by name.

`attention_inputs` needs Hypothesis, nothing here needs a GPU. `cupyattn.testing` judges a kernel's
results for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.kinds import STORAGE
from cupyattn.errors import shown
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.block_mask import BlockMask
from cupyattn.testing.counterexamples import replayed
from cupyattn.testing.watching import WATCHED

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["REGIMES", "attention_inputs", "make_regime"]

SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126}

Float64 = npt.NDArray[np.float64]
Generator = np.random.Generator
#: Fills q, k and v, which hold N(0, 1); `tiny` is the smallest normal number of their type.
_Maker = Callable[[Generator, Float64, Float64, Float64, float], None]


def _normal(rng: Generator, q: Float64, k: Float64, v: Float64, tiny: float) -> None:
    """Leave everything N(0, 1)."""


def _outlier_channel(rng: Generator, q: Float64, k: Float64, v: Float64, tiny: float) -> None:
    channel = rng.integers(q.shape[-1])
    for x in (q, k, v):
        x[..., channel] *= 100.0


def _constant_rows(rng: Generator, q: Float64, k: Float64, v: Float64, tiny: float) -> None:
    for x in (q, k, v):
        x[...] = rng.standard_normal((*x.shape[:-1], 1))


def _subnormal(rng: Generator, q: Float64, k: Float64, v: Float64, tiny: float) -> None:
    """Numbers around the smallest normal one, most of them below it."""
    for x in (q, k, v):
        x *= tiny / 4


def _equal_keys(rng: Generator, q: Float64, k: Float64, v: Float64, tiny: float) -> None:
    k[...] = rng.standard_normal((*k.shape[:2], 1, k.shape[3]))


def _repeated_maxima(rng: Generator, q: Float64, k: Float64, v: Float64, tiny: float) -> None:
    """Scores take three values, and the largest comes back in every tile."""
    q[...] = 2.0
    k[...] = rng.integers(-1, 2, (*k.shape[:3], 1))


def _large_offsets(rng: Generator, q: Float64, k: Float64, v: Float64, tiny: float) -> None:
    k += 30.0 * rng.standard_normal((*k.shape[:2], 1, k.shape[3]))
    v += 1000.0


def _large_logits(rng: Generator, q: Float64, k: Float64, v: Float64, tiny: float) -> None:
    """Scores of about +-1e4 at the default scale: almost one-hot rows."""
    q *= 100.0
    k *= 100.0


def _zeros(rng: Generator, q: Float64, k: Float64, v: Float64, tiny: float) -> None:
    for x in (q, k, v):
        x[...] = 0.0


_MAKERS: dict[str, _Maker] = {
    "normal": _normal,
    "outlier channel": _outlier_channel,
    "constant rows": _constant_rows,
    "subnormal": _subnormal,
    "equal keys": _equal_keys,
    "repeated maxima": _repeated_maxima,
    "large offsets": _large_offsets,
    "large logits": _large_logits,
    "zeros": _zeros,
}

#: Kinds of values that `attention_inputs` draws.
REGIMES = tuple(_MAKERS)
#: Further values that it may draw.
FEATURES = ("window", "softcap", "mask", "bias", "block_mask", "sinks")
#: Sizes of a head that are drawn: small, odd, around powers of two, and usual ones.
HEAD_DIMS = (
    1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 64, 65, 72, 80, 96, 127, 128, 160, 192,
    255, 256,
)  # fmt: skip


def _check_known(argument: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise ValueError for a word that is not known."""
    for word in given:
        if word not in known:
            words = ", ".join(map(repr, known))
            raise ValueError(f"{argument} must be of {words}, got {shown(word)}")


def make_regime(
    name: str, shape_q: tuple[int, ...], shape_kv: tuple[int, ...], dtype: str, seed: int
) -> tuple[Any, Any, Any]:
    """Draw q, k and v of one kind.

    Parameters
    ----------
    name : str
        One of `REGIMES`.
    shape_q, shape_kv : tuple of int
        (batch, heads, len_q, head_dim) and (batch, heads_kv, len_kv, head_dim).
    dtype : {"float16", "bfloat16", "float32"}
    seed : int

    Returns
    -------
    q, k, v : array
        NumPy, finite.

    Raises
    ------
    ValueError
        For an unknown name or dtype.

    Examples
    --------
    >>> q, k, v = make_regime("equal keys", (1, 2, 3, 4), (1, 1, 5, 4), "float16", 0)
    >>> bool((k == k[:, :, :1]).all())
    True
    """
    _check_known("name", (name,), REGIMES)
    _check_known("dtype", (dtype,), SMALLEST_NORMAL)
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in (shape_q, shape_kv, shape_kv))
    _MAKERS[name](rng, q, k, v, SMALLEST_NORMAL[dtype])
    q, k, v = (x.astype(STORAGE[dtype]) for x in (q, k, v))
    return q, k, v


def attention_inputs(
    *,
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32"),
    tiles: Tiles | None = None,
    regimes: Sequence[str] = REGIMES,
    max_head_dim: int = 256,
    max_scores: int = 2**15,
    features: Sequence[str] = (),
    head_dims: Sequence[int] = HEAD_DIMS,
    grouped: bool = True,
    square: bool = False,
    multiple: int = 1,
    empty: bool = True,
) -> SearchStrategy[tuple[Any, Any, Any, dict[str, Any]]]:
    """Return a Hypothesis strategy of attention problems.

    Parameters
    ----------
    dtypes : sequence of str
        Storage types to draw from.
    tiles : Tiles, optional
        Lengths are drawn around multiples of its ``block_q`` and ``block_kv``, 32 when omitted.
    regimes : sequence of str
        Kinds of values, of `REGIMES`.
    max_head_dim : int
        Largest head_dim.
    max_scores : int
        Largest batch * heads * len_q * len_kv.
    features : sequence of str
        Which of ``"window"``, ``"softcap"``, ``"mask"``, ``"bias"``, ``"block_mask"`` and
        ``"sinks"`` are drawn too, or left out now and then.
    head_dims : sequence of int
        Sizes of a head, of which those up to `max_head_dim` are drawn.
    grouped : bool
        Also draw fewer heads of K and V than of Q.
    square : bool
        Draw len_kv = len_q alone.
    multiple : int
        Lengths are multiples of this.
    empty : bool
        Also draw lengths of 0.

    Returns
    -------
    SearchStrategy
        Of (q, k, v, options): NumPy arrays, and ``scale``, ``causal``, ``causal_align`` and the
        features as `cupyattn.attention` takes them. It shrinks towards short, plain, single-headed
        problems. With ``pytest --cupyattn-replay=FILE`` it draws the problem of that file alone.

    Raises
    ------
    ValueError
        For an unknown dtype, regime or feature, or if there is no head_dim to draw.
    ImportError
        If Hypothesis is not installed.
    """
    _check_known("dtypes", dtypes, SMALLEST_NORMAL)
    _check_known("regimes", regimes, REGIMES)
    _check_known("features", features, FEATURES)
    head_dims = [size for size in head_dims if size <= max_head_dim]
    if not head_dims:
        raise ValueError(f"head_dims must have a size up to max_head_dim={max_head_dim}, got none")
    try:
        from hypothesis import strategies as st
    except ImportError:
        raise ImportError(
            "cupyattn.strategies.attention_inputs needs Hypothesis: pip install 'cupyattn[test]'"
        ) from None

    tiles = Tiles(32, 32, 4) if tiles is None else tiles

    def lengths(block: int, most: int) -> SearchStrategy[int]:
        edges = {e for n in (1, 2, 3) for e in (n * block - 1, n * block, n * block + 1)}
        primes = {2, 3, 7, 13, 31, 61, 97, 127}
        common = sorted(x for x in {0, 1} | edges | primes if x <= most)
        drawn = st.sampled_from(common) | st.integers(1, max(1, min(most, 4 * block)))
        least = 0 if empty else 1
        return drawn.map(lambda x: multiple * max(least, x // multiple))

    def added(shape: tuple[int, ...]) -> SearchStrategy[tuple[int, ...]]:
        axes = st.tuples(*(st.sampled_from(sorted({1, n})) for n in shape))
        return axes.flatmap(lambda x: st.integers(0, len(x)).map(lambda i: x[i:]))

    def biases(shape: tuple[int, ...], rng: Generator) -> SearchStrategy[Any]:
        # The usual ways to mask by a bias are among the numbers, and so is the smallest number.
        low = st.sampled_from([0.0, -np.inf, -1e4, -1e9, np.finfo(np.float32).min])
        size, share = st.sampled_from([0.1, 3.0, 100.0]), st.sampled_from([0.0, 0.5, 1.0])

        def make(dtype: str, shape: tuple[int, ...], size: float, low: float, share: float) -> Any:
            x = np.where(rng.random(shape) < share, low, size * rng.standard_normal(shape))
            with np.errstate(over="ignore"):  # the least float32 in 16 bits
                return x.astype(STORAGE[dtype])

        return st.builds(make, st.sampled_from(sorted(STORAGE)), added(shape), size, low, share)

    sides = st.sampled_from([-1, 0, 1, 7, 31, 32, 33]) | st.integers(-1, 4 * tiles.block_kv)
    drawers: dict[str, Callable[[tuple[int, ...], Generator], SearchStrategy[Any]]] = {
        "window": lambda shape, rng: st.tuples(sides, sides),
        "softcap": lambda shape, rng: st.sampled_from([0.05, 1.0, 30.0, 1e3]),
        "mask": lambda shape, rng: st.builds(
            lambda shape, share: np.asarray(rng.random(shape) < share),  # of shape (), too
            added(shape),
            st.floats(0, 1),
        ),
        "bias": biases,
        "block_mask": lambda shape, rng: st.builds(
            lambda block_q, block_kv, share: BlockMask(
                rng.random((*shape[:2], -(-shape[2] // block_q), -(-shape[3] // block_kv))) < share,
                block_q,
                block_kv,
            ),
            st.sampled_from([64, 128]),
            st.sampled_from([64, 128]),
            st.floats(0, 1),
        ),
        "sinks": lambda shape, rng: st.sampled_from([0.0, 1.0, 10.0]).map(
            lambda size: (size * rng.standard_normal(shape[1])).astype(np.float32)
        ),
    }

    @st.composite
    def draw_inputs(draw: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        if WATCHED.replay is not None:
            q, k, v, given = replayed(str(WATCHED.replay))
            return q.copy(), k.copy(), v.copy(), dict(given)
        head_dim = draw(st.sampled_from(head_dims))
        groups = (1, 2, 3) if grouped else (1,)
        batch, heads_kv, group = (draw(st.sampled_from(x)) for x in ((1, 2), (1, 2), groups))
        heads = heads_kv * group
        room = max_scores // (batch * heads)
        len_q = draw(lengths(tiles.block_q, math.isqrt(room) if square else room))
        rest = room // max(1, len_q)
        len_kv = len_q if square else draw(lengths(tiles.block_kv, rest))
        dtype = draw(st.sampled_from(tuple(dtypes)))
        regime = draw(st.sampled_from(tuple(regimes)))
        seed = draw(st.integers(0, 2**32 - 1))
        options: dict[str, Any] = {
            "scale": draw(st.none() | st.sampled_from([2.0**-6, 0.3, 1.0])),
            "causal": draw(st.booleans()),
            "causal_align": draw(st.sampled_from(["bottom-right", "top-left"])),
        }
        q, k, v = make_regime(
            regime, (batch, heads, len_q, head_dim), (batch, heads_kv, len_kv, head_dim),
            dtype, seed,
        )  # fmt: skip
        shape, rng = (batch, heads, len_q, len_kv), np.random.default_rng(seed)
        for name in features:
            if draw(st.booleans()):
                options[name] = draw(drawers[name](shape, rng))
        return q, k, v, options

    return draw_inputs()
