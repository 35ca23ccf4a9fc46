"""What a kernel receives: the record that mirror, bounds and judge take.

A call that runs is a `cupyattn.problem.attention.AttentionProblem`. Here are
operands beside the name of a
rung, wherever they lie. Nothing is launched, so a form may be named that no device here runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels import ladder
from cupyattn.kernels.limits import check_shapes
from cupyattn.kernels.tiles import check_kind
from cupyattn.problem.checks import ScoreOptions, check_dtype, check_options
from cupyattn.problem.form import Kernel, fresh_rows, kernel_support, settle
from cupyattn.problem.operands import Codes, Operands
from cupyattn.problem.row_preparation import Preparation, check_turned_before
from cupyattn.problem.settings import Settings, of_arguments
from cupyattn.quant.operand_protocol import Quantized, check_one_sequence, check_queries

Array = Any

#: Architectures that have forms of their own; None has the portable ones.
FORM_ARCHITECTURES = (None, "sm_90a")


@dataclass(frozen=True, eq=False)
class Received:
    """A kernel and its operands.

    Parameters
    ----------
    kernel : Kernel
    arrays : (array, array, array)
        The caller's q, k, v, layout (batch, heads, len, head_dim); None where only the `quantized`
        operands are known.
    scores : ScoreOptions
        What changes and masks scores.
    quantized : QuantizedQKV, optional
        The INT8 operands that the kernel reads in place of arrays.
    preparation : Preparation, optional
        What happens to rows of q and k first.
    """

    kernel: Kernel
    arrays: tuple[Any, Any, Any]
    scores: ScoreOptions
    quantized: Any = None
    preparation: Preparation | None = None

    @functools.cached_property
    def prepared(self) -> tuple[Any, Any, Any]:
        """q, k and v as rungs of 16 and 32 bits multiply them."""
        q, k, v = self.arrays
        return self.arrays if self.preparation is None else (*self.preparation.stored(q, k), v)


def receive(
    settings: Settings,
    arrays: Mapping[str, Any],
    *,
    quantized: Quantized | None = None,
    form: str | None = None,
    arch: str | None = None,
) -> Received:
    """Settle the kernel of arrays or quantised operands, wherever they lie.

    Parameters
    ----------
    settings : Settings
        With the name of a rung; of the others those count that say what is computed, and the tiles.
    arrays : mapping
        q, k and v of layout (batch, heads, len, head_dim), not looked at where `quantized` is
        given, and of the others of `cupyattn.problem.settings.ARRAYS` those that change scores or
        rows.
    quantized : QuantizedQKV, optional
        Operands that are quantised already.
    form, arch : str, optional
        As for `cupyattn.problem.form.settle`. Operands count as fresh arrays of an architecture.

    Returns
    -------
    Received

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        For operands or options that do not fit together.
    """
    check_kind(settings.tiles)
    rung, codes = ladder.lookup(settings.variant), None
    rung.check_form(form)
    q, k, v = (arrays[name] for name in "qkv")
    if quantized is None:
        dtype, shapes = check_dtype(q, k, v), [tuple(x.shape) for x in (q, k, v)]
    else:
        if not isinstance(quantized, Quantized):
            raise TypeError(f"quantized must be a cupyattn.QuantizedQKV, got {shown(quantized)}")
        check_queries(quantized)
        check_one_sequence(quantized)
        z = quantized.unpacked()
        dtype, codes = z.out_dtype, Codes.of(z)
        shapes = [tuple(x.shape) for x in (z.q_codes, z.k_codes, z.k_codes)]
    scores = settings.scores(arrays)
    mask, bias = operands(mask=scores.mask, bias=scores.bias)
    taken = replace(scores, mask=mask, bias=bias)
    call = check_options(check_shapes(*shapes), dtype, settings.scale, taken, return_lse=True)
    places = None
    if arch is not None:
        o = Operand.contiguous(call.output_shape, STORAGE[dtype].itemsize)
        rows = (q, k, v) if quantized is None else (z.q_codes, z.k_codes, z.v_codes)
        at = [fresh_rows(Operand.of(z.v if x is None else x)) for x in rows]
        of_bias = None if bias is None else Operand.of(bias)
        places = Operands(at[0], at[1], at[2], o, bias=of_bias)
    kernel = settle(
        rung, call, places, codes=codes, tiles=settings.tiles, arch=arch, form=form
    )
    if places is not None:
        kernel_support(kernel, places, arch).check()
    sizes = call.heads, call.heads_kv, call.len_q, call.len_kv, call.head_dim
    preparation = Preparation.of_arrays(settings.rows(arrays), sizes)
    return Received(kernel, (q, k, v), scores, quantized, preparation)


def receive_arguments(arguments: Mapping[str, Any], *, arch: str | None = None) -> Received:
    """Settle the kernel of what a mirror or a bound is given.

    Parameters
    ----------
    arguments : mapping
        Of `cupyattn.problem.settings.of_arguments`, with ``quantized`` and ``form`` as for
        `receive`.
    arch : str, optional
        As for `receive`.

    Returns
    -------
    Received

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `receive`, and for rows of quantised operands that were to be prepared.
    """
    settings, arrays = of_arguments(arguments)
    quantized = arguments["quantized"]
    received = receive(settings, arrays, quantized=quantized, form=arguments["form"], arch=arch)
    if received.preparation is not None:
        check_turned_before(quantized)
    return received


def receive_in_every_form(arguments: Mapping[str, Any]) -> list[Received]:
    """Settle each kernel that this version runs for what a bound is given, on any architecture.

    Parameters
    ----------
    arguments
        As for `receive_arguments`.

    Returns
    -------
    list of Received
        One for each form and its tiles, the portable one first.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `receive_arguments`, of operands that no form takes.
    """
    portable, *own = FORM_ARCHITECTURES
    found = [receive_arguments(arguments, arch=portable)]
    for arch in own:
        with contextlib.suppress(UnsupportedError, ValueError):  # which none of its forms takes
            found.append(receive_arguments(arguments, arch=arch))
    kernels = {(one.kernel.form, one.kernel.tiles): one for one in found}
    return list(kernels.values())
