"""Arguments of ranks may be NumPy numbers, lists and arrays, as on one device."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn import distributed
from cupyattn.distributed import Partition, RankError
from cupyattn.distributed import group as groups
from cupyattn.distributed.rank_calls import Calls
from cupyattn.distributed.store import Board
from cupyattn.distributed.tcp import TcpServer, TcpStore
from cupyattn.errors import UnsupportedError
from tests.distributed.distributed_cases import ROWS, X, attend, errors_of, fewer, packed
from tests.support.ranks import in_threads
from tests.support.runs import bits, normal

# ---- types of settings ---------------------------------------------------------------------------

SAME: list[tuple[str, Any, Any]] = [
    ("window", (3, 1), [3, 1]),
    ("window", (3, 1), (np.int64(3), np.int8(1))),
    ("scale", 0.5, np.float32(0.5)),
    ("scale", 0.5, Fraction(1, 2)),
    ("softcap", 2.0, np.float16(2)),
    ("softcap", 2.0, 2),
    ("causal", True, np.True_),
    ("return_lse", True, np.True_),
    ("causal", None, None),
    ("method", "ulysses", np.str_("ulysses")),
    ("partition", (ROWS, ROWS), [ROWS, ROWS]),
    ("partition", ROWS, Partition([[(0, 8)], [[np.int64(8), 16]]])),  # type: ignore[arg-type]
    ("partition", ROWS, Partition.contiguous(np.array([8, 8]))),  # type: ignore[arg-type]
    ("partition", ROWS, Partition.contiguous(np.int64(16), np.int64(2))),  # type: ignore[arg-type]
    ("partition", Partition.zigzag(16, 2), Partition.zigzag(np.int32(16), np.int64(2))),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("name", "plain", "other"), SAME, ids=lambda x: str(x)[:30])
def test_a_value_of_another_type_is_the_same_call(name: str, plain: Any, other: Any) -> None:
    """Whoever gives it, all or one of the ranks, and the call is known afterwards."""

    def on_rank(own: Any) -> Any:
        found = []
        for value in (other if own.rank else plain, other, plain):
            found.append(attend(own, **{name: value}))
            assert len(own.agreed) == 1
        return found

    for first, *others in distributed.run(on_rank, 2):
        for one in others:
            for a, b in zip(first, one, strict=True):
                np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("ulysses", [2, np.int64(2), np.array(2)], ids=repr)
def test_a_whole_number_of_any_type_says_how_many_exchange_heads(ulysses: Any) -> None:
    def on_rank(own: Any) -> Any:
        return attend(own, method="mixed", ulysses=ulysses if own.rank else 2)

    whole = ca.attention(*[np.concatenate([X, X], axis=2)] * 3)
    np.testing.assert_array_equal(ROWS.join(distributed.run(on_rank, 2)), whole)


REFUSED: list[tuple[str, Any, Any]] = [
    ("causal", True, 1), ("causal", True, np.array(True)), ("return_lse", True, 1),
    ("window", (3, 1), (3.0, 1.0)), ("window", (3, 1), 3), ("window", (3, 1), None),
    ("window", (3, 1), np.array([3, 1])), ("window", (3, 1), {3, 1}), ("scale", 0.5, 10**400),
    ("scale", 0.5, "0.5"), ("scale", 0.5, 0.5 + 0j), ("scale", 0.5, np.array(0.5)),
    ("scale", 0.5, -1), ("softcap", 2.0, 2 + 0j), ("softcap", 2.0, [2.0]),
    ("layout", "BHSD", ["BHSD"]), ("tiles", None, (64, 64, 4)), ("quant", None, "int8"),
    ("arch", None, 90),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plain", "wrong"), REFUSED, ids=lambda x: str(x)[:30])
def test_a_value_is_refused_as_one_device_refuses_it(name: str, plain: Any, wrong: Any) -> None:
    """Before the call with its equal, and after; the other rank is told, and both go on."""
    with pytest.raises((TypeError, ValueError)) as alone:
        ca.attention(X, X, X, **{name: wrong})
    expected = alone.type, str(alone.value)

    def on_rank(own: Any) -> None:
        for _ in range(2):
            with pytest.raises((TypeError, ValueError, RankError)) as found:
                attend(own, **{name: wrong if own.rank else plain})
            if own.rank:
                assert (found.type, str(found.value)) == expected
            else:
                assert found.type is RankError
                assert f"rank 1 raised {expected[0].__name__}: {expected[1]}" in str(found.value)
            attend(own, **{name: plain})

    assert errors_of(2, on_rank) == [None, None]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "mixed", "ulysses": 2.0}, TypeError, "ulysses must be a whole .* got 2.0"),
        ({"method": "mixed", "ulysses": True}, TypeError, "ulysses must be a whole .* got True"),
        ({"method": "mixed", "ulysses": "2"}, TypeError, "ulysses must be a whole .* got '2'"),
        ({"method": ["ring"]}, ValueError, r"method must be one of .*, got \['ring'\]"),
        ({"method": np.array(["ring", "ring"])}, ValueError, "method must be one of .* array of"),
        ({"partition": np.array([8, 8])}, TypeError, r"partition must be .* array of shape \(2,\)"),
        ({"partition": [8, 8]}, TypeError, r"partition must be .*, got \[8, 8\]"),
        ({"partition": [ROWS]}, TypeError, "partition must be 'contiguous', .* one of q and one"),
        ({"partition": b"zigzag"}, TypeError, "partition must be .*, got b'zigzag'"),
    ],
)  # fmt: skip
def test_what_ranks_alone_ask_for_is_refused_in_a_sentence(
    options: Any, error: Any, message: str
) -> None:
    """Also after a call with an equal value was agreed on."""

    def on_rank(own: Any) -> None:
        attend(own, method="mixed", ulysses=2)
        for _ in range(2):
            with pytest.raises(error if own.rank else RankError, match=message):
                attend(own, **(options if own.rank else {}))

    assert errors_of(2, on_rank) == [None, None]


#: Calls that shapes and options allow, and no kernel takes.
UNFIT: list[dict[str, Any]] = [
    {"variant": "fa_tc", "tiles": ca.Tiles(33, 64, 4)},
    {"variant": "fa_tc", "tiles": ca.Tiles(64, 64, 4), "arch": "sm_90a"},
    {"variant": "fa", "tiles": ca.Tiles(4096, 4096, 4), "causal": True},
    {"variant": "fa_int8", "tiles": ca.Tiles(64, 16, 4), "quant": ca.QuantConfig(pv="int8")},
]  # fmt: skip
HOW: list[dict[str, Any]] = [
    {"method": "ring"}, {"method": "ulysses"}, {"method": "mixed", "ulysses": 1},
]  # fmt: skip


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("options", UNFIT, ids=lambda x: str(x["tiles"]))
def test_what_a_kernel_refuses_of_all_ranks_leaves_them_a_group(options: Any, how: Any) -> None:
    """Each raises what one device raises, before the ranks exchange anything."""
    with pytest.raises((ValueError, UnsupportedError)) as alone:
        ca.attention(X, X, X, **options)

    def on_rank(own: Any) -> None:
        for _ in range(2):
            with pytest.raises(alone.type) as found:
                attend(own, **options, **how)
            assert str(found.value) == str(alone.value)
            attend(own, **how)

    assert errors_of(2, on_rank, timeout=10) == [None, None]


def test_what_a_kernel_refuses_of_packed_sequences_leaves_a_group() -> None:
    x, ends = packed(X), np.array([0, 10, 16])

    def on_rank(own: Any) -> None:
        for method in ("ring", "ulysses"):
            with pytest.raises(ValueError, match="fa_tc .* does not take Tiles"):
                distributed.parallel_attention_varlen(
                    x, x, x, ends, ends, own, method, variant="fa_tc", tiles=ca.Tiles(33, 64, 4)
                )
            distributed.parallel_attention_varlen(x, x, x, ends, ends, own, method)

    assert errors_of(2, on_rank, timeout=10) == [None, None]


def test_codes_of_no_keys_that_cannot_be_made_leave_a_group() -> None:
    """A rank of a ring makes codes of no rows and no keys, too."""
    nothing = X[:, :, :0]

    def on_rank(own: Any) -> None:
        with pytest.raises(ValueError, match="fa_int8 does not take Tiles"):
            distributed.parallel_attention(
                X, nothing, nothing, own, "ring", variant="fa_int8", tiles=ca.Tiles(33, 64, 4)
            )
        attend(own, method="ring")

    assert errors_of(2, on_rank, timeout=10) == [None, None]


def test_a_refusal_on_one_rank_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With devices of several kinds, a kernel may support the call on only some of them."""
    check = Calls.check

    def check_here(self: Any, blocks: Any, q: Any, k: Any, v: Any) -> None:
        if q.shape[2] == 10:
            raise UnsupportedError("not on this device")
        check(self, blocks, q, k, v)

    monkeypatch.setattr(Calls, "check", check_here)

    def on_rank(own: Any) -> None:
        q = np.ones((1, 4, 6 + 4 * own.rank, 16), np.float16)
        error = UnsupportedError if own.rank else RankError
        with pytest.raises(error, match="not on this device"):
            distributed.parallel_attention(q, X, X, own, "ring")
        attend(own)

    assert errors_of(2, on_rank, timeout=10) == [None, None]


