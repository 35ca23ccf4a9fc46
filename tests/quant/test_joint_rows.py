"""Rows of two tensors that are read as their concatenation: in front of a product, and added to it.

Nothing is rounded differently, so results have the bits of the stored concatenation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn import interpret
from cupyattn.arrays.described import Described
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.bounds.norm_quant import norm_quant_error
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.ops.layers import LAYERS, LayersSettings, steps_before
from cupyattn.ops.norm_quant import NormQuantSettings
from cupyattn.ops.operation import problem_of, run
from cupyattn.plans.norm_quant import plan_norm_quant
from cupyattn.plans.structs import JOINT_ROWS_PARAMS
from cupyattn.quant import gemm_error, gemm_exact
from cupyattn.quant.row_steps import RowSteps
from cupyattn.reference.norm_quant import Vectors, norm_quant_exact
from tests.faults.fault_patches import check_found, put_a_line_in_place
from tests.quant.gemm_cases import Product, product
from tests.quant.norm_quant_cases import dequantised
from tests.quant.quant_inputs import operand, same_bytes

LAYER_NORM = RowSteps("layer", "", None, float(np.float32(1e-6)), "channel")


def rows(*shape: int, dtype: str = "float16", seed: int = 0) -> np.ndarray:
    return operand(seed, STORAGE[dtype], (*[1] * (4 - len(shape)), *shape), "wide").reshape(shape)


def parted(whole: np.ndarray, split: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return ways in which two tensors hold the rows of (..., rows, channels)."""
    first, below = whole[..., :split, :], whole[..., split:, :]
    wide = np.full((*below.shape[:-1], below.shape[-1] + 8), np.nan, whole.dtype)
    wide[..., 8:] = below
    return {
        "slices of one tensor": (first, below),
        "two tensors": (first.copy(), below.copy()),
        "rows further apart": (first.copy(), wide[..., 8:]),
    }


# ---- in front of a product -----------------------------------------------------------------------


