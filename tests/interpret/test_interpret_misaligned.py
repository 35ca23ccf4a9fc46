"""A misaligned access of any kind is reported with its operand and its address."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupyattn.interpret.findings import KernelFault
from tests.interpret.raw_kernels import run

ODD = "reinterpret_cast<{0}*>(reinterpret_cast<uint64_t>({1}) + 4 * i + {2})"


def at(kind: str, array: str, by: int) -> str:
    return ODD.format(kind, array, by)


#: Body, operand, width, distance of the first bad address.
BODIES = {
    "load": (f"  y[i] = *{at('const int', 'x', 1)};", "kernel_param_0", 4, 1),
    "load of two bytes": (f"  y[i] = *{at('const short', 'x', 1)};", "kernel_param_0", 2, 1),
    "vector load": (
        f"  const int4 v = *{at('const int4', 'x', 0)};\n  y[i] = v.x ^ v.y ^ v.z ^ v.w;",
        "kernel_param_0", 16, 4,
    ),
    "cached load": (f"  y[i] = __ldg({at('const int', 'x', 2)});", "kernel_param_0", 4, 2),
    "store": (f"  *{at('int', 'y', 1)} = i;", "kernel_param_1", 4, 1),
    "vector store": (
        f"  if (i < 60) *{at('int2', 'y', 0)} = make_int2(i, i);", "kernel_param_1", 8, 4,
    ),
    "atomic": (f"  atomicAdd({at('int', 'y', 2)}, 1);", "kernel_param_1", 4, 2),
    "atomic of 8 bytes": (
        f"  atomicExch({at('unsigned long long', 'y', 0)}, 1ull);", "kernel_param_1", 8, 4,
    ),
    "copy in the background": (
        "  __shared__ alignas(16) int s[256];\n"
        f"  cp_async<16>(&s[4 * i], {at('const int', 'x', 4)}, true);\n"
        "  cp_async_commit_group();", "kernel_param_0", 16, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_it_is_reported(name: str, tmp_path: Path) -> None:
    body, operand, width, first = BODIES[name]
    with pytest.raises(KernelFault) as caught:
        run(tmp_path, body)
    finding = caught.value.finding
    assert finding.kind == "misaligned", finding
    assert f"an access of {width} bytes to {operand} " in finding.message
    assert finding.address == first


def test_a_short_copy_is_as_aligned_as_a_whole_one(tmp_path: Path) -> None:
    """Four bytes at a multiple of 4, of a copy of 16: a device faults there, too."""
    body = f"""
  __shared__ alignas(16) int s[256];
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(&s[4 * i]));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::
               "r"(to), "l"({at("const int", "x", 4)}), "r"(4));
"""
    with pytest.raises(KernelFault, match="misaligned") as caught:
        run(tmp_path, body)
    assert caught.value.finding.address == 4 and "kernel_param_0" in caught.value.finding.message
