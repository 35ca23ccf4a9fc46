"""The host's part of a call on torch's tensors, without a device, like test_host_calls.py."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupyattn import QuantConfig
from cupyattn.arrays import described
from cupyattn.ops import backward, layers, operation
from cupyattn.ops.operation import problem_of
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.settings import accept
from cupyattn.runtime import recent
from cupyattn.runtime.ready import Conversion, Ready
from tests.runtime.test_host_calls import (  # noqa: F401
    CASES,
    SHAPES,
    Done,
    Driver,
    array,
    check,
    driver,
    planned,
)

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")


class OnDevice:
    """What a call asks of a tensor on a device, over an array of memory that is never read."""

    is_cuda, layout = True, torch.strided
    device = SimpleNamespace(index=0)

    def __init__(self, own: Any) -> None:
        self.array, self.shape = own, own.shape
        self.dtype = getattr(torch, own.dtype.name)

    def stride(self, axis: int | None = None) -> Any:
        strides = tuple(s // self.array.itemsize for s in self.array.strides)
        return strides if axis is None else strides[axis]

    def data_ptr(self) -> int:
        return int(self.array.data.ptr)

    def get_device(self) -> int:
        return 0

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def detach(self) -> OnDevice:
        return self

    def __getitem__(self, part: slice) -> OnDevice:
        return OnDevice(self.array[part])

    def view(self, of: Any) -> OnDevice:
        if isinstance(of, tuple):
            return OnDevice(self.array.reshape(of))
        return OnDevice(self.array.view(str(of).removeprefix("torch.")))

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> OnDevice:
        places = tuple(n * self.array.itemsize for n in strides)
        return OnDevice(cupy.ndarray(shape, self.array.dtype, self.array.data, places))

    def copy_(self, source: OnDevice) -> None:
        cupy.copyto(self.array, source.array)


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> OnDevice:
    new = OnDevice(array(tuple(shape), str(dtype).removeprefix("torch.")))
    assert new.stride() == strides
    return new


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Any:  # noqa: F811
    """`cupyattn.interop.torch.calls` on tensors like these."""
    module = importlib.import_module("cupyattn.interop.torch.calls")
    bridge = importlib.import_module("cupyattn.interop.torch.bridge")
    monkeypatch.setattr(bridge, "_empty", empty)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda _: driver.stream, raising=False
    )
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **_: OnDevice(array(x.shape, x.array.dtype.name))
    )
    for name, stand_in in (
        ("as_array", lambda x: x.array), ("as_tensor", OnDevice),
        ("_nothing_on", lambda _: array((0,))),
        ("on_device_of", lambda _: contextlib.nullcontext()),
    ):  # fmt: skip
        monkeypatch.setattr(bridge, name, stand_in)
    monkeypatch.setattr(module, "check_tensors", lambda *_: None)
    return SimpleNamespace(
        bridge=bridge,
        forward=module.forward,
        gradients=module.backward_pass,
        Settings=module.TensorSettings.of,
    )


def planned_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test fail if a call is resolved from now on."""
    monkeypatch.setattr(operation, "problem_of", lambda *_: pytest.fail("planned again"))


