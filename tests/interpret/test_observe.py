"""Observers of the interpreter: counts, bank conflicts, traces and stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import interpret
from cupyattn.compiler.modules import KERNELS
from cupyattn.distributions import make
from cupyattn.interpret import (
    Break,
    KernelFault,
    Observer,
    Profile,
    Stop,
    Trace,
    banks,
    executor,
    machine,
    observe,
)
from cupyattn.interpret.members import Member, element_at
from tests.support.interpreted import run_ptx

LANES = np.arange(32)


def line_of(file: str, text: str) -> int:
    """Number of the one line of a kernel source that holds a text."""
    lines = (KERNELS / file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line]
    return number


# ---- bank conflicts ------------------------------------------------------------------------------


def passes_by_definition(address: np.ndarray, width: int, lanes: np.ndarray) -> tuple[int, int]:
    """Go through the lanes that are served together, bank by bank."""
    together = {1: 32, 2: 32, 4: 32, 8: 16, 16: 8}[width]
    passes = fewest = 0
    for first in range(0, int(lanes.max()) + 1, together):
        some = address[(lanes >= first) & (lanes < first + together)]
        words: dict[int, set[int]] = {}
        for start in some.tolist():
            for byte in range(start, start + width):
                words.setdefault(byte // 4 % 32, set()).add(byte // 4)
        if words:
            passes += max(map(len, words.values()))
            fewest += 1
    return passes, fewest


@given(st.data())
def test_passes_are_those_of_the_definition(data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    lanes = np.array(sorted(data.draw(st.sets(st.integers(0, 95), min_size=1))))
    slots = data.draw(st.lists(st.integers(0, 511), min_size=len(lanes), max_size=len(lanes)))
    address = np.array(slots) * width
    assert banks.passes(address, width, lanes) == passes_by_definition(address, width, lanes)


def cells(width: int, stride: int) -> np.ndarray:
    """Every lane its own cell, `stride` cells apart."""
    return width * stride * LANES


def rows_of_a_tile(row_bytes: int, *, swizzled: bool) -> np.ndarray:
    """Rows of 16 bytes of four 8 x 8 tiles: lane i names row i % 8 of tile i / 8, a column."""
    row, column = LANES % 8, LANES // 8
    return row * row_bytes + 16 * ((column ^ row) if swizzled else column)


#: (instruction on [%r2], bytes of a lane, offsets, passes, passes without conflicts)
ACCESSES = {
    "stride 1": ("ld.shared.u32 %r3, [%r2]", cells(4, 1), 1, 1),
    "stride 2": ("ld.shared.u32 %r3, [%r2]", cells(4, 2), 2, 1),
    "stride 3": ("ld.shared.u32 %r3, [%r2]", cells(4, 3), 1, 1),
    "stride 32": ("ld.shared.u32 %r3, [%r2]", cells(4, 32), 32, 1),
    "rows padded to 33": ("ld.shared.u32 %r3, [%r2]", cells(4, 33), 1, 1),
    "one word for all": ("ld.shared.u32 %r3, [%r2]", cells(4, 0), 1, 1),
    "two words of a bank": ("ld.shared.u32 %r3, [%r2]", 128 * (LANES % 2), 2, 1),
    "bytes": ("ld.shared.u8 %h1, [%r2]", cells(1, 1), 1, 1),
    "bytes of one bank": ("ld.shared.u8 %h1, [%r2]", cells(1, 128), 32, 1),
    "pairs": ("ld.shared.v2.u32 {%r3, %r4}, [%r2]", cells(8, 1), 2, 2),
    "pairs, stride 2": ("ld.shared.v2.u32 {%r3, %r4}, [%r2]", cells(8, 2), 4, 2),
    "fours": ("ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2]", cells(16, 1), 4, 4),
    "fours, stride 2": ("ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2]", cells(16, 2), 8, 4),
    "fours, all the same": ("ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2]", cells(16, 0), 4, 4),
    "store, stride 1": ("st.shared.u32 [%r2], %r1", cells(4, 1), 1, 1),
    "store, stride 8": ("st.shared.u32 [%r2], %r1", cells(4, 8), 8, 1),
    "store to the generic space": ("st.u32 [%rd4], %r1", cells(4, 2), 2, 1),
    "ldmatrix, swizzled": (
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r2]",
        rows_of_a_tile(128, swizzled=True), 4, 4,
    ),
    "ldmatrix, plain rows of 128 bytes": (
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r2]",
        rows_of_a_tile(128, swizzled=False), 32, 4,
    ),
    "ldmatrix, rows padded to 144 bytes": (
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r2]",
        rows_of_a_tile(144, swizzled=False), 4, 4,
    ),
    "ldmatrix of one tile": (
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2]",
        rows_of_a_tile(128, swizzled=False), 8, 1,
    ),
    "copy of 16 bytes": ("cp.async.cg.shared.global [%r2], [%rd2], 16", cells(16, 1), 4, 4),
    "copy of 16 bytes, stride 2": (
        "cp.async.cg.shared.global [%r2], [%rd2], 16", cells(16, 2), 8, 4,
    ),
    "copy of 4 bytes": ("cp.async.ca.shared.global [%r2], [%rd2], 4", cells(4, 32), 32, 1),
}  # fmt: skip

FILL = "\n".join(f"st.shared.u32 [%r7+{128 * i}], %r1;" for i in range(48))
PROBE = """
.shared .align 16 .b8 tile[6144];
.loc 1 1 0
mov.u32 %r1, %tid.x;
mov.u32 %r2, tile;
shl.b32 %r7, %r1, 2;
add.u32 %r7, %r7, %r2;
.loc 1 2 0
{fill}
.loc 1 3 0
bar.sync 0;
ld.param.u64 %rd1, [offsets];
mul.wide.u32 %rd2, %r1, 4;
add.u64 %rd2, %rd1, %rd2;
ld.global.u32 %r8, [%rd2];
add.u32 %r2, %r2, %r8;
cvt.u64.u32 %rd4, %r2;
cvta.shared.u64 %rd4, %rd4;
mul.wide.u32 %rd2, %r1, 16;
add.u64 %rd2, %rd1, %rd2;
.loc 1 4 0
{access};
"""


@pytest.mark.parametrize("name", ACCESSES)
def test_the_conflicts_of_an_access(name: str) -> None:
    access, offsets, passes, fewest = ACCESSES[name]
    table = np.zeros(128, np.uint32)
    table[:32] = offsets
    table.flags.writeable = False
    profile = Profile()
    with observe(profile):
        run_ptx(PROBE.format(fill=FILL, access=access), offsets=table)
    by_line = {a.line: a for a in profile.accesses}
    fill, probed = by_line["probe.cu:2"], by_line["probe.cu:4"]
    assert (fill.opcode, fill.accesses, fill.passes, fill.excess) == ("st", 48, 48, 0)
    assert (probed.accesses, probed.passes, probed.fewest) == (1, passes, fewest)
    assert probed.excess == passes - fewest == profile.excess
    assert access.startswith(probed.opcode)


def test_only_lanes_that_execute_an_access_count() -> None:
    table = np.zeros(128, np.uint32)
    table[:32] = 128 * LANES
    access = (
        "setp.lt.u32 %p1, %r1, 5;\n@%p1 ld.shared.u32 %r3, [%r2];\n@!%p1 ld.shared.u32 %r3, [%r7]"
    )
    profile = Profile()
    with observe(profile):
        run_ptx(PROBE.format(fill=FILL, access=access), offsets=table)
    (probed,) = [a for a in profile.accesses if a.line == "probe.cu:4"]
    assert (probed.accesses, probed.passes, probed.excess) == (2, 5 + 1, 4)


# ---- counts --------------------------------------------------------------------------------------


def test_instructions_count_for_a_warp_at_once() -> None:
    """Two warps and a bit; the first 40 threads take a way of their own."""
    body = """
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p1, %r1, 40;
    @%p1 bra OTHERS;
    add.u32 %r2, %r1, 1;
    add.u32 %r2, %r2, 1;
    OTHERS:
    mul.lo.u32 %r3, %r1, 3;
    """
    profile = Profile()
    with observe(profile):
        run_ptx(body, block=70, grid=5)
    (kernel,) = profile.kernels.values()
    assert (kernel.kernel, kernel.launches, kernel.blocks) == ("probe", 1, 5)
    warps = 5 * 3
    assert kernel.instructions["mul.lo.u32"] == kernel.instructions["setp.ge.u32"] == warps
    assert kernel.instructions["add.u32"] == 2 * 5 * 2  # warps 0 and 1 of each block
    assert profile.kinds == {"mov": 15, "setp": 15, "bra": 15, "add": 20, "mul": 15, "ret": 15}


def test_batches_of_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make("normal", 1, 2, 70, 70, 32)
    whole = interpret.attention(q, k, v, variant="fa_warps")[2]
    monkeypatch.setattr(executor, "MEMORY_BUDGET", 1)
    parts = interpret.attention(q, k, v, variant="fa_warps")[2]
    assert whole.kernels["attn_fa_warps"].blocks > 2
    assert parts.to_dict() == whole.to_dict()


def test_bytes_are_those_of_the_arrays() -> None:
    q, k, v = make("normal", 1, 1, 64, 64, 64)
    _, _, profile = interpret.attention(q, k, v, variant="fa_tc")
    assert profile.traffic["global", "load"] == 3 * q.nbytes
    assert profile.traffic["global", "store"] == q.nbytes + 4 * 64
    assert profile.nbytes("global") == 4 * q.nbytes + 4 * 64
    assert profile.excess == 0, "the tiles are swizzled"


def test_several_kernels_are_kept_apart() -> None:
    q, k, v = make("normal", 1, 1, 40, 40, 32)
    o, lse, profile = interpret.attention(q, k, v, variant="fa_int8")
    assert list(profile.kernels) == ["quantize", "attn_fa_int8"]
    total = sum(k.instructions.total() for k in profile.kernels.values())
    assert profile.instructions.total() == profile.kinds.total() == total
    assert o.shape == q.shape and lse.shape == q.shape[:3]
    assert "attn_fa_int8: 1 launch" in str(profile)


def test_nobody_watches_a_normal_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.Machine, "_run_observed", None)
    run_ptx("mov.u32 %r1, %tid.x;")
    with pytest.raises(TypeError), observe(Profile()):
        run_ptx("mov.u32 %r1, %tid.x;")


def test_observers_see_the_same_result_and_nest() -> None:
    q, k, v = make("normal", 1, 1, 20, 30, 16)
    outer, inner = Profile(), Profile()
    with observe(outer):
        first, _, _ = interpret.attention(q, k, v, variant="fa", profile=inner)
        second, _, third = interpret.attention(q, k, v, variant="fa")
    assert first.tobytes() == second.tobytes()
    assert inner.to_dict() == third.to_dict()
    assert outer.instructions.total() == 2 * inner.instructions.total()
    assert interpret.observe is observe and not observe_active()


def observe_active() -> tuple[Observer, ...]:
    from cupyattn.interpret.observer import active

    return active()


# ---- traces --------------------------------------------------------------------------------------

TRACED = """
.loc 1 7 0
mov.u32 %r1, %tid.x;
.loc 2 40 5, function_name info, inlined_at 1 8 2
mov.f32 %f1, 0f3FC00000;
mov.b32 %r2, 0xC0003C00;
add.f16x2 %r3, %r2, %r2;
sub.s32 %r4, %r1, 3;
.loc 1 9 0
setp.gt.s32 %p1, %r4, 0;
@%p1 add.s32 %r4, %r4, 100;
ld.param.u64 %rd1, [out];
st.global.u32 [%rd1], %r4;
"""


def test_a_trace_shows_lines_instructions_and_values(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    body = TRACED.replace("st.global", "setp.eq.u32 %p2, %r1, 1;\n@%p2 st.global")
    with observe(Trace(path, lane=1)):
        run_ptx(body, out=np.zeros(4, np.uint32))
    head, *lines = path.read_text().splitlines()
    assert head == "# probe<<<1, 32>>> for sm_80: block 0, warp 0, lane 1"
    columns = [(line[:46].strip(), line[47:107].strip(), line[108:]) for line in lines]
    inner = "probe.cu:8, in prims/inner.cuh:40"
    assert columns == [
        ("probe.cu:7", "mov.u32 %r1, %tid.x", "%r1 = 0x00000001 (1)"),
        (inner, "mov.f32 %f1, 0f3FC00000", "%f1 = 0x3fc00000 (1.5)"),
        (inner, "mov.b32 %r2, 0xC0003C00", "%r2 = 0xc0003c00"),
        (inner, "add.f16x2 %r3, %r2, %r2", "%r3 = 0xc4004000 (2, -4)"),
        (inner, "sub.s32 %r4, %r1, 3", "%r4 = 0xfffffffe (-2)"),
        ("probe.cu:9", "setp.gt.s32 %p1, %r4, 0", "%p1 = false"),
        ("probe.cu:9", "@%p1 add.s32 %r4, %r4, 100", "not executed"),
        ("probe.cu:9", "ld.param.u64 %rd1, [out]", columns[7][2]),
        ("probe.cu:9", "setp.eq.u32 %p2, %r1, 1", "%p2 = true"),
        ("probe.cu:9", "@%p2 st.global.u32 [%rd1], %r4", columns[9][2]),
        ("probe.cu:9", "ret", ""),
    ]
    assert columns[9][2].startswith("%p2 = true, %rd1 = ")
    assert columns[9][2].endswith(", %r4 = 0xfffffffe")


LOOP = """
mov.u32 %r1, %tid.x;
AGAIN:
add.u32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, 1000;
@%p1 bra AGAIN;
"""


def test_a_trace_is_cut_where_it_grows_too_long(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    with observe(Trace(path, limit=50)):
        run_ptx(LOOP)
    lines = path.read_text().splitlines()
    assert len(lines) == 51
    assert lines[-1] == "# cut here, after 50 lines: the kernel went on"


def test_a_finding_ends_a_trace_even_a_cut_one(tmp_path: Path) -> None:
    for limit in (3, 10_000):
        path = tmp_path / f"{limit}.txt"
        with pytest.raises(KernelFault) as caught, observe(Trace(path, limit=limit)):
            run_ptx(f"{LOOP}ld.shared.u32 %r3, [%r1];")
        lines = path.read_text().splitlines()
        assert lines[-1] == f"# finding: {caught.value.finding}"
    assert lines[-2].endswith("stopped by the finding") and "ld.shared.u32" in lines[-2]


def test_a_trace_follows_one_warp_of_one_block(tmp_path: Path) -> None:
    body = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    setp.lt.u32 %p1, %r1, 40;
    @%p1 bra LOW;
    add.u32 %r3, %r1, 1;
    bra END;
    LOW:
    add.u32 %r3, %r1, 2;
    END:
    """
    path = tmp_path / "trace.txt"
    with observe(Trace(path, block=2, warp=1, lane=5)):
        run_ptx(body, block=64, grid=3)
    text = path.read_text()
    assert "%r1 = 0x00000025 (37)" in text and "%r2 = 0x00000002 (2)" in text
    assert "%r3 = 0x00000027 (39)" in text
    (other,) = [line for line in text.splitlines() if "add.u32 %r3, %r1, 1" in line]
    assert other.endswith("lane 5 is not here")


