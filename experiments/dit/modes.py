"""The arithmetic of attention that is compared: what runs at each step of sampling, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cupyattn as ca
from experiments.dit.attention import Attention, ByTimestep, Kernels, Recorder
from experiments.dit.model import Model
from experiments.dit.parameters import Parameters
from experiments.dit.sampler import sample

#: Mode with which others are compared, and the reference of this mode.
FULL, REFERENCE = "16-bit", "32-bit"
UNIFORM, BY_STEP = "INT8, one static scale", "INT8, static by timestep"
DYNAMIC, LATE, POLICY = "INT8, dynamic", "INT8, late steps in 16 bits", "INT8, adaptive policy"
AGGRESSIVE, INT4 = "aggressive", "INT4"
#: Options of `cupyattn.Int8Attention` beside its sizes; "static" ones get a calibration.
INT8: dict[str, dict[str, Any]] = {
    UNIFORM: {"static": True, "use_adaptive_scaling": False, "precision_policy": "balanced"},
    BY_STEP: {"static": True, "precision_policy": "balanced"},
    DYNAMIC: {"precision_policy": "balanced"},
    LATE: {
        "static": True, "precision_policy": ca.diffusion.SigmaPolicy(aggressive_above=float("inf"))
    },
    POLICY: {"precision_policy": "adaptive"},
    AGGRESSIVE: {"precision_policy": "aggressive"},
    INT4: {"precision_policy": "balanced", "quant": ca.QuantConfig(qk_bits=4)},
}  # fmt: skip
#: All, in the order in which they are shown.
NAMES = (REFERENCE, FULL, *INT8)
#: Bins of log-SNR that a static scale is for; percentile of the maxima that it is of.
BINS, PERCENTILE = 8, 100.0
#: Seeds of the images for calibration. Seeds of judged images begin at 0.
CALIBRATION_SEEDS = range(1_000_000, 1_000_004)

At = Callable[[int], Attention]


def bins_of(steps: int) -> int:
    """Return how many bins of log-SNR there are: `BINS`, or as many as steps leave none empty.

    Examples
    --------
    >>> [bins_of(steps) for steps in (2, 4, 20, 50)]
    [1, 2, 8, 8]
    """
    sigmas = ca.compute_sigma_schedule(steps, "flow")
    for bins in range(min(BINS, steps // 2), 1, -1):
        edges = ca.diffusion.SnrBins.even(sigmas, bins)
        if len({int(edges.index(sigma)) for sigma in sigmas}) == bins:
            return bins
    return 1


def calibrate(
    model: Model, weights: Parameters, steps: int, seeds: Sequence[int] = CALIBRATION_SEEDS
) -> list[ca.Calibration]:
    """Return static scales for each block, from a run in 16 bits.

    Parameters
    ----------
    model : Model
    weights : Parameters
        float16.
    steps : int
    seeds : sequence of int
    """
    found: list[Any] = []
    blocks = tuple(range(model.shape.depth))
    sample(
        model, weights, seeds, lambda step: Recorder(Kernels(), step, blocks, found), steps=steps
    )
    sigmas = ca.compute_sigma_schedule(steps, "flow")
    return [
        ca.calibrate_quantization_scales(
            [(q, k, step) for step, layer, q, k, _ in found if layer == block], PERCENTILE,
            sigmas=sigmas, num_bins=bins_of(steps), source=f"experiments/dit, block {block}",
        )
        for block in blocks
    ]  # fmt: skip


def layers_of(
    name: str, model: Model, steps: int, calibrations: Sequence[ca.Calibration]
) -> tuple[ca.Int8Attention, ...]:
    """Return the layer of each block in an INT8 mode."""
    options: Mapping[str, Any] = {n: x for n, x in INT8[name].items() if n != "static"}
    scales = calibrations if INT8[name].get("static") else [None] * model.shape.depth
    return tuple(
        ca.Int8Attention(
            model.shape.heads, model.shape.head_dim, steps, sigmas="flow", timestep_scales=scale,
            **options,
        )
        for scale in scales
    )  # fmt: skip


def attention_of(
    name: str, model: Model, steps: int, calibrations: Sequence[ca.Calibration] = ()
) -> At:
    """Return the attention of a mode by step.

    Parameters
    ----------
    name : str
        Of `NAMES`.
    model : Model
    steps : int
    calibrations : sequence of Calibration
        One for each block, where the mode has static scales.
    """
    if name in INT8:
        layers = layers_of(name, model, steps, calibrations)
        return lambda step: ByTimestep(layers, step)
    fixed = Kernels() if name == FULL else Kernels("fa_warps", "float32")
    return lambda step: fixed


def attentions(model: Model, steps: int, calibrations: Sequence[ca.Calibration]) -> dict[str, At]:
    """Return the attention of every mode by step.

    Parameters
    ----------
    model : Model
    steps : int
    calibrations : sequence of Calibration
        One for each block.
    """
    return {name: attention_of(name, model, steps, calibrations) for name in NAMES}


def fallbacks(at: At) -> int:
    """Return how many calls of a mode fell back to 16 bits."""
    layers = getattr(at(0), "layers", ())
    return sum(sum(one.fallbacks.values()) for one in layers)
