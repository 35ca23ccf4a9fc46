"""Every kind of hazard is found where it is, and the same kernel without it runs clean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn.errors import UnsupportedError
from cupyattn.interpret import executor, machine
from cupyattn.interpret.findings import KINDS, Finding, KernelFault
from tests.interpret.raw_kernels import THREADS, arrays, run, source


def rows_apart() -> list[np.ndarray]:
    """x is 2 rows of 24, 32 apart."""
    x, y = arrays()
    return [x.reshape(2, 32)[:, :24], y]


@dataclass(frozen=True)
class Case:
    """A kernel that has a hazard in the line marked ``// here``, and none with ``MENDED`` defined.

    Parameters
    ----------
    name : str
    kind : str
        Of the finding.
    body : str
        Of the kernel, whose parameters are x and y.
    who : tuple of int
        Block, warp and lane of the finding.
    address : int or None
    says : str
        Part of the message.
    result : callable
        What y must hold after the mended kernel, from x.
    """

    name: str
    kind: str
    body: str
    who: tuple[int, int, int] = (0, 0, 0)
    address: int | None = None
    says: str = ""
    result: Callable[[np.ndarray], Any] = field(default=lambda x: x)
    block: int = THREADS
    grid: int = 1
    arguments: Callable[[], list[np.ndarray]] = arrays
    arch: str | None = None

    def run(self, folder: Path, **macros: int) -> Any:
        """Run the kernel and return y."""
        return run(
            folder, self.body, block=self.block, grid=self.grid, arguments=self.arguments(),
            arch=self.arch, **macros,
        )  # fmt: skip

    def fault(self, folder: Path) -> Finding:
        """Run the kernel, which must have a hazard."""
        with pytest.raises(KernelFault) as caught:
            self.run(folder)
        return caught.value.finding

    @property
    def line(self) -> int:
        """Number of the line that the finding must name."""
        marked = [
            n for n, text in enumerate(source(self.body).splitlines(), 1) if "// here" in text
        ]
        assert len(marked) == 1
        return marked[0]


def reverse(x: np.ndarray) -> np.ndarray:
    return x[::-1]


COPY = """
  __shared__ alignas(16) int s[64];
  cp_async<4>(&s[i], &x[i], true);
  cp_async_commit_group();
"""

CASES = [
    # ---- order ----
    Case(
        "no __syncthreads", "race", """
  __shared__ int s[64];
  s[i] = x[i];
#ifdef MENDED
  __syncthreads();
#endif
  y[i] = s[63 - i];  // here
""",
        address=252, says="after the write by warp 1 lane 31", result=reverse,
    ),
    Case(
        "no __syncwarp", "race", """
  __shared__ int s[64];
  s[i] = x[i];
#ifdef MENDED
  __syncwarp();
#endif
  y[i] = s[i ^ 1];  // here
""",
        address=4, says="after the write by warp 0 lane 1",
        result=lambda x: x.reshape(-1, 2)[:, ::-1].ravel(),
    ),
    Case(
        "__syncwarp for some of the lanes", "race", """
  __shared__ int s[64];
  s[i] = x[i];
#ifdef MENDED
  __syncwarp();
#else
  if (i % 32 < 31) __syncwarp(0x7fffffffu);
#endif
  y[i] = s[i ^ 1];  // here
""",
        who=(0, 0, 30), address=124, says="after the write by warp 0 lane 31",
        result=lambda x: x.reshape(-1, 2)[:, ::-1].ravel(),
    ),
    Case(
        "__syncwarp between warps", "race", """
  __shared__ int s[64];
  s[i] = x[i];
#ifdef MENDED
  __syncthreads();
#else
  __syncwarp();
#endif
  y[i] = s[63 - i];  // here
""",
        address=252, says="after the write by warp 1 lane 31", result=reverse,
    ),
    Case(
        "a write after a read", "race", """
  __shared__ int s[64];
  s[i] = x[i];
  __syncthreads();
  const int mine = s[63 - i];
#ifdef MENDED
  __syncthreads();
