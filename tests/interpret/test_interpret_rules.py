"""Rules of barriers, ``wgmma.fence`` and ``setmaxnreg``: each broken once, beside its right twin.

A line that ends with ``// wrong`` is in the faulty kernel alone, one that ends with ``// right`` in
its twin alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cupyattn.interpret import KernelFault
from cupyattn.interpret.executor import run_kernel
from tests.interpret.raw_kernels import arrays, run, spec


@dataclass(frozen=True)
class Rule:
    """A kernel that breaks a rule, and keeps it without its wrong lines.

    Parameters
    ----------
    name : str
    body : str
    kind, message : str
        Of the finding; the message in full.
    block : int
        Threads.
    """

    name: str
    body: str
    kind: str
    message: str
    block: int = 64

    def text(self, *, right: bool) -> str:
        """Return the body of one of the twins."""
        dropped = "wrong" if right else "right"
        return re.sub(rf"[^\n]*// {dropped}\n", "", self.body)


def check_faulty(rule: Rule, fault: KernelFault) -> None:
    assert (fault.finding.kind, fault.finding.message) == (rule.kind, rule.message)


def check_deadlock_or_rule(rule: Rule, fault: KernelFault) -> None:
    """The message of a deadlock holds the one of the rule."""
    if rule.kind != "deadlock":
        check_faulty(rule, fault)
    assert fault.finding.kind == rule.kind and rule.message in fault.finding.message, fault


# ---- barriers of a block -------------------------------------------------------------------------

SYNC = 'asm volatile("bar.sync %0, %1;" ::"r"({}), "r"({}) : "memory");'
#: Numbers and counts come out of x, which begins with 1, 2, 3: the compiler cannot know them.
BARRIERS = [
    Rule("a number above 15", f"""
  {SYNC.format("x[0] + 15", 64)}  // wrong
  {SYNC.format("x[0] + 14", 64)}  // right
""", "invalid operand", "there is no barrier 16: a block has barriers 0 to 15"),
    Rule("a number above 15 without a count", """
  asm volatile("barrier.sync %0;" ::"r"(x[0] + 31) : "memory");  // wrong
  asm volatile("barrier.sync %0;" ::"r"(x[0]) : "memory");  // right
""", "invalid operand", "there is no barrier 32: a block has barriers 0 to 15"),
    Rule("a negative number", f"""
  {SYNC.format("x[0] - 2", 64)}  // wrong
  {SYNC.format("x[0] - 1", 64)}  // right
""", "invalid operand", "there is no barrier 4294967295: a block has barriers 0 to 15"),
    Rule("a number above 15 of an arrival", """
  if (i < 32) asm volatile("bar.arrive %0, 64;" ::"r"(x[0] + 16) : "memory");  // wrong
  if (i < 32) asm volatile("bar.arrive %0, 64;" ::"r"(x[0]) : "memory");  // right
  else asm volatile("bar.sync 1, 64;" ::: "memory");
""", "invalid operand", "there is no barrier 17: a block has barriers 0 to 15"),
    Rule("a count that is no multiple of 32", f"""
  {SYNC.format(1, "x[0] + 47")}  // wrong
  {SYNC.format(1, "x[0] + 63")}  // right
""", "invalid operand", "barrier 1 is to wait for 48 threads: the count must be a multiple of 32 "
         "from 32 to 64, the threads of the block"),
    Rule("a count above the threads of the block", f"""
  {SYNC.format(1, "x[0] + 95")}  // wrong
  {SYNC.format(1, "x[0] + 63")}  // right
""", "invalid operand", "barrier 1 is to wait for 96 threads: the count must be a multiple of 32 "
         "from 32 to 64, the threads of the block"),
    Rule("an arrival with a count of 0", """
  if (i < 32) asm volatile("bar.arrive 1, %0;" ::"r"(x[0] - 1) : "memory");  // wrong
  if (i < 32) asm volatile("bar.arrive 1, %0;" ::"r"(x[0] + 63) : "memory");  // right
  else asm volatile("bar.sync 1, 64;" ::: "memory");
""", "invalid operand", "barrier 1 is to wait for 0 threads: the count must be a multiple of 32 "
         "from 32 to 64, the threads of the block"),
    Rule("an arrival without a count", """
  if (i < 32) asm volatile("bar.arrive 1;" ::: "memory");  // wrong
  if (i < 32) asm volatile("bar.arrive 1, 64;" ::: "memory");  // right
  else asm volatile("bar.sync 1, 64;" ::: "memory");
