"""8-bit P and V: fixtures that need no bound, for any backend.

Scores are even numbers of log2 units (``scale = ln 2``, scales of Q and K 1), so that no weight is
near a tie between two codes: the codes of P follow by hand, their products are exact in any order,
and what comes out is a few roundings of float32 away from whole-number arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn import attention
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.numerics import P_CODE_ONE
from cupyattn.quant import QuantConfig, QuantizedQKV, quantize
from cupyattn.reference.attention import attention_mirror
from tests.support.runs import bits, host_copy, on_host

LN2 = math.log(2.0)
#: What names the form on a Hopper: the codes of its own are those of another rule.
PORTABLE, HOPPER = "sm_90", "sm_90a"
HEAD_DIM = 64
BLOCK_KV = lookup("fa_int8").default_tiles(HEAD_DIM, "pv8").block_kv
#: Keys of a tile, by what the form is compiled for.
TILE = {PORTABLE: BLOCK_KV, HOPPER: lookup("fa_int8").default_tiles(HEAD_DIM, "sm90_pv8").block_kv}
#: Codes of P that are integers, whose sums are exact; the 8-bit float is not among them.
P_TYPES = ("u8", "s8")
#: The same where every tile of V has scales of its own, though they are all 1: the form differs.
BY_TILE = "u8 by tile"
E4M3 = ml_dtypes.float8_e4m3fn
#: What l may be off by: M is rounded by up to 2^-19 below 32 (times ln 2), an exponential errs by
#: 2^-22, and its exponent by as much; a lane and four of them add up to 70 numbers, 2^-24 each.
OF_SUMS = 2.0**-17

#: Brings an array to where the backend wants it.
Move = Callable[[Any], Any]


def type_of(p_type: str) -> str:
    return p_type.partition(" ")[0]


def granularity_of(p_type: str) -> str:
    return "block" if p_type == BY_TILE else "channel"


def pv_of(p_type: str) -> str:
    """Return the arithmetic that codes of P of this type belong to."""
    return "fp8" if p_type == "e4m3" else "int8"


def codes_of(scores: np.ndarray, v: np.ndarray, move: Move, **given: Any) -> QuantizedQKV:
    """Operands whose scores are these whole numbers, (rows, keys), and whose values are codes `v`.

    Row i of Q is 1 in channel i % 32: rows of a tile may have scores of their own, 32 of them.
    """
    rows, keys = scores.shape
    q, k = np.zeros((1, 1, rows, HEAD_DIM), np.int8), np.zeros((1, 1, keys, HEAD_DIM), np.int8)
    for row in range(rows):
        q[0, 0, row, row] = 1
        k[0, 0, :, row] = scores[row]
    given = {"v_scale": 1.0, "out_dtype": "float32", **given}
    if given["p_type"] == BY_TILE:
        groups = -(-keys // BLOCK_KV)
        given["v_scale"] = move(np.ones((1, 1, groups, HEAD_DIM), np.float32))
        given |= {"group_v": BLOCK_KV, "p_type": type_of(BY_TILE)}
    v = v[None, None].astype(E4M3).view(np.int8) if given["p_type"] == "e4m3" else v[None, None]
    operands = (move(x) for x in (q, k, v.astype(np.int8)))
    return QuantizedQKV.from_codes(*operands, 1.0, 1.0, **given)


def attend(
    z: QuantizedQKV, backend: str, arch: str = PORTABLE, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """O and lse of the one head."""
    o, lse = attention(z, scale=LN2, return_lse=True, backend=backend, arch=arch, **options)
    return on_host(o)[0, 0], on_host(lse)[0, 0]


def by_hand(scores: np.ndarray, p_type: str) -> np.ndarray:
    """The weight of each key, from the codes of P: tile by tile, in whole-number arithmetic.

    In u8 with one scale of V for a channel codes are multiples of a power of two, by which the
    largest of a tile is 128 or, 2^4 and more below the highest so far, less.
    """
    one = 128.0 if p_type == "u8" else P_CODE_ONE[type_of(p_type)]
    highest = np.full((len(scores), 1), -np.inf)
    weights = np.zeros(scores.shape)
    top = scores.max(axis=1, keepdims=True)
    for kv0 in range(0, scores.shape[1], BLOCK_KV):
        tile = scores[:, kv0 : kv0 + BLOCK_KV].astype(np.float64)
        m = tile.max(axis=1, keepdims=True)
        if p_type == "u8":
            highest = np.maximum(highest, m)
            m = np.maximum(m, highest - 4)
        codes = one * np.exp2(tile - m)
        codes = codes.astype(E4M3).astype(np.float64) if p_type == "e4m3" else np.rint(codes)
        weights[:, kv0 : kv0 + BLOCK_KV] = codes / one * np.exp2(m - top)
    # 8-bit floats are divided by the sum of what they round.
    divided_by = np.exp2(scores - top) if p_type == "e4m3" else weights
    return weights / divided_by.sum(axis=1, keepdims=True)


def even_scores(rows: int, keys: int, seed: int = 0) -> np.ndarray:
    """Up to 14 apart: 16 below the largest is a tie of 8-bit floats, as 1 below is of integers."""
    return 2 * np.random.default_rng(seed).integers(-4, 4, (rows, keys))


def whole_values(keys: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, (keys, HEAD_DIM))


def check_one_hot_values_show_p(
    backend: str, p_type: str, move: Move, arch: str = PORTABLE
) -> None:
    """With V the unit matrix the output is P, code by code."""
    scores = even_scores(32, HEAD_DIM)
    z = codes_of(scores, np.eye(HEAD_DIM), move, p_type=p_type)
    o, lse = attend(z, backend, arch)
    np.testing.assert_allclose(o, by_hand(scores, p_type), rtol=OF_SUMS)
    top = scores.max(axis=1)
    exact = LN2 * (top + np.log2(np.exp2(scores - top[:, None]).sum(axis=1)))
    np.testing.assert_allclose(lse, exact, rtol=2.0**-21, atol=OF_SUMS)  # l is of unrounded P


def check_products_by_hand(backend: str, p_type: str, move: Move, arch: str = PORTABLE) -> None:
    """Several tiles, whose maxima rise and fall, and a tail."""
    keys = 3 * TILE[arch] + 5
    scores, v = even_scores(30, keys), whole_values(keys)
    o, _ = attend(codes_of(scores, v, move, p_type=p_type), backend, arch)
    weights = by_hand(scores, p_type)
    error = np.abs(o - weights @ v)
    assert (error <= OF_SUMS * (weights @ np.abs(v))).all()


def check_scores_of_0_and_minus_infinity(
    backend: str, p_type: str, move: Move, arch: str = PORTABLE
) -> None:
    """O is a mean of whole numbers."""
    keys = 2 * TILE[arch] + 9
    mask = np.random.default_rng(2).random((32, keys)) < 0.5
    mask[3], mask[4, TILE[arch] :] = False, False
    v = whole_values(keys)
    z = codes_of(np.zeros((32, keys), np.int64), v, move, p_type=p_type)
    o, lse = attend(z, backend, arch, mask=move(mask))
    count = mask.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_allclose(lse, np.log(count), rtol=2.0**-21, atol=OF_SUMS)
        mean = np.where(count[:, None] == 0, 0, mask @ v / count[:, None])
    error = np.abs(o - mean)
    assert (error <= OF_SUMS * np.abs(mean)).all() and not o[3].any()


def check_equal_keys(backend: str, p_type: str, move: Move, arch: str = PORTABLE) -> None:
    """Every code of P is the largest one: O is the mean of V."""
    keys = TILE[arch] + 6
    v = whole_values(keys)
    o, _ = attend(codes_of(np.full((8, keys), 5), v, move, p_type=p_type), backend, arch)
    np.testing.assert_allclose(o, np.broadcast_to(v.mean(axis=0), o.shape), OF_SUMS, OF_SUMS)


def check_one_key_gives_its_value(
    backend: str, p_type: str, move: Move, arch: str = PORTABLE
) -> None:
    v = whole_values(1) // (16 if p_type == "e4m3" else 1)
    o, lse = attend(codes_of(np.full((8, 1), 3), v, move, p_type=p_type), backend, arch)
    np.testing.assert_allclose(o, np.broadcast_to(v, o.shape), rtol=2.0**-20)
    np.testing.assert_allclose(lse, 3 * LN2, rtol=2.0**-20)


def check_keys_in_another_order(
    backend: str, p_type: str, move: Move, arch: str = PORTABLE
) -> None:
    """Within tiles the order of the keys changes l alone, whatever fragments make of it."""
    keys = 2 * TILE[arch]
    rng = np.random.default_rng(3)
    scores, v = even_scores(32, keys), whole_values(keys)
    order = np.concatenate([t + rng.permutation(TILE[arch]) for t in (0, TILE[arch])])
    o, lse = attend(codes_of(scores, v, move, p_type=p_type), backend, arch)
    moved = codes_of(scores[:, order], v[order], move, p_type=p_type)
    o_moved, lse_moved = attend(moved, backend, arch)
    np.testing.assert_allclose(o, o_moved, rtol=2.0**-18)  # sums of 70 numbers
    np.testing.assert_allclose(lse, lse_moved, rtol=2.0**-21, atol=2.0**-18)


def check_shifted_scores(backend: str, p_type: str, move: Move, arch: str = PORTABLE) -> None:
    scores, v = even_scores(32, 90), whole_values(90)
    o, lse = attend(codes_of(scores, v, move, p_type=p_type), backend, arch)
    shifted = codes_of(scores + 100, v, move, p_type=p_type)
    o_shifted, lse_shifted = attend(shifted, backend, arch)
    np.testing.assert_allclose(o, o_shifted, rtol=2.0**-16)  # M near 100 has steps of 2^-17
    np.testing.assert_allclose(lse_shifted - lse, 100 * LN2, rtol=2.0**-20)


def check_split_keys_merge(backend: str, p_type: str, move: Move, arch: str = PORTABLE) -> None:
    """Partial results of two halves of whole tiles merge by lse to the whole. Keys have the
    largest score of their tile or nearly no weight, so lse is exact for the codes, too.
    """
    keys = 4 * TILE[arch]
    largest = even_scores(32, 4).repeat(TILE[arch], axis=1)
    if p_type == "u8":  # 128 and powers of two below it, by which shifts are exact
        largest = np.maximum(largest, 0)
    present = np.random.default_rng(6).random((32, keys)) < 0.5
    scores, v = np.where(present, largest, largest - 60), whole_values(keys)
    whole, lse = attend(codes_of(scores, v, move, p_type=p_type), backend, arch)
    parts = [
        attend(codes_of(scores[:, half], v[half], move, p_type=p_type), backend, arch)
        for half in (slice(0, keys // 2), slice(keys // 2, keys))
    ]
    shares = [np.exp(part.astype(np.float64) - lse)[:, None] for _, part in parts]
    merged = sum(share * o for share, (o, _) in zip(shares, parts, strict=True))
    np.testing.assert_allclose(merged, whole, rtol=1e-5, atol=2e-4)


def check_constant_values_come_back(
    backend: str, p_type: str, move: Move, arch: str = PORTABLE
) -> None:
    """Centred by its mean a constant V has codes 0: O is the constant, to the bit."""
    rng = np.random.default_rng(4)
    q, k = (rng.standard_normal((1, 2, n, HEAD_DIM)).astype(np.float16) for n in (40, 128))
    v = np.broadcast_to(rng.integers(-64, 65, HEAD_DIM) / 8, k.shape).astype(np.float16)
    quant = QuantConfig(
        pv=pv_of(p_type), p_type=type_of(p_type), granularity_v=granularity_of(p_type)
    )
    o = attention(*map(move, (q, k, v)), variant="fa_int8", quant=quant, backend=backend, arch=arch)
    assert bits(o) == bits(np.broadcast_to(v[:, :, :1], q.shape))


def check_constant_codes_come_back(
    backend: str, p_type: str, move: Move, arch: str = PORTABLE
) -> None:
    """O is divided by the sum of what multiplies V: where all values are one, O is that value.

    Whatever the scores, and whatever the codes of P round: with the sum of unrounded weights O
    would be off by what they all round, some 2^-10 of the value.
    """
    keys = 3 * TILE[arch] + 5
    rng = np.random.default_rng(7)
    scores, value = rng.integers(-7, 7, (32, keys)), rng.integers(-127, 128, (1, HEAD_DIM))
    v = np.broadcast_to(value, (keys, HEAD_DIM))
    z = codes_of(scores, v, move, p_type=p_type, out_dtype="float16")
    o, _ = attend(z, backend, arch)
    assert bits(o) == bits(np.broadcast_to(value, o.shape).astype(np.float16))


def check_codes_of_p_against_the_mirror(
    backend: str, p_type: str, move: Move, arch: str = PORTABLE
) -> None:
    """On real scores the codes of P differ from the mirror's by one, at few places if any.

    One tile, V the unit matrix: O l is the codes. Both exponentials have a relative error of 2^-22,
    which moves a code only where it lies that close to a tie.
    """
    rng = np.random.default_rng(5)
    q, k = (rng.standard_normal((1, 2, n, HEAD_DIM)).astype(np.float32) for n in (100, BLOCK_KV))
    v = np.broadcast_to(np.eye(BLOCK_KV, HEAD_DIM, dtype=np.float32), k.shape)
    quant = QuantConfig(
        pv="int8", granularity_v=granularity_of(p_type), smooth_v=False, p_type=type_of(p_type)
    )
    z = quantize(*map(move, (q, k, np.ascontiguousarray(v))), quant=quant, backend=backend)
    o = on_host(attention(z, backend=backend, arch=arch)).astype(np.float64)
    _, (step,) = attention_mirror(host_copy(z), variant="fa_int8", trace=True)
    codes = o * step.l[..., None].astype(np.float64)
    assert np.abs(codes - np.rint(codes)).max() <= 0.01
    expected = step.P * (1 if p_type == "u8" else P_CODE_ONE[type_of(p_type)])
    flips = np.abs(np.rint(codes) - np.rint(expected))
    assert flips.max() <= 1 and np.count_nonzero(flips) <= flips.size // 1000
    assert np.count_nonzero(np.rint(codes)) > flips.size // 2


#: (check, type of P): sums of 8-bit floats are not exact on a device, single products are.
CHECKS = [
    (check, p_type)
    for name, check in sorted(globals().items())
    if name.startswith("check_")
    for p_type in (*P_TYPES, BY_TILE)
] + [
    (check_one_hot_values_show_p, "e4m3"),
    (check_one_key_gives_its_value, "e4m3"),
    (check_constant_values_come_back, "e4m3"),
]
#: The same of the Hopper forms, which have one scale for a channel, and take no mask.
HOPPER_CHECKS = [
    (check, p_type)
    for check, p_type in CHECKS
    if p_type in ("u8", "e4m3") and check is not check_scores_of_0_and_minus_infinity
]