#endif
  s[i] = 2 * mine;  // here
  y[i] = s[i];
""",
        address=0, says="after the read by warp 1 lane 31", result=lambda x: 2 * x[::-1],
    ),
    Case(
        "a write after a write", "race", """
  __shared__ int s[64];
  s[i] = x[i];
#ifdef MENDED
  __syncthreads();
#endif
  s[i ^ 32] = x[i];  // here
  y[i] = s[i ^ 32];
""",
        address=128, says="after the write by warp 1 lane 0",
    ),
    Case(
        "a barrier for the other warp", "race", """
  __shared__ int s[96];
  if (i >= 32) s[i] = x[i];
#ifdef MENDED
  asm volatile("bar.sync 1, 64;" ::: "memory");
#else
  asm volatile("bar.sync %0, 32;" ::"r"(1 + i / 32) : "memory");
#endif
  y[i] = i < 32 ? s[i + 32] : 0;  // here
""",
        address=128, says="after the write by warp 1 lane 0",
        result=lambda x: np.where(np.arange(64) < 32, np.roll(x, -32), 0),
    ),
    Case(
        "two blocks write one word", "race", """
#ifdef MENDED
  atomicAdd(&y[i], x[i]);
#else
  y[i] += x[i];  // here
#endif
""",
        grid=2, address=0, says="nothing orders that", result=lambda x: 2 * x,
    ),
    Case(
        "a block reads what another writes", "race", """
  const int block = blockIdx.x;
  y[block * 32 + i] = x[i];
#ifdef MENDED
  const int other = block;
#else
  const int other = 1 - block;
#endif
  y[block * 32 + i] = y[other * 32 + i] + 1;  // here
""",
        block=32, grid=2, address=128, says="after the write by block 1 warp 0 lane 0",
        result=lambda x: np.tile(x[:32] + 1, 2),
    ),
    Case(
        "two lanes write one word", "race", """
  __shared__ int s[64];
#ifdef MENDED
  s[i] = x[i];
#else
  s[i / 2] = x[i];  // here
#endif
  y[i] = s[i];
""",
        address=0, says="by two lanes at once",
    ),
    Case(
        "a plain write among atomic ones", "race", """
#ifdef MENDED
  atomicAdd(&y[0], x[i]);
#else
  if (i < 63) atomicAdd(&y[0], x[i]);
  else y[0] = 0;  // here
#endif
""",
        who=(0, 1, 31), address=0, says="after the write by warp",
        result=lambda x: np.append(x.sum(), np.zeros(63)),
    ),
    # ---- copies in the background ----
    Case(
        "no cp.async.wait_group", "in flight", COPY + """
#ifdef MENDED
  cp_async_wait_group<0>();
#endif
  __syncthreads();
  y[i] = s[63 - i];  // here
""",
        address=252, says="not waited for", result=reverse,
    ),
    Case(
        "a wait for one group too few", "in flight", COPY + """
  __shared__ alignas(16) int t[64];
  cp_async<4>(&t[i], &x[i], false);
  cp_async_commit_group();
#ifdef MENDED
  cp_async_wait_group<0>();
#else
  cp_async_wait_group<1>();
#endif
  __syncthreads();
  y[i] = t[63 - i];  // here
""",
        address=508, result=np.zeros_like,
    ),
    Case(
        "no commit", "in flight", """
  __shared__ alignas(16) int s[64];
  cp_async<4>(&s[i], &x[i], true);
#ifdef MENDED
  cp_async_commit_group();
#endif
  cp_async_wait_group<0>();
  y[i] = s[i];  // here
""",
        address=0,
    ),
    Case(
        "a write to what is being copied to", "in flight", COPY + """
#ifdef MENDED
  cp_async_wait_group<0>();
#endif
  s[i] = -1;  // here
  y[i] = s[i];
""",
        address=0, says="is written while", result=lambda x: np.full(64, -1),
    ),
    Case(
        "no barrier after the wait", "race", COPY + """
  cp_async_wait_group<0>();
#ifdef MENDED
  __syncthreads();
