"""The pass in front of a product: bits of the kernel, its bound, its rotation, its refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import erf

import cupyattn as ca
from cupyattn import interpret
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.bounds.norm_quant import norm_quant_error
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.architectures import shared_memory_of
from cupyattn.interpret import KernelFault
from cupyattn.kernels.limits import HOPPER_BLOCKS
from cupyattn.kernels.row_teams import MOST_CHANNELS
from cupyattn.plans.norm_quant import VECTORS, NormQuantPlan, plan_norm_quant
from cupyattn.quant import rotated
from cupyattn.quant.rotation import GROUPS, group_of
from cupyattn.reference.act_quant import quantize_rows
from cupyattn.reference.norm_quant import norm_quant_exact, norm_quant_mirror
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.norm_quant_cases import ACTIVATED, CASES, WIDE, Case, dequantised, flat_vectors
from tests.support.marks import slow_rows

REGIMES = ("normal", "outlier channel", "constant rows", "subnormal", "zeros", "wide", "huge")


def in_both(one: Case, **drawn: Any) -> tuple[Any, Any, dict[str, npt.NDArray]]:
    """Return codes and scales of the interpreter, of the mirror, and the arrays."""
    arrays = one.arrays(**drawn)
    before = {name: x.tobytes() for name, x in arrays.items()}
    found = [ca.norm_quant(**arrays, **one.options, backend=b) for b in ("interpret", "mirror")]
    assert {name: x.tobytes() for name, x in arrays.items()} == before
    return found[0], found[1], arrays


def assert_bits(found: Any, expected: Any) -> None:
    for name, mine, theirs in zip(("codes", "scales"), found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        # NOTE: a comparison of bytes inside the assert would be explained byte by byte where CI is
        # set, which takes a minute.
        same = mine.tobytes() == theirs.tobytes()
        assert same, name


def fractions(one: Case, arrays: dict[str, npt.NDArray], made: Any) -> npt.NDArray[np.float64]:
    """Return errors as fractions of their bounds; 0 where nothing is off, or anything may be."""
    x, vectors = arrays["x"].reshape(-1, arrays["x"].shape[-1]), flat_vectors(arrays)
    codes, scales = made
    exact = norm_quant_exact(x, one.settled, vectors)
    bound = norm_quant_error(x, scales.reshape(len(x), -1), one.settled, vectors)
    off = np.abs(dequantised(codes, scales) - exact)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((off == 0) | np.isinf(bound), 0, off / bound)


# ---- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_makes_the_bits_of_the_mirror(name: str) -> None:
    found, expected, _ = in_both(CASES[name])
    assert_bits(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *WIDE])
@pytest.mark.parametrize("regime", REGIMES)
def test_so_it_does_on_any_numbers(name: str, regime: str) -> None:
    found, expected, _ = in_both({**CASES, **WIDE}[name], seed=3, regime=regime)
    assert_bits(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_the_widest_rows(name: str) -> None:
    found, expected, _ = in_both(WIDE[name])
    assert_bits(found, expected)


def in_several_steps(
    one: Case, steps: int, rows: int = 9, groups: int = 3, *, pad: int = 0, shared: bool = False
) -> tuple[Any, Any]:
    """Return what teams that take so many of the rows make in the interpreter, and the mirror.

    `pad` channels lie between rows of x. `shared`: whether next rows must wait in shared memory.
    """
    one = dataclasses.replace(one, shape=(rows, one.shape[-1]), groups=groups)
    arrays = with_padding(one.arrays(), pad)
    plan = planned(one, arrays, steps)
    assert plan.steps == steps
    assert waits_in_shared(plan) or not shared
    codes, scales = np.empty(one.shape, np.int8), np.empty((rows, 1), np.float32)
    interpret.run(plan, arrays | {"codes": codes, "scales": scales})
    return (codes, scales), norm_quant_mirror(arrays["x"], one.settled, flat_vectors(arrays))


def with_padding(arrays: dict[str, npt.NDArray], pad: int) -> dict[str, npt.NDArray]:
    x = arrays["x"]
    return arrays | {"x": np.pad(x, ((0, 0), (0, pad)))[:, : x.shape[1]]}


def planned(one: Case, arrays: dict[str, npt.NDArray], steps: int) -> NormQuantPlan:
    places = {name: Operand.of(x) for name, x in arrays.items()}
    vectors = tuple(places.get(name) for name in VECTORS)
    named = dict(one.vectors)
    types = named.get("weight", ""), named.get("scale", named.get("shift", ""))
    return plan_norm_quant(places["x"], one.dtype, vectors, types, one.settled, steps=steps)


def waits_in_shared(plan: NormQuantPlan) -> bool:
    return bool(dict(plan.launches[0].module.defines)["CFG_NEXT_IN_SHARED"])


@pytest.mark.parametrize(
    "name", ["layer, modulated", "rotated, six warps", "layer, one warp", "codes alone"]
)
@pytest.mark.parametrize("steps", [2, 4])
def test_a_team_may_take_several_rows(name: str, steps: int) -> None:
    """Groups of rows begin within a team's, and some teams run past the last row."""
    assert_bits(*in_several_steps(CASES[name], steps))