#: Values that calls take, of several types, and values that none does.
VALUES: dict[str, list[Any]] = {
    "method": ["ulysses", "auto", "mixed", "rings", None], "ulysses": [2, np.int64(1), 2.0, "2"],
    "partition": ["zigzag", ROWS, [ROWS, ROWS], np.array([8, 8]), None],
    "variant": ["fa", "fa_int8", "none", ["fa"]], "accuracy": ["balanced", "exact"],
    "scale": [0.25, np.float32(0.25), -1, "1"], "causal": [True, np.True_, 1, None],
    "window": [(3, 0), [3, 0], (3.0, 0), 3], "softcap": [2.0, 2, np.inf, [1]],
    "causal_align": ["top-left", "left"], "layout": ["BSHD", None],
    "return_lse": [True, np.True_, 1],
    "quant": [ca.QuantConfig(), ca.QuantConfig(fused=True, smooth_k=False), "int8"],
    "arch": ["sm_80", "none"], "backend": ["mirror", "none", "cuda"],
}  # fmt: skip


@given(st.data())
@fewer
def test_all_ranks_raise_or_none_does_and_they_go_on(data: Any) -> None:
    """Whatever each asks for, first or again: no rank waits for one that has raised."""
    size = data.draw(st.integers(1, 3))
    one = st.sampled_from(sorted(VALUES)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(VALUES[name]))
    )
    of_all = dict(data.draw(st.lists(one, max_size=2)))
    of_ranks = [{**of_all, **dict(data.draw(st.lists(one, max_size=1)))} for _ in range(size)]
    outcomes: list[list[Any]] = [[] for _ in range(2)]

    def on_rank(own: Any) -> None:
        for outcome in outcomes:
            try:
                attend(own, **of_ranks[own.rank])
            except (ValueError, TypeError, UnsupportedError, RankError) as error:
                outcome.append(error)
            else:
                outcome.append(None)
            attend(own)

    distributed.run(on_rank, size, timeout=10)
    for outcome in outcomes:
        assert len({error is None for error in outcome}) == 1, (of_ranks, outcome)
        assert len({str(error) for error in outcome if isinstance(error, RankError)}) <= 1


