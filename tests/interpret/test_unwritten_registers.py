"""A register that a lane reads before it writes it is a finding; what compilers do is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.diffusion import key_importance
from cupyattn.interpret import program
from cupyattn.interpret.executor import run_kernel
from cupyattn.interpret.findings import KernelFault
from tests.faults.fault_patches import put_a_line_in_place

HEAD = """.version 8.0
.target sm_80
.address_size 64
.file 1 "kernel.cu"
.entry kernel(.param .u64 y) {
  .reg .pred %p<4>;
  .reg .b32 %r<10>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %tid.x;
  mad.wide.u32 %rd2, %r1, 4, %rd1;
  setp.lt.u32 %p1, %r1, 3;
  mov.u32 %r2, 0;
  .loc 1 7 3
"""
TAIL = """
  st.global.u32 [%rd2], %r5;
  ret;
}
"""
LANES = np.arange(32)


def run(body: str) -> np.ndarray:
    y = np.zeros(32, np.int32)
    run_kernel(HEAD + body + TAIL, "kernel", [y], block=32)
    return y


#: Bodies that compute %r5: with the register, the first lane and the number of lanes that read it
#: without a write.
FAULTS = {
    "nothing writes it": ("add.s32 %r5, %r1, %r9;", "%r9", 0, 32),
    "a branch skips the write": (
        "@%p1 bra SKIP; mov.u32 %r4, 1; SKIP: add.s32 %r5, %r4, %r1;", "%r4", 0, 3,
    ),
    "one of two ways writes it": (
        "@%p1 bra ONE; mov.u32 %r4, 1; bra BOTH; ONE: mov.u32 %r2, 1; BOTH: add.s32 %r5, %r4, %r2;",
        "%r4", 0, 3,
    ),
    "the guard of the write": ("@%p1 mov.u32 %r4, 1; add.s32 %r5, %r4, %r1;", "%r4", 3, 29),
    "a negated guard": ("@!%p1 mov.u32 %r4, 1; add.s32 %r5, %r4, %r1;", "%r4", 0, 3),
    "the guard itself": ("@%p3 mov.u32 %r2, 1; mov.u32 %r5, %r2;", "%p3", 0, 32),
    "the guard of a branch": ("@%p3 bra SKIP; SKIP: mov.u32 %r5, %r2;", "%p3", 0, 32),
    "the first turn of a loop": (
        "AGAIN: add.s32 %r5, %r4, %r1; add.s32 %r2, %r2, 1; mov.u32 %r4, %r2;"
        "setp.lt.u32 %p2, %r2, 3; @%p2 bra AGAIN;", "%r4", 0, 32,
    ),
    "an address": ("ld.global.u32 %r5, [%rd3];", "%rd3", 0, 32),
    "a stored value": ("st.global.u32 [%rd2], %r4; mov.u32 %r5, 1;", "%r4", 0, 32),
    "a value that lanes exchange": (
        "@%p1 mov.u32 %r4, 1; shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;", "%r4", 3, 29,
    ),
    "a copy": ("mov.u32 %r3, %r9; mov.u32 %r4, %r3; add.s32 %r5, %r4, 1;", "%r4", 0, 32),
    "a value that was copied over": (
        "mov.u32 %r3, 1; @%p1 mov.u32 %r3, %r9; add.s32 %r5, %r3, 1;", "%r3", 0, 3,
    ),
    "what selects": ("selp.b32 %r5, 1, 2, %p3;", "%p3", 0, 32),
}  # fmt: skip
#: Bodies without a fault, with the values of %r5.
SOUND = {
    "one guard for write and read": (
        "mov.u32 %r5, %r2; @%p1 mov.u32 %r4, 1; @%p1 add.s32 %r5, %r4, 1;",
        np.where(LANES < 3, 2, 0),
    ),
    "both guards write": (
        "@%p1 mov.u32 %r4, 1; @!%p1 mov.u32 %r4, 2; add.s32 %r5, %r4, 1;",
        np.where(LANES < 3, 2, 3),
    ),
    "two branches on one condition": (
        "@%p1 bra SKIP; mov.u32 %r4, 6; SKIP: mov.u32 %r5, %r2;"
        "@%p1 bra END; add.s32 %r5, %r4, 1; END:", np.where(LANES < 3, 0, 7),
    ),
    "a loop that reads from its second turn on": (
        "mov.u32 %r5, %r2; AGAIN: setp.eq.u32 %p2, %r2, 0; @%p2 bra FIRST; add.s32 %r5, %r5, %r4;"
        "FIRST: add.s32 %r2, %r2, 1; mov.u32 %r4, %r2; setp.lt.u32 %p2, %r2, 3; @%p2 bra AGAIN;",
        np.full(32, 1 + 2),
    ),
    "a copy that nothing needs": ("mov.u32 %r3, %r9; mov.b64 %rd3, {%r2, %r3}; mov.u32 %r5, 4;",
                                  np.full(32, 4)),
    "one choice": ("selp.b32 %r4, 5, %r9, %p1; add.s32 %r5, %r4, 0;", None),
    "a vote at a barrier": ("bar.red.popc.u32 %r5, 0, %p1;", np.full(32, 3)),
    "two results": ("setp.lt.u32 %p2|%p3, %r1, 5; selp.b32 %r5, 1, 2, %p3;",
                    np.where(LANES < 5, 2, 1)),
}  # fmt: skip


@pytest.mark.parametrize(("body", "register", "lane", "lanes"), FAULTS.values(), ids=FAULTS)
def test_a_read_before_the_write_is_found(
    body: str, register: str, lane: int, lanes: int
) -> None:
    with pytest.raises(KernelFault, match="never written") as caught:
        run(body)
    finding = caught.value.finding
    assert finding.message == f"register {register} is read, and this lane has not written it"
    assert (finding.lane, finding.lanes) == (lane, lanes)
    assert finding.location is not None
    assert (finding.location.file, finding.location.line) == ("kernel.cu", 7)


@pytest.mark.parametrize(("body", "values"), SOUND.values(), ids=SOUND)
def test_a_read_after_the_write_is_none(body: str, values: np.ndarray | None) -> None:
    found = run(body)
    if values is None:  # a choice that leaves some lanes without a value
        values = np.where(LANES < 3, 5, found)
    np.testing.assert_array_equal(found, values)


def test_only_unsure_registers_are_watched() -> None:
    """Steps of other registers cost nothing."""
    sure = program.program(HEAD + "add.s32 %r5, %r1, %r2;" + TAIL, "kernel")
    assert sure.unsure == {}
    body = "@%p1 mov.u32 %r4, 1; @%p1 mov.u32 %r3, %r4; add.s32 %r5, %r1, %r2;"
    watched = program.program(HEAD + body + TAIL, "kernel")
    names = {watched.kernel.registers[index].name for index in watched.unsure}
    assert names == {"%r3", "%r4"}
    empty = ".version 8.0 .target sm_80 .entry kernel() { }"
    assert program.program(empty, "kernel").unsure == {}


def importance(x: np.ndarray) -> None:
    key_importance(x[None, None], x[None, None], backend="interpret", arch="sm_90a")


def codes(x: np.ndarray) -> None:
    ca.act_quant(x.reshape(4, 1024), strategy="channel", backend="interpret")


#: Loops that read a number past a local array: no instruction writes the register that it becomes.
PAST = [
    ("pruning/sm90/key_importance.cu", "float sum[MMA_KEYS][2] = {};\n#pragma unroll\n"
     "    for (int r = 0; r < MMA_ROWS; ++r)", importance, 329),
    ("prims/codes/quant.cuh", "for (int a = 1; a < ACCESSES; ++a) ends", codes, 101),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "loop", "call", "line"), PAST, ids=["key_importance", "row_quant"]
)
def test_a_number_past_a_local_array_is_found(
    source: str, loop: str, call: Callable[[np.ndarray], None], line: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    put_a_line_in_place(source, loop, loop.replace("<", "<="), tmp_path, monkeypatch)
    with pytest.raises(KernelFault, match="is read, and this lane has not written it") as caught:
        call(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16))
    finding = caught.value.finding
    assert finding.location is not None
    assert (finding.kind, finding.location.chain()[-1].line) == ("never written", line)
