"""Whether the kernel that was settled for a call takes its tiles, its codes and its size."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.architectures import ARCHITECTURES, shared_memory_of
from cupyattn.compiler.contracts import least_shared_bytes, refused_tiles
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import KernelLaunchError
from cupyattn.kernels.limits import HOPPER_BLOCKS, INT32_MAX, several_value_scales
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.form import Kernel
from cupyattn.problem.kernel_module import kernel_features, module_spec
from cupyattn.problem.operands import Codes, Operands, ValueCodes
from cupyattn.problem.support import SUPPORTED, Support, grid_support


def kernel_support(
    kernel: Kernel, operands: Operands, arch: str | None = None, *, on_device: bool = False
) -> Support:
    """Say whether a kernel takes the operands of the call that it was settled for.

    Parameters
    ----------
    kernel : Kernel
    operands : Operands
        As for `cupyattn.plans.attention.plan_attention`.
    arch : str, optional
        The architecture that the call names.
    on_device : bool
        Whether a device is there, whose own limits the launch is held to. Otherwise the limits are
        those of the architecture that the call resolves for: the one that it names, or the least
        that its kernel is compiled for.
    """
    for found in _answers(kernel, operands, arch, on_device):
        if not found.supported:
            return found
    return SUPPORTED


def _answers(
    kernel: Kernel, operands: Operands, arch: str | None, on_device: bool
) -> Iterator[Support]:
    """Yield what codes, tiles and size have to say, the next only if it is asked for."""
    codes, tiles = kernel.codes, kernel.tiles
    if codes is not None and codes.fused:
        yield _of_fused(codes, tiles)
    if codes is not None and codes.values is not None:
        yield _of_values(codes.values, operands.v, tiles)
    if math.prod(kernel.call.output_shape) == 0:  # nothing is launched
        return
    if not kernel.own_tiles or kernel.variant.source is not None:
        spec = module_spec(
            kernel.variant, kernel_features(kernel, operands), kernel.tiles, kernel.form
        )
        yield _of_tiles(kernel, spec)
        if not on_device:
            yield _of_shared_memory(spec, arch or spec.least_arch, kernel)
    for counts in kernel.blocks.values():
        yield grid_support(kernel.variant.name, *counts)
        if kernel.row.on_hopper:  # every block goes on to a tile past the last, an int as well
            yield grid_support("the Hopper form", *counts, limit=INT32_MAX - HOPPER_BLOCKS)


def _of_fused(codes: Codes, tiles: Tiles) -> Support:
    """Say whether the kernel can make the codes itself in tiles of this size."""
    whole = not tiles.block_q % codes.group_q and not tiles.block_kv % codes.group_kv
    if tiles.num_stages == 1 and whole:
        return SUPPORTED
    return Support(
        False,
        f"fused=True needs tiles.num_stages=1, and tiles.block_q and tiles.block_kv of "
        f"whole groups of {codes.group_q} rows and {codes.group_kv} keys, got {tiles}",
        ValueError,
    )


def _of_values(values: ValueCodes, v_codes: Operand, tiles: Tiles) -> Support:
    """Say whether the kernel can read codes of V in tiles of this size."""
    if reason := several_value_scales(values.group, tiles):
        return Support(False, reason)
    if 0 in v_codes.shape or v_codes.allows(16):
        return SUPPORTED
    return Support(
        False,
        "v_codes must be contiguous at an address that is a multiple of 16 bytes, got "
        f"16 n + {v_codes.misalignment} and strides {v_codes.strides}",
        ValueError,
    )


def _of_tiles(kernel: Kernel, spec: ModuleSpec) -> Support:
    """Say whether the tiles keep the contracts that the kernel's source states."""
    reason = refused_tiles(spec, kernel.tiles, _called(kernel))
    return Support(False, reason, ValueError) if reason else SUPPORTED


def _of_shared_memory(spec: ModuleSpec, arch: str, kernel: Kernel) -> Support:
    """Say whether a block has room for the tiles on an architecture."""
    least, limit = least_shared_bytes(spec), shared_memory_of(arch)
    most = max(map(shared_memory_of, ARCHITECTURES))
    if least <= limit:
        return SUPPORTED
    return Support(
        False,
        f"{_called(kernel)} does not take {kernel.tiles} at head_dim {kernel.call.head_dim}: a "
        f"block needs at least {least} bytes of shared memory, {arch} allows {limit}; reduce "
        "tiles.block_kv or tiles.num_stages first, then tiles.block_q"
        + (", or name another arch" if least <= most else ""),
        KernelLaunchError,
    )


def _called(kernel: Kernel) -> str:
    """Return the rung's name with its form, or with why the form is not the Hopper one."""
    note = kernel.note
    return f"{kernel.variant.name} ({note if note.startswith('portable form') else kernel.form})"