""", "invalid operand", "no count of threads is given for barrier 1: an arrival needs one"),
    Rule("two counts at one barrier", f"""
  if (i < 32) {SYNC.format(1, "x[0] + 63")}
  else if (i < 64) {SYNC.format(1, "x[0] + 95")}  // wrong
  else if (i < 64) {SYNC.format(1, "x[0] + 63")}  // right
""", "invalid operand", "barrier 1 is to wait for 96 threads, and earlier arrivals said "
         "64", block=96),
    Rule("lanes of a warp at two barriers", f"""
  {SYNC.format("x[i] % 2", 64)}  // wrong
  {SYNC.format("x[0] % 2", 64)}  // right
""", "divergence", "the lanes of a warp name different barriers or counts of threads"),
    Rule("lanes of a warp with two counts", f"""
  {SYNC.format(1, "64 - x[i] % 2 * 32")}  // wrong
  {SYNC.format(1, "96 - x[0] % 2 * 32")}  // right
""", "divergence", "the lanes of a warp name different barriers or counts of threads"),
    Rule("a warp that arrives twice", """
  if (i < 32) {
    asm volatile("bar.arrive 1, 64;" ::: "memory");
    asm volatile("bar.arrive 1, 64;" ::: "memory");  // wrong
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
  }
""", "divergence", "threads arrive at barrier 1 a second time before it completes"),
]  # fmt: skip


@pytest.mark.parametrize("rule", BARRIERS, ids=lambda rule: rule.name)
def test_a_barrier(rule: Rule, tmp_path: Path) -> None:
    x, _ = arrays()
    tail = "\n  y[i] = x[i];\n"
    given = [np.resize(x, 96), np.zeros(96, np.int32)]
    given[0].flags.writeable = False
    y = run(tmp_path, rule.text(right=True) + tail, block=rule.block, arguments=given)
    np.testing.assert_array_equal(y[: rule.block], given[0][: rule.block])
    with pytest.raises(KernelFault) as caught:
        run(tmp_path, rule.text(right=False) + tail, block=rule.block, arguments=given)
    check_faulty(rule, caught.value)


@pytest.mark.parametrize("operator", "/%")
@pytest.mark.parametrize("kind", ["int", "uint32_t", "int64_t", "uint64_t"])
def test_a_divisor_of_zero(operator: str, kind: str, tmp_path: Path) -> None:
    """x - 2 is 0 in lane 1; lanes that do not divide may hold any divisor."""
    divided = f"  y[i] = {kind}(7) {operator} {kind}(x[i] - 2);\n"
    y = run(tmp_path, f"if (x[i] != 2) {{ {divided} }}")
    assert y[1] == 0 and y[2] == (7 if operator == "/" else 0)
    with pytest.raises(KernelFault) as caught:
        run(tmp_path, divided)
    finding = caught.value.finding
    assert finding.kind == "invalid operand" and "divided by 0" in finding.message
    assert (finding.lane, finding.lanes) == (1, 1)


def test_a_barrier_counts_whole_warps(tmp_path: Path) -> None:
    """A block of 40 threads is two warps: both make up 64 threads."""
    body = """
  __shared__ int s[64];
  s[i] = x[i];
  asm volatile("bar.sync %0, %1;" ::"r"(x[0]), "r"(x[0] + 63) : "memory");
  y[i] = s[39 - i];
"""
    y = run(tmp_path, body, block=40)
    np.testing.assert_array_equal(y[:40], np.arange(40, 0, -1))


def test_every_block_has_barriers_of_its_own(tmp_path: Path) -> None:
    """Blocks of one launch give the same barrier other numbers and counts."""
    body = """
  __shared__ int s[64];
  s[i] = x[i];
  const int warps = 1 + blockIdx.x % 2;
  asm volatile("bar.sync %0, %1;" ::"r"(1 + (warps == 1 ? i / 32 : 0)), "r"(32 * warps) : "memory");
  atomicAdd(&y[i], warps == 1 ? s[i ^ 31] : s[63 - i]);
