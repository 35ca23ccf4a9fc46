"""Groups on torch's process groups: results, gradients, faults, and what diffusers asks of them.

Ranks are threads with gloo here; `test_context_parallel.py` starts processes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn import distributed
from cupyattn.distributed import Mesh, Partition, RankError, Shared, torch_groups
from cupyattn.distributed import group as groups
from cupyattn.distributed.group import Message
from cupyattn.errors import UnsupportedError
from tests.distributed.distributed_cases import asked_for, fewer, partitions
from tests.distributed.test_distributed_nccl import Array, Device, Event, FakeNccl, Now, Runtime
from tests.support.torch_ranks import on_threads

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

X = np.ones((1, 4, 8, 16), np.float16)


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def without_errors(function: Any, size: int, **options: Any) -> list[Any]:
    found, errors = on_threads(function, size, **options)
    assert errors == [None] * size
    return found


def attend(
    operands: Any, shared: Shared, d_out: np.ndarray, d_lse: np.ndarray | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """O, lse and gradients of tensors of all ranks, joined; the last rank's loss has no lse."""
    rows = shared.rows_q, shared.rows_kv, shared.rows_kv
    how = {**asked_for(shared.mesh), "partition": rows[:2], **options}

    def on_rank(group: Any) -> Any:
        own = [
            torch.from_numpy(r.take(x, group.rank)).requires_grad_()
            for r, x in zip(rows, operands, strict=True)
        ]
        o, lse = distributed.parallel_attention(*own, group, return_lse=True, **how)
        assert isinstance(o, torch.Tensor) and o.requires_grad and lse.requires_grad
        results, given = [o], [torch.from_numpy(rows[0].take(d_out, group.rank))]
        if d_lse is not None and group.rank + 1 < group.size:
            results.append(lse)
            given.append(torch.from_numpy(rows[0].take(d_lse, group.rank, 2)))
        return o, lse, torch.autograd.grad(results, own, given)

    found = without_errors(on_rank, shared.mesh.size)
    gradients = [
        torch.from_numpy(r.join([of_rank[2][i].numpy() for of_rank in found]))
        for i, r in enumerate(rows)
    ]
    o = rows[0].join([of_rank[0].detach().numpy() for of_rank in found])
    lse = rows[0].join([of_rank[1].detach().numpy() for of_rank in found], axis=-1)
    return torch.from_numpy(o), torch.from_numpy(lse), gradients


@pytest.mark.parametrize("mesh", [Mesh(2, 1), Mesh(2, 2), Mesh(4, 2)], ids=str)
@pytest.mark.parametrize("variant", ["fa_tc", "fa_int8"])
def test_tensors_are_computed_and_differentiated_within_the_bound(mesh: Mesh, variant: str) -> None:
    q, d_out = normal((1, 4, 24, 16), 1), normal((1, 4, 24, 16), 2)
    k, v = normal((1, 2, 24, 16), 3), normal((1, 2, 24, 16), 4)
    rows = Partition.zigzag(24, mesh.size)
    shared = Shared(mesh, rows, rows)
    options = {"causal": True, "variant": variant}
    if variant == "fa_int8":
        options["quant"] = ca.QuantConfig(smooth_k=False)
    o, lse, gradients = attend((q, k, v), shared, d_out, **options)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    assert distributed.judge(o, *tensors, shared, lse=lse, **options) <= 1
    given = torch.from_numpy(d_out), *tensors, o, lse
    assert distributed.judge_backward(gradients, *given, shared, causal=True) <= 1


@pytest.mark.parametrize("mesh", [Mesh(2, 1), Mesh(2, 2), Mesh(4, 2)], ids=str)
def test_gradients_go_through_the_log_sum_exp(mesh: Mesh) -> None:
    """Also where the loss of one rank does not use it."""
    q, d_out = normal((1, 4, 24, 16), 1), normal((1, 4, 24, 16), 2)
    k, v = normal((1, 2, 24, 16), 3), normal((1, 2, 24, 16), 4)
    d_lse = np.float32(8) * normal((1, 4, 24), 5)
    rows = Partition.contiguous(24, mesh.size)
    shared = Shared(mesh, rows, rows)
    o, lse, gradients = attend((q, k, v), shared, d_out, d_lse, causal=True)
    d_lse[:, :, slice(*rows.ranges[-1][0])] = 0
    given = d_out, q, k, v, o, lse
    options = {"causal": True}
    assert distributed.judge_backward(gradients, *given, shared, d_lse=d_lse, **options) <= 1
    assert distributed.judge_backward(gradients, *given, shared, **options) > 1


