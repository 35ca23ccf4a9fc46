"""The host's part of a call on CuPy arrays, without a device: parameters, streams, refusals.

The arrays are CuPy's own, over memory of the host; only the driver's launch is a stand-in, which
reads the parameters as the driver would. That kernels get the right results from them is tested in
tests/gpu/test_prepared.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupyattn import QuantConfig, attention, attention_backward, attention_varlen, plan, quantize
from cupyattn.arrays import described
from cupyattn.arrays import memory as arrays_memory
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.ops import operation
from cupyattn.ops.attention import resolved
from cupyattn.plans.backward import BackwardOperands, plan_backward
from cupyattn.plans.records import Plan, TensorMap
from cupyattn.plans.stages import stages
from cupyattn.plans.structs import pack
from cupyattn.problem.backward_form import settle_backward
from cupyattn.problem.settings import check_attention
from cupyattn.runtime import overlapping, replay, tensor_map

cupy = pytest.importorskip("cupy")
prepared_module = importlib.import_module("cupyattn.ops.prepared")
quantize_module = importlib.import_module("cupyattn.ops.quantize")
resolve_module = importlib.import_module("cupyattn.problem.resolve")

SHAPES = ((1, 4, 33, 64), (1, 2, 70, 64), (1, 2, 70, 64))
#: Rungs, and the architecture that chooses their form.
CASES = [*((rung, "sm_90") for rung in VARIANTS), ("fa_tc", "sm_90a")]


def array(shape: tuple[int, ...], dtype: str = "float16", address: int = 0) -> Any:
    """A CuPy array over memory that is never read or written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    held = np.zeros(size + 16, np.uint8)
    start = address or held.ctypes.data + -held.ctypes.data % 16
    memory = cupy.cuda.memory.UnownedMemory(start, size, held, 0)
    return cupy.ndarray(shape, np.dtype(dtype), cupy.cuda.memory.MemoryPointer(memory, 0))


@dataclass
class Done:
    """Records of launches (kernel, stream, bytes of parameters) and of fills (address, value,
    bytes, stream).
    """

    launches: list[tuple[str, int, list[bytes]]] = field(default_factory=list)
    fills: list[tuple[int, int, int, int]] = field(default_factory=list)


