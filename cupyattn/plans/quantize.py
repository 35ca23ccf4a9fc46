"""Plan the kernels and blocks that quantise Q, K and V (quantize*.cu): pure data."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.kernels.limits import check_grid
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.prepare_rows import Prepares, token_factors
from cupyattn.plans.quantize_blocks import Blocks
from cupyattn.plans.records import Launch, Plan, Workspace
from cupyattn.plans.structs import PREPARED_QUANTIZE_PARAMS, QUANTIZE_PARAMS, TURN_PARAMS
from cupyattn.quant.config import GROUP_ALL, QuantConfig
from cupyattn.quant.packed import packed_groups, packed_values
from cupyattn.quant.quantizers import (
    MANY_ROWS,
    VALUES_PAD,
    group_count,
    padded_columns,
    padded_length,
    rows_of_mean,
)

#: Fields of QUANTIZE_PARAMS that are buffers of an operand, except the operand itself.
_BUFFERS = (
    "codes", "scale", "static_scale", "absmax", "partial_sum", "extrema", "mean", "zero",
    "code_sum",
)  # fmt: skip

#: Fields of `Part` for batch entries of different lengths.
_OWN_LENGTHS = ("packed", "padded")

#: ``enum class Step`` of kernels_cu/prims/config.cuh, in its order.
STEPS = ("none", "sums", "extrema", "reach", "rows", "codes", "values", "value_reach")

#: Length and number of the slices of a head that are summed in parallel. If there are few heads, a
#: launch has about two slices for every SM of an H200. No slice is shorter than the rows of a
#: block.
_SLICE_ROWS, _SLICES, _ALL_SLICES, _MAX_SLICES = 256, 32, 264, 64
#: Pieces of work between the sum of a slice and the codes of its head. There are this many for
#: every block of rows in the slice, and one more. An H200 has begun about as many when the slice is
#: summed. With more of them, the rows would have left the L2 cache.
_AHEAD = 264


@dataclass(frozen=True)
class Part:
    """Quantisation of one operand.

    Parameters
    ----------
    x : Operand
        Shape (batch, heads, length, head_dim), contiguous last axis.
    group : int
        Rows that share a scale. For V, keys that share the scale of a channel: 32, 64, 128 or
        GROUP_ALL.
    per_tensor : bool
        One scale for all heads and batch entries; for V, for all channels as well.
    smooth : bool
        The mean of some rows (`cupyattn.quant.quantizers.of_mean`) is subtracted.
    static : bool
        Scales are given.
    zero_points : bool
        Codes have zero points. Scales are then dynamic.
    packed : (int, int), optional
        Number of packed sequences in x, which is then one batch entry, and their largest length.
        Means, scales and groups of rows belong to a sequence (`cupyattn.quant.packed`).
    padded : bool
        Batch entries have different lengths. Means and scales, including one scale for all heads,
        depend only on the valid rows of an entry.
    lengths : str, optional
        The buffer with the numbers of valid rows; None if all rows are valid.
    prepares : Prepares, optional
        Rows of Q or K are normalised and rotated first.
    gathered : bool
        For K: rows are read at ``places`` of a larger array, with the strides of x.
    summed : (int, int), optional
        The mean comes from given sums, the buffer ``partial_sum``: number of slices, and number of
        rows in all. Only if `sums_apart`.
    """

    x: Operand
    group: int
    per_tensor: bool = False
    smooth: bool = False
    static: bool = False
    zero_points: bool = False
    packed: tuple[int, int] | None = None
    padded: bool = False
    lengths: str | None = None
    prepares: Prepares | None = None
    gathered: bool = False
    summed: tuple[int, int] | None = None

    @property
    def sums_apart(self) -> bool:
        """Whether a separate read of the rows computes the sums of a mean; given sums avoid it."""
        return self.smooth and (self.static or self.per_tensor or self.group != GROUP_ALL)

    @property
    def entries(self) -> tuple[int, int]:
        """Batch entries, or sequences, and the rows of one, or of the longest."""
        return self.packed or (self.x.shape[0], self.x.shape[2])

    @property
    def shares_tables(self) -> bool:
        """Whether heads read the same rotation tables by column and weights as rows become codes.

        A block may then take rows of the same tokens of several heads.
        """
        how = self.prepares
        if how is None or how.rotate or self.static or self.zero_points or self.gathered:
            return False
        return how.of_all_heads and how.rope.endswith("by_column")

    def groups(self, group: int) -> int:
        """Return the number of groups of a head."""
        total = self.x.shape[2]
        return (
            packed_groups(total, self.packed[0], group)
            if self.packed
            else (group_count(total, group))
        )

    def buffers(self, name: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the buffers that a plan makes from the operand `name`.

        They include given scales, which are copied. In a row of codes of Q or K, the first head_dim
        elements are codes.
        """
        batch, heads, length, head_dim = self.x.shape
        shape: tuple[int, ...] = (batch, heads, length, padded_columns(head_dim))
        scale: tuple[int, ...] = (batch, heads, self.groups(self.group))
        if name == "v":
            padded = packed_values(length, self.packed[0]) if self.packed else padded_length(length)
            shape, scale = (batch, heads, head_dim, padded), (*scale, head_dim)
        elif self.per_tensor:
            scale = (batch if self.padded else 1, 1, scale[2])
        found: dict[str, tuple[tuple[int, ...], str]] = {
            "codes": (shape, "int8"), "scale": (scale, "float32"),
        }  # fmt: skip
        if self.static:
            found["static_scale"] = scale, "float32"
        if self.smooth:
            found["mean"] = (self.entries[0], heads, head_dim), "float32"
        if self.zero_points:
            found["zero"] = scale, "int32"
            if name != "v":
                found["code_sum"] = (batch, heads, self.groups(1)), "int32"
        return {f"{name}_{buffer}": what for buffer, what in found.items()}


