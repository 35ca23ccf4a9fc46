"""Requirements on calls, and their messages with the caller's names and values."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.arrays import memory as arrays_memory
from cupyattn.arrays.described import Described, check_receiver, meetings
from cupyattn.arrays.memory import data_address
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import limits
from cupyattn.problem import checks
from cupyattn.problem.settings import check_attention
from cupyattn.runtime.ready import Receiver


def arrays(
    q: tuple[int, ...] = (2, 4, 5, 8),
    k: tuple[int, ...] = (2, 2, 7, 8),
    v: tuple[int, ...] | None = None,
    dtype: Any = np.float16,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(np.zeros(shape, dtype) for shape in (q, k, k if v is None else v))


def test_a_call_is_what_the_arrays_say() -> None:
    call = check_attention(*arrays(), causal=True, return_lse=True)
    assert (call.batch, call.heads, call.heads_kv) == (2, 4, 2)
    assert (call.len_q, call.len_kv, call.head_dim) == (5, 7, 8)
    assert call.dtype == "float16" and call.scale == 1 / 8**0.5
    assert call.causal and call.causal_shift == 2 and call.return_lse
    assert call.output_shape == (2, 4, 5, 8) and call.lse_shape == (2, 4, 5)


def test_shift_is_nothing_without_causal() -> None:
    assert check_attention(*arrays()).causal_shift == 0
    top_left = check_attention(*arrays(), causal=True, causal_align="top-left")
    assert top_left.causal_shift == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_dtypes_that_are_taken(dtype: Any) -> None:
    assert checks.check_dtype(*arrays(dtype=dtype)) == np.dtype(dtype).name


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32, bool, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_type_errors(dtype: Any) -> None:
    with pytest.raises(TypeError, match=rf"float32, got q\.dtype={np.dtype(dtype).name}, k\.dtype"):
        check_attention(*arrays(dtype=dtype))


def test_mixed_dtypes_are_type_errors() -> None:
    q, k, v = arrays()
    with pytest.raises(TypeError, match=r"q\.dtype=float16, k\.dtype=float16, v\.dtype=float32"):
        check_attention(q, k, v.astype(np.float32))


@pytest.mark.parametrize(
    ("q", "k", "v", "error", "sentence"),
    [
        ((4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), ValueError, "q, k and v must have four axes"),
        ((3, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), ValueError, "q, k and v must agree on batch"),
        ((2, 4, 5, 8), (2, 2, 7, 8), (2, 1, 7, 8), ValueError, "k and v must agree on heads"),
        ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 6, 8), ValueError, "k and v must agree on length"),
        ((2, 4, 5, 8), (2, 2, 7, 4), (2, 2, 7, 4), ValueError, "q and k must agree on head_dim"),
        ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 4), UnsupportedError, "v with another head_dim"),
        ((2, 4, 5, 0), (2, 2, 7, 0), (2, 2, 7, 0), UnsupportedError, "head_dim must be 1 to 256"),
        ((2, 4, 5, 257), (2, 2, 7, 257), None, UnsupportedError, "head_dim must be 1 to 256"),
        ((2, 4, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), ValueError, "the heads of k and v must divide"),
        ((2, 4, 5, 8), (2, 0, 7, 8), (2, 0, 7, 8), ValueError, "the heads of k and v must divide"),
        ((1, 1, 2**31, 8), (1, 1, 7, 8), None, UnsupportedError, "at most 2"),
    ],
)
def test_shapes_that_do_not_fit(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...] | None,
    error: type[Exception],
    sentence: str,
) -> None:
    v = k if v is None else v
    with pytest.raises(error, match=sentence) as caught:
        limits.check_shapes(q, k, v)
    assert f"got q.shape={q} k.shape={k} v.shape={v}" in str(caught.value)


@pytest.mark.parametrize(
    ("q", "k"), [((0, 4, 5, 8), (0, 2, 7, 8)), ((2, 0, 5, 8), (2, 0, 7, 8)), ((1, 1, 0, 1),) * 2]
)
def test_empty_shapes_fit(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    assert limits.check_shapes(q, k, k) == (q[0], q[1], k[1], q[2], k[2], q[3])


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf")])
def test_scales_that_mean_nothing(scale: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"positive and finite, got {scale!r}")):
        checks.check_scale(scale, 64)


def test_alignments_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="'bottom-right' or 'top-left', got 'left'"):
        checks.check_causal("left", 4, 4)


# ---- out -----------------------------------------------------------------------------------------


def check_out(out: np.ndarray, inputs: tuple[np.ndarray, ...] | None = None) -> None:
    inputs = inputs or arrays()
    call, described = check_attention(*inputs), Described.of("out", out)
    check_receiver(described, call.output_shape, call.dtype)
    read = {name: Described.of(name, x) for name, x in zip("qkv", inputs, strict=True)}
    addresses = {name: data_address(x) for name, x in zip("qkv", inputs, strict=True)}
    Receiver("o", meetings(described, read)).check({**addresses, "o": data_address(out)})


def test_outs_that_fit() -> None:
    check_out(np.empty((2, 4, 5, 8), np.float16))
    check_out(np.empty((2, 5, 4, 8), np.float16).swapaxes(1, 2))
    check_out(np.empty((2, 4, 9, 20), np.float16)[:, ::-1, 2:7, 3:11])


def test_outs_that_do_not_fit() -> None:
    with pytest.raises(
        ValueError, match=r"shape \(2, 4, 5, 8\) and dtype float16, got shape \(2, 4"
    ):
        check_out(np.empty((2, 4, 6, 8), np.float16))
    with pytest.raises(ValueError, match="and dtype float32"):
        check_out(np.empty((2, 4, 5, 8), np.float32))
    with pytest.raises(ValueError, match="out must have a contiguous last axis, got strides"):
        check_out(np.empty((2, 4, 8, 5), np.float16).swapaxes(2, 3))
    with pytest.raises(ValueError, match="out must not be a broadcast view, got strides"):
        check_out(
            np.lib.stride_tricks.as_strided(np.empty(8, np.float16), (2, 4, 5, 8), (0, 0, 0, 2))
        )


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_may_not_overlap_an_input(name: str) -> None:
    shape = (2, 4, 5, 8)
    memory = np.zeros((3, *shape), np.float16)
    inputs = tuple(memory[i] for i in range(3))
    with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
        check_out(inputs["qkv".index(name)][:, ::-1], inputs)


def test_neighbours_do_not_overlap() -> None:
    memory = np.zeros((4, 2, 4, 5, 8), np.float16)
    check_out(memory[3], (memory[0], memory[1], memory[2]))
    check_out(memory[1], (memory[0], memory[2], memory[3]))


@st.composite
def any_view(draw: st.DrawFn) -> np.ndarray:
    base = np.zeros(
        [draw(st.integers(0, 4)) for _ in range(4)], draw(st.sampled_from(["i1", "f4"]))
    )
    steps = [draw(st.sampled_from([1, 2, -1, -2])) for _ in range(4)]
    view = base[tuple(slice(None, None, step) for step in steps)]
    return view.transpose(draw(st.permutations(range(4))))


@given(array=any_view())
def test_the_reach_is_the_hull_of_the_elements(array: np.ndarray) -> None:
    low, high = (data_address(array) + end for end in Described.of("x", array).reach)
    if array.size == 0:
        assert low == high
        return
    single = (array[tuple(slice(i, i + 1) for i in index)] for index in np.ndindex(array.shape))
    addresses = [arrays_memory.data_address(element) for element in single]
    assert (low, high) == (min(addresses), max(addresses) + array.itemsize)


def test_address_of_a_device_array_is_its_pointer() -> None:
    assert arrays_memory.data_address(SimpleNamespace(data=SimpleNamespace(ptr=4096))) == 4096
