"""Arguments that name nothing are refused where they are given, in one sentence, everywhere."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import VARIANTS, Variant, checkpoints, cli
from cupyattn.bounds import kernel
from cupyattn.compiler import architectures
from cupyattn.compiler import modules as kc
from cupyattn.compiler.contracts import check_tiles
from cupyattn.diffusion.pruning import key_importance
from cupyattn.distributed import Mesh, Partition, Shared
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.tiles import GemmTiles, Tiles
from cupyattn.quant import QuantConfig
from cupyattn.reference import attention as mirror
from cupyattn.testing import verdict
from tests.distributed.distributed_cases import on_ranks

WHERE = ["mirror", "interpret"]
RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 1, 2, 40, 16)).astype(np.float16)
ROWS = tuple(np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (Q, K, V))
ENDS = np.array([0, 15, 40])
OUT, LSE = ca.attention(Q, K, V, return_lse=True)
CODES = (
    *ca.act_quant(RNG.standard_normal((8, 128)).astype(np.float32)),
    *ca.weight_quant(np.ones((40, 128), np.float32)),
)
LINEAR = ca.Int8Linear.from_weight(np.ones((8, 128), np.float16))

#: Every call that takes `arch` and `backend`, by name.
CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda **o: ca.attention(Q, K, V, **o),
    "attention fa": lambda **o: ca.attention(Q, K, V, variant="fa", **o),
    "attention fa_int8": lambda **o: ca.attention(Q, K, V, variant="fa_int8", **o),
    "attention_varlen": lambda **o: ca.attention_varlen(*ROWS, ENDS, ENDS, **o),
    "plan": lambda **o: ca.plan(Q, K, V, **o),
    "explain": lambda **o: ca.explain(Q, K, V, **o),
    "attention_backward": lambda **o: ca.attention_backward(OUT, Q, K, V, OUT, LSE, **o),
    "attention_varlen_backward": lambda **o: ca.attention_varlen_backward(
        ROWS[0], *ROWS, ROWS[0], np.zeros((2, 40), np.float32), ENDS, ENDS, **o
    ),
    "quantize": lambda **o: ca.quantize(Q, K, V, **o),
    "int8_gemm": lambda **o: ca.int8_gemm(*CODES, **o),
    "Int8Linear": lambda **o: LINEAR(np.ones((3, 128), np.float16), **o),
    "Int8Attention": lambda **o: ca.Int8Attention(2, 16, 50, **o),
    "key_importance": lambda **o: key_importance(Q, K, **o),
}
NAMES = (
    "arch must be sm_80, sm_86, sm_87, sm_88, sm_89, sm_90, sm_100, sm_101, sm_103, sm_107, "
    "sm_110, sm_120 or sm_121, from sm_90 on also with the suffix a, from sm_100 on also with f, "
    "got "
)


def message_of(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


# ---- architectures -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", WHERE)
@pytest.mark.parametrize("call", CALLS)
def test_architectures_that_do_not_exist(call: str, backend: str, monkeypatch) -> None:
    monkeypatch.setattr("cupyattn.compiler.architectures._known", tuple)
    for arch in ("sm_9000", "foo", "sm_91", "sm_80a", "sm_90f", "SM_90", "90", 90):
        said = message_of(ValueError, functools.partial(CALLS[call], arch=arch, backend=backend))
        assert said == f"{NAMES}{arch!r}"


@pytest.mark.parametrize("backend", WHERE)
@pytest.mark.parametrize("call", CALLS)
def test_architectures_before_the_first_that_is_supported(call: str, backend: str) -> None:
    said = message_of(UnsupportedError, lambda: CALLS[call](arch="sm_75", backend=backend))
    assert said == (
        "compute capability 7.5 is not supported, 8.0 and newer are: give another arch than "
        "'sm_75', or leave it out"
    )


@pytest.mark.parametrize(
    "arch", [*architectures.ARCHITECTURES, "sm_100a", "sm_100f", "sm_121a", None]
)
def test_architectures_that_exist(arch: str | None) -> None:
    for name, call in CALLS.items():
        assert call(arch=arch, backend="mirror") is not None, name


def test_architectures_of_several_devices(monkeypatch) -> None:
    monkeypatch.setattr("cupyattn.compiler.architectures._known", tuple)
    rows = Partition.contiguous(40, 2)
    for given, error, message in (
        ({"arch": "foo"}, ValueError, f"{NAMES}'foo'"),
        ({"tiles": (1, 2, 3)}, TypeError, "tiles must be a cupyattn.Tiles or None, got (1, 2, 3)"),
    ):
        shared = Shared(Mesh(2, 1), rows, rows)
        with pytest.raises(error) as caught:
            on_ranks((Q, K, V), shared, **given)
        assert str(caught.value) == message


@pytest.mark.frameworks
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_modules_of_torch_refuse_an_architecture_when_they_are_made() -> None:
    import torch

    from cupyattn.interop import torch as modules

    linear = torch.nn.Linear(128, 8)
    for make in (
        lambda **o: modules.Attention(**o),
        lambda **o: modules.Int8Attention(2, 16, 50, **o),
        lambda **o: modules.Int8Linear.from_linear(linear, **o),
    ):
        assert message_of(ValueError, lambda make=make: make(arch="foo")).endswith("got 'foo'")
        make(arch="sm_90a")


def test_a_backend_that_does_not_exist() -> None:
    for name in ("attention", "quantize", "int8_gemm", "Int8Attention", "key_importance"):
        said = message_of(ValueError, lambda name=name: CALLS[name](backend="gpu"))
        assert said == "backend must be 'cuda', 'mirror' or 'interpret', got 'gpu'"


# ---- tiles ---------------------------------------------------------------------------------------

ODD = Tiles(17, 33, 3)
ROWS_OF_MMA = "block_q / num_warps must be a multiple of 16, the rows of an mma"
OWN = "(tiles=None takes its own)"
#: Options of attention, and the sentence on the tiles.
REFUSED_TILES: list[tuple[dict[str, Any], str]] = [
    ({"tiles": ODD}, f"fa_tc (portable) does not take {ODD}: {ROWS_OF_MMA} {OWN}"),
    (
        {"tiles": Tiles(64, 24, 4, 2)},
        f"fa_tc (portable) does not take {Tiles(64, 24, 4, 2)}: block_kv must be a multiple of 16, "
        f"the depth of an mma {OWN}",
    ),
    (
        {"tiles": Tiles(64, 32, 4, 1)},
        f"fa_tc (portable) does not take {Tiles(64, 32, 4, 1)}: num_stages must be at least 2: the "
        f"next tile arrives during this one {OWN}",
    ),
    (
        {"tiles": Tiles(64, 32, 1), "variant": "fa"},
        f"fa (portable) does not take {Tiles(64, 32, 1)}: block_q must be at most NUM_THREADS: S4 "
        f"takes a thread per row {OWN}",
    ),
    (
        {"tiles": ODD, "variant": "fa_warps"},
        f"fa_warps (portable) does not take {ODD}: block_q must be a multiple of num_warps {OWN}",
    ),
    (
        {"tiles": Tiles(32, 48, 4), "variant": "fa_warps"},
        f"fa_warps (portable) does not take {Tiles(32, 48, 4)}: block_kv must be a multiple of 32: "
        f"a lane holds whole keys {OWN}",
    ),
    (
        {"tiles": ODD, "variant": "fa_int8"},
        f"fa_int8 (portable) does not take {ODD}: {ROWS_OF_MMA} {OWN}",
    ),
    (
        {"tiles": Tiles(48, 64, 4, 2), "variant": "fa_int8"},
        f"fa_int8 (portable) does not take {Tiles(48, 64, 4, 2)}: {ROWS_OF_MMA} {OWN}",
    ),
    (
        {
            "tiles": Tiles(64, 64, 4, 2), "variant": "fa_int8",
            "quant": QuantConfig(smooth_k=False, fused=True),
        },
        "fused=True needs tiles.num_stages=1, and tiles.block_q and tiles.block_kv of whole groups "
        f"of 2 rows and 16 keys, got {Tiles(64, 64, 4, 2)}",
    ),
    (
        {"tiles": Tiles(64, 128, 12, 2), "arch": "sm_90a"},
        f"fa_tc (sm90) does not take {Tiles(64, 128, 12, 2)}: block_q must be 128 or 192: two or "
        f"three warpgroups of 64 rows fill the registers {OWN}",
    ),
    (
        {"tiles": Tiles(128, 128, 12, 2), "arch": "sm_90a", "softcap": 1e9},
        "fa_tc (portable form: the Hopper form takes softcap/scale from 2**-10 to 2**14, got "
        f"{1e9 / Q.shape[-1] ** -0.5:g}) does not take "
        f"{Tiles(128, 128, 12, 2)}: {ROWS_OF_MMA} {OWN}",
    ),
]  # fmt: skip


@pytest.mark.parametrize("backend", WHERE)
@pytest.mark.parametrize("function", ["attention", "plan", "explain"])
@pytest.mark.parametrize(("options", "message"), REFUSED_TILES)
def test_tiles_that_a_kernel_does_not_take(function, options, message, backend) -> None:
    call = getattr(ca, function)
    assert message_of(ValueError, lambda: call(Q, K, V, backend=backend, **options)) == message


@pytest.mark.parametrize("backend", WHERE)
@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"variant": "fa_tc"}, "fa_tc takes 4294967296 blocks, more than 2147483647"),
        ({"variant": "unfused"}, "unfused takes 4294967296 blocks, more than 2147483647"),
        ({"variant": "fa_int8"}, "fa_int8 takes 4294967296 blocks, more than 2147483647"),
    ],
)
def test_more_blocks_than_a_grid_has(options, blocks, backend) -> None:
    """Said before the mirror takes memory for the output."""
    q = np.broadcast_to(np.zeros(4, np.float16), (2**20, 2**12, 1, 4))
    said = message_of(UnsupportedError, lambda: ca.attention(q, q, q, backend=backend, **options))
    assert said == f"{blocks}: split the call over batch or heads"


@pytest.mark.parametrize("backend", WHERE)
def test_tiles_of_packed_sequences_and_of_quantising(backend: str) -> None:
    call = {"tiles": ODD, "backend": backend}
    said = message_of(ValueError, lambda: ca.attention_varlen(*ROWS, ENDS, ENDS, **call))
    assert said == REFUSED_TILES[0][1]
    said = message_of(ValueError, lambda: ca.quantize(Q, K, V, **call))
    assert said == (
        f"fa_int8 does not take {ODD}: block_q and block_kv must be multiples of 16, the rows of a "
        f"matrix product {OWN}"
    )


@pytest.mark.parametrize("backend", WHERE)
@pytest.mark.parametrize("variant", ["unfused", "fa"])
def test_odd_tiles_that_a_kernel_does_take(variant: str, backend: str) -> None:
    """These two have no contract that 17 rows and 33 keys break, and compute the right values."""
    q, k, v = (x.astype(np.float32) for x in (Q, K, V))
    o = ca.attention(q, k, v, variant=variant, tiles=ODD, backend=backend)
    scores = np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k) / 4
    weights = np.exp(scores)
    assert np.abs(o - weights / weights.sum(3, keepdims=True) @ v).max() < 1e-5


@pytest.mark.parametrize("backend", WHERE)
@pytest.mark.parametrize(
    ("tiles", "arch", "error", "message"),
    [
        (
            GemmTiles(17, 33, 3, 2), None, ValueError,
            f"int8_gemm (portable) does not take {GemmTiles(17, 33, 3, 2)}: block_m must be a "
            f"multiple of 16, past 64 of 64: the rows of a warp {OWN}",
        ),
        (
            GemmTiles(32, 24, 2, 2), None, ValueError,
            f"int8_gemm (portable) does not take {GemmTiles(32, 24, 2, 2)}: a warp must have a "
            f"multiple of 16 columns, those of an ldmatrix {OWN}",
        ),
        (
            GemmTiles(32, 48, 1, 2), None, ValueError,
            f"int8_gemm (portable) does not take {GemmTiles(32, 48, 1, 2)}: block_n must divide "
            f"128, or be a multiple of it {OWN}",
        ),
        (
            GemmTiles(32, 32, 2, 1), None, ValueError,
            f"int8_gemm (portable) does not take {GemmTiles(32, 32, 2, 1)}: num_stages must be at "
            f"least 2: the next slice arrives during this one {OWN}",
        ),
        (
            GemmTiles(32, 64, 8, 2), "sm_90a", ValueError,
            f"int8_gemm (sm90) does not take {GemmTiles(32, 64, 8, 2)}: block_m must be 64, 128 or "
            f"192: one to three warpgroups of 64 rows {OWN}",
        ),
        (
            (32, 32, 2, 2), None, TypeError,
            "tiles must be a cupyattn.GemmTiles or None, got (32, 32, 2, 2)",
        ),
    ],
)  # fmt: skip
def test_tiles_of_a_product(tiles: Any, arch: Any, error: Any, message: str, backend: str) -> None:
    call = {"tiles": tiles, "arch": arch, "backend": backend}
    assert message_of(error, lambda: ca.int8_gemm(*CODES, **call)) == message


@pytest.mark.parametrize("backend", WHERE)
def test_tiles_that_are_no_record(backend: str) -> None:
    given: Any = {"tiles": (64, 32, 4, 2), "backend": backend}
    wanted = "tiles must be a cupyattn.Tiles or None, got (64, 32, 4, 2)"
    for call in (
        lambda: ca.attention(Q, K, V, **given),
        lambda: ca.attention_varlen(*ROWS, ENDS, ENDS, **given),
        lambda: ca.plan(Q, K, V, **given),
        lambda: ca.explain(Q, K, V, **given),
        lambda: ca.quantize(Q, K, V, **given),
        lambda: verdict.judge(OUT, Q, K, V, variant="fa_tc", tiles=given["tiles"]),
        lambda: kernel.attention(Q, K, V, tiles=given["tiles"]),
        lambda: mirror.attention_mirror(Q, K, V, tiles=given["tiles"]),
    ):
        assert message_of(TypeError, call) == wanted


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 32, 4), "tiles.block_q must be a positive integer up to 2**20, got 0"),
        ((32.0, 32, 4), "tiles.block_q must be a positive integer up to 2**20, got 32.0"),
        ((32, True, 4), "tiles.block_kv must be a positive integer up to 2**20, got True"),
        ((32, 32, "4"), "tiles.num_warps must be a positive integer up to 2**20, got '4'"),
        ((32, 32, 33), "tiles.num_warps must be at most 32, got 33"),
    ],
)
def test_sizes_that_no_kernel_has(sizes: Any, message: str) -> None:
    for kind in (Tiles, lambda *given: GemmTiles(*given, 2)):
        named = message.replace("block_q", "block_m").replace("block_kv", "block_n")
        wanted = message if kind is Tiles else named
        assert message_of(ValueError, lambda kind=kind: kind(*sizes)) == wanted


def test_sizes_of_numpy_are_numbers_like_others() -> None:
    assert Tiles(np.int64(64), np.int32(32), 4) == Tiles(64, 32, 4)
    assert type(Tiles(np.int64(64), 32, 4).block_q) is int


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            {"block_q": 17},
            f"fa_tc (portable) does not take {Tiles(17, 32, 4, 2)}: {ROWS_OF_MMA} {OWN}",
        ),
        (
            {"block_k": 40},
            f"fa_tc (portable) does not take {Tiles(128, 40, 4, 2)}: block_kv must be a multiple "
            f"of 16, the depth of an mma {OWN}",
        ),
    ],
)
def test_blocks_of_a_layer_are_checked_when_it_is_made(blocks, message) -> None:
    assert message_of(ValueError, lambda: ca.Int8Attention(2, 16, 50, **blocks)) == message
    ca.Int8Attention(2, 20, 50, block_q=64, block_k=32)


# ---- variants ------------------------------------------------------------------------------------

TILES = {256: Tiles(32, 32, 4)}
FAMILY = "family must be one of 'unfused', 'float32', 'tensor_core', 'int8', got "
DTYPES = (
    "dtypes must be a tuple of some of 'float16', 'bfloat16', 'float32', such as ('float16',), "
)
TABLE = (
    "tiles must be a mapping of the largest head_dim to cupyattn.Tiles, rising and ending with "
    "256, such as {256: Tiles(32, 32, 4)}, got "
)
FORMS = "forms must be a mapping of names to cupyattn.kernels.forms.Form, got "
LETTERS = (
    "name must be letters, digits and underscores, as the kernel is called attn_<name>, got "
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"family": "magic"}, f"{FAMILY}'magic'"),
        ({"family": None}, f"{FAMILY}None"),
        ({"dtypes": "float16"}, f"{DTYPES}got 'float16'"),
        ({"dtypes": ("float64",)}, f"{DTYPES}got ('float64',)"),
        ({"dtypes": ()}, f"{DTYPES}got ()"),
        ({"dtypes": (np.float16,)}, f"{DTYPES}got {(np.float16,)!r}"),
        ({"tiles": Tiles(32, 32, 4)}, f"{TABLE}{Tiles(32, 32, 4)!r:.90}"),
        ({"tiles": {256: (32, 32, 4)}}, f"{TABLE}{{256: (32, 32, 4)}}"),
        ({"tiles": {}}, f"{TABLE}{{}}"),
        ({"tiles": {64: Tiles(8, 8, 4)}}, f"{TABLE}{ {64: Tiles(8, 8, 4)}!r:.90}"),
        ({"name": "no name"}, f"{LETTERS}'no name'"),
        ({"name": ""}, f"{LETTERS}''"),
        ({"name": 3}, f"{LETTERS}3"),
        ({"forms": TILES}, f"{FORMS}{TILES!r:.56} ..."),
        ({"forms": ("portable",)}, f"{FORMS}('portable',)"),
    ],
)
def test_variants_that_cannot_be(given: dict[str, Any], message: str) -> None:
    plain: dict[str, Any] = {"name": "mine", "idea": "x", "family": "float32", "tiles": TILES}
    Variant(**plain)
    said = message_of(ValueError, lambda: Variant(**{**plain, **given}))
    assert said == message


def test_what_is_registered_is_a_variant(tmp_path: Path) -> None:
    said = message_of(TypeError, lambda: ca.register("mine", tmp_path))  # type: ignore[arg-type]
    assert said == "variant must be a cupyattn.Variant, got 'mine'"


def test_a_registered_kernel_has_its_own_contracts_on_the_mirror(tmp_path: Path) -> None:
    source = tmp_path / "attn_mine.cu"
    text = (kc.KERNELS / "attn_fa.cu").read_text().replace("attn_fa", "attn_mine")
    source.write_text(text + 'static_assert(BLOCK_KV % 20 == 0, "BLOCK_KV must be twenties");\n')
    ca.register(Variant("mine", "twenties", "float32", {256: Tiles(16, 40, 4)}), source)
    try:
        for backend in WHERE:
            given = {"variant": "mine", "backend": backend}
            o = ca.attention(Q, K, V, **given)
            assert np.abs(o - ca.attention(Q, K, V, variant="fa")).max() < 2e-3
            said = message_of(
                ValueError, lambda g=given: ca.attention(Q, K, V, tiles=Tiles(16, 16, 4), **g)
            )
            assert said == (
                f"mine (portable) does not take {Tiles(16, 16, 4)}: block_kv must be twenties {OWN}"
            )
    finally:
        del VARIANTS["mine"]


def test_every_default_of_the_ladder_holds_its_contracts() -> None:
    """Kernels compiled by `tests/kernels/test_kernels_compile.py` are not refused beforehand."""
    for variant in VARIANTS.values():
        for limit, tiles in variant.tiles.items():
            defines = {**tiles.defines(), "CFG_HEAD_DIM": limit}
            check_tiles(
                kc.ModuleSpec(f"attn_{variant.name}.cu", tuple(defines.items())), tiles, "kernel"
            )


# ---- other arguments -----------------------------------------------------------------------------

FORM = "form must be one of 'portable', 'sm90', 'split' for fa_tc, got 'zz'"
WEIGHT = np.ones((4, 8), np.float16)
PATTERNS = "fp32_patterns must be a sequence of str, such as ('blocks.0.*',), got "
COLUMNS = "outlier_columns must be whole numbers, such as np.flatnonzero(mask) of a mask, got "


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: verdict.judge(OUT, Q, K, V, variant="fa_tc", form="zz"), ValueError, FORM),
        (lambda: kernel.attention(Q, K, V, variant="fa_tc", form="zz"), ValueError, FORM),
        (
            lambda: mirror.attention_mirror(Q, K, V, variant="fa_tc", form="zz"),
            ValueError, FORM,
        ),
        (
            lambda: ca.Int8Linear.from_weight(WEIGHT, outlier_columns=[1.5]), TypeError,
            f"{COLUMNS}[1.5] of float64",
        ),
        (
            lambda: ca.Int8Linear.from_weight(WEIGHT, outlier_columns=[True, False] * 4), TypeError,
            f"{COLUMNS}{[True, False] * 4!r:.60} of bool",
        ),
        (
            lambda: ca.Int8Linear.from_weight(WEIGHT, outlier_columns=[8]), ValueError,
            "outlier_columns must be 0 to 7, got [8]",
        ),
        (
            lambda: ca.BlockMask.from_window(-1, 40, (8, 8)), ValueError,
            "len_q must be between 0 and 2**30, got -1",
        ),
        (
            lambda: ca.BlockMask.from_window(40, -5, (8, 8)), ValueError,
            "len_kv must be between 0 and 2**30, got -5",
        ),
        (
            lambda: ca.BlockMask.from_window(40.0, 40, (8, 8)), TypeError,
            "len_q must be a whole number, got 40.0",
        ),
        (
            lambda: ca.BlockMask.from_window(40, 40, (8, 8), block_q=0), ValueError,
            "block_q must be 64 or 128, got 0",
        ),
        (
            lambda: ca.BlockMask.from_dense(np.ones((40, 40), bool), block_kv=0), ValueError,
            "block_kv must be 64 or 128, got 0",
        ),
        (lambda: ca.Int8Config(fp32_patterns=3), ValueError, f"{PATTERNS}3"),
        (lambda: ca.Int8Config(fp32_patterns=None), ValueError, f"{PATTERNS}None"),
        (lambda: ca.Int8Config(fp32_patterns=b"a"), ValueError, f"{PATTERNS}b'a'"),
        (lambda: ca.Int8Config(fp32_patterns=["a", 3]), ValueError, f"{PATTERNS}['a', 3]"),
        (
            lambda: checkpoints.analyze(None), TypeError,
            "model must be a path or a Source of open_checkpoint, got None",
        ),
        (
            lambda: checkpoints.analyze(3), TypeError,
            "model must be a path or a Source of open_checkpoint, got 3",
        ),
        (
            lambda: checkpoints.analyze("x.safetensors", {"block_size": 128}), TypeError,
            "config must be a cupyattn.Int8Config or None, got {'block_size': 128}",
        ),
        (
            lambda: key_importance(Q, K, scale=float("nan")), ValueError,
            "scale must be finite, got nan",
        ),
        (
            lambda: ca.ladder(*(x[:, :, :0] for x in (Q, K, V))), ValueError,
            "q, k and v must hold 1 or more of every axis to be judged, got q.shape=(1, 2, 0, 16) "
            "and k.shape=(1, 2, 0, 16)",
        ),
    ],
)  # fmt: skip
def test_arguments_that_mean_nothing(call: Callable[[], Any], error: Any, message: str) -> None:
    assert message_of(error, call) == message


def test_outlier_columns_of_integers_and_none_are_taken() -> None:
    for columns in ((), [], np.array([1, 3]), np.array([1], np.uint8), range(2)):
        assert ca.Int8Linear.from_weight(WEIGHT, outlier_columns=columns) is not None


# ---- commands ------------------------------------------------------------------------------------

EMPTY = "must be at least 1, got 0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("interpret fa --arch foo", f"{NAMES}'foo'"),
        ("interpret fa --arch sm_75", "compute capability 7.5 is not supported, 8.0 and newer are"),
        ("plan fa --arch sm_9000", f"{NAMES}'sm_9000'"),
        ("cache --warm fa_tc:hd64:fp16 --arch foo", f"{NAMES}'foo'"),
        ("cache --arch foo", f"{NAMES}'foo'"),
        ("cache --arch sm_80", "--arch is for --warm: give --warm SPEC too, or leave --arch out"),
        ("ladder --len 0", f"--len {EMPTY}"),
        ("ladder --len-q 0", f"--len-q {EMPTY}"),
        ("ladder --len-kv 0", f"--len-kv {EMPTY}"),
        ("ladder --batch 0", f"--batch {EMPTY}"),
        ("ladder --heads 0", f"--heads {EMPTY}"),
        ("ladder --heads-kv 0", f"--heads-kv {EMPTY}"),
        ("ladder --head-dim 0", f"--head-dim {EMPTY}"),
        ("ladder --len -3", "--len must be at least 1, got -3"),
        ("ablate --len 0", f"--len {EMPTY}"),
        ("interpret fa --len 0", f"--len {EMPTY}"),
        ("plan fa --len 0", "--len must be at least 1, got 0"),
        ("plan fa --len-kv 0", "--len-kv must be at least 1, got 0"),
    ],
)
def test_commands_say_the_same(words: str, message: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("cupyattn.compiler.architectures._known", tuple)
    words = words.replace("plan fa", "plan --variant fa")
    assert cli.main(words.split()) != 0
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith(f"cupyattn: {message}")


def test_a_file_that_holds_nothing(tmp_path: Path, capsys) -> None:
    path = tmp_path / "empty.npz"
    np.savez(path, q=Q[:, :, :0], k=K, v=V)
    assert cli.main(["ladder", "--qkv", str(path)]) != 0
    said = capsys.readouterr().err.strip()
    assert said == (
        f"cupyattn: q of {path} holds nothing, as its shape is (1, 2, 0, 16): give arrays of 1 or "
        "more rows"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("KERNEL=fa", 'run "cupyattn profile fa" to profile it'),
        ("KERNEL=fa_int8 NVCC_ARCH=90", 'run "cupyattn profile fa_int8" to profile it'),
        ("NVCC_ARCH=89", "--arch sm_89"),
    ],
)
def test_make_has_no_kernel_to_build(words: str, message: str) -> None:
    root = Path(__file__).parents[2]
    # These tests may run under make themselves.
    outside = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "--dry-run", *words.split()], cwd=root, env=outside, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr
    assert not done.stdout
