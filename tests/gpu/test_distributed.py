"""Several devices by NCCL: J2, bits, bytes, memory, and the effect of a rank that ends.
`tests/distributed/test_distributed.py` has the same tests for threads without devices.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import distributed
from cupyattn.distributed import Mesh, Partition, Shared
from cupyattn.distributed.group import Message
from cupyattn.distributed.merging import Partial
from cupyattn.distributed.mesh import shares_of_heads
from cupyattn.distributed.model import predict
from cupyattn.ops.attention import resolved
from cupyattn.plans.stages import stages
from cupyattn.problem.checks import AttentionSpec
from tests.distributed.distributed_cases import asked_for, entry, packed
from tests.kernels.test_merge_partials import assert_within, exactly, parts_of
from tests.support.ranks import free_port
from tests.support.runs import bits, normal

cupy = pytest.importorskip("cupy")

ROOT = Path(__file__).parents[2]
#: Meshes of two and of four devices.
MESHES = [Mesh(2, 2), Mesh(2, 1), Mesh(4, 4), Mesh(4, 1), Mesh(4, 2)]


def devices(size: int) -> list[int]:
    if size > int(cupy.cuda.runtime.getDeviceCount()):
        pytest.skip(f"needs {size} devices")
    return list(range(size))


def form() -> str | None:
    return "sm90" if int(cupy.cuda.Device().compute_capability) == 90 else None


def on_devices(
    operands: Any,
    shared: Shared,
    d_out: Any = None,
    deterministic: bool = True,
    transport: str = "nccl",
    **options: Any,
) -> Any:
    """O, lse, bytes sent and gradients of all ranks, joined, on the host."""
    rows = shared.rows_q, shared.rows_kv, shared.rows_kv
    ends = [x for x in (shared.cu_seqlens_q, shared.cu_seqlens_k) if x is not None]
    how = {**asked_for(shared.mesh), "partition": rows[:2]}
    backward = {n: x for n, x in options.items() if n not in ("variant", "quant")}
    there, back = (packed, entry) if ends else (lambda x: x, lambda x: x)
    forward = distributed.parallel_attention_varlen if ends else distributed.parallel_attention
    gradients = (
        distributed.parallel_attention_varlen_backward
        if ends
        else distributed.parallel_attention_backward
    )

    def on_rank(group: Any) -> Any:
        pairs = zip(rows, operands, strict=True)
        own = [cupy.asarray(there(r.take(x, group.rank))) for r, x in pairs]
        o, lse = forward(*own, *ends, group, return_lse=True, **how, **options)
        assert o.device.id == group.device
        sent, found = group.bytes_sent, ()
        if d_out is not None:
            given = cupy.asarray(there(rows[0].take(d_out, group.rank)))
            found = gradients(
                given, *own, o, lse, *ends, group, deterministic=deterministic, **how, **backward
            )
        lse = lse.get()[None] if ends else lse.get()
        return back(o.get()), lse, sent, [back(x.get()) for x in found]

    ranks = devices(shared.mesh.size)
    all_ranks = distributed.run(on_rank, ranks, transport=transport, timeout=60)
    o = rows[0].join([of_rank[0] for of_rank in all_ranks])
    lse = rows[0].join([of_rank[1] for of_rank in all_ranks], axis=-1)
    found = [
        r.join([of_rank[3][i] for of_rank in all_ranks])
        for i, r in enumerate(rows)
        if d_out is not None
    ]
    return o, lse, [of_rank[2] for of_rank in all_ranks], found


# ---- one device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float16", 128), ("bfloat16", 64), ("float32", 40), ("bfloat16", 17)]
)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("knows", [False, True])
def test_partial_results_are_merged_within_their_bound(
    dtype: str, head_dim: int, count: int, knows: bool
) -> None:
    parts = parts_of((2, 3, 200, head_dim), dtype, count)
    partial = Partial(cupy.asarray(parts[0][0]), "cuda")
    for o, lse in parts:
        partial.add((0, 200), cupy.asarray(o), cupy.asarray(lse))
    last_o, last_lse = parts_of((2, 3, 200, head_dim), dtype, 1, seed=9)[0]
    last = cupy.asarray(last_o)[:, :, 7:], cupy.asarray(last_lse)[:, :, 7:]
    partial.add((7, 200), *last, last=knows)
    last_o[:, :, :7], last_lse[:, :, :7] = 0, -np.inf
    found = tuple(x.get() for x in partial.result())
    assert_within(found, exactly([*parts, (last_o, last_lse)], dtype))


def test_one_rank_is_one_device() -> None:
    q, k = normal((1, 4, 300, 64), (1, 2, 300, 64))[:2]
    rows = Partition.contiguous(300, 1)
    o, lse, sent, _ = on_devices((q, k, k), Shared(Mesh(1, 1), rows, rows), causal=True)
    x, y = cupy.asarray(q), cupy.asarray(k)
    alone, alone_lse = ca.attention(x, y, y, causal=True, return_lse=True)
    np.testing.assert_array_equal(bits(o), bits(alone.get()))
    np.testing.assert_array_equal(bits(lse), bits(alone_lse.get()))
    assert sent == [0]


# ---- several -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("variant", ["fa_tc", "fa", "fa_int8"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_mesh_is_within_the_bound(mesh: Mesh, variant: str, causal: bool) -> None:
    """Grouped heads that do not divide, rows that do not divide."""
    q, k = normal((1, 6, 700, 64), (1, 2, 700, 64))[:2]
    v = normal(k.shape, k.shape, seed=5)[0]
    rows = (Partition.zigzag if causal else Partition.contiguous)(700, mesh.size)
    shared = Shared(mesh, rows, rows)
    options: dict[str, Any] = {"variant": variant, "causal": causal}
    if variant == "fa_int8":  # a mean that is summed in another order would make other codes
        options["quant"] = ca.QuantConfig(smooth_k=False)
    o, lse, _, _ = on_devices((q, k, v), shared, **options)
    judged = {"lse": lse, **options}
    judged["form"] = form() if variant != "fa" else None
    assert distributed.judge(o, q, k, v, shared, **judged) <= 1


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_fewer_heads_than_devices_uneven_rows_and_windows(mesh: Mesh) -> None:
    q, k = normal((2, 1, 300, 128), (2, 1, 420, 128), "bfloat16")[:2]
    cuts = [0, 17, 170, 170, 300] if mesh.size == 4 else [0, 61, 300]
    rows = Partition.contiguous(np.diff(cuts).tolist())
    shared = Shared(mesh, rows, Partition.contiguous(420, mesh.size))
    options = {"causal": True, "window": (100, -1)}
    o, lse, _, _ = on_devices((q, k, k), shared, variant="fa_tc", **options)
    judged = {"variant": "fa_tc", "lse": lse, "form": form(), **options}
    assert distributed.judge(o, q, k, k, shared, **judged) <= 1


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_both_transports_have_the_same_bits(mesh: Mesh) -> None:
    q, k = normal((1, 4, 600, 64), (1, 4, 600, 64))[:2]
    rows = Partition.zigzag(600, mesh.size)
    shared, how = Shared(mesh, rows, rows), {"variant": "fa_tc", "causal": True}
    nccl, copies = (
        on_devices((q, k, k), shared, q, transport=name, **how) for name in ("nccl", "copies")
    )
    assert nccl[2] == copies[2]
    for a, b in zip([*nccl[:2], *nccl[3]], [*copies[:2], *copies[3]], strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_are_within_their_bound_and_the_same_bits(mesh: Mesh) -> None:
    q, k = normal((1, 4, 400, 64), (1, 2, 400, 64))[:2]
    d_out = normal(q.shape, q.shape, seed=7)[0]
    rows = Partition.zigzag(400, mesh.size)
    shared = Shared(mesh, rows, rows)
    first, second = (
        on_devices((q, k, k), shared, d_out, variant="fa_tc", causal=True) for _ in range(2)
    )
    o, lse, _, found = first
    assert distributed.judge_backward(found, d_out, q, k, k, o, lse, shared, causal=True) <= 1
    for a, b in zip([o, lse, *found], [*second[:2], *second[3]], strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_packed_sequences(mesh: Mesh) -> None:
    ends = np.array([0, 90, 90, 333, 700], np.int32)
    q, k = normal((1, 4, 700, 64), (1, 2, 700, 64))[:2]
    d_out = normal(q.shape, q.shape, seed=7)[0]
    rows = Partition.zigzag_varlen(ends, mesh.size)
    shared = Shared(mesh, rows, rows, ends, ends)
    o, lse, _, found = on_devices((q, k, k), shared, d_out, variant="fa_tc", causal=True)
    judged = {"variant": "fa_tc", "lse": lse, "causal": True, "form": form()}
    assert distributed.judge(o, q, k, k, shared, **judged) <= 1
    assert distributed.judge_backward(found, d_out, q, k, k, o, lse, shared, causal=True) <= 1


@pytest.mark.parametrize("size", [2, 4])
def test_exchanged_heads_are_those_of_one_device(size: int) -> None:
    """The cut of the last wave follows the number of heads, so bits are of the same call."""
    q, k = normal((1, 8, 500, 128), (1, 4, 500, 128))[:2]
    rows = Partition.contiguous(500, size)
    o = on_devices((q, k, k), Shared(Mesh(size, size), rows, rows), variant="fa_tc")[0]
    step = 8 // 4  # the query heads of one key head: what a step computes
    for head in range(0, 8, step):
        x = cupy.asarray(q[:, head : head + step])
        y = cupy.asarray(k[:, head // step : head // step + 1])
        alone = ca.attention(x, y, y, variant="fa_tc").get()
        np.testing.assert_array_equal(bits(o[:, head : head + step]), bits(alone))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("transport", ["nccl", "copies"])
@pytest.mark.parametrize("on_device", [False, True])
def test_heads_have_their_given_scales(mesh: Mesh, transport: str, on_device: bool) -> None:
    """All ranks share one configuration, whose scales lie on the host or on the first device."""
    q, k, v = normal((2, 6, 300, 64), (2, 3, 300, 64))
    rng, rows = np.random.default_rng(0), Partition.contiguous(300, mesh.size)
    given = [rng.uniform(0.01, 0.04, (1, heads, 1)).astype(np.float32) for heads in (6, 3)]
    where = cupy.asarray if on_device else np.asarray
    how = {"granularity_q": "head", "granularity_k": "head", "smooth_k": False}
    on_ranks, on_host = (
        ca.QuantConfig(**how, scales=tuple(map(f, given))) for f in (where, np.asarray)
    )
    shared = Shared(mesh, rows, rows)
    options = {"variant": "fa_int8", "quant": on_ranks}
    o, lse, _, _ = on_devices((q, k, v), shared, transport=transport, **options)
    judged = {"variant": "fa_int8", "quant": on_host, "lse": lse, "form": form()}
    assert distributed.judge(o, q, k, v, shared, **judged) <= 1


def test_arrays_on_the_device_of_another_rank_are_refused() -> None:
    def on_rank(group: Any) -> None:
        with cupy.cuda.Device(0):
            x = cupy.ones((1, 2, 64, 64), "float16")
        expected = distributed.RankError if group.device == 0 else ValueError
        with pytest.raises(expected, match="q must lie on device 1, the device of rank 1"):
            distributed.parallel_attention(x, x, x, group)

    distributed.run(on_rank, devices(2), timeout=30)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_memory_is_what_the_model_says(mesh: Mesh) -> None:
    """All of a rank's pool: operands, results, what travels; scratch memory comes on top, twice
    where the pool cuts the results of a step out of what the step before has given back."""
    length, heads = 16384, 8
    call = AttentionSpec(1, heads, heads, length, length, 128, "float16", 0.1)
    costs = predict(call, mesh)
    heads_of_a_step = shares_of_heads(heads, heads, mesh.ulysses)[0][0].q[1]
    if mesh.ulysses == 1:
        heads_of_a_step = heads

    def on_rank(group: Any) -> int:
        pool = cupy.get_default_memory_pool()
        shape = 1, heads, length // mesh.size, 128
        own = [cupy.ones(shape, "float16") for _ in range(3)]
        how = asked_for(mesh)
        distributed.parallel_attention(*own, group, variant="fa_tc", **how)  # compiles
        pool.free_all_blocks()
        distributed.parallel_attention(*own, group, variant="fa_tc", **how)
        return int(pool.total_bytes())

    found = distributed.run(on_rank, devices(mesh.size), timeout=60)
    step = cupy.empty((1, heads_of_a_step, length // mesh.ring, 128), "float16")
    of_step = stages(resolved(step, step, step, variant="fa_tc", return_lse=True))
    scratch = 2 * sum(work.nbytes for work in of_step.workspace)
    rounded_up = 2**20
    assert max(found) <= costs.memory_bytes + scratch + rounded_up


# ---- what fails ----------------------------------------------------------------------------------


def test_a_rank_that_raises_ends_those_that_wait_by_nccl() -> None:
    x = np.ones((1, 2, 64, 64), np.float16)

    def on_rank(group: Any) -> None:
        own = cupy.asarray(x)
        distributed.parallel_attention(own, own, own, group, "ring")
        if group.rank == 1:
            raise KeyError("lost")
        distributed.parallel_attention(own, own, own, group, "ring")

    start = time.monotonic()
    with pytest.raises(KeyError, match="lost"):
        distributed.run(on_rank, devices(2), timeout=30)
    assert time.monotonic() - start < 25


#: One rank of a group in which rank 1 fails; the next group of the remaining ranks is right.
#: Without a device the arrays are NumPy's.
SCRIPT = """
import os, sys, threading, time
import numpy as np
from cupyattn import distributed

