"""Judge any function that computes attention. It draws problems, compares each output with its
bound, shrinks the first problem that fails, and leaves a script that reproduces it.

MODULE:NAME or FILE.py:NAME is the function, and --library says how to call it. It gets q, k, v
and, by name, the options that it takes. It returns O, or O and lse. With --gradients, its
gradients are judged, which the autograd of torch or JAX computes. A function of NumPy or CuPy
takes d_out before q and returns dq, dk and dv. If it raises NotImplementedError, the problem does
not count. The last line is a summary. The exit status is 0 (all outputs are within their bounds),
1 (one is not, or the function failed) or 2 (nothing could be judged)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from cupyattn.cli import flags, output
from cupyattn.cli.judged_problems import Failure, Search, search
from cupyattn.files import check_folder, replacing
from cupyattn.interop.callables import LIBRARIES, OPTIONS, called
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.numerics import Numerics
from cupyattn.measure import device
from cupyattn.measure import words as measure_words
from cupyattn.testing import numerics

#: Words of `cupyattn.testing.numerics`, by their flags; `p` is the type of q when omitted.
WORDS = ("accumulate", "promote", "scores", "exponential", "order", "qk", "v", "out", "tanh",
         "scaled_q")  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("function", metavar="MODULE:NAME", help="or FILE.py:NAME")
    parser.add_argument("--library", choices=LIBRARIES, default="numpy",
                        help="library of its arrays, layout and arguments (numpy)")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"),
                        help="of torch's tensors (cuda, if torch has one)")  # fmt: skip
    parser.add_argument("--gradients", action="store_true",
                        help="judge the gradients of q, k and v")  # fmt: skip
    said = parser.add_argument_group("what it rounds", "as for cupyattn.testing.numerics")
    said.add_argument("--p", metavar="TYPE", help="type of P in P.V (the type of q)")
    for name in ("accumulate", "scores", "order", "qk", "v", "out", "scaled-q"):
        said.add_argument(f"--{name}", metavar="WORD")
    said.add_argument("--promote", type=int, metavar="KEYS")
    for name in ("exponential", "tanh"):
        said.add_argument(f"--{name}", type=float, metavar="ERROR")
    drawn = parser.add_argument_group("what is drawn")
    drawn.add_argument("--problems", type=int, default=100, metavar="N", help="of each type (100)")
    drawn.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (0)")
    drawn.add_argument("--dtypes", nargs="+", choices=DTYPES, help="types (all of the library)")
    drawn.add_argument("--options", nargs="*", choices=OPTIONS,
                       help="options (all that the function takes)")  # fmt: skip
    drawn.add_argument("--head-dims", nargs="+", type=int, metavar="D", help="sizes of a head")
    drawn.add_argument("--block", type=int, default=32, metavar="N",
                       help="lengths lie around its multiples (32)")  # fmt: skip
    drawn.add_argument("--multiple", type=int, default=1, metavar="N",
                       help="lengths are multiples of it (1)")  # fmt: skip
    drawn.add_argument("--empty", action="store_true", help="lengths of 0, too")
    drawn.add_argument("--square", action="store_true", help="as many keys as queries")
    drawn.add_argument("--no-groups", action="store_true", help="as many heads of k and v as of q")
    parser.add_argument("--out-name", default="judged", metavar="NAME",
                        help="of the reproducer, NAME.npz and NAME.py (judged)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write every problem and the verdict")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "problems", "block", "multiple")
    flags.check_whole(args, "seed", least=0)
    for size in args.head_dims or ():
        if not 1 <= size <= 256:
            raise ValueError(f"--head-dims must be 1 to 256, got {size}")
    check_folder("--out-name", f"{args.out_name}.npz")
    words = {name: x for name in WORDS if (x := getattr(args, name)) is not None}
    said = {name: numerics(args.p or name, **words) for name in DTYPES}
    library = LIBRARIES[args.library]
    function = called(args.function, args.library, args.device or _device(library.arrays))
    function = function.limited(args.options)
    dtypes = args.dtypes or list(library.dtypes)
    where = f" on {function.device}" if library.arrays == "torch" else ""
    taken = ", ".join(function.taken) or "none"
    what = "gradients of " if args.gradients else ""
    output.say(f"{what}{args.function} as {args.library}{where}; options drawn: {taken}\n")
    asked = {
        "count": args.problems, "seed": args.seed, "block": args.block, "multiple": args.multiple,
        "head_dims": args.head_dims, "square": args.square, "grouped": not args.no_groups,
        "empty": args.empty, "gradients": args.gradients,
    }  # fmt: skip
    found: dict[str, Search] = {}
    with output.progress("judging", args.problems * len(dtypes)) as advance:
        for dtype in dtypes:
            found[dtype] = search(function, dtype, said[dtype], advance=advance, **asked)
            if found[dtype].failure is not None:
                break
    _print_table(found, said)
    failure = next((one.failure for one in found.values() if one.failure is not None), None)
    if failure is not None:
        output.say(f"\n{failure.message}\n")
        _leave(args, function.taken, failure)
    judged = sum(len(one.judged) for one in found.values())
    if args.json:
        record = {"function": args.function, "library": args.library, "seed": args.seed}
        record["gradients"] = args.gradients
        record |= {"environment": device.environment(), "passed": failure is None and judged > 0}
        record["problems"] = [one for each in found.values() for one in each.judged]
        record["refused"] = sum(one.refused for one in found.values())
        record["failure"] = None if failure is None else failure.to_dict()
        output.write_json(args.json, record)
    output.say(_summary(found, failure, judged))
    if failure is not None:
        return 1
    return 0 if judged else 2


def _device(arrays: str) -> str:
    if arrays != "torch":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _print_table(found: Mapping[str, Search], said: Mapping[str, Numerics]) -> None:
    rows = []
    for dtype, one in found.items():
        foreign = said[dtype].foreign
        largest = max(one.judged, key=lambda x: x["ratio"], default=None)
        ratio = "-" if largest is None else measure_words.format_ratio(largest["ratio"])
        at = "-" if largest is None else largest["problem"]
        name = "" if foreign is None else foreign.name
        rows.append((dtype, name, str(len(one.judged)), str(one.refused), ratio, at))
    header = ("type", "held to", "judged", "refused", "error / bound", "largest at")
    output.print_table(header, rows)


def _summary(found: Mapping[str, Search], failure: Failure | None, judged: int) -> str:
    """Return the last line, for CI."""
    counted = measure_words.counted(judged, "problem")
    if failure is not None:
        return f"judge: FAILED, {counted}, {failure.kind}: {failure.problem}"
    if not judged:
        return "judge: NOTHING JUDGED, the function refused every problem"
    largest = max(x["ratio"] for one in found.values() for x in one.judged)
    return f"judge: passed, {counted}, largest error / bound {largest:.3g}"


def _leave(args: argparse.Namespace, taken: tuple[str, ...], failure: Failure) -> None:
    """Write the smallest problem that fails, and the script that runs it."""
    npz, script = (Path(f"{args.out_name}{ending}") for ending in (".npz", ".py"))
    failure.case.save(npz)
    place = args.function
    if place.rpartition(":")[0].endswith(".py"):
        place = str(Path(place.rpartition(":")[0]).resolve()) + ":" + place.rpartition(":")[2]
    judge, judged = "judge", (
        "o, lse = attention(case.q, case.k, case.v, case.options)\n"
        'report = judge(o, case.q, case.k, case.v, **{**case.options, "lse": lse})\n'
    )
    if args.gradients:
        judge, judged = "judge_backward", (
            "given = case.o, case.q, case.k, case.v  # the gradient of O, and the operands\n"
            "found = attention.gradients(*given, case.options)\n"
            'options = {n: x for n, x in case.options.items() if n != "seed"}\n'
            "report = judge_backward(found, *given, **options)\n"
        )
    text = (
        f'"""Written by cupyattn judge: {failure.kind},\n{failure.problem}."""\n'
        "from pathlib import Path\n\n"
        "from cupyattn.interop.callables import called\n"
        f"from cupyattn.testing import {judge}, load_counterexample\n\n"
        'case = load_counterexample(Path(__file__).with_suffix(".npz"))\n'
        f"attention = called({place!r}, {args.library!r}, {failure.device!r})\n"
        f"attention = attention.limited({list(taken)!r})\n"
        f"{judged}"
        "print(report)\n"
        "raise SystemExit(not report.passed)\n"
    )
    with replacing(script) as file:
        file.write(text.encode())
    output.say(f"Wrote {npz} and {script}: python {script} runs this problem alone.")
