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

#: Threads of a block with short rows, and the same if they are rotated.
_THREADS, _THREADS_ROTATED = 128, 64
#: Most rows of a team, one after the other, with several blocks of a multiprocessor and with one.
#: Factors are made once for all rows of a block, and nothing else runs beside a single one.
_STEPS, _STEPS_ALONE = 16, 32
#: Warps of a multiprocessor: registers for more are not needed.
_WARPS = 24
#: Channels of a lane beyond which the next row may wait in shared memory, and beyond which no
#: thread has registers for it.
_MANY, _MOST_AHEAD = 32, 96
#: Registers of a thread beside the numbers of its row and of the next, with up to `_MANY` of a row.
#: Behind it: with more of a row, and with more of a rotated row.
_OTHER_REGISTERS, _BESIDE_MANY, _BESIDE_ROTATED = 26, 48, 56
#: Blocks of a multiprocessor, the best first, if the next row of a team waits in shared memory.
#: Behind them: the fewest bytes of a copy that does not hold up a thread.
_BLOCKS_BESIDE, _LEAST_COPY = (2, 3, 4, 1), 4
#: Share by which a row takes longer if a multiprocessor has half as many at a time, and the same of
#: a rotated row.
_FEWER, _FEWER_ROTATED = 0.2, 0.5
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
    group_rows = rows // groups
    factors = "" if not any(types) else "row" if group_rows < _LEAST_KEPT else "block"
    rows_of = _Rows(
        team_of(channels, rotate, normed=how.norm is not None), bool(rotate), rows,
        rows if factors == "row" else group_rows, factors,
        x.itemsize * (x.shape[-1] // channels), features.vec * x.itemsize,
    )  # fmt: skip
    form, team = _blocks(rows_of, steps), rows_of.team
    tiles = GemmTiles(form.teams, team.held, form.teams * team.lanes // 32, num_stages=1)
    if steps is None:
        steps = rows_of.steps(form)
    own = {
        "CFG_BLOCKS_PER_SM": form.resident,
        "CFG_FACTORS_OF_ROW": int(factors == "row"),
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
    grid = rows_of.grid(form, steps)
    launch = Launch(spec, "norm_quant", grid, tiles.num_threads, True, structs)
    return NormQuantPlan(features=features, launches=(launch,), steps=steps)


class _Blocks(NamedTuple):
    """Blocks of a multiprocessor, teams of a block, and whether next rows are in shared memory."""

    resident: int
    teams: int
    next_in_shared: bool = False

    @property
    def rows(self) -> int:
        """Rows of a multiprocessor at a time."""
        return self.resident * self.teams


class _Rows(NamedTuple):
    """Properties of a call that decide on its blocks.

    Parameters
    ----------
    team : Team
    rotated : bool
    rows, together : int
        Number of rows in all, and in a group. A block has rows of one group.
    factors : {"", "block", "row"}
        Whether all rows of a block share factors, or each row has its own; "": there are none.
    itemsize, access_bytes : int
        Bytes of a row of x for each channel, and of an access to it.
    """

    team: Team
    rotated: bool
    rows: int
    together: int
    factors: str
    itemsize: int
    access_bytes: int

    @property
    def own(self) -> int:
        """Number of channels of a lane."""
        return self.team.runs * RUN

    def warps(self, following: int) -> int:
        """Return the warps of a multiprocessor whose threads hold so many numbers of a next row."""
        other = _OTHER_REGISTERS
        if self.own > _MANY:
            other = _BESIDE_ROTATED if self.rotated else _BESIDE_MANY
        registers = self.own + following + other
        return min(_WARPS, 4 * (16_384 // (32 * registers)))  # as many on each of four schedulers

    def block_bytes(self, teams: int, *, next_in_shared: bool = False) -> int:
        """Return the shared memory of a block of so many teams."""
        held = self.team.held
        exchanged = 32 * teams * self.team.lanes if self.rotated else 0  # by lanes
        kept = self.factors == "block" and (teams > 1 or self.team.lanes <= 256)
        waiting = teams * held * self.itemsize + _LINE if next_in_shared else 0  # from a line on
        return 4 * (exchanged + 2 * held * kept) + waiting + _BLOCK_BYTES

    def grid(self, form: _Blocks, steps: int) -> int:
        """Return how many blocks there are, with so many rows of a team."""
        return self.rows // self.together * -(-self.together // (form.teams * steps))

    def steps(self, form: _Blocks) -> int:
        """Return the rows of a team with which all blocks are resident, or few sets of blocks."""
        turns = -(-self.together // form.teams)
        each = -(-self.grid(form, 1) // (HOPPER_BLOCKS * form.resident))
        most = -(-each // -(-each // (_STEPS if form.resident > 1 else _STEPS_ALONE)))
        return -(-turns // -(-turns // most))

    def busiest(self, form: _Blocks) -> int:
        """Return the rows of the multiprocessor that has most."""
        steps = self.steps(form)
        return -(-self.grid(form, steps) // HOPPER_BLOCKS) * steps * form.teams


def _blocks(of: _Rows, steps: int | None) -> _Blocks:
    """Return the blocks for a call whose teams take so many rows; by their number if None."""
    if not of.rotated:
        teams = max(1, _THREADS // of.team.lanes)
        in_registers = _Blocks(max(1, _WARPS // (teams * of.team.lanes // 32)), teams)
        return _blocks_beside(of) if of.own > _MANY else in_registers
    few = max(1, _THREADS_ROTATED // of.team.lanes)
    ways = {"": [few], "row": [few], "block": [max(1, 32 // of.team.lanes), max(few, 2)]}
    found = []
    for teams in ways[of.factors]:
        room = _SHARED // of.block_bytes(teams)
        blocks = min(of.warps(of.own * of.itemsize // 4) // (teams * of.team.lanes // 32), room)
        found.append(_Blocks(max(1, blocks), teams))
    in_registers = max(found, key=lambda one: (one.rows, -one.teams))
    several = of.rows > HOPPER_BLOCKS * in_registers.rows if steps is None else steps > 1
    if several and of.own > _MANY and of.access_bytes >= _LEAST_COPY and of.factors != "row":
        return _blocks_beside(of)
    return _blocks_beside(of) if of.own > _MOST_AHEAD else in_registers


def _blocks_beside(of: _Rows) -> _Blocks:
    """Return the blocks whose next rows wait in shared memory.

    Time is that of the multiprocessor with most rows, and each takes longer if it has few at a
    time. A block has room on every device from compute capability 8.0 on, though fewer blocks may
    be resident.
    """
    least = max(1, 32 // of.team.lanes)  # teams: whole warps
    found = [_Blocks(1, least, next_in_shared=True)]
    for blocks in _BLOCKS_BESIDE:
        room = min(_SHARED // blocks, LEAST_SHARED)
        most = of.warps(0) // blocks * 32 // of.team.lanes
        found += [
            _Blocks(blocks, teams, next_in_shared=True) for teams in range(least, 1 + most, least)
            if of.block_bytes(teams, next_in_shared=True) <= room
        ]  # fmt: skip
    most = max(one.rows for one in found)
    longer = _FEWER_ROTATED if of.rotated else _FEWER
    return min(found, key=lambda one: of.busiest(one) * (1 + longer * (most / one.rows - 1)))


def _by_eight(vector: Operand | None) -> bool:
    """Whether eight numbers of a vector, from a multiple of eight on, can be read 16 bytes each."""
    return vector is None or vector.allows(16 // vector.itemsize)