@pytest.mark.parametrize(("rung", "arch"), CASES)
@pytest.mark.parametrize("added", ["", "return_lse", "mask", "block_mask", "out"])
def test_a_call_on_tensors_is_launched_again_from_their_addresses(
    driver: Driver,  # noqa: F811
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
    rung: str,
    arch: str,
    added: str,
) -> None:
    """After the first time nothing is checked or planned: only addresses and the stream count."""
    options: dict[str, Any] = {"variant": rung, "arch": arch, "causal": True}
    kept: dict[str, Any] = {}
    if added == "return_lse":
        options["return_lse"] = True
    if added == "block_mask":
        kept["kept_blocks"] = array((1, 1, 1, 3), "int32")
        monkeypatch.setattr(BlockMask, "kept_blocks", lambda *_: kept["kept_blocks"])
        options["block_mask"] = BlockMask.from_window(33, 70, (64, 0))
    masks = {"mask": array((33, 70), "bool")} if added == "mask" else {}
    inputs = [array(s) for s in SHAPES]
    made = planned(inputs, array(SHAPES[0]), **options, **masks)
    driver.expect(made)
    for driver.stream in (7, 8):
        given = {n: OnDevice(array(s)) for n, s in zip("qkv", SHAPES, strict=True)}
        given |= {name: OnDevice(array((33, 70), "bool")) for name in masks}
        out = OnDevice(array(SHAPES[0])) if added == "out" else None
        o, lse = calls.forward(calls.Settings(**options), given, out)
        assert (o is out) == (added == "out") and (lse is None) == (added != "return_lse")
        read = given if rung != "fa_int8" else {n: given[n] for n in ("v", *masks)}
        known = {name: x.array for name, x in read.items()} | kept
        check(driver, made, known | {"o": o.array} | ({} if lse is None else {"lse": lse.array}))
        planned_no_more(monkeypatch)
    zeros = any(work.zeros for one in made for work in one.workspace)
    assert [stream for *_, stream in driver.fills] == [7, 8] * zeros
    if added == "out":
        with pytest.raises(ValueError, match="out must not share memory with q"):
            calls.forward(calls.Settings(**options), given, given["q"])


