"""Memory accesses of kernels: nothing outside of arrays, no writes to inputs, any strides."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyattn import QuantConfig, attention, explain, plan, quantize
from cupyattn.arrays.kinds import STORAGE
from cupyattn.compiler import modules as kc
from cupyattn.errors import DeviceMemoryError, KernelLaunchError
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem import choose
from cupyattn.quant.quantized import BUFFERS as QUANTIZED
from tests.gpu.support import (
    arch_of,
    attend,
    embedded,
    form_taken,
    guarded,
    on_device,
    prebuild,
    run,
    run_into,
    specs_of,
)
from tests.hopper import hopper_pv8_cases
from tests.support.runs import (
    CELLS,
    RUNGS,
    SPILLED,
    SPILLED_FINE,
    asked_for,
    bits,
    normal,
    on_host,
    variant_of,
)

cupy = pytest.importorskip("cupy")

#: Head sizes by the width of access that they allow.
HEAD_DIMS = (64, 36, 9)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    shapes = [(d, causal, True, 0) for d in HEAD_DIMS for causal in (False, True)]
    shapes += [(d, causal, True, 1) for d in HEAD_DIMS for causal in (False, True)]
    shapes += [(64, causal, False, pad) for causal in (False, True) for pad in (0, 1)]
    prebuild(
        spec
        for (variant, dtype), (head_dim, causal, lse, pad) in itertools.product(CELLS, shapes)
        for spec in specs_of(variant, dtype, head_dim, causal, lse=lse, pad=pad)
    )


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_results_are_written_in_full_and_nothing_beside_them(
    variant: str, dtype: str, head_dim: int, causal: bool
) -> None:
    for len_q, len_kv in ((1, 5), (77, 130), (130, 77)):
        inputs = on_device(*normal((2, 4, len_q, head_dim), (2, 2, len_kv, head_dim), dtype))
        before = [bits(x) for x in inputs]
        o = guarded((2, 4, len_q, head_dim), dtype)
        lse = guarded((2, 4, len_q), "float32")
        found = run_into(variant, inputs, o.array, lse.array, causal=causal)
        o.check()
        lse.check()
        found.check()
        assert [bits(x) for x in inputs] == before, "an input was modified"


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
@pytest.mark.parametrize("causal", [False, True])
def test_what_lies_outside_the_arrays_has_no_influence(
    variant: str, dtype: str, causal: bool
) -> None:
    for head_dim, pad in ((64, 8), (36, 1), (9, 3)):
        inputs = normal((2, 4, 77, head_dim), (2, 2, 131, head_dim), dtype)
        alone = run(variant, on_device(*inputs), causal=causal)
        amid_nan = run(variant, tuple(embedded(x, pad) for x in inputs), causal=causal)
        amid_zeros = run(variant, tuple(embedded(x, pad, 0.0) for x in inputs), causal=causal)
        assert bits(amid_nan.o) == bits(amid_zeros.o)
        assert bits(amid_nan.lse) == bits(amid_zeros.lse)
        same_form = form_taken(variant, amid_nan.inputs) == form_taken(variant, alone.inputs)
        if same_form and variant_of(variant).family != "int8":  # see test_strides
            assert bits(amid_nan.o) == bits(alone.o)
            assert bits(amid_nan.lse) == bits(alone.lse)
        else:
            amid_nan.check()


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
def test_out_is_written_in_any_strides(variant: str, dtype: str) -> None:
    inputs = on_device(*normal((2, 4, 77, 64), (2, 2, 50, 64), dtype))
    alone = run(variant, inputs)
    for pad in (8, 1):
        buffer = cupy.asarray(np.full((2, 77, 4, 64 + 2 * pad), np.nan, STORAGE[dtype]))
        view = buffer[..., pad : pad + 64].swapaxes(1, 2)
        o, lse = attend(variant, *inputs, out=view, return_lse=True)
        assert o is view
        form = form_taken(variant, inputs, out=view)
        if form == alone.form:
            assert bits(view) == bits(alone.o)
        replace(alone, form=form, o=view, lse=lse).check()
        host = on_host(buffer)
        assert np.isnan(host[..., :pad].astype(np.float32)).all()
        assert np.isnan(host[..., pad + 64 :].astype(np.float32)).all()


@pytest.mark.parametrize("head_dim", [36, 132])
def test_the_hopper_form_writes_no_column_past_head_dim(head_dim: int) -> None:
    wide = on_device(*normal((1, 4, 177, head_dim + 4), (1, 2, 50, head_dim + 4)))
    inputs = tuple(x[..., :head_dim] for x in wide)
    buffer = cupy.full_like(wide[0], cupy.nan)
    attend("fa_tc@sm90", *inputs, out=buffer[..., :head_dim])
    assert bool(cupy.isfinite(buffer[..., :head_dim]).all())
    assert bool(cupy.isnan(buffer[..., head_dim:]).all())


def views_of(x: np.ndarray) -> dict[str, tuple[Any, np.ndarray]]:
    """Views on the device that hold what the array beside them holds."""
    d = on_device(x)[0]
    both = ((cupy, d), (np, x))
    return {
        "BSHD underneath": (on_device(x.swapaxes(1, 2).copy())[0].swapaxes(1, 2), x),
        "heads and batch reversed": (d[::-1, ::-1], x[::-1, ::-1]),
        "rows reversed": (d[:, :, ::-1], x[:, :, ::-1]),
        "every second row": (d[:, :, ::2], x[:, :, ::2]),
        "one head for all": tuple(xp.broadcast_to(a[:, :1], x.shape) for xp, a in both),
        "one batch for all": tuple(xp.broadcast_to(a[:1], x.shape) for xp, a in both),
        "columns strided": (on_device(np.repeat(x, 2, axis=3))[0][..., ::2], x),
        "rows at odd places": (embedded(x, 1), x),
    }


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
def test_strides(variant: str, dtype: str) -> None:
    q, k, v = normal((2, 4, 78, 64), (2, 2, 130, 64), dtype)
    views = [views_of(x) for x in (q, k, v)]
    for name in views[0]:
        strided = tuple(view[name][0] for view in views)
        plain = on_device(*(np.ascontiguousarray(view[name][1]) for view in views))
        before = [bits(x) for x in strided]
        found = run(variant, strided, causal=True)
        assert [bits(x) for x in strided] == before, name
        if form_taken(variant, strided) == form_taken(variant, plain):
            # no rounding depends on where rows lie, but that of the keys' mean: wider accesses
            # give a lane other rows to add up
            if variant_of(variant).family == "int8":
                found.check()
            else:
                assert bits(found.o) == bits(attend(variant, *plain, causal=True)), name
        else:
            found.check()  # the Hopper form does not take these


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
def test_a_hundred_runs_are_one(variant: str, dtype: str) -> None:
    inputs = on_device(*normal((60, 4, 65, 64), (60, 4, 100, 64), dtype))
    first = attend(variant, *inputs)
    words = first.view(f"u{first.dtype.itemsize}")
    differing = cupy.zeros((), "int64")
    for _ in range(99):
        again = attend(variant, *inputs)
        differing += (again.view(words.dtype) != words).sum()
    assert int(differing) == 0


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", RUNGS)
def test_more_heads_than_a_grid_has_in_y(variant: str) -> None:
    inputs = on_device(*normal((35_000, 2, 3, 9), (35_000, 1, 5, 9)))
    found = run(variant, inputs)
    found.check()
    single = run(variant, tuple(x[-1:] for x in inputs))
    assert bits(single.o) == bits(found.o[-1:])


def far_apart(shape: tuple[int, ...], strides: tuple[int, ...], x: np.ndarray) -> Any:
    """Return a view whose rows lie `strides` elements apart, filled with `x`."""
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    buffer = cupy.empty(last + 1, x.dtype)
    byte_strides = tuple(s * x.dtype.itemsize for s in strides)
    view = cupy.ndarray(shape, x.dtype, memptr=buffer.data, strides=byte_strides)
    view[...] = cupy.asarray(x)
    return view


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("variant", [*RUNGS, *hopper_pv8_cases.RUNGS])
def test_offsets_past_two_to_the_31(variant: str, axis: int) -> None:
    """Batches, heads or rows more than 2^30 elements apart, in Q, K, V and O."""
    if cupy.cuda.runtime.memGetInfo()[0] < 30 * 2**30:
        pytest.skip("needs 30 GB of device memory")
    inputs = normal((3, 3, 3, 64), (3, 3, 3, 64))
    strides = [9 * 64, 3 * 64, 64]
    strides[axis] = 2**30 + 64
    shape = inputs[0].shape
    try:
        views = tuple(far_apart(shape, (*strides, 1), x) for x in inputs)
        out = far_apart(shape, (*strides, 1), np.full(shape, np.nan, np.float16))
        expected = attend(variant, *on_device(*inputs), causal=True)
        form = form_taken(variant, views, causal=True, out=out)
        assert form == (variant.partition("@")[2] or "portable")
        attend(variant, *views, causal=True, out=out)
        assert bits(out) == bits(expected)
    finally:
        views = out = None
        cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("variant", [rung for rung in RUNGS if "@sm90" not in rung])
def test_offsets_of_mask_and_bias_past_two_to_the_31(variant: str, axis: int) -> None:
    """Entries, heads or rows of both more than 2^30 elements apart; keys lie side by side."""
    if cupy.cuda.runtime.memGetInfo()[0] < 20 * 2**30:
        pytest.skip("needs 20 GB of device memory")
    rng = np.random.default_rng(0)
    inputs = on_device(*normal((3, 3, 3, 64), (3, 3, 40, 64)))
    shape = 3, 3, 3, 40
    mask, bias = rng.random(shape) < 0.6, rng.standard_normal(shape).astype(np.float32)
    strides = [9 * 40, 3 * 40, 40, 1]
    strides[axis] = 2**30 + 64
    try:
        expected = attend(variant, *inputs, mask=cupy.asarray(mask), bias=cupy.asarray(bias))
        views = {
            n: far_apart(shape, tuple(strides), x) for n, x in (("mask", mask), ("bias", bias))
        }
        assert bits(attend(variant, *inputs, **views)) == bits(expected)
    finally:
        views = None
        cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize(
    "rung", ["fa_int8", "fa_int8@pv8", "fa_int8@pv8_whole", "fa_int8@sm90", *hopper_pv8_cases.RUNGS]
)
def test_codes_past_two_to_the_31(rung: str) -> None:
    """More than 2^31 codes of K, and of V where it has any: the last entry is as the first."""
    if cupy.cuda.runtime.memGetInfo()[0] < 16 * 2**30:
        pytest.skip("needs 16 GB of device memory")
    arch, batch = arch_of(rung), 2**11 + 1
    q, k, v = on_device(*normal((1, 16, 3, 64), (1, 16, 1024, 64)))
    one = quantize(q, k, v, quant=asked_for(rung).get("quant"), arch=arch)
    few = {name: a for name in QUANTIZED if (a := getattr(one, name)) is not None}
    try:
        many = replace(one, **{name: cupy.concatenate([a] * batch) for name, a in few.items()})
        values = many.v if many.v_codes is None else many.v_codes
        assert many.k_codes.size > 2**31 and values.size > 2**31
        expected = attend(rung, one, return_lse=True)
        found = attend(rung, many, return_lse=True)
        for whole, first in zip(found, expected, strict=True):
            assert bits(whole[-1:]) == bits(first) == bits(whole[:1])
    finally:
        many = values = found = whole = None
        cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("variant", ["unfused", "fa_tc", "fa_int8"])
def test_what_does_not_fit_says_so_before_the_launch(variant: str) -> None:
    """The device pretends to have 1 MiB left; afterwards the call runs as before."""
    inputs = on_device(*normal((1, 8, 2048, 64), (1, 8, 2048, 64)))
    expected = attention(*inputs, variant=variant)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    try:
        pool.set_limit(size=pool.used_bytes() + 2**20)
        with pytest.raises(DeviceMemoryError, match=rf"{variant} needs .* bytes .* are free: "):
            attention(*inputs, variant=variant)
    finally:
        pool.set_limit(size=0)
    assert bits(attention(*inputs, variant=variant)) == bits(expected)


@pytest.mark.parametrize("variant", ["fa_warps", "fa_tc", "fa_int8"])
def test_more_than_two_to_the_31_elements(variant: str) -> None:
    if cupy.cuda.runtime.memGetInfo()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of device memory")
    len_q = 2**23 + 300
    _, k, v = on_device(*normal((1, 1, 1, 256), (1, 1, 40, 256)))
    block = on_device(*normal((1, 1, 4096, 256), (1, 1, 1, 256)))[0]
    try:
        q = cupy.empty((1, 1, len_q, 256), "float16")
        for row in range(0, len_q, 4096):
            q[:, :, row : row + 4096] = block[:, :, : min(4096, len_q - row)]
        assert math.prod(q.shape) > 2**31
        o = attend(variant, q, k, v)
        # the rows repeat, so the result does: each row is computed from itself and the keys alone
        first, last = o[:, :, :4096], o[:, :, len_q // 4096 * 4096 :]
        assert bits(last) == bits(first[:, :, : last.shape[2]])
        assert bits(first) == bits(attend(variant, block, k, v))
    finally:
        q = o = first = last = None
        cupy.get_default_memory_pool().free_all_blocks()


# ---- resources -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quant",
    [QuantConfig(), QuantConfig(pv="int8"), *choose.QUANT.values()],
    ids=["16bit", "int8", *choose.QUANT],
)
def test_quantising_takes_the_memory_that_explain_states(quant: QuantConfig) -> None:
    """Codes, padded for V, with scales and means; slices' sums; nothing else but O."""
    inputs = on_device(*normal((2, 4, 1000, 64), (2, 2, 2001, 64)))
    options = {"variant": "fa_int8", "quant": quant}
    attend_as_planned = plan(*inputs, **options)
    out = attend_as_planned(*inputs)  # what is made once is there
    stated = re.findall(r"([\d,]+) bytes", explain(*inputs, **options))
    total = sum(int(x.replace(",", "")) for x in stated)
    assert attend_as_planned.workspace_bytes == total
    del attend_as_planned
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        held = plan(*inputs, out=out, **options)
        before = pool.used_bytes()
        held(*inputs, out=out)
        assert pool.used_bytes() == before
    buffers = 12  # that may be, each rounded up to 256 bytes, and the whole to 512
    assert total <= before <= total + 256 * buffers + 512


