"""The candidates in the interpreter: exact results, no hazards, planted faults that are found."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from cupyattn.compiler import modules as compiler
from cupyattn.interpret.executor import run_launch
from cupyattn.interpret.findings import KernelFault
from cupyattn.interpret.machine import schedule
from experiments.tuning.channel_product.candidates import ARCH, CANDIDATES, SOURCE, Candidate
from experiments.tuning.channel_product.exact_products import SMALL_CASES, Case, draw, rounded
from experiments.tuning.channel_product.pairs import taught

FAULTY_CASE = Case(300, 528, 1168)

#: Three-line faults, every one of which must be found: the candidate that has it, the change.
FAULTS: dict[str, tuple[Candidate, tuple[tuple[str, str], ...]]] = {
    "the pair's other block is not waited for": (CANDIDATES[0], (
        ("mbarrier_init(smem.empty[s], PAIR * TEAM * 4);",
         "mbarrier_init(smem.empty[s], TEAM * 4);"),
        ("if (lane_id() < PAIR) mbarrier_arrive_cluster(empty, lane_id());",
         "if (lane_id() == 0) mbarrier_arrive(empty);"),
    )),
    "a stage is released before its products end": (CANDIDATES[0], (
        ("wgmma_wait_group<1>();", "wgmma_wait_group<1>(); release(smem.empty[at.stage]);"),
        ("if (step > 0) release(smem.empty[last.stage]);", ""),
        ("release(smem.empty[last.stage]);", ""),
    )),
    "the producer waits for no stage": (CANDIDATES[0], (
        ("mbarrier_wait_parity(smem.empty[at.stage], at.parity ^ 1);", ""),
    )),
    "a block ends before the other one arrives there": (CANDIDATES[0], (
        ("if constexpr (PAIR > 1) cluster_sync();\n}", "}"),
    )),
    "a slot is overwritten while it is stored": (CANDIDATES[2], (
        ("if (lane_id() == 0) cp_async_bulk_wait_group_read_but<SLOTS - 1>();", ""),
    )),
    "a team waits for slices of two phases later": (CANDIDATES[7], (
        ("if constexpr (TEAMS > 1) turn.take();", ""),
        ("if constexpr (TEAMS > 1) turn.pass();", ""),
    )),
    "the scale of the next column": (CANDIDATES[0], (
        ("B_scale[i].v[j]", "B_scale[i].v[1 - j]"),
    )),
}  # fmt: skip


def replaced(changes: Iterable[tuple[str, str]]) -> str:
    """Return the kernel with some of its text replaced; ValueError where it is not there."""
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in changes:
        if old not in text:
            raise ValueError(f"{SOURCE.name} does not hold {old!r}: mend the change")
        text = text.replace(old, new)
    return text


def interpreted(candidate: Candidate, case: Case, blocks: int, source: str | None = None) -> Any:
    """Run a candidate in the interpreter, on two or four blocks; return C and what is exact."""
    import ml_dtypes

    x = draw(case, np, case.kind, case.seed)
    dtype = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    c = np.full((case.m, case.n), np.nan, dtype)
    one = candidate.launch(case.m, case.n, case.k, case.dtype, case.bias, blocks=blocks)
    for array in x.values():
        array.flags.writeable = False
    buffers = {**x, "c": c}
    written = set(x)
    with taught():
        run_launch(one, compiler.translate(one.module, ARCH, source), buffers, written)
    sums = x["a"].astype(np.int64) @ x["b"].astype(np.int64).T
    return c, rounded(sums, x, dtype, case.bias)


def holds(candidate: Candidate, case: Case, blocks: int, source: str | None = None) -> str:
    """Return "exact", or what is wrong, in a line."""
    try:
        c, expected = interpreted(candidate, case, blocks, source)
    except KernelFault as fault:
        return " ".join(str(fault).split())[:160]
    same = c.view(np.uint16) == expected.view(np.uint16)
    return "exact" if same.all() else f"{np.logical_not(same).sum()} of {same.size} differ"


def interpret(args: argparse.Namespace) -> int:
    """Check every candidate in the interpreter, and that it finds faults."""
    cases = SMALL_CASES[:1] if args.quick else SMALL_CASES
    candidates = [x for x in CANDIDATES if args.only is None or x.name.startswith(args.only)]
    ok = True
    for number, case in enumerate(cases):
        for one in candidates:
            case_ = case if one.takes(case.n) else Case(**asdict(case) | {"n": case.n // 8 * 8})
            with contextlib.ExitStack() as stack:
                if number:
                    stack.enter_context(schedule(args.seed + number))
                start = time.monotonic()
                found = holds(one, case_, blocks=2)
            ok &= found == "exact"
            took = f"{time.monotonic() - start:.0f} s"
            print(one.name, case_.name, found, took, sep=" | ", flush=True)
    if not args.quick and args.only is None:
        for fault, (one, changes) in FAULTS.items():
            with schedule(args.seed):
                found = holds(one, FAULTY_CASE, 2, replaced(changes))
            ok &= found != "exact"
            print("fault:", fault, "|", found, flush=True)
    return 0 if ok else 1