def test_a_trace_of_nobody_is_an_error(tmp_path: Path) -> None:
    for options in ({"block": 3}, {"warp": 1}):
        with pytest.raises(ValueError, match="largest has 3 blocks, or 32 threads"), \
                observe(Trace(tmp_path / "x.txt", **options)):  # fmt: skip
            run_ptx("mov.u32 %r1, %tid.x;", grid=3)
    for options in ({"block": -1}, {"lane": 32}, {"limit": -1}):
        with pytest.raises(ValueError, match="must"):
            Trace(tmp_path / "x.txt", **options)
    with pytest.raises(OSError, match="nowhere"), observe(Trace("/nowhere/x.txt")):
        pass


# ---- stops ---------------------------------------------------------------------------------------


def test_a_stop_hands_over_what_the_lanes_see() -> None:
    """attn_fa between S3 and S4: S holds the scores, and one warp computes the new maximum."""
    q, k, v = make("normal", 1, 2, 40, 40, 32)
    line = line_of("attn_fa.cu", "state.advance(")
    seen: list[dict[str, Any]] = []

    def callback(stop: Stop) -> None:
        assert stop.kernel == "attn_fa" and stop.line == f"attn_fa.cu:{line}"
        seen.append({
            "block": stop.block, "warp": stop.warp, "lane": stop.lane, "blocks": stop.blocks,
            "registers": stop.registers, "shared": stop.shared, "arrays": stop.arrays,
            "instructions": stop.instructions,
        })  # fmt: skip

    interpret.attention(q, k, v, variant="fa", break_at=("attn_fa.cu", line), callback=callback)
    first = seen[0]
    assert set(first["warp"]) == {0} and list(first["blocks"]) == [0, 1, 2, 3]
    assert list(first["lane"]) == list(range(32)) * 4
    assert list(first["block"]) == [b for b in range(4) for _ in range(32)]
    assert set(first["arrays"]) == {"q", "k", "v", "o", "lse"}
    np.testing.assert_array_equal(first["arrays"]["k"], k)
    for name, values in first["registers"].items():
        assert values.shape == (128,) and any(name in text for text in first["instructions"])
    S = first["shared"]["S"]  # [blocks, BLOCK_Q * (BLOCK_KV + 1)]
    assert S.dtype == np.float32 and S.shape == (4, 32 * 33)
    # Block 1 has the last 8 queries of head 0, and the first keys.
    exact = q[0, 0, 32:].astype(np.float64) @ k[0, 0, :32].astype(np.float64).T
    np.testing.assert_allclose(S[1].reshape(32, 33)[:8, :32], exact, rtol=1e-5, atol=1e-5)
    for array in (S, first["arrays"]["q"], first["registers"][next(iter(first["registers"]))]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_registers_have_the_values_of_their_lanes() -> None:
    stops: list[Stop] = []
    body = """
    .loc 1 5 0
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 3;
    .loc 2 6 0, function_name info, inlined_at 1 5 9
    cvt.rn.f32.u32 %f1, %r1;
    .loc 1 7 0
    add.u32 %r1, %r1, 1000;
    """
    with observe(Break("probe.cu", 5, stops.append)):
        run_ptx(body, block=40)
    (stop,) = stops
    assert stop.registers["%r1"].dtype == np.uint32
    np.testing.assert_array_equal(stop.registers["%r1"], np.arange(40))
    np.testing.assert_array_equal(stop.registers["%f1"], np.arange(40, dtype=np.float32))
    assert stop.registers["%p1"].sum() == 3
    assert str(stop) == "probe at probe.cu:5: block 0, warp 0-1, lane 0-31 (40 lanes of 2 warps)"
    assert stop.instructions == (
        "mov.u32 %r1, %tid.x", "setp.lt.u32 %p1, %r1, 3", "cvt.rn.f32.u32 %f1, %r1",
    )  # fmt: skip


def test_inlined_lines_can_be_stopped_at() -> None:
    q, k, v = make("normal", 1, 1, 20, 30, 16)
    line = line_of("prims/score/online_softmax.cuh", "M = fmaxf(M_old, M_new);")
    for name in ("prims/score/online_softmax.cuh", "online_softmax.cuh"):
        stops: list[Stop] = []
        interpret.attention(q, k, v, variant="fa", break_at=(name, line), callback=stops.append)
        assert stops and {stop.kernel for stop in stops} == {"attn_fa"}


def test_each_group_of_lanes_stops_for_itself() -> None:
    body = """
    .loc 1 2 0
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 10;
    @%p1 bra LOW;
    .loc 1 3 0
    add.u32 %r1, %r1, 1;
    bra END;
    LOW:
    .loc 1 4 0
    add.u32 %r1, %r1, 2;
    END:
    .loc 1 5 0
    add.u32 %r1, %r1, 3;
    """
    for line, lanes in ((2, range(32)), (3, range(10, 32)), (4, range(10)), (5, range(32))):
        stops: list[Stop] = []
        with observe(Break("probe.cu", line, stops.append)):
            run_ptx(body)
        assert [stop.lane.tolist() for stop in stops] == [list(lanes)]


def test_what_is_asked_for_too_late_is_an_error() -> None:
    stops: list[Stop] = []
    with observe(Break("probe.cu", 1, stops.append)):
        run_ptx(".loc 1 1 0\nmov.u32 %r1, %tid.x;")
    assert "%r1" in stops[0].registers
    for name in ("shared", "arrays"):
        with pytest.raises(RuntimeError, match=f"read .{name} within the callback"):
            getattr(stops[0], name)


def test_a_line_without_instructions_names_its_neighbours() -> None:
    q, k, v = make("normal", 1, 1, 4, 4, 16)
    run = {"variant": "fa", "callback": lambda stop: None}
    line = line_of("attn_fa.cu", "// S3 scores")
    with pytest.raises(ValueError, match=rf"attn_fa.cu:{line}: the nearest .* are .*{line + 1}"):
        interpret.attention(q, k, v, break_at=("attn_fa.cu", line), **run)
    with pytest.raises(ValueError, match=r"no kernel has .* 'attn_fb.cu', only of attn_fa.cu, pr"):
        interpret.attention(q, k, v, break_at=("attn_fb.cu", 3), **run)
    with pytest.raises(ValueError, match="belong together"):
        interpret.attention(q, k, v, variant="fa", break_at=("attn_fa.cu", 3))


def test_a_callback_that_raises_ends_the_run() -> None:
    def callback(stop: Stop) -> None:
        raise LookupError("seen enough")

    with pytest.raises(LookupError, match="seen enough"), observe(Break("probe.cu", 1, callback)):
        run_ptx(".loc 1 1 0\nmov.u32 %r1, %tid.x;")
    assert not observe_active()


def test_a_finding_is_not_hidden_by_what_was_never_reached() -> None:
    with pytest.raises(KernelFault), observe(Break("probe.cu", 99, print)):
        run_ptx(".loc 1 1 0\nld.shared.u32 %r1, [%r2];")


# ---- places of findings --------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 2])
def test_a_finding_counts_bytes_from_the_start_of_the_blocks_own_memory(block: int) -> None:
    body = f"""
    .shared .align 16 .b8 tile[96];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, tile;
    setp.ne.u32 %p1, %r2, {block};
    @%p1 ret;
    ld.shared.u32 %r4, [%r3+24];
    """
    with pytest.raises(KernelFault) as caught:
        run_ptx(body, grid=3, block=1)
    finding = caught.value.finding
    assert (finding.kind, finding.block, finding.address) == ("never written", block, 24)


def test_a_finding_in_an_array_counts_from_its_first_element() -> None:
    body = """
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    st.global.u32 [%rd1+8], %r1;
    """
    out = np.zeros(13, np.uint32)[1:]
    with pytest.raises(KernelFault) as caught:
        run_ptx(body, out=out)
    assert caught.value.finding.kind == "race" and caught.value.finding.address == 8


def test_bytes_of_a_union_belong_to_several_members() -> None:
    members = (Member("a.x", "float16", (4,), 0), Member("b", "float32", (2, 2), 0))
    assert element_at(members, 6) == "a.x[3] or b[0, 1]"
    assert element_at(members, 12) == "b[1, 1]" and element_at(members, 16) == ""