@pytest.mark.parametrize("variant", [rung for rung in RUNGS if "@" not in rung])
def test_a_tile_that_does_not_fit_is_an_error_that_names_it(variant: str) -> None:
    inputs = on_device(*normal((1, 1, 64, 256), (1, 1, 64, 256)))
    tiles = Tiles(64, 64, 4, 8) if variant_of(variant).family in ("tensor_core", "int8") else None
    with pytest.raises(KernelLaunchError) as caught:
        attend(variant, *inputs, tiles=tiles or Tiles(64, 256, 4))
    limit = cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    for piece in (
        f"attn_{variant}.cu",
        "CFG_BLOCK_KV=",
        f"allows {limit}",
        "reduce tiles.block_kv",
    ):
        assert piece in str(caught.value)
    run(variant, inputs).check()  # the device is as well as before


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_tiles_keep_everything_in_registers(
    variant: str, dtype: str, head_dim: int
) -> None:
    for causal in (False, True):
        for spec in specs_of(variant, dtype, head_dim, causal):
            module = kc.load(spec)
            for entry in module.binary.kernels:
                allowed = max(
                    SPILLED.get((variant, dtype, head_dim), 0),
                    SPILLED_FINE.get((variant, head_dim), 0),
                )
                assert module.kernel(entry).local_size_bytes <= allowed, f"{entry} of {spec}"