def test_a_second_derivative_is_refused_and_not_zero() -> None:
    def on_rank(group: Any) -> Any:
        x = torch.from_numpy(X).requires_grad_()
        o = distributed.parallel_attention(x, x, x, group)
        (dx,) = torch.autograd.grad(o.sum(), x, create_graph=True)
        (o.sum() + dx.square().sum()).backward()

    _, errors = on_threads(on_rank, 2, method="ring")
    assert all("parallel_attention has no second derivative" in str(e) for e in errors)


@pytest.mark.slow
def test_compiled_code_calls_ranks_between_graphs() -> None:
    def on_rank(group: Any) -> None:
        def layer(x: Any) -> Any:
            return 2 * distributed.parallel_attention(x, x, x, group)

        x = torch.from_numpy(X).requires_grad_()
        found, expected = torch.compile(layer, backend="eager")(x), layer(x)
        assert torch.equal(found, expected) and found.requires_grad

    distributed.run(on_rank, 1)


def test_a_transform_of_ranks_is_refused() -> None:
    def on_rank(group: Any) -> None:
        def layer(x: Any) -> Any:
            return distributed.parallel_attention(x, x, x, group)

        x, func = torch.from_numpy(X), torch.func
        for call in (
            lambda: func.vmap(layer)(x[None]), lambda: func.vjp(layer, x),
            lambda: func.jvp(layer, (x,), (x,)),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=r"^q is a tensor within torch\.func or vmap"):
                call()

    distributed.run(on_rank, 1)


def test_tensors_without_gradients_are_computed_as_arrays_are() -> None:
    def on_rank(group: Any) -> Any:
        own = torch.from_numpy(normal((1, 2, 8, 16), group.rank)).bfloat16()
        arrays = own.float().numpy().astype(ca.arrays.kinds.STORAGE["bfloat16"])
        with torch.no_grad():
            needing = own.requires_grad_()
            o = distributed.parallel_attention(needing, needing, needing, group)
        same = distributed.parallel_attention(arrays, arrays, arrays, group)
        return o.dtype, o.requires_grad, np.array_equal(o.float().numpy(), same.astype(np.float32))

    assert without_errors(on_rank, 2, method="ulysses") == [(torch.bfloat16, False, True)] * 2


def test_a_call_of_tensors_is_known_after_the_first() -> None:
    """Ranks that have agreed on a call compare one word."""

    def on_rank(group: Any) -> Any:
        words = []
        for seed in range(3):
            own = torch.from_numpy(normal((1, 2, 8, 16), seed))
            before = group._calls
            distributed.parallel_attention(own, own, own, group)
            words.append(group._calls - before)
        return words

    assert without_errors(on_rank, 2, method="ring") == [[3, 1, 1]] * 2


def test_packed_tensors_are_differentiated() -> None:
    ends = np.array([0, 5, 12], np.int32)
    rows = Partition.zigzag_varlen(ends, 2)
    q, k, v, d_out = (normal((1, 2, 12, 16), n) for n in range(4))

    def packed(x: np.ndarray, rank: int) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows.take(x, rank)[0].swapaxes(0, 1)))

    def on_rank(group: Any) -> Any:
        own = [packed(x, group.rank).requires_grad_() for x in (q, k, v)]
        how = {"partition": "zigzag", "causal": True, "return_lse": True, "variant": "fa_tc"}
        o, lse = distributed.parallel_attention_varlen(*own, ends, ends, group, **how)
        found = torch.autograd.grad(o, own, packed(d_out, group.rank))
        rows_first = [x.detach().numpy() for x in (o, *found)]
        return [x.swapaxes(0, 1)[None] for x in rows_first], lse.detach().numpy()[None]

    found = without_errors(on_rank, 2, method="ring")
    o, *gradients = (rows.join([of_rank[0][n] for of_rank in found]) for n in range(4))
    lse = rows.join([of_rank[1] for of_rank in found], axis=-1)
    shared = Shared(Mesh(2, 1), rows, rows, ends, ends)
    given = d_out, q, k, v, o, lse
    assert distributed.judge(o, q, k, v, shared, variant="fa_tc", causal=True) <= 1
    assert distributed.judge_backward(gradients, *given, shared, causal=True) <= 1


