"""Attention and its gradients on 1 to 8 ranks, each a thread: J2, bits, bytes, errors."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn import distributed
from cupyattn.distributed import HostGroup, Mesh, Partition, Shared, codes, rank_calls
from cupyattn.distributed.store import Board
from cupyattn.errors import UnsupportedError
from cupyattn.strategies import attention_inputs
from tests.distributed.distributed_cases import (
    MESHES,
    asked_for,
    errors_of,
    fewer,
    on_ranks,
    packed,
    partitions,
)
from tests.support.marks import slow
from tests.support.ranks import in_threads
from tests.support.resolved import watch_calls, watch_running
from tests.support.runs import bits, normal

TWO = Mesh(2, 1)


def draw_shared(data: Any, len_q: int, len_kv: int) -> Shared:
    mesh = data.draw(st.sampled_from(MESHES))
    rows = data.draw(partitions(mesh.size, len_q))
    if len_q == len_kv and data.draw(st.booleans()):
        return Shared(mesh, rows, rows)
    return Shared(mesh, rows, data.draw(partitions(mesh.size, len_kv)))


# ---- J2 ------------------------------------------------------------------------------------------


@given(st.data())
def test_every_rung_is_within_its_bound(data: Any) -> None:
    """Grouped heads, fewer heads than ranks, uneven rows, windows, softcaps, empty ranks."""
    inputs = attention_inputs(features=("window", "softcap"), max_scores=2**12, max_head_dim=40)
    q, k, v, options = data.draw(inputs)
    of_type = {"float32": ["unfused", "fa", "fa_warps"]}.get(q.dtype.name, ["fa_tc", "fa"])
    variant = data.draw(st.sampled_from(of_type))
    shared = draw_shared(data, q.shape[2], k.shape[2])
    found = on_ranks((q, k, v), shared, variant=variant, **options)
    judged = {"variant": variant, "lse": found.lse, **options}
    assert distributed.judge(found.o, q, k, v, shared, **judged) <= 1


@given(st.data())
@fewer
def test_gradients_are_within_their_bound(data: Any) -> None:
    inputs = attention_inputs(
        dtypes=("float16", "bfloat16"), regimes=("normal",), features=("window", "softcap"),
        max_scores=2**11, max_head_dim=24,
    )  # fmt: skip
    q, k, v, options = data.draw(inputs)
    shared = draw_shared(data, q.shape[2], k.shape[2])
    d_out = normal(q.shape, q.shape, q.dtype.name, seed=5)[0]
    found = on_ranks((q, k, v), shared, d_out, variant="fa_tc", **options)
    given = d_out, q, k, v, found.o, found.lse
    ratio = distributed.judge_backward(found.gradients, *given, shared, **options)
    assert ratio <= 1


@st.composite
def offsets(draw: Any, longest: int) -> np.ndarray:
    cuts = draw(st.lists(st.integers(0, longest), min_size=3, max_size=3))
    return np.array([0, *sorted(cuts), longest], np.int32)


@given(st.data())
@fewer
def test_packed_sequences_are_within_their_bounds(data: Any) -> None:
    """Sequences begin on one rank and end on another; some are empty, in q, in k or in both."""
    mesh = data.draw(st.sampled_from(MESHES))
    totals = data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))
    ends = [data.draw(offsets(total)) for total in totals]
    rows = [data.draw(partitions(mesh.size, n, e)) for n, e in zip(totals, ends, strict=True)]
    if data.draw(st.booleans()):
        totals, ends, rows = (totals[0],) * 2, ends[:1] * 2, rows[:1] * 2
    shared = Shared(mesh, *rows, *ends)
    options = {"causal": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        options["window"] = (data.draw(st.integers(0, 9)), -1)
    q, k = normal((1, 4, totals[0], 16), (1, 2, totals[1], 16))[:2]
    v, d_out = normal(k.shape, k.shape, seed=3)[0], normal(q.shape, q.shape, seed=4)[0]
    found = on_ranks((q, k, v), shared, d_out, variant="fa_tc", **options)
    judged = {"variant": "fa_tc", "lse": found.lse, **options}
    assert distributed.judge(found.o, q, k, v, shared, **judged) <= 1
    given = d_out, q, k, v, found.o, found.lse
    assert distributed.judge_backward(found.gradients, *given, shared, **options) <= 1


QUANTS = [
    None, ca.QuantConfig(pv="int8"), ca.QuantConfig(pv="int8", symmetric=False),
    ca.QuantConfig(pv="fp8"), ca.QuantConfig(qk_bits=4), ca.QuantConfig(granularity_k="token"),
    ca.QuantConfig(granularity_q="tensor", granularity_k="tensor", smooth_k=False),
    ca.QuantConfig(pv="int8", p_type="16bit", granularity_v="tensor"),
]  # fmt: skip


@pytest.mark.parametrize("mesh", [Mesh(3, 1), *slow((Mesh(4, 2), Mesh(2, 2)))])
@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: "default" if q is None else f"{q.pv}")
def test_codes_go_round_a_ring(mesh: Mesh, quant: Any) -> None:
    """J2 of what the codes say; in bfloat16, whose names NumPy does not know."""
    q, k, v = (normal((1, 4, 150, 40), (1, 2, 150, 40), "bfloat16", seed=s)[i]
               for s, i in ((0, 0), (0, 1), (1, 1)))  # fmt: skip
    rows = Partition.zigzag(150, mesh.size)
    shared = Shared(mesh, rows, rows)
    found = on_ranks((q, k, v), shared, variant="fa_int8", quant=quant, causal=True)
    judged = {"variant": "fa_int8", "quant": quant, "lse": found.lse, "causal": True}
    assert distributed.judge(found.o, q, k, v, shared, **judged) <= 1
    exact = ca.reference.attention_exact(q, k, v, causal=True)
    error = np.linalg.norm(found.o.astype(float) - exact) / np.linalg.norm(exact)
    assert error < (0.25 if quant is not None and quant.qk_bits == 4 else 0.04)


def test_codes_with_a_softcap_are_judged_without_smoothing() -> None:
    """As the calls of ranks quantise."""
    q, k, v = normal((1, 2, 40, 16), (1, 2, 40, 16))
    rows = Partition.contiguous(40, 2)
    shared, options = Shared(Mesh(2, 1), rows, rows), {"variant": "fa_int8", "softcap": 4.0}
    found = on_ranks((q, k, v), shared, **options)
    assert distributed.judge(found.o, q, k, v, shared, lse=found.lse, **options) <= 1


def test_a_fault_in_a_ring_is_past_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its keys' lse a partial result would be added with another weight."""
    from cupyattn.distributed import merging

    q, k = normal((1, 2, 64, 16), (1, 2, 64, 16))[:2]
    rows = Partition.contiguous(64, 2)
    shared = Shared(TWO, rows, rows)
    right = on_ranks((q, k, k), shared, variant="fa_tc")
    assert distributed.judge(right.o, q, k, k, shared, variant="fa_tc") <= 1
    merge = merging.merge_mirror
    monkeypatch.setattr(
        merging,
        "merge_mirror",
        lambda before, lse, p, p_lse, o: merge(before, lse, p, p_lse + np.float32(0.01), o),
    )
    wrong = on_ranks((q, k, k), shared, variant="fa_tc")
    assert distributed.judge(wrong.o, q, k, k, shared, variant="fa_tc") > 1


