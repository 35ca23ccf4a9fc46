"""The gradients of a resolved backward pass from NumPy, every packed sequence by itself."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyattn.gradients.mirror import mirror_gradients
from cupyattn.gradients.prepared import back_mirror
from cupyattn.gradients.problem import BackwardProblem
from cupyattn.plans.backward import GIVEN_SUMS
from cupyattn.problem.sequences import SEQUENCES
from cupyattn.reference.problem import corner_of, masks_of

if TYPE_CHECKING:
    from cupyattn.ops.backward import BackwardSettled


def mirror_into(
    settled: BackwardSettled,
    arrays: Mapping[str, Any],
    results: dict[str, Any],
) -> None:
    """Run the mirror.

    Parameters
    ----------
    settled : BackwardSettled
    arrays : mapping of str to array
        Operands by buffer.
    results : dict of str to array
        Receives the gradients: dq, dk and dv in layout BHSD, others contiguous.
    """
    forward, of_bias = settled.forward, settled.places.dbias
    settings, how = forward.settings, forward.preparation
    if how is not None:
        how = how.with_arrays(arrays)
    operands = {n: arrays["o" if n == "out" else n] for n in ("d_out", *"qkv", "out", "lse")}
    operands |= {n: arrays[n] for n in ("d_lse", *GIVEN_SUMS) if n in arrays}

    def run_one(
        given: Mapping[str, Any], masks: Mapping[str, Any], of_bias: tuple[int, ...] | None
    ) -> dict[str, Any]:
        if how is not None:
            rows = given["q"], given["k"]
            given = {**given, **dict(zip("qk", how.stored(*rows), strict=True))}
        given = dict(given)
        sums: Any = tuple(given.pop(n) for n in GIVEN_SUMS if n in given)
        problem = BackwardProblem(
            **given, sums=sums or None, scale=settings.scale, options=settings.scores(masks),
            all_keys=settled.all_keys, of_bias=of_bias,
        )  # fmt: skip
        found = mirror_gradients(problem, settled.kernel)
        if how is None:
            return found._asdict()
        back = back_mirror(how, *rows, found.dq, found.dk)._asdict()
        return found._asdict() | {n: x for n, x in back.items() if x is not None}

    masks = masks_of(forward, arrays)
    if forward.call.packed is None:
        for name, gradient in run_one(operands, masks, of_bias).items():
            results[name][...] = gradient.reshape(results[name].shape)
        return
    sums = None if of_bias is None else np.zeros(of_bias, np.float32)
    of_weights: dict[str, Any] = {}
    pairs = zip(*(pairwise(arrays[name]) for name in SEQUENCES), strict=True)
    for number, (q_ends, k_ends) in enumerate(pairs):
        places = {"k": slice(*k_ends), "v": slice(*k_ends)}
        one = {name: a[:, :, places.get(name, slice(*q_ends))] for name, a in operands.items()}
        len_q, len_kv = one["q"].shape[2], one["k"].shape[2]
        own = corner_of(masks, number, len_q, len_kv)
        corner: Any = None
        if sums is not None:
            cut = slice(number, number + 1), slice(None), slice(len_q), slice(len_kv)
            whole = zip(cut, sums.shape, strict=True)
            corner = sums[tuple(at if n > 1 else slice(None) for at, n in whole)]
        found = run_one(one, own, None if corner is None else corner.shape)
        if corner is not None:
            corner += found.pop("dbias")
        for name in [n for n in found if n.endswith("_weight")]:
            of_weights[name] = of_weights.get(name, np.float32(0)) + found.pop(name)  # R14
        for name, gradient in found.items():
            results[name][:, :, places.get(name[1:], slice(*q_ends))] = gradient
    if sums is not None:
        results["dbias"][...] = sums.reshape(results["dbias"].shape)
    for name, x in of_weights.items():
        results[name][...] = x.reshape(results[name].shape)