def judge_random(seed: int, size: int, ulysses: int, rows: Any, keys: Any, causal: bool) -> None:
    """A random partition of random operands, forward and backward."""
    mesh = Mesh(size, ulysses)
    shared = Shared(mesh, rows, keys)
    q, d_out = (normal((1, 4, rows.length, 8), seed + i) for i in range(2))
    k, v = (normal((1, 2, keys.length, 8), seed + i) for i in range(2, 4))
    options: dict[str, Any] = {"causal": causal, "causal_align": "top-left"}
    o, lse, gradients = attend((q, k, v), shared, d_out, variant="fa_tc", **options)
    assert distributed.judge(o, q, k, v, shared, variant="fa_tc", lse=lse, **options) <= 1
    found = distributed.judge_backward(gradients, d_out, q, k, v, o, lse, shared, **options)
    assert found <= 1


CASES = st.sampled_from([(2, 1), (2, 2), (3, 1), (4, 2), (4, 4)]).flatmap(
    lambda mesh: st.tuples(
        st.integers(0, 2**20), st.just(mesh[0]), st.just(mesh[1]), partitions(mesh[0], 20),
        partitions(mesh[0], 14), st.booleans(),
    )  # fmt: skip
)


@settings(fewer, max_examples=3)
@given(CASES)
def test_random_partitions(case: Any) -> None:
    judge_random(*case)


@pytest.mark.slow
@settings(max_examples=200)
@given(CASES)
def test_two_hundred_random_partitions(case: Any) -> None:
    judge_random(*case)


# ---- what from_torch takes -----------------------------------------------------------------------


def test_a_group_of_torch_is_described_as_others_are() -> None:
    def on_rank(group: Any) -> Any:
        assert group.gather("word", group.rank) == [0, 1]
        assert group.namespace == "numpy" and len(group.hosts) == 2
        with group:
            pass
        return group.rank, group.size, group.mesh

    assert without_errors(on_rank, 2) == [(0, 2, None), (1, 2, None)]
    assert without_errors(on_rank, 2, method="ring")[1] == (1, 2, Mesh(2, 1))
    assert without_errors(on_rank, 2, method="ulysses")[1] == (1, 2, Mesh(2, 2))


def test_two_groups_on_one_process_group_keep_their_words_apart() -> None:
    def on_rank(group: Any) -> Any:
        other = distributed.from_torch(group.process_group)
        return group.gather("a", 1), other.gather("b", 2), group.gather("c", 3)

    assert without_errors(on_rank, 2) == [([1, 1], [2, 2], [3, 3])] * 2


def test_two_groups_on_one_process_group_keep_their_arrays_apart() -> None:
    """Calls of threads may come in another order on each rank."""

    def on_rank(group: Any) -> Any:
        both = [group, distributed.from_torch(group.process_group)]
        if group.rank:
            both.reverse()
        arrays = [np.full(3, n) if group.rank == 0 else np.empty(3, int) for n in range(2)]
        works = [
            one.exchange([(1, x)], []) if group.rank == 0 else one.exchange([], [(0, x)])
            for one, x in zip(both, arrays, strict=True)
        ]
        for work in works:
            work.wait()
        return [int(x[0]) for x in arrays]

    assert without_errors(on_rank, 2) == [[0, 1], [1, 0]]


def test_what_is_no_group_of_torch_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"call torch\.distributed\.init_process_group"):
        distributed.from_torch()
    with pytest.raises(ValueError, match="method must be 'ring', 'ulysses' or None, got 'auto'"):
        distributed.from_torch(method="auto")
    with pytest.raises(TypeError, match="device must be the number of a CUDA device or 'cpu'"):
        distributed.from_torch(device="cuda:1")
    with pytest.raises(ValueError, match="timeout must be positive"):
        distributed.from_torch(timeout=0)


def test_what_one_rank_is_refused_ends_the_call_of_all() -> None:
    def on_rank(group: Any) -> None:
        distributed.parallel_attention(X, X, [X, "no array"][group.rank], group)

    _, errors = on_threads(on_rank, 2)
    assert type(errors[1]) is TypeError
    assert str(errors[0]) == f"rank 1 raised TypeError: {errors[1]} (in parallel_attention)"


def test_tensors_are_shared_and_gathered() -> None:
    def on_rank(group: Any) -> Any:
        x = torch.arange(12.0).reshape(3, 2, 2).requires_grad_()
        own, _, _ = distributed.share(x, x, x, group)
        return own.shape[0], torch.equal(distributed.gather(own, group), x)

    assert without_errors(on_rank, 2) == [(2, True), (1, True)]


