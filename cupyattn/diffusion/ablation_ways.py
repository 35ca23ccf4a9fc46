"""Ways of diffusion as points of `ablate`: given and static scales, pruned keys, windows, blocks.

They leave keys out or take scales beforehand, so that their relative error is against exact
attention to all keys. J2 holds a window or block mask to attention to the keys that it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import array_namespace, as_float64
from cupyattn.diffusion.attention import Int8Attention
from cupyattn.diffusion.calibration import Calibration, calibrate_quantization_scales
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.measure import rungs
from cupyattn.ops.attention import attention
from cupyattn.ops.explain import kernel_form
from cupyattn.ops.quantize import quantize
from cupyattn.problem.block_mask import BLOCK_SIZES, BlockMask
from cupyattn.quant.config import QuantConfig
from cupyattn.testing import verdict

PART, KIND = "diffusion", "ways of diffusion"
#: Share of the keys that is pruned, and share that a window keeps.
PRUNED, KEPT = 0.2, 0.25
#: Factor of static scales for a step that has twice the noise of the recorded step.
FACTOR = 2.0
_INT8 = "fa_int8"


@dataclass(frozen=True)
class Way:
    """One way to call attention of a diffusion transformer, in mode "balanced".

    Parameters
    ----------
    name : str
    quant : QuantConfig, optional
        With static scales of the input.
    scores : mapping
        ``window`` or ``block_mask`` of `cupyattn.attention`.
    pruned : bool
        Whether `PRUNED` of the keys are dropped.
    """

    name: str
    quant: QuantConfig | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)
    pruned: bool = False
    kind: str = KIND
    variant: str = _INT8

    def call(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Return O."""
        if not self.pruned:
            return attention(q, k, v, variant=_INT8, quant=self.quant, **options, **self.scores)
        layer = Int8Attention(
            q.shape[1], q.shape[3], 1, precision_policy="balanced", sigmas=[1.0],
            quant=self.quant, enable_pruning=True, pruning_ratio=PRUNED, scale=options.get("scale"),
        )  # fmt: skip
        return layer(q, k, v, 0)

    def judged(
        self, qkv: tuple[Any, Any, Any], options: Mapping[str, Any], rows: Any, exact: rungs.Exact
    ) -> dict[str, Any]:
        """Return its row of the table; ``unsupported`` says why there is no judgement."""
        q, k, v = qkv
        row: dict[str, Any] = {"variant": self.name, "choice": self.kind, "judgement": None}
        dtypes = ladder.lookup(_INT8).dtypes
        if q.dtype.name not in dtypes:
            return row | {"unsupported": f"takes {', '.join(dtypes)}"}
        if options["causal"] and (self.scores or self.pruned):
            return row | {"unsupported": "leaves keys out on both sides: leave --causal out"}
        if self.scores and q.shape[2] != k.shape[2]:
            return row | {"unsupported": "takes as many keys as queries"}
        try:
            o = self.call(*qkv, **options)
            of_all, _ = exact(*qkv, return_lse=True, rows=rows, **options)
            j2, j3, form = None, None, ""
            if not self.pruned:
                z = quantize(*qkv, quant=self.quant)
                ran = kernel_form(z, variant=_INT8, **options, **self.scores)
                report = verdict.judge(
                    o, q, k, v, variant=_INT8, quantized=z, rows=rows, **ran, **options,
                    **self.scores,
                )  # fmt: skip
                j2, j3, form = report.ratio, report.quantisation, ran["form"]
        except UnsupportedError as error:
            return row | {"unsupported": str(error)}
        off = rungs.relative_error(as_float64(o[:, :, rows]), of_all)
        ok = all(share is None or share <= 1 for share in (j2, j3))
        return row | {
            "judgement": {"j2": j2, "j3": j3, "relative_error": off}, "ok": ok, "form": form,
        }  # fmt: skip


def ways(q: Any, k: Any) -> list[Way]:
    """Return all of them for an input, whose own scales the static ones are."""
    size, plain = BLOCK_SIZES[0], QuantConfig()
    half = max(1, round(KEPT * k.shape[2] / 2))
    mask = BlockMask.from_window(q.shape[2], k.shape[2], (half, half), block_q=size, block_kv=size)
    own = calibrate_quantization_scales([(q, k)], 100.0)

    def static(factor: float) -> QuantConfig:
        layer = Int8Attention(
            own.heads, own.head_dim, 1, precision_policy="balanced", sigmas=[1.0],
            quant=QuantConfig("head", "head", smooth_k=False, scales=_scales(own, q)),
            timestep_scales=np.full(1, factor, np.float32),
        )  # fmt: skip
        return layer.quant_config(q, k, 0)

    largest = [float(scale.max()) for scale in (own.q_scale, own.k_scale)]
    given = QuantConfig("tensor", "tensor", smooth_k=False, scales=(largest[0], largest[1]))
    return [
        Way("given scales of a tensor", given),
        Way("static scales of a head", static(1.0)),
        Way(f"the same by timestep, {FACTOR:g} times the noise", static(FACTOR)),
        Way(f"pruned, {PRUNED:.0%} of the keys", plain, pruned=True),
        Way(f"local, {KEPT:.0%} of the keys", plain, {"window": (half, half)}),
        Way(f"block-sparse, {KEPT:.0%} of the keys", plain, {"block_mask": mask}),
    ]


def _scales(own: Calibration, q: Any) -> tuple[Any, Any]:
    """Return scales (1, heads, 1) of a calibration, where the operands lie."""
    xp = array_namespace(q)
    return xp.asarray(own.q_scale[..., None]), xp.asarray(own.k_scale[..., None])