def operand_parts(
    quant: QuantConfig,
    tiles: Tiles,
    operands: Mapping[str, Operand],
    packed: Mapping[str, tuple[int, int] | None],
    prepares: Mapping[str, Prepares] | None = None,
    padded: Mapping[str, str | None] | None = None,
) -> dict[str, Part]:
    """Return the `Part` of "q", "k" and, if V becomes codes, of "v".

    Parameters
    ----------
    quant : QuantConfig
    tiles : Tiles
        Tiles of the attention kernel.
    operands : mapping of str to Operand
    packed : mapping of str to (int, int) or None
        As for `Part`, by operand.
    prepares : mapping of str to Prepares, optional
        As for `Part`, by operand.
    padded : mapping of str to (str or None), optional
        `Part.lengths` by operand, if batch entries have different lengths.
    """
    prepares = prepares or {}
    rows: dict[str, Any] = {"static": quant.static, "zero_points": quant.zero_points}
    own: dict[str, dict[str, Any]] = {
        n: {"padded": padded is not None, "lengths": (padded or {}).get(n)} for n in "qkv"
    }
    found = {
        "q": Part(
            operands["q"], quant.group_q(tiles), quant.granularity_q == "tensor",
            packed=packed["q"], prepares=prepares.get("q"), **rows, **own["q"],
        ),
        "k": Part(
            operands["k"], quant.group_kv(tiles), quant.granularity_k == "tensor", quant.smooth_k,
            packed=packed["k"], prepares=prepares.get("k"), **rows, **own["k"],
        ),
    }  # fmt: skip
    if quant.has_value_codes:
        found["v"] = Part(
            operands["v"], quant.group_v(tiles), quant.granularity_v == "tensor",
            smooth=bool(quant.smooth_v),
            zero_points=quant.value_zero_points, packed=packed["v"], **own["v"],
        )  # fmt: skip
    return found


