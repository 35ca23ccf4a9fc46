"""Every variant compiles for every architecture, fits in shared memory and spills nothing.

No GPU is needed: NVRTC compiles, and ptxas itself reports registers and spills. The full product
of variants, head sizes, dtypes, masks and architectures would take an hour; every pair of
(variant, architecture) is compiled with a few of the other choices, rotated so that each of them
meets each variant, and every default tile is compiled for the architectures named in NO_SPILLS.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cupyattn.compiler import architectures as compiler_architectures
from cupyattn.compiler import devices, nvrtc, target
from cupyattn.compiler import modules as kc
from cupyattn.kernels.features import Features
from cupyattn.kernels.ladder import HOPPER_SCALE_KEYS, VARIANTS, Variant
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem import form as kernel_form_module
from tests.support.runs import SPILLED, SPILLED_FINE, SPILLED_PACKED, SPILLED_PADDED

#: Head sizes at which spills are looked for, beside 128, which is the likeliest to have some.
LATE = [pytest.param(head_dim, marks=pytest.mark.slow) for head_dim in (64, 256)]
#: Where default tiles must keep everything in registers.
NO_SPILLS = ("sm_80", "sm_89", "sm_90")
#: The smallest opt-in limit of any device from compute capability 8.0 on (8.6, 8.9 and 12.0).
SMALLEST_LIMIT = 99 * 1024
#: One head size for each padded shape that the default tiles tell apart, odd ones among them.
HEAD_DIMS = (64, 128, 256, 40, 96, 1, 80, 200, 7)


def rung_of(name: str, form: str) -> str:
    return name if form == "portable" else f"{name}@{form}"


def features_of(
    variant: Variant, form: str, dtype: str, head_dim: int, causal: bool, lse: bool
) -> Features:
    """Features of a call with contiguous arrays: the widest loads that head_dim allows."""
    widest = 4 if dtype == "float32" else 8
    vec = next(v for v in (8, 4, 2, 1) if v <= widest and head_dim % v == 0)
    group = 64 if variant.family == "int8" else 0
    values = {}
    if form.endswith(("pv8", "whole", "by_tile", "fp8")):
        p_type = "e4m3" if form == "sm90_fp8" else "u8"
        by_tile = form in ("pv8", "sm90_pv8_by_tile")
        values = {"group_v": 128 if by_tile else GROUP_ALL, "p_type": p_type}
    elif form == "v8":
        values = {"group_v": GROUP_ALL, "p_type": "16bit"}
    return Features(dtype, head_dim, causal, lse, vec, group, group, **values)


def choices(variant: Variant) -> list[tuple[int, str, bool, bool]]:
    """Head sizes, dtypes and switches in an order in which neighbours differ in all of them."""
    count = len(HEAD_DIMS) * len(variant.dtypes) * 4
    flags = list(itertools.product((False, True), repeat=2))
    return [
        (
            HEAD_DIMS[i % len(HEAD_DIMS)],
            variant.dtypes[(i + i // len(HEAD_DIMS)) % len(variant.dtypes)],
            *flags[(i + i // len(HEAD_DIMS)) % 4],
        )
        for i in range(count)
    ]


def architectures(form: str) -> tuple[str, ...]:
    return ("sm_90a",) if form.startswith("sm90") else compiler_architectures.ARCHITECTURES


def taken(variant: Variant, form: str, head_dim: int) -> int:
    """Return `head_dim`, or the largest that a Hopper form takes, or another where it takes none
    that is no multiple of 4."""
    if form == "sm90_pv8_by_tile" and head_dim % 4:
        return 40
    return min(head_dim, variant.largest_head_dim(form))


def rotated() -> list[tuple[str, str, str, int, str, bool, bool]]:
    cells = []
    for name, variant in VARIANTS.items():
        picks = itertools.cycle(choices(variant))
        for form in variant.forms:
            for arch in architectures(form):
                for head_dim, *rest in itertools.islice(picks, 2):
                    cells.append((name, form, arch, taken(variant, form, head_dim), *rest))
    return cells


def oldest(arch: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a compilation: on the oldest and on Hopper it is not slow."""
    return [] if arch in (NO_SPILLS[0], "sm_90a") else [pytest.mark.slow]


def build(
    name: str, form: str, arch: str, head_dim: int, dtype: str, causal: bool, lse: bool
) -> tuple[kc.ModuleSpec, kc.Binary]:
    if arch not in target.supported_architectures():
        version = ".".join(map(str, nvrtc.load().version))
        pytest.skip(f"NVRTC {version} does not know {arch}")
    variant = VARIANTS[name]
    features = features_of(variant, form, dtype, head_dim, causal, lse)
    tiles = variant.tiles_for(head_dim, form=form)
    spec = kernel_form_module.module_spec(variant, features, tiles, form)
    return spec, kc.build(spec, arch)


