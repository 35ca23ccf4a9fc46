"""Plans the pass that normalises, modulates, activates and rotates rows, and makes their codes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.features import DTYPES, without_defaults
from cupyattn.kernels.limits import HOPPER_BLOCKS, MAX_LENGTH
from cupyattn.kernels.row_teams import MOST_CHANNELS, RUN, held_of, lanes_of
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import Launches
from cupyattn.plans.records import Launch
from cupyattn.plans.structs import NORM_QUANT_PARAMS
from cupyattn.quant.activation import ACTIVATIONS, GATE_LAST, GLU, columns_of
from cupyattn.quant.rotation import group_of
from cupyattn.quant.row_steps import NORMS, RowSteps

#: Threads of a block with short rows, and the most rows of a team, one after the other. The vectors
#: over the channels are prepared once for all rows of a team.
_THREADS, _STEPS = 128, 16
#: Warps of a multiprocessor: registers for more are not needed, and rotated rows need more each.
_WARPS, _WARPS_ROTATED = 24, 20


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
    rows, channels = x.shape[0], columns_of(x.shape[1], how.activation)
    rotate = 0 if how.rotate is None else group_of(channels)
    at: Mapping[str, Operand | None] = dict(zip(VECTORS, vectors, strict=True))
    features = NormQuantFeatures(
        dtype, max(w for w in (1, 2, 4, 8) if x.allows(w) and channels % w == 0), channels,
        how.norm, *types, channels % RUN == 0 and all(map(_by_eight, vectors)), how.activation,
        rotate, how.strategy,
    )  # fmt: skip
    if rows == 0:
        return NormQuantPlan(features=features)
    if channels > MOST_CHANNELS or rows > MAX_LENGTH:
        raise UnsupportedError(
            f"{rows} rows of {channels} channels exceed {MAX_LENGTH} rows or {MOST_CHANNELS} "
            "channels: split the rows, or use backend='mirror'"
        )
    lanes = lanes_of(channels)
    teams = max(1, _THREADS // lanes)
    tiles = GemmTiles(teams, held_of(channels), teams * lanes // 32, num_stages=1)
    resident = max(1, (_WARPS_ROTATED if rotate else _WARPS) // tiles.num_warps)
    blocks = -(-rows // teams)
    if steps is None:
        each = -(-blocks // (HOPPER_BLOCKS * resident))  # with all blocks at a time
        steps = -(-each // -(-each // _STEPS))
    own = {"CFG_BLOCKS_PER_SM": resident}
    spec = ModuleSpec.of("linear/norm_quant.cu", tiles.defines(), features.defines(), own)
    groups = max([1, *(one.shape[0] for one in vectors[2:] if one is not None)])
    params: dict[str, Any] = {
        "X": "x", "codes": "codes", "scales": "scales",
        **{name: None if one is None else name for name, one in at.items()},
        "X_stride": x.row_strides[0],
        **{f"{n}_stride": one.row_strides[0] if (one := at[n]) else 0 for n in VECTORS[2:]},
        "rows": rows, "group_rows": rows // groups, "steps": steps, "eps": how.eps,
    }  # fmt: skip
    structs = ((NORM_QUANT_PARAMS, params),)
    grid = -(-blocks // steps)
    launch = Launch(spec, "norm_quant", grid, tiles.num_threads, True, structs)
    return NormQuantPlan(features=features, launches=(launch,), steps=steps)


def _by_eight(vector: Operand | None) -> bool:
    """Whether eight numbers of a vector, from a multiple of eight on, can be read 16 bytes each."""
    return vector is None or vector.allows(16 // vector.itemsize)