# ---- bits and bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["fa_tc", "fa_int8"])
def test_exchanged_heads_have_the_bits_of_one_device(variant: str) -> None:
    q, k = normal((2, 6, 70, 24), (2, 3, 70, 24))[:2]
    rows = Partition.zigzag(70, 3)
    found = on_ranks((q, k, k), Shared(Mesh(3, 3), rows, rows), variant=variant, causal=True)
    o, lse = ca.attention(q, k, k, variant=variant, causal=True, return_lse=True)
    np.testing.assert_array_equal(bits(found.o), bits(o))
    np.testing.assert_array_equal(bits(found.lse), bits(lse))


@pytest.mark.parametrize("heads_kv", [8, 4])
def test_steps_of_heads_overlap_rings(heads_kv: int) -> None:
    """Four steps: what the next one needs and what the last one made are on their way at once."""
    q, k = normal((1, 8, 40, 16), (1, heads_kv, 40, 16))[:2]
    rows = Partition.zigzag(40, 4)
    shared = Shared(Mesh(4, 2), rows, rows)
    found = on_ranks((q, k, k), shared, q, variant="fa_tc", causal=True)
    judged = {"variant": "fa_tc", "lse": found.lse, "causal": True}
    assert distributed.judge(found.o, q, k, k, shared, **judged) <= 1
    given = q, q, k, k, found.o, found.lse
    assert distributed.judge_backward(found.gradients, *given, shared, causal=True) <= 1


