"""Do devices return what predicted codes of P say, in every form with P in 8 bits?

Varies       form and type of P; length 256, 1,024 and 4,096; head_dim 64 and 128; N(0, 1), scores
             nine times as wide, outliers and a key that takes most of the attention; all keys with
             float32 outputs, causal with float16 ones
Holds fixed  the seed; operands from `quantize`; tiles and form from the call's own plan
Measures     |O - prediction| / bound; codes in doubt; rows left to the other bound; the bound over
             the other one; how far another tile size predicts wrongly
Run          python -m experiments.accuracy.predicted_codes     # a device; a million rows a form
             python -m experiments.accuracy.predicted_codes --backend mirror [--rows N]
             python -m experiments.accuracy.predicted_codes --backend interpret
             python -m experiments.accuracy.predicted_codes --stored --update-docs   # no device

Long calls come last: a run that ends by ``--seconds`` has a table and a record of the shorter ones.
``--update-docs`` writes the table of docs/MATH_REFERENCE.md, from the record. Exit status 1: an
output lies outside its bound, or another tile size does not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn import distributions
from cupyattn.arrays.kinds import Array, array_namespace, as_float64
from cupyattn.bounds.kernel import bound_kernel, predict_kernel
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.cli import output
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.attention import KernelCall, kernel_call
from cupyattn.problem.settings import Settings
from experiments._harness import plots, recording

PAGE = recording.ROOT / "docs" / "MATH_REFERENCE.md"
BEGIN, END = "<!-- predicted_codes: begin -->", "<!-- predicted_codes: end -->"
#: Every form that codes P, by the options that ask for it.
FORMS = {
    "pv8, u8": ("pv8", ca.QuantConfig(pv="int8", granularity_v="block"), "sm_90"),
    "pv8, s8": ("pv8", ca.QuantConfig(pv="int8", granularity_v="block", p_type="s8"), "sm_90"),
    "pv8, e4m3": ("pv8", ca.QuantConfig(pv="fp8", granularity_v="channel"), "sm_90"),
    "pv8_whole": ("pv8_whole", ca.QuantConfig(pv="int8", granularity_v="channel"), "sm_90"),
    "sm90_pv8": ("sm90_pv8", ca.QuantConfig(pv="int8", granularity_v="channel"), "sm_90a"),
    "sm90_pv8_by_tile": (
        "sm90_pv8_by_tile", ca.QuantConfig(pv="int8", granularity_v="block"), "sm_90a",
    ),
    "sm90_fp8": ("sm90_fp8", ca.QuantConfig(pv="fp8", granularity_v="channel"), "sm_90a"),
}  # fmt: skip
DISTRIBUTIONS = ("normal", "tripled", "outlier", "sink")
HEAD_DIMS = (64, 128)
#: Whether a call is causal, and the type of its output: float32 stores round nothing.
KINDS = ((False, "float32"), (True, "float16"))
#: Rows of a form, lengths, head sizes and distributions, by backend.
SIZES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], tuple[str, ...]]] = {
    "cuda": (1_000_000, (256, 1024, 4096), HEAD_DIMS, DISTRIBUTIONS),
    "mirror": (20_000, (256, 1024), HEAD_DIMS, DISTRIBUTIONS),
    "interpret": (800, (200,), HEAD_DIMS[:1], DISTRIBUTIONS[:2]),
}
#: Rows of every head whose bound is compared with the other one.
COMPARED = 2


@dataclass(frozen=True)
class Cell:
    """One call."""

    form: str
    length: int
    head_dim: int
    distribution: str
    causal: bool
    dtype: str


@dataclass
class Tally:
    """Results of the calls of a form."""

    rows: int = 0
    left: int = 0
    codes: int = 0
    in_doubt: int = 0
    largest_ratio: float = 0.0
    largest_in_float32: float = 0.0
    worst: str = ""
    wrong_tile: float = 0.0

    def row(self, form: str, over_old: Sequence[float]) -> dict[str, Any]:
        """Return the JSON-ready row of a form."""
        return {
            "form": form,
            "rows": self.rows,
            "largest_ratio": self.largest_ratio,
            "largest_ratio_in_float32": self.largest_in_float32,
            "worst": self.worst,
            "codes_in_doubt": self.in_doubt / max(1, self.codes),
            "rows_left": self.left / max(1, self.rows),
            "bound_over_old": float(np.median(over_old)),
            "wrong_tile_ratio": self.wrong_tile,
        }


def cells(form: str, args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the calls of a form."""
    for length, head_dim, distribution, (causal, dtype) in itertools.product(
        args.lengths, args.head_dims, args.distributions, KINDS
    ):
        yield Cell(form, length, head_dim, distribution, causal, dtype)


