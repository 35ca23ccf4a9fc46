"""Gradients in a ring of rows whose float32 log-sum-exp is too coarse to give P."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import attention_varlen_backward, distributed
from cupyattn.distributed import Mesh, Partition, Shared
from cupyattn.distributed.verdict import judge_backward
from cupyattn.gradients import Gradients
from cupyattn.ops.part_sums import added_sums, all_keys_sums
from tests.backward.backward_cases import Received, received
from tests.backward.coarse_cases import check, defined, large_products
from tests.distributed.distributed_cases import asked_for, entry, packed
from tests.faults.fault_patches import put_a_line_in_place


def in_a_ring(
    inputs: Received, size: int, partition: str = "contiguous", d_lse: Any = None, **options: Any
) -> list[np.ndarray]:
    """Return the gradients of all ranks, joined."""
    d_out, q, k, v, out, lse = inputs
    rows, keys = (getattr(Partition, partition)(x.shape[2], size) for x in (q, k))
    options = {"method": "ring", **options, "partition": (rows, keys)}

    def on_rank(group: distributed.Group) -> Gradients:
        own = [rows.take(x, group.rank, 2) for x in (d_out, q, out, lse)]
        of_keys = [keys.take(x, group.rank) for x in (k, v)]
        given = own[0], own[1], *of_keys, own[2], own[3]
        of_lse = None if d_lse is None else rows.take(d_lse, group.rank, 2)
        return distributed.parallel_attention_backward(*given, group, d_lse=of_lse, **options)

    found = zip(*distributed.run(on_rank, size), strict=True)
    return [where.join(x) for where, x in zip((rows, keys, keys), found, strict=True)]


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_large_products_have_the_gradients_of_one_call(backend: str) -> None:
    """lse is about 2^21, and unchanged it would be off by up to 2^-4 of itself."""
    inputs = large_products(64, 24, 40)
    found = in_a_ring(inputs, 2, scale=1 / 8, backend=backend)
    check(found, defined(inputs, scale=1 / 8), columns=1)
    assert not (np.abs(inputs[5]) >= 1024).all()  # rows of both kinds


@pytest.mark.parametrize("size", [2, 3])
def test_the_bound_of_a_ring_holds(size: int) -> None:
    """Rows of every scale from 1 to 2^12, causal, so that some have no keys on some ranks."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 24, 16)).astype(np.float16) for _ in "qkv")
    q *= (2.0 ** np.arange(24) / 2**12)[:, None].astype(np.float16) * np.float16(2.0**2)
    k *= np.float16(64)
    inputs = received(q, k, v, causal=True)
    assert (np.abs(inputs[5]) > 1e4).any()
    found = in_a_ring(inputs, size, "zigzag", causal=True)
    rows = Partition.zigzag(24, size)
    ratio = judge_backward(found, *inputs, Shared(Mesh(size, 1), rows, rows), causal=True)
    assert ratio <= 1, ratio


def test_packed_sequences_and_heads_that_are_exchanged() -> None:
    inputs = large_products(16, 24, 24)
    d_out, q, k, v, out, lse = inputs
    k, v = (np.concatenate([x, x], axis=1) for x in (k, v))
    ends = np.array([0, 9, 24])
    given = [packed(x) for x in (d_out, q, k, v, out)]
    expected = attention_varlen_backward(*given, lse[0], ends, ends, scale=1 / 8)
    for size, mesh in ((2, Mesh(2, 1)), (4, Mesh(4, 2))):
        rows = Partition.contiguous(24, size)

        def on_rank(
            group: distributed.Group, rows: Partition = rows, mesh: Mesh = mesh
        ) -> Gradients:
            own = [packed(rows.take(x, group.rank)) for x in (d_out, q, k, v, out)]
            of_lse = rows.take(lse, group.rank, 2)[0]
            return distributed.parallel_attention_varlen_backward(
                *own, of_lse, ends, ends, group, scale=1 / 8, partition=rows, **asked_for(mesh)
            )

        found = zip(*distributed.run(on_rank, size), strict=True)
        for x, y in zip((rows.join([entry(one) for one in each]) for each in found), expected,
                        strict=True):  # fmt: skip
            difference = np.linalg.norm(x.astype(float) - entry(y))
            assert difference <= 2e-3 * np.linalg.norm(entry(y).astype(float))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "line", "instead"), [
    ("backward_coarse.cu", "part_M[at + g + h * 8] = m[h] == NEG_INF ? NEG_INF : M[h];",
     "part_M[at + g + h * 8] = 0.0f;"),
    ("backward_coarse.cu", "part_l[at + g + h * 8] = l[h];", "part_l[at + g + h * 8] = 1.0f;"),
    ("backward_delta.cu", "row_M[padded] = grad.given_M[at];",
     "row_M[padded] = row_maximum_from(lse);"),
    ("backward_delta.cu", "row_factor[padded] = grad.given_factor[at];",
     "row_factor[padded] = 1.0f;"),
])  # fmt: skip
def test_a_mistake_in_a_kernel_is_noticed(
    file: str, line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maxima and sums over some keys, and where they are taken over all keys."""
    source = f"backward/{file}"
    put_a_line_in_place(source, f"grad.{line}", f"grad.{instead}", tmp_path, monkeypatch)
    inputs = large_products(64, 24, 40)
    found = in_a_ring(inputs, 2, scale=1 / 8, backend="interpret")
    with pytest.raises(AssertionError, match="off by"):
        check(found, defined(inputs, scale=1 / 8), columns=1)


@pytest.mark.parametrize("natural", [False, True])
def test_sums_of_parts_are_those_of_all_keys(natural: bool) -> None:
    """The last row has no keys anywhere, the row before none in the first part."""
    S = np.random.default_rng(0).integers(-8, 9, (3, 5)).astype(np.float32) + np.float32(2**20)
    S[1:, :2] = -np.inf
    S[2] = -np.inf
    power = np.exp if natural else np.exp2

    def sums(S: np.ndarray) -> Any:
        M = S.max(axis=-1)
        return M, power(S - np.where(-np.inf < M, M, 0)[:, None]).sum(axis=-1)

    M, factor = all_keys_sums(*added_sums(sums(S[:, :2]), sums(S[:, 2:]), natural=natural))
    whole, total = sums(S)
    np.testing.assert_array_equal(M, [*whole[:2], np.inf])
    np.testing.assert_allclose(factor, [*(1 / total[:2]), 0], rtol=1e-6)
