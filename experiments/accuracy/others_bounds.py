"""Which error bounds do other libraries' attention kernels keep?

Varies       torch SDPA's backends (math, flash, efficient, cuDNN), FlashAttention-3 in 16 bits and
             e4m3, SageAttention 1 and 2, fa and fa_tc; dtype, causal mask, distribution
Holds fixed  one batch entry, 4 heads, length 1024, head_dim 64; rows of `rungs.judged_rows`
Measures     error over bound, for what each is documented to round, and for P in fp32, fp16, bf16
Run          python -m experiments.accuracy.others_bounds [--quick] [--json FILE] [--update-docs]
             [--stored]

What cannot be had is left out. Without a device ``--quick`` judges torch's kernels for a CPU, and
the mirror of our rungs, at a shorter length. ``--update-docs`` writes the table of docs/TESTING.md,
with ``--stored`` from the committed record alone.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import array_namespace
from cupyattn.cli import output
from cupyattn.measure import rungs, words
from cupyattn.ops.explain import kernel_form
from experiments._harness import others, others8, recording
from experiments._harness.cells import REFUSALS, Cell, Problem, reason, rung

NAME = "others_bounds"
PAGE = recording.ROOT / "docs" / "TESTING.md"
BEGIN, END = "<!-- others_bounds: begin -->", "<!-- others_bounds: end -->"
DISTRIBUTIONS = ("normal", "channel-bias", "outlier")
DTYPES = ("float32", "float16", "bfloat16")
#: The types of P that every output is held to, with sums in float32.
LADDER = ("fp32", "fp16", "bf16")
SHORT = dict(zip(DTYPES, LADDER, strict=True))
#: Words of `cupyattn.testing.numerics` beside P's type, by kernel: what its documents say.
SAGE_1 = {"p": "fp16 P", "accumulate": "fp16", "promote": 64, "qk": "int8"}
SAGE_2 = {"p": "e4m3 P", "accumulate": "fp22", "promote": 128, "qk": "int8", "v": "e4m3"}
FLASH_3_FP8 = {"p": "e4m3 P", "accumulate": "fp22", "qk": "e4m3", "v": "e4m3", "out": "bf16"}


@dataclass(frozen=True)
class Judged:
    """A kernel and its documented roundings: words of `numerics`, or None for a rung."""

    cell: Cell
    documented: Mapping[str, Any] | None


def torch_backends(problem: Problem) -> Iterator[Judged]:
    """Yield torch's attention with each backend that it has; nothing where torch is missing."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return
    documented = {
        "math": (SDPBackend.MATH, "fp32"),  # 16-bit operands become float32 first
        "flash": (SDPBackend.FLASH_ATTENTION, SHORT[problem.dtype]),
        "efficient": (SDPBackend.EFFICIENT_ATTENTION, SHORT[problem.dtype]),
        "cuDNN": (SDPBackend.CUDNN_ATTENTION, SHORT[problem.dtype]),
    }

    def run(backend: Any, q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal
            )

    for name, (backend, p) in documented.items():
        title = f"torch SDPA, {name}"
        call = others.refusing(title, partial(run, backend))
        words_of = {"p": f"{p} P", "order": "any"}  # flash may split the keys
        if name == "math":
            del words_of["order"]
        yield Judged(Cell(title, "fa_tc", call, as_tensors, peer=True), words_of)


def as_tensors(*arrays: Any) -> tuple[Any, ...]:
    """Return NumPy or CuPy arrays as tensors of torch, without a copy."""
    import torch

    def one(array: Any) -> Any:
        if isinstance(array, np.ndarray) and array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(array)

    return tuple(map(one, arrays))


def kernels(problem: Problem, *, on_device: bool) -> Iterator[Judged]:
    """Yield every kernel that can be had, ours last."""
    yield from torch_backends(problem)
    if on_device and problem.dtype != "float32":
        p = {"p": f"{SHORT[problem.dtype]} P"}
        yield from (Judged(cell, p) for cell in others.flash_attention_3(problem))
        behind = others8.BY_TORCH, others8.GIVEN
        for made, documented in (
            (others8.flash_attention_3_fp8, FLASH_3_FP8), (others8.sage, SAGE_1),
            (others8.sage_2, SAGE_2),
        ):  # fmt: skip
            cells = (cell for cell in made(problem) if not cell.name.endswith(behind))
            yield from (Judged(cell, documented) for cell in cells)
    yield Judged(rung("fa", problem), None)
    if problem.dtype != "float32":
        yield Judged(rung("fa_tc", problem), None)


def judge(
    judged: Judged, problem: Problem, inputs: Sequence[Any], **options: Any
) -> dict[str, Any]:
    """Return a kernel's row: its documented roundings, and its error over each bound."""
    cell = judged.cell
    row: dict[str, Any] = {"kernel": cell.name, "documented": None, "ratio": None, "ladder": {}}
    try:
        o = cell.run(*cell.prepare(*inputs))
        o = o if cell.read is None else cell.read(o)
    except REFUSALS as error:
        return row | {"unsupported": reason(error)}
    held: Callable[..., Any] = partial(
        ca.testing.judge, o, *inputs, causal=problem.causal, **options
    )
    for p in LADDER:
        row["ladder"][p] = held(numerics=ca.testing.numerics(p)).ratio
    if judged.documented is None:
        form = kernel_form(*inputs, variant=cell.variant, causal=problem.causal)
        report = held(variant=cell.variant, **form)
        documented = f"{cell.variant}, {form['form']}"
    else:
        report = held(numerics=ca.testing.numerics(**judged.documented))
        documented = report.variant
    return row | {
        "documented": documented, "ratio": report.ratio, "tag": report.tag,
        "relative_l2": report.relative_l2, "tightness": report.tightness,
    }  # fmt: skip