def test_an_iterator_is_no_window_even_after_an_equal_pair() -> None:
    def on_rank(own: Any) -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="window must be a pair"):
                attend(own, window=iter((3, 1)))
            attend(own, window=(3, 1))

    with pytest.raises(ValueError, match="window must be a pair"):
        ca.attention(X, X, X, window=iter((3, 1)))  # type: ignore[arg-type]
    assert errors_of(2, on_rank) == [None, None]


def test_a_pair_of_partitions_goes_with_a_switch_that_is_left_open() -> None:
    for found in errors_of(2, lambda own: attend(own, causal=None, partition=[ROWS, ROWS])):
        assert found is None


def test_backends_that_differ_are_named() -> None:
    def on_rank(own: Any) -> None:
        attend(own, backend="interpret" if own.rank else None)

    for found in errors_of(2, on_rank):
        assert str(found) == (
            'rank 1 called parallel_attention with backend="interpret", rank 0 with '
            'backend="mirror": give all ranks the same backend'
        )


WIDE = X.astype(np.float32)


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        ((X, X, X), {"deterministic": "no"}), ((X, X, X), {"deterministic": 1}),
        ((WIDE, WIDE, WIDE), {}), ((ca.quantize(X, X, X), X, X), {}), ((X, X, X), {"causal": 1}),
    ],
)  # fmt: skip
def test_gradients_are_refused_as_one_device_refuses_them(arrays: Any, options: Any) -> None:
    lse = np.ones((1, 4, 8), np.float32)
    with pytest.raises((TypeError, UnsupportedError)) as alone:
        ca.attention_backward(X, *arrays, X, lse, **options)

    def on_rank(own: Any) -> None:
        mine = (arrays, options) if own.rank else ((X, X, X), {"deterministic": True})
        distributed.parallel_attention_backward(X, *mine[0], X, lse, own, **mine[1])

    first, second = errors_of(2, on_rank)
    assert type(second) is alone.type and str(second) == str(alone.value)
    assert isinstance(first, RankError) and str(second) in str(first)


