"""Activation functions of a product's epilogue, and how steep they are."""

from __future__ import annotations

#: What may follow a product, by name: nothing, GELU by erf or by tanh, SiLU.
ACTIVATIONS = ("", "gelu", "gelu_tanh", "silu")

#: [L41] Largest slope of each of these; of both forms of GELU it is below 1.129.
ACTIVATION_SLOPE = {"": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}

#: Thread blocks that may share a tile: the largest cluster that every device has.
MOST_SPLITS = 8


def check_activation(activation: str) -> None:
    """Raise ValueError for a name that is none of `ACTIVATIONS`."""
    if activation not in ACTIVATIONS:
        names = " or ".join(map(repr, ACTIVATIONS[1:]))
        raise ValueError(f"activation must be {names} or None, got {activation!r}")
