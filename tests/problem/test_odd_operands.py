"""Operands that do not fit, or are odd, are refused in a sentence or computed, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.compiler.modules import ModuleSpec, translate
from cupyattn.diffusion import key_importance
from cupyattn.distributed import Partition
from tests.support.runs import normal

Q, K, V = normal((1, 2, 40, 16), (1, 2, 40, 16), "float16")


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize(
    ("q", "k", "options", "error", "says"),
    [
        (Q, K[..., :8], {}, ValueError, "must agree on batch and head_dim, got q.shape="),
        (np.concatenate([Q, Q]), K, {}, ValueError, "must agree on batch and head_dim"),
        (Q, np.concatenate([K, K, K], 1), {}, ValueError, "heads of k must divide the heads of q"),
        (Q[0], K[0], {}, ValueError, "must have four axes"),
        (Q, K.astype(np.float32), {}, TypeError, "got float16 and float32"),
        (Q.astype(np.int8), K.astype(np.int8), {}, TypeError, "got int8 and int8"),
        (Q, K, {"scale": np.nan}, ValueError, "scale must be finite, got nan"),
        (Q, K, {"rows": -1}, ValueError, "rows must be 1 or more"),
    ],
)
def test_importance_is_of_queries_and_keys_that_belong_together(
    q: Any, k: Any, options: dict[str, Any], error: type[Exception], says: str, backend: str
) -> None:
    with pytest.raises(error, match=says):
        key_importance(q, k, backend=backend, **options)


def test_arrays_in_another_byte_order_are_refused() -> None:
    weight, swapped = np.ones((8, 16), np.float32), Q.astype(">f2")
    for call in (
        lambda: ca.attention(swapped, K, V),
        lambda: ca.act_quant(swapped),
        lambda: ca.weight_quant(weight.astype(">f4")),
        lambda: ca.Int8Linear.from_weight(weight)(swapped),
        lambda: key_importance(swapped, K),
    ):
        with pytest.raises(TypeError, match=r"byte order, got dtype >f\d: pass x.astype"):
            call()


def test_a_block_may_be_longer_than_rows() -> None:
    x = Q[0, 0].astype(np.float32)
    codes, scales = ca.act_quant(x, 10**12)
    found = ca.act_quant(x, 16)
    np.testing.assert_array_equal(codes, found[0])
    np.testing.assert_array_equal(scales, found[1])


def test_codes_of_no_keys_are_attended_to_after_loading(tmp_path: Path) -> None:
    quant = ca.QuantConfig(pv="int8")
    ca.quantize(Q, K[:, :, :0], V[:, :, :0], quant=quant).save(tmp_path / "codes")
    assert not ca.attention(ca.QuantizedQKV.load(tmp_path / "codes")).any()


def test_what_is_no_file_of_codes_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "codes.npz"
    path.write_bytes(b"garbage")
    with pytest.raises(ValueError, match=r"no usable QuantizedQKV: it does not begin as a .npz"):
        ca.QuantizedQKV.load(path)


def test_a_command_is_refused_before_it_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, says in (
        (["--json", str(tmp_path / "none" / "x.json")], "--json: there is no folder"),
        (["--distribution", "normal", "--seed", "-1"], "--seed must be at least 0, got -1"),
    ):
        assert cli.main(["ladder", *arguments]) == 2
        printed = capsys.readouterr()
        assert says in printed.err and not printed.out


def test_out_may_be_written_to() -> None:
    out = np.empty_like(Q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be an array that may be written to"):
        ca.attention(Q, K, V, out=out)


def test_messages_show_the_shapes_that_were_given() -> None:
    ends = np.array([0, 20, 40], np.int32)
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (Q, K, V))
    with pytest.raises(ValueError, match=r"out must have shape \(40, 2, 16\), got shape \(39,"):
        ca.attention_varlen(q, k, v, ends, ends, out=q[:39].copy())
    with pytest.raises(ValueError, match=r"got q.shape=\(40, 2, 16\) k.shape=\(40, 2, 16\) v"):
        ca.attention_varlen(q, k, v[:30], ends, ends)
    with pytest.raises(ValueError, match=r"on length, got q.shape=\(1, 40, 2, 16\) k"):
        ca.attention(q[None], k[None], v[None, :30], layout="BSHD")


def test_a_partition_is_of_all_rows() -> None:
    rows = Partition.contiguous(20, 2)
    with pytest.raises(ValueError, match="must have 20 rows along axis -2, got shape"):
        rows.take(Q, 0)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank must be 0 to 1, got {rank}"):
            rows.take(Q[:, :, :20], rank)
    with pytest.raises(ValueError, match="2 ranks have a part each, got 1 parts"):
        rows.join([Q[:, :, :10]])


def test_arch_and_tiles_are_of_their_types() -> None:
    with pytest.raises(ValueError, match="^arch must be sm_80, .*, got 90$"):
        translate(ModuleSpec("attn_fa.cu"), 90)  # type: ignore[arg-type]
    x = np.ones((8, 32), np.float32)
    a, b = ca.act_quant(x), ca.weight_quant(x)
    with pytest.raises(TypeError, match="tiles must be a cupyattn.GemmTiles or None, got Tiles"):
        ca.int8_gemm(*a, *b, tiles=ca.Tiles(64, 64, 4))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_values_past_float16_become_infinities(backend: str) -> None:
    x = Q[:, :1, :8].astype(np.float32)
    found = ca.attention(x, x, np.full_like(x, 1e6), variant="fa_int8", backend=backend)
    assert np.isposinf(found).all()


def test_an_array_of_no_known_device_is_refused() -> None:
    class Foreign:
        __dlpack__ = Q.__dlpack__
        __dlpack_device__ = staticmethod(lambda: ())

    with pytest.raises(TypeError, match="q must lie on a CPU or a CUDA device, got one on no k"):
        ca.attention(Foreign(), K, V)
