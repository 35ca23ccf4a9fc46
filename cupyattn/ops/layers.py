"""Layers of INT8 weights that read one input, as one operation: torch's, under its compiler too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cupyattn.arrays.described import Described
from cupyattn.errors import UnsupportedError
from cupyattn.ops.act_quant import ACT_QUANT, SIDES, ActQuantSettings, channels_of
from cupyattn.ops.gemm import GEMM, GemmSettings, are_alike, plan_together, settle_together
from cupyattn.ops.norm_quant import NORM_QUANT, PARTS, NormQuantSettings, are_of_groups
from cupyattn.ops.operation import Operation, problem_of, run
from cupyattn.plans.gemm import buffer_of
from cupyattn.plans.norm_quant import VECTORS
from cupyattn.plans.records import Stage, Work, Workspace
from cupyattn.problem.gemm_form import MOST_LAYERS, GemmKernel
from cupyattn.problem.joint_rows import joined
from cupyattn.problem.problem import Problem
from cupyattn.problem.row_preparation import EPS
from cupyattn.quant.activation import columns_of
from cupyattn.quant.blocks import BLOCK_SIZE, strategy_of_weight

#: The first architecture on which launches overlap.
OVERLAPPING = "sm_90"
#: The operations that make codes of rows, by name.
_OPERATIONS: dict[str, Operation] = {one.name: one for one in (ACT_QUANT, NORM_QUANT)}
#: Results of quantising, by their names in products.
_CODES = {"codes": "a", "scales": "a_scales"}


class LayersSettings(NamedTuple):
    """Settings of several layers: the activation of each, and arguments of `int8_gemm`.

    `before` describes the operations on rows before they are quantised; its backend is the layers'
    backend.
    """

    out_dtype: str
    activations: tuple[str, ...]
    arch: str | None
    backend: str | None
    before: NormQuantSettings | None = None


def steps_before(rotate: str | None, smooth: bool = False) -> NormQuantSettings | None:
    """Return the steps of rows that a layer rotates, or multiplies by factors of channels, or None.

    Its rotation need not tell adjacent from spread groups; the factors are the pass's `weight`.
    """
    if rotate is None and not smooth:
        return None
    return NormQuantSettings(None, None, rotate and "hadamard", EPS, "channel", None)


class _Layers(Operation):
    """Activations to codes, once, and their products with the weights of all layers.

    Its arrays are "x" and vectors of `norm_quant` by their names. Optional "right" has channels
    after the channels of x, and "below" rows after its rows. The arrays of each product have names
    that end in the number of the layer: "b0", "b_scales0", and so on. If given, "c0" receives the
    result. Between the launches, codes and their scales are in scratch memory.
    """

    name = "int8_layers"
    receives = ("c",)

    def resolve(self, settings: LayersSettings, arrays: Mapping[str, Described]) -> Problem:
        """Check the activations, and the products of codes of their shape."""
        if settings.before is None:
            if "below" in arrays:
                raise UnsupportedError(
                    "below goes with rows that are normalised, rotated or multiplied by factors, "
                    "not quantised as they are: concatenate x and below"
                )
            strategy = strategy_of_weight(arrays["b0"].shape, arrays["b_scales0"].shape)
        elif "right" in arrays:
            raise UnsupportedError(
                "right goes with rows that are quantised as they are, not normalised, rotated or "
                "multiplied by factors: concatenate x and right"
            )
        else:
            strategy = settings.before.strategy
        codes = _codes_of(settings, arrays, strategy)
        x = joined(arrays["x"], arrays.get("below"))
        gated = settings.before is not None and settings.before.activation
        channels = columns_of(channels_of(arrays), gated or "")
        blocks = 1 if strategy == "channel" else -(-channels // BLOCK_SIZE)
        shapes = {"a": ((*x.shape[:-1], channels), "int8")}
        shapes["a_scales"] = (*x.shape[:-1], blocks), "float32"
        between = {n: Described.contiguous(n, *form, x.device) for n, form in shapes.items()}
        products: list[Problem] = []
        operands = dict(codes.operands)
        received: dict[str, Described] = {}
        results: dict[str, Any] = {}
        for number, activation in enumerate(settings.activations):
            own = _of_layer(arrays, number)
            if "gate" in own and own["gate"].ndim > 2:  # of rows with several axes
                _check_gate(own["gate"], x)
                own["gate"] = own["gate"].rows()
            how = GemmSettings(
                settings.out_dtype, activation, None, settings.arch, settings.backend
            )
            product: Problem = problem_of(GEMM, how, {**between, **own})
            products.append(product)
            operands |= {
                f"{name}{number}": array
                for name, array in product.operands.items()
                if name not in between
            }
            received |= {f"{name}{number}": array for name, array in product.received.items()}
            results |= {f"{name}{number}": result for name, result in product.results.items()}
        # NOTE: with few rows, only some layers have the Hopper form; the portable form runs there,
        # too.
        arch = next((one.arch for one in products if one.arch), None)
        return replace(
            codes, what=self.name, arch=arch, operands=operands, results=results,
            received=received, settled=(codes, products, _launches_of(products)),
        )  # fmt: skip

    def plan(self, problem: Problem) -> Work:
        """Return the launch that quantises, and a launch for each product or several of them."""
        codes, products, launches = problem.settled
        (quantise,) = _OPERATIONS[codes.what].plan(codes).stages
        stages = [Stage(quantise.plan, _CODES)]
        for numbers, kernel in launches:
            if kernel is None:
                (multiply,) = GEMM.plan(products[numbers[0]]).stages
                plan = multiply.plan
            else:
                plan = plan_together(kernel, [products[number] for number in numbers])
            if numbers[0] == 0 and quantise.plan.launches:  # it may bring weights early
                made = tuple(_CODES.values())
                plan = replace(
                    plan, launches=tuple(replace(one, awaits=made) for one in plan.launches)
                )
            names: dict[str, str] = {}
            for place, number in enumerate(numbers):
                own = products[number]
                buffers = {*own.operands, *own.received, *own.results} - {*_CODES.values()}
                names |= {buffer_of(name, place): f"{name}{number}" for name in buffers}
            stages.append(Stage(plan, names))
        between = ((name, products[0].operands[name]) for name in _CODES.values())
        return Work(
            tuple(stages), tuple(Workspace(name, x.shape, x.dtype.name) for name, x in between)
        )

    def mirror(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the products with NumPy; return the products that no array receives."""
        codes, products, _ = problem.settled
        found = _OPERATIONS[codes.what].mirror(codes, arrays)
        made = {_CODES[name]: x for name, x in found.items()}
        results: dict[str, Any] = {}
        for number, product in enumerate(products):
            rows = {name: x.reshape(product.operands[name].shape) for name, x in made.items()}
            found = GEMM.mirror(product, {**_of_layer(arrays, number), **rows})
            results |= {f"{name}{number}": x for name, x in found.items()}
        return results

    def restore(self, facts: None, arrays: Mapping[str, Any], results: dict[str, Any]) -> list[Any]:
        """Return the results, each in the array that received it, if there is one."""
        return [x for name, x in {**results, **arrays}.items() if name.startswith("c")]


