"""An access to shared memory stays within the variable that its address was computed from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupyattn.interpret.findings import KernelFault
from cupyattn.interpret.program import program
from tests.interpret.raw_kernels import run

#: Two arrays, of which the second lies behind the first. x[i] is i + 1.
TWO = """
  __shared__ int first[64];
  __shared__ int second[128];
  first[i] = second[i] = second[i + 64] = 7;
  __syncthreads();
"""
#: Reads both: the compiler leaves out what is not read. It adds 0.
BOTH = "__syncthreads(); y[i] += first[63 - i] & second[127 - i] & 256;"


@pytest.mark.parametrize(
    ("body", "says", "address"),
    [
        ("first[x[i]] = 1;", "4 bytes outside first, which has 256", 256),
        ("y[i] = second[i - x[i]];", "4 bytes outside second, which has 512", -4),
        ("atomicAdd(first + 63 + x[i], 1);", "4 bytes outside first, which has 256", 256),
        ("int* p = first; for (int k = 0; k < x[i]; ++k) p += 2; y[i] = *p;",
         "4 bytes outside first, which has 256", 256),
    ],
    ids=["store", "load", "atomic", "in a loop"],
)  # fmt: skip
def test_an_access_past_one_of_two_arrays(
    body: str, says: str, address: int, tmp_path: Path
) -> None:
    """All of them stay within the block's shared memory."""
    with pytest.raises(KernelFault, match=says) as found:
        run(tmp_path, TWO + body + BOTH)
    assert (found.value.finding.kind, found.value.finding.address) == ("out of bounds", address)


@pytest.mark.parametrize(
    "body",
    [
        "first[x[i] - 1] = 1; y[i] = x[i];",
        "int* p = x[i] % 2 ? first : second + 64; *p = 1; y[i] = x[i];",
    ],
    ids=["within", "one of two arrays"],
)
def test_an_access_within_its_array(body: str, tmp_path: Path) -> None:
    """An address that is of one of two arrays may be in either."""
    np.testing.assert_array_equal(run(tmp_path, TWO + body + BOTH), np.arange(1, 65))


def test_a_dynamic_array_has_no_end_of_its_own(tmp_path: Path) -> None:
    body = "  extern __shared__ int more[];\n"
    body += TWO.replace("second[128]", "other[8]").replace("second[i + 64] = ", "")
    body = body.replace("second[i]", "more[i]")
    with pytest.raises(KernelFault, match="outside shared memory"):
        run(tmp_path, body + "y[i] = more[i];")


PTX = """
.version 8.0
.target sm_80
.address_size 64
.shared .align 4 .b8 {names};
.visible .entry f() {{
  .reg .b32 %r<5>;
  mov.u32 %r1, one;
  add.s32 %r2, %r1, 4;
  st.shared.u32 [%r2], 1;
  ld.shared.u32 %r3, [%r1+4];
  st.shared.u32 [%r3], 1;
  ret;
}}
"""


def test_a_kernel_with_one_variable_looks_at_none() -> None:
    assert program(PTX.format(names="one[16]"), "f").extents == {}


def test_an_address_from_memory_is_of_no_variable() -> None:
    text = PTX.format(names="one[16];\n.shared .align 4 .b8 two[16]").replace("add.s32 %r2, %r1, 4",
        "add.s32 %r2, %r1, 4;\n  mov.u32 %r4, two")  # fmt: skip
    extents = program(text, "f").extents
    assert [(index, one.names, one.end - one.begin) for index, one in extents.items()] == [
        (3, "one", 16), (4, "one", 16),
    ]  # fmt: skip
