"""A diffusion transformer: patches, adaLN blocks, QK-norm, RoPE, MLP, forwards and backwards.

It predicts the velocity of flow matching, ``noise - image``, at ``x = (1 - sigma) image + sigma
noise``. One linear layer makes shifts, scales and gates for all blocks from noise level and label.
Each block adds a separate table to them (adaLN-single, Chen et al. 2023).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.errors import UnsupportedError
from experiments.dit import layers
from experiments.dit.attention import Attention
from experiments.dit.data import NAMES
from experiments.dit.parameters import Parameters

Array = Any

#: Shift, scale and gate of attention and of the MLP.
_MODULATIONS = 6
#: Periods of the sinusoids that encode noise levels, and of RoPE.
_LONGEST_PERIOD, _LONGEST_TURN, _LEVELS = 10_000.0, 100.0, 1000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer.

    Parameters
    ----------
    size : int
        Rows and columns of an image, of three channels.
    patch : int
        Rows and columns that make a token.
    width, depth, heads : int
    classes : int
        Labels.
    mlp : int
        Width of the MLP's inner layer over `width`.

    Examples
    --------
    >>> Shape().tokens, Shape().head_dim, Shape().count
    (1024, 64, 5408780)
    """

    size: int = 64
    patch: int = 2
    width: int = 256
    depth: int = 6
    heads: int = 4
    classes: int = len(NAMES)
    mlp: int = 4

    @property
    def tokens(self) -> int:
        """Number of tokens of one image."""
        return (self.size // self.patch) ** 2

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.width // self.heads

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name."""
        w, channels = self.width, 3 * self.patch**2
        sizes = {"patch": (channels, w), "time.0": (w, w), "time.1": (w, w)}
        sizes["modulation"] = (w, _MODULATIONS * w)
        found: dict[str, tuple[int, ...]] = {"label": (self.classes, w)}
        for i in range(self.depth):
            found[f"{i}.table"] = (_MODULATIONS * w,)
            found |= {f"{i}.{name}": (self.head_dim,) for name in ("q_norm", "k_norm")}
            sizes |= {f"{i}.qkv": (w, 3 * w), f"{i}.out": (w, w)}
            sizes |= {f"{i}.mlp.0": (w, self.mlp * w), f"{i}.mlp.1": (self.mlp * w, w)}
        sizes |= {"final.modulation": (w, 2 * w), "final": (w, channels)}
        for name, (rows, columns) in sizes.items():
            found |= {f"{name}.weight": (rows, columns), f"{name}.bias": (columns,)}
        return found

    @property
    def count(self) -> int:
        """Numbers in all parameters together."""
        return sum(map(math.prod, self.parameters.values()))


def initial(shape: Shape, seed: int) -> Parameters:
    """Draw parameters, float32 on the host: blocks are the identity at first, the output is 0."""
    rng = np.random.default_rng(seed)
    found = Parameters(shape.parameters, np.zeros(shape.count, np.float32))
    for name, x in found.items():
        if name.endswith("_norm"):
            x[...] = 1
        elif name == "label":
            x[...] = 0.02 * rng.standard_normal(x.shape)
        elif name.endswith(".weight") and not ("modulation" in name or name == "final.weight"):
            x[...] = rng.standard_normal(x.shape) / math.sqrt(x.shape[0])
    return found


def positions(shape: Shape) -> np.ndarray:
    """Return the angles of RoPE: half of the pairs turn by row, half by column.

    Returns
    -------
    array, float64, (tokens, head_dim / 2)
    """
    pairs, side = shape.head_dim // 2, shape.size // shape.patch
    speeds = _LONGEST_TURN ** -(np.arange(pairs // 2) / (pairs // 2))
    rows, columns = (x.reshape(-1, 1) for x in np.mgrid[:side, :side])
    return np.concatenate([rows * speeds, columns * speeds], axis=1)


class Model:
    """The transformer: its fixed sizes, and its two passes.

    Parameters
    ----------
    shape : Shape
    xp : module
        NumPy or CuPy.
    wide : str
        Type of activations and gradients; parameters come in it.
    linear : mapping of str to callable, optional
        Layers that run in place of the model's own of these names, without gradients.

    Raises
    ------
    ValueError
        For sizes that do not divide.
    """

    def __init__(
        self,
        shape: Shape,
        xp: Any,
        wide: str = "float32",
        linear: Mapping[str, Callable[[Array], Array]] | None = None,
    ) -> None:
        if shape.size % shape.patch or shape.width % shape.heads or shape.head_dim % 4:
            raise ValueError(
                "patch must divide size, heads the width, and 4 the head_dim that results, got "
                f"{shape}"
            )
        self.shape, self.xp, self.wide, self.linear = shape, xp, np.dtype(wide), linear or {}
        angles = positions(shape)
        self._cos, self._sin = (xp.asarray(f(angles).astype(wide)) for f in (np.cos, np.sin))
        half = shape.width // 2
        speeds = _LEVELS * _LONGEST_PERIOD ** -(np.arange(half) / half)
        self._speeds = xp.asarray(speeds.astype(wide))

    def forward(
        self,
        parameters: Parameters,
        rounded: Parameters,
        x: Array,
        sigma: Array,
        labels: Array,
        attention: Attention,
        *,
        keep: bool = True,
    ) -> tuple[Array, Any]:
        """Predict velocities.

        Parameters
        ----------
        parameters : Parameters
            In the wide type.
        rounded : Parameters
            The same in the type of matrix products.
        x : array, (batch, size, size, 3)
            Noisy images.
        sigma : array, (batch,)
            Noise levels, 0 to 1.
        labels : array, (batch,), int
        attention : Attention
        keep : bool
            Whether to keep what the backward pass needs.

        Returns
        -------
        velocity : array, (batch, size, size, 3)
        tape : object
            For `backward`; None where it is not kept.

        Raises
        ------
        UnsupportedError
            If the backward pass shall be possible, and layers without one run.
        """
        if keep and self.linear:
            raise UnsupportedError("layers in place of the model's own have no gradients")
        apply = _linear(parameters, rounded, self.linear)
        tokens = layers.merge_patches(x.astype(self.wide, copy=False), self.shape.patch)
        grid = tokens.shape[:3]
        h, patch = apply("patch", tokens.reshape(len(x), -1, tokens.shape[-1]))
        condition, condition_tape = self._condition(parameters, apply, sigma, labels)
        shared, modulation = apply("modulation", condition)
        blocks = []
        for i in range(self.shape.depth):
            table = shared + parameters[f"{i}.table"]
            h, tape = self._block(i, parameters, apply, h, table, attention)
            blocks.append(tape if keep else None)
        both, final_modulation = apply("final.modulation", condition)
        n, norm = layers.layer_norm(h)
        n, modulated = layers.modulate(n, *self._split(both, 2))
        out, final = apply("final", n)
        velocity = layers.split_patches(out.reshape(*grid, -1), self.shape.patch)
        if not keep:
            return velocity, None
        ends = patch, condition_tape, modulation, final_modulation, norm, modulated, final
        return velocity, (ends, blocks, attention)

    def backward(self, d_velocity: Array, tape: Any, gradients: Parameters) -> None:
        """Write the gradients of all parameters.

        Parameters
        ----------
        d_velocity : array, (batch, size, size, 3)
        tape : object
            Of `forward`.
        gradients : Parameters
            In the wide type; every number of it is written.
        """
        ends, blocks, attention = tape
        patch, condition_tape, modulation, final_modulation, norm, modulated, final = ends
        back = functools.partial(layers.linear_backward_into, gradients)
        d_out = layers.merge_patches(d_velocity, self.shape.patch)
        d_n = back("final", d_out.reshape(len(d_out), -1, d_out.shape[-1]), final)
        d_n, d_shift, d_scale = layers.modulate_backward(d_n, modulated)
        d_both = self.xp.concatenate([d_shift, d_scale], axis=1)
        d_condition = back("final.modulation", d_both, final_modulation)
        d_h = layers.layer_norm_backward(d_n, norm)
        d_shared = self.xp.zeros((len(d_h), _MODULATIONS * self.shape.width), self.wide)
        for i in reversed(range(self.shape.depth)):
            d_h, d_table = self._block_backward(i, back, gradients, d_h, blocks[i], attention)
            gradients[f"{i}.table"][...] = d_table.sum(axis=0)
            d_shared += d_table
        d_condition += back("modulation", d_shared, modulation)
        self._condition_backward(back, gradients, d_condition, condition_tape)
        back("patch", d_h, patch)

    # ---- noise level and label -------------------------------------------------------------------

    def _condition(
        self, parameters: Parameters, apply: Any, sigma: Array, labels: Array
    ) -> tuple[Array, Any]:
        """Return what the modulations are made of, (batch, width)."""
        xp = self.xp
        angles = sigma.astype(self.wide, copy=False)[:, None] * self._speeds
        found = xp.concatenate([xp.cos(angles), xp.sin(angles)], axis=1)
        found, first = apply("time.0", found)
        found, between = layers.silu(found)
        found, second = apply("time.1", found)
        chosen = (labels[:, None] == xp.arange(self.shape.classes)).astype(self.wide)
        found, last = layers.silu(found + chosen @ parameters["label"])
        return found, (first, between, second, chosen, last)

    def _condition_backward(
        self, back: Any, gradients: Parameters, d_condition: Array, tape: Any
    ) -> None:
        first, between, second, chosen, last = tape
        d = layers.silu_backward(d_condition, last)
        gradients["label"][...] = chosen.T @ d
        d = back("time.1", d, second)
        back("time.0", layers.silu_backward(d, between), first)

    def _split(self, x: Array, parts: int) -> list[Array]:
        width = self.shape.width
        return [x[:, i * width : (i + 1) * width] for i in range(parts)]

    # ---- a block ---------------------------------------------------------------------------------

    def _block(
        self, i: int, parameters: Parameters, apply: Any, x: Array, table: Array,
        attention: Attention,
    ) -> tuple[Array, Any]:  # fmt: skip
        """Attention and MLP, each normalised and modulated before, gated behind."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self._split(table, _MODULATIONS)
        n, norm = layers.layer_norm(x)
        n, modulated = layers.modulate(n, shift, scale)
        branch, attended = self._attend(i, parameters, apply, n, attention)
        x, joined = layers.gated(x, gate, branch)
        n, mlp_norm = layers.layer_norm(x)
        n, mlp_modulated = layers.modulate(n, mlp_shift, mlp_scale)
        n, inner = apply(f"{i}.mlp.0", n)
        n, active = layers.gelu(n)
        branch, outer = apply(f"{i}.mlp.1", n)
        x, mlp_joined = layers.gated(x, mlp_gate, branch)
        first = norm, modulated, attended, joined
        return x, (first, (mlp_norm, mlp_modulated, inner, active, outer, mlp_joined))

    def _block_backward(
        self, i: int, back: Any, gradients: Parameters, d_x: Array, tape: Any, attention: Attention
    ) -> tuple[Array, Array]:
        (norm, modulated, attended, joined), rest = tape
        mlp_norm, mlp_modulated, inner, active, outer, mlp_joined = rest
        d_mlp_gate, d = layers.gated_backward(d_x, mlp_joined)
        d = layers.gelu_backward(back(f"{i}.mlp.1", d, outer), active)
        d, *d_mlp = layers.modulate_backward(back(f"{i}.mlp.0", d, inner), mlp_modulated)
        d_x = d_x + layers.layer_norm_backward(d, mlp_norm)
        d_gate, d = layers.gated_backward(d_x, joined)
        d = self._attend_backward(i, back, gradients, d, attended, attention)
        d, *d_attention = layers.modulate_backward(d, modulated)
        d_x = d_x + layers.layer_norm_backward(d, norm)
        return d_x, self.xp.concatenate([*d_attention, d_gate, *d_mlp, d_mlp_gate], axis=1)

    def _attend(
        self, i: int, parameters: Parameters, apply: Any, x: Array, attention: Attention
    ) -> tuple[Array, Any]:
        """Self-attention; q and k are normalised and turned by their positions."""
        qkv, projected = apply(f"{i}.qkv", x)
        q, k, v = self._heads(qkv)
        q, q_norm = layers.rms_norm(q, parameters[f"{i}.q_norm"])
        k, k_norm = layers.rms_norm(k, parameters[f"{i}.k_norm"])
        q, k = (layers.rotate(x, self._cos, self._sin) for x in (q, k))
        o, attended = attention.forward(*(x.astype(attention.dtype) for x in (q, k, v)), layer=i)
        out, result = apply(f"{i}.out", o.reshape(*x.shape))
        return out, (projected, q_norm, k_norm, attended, result)

    def _attend_backward(
        self, i: int, back: Any, gradients: Parameters, d_out: Array, tape: Any,
        attention: Attention,
    ) -> Array:  # fmt: skip
        projected, q_norm, k_norm, attended, result = tape
        d_o = back(f"{i}.out", d_out, result)
        d_o = d_o.reshape(*d_o.shape[:2], self.shape.heads, -1)
        found = attention.backward(d_o.astype(attention.dtype), attended)
        d_qkv = self.xp.empty((*d_o.shape[:2], 3 * self.shape.width), self.wide)
        d_q, d_k, d_v = self._heads(d_qkv)
        d_v[...] = found[2]
        norms = ("q_norm", q_norm, d_q), ("k_norm", k_norm, d_k)
        for d, (name, saved, place) in zip(found[:2], norms, strict=True):
            d = layers.rotate(d.astype(self.wide), self._cos, -self._sin)
            place[...], gradients[f"{i}.{name}"][...] = layers.rms_norm_backward(d, saved)
        return back(f"{i}.qkv", d_qkv, projected)

    def _heads(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Return views of q, k and v: (batch, len, heads, head_dim)."""
        parts = qkv.reshape(*qkv.shape[:2], 3, self.shape.heads, self.shape.head_dim)
        return parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]


def _linear(
    parameters: Mapping[str, Array],
    rounded: Mapping[str, Array],
    others: Mapping[str, Callable[[Array], Array]],
) -> Callable[[str, Array], tuple[Array, Any]]:
    """Return a function that applies the linear layer of a name, or another in its place."""

    def apply(name: str, x: Array) -> tuple[Array, Any]:
        if name in others:
            return others[name](x), None
        return layers.linear(x, rounded[f"{name}.weight"], parameters[f"{name}.bias"])

    return apply


def squared_error(velocity: Array, target: Array) -> tuple[Array, Array]:
    """Return the mean squared error, not waited for, and its gradient by the velocity."""
    off = velocity - target
    return (off * off).mean(), off * (2 / off.size)
