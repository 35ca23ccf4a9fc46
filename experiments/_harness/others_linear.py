"""Other libraries' INT8 linear layers: which there are, and whether they compute the layer.

Their arithmetic has no error bound here: one is refused where its relative error is past what
rounding rows to 8 bits can cost.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import cupyattn as ca
from experiments._harness.others import refusing

COMFY = "comfy-kitchen"
#: Rows of a result that are compared with the layer in 16 bits.
COMPARED_ROWS = 256
#: Relative error past which a layer is refused: 8 bits by row and column cost N(0, 1) about 0.013.
TOLERANCE = 0.05


def versions() -> dict[str, str]:
    """Return the version of each library, or that it is absent, for a record."""
    try:
        return {COMFY: importlib.metadata.version(COMFY)}
    except importlib.metadata.PackageNotFoundError:
        return {COMFY: "absent: not installed"}


def comfy_kitchen(
    x: Any, codes: Any, scales: Any, bias: Any, reference: Any, backend: str
) -> Callable[..., Any]:
    """Return comfy-kitchen's ``int8_linear``, for a layer that it was seen to compute.

    Parameters
    ----------
    x : torch.Tensor, (m, k)
        Quantised by row in the call.
    codes, scales : torch.Tensor, (n, k) int8 and (n, 1) float32
        Of the weight. It also takes one scale, which it would spread over columns in each call.
    bias : torch.Tensor, (n,)
    reference : torch.Tensor, (m, n)
        The layer in the type of x, which the result is compared with.
    backend : {"cuda", "eager"}
        Which of its implementations has to run: it would fall back to another without a word.

    Returns
    -------
    callable
        ``call(x, codes, scales, bias)``, as its users call it; y has the type of x.

    Raises
    ------
    UnsupportedError
        Where it cannot be imported, does not take the operands, or computes something else.
    """
    try:
        import comfy_kitchen as library
    except ImportError as error:
        raise ca.UnsupportedError(f"{COMFY} is absent: {error}") from error

    given = {"x": x, "weight": codes, "weight_scale": scales, "bias": bias, "out_dtype": x.dtype}
    found = library.registry.validate_backend_for_call(backend, "int8_linear", given)
    if not found.success:
        raise ca.UnsupportedError(
            f"{COMFY} cannot run on {backend}: {found.failed_param}: {found.failure_reason}"
        )

    def call(x: Any, codes: Any, scales: Any, bias: Any) -> Any:
        return library.int8_linear(x, codes, scales, bias=bias, out_dtype=x.dtype)

    y, exact = (
        full[:COMPARED_ROWS].float()
        for full in (refusing(COMFY, call)(x, codes, scales, bias), reference)
    )
    error = float((y - exact).norm() / exact.norm())
    if not error <= TOLERANCE:  # NaN, too
        raise ca.UnsupportedError(
            f"{COMFY} computes something else: relative error {error:.3g}, at most {TOLERANCE} is "
            "what 8 bits cost"
        )
    return call