def judge_problem(problem: Problem, *, on_device: bool) -> dict[str, Any]:
    """Return the rows of a problem."""
    inputs = problem.draw(on_device=on_device)
    rows = array_namespace(inputs[0]).asarray(rungs.judged_rows(problem.call, problem.seed))
    exact = rungs.remembered()
    return {
        "problem": vars(problem) | {"name": problem.name},
        "rows": [
            judge(one, problem, inputs, rows=rows, exact=exact)
            for one in kernels(problem, on_device=on_device)
        ],
    }


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    """Yield the problems of the grid."""
    heads, length = (1, 192) if args.quick else (4, 1024)
    for dtype in DTYPES:
        for causal in (False, True):
            for distribution in DISTRIBUTIONS:
                yield Problem(1, heads, length, 64, causal, dtype, distribution, args.seed)


def worst(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each kernel and dtype: the largest ratios over its problems."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in record["problems"]:
        for row in one["rows"]:
            if row["ratio"] is None:
                continue
            key = one["problem"]["dtype"], row["kernel"]
            start = {"dtype": key[0], "kernel": key[1], "documented": row["documented"]}
            start |= {"problems": 0, "ratio": 0.0, "tightness": 0.0}
            so_far = found.setdefault(key, start | {"ladder": dict.fromkeys(LADDER, 0.0)})
            so_far["problems"] += 1
            for name in ("ratio", "tightness"):
                so_far[name] = larger(so_far[name], row[name])
            so_far["ladder"] = {p: larger(x, row["ladder"][p]) for p, x in so_far["ladder"].items()}
    return [found[key] for key in sorted(found, key=lambda key: DTYPES.index(key[0]))]


def larger(a: float, b: float) -> float:
    """Return the larger of two ratios; one that is not a number is larger than any.

    Examples
    --------
    >>> larger(0.5, 2.0), larger(0.5, math.nan)
    (2.0, inf)
    """
    return max(a, math.inf if math.isnan(b) else b)


def table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table."""
    header = ["inputs", "kernel", "documented to round", "error / bound", "bound / rms"]
    header += [f"by {p} P" for p in LADDER]
    rows = []
    for row in worst(record):
        ratios = [words.format_ratio(row["ladder"][p]) for p in LADDER]
        kept = "" if row["ratio"] <= 1 else " (missed)"
        rows.append([
            row["dtype"], row["kernel"], row["documented"],
            words.format_ratio(row["ratio"]) + kept, words.format_share(row["tightness"]), *ratios,
        ])  # fmt: skip
    return header, rows


def page(record: Mapping[str, Any]) -> str:
    """Return the section of docs/TESTING.md."""
    found = record["environment"]["device"]
    where = found["name"] if found else "a CPU, our rungs on the mirror"
    (length, *_), (head_dim, *_) = (
        sorted({one["problem"][name] for one in record["problems"]})
        for name in ("length", "head_dim")
    )
    asked = [one["problem"] for one in record["problems"]]
    count = len({(problem["causal"], problem["distribution"]) for problem in asked})
    missing: dict[str, list[str]] = {}
    for one in record["problems"]:
        for row in one["rows"]:
            types = missing.setdefault(row["kernel"], []) if "unsupported" in row else []
            types += {one["problem"]["dtype"]} - set(types)
    lines = [
        f"Measured on {where}: length {length}, head_dim {head_dim}, the largest ratio of {count} "
        f"problems each (`{recording.command_now(record)}`).",
        "",
        *recording.markdown(*table(record)),
    ]
    if missing:
        named = (f"{name} ({', '.join(types)})" for name, types in missing.items())
        lines += ["", f"Not supported there: {'; '.join(named)}."]
    return "\n".join(lines)


def ours_hold(record: Mapping[str, Any]) -> bool:
    """Whether our rungs hold their bounds; other libraries are reported, not judged."""
    ours = [row for row in worst(record) if row["kernel"] in ("fa", "fa_tc")]
    return bool(ours) and all(row["ratio"] <= 1 for row in ours)


def run(args: argparse.Namespace) -> int:
    """Judge every kernel on every problem, print the table and write the record."""
    if args.stored:
        record = recording.stored(NAME)
    else:
        content = [judge_problem(x, on_device=not args.quick) for x in problems(args)]
        backend = "cpu" if args.quick else "cuda"
        record = recording.keep(args, NAME, backend, {"problems": content})
    output.print_table(*table(record))
    if args.update_docs:
        recording.replace_between(PAGE, BEGIN, END, page(record))
    return 0 if ours_hold(record) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    if args.stored:
        return recording.guarded(run, args)
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