# ---- faults --------------------------------------------------------------------------------------


def test_other_settings_are_found_before_anything_is_sent() -> None:
    sent = []

    def on_rank(group: Any) -> Any:
        own = torch.from_numpy(X)
        try:
            distributed.parallel_attention(own, own, own, group, softcap=float(group.rank))
        finally:
            sent.append(group.bytes_sent)

    _, errors = on_threads(on_rank, 2, method="ring")
    said = {str(error) for error in errors}
    assert len(said) == 1 and sent == [0, 0]
    told = "rank 1 called parallel_attention with softcap=1.0, rank 0 with softcap=0.0"
    assert said.pop().startswith(told)


def test_one_rank_without_autograd_is_named() -> None:
    def on_rank(group: Any) -> Any:
        own = torch.from_numpy(X).requires_grad_()
        with torch.set_grad_enabled(group.rank == 0):
            return distributed.parallel_attention(own, own, own, group)

    _, errors = on_threads(on_rank, 2, method="ring")
    told = "rank 1 called parallel_attention with autograd=false, rank 0 with autograd=true"
    assert [str(error).partition(":")[0] for error in errors] == [told] * 2


def test_a_rank_that_does_not_come_ends_the_others_in_time() -> None:
    def on_rank(group: Any) -> Any:
        if group.rank:
            return None
        own = torch.from_numpy(X)
        return distributed.parallel_attention(own, own, own, group)

    _, errors = on_threads(on_rank, 2, timeout=0.3)
    assert str(errors[0]) == "rank 1 did not come to 'parallel_attention, call 1' within 0.3 s"


def test_a_rank_that_raises_ends_those_that_wait_for_its_arrays() -> None:
    begun = threading.Event()

    def on_rank(group: Any) -> Any:
        x = np.ones(4, np.float32)
        if group.rank == 1:
            with group.failing_together("a test"):
                begun.wait(10)
                raise MemoryError("no room")
        work = group.exchange([Message(1, x)], [Message(1, np.empty_like(x))])
        begun.set()
        work.wait()
        return None

    _, errors = on_threads(lambda group: _as_value_error(on_rank, group), 2, timeout=20)
    assert str(errors[0]) == "rank 1 raised MemoryError in a test: no room"


def _as_value_error(function: Any, group: Any) -> Any:
    try:
        return function(group)
    except MemoryError as error:
        raise ValueError(str(error)) from error


def test_a_group_that_has_failed_stays_so() -> None:
    def on_rank(group: Any) -> Any:
        if group.rank:
            group.abort("gave up")
        with pytest.raises(RankError, match="rank 1 gave up"):
            group.barrier()
        return str(pytest.raises(RankError, group.barrier).value)

    assert without_errors(on_rank, 2) == ["rank 1 gave up"] * 2


# ---- sums in the type of q -----------------------------------------------------------------------


@pytest.mark.parametrize("wide", [True, False])
def test_a_ring_adds_up_in_float32_or_in_its_own_type(wide: bool) -> None:
    from cupyattn.distributed.agreement import ShardedSettings
    from cupyattn.distributed.parallel import on_ranks
    from cupyattn.problem.settings import Settings

    q, k, v, d_out = (normal((1, 2, 32, 16), n) for n in range(4))
    rows = Partition.contiguous(32, 4)
    shared = Shared(Mesh(4, 1), rows, rows)
    asked = ShardedSettings(Settings(variant="fa_tc"), "ring", None, "contiguous", wide_sums=wide)
    seen = []

    def on_rank(group: Any) -> Any:
        own = {
            n: torch.from_numpy(rows.take(x, group.rank)).requires_grad_()
            for n, x in zip("qkv", (q, k, v), strict=True)
        }
        call, o, lse = on_ranks("a test", asked, group, own)
        seen.append(call.wide_sums)
        given = torch.from_numpy(rows.take(d_out, group.rank))
        found = torch.autograd.grad(o, list(own.values()), given)
        return o.detach().numpy(), lse.numpy(), [x.numpy() for x in found]

    found = without_errors(on_rank, 4)
    o = rows.join([of_rank[0] for of_rank in found])
    lse = rows.join([of_rank[1] for of_rank in found], axis=-1)
    gradients = [rows.join([of_rank[2][i] for of_rank in found]) for i in range(3)]
    given = d_out, q, k, v, o, lse
    assert distributed.judge_backward(gradients, *given, shared, wide_sums=wide) <= 1
    assert seen == [wide] * 4
    assert distributed.judge(o, q, k, v, shared, variant="fa_tc", wide_sums=wide) <= 1
    if not wide:
        of_float32 = distributed.judge(o, q, k, v, shared, variant="fa_tc")
        assert of_float32 > distributed.judge(o, q, k, v, shared, variant="fa_tc", wide_sums=False)


