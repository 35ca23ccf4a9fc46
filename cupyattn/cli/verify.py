"""Compare every rung with float64 on every distribution. J1 compares operands bit for bit, J2 the
kernel's output and log-sum-exp with their bounds, and J3 the effect of quantisation with its
bound. The kernel of a file is checked by J2, on the device, or in the interpreter if there is
none. A file is a .cu with the arguments of a rung, or any kernel with a description of its launch
(`cupyattn docs your_kernel`). Its q, k and v are then drawn from every distribution, in the sizes
of the description. Exit status 1 if a check fails, 2 if nothing can be run. The float64 references
are stored in the cache folder."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import logging
import math
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn import distributions
from cupyattn.arrays import kinds
from cupyattn.arrays.interchange import on_host
from cupyattn.cli import flags, output, own_kernel, own_launch, verify_launch
from cupyattn.compiler import disk_cache, target
from cupyattn.compiler.architectures import LEAST_CAPABILITY
from cupyattn.files import replacing
from cupyattn.interpret.findings import KernelFault
from cupyattn.kernels import ladder
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.ladder import Variant
from cupyattn.measure import device
from cupyattn.measure import rungs as measure
from cupyattn.measure import words as measure_words
from cupyattn.measure.rungs import Judgement
from cupyattn.ops.attention import attention
from cupyattn.ops.explain import kernel_form
from cupyattn.ops.quantize import quantize
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.reference import exact, rounding, scoring
from cupyattn.reference.quantize import quantize_mirror
from cupyattn.runtime.origins import WORDS

LOG = logging.getLogger("cupyattn")


#: Options that apply to a kernel with a description of its launch.
DESCRIBED_OPTIONS = ("--launch", "--distribution", "--seed", "--json")


@dataclass(frozen=True)
class Shape:
    """One problem size."""

    name: str
    heads: int
    heads_kv: int
    len_q: int
    len_kv: int
    head_dim: int
    causal: bool
    offset_q: float = 0.0  #: added to Q
    offset_k: float = 0.0


#: A plain square problem, and one with grouped heads, tails, a padded head_dim and a mask.
SHAPES = (
    Shape("square", 2, 2, 256, 256, 64, False),
    Shape("ragged, grouped, causal", 4, 2, 77, 131, 40, True),
)
#: For a kernel in a file: only this input exposes a running maximum that starts at 0.
BELOW = Shape("scores far below 0", 1, 1, 20, 40, 64, False, 3.0, -7.0)
#: SHAPES for a kernel in the interpreter, which is slow. They have several steps, tails, or one
#: row.
SMALL_SHAPES = (
    Shape("square", 1, 1, 64, 64, 16, False),
    Shape("ragged, grouped, causal", 4, 2, 35, 83, 24, True),
    Shape("one row", 1, 1, 1, 70, 8, False),
    BELOW,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "variant", nargs="?", metavar="VARIANT|FILE",
        help="one rung, or a .cu, .ptx or .fatbin file (default: all rungs)",
    )
    own_launch.add_arguments(parser)
    own_kernel.add_arguments(parser)
    parser.add_argument("--distribution", choices=distributions.NAMES, help="one only")
    parser.add_argument("--dtype", choices=DTYPES, help="one only")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the inputs (0)")
    parser.add_argument("--json", metavar="FILE", help="write every cell")


@dataclass(frozen=True)
class Cell:
    """One rung on one input."""

    variant: str
    distribution: str
    dtype: str
    shape: str
    judgement: Judgement
    operands_equal: bool | None
    finding: str = ""  #: of the interpreter
    ran: str = ""  #: device, interpreter or mirror

    @property
    def ok(self) -> bool:
        """Whether all three judgements are passed and the interpreter found no fault."""
        return self.judgement.ok and self.operands_equal is not False and not self.finding


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "seed", least=0)
    description = own_launch.description_of(args, DESCRIBED_OPTIONS)
    if description is not None:
        return verify_launch.run(args, description)
    if args.variant is None:
        own_kernel.refuse_options(args)
        return _run(args, list(ladder.VARIANTS.values()))
    with own_kernel.variant_of(args) as variant:
        if own_kernel.is_file(args.variant):
            archs = own_kernel.compile_everywhere(variant)
            output.say(f"attn_{variant.name} compiles for {', '.join(archs)}.")
        return _run(args, [variant])


#: Default architecture of the interpreter.
INTERPRETED_ARCH = f"sm_{LEAST_CAPABILITY}"
#: Text for each backend, with the reason why there is no device.
_WHERE = {
    "cuda": "on the device",
    "mirror": "on the mirror, as {}",
    "interpret": "in the interpreter, as {}",
}


def _backend(variant: Variant, missing: str) -> str:
    """Return the backend of a rung: without a device, a user's kernel runs in the interpreter."""
    if not missing:
        return "cuda"
    return target.choose(None, False, registered=variant.source is not None)


