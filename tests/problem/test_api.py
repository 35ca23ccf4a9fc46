"""`attention` and `explain` on NumPy arrays: arguments, results, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyattn import attention, attention_varlen, explain, plan, register, unfused
from cupyattn.bounds import kernel, quantised
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.kernels.features import Features
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.form import module_spec
from cupyattn.quant import QuantConfig, quantize
from cupyattn.reference import exact as reference
from tests.support.foreign import Foreign, ForeignWithNamespace
from tests.support.own_kernels import renamed

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
CELLS = [(name, dtype) for name, variant in VARIANTS.items() for dtype in variant.dtypes]


def normal(
    q: tuple[int, ...] = (2, 4, 9, 16),
    kv: tuple[int, ...] = (2, 2, 13, 16),
    dtype: str = "float16",
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=shape).astype(DTYPES[dtype]) for shape in (q, kv, kv))


def assert_bits_equal(left: np.ndarray, right: np.ndarray) -> None:
    assert left.dtype == right.dtype and left.shape == right.shape
    assert left.tobytes() == right.tobytes()


# ---- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "dtype"), CELLS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_rung_computes_attention(variant: str, dtype: str, causal: bool) -> None:
    q, k, v = normal(dtype=dtype)
    o, lse = attention(q, k, v, variant=variant, causal=causal, return_lse=True)
    assert o.dtype == q.dtype and o.shape == q.shape
    assert lse.dtype == np.float32 and lse.shape == q.shape[:3]
    exact, exact_lse = reference.attention_exact(q, k, v, causal=causal, return_lse=True)
    if variant == "fa_int8":
        codes = quantize(q, k, v)
        bound = kernel.attention(None, None, None, variant=variant, causal=causal, quantized=codes)
        cost = quantised.quantisation(q, k, v, codes, causal=causal)
        limit, lse_limit = bound.total + cost.total, bound.lse + cost.lse
    else:
        bound = kernel.attention(q, k, v, variant=variant, causal=causal)
        limit, lse_limit = bound.total, bound.lse
    assert (np.abs(o.astype(np.float64) - exact) <= limit).all()
    assert (np.abs(lse.astype(np.float64) - exact_lse) <= lse_limit).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_are_not_modified(variant: str) -> None:
    inputs = normal()
    before = [x.copy() for x in inputs]
    for x in inputs:
        x.setflags(write=False)
    attention(*inputs, variant=variant, causal=True, return_lse=True)
    for x, y in zip(inputs, before, strict=True):
        assert_bits_equal(x, y)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layout_bshd_is_the_same_numbers_elsewhere(variant: str) -> None:
    inputs = normal()
    o, lse = attention(*inputs, variant=variant, return_lse=True)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in inputs]
    o_turned, lse_turned = attention(*turned, variant=variant, layout="BSHD", return_lse=True)
    assert o_turned.shape == (2, 9, 4, 16)
    assert_bits_equal(np.ascontiguousarray(o_turned.swapaxes(1, 2)), o)
    assert_bits_equal(lse_turned, lse)  # (batch, heads, len_q) in either layout


def test_strides_are_taken_as_they_are() -> None:
    q, k, v = normal()
    wide = np.full((2, 4, 20, 40), np.nan, np.float16)
    view = wide[:, ::-1, 1:19:2, 5:21]
    view[...] = q
    assert_bits_equal(attention(view, k, v), attention(q, k, v))
    last_axis = np.ascontiguousarray(k.swapaxes(2, 3)).swapaxes(2, 3)
    assert last_axis.strides[-1] != 2
    assert_bits_equal(attention(q, last_axis, v), attention(q, k, v))
    shared = np.broadcast_to(k[:, :1], k.shape)
    assert_bits_equal(attention(q, shared, v), attention(q, shared.copy(), v))


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_out_receives_the_result_and_is_returned(layout: str) -> None:
    inputs = normal()
    if layout == "BSHD":
        inputs = tuple(x.swapaxes(1, 2) for x in inputs)
    out = np.full_like(inputs[0], np.nan)
    returned = attention(*inputs, layout=layout, out=out)
    assert returned is out
    assert_bits_equal(out, attention(*inputs, layout=layout))


def test_out_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    q, k, v = normal()
    before = q.copy()
    with pytest.raises(ValueError, match="out must not share memory with q"):
        attention(q, k, v, out=q)
    assert_bits_equal(q, before)
    with pytest.raises(ValueError, match=r"out must have shape \(2, 4, 9, 16\)"):
        attention(q, k, v, out=np.empty((2, 9, 4, 16), np.float16))
    with pytest.raises(TypeError, match="out must be a NumPy or CuPy array"):
        attention(q, k, v, out=q.tolist())


def test_empty_results_and_empty_rows() -> None:
    q, k, v = normal()
    for empty in ((q[:0], k[:0], v[:0]), (q[:, :, :0], k, v)):
        o, lse = attention(*empty, return_lse=True)
        assert o.shape == empty[0].shape and lse.shape == empty[0].shape[:3]
    for variant in VARIANTS:
        o, lse = attention(q, k[:, :, :0], v[:, :, :0], variant=variant, return_lse=True)
        assert (o == 0).all() and (lse == -np.inf).all()
        o, lse = attention(
            q, k[:, :, :4], v[:, :, :4], variant=variant, causal=True, return_lse=True
        )
        assert (o[:, :, :5] == 0).all() and (lse[:, :, :5] == -np.inf).all()
        assert (o[:, :, 5] == v[:, [0, 0, 1, 1], 0]).all()  # one key: o is its value, to the bit


def test_alignment_is_bottom_right_unless_told() -> None:
    q, k, v = normal()
    rectangular = attention(q, k, v, causal=True)
    by_hand = reference.attention_exact(q, k, v, causal=True, causal_align="bottom-right")
    assert np.abs(rectangular - by_hand).max() < 1e-2
    top_left = attention(q, k, v, causal=True, causal_align="top-left")
    assert (top_left[:, :, 0] == v[:, [0, 0, 1, 1], 0]).all()


# ---- which rung ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_auto_keeps_to_the_accuracy_class(dtype: str) -> None:
    inputs = normal(dtype=dtype)
    full = explain(*inputs).splitlines()[0]
    assert f": the fastest rung of accuracy class 'full' for {dtype}, by rule: no times" in full
    rung = VARIANTS[full.partition(":")[0]]
    assert rung.family != "int8" and dtype in rung.dtypes
    assert_bits_equal(attention(*inputs), attention(*inputs, variant=rung.name))
    assert explain(*inputs, accuracy="balanced").startswith("fa_int8: the fastest rung")


@pytest.mark.parametrize("call", [attention, explain, plan, attention_varlen])
def test_arguments_that_do_not_exist_are_named(call: Any) -> None:
    q, k, v = normal()
    message = rf"^{call.__name__}\(\) got an unexpected keyword argument 'casual'"
    with pytest.raises(TypeError, match=message):
        call(q, k, v, casual=True)


@pytest.mark.parametrize("call", [attention, explain, plan, attention_varlen])
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dropout", "leave it out"), ("dropout_p", "scaled_dot_product_attention"),
        ("block_table", "attention_varlen"), ("page_table", "gather"),
    ],
)  # fmt: skip
def test_what_other_libraries_have_says_what_to_do_instead(
    call: Any, name: str, instead: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name} is not supported: .*{instead}"):
        call(*normal(), **{name: 0.1})


@pytest.mark.parametrize("variant", ["fa", "fa_tc", "fa_int8"])
def test_devices_before_compute_capability_8_are_refused(variant: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^compute capability 7\.5 is not supported, 8\.0"):
        attention(*normal(), variant=variant, arch="sm_75", backend="interpret")


def test_a_rung_asked_for_by_name_is_never_replaced() -> None:
    inputs = normal()
    for variant in VARIANTS:
        text = explain(*inputs, variant=variant)
        assert text.startswith(f"{variant}: asked for by name\n")
        assert f"attn_{variant}" in text
    with pytest.raises(UnsupportedError, match="fa_tc takes float16, bfloat16, got float32"):
        attention(*normal(dtype="float32"), variant="fa_tc")


def test_explain_says_form_tiles_launches_and_workspace() -> None:
    text = explain(*normal(), variant="unfused", tiles=Tiles(32, 16, 2), causal=True)
    for piece in (
        "runs in NumPy, with the blocks and the rounding of these launches",
        "\nunfused (portable)\n  tiles     block_q=32, block_kv=16, num_warps=2, num_stages=1\n",
        "causal=True",
        "attn_unfused_scores<<<8, 64>>> of attn_unfused.cu",
        f"workspace {4 * 2 * 4 * 9 * 13:,} bytes",
    ):
        assert piece in text
    with pytest.raises(TypeError, match="unexpected .*argument 'casual'"):
        explain(*normal(), casual=True)


def test_explain_says_what_codes_and_scales_take() -> None:
    q, k, v = normal((2, 4, 37, 40), (2, 2, 300, 40))
    quant = QuantConfig(pv="int8")
    text = explain(q, k, v, variant="fa_int8", quant=quant, tiles=Tiles(64, 64, 4, 2))
    for line in (
        "q_codes 2 x 4 x 37 x 48 int8, 14,208 bytes", "q_scale 2 x 4 x 19 float32, 608 bytes",
        "k_codes 2 x 2 x 300 x 48 int8, 57,600 bytes", "k_scale 2 x 2 x 19 float32, 304 bytes",
        "v_codes 2 x 2 x 40 x 384 int8, 61,440 bytes",
        "v_scale 2 x 2 x 5 x 40 float32, 3,200 bytes", "k_mean 2 x 2 x 40 float32, 640 bytes",
    ):  # fmt: skip
        assert f"\n{line}\n" in text
    prepared = plan(q, k, v, variant="fa_int8", quant=quant, tiles=Tiles(64, 64, 4, 2))
    stated = (*re.findall(r"([\d,]+) bytes", text),)
    assert prepared.workspace_bytes == sum(int(x.replace(",", "")) for x in stated)


def test_tiles_change_the_blocks_and_hardly_the_result() -> None:
    inputs = normal((1, 2, 40, 32), (1, 2, 300, 32))
    small = attention(*inputs, variant="fa_tc", tiles=Tiles(16, 16, 1, 2))
    large = attention(*inputs, variant="fa_tc", tiles=Tiles(64, 128, 4, 2))
    assert 0 < np.abs(small.astype(np.float64) - large).max() < 1e-2


# ---- quantised operands --------------------------------------------------------------------------


def test_fa_int8_is_quantising_and_then_attention() -> None:
    inputs = normal()
    config = QuantConfig(granularity_q="token", granularity_k="head", smooth_k=False)
    for quant in (None, config):
        two_steps = attention(quantize(*inputs, quant=quant), causal=True)
        one_step = attention(*inputs, variant="fa_int8", quant=quant, causal=True)
        assert_bits_equal(one_step, two_steps)
    assert explain(quantize(*inputs)).startswith("fa_int8: the rung for quantised operands")


def test_quantised_operands_come_alone() -> None:
    inputs = normal()
    operands = quantize(*inputs)
    with pytest.raises(ValueError, match="give no k, v or quant beside it"):
        attention(operands, inputs[1], inputs[2])
    with pytest.raises(ValueError, match="give no k, v or quant beside it"):
        attention(operands, quant=QuantConfig())
    with pytest.raises(ValueError, match="runs on fa_int8, got variant='fa_tc'"):
        attention(operands, variant="fa_tc")
    with pytest.raises(ValueError, match="has layout 'BHSD', got layout='BSHD'"):
        attention(operands, layout="BSHD")
    with pytest.raises(ValueError, match="quant is for fa_int8, got variant 'fa_tc'"):
        attention(*inputs, quant=QuantConfig(), variant="fa_tc")


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"variant": "flash"}, ValueError, "variant must be one of unfused, .*, auto, got 'flash'"),
        ({"variant": ["fa"]}, ValueError, "variant must be one of unfused, .*, auto, got .'fa'"),
        ({"accuracy": "high"}, ValueError, "accuracy must be .*, got 'high'"),
        ({"layout": "SBHD"}, ValueError, "layout must be 'BHSD' or 'BSHD', got 'SBHD'"),
        ({"causal_align": "top"}, ValueError, "causal_align must be .*, got 'top'"),
        ({"scale": -0.5}, ValueError, "scale must be positive and finite, got -0.5"),
        ({"backend": "triton"}, ValueError, "backend must be .*, got 'triton'"),
        ({"backend": "cuda"}, ValueError, "backend='cuda' takes CuPy arrays, got NumPy arrays"),
        ({"block_mask": object()}, TypeError, "block_mask must be a cupyattn.BlockMask or None"),
    ],
)
def test_options_that_cannot_be(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    for call in (attention, explain):
        with pytest.raises(error, match=sentence):
            call(*normal(), **options)


def test_explain_shows_which_size_is_taken_for_what() -> None:
    q, ends = np.zeros((2, 6, 24, 8), np.float16), np.int32([0, 3, 24])
    sizes = "sizes: batch=2, heads=6, heads_kv=3, len_q=24, len_kv=24, head_dim=8"
    assert sizes in explain(q, q[:, :3], q[:, :3]).splitlines()
    assert "heads=24, heads_kv=24, len_q=6, len_kv=6" in explain(q, q, q, layout="BSHD")
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    said = explain(*[q[0].swapaxes(0, 1)] * 3, **packed)
    assert "len_q=21, len_kv=21, head_dim=8, the lengths of the longest sequences" in said


def test_the_environment_chooses_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums run in the kernel's order, the mirror's in NumPy's: the last bits differ."""
    q, k, v = normal()
    asked = attention(q, k, v, variant="fa", backend="interpret")
    assert explain(q, k, v, backend="interpret").splitlines()[1].startswith("runs these launches")
    monkeypatch.setenv("CUPYATTN_INTERPRET", "1")
    chosen = attention(q, k, v, variant="fa")
    np.testing.assert_array_equal(chosen, asked)
    assert explain(q, k, v).splitlines()[1].startswith("runs these launches in the interpreter")
    assert explain(q, k, v, backend="mirror").splitlines()[1].startswith("runs in NumPy")


