"""What races: the portable fa_tc as it is and with a lazy M, each in some tiles; their plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as compiler
from cupyattn.kernels import ladder
from cupyattn.kernels.numerics import HEADROOM, Numerics, numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.attention import plan_attention
from cupyattn.plans.records import Plan
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.form import settle
from cupyattn.problem.operands import Operands

#: Not sm_90a, whose form is another one.
ARCH = "sm_90"
FA_TC = ladder.lookup("fa_tc")
EAGER = compiler.KERNELS / "attn_fa_tc.cu"
LAZY = Path(__file__).with_name("attn_fa_tc_lazy.cu")
ENTRY = "attn_fa_tc"


@dataclass(frozen=True)
class Contestant:
    """A source in some tiles."""

    lazy: bool
    tiles: Tiles

    @property
    def name(self) -> str:
        """Which M, and the tiles."""
        return f"{'lazy' if self.lazy else 'eager'} {self.tiles.block_q}x{self.tiles.block_kv}"

    def numerics(self, call: AttentionSpec) -> Numerics:
        """Return where it rounds: with softcap or bias M does not lag."""
        n = numerics(
            "tensor_core", "portable", call.dtype, softcap=bool(call.softcap), bias=bool(call.bias)
        )
        return replace(n, headroom=HEADROOM) if self.lazy and not (n.softcap or n.bias) else n

    def plan(self, call: AttentionSpec, operands: Mapping[str, Operand]) -> Plan:
        """Return the launch of a call: the project's own, with this source."""
        lie = Operands(**operands)
        kernel = settle(FA_TC, call, lie, tiles=self.tiles, arch=ARCH, form="portable")
        plan = plan_attention(kernel, lie)
        (launch,) = plan.launches
        source = str(LAZY if self.lazy else EAGER)
        return replace(plan, launches=(
            replace(launch, module=replace(launch.module, source=source)),
        ))  # fmt: skip


def _both(block_q: int, *blocks_kv: int) -> tuple[Contestant, ...]:
    """Today's tiles with either M, then a lazy M with other keys a step."""
    first, *others = (Tiles(block_q, n, 4, 2) for n in blocks_kv)
    return (
        Contestant(False, first), Contestant(True, first), *(Contestant(True, x) for x in others)
    )  # fmt: skip


#: By head_dim; the first is what runs today. Others keep their registers without spills.
CONTESTANTS = {64: _both(128, 64, 32), 128: _both(128, 48, 64, 32), 256: _both(64, 32, 48)}


def resources(plan: Plan, arch: str = ARCH) -> dict[str, int]:
    """Compile a plan's kernel and return what it takes."""
    (launch,) = plan.launches
    binary = compiler.build(launch.module, arch)
    taken = binary.kernels[ENTRY]
    return {
        "registers": taken.registers, "spill_bytes": taken.spill_stores + taken.spill_loads,
        "shared_bytes": binary.smem_bytes,
    }  # fmt: skip