rank, first, second, fault, where = int(sys.argv[1]), *sys.argv[2:6]
device = rank if where == "device" else None
xp = np
if device is not None:
    import cupy as xp
    xp.cuda.Device(device).use()

def attend(group, **options):
    x = xp.ones((1, 2, 64, 64), "float16")
    o = distributed.parallel_attention(x, x, x, group, "ring", **options)
    group.finish()
    return float(abs(o - 1).max())

def ring(port, timeout):
    return distributed.connect(rank, 2, f"localhost:{port}", device=device, timeout=timeout)

held = []
if fault != "again":
    try:
        with ring(first, 60 if fault == "late" else 10) as group:
            assert attend(group) < 1e-2
            if rank == 1:
                if fault == "dies":  # while a message is on its way
                    threading.Timer(0.5, os._exit, [9]).start()
                if fault in ("sleeps", "late"):
                    time.sleep(20)
                if fault == "other arguments":
                    attend(group, causal=True)
                if fault == "full memory":
                    size = 2**33
                    while size >= 2**20:
                        try:
                            held.append(xp.cuda.alloc(size))
                        except xp.cuda.memory.OutOfMemoryError:
                            size //= 2
            if fault in ("dies", "sleeps"):
                y = xp.empty(2**20, "uint8")
                group.exchange([], [(1 - rank, y)])
                group.finish()
            if fault == "full memory":
                x = xp.ones((1, 16, 2048, 128), "float16")
                distributed.parallel_attention(x, x, x, group, "ring")
                group.finish()
            assert attend(group) < 1e-2
            print("went on")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
