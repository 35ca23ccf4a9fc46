"""The host's part of pruning on CuPy arrays, without a device, like test_host_calls.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupyattn.compiler import modules as kc
from cupyattn.diffusion import key_importance, pruning
from cupyattn.runtime import recent
from tests.quant.test_host_gemm import Host, watched
from tests.runtime.test_host_calls import Driver, array, driver  # noqa: F401

cupy = pytest.importorskip("cupy")


@pytest.fixture
def host(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:  # noqa: F811
    monkeypatch.setattr(pruning, "own_arch", lambda *_: None)
    planners = (pruning, "plan_key_importance"), (pruning, "plan_compact")
    with watched(driver, monkeypatch, *planners) as found:
        yield found


def test_importance_that_comes_again_gets_the_new_addresses(host: Host) -> None:
    for turn in range(3):
        q, k = array((1, 4, 70, 64)), array((1, 2, 90, 64))
        found = key_importance(q, k, rows=8)
        assert found.shape == (1, 2, 90) and found.dtype == np.float32
        states = []
        for number, entry in enumerate(("row_statistics", "key_importance")):
            name, passed = host.passed(2 * turn + number)
            assert name == entry and passed.keys() == {"q", "k", "row_M", "row_l", "importance"}
            assert (passed["q"], passed["k"]) == (q.data.ptr, k.data.ptr)
            assert passed["importance"] == found.data.ptr
            states.append((passed["row_M"], passed["row_l"]))
        assert states[0] == states[1]  # what the first leaves the second finds
    assert len(host.plans) == len(recent.CALLS) == 1


def test_keys_that_are_read_once_take_one_launch(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "own_arch", lambda *_: "sm_90a")
    asked: list[str | None] = []
    load = kc.load
    monkeypatch.setattr(kc, "load", lambda spec, arch=None: (asked.append(arch), load(spec))[1])
    for turn in range(3):
        q, k = array((1, 4, 70, 64)), array((1, 2, 90, 64))
        found = key_importance(q, k, rows=8)
        given = {"q": q, "k": k, "importance": found}
        expected = {name: x.data.ptr for name, x in given.items()}
        assert host.passed(turn) == ("key_importance", expected)
    assert len(host.plans) == len(recent.CALLS) == 1
    assert len(host.driver.launches) == 3 and asked == ["sm_90a"]


def test_keys_that_are_summed_again_get_the_new_addresses(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "own_arch", lambda *_: "sm_90a")
    how: dict[str, Any] = {"scale": None, "rows": 8, "backend": None, "arch": None}
    for turn in range(3):
        q, k = array((1, 4, 70, 64)), array((1, 2, 1000, 64))
        found, sums = pruning.weigh_keys(q, k, **how, key_sums=True)
        assert sums is not None
        assert (sums.shape, sums.dtype) == ((1, 2, 2, 64), np.float32)
        given = {"q": q, "k": k, "importance": found, "partial_sum": sums}
        expected = {name: x.data.ptr for name, x in given.items()}
        assert host.passed(turn) == ("key_importance", expected)
    assert len(host.plans) == len(recent.CALLS) == 1
    assert pruning.weigh_keys(q, k, **how)[1] is None  # another call, of another module
    assert len(host.plans) == len(recent.CALLS) == 2
    monkeypatch.setattr(pruning, "own_arch", lambda *_: None)
    how["scale"] = 0.5
    for _ in range(2):  # row states are no sums
        assert pruning.weigh_keys(q, k, **how, key_sums=True)[1] is None


def test_keys_that_are_moved_again_get_the_new_addresses(host: Host) -> None:
    for turn in range(3):
        k, v, importance = (
            array((2, 2, 90, 64)),
            array((2, 2, 90, 64)),
            array((2, 2, 90), "float32"),
        )
        few_k, few_v, kept = pruning.compact(k, v, importance, 70)
        assert few_k.shape == few_v.shape == (2, 2, 70, 64) and kept.shape == (2, 2, 90)
        assert few_k.dtype == few_v.dtype == np.float16 and kept.dtype == np.bool_
        entry, chosen = host.passed(2 * turn)
        assert entry == "largest_keys"
        assert chosen["importance"] == importance.data.ptr and chosen["kept"] == kept.data.ptr
        entry, moved = host.passed(2 * turn + 1)
        assert entry == "gather_rows" and moved["places"] == chosen["places"]
        given: dict[str, Any] = {"k": k, "v": v, "kept_k": few_k, "kept_v": few_v}
        for name, x in given.items():
            assert moved[name] == x.data.ptr, name
    assert len(host.plans) == len(recent.CALLS) == 1


def test_values_that_are_moved_alone_leave_the_keys(host: Host) -> None:
    for turn in range(3):
        k, v, importance = (
            array((2, 2, 90, 64)),
            array((2, 2, 90, 64)),
            array((2, 2, 90), "float32"),
        )
        few_v, kept, places = pruning.compact_values(k, v, importance, 70, backend="cuda")
        assert few_v.shape == (2, 2, 70, 64) and kept.shape == (2, 2, 90)
        assert places.shape == (2, 2, 70) and places.dtype == np.int32
        entry, chosen = host.passed(2 * turn)
        assert entry == "largest_keys" and chosen["places"] == places.data.ptr
        entry, moved = host.passed(2 * turn + 1)
        given = {"v": v, "kept_v": few_v, "places": places}
        assert entry == "gather_rows" and moved == {n: x.data.ptr for n, x in given.items()}
    pruning.compact(k, v, importance, 70)
    assert len(host.plans) == len(recent.CALLS) == 2


def test_few_keys_move_and_many_stay() -> None:
    few, many = (np.empty((1, 1, n, 64), np.float16) for n in (2**19 - 1, 2**19))
    assert not pruning.quantises_in_place("interpret", few, few, 5)
    assert pruning.quantises_in_place("interpret", many, many, 5)
    assert not pruning.quantises_in_place("mirror", many, many, 5)


def test_what_differs_is_another_call(host: Host) -> None:
    q, k = array((1, 2, 70, 64)), array((1, 2, 90, 64))
    for options in ({}, {"scale": 2.0}, {"rows": 5}):
        key_importance(q, k, **options)
    importance = array((1, 2, 90), "float32")
    for count in (70, 71):
        pruning.compact(k, k, importance, count)
    assert len(host.plans) == len(recent.CALLS) == 5
    assert len(host.driver.launches) == 10