"""
    y = run(tmp_path, body, grid=2)
    i = np.arange(64)
    np.testing.assert_array_equal(y, (i ^ 31) + 1 + 64 - i)


# ---- barriers that count arrivals ----------------------------------------------------------------

ARRIVE = 'asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(b) : "memory");'
WAIT = """asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0;"
               "@!p bra W; }" ::"r"(b) : "memory");"""
TWO_PHASES = Rule("lanes of a warp in two phases", f"""
  __shared__ uint64_t barrier;
  const uint32_t b = uint32_t(__cvta_generic_to_shared(&barrier));
  if (i == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(b) : "memory");
  __syncthreads();
  if (i < 32 && i != 0) {ARRIVE}  // wrong
  if (i == 0) {ARRIVE}  // right
  {WAIT}
""", "divergence", "lanes of a warp arrive at an mbarrier in two of its phases")  # fmt: skip


def test_lanes_of_a_warp_arrive_in_one_phase(tmp_path: Path) -> None:
    """31 arrivals in place of one complete an odd number of phases, so the parities match."""
    tail = "\n  y[i] = x[i];\n"
    np.testing.assert_array_equal(
        run(tmp_path, TWO_PHASES.text(right=True) + tail, arch="sm_90a"), arrays()[0]
    )
    with pytest.raises(KernelFault) as caught:
        run(tmp_path, TWO_PHASES.text(right=False) + tail, arch="sm_90a")
    check_faulty(TWO_PHASES, caught.value)


def test_warps_arrive_in_phases_of_their_own(tmp_path: Path) -> None:
    """Their order does not matter if each is one arrival."""
    body = TWO_PHASES.text(right=True).replace("(i == 0) asm volatile(\"mbarrier.arrive",
                                               "(i % 32 == 0) asm volatile(\"mbarrier.arrive")
    body = body.replace("p, [%0], 0;", "p, [%0], 1;")
    y = run(tmp_path, f"{body}\n  y[i] = x[i];\n", arch="sm_90a")
    np.testing.assert_array_equal(y, arrays()[0])


# ---- registers of products -----------------------------------------------------------------------

#: B is 1 in shared memory, A in registers is 1 (%r10 to %r13) and 2 (%r20 to %r23). The result is
#: the first accumulator (%f0) of every thread. m64n8 has 4 accumulators, m64n16 has 8.
WGMMA = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 x, .param .u64 y) .maxntid 128, 1, 1 {{
  .reg .b32 %r<40>;
  .reg .f32 %f<40>;
  .reg .b64 %rd<10>;
  .reg .pred %p<4>;
  .shared .align 128 .b8 tile[2048];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, tile;
  shl.b32 %r3, %r1, 4;
  add.s32 %r4, %r2, %r3;
  mov.u64 %rd1, 0x3C003C003C003C00;
  st.shared.v2.u64 [%r4], {{%rd1, %rd1}};
  fence.proxy.async.shared::cta;
  bar.sync 0;
  shr.u32 %r5, %r2, 4;
  cvt.u64.u32 %rd2, %r5;
  or.b64 %rd3, %rd2, 0x1000080000;
  setp.eq.u32 %p1, %r1, %r1;
  mov.b32 %r10, 0x3C003C00;
  mov.b32 %r11, %r10;
  mov.b32 %r12, %r10;
  mov.b32 %r13, %r10;
  mov.b32 %r20, 0x40004000;
  mov.b32 %r21, %r20;
  mov.b32 %r22, %r20;
  mov.b32 %r23, %r20;
  {zeros}
{body}
  ld.param.u64 %rd4, [y];
  mad.wide.u32 %rd5, %r1, 4, %rd4;
  st.global.f32 [%rd5], %f0;
  ret;
}}
"""
ZEROS = "\n  ".join(f"mov.f32 %f{n}, 0f00000000;" for n in range(16))
FENCE = "wgmma.fence.sync.aligned;"
DONE = "wgmma.commit_group.sync.aligned;\n  wgmma.wait_group.sync.aligned 0;"


