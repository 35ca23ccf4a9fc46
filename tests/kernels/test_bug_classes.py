"""Known faults of other attention kernels, with a test named after each kind.

Issue trackers of attention libraries know twelve classes of mistakes. Here each has one test on the
mirror and in the interpreter; what only a device can show is in `tests/gpu/test_bug_classes.py`.
More about a class stands in the file that its test names.
"""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, quantize
from cupyattn.arrays.described import Described
from cupyattn.arrays.kinds import as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.interpret import KernelFault
from cupyattn.kernels import ladder
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops import attention as api
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from cupyattn.plans.structs import pack
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.settings import Settings
from cupyattn.quant import QuantConfig
from cupyattn.reference.exact import attention_exact
from tests.interpret.test_interpret_faults import far_apart
from tests.kernels.test_kernels_compile import architectures, build
from tests.support.planned import plan_attention
from tests.support.runs import bits, embedded, normal, on_both, run

BACKENDS = ("mirror", "interpret")
PLAIN = [name for name, variant in VARIANTS.items() if variant.family != "int8"]
CASES = pytest.mark.parametrize(("rung", "backend"), on_both(2))


# ---- 1 to 4 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", VARIANTS)
def test_1_offsets_past_32_bits(rung: str) -> None:
    """Heads more than 2^31 elements apart. Also tests/gpu/test_memory.py, on every axis."""
    q, k, v = normal((1, 2, 5, 16), (1, 2, 7, 16))
    expected = run(rung, (q, k, v), backend="interpret")
    found = run(rung, (far_apart(q), far_apart(k), far_apart(v)), backend="interpret")
    assert bits(found.o) == bits(expected.o)
    rng = np.random.default_rng(0)
    added = {"mask": rng.random((1, 2, 5, 7)) < 0.6, "bias": q[..., :7] * 1}
    expected = run(rung, (q, k, v), backend="interpret", **added)
    added = {name: far_apart(x) for name, x in added.items()}
    found = run(rung, (q, k, v), backend="interpret", **added)
    assert bits(found.o) == bits(expected.o) and bits(found.lse) == bits(expected.lse)


@pytest.mark.parametrize("rung", PLAIN)
def test_1_strides_of_huge_arrays_reach_the_kernel_whole(rung: str) -> None:
    shape = (40, 32, 2**20, 128)  # 1.7e11 elements
    call = AttentionSpec(*shape[:2], 32, 2**20, 2**20, 128, "float16", 0.1)
    x = Operand.contiguous(shape, 2)
    if rung == "unfused":  # S alone would have 1.4e15 elements
        with pytest.raises(UnsupportedError, match="blocks, more than"):
            plan_attention(VARIANTS[rung], call, x, x, x, x)
        return
    (one,) = plan_attention(VARIANTS[rung], call, x, x, x, x).launches
    packed = pack(*one.params[0], dict.fromkeys("qkvo", 0))[0]
    for name in ("Q_stride", "K_stride", "V_stride", "O_stride"):
        assert packed[name].tolist() == [2**32, 2**27, 128], name


@pytest.mark.parametrize("rung", VARIANTS)
def test_2_grids_past_65535(rung: str) -> None:
    """All blocks lie along x: 80,000 heads take as many blocks, and heads past 65,535 are right."""
    q, k, v = normal((40_000, 2, 2, 4), (40_000, 1, 3, 4))
    plans = explain.plans(resolved(q, k, v, variant=rung))
    for one in itertools.chain.from_iterable(p.launches for p in plans):
        assert isinstance(one.grid, int) and 2**15 < one.grid < 2**31
    assert any(one.grid >= 80_000 for p in plans for one in p.launches)
    tail = attention(q[-3:], k[-3:], v[-3:], variant=rung)
    assert bits(attention(q, k, v, variant=rung)[-3:]) == bits(tail)
    call = AttentionSpec(2**20, 2**12, 2**12, 1, 1, 4, "float16", 0.5)
    x = Operand.contiguous((2**20, 2**12, 1, 4), 2)
    with pytest.raises(UnsupportedError, match="blocks, more than"):
        plan_attention(VARIANTS["fa" if rung == "fa_int8" else rung], call, x, x, x, x)


