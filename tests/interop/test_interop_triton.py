"""An attention kernel in Triton, compiled without a device: interpreted, judged, with faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn import interpret
from cupyattn.testing import judge, numerics

triton: Any = pytest.importorskip("triton", minversion="3.4")
tl: Any = pytest.importorskip("triton.language")
compiler: Any = pytest.importorskip("triton.backends.compiler")

BLOCK_Q, BLOCK_KV, HEAD_DIM, LENGTH, WARPS = 64, 32, 64, 100, 4
SHARED_BYTES = 48 << 10  # at least what the kernel needs
NUMERICS = numerics("fp16", accumulate="fp32")


@triton.jit  # type: ignore[untyped-decorator]
def attn(q_ptr, k_ptr, v_ptr, o_ptr, length, scale, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
         HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    row = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, HEAD_DIM)
    inside = row[:, None] < length
    q = tl.load(q_ptr + row[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    largest = tl.full([BLOCK_Q], -1e30, tl.float32)
    weights = tl.zeros([BLOCK_Q], tl.float32)
    sums = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)
    for start in range(0, length, BLOCK_KV):
        key = start + tl.arange(0, BLOCK_KV)
        there = key[:, None] < length
        k = tl.load(k_ptr + key[:, None] * HEAD_DIM + d[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + key[:, None] * HEAD_DIM + d[None, :], mask=there, other=0.0)
        s = tl.where(key[None, :] < length, tl.dot(q, tl.trans(k)) * scale, -1e30)
        larger = tl.maximum(largest, tl.max(s, 1))
        before = tl.exp(largest - larger)
        p = tl.exp(s - larger[:, None])
        weights = weights * before + tl.sum(p, 1)
        sums = tl.dot(p.to(tl.float16), v, sums * before[:, None])
        largest = larger
    o = (sums / weights[:, None]).to(tl.float16)
    tl.store(o_ptr + row[:, None] * HEAD_DIM + d[None, :], o, mask=inside)


def ptx_of(capability: int) -> str:
    """Compile the kernel; ptxas comes with Triton."""
    types = {f"{name}_ptr": "*fp16" for name in "qkvo"} | {"length": "i32", "scale": "fp32"}
    sizes = {"BLOCK_Q": BLOCK_Q, "BLOCK_KV": BLOCK_KV, "HEAD_DIM": HEAD_DIM}
    source = triton.compiler.ASTSource(attn, types | dict.fromkeys(sizes, "constexpr"), sizes)
    target = compiler.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": WARPS})
    assert compiled.metadata.shared <= SHARED_BYTES
    text: str = compiled.asm["ptx"]
    return text


def run(ptx: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (1, 1, LENGTH, HEAD_DIM)
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for _ in range(3))
    o = np.full(shape, np.nan, np.float16)
    args = {"q": q, "k": k, "v": v, "o": o, "length": np.int32(LENGTH), "scale": np.float32(0.125)}
    scratch = ptx.split(".reqntid")[0].count("attn_param_") - len(args)
    args |= {f"scratch{index}": None for index in range(scratch)}
    grid = -(-LENGTH // BLOCK_Q)
    interpret.launch(ptx, "attn", grid, 32 * WARPS, args, shared_bytes=SHARED_BYTES)
    return [o, q, k, v]


@pytest.mark.parametrize("capability", [80, 90])
def test_it_runs_and_is_within_its_bound(capability: int) -> None:
    ptx = ptx_of(capability)
    assert ("wgmma.mma_async" in ptx) == (capability == 90)
    o, q, k, v = run(ptx)
    assert judge(o, q, k, v, numerics=NUMERICS).passed


def test_removed_barriers_are_found_in_its_python_line() -> None:
    lines = ptx_of(80).splitlines()
    barriers = [index for index, line in enumerate(lines) if "bar.sync" in line]
    found = 0
    for index in barriers[:2]:
        try:
            run("\n".join([*lines[:index], "", *lines[index + 1 :]]))
        except interpret.KernelFault as fault:
            location = fault.finding.location
            assert fault.finding.kind == "race" and location is not None
            assert location.file.endswith("test_interop_triton.py")
            found += 1
    assert found == 2


def test_a_removed_wait_for_wgmma_is_found() -> None:
    ptx = ptx_of(90)
    wait = "wgmma.wait_group.sync.aligned 0;"
    assert wait in ptx
    with pytest.raises(interpret.KernelFault, match="in flight"):
        run(ptx.replace(wait, "", 1))


def test_a_wrong_edge_is_found_by_the_judge() -> None:
    """Keys past the length count as keys with score 0 where the mask of the scores is gone."""
    ptx = ptx_of(80)
    assert "0fF149F2CA" in ptx  # -1e30
    o, q, k, v = run(ptx.replace("0fF149F2CA", "0f00000000"))
    assert not judge(o, q, k, v, numerics=NUMERICS).passed
