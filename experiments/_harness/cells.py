"""Cells that experiments judge and time, each a rung or a peer on a problem.

An experiment names its cells and how to run one. Here each cell is first held to its error bound;
one that misses it has no time. Compared cells take turns in one run, round by round, on inputs that
rotate through more than the L2 cache. Figures are medians of times. Comparisons are medians of the
ratios within a round. Each has a 95 % bootstrap interval.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import distributions
from cupyattn.arrays import kinds
from cupyattn.arrays.kinds import array_namespace
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.measure import device, rungs, timing
from cupyattn.ops.explain import kernel_form
from cupyattn.plans.records import Launch
from cupyattn.problem.checks import AttentionSpec
from experiments._harness import graphs

#: Errors that keep a cell from running; its row names them.
REFUSALS = (UnsupportedError, ca.KernelCompileError, ca.KernelLaunchError, ca.DeviceMemoryError)


@dataclass(frozen=True)
class Problem:
    """One input: what `cupyattn.distributions.make` draws, and the options of the call.

    Keys are as many as queries unless `length_kv` gives their number. K and V have as many heads
    as Q unless `heads_kv` gives theirs.

    Raises
    ------
    ValueError
        For a causal problem with two lengths, whose diagonal not every library puts at one place.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool = False
    dtype: str = "float16"
    distribution: str = "normal"
    seed: int = 0
    length_kv: int | None = None
    heads_kv: int | None = None

    def __post_init__(self) -> None:
        if self.causal and self.len_kv != self.length:
            raise ValueError(
                f"a causal problem must have one length, got {self.length} and {self.len_kv}"
            )

    @property
    def len_kv(self) -> int:
        """Number of keys."""
        return self.length if self.length_kv is None else self.length_kv

    @property
    def key_heads(self) -> int:
        """Number of heads of K and V."""
        return self.heads if self.heads_kv is None else self.heads_kv

    @property
    def name(self) -> str:
        """One line that tells it from the others."""
        mask = " causal" if self.causal else ""
        heads = f"H{self.heads}" + ("" if self.heads_kv is None else f"/{self.heads_kv}")
        lengths = f"{self.length}" if self.len_kv == self.length else f"{self.length}x{self.len_kv}"
        return (
            f"B{self.batch} {heads} {lengths} hd{self.head_dim} {self.dtype}{mask} "
            f"{self.distribution}"
        )

    @property
    def call(self) -> AttentionSpec:
        """Sizes of the call."""
        sizes = self.batch, self.heads, self.key_heads, self.length, self.len_kv, self.head_dim
        return AttentionSpec(*sizes, self.dtype, self.head_dim**-0.5, self.causal)

    @property
    def operations(self) -> int:
        """Floating-point or integer operations of both products."""
        pairs = rungs.admitted_pairs(self.call)
        return 4 * self.head_dim * self.batch * self.heads * pairs

    def host(self) -> tuple[Any, ...]:
        """Return q, k and v as NumPy arrays."""
        q, *keys = distributions.make(
            self.distribution, self.batch, self.heads, self.length, self.len_kv, self.head_dim,
            self.dtype, self.seed,
        )  # fmt: skip
        return q, *(np.ascontiguousarray(x[:, : self.key_heads]) for x in keys)

    def draw(self, *, on_device: bool) -> tuple[Any, ...]:
        """Return q, k and v as NumPy or CuPy arrays."""
        if not on_device:
            return self.host()
        import cupy

        return tuple(cupy.asarray(array) for array in self.host())


