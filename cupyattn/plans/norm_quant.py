"""Plans the pass that normalises, modulates, activates and rotates rows, and makes their codes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.architectures import LEAST_SHARED
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.features import DTYPES, without_defaults
from cupyattn.kernels.limits import HOPPER_BLOCKS, MAX_LENGTH
from cupyattn.kernels.row_teams import MOST_CHANNELS, RUN, Team, team_of
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import Launches
from cupyattn.plans.joint_rows import joint_rows
from cupyattn.plans.records import Launch
from cupyattn.plans.structs import JOINT_NORM_QUANT_PARAMS, NORM_QUANT_PARAMS
from cupyattn.quant.activation import ACTIVATIONS, GATE_LAST, GLU, columns_of
from cupyattn.quant.rotation import group_of
from cupyattn.quant.row_steps import NORMS, RowSteps

#: Threads of a block with short rows, the same if they are rotated, and the most rows of a team,
#: one after the other. The vectors over the channels are prepared once for all rows of a team.
_THREADS, _THREADS_ROTATED, _STEPS = 128, 64, 16
#: Warps of a multiprocessor: registers for more are not needed.
_WARPS = 24
#: Registers of a thread beside the numbers of its row and of the next: with 32 of a row, and with
#: more. The pass would wait for numbers of the next row that have no register.
_OTHER_REGISTERS = 26, 56
#: Blocks of a multiprocessor, the best first, if the next row of a team waits in shared memory.
#: Behind them: the fewest bytes of a copy to it.
_BLOCKS_BESIDE, _LEAST_COPY = (2, 3, 4), 4
#: Fewest rows for which their factors are kept. Fewer rows read theirs from memory.
_LEAST_KEPT = 4
#: Bytes of shared memory of a Hopper multiprocessor, and what a block takes beside its arrays.
_SHARED, _BLOCK_BYTES = 228 * 1024, 1024 + 96 * 4
_LINE = 128  # bytes


@dataclass(frozen=True)
class NormQuantFeatures:
    """Features of one compiled pass.

    Parameters
    ----------
    dtype : {"float16", "bfloat16", "float32"}
        Storage type of x.
    vec : {1, 2, 4, 8}
        Elements per access to a row of x.
    channels, rotate : int
        Channels of a row of codes, and of a rotated group; 0 without rotation.
    norm : {None, "layer", "rms"}
    weight, modulation : {"", "float16", "bfloat16", "float32"}
        Storage types of weight and bias, and of scale and shift; "": there are none.
    in_vectors_of_eight : bool
        Whether eight numbers of those lie aligned.
    activation : str
        "", or one of `cupyattn.quant.activation.ACTIVATIONS` or `GLU`.
    strategy : {"block", "channel"}
    joint_rows : bool
        Whether the rows lie in two tensors.
    """

    dtype: str
    vec: int
    channels: int
    norm: str | None = None
    weight: str = ""
    modulation: str = ""
    in_vectors_of_eight: bool = True
    activation: str = ""
    rotate: int = 0
    strategy: str = "channel"
    joint_rows: bool = False

    def __str__(self) -> str:
        """Name the type, the accesses and whatever differs from a plain pass."""
        return without_defaults(self)

    def defines(self) -> dict[str, int]:
        """Return the ``CFG_*`` macros that carry these features to ``prims/config.cuh``."""
        return {
            "CFG_DTYPE": DTYPES.index(self.dtype),
            "CFG_VEC": self.vec,
            "CFG_BIAS": 0,
            "CFG_ACCESS_BYTES": 1,
            "CFG_OUTLIERS": 0,
            "CFG_CHANNELS": self.channels,
            "CFG_NORM": NORMS.index(self.norm),
            "CFG_WEIGHT": 1 + DTYPES.index(self.weight) if self.weight else 0,
            "CFG_MODULATION": 1 + DTYPES.index(self.modulation) if self.modulation else 0,
            "CFG_BY_EIGHT": int(self.in_vectors_of_eight),
            "CFG_ACTIVATION": ACTIVATIONS.index(GLU.get(self.activation, self.activation)),
            "CFG_ROTATE": self.rotate,
            "CFG_BY_ROW": int(self.strategy == "channel"),
            **({"CFG_GLU": 1} if self.activation in GLU else {}),
            **({"CFG_GATE_LAST": 1} if self.activation in GATE_LAST else {}),
            **({"CFG_JOINT_ROWS": 1} if self.joint_rows else {}),
        }


@dataclass(frozen=True, kw_only=True)
class NormQuantPlan(Launches):
    """The launch of a pass, or none without rows.

    `steps` is how many rows a team takes, one after the other.
    """

    features: NormQuantFeatures
    steps: int = 1


#: Names of the vectors over the channels, and types of each pair, as a plan takes them.
VECTORS = ("weight", "bias", "scale", "shift")


@functools.lru_cache(maxsize=1024)
def plan_norm_quant(
    x: Operand,
    dtype: str,
    vectors: tuple[Operand | None, ...],
    types: tuple[str, str],
    how: RowSteps,
    *,
    below: Operand | None = None,
    steps: int | None = None,
) -> NormQuantPlan:
    """Plan the pass.

    Parameters
    ----------
    x : Operand
        (rows, channels), contiguous last axis; of a gated linear unit (rows, 2 channels). The
        buffer ``"x"``.
    dtype : {"float16", "bfloat16", "float32"}
        Its storage type.
    vectors : tuple of Operand
        `VECTORS`, the buffers of these names; None: there is none. Scale and shift are
        (groups, channels), of groups that divide the rows.
    types : (str, str)
        Storage types of weight and bias, and of scale and shift; "": there are none.
    how : RowSteps
    below : Operand, optional
        Further rows of each batch entry, the buffer ``"below"``; x and `below` are then (batch,
        rows, channels).
    steps : int, optional
        Rows of a team; by their number when omitted.

    Returns
    -------
    NormQuantPlan
        It names the buffers ``"codes"`` and ``"scales"``, too.

    Raises
    ------
    UnsupportedError
        For more rows or channels than the kernel counts.
    """
    parts = (x,) if below is None else (x, below)
    rows = sum(math.prod(one.shape[:-1]) for one in parts)
    channels = columns_of(x.shape[-1], how.activation)
    rotate = 0 if how.rotate is None else group_of(channels)
    at: Mapping[str, Operand | None] = dict(zip(VECTORS, vectors, strict=True))
    features = NormQuantFeatures(
        dtype, math.gcd(widest(*parts), channels), channels,
        how.norm, *types, channels % RUN == 0 and all(map(_by_eight, vectors)), how.activation,
        rotate, how.strategy, below is not None,
    )  # fmt: skip
    if rows == 0:
        return NormQuantPlan(features=features)
    if channels > MOST_CHANNELS or rows > MAX_LENGTH:
        raise UnsupportedError(
            f"{rows} rows of {channels} channels exceed {MAX_LENGTH} rows or {MOST_CHANNELS} "
            "channels: split the rows, or use backend='mirror'"
        )
    groups = max([1, *(one.shape[0] for one in vectors[2:] if one is not None)])
    team = team_of(channels, rotate, normed=how.norm is not None)
    teams = max(1, _THREADS // team.lanes)
    form = _Blocks(max(1, _WARPS // (teams * team.lanes // 32)), teams, "team")
    if rotate:
        form = _rotated_blocks(
            team, features.vec * x.itemsize, rows, groups if any(types) else 0, steps,
            itemsize=x.itemsize * (x.shape[-1] // channels),
        )  # fmt: skip
    tiles = GemmTiles(form.teams, team.held, form.teams * team.lanes // 32, num_stages=1)
    blocks = -(-rows // form.teams)
    if steps is None:
        each = -(-blocks // (HOPPER_BLOCKS * form.resident))  # with all blocks at a time
        steps = -(-each // -(-each // _STEPS))
    own = {
        "CFG_BLOCKS_PER_SM": form.resident,
        "CFG_FACTORS": ("team", "block", "row").index(form.factors),
        "CFG_NEXT_IN_SHARED": int(form.next_in_shared),
    }
    spec = ModuleSpec.of("linear/norm_quant.cu", tiles.defines(), features.defines(), own)
    params: dict[str, Any] = {
        "X": "x", "codes": "codes", "scales": "scales",
        **{name: None if one is None else name for name, one in at.items()},
        "X_stride": x.row_strides[-1],
        **{f"{n}_stride": one.row_strides[0] if (one := at[n]) else 0 for n in VECTORS[2:]},
        "rows": rows, "group_rows": rows // groups, "steps": steps, "eps": how.eps,
    }  # fmt: skip
    struct = NORM_QUANT_PARAMS
    if below is not None:
        struct, params = JOINT_NORM_QUANT_PARAMS, params | joint_rows(x, below, "below")
    structs = ((struct, params),)
    grid = -(-blocks // steps)
    launch = Launch(spec, "norm_quant", grid, tiles.num_threads, True, structs)
    return NormQuantPlan(features=features, launches=(launch,), steps=steps)


class _Blocks(NamedTuple):
    """Blocks of a multiprocessor, and teams of a block.

    `factors` are of a team, of a block or of a row, as ``FactorsOf`` of the kernel. The next row of
    a team waits in registers or in shared memory.
    """

    resident: int
    teams: int
    factors: str
    next_in_shared: bool = False

    @property
    def rows(self) -> int:
        """Rows of a multiprocessor at a time."""
        return self.resident * self.teams


def _rotated_blocks(
    team: Team, access_bytes: int, rows: int, groups: int, steps: int | None, *, itemsize: int
) -> _Blocks:
    """Return the blocks for rotated rows.

    Parameters
    ----------
    team : Team
    access_bytes : int
        Bytes of an access to x.
    rows : int
    groups : int
        Groups of rows that share factors; 0: there are no factors.
    steps : int, optional
        Rows of a team; by their number when omitted.
    itemsize : int
        Bytes of a row of x for each channel.
    """
    own, few = team.runs * RUN, max(1, _THREADS_ROTATED // team.lanes)
    warps = _warps(own, own * itemsize // 4)
    group_rows = rows // groups if groups else 0
    ways = [(few, "team")]
    if 0 < group_rows < _LEAST_KEPT:
        ways = [(few, "row")]
    elif groups:
        ways = [(max(1, 32 // team.lanes), "team")]
        together = max(few, 2)
        ways += [(together, "block")] * (groups < 2 or group_rows % together == 0)
    found = []
    for teams, factors in ways:
        sets = 0
        if groups and (factors == "block" or (factors == "team" and teams * team.lanes <= 256)):
            sets = teams if factors == "team" else 1
        room = _SHARED // _block_bytes(team, teams, sets)
        blocks = min(warps // (teams * team.lanes // 32), room)
        found.append((blocks * teams, -teams, max(1, blocks), factors))
    _, negative, blocks, factors = max(found)
    in_registers = _Blocks(blocks, -negative, factors)
    several = rows > HOPPER_BLOCKS * in_registers.rows if steps is None else steps > 1
    if several and own > 32 and access_bytes >= _LEAST_COPY and factors != "row":
        return _blocks_with_next_in_shared(team, group_rows, groups, itemsize) or in_registers
    return in_registers


def _blocks_with_next_in_shared(
    team: Team, group_rows: int, groups: int, itemsize: int
) -> _Blocks | None:
    """Return the blocks whose next rows wait in shared memory.

    None if shared memory has no room for them, or if groups of rows end within blocks. A block has
    room on every device from compute capability 8.0 on, though fewer blocks may be resident.
    """
    found = []
    for blocks in _BLOCKS_BESIDE:
        teams = _warps(team.runs * RUN, 0) // blocks * 32 // team.lanes
        taken = _block_bytes(team, teams, min(groups, 1), itemsize)
        shares = groups < 2 or group_rows % teams == 0
        if shares and taken <= min(_SHARED // blocks, LEAST_SHARED):
            factors = "block" if groups else "team"
            found.append(_Blocks(blocks, teams, factors, next_in_shared=True))
    return max(found, key=lambda one: one.rows, default=None)


def _warps(own: int, following: int) -> int:
    """Return the warps of a multiprocessor whose threads have so many numbers of two rows."""
    registers = own + following + _OTHER_REGISTERS[own > 32]
    return min(_WARPS, 4 * (16_384 // (32 * registers)))  # as many on each of four schedulers


def _block_bytes(team: Team, teams: int, sets: int, itemsize: int = 0) -> int:
    """Return the shared memory of a block that has so many sets of factors.

    `itemsize` are the bytes of each channel of the next row, if it waits there.
    """
    exchanged = 32 * teams * team.lanes  # numbers that change lanes
    waiting = teams * team.held * itemsize + _LINE if itemsize else 0  # from a line on
    return 4 * (exchanged + 2 * team.held * sets) + waiting + _BLOCK_BYTES


def _by_eight(vector: Operand | None) -> bool:
    """Whether eight numbers of a vector, from a multiple of eight on, can be read 16 bytes each."""
    return vector is None or vector.allows(16 // vector.itemsize)
