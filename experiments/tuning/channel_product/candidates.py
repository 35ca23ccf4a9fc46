"""The candidates for a product of INT8 codes with a scale for each row and column: pure data.

The fastest, a block of 128 x 256 by itself, is the library's: linear/sm90/gemm_int8_channel.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.limits import HOPPER_BLOCKS
from cupyattn.plans.assemble import tensor_map_of
from cupyattn.plans.gemm import GEMM_PARAMS
from cupyattn.plans.records import Launch, TensorMap

SOURCE = Path(__file__).resolve().parent / "gemm_int8_channel_sm90.cu"
ENTRY, ARCH = "gemm_int8_channel", "sm_90a"
#: Codes of a row that one copy brings: TMA needs rows at multiples of 16 bytes.
SLICE, ROW_BYTES = 128, 16
#: Rows and columns of a box of C that a warp stores.
STORE_ROWS = 16


@dataclass(frozen=True)
class Candidate:
    """One specialisation of the kernel.

    Parameters
    ----------
    block_m, block_n : int
        Rows and columns of a tile.
    pair : int
        Blocks of a cluster, 1 or 2: two share copies of the longer operand.
    warpgroups : int
        That compute: 2 or 3.
    teams : int
        1: all on one tile; 2: each on a tile of its own.
    stages : int
        Slices of 128 codes in flight.
    lead : int
        Slices that a warpgroup begins after the one before it.
    slots : int
        Boxes of C of each warp that the copy engine stores; 0: stores from registers.
    group : int
        Units (tiles, or tiles of a pair) of rows that are worked on together.
    tells : str
        What its time is meant to tell.
    """

    block_m: int
    block_n: int
    pair: int
    stages: int
    group: int
    warpgroups: int = 2
    teams: int = 1
    lead: int = 0
    slots: int = 0
    tells: str = ""

    @property
    def name(self) -> str:
        """One line that tells it from the others."""
        parts = [f"{self.block_m}x{self.block_n}"]
        parts += ["pair"] if self.pair > 1 else []
        parts += [f"{self.teams} teams"] if self.teams > 1 else []
        parts += [f"lead {self.lead}"] if self.lead else []
        parts += [f"slots {self.slots}"] if self.slots else []
        return " ".join([*parts, f"s{self.stages}", f"g{self.group}"])

    @property
    def pair_m(self) -> int:
        """Tiles of a pair one below the other: they share rows of B."""
        return self.pair if self.block_n >= self.block_m else 1

    @property
    def pair_n(self) -> int:
        """Tiles of a pair side by side: they share rows of A."""
        return self.pair // self.pair_m

    def takes(self, n: int) -> bool:
        """Whether it stores rows of C of `n` elements: the copy engine stores 16 bytes whole."""
        return not self.slots or n % 8 == 0

    def units(self, m: int, n: int) -> int:
        """Tiles, or tiles of a pair, of an (m, n) product."""
        rows, columns = self.block_m * self.pair_m, self.block_n * self.pair_n
        return -(-m // rows) * -(-n // columns)

    def waves(self, m: int, n: int) -> float:
        """Tiles of an (m, n) product for each block that runs at a time."""
        return self.units(m, n) * self.pair / HOPPER_BLOCKS

    def spec(self, dtype: str, n: int, bias: str = "", source: Path = SOURCE) -> ModuleSpec:
        """What to compile for C of a type and of rows of `n` elements."""
        defines = {
            "CFG_BLOCK_M": self.block_m, "CFG_BLOCK_N": self.block_n,
            "CFG_NUM_WARPS": 4 * (self.warpgroups + 1), "CFG_NUM_STAGES": self.stages,
            "CFG_PAIR": self.pair, "CFG_TEAMS": self.teams, "CFG_GROUP": self.group,
            "CFG_LEAD": self.lead, "CFG_STORE_BOXES": self.slots,
            "CFG_DTYPE": DTYPES.index(dtype), "CFG_BIAS": 1 + DTYPES.index(bias) if bias else 0,
            "CFG_VEC": 8 if n % 8 == 0 else 1, "CFG_ACCESS_BYTES": 16, "CFG_ACTIVATION": 0,
            "CFG_OUTLIERS": 0,
        }  # fmt: skip
        return ModuleSpec(source, tuple(sorted(defines.items())))

    def launch(
        self,
        m: int,
        n: int,
        k: int,
        dtype: str = "float16",
        bias: str = "",
        *,
        blocks: int = HOPPER_BLOCKS,
        source: Path = SOURCE,
    ) -> Launch:
        """Return the launch of a product of contiguous buffers.

        They are called a (m, k), b (n, k), a_scales (m,), b_scales (n,), c (m, n) and bias (n,).
        """
        if k % ROW_BYTES:
            raise ValueError(f"k must be a multiple of {ROW_BYTES}, got {k}")
        params: dict[str, Any] = {
            "A": "a", "B": "b", "A_scale": "a_scales", "B_scale": "b_scales", "C": "c",
            "bias": "bias" if bias else None, "A_16": None, "B_16": None,
            "A_stride": k, "B_stride": k, "A_scale_stride": 0, "B_scale_stride": 0,
            "C_stride": n, "A_16_stride": 0, "B_16_stride": 0,
            "m": m, "n": n, "k": k, "outliers": 0, "alone": 0,
        }  # fmt: skip
        rows = {"a": self.block_m // self.pair_n, "b": self.block_n // self.pair_m}
        maps = {
            name: tensor_map_of(name, "int8", Operand.contiguous((1, 1, x, k), 1), rows[name])
            for name, x in (("a", m), ("b", n))
        }
        c_map: TensorMap = maps["a"]  # something that holds: it is not looked at
        if self.slots:
            c_map = tensor_map_of("c", dtype, Operand.contiguous((1, 1, m, n), 2), STORE_ROWS)
        grid = min(self.units(m, n) * self.pair, blocks // self.pair * self.pair)
        block = 128 * (self.warpgroups + 1)
        structs = ((GEMM_PARAMS, params), maps["a"], maps["b"], c_map)
        return Launch(self.spec(dtype, n, bias, source), ENTRY, grid, block, True, structs)


#: In the order of the table.
CANDIDATES = (
    Candidate(128, 256, 2, 4, 8, tells="in a pair: two thirds of that traffic"),
    Candidate(128, 256, 2, 4, 8, lead=1, slots=2, tells="is the store hidden by a lead?"),
    Candidate(128, 256, 2, 4, 8, slots=2, tells="stores by the copy engine"),
    Candidate(128, 256, 2, 4, 8, lead=2, slots=2, tells="a longer lead leaves fewer stages ahead"),
    Candidate(128, 256, 2, 4, 4, tells="order of tiles: groups half as high"),
    Candidate(256, 192, 2, 4, 10, tells="least of L2 and shared memory; long stores"),
    Candidate(192, 192, 2, 4, 6, 3, lead=1, slots=1, tells="whole waves at n = 3072"),
    Candidate(128, 192, 2, 5, 7, teams=2, tells="two teams: stores wholly hidden, more traffic"),
    Candidate(256, 128, 2, 4, 8, tells="shared memory at 1.125 by count: is the count right?"),
)
