"""Do kernels that no one here wrote run in the interpreter, within their bounds?

Varies       the kernel: of Triton's tutorials, of wheels, of NVIDIA's cuda-samples, of DeepGEMM
             and FlashAttention-4 (experiments/_harness/foreign_*.py).
Holds fixed  small calls, versions and revisions.
Measures     instructions, CPU seconds, and the largest error as a share of its bound. The bound is
             derived from the kernel's roundings; attention is judged. If a change of the PTX mends
             a finding, the finding is kept and the rest of the kernel runs.
Run          python -m experiments.accuracy.foreign_kernels --folder DIR --update-docs

No device needed. foreign_kernels.txt beside this file has the packages. The folder has checkouts
that are named as in `REPOSITORIES`. Missing ones are left out. Nothing of theirs is kept here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn import interpret
from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from cupyattn.interpret.ptx import PtxError
from experiments._harness import recording
from experiments._harness.foreign import Case, Launcher, Missing, Sources

PAGE = recording.ROOT / "docs" / "YOUR_KERNEL.md"
BEGIN, END = "<!-- foreign kernels: begin -->", "<!-- foreign kernels: end -->"
#: Modules of the harness, in the order of the table.
FAMILIES = ("cute", "deepgemm", "tutorials", "wheels", "cuda")
#: Checkouts: the repository on GitHub and the revision that the record is of. The first
#: is a fork of triton-lang/triton, with its tutorials.
REPOSITORIES = {
    "triton": ("triton-lang/Triton-to-tile-IR", "50ec1da08373"),
    "cuda-samples": ("NVIDIA/cuda-samples", "c94ff366aed1"),
    "DeepGEMM": ("deepseek-ai/DeepGEMM", "54e226124093"),
}
#: Packages that compile, for the record.
COMPILERS = ("triton", "nvidia-cutlass-dsl", "nvidia-cuda-nvrtc")
#: Why, looked at by hand: a part of what the interpreter said, and a sentence.
BECAUSE = {
    "lse2 is written by two lanes": "256 threads write the rows of a tile of 128, so two blocks "
                                    "write the same values to the same rows",
    "still reads its shared memory": "the last copies are not waited for before the block ends",
    "no fence.mbarrier_init": "Triton lets the copy engine signal a new mbarrier without a fence",
    "g_odata is read": "the last block has no fence behind the operation that counts blocks",
}  # fmt: skip
#: Outcomes.
WITHIN, OUTSIDE, FOUND, UNKNOWN = "within its bound", "outside", "finding", "not modelled"


def cases() -> tuple[Case, ...]:
    """Return all kernels."""
    found: list[Case] = []
    for family in FAMILIES:
        found += importlib.import_module(f"experiments._harness.foreign_{family}").CASES
    return tuple(found)


def outcome(case: Case, sources: Sources, seed: int, keep: Path | None = None) -> dict[str, Any]:
    """Run one kernel and return its row of the record.

    Raises
    ------
    Missing
        If its package or checkout is not there.
    """
    version = case.version(sources)
    name = "_".join(f"{case.package} {case.name}".replace(",", "").split())
    run = Launcher(sources, keep, name)
    row: dict[str, Any] = {"kernel": case.name, "package": case.package, "version": version}
    try:
        share = case.run(run, np.random.default_rng(seed))
        row |= {"became": WITHIN if share <= 1 else OUTSIDE, "share": round(share, 4)}
    except interpret.KernelFault as fault:
        row |= {"became": FOUND, "why": f"{fault.finding.kind}: {fault.finding.message}"}
    except (UnsupportedError, PtxError) as error:
        row |= {"became": UNKNOWN, "why": str(error).partition(" (")[0]}
    return row | {
        "launches": run.launches, "instructions": run.instructions,
        "cpu_s": round(run.seconds, 2), "findings": run.findings,
        "ptx_sha256": run.digest.hexdigest(),
    }  # fmt: skip


def experiment(args: argparse.Namespace) -> dict[str, Any]:
    """Run all kernels that are there."""
    places = {name: args.folder / name for name in REPOSITORIES} if args.folder else {}
    sources = Sources({name: places.get(name) for name in REPOSITORIES})
    rows = []
    for case in cases():
        if args.only and args.only not in f"{case.package} {case.name}":
            continue
        try:
            row = outcome(case, sources, args.seed, args.keep)
        except Missing as error:
            print(f"{case.package}, {case.name}: left out, {error}")
            continue
        rows.append(row)
        print(row["package"], row["kernel"], row["became"], row.get("share", row.get("why")),
              flush=True)  # fmt: skip
    versions = {name: _version(name) for name in COMPILERS}
    return recording.keep(
        args, "foreign_kernels", "interpret", {"compilers": versions, "kernels": rows}
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def table(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page that are made from a record."""
    rows, notes = [], []
    for row in record["kernels"]:
        repository, revision = REPOSITORIES.get(row["package"], (row["package"], ""))
        version = row["version"][:7] if revision else row["version"]
        became = f"{row['share']:.3f}" if "share" in row else row["became"]
        for text in [*row["findings"], *([row["why"]] if "why" in row else [])]:
            why = [sentence for part, sentence in BECAUSE.items() if part in text]
            notes.append([str(len(notes) + 1), row["kernel"], text, *(why or [""])])
            became += f" ({len(notes)})"
        rows.append([
            row["kernel"], f"{repository} {version}", f"`{row['ptx_sha256'][:12]}`",
            f"{row['instructions']:,}", f"{row['cpu_s']:.2f}", became,
        ])  # fmt: skip
    ran = sum(row["became"] == WITHIN for row in record["kernels"])
    compilers = ", ".join(f"{name} {version}" for name, version in record["compilers"].items())
    header = ["kernel", "package or repository", "sha256 of the PTX", "instructions", "CPU s",
              "error / bound"]  # fmt: skip
    lines = [
        f"`{recording.command_now(record).partition(' --')[0]}` compiled {len(rows)} kernels of "
        f"others without a GPU ({compilers}) and ran them; {ran} of them are within their bound. "
        "Instructions are counted by warp. The hash leaves out comments and line numbers.",
        "",
        *recording.markdown(header, rows),
        "",
    ]
    return [
        *lines,
        "A number points to a row below. If an error stands before it, the finding was mended in "
        "the PTX: by a fence, a wait or an order of memory.",
        "",
        *recording.markdown(["", "kernel", "the interpreter said", "because"], notes),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="a folder with checkouts")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels with this in the name")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where to write the PTX")
    recording.add_page_arguments(parser)
    args = parser.parse_args(argv)
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # the PTX would have paths in it
    warnings.simplefilter("ignore")
    if not args.stored:
        experiment(args)
    path = args.json or recording.RESULTS / "foreign_kernels.json"
    lines = table(json.loads(path.read_text(encoding="utf-8")))
    output.say("\n".join(lines))
    if args.update_docs:
        recording.replace_between(PAGE, BEGIN, END, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
