"""Is the PTX of every kernel the same in two revisions?

Varies       the revision. Each has compiled its kernels into a separate cache, for example by a run
             of the tests: ``CUPYATTN_CACHE_DIR=FOLDER make test-quick`` in a checkout of it.
Holds fixed  NVRTC, its options, and what was compiled.
Measures     for every module of the second cache whether the first has one of the same PTX, line
             information and numbers of labels aside. NVRTC's output for one source may vary (in one
             kernel, the width of a shared load), so modules that differ are listed.
Run          python -m experiments.tuning.same_ptx FOLDER FOLDER [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from cupyattn.measure import device

#: Lines that do not affect the machine code: comments, places in the source, constants of headers.
#: These are variables of a byte or a word that no instruction reads.
_NOTES = ("//", ".file", ".loc")
_CONSTANT = re.compile(r"\.global \.align \d+ \.\w+ [A-Z0-9_]+( = \d+)?;")


def modules(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield architecture, source below kernels_cu and digest of every module of a cache.

    Sources of tests and of users are left out.
    """
    for path in sorted(folder.glob("*.bin")):
        raw = path.read_bytes()
        entry = json.JSONDecoder().raw_decode(raw[raw.index(b'{"arch"') :].decode(errors="replace"))
        found: dict[str, Any] = entry[0]
        source = re.search(r'\.file\s+\d+ "[^"]*/kernels(?:_cu)?/([^"]+\.cu)"', found["ptx"])
        if source:
            yield found["arch"], source[1], digest(found["ptx"])


def digest(ptx: str) -> str:
    """Return what stands for the instructions of a module.

    Examples
    --------
    >>> digest("ret; // here\\n.loc 1 2\\n$L__BB0_1:") == digest("ret; // there\\n$L__BB7_3:")
    True
    """
    code = ptx.partition("\t.section")[0]
    lines = (line.partition("//")[0].strip() for line in code.splitlines())
    kept = [
        re.sub(r"\$L__\w+", "$L", x)
        for x in lines
        if x and not x.startswith(_NOTES) and not _CONSTANT.fullmatch(x)
    ]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def compare(before: Path, after: Path) -> dict[str, Any]:
    """Return how many modules are the same, by source, and which are not."""
    known = {(arch, one) for arch, _, one in modules(before)}
    same: dict[str, int] = {}
    other = []
    for arch, source, one in modules(after):
        if (arch, one) in known:
            same[source] = same.get(source, 0) + 1
        else:
            other.append(f"{source} for {arch}")
    return {"same": same, "other": other}


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two caches; exit status 1 if a module differs, or if there is none to compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, metavar="FOLDER")
    parser.add_argument("after", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    found = compare(args.before, args.after)
    print(f"{sum(found['same'].values())} modules of {len(found['same'])} sources are the same")
    for one in found["other"]:
        print(f"another PTX: {one}")
    if args.json:
        record = {"experiment": "same_ptx", "environment": device.environment(), **found}
        output.write_json(args.json, record)
    return 0 if found["same"] and not found["other"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