@functools.lru_cache(maxsize=1024)
def plan_quantize(
    dtype: str,
    q: Part | None = None,
    k: Part | None = None,
    v: Part | None = None,
    p_type: str = "",
    qk_bits: int = 8,
) -> Plan:
    """Plan the quantisation of operands, all of them in the same launches.

    One launch is enough: blocks whose codes depend on a mean, or on the range of a whole head,
    wait for it. A second launch is needed if groups span blocks without being a head. It is also
    needed if the whole array has one scale, or if tiles have an unusual size. With a mean, these
    need a third launch. Norms of all heads of a token need one more before, for each operand.

    Parameters
    ----------
    dtype : {"float16", "bfloat16", "float32"}
        Their storage type.
    q, k, v : Part, optional
    p_type : {"", "u8", "s8", "e4m3", "16bit"}
        Type of P for codes of V. V's codes are INT8, or e4m3 if P is e4m3.
    qk_bits : {8, 4}
        Bits of a code of Q or K, which is stored in a byte in either case.

    Returns
    -------
    Plan
        It has no launches if all operands are empty. Its buffers are ``"q"``, ``"k"`` and ``"v"``,
        `Part.buffers` and `Part.lengths`, the offsets ``"cu_seqlens_q"`` and ``"cu_seqlens_k"``,
        ``"k_places"``, int32, (batch, heads, length), and for given sums ``"k_partial_sum"``,
        float32, (batch, heads, slices, head_dim).

    Raises
    ------
    UnsupportedError
        If a grid would be too large.
    """
    present = {name: part for name, part in zip("qkv", (q, k, v), strict=True) if part}
    blocks = _blocks_of(present)
    work = {
        name: _Work(
            name, part, *_heads_and_rows(name, present, blocks), blocks.rows(GROUP_ALL),
            blocks.columns,
        )
        for name, part in present.items()
        if math.prod(part.x.shape)
    }  # fmt: skip
    packed, padded = (any(getattr(p, name) for p in present.values()) for name in _OWN_LENGTHS)
    features = Features(dtype, blocks.head_dim, vec=blocks.vec, varlen=packed, padded=padded)
    tiles = Tiles(1, 1, blocks.num_warps)
    steps, first = _shared_out(work)
    before = [
        token_factors(one.part.x, dtype, one.part.prepares, name)
        for name, one in work.items()
        if one.part.prepares
    ]
    launches = [launch for some, _ in before for launch in some]
    for now in steps:
        of_now = {name: work[name] for name in now}
        # The work on slices depends neither on groups nor on codes.
        coded = {n: work[n] for n, step in now.items() if step not in ("sums", "extrema")}
        block_q, block_kv = (coded[n].rows if n in coded else 1 for n in "qk")
        tiles = Tiles(block_q, block_kv, blocks.num_warps)
        features = _features_of(features, of_now, coded, p_type)
        defines = _defines(now, first, of_now, qk_bits) | tiles.defines() | features.defines()
        defines["CFG_BLOCK_COLS"] = blocks.columns
        turns = _Turns.of(of_now, now, first)
        launches.append(_launch(of_now, turns, tiles, defines, makes_codes=now is steps[-1]))
    note = "; ".join(f"{name}: {', then '.join(one.steps)}" for name, one in work.items())
    workspace = (*_workspace(work, first), *(w for _, some in before for w in some))
    return Plan("quantize", "portable", tiles, features, tuple(launches), workspace, note)


def _blocks_of(parts: Mapping[str, Part]) -> Blocks:
    """Return the blocks that hold the rows of all operands."""
    groups = [p.group for name, p in parts.items() if name != "v" and p.group != GROUP_ALL]
    pairs = any(part.prepares for part in parts.values())
    return Blocks.of([part.x for part in parts.values()], groups, pairs)


def _heads_and_rows(name: str, parts: Mapping[str, Part], blocks: Blocks) -> tuple[int, int]:
    """Return the heads whose rows a block takes, and its rows.

    Blocks read weights of Q and of K before they know their work. So heads share blocks only if all
    heads of Q share weights, and all heads of K.
    """
    part = parts[name]
    weights_by_head = any(p.prepares and not p.prepares.of_all_heads for p in parts.values())
    if weights_by_head or not part.shares_tables:
        return 1, blocks.rows(part.group)
    # Codes of V take shared memory, too.
    heads, held = part.x.shape[1], "v" not in parts
    return blocks.heads_and_rows(part.group, heads, held=held, single=name == "q")


def _workspace(work: Mapping[str, _Work], first: Mapping[str, str]) -> tuple[Workspace, ...]:
    """Return the scratch memory through which launches, and blocks of the last one, communicate."""
    found = [w for one in work.values() for w in one.workspace]
    if first:
        found.append(Workspace("next_piece", (1,), "int32", zeros=True))
    for name in first:
        sums = work[name].heads, work[name].part.x.shape[3]
        found += [
            Workspace(f"{name}_summed_slices", sums[:1], "int32", zeros=True),
            Workspace(f"{name}_head_sum", sums, "uint64", zeros=True),
        ]
    return tuple(found)