@pytest.mark.parametrize(
    ("ends", "partition", "message"),
    [
        ([0, 9, 16], "contiguous", r'cu_seqlens_q="\[0, 9, 16\]", rank 0 .*="\[0, 10, 16\]"'),
        ([0, 10, *[16] * 50], "contiguous", r'cu_seqlens_q="\[0, 10, 16.*\.\.\., sha256 \w{16}"'),
        ([0, 10, 16], Partition.zigzag(16, 2), r'partition=\["\(.*"\], rank 0 .*="contiguous"'),
    ],
)  # fmt: skip
def test_offsets_and_rows_that_differ_are_shown(ends: Any, partition: Any, message: str) -> None:
    x = packed(X)

    def on_rank(own: Any) -> None:
        mine = (ends, partition) if own.rank else ([0, 10, 16], "contiguous")
        offsets = np.array(mine[0])
        distributed.parallel_attention_varlen(x, x, x, offsets, offsets, own, partition=mine[1])

    for found in errors_of(2, on_rank):
        with pytest.raises(RankError, match=f"^rank 1 called .* with {message}"):
            raise found  # type: ignore[misc]


def test_settings_of_gradients_may_be_of_other_types() -> None:
    q, k = normal((1, 2, 16, 16), (1, 2, 16, 16))[:2]

    def on_rank(own: Any) -> Any:
        mine = [ROWS.take(x, own.rank) for x in (q, k, k)]
        plain = {"causal": True, "window": (5, 0), "scale": 0.5}
        other = {"causal": np.True_, "window": [np.int64(5), 0], "scale": np.float64(0.5)}
        o, lse = distributed.parallel_attention(*mine, own, "ring", return_lse=True, **plain)
        return distributed.parallel_attention_backward(
            o, *mine, o, lse, own, "ring", partition=[ROWS, ROWS], **(other if own.rank else plain)
        )

    gradients = [ROWS.join(x) for x in zip(*distributed.run(on_rank, 2), strict=True)]
    o, lse = ca.attention(q, k, k, causal=True, window=(5, 0), scale=0.5, return_lse=True)
    alone = ca.attention_backward(o, q, k, k, o, lse, causal=True, window=(5, 0), scale=0.5)
    for one, other in zip(gradients, alone, strict=True):
        np.testing.assert_allclose(one.astype(float), other.astype(float), atol=0.02)


def test_a_rank_may_name_what_another_leaves_to_the_default() -> None:
    def on_rank(own: Any) -> Any:
        quant = ca.QuantConfig() if own.rank else None
        return attend(own, variant="fa_int8", quant=quant)

    first, second = distributed.run(on_rank, 2)
    np.testing.assert_array_equal(bits(first), bits(second))