#endif
  y[i] = s[63 - i];  // here
""",
        address=252, says="after the write by warp 1 lane 31", result=reverse,
    ),
    # ---- places ----
    Case(
        "shared memory that nothing has written", "never written", """
  __shared__ int s[64];
#ifdef MENDED
  s[i] = x[i];
#else
  if (i != 37) s[i] = x[i];
#endif
  y[i] = s[i];  // here
""",
        who=(0, 1, 5), address=148, says="shared memory is read before",
    ),
    Case(
        "behind an array", "out of bounds", """
#ifdef MENDED
  y[i] = i < 63 ? x[i + 1] : 0;
#else
  y[i] = x[i + 1];  // here
#endif
""",
        who=(0, 1, 31), address=256, says="4 bytes outside",
        result=lambda x: np.append(x[1:], 0),
    ),
    Case(
        "before an array", "out of bounds", """
#ifdef MENDED
  y[i] = i > 0 ? x[i - 1] : 0;
#else
  y[i] = x[i - 1];  // here
#endif
""",
        address=-4, says="4 bytes outside", result=lambda x: np.append(0, x[:-1]),
    ),
    Case(
        "a write behind an array", "out of bounds", """
#ifdef MENDED
  y[i] = x[i];
#else
  y[2 * i] = x[i];  // here
#endif
""",
        who=(0, 1, 0), address=256,
    ),
    Case(
        "between the rows of a view", "out of bounds", """
#ifdef MENDED
  if (i % 32 < 24)
#endif
  y[i] = x[i % 32];  // here
""",
        arguments=rows_apart, who=(0, 0, 24), address=96, says="between the rows of",
        result=lambda x: np.tile(np.pad(x[0], (0, 8)), 2),
    ),
    Case(
        "through a null pointer", "out of bounds", """
#ifdef MENDED
  const int* z = x;
#else
  const int* z = reinterpret_cast<const int*>(static_cast<uint64_t>(y[0]));
#endif
  y[i] = z[i];  // here
""",
        says="where no array lies",
    ),
    Case(
        "a vector at an odd place", "misaligned", """
#ifdef MENDED
  const int2 v = reinterpret_cast<const int2*>(x)[i / 2];
#else
  const int2 v = *reinterpret_cast<const int2*>(x + i);  // here
#endif
  y[i] = i % 2 ? v.y : v.x;
""",
        who=(0, 0, 1), address=4, says="8 bytes to",
    ),
    Case(
        "a vector at an odd place of shared memory", "misaligned", """
  __shared__ alignas(16) int s[64];
  s[i] = 1;
  __syncthreads();
#ifdef MENDED
  const int2 v = reinterpret_cast<const int2*>(s)[i / 2];
#else
  const int2 v = *reinterpret_cast<const int2*>(s + i);  // here
#endif
  y[i] = v.x - v.y;
""",
        who=(0, 0, 1), address=4, says="8 bytes to shared memory", result=np.zeros_like,
    ),
    Case(
        "outside shared memory", "out of bounds", """
  __shared__ int s[64];
#ifdef MENDED
  s[i] = x[i];
#else
  s[i + 1] = x[i];  // here
#endif
  y[i] = s[i];
""",
        who=(0, 1, 31), address=256, says="outside shared memory, which has 256",
    ),
    Case(
        "outside local memory", "out of bounds", """
  int a[4] = {x[0], x[1], x[2], x[3]};
#ifdef MENDED
  y[i] = a[x[i] % 4];
#else
  y[i] = a[x[i] % 8];  // here
#endif
""",
        who=(0, 0, 3), address=16, says="outside local memory",
        result=lambda x: x[x % 4],
    ),
    Case(
        "a write to an input", "read-only", """
#ifdef MENDED
  int* z = y;
#else
  int* z = const_cast<int*>(x);
#endif
  z[i] = i + 1;  // here
""",
        address=0, says="is an input",
    ),
    # ---- lanes and warps apart ----
    Case(
        "a shuffle with lanes that are elsewhere", "divergence", """
