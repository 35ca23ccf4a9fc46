"""Worst-case errors of INT8 codes for a weight on a device, computed there by torch.

`cupyattn.checkpoints.weight_errors` computes the errors on the host. Float32 sums depend on their
order, so the two differ in the last bits. The errors returned here are upper bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from cupyattn.checkpoints.weight_errors import NARROW_SQUARES, OUTLIER_RMS, WeightErrors
from cupyattn.quant.blocks import BLOCK_SIZE, panels

#: Elements of a part, so few that its float32 copies take less memory than a large layer.
PART_ELEMENTS = 2**22
#: Relative difference of two sums of a column of a block. Its numbers are not negative. Both sums
#: have 127 additions in any order, each rounded by 2^-24.
ORDER = 2 * BLOCK_SIZE * 2.0**-24
#: The same for the limit of outliers, a square root, with room for rounding that to float32.
LIMIT_ORDER = ORDER / 2 + 2.0**-22


def worst_errors(w: Tensor, codes: Tensor, scales: Tensor, strategy: str) -> WeightErrors | None:
    """Return errors of codes that are at least as large as the host's.

    Parameters
    ----------
    w : Tensor, (out, in), float16, bfloat16 or float32
    codes : Tensor, (out, in), int8
    scales : Tensor, (ceil(out / 128), ceil(in / 128)) or (out, 1), float32
    strategy : {"block", "channel"}

    Returns
    -------
    WeightErrors or None
        Upper bounds of outliers, noise and loudness, and a lower bound of the signal; waits for the
        device. None if the host must decide: w is not finite, or its squares overflow float32.
    """
    parts = []
    for (rows, columns), (lines, across) in panels(tuple(w.shape), BLOCK_SIZE, PART_ELEMENTS):
        of_part = scales[rows] if strategy == "channel" else scales[lines, across]
        parts.append(_sums(w[rows, columns], codes[rows, columns], of_part, strategy))
    total: list[float] = _stacked(parts).tolist()
    outliers, outlier_power, error, noise, signal, worst, largest, least = total
    if not (NARROW_SQUARES[0] <= least and largest <= NARROW_SQUARES[1]):  # NaN is neither
        return None
    more, less = 1 + ORDER, 1 - ORDER
    return WeightErrors(
        w.numel(), 0, largest, int(outliers), worst, error * more, noise * more, signal * less,
        outlier_power * more,
    )  # fmt: skip


def _stacked(parts: list[list[Tensor]]) -> Tensor:
    """Combine parts: sums of the first five numbers, maxima of two, the minimum of the last."""
    table = torch.stack([torch.stack([x.double() for x in part]) for part in parts])
    return torch.cat([table[:, :5].sum(0), table[:, 5:7].amax(0), table[:, 7:].amin(0)])


def _blocks(x: Tensor) -> Tensor:
    """View a part that `panels` cut as (lines, rows, blocks, columns), the last filled with 0."""
    rows, columns = x.shape
    if columns % BLOCK_SIZE:
        x = pad(x, (0, -columns % BLOCK_SIZE))
    return x.view(-1, min(rows, BLOCK_SIZE), x.shape[1] // BLOCK_SIZE, BLOCK_SIZE)


def _sums(w: Tensor, codes: Tensor, scales: Tensor, strategy: str) -> list[Tensor]:
    """Return outliers, loudness, error, noise, signal, largest error, largest and least maximum."""
    columns = w.shape[1]
    x = _blocks(w.to(torch.float32, copy=True))  # changed below
    if strategy == "channel":
        factors = scales.view(*x.shape[:2], 1, 1)
    else:
        factors = scales[:, None, :, None]
    error = _blocks(codes.float()).mul_(factors).sub_(x).abs_()
    worst, total = error.amax(), error.sum(1).sum(dtype=torch.float64)
    noise = error.square_().sum(1).sum(dtype=torch.float64)
    squares = x.square().sum(1).double()
    of_blocks = squares.sum(2)
    counts = x.new_full((x.shape[2],), BLOCK_SIZE * x.shape[1], dtype=torch.float64)
    if columns % BLOCK_SIZE:
        counts[-1] = columns % BLOCK_SIZE * x.shape[1]
    limit = (OUTLIER_RMS**2 * of_blocks / counts).sqrt().mul_(1 - LIMIT_ORDER).float()
    sizes = x.abs_()
    tops = sizes.amax((1, 3))
    far = sizes > limit[:, None, :, None]
    outlier_power = sizes.square_().mul_(far).sum(1).sum(dtype=torch.float64)
    # A block of zeros has no squares that float32 could lose.
    least = tops.masked_fill(tops == 0, NARROW_SQUARES[1]).amin()
    return [far.sum(), outlier_power, total, noise, squares.sum(), worst, tops.amax(), least]
