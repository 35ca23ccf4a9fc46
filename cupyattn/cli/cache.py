"""Show, clear, fill or limit the cache of compiled kernels and of float64 references.

SPEC is VARIANT:hdHEAD_DIM:DTYPE[:causal][:lse], for example fa_tc:hd128:fp16:causal. It compiles
the kernels of a call on aligned, contiguous arrays of that kind; no GPU is needed.

Beyond SIZE (1 GiB by default; 512MiB, 2GB or none) the least recently used kernels are deleted.
CUPYATTN_CACHE_SIZE overrides --limit."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from cupyattn.arrays.described import Described
from cupyattn.arrays.kinds import STORAGE
from cupyattn.cli import flags, output, verify
from cupyattn.compiler import architectures as compiler_architectures
from cupyattn.compiler import devices, disk_cache, size_limit, target
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.compiler.target import HOPPER_CAPABILITY
from cupyattn.kernels import ladder
from cupyattn.measure import device
from cupyattn.measure.words import counted, format_bytes
from cupyattn.ops.attention import resolved
from cupyattn.ops.explain import plans

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--clear", action="store_true", help="forget everything, first")
    parser.add_argument("--warm", action="append", metavar="SPEC", default=[], help="compile it")
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help="for --warm, e.g. sm_90 (default: the device's; without one, all that NVRTC supports)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", default=4, help="compilations at a time (4)"
    )
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="limit kernels to SIZE from now on, in every process; or 'default'",
    )
    parser.add_argument("--json", metavar="FILE", help="write the contents to a file, too")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "threads")
    for arch in args.arch or ():
        compiler_architectures.capability_of(arch)
    if args.arch and not args.warm:
        raise ValueError("--arch is for --warm: give --warm SPEC too, or leave --arch out")
    architectures = (args.arch or _architectures()) if args.warm else []  # which takes NVRTC
    jobs = [
        (spec, arch)
        for arch in architectures
        for text in args.warm
        for spec in parse_spec(text, arch)
    ]
    limit = _set_limit(args.limit) if args.limit else size_limit.current()
    if args.clear:
        kernels, references = compiler.cache_clear(), verify.clear_references()
        output.say(f"forgot {counted(kernels, 'kernel')} and {counted(references, 'reference')}")
    if jobs:
        warm(list(dict.fromkeys(jobs)), args.threads)
    if args.limit:
        deleted, size = size_limit.trim(limit.bytes)
        output.say(f"deleted {counted(deleted, 'kernel')}, {format_bytes(size)}")
    info = compiler.cache_info()
    references, size = verify.reference_info()
    unused = disk_cache.why_unused(info.folder)
    output.say(f"{info.folder}" + (f" is not used: {unused}" if unused else ""))
    most = "no limit" if limit.bytes is None else f"{format_bytes(limit.bytes)} at most"
    there = f"{counted(info.entries, 'kernel')}, {format_bytes(info.bytes)}"
    output.say(f"{there}; {most} ({limit.source})")
    output.say(f"{counted(references, 'reference')}, {format_bytes(size)}")
    if args.json:
        found = {"folder": str(info.folder), "kernels": info.entries, "kernel_bytes": info.bytes}
        found |= {"compiled": info.compiled, "references": references, "reference_bytes": size}
        found |= {"not_used": unused, "limit_bytes": limit.bytes, "limit_from": limit.source}
        output.write_json(args.json, found)
    return 0


def _set_limit(text: str) -> size_limit.Limit:
    """Store a limit in the cache folder, and return it."""
    if given := os.environ.get(size_limit.VARIABLE):
        raise ValueError(
            f"--limit has no effect beside {size_limit.VARIABLE}={given}: unset that variable, or "
            "change it"
        )
    if text == "default":
        size_limit.forget()
    else:
        size_limit.store(size_limit.parse(text, "--limit"))
    return size_limit.current()


def _architectures() -> list[str]:
    if device.device_missing():
        return list(target.supported_architectures())
    import cupy

    capability = int(cupy.cuda.Device().compute_capability)
    own = [devices.device_architecture(capability)]
    return own if capability != HOPPER_CAPABILITY else [*own, "sm_90a"]


def warm(jobs: Sequence[tuple[ModuleSpec, str]], threads: int) -> None:
    """Compile modules for their architectures in parallel, and print how many existed already."""
    before = compiler.cache_info()
    with ThreadPoolExecutor(threads) as pool, output.progress("compiling", len(jobs)) as advance:
        running = {pool.submit(compiler.build, spec, arch): arch for spec, arch in jobs}
        for future in as_completed(running):
            future.result()
            advance(running[future])
    compiled = compiler.cache_info().compiled - before.compiled
    output.say(
        f"{counted(len(jobs), 'kernel')} for "
        f"{', '.join(dict.fromkeys(a for _, a in jobs))}: "
        f"{compiled} compiled, "
        f"{len(jobs) - compiled} were there",
        flush=True,
    )


def parse_spec(text: str, arch: str | None = None) -> list[ModuleSpec]:
    """Return the modules that a call like `text` compiles for an architecture.

    Raises
    ------
    ValueError, UnsupportedError
        For a text that is not a SPEC, or for a feature that the rung does not support.

    Examples
    --------
    >>> [spec.source for spec in parse_spec("fa_tc:hd128:fp16:causal")]
    ['attn_fa_tc.cu']
    >>> [spec.source for spec in parse_spec("fa_tc:hd128:fp16", "sm_90a")]
    ['sm90/attn_fa_tc.cu', 'merge/sm90/merge_pieces.cu']
    """
    name, _, rest = text.partition(":")
    size, dtype, *flags = (rest or ":").split(":")
    ladder.lookup(name)
    matched = re.fullmatch(r"hd(\d+)", size)
    if matched is None or dtype not in _DTYPES or not set(flags) <= {"causal", "lse"}:
        raise ValueError(
            "SPEC must look like fa_tc:hd128:fp16[:causal][:lse], with fp16, bf16 or fp32, "
            f"got {text!r}"
        )
    shape = 1, 1, 4096, int(matched[1])
    q, k, v = (Described.contiguous(n, shape, STORAGE[_DTYPES[dtype]]) for n in "qkv")
    problem = resolved(
        q, k, v, variant=name, causal="causal" in flags, return_lse="lse" in flags, arch=arch
    )
    launches = (launch for plan in plans(problem) for launch in plan.launches)
    return list(dict.fromkeys(launch.module for launch in launches))