def test_a_graph_of_the_caller_gets_the_launches_and_memory_of_torch(
    driver: Driver,  # noqa: F811
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that a graph of our own stands for is launched by kernels where a caller captures."""
    options: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90"}
    given = {n: OnDevice(array(s)) for n, s in zip("qkv", SHAPES, strict=True)}
    out, asked = OnDevice(array(SHAPES[0])), []
    made = planned([x.array for x in given.values()], out.array, **options)
    driver.expect(made)
    scratch = OnDevice(array((1 << 20,), "uint8"))

    def empty(shape: tuple[int, ...], *_: Any) -> OnDevice:
        asked.extend(shape)
        return scratch

    monkeypatch.setattr(calls.bridge, "_empty", empty)
    for _ in range(4):
        calls.forward(calls.Settings(**options), given, out)
    assert driver.replays and len(driver.graphs) == 1
    replays, before = len(driver.replays), len(asked)
    driver.launches.clear()
    driver.recording[driver.stream] = theirs = Done()
    calls.forward(calls.Settings(**options), given, out)
    assert len(driver.replays) == replays and not driver.launches
    assert len(driver.graphs) == 1 and len(asked) == before + 1 and asked[-1] > 0
    driver.launches += theirs.launches
    check(driver, made, {"v": given["v"].array, "o": out.array})


@pytest.mark.parametrize("way", ["plain", "strided", "BSHD", "packed"])
def test_a_v_that_is_converted_is_found_again(
    driver: Driver,  # noqa: F811
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """As with CuPy's arrays, it is planned once, and each V is converted to the kernel's place."""
    converted: list[tuple[Any, Any]] = []
    monkeypatch.setattr(cupy, "copyto", lambda *pair: converted.append(pair))
    options: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90"}
    given: dict[str, Any] = {}
    shapes = SHAPES
    if way in ("BSHD", "packed"):
        shapes = tuple((*s[:1], s[2], s[1], s[3]) for s in SHAPES)  # type: ignore[assignment]
    if way == "BSHD":
        options["layout"] = way
    if way == "packed":
        shapes = tuple(s[1:] for s in shapes)  # type: ignore[assignment]
        options |= {"max_len_q": 33, "max_len_k": 70}
        given = {f"cu_seqlens_{n}": array((2,), "int32") for n in "qk"}

    def fresh() -> dict[str, Any]:
        rows = {n: array(shape, "float32") for n, shape in zip("qkv", shapes, strict=True)}
        if way == "strided":
            rows["v"] = array((1, 70, 2, 64), "float32").swapaxes(1, 2)
        return rows | given

    q, k, v, *_ = fresh().values()
    made = planned((q, k, v), array(shapes[0], "float32"), **options, **given)
    driver.expect(made)
    for turn in range(3):
        arrays = fresh()
        tensors = {name: OnDevice(x) for name, x in arrays.items()}
        o, _ = calls.forward(calls.Settings(**options), tensors)
        target, source = converted[turn]
        check(driver, made, {"o": o.array, "v": target})
        seen = arrays["v"] if way in ("plain", "strided") else arrays["v"].swapaxes(-3, -2)
        assert (target.dtype, target.shape) == ("float16", SHAPES[2])
        assert target.flags.c_contiguous
        assert (source.shape, source.dtype) == (target.shape, "float32")
        assert source.data.ptr == arrays["v"].data.ptr and source.strides[-3:] == seen.strides[-3:]
        planned_no_more(monkeypatch)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_torch_converts_what_the_plan_says(layout: str) -> None:
    """On tensors of the host: the numbers, in the plan's order of axes, where the plan has them."""
    bridge = importlib.import_module("cupyattn.interop.torch.bridge")
    v = torch.randn(2, 5, 3, 16) * 1e5  # some past the largest of float16
    v.requires_grad_()
    if layout == "BHSD":
        v = v.swapaxes(1, 2)
    rows = v if layout == "BHSD" else v.swapaxes(1, 2)
    shape, strides = tuple(rows.shape), rows.stride()
    nbytes = 2 * rows.numel()
    scratch = torch.full((nbytes + 512,), 7, dtype=torch.uint8)
    one = Conversion("v", shape, "float16", strides, 256, nbytes)
    bridge.convert(one, v, scratch)
    with np.errstate(over="ignore"):
        expected = rows.detach().numpy().astype(np.float16)
    found = scratch[256 : 256 + nbytes].numpy().view(np.float16).reshape(shape)
    np.testing.assert_array_equal(found, expected)
    assert np.isinf(found).any()
    assert bool((scratch[:256] == 7).all()) and bool((scratch[256 + nbytes :] == 7).all())


def test_scales_that_a_caller_gives_are_operands(
    driver: Driver,  # noqa: F811
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Codes point at the caller's, scores at copies in scratch memory; other scales of the same
    forms are no other call."""
    copies: list[tuple[int, int, int, int]] = []
    monkeypatch.setattr(
        cupy.cuda.runtime, "memcpyAsync",
        lambda to, of, n, _, stream: copies.append((to, of, n, stream)),
    )  # fmt: skip

    def quantised(scale: float) -> QuantConfig:
        return QuantConfig(
            "head", "tensor", smooth_k=False, scales=(np.full((1, 4, 1), scale, "f4"), scale)
        )

    shapes = zip("qkv", SHAPES, strict=True)
    given = {n: OnDevice(array(shape)) for n, shape in shapes}
    how: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90"}
    made = planned([x.array for x in given.values()], quant=quantised(0.1), **how)
    driver.expect(made)
    for quant in (one := quantised(0.1), one, quantised(0.2)):
        o, _ = calls.forward(calls.Settings(quant=quant, **how), given)
        _, _, passed = driver.launches[0]
        params = zip(passed, made[0].launches[0].params, strict=True)
        structs = [np.frombuffer(x, parameter[0])[0] for x, parameter in params]
        kept = quant.scales_beside(given["q"].array, ((1, 4), (1, 2)))
        sources = [x.data.ptr for x in kept.values()]
        assert [int(x["static_scale"]) for x in structs[:2]] == sources
        assert [of for _, of, *_ in copies[-2:]] == sources
        assert [int(x["scale"]) for x in structs[:2]] == [to for to, *_ in copies[-2:]]
        assert [(n, stream) for *_, n, stream in copies[-2:]] == [(16, 7), (4, 7)]
        check(driver, made, {"v": given["v"].array, "o": o.array})
        planned_no_more(monkeypatch)


def gradient_plans(arrays: dict[str, Any], **options: Any) -> list[Any]:
    """The plans of a backward pass on arrays by name."""
    rows = {name: arrays[name] for name in ("d_out", "q", "k", "v", "out", "lse")}
    options |= {name: x for name, x in arrays.items() if name not in rows}
    problem = backward.resolved_backward("attention_backward", *rows.values(), options)
    return backward.BACKWARD.plan(problem).plans


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
@pytest.mark.parametrize("added", ["", "deterministic", "mask", "block_mask", "packed"])
def test_gradients_of_tensors_are_launched_again_from_their_addresses(
    driver: Driver,  # noqa: F811
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    added: str,
) -> None:
    """As above: what plans the second call fails the test."""
    options: dict[str, Any] = {"arch": arch, "causal": True}
    others: dict[str, tuple[tuple[int, ...], str]] = {}
    of_q, of_k, of_lse = SHAPES[0], SHAPES[1], SHAPES[0][:-1]
    kept = {name: array((1, 1, 1, 3), "int32") for name in ("kept_blocks", "kept_rows")}
    if added == "deterministic":
        options["deterministic"] = True
    if added == "mask":
        others["mask"] = ((33, 70), "bool")
    if added == "block_mask":
        near = options["block_mask"] = BlockMask.from_window(33, 70, (64, 0))
        monkeypatch.setattr(
            BlockMask, "kept_blocks",
            lambda self, *_: kept["kept_blocks" if self is near else "kept_rows"],
        )  # fmt: skip
    if added == "packed":
        of_q, of_k, of_lse = (33, 4, 64), (70, 2, 64), (4, 33)
        options |= {"max_len_q": 20, "max_len_k": 50}
        others |= {f"cu_seqlens_{n}": ((3,), "int32") for n in "qk"}
    shapes = {"d_out": of_q, "q": of_q, "k": of_k, "v": of_k, "out": of_q}

    def fresh() -> dict[str, Any]:
        rows = {name: array(shape) for name, shape in shapes.items()}
        rest = {name: array(*one) for name, one in others.items()}
        return {**rows, "lse": array(of_lse, "float32"), **rest}

    settings = calls.Settings(**options)
    made = gradient_plans(fresh(), **options)
    driver.expect(made)
    resolved = []
    take = backward._take
    monkeypatch.setattr(backward, "_take", lambda *a: resolved.append(a) or take(*a))
    for driver.stream in (7, 8):
        given = {name: OnDevice(x) for name, x in fresh().items()}
        tensors = {n: x for n, x in given.items() if n not in ("d_out", "out", "lse")}
        found = calls.gradients(settings, tensors, *(given[n] for n in ("d_out", "out", "lse")))
        known = {name: x.array for name, x in given.items()} | (
            kept if added == "block_mask" else {}
        )
        known["o"] = known.pop("out")
        known |= {f"d{name}": x.array for name, x in found.items()}
        check(driver, made, known)
        assert len(resolved) == 1, "a call is resolved once, the first one too"
    zeros = any(work.zeros for work in made[0].workspace)
    assert zeros == (added != "deterministic" or arch == "sm_90a")
    assert [stream for *_, stream in driver.fills] == [7, 8] * zeros


@pytest.mark.parametrize("why", ["turned", "copied"])
def test_gradients_that_copy_operands_are_known_again(
    driver: Driver,  # noqa: F811
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    """Rows that are turned back take other sines, and here an lse is copied: anew in every call."""
    copies = []

    def copy(x: Any) -> Any:
        copies.append(array(x.shape, x.dtype.name))
        return copies[-1]

    monkeypatch.setattr(cupy, "ascontiguousarray", copy)
    monkeypatch.setattr(cupy.ndarray, "__neg__", copy, raising=False)
    of_lse = "lse" if why == "copied" else ""

    def fresh() -> dict[str, Any]:
        given = {name: array(SHAPES[0]) for name in ("d_out", "q", "k", "v", "out")}
        lse = given["lse"] = array(SHAPES[0][:-1], "float32")
        if of_lse:
            given["lse"] = cupy.ndarray(lse.shape, lse.dtype, lse.data, order="F")
        return given

    options: dict[str, Any] = {"arch": "sm_90"}
    tables = {n: array((33, 32), "float32") for n in ("rope_cos", "rope_sin") if why == "turned"}
    pair = {"rope": tuple(tables.values())} if tables else {}
    made = gradient_plans(fresh() | pair, **options)
    driver.expect(made)
    for turn in range(3):
        given = fresh()
        tensors = {name: OnDevice(x) for name, x in {**given, **tables}.items()}
        of_pass = [tensors.pop(name) for name in ("d_out", "out", "lse")]
        found = calls.gradients(calls.Settings(**options), tensors, *of_pass)
        assert len(copies) == turn + 1
        known = {"d_out": given["d_out"], "v": given["v"], "dv": found["v"].array}
        if of_lse:
            check(driver, made, {**known, "lse": copies[-1]})
        else:
            assert copies[-1].data.ptr in _pointers(driver)
            driver.launches.clear()
        planned_no_more(monkeypatch)


def _pointers(driver: Driver) -> set[int]:  # noqa: F811
    """All words of the parameters of what was launched."""
    values = [value for _, _, some in driver.launches for value in some]
    return {int(x) for one in values for x in np.frombuffer(one[: len(one) // 8 * 8], np.uint64)}


@pytest.mark.parametrize("copied", ["mask", "v"])
def test_a_call_that_copies_an_operand_is_known_again(
    driver: Driver,  # noqa: F811
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
    copied: str,
) -> None:
    """Each call reads a copy of its own, of operands whose elements lie at odd addresses."""
    copies = []

    def copy(x: Any) -> Any:
        copies.append(array(x.shape, x.dtype.name))
        return copies[-1]

    monkeypatch.setattr(described, "aligned_copy", copy)
    place = array((2**20,), "uint8").data.ptr + 1

    def fresh() -> dict[str, Any]:
        given = {n: array(s) for n, s in zip("qkv", SHAPES, strict=True)}
        if copied == "v":
            return {**given, "v": array(SHAPES[2], address=place)}
        return {**given, "bias": array((33, 70), "float32", address=place)}

    given, options = fresh(), {"variant": "fa", "arch": "sm_90"}
    made = planned(list(given.values())[:3], **{"bias": given.get("bias")}, **options)
    driver.expect(made)
    for turn in range(3):
        given = fresh()
        tensors = {name: OnDevice(x) for name, x in given.items()}
        o, _ = calls.forward(calls.Settings(**options), tensors)
        assert len(copies) == turn + 1
        name = "v" if copied == "v" else "bias"
        check(driver, made, {**given, name: copies[-1], "o": o.array})
        planned_no_more(monkeypatch)


def test_known_calls_are_launched_on_the_device_of_their_tensors(
    driver: Driver,  # noqa: F811
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward, gradients and a layer's codes; whatever device is current, it stays so."""
    current = [0]

    @contextlib.contextmanager
    def device(one: int) -> Any:
        before, current[0] = current[0], one
        yield
        current[0] = before

    parts = importlib.import_module("cupyattn.interop.torch.linear_parts")
    weight = OnDevice(array((128, 256), "int8")), OnDevice(array((1, 2), "float32"))
    x, settings = OnDevice(array((8, 256))), calls.Settings(variant="fa_tc", arch="sm_90a")
    given = {n: OnDevice(array(s)) for n, s in zip("qkv", SHAPES, strict=True)}
    d_out, out = (OnDevice(array(SHAPES[0])) for _ in range(2))
    lse = OnDevice(array(SHAPES[0][:-1], "float32"))
    driver.expect(planned([x.array for x in given.values()], variant="fa_tc", arch="sm_90a"))
    of_layer = {"x": x.array, "b0": weight[0].array, "b_scales0": weight[1].array}
    asked = layers.LayersSettings("float16", ("",), "sm_90", None)
    driver.expect(layers.LAYERS.plan(problem_of(layers.LAYERS, asked, of_layer)).plans)
    rows = {"d_out": d_out, **given, "out": out, "lse": lse}
    driver.expect(gradient_plans({n: x.array for n, x in rows.items()}, arch="sm_90a"))
    ways = (
        lambda: calls.forward(settings, given),
        lambda: calls.gradients(settings, given, d_out, out, lse),
        lambda: parts.run_layer(x, *weight, None, None, None, "", "sm_90", None),
    )
    for way in ways:
        way()
    launched: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(Ready, "launch", lambda *_: launched.append(current[0]))
    for current[0] in (0, 1):
        before = current[0]
        for way in ways:
            way()
            assert current[0] == before
    assert launched == [0] * 6


def test_what_makes_calls_on_tensors_different(
    driver: Driver,  # noqa: F811
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values make none; forms, settings and whether offsets have to be looked at do."""
    given = {n: OnDevice(array(s)) for n, s in zip("qkv", SHAPES, strict=True)}
    settings = calls.Settings(variant="fa", causal=True)

    def but(**options: Any) -> Any:
        return settings._replace(of_call=settings.of_call._replace(**options))

    def find(settings: Any, tensors: Any, out: Any) -> Any:
        """Return the key of a call, None of one that is known by none."""
        keys: list[Any] = []

        def stop(key: Any, forms: Any) -> Any:
            keys.append(recent.CALLS.__class__.find(recent.CALLS, key, forms)[0])
            raise InterruptedError

        with monkeypatch.context() as patch:
            patch.setattr(recent.CALLS, "find", stop)
            patch.setattr(operation, "problem_of", mock.Mock(side_effect=InterruptedError))
            with contextlib.suppress(InterruptedError):
                calls.forward(settings, tensors, out)
        return keys[0] if keys else None

    lists = array((1, 1, 1, 3), "int32")
    monkeypatch.setattr(BlockMask, "kept_blocks", lambda *_: lists)
    accept(find(settings, given, None))  # as a call does that has passed
    key = find(settings, given, None)
    other = {n: OnDevice(array(s)) for n, s in zip("qkv", SHAPES, strict=True)}
    assert find(settings, other, None) == key
    assert find(calls.Settings(variant="fa", causal=True), other, None) == key
    place = array((2**20,), "uint8").data.ptr
    changed = [
        (but(causal=False), given, None),
        (calls.Settings(variant="fa", causal=1), given, None),
        (settings, {**given, "q": OnDevice(array(SHAPES[0], "bfloat16"))}, None),
        (settings, {**given, "q": OnDevice(array((1, 4, 34, 64)))}, None),
        (settings, {**given, "q": OnDevice(array(SHAPES[0], address=place + 8))}, None),
        (settings, {**given, "k": OnDevice(array((1, 70, 2, 64)).swapaxes(1, 2))}, None),
        (settings, {**given, "mask": OnDevice(array((33, 70), "bool"))}, None),
        (settings, given, given["q"]),
        (settings._replace(block_mask=BlockMask.from_window(33, 70, (64, 0))), given, None),
    ]
    found = [find(*one) for one in changed]
    assert None not in found and len({key, *found}) == 1 + len(found)
    ends = {f"cu_seqlens_{n}": OnDevice(array((3,), "int32")) for n in "qk"}
    limited = but(max_len_q=33, max_len_k=70)
    assert find(limited, {**given, **ends}, None) is not None
    monkeypatch.setattr(calls.bridge.Tensors, "read", lambda _, x: {n: np.arange(3) for n in x})
    for looked_at in (settings, but(max_len_q=33)):
        assert find(looked_at, {**given, **ends}, None) is None
    assert find(but(check_finite=True), given, None) is None
    assert find(but(window=[1, 2]), given, None) is None


def test_memory_of_the_public_function_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves where torch has no function of Inductor's."""
    bridge = importlib.import_module("cupyattn.interop.torch.bridge")
    public, shape = torch.empty_strided, (2, 3, 4)
    monkeypatch.setattr(torch, "empty_strided", lambda *a, device, **how: public(*a, **how))
    made = bridge._public_empty(shape, bridge.strides_of(shape), torch.float16)
    own = torch._C._dynamo.guards._empty_strided_cpu(shape, bridge.strides_of(shape), torch.float16)
    for x in (made, own):
        assert x.shape == shape and x.is_contiguous() and x.dtype == torch.float16
    assert hasattr(torch._C._dynamo.guards, "_empty_strided_cuda")