sys.stdout.flush()
held.clear()
with ring(second, 30) as group:
    assert attend(group) < 1e-2
    print("and again")
"""

#: Patterns of what rank 0 says, and rank 1 where it lives on.
SAID = {
    "dies": ("RankError: rank 1 ended: ", ""),
    "sleeps": ("RankError: rank . (waited longer than|did not come to .* within) 10 s",) * 2,
    "late": ("went on", "went on"),
    "other arguments": ('RankError: rank 1 called parallel_attention with causal="True", ',) * 2,
    "full memory": ("RankError: rank 1 raised OutOfMemoryError: ", "OutOfMemoryError: "),
}


def start(rank: int, ports: tuple[str, str], fault: str, where: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(rank), *ports, fault, where],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def check_fault(fault: str, where: str) -> None:
    """Let rank 1 go wrong: what both say, within the timeout, and the next group works."""
    begin, ports = time.monotonic(), (str(free_port()), str(free_port()))
    running = [start(rank, ports, fault, where) for rank in range(2)]
    try:
        if fault == "dies":  # another process takes its place
            assert running[1].wait(timeout=60) == 9
            running.append(start(1, ports, "again", where))
        said = [one.communicate(timeout=90)[0].splitlines() for one in (running[0], running[-1])]
    finally:
        for process in running:
            process.kill()
    for lines, expected in zip(said, SAID[fault], strict=True):
        assert not expected or re.match(expected, lines[0]), said
        assert lines[bool(expected) :] == ["and again"], said
    assert time.monotonic() - begin < 80


@pytest.mark.parametrize("fault", SAID)
def test_a_rank_that_goes_wrong_ends_the_other_and_the_next_group_works(fault: str) -> None:
    devices(2)
    check_fault(fault, "device")


@pytest.mark.parametrize("transport", ["nccl", "copies"])
def test_messages_keep_their_order_and_their_bytes(transport: str) -> None:
    def on_rank(group: Any) -> Any:
        other = 1 - group.rank
        sent = [cupy.full(n, 10 * group.rank + i, "int16") for i, n in enumerate((1, 2**16 + 1, 3))]
        found = [cupy.empty_like(x) for x in sent]
        group.exchange([(other, x) for x in sent], [(other, x) for x in found]).wait()
        group.finish()
        assert group.bytes_sent == 2 * (2**16 + 5)
        return [int(x[-1]) for x in found]

    found = distributed.run(on_rank, devices(2), transport=transport, timeout=30)
    assert found == [[10, 11, 12], [0, 1, 2]]


@pytest.mark.parametrize("transport", ["nccl", "copies"])
@pytest.mark.parametrize(
    "cuts", [[(0, 300), (300, 1001)], [(0, 0), (0, 1001)]], ids=["uneven", "none and all"]
)
def test_heads_at_a_pitch_travel_and_nothing_beside_them_changes(
    transport: str, cuts: list[tuple[int, int]]
) -> None:
    """Batch 2, rows of a rank in two ranges, heads of the middle: what lies around them stays."""

    def on_rank(group: Any) -> Any:
        other = 1 - group.rank
        mine, theirs = cuts[group.rank], cuts[other]
        numbers = (cupy.arange(2 * 6 * 1001 * 40) % 30000).astype("int16").reshape(2, 6, 1001, 40)
        x = numbers + cupy.int16(group.rank)
        y = cupy.full((2, 3, 1003, 40), -7, "int16")
        shifted = [tuple(1 + i for i in rows) for rows in (mine, theirs)]
        heads = slice(2, 5)
        sends = [Message(rank, x[:, heads, slice(*mine)], 2) for rank in (other, group.rank)]
        receives = [
            Message(other, y[:, :, slice(*shifted[1])], 2),
            Message(group.rank, y[:, :, slice(*shifted[0])], 2),
        ]
        work = group.prepare(sends, receives)
        work.begin()
        work.wait()
        group.finish()
        assert group.bytes_sent == 2 * 3 * (mine[1] - mine[0]) * 40 * 2
        found = y.get()
        assert (found[:, :, [0, -1]] == -7).all()
        for rank, (begin, end) in ((group.rank, mine), (other, theirs)):
            right = (numbers + cupy.int16(rank))[:, heads].get()
            np.testing.assert_array_equal(found[:, :, begin + 1 : end + 1], right[:, :, begin:end])

    distributed.run(on_rank, devices(2), transport=transport, timeout=30)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("transport", ["nccl", "copies"])
@pytest.mark.parametrize("zigzag", [False, True])
def test_calls_one_after_the_other_have_the_same_bits(
    mesh: Mesh, transport: str, zigzag: bool
) -> None:
    """Batch 2, uneven rows, the same memory again and again: the first call, which compiles and so
    waits everywhere, and the third, which does not, come to the same bits."""
    q, k = normal((2, 8, 1500, 64), (2, 8, 1500, 64))[:2]
    v = normal(k.shape, k.shape, seed=5)[0]
    cuts = [0, 100, 700, 701, 1500] if mesh.size == 4 else [0, 301, 1500]
    rows = Partition.contiguous(np.diff(cuts).tolist())
    if zigzag:
        rows = Partition.zigzag(1500, mesh.size)
    how = {"variant": "fa_tc", "causal": zigzag, "partition": rows, **asked_for(mesh)}

    def on_rank(group: Any) -> Any:
        own = [cupy.asarray(rows.take(x, group.rank)) for x in (q, k, v)]
        calls = [distributed.parallel_attention(*own, group, **how) for _ in range(3)]
        return [o.get() for o in calls]

    found = distributed.run(on_rank, devices(mesh.size), transport=transport, timeout=60)
    first, _, third = (rows.join([of_rank[i] for of_rank in found]) for i in range(3))
    np.testing.assert_array_equal(bits(first), bits(third))
    shared = Shared(mesh, rows, rows)
    judged = {"variant": "fa_tc", "causal": zigzag, "form": form()}
    assert distributed.judge(third, q, k, v, shared, **judged) <= 1


def test_what_is_computed_behind_a_prepared_message_does_not_change_it() -> None:
    """Memory is given back and taken again while the message waits for the host to send it off."""

    def on_rank(group: Any) -> int:
        other, wrong = 1 - group.rank, 0
        for turn in range(20):
            x, y = cupy.full(2**20, turn, "int32"), cupy.empty(2**20, "int32")
            work = group.prepare([Message(other, x)], [Message(other, y)])
            for _ in range(5):  # scratch memory of the same size, behind the mark
                scratch = cupy.full(2**20, -1, "int32")
                scratch *= 3
                del scratch
            work.begin()
            work.wait()
            wrong += int((y != turn).sum())
        group.finish()
        return wrong

    for transport in ("nccl", "copies"):
        assert distributed.run(on_rank, devices(2), transport=transport, timeout=30) == [0, 0]


def test_devices_of_a_process_that_reach_each_other_use_copy_engines() -> None:
    two = devices(2)
    reach = all(cupy.cuda.runtime.deviceCanAccessPeer(a, b) for a, b in ((0, 1), (1, 0)))
    kinds = distributed.run(type, two, timeout=30)
    assert kinds == [distributed.CopyGroup if reach else distributed.NcclGroup] * 2
