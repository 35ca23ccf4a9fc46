"""The members of a kernel's shared memory have the compiler's offsets."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from cupyattn.compiler import modules as kc
from cupyattn.errors import KernelCompileError
from cupyattn.interpret.members import Member, member_names, shared_members
from tests.compiler.test_contracts import GOOD, arch_of, spec_of

WITHOUT_STORAGE = [
    "prepare/quantize.cu",
    "prepare/quantize_reduce.cu",
    "prepare/rope.cu",
    "prepare/unpack.cu",
    "prepare/normalise.cu",
    "prepare/token_factors.cu",
    "backward/backward_normalise.cu",
    "backward/backward_delta.cu",
    "backward/backward_coarse.cu",
    "backward/sm90/backward_sums.cu",
    "linear/row_quant.cu",
    "linear/weight_blocks.cu",
    "pruning/largest_keys.cu",
    "pruning/gather_rows.cu",
]
WITH_STORAGE = [source for source in GOOD if source not in WITHOUT_STORAGE]
#: A third of them at once: the others are slow.
IN_TURN = [
    pytest.param(source, marks=[pytest.mark.slow] if number % 3 else [])
    for number, source in enumerate(WITH_STORAGE)
]
#: Barriers of the Hopper forms: where K and V of a step arrive together, and where each by itself.
TOGETHER, RINGS = (
    {f"{operand}{state}": "uint64" for operand in operands for state in ("full", "empty")}
    for operands in (("Q_", ""), ("Q_", "K_", "V_"))
)
#: Element types for the features of test_contracts: float16.
EXPECTED = {
    "attn_fa.cu": {"Q": "float32", "K": "float32", "V": "float32", "S": "float32",
                   "alpha": "float32"},
    "attn_fa_warps.cu": {"Q": "float32", "K": "float32", "V": "float32"},
    "attn_fa_tc.cu": {"Q": "float16", "K": "float16", "V": "float16"},
    "attn_fa_int8.cu": {"Q": "int8", "K": "int8", "V": "float16", "K_scale": "float32"},
    "forms/attn_fa_int8_pv8.cu": {"Q": "int8", "K": "int8", "V": "int8", "K_scale": "float32",
                            "V_scale": "float32", "Q_factor": "float32", "exact_l": "float32"},
    "forms/attn_fa_int8_pv8_whole.cu": {"Q": "int8", "K": "int8", "V": "int8", "K_scale": "float32",
                                  "Q_factor": "float32", "highest": "int32",
                                  "exact_l": "float32"},
    "forms/attn_fa_int8_fused.cu": {"Q": "int8", "K": "int8", "V": "float16", "Q_scale": "float32",
                              "K_scale": "float32", "Q_groups": "uint8", "K_groups": "uint8"},
    "attn_unfused.cu": {"scores.Q": "float32", "scores.K": "float32", "weighted_sum.P": "float32",
                        "weighted_sum.V": "float32"},
    "sm90/attn_fa_tc.cu": {"Q": "float16", "K": "float16", "V": "float16", "tile": "uint8",
                           **TOGETHER, "step": "int32", "places": "uint8"},
    "sm90/attn_fa_int8.cu": {"Q": "int8", "K": "int8", "V": "float16",
                             "O": "float16", "Q_codes": "int8",
                             "tile": "uint8", **TOGETHER, "step": "int32", "K_scale": "float32",
                             "places": "uint8", "whole_steps": "int32"},
    "sm90/attn_fa_int8_pv8.cu": {"Q": "int8", "K": "int8", "V": "int8",
                                 "O": "float16", "Q_codes": "int8",
                                 "tile": "uint8", **TOGETHER, "step": "int32", "K_scale": "float32",
                                 "V_scales": "uint8", "places": "uint8"},
    "sm90/attn_fa_int8_pv8_by_tile.cu": {
        "Q": "int8", "K": "int8", "V": "int8", "O": "float16", "Q_codes": "int8", "tile": "uint8",
        **TOGETHER, "step": "int32", "K_scale": "float32", "V_scale": "float32",
        "V_means": "uint8", "rows": "uint8", "places": "uint8",
    },
    "sm90/attn_fa_int8_fp8.cu": {"Q": "int8", "K": "int8", "V": "int8",
                                 "O": "float16", "Q_codes": "int8",
                                 "tile": "uint8", **RINGS, "step": "int32", "K_scale": "float32",
                                 "V_scales": "uint8", "places": "uint8"},
    "merge/merge_partials.cu": {"weights": "float32"},
    "linear/norm_quant.cu": {
        "affine": "float32", "part": "float32", "of_warp": "uint32", "next": "uint8",
    },
    "pruning/key_importance.cu": {"Q": "float16", "K": "float16", "M": "float32", "l": "float32"},
    "pruning/sm90/key_importance.cu": {
        "Q": "float16", "K": "float16", "K_sum": "float32", "of_warp": "float32",
        "of_block": "float32",
    },
    "backward/sm90/backward_keys.cu": {
        "K": "float16", "V": "float16", "Q": "float16", "dO": "float16", "dS": "float16",
        "row_M": "float32", "delta": "float32", "coarse": "int32", "KV_full": "uint64",
        "KV_empty": "uint64", "full": "uint64", "empty": "uint64", "dS_full": "uint64",
        "dS_empty": "uint64", "turn": "uint64", "added": "uint64", "passed": "uint64",
        "turn_at": "uint8", "index": "int32",
    },
    "backward/sm90/backward_keys_wide.cu": {
        "K": "float16", "V": "float16", "Q": "float16", "dO": "float16", "P": "float16",
        "dS": "float16", "row_M": "float32", "row_factor": "float32", "coarse": "int32",
        "delta": "float32", "KV_full": "uint64", "full": "uint64", "empty": "uint64",
        "P_full": "uint64", "P_empty": "uint64",
    },
    "backward/sm90/backward_keys_pair.cu": {
        "K": "float16", "V": "float16", "K_other": "float16", "Q": "float16", "dO": "float16",
        "dS": "float16", "P": "float32", "row_M": "float32", "delta": "float32", "coarse": "int32",
        "KV_full": "uint64", "Q_full": "uint64", "Q_empty": "uint64", "dO_full": "uint64",
        "dO_empty": "uint64", "P_full": "uint64", "P_empty": "uint64", "dS_full": "uint64",
        "dS_empty": "uint64", "turn": "uint64", "added": "uint64", "passed": "uint64",
        "turn_at": "uint8", "index": "int32",
    },
    "backward/sm90/backward_queries_wide.cu": {
        "Q": "float16", "dO": "float16", "K": "float16", "V": "float16", "Q_full": "uint64",
        "full": "uint64", "empty": "uint64",
    },
    "forms/split/attn_fa_tc.cu": {
        "stages.K": "float16", "stages.V": "float16", "parts.O": "float32", "parts.M": "float32",
        "parts.l": "float32",
    },
    "backward/backward_keys.cu": {"K": "float16", "V": "float16", "Q": "float16", "dO": "float16",
                         "dS": "float16", "row_M": "float32", "delta": "float32"},
    "backward/backward_queries.cu": {"Q": "float16", "dO": "float16", "K": "float16",
                                     "V": "float16"},
    "linear/gemm_int8.cu": {"A": "int8", "B": "int8", "A_scale": "float32", "B_scale": "float32",
                     "partial": "float32"},
    "linear/sm90/gemm_int8.cu": {"A": "int8", "B": "int8", "full": "uint64", "empty": "uint64"},
    "linear/gemm_int8_channel.cu": {"A": "int8", "B": "int8", "partial": "int32"},
    "linear/sm90/gemm_int8_channel.cu": {
        "A": "int8", "B": "int8", "full": "uint64", "empty": "uint64",
    },
    "merge/merge_splits.cu": {"O": "float32", "l": "float32"},
}  # fmt: skip


@pytest.mark.parametrize("source", WITH_STORAGE)
def test_names_and_types_of_the_shipped_kernels(source: str) -> None:
    members = shared_members(spec_of(source, {}), arch_of(source))
    assert {member.name: member.dtype for member in members} == EXPECTED[source]


@pytest.mark.parametrize("source", IN_TURN)
def test_the_kernel_itself_agrees_on_every_place(source: str) -> None:
    """Offsets, sizes and extents as assertions in the whole source, under the same options.

    A wrong one stands behind them. That it alone fails says as much as a compilation of the right
    ones, and the front end finds it before anything is optimised.
    """
    spec, arch = spec_of(source, {}), arch_of(source)
    members = shared_members(spec, arch)
    checks = []
    for member in members:
        place = f"((SharedStorage*)0)->{member.name}"
        checks.append(f"__INTADDR__(&{place}) == {member.offset}")
        checks.append(f"sizeof({place}) == {member.nbytes}")
        extents = member.shape[:-1] if member.dtype == "uint8" else member.shape  # a struct's bytes
        for axis, extent in enumerate(extents):
            row = place + "[0]" * axis
            checks.append(f"sizeof({row}) / sizeof({row}[0]) == {extent}")
    checks.append(f"{checks[0]} + 1")
    text = spec.path.read_text() + "".join(f"static_assert({check});\n" for check in checks)
    with pytest.raises(KernelCompileError) as caught:
        kc.translate(spec, arch, text)
    failed = re.findall(r"\((\d+)\): error: (static assertion failed)?", str(caught.value))
    assert set(failed) == {(str(len(text.splitlines())), "static assertion failed")}


@pytest.mark.parametrize("source", IN_TURN)
def test_the_members_fill_the_struct(source: str) -> None:
    """Nothing but alignment lies between them, before them and behind them."""
    spec, arch = spec_of(source, {}), arch_of(source)
    members = shared_members(spec, arch)
    for before, after in itertools.pairwise(members):
        if after.offset:  # the second part of a union starts at 0 again
            assert 0 <= after.offset - (before.offset + before.nbytes) < 1024
    end = max(member.offset + member.nbytes for member in members)
    slack = 2048 if spec.hopper else 128  # the Hopper form aligns its base itself
    assert members[0].offset == 0
    assert 0 <= kc.translate(spec, arch).smem_bytes - end < slack


def test_other_element_types_and_stages() -> None:
    spec = spec_of("attn_fa_tc.cu", {"DTYPE": 1})
    members = {member.name: member for member in shared_members(spec, "sm_80")}
    assert members["K"].dtype == "bfloat16"
    assert members["K"].shape == (GOOD["attn_fa_tc.cu"].num_stages, 64 * 64)
    hopper = {m.name: m for m in shared_members(spec_of("sm90/attn_fa_tc.cu", {}), "sm_90a")}
    assert hopper["K"].shape == (2, 1, 128 * 64) and hopper["full"].shape == (2,)


@pytest.mark.parametrize("source", WITHOUT_STORAGE)
def test_a_source_without_shared_storage_has_no_members(source: str) -> None:
    assert shared_members(spec_of(source, {}), "sm_80") == ()


def test_every_form_of_a_member(tmp_path: Path) -> None:
    source = tmp_path / "forms.cu"
    source.write_text("""