@pytest.mark.parametrize(
    ("name", "form", "arch", "head_dim", "dtype", "causal", "lse"),
    [
        pytest.param(*cell, marks=pytest.mark.slow if number % 6 else oldest(cell[2]))
        for number, cell in enumerate(rotated())
    ],
)
def test_compiles(
    name: str, form: str, arch: str, head_dim: int, dtype: str, causal: bool, lse: bool
) -> None:
    spec, binary = build(name, form, arch, head_dim, dtype, causal, lse)
    assert any(entry.startswith(VARIANTS[name].entry_point) for entry in binary.kernels)
    if not form.startswith("sm90"):
        static = max(taken.static_smem for taken in binary.kernels.values())
        devices.check_shared_memory(binary.smem_bytes + static, SMALLEST_LIMIT, str(spec))


def by_default() -> Iterator[Any]:
    """Yield the kernels that are checked for spills: at head_dim 128 every type and architecture.

    Types and architectures differ little in registers: of the other head sizes float16, on the
    oldest and on Hopper. A causal mask takes registers: calls without one are compiled at 128 in
    float16 on the oldest alone, and of the Hopper forms. At once is float16 there with the mask.
    """
    for name, variant in VARIANTS.items():
        for form in variant.forms:
            archs = ("sm_90a",) if form.startswith("sm90") else NO_SPILLS
            head_dims = [x for x in (64, 128, 256) if x <= variant.largest_head_dim(form)]
            for dtype, arch, head_dim in itertools.product(variant.dtypes, archs, head_dims):
                first = dtype == "float16" and arch != "sm_89"
                if head_dim == 128 and (dtype == "float16" or arch == archs[0]) or first:
                    at_once = dtype == "float16" and arch == archs[0] and head_dim == 128
                    for causal in (False, True) if at_once else (True,):
                        marks = [] if at_once and causal else [pytest.mark.slow]
                        yield pytest.param(name, form, dtype, arch, head_dim, causal, marks=marks)


@pytest.mark.parametrize(
    ("name", "form", "dtype", "arch", "head_dim", "causal"),
    [
        pytest.param(*cell.values, marks=[*cell.marks, *([pytest.mark.slow] if number % 3 else [])])
        for number, cell in enumerate(by_default())
    ],
)
def test_default_tiles_spill_nothing(
    name: str, form: str, dtype: str, arch: str, head_dim: int, causal: bool
) -> None:
    spec, binary = build(name, form, arch, head_dim, dtype, causal, lse=True)
    for entry, taken in binary.kernels.items():
        spilled = max(taken.spill_stores, taken.spill_loads)
        allowed = SPILLED.get((rung_of(name, form), dtype, head_dim), 0)
        assert spilled <= allowed, f"{entry} for {arch} takes {taken}: {spec}"


#: Cases of `test_own_lengths_spill_nothing` that compile at once: packed sequences, and a mask.
AT_ONCE = ("varlen", True)
#: Forms of which all packed sequences are left to the slow tests.
SELDOM = {
    ("unfused", "portable"), ("fa", "portable"), ("fa_warps", "portable"),
    ("fa_int8", "portable"), ("fa_int8", "sm90"), ("fa_int8", "pv8"), ("fa_int8", "pv8_whole"),
    ("fa_int8", "v8"), ("fa_int8", "sm90_fp8"), ("fa_int8", "sm90_pv8_by_tile"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "form", "head_dim", "how", "causal"),
    [
        pytest.param(
            *cell, how, causal,
            marks=[] if cell[2] == 128 and cell[:2] not in SELDOM and (how, causal) == AT_ONCE
            else [pytest.mark.slow],
        )
        for cell in (
            *((name, "portable", head_dim) for name in VARIANTS for head_dim in (64, 128, 256)),
            *(
                (name, form, head_dim)
                for name, variant in VARIANTS.items()
                for form, row in variant.forms.items()
                if row.on_hopper
                for head_dim in row.tiles.default
            ),
            *(
                ("fa_int8", form, head_dim)
                for form in ("pv8", "pv8_whole", "v8")
                for head_dim in (64, 128)
            ),
        )
        for how, causal in (AT_ONCE, ("padded", True), *([("varlen", False)] * (cell[2] == 128)))
    ],
)  # fmt: skip
def test_own_lengths_spill_nothing(
    name: str, form: str, head_dim: int, how: str, causal: bool
) -> None:
    """Lengths and first rows of an entry take registers, where others have constants.

    So does a causal mask: without one they are compiled at 128 alone.
    """
    variant = VARIANTS[name]
    plain = features_of(variant, form, "float16", head_dim, causal, lse=True)
    features = replace(plain, **{how: True})
    tiles = variant.tiles_for(head_dim, form=form)
    spec = kernel_form_module.module_spec(variant, features, tiles, form)
    arch = "sm_90a" if form.startswith("sm90") else "sm_80"
    for entry, taken in kc.build(spec, arch).kernels.items():
        spilled = max(taken.spill_stores, taken.spill_loads)
        known = SPILLED_PADDED if how == "padded" else SPILLED_PACKED
        allowed = known.get((rung_of(name, form), head_dim), 0)
        assert spilled <= allowed, f"{entry} takes {taken}: {spec}"


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("form", "head_dim"),
    [
        (form, head_dim)
        for form in ("sm90", "sm90_pv8", "sm90_pv8_by_tile", "sm90_fp8")
        for head_dim in (64, 80, 128, 256)
        if head_dim <= VARIANTS["fa_int8"].largest_head_dim(form)
    ],
)
def test_fine_scales_spill_nothing(form: str, head_dim: int, causal: bool) -> None:
    """Those of 16 keys, as `QuantConfig` has them if it is not told, in the widest tiles too.

    Each two of mask, lse and neither meet.
    """
    variant = VARIANTS["fa_int8"]
    others = variant.forms[form].tiles.other.get(head_dim, ())[:1]
    for lse, tiles in itertools.product(
        (False, True) if causal else (True,), (variant.tiles_for(head_dim, form=form), *others)
    ):
        features = features_of(variant, form, "float16", head_dim, causal, lse)
        fine = replace(features, group_q=2, group_kv=16)
        spec = kernel_form_module.module_spec(variant, fine, tiles, form)
        for entry, taken in kc.build(spec, "sm_90a").kernels.items():
            allowed = SPILLED_FINE.get((rung_of("fa_int8", form), head_dim), 0)
            assert taken.stack <= allowed, f"{entry} takes {taken}: {spec}"