def _shapes(variant: Variant, backend: str) -> tuple[Shape, ...]:
    """Return the shapes on which a rung is checked."""
    if not variant.source:
        return SHAPES
    return SMALL_SHAPES if backend == "interpret" else (*SHAPES, BELOW)


def _run(args: argparse.Namespace, variants: list[Variant]) -> int:
    names = [args.distribution] if args.distribution else list(distributions.NAMES)
    dtypes = [args.dtype] if args.dtype else list(DTYPES)
    missing = device.device_missing()
    backends_of = {variant.name: _backend(variant, missing) for variant in variants}
    limits = {"cuda": "", "mirror": "", "interpret": f", within the limits of {INTERPRETED_ARCH}"}
    for backend in dict.fromkeys(backends_of.values()):
        rungs = ", ".join(name for name, its in backends_of.items() if its == backend)
        output.say(f"Running {_WHERE[backend].format(missing)}{limits[backend]}: {rungs}.")
    output.say()
    plan = [
        (variant, name, dtype, shape)
        for name in names
        for dtype in dtypes
        for variant in variants
        if dtype in variant.dtypes
        for shape in _shapes(variant, backends_of[variant.name])
    ]
    if not plan:
        raise ValueError(f"{args.variant} takes {', '.join(variants[0].dtypes)}, not {args.dtype}")
    cells = []
    with output.progress("verifying", len(plan)) as advance:
        for variant, name, dtype, shape in plan:
            backend = backends_of[variant.name]
            cells.append(_verify(variant, name, dtype, shape, args.seed, backend))
            advance(f"{variant.name}, {name}, {dtype}")
    output.print_table(_HEADER, list(_summary(cells)))
    failed = [cell for cell in cells if not cell.ok]
    counted = measure_words.counted
    several = [{getattr(cell, name) for cell in cells} for name in ("dtype", "shape")]
    of_types, of_shapes = map(len, several)
    output.say(
        f"\n{counted(len(cells), 'cell')}: each row shows the worst of up to "
        f"{counted(of_types, 'dtype')} by {counted(of_shapes, 'shape')}."
    )
    for cell in failed:
        output.say(
            f"FAILED: {cell.variant}, {cell.distribution}, {cell.dtype}, {cell.shape}: "
            f"{_verdict(cell)}"
        )
    if args.json:
        record = {"environment": device.environment(), "seed": args.seed}
        output.write_json(
            args.json, {**record, "cells": [{**asdict(c), "ok": c.ok} for c in cells]}
        )
    hint = "cupyattn docs testing explains J1, J2 and J3."
    output.say(hint if failed else "Every cell holds its bounds.")
    return 1 if failed else 0


_HEADER = ("rung", "distribution", "J1", "J2", "J3", "rel. error", "verdict")


def _summary(cells: list[Cell]) -> Iterator[tuple[str, ...]]:
    """Yield one row for each rung and distribution: the worst over dtypes and shapes."""
    keys = dict.fromkeys((cell.variant, cell.distribution) for cell in cells)
    for variant, distribution in sorted(
        keys, key=lambda key: list(ladder.VARIANTS).index(key[0])
    ):
        some = [c for c in cells if (c.variant, c.distribution) == (variant, distribution)]
        j3 = [c.judgement.j3 for c in some if c.judgement.j3 is not None]
        equal = [c.operands_equal for c in some if c.operands_equal is not None]
        yield (
            variant,
            distribution,
            ("equal" if all(equal) else "DIFFER") if equal else "-",
            measure_words.format_ratio(max(c.judgement.j2 for c in some)),
            measure_words.format_ratio(max(j3)) if j3 else "-",
            f"{max(c.judgement.relative_error for c in some):.2e}",
            "holds" if all(c.ok for c in some) else "FAILED",
        )


def _verdict(cell: Cell) -> str:
    words = [f"J2 {measure_words.format_ratio(cell.judgement.j2)}"]
    if cell.judgement.j3 is not None:
        words.append(f"J3 {measure_words.format_ratio(cell.judgement.j3)}")
    if cell.operands_equal is False:
        words.append("J1: codes or scales differ from the mirror's")
    if cell.finding:
        words = [f"the interpreter found: {cell.finding}"]
    return ", ".join(words)