def _launches_of(products: Sequence[Problem]) -> list[tuple[list[int], GemmKernel | None]]:
    """Return the numbers of the products of each launch, and the kernel if there are several.

    A launch takes the place of its first product.
    """
    groups: list[list[int]] = []
    for number, product in enumerate(products):
        for group in groups:
            own = [products[i] for i in group]
            if len(group) < MOST_LAYERS and are_alike([*own, product]):
                group.append(number)
                break
        else:
            groups.append([number])
    launches: list[tuple[list[int], GemmKernel | None]] = []
    for group in groups:
        kernel = settle_together([products[i] for i in group]) if len(group) > 1 else None
        launches += [([i], None) for i in group] if kernel is None else [(group, kernel)]
    return sorted(launches, key=lambda one: one[0])


def _codes_of(
    settings: LayersSettings, arrays: Mapping[str, Described], strategy: str
) -> Problem:
    """Return how rows become codes."""
    before = settings.before
    given = {name: arrays[name] for name in (*SIDES, *PARTS[1:], *VECTORS) if name in arrays}
    operation: Operation = ACT_QUANT
    asked: Any = ActQuantSettings(BLOCK_SIZE, settings.backend, strategy=strategy)
    if before is not None:
        operation, asked = NORM_QUANT, before._replace(backend=settings.backend)
    codes: Problem = problem_of(operation, asked, given)
    return codes


def _check_gate(gate: Described, x: Described) -> None:
    """Raise ValueError for a gate with the axes of x that would be repeated by sample."""
    if gate.ndim == x.ndim and not are_of_groups(tuple(gate.shape), tuple(x.shape)):
        raise ValueError(
            f"gate must be (n,), (groups, n), or as the result with axes of 1 before the last, got "
            f"{tuple(gate.shape)} for rows {tuple(x.shape[:-1])}: expand it to the result's shape"
        )


def _of_layer(arrays: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the arrays of a layer, by the names of a product."""
    end = str(number)
    named = ((name.rstrip("0123456789"), name, x) for name, x in arrays.items())
    return {short: x for short, name, x in named if name == short + end}


LAYERS = _Layers()


def interpret_layer(
    x: Any,
    codes: Any,
    scales: Any,
    settings: LayersSettings,
    *,
    weight: Any = None,
    out: Any = None,
    **operands: Any,
) -> Any:
    """Interpret a layer as models launch it: its product may begin while codes are made.

    Parameters
    ----------
    x : numpy.ndarray
    codes, scales : numpy.ndarray
        As for `cupyattn.Int8Linear`.
    settings : LayersSettings
        Settings of one layer. Without `arch`, the first architecture on which launches overlap.
    weight : numpy.ndarray, optional
        Weight of the pass that makes codes of x.
    out, **operands
        As for `cupyattn.int8_gemm`.

    Returns
    -------
    numpy.ndarray
    """
    arrays = {"x": x, "b0": codes, "b_scales0": scales}
    arrays |= {} if weight is None else {"weight": weight}
    operands |= {"c": out}
    arrays |= {f"{name}0": array for name, array in operands.items() if array is not None}
    own = settings._replace(arch=settings.arch or OVERLAPPING, backend="interpret")
    return run(LAYERS, own, arrays)[0]
