"""A backward pass as definition, mirror and bound take it: arrays and options of its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupyattn.arrays.kinds import Array
from cupyattn.problem.backward_form import (
    BackwardKernel,
    check_backward,
    check_grad_bias,
    settle_backward,
)
from cupyattn.problem.checks import check_options
from cupyattn.problem.settings import Settings, parse


@dataclass(frozen=True)
class BackwardProblem:
    """One backward pass.

    Parameters
    ----------
    d_out, q, k, v : array
        Shapes as for `cupyattn.gradients.backward_exact`.
    out, lse : array or None
        O and the log-sum-exp as the forward pass left them; None: exact.
    scale : float or None
        Softmax scale; None: ``head_dim ** -0.5``.
    options : mapping
        Options that change and mask scores (`cupyattn.problem.settings.Settings.scores`).
    all_keys : bool
        Whether the rows attend to no keys but these.
    d_lse : array, optional
        The gradient with respect to the log-sum-exp; None: zero.
    sums : (array, array), optional
        M and the factor of coarse rows, over all their keys, (batch, heads, len_q); not with
        `all_keys`.
    of_bias : tuple of int, optional
        Shape of the gradient of the bias, with 1 for axes that broadcast. None if it is not
        requested.
    """

    d_out: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    scale: float | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: Settings().scores({}))
    all_keys: bool = True
    d_lse: Array | None = None
    of_bias: tuple[int, ...] | None = None
    sums: tuple[Array, Array] | None = None

    @classmethod
    def of(
        cls, function: str, received: Sequence[Any], q: Any, k: Any, v: Any,
        options: Mapping[str, Any], all_keys: bool, grad_bias: bool,
    ) -> BackwardProblem:  # fmt: skip
        """Separate the scale from the options of `function`. `received` holds d_out, out, lse and
        d_lse."""
        settings, arrays = parse(function, q, k, v, options)
        d_out, out, lse, d_lse = received
        scores = settings.scores(arrays)
        check_grad_bias(grad_bias, scores["bias"])
        of_bias = tuple(scores["bias"].shape) if grad_bias else None
        return cls(d_out, q, k, v, out, lse, settings.scale, scores, all_keys, d_lse, of_bias)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Gradient, operands and results, in the order of the parameters."""
        return self.d_out, self.q, self.k, self.v, self.out, self.lse

    def portable_kernel(self, *, deterministic: bool) -> BackwardKernel:
        """Choose the portable form, for operands at any alignment.

        Raises
        ------
        TypeError, ValueError, UnsupportedError
            For arrays or options that do not fit together.
        """
        sizes, dtype = check_backward(*self.arrays, d_lse=self.d_lse)
        call = check_options(sizes, dtype, self.scale, self.options, return_lse=True)
        return settle_backward(call, {}, deterministic=deterministic)