def _verify(variant: Variant, name: str, dtype: str, shape: Shape, seed: int, backend: str) -> Cell:
    q, k, v = distributions.make(
        name, 1, shape.heads, shape.len_q, shape.len_kv, shape.head_dim, dtype, seed, shape.heads_kv
    )
    q, k = (
        (x + x.dtype.type(offset)).astype(x.dtype) if offset else x
        for x, offset in ((q, shape.offset_q), (k, shape.offset_k))
    )
    host = q, k, v
    if backend == "cuda":
        import cupy

        q, k, v = (cupy.asarray(a) for a in host)
    z = quantize(q, k, v, backend=backend) if variant.family == "int8" else None
    operands = (q, k, v) if z is None else (z,)
    try:
        o, lse = attention(
            *operands, variant=variant.name, causal=shape.causal, return_lse=True, backend=backend
        )
    except KernelFault as fault:
        nothing = Judgement(math.inf, None, math.inf)
        return Cell(
            variant.name, name, dtype, shape.name, nothing, None, str(fault), WORDS[backend]
        )
    judged = measure.judge(
        o, q, k, v, variant=variant.name, lse=lse, quantized=z, causal=shape.causal,
        exact=cached_exact,
        **kernel_form(*operands, variant=variant.name, causal=shape.causal, backend=backend),
    )  # fmt: skip
    equal = operands_equal(z, host) if z is not None and backend != "mirror" else None
    return Cell(variant.name, name, dtype, shape.name, judged, equal, ran=WORDS[backend])


def operands_equal(z: QuantizedQKV, host: tuple[Any, Any, Any]) -> bool:
    """Judge J1: whether the kernels' codes and scales equal the mirror's, bit for bit.

    Parameters
    ----------
    z : QuantizedQKV
        Codes of the kernels, on a device or in the interpreter.
    host : (q, k, v)
        The same inputs as NumPy arrays. The mean of the keys is taken from `z`: sums may run in
        any order.
    """
    mean = None if z.k_mean is None else on_host(z.k_mean)
    tiles = ladder.lookup("fa_int8").default_tiles(z.head_dim)
    mirror = quantize_mirror(*host, z.config, tiles, k_mean=mean)
    names = ("q_codes", "k_codes", "q_scale", "k_scale", "v")
    return all(
        on_host(getattr(z, name)).tobytes() == np.ascontiguousarray(getattr(mirror, name)).tobytes()
        for name in names
    )


# ---- references on disk --------------------------------------------------------------------------


def _folder() -> Path:
    return disk_cache.cache_folder() / "reference"


def cached_exact(
    q: Any, k: Any, v: Any, *, rows: Any = None, return_lse: bool = True, **options: Any
) -> tuple[Any, Any]:
    """Return `cupyattn.reference.attention_exact` and its lse, from the disk if stored there.

    Parameters
    ----------
    q, k, v, rows, **options
        As there. The key is a hash of all of them and of the source of the definition.
    return_lse : bool
        Must be True.

    Returns
    -------
    o, lse : arrays of the kind that came in, float64
    """
    if not return_lse:
        raise ValueError("cached_exact always returns lse")
    path = _folder() / f"{_key((q, k, v, rows), options)}.npz"
    try:
        with disk_cache.open_own(path) as raw, np.load(raw, allow_pickle=False) as file:
            o, lse = file["o"], file["lse"]
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        # Not there, cut short by a crash, or another user's: computed and written again.
        o, lse = exact.attention_exact(q, k, v, rows=rows, return_lse=True, **options)
        _write(path, on_host(o), on_host(lse))
        return o, lse
    xp = kinds.array_namespace(q)
    return xp.asarray(o), xp.asarray(lse)


#: An omitted option and an option with its default value are the same call.
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(exact.attention_exact).parameters.items()
}


def _key(operands: tuple[Any, ...], options: dict[str, Any]) -> str:
    changed = {name: x for name, x in options.items() if x is not _DEFAULTS[name]}
    block_mask, rope = changed.pop("block_mask", None), changed.pop("rope", None)
    of_blocks = () if block_mask is None else (block_mask.mask, np.array(block_mask.blocks))
    scored = changed.pop("mask", None), changed.pop("bias", None)
    named = *scored, *(rope or (None, None)), *of_blocks
    plain = {name: x for name, x in changed.items() if x != _DEFAULTS[name]}
    digest = hashlib.sha256(repr(sorted(plain.items())).encode())
    for source in (exact.__file__, rounding.__file__, scoring.__file__):
        digest.update(Path(source).read_bytes())
    for array in (*operands, *named):
        if array is None:
            digest.update(b"-")
            continue
        array = on_host(array)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def _write(path: Path, o: Any, lse: Any) -> None:
    """Write a whole reference; if the folder cannot be written, only warn."""
    try:
        if not disk_cache.make_folder(path.parent):
            return
        with replacing(path) as file:
            disk_cache.open_private(file)
            np.savez(file, o=o, lse=lse)
    except OSError as error:
        folder, why = (measure_words.printable(str(x)) for x in (path.parent, error))
        LOG.warning("cannot keep references in %s: %s", folder, why)


def reference_info() -> tuple[int, int]:
    """Return the number of stored references, and their size in bytes."""
    sizes = [path.stat().st_size for path in disk_cache.regular_files(_folder(), ".npz")]
    return len(sizes), sum(sizes)


def clear_references() -> int:
    """Delete every reference; return their number."""
    paths = disk_cache.regular_files(_folder(), ".npz")
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)
