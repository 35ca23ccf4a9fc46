"""A backward pass: checks of its arrays, and the form and tiles of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.kernels import backward_tiles as known
from cupyattn.kernels.backward_tiles import (
    IN_ORDER_KEYS,
    IN_ORDER_KEYS_OF_PAIRS,
    IN_ORDER_KEYS_PAST_64,
    LEAST_PERSISTENT_KEYS,
    PERSISTENT_ROWS,
    SUMMED,
    backward_tiles,
    hopper_backward_tiles,
)
from cupyattn.kernels.limits import check_shapes
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.checks import AttentionSpec, check_dtype
from cupyattn.problem.form import score_kind
from cupyattn.problem.settings import check_switch
from cupyattn.problem.support import Support, obstacle_of_places, reach

#: Values of ``CFG_DQ``: how ``backward_keys.cu`` computes dQ.
NO_DQ, SUMS_DQ, SUMS_DQ_IN_ORDER, SUMS_DQ_PERSISTENT = range(4)


@dataclass(frozen=True)
class BackwardKernel:
    """The kernels of a backward pass.

    Parameters
    ----------
    call : AttentionSpec
        The forward call of these gradients, with ``return_lse``.
    form : str
        In ``"atomic"``, blocks of keys add up dQ in float32 in memory. ``"deterministic"`` has a
        separate kernel for dQ, with the same bits on every run. ``"sm90_atomic"`` and
        ``"sm90_deterministic"`` are the Hopper forms. The latter adds up dQ in one order. Past
        head_dim 128, blocks run in pairs, except in calls of `NO_DQ`.
    dq : int
        How ``backward_keys.cu`` computes dQ: `NO_DQ`, `SUMS_DQ` or `SUMS_DQ_IN_ORDER`. With
        `SUMS_DQ_PERSISTENT` it computes `SUMS_DQ` in thread blocks that take many blocks of keys.
    keys_tiles, queries_tiles : Tiles
        Tiles of the kernel whose blocks own keys, and of the kernel whose blocks own query rows.
    note : str
        Why no Hopper form runs, if none does.
    """

    call: AttentionSpec
    form: str
    dq: int
    keys_tiles: Tiles
    queries_tiles: Tiles
    note: str = ""

    @property
    def on_hopper(self) -> bool:
        """Whether this is a Hopper form."""
        return self.form.startswith("sm90")

    @property
    def paired(self) -> bool:
        """Whether two blocks of a cluster share the keys of `keys_tiles`."""
        return self.on_hopper and self.dq != NO_DQ and self.call.head_dim > SUMMED


def check_backward_shapes(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, d_lse: Any = None
) -> tuple[int, int, int, int, int, int]:
    """Check q, k and v as `check_shapes` does, and that the other arrays match q.

    `out`, `lse` and `d_lse` may be None.
    """
    sizes = check_shapes(*(tuple(x.shape) for x in (q, k, v)))
    shape = tuple(q.shape)
    wanted = {"d_out": (d_out, shape), "out": (out, shape), "lse": (lse, shape[:3])}
    wanted["d_lse"] = d_lse, shape[:3]
    for name, (array, want) in wanted.items():
        if array is not None and tuple(array.shape) != want:
            raise ValueError(
                f"{name} must have shape {want}, to go with q.shape={shape}, got "
                f"{name}.shape={tuple(array.shape)}"
            )
    return sizes


def check_backward(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, d_lse: Any = None
) -> tuple[tuple[int, int, int, int, int, int], str]:
    """Return the sizes and the dtype of arrays (batch, heads, len, head_dim) of a backward pass."""
    sizes = check_backward_shapes(d_out, q, k, v, out, lse, d_lse=d_lse)
    dtype = check_dtype(q, k, v)
    for name, array, want in (
        ("d_out", d_out, dtype),
        ("out", out, dtype),
        ("lse", lse, "float32"),
        ("d_lse", d_lse, "float32"),
    ):
        if array is not None and str(array.dtype) != want:
            raise TypeError(f"{name} must be {want}, got {name}.dtype={array.dtype}")
    return sizes, dtype


def check_grad_bias(grad_bias: Any, bias: Any) -> None:
    """Raise for an answer that is no bool, and where there is no bias to have a gradient."""
    check_switch("grad_bias", grad_bias)
    if grad_bias and bias is None:
        raise ValueError("grad_bias=True needs the bias of the forward pass: give bias=")


def settle_backward(
    call: AttentionSpec,
    operands: Mapping[str, Operand],
    *,
    deterministic: bool | None,
    arch: str | None = None,
) -> BackwardKernel:
    """Settle which form of the backward pass takes a call, and in which tiles.

    Parameters
    ----------
    call : AttentionSpec
    operands : mapping of str to Operand
        Layouts of q, k, v, d_out, dq, dk and dv, and of a bias; others are ignored.
    deterministic : bool or None
        Whether the same call gives the same bits on every run; None: the faster form.
    arch : str, optional
        Architecture that it will run on. On ``"sm_90a"`` a Hopper form runs if it takes the call;
        past head_dim 128 calls that pairs of blocks do not take get the deterministic form.

    Returns
    -------
    BackwardKernel
    """
    form, note = "deterministic" if deterministic else "atomic", ""
    dq = NO_DQ if deterministic else SUMS_DQ
    tiles = backward_tiles(call.head_dim, call.block_mask)
    if arch == "sm_90a":
        named = {name: operands[name] for name in ("q", "k", "v", "d_out", "dq", "dk", "dv")}
        note = backward_support(call, named, operands["bias"] if call.bias else None).note
        if not note:
            form, dq = _hopper_form(call, deterministic)
            tiles = (hopper_backward_tiles(call.head_dim),) * 2
            if call.head_dim > SUMMED and dq != NO_DQ:
                tiles = (known.PAIR_TILES,) * 2
    return BackwardKernel(call, form, dq, *tiles, note)


def _hopper_form(call: AttentionSpec, deterministic: bool | None) -> tuple[str, int]:
    if call.head_dim > SUMMED and not pairs_take(call):
        return "sm90_deterministic", NO_DQ
    if deterministic or (deterministic is None and order_is_faster(call)):
        return "sm90_deterministic", SUMS_DQ_IN_ORDER
    return "sm90_atomic", SUMS_DQ_PERSISTENT if persistent_is_faster(call) else SUMS_DQ


def pairs_take(call: AttentionSpec) -> bool:
    """Return whether ``backward_keys_pair.cu`` takes a call that the Hopper form takes."""
    plain = not (call.softcap or call.mask or call.bias)
    return plain and call.block_mask == (0, 0) and call.packed is None


def order_is_faster(call: AttentionSpec) -> bool:
    """Return whether blocks of keys that take turns at dQ are faster than atomic additions."""
    if call.causal and call.heads != call.heads_kv:
        return False
    if call.head_dim > 64:
        paired = call.head_dim > SUMMED
        most = IN_ORDER_KEYS_OF_PAIRS if paired else IN_ORDER_KEYS_PAST_64
        return call.causal and call.len_kv <= most
    if persistent_is_faster(call):
        return call.len_kv < LEAST_PERSISTENT_KEYS
    return (call.len_kv // 2 if call.causal else call.len_kv) <= IN_ORDER_KEYS


def persistent_is_faster(call: AttentionSpec) -> bool:
    """Return whether atomic additions are faster in thread blocks that take many blocks of keys."""
    rows = call.len_q * call.heads // call.heads_kv
    few = (rows // 2 if call.causal else rows) <= PERSISTENT_ROWS
    return call.head_dim <= 64 and pairs_take(call) and few


def backward_support(
    call: AttentionSpec, operands: Mapping[str, Operand], bias: Operand | None = None
) -> Support:
    """Say whether the Hopper form of the backward pass takes a call.

    Parameters
    ----------
    call : AttentionSpec
    operands : mapping of str to Operand
        Operands that the copy engine reads, and the gradients, which are written in 16-byte
        stores.
    bias : Operand, optional
        The bias of the call.
    """
    if 0 in (call.heads_kv, call.len_kv, call.len_q):
        return Support(False, "there is nothing for the copy engine")
    if bias is not None and (reason := _of_bias(call, bias)):
        return Support(False, f"the Hopper form {reason}")
    if call.mask and (call.block_mask != (0, 0) or call.packed is not None):
        return Support(
            False, "the Hopper form takes no mask with a block mask or of packed sequences"
        )
    rows, keys = call.block_mask
    size = 128 if call.head_dim <= SUMMED else 64
    if rows % size or keys % size:
        return Support(
            False,
            "the Hopper form takes block masks whose blocks are multiples of "
            f"{size} x {size}, got {rows} x {keys}",
        )
    return reach(operands)


def _of_bias(call: AttentionSpec, bias: Operand) -> str:
    """Return why the Hopper form does not take the bias of a call; "" if it does."""
    kind = score_kind(bias, "dense")
    if kind == "rows":
        return "takes no bias that is the same for all keys"
    if kind == "keys" and call.head_dim <= SUMMED:  # it is read where it is
        return ""
    if kind == "dense" and call.mask and call.bias == "float32":
        least, most = 65, SUMMED
        if not least <= call.head_dim <= most:
            return (
                f"takes a mask with a float32 bias from head_dim {least} to {most}, got "
                f"{call.head_dim}: a bias of -inf masks, too"
            )
    wide = kind == "dense" and call.bias == "float32" and call.head_dim > SUMMED
    if wide and call.packed is not None and call.softcap:
        return f"takes no float32 bias of packed sequences with softcap past head_dim {SUMMED}"
    return obstacle_of_places(bias)
