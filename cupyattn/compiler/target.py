"""Choose where kernels run: backends, architectures and compute capabilities."""

from __future__ import annotations

from cupyattn.arrays.described import Described
from cupyattn.compiler import nvrtc
from cupyattn.compiler.architectures import ARCHITECTURES as ARCHITECTURES
from cupyattn.compiler.architectures import capability_of as capability_of
from cupyattn.errors import shown
from cupyattn.switches import is_on

BACKENDS = ("cuda", "mirror", "interpret")

#: Libraries by the backends that take their arrays.
_KIND = {"cuda": "CuPy", "mirror": "NumPy", "interpret": "NumPy"}


def choose(backend: str | None, on_device: bool, *, registered: bool = False) -> str:
    """Return the backend of a call.

    Parameters
    ----------
    backend : {"cuda", "mirror", "interpret"} or None
        What the caller asks for. None: ``cuda`` for CuPy arrays; for NumPy arrays ``mirror``, or
        ``interpret`` where the environment says ``CUPYATTN_INTERPRET=1``.
    on_device : bool
        Whether its arrays are CuPy's, not NumPy's.
    registered : bool
        Whether the rung is a user's own: the mirror reads no source, so that on NumPy arrays such a
        rung runs in the interpreter unless ``mirror`` is named.

    Raises
    ------
    ValueError
        For another name, or one that does not take arrays of that kind.
    """
    kind = "CuPy" if on_device else "NumPy"
    check_backend(backend)
    if backend is None:
        if on_device:
            return "cuda"
        return "interpret" if registered or is_on("CUPYATTN_INTERPRET") else "mirror"
    if _KIND[backend] != kind:
        raise ValueError(f"backend={backend!r} takes {_KIND[backend]} arrays, got {kind} arrays")
    return backend


def check_backend(backend: str | None) -> None:
    """Raise ValueError unless there is a backend of that name, or None is named."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be 'cuda', 'mirror' or 'interpret', got {shown(backend)}")


def own_arch(backend: str, x: Described) -> str | None:
    """Return ``"sm_90a"`` where an array lies on a device that runs the Hopper forms, else None."""
    hopper = backend == "cuda" and x.capability == HOPPER_CAPABILITY
    return "sm_90a" if hopper else None

#: Compute capability times ten of the devices that the Hopper forms are for.
HOPPER_CAPABILITY = 90


def supported_architectures() -> tuple[str, ...]:
    """Return the members of `ARCHITECTURES` that the NVRTC of this environment compiles for."""
    known = nvrtc.load().capabilities
    return tuple(arch for arch in ARCHITECTURES if capability_of(arch) in known)