def _shared_out(work: Mapping[str, _Work]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the steps of each launch, by operand, and the earlier steps within the last launch.

    The last steps of all operands share a launch, and so do the steps before them.
    """
    steps = {name: one.steps for name, one in work.items()}
    first: dict[str, str] = {}
    if not {"reach", "value_reach"} & {step for some in steps.values() for step in some}:
        first = {name: some[0] for name, some in steps.items() if len(some) > 1}
        steps = {name: some[-1:] for name, some in steps.items()}
    count = max(map(len, steps.values()), default=0)
    launches = [
        {name: some[-left] for name, some in steps.items() if len(some) >= left}
        for left in range(count, 0, -1)
    ]
    return launches, first


def _features_of(
    before: Features, now: Mapping[str, _Work], coded: Mapping[str, _Work], p_type: str
) -> Features:
    """Return the features of a launch that makes codes, or scales of codes, for `coded`."""
    of_groups = {name: one.part.group for name, one in coded.items()}
    how = _preparing(now)
    return replace(
        before, group_q=of_groups.get("q", 0), group_kv=of_groups.get("k", 0),
        group_v=of_groups.get("v", 0), p_type=p_type if "v" in coded else "",
        zero_points=any(one.part.zero_points for one in coded.values()),
        **(how.features if how else {"rope": "", "qk_norm": "", "qk_rotate": False}),
    )  # fmt: skip


def _preparing(now: Mapping[str, _Work]) -> Prepares | None:
    """Return how a launch normalises and rotates rows; None if it does neither."""
    return next((one.part.prepares for one in now.values() if one.part.prepares), None)


def _defines(
    now: Mapping[str, str], first: Mapping[str, str], work: Mapping[str, _Work], qk_bits: int
) -> dict[str, int]:
    """Return the macros of a launch, except macros of its tiles and features."""
    defines = {f"CFG_STEP_{n.upper()}": STEPS.index(now.get(n, "none")) for n in "qkv"}
    defines |= {f"CFG_FIRST_{n.upper()}": STEPS.index(first.get(n, "none")) for n in "qkv"}
    together = {n: work[n].together if now.get(n) == "rows" else 1 for n in "qk"}
    if max(together.values()) > 1:
        defines |= {f"CFG_HEADS_{n.upper()}": heads for n, heads in together.items()}
    defines |= {} if qk_bits == 8 else {"CFG_QK_BITS": qk_bits}
    return defines | ({"CFG_GATHERED": 1} if any(x.part.gathered for x in work.values()) else {})


def _launch(
    now: Mapping[str, _Work],
    turns: _Turns,
    tiles: Tiles,
    defines: Mapping[str, int],
    *,
    makes_codes: bool,
) -> Launch:
    """Plan one launch for the operands of `now`."""
    what = " and ".join(str(one.part.x.shape) for one in now.values())
    grid = check_grid(f"quantising {what}", turns.grid)
    entry = "quantize" if makes_codes else "quantize_reduce"
    spec = ModuleSpec.of(f"prepare/{entry}.cu", defines)
    struct = PREPARED_QUANTIZE_PARAMS if _preparing(now) else QUANTIZE_PARAMS
    structs = tuple(
        (struct, {**now[n].params, **turns.fields[n]} if n in now else {}) for n in "qkv"
    )
    structs += ((TURN_PARAMS, turns.params),) if makes_codes else ()
    return Launch(spec, entry, grid, tiles.num_threads, makes_codes, structs)


@dataclass(frozen=True)
class _Turns:
    """The order of work in a launch, in the `rounds` of quantize_turns.cuh.

    Codes are made `lag` rounds after the sums of their head. A launch without waits has one round.
    `fields` are the fields of QUANTIZE_PARAMS for this order, by operand.
    """

    rounds: int
    lag: int
    fields: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(
        cls, work: Mapping[str, _Work], now: Mapping[str, str], first: Mapping[str, str]
    ) -> _Turns:
        """Divide the work of the steps `now`, which follow the steps `first`, into rounds."""
        rounds = math.gcd(*(one.heads // one.together for one in work.values())) if first else 1
        fields = {
            name: {
                "blocks": one.blocks(now[name]) // rounds,
                "first_blocks": one.blocks(first[name]) // rounds if name in first else 0,
                "summed_slices": f"{name}_summed_slices" if name in first else None,
                "head_sum": f"{name}_head_sum" if name in first else None,
            }
            for name, one in work.items()
        }
        if not first:
            return cls(rounds, 0, fields)
        longest = max(work[name].slices[1] // work[name].held for name in first)
        lag = -(-_AHEAD * (1 + longest) // _pieces(fields))
        return cls(rounds, min(lag, rounds), fields)  # with so many all sums come first

    @property
    def grid(self) -> int:
        """Thread blocks of the launch."""
        return (self.rounds + self.lag) * _pieces(self.fields)

    @property
    def params(self) -> dict[str, Any]:
        """The fields of TURN_PARAMS."""
        next_piece = "next_piece" if self.lag else None
        return {"next": next_piece, "rounds": self.rounds, "lag": self.lag}


def _pieces(fields: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many pieces of work a round has."""
    return sum(of["blocks"] + of["first_blocks"] for of in fields.values())


@dataclass(frozen=True)
class _Work:
    """The work of the launches for one operand, and the number of its rows for each block.

    The rows of a block are the rows of `together` heads, as many of each. `held` is the number of
    rows that fit in a block, regardless of groups. `columns` is the number of columns of V that a
    block transposes.
    """

    name: str
    part: Part
    together: int
    rows: int
    held: int
    columns: int

    @functools.cached_property
    def steps(self) -> tuple[str, ...]:
        """The steps, one for each launch that does something for the operand."""
        part = self.part
        mean = ("sums",) if part.smooth and not part.summed else ()
        if self.name == "v":
            if part.group != GROUP_ALL:
                return (*mean, "values")
            return ("extrema", *(("value_reach",) if part.per_tensor else ()), "values")
        if part.static:
            return (*mean, "codes")
        if self.rows // self.together % part.group == 0:
            return (*mean, "rows")
        if part.group == GROUP_ALL and not part.per_tensor:
            return ("extrema", "codes")
        return (*mean, "reach", "codes")

    @property
    def heads(self) -> int:
        """Heads of all batch entries."""
        return self.part.entries[0] * self.part.x.shape[1]

    @functools.cached_property
    def slices(self) -> tuple[int, int]:
        """Number of slices that are summed in parallel, and the rows of a slice.

        Slices cover the rows of a head, or the rows of its mean. The rows of a slice are a multiple
        of the rows of a block, so all loads of a block overlap.
        """
        _, length = self.part.entries
        if "extrema" not in self.steps:
            own = self.part.packed or self.part.lengths  # a shorter entry may have more of them
            shorter = min(length, MANY_ROWS - 1) if own else 0
            length = max(rows_of_mean(length), shorter)
        few = min(_ALL_SLICES // self.heads, _MAX_SLICES)
        splits = max(1, few, min(length // _SLICE_ROWS, _SLICES))
        rows = -(-length // (splits * self.held)) * self.held
        return -(-length // rows), rows

    def blocks(self, step: str) -> int:
        """Return how many thread blocks a step takes."""
        _, length = self.part.entries
        if step in ("sums", "extrema"):
            of_head = self.slices[0]
        elif step == "value_reach":
            of_head = 1
        elif step == "values":
            of_head = -(-length // VALUES_PAD) * -(-self.part.x.shape[3] // self.columns)
        else:
            return self.heads // self.together * -(-length // (self.rows // self.together))
        return self.heads * of_head

    @functools.cached_property
    def workspace(self) -> tuple[Workspace, ...]:
        """Scratch memory through which the steps communicate."""
        name, part, found = self.name, self.part, []
        shape = (part.entries[0], part.x.shape[1], self.slices[0])
        if {"sums", "extrema"} & {*self.steps}:
            found += [Workspace(f"{name}_partial_sum", (*shape, part.x.shape[3]), "float32")]
        if "extrema" in self.steps:
            found += [Workspace(f"{name}_extrema", (*shape, 2, part.x.shape[3]), "uint32")]
        if "reach" in self.steps:
            scale, _ = part.buffers(name)[f"{name}_scale"]
            sides = (2,) if part.zero_points else ()
            found += [Workspace(f"{name}_absmax", (*scale, *sides), "uint32", zeros=True)]
        if "value_reach" in self.steps:
            reaches = part.entries[0] if part.packed or part.padded else 1, 1 + part.zero_points
            found += [Workspace(f"{name}_absmax", reaches, "uint32", zeros=True)]
        return tuple(found)

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """The fields of QUANTIZE_PARAMS, except the number of blocks of a launch."""
        name, part = self.name, self.part
        made = part.buffers(name)
        named = {*made, *(w.name for w in self.workspace)}
        if part.summed:
            named.add(f"{name}_partial_sum")
        splits, summed = part.summed or (self.slices[0], 0)
        buffers = {b: f"{name}_{b}" for b in _BUFFERS}
        _, heads, total, _ = part.x.shape
        groups, sums, packed = part.groups(part.group), part.groups(1), part.packed is not None
        one_scale = part.per_tensor and name != "v"
        scale_heads = 1 if one_scale else heads
        shared = packed or (one_scale and not part.padded)
        return {
            **(part.prepares.params(part.x.shape[3]) if part.prepares else {}),
            "X": name, **{field: b if b in named else None for field, b in buffers.items()},
            "X_stride": part.x.row_strides,
            "scale_stride_batch": 0 if shared else scale_heads * groups,
            "scale_stride_head": 0 if one_scale else groups,
            "heads": heads, "length": part.entries[1], "splits": splits,
            "split_rows": self.slices[1],
            "cu_seqlens": f"cu_seqlens_{'q' if name == 'q' else 'k'}" if packed else part.lengths,
            "total": total, "padded": made["v_codes"][0][3] if name == "v" else 0,
            "sum_stride_batch": 0 if packed else heads * sums, "sum_stride_head": sums,
            "places": f"{name}_places" if part.gathered else None, "summed": summed,
        }  # fmt: skip