# ---- partitions, ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Partition((((0, 2.0),),)), r"pairs \(begin, end\) of whole numbers"),  # type: ignore[arg-type]
        (lambda: Partition([0, 4]), r"pairs \(begin, end\) of whole numbers"),  # type: ignore[arg-type]
        (lambda: Partition.contiguous(8.0, 2), "length: a whole number of at least 0 .* got 8.0"),  # type: ignore[arg-type]
        (lambda: Partition.contiguous(-4, 2), "length: a whole number of at least 0 .* got -4"),
        (lambda: Partition.contiguous([4, 4.5]), "length: a whole number .* got 4.5"),  # type: ignore[list-item]
        (lambda: Partition.contiguous(8, 0), "size: a whole number of at least 1 .* got 0"),
        (lambda: Partition.zigzag(8.5, 2), "length: a whole number .* got 8.5"),  # type: ignore[arg-type]
        (lambda: Partition.zigzag(8, 2.0), "size: a whole number .* got 2.0"),  # type: ignore[arg-type]
        (lambda: Partition.zigzag_varlen([0, 2.5], 2), "cu_seqlens: a whole number .* got 2.5"),  # type: ignore[list-item]
    ],
)
def test_rows_are_counted_in_whole_numbers(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_group_has_a_whole_number_of_ranks() -> None:
    assert distributed.run(lambda own: own.size, np.int64(2)) == [2, 2]  # type: ignore[arg-type]
    for wrong in (2.0, [0.5], None):
        with pytest.raises(TypeError, match="ranks must be how many there are, or the numbers"):
            distributed.run(lambda own: None, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rank and size must be whole numbers, got rank=0.0"):
        distributed.connect(0.0, 2, "localhost:29400")  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, -1, np.inf, np.nan, 1e300, "5", None])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="^timeout must be "):
        distributed.run(lambda own: own.barrier(), 2, timeout=timeout)
    with pytest.raises((TypeError, ValueError), match="^timeout must be "):
        distributed.connect(0, 1, "localhost:29400", timeout=timeout)


def test_numbers_of_numpy_reach_a_store_of_processes() -> None:
    """The store carries JSON: the others learn of a failed rank, and a timeout is understood."""
    server = TcpServer(2, ("localhost", 0), secret=b"a secret of these tests")
    found: list[Any] = [None, None]

    def on_rank(rank: int) -> None:
        of_server = server if rank == 0 else None
        store = TcpStore(rank, server.address, 20, of_server, secret=b"a secret of these tests")
        own = distributed.HostGroup(store, np.int64(rank), np.int64(2), np.float32(20))  # type: ignore[arg-type]
        assert own.gather("ranks", own.rank) == [0, 1]
        if rank:
            own.abort("has ended")
        with pytest.raises(RankError) as error:
            own.barrier()
        found[rank] = str(error.value)

    in_threads(on_rank, 2, 30)
    server.close(0.0)
    assert found == ["rank 1 has ended"] * 2


# ---- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["fa_tc", "fa_int8"])
@pytest.mark.parametrize("method", ["ring", "ulysses", "auto"])
@pytest.mark.parametrize("first", [0, 16])
def test_a_rank_may_have_neither_rows_nor_keys(variant: str, method: str, first: int) -> None:
    q, k, v = normal((1, 4, 16, 16), (1, 4, 16, 16))
    rows = Partition.contiguous([first, 16 - first])

    def on_rank(own: Any) -> Any:
        mine = [rows.take(x, own.rank) for x in (q, k, v)]
        return distributed.parallel_attention(*mine, own, method, variant=variant)

    found = rows.join(distributed.run(on_rank, 2))
    np.testing.assert_array_equal(bits(found), bits(ca.attention(q, k, v, variant=variant)))


@pytest.mark.parametrize("method", ["ring", "ulysses", "auto"])
@pytest.mark.parametrize("shape", [(0, 2, 8, 16), (1, 0, 8, 16), (1, 2, 0, 16)])
def test_a_call_may_be_of_nothing(shape: tuple[int, ...], method: str) -> None:
    x = np.ones(shape, np.float16)
    found = distributed.run(lambda own: distributed.parallel_attention(x, x, x, own, method), 2)
    assert [one.shape for one in found] == [shape] * 2


