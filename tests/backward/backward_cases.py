"""Problems and runs that tests of the gradients share, on a device and in the interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn import attention_backward, attention_varlen, attention_varlen_backward
from cupyattn.arrays.kinds import STORAGE
from cupyattn.gradients import GradientReport, Gradients, GradientsWithBias, judge_backward
from cupyattn.plans import backward as plans
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.row_preparation import BUFFERS_OF, OPTIONS, Preparation
from cupyattn.problem.settings import Settings
from cupyattn.reference.attention import attention_mirror
from tests.faults.fault_patches import Fault
from tests.support.runs import (
    ADDED,
    D_LSE,
    GRAD_BIAS,
    normal,
    of_sequence,
    on_host,
    packed,
    rope_tables,
)

#: Arguments of `cupyattn.attention_backward`: d_out, q, k, v, out, lse.
Received = tuple[Any, Any, Any, Any, Any, Any]
#: Row i attends to keys up to i.
TOP_LEFT = {"causal": True, "causal_align": "top-left"}
#: Values by the option of `attention_backward`.
FORMS = {"atomic": False, "deterministic": True}
#: The same of Hopper, where these are compiled for it.
HOPPER_FORMS = {f"sm90_{name}": deterministic for name, deterministic in FORMS.items()}


def interpreted_as(form: str) -> dict[str, Any]:
    """Return the options by which the interpreter runs a form."""
    arch = "sm_90a" if form in HOPPER_FORMS else None
    return {"deterministic": (FORMS | HOPPER_FORMS)[form], "backend": "interpret", "arch": arch}


def received(q: Any, k: Any, v: Any, seed: int = 1, **options: Any) -> Received:
    """Return operands of a backward pass on the host: d_out ~ N(0, 1), and a forward's results."""
    rng = np.random.default_rng(seed)
    d_out = rng.standard_normal(q.shape).astype(q.dtype)
    own = {n: options.pop(n) for n in OPTIONS if n in options}
    how = Preparation.of_arrays(
        Settings().rows({}) | own, (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
    )
    rows = (q, k) if how is None else how.stored(q, k)
    forward = {n: x for n, x in options.items() if n not in (D_LSE, GRAD_BIAS)}
    out, lse = attention_mirror(*rows, v, variant="fa_tc", return_lse=True, **forward)
    return d_out, q, k, v, out, lse


@dataclass(frozen=True)
class BackwardRun:
    """One call, with all that is needed to judge it."""

    received: Received
    options: dict[str, Any]
    gradients: Any

    def judge(self) -> GradientReport:
        arrays = (*ADDED, D_LSE)
        options = {n: on_host(a) if n in arrays else a for n, a in self.options.items()}
        for name in BUFFERS_OF:
            if name in options:
                options[name] = tuple(map(on_host, options[name]))
        return judge_backward(
            [on_host(x) for x in self.gradients], *map(on_host, self.received), **options
        )

    def check(self) -> None:
        """Raise unless every gradient is within its bound."""
        report = self.judge()
        assert report.passed, str(report)


def run_backward(
    inputs: Received,
    *,
    deterministic: bool | None = None,
    arch: str | None = None,
    backend: str | None = None,
    **options: Any,
) -> BackwardRun:
    """Call `attention_backward` in layout BHSD."""
    gradients = attention_backward(
        *inputs, deterministic=deterministic, arch=arch, backend=backend, **options
    )
    return BackwardRun(inputs, options, gradients)


def gradients_of_lse(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return gradients with respect to lse that no other row or head has."""
    return (4 * rng.standard_normal(shape)).astype(np.float32)


def sparse(shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask of which a fifth is False, and all of its third row."""
    mask = np.random.default_rng(6).random(shape) < 0.8
    if shape[-2] > 2:
        mask[..., 2, :] = False
    return mask


def admitting(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return a bias of which a fifth is -inf."""
    rng = np.random.default_rng(7)
    bias = 2 * rng.standard_normal(shape)
    bias[rng.random(shape) < 0.2] = -np.inf
    return bias.astype(STORAGE[dtype])


def revealing_backward(head_dim: int = 32) -> Iterator[tuple[Received, dict[str, Any]]]:
    """Yield problems that bring mistakes to light: tails, several tiles of keys and of rows,
    grouped heads, causal masks, windows, block masks, softcap, mask and bias, small and large."""
    q, k, v = normal((1, 4, 75, head_dim), (1, 2, 140, head_dim))
    k = (k * 2 + 1).astype(k.dtype)
    shape = (1, 4, 75, 140)
    rng = np.random.default_rng(0)
    bias = 2 * rng.standard_normal(shape)
    bias[rng.random(shape) < 0.2] = -np.inf
    kept = np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1], [0, 0, 1]], bool)  # of a head
    kept = np.stack([kept, kept[::-1]], axis=1)[None]  # and of a block of rows
    some: tuple[dict[str, Any], ...] = (
        {"causal": True},
        {"window": (9, 30)},
        {"causal": True, "causal_align": "top-left", "window": (20, -1)},
        {"block_mask": BlockMask(kept, 64, 64), "causal": True},
        {
            "softcap": 1.5, "mask": rng.random(shape) < 0.8, "bias": bias.astype(np.float32),
            GRAD_BIAS: True,
        },
        {"bias": np.full((1, 1, 1, 140), -1e9, np.float32)},  # lse is coarse
        {"d_lse": gradients_of_lse(rng, (1, 4, 75)), "window": (0, 30)},  # rows without keys
        {"bias": rng.standard_normal((75, 140)).astype("f2"), "causal": True, GRAD_BIAS: True},
        {"bias": rng.standard_normal((2, 1, 140)).repeat(2, 0).astype("f4"), GRAD_BIAS: True},
        {
            "qk_norm": (
                rng.standard_normal((4, head_dim)).astype("f4"),
                rng.standard_normal(head_dim).astype("f2"),
            ),
            "rope": rope_tables(140, head_dim),
        },
    )
    for options in some:
        yield received(q, k, v, **options), options


@contextlib.contextmanager
def two_persistent_blocks() -> Iterator[None]:
    """Let two thread blocks take all blocks of keys of a call, whose shape no other test may have:
    plans are kept."""
    every = plans.HOPPER_BLOCKS
    plans.HOPPER_BLOCKS = 2
    try:
        yield
    finally:
        plans.HOPPER_BLOCKS = every


def persistent_backward() -> BackwardRun:
    """Run blocks that take more keys than they have stages. The last keys have no rows."""
    inputs = received(*normal((1, 4, 260, 64), (1, 2, 530, 64)), **TOP_LEFT)
    with two_persistent_blocks():
        return run_backward(inputs, **interpreted_as("sm90_atomic"), **TOP_LEFT)


def persistent_backward_of_few_rows() -> BackwardRun:
    """Run persistent blocks most of whose keys have no rows, one after another."""
    inputs = received(*normal((3, 1, 8, 8), (3, 1, 512, 8)), **TOP_LEFT)
    with two_persistent_blocks():
        return run_backward(inputs, **interpreted_as("sm90_atomic"), **TOP_LEFT)


def revealing_hopper_backward() -> Iterator[tuple[Received, dict[str, Any]]]:
    """Yield the same for the Hopper form: more steps than its rings have stages, over rows and over
    keys, both tilings, block masks of its size."""
    kept = np.array([[1, 0], [0, 1]], bool)[None, None]
    some: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
        (72, 330, 150, {"causal": True, "causal_align": "top-left"}),
        (64, 300, 140, {"window": (150, 40)}),
        (64, 300, 140, {"d_lse": gradients_of_lse(np.random.default_rng(0), (1, 2, 300))}),
        (128, 130, 400, {"causal": True}),
        (40, 200, 256, {"block_mask": BlockMask(kept, 128, 128)}),
        (64, 150, 140, {"mask": sparse((1, 2, 150, 140)), "causal": True}),
        (128, 150, 270, {"softcap": 1.5, "mask": sparse((150, 270)), "window": (100, 100)}),
        (96, 70, 140, {"mask": sparse((2, 1, 140))}),
        (64, 300, 140, {"bias": admitting((1, 2, 300, 140), "float16"), "causal": True}),
        (
            128, 150, 270, {
                "bias": admitting((150, 270), "bfloat16"), "window": (100, 100), GRAD_BIAS: True,
            },
        ),
        (72, 150, 140, {"bias": admitting((2, 1, 140), "float32"), "mask": sparse((2, 150, 1))}),
        (64, 300, 140, {"bias": admitting((2, 300, 140), "float32"), "causal": True}),
        (128, 70, 270, {"bias": admitting((70, 270), "float32"), "mask": sparse((2, 70, 1))}),
        (64, 150, 140, {"bias": admitting((2, 150, 140), "float16"), "softcap": 1.5}),
        (128, 70, 140, {"bias": admitting((2, 1, 140), "float32"), "softcap": 2, "causal": True}),
    )  # fmt: skip
    yield from _with_their_options(some)


def revealing_pair_backward() -> Iterator[tuple[Received, dict[str, Any]]]:
    """Yield the same for the kernel past head_dim 128 that runs in pairs of blocks."""
    some: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
        (136, 330, 100, {}),
        (160, 150, 270, {"causal": True}),
        (256, 70, 140, {"d_lse": gradients_of_lse(np.random.default_rng(0), (1, 2, 70))}),
        (256, 150, 270, {"window": (150, 40)}),
    )
    yield from _with_their_options(some)


def revealing_wide_backward() -> Iterator[tuple[Received, dict[str, Any]]]:
    """Yield the same for the kernels of Hopper that take what no pair of blocks does."""
    kept = np.array([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [1, 1, 0, 1, 1]], bool)[None, None]
    of_lse = gradients_of_lse(np.random.default_rng(0), (1, 2, 70))
    some: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
        (256, 70, 140, {"d_lse": of_lse, "mask": sparse((2, 1, 140))}),
        (200, 150, 270, {"block_mask": BlockMask(kept, 64, 64)}),
        (256, 150, 140, {"softcap": 1.5, "causal": True}),
        (256, 150, 270, {"softcap": 1.5, "window": (150, 40)}),
        (160, 150, 270, {"mask": sparse((1, 2, 150, 270)), "window": (100, -1)}),
        (256, 70, 140, {"mask": sparse((2, 1, 140)), "softcap": 1.5}),
        (160, 150, 270, {"mask": sparse((1, 2, 150, 270)), "causal": True}),
        (256, 70, 140, {"mask": sparse((70, 140)), "window": (60, 20), "softcap": 1.5}),
        (136, 150, 270, {"bias": admitting((1, 2, 150, 270), "float16"), "causal": True}),
        (256, 70, 140, {"bias": admitting((70, 140), "bfloat16"), "softcap": 1.5}),
        (200, 70, 140, {"bias": admitting((2, 70, 140), "float32"), "window": (100, 100)}),
        (160, 70, 140, {"bias": admitting((2, 1, 140), "float32"), "mask": sparse((2, 70, 1))}),
    )
    yield from _with_their_options(some)


def _with_their_options(
    some: Sequence[tuple[int, int, int, dict[str, Any]]],
) -> Iterator[tuple[Received, dict[str, Any]]]:
    for head_dim, len_q, len_kv, options in some:
        q, k, v = normal((1, 2, len_q, head_dim), (1, 1, len_kv, head_dim))
        k = (k * 2 + 1).astype(k.dtype)
        yield received(q, k, v, **options), options


def file_of(fault: Fault) -> str:
    """Return the source whose calls show a mistake: the one that it names, or its own."""
    return fault.shown_by if fault.shown_by.endswith(".cu") else fault.hunks[0].file


def revealing_of(file: str, form: str) -> Iterator[tuple[Received, dict[str, Any]]]:
    """Yield the problems that bring a mistake in a source to light."""
    if "_pair" in file:
        return revealing_pair_backward()
    if "_wide" in file:
        return revealing_wide_backward()
    return revealing_hopper_backward() if form in HOPPER_FORMS else revealing_backward()


def run_packed_backward(
    lengths: Sequence[tuple[int, int]],
    *,
    head_dim: int = 32,
    deterministic: bool | None = None,
    arch: str | None = None,
    backend: str | None = None,
    move: Callable[..., Any] = lambda *x: x,
    of_lse: bool = False,
    **options: Any,
) -> Iterator[BackwardRun]:
    """Call `attention_varlen_backward`; yield the results of every sequence that has rows and keys.

    `move` moves arrays to their device; `of_lse`: lse has a gradient, too. Rows of other sequences
    have no influence: an empty sequence in q leaves its keys without gradients.
    """
    host, ends = packed(lengths, 4, 2, head_dim)
    inputs = move(*host)
    forward = {"variant": "fa_tc", "return_lse": True, "backend": backend, **options}
    forward.pop(GRAD_BIAS, None)
    out, lse = attention_varlen(*inputs, *move(*ends), **forward)
    d_out = (inputs[0] * 0.5 + out).astype(out.dtype)
    longest = {
        f"max_len_{n}": max(x) for n, x in zip("qk", zip(*lengths, strict=True), strict=True)
    }
    d_lse = gradients_of_lse(np.random.default_rng(0), lse.shape) if of_lse else None
    given = {} if d_lse is None else {D_LSE: move(d_lse)[0]}
    found = attention_varlen_backward(
        d_out, *inputs, out, lse, *move(*ends), **given, deterministic=deterministic, arch=arch,
        backend=backend, **longest, **options,
    )  # fmt: skip
    host_found = [on_host(x).swapaxes(0, 1)[None] for x in found[:3]]
    received = [on_host(x).swapaxes(0, 1)[None] for x in (d_out, *inputs, out)]
    for number, (q_ends, k_ends) in enumerate(zip(*map(pairwise, ends), strict=True)):
        rows, keys = slice(*q_ends), slice(*k_ends)
        d, q, k, v, o = (x[:, :, keys if n in (2, 3) else rows] for n, x in enumerate(received))
        gradients = (x[:, :, rows if n == 0 else keys] for n, x in enumerate(host_found))
        own = of_sequence({n: on_host(a) if n in ADDED else a for n, a in options.items()},
                          number, (q, k, v))  # fmt: skip
        one = d, q, k, v, o, on_host(lse)[None, :, rows]
        if d_lse is not None:
            own[D_LSE] = d_lse[None, :, rows]
        made: Any = Gradients(*gradients)
        if options.get(GRAD_BIAS):  # of a bias that broadcasts along no sequences
            of_bias = of_sequence({"bias": on_host(found[3])}, number, (q, k, v))["bias"]
            made = GradientsWithBias(*made, of_bias)
        yield BackwardRun(one, own, made)


def scaled(x: np.ndarray, factor: float) -> np.ndarray:
    """Return numbers of the same type, so many times as large."""
    return (x.astype(np.float32) * factor).astype(STORAGE[x.dtype.name])
