"""Arrays whose elements are not aligned, and subclasses of NumPy's array, in every function."""

from __future__ import annotations

import contextlib
import pickle
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays import described, interchange, memory
from cupyattn.ops import operation
from docs import write_api
from tests.problem.array_calls import CALLS, MODULES, ON_THE_HOST, WITHOUT_ARRAYS, K, Q, V
from tests.support.foreign import Foreign

#: The arguments of each call, and those whose elements have more than one byte.
EVERY = {name: list(given) for name, (given, _) in CALLS.items()}
WIDE = {
    name: wide for name, (given, _) in CALLS.items()
    if (wide := [argument for argument, x in given.items() if x.dtype.itemsize > 1])
}  # fmt: skip


class Metres(np.ndarray):
    """A subclass that a unit belongs to."""


def at_odd_address(x: np.ndarray) -> np.ndarray:
    """Return a copy whose address is one byte past a multiple of 16."""
    buffer = np.zeros(x.nbytes + 32, np.uint8)
    start = -buffer.ctypes.data % 16 + 1
    copy: np.ndarray = np.ndarray(x.shape, x.dtype, buffer.data, start)
    copy[...] = x
    return copy


def in_packed_records(x: np.ndarray) -> np.ndarray:
    """Return a copy as a field of records of one more byte: no stride fits the elements."""
    records = np.zeros(x.shape, [("tag", "u1"), ("x", x.dtype)])
    records["x"] = x
    field: np.ndarray = records["x"]
    return field


def bits(result: Any) -> list[bytes]:
    """Return all arrays that a result consists of, as bytes."""
    if isinstance(result, ca.QuantizedQKV):
        result = tuple(vars(result)[n] for n in ("q_codes", "q_scale", "k_codes", "k_scale", "v"))
    if isinstance(result, tuple):
        return [one for x in result for one in bits(x)]
    return [result.tobytes() if isinstance(result, np.ndarray) else pickle.dumps(result)]


def test_every_public_name_has_a_row() -> None:
    """A name that a module shares with `cupyattn` needs one row."""
    public = set(ca.__all__)
    for module in MODULES:
        held = getattr(ca, module)
        public |= {
            f"{module}.{name}"
            for name in write_api.public(f"cupyattn.{module}")
            if getattr(held, name) is not getattr(ca, name, None)
        }
    rows = {".".join(name.split(".")[:2]) for name in CALLS} | {n.split(".")[0] for n in CALLS}
    assert not public - rows - WITHOUT_ARRAYS
    assert public >= WITHOUT_ARRAYS
    assert not WITHOUT_ARRAYS & {name for name in CALLS if name not in MODULES}


@pytest.mark.parametrize("name", WIDE)
def test_misaligned_inputs_are_copied(name: str) -> None:
    given, call = CALLS[name]
    wanted = bits(call(dict(given)))
    for argument in WIDE[name]:
        for odd in (at_odd_address, in_packed_records):
            moved = odd(given[argument])
            before = moved.tobytes()
            assert bits(call({**given, argument: moved})) == wanted, (argument, odd)
            assert moved.tobytes() == before, (argument, odd)


