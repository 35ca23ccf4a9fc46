"""Properties of a device: the architecture to compile for, and the shared memory of a block."""

from __future__ import annotations

from cupyattn.compiler import nvrtc
from cupyattn.compiler.architectures import LEAST_CAPABILITY, capability_of
from cupyattn.compiler.target import HOPPER_CAPABILITY
from cupyattn.errors import KernelLaunchError, UnsupportedError


def device_architecture(capability: int, hopper: bool = False) -> str:
    """Return what to compile for a device.

    Parameters
    ----------
    capability : int
        Compute capability times ten: 90 for an H100 or H200.
    hopper : bool
        Whether the source uses instructions that exist on compute capability 9.0 alone.

    Returns
    -------
    str
        The newest architecture of the same generation, not newer than the device, that the NVRTC
        of this environment knows; its binary runs on the device.

    Raises
    ------
    UnsupportedError
        If the device is too old, or too new for this NVRTC, or not a Hopper where one is needed.
    """
    _check_supported(capability)
    if hopper:
        if capability != HOPPER_CAPABILITY:
            raise UnsupportedError(
                f"the Hopper form runs on compute capability 9.0 alone, this device has "
                f"{capability / 10:.1f}: use the portable form"
            )
        return "sm_90a"
    compiler = nvrtc.load()
    usable = [c for c in compiler.capabilities if c // 10 == capability // 10 and c <= capability]
    if not usable:
        raise UnsupportedError(
            f"{compiler} does not know compute capability "
            f"{capability / 10:.1f}: install a newer nvidia-cuda-nvrtc"
        )
    return f"sm_{max(usable)}"


def _check_supported(capability: int) -> None:
    if capability < LEAST_CAPABILITY:
        raise UnsupportedError(
            f"compute capability {capability / 10:.1f} is not supported, 8.0 and newer are: "
            "call with NumPy arrays to run the mirror"
        )


def check_runs_on(arch: str, capability: int) -> None:
    """Raise where a device cannot run the machine code of an architecture."""
    needed = capability_of(arch)
    exact = arch.endswith("a")
    same_generation = needed // 10 == capability // 10 and needed <= capability
    if needed != capability and (exact or not same_generation):
        raise UnsupportedError(
            f"machine code for {arch} does not run on compute capability {capability / 10:.1f}: "
            "leave arch out to compile for the device"
        )


def check_shared_memory(
    smem_bytes: int, limit: int, what: str, where: str = "this device"
) -> None:
    """Raise where a block needs more shared memory than a device has.

    Parameters
    ----------
    smem_bytes : int
        Bytes that a block needs.
    limit : int
        Bytes that the device allows a block (``MaxSharedMemoryPerBlockOptin``).
    what : str
        Which kernel, with its tiles.
    where : str
        The device or the architecture, for the message.

    Raises
    ------
    KernelLaunchError
        Naming both numbers and the tile to reduce.

    Examples
    --------
    >>> check_shared_memory(49152, 101376, "attn_fa.cu")
    """
    if smem_bytes > limit:
        raise KernelLaunchError(
            f"{what} needs {smem_bytes} bytes of shared memory per block, {where} allows "
            f"{limit}: reduce tiles.block_kv or tiles.num_stages first, then tiles.block_q"
        )
