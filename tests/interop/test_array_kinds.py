"""One behaviour for arrays of every library: what goes in comes back, what cannot is one line."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn as ca
from cupyattn.problem.borrowed_names import NOT_OFFERED
from cupyattn.testing.report import UNKNOWN_ORIGIN
from tests.quant.kind_cases import CASES, TOLD, check

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from cupyattn.interop import jax as of_jax  # noqa: E402 - imports jax
from cupyattn.interop import torch as of_torch  # noqa: E402 - imports torch

X = np.random.default_rng(0).normal(size=(1, 1, 4, 8)).astype(np.float16)
T = torch.from_numpy(X)
ENTRIES: dict[str, Callable[..., Any]] = {
    "torch.attention": lambda **o: of_torch.attention(T, T, T, **o),
    "torch.attention_varlen": lambda **o: of_torch.attention_varlen(T[0], T[0], T[0], T, T, **o),
    "torch.int8_attention": lambda **o: of_torch.int8_attention(T, T, T, **o),
    "torch.Attention": lambda **o: of_torch.Attention(**o),
    "torch.Attention.forward": lambda **o: of_torch.Attention(backend="mirror")(T, T, T, **o),
    "jax.attention": lambda **o: of_jax.attention(X, X, X, **o),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_argument_of_another_library_names_ours(entry: str) -> None:
    for name in NOT_OFFERED:
        if name == "deterministic":  # which these take
            continue
        with pytest.raises(ca.UnsupportedError, match=rf"^{name} is not supported: ") as one:
            ENTRIES[entry](**{name: 1})
        assert "\n" not in str(one.value)


@pytest.mark.parametrize(
    ("path", "many"),
    [
        ("cupyattn.interop.torch.scaled_dot_product_attention", 8),
        ("torch.nn.attention.flex_attention.flex_attention", 8),
        ("torch.nn.attention.varlen.varlen_attn", 9),
        ("jax.nn.dot_product_attention", 10),
        ("diffusers.models.attention_dispatch.dispatch_attention_fn", 9),
    ],
)
def test_every_argument_of_other_libraries_is_ours_or_has_a_sentence(path: str, many: int) -> None:
    """The first stands for torch's own function, which has no signature."""
    module, _, name = path.rpartition(".")
    others = set(inspect.signature(getattr(pytest.importorskip(module), name)).parameters)
    ours = {n for f in (ca.attention, ca.attention_varlen) for n in inspect.signature(f).parameters}
    assert len(others) >= many
    assert others - ours - NOT_OFFERED.keys() <= {"options"}


def test_the_drop_in_has_the_arguments_of_torch_and_no_others() -> None:
    given = {"is_causal": True, "enable_gqa": True, "dropout_p": 0.0}
    of_torch.scaled_dot_product_attention(T, T, T, **given, backend="mirror")
    with pytest.raises(ca.UnsupportedError, match="^softmax_scale is not supported: give scale="):
        of_torch.scaled_dot_product_attention(T, T, T, softmax_scale=0.1)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_tensor_that_requires_a_gradient_is_sent_to_torch(name: str) -> None:
    given = {"q": T, "k": T, "v": T, name: T.clone().requires_grad_()}
    sentence = rf"^{name} requires a gradient.*cupyattn\.interop\.torch, or give {name}\.detach\(\)"
    with pytest.raises(TypeError, match=sentence):
        ca.attention(**given)
    given[name] = given[name].detach()
    assert isinstance(ca.attention(**given), torch.Tensor)