#ifdef MENDED
  y[i] = __shfl_xor_sync(0xffffffffu, x[i], 16);
#else
  if (i % 32 < 16) y[i] = __shfl_xor_sync(0xffffu, x[i], 16);  // here
#endif
""",
        says="does not take part", result=lambda x: x.reshape(2, 2, 16)[:, ::-1].ravel(),
    ),
    Case(
        "masks that contradict each other", "divergence", """
#ifdef MENDED
  const unsigned mask = i % 32 < 16 ? 0xffffu : 0xffff0000u;
#else
  const unsigned mask = i % 32 < 16 ? 0xffffffffu : 0xffff0000u;
#endif
  y[i] = __shfl_xor_sync(mask, x[i], 1);  // here
""",
        says="name different partners",
        result=lambda x: x.reshape(-1, 2)[:, ::-1].ravel(),
    ),
    Case(
        "a mask without the lane itself", "divergence", """
#ifdef MENDED
  const unsigned mask = 0xffffffffu;
#else
  const unsigned mask = 0x7fffffffu;
#endif
  y[i] = __shfl_sync(mask, x[i], 0);  // here
""",
        who=(0, 0, 31), says="whose mask leaves it out",
        result=lambda x: np.repeat(x[::32], 32),
    ),
    Case(
        "a barrier for half a warp", "deadlock", """
#ifdef MENDED
  __syncthreads();
#else
  if (i % 32 < 16) __syncthreads();  // here
#endif
  __syncthreads();
  y[i] = x[i];
""",
        says="64 lanes wait for others that never come",
    ),
    Case(
        "a warp that skips a barrier", "deadlock", """
#ifndef MENDED
  if (i < 32)
#endif
  asm volatile("bar.sync 3, 64;" ::: "memory");  // here
  y[i] = x[i];
""",
        says="32 at barrier 3; 32 have exited",
    ),
    Case(
        "a count that never comes", "deadlock", """
#ifdef MENDED
  if (i == 0) atomicAdd(&y[63], 1);
#endif
  if (i == 32)
    while (*const_cast<volatile int*>(&y[63]) != 1) __nanosleep(64);  // here
  __syncthreads();
  if (i == 63) atomicAdd(&y[63], -1);
  __syncthreads();
  atomicAdd(&y[i], x[i] - y[i]);
""",
        who=(0, 1, 0), says="lanes wait for others that never come",
    ),
    Case(
        "a plain write after a read that says how it is ordered", "race", """
  if (i == 40) atomicAdd(&y[0], *const_cast<volatile int*>(&x[40]));
  if (i == 40) y[1] = *const_cast<volatile int*>(&y[0]);
#ifdef MENDED
  __syncthreads();
#endif
  if (i == 0) y[0] = x[0];  // here
  __syncthreads();
  y[i] = x[i];
""",
        address=0, says="after the",
    ),
    Case(
        "a loop without end", "no end", """
#ifdef MENDED
  y[i] = 1;
#endif
  while (*const_cast<volatile int*>(&y[i]) == 0) {  // here
  }
  y[i] = x[i];
""",
        says="still running after",
    ),
    Case(
        "a trap", "trap", """
#ifndef MENDED
  if (i == 40) __trap();  // here
#endif
  y[i] = x[i];
""",
        who=(0, 1, 8), says="stopped itself",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hazard_is_found_where_it_is(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "MAX_SEGMENTS", 1000)
    finding = case.fault(tmp_path)
    assert finding.kind == case.kind, finding
    assert finding.location is not None
    outermost = finding.location.chain()[-1]
    assert (Path(outermost.file).name, outermost.line) == ("kernel.cu", case.line), finding
    assert (finding.block, finding.warp, finding.lane) == case.who, finding
    assert case.says in finding.message
    assert finding.address == case.address, finding
    assert finding.kernel == "kernel" and finding.instruction
    for piece in (case.kind, f"kernel.cu:{case.line}", f"lane {finding.lane}"):
        assert piece in str(finding)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_mended_kernel_has_none(case: Case, tmp_path: Path) -> None:
    x = case.arguments()[0]
    np.testing.assert_array_equal(case.run(tmp_path, MENDED=1), case.result(x))


def test_every_kind_has_a_case() -> None:
    elsewhere = {"invalid operand"}  # tests/interpret/test_interpret_rules.py
    assert {case.kind for case in CASES} | elsewhere == set(KINDS)
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_finding_in_a_function_names_the_lines_that_it_was_inlined_into(tmp_path: Path) -> None:
    body = """
  __shared__ int s[64];
  cp_async<4>(&s[i + 1], &x[i], true);