#: Channels, type, steps, and types of vectors: each form of the kernel, and each access.
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, str]]] = {
    "modulated": (192, "bfloat16", {"norm": "layer"}, {"scale": "bfloat16", "shift": "bfloat16"}),
    "of float32": (264, "float32", {"norm": "rms"}, {"weight": "float32"}),
    "several warps": (3072, "float16", {"norm": "layer"}, {"scale": "float16"}),
    "odd width": (333, "float16", {"norm": "layer"}, {"shift": "float32"}),
    "blocks": (300, "bfloat16", {"norm": "rms", "strategy": "block"}, {}),
    "rotated": (256, "float16", {"norm": "layer", "rotate": "hadamard"}, {"scale": "float16"}),
    "a gated linear unit": (96, "float16", {"activation": "swiglu"}, {}),
}
#: Batch, rows of each entry, and how many of these lie in the first tensor.
PARTS = {
    "one": (1, 9, 4), "batch": (3, 7, 2), "as few as can be": (2, 3, 1), "none": (2, 3, 0),
    "all": (2, 3, 3), "no rows": (2, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", CASES)
def test_codes_are_of_the_concatenation(name: str, part: str) -> None:
    channels, dtype, steps, types = CASES[name]
    batch, count, split = PARTS[part]
    whole = rows(batch, count, channels * (2 if steps.get("activation") else 1), dtype=dtype)
    vectors = {
        n: rows(*((batch, 1, channels) if n in ("scale", "shift") else (channels,)), dtype=t)
        for n, t in types.items()
    }
    for first, below in parted(whole, split).values():
        before = first.tobytes(), below.tobytes()
        for backend in ("interpret", "mirror"):
            found = ca.norm_quant(first, below=below, **steps, **vectors, backend=backend)
            other = "mirror" if name != "a gated linear unit" else backend
            expected = ca.norm_quant(whole, **steps, **vectors, backend=other)
            assert same_bytes(found, expected)
        assert (first.tobytes(), below.tobytes()) == before


@pytest.mark.parametrize("rotate", [None, "hadamard"])
def test_a_team_goes_from_one_tensor_to_the_other(rotate: str | None) -> None:
    """The next row of a team is on its way in shared memory."""
    x, below = rows(2, 5, 1536), rows(2, 8, 1536, seed=1)
    how = LAYER_NORM._replace(rotate=rotate)
    plan = plan_norm_quant(
        Operand.of(x), "float16", (None,) * 4, ("", ""), how, below=Operand.of(below), steps=4
    )
    assert dict(plan.launches[0].module.defines)["CFG_NEXT_IN_SHARED"] == 1
    codes, scales = np.empty((26, 1536), np.int8), np.empty((26, 1), np.float32)
    interpret.run(plan, {"x": x, "below": below, "codes": codes, "scales": scales})
    whole = np.concatenate((x, below), axis=1).reshape(26, -1)
    expected = ca.norm_quant(whole, norm="layer", rotate=rotate)
    assert same_bytes((codes, scales), expected)


def test_two_axes_and_rows_that_are_copied() -> None:
    x, below = rows(40, 6).T, rows(5, 40, seed=1)
    found = ca.norm_quant(x, below=below, norm="rms", backend="interpret")
    assert same_bytes(found, ca.norm_quant(np.vstack((x, below)), norm="rms"))


def test_every_code_holds_its_bound() -> None:
    x, below = rows(2, 5, 384), rows(2, 3, 384, seed=1)
    codes, scales = ca.norm_quant(x, below=below, norm="layer", backend="interpret")
    whole = np.concatenate((x, below), axis=1).reshape(16, 384)
    exact = norm_quant_exact(whole, LAYER_NORM, Vectors())
    bound = norm_quant_error(whole, scales.reshape(16, 1), LAYER_NORM, Vectors())
    assert np.isfinite(bound).all()
    assert (np.abs(dequantised(codes, scales) - exact) <= bound).all()


# ---- added to a product --------------------------------------------------------------------------


#: Tiles, their architecture, strategy and type of the result: each kernel that adds a residual.
TILES = {
    "portable": (GemmTiles(32, 64, num_warps=2, num_stages=2), "sm_80", "channel", "bfloat16"),
    "portable, blocks": (GemmTiles(32, 32, 2, num_stages=2), "sm_80", "block", "float32"),
    "portable, shared": (GemmTiles(32, 32, 2, num_stages=2, splits=2), "sm_90", "block", "float16"),
    "Hopper": (GemmTiles(128, 256, 12, num_stages=2), "sm_90a", "channel", "bfloat16"),
    "Hopper, blocks": (GemmTiles(128, 256, 12, num_stages=2), "sm_90a", "block", "float16"),
}


def added(
    p: Product, parts: tuple[np.ndarray, np.ndarray], tiles: GemmTiles, arch: str
) -> np.ndarray:
    """Return the result with the residual in two tensors, which stay as they are."""
    first, below = parts
    before = first.tobytes(), below.tobytes()
    by_batch = {n: x.reshape(len(first), -1, x.shape[-1])
                for n, x in (("a", p.a), ("a_scales", p.a_scales))}  # fmt: skip
    q = p.but(**by_batch, residual=first)
    c = q.run(residual_below=below, backend="interpret", tiles=tiles, arch=arch)
    assert (first.tobytes(), below.tobytes()) == before
    return c.reshape(len(p.a), -1)


def residuals(p: Product, batch: int, split: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return parted(p.residual.reshape(batch, len(p.a) // batch, -1), split)


@pytest.mark.parametrize(("batch", "split"), [(1, 37), (2, 11), (2, 0), (2, 20), (4, 3)])
@pytest.mark.parametrize("name", TILES)
def test_a_product_is_added_to_the_concatenation(name: str, batch: int, split: int) -> None:
    """No tile divides the splits: its rows are of both tensors, and of several entries."""
    tiles, arch, strategy, dtype = TILES[name]
    m = 40 if batch < 4 else 36
    p = product(batch, (m, 64, 272), out_dtype=dtype, bias=True, strategy=strategy, gates=batch)
    for parts in residuals(p, batch, split).values():
        c = added(p, parts, tiles, arch)
        assert c.tobytes() == p.mirror(tiles.splits).tobytes()
    assert p.share_of_bound(c) <= 1


@pytest.mark.parametrize("name", TILES)
def test_odd_columns(name: str) -> None:
    tiles, arch, strategy, dtype = TILES[name]
    p = product(1, (21, 33, 200 if arch != "sm_90a" else 208), out_dtype=dtype, strategy=strategy,
                gates=0)  # fmt: skip
    for parts in residuals(p, 3, 5).values():
        assert added(p, parts, tiles, arch).tobytes() == p.mirror(tiles.splits).tobytes()


def test_the_mirror_adds_both() -> None:
    p = product(3, (12, 20, 64), out_dtype="float16", strategy="channel", gates=2)
    residual = p.residual.reshape(2, 6, 20)
    by_batch = p.but(a=p.a.reshape(2, 6, 64), a_scales=p.a_scales.reshape(2, 6, 1))
    c = by_batch.but(residual=residual[:, :2]).run(residual_below=residual[:, 2:])
    assert c.tobytes() == p.mirror().tobytes()
    off = np.abs(c.reshape(12, 20).astype(float) - gemm_exact(*p.operands, **p.after))
    assert (off <= gemm_error(*p.operands, p.out_dtype, **p.after)).all()


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(0, 9), st.integers(1, 20))
def test_any_split_has_the_bits_of_the_concatenation(seed, batch, split, more) -> None:
    x, below = rows(batch, split, 64, seed=seed), rows(batch, more, 64, seed=seed + 1)
    codes = ca.norm_quant(x, below=below, norm="layer", backend="interpret")
    assert same_bytes(codes, ca.norm_quant(np.concatenate((x, below), axis=1), norm="layer"))
    m = batch * (split + more)
    p = product(seed, (m, 16, 64), out_dtype="float16", strategy="channel", gates=batch)
    for parts in residuals(p, batch, split).values():
        assert added(p, parts, *TILES["portable"][:2]).tobytes() == p.mirror().tobytes()


# ---- both ----------------------------------------------------------------------------------------


def layers(channels: int, out: int, strategy: str = "channel") -> dict[str, Any]:
    made = ca.weight_quant(rows(out, channels, seed=5), strategy=strategy)
    return dict(zip(("b0", "b_scales0"), made, strict=True))


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_a_layer_reads_two_tensors_and_is_added_to_two(backend: str) -> None:
    x, below = rows(2, 3, 64), rows(2, 5, 64, seed=1)
    shift, gate = rows(2, 1, 64, seed=2), rows(2, 1, 64, seed=3)
    before = NormQuantSettings("layer", None, None, 1e-6, "channel", None)
    how = LayersSettings("float16", ("",), "sm_90", backend, before)
    both = {"shift": shift, "gate0": gate, **layers(64, 64)}
    parts = {"x": x, "below": below, "residual0": x, "residual_below0": below}
    whole = np.concatenate((x, below), axis=1)
    expected = run(LAYERS, how._replace(backend="mirror"), {"x": whole, "residual0": whole, **both})
    assert same_bytes(tuple(run(LAYERS, how, {**parts, **both})), tuple(expected))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_at_the_shape_of_flux_nothing_spills(arch: str) -> None:
    """And as many blocks are resident as with one tensor."""
    text, image, width = 512, 4096, 3072
    forms = {
        "x": (1, text, width), "below": (1, image, width), "scale": (1, 1, width),
        "residual0": (1, text, width), "residual_below0": (1, image, width), "gate0": (1, 1, width),
    }  # fmt: skip
    given = {n: Described.contiguous(n, s, STORAGE["bfloat16"]) for n, s in forms.items()}
    weight = {"b0": ((width, width), "int8"), "b_scales0": ((width, 1), "float32")}
    given |= {n: Described.contiguous(n, *form) for n, form in weight.items()}
    before = NormQuantSettings("layer", None, None, 1e-6, "channel", None)
    how = LayersSettings("bfloat16", ("",), arch, "interpret", before)
    plans = LAYERS.plan(problem_of(LAYERS, how, given)).plans
    assert len(plans) == 2
    for launch in (one for plan in plans for one in plan.launches):
        named = dict(launch.module.defines)
        assert named["CFG_JOINT_ROWS"] == 1 and named["CFG_VEC"] == 8
        (taken,) = kc.build(launch.module, arch).kernels.values()
        assert (taken.spill_stores, taken.spill_loads, taken.stack) == (0, 0, 0)
        blocks = named.get("CFG_BLOCKS_PER_SM", 1)
        assert blocks * launch.block * taken.registers <= 65_536


def test_rows_of_one_tensor_are_another_module() -> None:
    """Its struct and its code know nothing of a second tensor."""
    x = Operand.contiguous((1, 6, 64), 2)
    how = (None,) * 4, ("", ""), LAYER_NORM
    one = plan_norm_quant(Operand.contiguous((6, 64), 2), "float16", *how).launches[0]
    two = plan_norm_quant(x, "float16", *how, below=x).launches[0]
    assert "CFG_JOINT_ROWS" not in dict(one.module.defines)
    assert dict(two.module.defines)["CFG_JOINT_ROWS"] == 1
    ((own, _),), ((both, _),) = one.params, two.params
    assert {*both.names} - {*own.names} == {*JOINT_ROWS_PARAMS.names}


@pytest.mark.parametrize(
    ("first", "below", "vec"),
    [((64, 512), (64, 512), 8), ((68, 512), (64, 512), 4), ((64, 512), (64, 514), 2),
     ((65, 512), (64, 512), 1)],
)  # fmt: skip
def test_an_access_goes_with_both(first: Any, below: Any, vec: int) -> None:
    """Distances of rows and of batch entries limit its elements."""
    parts = [Operand((2, 4, 64), (entry, row, 1), 2, 0) for row, entry in (first, below)]
    plan = plan_norm_quant(parts[0], "float16", (None,) * 4, ("", ""), LAYER_NORM, below=parts[1])
    assert plan.features.vec == vec and plan.features.joint_rows
    assert "joint_rows" in str(plan.features)


SOURCE = "prims/io/joint_rows.cuh"
BOUNDS = "out of bounds"
#: Line of the source, its replacement, and the finding: a hazard, or "": a wrong result.
THEFTS = {
    "a row too many of the first": ("own >= p.split", "own > p.split", BOUNDS),
    "the second from its split on": ("own - p.split : own", "own : own", BOUNDS),
    "the second at the distance of the first": (
        "second ? p.below_stride : stride", "stride", BOUNDS
    ),
    "entries at the distance of the first": (
        "second ? p.below_batch_stride : p.batch_stride", "p.batch_stride", BOUNDS
    ),
    "the first alone": ("second ? p.below : first", "first", BOUNDS),
    "the first entry alone": ("entry * batch_stride", "0 * batch_stride", ""),
}  # fmt: skip


@pytest.mark.parametrize("theft", THEFTS)
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead, finding = THEFTS[theft]
    put_a_line_in_place(SOURCE, line, instead, tmp_path, monkeypatch)
    whole = rows(2, 9, 64) + np.arange(18, dtype=np.float16).reshape(2, 9, 1)
    first, below = parted(whole, 2)["rows further apart"]
    check_found(
        lambda: (
            not same_bytes(
                ca.norm_quant(first, below=below, norm="layer", backend="interpret"),
                ca.norm_quant(whole, norm="layer"),
            )
        ),
        finding,
    )
    p = product(8, (18, 64, 64), out_dtype="float16", strategy="channel", gates=2)
    parts = residuals(p, 2, 2)["rows further apart"]
    check_found(
        lambda: added(p, parts, *TILES["portable"][:2]).tobytes() != p.mirror().tobytes(), finding
    )


# ---- refusals ------------------------------------------------------------------------------------


X = rows(2, 3, 64)
P = product(0, (6, 64, 64), out_dtype="float16", strategy="channel", gates=0)
LAYER = LayersSettings("float16", ("",), None, "interpret")
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "other channels": (
        lambda: ca.norm_quant(X, below=X[..., :32]), ValueError,
        r"below must be further rows of x, .*float16 of shape \(2, '\*', 64\), got float16 of "
        r"shape \(2, 3, 32\)",
    ),
    "another batch": (lambda: ca.norm_quant(X, below=X[:1]), ValueError, "below must be further"),
    "other axes": (lambda: ca.norm_quant(X, below=X[0]), ValueError, "below must be further rows"),
    "four axes": (
        lambda: ca.norm_quant(X[None], below=X[None]), ValueError, r"\(batch, rows, channels\)"
    ),
    "another type": (
        lambda: ca.norm_quant(X, below=X.astype(np.float32)), ValueError, "got float32 of shape"
    ),
    "a modulation of x alone": (
        lambda: ca.norm_quant(X, below=X, scale=X), ValueError, "divide the 12 rows"
    ),
    "no residual": (
        lambda: P.but(residual=None).run(residual_below=P.residual), ValueError,
        "residual_below goes with residual, got residual=None",
    ),
    "too many rows": (
        lambda: P.run(residual_below=P.residual), ValueError,
        r"residual with residual_below must have shape \(6, 64\), got \(12, 64\)",
    ),
    "rows of another type": (
        lambda: P.but(residual=P.residual[:2]).run(residual_below=X[0]), ValueError,
        r"residual must have shape|residual with residual_below must have shape \(6, 64\)",
    ),
    "rows without steps": (
        lambda: run(LAYERS, LAYER, {"x": X, "below": X, **layers(64, 8)}), UnsupportedError,
        "below goes with rows that are normalised, rotated or multiplied by factors",
    ),
    "channels, too": (
        lambda: run(
            LAYERS, LAYER._replace(before=steps_before("hadamard")),
            {"x": X, "below": X, "right": X, **layers(128, 8)},
        ), UnsupportedError, "right goes with rows that are quantised as they are",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said(name: str) -> None:
    call, error, said = REFUSED[name]
    with pytest.raises(error, match=said):
        call()


def test_the_result_may_not_lie_where_the_residual_does() -> None:
    parts = P.but(residual=P.residual[:2])
    whole = P.residual.copy()
    with pytest.raises(ValueError, match="out must not share memory with residual_below"):
        parts.run(residual_below=whole[2:], out=whole)