def test_offsets_past_32_bits_are_no_small_ones() -> None:
    x = packed(X)

    def on_rank(own: Any) -> None:
        for ends in (np.array([0, 2**32 + 16]), np.array([0, 16, 8]), np.array([1, 16])):
            for partition in ("contiguous", "zigzag"):
                with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0 to 16"):
                    distributed.parallel_attention_varlen(
                        x, x, x, ends, ends, own, partition=partition
                    )
        narrow = np.array([0, 16], np.int16)
        with pytest.raises(ValueError, match="cu_seqlens_q must be int32 or int64"):
            distributed.parallel_attention_varlen(x, x, x, narrow, narrow, own)

    assert errors_of(2, on_rank) == [None, None]


def test_codes_are_refused_in_a_sentence() -> None:
    z = ca.quantize(X, X, X)

    def on_rank(own: Any) -> None:
        expected = UnsupportedError if own.rank else RankError
        for others in (X, None):
            with pytest.raises(expected, match="take no QuantizedQKV: give the arrays that were"):
                distributed.parallel_attention(z if own.rank else X, others, others, own)

    assert errors_of(2, on_rank)[1] is None


@pytest.mark.parametrize(
    ("x", "axis", "error", "message"),
    [
        (X, "rows", ValueError, "axis must be 'batch' or 'heads', got 'rows'"),
        (X, ["batch"], ValueError, r"axis must be 'batch' or 'heads', got \['batch'\]"),
        (np.ones(3), "heads", ValueError, r"x must be an array \(batch, heads, ...\), got"),
        ([1.0], "batch", TypeError, "x must be"),
        (np.ma.ones((2, 2)), "batch", TypeError, "x must not be masked"),
    ],
)
def test_what_cannot_be_gathered_is_told_to_all(
    x: Any, axis: Any, error: Any, message: str
) -> None:
    def on_rank(own: Any) -> None:
        with pytest.raises(error if own.rank else RankError, match=message):
            distributed.gather(*((x, own, axis) if own.rank else (X, own)))
        distributed.gather(X, own)

    assert errors_of(2, on_rank, timeout=5) == [None, None]


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_what_cannot_be_shared_is_refused_in_a_sentence(axis: str) -> None:
    for wrong in (X.tolist(), np.float16(1), None):
        with pytest.raises(ValueError, match=r"k must be an array \(batch, heads, ...\), got "):
            distributed.run(lambda own, wrong=wrong: distributed.share(X, wrong, X, own, axis), 1)


def test_ranks_that_gather_along_other_axes_are_named() -> None:
    x = np.ones((2, 2))

    def on_rank(own: Any) -> None:
        distributed.gather(x, own, "heads" if own.rank else "batch")

    for found in errors_of(2, on_rank, timeout=5):
        assert 'rank 1 called gather with axis="heads", rank 0 with axis="batch"' in str(found)


def test_words_that_json_does_not_know_are_told_to_all() -> None:
    """And a rank that was refused them is at the same call as the others afterwards."""

    def on_rank(own: Any) -> None:
        number = np.int64(3) if own.rank else 3
        with pytest.raises(TypeError if own.rank else RankError, match="not JSON serializable"):
            own.agree("numbers", lambda: {"same": {"number": number}})
        if own.rank:
            with pytest.raises(TypeError, match="not JSON serializable"):
                own.gather("numbers", number)
        assert own.gather("numbers", int(number)) == [3, 3]

    assert errors_of(2, on_rank, timeout=5) == [None, None]


class OnDeviceOne(groups.DeviceGroup):
    """A rank on device 1 whose arrays are NumPy's; `device_of` says where they lie."""

    namespace = "numpy"

    def _prepare(self, *_: Any) -> Any: ...

    def finish(self) -> None: ...


def test_arrays_on_the_device_of_another_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_cupy", lambda: None)
    own = OnDeviceOne(Board(1), 0, 1, device=1)
    monkeypatch.setattr(groups, "device_of", lambda _: 1)
    attend(own)
    monkeypatch.setattr(groups, "device_of", lambda _: 0)
    message = "must lie on device 1, the device of rank 0, got device 0: make it in"
    with pytest.raises(ValueError, match=f"^q {message}"):
        attend(own, causal=True)
    with pytest.raises(ValueError, match=f"^x {message}"):
        distributed.gather(X, own)