@pytest.mark.parametrize("mesh", [Mesh(4, 1), Mesh(4, 2), Mesh(4, 4)], ids=str)
def test_the_same_call_has_the_same_bits(mesh: Mesh) -> None:
    q, k = normal((1, 4, 61, 16), (1, 2, 61, 16))[:2]
    rows = Partition.zigzag(61, 4)
    first, second = (
        on_ranks((q, k, k), Shared(mesh, rows, rows), q, causal=True) for _ in range(2)
    )
    for a, b in zip((first.o, first.lse, *first.gradients),
                    (second.o, second.lse, *second.gradients), strict=True):  # fmt: skip
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_all_ranks_exchange_equally_often(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks without heads or rows do so, too: with NCCL in one process they wait for each other."""
    counts = Counter[int]()
    prepare = HostGroup.prepare

    def counted(group: Any, *messages: Any) -> Any:
        counts[group.rank] += 1
        return prepare(group, *messages)

    monkeypatch.setattr(HostGroup, "prepare", counted)
    q, k = normal((1, 3, 5, 8), (1, 1, 6, 8))[:2]
    rows, keys = Partition.contiguous(5, mesh.size), Partition.contiguous(6, mesh.size)
    on_ranks((q, k, k), Shared(mesh, rows, keys), q, variant="fa_tc")
    assert len(set(counts.values())) <= 1 and len(counts) in (0, mesh.size)


def test_operands_stay_as_they_are_and_any_layout_goes() -> None:
    x = normal((1, 30, 4, 16), (1, 30, 4, 16))[0]  # BSHD
    before = x.copy()
    whole = ca.attention(x, x, x, layout="BSHD", causal=True, variant="fa_tc")

    def on_rank(group: Any) -> Any:
        own = x[:, 15 * group.rank : 15 * (group.rank + 1)]
        own.flags.writeable = False
        return distributed.parallel_attention(
            own, own, own, group, "ulysses", layout="BSHD", causal=True, variant="fa_tc"
        )

    found = distributed.run(on_rank, 2)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), whole)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize(
    ("arch", "form"), [(None, None), pytest.param("sm_90a", "sm90", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("variant", ["fa_tc", pytest.param("fa_int8", marks=pytest.mark.slow)])
def test_the_kernels_do_the_same_in_the_interpreter(variant: str, arch: Any, form: Any) -> None:
    q, k = normal((1, 2, 72, 16), (1, 1, 72, 16))[:2]
    rows = Partition.zigzag(72, 2)
    shared, options = Shared(TWO, rows, rows), {"variant": variant, "causal": True}
    if variant == "fa_int8":  # scales per row: those of tiles follow the form
        options["quant"] = ca.QuantConfig(granularity_q="thread", granularity_k="thread")
    found = on_ranks((q, k, k), shared, arch=arch, backend="interpret", **options)
    judged = {"lse": found.lse, "form": form, **options}
    assert distributed.judge(found.o, q, k, k, shared, **judged) <= 1


@pytest.mark.parametrize(
    ("quant", "share"),
    [(None, 0.75), (ca.QuantConfig(pv="int8"), 0.52), (ca.QuantConfig(pv="int8", qk_bits=4), 0.40)],
    ids=["16bit", "int8", "int4"],
)
def test_codes_are_fewer_bytes_than_keys(quant: Any, share: float) -> None:
    """With head_dim 128, K takes one byte, V two or one, and there are scales."""
    q = normal((1, 1, 8, 128), (1, 1, 8, 128))[0]
    k = normal((1, 1, 1024, 128), (1, 1, 1024, 128))[0]
    shared = Shared(TWO, Partition.contiguous(8, 2), Partition.contiguous(1024, 2))
    codes = on_ranks((q, k, k), shared, variant="fa_int8", quant=quant)
    keys = on_ranks((q, k, k), shared, variant="fa_tc")
    assert keys.bytes_sent[0] == 2 * 512 * 128 * 2
    assert codes.bytes_sent[0] / keys.bytes_sent[0] == pytest.approx(share, abs=0.006)


# ---- what is wrong is said on every rank ---------------------------------------------------------


X = np.ones((1, 2, 8, 16), np.float16)
RING = {"method": "ring"}


@pytest.mark.parametrize(
    ("own", "options", "message"),
    [
        (np.ones((1, 4, 8, 16), np.float16), {}, r"rank 2 called .* with heads=4, rank 0 .*=2"),
        (np.ones((1, 2, 8, 24), np.float16), {}, r"rank 2 .* head_dim=24, rank 0 .*=16"),
        (X.astype(ml_dtypes.bfloat16), {}, 'rank 2 .* dtype="bfloat16", rank 0 .*="float16"'),
        (X, {"causal": True}, r'rank 2 .* causal="True", rank 0 with causal="False"'),
        (X, {"variant": "fa"}, r'rank 2 .* variant="fa", rank 0 with variant="fa_tc"'),
        (X, {"method": "ulysses"}, r'rank 2 .* method="ulysses", rank 0 with method="ring"'),
        (X, {"partition": "zigzag"}, 'rank 2 .* partition="zigzag", rank 0 .*="contiguous"'),
        (X, {"return_lse": True}, "rank 2 .* return_lse=true, rank 0 .*=false"),
    ],
)
def test_ranks_that_differ_are_named_on_all_ranks(own: Any, options: Any, message: str) -> None:
    def call(group: Any) -> None:
        x, how = (own, {**RING, **options}) if group.rank == 2 else (X, RING)
        distributed.parallel_attention(x, x, x, group, **how)

    found = errors_of(3, call)
    assert all(isinstance(error, distributed.RankError) for error in found)
    assert len({str(error) for error in found}) == 1
    with pytest.raises(distributed.RankError, match=message):
        raise found[0]  # type: ignore[misc]


def test_a_call_that_all_ranks_know_is_another_call_only_in_its_numbers() -> None:
    """Its arrays are others, and not kept alive."""
    q = normal((1, 2, 24, 16), (1, 2, 24, 16))[0]
    rows = Partition.contiguous(24, 2)

    def on_rank(group: Any) -> Any:
        found = []
        for number in range(4):
            x = np.ascontiguousarray(rows.take(q + np.float16(number), group.rank))
            alive = weakref.ref(x)
            o = distributed.parallel_attention(x, x, x, group, "ulysses", variant="fa_tc")
            del x
            assert alive() is None and len(group.agreed) == 1
            found.append(o)
        return found

    for number, parts in enumerate(zip(*distributed.run(on_rank, 2), strict=True)):
        x = q + np.float16(number)
        np.testing.assert_array_equal(rows.join(parts), ca.attention(x, x, x, variant="fa_tc"))


@pytest.mark.parametrize("variant", ["fa_tc", "fa_int8"])
@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(2, 2), TWO, Mesh(4, 2)], ids=str)
def test_what_a_rank_resolves_is_what_it_runs(
    mesh: Mesh, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks agree without that: on the first call, too, each call of a kernel is resolved once."""
    operands, rows = normal((1, 4, 24, 16), (1, 4, 24, 16)), Partition.contiguous(24, mesh.size)
    resolved = watch_running(monkeypatch)
    launched = watch_calls(
        monkeypatch, (rank_calls, "run_attention"), (codes, "run_attention"),
        (rank_calls, "run_backward"),
    )  # fmt: skip
    d_out = operands[0] if variant == "fa_tc" else None
    on_ranks(operands, Shared(mesh, rows, rows), d_out, variant=variant)
    runs = Counter(launched)
    assert runs["run_attention"] >= mesh.size
    assert d_out is None or runs["run_backward"] >= mesh.size
    found = Counter(resolved)
    assert found["attention"] == runs["run_attention"]
    assert found["attention_backward"] == runs["run_backward"]


def test_what_a_group_remembers_ends_with_it() -> None:
    """It knows calls by settings and forms: the numbers of offsets are neither."""
    x = normal((1, 2, 16, 16), (1, 2, 16, 16))[0]
    ends, rows = np.array([0, 20, 32]), x[0].swapaxes(0, 1)
    groups = []

    def on_rank(group: Any) -> None:
        groups.append(group)
        for count, options in enumerate(({}, {"causal": True}, {"ulysses": 2, "method": "mixed"})):
            for _ in range(2):
                distributed.parallel_attention(x, x, x, group, **options)
                assert len(group.agreed) == count + 1
        for _ in range(2):
            distributed.parallel_attention_varlen(rows, rows, rows, ends, ends, group)
        assert len(group.agreed) == 3

    distributed.run(on_rank, 2)
    assert [len(group.agreed) for group in groups] == [0, 0]


@pytest.mark.parametrize("other", [{"causal": True}, {"variant": "fa"}, {"return_lse": True}])
def test_a_rank_that_differs_from_what_all_know_is_named(other: dict[str, Any]) -> None:
    def call(group: Any) -> None:
        for number in range(3):
            options = other if number == 2 and group.rank == 1 else {}
            distributed.parallel_attention(X, X, X, group, "ring", **options)

    for found in errors_of(3, call):
        assert isinstance(found, distributed.RankError) and found.rank == 1
        assert f"with {next(iter(other))}=" in str(found)


def test_ranks_that_call_different_functions_are_named() -> None:
    def call(group: Any) -> None:
        if group.rank == 1:
            group.barrier()
        else:
            distributed.parallel_attention(X, X, X, group)

    for found in errors_of(2, call):
        assert str(found) == "rank 1 called barrier, rank 0 called parallel_attention"


def test_an_error_of_one_rank_reaches_all_and_they_go_on() -> None:
    def call(group: Any) -> None:
        for x in (X.astype(np.int32) if group.rank == 1 else X, X):
            try:
                distributed.parallel_attention(x, x, x, group, "ring")
            except (TypeError, distributed.RankError) as error:
                expected = TypeError if group.rank == 1 else distributed.RankError
                assert isinstance(error, expected) and "q.dtype=int32" in str(error)
                assert group.rank == 1 or "rank 1 raised TypeError" in str(error)
            else:
                assert x is X

    assert errors_of(3, call) == [None] * 3


def test_a_variant_that_is_no_name_is_told_to_all_ranks() -> None:
    """An argument that cannot be compared is refused on all ranks."""

    def call(group: Any) -> None:
        variant: Any = ["fa"] if group.rank == 1 else "fa"
        distributed.parallel_attention(X, X, X, group, "ring", variant=variant)

    first, second = errors_of(2, call)
    assert isinstance(second, ValueError) and "variant must be one of" in str(second)
    assert isinstance(first, distributed.RankError) and "raised ValueError" in str(first)


def test_an_error_within_a_call_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyattn.distributed import merging

    merge = merging.merge_mirror

    def failing(o: Any, *rest: Any) -> None:
        if o[0, 0, 0, 0] == 5:  # rank 1
            raise MemoryError("nothing left")
        merge(o, *rest)

    monkeypatch.setattr(merging, "merge_mirror", failing)

    def call(group: Any) -> None:
        x = X * 5 if group.rank == 1 else X
        distributed.parallel_attention(x, x, x, group, "ring")
        group.barrier()

    found = errors_of(3, call)
    assert isinstance(found[1], MemoryError)
    for error in (found[0], found[2]):
        assert isinstance(error, distributed.RankError) and error.rank == 1
        assert "raised MemoryError in parallel_attention: nothing left" in str(error)


@given(st.data())
@fewer
def test_a_rank_that_dies_anywhere_is_named_by_all(data: Any) -> None:
    """Before its n-th exchange, whichever mesh and pass: no rank hangs, none returns a result."""
    mesh = data.draw(st.sampled_from([mesh for mesh in MESHES if mesh.size > 1]))
    dead = data.draw(st.integers(0, mesh.size - 1))
    left = data.draw(st.integers(0, 6))
    q, k = normal((1, 4, 24, 8), (1, 4, 24, 8))[:2]
    rows = Partition.zigzag(24, mesh.size)
    how = {"partition": "zigzag", "causal": True, **asked_for(mesh)}
    died = threading.Event()

    class Dying(HostGroup):
        def prepare(self, sends: Any, receives: Any) -> Any:
            nonlocal left
            if self.rank == dead:
                left -= 1
                if left < 0:
                    died.set()
                    raise SystemExit("killed")
            return super().prepare(sends, receives)

    board, found = Board(mesh.size), {}

    def on_rank(rank: int) -> None:
        try:
            with Dying(board, rank, mesh.size, 20) as group:
                own = [rows.take(x, rank) for x in (q, k, k)]
                o, lse = distributed.parallel_attention(*own, group, return_lse=True, **how)
                distributed.parallel_attention_backward(o, *own, o, lse, group, **how)
                found[rank] = "a result"
        except (distributed.RankError, SystemExit) as error:
            found[rank] = error

    in_threads(on_rank, mesh.size, 15)
    if not died.is_set():
        assert set(found.values()) == {"a result"}
        return
    assert isinstance(found.pop(dead), SystemExit)
    for error in found.values():
        assert isinstance(error, distributed.RankError) and error.rank == dead, error
        assert "raised SystemExit" in str(error)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "rings"}, ValueError, r"method must be one of .*, got 'rings'"),
        ({"method": "mixed"}, ValueError, "is required by method='mixed' and by no other"),
        ({"method": "mixed", "ulysses": 3}, ValueError, "ulysses must divide the 2 ranks, got 3"),
        ({"partition": 4}, TypeError, "partition must be 'contiguous', 'zigzag', a Partition"),
        ({"partition": Partition.contiguous(9, 2)}, ValueError, r"ranks \[5, 4\] rows of q, they"),
        ({"method": "ring", "variant": "fa_int8", "window": (3, 0)}, UnsupportedError,
         "takes no window, .*: use method='ulysses'"),
        ({"method": "ring", "variant": "fa_int8", "quant": ca.QuantConfig(
            smooth_k=False, fused=True)}, UnsupportedError, "takes no QuantConfig"),
        ({"backend": "cuda"}, ValueError, "backend='cuda' takes CuPy arrays"),
    ],
)  # fmt: skip
def test_what_all_ask_wrongly_is_said_to_all(options: Any, error: Any, message: str) -> None:
    def call(group: Any) -> None:
        distributed.parallel_attention(X, X, X, group, **options)

    for found in errors_of(2, call):
        with pytest.raises(error, match=message):
            raise found  # type: ignore[misc]