class Inputs:
    """Q, K and V of a cell as arrays of the backend. The arrays of the last cell are kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.kept: tuple[Any, Any] = (None, None)

    def __call__(self, cell: Cell, rows: int) -> tuple[Array, Array, Array]:
        """Return q, k and v of so many rows in all, a whole number of heads."""
        key = replace(cell, form="", causal=False)
        if self.kept[0] != key:
            heads = -(-rows // cell.length)
            drawn = distributions.make(
                cell.distribution, 1, heads, cell.length, cell.length, cell.head_dim, cell.dtype,
                seed=self.args.seed,
            )  # fmt: skip
            if self.args.backend == "cuda":
                import cupy

                drawn = tuple(cupy.asarray(x) for x in drawn)
            self.kept = key, drawn
        return self.kept[1]


def received(quantized: Any, cell: Cell, form: str, tiles: Tiles) -> KernelCall:
    """Return the record that bounds and prediction take."""
    settings = Settings("fa_int8", causal=cell.causal, tiles=tiles)
    return kernel_call(settings, {"q": None, "k": None, "v": None}, quantized=quantized, form=form)


def other_tiles(tiles: Tiles) -> Tiles:
    """Return tiles of other steps."""
    return replace(tiles, block_kv=tiles.block_kv + (32 if tiles.block_kv == 32 else -32))


def run_cell(
    cell: Cell, inputs: Inputs, rows: int, tally: Tally, over_old: list[float], backend: str
) -> None:
    """Run one call, and add what came of it to the tally of its form."""
    q, k, v = inputs(cell, rows)
    xp = array_namespace(q)
    name, quant, arch = FORMS[cell.form]
    quantized = ca.quantize(q, k, v, quant=quant, arch=arch, backend=backend)
    asked: dict[str, Any] = {"causal": cell.causal, "arch": arch, "backend": backend}
    ran = ca.kernel_form(quantized, **asked)
    if ran["form"] != name:
        raise ValueError(f"{cell} ran in form {ran['form']}, not {name}")
    o = as_float64(ca.attention(quantized, **asked))
    kernel = received(quantized, cell, name, ran["tiles"])
    found = predict_kernel(kernel)
    ratio = ratio_to_bound(o, found.o, found.bound).max(axis=-1)
    largest = float(ratio.max())
    if largest > tally.largest_ratio:
        tally.largest_ratio, tally.worst = largest, str(vars(cell))
    if cell.dtype == "float32":
        tally.largest_in_float32 = max(tally.largest_in_float32, largest)
    tally.rows += ratio.size
    tally.left += int((~xp.isfinite(found.bound)).any(axis=-1).sum())
    tally.codes += ratio.size * cell.length // (2 if cell.causal else 1)
    tally.in_doubt += int(found.in_doubt.sum())
    some = xp.arange(cell.length // 3, cell.length, -(-cell.length // COMPARED))
    old = bound_kernel(kernel, rows=some).total
    both = xp.where(old > 0, found.bound[:, :, some] / xp.where(old > 0, old, 1.0), 1.0)
    over_old.append(float(xp.median(xp.minimum(both, 1.0))))
    if cell.distribution == "normal" and not cell.causal:
        wrong = received(quantized, cell, name, ran["tiles"])
        wrong = replace(wrong, kernel=replace(wrong.kernel, tiles=other_tiles(ran["tiles"])))
        few = xp.arange(min(64, cell.length))
        guess = predict_kernel(wrong, rows=few)
        ratios = ratio_to_bound(o[:, :, few], guess.o, guess.bound)
        tally.wrong_tile = max(tally.wrong_tile, float(ratios.max()))


def compile_all(args: argparse.Namespace) -> None:
    """Compile side by side what the cells run."""
    import cupy

    def prepare(cell: Cell) -> None:
        _, quant, arch = FORMS[cell.form]
        x = cupy.zeros((1, 1, 256, cell.head_dim), cell.dtype)
        quantized = ca.quantize(x, x, x, quant=quant, arch=arch)
        ca.plan(quantized, causal=cell.causal, arch=arch)

    wanted = [
        replace(cell, distribution="normal", length=256)
        for form in args.forms
        for cell in cells(form, args)
    ]
    with ThreadPoolExecutor(args.threads) as pool:
        list(pool.map(prepare, dict.fromkeys(wanted)))


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the table of a record's forms."""
    header = [
        "", "rows", "largest |O - predicted| / bound", "in float32", "codes in doubt", "rows left",
        "bound / old bound", "with another tile",
    ]  # fmt: skip
    return header, [
        [
            row["form"], f"{row['rows']:,}", f"{row['largest_ratio']:.7f}",
            f"{row['largest_ratio_in_float32']:.4f}",
            f"{row['codes_in_doubt']:.1e}", f"{row['rows_left']:.1e}",
            f"{row['bound_over_old']:.1e}", f"{row['wrong_tile_ratio']:.3g}",
        ]
        for row in rows
    ]  # fmt: skip