@pytest.mark.parametrize(("rows", "groups"), [(12, 3), (15, 1), (9, 9), *slow_rows([(402, 6)])])
@pytest.mark.parametrize(
    "name",
    ["rotated by 256", "rotated, factors of a block", "rotated, six warps",
     "layer, modulated by token"],
)  # fmt: skip
def test_teams_of_a_block_may_share_factors(name: str, rows: int, groups: int) -> None:
    """Groups end within a turn of a block's teams, or after each row."""
    assert_bits(*in_several_steps(CASES[name], 3, rows, groups))


@pytest.mark.parametrize(
    ("name", "steps", "rows", "groups", "pad"),
    [
        ("rotated by 256", 2, 29, 1, 0), ("rotated by 256", 3, 36, 3, 0),
        ("rotated by 256", 2, 26, 1, 2), ("rotated by 128", 3, 27, 1, 0),
        ("rotated, factors of a block", 2, 32, 2, 0), ("rotated, idle lanes", 3, 19, 1, 4),
        ("rotated, one warp of three sets", 3, 20, 1, 0),
        ("rotated, one warp of three sets", 4, 16, 4, 0),
        ("rotated, idle lanes of a warp", 2, 50, 1, 0),
        ("rotated, one warp of five sets", 2, 9, 1, 0),
        ("layer, modulated by token", 2, 29, 1, 0), ("layer, modulated by token", 3, 402, 3, 4),
        ("layer, modulated by token", 2, 19, 1, 1), ("layer, four warps", 2, 12, 2, 0),
        ("rms, float32 weight", 3, 20, 1, 2),
    ],
)  # fmt: skip
def test_the_next_row_may_wait_in_shared_memory(
    name: str, steps: int, rows: int, groups: int, pad: int
) -> None:
    """Groups begin with a row that waits; last rows end in a block; accesses of 2 to 16 bytes."""
    assert_bits(*in_several_steps(CASES[name], steps, rows, groups, pad=pad, shared=True))