@CASES
def test_3_rows_without_keys_and_extreme_scores(rung: str, backend: str) -> None:
    q, k, v = normal((1, 2, 20, 16), (1, 1, 40, 16))
    for empty in (
        run(rung, (q, k[:, :, :0], v[:, :, :0]), backend=backend),
        run(rung, (q, k, v), backend=backend, mask=np.zeros((1, 1, 1, 1), bool)),
    ):
        assert bits(empty.o) == bits(np.zeros_like(q)) and (empty.lse == -np.inf).all()
    alone = run(rung, (q, k[:, :, 7:8], v[:, :, 7:8]), backend=backend)
    assert bits(alone.o) == bits(np.repeat(np.repeat(v[:, :, 7:8], 2, axis=1), 20, axis=2))
    one = np.zeros((20, 40), bool)
    one[:, 33] = True
    masked = run(rung, (q, k, v), backend=backend, mask=one)
    assert bits(masked.o) == bits(np.repeat(np.repeat(v[:, :, 33:34], 2, axis=1), 20, axis=2))
    # All scores of a row beyond -5e4, where others keep a finite number for -inf; then +-1e4.
    for factor, shift in ((1.0, -900.0), (80.0, 0.0)):
        ones, keys = np.full_like(q, 16.0), (k * factor + shift).astype(k.dtype)
        found = run(rung, (ones if shift else q * 80, keys, v), backend=backend)
        found.check()
        assert np.isfinite(as_float64(found.o)).all()
        if shift:
            assert found.lse.max() < -5e4


@CASES
def test_4_nan_outside_and_inside(rung: str, backend: str) -> None:
    """Amid NaN as amid zeros; a NaN in a key reaches the rows that attend to it, and no others."""
    q, k, v = normal((1, 2, 20, 16), (1, 2, 40, 16))
    amid = [
        run(rung, tuple(embedded(x, 3, fill) for x in (q, k, v)), backend=backend, causal=True)
        for fill in (np.nan, 0.0)
    ]
    assert bits(amid[0].o) == bits(amid[1].o) and bits(amid[0].lse) == bits(amid[1].lse)
    amid[0].check()
    spoilt = k.copy()
    spoilt[:, 0, 30] = np.nan  # row i sees the keys up to i + 20
    clean, dirty = (run(rung, (q, x, v), backend=backend, causal=True) for x in (k, spoilt))
    nan = np.isnan(as_float64(dirty.o)).all(axis=-1)[0]
    assert nan[0, 10:].all() and not nan[1].any()
    if rung in PLAIN:  # in fa_int8 the key shares its scale with its neighbours
        assert not nan[0, :10].any()
        assert bits(dirty.o[:, 0, :10]) == bits(clean.o[:, 0, :10])
    assert bits(dirty.o[:, 1]) == bits(clean.o[:, 1])


# ---- 5 to 8 --------------------------------------------------------------------------------------

#: Query and key lengths: one row, one key, below a tile, tails of 65 to 127 keys, far from square.
TAILS = [(1, 1), (1, 65), (3, 127), (17, 66), (65, 3), (33, 97)]


@pytest.mark.parametrize("shape", TAILS)
@CASES
def test_5_tails(rung: str, backend: str, shape: tuple[int, int]) -> None:
    for head_dim in (16,) if backend == "interpret" else (1, 8, 33, 80):
        inputs = normal((1, 2, shape[0], head_dim), (1, 1, shape[1], head_dim))
        run(rung, inputs, backend=backend).check()