def page(record: Mapping[str, Any]) -> str:
    """Return the section of docs/MATH_REFERENCE.md."""
    header, rows = table(record["forms"])
    lengths, sizes = (", ".join(f"{n:,}" for n in record[x]) for x in ("lengths", "head_dims"))
    lines = [
        f"Written by `{recording.command_now(record)}` from "
        "[predicted_codes.json](../experiments/results/predicted_codes.json): "
        f"{plots.source(record)}. Lengths {lengths}, head_dim {sizes}, "
        f"inputs {', '.join(record['distributions'])}.",
        "",
        *recording.markdown([x.replace("|", "\\|") for x in header], rows),
    ]
    return "\n".join(lines)


def right(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all outputs are within their bounds, and outputs of another tile size are not."""
    return all(row["largest_ratio"] <= 1 < row["wrong_tile_ratio"] for row in rows)


def run_stored(args: argparse.Namespace) -> int:
    """Print the table of the record, and write it into the page."""
    record = recording.stored("predicted_codes")
    output.print_table(*table(record["forms"]))
    if args.update_docs:
        recording.replace_between(PAGE, BEGIN, END, page(record))
    return 0 if right(record["forms"]) else 1


def run(args: argparse.Namespace) -> int:
    """Run every cell, print the table, write the record."""
    began = time.perf_counter()
    if args.backend == "cuda":
        compile_all(args)
    compiled = time.perf_counter() - began
    inputs = Inputs(args)
    every = [list(cells(form, args)) for form in args.forms]
    each = -(-args.rows // len(every[0]))
    tallies = {form: Tally() for form in args.forms}
    over_old: dict[str, list[float]] = {form: [] for form in args.forms}
    # Forms take turns, so that inputs are drawn once for all of them.
    in_turn = sorted(
        itertools.chain(*every),
        key=lambda c: (c.length, c.head_dim, DISTRIBUTIONS.index(c.distribution), c.causal),
    )
    with output.progress("calls", len(in_turn)) as advance:
        for number, cell in enumerate(in_turn):
            if time.perf_counter() - began > args.seconds:
                print(f"{len(in_turn) - number} of {len(in_turn)} calls are left: give --seconds")
                break
            run_cell(cell, inputs, each, tallies[cell.form], over_old[cell.form], args.backend)
            advance(cell.form)
    rows = [tallies[form].row(form, over_old[form]) for form in args.forms]
    output.print_table(*table(rows))
    seconds = time.perf_counter() - began
    for row in rows:
        if row["largest_ratio"] > 1:
            print(f"{row['form']}: {row['worst']}")
    print(f"{seconds:.0f} s, of which {compiled:.0f} s compiled")
    content = {
        "lengths": list(args.lengths), "head_dims": list(args.head_dims),
        "distributions": list(args.distributions), "seconds": seconds, "forms": rows,
    }  # fmt: skip
    recording.keep(args, "predicted_codes", args.backend, content)
    return 0 if right(rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--backend", choices=list(SIZES), default="cuda")
    parser.add_argument("--rows", type=int, help="of each form; about, in whole heads")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--seconds", type=float, default=300.0, help="no call begins later")
    parser.add_argument("--threads", type=int, default=16, help="compilations at a time")
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    if args.stored:
        return recording.guarded(run_stored, args)
    if args.quick and args.backend == "cuda":
        args.backend = "mirror"
    args.quick = args.backend != "cuda"
    rows, lengths, args.head_dims, args.distributions = SIZES[args.backend]
    args.rows, args.lengths = args.rows or rows, tuple(args.lengths or lengths)
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
