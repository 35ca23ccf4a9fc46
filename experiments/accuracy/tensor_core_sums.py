"""How does a tensor core add up: how many products at a time, to how many bits, cut off or rounded?

Varies       the instruction: mma.sync and wgmma over float16, bfloat16 and e4m3, sums in float32
Holds fixed  a case is one sum, c + sum of a[k] b[k], its other rows and columns 0; every product is
             exact
Measures     the least addend beside 1 that counts; which products are added before they meet the
             largest; whether addends and sums are cut off or rounded; how many random sums equal
             `model` to the bit; the largest error as a fraction of `bound`
Run          python -m experiments.accuracy.tensor_core_sums            # a device of 9.0
             python -m experiments.accuracy.tensor_core_sums --backend interpret

The bound is what docs/MATH_REFERENCE.md assumes of R6 (`cupyattn.bounds.codes`), and
tests/gpu/test_tensor_core_sums.py holds it. Exit status 1: a sum lies outside its bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from experiments._harness import recording

Float64 = npt.NDArray[np.float64]

SPEC = ModuleSpec(Path(__file__).with_suffix(".cu"))
ARCH = "sm_90a"
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}
#: Random sums of an instruction, by backend.
CASES = {"cuda": 20_000, "interpret": 64}


@dataclass(frozen=True)
class Instruction:
    """An instruction of a tensor core.

    Parameters
    ----------
    name : {"mma", "wgmma"}
    kind : {"f16", "bf16", "e4m3"}
        Type of the operands.
    fraction_bits : int
        Bits that the bound says are kept below the first bit of the largest addend.
    """

    name: str
    kind: str
    fraction_bits: int

    @property
    def least_normal(self) -> float:
        """Least normal number of the operands: smaller ones are aligned as if they were it."""
        return float(ml_dtypes.finfo(DTYPES[self.kind]).smallest_normal)

    @property
    def entry(self) -> str:
        """Kernel that runs it."""
        return f"{self.name}_{self.kind}"

    @property
    def depth(self) -> int:
        """Products that it adds."""
        return 32 if self.kind == "e4m3" else 16

    def sums(self, a: Any, b: Any, c: Any, backend: str) -> Float64:
        """Return c + sum of a[k] b[k] of every case: a and b (cases, depth), c (cases)."""
        dtype = DTYPES[self.kind]
        given = [np.asarray(x, np.float64) for x in (a, b)]
        stored = [x.astype(np.float32).astype(dtype) for x in given]
        for x, y in zip(given, stored, strict=True):
            if not np.array_equal(x, y.astype(np.float64)):
                raise ValueError(f"operands must be numbers that {self.kind} holds")
        words = [np.ascontiguousarray(x).view(np.uint32).reshape(len(x), 8) for x in stored]
        start = np.asarray(c, np.float32)
        if not np.array_equal(np.asarray(c, np.float64), start.astype(np.float64)):
            raise ValueError("c must be numbers that float32 holds")
        found = np.full(len(start), np.nan, np.float32)
        block = 128 if self.name == "wgmma" else 32
        if backend == "cuda":
            import cupy

            arrays = [cupy.asarray(x) for x in (*words, start, found)]
            kernel = compiler.load(SPEC, ARCH).kernel(self.entry)
            kernel((len(start),), (block,), tuple(arrays))
            return np.asarray(arrays[-1].get(), np.float64)
        from cupyattn.interpret.executor import run_kernel

        for x in (*words, start):
            x.flags.writeable = False
        ptx = compiler.translate(SPEC, ARCH).ptx
        run_kernel(ptx, self.entry, [*words, start, found], block=block, grid=len(start))
        return found.astype(np.float64)


INSTRUCTIONS = [
    Instruction(name, kind, 13 if kind == "e4m3" else 23)
    for name in ("mma", "wgmma")
    for kind in DTYPES
]


def bound(a: Float64, b: Float64, c: Float64, fraction_bits: int, least_normal: float) -> Float64:
    """Bound the error of c + sum of a[k] b[k]: each addend and the sum lose less than one unit.

    The unit is 2^-fraction_bits of the largest addend, of the sum 2^-fraction_bits of the sum.
    An addend loses no more than itself. Exponents are compared before anything is normalised, so an
    operand other than 0 counts as `least_normal` at least where the largest addend is sought.

    Parameters
    ----------
    a, b : (cases, depth) array
    c : (cases,) array
    fraction_bits : int
        From 23 on the largest addend has no bit below the last one kept, and loses nothing.
    least_normal : float

    Returns
    -------
    (cases,) array
    """
    products = a * b
    aligned = np.maximum(np.abs(a), least_normal) * np.maximum(np.abs(b), least_normal)
    largest = np.where(products != 0, aligned, 0.0).max(axis=1)
    largest = np.maximum(largest, np.abs(c))
    unit = 2.0**-fraction_bits * largest
    sizes = np.abs(np.concatenate([products, c[:, None]], axis=1))
    lost = np.minimum(sizes, unit[:, None]).sum(axis=1)
    if fraction_bits >= 23:
        lost = lost - np.where(sizes.max(axis=1) == largest, unit, 0.0)
    return lost + 2.0**-fraction_bits * (np.abs(products.sum(axis=1) + c) + lost)


def sided_bound(
    a: Float64, b: Float64, c: Float64, fraction_bits: int, least_normal: float
) -> tuple[Float64, Float64]:
    """Return the middle of the error of c + sum of a[k] b[k], and how far from it that may lie.

    Addends are truncated toward zero by less than one unit, as `model` describes. So the loss of a
    product has its sign. The addend c and the sum may err to either side.

    Parameters
    ----------
    a, b, c, fraction_bits, least_normal
        As for `bound`.

    Returns
    -------
    middle, width : (cases,) array
    """
    exact = (a * b).sum(axis=1) + c
    unit = _unit(a, b, c, fraction_bits, least_normal)
    positive, negative = (a * b > 0).sum(axis=1), (a * b < 0).sum(axis=1)
    addends = a.shape[1] + 1
    of_sum = 2.0**-fraction_bits * (np.abs(exact) + addends * unit)
    return -0.5 * unit * (positive - negative), unit * (0.5 * (positive + negative) + 1) + of_sum


def _exponent(x: Float64, least: float = 0.0) -> npt.NDArray[np.int64]:
    """Return the exponents of numbers, at least that of `least`; very low ones of 0."""
    x = np.maximum(np.abs(x), least)
    return np.where(x == 0, -4000, np.frexp(x)[1] - 1).astype(np.int64)


def _unit(a: Float64, b: Float64, c: Float64, fraction_bits: int, least_normal: float) -> Float64:
    """Return the unit that addends are aligned to, (cases,)."""
    of_products = _exponent(a, least_normal) + _exponent(b, least_normal)
    of_products = np.where(a * b == 0, -4000, of_products)
    largest = np.maximum(of_products.max(axis=1), _exponent(c))
    return np.asarray(np.ldexp(1.0, np.maximum(largest, -1000) - fraction_bits))


def model(
    a: Float64,
    b: Float64,
    c: Float64,
    fraction_bits: int,
    sum_bits: int = 23,
    least_normal: float = 0.0,
) -> Float64:
    """Add as tensor cores are said to: addends cut off toward zero, then the sum.

    The unit is 2^-fraction_bits of 2 to the largest exponent. The exponent of a product is the sum
    of its factors' exponents, at least the exponent of `least_normal`. A product of 0 has no
    exponent. The sum keeps `sum_bits` bits of its fraction.
    """

    unit = _unit(a, b, c, fraction_bits, least_normal)
    addends = np.concatenate([a * b, c[:, None]], axis=1)
    total = np.trunc(addends / unit[:, None]).sum(axis=1) * unit
    last = np.ldexp(1.0, np.maximum(_exponent(total), -1000) - sum_bits)
    return np.asarray(np.trunc(total / last) * last)


# ---- probes --------------------------------------------------------------------------------------


class Probe:
    """Sums of powers of two, given addend by addend, in a unit that leaves e4m3 its range."""

    def __init__(self, instruction: Instruction, backend: str) -> None:
        self.of, self.backend = instruction, backend
        self.unit = 2.0**16 if instruction.kind == "e4m3" else 1.0

    def __call__(self, addends: Sequence[dict[int, float]], c: Sequence[float]) -> Float64:
        """Return the sums: of each case the products by position, powers of two with a sign."""
        a = np.zeros((len(addends), self.of.depth))
        b = np.zeros_like(a)
        for case, some in enumerate(addends):
            for position, x in some.items():
                exponent = int(np.log2(abs(x) * self.unit))
                half = exponent // 2
                a[case, position] = np.sign(x) * 2.0**half
                b[case, position] = 2.0 ** (exponent - half)
        return self.of.sums(a, b, np.asarray(c) * self.unit, self.backend) / self.unit

    def kept_bits(self) -> int:
        """Return the largest k for which products of 2^-k in pairs count beside one of 1."""
        ks = list(range(2, 27))
        sums = self([{0: 1.0, **dict.fromkeys(range(1, 9), 2.0**-k)} for k in ks], [0.0] * len(ks))
        kept = [k for k, x in zip(ks, sums, strict=True) if x > 1]
        return max(kept, default=0)

    def kept_beside_c(self) -> int:
        """Return the same beside a c of 1."""
        ks = list(range(2, 27))
        sums = self([dict.fromkeys(range(8), 2.0**-k) for k in ks], [1.0] * len(ks))
        return max((k for k, x in zip(ks, sums, strict=True) if x > 1), default=0)

    def partners(self, bits: int) -> int:
        """Return how many products are added before they meet the largest, that one among them.

        Two products of half a unit count beside a larger one if they are added to each other first.
        """
        half = 2.0 ** -(bits + 1)
        depth = self.of.depth
        pairs = [(i, j) for i in range(1, depth) for j in range(i + 1, depth)]
        sums = self([{0: 1.0, i: half, j: half} for i, j in pairs], [0.0] * len(pairs))
        apart = {i for pair, x in zip(pairs, sums, strict=True) if x > 1 for i in pair}
        return depth - len(apart)

    def directions(self, bits: int) -> dict[str, float]:
        """Return what becomes of half a unit beside 1 and -1, and of the last bit of a sum."""
        half = 2.0 ** -(bits + 1)
        cases: dict[str, tuple[dict[int, float], float]] = {
            "1 + half": ({0: 1.0, 1: half}, 0.0),
            "1 - half": ({0: 1.0, 1: -half}, 0.0),
            "-1 + half": ({0: -1.0, 1: half}, 0.0),
            "-1 - half": ({0: -1.0, 1: -half}, 0.0),
            "2 + 3 last": ({0: 1.0, 1: 1.0, 2: 2.0**-22, 3: 2.0**-23}, 0.0),
            "-2 - 3 last": ({0: -1.0, 1: -1.0, 2: -(2.0**-22), 3: -(2.0**-23)}, 0.0),
            "c of 1 + 2^-23": ({}, 1.0 + 2.0**-23),
            "c of 1 + 2^-23 and a product of 2^-18": ({0: 2.0**-18}, 1.0 + 2.0**-23),
        }
        sums = self([some for some, _ in cases.values()], [c for _, c in cases.values()])
        origin = {"1": 1.0, "-": -1.0, "2": 2.0, "c": 1.0}
        found = {}
        for (name, _), x in zip(cases.items(), sums, strict=True):
            start = -2.0 if name.startswith("-2") else origin[name[0]]
            found[name] = (float(x) - start) * 2.0**23
        return found


def drawn(instruction: Instruction, cases: int, seed: int) -> tuple[Float64, Float64, Float64]:
    """Draw sums: N(0, 1), of one sign, over many powers of two, with a large c, and that cancel."""
    rng = np.random.default_rng(seed)
    dtype, largest = DTYPES[instruction.kind], 448.0  # of e4m3

    def stored(x: Float64) -> Float64:
        x = np.clip(x, -largest, largest)
        return np.asarray(x.astype(np.float32).astype(dtype).astype(np.float64))

    shape = cases, instruction.depth
    spread = rng.integers(0, 7, (cases, 1))
    a, b = (
        stored(rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape))
        for _ in "ab"
    )
    same = rng.random(cases) < 0.3
    a, b = (np.where(same[:, None], np.abs(x), x) for x in (a, b))
    few = rng.random(shape) < rng.choice([0.1, 1.0], (cases, 1))
    a = a * few
    c = rng.standard_normal(cases) * 2.0 ** rng.integers(-12, 13, cases)
    c = np.where(rng.random(cases) < 0.3, -(a * b).sum(axis=1), c)
    c = np.where(rng.random(cases) < 0.2, 0.0, c)
    return a, b, c.astype(np.float32).astype(np.float64)


def drawn_low(instruction: Instruction, cases: int, seed: int) -> tuple[Float64, Float64, Float64]:
    """Draw sums whose left operands are the least normal number and below, with c of that size."""
    rng = np.random.default_rng([seed, 1])
    shape, dtype = (cases, instruction.depth), DTYPES[instruction.kind]
    # Of bfloat16 the products would leave float32.
    low = max(instruction.least_normal, 2.0**-100)
    a = rng.uniform(-1, 1, shape) * low * (rng.random(shape) < rng.choice([0.1, 1.0], (cases, 1)))
    b = rng.standard_normal(shape)
    a, b = (x.astype(np.float32).astype(dtype).astype(np.float64) for x in (a, b))
    c = low * rng.standard_normal(cases) * 2.0 ** rng.integers(-8, 3, cases)
    c = np.where(rng.random(cases) < 0.2, 0.0, c)
    return a, b, c.astype(np.float32).astype(np.float64)


def measure(instruction: Instruction, backend: str, seed: int) -> dict[str, Any]:
    """Return the row of an instruction."""
    probe = Probe(instruction, backend)
    kept = probe.kept_bits()
    ordinary = drawn(instruction, CASES[backend], seed)
    low = drawn_low(instruction, CASES[backend] // 8, seed)
    a, b, c = (np.concatenate(two) for two in zip(ordinary, low, strict=True))
    sums = instruction.sums(a, b, c, backend)
    exact = (a * b).sum(axis=1) + c
    allowed = bound(a, b, c, instruction.fraction_bits, instruction.least_normal)
    error = np.abs(sums - exact)
    ratio = np.where(error > 0, error / np.where(allowed > 0, allowed, np.inf), 0.0)
    ratio = np.where((error > 0) & (allowed <= 0), np.inf, ratio)
    alike = {
        f"{bits}, {last}": float(
            (model(a, b, c, bits, last, instruction.least_normal) == sums).mean()
        )
        for bits in range(10, 28)
        for last in {bits, 23}
    }
    best = max(alike, key=lambda name: alike[name])
    return {
        "instruction": instruction.entry,
        "depth": instruction.depth,
        "kept_bits": kept,
        "kept_beside_c": probe.kept_beside_c(),
        "added_with_the_largest": probe.partners(kept),
        "last_bits": probe.directions(kept),
        "assumed_bits": instruction.fraction_bits,
        "largest_ratio": float(ratio.max()),
        "model": best,
        "model_share": alike[best],
    }


def run(args: argparse.Namespace) -> int:
    """Measure every instruction, print the table, write the record."""
    rows = []
    for instruction in INSTRUCTIONS:
        rows.append(measure(instruction, args.backend, args.seed))
        print(f"{instruction.entry}: {rows[-1]['last_bits']} (units of 2^-23)")
    header = [
        "", "products", "bits kept beside 1", "beside c = 1", "added with the largest",
        "error / bound", "bits of the bound", "best model: bits, of the sum", "alike",
    ]  # fmt: skip
    output.print_table(header, [
        [
            row["instruction"], str(row["depth"]), str(row["kept_bits"]),
            str(row["kept_beside_c"]), str(row["added_with_the_largest"]),
            f"{row['largest_ratio']:.4f}", str(row["assumed_bits"]), row["model"],
            f"{row['model_share']:.4f}",
        ]
        for row in rows
    ])  # fmt: skip
    content = {"cases": CASES[args.backend] * 9 // 8, "instructions": rows}
    recording.keep(args, "tensor_core_sums", args.backend, content)
    return 0 if all(row["largest_ratio"] <= 1 for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--backend", choices=list(CASES), default="cuda")
    args = parser.parse_args(argv)
    args.backend = "interpret" if args.quick else args.backend
    args.quick = args.backend != "cuda"
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