template <typename A, int N> struct Pair { A a[N]; };
struct alignas(8) Barrier { unsigned long long state; };
constexpr int LD = 5;
struct SharedStorage {  // float wrong[3];
  alignas(64) float Q[3][LD - 1], *pointer;  /* both aligned, int wrong; */
  Barrier full[2], one;
  struct {
    unsigned char mask[7];
    union { short s; bool b; } both;
  } inner;
  Pair<int, 3> pair[2];
  struct { int a, b; } ring[2];
  struct { double d; };
  char last;
};
extern "C" __global__ void k() {}
""")
    assert shared_members(kc.ModuleSpec(source), "sm_80") == (
        Member("Q", "float32", (3, 4), 0),
        Member("pointer", "uint64", (), 64),
        Member("full", "uint64", (2,), 72),
        Member("one", "uint64", (), 88),
        Member("inner.mask", "uint8", (7,), 96),
        Member("inner.both.s", "int16", (), 104),
        Member("inner.both.b", "bool", (), 104),
        Member("pair", "uint8", (2, 12), 108),
        Member("ring", "uint64", (2,), 132),
        Member("d", "float64", (), 152),
        Member("last", "int8", (), 160),
    )


def test_an_edit_is_noticed(tmp_path: Path) -> None:
    spec = kc.ModuleSpec(tmp_path / "edited.cu")
    for extent in (4, 8):
        spec.path.write_text(f"struct SharedStorage {{\n  int row[{extent}];\n}};\n")
        assert shared_members(spec, "sm_80") == (Member("row", "int32", (extent,), 0),)


def test_a_struct_on_one_line(tmp_path: Path) -> None:
    spec = kc.ModuleSpec(tmp_path / "line.cu")
    spec.path.write_text("struct alignas(16) SharedStorage { int a; /* } */ float b[2]; };\n")
    assert shared_members(spec, "sm_80") == (
        Member("a", "int32", (), 0),
        Member("b", "float32", (2,), 4),
    )


def test_more_axes_than_are_read_back_are_refused(tmp_path: Path) -> None:
    spec = kc.ModuleSpec(tmp_path / "deep.cu")
    spec.path.write_text(f"struct SharedStorage {{\n  int deep{'[1]' * 7};\n}};\n")
    with pytest.raises(KernelCompileError, match="more axes than are read back"):
        shared_members(spec, "sm_80")


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("", []),
        ("float Q[ROWS * (COLS + 1)];", ["Q"]),
        ("alignas(max(16, 8)) T a[f(1, 2)][N], b, c[2];", ["a", "b", "c"]),
        ("Pair<int, 3> a; // int b;\n", ["a"]),
        ("struct { int a; struct { int b, c; } d; } e; int f;", ["e.a", "e.d.b", "e.d.c", "f"]),
        ("struct { int a; } e[2]; union { int b; }; int f;", ["e", "b", "f"]),
    ],
)
def test_member_names(body: str, names: list[str]) -> None:
    assert member_names(body) == names
