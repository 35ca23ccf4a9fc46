"""Calls made for one place of Inductor's code, without a device, like test_interop_torch_host.py.
They check launches, stored graphs, and the little host work of repeated calls.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import cupyattn as ca
from cupyattn.arrays import described
from cupyattn.compiler import modules as compiler
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.runtime import recent, replay
from experiments.speed.host_places import functions_of
from tests.interop.test_interop_torch_host import OnDevice, calls  # noqa: F401
from tests.quant.test_host_gemm import Host, K, N, host, operands  # noqa: F401
from tests.runtime.test_host_calls import SHAPES, array, check, driver, planned  # noqa: F401
from tests.support.own_kernels import renamed

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
places = importlib.import_module("cupyattn.interop.torch.places")
calls_module = importlib.import_module("cupyattn.interop.torch.calls")
importlib.import_module("cupyattn.interop.torch.linear")
operator = importlib.import_module("cupyattn.interop.diffusers.operator")

#: Arguments of a layer of 10 rows, as Inductor writes them.
RESULT = f"(2, 5, {N}), ({5 * N}, {N}, 1), torch.float16"
LAYER = "(t0, t1, t2, None, None, None, 'gelu', 'sm_90', None, )"


class Given(OnDevice):
    def is_neg(self) -> bool:
        return False

    def numel(self) -> int:
        return int(self.array.size)


class Memory:
    """Stands in for torch's allocator: the same memory for each form, until it is told to move."""

    def __init__(self) -> None:
        self.kept: dict[Any, Given] = {}
        self.asked: list[Any] = []

    def __call__(self, shape: Any, strides: Any, dtype: Any) -> Given:
        form = shape, dtype, len([x for x in self.asked if x == (shape, dtype)])
        self.asked.append(form[:2])
        if form not in self.kept:
            own = array(shape, str(dtype).removeprefix("torch."))
            in_bytes = tuple(n * own.itemsize for n in strides)
            self.kept[form] = Given(cupy.ndarray(shape, own.dtype, own.data, in_bytes))
        return self.kept[form]


@pytest.fixture
def memory(calls: Any, monkeypatch: pytest.MonkeyPatch) -> Memory:  # noqa: F811
    found = Memory()
    guards = SimpleNamespace(guards=SimpleNamespace(_empty_strided_cuda=found))
    monkeypatch.setattr(torch._C, "_dynamo", guards)
    return found


def one_layer() -> tuple[Any, list[Given]]:
    """A place of one layer, and its operands."""
    given = operands(5)
    tensors = [array((2, 5, K)), given["b"], given["b_scales"]]
    call = places.place("int8_layer", ("cuda", 0), 3, (), (RESULT,), LAYER, "y0")
    return call, [Given(x) for x in tensors]