def test_another_group_is_refused_by_its_name() -> None:
    for call in (
        lambda: distributed.parallel_attention(X, X, X, "ring"),
        lambda: distributed.parallel_attention_backward(X, X, X, X, X, X, "ring"),
        lambda: distributed.share(X, X, X, "ring"), lambda: distributed.gather(X, "ring"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"^group must be a group of .*, got 'ring'"):
            call()


def test_offsets_and_gradients_are_checked() -> None:
    def wrong_offsets(group: Any) -> None:
        x = packed(X)
        distributed.parallel_attention_varlen(x, x, x, [0, 8], np.array([0, 16]), group)

    for found in errors_of(2, wrong_offsets):
        assert isinstance(found, TypeError) and "cu_seqlens_q must be" in str(found)

    def short_offsets(group: Any) -> None:
        x, ends = packed(X), np.array([0, 8])
        distributed.parallel_attention_varlen(x, x, x, ends, ends, group)

    for found in errors_of(2, short_offsets):
        assert isinstance(found, ValueError) and "must rise from 0 to 16" in str(found)

    def wrong_lse(group: Any) -> None:
        lse = np.ones((1, 2, 7), np.float32)
        distributed.parallel_attention_backward(X, X, X, X, X, lse, group)

    for found in errors_of(2, wrong_lse):
        assert isinstance(found, ValueError) and "lse must have shape (1, 2, 8)" in str(found)


# ---- batch entries and heads ---------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_batch_entries_or_heads_are_shared_and_gathered(axis: str) -> None:
    q, k = normal((3, 6, 20, 16), (3, 3, 20, 16))[:2]
    whole = ca.attention(q, k, k, variant="fa_tc")

    def on_rank(group: Any) -> Any:
        own = distributed.share(q, k, k, group, axis)
        return distributed.gather(ca.attention(*own, variant="fa_tc"), group, axis)

    for found in distributed.run(on_rank, 3):
        np.testing.assert_array_equal(found, whole)
    with pytest.raises(ValueError, match="heads_kv must be a multiple of the 2 ranks"):
        distributed.run(lambda group: distributed.share(q, k, k, group, "heads"), 2)


def test_auto_takes_a_mesh_that_fits() -> None:
    """Few heads: not all ranks could have one."""
    q = normal((1, 2, 64, 16), (1, 2, 64, 16))[0]
    rows = Partition.zigzag(64, 4)

    def on_rank(group: Any) -> Any:
        own = rows.take(q, group.rank)
        return distributed.parallel_attention(
            own, own, own, group, causal=True, partition="zigzag", variant="fa_tc"
        )

    found = rows.join(distributed.run(on_rank, 4))
    options = {"variant": "fa_tc", "causal": True}
    judged = [
        distributed.judge(found, q, q, q, Shared(mesh, rows, rows), **options)
        for mesh in (Mesh(4, 1), Mesh(4, 2), Mesh(4, 4))
    ]
    assert min(judged) <= 1
    assert asked_for(Mesh(4, 2)) == {"method": "mixed", "ulysses": 2}