def check_no_spills(variant: Variant, form: str, features: Features, tiles: Tiles) -> None:
    spec = kernel_form_module.module_spec(variant, features, tiles, form)
    (taken,) = kc.build(spec, "sm_90a").kernels.values()
    assert (taken.spill_stores, taken.spill_loads) == (0, 0), f"{taken}: {spec}"


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_steps_of_fewer_keys_spill_nothing(causal: bool) -> None:
    """These steps replace wide steps for lengths that would leave them empty."""
    variant, form = VARIANTS["fa_int8"], "sm90_pv8"
    for head_dim in variant.forms[form].tiles.other:
        features = features_of(variant, form, "float16", head_dim, causal, lse=True)
        tiles = variant.default_tiles(head_dim, form)
        assert tiles != variant.tiles_for(head_dim, form=form)
        check_no_spills(variant, form, features, tiles)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "head_dim"),
    [
        (form, head_dim)
        for form in ("sm90_fp8", "sm90_pv8_by_tile")
        for head_dim in VARIANTS["fa_int8"].forms[form].tiles.default
    ],
)
def test_the_finest_scales_spill_nothing_beside_two_levels_of_sums(
    form: str, head_dim: int
) -> None:
    """Each of them takes two registers, and none is left over."""
    variant = VARIANTS["fa_int8"]
    features = features_of(variant, form, "float16", head_dim, causal=True, lse=True)
    features = replace(features, group_kv=HOPPER_SCALE_KEYS)
    tiles = variant.tiles_for(head_dim, form=form)
    check_no_spills(variant, form, features, tiles)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("fa_tc", "sm90"), ("fa_int8", "sm90"),
        pytest.param("fa_int8", "sm90_pv8", marks=pytest.mark.slow),
        pytest.param("fa_int8", "sm90_pv8_by_tile", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize("block_kv", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [*LATE, 128])
def test_block_masks_spill_nothing_in_the_hopper_forms(
    head_dim: int, block_kv: int, name: str, form: str
) -> None:
    """The thread that copies has few registers, and searches a list."""
    variant, blocks = VARIANTS[name], (128, block_kv)
    plain = features_of(variant, form, "float16", head_dim, causal=True, lse=True)
    features = replace(plain, window=True, block_mask=blocks)
    tiles = variant.tiles_for(head_dim, form=form, block_mask=blocks)
    check_no_spills(variant, form, features, tiles)


def test_rotation_meets_every_choice() -> None:
    """Each variant is compiled for each architecture, head size, dtype, mask and lse."""
    for name, variant in VARIANTS.items():
        met = [set(column) for column in zip(*(c for c in rotated() if c[0] == name), strict=True)]
        assert met[3] == set(HEAD_DIMS) and met[4] == set(variant.dtypes)
        assert met[5] == met[6] == {False, True}
        assert set(compiler_architectures.ARCHITECTURES) <= met[2]