# ---- devices, played by the host -----------------------------------------------------------------


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy and NCCL as groups of devices see them, with NumPy arrays and gloo in their place."""
    numbers: Counter[Any] = Counter()

    def batch(operations: Any) -> list[Any]:
        works = []
        for way, tensor, group, peer in sorted(operations, key=lambda one: one[0]):
            own = group.rank()
            pair = (own, peer) if way == "send" else (peer, own)
            numbers[way, pair] += 1
            call = group.send if way == "send" else group.recv
            works.append(call([tensor], peer, numbers[way, pair]))
        return works

    nothing = contextlib.nullcontext()
    monkeypatch.setattr(
        torch_groups, "_torch", lambda: SimpleNamespace(
            cuda=SimpleNamespace(
                device=lambda _: nothing, stream=lambda _: nothing,
                ExternalStream=lambda *_: None, default_stream=lambda *_: None,
            ),
            zeros=lambda *_, **__: None, device=torch.device,
            from_dlpack=lambda x: torch.from_numpy(x.view(np.ndarray)),
            distributed=SimpleNamespace(
                is_available=lambda: True, ProcessGroup=torch.distributed.ProcessGroup,
                all_reduce=lambda *_, **__: None, isend="send", irecv="recv",
                P2POp=lambda way, x, group, group_peer: (way, x, group, group_peer),
                batch_isend_irecv=batch,
            ),
        ),
    )  # fmt: skip
    fake = FakeNccl()
    monkeypatch.setattr(Array, "nccl", fake, raising=False)
    cuda = SimpleNamespace(
        Device=Device, Event=Event, get_current_stream=Now, runtime=Runtime(fake)
    )
    monkeypatch.setattr(
        groups, "_cupy", lambda: SimpleNamespace(
            cuda=cuda, empty=lambda shape, dtype: np.empty(shape, dtype).view(Array)
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("handle", "entered"), [(0, "default of 3"), (7, "7 of 3")])
def test_the_null_stream_is_torchs_own(
    handle: int, entered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a handle of 0 ExternalStream makes another stream, which waits for nothing."""
    torchs = SimpleNamespace(
        stream=lambda x: x, default_stream=lambda device: f"default of {device}",
        ExternalStream=lambda x, device: f"{x or 'another'} of {device}",
    )  # fmt: skip
    cupys = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=handle))
    group = object.__new__(torch_groups.TorchDeviceGroup)
    group.device = 3
    monkeypatch.setattr(group, "_torch", SimpleNamespace(cuda=torchs), raising=False)
    monkeypatch.setattr(group, "_cupy", SimpleNamespace(cuda=cupys), raising=False)
    assert group.on_stream() == entered


class Played(torch_groups.TorchDeviceGroup):
    namespace = "numpy"

    def prepare(self, sends: Any, receives: Any) -> Any:
        sends, receives = ([Message(*m) for m in some] for some in (sends, receives))
        for _, x, _ in receives:
            x[...] = np.nan  # until it comes
        return super().prepare(
            *([m._replace(array=m.array.view(Array)) for m in some] for some in (sends, receives))
        )


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(4, 2), Mesh(3, 1)], ids=str)
def test_devices_exchange_heads_that_lie_apart(mesh: Mesh) -> None:
    """Each message of NCCL's lies together: the same bits as with any other group."""
    q, k, v = (normal((2, 8, 24, 8), n) for n in range(3))
    rows = Partition.zigzag(24, mesh.size)
    how = {"partition": "zigzag", "causal": True, "variant": "fa_tc", **asked_for(mesh)}

    def attend_as(group: Any) -> Any:
        own = (rows.take(x, group.rank) for x in (q, k, v))
        return distributed.parallel_attention(*own, group, **how)

    def on_rank(group: Any) -> Any:
        pg = group.process_group
        store = torch_groups.TorchStore(pg, pg.rank(), pg.size())
        return attend_as(Played(store, pg.rank(), pg, 0, timeout=20))

    found = without_errors(on_rank, mesh.size)
    expected = distributed.run(attend_as, mesh.size)
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
