"""What do several devices gain in Wan's block by diffusers' context parallelism, and what travels?

Varies       devices; whose attention (diffusers' own, 16 bits, INT8); keys round a ring, or heads.
Holds fixed  Wan 14B with one block, 32,760 tokens, bfloat16, random weights. Quick: a small one.
Measures     seconds of a pass, of the slowest rank. Its ratio to diffusers' own on one device, and
             on as many. Bytes that a rank sends in one attention. Relative L2 of the output to
             diffusers' own on one device.
Beside       cuDNN's attention in diffusers' own ring and exchange. On a CPU torch's own, no ring.
Run          python -m experiments.diffusion.context_parallel [--quick] [--devices 1 2]
             [--json FILE] [--update-docs] [--stored]

Ranks are processes that torchrun starts, each of which runs every way in turn. The record says what
`report()` has of each way. Needs torch and diffusers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from cupyattn.measure import timing
from cupyattn.measure.words import format_bytes, format_seconds
from experiments._harness import recording
from experiments.diffusion.diffusers_blocks import MODELS, QUICK_MODELS, inputs, make, relative

#: The page that says what was measured, and the marks it stands between.
PAGE = recording.ROOT / "docs" / "DISTRIBUTED.md"
BEGIN, END = "<!-- context parallelism: begin -->", "<!-- context parallelism: end -->"
MODEL = "Wan 14B"
#: Passes before the first that is timed.
WARM = 2
HEADER = ["devices", "way", "pass", "of one device", "of native", "sent", "to native", "ran"]


@dataclass(frozen=True)
class Way:
    """The implementation of attention, and the mesh of ranks that share the sequence.

    Parameters
    ----------
    name : str
    policy : str or None
        Of `replace_attention_with_int8`; None: diffusers' own attention.
    ring : bool
        Keys go round a ring; otherwise heads are exchanged.
    """

    name: str
    policy: str | None
    ring: bool


#: Cases; on one device the first of each policy runs.
WAYS = (
    Way("native, heads", None, False), Way("native, ring", None, True),
    Way("16 bits, heads", "precision", False), Way("16 bits, ring", "precision", True),
    Way("INT8, heads", "balanced", False), Way("INT8, ring of codes", "balanced", True),
    Way("8-bit P·V, ring of codes", "aggressive", True),
)  # fmt: skip


def ways_of(ranks: int, quick: bool) -> list[Way]:
    """Return the ways of so many ranks."""
    if ranks == 1:
        policies = {way.policy: way.name.partition(",")[0] for way in reversed(WAYS)}
        return [Way(name, policy, False) for policy, name in reversed(policies.items())]
    return [way for way in WAYS if not (quick and way.ring and way.policy is None)]


def native_bytes(way: Way, ranks: int, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes that a rank sends in one attention of diffusers' own.

    An all-gather of K and V passes every rank's on to all others; heads of Q, K, V and O go where
    they are computed.
    """
    batch, tokens, heads, head_dim = shape
    own = batch * -(-tokens // ranks) * heads * head_dim * itemsize
    return 2 * (ranks - 1) * own if way.ring else 4 * own * (ranks - 1) // ranks


# ---- a rank --------------------------------------------------------------------------------------


def on_rank(args: argparse.Namespace) -> int:
    """Run every way on this rank, and write what rank 0 knows of all into a file."""
    import os

    import torch
    from torch import distributed as dist

    kind = "cpu" if args.quick else "cuda"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    where = kind if kind == "cpu" else f"cuda:{torch.cuda.current_device()}"
    chosen = (QUICK_MODELS if args.quick else MODELS)[MODEL]
    latents, arguments = inputs(chosen, where, args.seed)
    given = arguments(latents, torch.tensor([500.0], device=where))
    rows = []
    with torch.inference_mode(False), torch.no_grad():
        expected = make(chosen, where, args.seed)(**given, return_dict=False)[0]
        for way in ways_of(dist.get_world_size(), args.quick):
            rows.append(_measure(way, chosen, where, given, expected, args))
    if dist.get_rank() == 0:
        Path(args.rank_file).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _measure(
    way: Way, chosen: Any, where: str, given: Mapping[str, Any], expected: Any, args: Any
) -> dict[str, Any]:
    import diffusers
    import torch
    from torch import distributed as dist

    from cupyattn.interop.diffusers import replace_attention_with_int8
    from cupyattn.interop.diffusers.context_parallel import Ranks

    ranks = dist.get_world_size()
    model = make(chosen, where, args.seed)
    handle = None
    if where != "cpu":  # the only one of torch's own that takes both a ring and heads
        model.set_attention_backend("_native_cudnn")
    if way.policy is not None:
        handle = replace_attention_with_int8(model, policy=way.policy)
    if ranks > 1:
        degree = {"ring_degree" if way.ring else "ulysses_degree": ranks}
        model.enable_parallelism(config=diffusers.ContextParallelConfig(**degree))

    def one_pass() -> Any:
        return model(**given, return_dict=False)[0]

    def wait() -> None:
        if where != "cpu":
            torch.cuda.synchronize()

    found = one_pass()
    config = model.config
    shape = 1, chosen.tokens, config.num_attention_heads, config.attention_head_dim
    sent = native_bytes(way, ranks, shape, 2)
    if way.policy is not None and ranks > 1:
        shared = Ranks.of(model._parallel_config)
        before = shared.group.bytes_sent if shared else 0
        found = one_pass()
        sent = shared.group.bytes_sent - before if shared else 0
    samples = []
    for number in range(WARM + args.rounds if not args.quick else 1):
        dist.barrier()
        wait()
        start = time.perf_counter()
        one_pass()
        wait()
        spent: list[Any] = [None] * ranks
        dist.all_gather_object(spent, time.perf_counter() - start)
        samples += [max(spent)] if number >= WARM or args.quick else []
    report = handle.report() if handle is not None else None
    ran = "" if report is None else "; ".join(report.on_ranks) or ", ".join(report.modes)
    return {
        "way": way.name, "policy": way.policy, "ring": way.ring, "ranks": ranks, "samples": samples,
        "bytes_sent": sent, "to_native": relative(found, expected), "ran": ran,
        "native": {} if report is None else dict(report.native),
    }  # fmt: skip


# ---- the record ----------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Start the ranks, print the table and write the record."""
    rows: list[dict[str, Any]] = []
    for ranks in args.devices:
        rows += started(ranks, args)
    add_ratios(rows)
    output.print_table(HEADER, [cells_of(row) for row in rows])
    record = recording.keep(
        args, "context_parallel", "mirror" if args.quick else "cuda",
        {"model": MODEL, "tokens": (QUICK_MODELS if args.quick else MODELS)[MODEL].tokens,
         "rows": rows},
    )  # fmt: skip
    if args.update_docs:
        update_page(record)
    return 0


def section(record: Mapping[str, Any]) -> str:
    """Return what docs/DISTRIBUTED.md says was measured."""
    environment = record["environment"]
    where = environment["device"] or {}
    return "\n".join([
        f"`{recording.command_now(record)}`, {record['model']} with one block and "
        f"{record['tokens']:,} tokens, on {where.get('name', 'no device')}, revision "
        f"{environment.get('revision', 'unknown')[:10]}:",
        "",
        *recording.markdown(HEADER, [cells_of(row) for row in record["rows"]]),
    ])  # fmt: skip


def update_page(record: Mapping[str, Any], path: Path = PAGE) -> None:
    """Write what was measured between the marks of docs/DISTRIBUTED.md."""
    recording.replace_between(path, BEGIN, END, section(record))


def started(ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of so many ranks, which torchrun starts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", "-m", "experiments.diffusion.context_parallel",
            "--rank-file", str(file), "--rounds", str(args.rounds), "--seed", str(args.seed),
        ]  # fmt: skip
        done = subprocess.run(
            [*command, *(["--quick"] if args.quick else [])], capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise UnsupportedError(f"{ranks} ranks ended with {done.stderr[-2000:]}")
        found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row its speed as a multiple of diffusers' own: on one device, and on as many."""
    def seconds(row: Mapping[str, Any]) -> float:
        return float(timing.median(row["samples"]).median)

    native = [row for row in rows if row["policy"] is None]
    alone = [row for row in native if row["ranks"] == 1]
    for row in rows:
        row["seconds"] = seconds(row)
        if alone:
            row["of_one"] = seconds(alone[0]) / row["seconds"]
        beside = [seconds(other) for other in native if other["ranks"] == row["ranks"]]
        if beside:
            row["of_native"] = min(beside) / row["seconds"]


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """Return one row of the table."""
    ratio = ["" if name not in row else f"{row[name]:.2f}" for name in ("of_one", "of_native")]
    return [
        str(row["ranks"]), row["way"], format_seconds(row["seconds"]), *ratio,
        format_bytes(row["bytes_sent"]), f"{row['to_native']:.1e}", row["ran"],
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = recording.parser(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--rank-file", help=argparse.SUPPRESS)
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    if args.stored:
        update_page(recording.stored("context_parallel"))
        return 0
    if args.rank_file:
        return recording.main(on_rank, args)
    return recording.main(run, args)


if __name__ == "__main__":
    sys.exit(main())