@pytest.mark.parametrize("shape", [(7, 40), (40, 7)])
@CASES
def test_6_causal_alignment(rung: str, backend: str, shape: tuple[int, int]) -> None:
    """Row i sees key j <= i + shift, by explicit masks; the two alignments are two results."""
    inputs = normal((1, 2, shape[0], 16), (1, 1, shape[1], 16))
    found = {}
    for align, shift in (("bottom-right", shape[1] - shape[0]), ("top-left", 0)):
        one = run(rung, inputs, backend=backend, causal=True, causal_align=align)
        one.check()
        place = np.arange(shape[1]) <= np.arange(shape[0])[:, None] + shift
        masked = run(rung, inputs, backend=backend, mask=place)
        assert bits(one.o) == bits(masked.o) and bits(one.lse) == bits(masked.lse)
        found[align] = bits(one.o)
    assert found["bottom-right"] != found["top-left"]


def barriers() -> list[tuple[str, int]]:
    """Every barrier of every portable kernel, by its place in the source."""
    return [
        (name, number)
        for name in VARIANTS
        for number in range((kc.KERNELS / f"attn_{name}.cu").read_text().count("__syncthreads();"))
    ]


@pytest.mark.parametrize(("rung", "number"), barriers())
def test_7_missing_barriers(
    rung: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each barrier of each kernel is needed: without it the interpreter reports a race.

    Planted races of other kinds are in tests/faults.
    """
    text = (kc.KERNELS / f"attn_{rung}.cu").read_text()
    places = [m.start() for m in re.finditer(r"__syncthreads\(\);", text)]
    at = places[number]
    source = tmp_path / f"attn_{rung}.cu"
    source.write_text(text[:at] + text[at:].replace("__syncthreads();", ";", 1))
    monkeypatch.setitem(ladder.VARIANTS, rung, replace(VARIANTS[rung], source=source))
    inputs = normal((1, 1, 40, 24), (1, 1, 150, 24))
    tiles = Tiles(64, 32, 4, 2) if VARIANTS[rung].family in ("tensor_core", "int8") else None
    with pytest.raises(KernelFault):
        run_tiles = {"tiles": tiles} if tiles else {}
        operands = (quantize(*inputs, backend="interpret"),) if rung == "fa_int8" else inputs
        attention(*operands, variant=rung, backend="interpret", return_lse=True, **run_tiles)


#: What ptxas is told for the machine code that differs most while nothing is spilled: other
#: registers, another order. A limit of registers is no such thing: launch bounds overrule it.
LEAST_OPTIMISED = "--ptxas-options=-O1"


#: One form of each family that is built so in the quick tests.
REBUILT = (("fa", "portable"), ("fa_tc", "sm90"), ("fa_int8", "portable"))


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """The sections of an ELF file that are code, by name."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    names = cubin[headers[of_names][4] :]
    found = {
        names[name : names.index(b"\0", name)].decode(): cubin[offset : offset + length]
        for name, _, _, _, offset, length in headers
    }
    return {name: code for name, code in found.items() if name.startswith(".text.")}


@pytest.mark.parametrize(
    ("rung", "form"),
    [
        pytest.param(name, form, marks=[] if (name, form) in REBUILT else [pytest.mark.slow])
        for name, one in VARIANTS.items()
        for form in one.forms
    ],
)
def test_7_another_level_of_optimisation_is_other_code(
    rung: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel compiles so; that it computes the same tests/gpu/test_bug_classes.py says."""
    built = rung, form, architectures(form)[0], 64, "float16", True, True
    usual = machine_code(build(*built)[1].cubin)
    monkeypatch.setattr(kc, "OPTIONS", (*kc.OPTIONS, LEAST_OPTIMISED))
    other = machine_code(build(*built)[1].cubin)
    assert usual.keys() == other.keys() and usual
    assert all(usual[name] != other[name] for name in usual)


@pytest.mark.parametrize("len_kv", [1, 2, 3, 5, 16, 17, 64, 77])
def test_8_smoothing_harms_no_short_sequence(len_kv: int) -> None:
    """A mean of few keys is no mean of many: errors of 128 heads grow by a fiftieth at most, and
    where K has an offset they fall. One key has no score to err in."""
    q, k, v = normal((32, 4, 16, 64), (32, 4, len_kv, 64), seed=len_kv)
    offset = 3 * normal((32, 4, 1, 64), (1, 1, 1, 1), seed=1)[0]
    for keys, most in ((k, 1.02), (k + offset, 0.75)):
        exact, error = attention_exact(q, keys, v), {}
        for smooth_k in (False, True):
            quant = QuantConfig(smooth_k=smooth_k)
            o = attention(q, keys, v, variant="fa_int8", quant=quant, backend="mirror")
            error[smooth_k] = np.linalg.norm(as_float64(o) - exact)
        assert error[True] <= most * error[False], error
        assert (error[False] == 0) == (len_kv == 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_8_quantisation(backend: str) -> None:
    """Zeros, subnormal maxima, both ends of the codes, large V, inputs left alone, integer sums."""

    def int8(q: Any, k: Any, v: Any, **options: Any) -> Any:
        one = run("fa_int8", (q, k, v), backend=backend, **options)
        one.check()
        assert np.isfinite(as_float64(one.o)).all()
        return one

    q, k, v = normal((1, 2, 20, 16), (1, 2, 40, 16))
    zeros = q.copy(), k.copy(), v
    zeros[0][:, :, 2:4], zeros[1][:, :, 16:32] = 0, 0  # whole groups
    int8(*zeros)
    int8(0 * q, 0 * k, v)
    tiny = tuple(x.astype(np.float32) * np.float32(2.0**-140) for x in (q, k))
    scales = quantize(*tiny, v.astype(np.float32), backend=backend)
    assert (scales.q_scale >= 2.0**-126).all() and (scales.k_scale >= 2.0**-126).all()
    int8(*tiny, v.astype(np.float32))
    codes = quantize(-q, -k, v, quant=QuantConfig(smooth_k=False), backend=backend)
    mirrored = quantize(q, k, v, quant=QuantConfig(smooth_k=False), backend=backend)
    for one in (codes.q_codes, codes.k_codes):  # -128 is no code, and every group reaches 127
        assert one.min() >= -127 and np.abs(one.astype(int)).max() == 127
    assert bits(codes.q_codes) == bits(-mirrored.q_codes)
    large = (np.sign(v) * 60_000).astype(np.float16)  # sums of V leave float16, their means do not
    assert np.abs(as_float64(int8(q, k, large).o)).max() <= 60_000
    before = [bits(x) for x in (q, k, v)]
    int8(q, k + np.float16(30), v)
    assert [bits(x) for x in (q, k, v)] == before
    ends = np.full((1, 1, 4, 256), 127, np.float32)
    z = quantize(
        ends, -ends, ends, quant=QuantConfig(smooth_k=False), backend=backend
    )  # the largest sum of products there is: 256 * 127^2
    lse = attention(z, backend=backend, return_lse=True, scale=2.0**-12)[1]
    np.testing.assert_allclose(lse, -(127.0**2) * 256 / 2**12 + np.log(4), rtol=1e-6)


# ---- 9 to 12 -------------------------------------------------------------------------------------


def test_9_streams_and_devices() -> None:
    """One place launches, on the stream and the device that are current then.

    That it is the right one tests/gpu/test_streams.py and test_bug_classes.py say; arrays of two
    devices are refused.
    """
    folder = Path(api.__file__).parents[1]
    texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    launchers = [name for name, text in texts.items() if "launchKernel(" in text]
    assert launchers == ["runtime/launches.py"]
    launching = texts["runtime/ready.py"].split("def __call__(")[1].split("\n    def ")[0]
    assert "self._cupy.cuda.get_current_stream()" in launching and "cuda.Device(" in launching

    for device in (1, 0):
        places = {"q": 0, "k": device, "v": 0}
        rows = {n: Described.contiguous(n, (1, 1, 3, 4), "float16", at) for n, at in places.items()}
        if device:
            with pytest.raises(ValueError, match="on one device, got q on 0, k on 1, v on 0"):
                api.described(Settings(variant="fa"), rows)
        else:
            assert api.described(Settings(variant="fa"), rows).backend == "cuda"


@CASES
def test_10_log_sum_exp(rung: str, backend: str) -> None:
    """Natural, float32, one a row, smoothing given back, -inf where empty; parts merge by it."""
    q, k, v = normal((1, 2, 20, 16), (1, 1, 60, 16))
    k = (k + 3).astype(k.dtype)  # a mean for fa_int8 to take off
    whole = run(rung, (q, k, v), backend=backend)
    whole.check()
    assert whole.lse.shape == (1, 2, 20) and whole.lse.dtype == np.float32
    _, exact = attention_exact(q, k, v, return_lse=True)
    np.testing.assert_allclose(whole.lse, exact, atol=0.05)  # log2 would be off by 44 %
    parts = [
        run(rung, (q, k[:, :, part], v[:, :, part]), backend=backend)
        for part in (slice(0, 23), slice(23, 23), slice(23, 60))
    ]
    assert (parts[1].lse == -np.inf).all()
    lse = np.stack([part.lse.astype(np.float64) for part in parts])
    total = np.logaddexp.reduce(lse)
    merged = sum(
        np.exp(one - total)[..., None] * as_float64(part.o)
        for one, part in zip(lse, parts, strict=True)
    )
    slack = 0.02 if rung == "fa_int8" else 2e-3
    np.testing.assert_allclose(total, whole.lse, atol=slack)
    np.testing.assert_allclose(merged, as_float64(whole.o), atol=2 * slack)


@CASES
def test_11_strides_and_layouts(rung: str, backend: str) -> None:
    """Reversed, broadcast, strided, misaligned: as contiguous copies of them.

    Also tests/interpret/test_interpret_attention.py and tests/gpu/test_memory.py.
    """
    given = normal((2, 2, 18, 16), (2, 2, 36, 16))

    def views(x: np.ndarray) -> list[np.ndarray]:
        return [
            x[::-1, :, ::-1], np.broadcast_to(x[:1, :1], x.shape), x[:, :, ::2],
            np.repeat(x, 2, axis=3)[..., ::2], embedded(x, 1),
        ]  # fmt: skip

    for strided in zip(*map(views, given), strict=True):
        found = run(rung, strided, backend=backend, causal=True)
        found.check()
        if rung != "fa_int8" or backend == "mirror":  # the mean of keys depends on the access
            copies = tuple(map(np.ascontiguousarray, strided))
            plain = run(rung, copies, backend=backend, causal=True)
            assert bits(found.o) == bits(plain.o)


_EDIT = """
import sys
from pathlib import Path
from cupyattn.compiler import modules as kc
spec = kc.ModuleSpec(Path(sys.argv[1]))
before = kc.build(spec, "sm_80").ptx
header = Path(sys.argv[1]).with_name("number.cuh")
header.write_text(header.read_text().replace("11", "22"))
after = kc.build(spec, "sm_80").ptx
assert before != after, "an edited header was answered with the old binary"
kc.cache_clear(disk=False)
assert kc.build(spec, "sm_80").ptx == after and kc.cache_info().disk_hits == 1
print("good")
"""


def test_12_stale_and_shared_caches(tmp_path: Path) -> None:
    """Also tests/compiler/test_compile.py: threads, processes, damaged and read-only folders."""
    (tmp_path / "number.cuh").write_text("constexpr int NUMBER = 11;\n")
    source = tmp_path / "use.cu"
    source.write_text(
        '#include "number.cuh"\nextern "C" __global__ void use(int* x) { *x = NUMBER; }\n'
    )
    root = str(Path(kc.__file__).parents[1])
    environment = {"PYTHONPATH": root, "CUPYATTN_CACHE_DIR": str(tmp_path / "cache"), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", _EDIT, str(source)], env=environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