def test_the_pieces_of_the_unfused_rung_run_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = normal()
    whole = attention(q, k, v, variant="unfused", causal=True, backend="interpret")
    monkeypatch.setenv("CUPYATTN_INTERPRET", "1")
    P, lse = unfused.softmax(unfused.scores(q, k, causal=True), return_lse=True)
    np.testing.assert_array_equal(unfused.weighted_sum(P, v), whole)
    assert np.isfinite(lse).all()


def test_arrays_that_do_not_fit_are_named() -> None:
    q, k, v = normal()
    sentence = (
        "k and v must agree on length, got q.shape=(2, 4, 9, 16) k.shape=(2, 2, 13, 16) v.shape="
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        attention(q, k, v[:, :, :12])
    with pytest.raises(TypeError, match=r"v\.dtype=float32"):
        attention(q, k, v.astype(np.float32))
    with pytest.raises(
        TypeError, match="k must be a NumPy or CuPy array, or have __dlpack__, got list"
    ):
        attention(q, k.tolist(), v)
    with pytest.raises(TypeError, match="k must be a NumPy or CuPy array"):
        attention(q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_check_finite_names_the_array(name: str, dtype: str) -> None:
    arrays = dict(zip("qkv", normal(dtype=dtype), strict=True))
    attention(**arrays, check_finite=True)
    arrays[name][0, 0, 0, 0] = np.inf
    with pytest.raises(ValueError, match=f"{name} holds a NaN or an infinity"):
        attention(**arrays, check_finite=True)


# ---- arrays of other libraries -------------------------------------------------------------------


def test_arrays_of_another_library_come_back_as_they_went_in() -> None:
    inputs = normal()
    expected, expected_lse = attention(*inputs, return_lse=True)
    o, lse = attention(*map(ForeignWithNamespace, inputs), return_lse=True)
    assert type(o) is type(lse) is ForeignWithNamespace
    assert_bits_equal(o.array, expected)
    assert_bits_equal(lse.array, expected_lse)


def test_out_may_be_of_another_library() -> None:
    inputs = normal()
    out = ForeignWithNamespace(np.zeros_like(inputs[0]))
    assert attention(*inputs, out=out) is out
    assert_bits_equal(out.array, attention(*inputs))


def test_arrays_of_a_nameless_library_come_back_as_numpy() -> None:
    inputs = normal()
    o = attention(*map(Foreign, inputs))
    assert isinstance(o, np.ndarray)
    assert_bits_equal(o, attention(*inputs))


# ---- a rung of one's own -------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ladder.Variant:
    """attn_fa_warps.cu, copied and renamed in a user's own folder, registered in one call."""
    monkeypatch.setattr(ladder, "VARIANTS", ladder.VARIANTS)
    variant = replace(VARIANTS["fa_warps"], name="mine", idea="my own")
    yield register(variant, renamed(tmp_path, of="fa_warps"))
    del VARIANTS["mine"]


def test_a_registered_rung_is_a_rung(mine: ladder.Variant) -> None:
    inputs = normal()
    features = Features("float16", 16, lse=True, vec=8)
    binary = kc.build(module_spec(mine, features, mine.default_tiles(16)), "sm_80")
    assert list(binary.kernels) == ["attn_mine"]
    assert explain(*inputs, variant="mine").startswith("mine: asked for by name")
    for backend in ("mirror", "interpret"):
        assert_bits_equal(
            attention(*inputs, variant="mine", backend=backend),
            attention(*inputs, variant="fa_warps", backend=backend),
        )


def test_a_name_is_registered_once_and_from_a_file(mine: ladder.Variant, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mine' is already registered"):
        register(mine, tmp_path / "attn_mine.cu")
    with pytest.raises(ValueError, match=r"must be an existing \.cu file, got .*attn_other\.cu"):
        register(replace(mine, name="other"), tmp_path / "attn_other.cu")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"tiles": (64, 64)}, "tiles must be a cupyattn.Tiles or None, got (64, 64)"),
        ({"quant": "token", "variant": "fa_int8"}, "quant must be a cupyattn.QuantConfig or None"),
        ({"causal": np.ones((4, 4))}, "causal must be True or False, got an array of shape"),
        ({"scale": "0.5"}, "scale must be a number or None, got '0.5'"),
    ],
)
def test_options_of_another_kind(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(TypeError, match=re.escape(wanted)):
        attention(*normal(), **options)


@pytest.mark.frameworks
def test_a_type_that_numpy_cannot_take_over_is_one_sentence() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(1, 1, 4, 16).to(torch.float8_e4m3fn)
    sentence = r"q on a CPU must .* got torch.float8_e4m3fn: .* ml_dtypes"
    with pytest.raises(TypeError, match=sentence):
        attention(x, x, x)
