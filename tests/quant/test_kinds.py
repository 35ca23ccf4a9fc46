"""Functions of codes take arrays of any library and give back their kind; misuse is one line."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.testing import judge
from tests.quant.kind_cases import A_SCALES, CASES, LSE, OUT, QKV, TOLD, A, B, K, Q, V, W, X, check
from tests.support.foreign import Foreign, ForeignWithNamespace


@pytest.mark.parametrize("case", CASES)
def test_what_is_given_comes_back(case: str) -> None:
    check(case, lambda x: x, lambda x: x)
    check(case, ForeignWithNamespace, lambda x: x.array)


@pytest.mark.parametrize("case", CASES)
def test_arrays_of_a_nameless_library_come_back_as_numpy(case: str) -> None:
    arrays, call = CASES[case]
    found = call({name: Foreign(array) for name, array in arrays.items()})
    for one in found if isinstance(found, tuple) else (found,):
        assert isinstance(one, np.ndarray)


@pytest.mark.parametrize("case", TOLD)
def test_the_same_is_told_of_every_kind(case: str) -> None:
    arrays, call = TOLD[case]
    assert call({name: Foreign(array) for name, array in arrays.items()}) == call(arrays)


def test_the_kernels_make_codes_of_every_kind() -> None:
    few = [x[:, :1, :4].copy() for x in QKV.values()]
    quant = ca.QuantConfig("token", "token", smooth_k=False)
    expected = ca.quantize(*few, quant=quant)
    found = ca.quantize(*map(Foreign, few), quant=quant, backend="interpret")
    np.testing.assert_array_equal(found.q_codes, expected.q_codes)
    np.testing.assert_array_equal(found.k_codes, expected.k_codes)


def test_a_product_is_received_by_an_array_of_another_library() -> None:
    b, b_scales = ca.weight_quant(W)
    out = ForeignWithNamespace(np.zeros((3, 5), np.float32))
    assert ca.int8_gemm(A, A_SCALES, b, b_scales, "float32", out=out) is out
    np.testing.assert_array_equal(out.array, ca.int8_gemm(A, A_SCALES, b, b_scales, "float32"))


def test_bfloat16_has_no_way_back_by_dlpack() -> None:
    codes, scales = map(ForeignWithNamespace, ca.weight_quant(W))
    with pytest.raises(TypeError, match="^a bfloat16 result on a CPU has no way back by DLPack"):
        ca.weight_dequant(codes, scales, out_dtype="bfloat16")


# ---- keys and values once ------------------------------------------------------------------------


def assert_same(found: ca.QuantizedQKV, expected: ca.QuantizedQKV) -> None:
    for field in fields(found):
        left, right = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(right, np.ndarray):
            np.testing.assert_array_equal(left, right, field.name)
        elif field.name not in ("config", "as_given"):
            assert left == right, field.name


CONFIGS = {
    "default": ca.QuantConfig(), "token": ca.QuantConfig("token", "head"),
    "block": ca.QuantConfig("block", "block", pv="int8"), "fp8": ca.QuantConfig(pv="fp8"),
    "tensor": ca.QuantConfig("tensor", "tensor", symmetric=False),
    "zeros": ca.QuantConfig(pv="int8", symmetric=False), "4 bits": ca.QuantConfig(qk_bits=4),
    "fused": ca.QuantConfig(smooth_k=False, fused=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_codes_of_keys_serve_any_queries(name: str) -> None:
    """The codes equal codes of all three together, and K and V are not quantised again."""
    quant = CONFIGS[name]
    whole, kv = ca.quantize(**QKV, quant=quant), ca.quantize_kv(K, V, quant=quant)
    assert kv.len_q == 0 and kv.len_kv == 20
    assert_same(kv.with_q(Q), whole)
    other = Q[:, :, 7:8] * np.float16(2)
    few, expected = whole.with_q(other), ca.quantize(other, K, V, quant=quant)
    assert_same(few, expected)
    assert few.k_codes is whole.k_codes and few.k_scale is whole.k_scale
    np.testing.assert_array_equal(ca.attention(few), ca.attention(expected))


@pytest.mark.parametrize(
    "call",
    [
        ca.attention, ca.plan, ca.explain, ca.kernel_form,
        lambda z: ca.plan(ca.quantize(**QKV))(z),
        lambda z: judge(Q, None, None, None, variant="auto", quantized=z),
        lambda z: judge(Q, **QKV, variant="fa_int8", quantized=z),
        lambda z: ca.bounds.attention(None, None, None, variant="fa_int8", quantized=z),
        lambda z: ca.bounds.quantisation(*QKV.values(), z),
        lambda z: ca.reference.attention_mirror(z, variant="fa_int8"),
    ],
)  # fmt: skip
def test_keys_without_queries_are_refused(call: Callable[[Any], Any], tmp_path: Path) -> None:
    """Attention of no rows would be an empty array, which no caller of these has in mind."""
    kv = ca.quantize_kv(K, V)
    kv.save(tmp_path / "kv.npz")
    for z in (kv, ca.QuantizedQKV.load(tmp_path / "kv.npz"), copy.copy(kv)):
        with pytest.raises(ValueError, match=r"^this .* holds keys and values only: give it quer"):
            call(z)
    packed = packed_keys()
    with pytest.raises(ValueError, match=r"holds keys and values only: .* record\.with_q\(q\)$"):
        ca.attention_varlen(packed)
    assert ca.attention(kv.with_q(Q[:, :, :0])).shape == (1, 2, 0, 16)
    assert ca.attention(ca.quantize(Q[:, :, :0], K, V)).shape == (1, 2, 0, 16)


def test_queries_may_have_more_heads_and_positions_of_their_own() -> None:
    q = np.concatenate([Q, -Q], axis=1)
    assert_same(ca.quantize_kv(K, V).with_q(q), ca.quantize(q, K, V))
    angles = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    rope = np.cos(angles), np.sin(angles)
    last = q[:, :, 19:]
    found = ca.quantize_kv(K, V, rope=rope).with_q(last, rope=rope, rope_offset_q=19)
    assert_same(found, ca.quantize(last, K, V, rope=rope, rope_offset_q=19))
    interpreted = ca.quantize_kv(K, V).with_q(q, backend="interpret")
    np.testing.assert_array_equal(interpreted.q_codes, ca.quantize(q, K, V).q_codes)


def given(*shape: int) -> np.ndarray:
    """Scales of so many heads and groups."""
    return np.linspace(0.01, 0.05, int(np.prod(shape)), dtype=np.float32).reshape(shape)


FOUR_HEADS = np.concatenate([Q, -Q], axis=1)
STATIC = {
    "tensor": ca.QuantConfig("tensor", "tensor", scales=(0.02, 0.03)),
    "head": ca.QuantConfig("head", "head", scales=(given(1, 4, 1), given(1, 2, 1))),
    "token": ca.QuantConfig("token", "token", scales=(given(1, 4, 20), given(1, 2, 20))),
    "thread": ca.QuantConfig("thread", "tensor", pv="int8", scales=(given(1, 1, 10), 0.03)),
    "block": ca.QuantConfig("block", "token", scales=(given(1, 4, 1), given(1, 1, 20))),
}  # fmt: skip


def on_both(names: Iterable[str], sooner: str) -> list[Any]:
    """Return each name with each backend: in the interpreter all but one are slow."""
    late = [name for name in names if name != sooner]
    return [
        *((name, "mirror") for name in names), (sooner, "interpret"),
        *(pytest.param(name, "interpret", marks=pytest.mark.slow) for name in late),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "backend"), on_both(STATIC, "thread"))
def test_given_scales_wait_for_the_queries(name: str, backend: str) -> None:
    whole = ca.quantize(FOUR_HEADS, K, V, quant=STATIC[name], backend=backend)
    kv = ca.quantize_kv(K, V, quant=STATIC[name], backend=backend)
    found = kv.with_q(FOUR_HEADS, backend=backend)
    assert_same(found, whole)
    assert_same(whole.with_q(FOUR_HEADS, backend=backend), whole)
    assert found.config is STATIC[name] and found.k_codes is kv.k_codes
    np.testing.assert_array_equal(ca.attention(found), ca.attention(whole))


def test_scales_of_a_calibration_serve_keys_once() -> None:
    found = ca.calibrate_quantization_scales([(Q, K)], smooth_k=False)
    q_scale, k_scale = (scale[:, :, None] for scale in found.uniform())
    quant = ca.QuantConfig("head", "head", smooth_k=False, scales=(q_scale, k_scale))
    assert_same(ca.quantize_kv(K, V, quant=quant).with_q(Q), ca.quantize(**QKV, quant=quant))


OFFSETS, OFFSETS_Q = np.int32([0, 5, 5, 20]), np.int32([0, 7, 8, 20])
PACKED = [x[0].swapaxes(0, 1) for x in (Q, K, V)]
PACKED_CONFIGS = {name: CONFIGS[name] for name in ("default", "block", "zeros", "4 bits")} | {
    "static": ca.QuantConfig("head", "head", scales=(given(3, 2, 1), given(1, 2, 1)))
}


@pytest.mark.parametrize(("name", "backend"), on_both(PACKED_CONFIGS, "block"))
def test_codes_of_packed_keys_serve_any_packed_queries(name: str, backend: str) -> None:
    q, k, v = PACKED
    how = {"quant": PACKED_CONFIGS[name], "backend": backend}
    whole = ca.quantize(q, k, v, cu_seqlens_q=OFFSETS_Q, cu_seqlens_k=OFFSETS, **how)
    kv = ca.quantize_kv(k, v, cu_seqlens_k=OFFSETS, **how)
    found = kv.with_q(q, cu_seqlens_q=OFFSETS_Q, backend=backend)
    assert_same(found, whole)
    assert found.k_codes is kv.k_codes and found.cu_seqlens_k is kv.cu_seqlens_k
    assert_same(whole.with_q(q, backend=backend), whole)  # offsets are those before
    np.testing.assert_array_equal(ca.attention_varlen(found), ca.attention_varlen(whole))
    one_row = np.arange(4, dtype=np.int64)
    few = whole.with_q(q[:3], cu_seqlens_q=one_row, max_len_q=2, backend=backend)
    expected = ca.quantize(
        q[:3], k, v, cu_seqlens_q=one_row, cu_seqlens_k=OFFSETS, max_len_q=2, **how
    )
    assert_same(few, expected)


def test_rows_of_packed_queries_have_positions_of_their_own() -> None:
    q, k, v = PACKED
    angles = np.random.default_rng(0).normal(size=(15, 8)).astype(np.float32)
    rope = np.cos(angles), np.sin(angles)
    kv = ca.quantize_kv(k, v, cu_seqlens_k=OFFSETS, max_len_k=15, rope=rope)
    expected = ca.quantize(
        q, k, v, cu_seqlens_q=OFFSETS_Q, cu_seqlens_k=OFFSETS, max_len_k=15, rope=rope
    )
    assert_same(kv.with_q(q, cu_seqlens_q=OFFSETS_Q, rope=rope), expected)


def test_queries_need_what_the_keys_had(tmp_path: Path) -> None:
    """A record knows that its rows were turned or normalised, from a file, too."""
    angles = np.random.default_rng(3).normal(size=(20, 8)).astype(np.float32)
    given = {"rope": (np.cos(angles), np.sin(angles)), "qk_norm": (np.ones(16, np.float32),) * 2}
    for names in (("rope",), ("qk_norm",), ("rope", "qk_norm")):
        some = {name: given[name] for name in names}
        ca.quantize(Q, K, V, **some).save(tmp_path / "z.npz")
        for z in (ca.quantize_kv(K, V, **some), ca.QuantizedQKV.load(tmp_path / "z.npz")):
            for name in names:
                others = {n: x for n, x in some.items() if n != name}
                with pytest.raises(ValueError, match=f"^with_q needs {name}=, as the keys had it"):
                    z.with_q(Q, **others)
            assert_same(z.with_q(Q, **some), ca.quantize(Q, K, V, **some))


def test_a_record_from_a_pickle_takes_queries() -> None:
    """In a process that has imported nothing but the package."""
    code = (
        "import pickle, sys\nimport numpy as np\nimport cupyattn\n"
        "kv, q = pickle.load(sys.stdin.buffer)\n"
        "pickle.dump(np.asarray(kv.with_q(q).q_codes), sys.stdout.buffer)"
    )
    given = pickle.dumps((ca.quantize_kv(K, V), Q))
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True)
    assert not done.returncode, done.stderr.decode()[-600:]
    np.testing.assert_array_equal(pickle.loads(done.stdout), ca.quantize(Q, K, V).q_codes)
    assert_same(copy.copy(ca.quantize_kv(K, V)).with_q(Q), ca.quantize(Q, K, V))


def packed_keys() -> ca.QuantizedQKV:
    return ca.quantize_kv(*PACKED[1:], cu_seqlens_k=OFFSETS)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda z: z.with_q(Q[0]), ValueError, r"q must be \(batch, heads, len_q, head_dim\) = "),
        (lambda z: z.with_q(Q[:, :1]), ValueError, r"a multiple of 2, .* got shape \(1, 1, 20"),
        (lambda z: z.with_q(Q[..., :8]), ValueError, r"got shape \(1, 2, 20, 8\)"),
        (lambda z: z.with_q(Q.astype(np.float32)), TypeError, "q must be float16, .* got float32"),
        (lambda z: z.with_q([1.0]), TypeError, "q must be a NumPy or CuPy array, or have __dl"),
        (lambda z: z.with_q(Q, quant=1), TypeError, r"with_q\(\) got an unexpected .* 'quant'"),
        (
            lambda z: packed_keys().with_q(Q), ValueError,
            r"q must be \(total_q, heads, head_dim\) = \(\*, a multiple of 2, 16\) for these keys",
        ),
        (
            lambda z: packed_keys().with_q(PACKED[0]), ValueError,
            "q has 20 rows, and these codes are of 0 packed rows: give cu_seqlens_q and max_len_q",
        ),
        (
            lambda z: packed_keys().with_q(PACKED[0], cu_seqlens_q=OFFSETS[1:]), ValueError,
            "cu_seqlens_q must rise from 0 to 20",
        ),
        (
            lambda z: packed_keys().with_q(PACKED[0], cu_seqlens_q=OFFSETS[1:] * 0), ValueError,
            "cu_seqlens_q must rise from 0 to 20",
        ),
        (
            lambda z: packed_keys().with_q(PACKED[0], cu_seqlens_q=OFFSETS[::3]), ValueError,
            "cu_seqlens_q and cu_seqlens_k must be of one length",
        ),
        (
            lambda z: z.with_q(Q, cu_seqlens_q=OFFSETS_Q), TypeError,
            "cu_seqlens_q goes with packed keys, .*: leave it out, or give cu_seqlens_k to",
        ),
        (
            lambda z: ca.quantize_kv(*PACKED[1:], cu_seqlens_k=OFFSETS[:2]), ValueError,
            "cu_seqlens_k must rise from 0 to 20",
        ),
        (
            lambda z: ca.quantize_kv(K, V, max_len_k=20), TypeError,
            "max_len_q and max_len_k go with cu_seqlens_q and cu_seqlens_k",
        ),
        (
            lambda z: ca.quantize_kv(K, V, cu_seqlens_k=OFFSETS), ValueError,
            r"k and v must both be \(total_k, heads_kv, head_dim\), got k.shape=\(1, 2, 20, 16\)",
        ),
        (
            lambda z: ca.quantize_kv(K, V, quant=STATIC["token"]).with_q(Q[:, :, :3]), ValueError,
            r"the static q_scale must have shape \(1 or 1, 2 or 1, 3\) .* got \(1, 4, 20\)",
        ),
        (lambda z: ca.quantize_kv(K[0], V[0]), ValueError, r"k and v must both be \(batch, heads_"),
        (lambda z: ca.quantize_kv(K, V[:, :, :3]), ValueError, r"got k.shape=\(1, 2, 20, 16\) v."),
        (lambda z: ca.quantize_kv(K, [1]), TypeError, "v must be a NumPy or CuPy array, or have"),
        (lambda z: ca.quantize([1], K, V), TypeError, "q must be a NumPy or CuPy array, or have"),
        (lambda z: ca.act_quant([1.0]), TypeError, "x must be a NumPy or CuPy array, or have"),
        (lambda z: ca.weight_quant([1.0]), TypeError, "w must be a NumPy or CuPy array, or have"),
        (
            lambda z: ca.weight_dequant(B, [1.0]), TypeError,
            "scales must be a NumPy or CuPy array, or have",
        ),
        (
            lambda z: ca.int8_gemm(A, A_SCALES, B, None), TypeError,
            "b_scales must be a NumPy or CuPy array, or have",
        ),
        (
            lambda z: ca.Int8Linear.from_weight(W)("x"), TypeError,
            "x must be a NumPy or CuPy array, or have",
        ),
        (
            lambda z: judge("o", Q, K, V, variant="auto"), TypeError,
            "o must be a NumPy or CuPy array, or have",
        ),
    ],
)  # fmt: skip
def test_misuse_is_one_line(
    call: Callable[[Any], Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        call(ca.quantize_kv(K, V))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("face", ["cupyattn", "cupyattn.quant"])
def test_a_record_by_itself_can_quantise_queries(face: str, tmp_path: Path) -> None:
    """Its public name brings the operation along; its own module stands above that."""
    ca.quantize_kv(K, V).save(file := tmp_path / "kv.npz")
    script = (
        "import sys, numpy as np; from {} import QuantizedQKV; "
        "z = QuantizedQKV.load(sys.argv[1]); "
        "print(z.with_q(np.ones((1, 2, 3, 16), np.float16)).len_q)"
    )  # fmt: skip
    for module, status in ((face, 0), ("cupyattn.quant.quantized", 1)):
        command = [sys.executable, "-c", script.format(module), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == status, done.stderr
        assert (done.stdout, status) in (("3\n", 0), ("", 1))
    assert done.stderr.endswith(
        "RuntimeError: with_q quantises q by cupyattn.ops.quantize: import that module first\n"
    )


# ---- the rung that attention takes by itself -----------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, -1)}, {"softcap": 2.0}])
def test_judge_takes_the_rung_that_attention_takes(options: dict[str, Any]) -> None:
    o, lse = ca.attention(**QKV, return_lse=True, **options)
    report = judge(o, **QKV, lse=lse, variant="auto", **options)
    plan = ca.plan(**QKV, **options)
    assert report.passed and report.variant == plan.variant
    by_name = judge(
        o, **QKV, lse=lse, variant=plan.variant, **options,
        **ca.kernel_form(**QKV, variant="auto", **options),
    )  # fmt: skip
    assert report.held_to == by_name.held_to.replace("as given", "assumed")
    assert str(report) == str(replace(by_name, held_to=report.held_to))
    assert not judge(1.1 * o, **QKV, variant="auto", **options).passed


def test_judge_of_codes_takes_their_rung() -> None:
    z = ca.quantize(**QKV)
    report = judge(ca.attention(z), **QKV, quantized=z, variant="auto")
    assert report.variant == "fa_int8" and report.passed and report.quantisation is not None
    float32 = {name: x.astype(np.float32) for name, x in QKV.items()}
    assert judge(ca.attention(**float32), **float32, variant="auto").variant == "fa_warps"
    assert judge(OUT, **QKV, lse=LSE, variant="auto").variant == "fa_tc"
    assert judge(*[X[None, None, :, :16].astype(np.float16)] * 4, variant="auto").rows == 3