@pytest.mark.parametrize(
    ("rows", "channels"),
    [(4096, 3072), (4608, 3072), (118_800, 3072), (14_040, 5120), (32_760, 5120), (6144, 1792),
     (16_384, 1792), (32_760, 1536)],
)  # fmt: skip
def test_no_multiprocessor_has_many_rows_more_than_others(rows: int, channels: int) -> None:
    plan = plan_modulated(rows, channels, 1, rotate=False)
    blocks = -(-plan.launches[0].grid // HOPPER_BLOCKS)
    teams = dict(plan.launches[0].module.defines)["CFG_BLOCK_M"]
    assert blocks * plan.steps * teams <= 1.04 * rows / HOPPER_BLOCKS


def test_few_rows_have_many_blocks() -> None:
    plan = plan_modulated(16, 1024, 1, rotate=False)
    assert plan.steps == 1 and plan.launches[0].grid == 4


def plan_modulated(
    rows: int, channels: int, groups: int, *, rotate: bool, pad: int = 0, dtype: str = "bfloat16"
) -> NormQuantPlan:
    """Plan a pass over rows of which `groups` have separate factors; 0: there are no factors."""
    x = Operand.of(np.empty((rows, channels + pad), STORAGE[dtype])[:, :channels])
    vector = Operand.contiguous((groups, channels), 2) if groups else None
    types = "", "bfloat16" if groups else ""
    how = CASES["layer, modulated"].settled._replace(rotate="hadamard" if rotate else None)
    return plan_norm_quant(x, dtype, (None, None, vector, vector), types, how)


@pytest.mark.parametrize(
    ("channels", "groups", "rotate", "teams", "lanes", "own"),
    [
        (3072, 1, True, 6, 32, 0), (3072, 4608, True, 2, 32, 1), (3072, 512, True, 3, 32, 0),
        (3072, 576, True, 4, 32, 0), (1536, 512, True, 10, 16, 0), (5120, 1, True, 4, 32, 0),
        (3072, 1, False, 3, 64, 0), (3072, 4608, False, 3, 64, 1), (3072, 576, False, 4, 64, 0),
        (1536, 512, False, 9, 32, 0), (5120, 1, False, 5, 128, 0), (1024, 1, False, 4, 32, 0),
    ],
)  # fmt: skip
def test_teams_of_a_block_share_factors_if_groups_have_several_rows(
    channels: int, groups: int, rotate: bool, teams: int, lanes: int, own: int
) -> None:
    """As many teams as divide a group of nine rows with few of them idle."""
    plan = plan_modulated(4608, channels, groups, rotate=rotate)
    defines = dict(plan.launches[0].module.defines)
    assert defines["CFG_BLOCK_M"] == teams and plan.launches[0].block == teams * lanes
    assert defines["CFG_FACTORS_OF_ROW"] == own


@pytest.mark.parametrize(
    ("dtype", "rows", "channels", "groups", "pad", "shared"),
    [
        ("bfloat16", 4608, 3072, 1, 0, True), ("bfloat16", 1057, 3072, 1, 0, True),
        ("bfloat16", 1056, 3072, 1, 0, False), ("bfloat16", 4608, 3072, 1, 1, False),
        ("bfloat16", 4608, 3072, 1, 2, True), ("bfloat16", 7007, 3072, 7, 0, True),
        ("bfloat16", 4608, 3072, 4608, 0, False), ("bfloat16", 128, 5120, 1, 1, True),
        ("bfloat16", 4608, 6144, 1, 0, False), ("bfloat16", 6144, 1792, 1, 0, True),
        ("float32", 4608, 3072, 1, 0, True), ("float32", 4608, 3072, 0, 0, True),
    ],
    ids=lambda value: str(value),
)  # fmt: skip
def test_where_the_next_rotated_row_waits(
    dtype: str, rows: int, channels: int, groups: int, pad: int, *, shared: bool
) -> None:
    """In registers if no team has one and if copies have 2 bytes, unless it has too many."""
    plan = plan_modulated(rows, channels, groups, rotate=True, pad=pad, dtype=dtype)
    assert waits_in_shared(plan) == shared


def assert_blocks_fit(plan: NormQuantPlan, arch: str) -> None:
    """A thread spills no registers, and a Hopper has room for as many blocks as are planned."""
    (launch,) = plan.launches
    binary = compiler.build(launch.module, arch)
    taken = binary.kernels["norm_quant"]
    assert taken.spill_stores == 0
    blocks = dict(launch.module.defines)["CFG_BLOCKS_PER_SM"]
    assert blocks * launch.block * taken.registers <= 65_536
    assert blocks * (binary.smem_bytes + 1024) <= 227 * 1024
    assert binary.smem_bytes <= shared_memory_of(arch)


@pytest.mark.parametrize("rotate", [0, 1])
@pytest.mark.parametrize("channels", [1536, 1792, 3072, 5120])
def test_rows_of_models_stay_in_registers(channels: int, rotate: int) -> None:
    """With as many blocks as the plan counts on."""
    assert_blocks_fit(plan_modulated(4608, channels, 1, rotate=bool(rotate)), "sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize(
    ("name", "pad"),
    [
        ("rotated, one warp of three sets", 0),
        *slow_rows((
            ("rotated by 256", 0), ("rotated by 256", 2), ("rotated by 128", 0),
            ("rotated, factors of a block", 0), ("rotated, idle lanes", 4),
            ("rotated, idle lanes of a warp", 0), ("rotated, one warp of five sets", 0),
            ("layer, modulated by token", 0), ("layer, four warps", 0), ("rms, float32 weight", 0),
        )),
    ],
)  # fmt: skip
def test_rows_beside_the_next_stay_in_registers(name: str, pad: int, arch: str) -> None:
    one = dataclasses.replace(CASES[name], shape=(24, CASES[name].shape[-1]), groups=1)
    plan = planned(one, with_padding(one.arrays(), pad), 2)
    assert waits_in_shared(plan)
    assert_blocks_fit(plan, arch)


def test_strided_rows_and_vectors_are_read_where_they_lie() -> None:
    rng = np.random.default_rng(5)
    wide = rng.standard_normal((2, 6, 400)).astype(np.float16)
    x, both = wide[:, ::2, 1:265], rng.standard_normal((2, 2, 264)).astype(np.float16)
    call = {"norm": "layer", "scale": both[:, :1], "shift": both[:, 1:]}
    found = ca.norm_quant(x, **call, backend="interpret")
    copies = {name: y.copy() if name != "norm" else y for name, y in call.items()}
    assert_bits(found, ca.norm_quant(x.copy(), **copies))


def test_without_steps_it_is_act_quant() -> None:
    x = np.random.default_rng(6).standard_normal((3, 5, 300)).astype(np.float16)
    for strategy in ("block", "channel"):
        made = ca.norm_quant(x, strategy=strategy)
        assert_bits(made, ca.act_quant(x, strategy=strategy))


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("rotate", [None, "hadamard"])
def test_a_number_that_is_not_finite_poisons_its_row_alone(
    value: float, rotate: str | None, backend: str
) -> None:
    """A number whose square is not finite does the same: results are never finite but wrong."""
    x = np.random.default_rng(7).standard_normal((3, 256)).astype(np.float32)
    clean = ca.norm_quant(x, norm="rms", rotate=rotate)
    x[1, 9] = value
    codes, scales = ca.norm_quant(x, norm="rms", rotate=rotate, backend=backend)
    assert np.isnan(scales[1]) and not codes[1].any()
    assert codes[::2].tobytes() == clean[0][::2].tobytes()
    assert scales[::2].tobytes() == clean[1][::2].tobytes()


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_no_rows(backend: str) -> None:
    codes, scales = ca.norm_quant(np.zeros((0, 256), np.float16), norm="rms", backend=backend)
    assert codes.shape == (0, 256) and scales.shape == (0, 1)
    x, scale = np.zeros((0, 3, 256), np.float16), np.zeros((0, 1, 256), np.float16)
    codes, _ = ca.norm_quant(x, norm="rms", scale=scale, backend=backend)  # of each sample
    assert codes.shape == x.shape


@pytest.mark.parametrize(("shape", "rows"), [((1, 1, 64), (3, 2, 5)), ((2, 1, 64), (1, 2, 5))])
def test_a_modulation_may_leave_out_leading_axes(shape: Any, rows: Any) -> None:
    rng = np.random.default_rng(0)
    x, scale = (rng.standard_normal(s, np.float32) for s in ((*rows, 64), shape))
    found = ca.norm_quant(x, norm="layer", scale=scale)
    whole = np.broadcast_to(scale, x.shape)
    assert_bits(found, ca.norm_quant(x, norm="layer", scale=whole))


# ---- error ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, *ACTIVATED])
@pytest.mark.parametrize("regime", REGIMES)
def test_the_mirror_holds_its_bound(name: str, regime: str) -> None:
    one = {**CASES, **ACTIVATED}[name]
    arrays = one.arrays(seed=1, regime=regime)
    made = ca.norm_quant(**arrays, **one.options)
    shares = fractions(one, arrays, made)
    assert shares.max() <= 1
    if regime == "normal":
        assert shares.max() > 0.9  # half a code is most of it


@pytest.mark.parametrize("name", ACTIVATED)
def test_the_kernel_holds_its_bound_behind_an_activation(name: str) -> None:
    """A device approximates exponentials: a code in a thousand may be the next one."""
    one = ACTIVATED[name]
    found, expected, arrays = in_both(one)
    assert fractions(one, arrays, found).max() <= 1
    differ = found[0].astype(int) - expected[0]
    assert np.abs(differ).max() <= 1 and np.count_nonzero(differ) <= differ.size / 1000
    np.testing.assert_allclose(found[1], expected[1], rtol=2.0**-20)


@pytest.mark.parametrize("fault", ["no mean", "no eps", "next group", "no rotation", "codes"])
def test_a_fault_breaks_the_bound(fault: str) -> None:
    one = CASES["rotated by 256" if fault == "no rotation" else "layer, modulated"]
    arrays = one.arrays(seed=2)
    given = dict(arrays)
    options = one.options
    if fault == "no mean":
        options |= {"norm": "rms"}
    elif fault == "no eps":
        options |= {"eps": 0.01}
    elif fault == "next group":
        given["scale"] = np.roll(given["scale"], 1, axis=0)
    codes, scales = ca.norm_quant(**given, **options)
    if fault == "codes":
        codes = np.where(codes < 127, codes + np.int8(1), codes)
    elif fault == "no rotation":
        plain = norm_quant_exact(
            arrays["x"], one.settled._replace(rotate=None), flat_vectors(arrays)
        )
        codes, scales = quantize_rows(plain.astype(np.float32), 128, "channel")
    assert fractions(one, arrays, (codes, scales)).max() > 1


# ---- mistakes of the kernel ----------------------------------------------------------------------

#: A line of norm_quant.cu, what stands in its place, and the case that finds it, with its rows and
#: groups of rows unless they are nine and three.
MISTAKES: dict[str, tuple[Any, ...]] = {
    "no barrier behind the sums": (
        "    team_sync();  // the sums of all warps are visible\n", "", "rms, float32 weight",
    ),
    "no barrier behind the maxima": (
        "    team_sync();  // the maxima of all warps are visible\n", "", "rms, float32 weight",
    ),
    "no barrier before numbers change lanes": (
        "  __syncwarp();  // the numbers of all lanes of a group are visible\n", "",
        "rotated by 256",
    ),
    "maxima of two rows in one place": (
        "    const Scale scale = scale_of_absmax(team_max(absmax, smem.of_warp[step % 2][2]));",
        "    const Scale scale = scale_of_absmax(team_max(absmax, smem.of_warp[0][2]));",
        "codes alone",
    ),
    "factors of the first group": ("affine.load(p, smem, group);", "affine.load(p, smem, 0);",
                                   "layer, modulated", 12, 3),
    "rows past the last are stored": ("    if (row >= end) return;\n", "", "layer, one warp"),
    "rows of the next group are stored": (
        "end = (group + 1) * group_rows;", "end = p.rows;", "layer, modulated", 15, 3,
    ),
    "no barrier behind factors of a block": (
        "      __syncthreads();  // the factors of all runs are visible\n", "",
        "layer, modulated", 12, 3,
    ),
    "no barrier between two rows": (
        "    if (set > 0 || TEAM_WARPS == 1) __syncwarp();  // the numbers before are read\n", "",
        "rotated by 128",
    ),
    "the next row is not waited for": (
        "      cp_async_wait_group<0>();  // this thread's copies have arrived\n", "",
        "rotated by 256", 36, 1,
    ),
    "the next row is copied over the present one": (
        "    loaded.take(smem);\n",
        "    if (step + 1 < p.steps) loaded.request(p, smem, row + BLOCK_M);\n"
        "    loaded.take(smem);\n",
        "rotated by 256", 36, 1,
    ),
    "no signs of halves of runs": ("a & 1 ? -order : order", "order", "rotated by 256"),
    "no signs of runs": ("x[3][j], sign)", "x[3][j])", "rotated by 128"),
    "no signs of lanes": (", bit == 2 * WIDE && i & 4 * WIDE)", ")", "rotated by 256"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_kernel_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter finds hazards and writes past the end; the bits show the rest."""
    line, instead, case_name, *sizes = MISTAKES[name]
    put_a_line_in_place("linear/norm_quant.cu", line, instead, tmp_path, monkeypatch)
    try:
        found = in_several_steps(CASES[case_name], 3, *sizes)
    except KernelFault:
        return
    with pytest.raises(AssertionError):
        assert_bits(*found)


# ---- rotation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [64, 192, 384, 768, 1280])
def test_rotated_rows_have_the_same_products(channels: int) -> None:
    rng = np.random.default_rng(8)
    x, w = rng.standard_normal((2, 7, channels))
    np.testing.assert_allclose(rotated(x) @ rotated(w).T, x @ w.T, atol=1e-11)
    matrix = rotated(np.eye(channels))
    assert group_of(channels) == next(n for n in GROUPS if channels % n == 0)
    assert np.allclose(matrix @ matrix.T, np.eye(channels))


def test_the_mean_of_a_group_reaches_all_of_its_channels() -> None:
    """The matrix is regular for 64 and 256, where Sylvester's would gather 16 times the mean."""
    for channels in (64, 128, 256):
        spread = np.abs(rotated(np.ones((1, channels))))
        assert spread.max() <= (1 if channels != 128 else 2**0.5) + 1e-12


def product_error(x: npt.NDArray, w: npt.NDArray, rotate: bool) -> float:
    """Return the relative L2 error of a product of codes, a scale for each row of both."""
    exact = x @ w.T
    if rotate:
        w = rotated(w)
    codes, scales = ca.norm_quant(
        x.astype(np.float32), rotate="hadamard" if rotate else None, backend="mirror"
    )
    of_w = quantize_rows(w.astype(np.float32), 128, "channel")
    found = dequantised(codes, scales) @ dequantised(*of_w).T
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("seed", range(3))
def test_outlier_channels_cost_a_rotated_product_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((32, 3072)), rng.standard_normal((64, 3072))
    outliers, head, gelu = x.copy(), x.copy(), 0.5 * x * (1 + erf(x / np.sqrt(2)))
    outliers[:, rng.choice(3072, 15, replace=False)] *= 30
    head[:, 640:768] *= 10
    assert product_error(outliers, w, False) > 0.05
    assert product_error(outliers, w, True) <= 0.0135
    assert product_error(head, w, True) <= 0.014
    assert product_error(gelu, w, True) <= product_error(gelu, w, False)


# ---- refusals ------------------------------------------------------------------------------------

X, ROW = np.ones((4, 256), np.float16), np.ones(256, np.float16)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"norm": "batch"}, ValueError, "norm must be None or 'layer' or 'rms', got 'batch'"),
        ({"rotate": "haar"}, ValueError, "rotate must be None or 'hadamard', got 'haar'"),
        ({"activation": "relu"}, ValueError, "activation must be 'gelu' or"),
        ({"strategy": "row"}, ValueError, "strategy must be 'block' or 'channel'"),
        ({"norm": "rms", "eps": 0.0}, ValueError, "eps must be a number from 2\\*\\*-126"),
        ({"norm": "rms", "eps": 1e39}, ValueError, "eps must be a number .*, got 1e\\+39"),
        ({"x": X[None], "scale": X[None, :, None]}, ValueError, "scale must be .* the 4 rows"),
        ({"weight": ROW[:8]}, ValueError, r"weight must have shape \(256,\)"),
        ({"weight": ROW, "bias": ROW.astype("f4")}, TypeError, "weight and bias must have one typ"),
        ({"scale": np.ones((3, 256), "f2")}, ValueError, "scale must be .* divide the 4 rows"),
        ({"scale": np.ones((2, 256), "f2"), "shift": ROW}, ValueError, "scale and shift must have"),
        ({"shift": np.ones((4, 256), "i1")}, TypeError, "shift must be float16, bfloat16, float32"),
        ({"activation": "swiglu", "norm": "rms"}, ca.UnsupportedError, "takes rows as they are"),
        ({"rotate": "hadamard", "strategy": "block"}, ca.UnsupportedError, "strategy='channel'"),
        ({"x": X[:, :96], "rotate": "hadamard"}, ca.UnsupportedError, "multiple of 64 channels"),
        ({"x": X[:, :0]}, ValueError, "x must have channels"),
        ({"x": X.astype("i4")}, TypeError, "x must be float16, bfloat16, float32, got int32"),
        ({"x": X[:, :33], "activation": "swiglu"}, ValueError,
         "activation='swiglu' takes x with an even number of channels.*got 33: use 'silu' for x"),
        (
            {"x": np.ones((1, MOST_CHANNELS + 8), "f2"), "backend": "interpret"},
            ca.UnsupportedError, "split the rows, or use backend='mirror'",
        ),
    ],
)  # fmt: skip
def test_what_it_does_not_take(options: dict, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        ca.norm_quant(**{"x": X, **options})