def as_they_are(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Prepare nothing."""
    return q, k, v


def quantized(
    tiles: ca.Tiles | None = None, quant: ca.QuantConfig | None = None, arch: str | None = None
) -> Callable[[Any, Any, Any], tuple[Any, ...]]:
    """Prepare codes and scales, so that quantising is not part of the time."""
    return lambda q, k, v: (ca.quantize(q, k, v, tiles=tiles, quant=quant, arch=arch),)


@dataclass(frozen=True)
class Cell:
    """One thing to be judged and timed on a problem.

    Parameters
    ----------
    name : str
        Row of the table.
    variant : str
        The rung; for another library, the rung whose bound it is held to.
    run : callable
        ``run(*prepared) -> o``, a NumPy or CuPy array or one with DLPack; must not wait for the
        device.
    prepare : callable
        ``prepare(q, k, v) -> prepared``, not timed.
    tiles : Tiles, optional
        What it was given in place of the variant's own.
    arch : str, optional
        The architecture that it was told to run as.
    facts : mapping
        JSON-ready description.
    peer : bool
        Whether it is another library.
    quant : QuantConfig, optional
        How it quantises, where it is `fa_int8` and not by default.
    tolerance : float, optional
        The relative error that is allowed, for arithmetic that has no bound here.
    read : callable, optional
        ``read(result) -> o``, not timed, where `run` returns something else.
    """

    name: str
    variant: str
    run: Callable[..., Any]
    prepare: Callable[[Any, Any, Any], tuple[Any, ...]] = as_they_are
    tiles: ca.Tiles | None = None
    arch: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    peer: bool = False
    quant: ca.QuantConfig | None = None
    tolerance: float | None = None
    read: Callable[[Any], Any] | None = None


def rung(
    variant: str,
    problem: Problem,
    *,
    tiles: ca.Tiles | None = None,
    codes_given: bool = False,
    arch: str | None = None,
    quant: ca.QuantConfig | None = None,
    name: str | None = None,
) -> Cell:
    """Return the cell of one rung.

    Parameters
    ----------
    variant : str
    problem : Problem
    tiles : Tiles, optional
        The rung's own when omitted.
    codes_given : bool
        Quantise beforehand (`fa_int8`).
    arch : str, optional
        Architecture in place of the device's own: ``"sm_90"`` keeps a Hopper to the portable form.
    quant : QuantConfig, optional
        How to quantise (`fa_int8`).
    name : str, optional
        Row of the table in place of the variant's name.
    """
    given = {} if codes_given else {"quant": quant}

    def run(*operands: Any) -> Any:
        return ca.attention(
            *operands, variant=variant, causal=problem.causal, tiles=tiles, arch=arch, **given
        )

    name = name or (variant if tiles is None else f"{variant} {describe_tiles(tiles)}")
    name += "" if arch is None else f", {arch}"
    return Cell(
        f"{name}, codes given" if codes_given else name, variant, run,
        quantized(tiles, quant, arch) if codes_given else as_they_are, tiles, arch, quant=quant,
    )  # fmt: skip


def resources(launch: Launch, arch: str) -> dict[str, int]:
    """Compile the kernels of a launch and return the resources that they take.

    Raises
    ------
    KernelCompileError
        If it does not compile.
    """
    binary = compiler.build(launch.module, arch)
    taken = binary.kernels[launch.entry]
    return {
        "registers": taken.registers,
        "spill_bytes": taken.spill_stores + taken.spill_loads,
        "shared_bytes": binary.smem_bytes + taken.static_smem,
    }


def describe_tiles(tiles: ca.Tiles) -> str:
    """Return tiles in a few characters."""
    return f"{tiles.block_q}x{tiles.block_kv} w{tiles.num_warps} s{tiles.num_stages}"


def measure_problem(
    problem: Problem,
    cells: Sequence[Cell],
    *,
    rounds: int,
    on_device: bool,
    baseline: str | None = None,
    inputs: tuple[Any, ...] | None = None,
    in_graphs: bool = False,
    entries: int | None = None,
) -> dict[str, Any]:
    """Judge every cell of a problem, then time the cells that hold their bound, in turns.

    Parameters
    ----------
    problem : Problem
    cells : sequence of Cell
    rounds : int
        Timed samples of each.
    on_device : bool
        False: NumPy arrays, no times.
    baseline : str, optional
        Name of the cell that the others' times are divided by.
    inputs : three arrays, optional
        Q, K and V where they lie; drawn when omitted.
    in_graphs : bool
        Time CUDA graphs of the calls (`experiments._harness.graphs`); the record says so.
    entries : int, optional
        Batch entries that are judged at a time, for problems whose float64 would not fit.

    Returns
    -------
    dict
        JSON-ready record of the problem with one row for each cell.
    """
    if inputs is None:
        inputs = problem.draw(on_device=on_device)
    found = judge_problem(problem, cells, inputs, entries)
    if on_device:
        time_cells(problem, cells, found["rows"], inputs, rounds, baseline, in_graphs)
        found["in_graphs"] = in_graphs
    return found


def judge_problem(
    problem: Problem, cells: Sequence[Cell], inputs: tuple[Any, ...], entries: int | None = None
) -> dict[str, Any]:
    """Return what `measure_problem` does, without times; on a device if the inputs are there."""
    xp = array_namespace(inputs[0])
    step = entries or max(problem.batch, 1)
    firsts = range(0, max(problem.batch, 1), step)
    parts = [tuple(x[first : first + step] for x in inputs) for first in firsts]
    judged_rows = xp.asarray(rungs.judged_rows(problem.call, problem.seed))
    exact = rungs.remembered()
    return {
        "problem": vars(problem) | {"name": problem.name},
        "judged_rows": int(judged_rows.size),
        "rows": [
            judge_cell(problem, cell, inputs, parts, rows=judged_rows, exact=exact)
            for cell in cells
        ],
    }


def judge_cell(
    problem: Problem,
    cell: Cell,
    inputs: tuple[Any, ...],
    parts: Sequence[tuple[Any, ...]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the row of a cell with its judgement; ``unsupported`` says why there is none.

    `parts` are the inputs of one entry of the batch after the other. The whole output is judged by
    part, and the row has the worst of each number.
    """
    row: dict[str, Any] = {
        "variant": cell.name, "rung": cell.variant, "peer": cell.peer,
        "operations": problem.operations, "judgement": None, **cell.facts,
    }  # fmt: skip
    q, k, v = inputs
    try:
        result = cell.run(*cell.prepare(q, k, v))
        o = _like(q, result if cell.read is None else cell.read(result))
    except REFUSALS as error:
        return row | {"unsupported": reason(error)}
    form: dict[str, Any] = {}
    if cell.tolerance is None and not cell.peer:  # a peer is held to the portable form's bound
        form = kernel_form(
            *(_codes(cell, inputs) or inputs), variant=cell.variant, causal=problem.causal,
            tiles=cell.tiles, arch=cell.arch,
        )  # fmt: skip
    found: list[rungs.Judgement] = []
    first = 0
    for part in parts or (inputs,):
        whole = o[first : first + len(part[0])]
        found.append(_judge_part(problem, cell, whole, part, form, **options))
        first += len(part[0])
    quantisation = [one.j3 for one in found if one.j3 is not None]
    judged = rungs.Judgement(
        max(one.j2 for one in found), max(quantisation, default=None),
        max(one.relative_error for one in found),
    )  # fmt: skip
    made_by = {"form": form["form"], "tiles": vars(form["tiles"])} if form else {}
    return row | made_by | {"judgement": vars(judged), "ok": judged.ok}


def _codes(cell: Cell, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Quantise inputs as a cell of ``fa_int8`` does; of other rungs there are no codes."""
    if ladder.lookup(cell.variant).family != "int8":
        return ()
    return quantized(cell.tiles, cell.quant, cell.arch)(*inputs)


def _judge_part(
    problem: Problem,
    cell: Cell,
    o: Any,
    inputs: tuple[Any, ...],
    form: Mapping[str, Any],
    **options: Any,
) -> rungs.Judgement:
    """Judge the output of some inputs, by the bound of the form that made it."""
    q, k, v = inputs
    if cell.tolerance is not None:
        exact, _ = options["exact"](
            q, k, v, rows=options["rows"], return_lse=True, causal=problem.causal
        )
        error = rungs.relative_error(kinds.as_float64(o[:, :, options["rows"]]), exact)
        return rungs.Judgement(error / cell.tolerance, None, error)
    (operands,) = _codes(cell, inputs) or (None,)
    return rungs.judge(
        o, q, k, v, variant=cell.variant, quantized=operands, causal=problem.causal, **form,
        **options,
    )  # fmt: skip


def reason(error: Exception) -> str:
    """Return what an error says in one line that means the same on every machine."""
    text = str(error).replace(f"{compiler.KERNELS}{os.sep}", "")
    sentence = re.search(r'static assertion failed with "([^"]+)"', text)
    if sentence:
        return sentence[1]
    sentence = re.search(r"does not take Tiles\(.*?\): (.*) \(tiles=None", text)
    if sentence is None:
        return text.splitlines()[0]
    # NOTE: in the words of the kernel, as the compiler says the same.
    sizes = r"\b(?:block_(?:q|kv|m|n)|num_warps|num_stages|head_dim)\b"
    return re.sub(sizes, lambda size: size[0].upper(), sentence[1])


def _like(array: Any, result: Any) -> Any:
    """Return a result of another library as an array of the kind of `array`."""
    if isinstance(result, type(array)):
        return result
    return array_namespace(array).from_dlpack(result)


def time_cells(
    problem: Problem,
    cells: Sequence[Cell],
    rows: list[dict[str, Any]],
    inputs: tuple[Any, ...],
    rounds: int,
    baseline: str | None,
    in_graphs: bool,
) -> None:
    """Add times to the rows that hold J2."""
    sets = timing.rotated(inputs)
    calls = {}
    for cell, row in zip(cells, rows, strict=True):
        if row["judgement"] is not None and row["judgement"]["j2"] <= 1:
            calls[cell.name] = rotating(cell.run, [cell.prepare(*operands) for operands in sets])
    each = len(sets) if in_graphs else 1
    if in_graphs:
        calls = graphs.of_calls(calls, each)
    before = device.clocks()
    with output.progress(problem.name, rounds * len(calls)) as advance:
        samples = timing.time_interleaved(calls, rounds=rounds, advance=advance)
    samples = {name: [seconds / each for seconds in found] for name, found in samples.items()}
    watched = {"before": before, "after": device.clocks()}
    for cell, row in zip(cells, rows, strict=True):
        if cell.name not in samples:
            continue
        estimate = timing.median(samples[cell.name])
        row["seconds"] = estimate.median
        row["seconds_interval"] = [estimate.low, estimate.high]
        row["samples"] = samples[cell.name]
        row["tflops"] = problem.operations / estimate.median / 1e12
        ceiling = device.device_ceiling(ladder.lookup(cell.variant).family)
        row["share"] = None if ceiling is None else row["tflops"] * 1e12 / ceiling
        row["clocks"] = watched
        if baseline in samples:
            ratio = timing.paired_ratio(samples[baseline], samples[cell.name])
            row["speed_ratio"] = ratio.to_list()
            row["baseline"] = baseline


def rotating(run: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Callable[[int], Any]:
    """Return what `cupyattn.measure.timing.time_interleaved` calls: one set of arrays after the
    other."""
    return lambda i: run(*sets[i % len(sets)])