@pytest.mark.parametrize("name", ["attention", "act_quant", "int8_gemm", "attention_backward"])
def test_misaligned_inputs_reach_kernels_aligned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter would report an access at their own addresses."""
    monkeypatch.setenv("CUPYATTN_INTERPRET", "1")
    given, call = CALLS[name]
    wanted = bits(call(dict(given)))
    assert bits(call({n: at_odd_address(x) for n, x in given.items()})) == wanted


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_misaligned_operands_give_attention(dtype: Any) -> None:
    q, k, v = (at_odd_address(x.astype(dtype)) for x in (Q, K, V))
    S = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k.astype(np.float64)) / 4
    P = np.exp(S - S.max(-1, keepdims=True))
    exact = np.einsum("bhqk,bhkd->bhqd", P / P.sum(-1, keepdims=True), v.astype(np.float64))
    o = ca.attention(q, k, v).astype(np.float64)
    np.testing.assert_allclose(o, exact, rtol=0, atol=4e-3 if dtype != ml_dtypes.bfloat16 else 3e-2)


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_a_misaligned_out_is_refused(backend: str) -> None:
    out = at_odd_address(np.zeros_like(Q))
    said = r"out must have its elements at multiples of their 2 bytes, got address 2 n \+ 1"
    for run in (
        lambda: ca.attention(Q, K, V, out=out, backend=backend),
        lambda: ca.plan(Q, K, V, out=out, backend=backend),
    ):
        with pytest.raises(ValueError, match=said):
            run()
    given, _ = CALLS["int8_gemm"]
    with pytest.raises(ValueError, match=said):
        product = at_odd_address(np.zeros((3, 5), np.float16))
        ca.int8_gemm(**given, out_dtype="float16", out=product, backend=backend)
    assert not out.any()


def test_a_prepared_call_reads_a_copied_mask_again() -> None:
    bias = at_odd_address(np.zeros((1, 1, 8, 8), np.float32))
    prepared = ca.plan(Q, K, V, bias=bias)
    plain = prepared(Q, K, V)
    bias[..., 4:] = -np.inf
    masked = prepared(Q, K, V)
    np.testing.assert_array_equal(masked, ca.attention(Q, K, V, bias=bias))
    assert (masked != plain).any()


def refusal(name: str, argument: str, x: np.ndarray) -> str:
    """Return the message of the TypeError by which a call refuses `x` for one of its arguments."""
    given, call = CALLS[name]
    try:
        call({**given, argument: x})
    except TypeError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize("name", EVERY)
def test_subclasses_are_refused(name: str) -> None:
    """Masked arrays, and other subclasses that change the meaning of elements."""
    ignored = r"masked, because the mask would be ignored: pass .*mask="
    other = r"numpy\.ndarray or numpy\.memmap, got .*np\.asarray\(x\)"
    answers = [
        (argument, said, refusal(name, argument, array))
        for argument, x in CALLS[name][0].items()
        for array, said in (
            (np.ma.MaskedArray(x, mask=False), ignored),
            (x.view(Metres), other),
            (x.view(np.recarray), other),
        )
    ]
    assert not [one for one in answers if not re.search(one[1], one[2])]


@pytest.mark.parametrize("argument", ["x", "w"])
def test_matrices_are_refused(argument: str) -> None:
    given, call = CALLS["act_quant" if argument == "x" else "weight_quant"]
    with pytest.raises(TypeError, match=r"pass np\.asarray\(x\)"):
        call({argument: given[argument].view(np.matrix)})


@pytest.mark.parametrize("name", EVERY)
def test_mapped_files_are_taken(name: str, tmp_path: Path) -> None:
    given, call = CALLS[name]
    wanted = bits(call(dict(given)))
    for argument, x in given.items():
        mapped = np.memmap(tmp_path / argument, x.dtype, "w+", offset=3, shape=x.shape)
        mapped[...] = x
        assert bits(call({**given, argument: mapped})) == wanted, argument


def test_misaligned_arrays_come_in_by_dlpack() -> None:
    moved = [Foreign(at_odd_address(x)) for x in (Q, K, V)]
    assert bits(ca.attention(*moved)) == bits(ca.attention(Q, K, V))


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_masked_arrays_are_refused(kind: Any) -> None:
    sigmas = kind(np.ma.MaskedArray([8.0, 2.0, 0.5], mask=[False, True, False]))
    with pytest.raises(TypeError, match="sigmas must not be masked"):
        ca.compute_adaptive_scales(sigmas)


def test_values_in_another_byte_order_are_converted() -> None:
    sigmas = np.array([8.0, 2.0, 0.5])
    swapped = sigmas.astype(sigmas.dtype.newbyteorder())
    assert bits(ca.compute_adaptive_scales(swapped)) == bits(ca.compute_adaptive_scales(sigmas))


#: Arguments of functions that compute on CuPy arrays, but for those read after the device is used.
ON_CUPY = {
    name: read for name, wide in WIDE.items()
    if name.partition(".")[0] in ("bounds", "diffusion", "gradients", "reference", "testing")
    and name not in ON_THE_HOST
    and (read := [argument for argument in wide if argument not in ("bias", "rows")])
}  # fmt: skip


@pytest.mark.parametrize("name", ON_CUPY)
def test_misaligned_cupy_arrays_are_copied_before_they_are_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's arrays over memory of the host: without a device, only the copy can be reached."""
    cupy = pytest.importorskip("cupy")

    class Copied(Exception):
        pass

    def on_cupy(x: np.ndarray, *, odd: bool) -> Any:
        held = np.zeros(x.nbytes + 32, np.uint8)
        start = held.ctypes.data + -held.ctypes.data % 16 + odd
        memory = cupy.cuda.memory.UnownedMemory(start, x.nbytes, held, 0)
        return cupy.ndarray(x.shape, x.dtype, cupy.cuda.memory.MemoryPointer(memory, 0))

    def copy(array: Any) -> Any:
        raise Copied

    monkeypatch.setattr(interchange, "aligned_copy", copy)
    monkeypatch.setattr(described, "aligned_copy", copy)
    monkeypatch.setattr(described, "capability_of_device", lambda _: 80)

    def bind(one: Any, problem: Any, arrays: Any, *_: Any) -> Any:
        """Do what a call does with its arrays before it launches."""
        return problem.bound(arrays)

    monkeypatch.setattr(operation, "_run_new", bind)
    monkeypatch.setattr(memory, "on_device_of", lambda _: contextlib.nullcontext())
    given, call = CALLS[name]
    for argument in ON_CUPY[name]:
        with pytest.raises(Copied):
            call({n: on_cupy(x, odd=n == argument) for n, x in given.items()})
            pytest.fail(f"{argument} was not copied")
