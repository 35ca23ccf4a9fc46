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
from cupyattn.arrays.operand import Operand
from cupyattn.bounds.norm_quant import norm_quant_error
from cupyattn.compiler import modules as compiler
from cupyattn.interpret import KernelFault
from cupyattn.kernels.row_teams import MOST_CHANNELS
from cupyattn.plans.norm_quant import VECTORS, plan_norm_quant
from cupyattn.quant import rotated
from cupyattn.quant.rotation import GROUPS, group_of
from cupyattn.reference.act_quant import quantize_rows
from cupyattn.reference.norm_quant import norm_quant_exact, norm_quant_mirror
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.norm_quant_cases import ACTIVATED, CASES, WIDE, Case, dequantised, flat_vectors

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


def in_several_steps(one: Case, steps: int) -> tuple[Any, Any]:
    """Return what teams that take so many of nine rows make in the interpreter, and the mirror."""
    one = dataclasses.replace(one, shape=(9, one.shape[-1]), groups=3)
    arrays, how = one.arrays(), one.settled
    places = {name: Operand.of(x) for name, x in arrays.items()}
    vectors = tuple(places.get(name) for name in VECTORS)
    named = dict(one.vectors)
    types = named.get("weight", ""), named.get("scale", named.get("shift", ""))
    plan = plan_norm_quant(places["x"], one.dtype, vectors, types, how, steps=steps)
    assert plan.steps == steps
    codes, scales = np.empty(one.shape, np.int8), np.empty((9, 1), np.float32)
    interpret.run(plan, arrays | {"codes": codes, "scales": scales})
    return (codes, scales), norm_quant_mirror(arrays["x"], how, flat_vectors(arrays))


@pytest.mark.parametrize(
    "name", ["layer, modulated", "rotated by 256", "layer, one warp", "codes alone"]
)
@pytest.mark.parametrize("steps", [2, 4])
def test_a_team_may_take_several_rows(name: str, steps: int) -> None:
    """Groups of rows begin within a team's, and some teams run past the last row."""
    assert_bits(*in_several_steps(CASES[name], steps))


def test_blocks_fill_a_device_once_before_teams_take_more_rows() -> None:
    x = Operand.contiguous((4608, 3072), 2)
    how = "bfloat16", (None,) * 4, ("", ""), CASES["layer, one warp"].settled
    plan = plan_norm_quant(x, *how)
    assert plan.steps == 6 and plan.launches[0].grid == 4608 // 6
    few = plan_norm_quant(Operand.contiguous((16, 3072), 2), *how)
    assert few.steps == 1 and few.launches[0].grid == 16


@pytest.mark.parametrize(("channels", "rotate"), [(1536, 0), (3072, 0), (5120, 0), (3072, 1)])
def test_rows_of_models_stay_in_registers(channels: int, rotate: int) -> None:
    """With as many blocks as the plan counts on; a rotated row leaves a few registers over."""
    vector = Operand.contiguous((1, channels), 2)
    how = CASES["layer, modulated"].settled._replace(rotate="hadamard" if rotate else None)
    plan = plan_norm_quant(
        Operand.contiguous((4608, channels), 2), "bfloat16", (None, None, vector, vector),
        ("", "bfloat16"), how,
    )  # fmt: skip
    (launch,) = plan.launches
    binary = compiler.build(launch.module, "sm_90a")
    taken = binary.kernels["norm_quant"]
    assert taken.spill_stores <= (32 if rotate else 0)
    blocks = dict(launch.module.defines)["CFG_BLOCKS_PER_SM"]
    assert blocks * launch.block * taken.registers <= 65_536
    assert blocks * (binary.smem_bytes + 1024) <= 227 * 1024


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

#: A line of norm_quant.cu, what stands in its place, and the case that finds it.
MISTAKES = {
    "no barrier behind the sums": (
        "    __syncthreads();  // the sums of all warps are visible\n", "", "rotated by 256",
    ),
    "no barrier behind the maxima": (
        "    __syncthreads();  // the maxima of all warps are visible\n", "", "rotated by 256",
    ),
    "no barrier behind the runs": (
        "  team_sync();  // the runs of all lanes are visible\n", "", "rotated by 256",
    ),
    "maxima of two rows in one place": (
        "    const Scale scale = scale_of_absmax(team_max(absmax, smem.of_warp[step % 2][2]));",
        "    const Scale scale = scale_of_absmax(team_max(absmax, smem.of_warp[0][2]));",
        "codes alone",
    ),
    "factors of the first group": ("    if (row < end) return;", "    if (end) return;",
                                   "layer, modulated"),
    "rows past the last are stored": ("    if (row >= p.rows) return;\n", "", "layer, one warp"),
    "signs of the wrong half": ("half[j / 4]", "half[0]", "rotated by 256"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_kernel_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter finds hazards and writes past the end; the bits show the rest."""
    line, instead, case_name = MISTAKES[name]
    put_a_line_in_place("linear/norm_quant.cu", line, instead, tmp_path, monkeypatch)
    try:
        found = in_several_steps(CASES[case_name], 3)
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
        ({"norm": "rms", "eps": 0.0}, ValueError, "eps must be a finite number from 2\\*\\*-126"),
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
        (
            {"x": np.ones((1, MOST_CHANNELS + 8), "f2"), "backend": "interpret"},
            ca.UnsupportedError, "split the rows, or use backend='mirror'",
        ),
    ],
)  # fmt: skip
def test_what_it_does_not_take(options: dict, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        ca.norm_quant(**{"x": X, **options})