def mma(first: int = 10, columns: int = 8, start: int = 0) -> str:
    """Return a product of the fragments from %r`first` on, in accumulators from %f`start` on."""
    d = ", ".join(f"%f{start + n}" for n in range(columns // 2))
    a = ", ".join(f"%r{first + n}" for n in range(4))
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    return f"{name} {{{d}}}, {{{a}}}, %rd3, %p1, 1, 1, 0;"


#: With what the right twin leaves in %f0.
PRODUCTS = [
    (Rule("no fence before the first product", f"""
  {FENCE}  // right
  {mma()}
  {DONE}
""", "race", "no wgmma.fence stands between a change of %f0 and its product"), 16.0),
    (Rule("accumulators changed", f"""
  {FENCE}
  mov.f32 %f1, 0f3F800000;
  {FENCE}  // right
  {mma()}
  {DONE}
""", "race", "no wgmma.fence stands between a change of %f1 and its product"), 16.0),
    (Rule("accumulators read, then written by the next product", f"""
  {FENCE}
  {mma()}
  {DONE}
  add.f32 %f20, %f2, %f2;
  {FENCE}  // right
  {mma()}
  {DONE}
""", "race", "no wgmma.fence stands between a read of %f2 and the product that writes it"), 32.0),
    (Rule("fragments of A changed after the product before", f"""
  {FENCE}
  {mma()}
  {DONE}
  mov.b32 %r12, 0;
  {FENCE}  // right
  {mma()}
  {DONE}
""", "race", "no wgmma.fence stands between a change of %r12 and its product"), 24.0),
    (Rule("fragments of A changed while a product reads them", f"""
  {FENCE}
  {mma()}
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;  // right
  mov.b32 %r11, 0;
  {FENCE}
  {mma()}
  {DONE}
""", "in flight", "%r11 is used while a wgmma that holds it is not waited for"), 32.0),
    (Rule("accumulators read before the wait", f"""
  {FENCE}
  {mma()}
  wgmma.commit_group.sync.aligned;
  add.f32 %f20, %f3, %f3;  // wrong
  wgmma.wait_group.sync.aligned 0;
  add.f32 %f20, %f3, %f3;
""", "in flight", "%f3 is used while a wgmma that holds it is not waited for"), 16.0),
    (Rule("fragments of A read before the wait", f"""
  {FENCE}
  {mma()}
  wgmma.commit_group.sync.aligned;
  add.u32 %r30, %r13, %r13;  // wrong
  wgmma.wait_group.sync.aligned 0;
  add.u32 %r30, %r13, %r13;
""", "in flight", "%r13 is used while a wgmma that holds it is not waited for"), 16.0),
    (Rule("a wait for the wrong group", f"""
  {FENCE}
  {mma()}
  wgmma.commit_group.sync.aligned;
  {mma(20, start=8)}
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 1;  // wrong
  wgmma.wait_group.sync.aligned 0;  // right
  mov.f32 %f0, %f8;
""", "in flight", "%f8 is used while a wgmma that holds it is not waited for"), 32.0),
    (Rule("another shape on the same accumulators", f"""
  {FENCE}
  {mma()}
  {FENCE}  // right
  {mma(columns=16)}
  {DONE}
""", "race", "no wgmma.fence stands between two wgmma that use %f0 and are not of one shape with "
          "the same accumulators"), 32.0),
]  # fmt: skip

#: Accumulators and fragments of A in the same registers: PTX types of both are of 32 bits.
SHARED_REGISTERS = [
    (Rule("a product accumulates where one under way reads A", f"""
  {FENCE}
  {mma()}
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;  // right
  {FENCE}
  {mma(20).replace("%f0, %f1, %f2, %f3", "%r10, %r11, %r12, %r13")}
  {DONE}
""", "in flight", "a wgmma accumulates in %r10 while one that reads it is under way"), 16.0),
    (Rule("a product reads as A what one under way accumulates", f"""
  {FENCE}
  {mma(20).replace("%f0, %f1, %f2, %f3", "%r10, %r11, %r12, %r13")}
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;  // right
  mov.b32 %r10, %r20;  // right
  mov.b32 %r11, %r20;  // right
  mov.b32 %r12, %r20;  // right
  mov.b32 %r13, %r20;  // right
  {FENCE}
  {mma()}
  {DONE}
""", "in flight", "a wgmma reads %r10 while one that accumulates in it is under way"), 32.0),
    (Rule("a product accumulates where the one before has read A, no fence", f"""
  {FENCE}
  {mma()}
  {DONE}
  {FENCE}  // right
  {mma(20).replace("%f0, %f1, %f2, %f3", "%r10, %r11, %r12, %r13")}
  {DONE}
""", "race", "no wgmma.fence stands between two wgmma that use %r10 and are not of one shape with "
          "the same accumulators"), 16.0),
]  # fmt: skip


def multiply(body: str, zeros: str = ZEROS) -> np.ndarray:
    y = np.zeros(128, np.float32)
    run_kernel(WGMMA.format(body=body, zeros=zeros), "kernel", [None, y], block=128)
    return y


@pytest.mark.parametrize(
    ("rule", "value"), PRODUCTS + SHARED_REGISTERS, ids=lambda x: getattr(x, "name", "")
)
def test_a_product(rule: Rule, value: float) -> None:
    np.testing.assert_array_equal(multiply(rule.text(right=True)), np.float32(value))
    with pytest.raises(KernelFault) as caught:
        multiply(rule.text(right=False))
    check_faulty(rule, caught.value)


def test_the_first_product_needs_a_fence_though_no_register_was_touched() -> None:
    """Its accumulators do not count (scale-d is false), and A lies in shared memory."""
    text = WGMMA.replace("setp.eq.u32 %p1", "setp.ne.u32 %p1")
    a = "{%r10, %r11, %r12, %r13}"
    product = mma().replace(a, "%rd3").replace("1, 1, 0;", "1, 1, 0, 0;")
    for fence in (True, False):
        y = np.zeros(128, np.float32)
        body = f"{FENCE if fence else ''}\n{product}\n{DONE}\n"
        ptx = text.format(body=body, zeros="")
        if fence:
            run_kernel(ptx, "kernel", [None, y], block=128)
            assert (y == 16).all()
            continue
        with pytest.raises(KernelFault, match="race: no wgmma.fence stands before the first wgmma"):
            run_kernel(ptx, "kernel", [None, y], block=128)


def test_a_product_adds_to_registers_that_have_a_value() -> None:
    body = f"{FENCE}\n{mma()}\n{DONE}\n"
    with pytest.raises(KernelFault, match="adds to register %f2, and this lane has not") as caught:
        multiply(body, zeros=ZEROS.replace("mov.f32 %f2,", "@!%p1 mov.f32 %f2,"))
    assert (caught.value.finding.kind, caught.value.finding.lanes) == ("never written", 128)


def test_products_of_one_shape_follow_each_other_without_a_fence() -> None:
    """On the same accumulators, and with the same fragments of A."""
    y = multiply(f"{FENCE}\n{mma()}\n{mma(20)}\n{mma()}\n{DONE}\n")
    np.testing.assert_array_equal(y, np.float32(16 + 32 + 16))


def test_what_a_guard_keeps_from_happening_is_no_access() -> None:
    y = multiply(f"{FENCE}\n@!%p1 mov.f32 %f0, %f1;\n{mma()}\n@!%p1 mov.b32 %r10, 0;\n{DONE}\n")
    np.testing.assert_array_equal(y, np.float32(16))


@pytest.mark.parametrize("block", [160, 256])
def test_a_warpgroup_beside_other_warps(block: int) -> None:
    """The last warps of the block are no whole warpgroup, or a second one that exits."""
    text = WGMMA.replace(".maxntid 128", f".maxntid {block}").replace("tile[2048]", "tile[4096]")
    leave = "setp.ge.u32 %p2, %r1, 128;\n@%p2 ret;\n"
    ptx = text.format(body=f"{leave}{FENCE}\n{mma()}\n{DONE}\n", zeros=ZEROS)
    y = np.zeros(128, np.float32)
    run_kernel(ptx, "kernel", [None, y], block=block)
    assert (y == 16).all()


# ---- setmaxnreg ----------------------------------------------------------------------------------


def registers(count: int, action: str = "dec") -> str:
    return f'asm volatile("setmaxnreg.{action}.sync.aligned.u32 {count};");'


#: 384 threads have 168 registers each at launch: 65,536 / 384, rounded down to a multiple of 8.
SET_REGISTERS = [
    Rule("no multiple of 8", f"""
  if (i < 128) {registers(100)}  // wrong
  if (i < 128) {registers(104)}  // right
""", "invalid operand", "setmaxnreg to 100 registers: the count must be a multiple of 8 from 24 to "
         "256"),
    Rule("fewer than 24", f"""
  if (i < 128) {registers(16)}  // wrong
  if (i < 128) {registers(24)}  // right
""", "invalid operand", "setmaxnreg to 16 registers: the count must be a multiple of 8 from 24 to "
         "256"),
    Rule("more than 256", f"""
  if (i < 256) {registers(24)}
  else {registers(264, "inc")}  // wrong
  else {registers(256, "inc")}  // right
""", "invalid operand", "setmaxnreg to 264 registers: the count must be a multiple of 8 from 24 to "
         "256"),
    Rule("dec to more", f"""
  if (i < 128) {registers(176)}  // wrong
  if (i < 128) {registers(168)}  // right
""", "invalid operand", "setmaxnreg.dec to 176 registers is more than 168, which each thread "
         "holds"),
    Rule("inc to fewer", f"""
  if (i < 128) {registers(160, "inc")}  // wrong
  if (i < 128) {registers(168, "inc")}  // right
""", "invalid operand", "setmaxnreg.inc to 160 registers is fewer than 168, which each thread "
         "holds"),
    Rule("more is asked for than is given up", f"""
  if (i < 128) {registers(32)}  // wrong
  if (i < 128) {registers(24)}  // right
  else {registers(240, "inc")}
""", "deadlock", "128 at setmaxnreg.inc for 9216 registers more, of which the block has 8192"),
    Rule("nothing is given up", f"""
  if (i < 128) {registers(24)}  // right
  if (i >= 256) {registers(176, "inc")}
""", "deadlock", "128 at setmaxnreg.inc for 1024 registers more, of which the block has 0"),
    Rule("one warp of four, the others exit", f"""
  if (i < 32) {registers(24)}  // wrong
  if (i < 128) {registers(24)}  // right
""", "divergence", "setmaxnreg is executed by 1 of the 4 warps of a warpgroup"),
    Rule("three warps of four, the other waits", f"""
  if (i >= 32 && i < 128) {registers(24)}  // wrong
  if (i < 128) {registers(24)}  // right
  __syncthreads();
""", "divergence", "not all warps of a warpgroup come to setmaxnreg.dec.sync.aligned.u32"),
    Rule("no synchronisation since the last one", f"""
  if (i < 128) {{
    {registers(40)}
    asm volatile("bar.sync 1, 128;" ::: "memory");  // right
    {registers(24)}
  }}
""", "race", "setmaxnreg, and the warps of the warpgroup have not synchronised since their last "
         "one"),
    Rule("a barrier of warps alone since the last one", f"""
  if (i < 128) {{
    {registers(40)}
    __syncwarp();  // wrong
    asm volatile("bar.sync 1, 128;" ::: "memory");  // right
    {registers(24)}
  }}
""", "race", "setmaxnreg, and the warps of the warpgroup have not synchronised since their last "
         "one"),
]  # fmt: skip


def change_registers(folder: Path, body: str, bounds: str = "__launch_bounds__(384, 1)") -> None:
    text = f'extern "C" __global__ {bounds} void kernel(int* y) {{\n  const int i = threadIdx.x;\n'
    y = np.zeros(384, np.int32)
    run_kernel(
        spec(folder, f"{text}{body}\n  y[i] = i;\n}}\n"), "kernel", [y], block=384, arch="sm_90a"
    )
    np.testing.assert_array_equal(y, np.arange(384))


@pytest.mark.parametrize("rule", SET_REGISTERS, ids=lambda rule: rule.name)
def test_setmaxnreg(rule: Rule, tmp_path: Path) -> None:
    change_registers(tmp_path, rule.text(right=True))
    with pytest.raises(KernelFault) as caught:
        change_registers(tmp_path, rule.text(right=False))
    check_deadlock_or_rule(rule, caught.value)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ("", "setmaxnreg in a kernel that says neither .maxnreg nor .maxntid: the registers of a "
         "thread at launch are not known, give __launch_bounds__"),
        ("__maxnreg__(240)", "setmaxnreg in a block of 384 threads with 240 registers each: 92160 "
         "registers, an SM has 65536"),
        ("__launch_bounds__(384, 2)", "setmaxnreg.dec to 104 registers is more than 80, which each "
         "thread holds"),
    ],
    ids=["none", "too many", "two blocks"],
)  # fmt: skip
def test_registers_at_launch(bounds: str, message: str, tmp_path: Path) -> None:
    body = f"  if (i < 128) {registers(104)}\n"
    change_registers(tmp_path, body, "__maxnreg__(168)")
    with pytest.raises(KernelFault) as caught:
        change_registers(tmp_path, body, bounds)
    assert (caught.value.finding.kind, caught.value.finding.message) == ("invalid operand", message)


def test_registers_given_up_later_are_waited_for(tmp_path: Path) -> None:
    """And registers go from warpgroup to warpgroup."""
    body = f"""
  if (i < 128) {{
    {registers(24)}
    asm volatile("bar.sync 1, 128;" ::: "memory");
    {registers(240, "inc")}
  }} else if (i < 256) {{
    {registers(240, "inc")}
    asm volatile("bar.sync 2, 128;" ::: "memory");
    {registers(24)}
  }} else {{
    {registers(168)}
  }}
"""
    change_registers(tmp_path, body)
