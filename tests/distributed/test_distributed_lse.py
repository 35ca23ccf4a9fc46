"""Gradients through the log-sum-exp of rows whose keys are on several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import distributed
from cupyattn.distributed import Mesh, Partition, RankError, Shared
from tests.backward.coarse_cases import large_products
from tests.distributed.distributed_cases import X, errors_of, on_ranks
from tests.distributed.test_distributed_coarse import in_a_ring
from tests.support.runs import normal

MESHES = [Mesh(2, 1), Mesh(3, 1), Mesh(2, 2), Mesh(4, 2)]


def numbers_of_rows(shape: tuple[int, ...], seed: int = 7) -> np.ndarray:
    """Return float32 numbers of magnitude 8, so that they outweigh d_out."""
    return np.float32(8) * np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_are_within_their_bound(mesh: Mesh) -> None:
    """Causal, grouped heads; rows of some blocks have no keys."""
    q, k, v = normal((1, 4, 24, 16), (1, 2, 24, 16))
    d_out, d_lse = normal(q.shape, q.shape, seed=5)[0], numbers_of_rows(q.shape[:3])
    rows = Partition.zigzag(24, mesh.size)
    shared = Shared(mesh, rows, rows)
    options = {"causal": True, "softcap": 5.0}
    found = on_ranks((q, k, v), shared, d_out, variant="fa_tc", d_lse=d_lse, **options)
    given = d_out, q, k, v, found.o, found.lse
    ratio = distributed.judge_backward(found.gradients, *given, shared, d_lse=d_lse, **options)
    assert ratio <= 1
    assert distributed.judge_backward(found.gradients, *given, shared, **options) > 10


def test_packed_sequences_with_five_tiles_to_a_block() -> None:
    """A ring of two ranks, and two sequences."""
    total = 2 * 5 * 64
    ends = np.array([0, total // 3, total], np.int32)
    q, k, v = normal((1, 2, total, 16), (1, 1, total, 16))
    d_out, d_lse = normal(q.shape, q.shape, seed=5)[0], numbers_of_rows(q.shape[:3])
    rows = Partition.contiguous(total, 2)
    shared = Shared(Mesh(2, 1), rows, rows, ends, ends)
    found = on_ranks((q, k, v), shared, d_out, variant="fa_tc", d_lse=d_lse)
    given = d_out, q, k, v, found.o, found.lse
    assert distributed.judge_backward(found.gradients, *given, shared, d_lse=d_lse) <= 1


@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_with_five_tiles_to_a_block(size: int) -> None:
    """Without d_out the gradient of q is that of the log-sum-exp, a mean of keys."""
    length = size * 5 * 64
    q, k, v = normal((1, 1, length, 16), (1, 1, length, 16))
    out, lse = ca.attention(q, k, v, variant="fa_tc", return_lse=True)
    d_out, d_lse = np.zeros_like(q), numbers_of_rows(q.shape[:3])
    found = in_a_ring((d_out, q, k, v, out, lse), size, d_lse=d_lse)
    S = np.float64(q[0, 0]) @ np.float64(k[0, 0]).T / 4
    dS = np.exp(S - S.max(axis=-1, keepdims=True))
    dS *= d_lse[0, 0, :, None] / dS.sum(axis=-1, keepdims=True)
    for x, exact in zip(found, (dS @ k[0, 0] / 4, dS.T @ q[0, 0] / 4), strict=False):
        assert np.linalg.norm(x[0, 0] - exact) <= 2e-3 * np.linalg.norm(exact)
    assert not found[2].any()


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_coarse_rows(backend: str) -> None:
    """M and factors of coarse rows are given to the kernel that subtracts d_lse."""
    d_out, q, k, v, out, lse = large_products(64, 24, 40)
    assert (np.abs(lse) >= 1024).any() and not (np.abs(lse) >= 1024).all()
    d_lse = numbers_of_rows(lse.shape)
    options = {"scale": 1 / 8, "backend": backend}
    given = np.zeros_like(d_out), q, k, v, out, lse
    found = in_a_ring(given, 2, d_lse=d_lse, **options)
    expected = ca.attention_backward(*given, d_lse=d_lse, scale=1 / 8)
    for x, y in zip(found[:2], expected, strict=False):
        assert y.any()
        difference = np.linalg.norm(x.astype(np.float64) - y)
        assert difference <= 2e-3 * np.linalg.norm(y.astype(np.float64))


@pytest.mark.parametrize(("d_lse", "error", "message"), [
    (np.ones((1, 4, 7), np.float32), ValueError, r"d_lse must have shape \(1, 4, 8\)"),
    (np.ones((1, 4, 8)), TypeError, "d_lse must be float32"),
])  # fmt: skip
def test_a_gradient_of_another_shape_or_type_is_refused(
    d_lse: np.ndarray, error: Any, message: str
) -> None:
    lse = np.ones((1, 4, 8), np.float32)

    def call(group: Any) -> None:
        distributed.parallel_attention_backward(X, X, X, X, X, lse, group, d_lse=d_lse)

    for found in errors_of(2, call):
        with pytest.raises(error, match=message):
            raise found  # type: ignore[misc]


def test_ranks_that_give_none_are_named() -> None:
    """Ranks that exchange heads send it to each other."""
    lse = np.ones((1, 4, 8), np.float32)

    def call(group: Any) -> None:
        d_lse = None if group.rank else lse
        distributed.parallel_attention_backward(X, X, X, X, X, lse, group, "ulysses", d_lse=d_lse)

    for found in errors_of(2, call):
        assert isinstance(found, RankError) and "d_lse" in str(found)