@dataclass
class Driver(Done):
    """Stands in for the driver: keeps what was done on streams, by launches and by graphs."""

    sizes: dict[str, list[int]] = field(default_factory=dict)
    stream: int = 7
    names: dict[int, str] = field(default_factory=dict)
    recording: dict[int, Done] = field(default_factory=dict)  # by a capturing stream's handle
    graphs: list[Done] = field(default_factory=list)
    replays: list[tuple[int, int]] = field(default_factory=list)  # graph, stream

    def kernel(self, entry: str) -> Any:
        handle = 1000 + len(self.names)
        self.names[handle] = entry
        return SimpleNamespace(kernel=SimpleNamespace(ptr=handle))

    def launch(self, function: int, *geometry: int) -> None:
        *_, stream, parameters, _ = geometry
        entry = self.names[function]
        pointers = (ctypes.c_uint64 * len(self.sizes[entry])).from_address(parameters)
        values = [ctypes.string_at(p, n) for p, n in zip(pointers, self.sizes[entry], strict=True)]
        self.recording.get(stream, self).launches.append((entry, stream, values))

    def fill(self, address: int, value: int, count: int, stream: int) -> None:
        self.recording.get(stream, self).fills.append((address, value, count, stream))

    def new_stream(self, *, non_blocking: bool) -> Any:
        """Return a stream that takes no part in what others wait for, to be captured."""
        assert non_blocking
        handle = 1_000_000 + len(self.graphs)

        def end_capture() -> Any:
            self.graphs.append(self.recording.pop(handle))
            return SimpleNamespace(graphExec=len(self.graphs) - 1)

        return SimpleNamespace(
            ptr=handle,
            begin_capture=lambda mode: self.recording.update({handle: Done()}),
            end_capture=end_capture,
        )

    def replay(self, graph: int, stream: int) -> None:
        self.replays.append((graph, stream))
        done, to = self.graphs[graph], self.recording.get(stream, self)
        to.launches += [(entry, stream, values) for entry, _, values in done.launches]
        to.fills += [(*fill, stream) for *fill, _ in done.fills]  # type: ignore[misc]

    def expect(self, made: list[Plan]) -> None:
        """Note how long the parameters of the launches are."""
        for one in (one for p in made for one in p.launches):
            self.sizes[one.entry] = [
                tensor_map.NBYTES if isinstance(x, TensorMap) else x[0].nbytes
                for x in one.templates
            ]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    module = SimpleNamespace(kernel=fake.kernel, binary=SimpleNamespace(smem_bytes=4096))
    monkeypatch.setattr(kc, "load", lambda spec, arch=None: module)
    monkeypatch.setattr(kc, "is_loaded", lambda spec, arch=None: True)
    monkeypatch.setattr(overlapping, "is_supported", lambda: False)
    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", fake.launch)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", lambda _: None)
    monkeypatch.setattr(
        cupy.cuda, "get_current_stream", lambda *_: SimpleNamespace(ptr=fake.stream)
    )
    monkeypatch.setattr(arrays_memory, "on_device_of", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(cupy, "asarray", lambda x, *_: x)
    monkeypatch.setattr(cupy, "array", lambda x: array(x.shape, x.dtype.name))
    monkeypatch.setattr(cupy.cuda.runtime, "deviceSynchronize", lambda: None)
    monkeypatch.setattr(cupy.cuda.runtime, "memsetAsync", fake.fill)
    monkeypatch.setattr(cupy.cuda.runtime, "graphLaunch", fake.replay)
    monkeypatch.setattr(cupy.cuda.runtime, "streamIsCapturing", lambda x: x in fake.recording)
    monkeypatch.setattr(cupy.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(replay, "_exchange_mode", lambda: lambda mode: 0)
    monkeypatch.setattr(replay, "_per_thread", replay._PerThread())
    monkeypatch.setattr(tensor_map, "encode", encoded)
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(lambda size: array((size,), "uint8").data)
    kc.cache_clear(disk=False)  # plans keep what was made ready for them, here and afterwards
    yield fake
    replay.graphs(0)._graphs.clear()  # before there is another driver
    kc.cache_clear(disk=False)
    cupy.cuda.set_allocator(before)


def encoded(address: int, *_: Any) -> np.ndarray:
    """A tensor map of which nothing but the address is known."""
    words = np.zeros(tensor_map.NBYTES // 8, np.uint64)
    words[0] = address
    return words.view(np.uint8)


def check(driver: Driver, made: list[Plan], known: dict[str, Any]) -> None:
    """Assert that the launches are the plans' launches with the arrays' addresses."""
    expected = [one for p in made for one in p.launches]
    assert [entry for entry, *_ in driver.launches] == [one.entry for one in expected]
    for (_, stream, values), one in zip(driver.launches, expected, strict=True):
        assert stream == driver.stream
        for parameter, value in zip(one.params, values, strict=True):
            if isinstance(parameter, TensorMap):
                address = int.from_bytes(value[:8], "little")
                assert address == known[parameter.buffer].data.ptr, parameter.buffer
                continue
            struct, fields = parameter
            found = np.frombuffer(value, struct)[0]
            for name, x in fields.items():
                if not isinstance(x, str):
                    wanted = pack(struct, {name: x}, {})[0][name]
                    np.testing.assert_array_equal(found[name], wanted, err_msg=name)
                elif x in known:
                    assert found[name] == known[x].data.ptr, name
                else:
                    assert found[name] != 0, f"{name} points nowhere"
    driver.launches.clear()


def planned(inputs: Any, out: Any = None, **options: Any) -> list[Plan]:
    return stages(resolved(*inputs, out=out, **options)).plans


@pytest.mark.parametrize(("rung", "arch"), CASES)
def test_every_way_to_call_passes_what_the_plan_says(driver: Driver, rung: str, arch: str) -> None:
    """The first call, one that is remembered, prepared ones: each with other arrays."""
    options: dict[str, Any] = {"variant": rung, "arch": arch, "causal": True}
    inputs, out = [array(s) for s in SHAPES], array(SHAPES[0])
    made = planned(inputs, **options)
    driver.expect(made)
    prepared = plan(*inputs, **options)
    into = plan(*inputs, out=out, **options)
    for _ in range(3):
        inputs, out = [array(s) for s in SHAPES], array(SHAPES[0])
        known = dict(zip("qkv", inputs, strict=True)) if rung != "fa_int8" else {"v": inputs[2]}
        check(driver, made, {"o": attention(*inputs, **options), **known})
        check(driver, made, {"o": prepared(*inputs), **known})
        assert into(*inputs, out=out) is out
        check(driver, planned(inputs, out, **options), {**known, "o": out})


def test_a_prepared_call_is_resolved_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the layout, and with other arrays in the place of a mask or of lengths."""
    options: dict[str, Any] = {"variant": "fa", "arch": "sm_90", "return_lse": True}
    shapes = [(b, n, h, d) for b, h, n, d in SHAPES]
    batch, heads, len_q, head_dim = SHAPES[0]
    len_kv = SHAPES[1][2]

    def given() -> tuple[list[Any], dict[str, Any]]:
        mask, lengths = array((len_q, len_kv), "bool"), array((batch,), "int32")
        return [array(s) for s in shapes], {"mask": mask, "lengths_kv": lengths}

    inputs, others = given()
    made = planned(inputs, **others, layout="BSHD", **options)
    driver.expect(made)
    prepared = plan(*inputs, **others, layout="BSHD", **options)
    into = plan(*inputs, **others, out=array(shapes[0]), layout="BSHD", **options)
    resolved_again = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(prepared_module, "problem_of", resolved_again)
    for replaced in ((), ("mask",), ("mask", "lengths_kv")):
        inputs, new = given()
        new = {name: new[name] for name in replaced}
        o, lse = prepared(*inputs, **new)
        assert o.shape == (batch, len_q, heads, head_dim)
        known = {**dict(zip("qkv", inputs, strict=True)), **others, **new}
        check(driver, made, {**known, "o": o, "lse": lse})
    out = array(shapes[0])
    assert into(*given()[0], out=out)[0] is out
    wrong = array((len_q, len_kv + 8), "bool")[:, :len_kv]
    for bad in ({"mask": wrong}, {"mask": np.ones((len_q, len_kv), bool)}):
        with pytest.raises(AssertionError):  # of another form: it goes the long way
            prepared(*inputs, **bad)
    assert resolved_again.call_count == 2


def test_a_prepared_call_that_checks_values_reads_them(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"variant": "fa", "arch": "sm_90", "check_finite": True}
    inputs = [array(s) for s in SHAPES]
    driver.expect(planned(inputs, variant="fa", arch="sm_90"))
    monkeypatch.setattr(resolve_module, "check_finite", lambda *_: None)
    prepared = plan(*inputs, **options)
    resolve = mock.Mock(side_effect=prepared_module.problem_of)
    monkeypatch.setattr(prepared_module, "problem_of", resolve)
    prepared(*inputs)
    assert resolve.call_count == 1


class OnDevice:
    """An array on a device of a library that has DLPack and a namespace, over one of CuPy's."""

    def __init__(self, own: Any) -> None:
        self.array = own

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("CuPy's from_dlpack is a stand-in here")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=OnDevice)


def test_device_arrays_of_another_library_are_launched_and_go_back(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the same call on CuPy's arrays is remembered, or the operands are codes."""
    monkeypatch.setattr(cupy, "from_dlpack", lambda x: x.array)
    monkeypatch.setattr(quantize_module, "on_device_of", lambda _: contextlib.nullcontext())
    inputs = [array(s) for s in SHAPES]
    given, options = [OnDevice(x) for x in inputs], {"arch": "sm_90"}
    made = planned(inputs, variant="fa", **options)
    driver.expect(made)
    known = dict(zip("qkv", inputs, strict=True))
    for _ in range(2):
        check(driver, made, {"o": attention(*inputs, variant="fa", **options), **known})
        o = attention(*given, variant="fa", **options)
        assert type(o) is OnDevice
        check(driver, made, {"o": o.array, **known})
    driver.expect(planned(inputs, variant="fa_int8", **options))
    codes, own = quantize(*given, **options), quantize(*inputs, **options)
    prepared = plan(codes, **options)
    for _ in range(3):
        assert isinstance(attention(own, **options), cupy.ndarray)
        for call in (lambda: attention(codes, **options), lambda: prepared(codes)):
            assert type(call()) is OnDevice


def test_lse_mask_and_packed_sequences_arrive_too(driver: Driver) -> None:
    inputs = [array(s) for s in SHAPES]
    mask = array((33, 70), "bool")
    options: dict[str, Any] = {"variant": "fa", "arch": "sm_90", "return_lse": True}
    made = planned(inputs, mask=mask, **options)
    driver.expect(made)
    prepared = plan(*inputs, mask=mask, **options)
    other = array((33, 70), "bool")
    for call, given in ((attention, {"mask": mask, **options}), (prepared, {"mask": other})):
        o, lse = call(*inputs, **given)
        known = {**dict(zip("qkv", inputs, strict=True)), "o": o, "lse": lse}
        check(driver, made, {**known, "mask": given["mask"]})
    packed = [array((33, 4, 64)), array((70, 2, 64)), array((70, 2, 64))]
    ends = {name: array((3,), "int32") for name in ("cu_seqlens_q", "cu_seqlens_k")}
    limits: dict[str, Any] = {"max_len_q": 33, "max_len_k": 70}
    known = {**dict(zip("qkv", packed, strict=True)), **ends}
    for added in ({}, {"mask": mask}):
        made = planned(packed, **ends, **limits, **added, **options)
        driver.expect(made)
        for _ in range(2):
            o, lse = attention_varlen(*packed, **ends, **limits, **added, **options)
            check(driver, made, {**known, **added, "o": o, "lse": lse})


@pytest.mark.parametrize("form", ["atomic", "deterministic"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_gradients_get_what_the_plan_says(driver: Driver, form: str, arch: str) -> None:
    """The first call and remembered calls, each with other arrays."""
    deterministic = form == "deterministic"
    shapes = {"d_out": SHAPES[0], "q": SHAPES[0], "k": SHAPES[1], "v": SHAPES[2], "o": SHAPES[0]}
    for _ in range(3):
        inputs = {name: array(shape) for name, shape in shapes.items()}
        described = {name: Operand.of(a) for name, a in inputs.items()}
        described |= {f"d{name}": described[name] for name in "qkv"}
        call = check_attention(*(inputs[n] for n in "qkv"), return_lse=True, causal=True)
        operands = BackwardOperands(**described)
        settled = settle_backward(call, described, deterministic=deterministic, arch=arch)
        made = [plan_backward(settled, operands)]
        driver.expect(made)
        inputs["lse"] = array(SHAPES[0][:3], "float32")
        found = attention_backward(
            *inputs.values(), causal=True, deterministic=deterministic, arch=arch
        )
        check(driver, made, {**inputs, **found._asdict()})


def test_what_is_no_block_mask_is_refused_in_the_backward_pass_too(driver: Driver) -> None:
    q, k, v = (array(shape) for shape in SHAPES)
    lse, wrong = array(SHAPES[0][:3], "float32"), np.ones((1, 1, 1, 1), bool)
    with pytest.raises(TypeError, match="block_mask must be a cupyattn.BlockMask"):
        attention_backward(q, q, k, v, q, lse, block_mask=wrong)


def test_the_stream_is_the_current_one_of_each_call(driver: Driver) -> None:
    inputs = [array(s) for s in SHAPES]
    options: dict[str, Any] = {"variant": "unfused", "arch": "sm_90"}
    driver.expect(planned(inputs, **options))
    prepared = plan(*inputs, **options)
    for driver.stream in (3, 5):
        attention(*inputs, **options)
        prepared(*inputs)
        assert {stream for _, stream, _ in driver.launches} == {driver.stream}
        driver.launches.clear()


def test_threads_have_parameters_of_their_own(driver: Driver) -> None:
    """One waits inside its launch while another launches the same kernel."""
    options: dict[str, Any] = {"variant": "fa", "arch": "sm_90"}
    problems = [[array(s) for s in SHAPES] for _ in range(2)]
    made = planned(problems[0], **options)
    driver.expect(made)
    attention(*problems[0], **options)
    driver.launches.clear()
    launch, inside, done = driver.launch, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        if threading.current_thread() is first:
            inside.set()
            assert done.wait(30)
        launch(*arguments)

    cupy.cuda.driver.launchKernel = slow  # the fixture puts it back
    first = threading.Thread(target=attention, args=problems[0], kwargs=options)
    first.start()
    assert inside.wait(30)
    attention(*problems[1], **options)
    done.set()
    first.join()
    found = [values for _, _, values in driver.launches]
    driver.launches.reverse()
    for values, (q, *_) in zip(found, reversed(problems), strict=True):
        struct, _ = made[0].launches[0].params[0]
        assert np.frombuffer(values[0], struct)[0]["Q"] == q.data.ptr


def test_out_may_not_meet_what_is_read(driver: Driver) -> None:
    """By a prepared call as by `attention`, to the byte."""
    shape = (1, 2, 8, 64)
    nbytes = 2 * int(np.prod(shape))
    q, k, v = (array(shape) for _ in range(3))
    options: dict[str, Any] = {"variant": "fa", "arch": "sm_90"}
    driver.expect(planned((q, k, v), array(shape), **options))
    into = plan(q, k, v, out=array(shape), **options)
    place = array((4 * nbytes,), "uint8").data.ptr
    k = array(shape, address=place + nbytes)
    for distance, meets in ((-nbytes, False), (16 - nbytes, True), (0, True),
                            (nbytes - 16, True), (nbytes, False)):  # fmt: skip
        out = array(shape, address=place + nbytes + distance)
        for call in (into, lambda *a, out: attention(*a, out=out, **options)):
            if meets:
                with pytest.raises(ValueError, match="out must not share memory with k"):
                    call(q, k, v, out=out)
            else:
                assert call(q, k, v, out=out) is out


@pytest.mark.parametrize("way", ["plain", "BSHD", "packed"])
def test_a_v_that_is_converted_is_found_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """P.V takes float16: each call converts the V that it is given, where its elements lie."""
    converted: list[tuple[Any, Any]] = []
    monkeypatch.setattr(cupy, "copyto", lambda *pair: converted.append(pair))
    options: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90"}
    call: Any = attention
    shapes = SHAPES
    if way != "plain":
        shapes = tuple((*s[:1], s[2], s[1], s[3]) for s in SHAPES)  # type: ignore[assignment]
    if way == "BSHD":
        options["layout"] = way
    if way == "packed":
        shapes, call = tuple(s[1:] for s in shapes), attention_varlen  # type: ignore[assignment]
        options |= {"max_len_q": 33, "max_len_k": 70}
        options |= {f"cu_seqlens_{n}": array((2,), "int32") for n in "qk"}
    inputs = [array(shape, "float32") for shape in shapes]
    made = planned(inputs, **options)
    driver.expect(made)
    for turn in range(3):
        inputs = [array(shape, "float32") for shape in shapes]
        check(driver, made, {"o": call(*inputs, **options)})
        target, source = converted[turn]
        seen = inputs[2] if way == "plain" else inputs[2].swapaxes(-3, -2)
        assert target.dtype == "float16" and target.flags.c_contiguous
        assert (source.shape, source.dtype) == (target.shape, "float32")
        assert target.shape == SHAPES[2] and source.data.ptr == inputs[2].data.ptr
        assert source.strides[-3:] == seen.strides[-3:]
        monkeypatch.setattr(operation, "make_ready", lambda *_: pytest.fail("planned again"))


def test_scratch_memory_is_one_piece_and_buffers_do_not_meet(driver: Driver) -> None:
    """Memory that must be zero comes first, where one fill reaches only that."""
    inputs = [array(s) for s in SHAPES]
    quant = QuantConfig(granularity_k="tensor")
    options: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90", "quant": quant}
    driver.expect(planned(inputs, **options))
    prepared = plan(*inputs, **options)
    layout, workspace = prepared._ready.layout, prepared._work.workspace
    assert set(layout.offsets) == {work.name for work in workspace}
    places = sorted(((layout.offsets[work.name], work) for work in workspace), key=lambda x: x[0])
    ends = [start + work.nbytes for start, work in places]
    assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
    assert places[0][0] == 0 and ends[-1] <= layout.nbytes
    assert all(start % 256 == 0 for start, _ in places)
    inside = {work.name for start, work in places if start < layout.zeros}
    assert inside == {work.name for work in workspace if work.zeros} != set()
    prepared(*inputs)
    assert prepared._scratch is not None
    assert driver.fills == [(prepared._scratch.ptr, 0, layout.zeros, driver.stream)]
    assert attention(*inputs, **options).shape == SHAPES[0]


@pytest.mark.parametrize("name", ["q", "bias", "rope_sin", "v"])
def test_a_capture_refuses_operands_that_need_a_copy(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The memory of the copy would return to the pool, and a replay would write to it."""
    held = np.zeros(2**16, np.uint8)
    odd = held.ctypes.data + -held.ctypes.data % 16 + 1
    q, k, v = map(array, SHAPES)
    options: dict[str, Any] = {"arch": "sm_90", "variant": "fa_tc"}
    if name == "q":
        q = array(SHAPES[0], address=odd)
    elif name == "bias":
        options["bias"] = array((1, 1, 33, 70), "float32", odd)
    elif name == "rope_sin":
        options["rope"] = array((70, 32), "float32"), array((70, 32), "float32", odd)
    else:
        v = cupy.ndarray(v.shape, v.dtype, v.data, order="F")
    copies: list[Any] = []

    def copy(x: Any, *_: Any, **__: Any) -> Any:
        copies.append(x)
        return array(x.shape, x.dtype.name)

    monkeypatch.setattr(described, "aligned_copy", copy)
    monkeypatch.setitem(described._COPIES, "whole", copy)
    monkeypatch.setitem(described._STEPS, "whole", copy)
    monkeypatch.setattr(cupy, "ascontiguousarray", copy)
    driver.expect(planned([array(shape) for shape in SHAPES], **options))
    call = plan(q, k, v, **options)
    call(q, k, v)
    assert driver.launches and len(copies) >= 1, "copied by each call"
    before = len(copies)
    driver.recording[driver.stream] = Done()
    with pytest.raises(ValueError, match=f"{name} must not need a copy while a CUDA graph capt"):
        call(q, k, v)
    assert len(copies) == before and not driver.recording[driver.stream].launches