KINDS: dict[str, tuple[Callable[[np.ndarray], Any], Callable[[Any], np.ndarray]]] = {
    "torch": (torch.from_numpy, lambda x: x.numpy()),
    "jax": (jax.numpy.asarray, np.asarray),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_given_comes_back(case: str, kind: str) -> None:
    check(case, *KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", TOLD)
def test_the_same_is_told_of_every_kind(case: str, kind: str) -> None:
    arrays, call = TOLD[case]
    told = call({name: KINDS[kind][0](array) for name, array in arrays.items()})
    expected = call(arrays)
    if kind == "jax" and isinstance(expected, str):  # it copies, so what made an array is not known
        expected = expected.replace("run by: mirror", f"run by: {UNKNOWN_ORIGIN}")
    assert told == expected


#: Calls on one array of bfloat16, whose results are of it.
OF_BFLOAT16: dict[str, Callable[[Any], Any]] = {
    "attention": lambda x: ca.attention(x, x, x, causal=True),
    "attention_backward": lambda x: ca.attention_backward(
        x, x, x, x, *ca.attention(x, x, x, return_lse=True)
    )[0],
    "quantize": lambda x: ca.attention(ca.quantize(x, x, x)),
    "quantize_kv": lambda x: ca.attention(ca.quantize_kv(x, x).with_q(x)),
    "weight_dequant": lambda x: ca.weight_dequant(*ca.weight_quant(x), out_dtype="bfloat16"),
    "int8_gemm": lambda x: ca.int8_gemm(*ca.act_quant(x[0, 0]), *ca.weight_quant(x[0, 0]),
                                        "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("call", OF_BFLOAT16)
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_on_a_cpu_goes_in_and_comes_back(kind: str, call: str) -> None:
    """DLPack knows the type and NumPy does not, so its bits travel."""
    given = np.random.default_rng(1).normal(size=(1, 1, 4, 16)).astype(ml_dtypes.bfloat16)
    expected = OF_BFLOAT16[call](given)
    if kind == "torch":
        x = torch.from_numpy(given.view(np.int16)).view(torch.bfloat16)
        found = OF_BFLOAT16[call](x)
        assert found.dtype == torch.bfloat16
        found = found.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        found = OF_BFLOAT16[call](jax.numpy.asarray(given))
        assert isinstance(found, jax.Array)
        found = np.asarray(found)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found, expected)


def test_a_tensor_of_bfloat16_receives_a_result() -> None:
    x = torch.randn(1, 2, 4, 16, dtype=torch.bfloat16).transpose(1, 2)
    out = torch.empty(1, 4, 2, 16, dtype=torch.bfloat16)
    assert ca.attention(x, x, x, layout="BSHD", out=out) is out
    assert torch.equal(out, of_torch.attention(x, x, x, layout="BSHD"))


@pytest.mark.parametrize(
    ("x", "says"),
    [(torch.ones(1, 1, 4, 16).to_sparse(), r"^x is sparse \(torch.sparse_coo\): .* x.to_dense\(\)"),
     (torch.ones(1, 1, 4, 16).to(torch.float8_e4m3fn), r"^x .*on a CPU.*, got "),
     (torch.ones(1, 1, 4, 16, device="meta"), r"^x .*on a CPU.*, got ")],
    ids=["sparse", "float8", "meta"],
)  # fmt: skip
def test_a_tensor_that_numpy_cannot_read_is_one_line(x: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says) as one:
        ca.act_quant(x)
    assert "\n" not in str(one.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_mask_is_made_of_an_array_of_any_library(kind: str) -> None:
    make, _ = KINDS[kind]
    blocks = np.tri(2, dtype=bool)[None, None]
    mask = ca.BlockMask(make(blocks), 64, 64)
    np.testing.assert_array_equal(mask.mask, blocks)
    dense = np.tri(100, dtype=bool)
    found = ca.BlockMask.from_dense(make(dense))
    np.testing.assert_array_equal(found.mask, ca.BlockMask.from_dense(dense).mask)


#: Misuses of what takes tensors, and how the sentence begins.
MISUSES: dict[str, tuple[Callable[[], Any], str]] = {
    "sizes": (
        lambda: of_torch.Int8Linear(128, 128),
        r"codes must be an array, got 128: Int8Linear takes codes and scales, and Int8Linear",
    ),
    "one size": (
        lambda: of_torch.Int8Linear(torch.zeros(128, 128, dtype=torch.int8), 128),
        "scales must be an array, got 128: ",
    ),
    "a weight": (
        lambda: of_torch.Int8Linear(torch.ones(128, 128), torch.ones(1, 1)),
        r"codes must be int8 with two axes or more and scales float32, got float32 \(128, 128\)",
    ),
    "a tensor": (
        lambda: of_torch.Int8Linear.from_linear(torch.ones(128, 128)),
        r"linear must be a torch\.nn\.Linear, got Tensor: ",
    ),
    "an array": (
        lambda: of_torch.Int8Linear.from_linear(torch.nn.Linear(8, 8))(np.ones((2, 8), np.float32)),
        r"Int8Linear\(\): argument 'x' must be Tensor, not ndarray",
    ),
    "arrays": (
        lambda: of_torch.scaled_dot_product_attention(X, X, X),
        r"scaled_dot_product_attention\(\): argument 'query' must be Tensor, not ndarray",
    ),
    "an array as a mask": (
        lambda: of_torch.scaled_dot_product_attention(T, T, T, np.ones((4, 4), bool)),
        r"scaled_dot_product_attention\(\): argument 'attn_mask' must be Tensor, not ndarray",
    ),
    "codes": (
        lambda: of_torch.attention(ca.quantize(T, T, T), T, T),
        "attention.* must be Tensor, not QuantizedQKV: cupyattn.attention takes it",
    ),
    "a traced array": (
        lambda: jax.jit(lambda x: ca.attention(x, x, x))(jax.numpy.asarray(X)),
        r"q must be .* got \w+, which JAX traces: .* cupyattn\.interop\.jax may",
    ),
    "nothing": (lambda: of_jax.attention(X, None, X), "k must be a JAX array, got None"),
    "a model": (
        lambda: ca.calibrate_quantization_scales(torch.nn.Linear(8, 8), [(T, T)]),
        "batches must be recorded .*, got Linear: no model is run here",
    ),
    "layers": (
        lambda: ca.calibrate_quantization_scales(torch.nn.Sequential(torch.nn.Linear(8, 8)), 99.0),
        "batches must be recorded .*, got Sequential: no model is run here",
    ),
}  # fmt: skip


def test_one_layer_is_sent_to_its_own_function() -> None:
    with pytest.raises(ValueError, match=r"it is itself a linear layer, which Int8Linear\.from"):
        of_torch.replace_linear_with_int8(torch.nn.Linear(256, 256))


@pytest.mark.parametrize("case", MISUSES)
def test_a_misuse_of_what_takes_tensors_is_one_line(case: str) -> None:
    call, says = MISUSES[case]
    with pytest.raises(TypeError, match=f"^{says}") as one:
        call()
    assert "\n" not in str(one.value)


@pytest.mark.parametrize("name", ["x", "q"])
def test_codes_of_what_requires_a_gradient_are_refused(name: str) -> None:
    x = torch.ones(1, 1, 4, 16).requires_grad_()
    calls = {"x": lambda: ca.act_quant(x), "q": lambda: ca.quantize(x, x, x)}
    with pytest.raises(TypeError, match=rf"^{name} requires a gradient"):
        calls[name]()


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.copy, "deepcopy": copy.deepcopy,
}  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("array", [T, jax.numpy.asarray(X)], ids=["torch", "jax"])
def test_a_copy_of_codes_gives_the_same_kind_of_array(array: Any, how: str) -> None:
    for record in (ca.quantize(array, array, array), ca.quantize_kv(array, array).with_q(array)):
        expected, found = ca.attention(record), ca.attention(COPIES[how](record))
        assert type(found) is type(expected) is type(array)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("attend", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_codes_from_a_pickle_import_their_library(attend: bool) -> None:
    """In a process that has imported nothing but the package: no sooner than it is needed."""
    code = (
        "import pickle, sys\nimport cupyattn as ca\n"
        "z = pickle.load(sys.stdin.buffer)\nassert 'torch' not in sys.modules\n"
    )
    code += (
        "pickle.dump(ca.attention(z).numpy(), sys.stdout.buffer)" if attend
        else "pickle.dump(z.q_codes, sys.stdout.buffer)"
    )  # fmt: skip
    record = ca.quantize(T, T, T)
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(record), capture_output=True
    )
    assert not done.returncode, done.stderr.decode()[-600:]
    expected = ca.attention(record).numpy() if attend else record.q_codes
    np.testing.assert_array_equal(pickle.loads(done.stdout), expected)