"""
    place = r"kernel at kernel.cu:6, in prims/io/tile_io.cuh:\d+"
    with pytest.raises(KernelFault, match=place) as c:
        run(tmp_path, body)
    assert c.value.finding.kind == "out of bounds" and c.value.finding.address == 256


def test_the_hazard_of_a_later_block_is_its_own(tmp_path: Path) -> None:
    """Addresses are those within its shared memory; numbers of blocks go through the launch."""
    body = """
  __shared__ int s[64];
  if (blockIdx.x != 5 || i != 33) s[i] = x[i];
  y[i] = blockIdx.x == 5 ? s[i] : 0;
"""
    with pytest.raises(KernelFault) as caught:
        run(tmp_path, body.replace("y[i]", "const_cast<volatile int*>(s)[i]"), grid=7)
    finding = caught.value.finding
    assert (finding.kind, finding.block, finding.warp, finding.lane) == ("never written", 5, 1, 1)
    assert finding.address == 132


def test_lanes_that_write_the_same_to_one_word_of_shared_memory_are_no_race(tmp_path: Path) -> None:
    """Compilers let lanes with copies of a number store it together: Triton does."""
    body = """
  __shared__ int s[32];
  s[i % 32] = x[i % 32];
  __syncthreads();
  y[i] = s[31 - i % 32];
"""
    x, y = arrays()
    run(tmp_path, body, arguments=[x, y])
    assert (y[:64] == np.tile(x[31::-1], 2)).all()
    with pytest.raises(KernelFault, match="written by two lanes at once"):
        run(tmp_path, body.replace("x[i % 32]", "x[i]"), arguments=[*arrays()])


@pytest.mark.parametrize("budget", [0, 1 << 30])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("if (blockIdx.x == 2 || blockIdx.x == 4) y[i] = i;", "write by block 2 warp 0 lane 0"),
        ("if (blockIdx.x == 4) y[i] = 1; else y[64 + i] = y[i];", "block"),
    ],
)
def test_blocks_are_not_ordered_whether_they_run_together_or_not(
    body: str, says: str, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "MEMORY_BUDGET", budget)
    y = np.zeros((7, 64), np.int32)
    if "else" in body:
        body = body.replace("y[64 + i]", "y[(1 + blockIdx.x) * 64 + i]")
    with pytest.raises(KernelFault, match=r"race: kernel_param_1 is (read|written)") as caught:
        run(tmp_path, body, grid=5, arguments=[arrays()[0], y])
    assert budget or says in caught.value.finding.message
    assert not y.any(), "a launch with a hazard leaves the arrays alone"


@pytest.mark.parametrize(
    ("statement", "name", "text"),
    [
        ('asm volatile("fns.b32 %0, %1, 0, 1;" : "=r"(r) : "r"(x[i]));', "fns.b32", "fns.b32"),
        ('asm volatile("mov.u32 %0, %%clock;" : "=r"(r));', "mov.u32", "%clock"),
    ],
)
def test_an_unknown_instruction_is_named_with_its_line(
    statement: str, name: str, text: str, tmp_path: Path
) -> None:
    body = f"  int r = 0;\n  if (x[i] > 3)\n    {statement}\n  y[i] = r;\n"
    with pytest.raises(UnsupportedError, match=rf"{name} \(kernel.cu:6, PTX line \d+: .*{text}"):
        run(tmp_path, body)
    y = run(tmp_path, body, block=3)  # nobody gets there
    assert not y.any()