def known(call: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = call.__globals__["here"].graphs
    return found


def again(memory: Memory, call: Any, *given: Any) -> Any:
    memory.asked.clear()
    return call(*given)


def test_a_call_that_comes_again_is_launched_from_its_place(
    host: Host,  # noqa: F811
    memory: Memory,
) -> None:
    """Twice it goes the way of all calls; then it is launched and recorded on memory of its own."""
    call, tensors = one_layer()
    for _ in range(2):
        again(memory, call, *tensors)
    planned, remembered = len(host.plans), len(recent.CALLS)
    for _ in range(2):
        y = again(memory, call, *tensors)
    assert y is memory.kept[(2, 5, N), torch.float16, 0] and len(known(call)) == 1
    graph = len(host.driver.graphs) - 1
    for host.driver.stream in (7, 8):
        before = len(host.driver.launches)
        assert again(memory, call, *tensors) is y
        assert host.driver.replays[-1] == (graph, host.driver.stream)
        entry, quantised = host.passed(before)
        assert entry == "act_quant" and quantised["x"] == tensors[0].data_ptr()
        _, multiplied = host.passed(before + 1)
        assert multiplied["c"] == y.data_ptr() and multiplied["a"] == quantised["codes"]
        assert [multiplied["b"], multiplied["b_scales"]] == [x.data_ptr() for x in tensors[1:]]
        scratch = memory.kept[(10 * K + 256,), torch.uint8, 0]  # codes, and 20 scales
        assert quantised["codes"] == scratch.data_ptr()
        assert len(host.driver.launches) == before + 2
    assert (planned, remembered) == (len(host.plans), len(recent.CALLS))


def test_other_addresses_are_other_calls_and_places_are_bounded(
    host: Host,  # noqa: F811
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The code of a block that comes again serves all blocks, each with its weights."""
    monkeypatch.setattr(places, "MOST", 3)
    call, (x, weight, scales) = one_layer()
    weights = [weight, *(Given(operands(5)["b"]) for _ in range(3))]
    for _ in range(5):
        for one in weights[:3]:
            again(memory, call, x, one, scales)
    assert len(known(call)) == 3
    for one in weights[:3]:
        again(memory, call, x, one, scales)
        _, multiplied = host.passed(len(host.driver.launches) - 1)
        assert multiplied["b"] == one.data_ptr()
    kept = len(host.driver.graphs)
    for _ in range(2):
        again(memory, call, x, weights[3], scales)
    assert len(known(call)) == 1 and len(host.driver.graphs) == kept + 1
    again(memory, call, x, weights[0], scales)  # found among all calls' graphs
    assert len(known(call)) == 2 and len(host.driver.graphs) == kept + 1


def test_a_graph_of_the_caller_gets_the_kernels(
    host: Host,  # noqa: F811
    memory: Memory,
) -> None:
    call, tensors = one_layer()
    for _ in range(5):
        again(memory, call, *tensors)
    replays = len(host.driver.replays)
    theirs = host.driver.recording[host.driver.stream] = type(host.driver)()
    again(memory, call, *tensors)
    assert len(theirs.launches) == 2 and len(host.driver.replays) == replays
    del host.driver.recording[host.driver.stream]
    again(memory, call, *tensors)
    assert len(host.driver.replays) == replays + 1


@pytest.mark.parametrize("change", ["cleared", "registered", "destroyed"])
def test_what_is_stale_is_not_launched(
    change: str,
    host: Host,  # noqa: F811
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    """When the cache of kernels is cleared, the ladder changes, or a graph made room for others."""
    call, tensors = one_layer()
    for _ in range(5):
        again(memory, call, *tensors)
    (stale,) = known(call).values()
    if change == "cleared":
        compiler.cache_clear(disk=False)
    elif change == "registered":
        own_rungs = importlib.import_module("cupyattn.ops.own_rungs")
        monkeypatch.setattr(own_rungs, "_compile", lambda *_: None)
        ca.register(dataclasses.replace(ladder.VARIANTS["fa"], name="mine"), renamed(tmp_path))
        ca.unregister("mine")
    else:
        replay.graphs(0).clear()
    before = len(host.driver.replays)
    again(memory, call, *tensors)
    assert len(host.driver.replays) == before
    for _ in range(4):
        again(memory, call, *tensors)
    (fresh,) = known(call).values()
    assert fresh is not stale and host.driver.replays[-1][0] == fresh.handle


def test_each_thread_launches_graphs_of_its_own(
    host: Host,  # noqa: F811
    memory: Memory,
) -> None:
    call, tensors = one_layer()
    for _ in range(5):
        again(memory, call, *tensors)
    (own,) = known(call).values()
    found = []

    def work() -> None:
        assert not known(call)
        for _ in range(3):
            again(memory, call, *tensors)
        found.extend(known(call).values())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (other,) = found
    assert other is not own and other.handle is None and own.handle is not None


def test_lengths_are_part_of_what_is_looked_up(
    host: Host,  # noqa: F811
    memory: Memory,
) -> None:
    """One memory serves two lengths, each of which takes scratch memory of its size."""
    given = operands(5)
    weight = [Given(given["b"]), Given(given["b_scales"])]
    result = f"(2, s0, {N}), ({N}*s0, {N}, 1), torch.float16"
    call = places.place("int8_layer", ("cuda", 0), 3, ("s0",), (result,), LAYER, "y0")
    whole = array((2, 5, K))
    rows = {n: Given(cupy.ndarray((2, n, K), whole.dtype, whole.data)) for n in (5, 3)}
    for _ in range(5):
        for length, x in rows.items():
            y = again(memory, call, x, *weight, length)
            assert y.shape == (2, length, N)
    graphs = known(call)
    assert sorted(key[0] for key in graphs) == [3, 5]
    before = len(host.driver.launches)
    for length, x in rows.items():
        again(memory, call, x, *weight, length)
        assert memory.asked[-1] == ((2 * length * K + 256,), torch.uint8)
    grids = [host.passed(before + n)[1]["codes"] for n in (0, 2)]
    assert len({*grids}) == 2 and len(host.driver.replays) >= 2


def test_a_layer_of_two_tensors_side_by_side_gets_both(
    host: Host,  # noqa: F811
    memory: Memory,
) -> None:
    given = operands(5, "channel")
    weight = [Given(given["b"]), Given(given["b_scales"])]
    wide = array((2, 5, K))  # the right side is a part of longer rows
    right = Given(cupy.ndarray((2, 5, K // 2), wide.dtype, wide.data, wide.strides))
    call = places.place(
        "int8_layer", ("cuda", 0), 4, (), (RESULT,),
        "(t0, t1, t2, None, None, None, 'gelu', 'sm_90', None, None, None, t3, )", "y0",
    )  # fmt: skip
    x = Given(array((2, 5, K // 2)))
    for _ in range(5):
        again(memory, call, x, *weight, right)
        entry, quantised = host.passed(len(host.driver.launches) - 2)
        assert entry == "row_quant" and quantised["right"] == right.data_ptr()
        assert quantised["x"] == x.data_ptr()
    assert known(call)


def test_several_layers_return_a_list(
    host: Host,  # noqa: F811
    memory: Memory,
) -> None:
    given = [operands(5) for _ in range(2)]
    x = Given(array((2, 5, K)))
    weights, scales = ([Given(one[name]) for one in given] for name in ("b", "b_scales"))
    call = places.place(
        "int8_layers", ("cuda", 0), 5, (), (RESULT, RESULT),
        "(t0, [t1, t2], [t3, t4], [None, None], ['', 'silu'], 'sm_90', None, )", "[y0, y1]",
    )  # fmt: skip
    for _ in range(5):
        results = again(memory, call, x, *weights, *scales)
    assert [type(results), len(results), len(known(call))] == [list, 2, 1]
    for number, y in enumerate(results):
        _, multiplied = host.passed(len(host.driver.launches) - 2 + number)
        assert multiplied["c"] == y.data_ptr() and multiplied["b"] == weights[number].data_ptr()


def test_one_tensor_in_two_places_of_a_call_is_not_told_apart_by_its_place(
    host: Host,  # noqa: F811
    memory: Memory,
) -> None:
    """The next call may have two: such calls stay with the way of all."""
    given = operands(5)
    both = Given(array((2, 5, N)))
    tensors = [Given(array((2, 5, K))), Given(given["b"]), Given(given["b_scales"]), both, both]
    text = "(t0, t1, t2, None, t3, t4, '', 'sm_90', None, )"
    call = places.place("int8_layer", ("cuda", 0), 5, (), (RESULT,), text, "y0")
    for _ in range(5):
        again(memory, call, *tensors)
    assert not known(call)


def test_operands_that_every_call_copies_are_copied(
    host: Host,  # noqa: F811
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gate whose rows lie at no common distance: launching is not all of such a call."""
    copies: list[Any] = []

    def gathered(x: Any, *shape: int) -> Any:
        copies.append(array(shape))
        return copies[-1]

    monkeypatch.setitem(described._STEPS, "gathered", gathered)
    given = operands(5)
    tensors = [
        Given(array((2, 2, 5, K))), Given(given["b"]), Given(given["b_scales"]),
        Given(array((2, 2, 5, N))), Given(array((2, 3, N))[:, :2]),
    ]  # fmt: skip
    result = f"(2, 2, 5, {N}), ({10 * N}, {5 * N}, {N}, 1), torch.float16"
    text = "(t0, t1, t2, None, t3, t4, '', 'sm_90', None, )"
    call = places.place("int8_layer", ("cuda", 0), 5, (), (result,), text, "y0")
    for turn in range(5):
        again(memory, call, *tensors)
        assert len(copies) == turn + 1
        assert host.passed(2 * turn + 1)[1]["gate"] == copies[turn].data.ptr
    assert not known(call)


# ---- attention -----------------------------------------------------------------------------------

Q, KV = SHAPES[:2]


def attention_of(variant: str, *, transposed: bool, raw: bool = False) -> tuple[Any, list[Given]]:
    """A place of attention of models of diffusers, whose queries may lie as heads of rows do.

    Raw queries and keys come with tables of a rotation and weights of a norm.
    """
    shapes = [(b, n, h, d) if transposed else (b, h, n, d) for b, h, n, d in (Q, KV, KV)]
    arrays = [array(shape) for shape in shapes]
    tensors = [Given(x.transpose(0, 2, 1, 3) if transposed else x) for x in arrays]
    result = f"{Q}, {tensors[0].stride()}, torch.float16"
    settings = f"variant={variant!r}, arch='sm_90'"
    further = "None, None, None, None"
    if raw:
        length, head_dim = KV[2:]
        for shape in [(length, head_dim)] * 2 + [(head_dim,)] * 2:
            tensors.append(Given(array(shape, "float32")))
        further, settings = "t3, t4, t5, t6", f"{settings}, rope_interleaved=True"
    text = f"(t0, t1, t2, None, None, {further}, None, 0, False, {settings!r}, )"
    own = "diffusers_attention", ("cuda", 0), len(tensors), (), (result,), text, "y0"
    return places.place(*own), tensors


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("variant", ["fa_tc", "fa_int8"])
def test_attention_of_models_is_launched_from_its_place(
    variant: str,
    transposed: bool,
    raw: bool,
    driver: Any,  # noqa: F811
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result lies as the queries do; kernels get all addresses."""
    call, tensors = attention_of(variant, transposed=transposed, raw=raw)
    monkeypatch.setattr(torch, "empty_like", lambda x: memory(x.shape, x.stride(), x.dtype))
    _, (out, *_) = attention_of(variant, transposed=transposed)
    given, further = [x.array for x in tensors[:3]], [x.array for x in tensors[3:]]
    names = "rope_cos", "rope_sin", "q_norm_weight", "k_norm_weight"
    known_of_raw = dict(zip(names, further, strict=True)) if raw else {}
    options: dict[str, Any] = {"variant": variant, "arch": "sm_90"}
    if raw:
        options |= {"rope": tuple(further[:2]), "rope_interleaved": True}
        options |= {"qk_norm": tuple(further[2:])}
    made = planned(given, out.array, **options)
    driver.expect(made)
    for _ in range(4):
        again(memory, call, *tensors)
    (graph,) = known(call).values()
    driver.launches.clear()
    y = again(memory, call, *tensors)
    assert driver.replays[-1] == (graph.handle, driver.stream)
    check(driver, made, {"v": given[2], "o": y.array, **known_of_raw})
    assert y.stride() == tensors[0].stride()


def test_calls_that_fall_back_are_counted_each_time(
    driver: Any,  # noqa: F811
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls that INT8 refuses run in 16 bits, and never from a place alone."""
    call, tensors = attention_of("fa_int8", transposed=False)
    own = calls_module.forward

    def refused(settings: Any, *given: Any) -> Any:
        if settings.of_call.variant == "fa_int8":
            raise UnsupportedError("no such call in INT8")
        return own(settings, *given)

    monkeypatch.setattr(operator, "forward", refused)
    monkeypatch.setattr(operator, "fallbacks", Counter())
    given = [x.array for x in tensors]
    driver.expect(planned(given, variant="auto", arch="sm_90"))
    for _ in range(6):
        again(memory, call, *tensors)
    assert operator.fallbacks == {"no such call in INT8": 6} and not known(call)


# ---- how little a call that comes again takes ----------------------------------------------------


@pytest.mark.parametrize(("layers", "functions"), [(1, 15), (3, 25)])
def test_a_call_that_comes_again_runs_few_functions(
    layers: int,
    functions: int,
    driver: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python runs only the call: two checks, memory, addresses, a look-up, the launch."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {0: 7}.get, raising=False)
    tensors = [torch.zeros(1) for _ in range(3 * layers + 1)]
    memory = itertools.cycle([torch.zeros(1) for _ in range(layers + 1)])
    operator, returned = ("int8_layer", "y0") if layers == 1 else ("int8_layers", "[y0, y1, y2]")
    results = (RESULT,) * layers
    call = places.place(operator, ("cuda", 0), len(tensors), (), results, "()", returned)
    launched: list[int] = []
    graph = SimpleNamespace(handle=0, last_call=0)
    call.__globals__.update(
        empty=lambda *_: next(memory), capturing=set().__contains__, launch=launched.insert,
        found=lambda form, key, *_: known(call).update({key: graph}),
    )  # fmt: skip
    call(*tensors)
    assert not launched
    count = functions_of(lambda: call(*tensors)) - (layers + 1)  # `next`, in the stand-in
    assert count == functions and launched == [7]
    assert graph.last_call == replay.graphs(0).calls == 1
