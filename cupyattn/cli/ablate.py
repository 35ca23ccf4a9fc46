"""One input, every rung and every choice of INT8 arithmetic, one at a time: J2 and J3 (errors as
shares of their bounds), relative error against float64, and on a device the time beside fa_int8's
default in the same rounds. The input is your own (--qkv), a random one, or the real one beside us.
NAME keeps to a part: rungs, granularity, offsets, pv, bits, codes or diffusion."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cupyattn.arrays.kinds import array_namespace
from cupyattn.cli import ablate_ways, flags, inputs, output
from cupyattn.cli.ablate_ways import Way
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.measure import device, rungs, timing
from cupyattn.measure.words import format_ratio, format_seconds
from cupyattn.ops.attention import attention
from cupyattn.ops.explain import kernel_form
from cupyattn.ops.quantize import quantize
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.settings import check_attention
from cupyattn.quant.choices import CHOICES
from cupyattn.quant.config import QuantConfig

RUNGS, DEFAULT = "rungs", "fa_int8"
#: What a part is called on the command line: the kind of choice.
PARTS = {
    "granularity": "granularity",
    "offsets": "offsets of Q and K",
    "pv": "P and V in 8 bits",
    "bits": "bits of Q and K",
    "codes": "where codes come from",
}


#: All parts.
_NAMES = (RUNGS, *PARTS, ablate_ways.PART)


@dataclass(frozen=True)
class Choice:
    """One thing to run.

    Parameters
    ----------
    name, kind : str
    variant : str
        The rung.
    quant : QuantConfig or None
        Of `fa_int8`.
    """

    name: str
    kind: str
    variant: str
    quant: QuantConfig | None = None

    def call(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Return O."""
        own_options = options if self.quant is None else {**options, "quant": self.quant}
        return attention(q, k, v, variant=self.variant, **own_options)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "parts", nargs="*", metavar="NAME", help=f"{', '.join(_NAMES)} (default: all)"
    )
    inputs.add_arguments(parser)
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=15, help="timed samples of each choice (15)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")


def choices(names: list[str]) -> list[Choice]:
    """Return fa_int8's default and all choices of some parts; of all parts for an empty list.

    Raises
    ------
    ValueError
        For a part that does not exist.
    """
    for part in names:
        if part not in _NAMES:
            raise ValueError(f"NAME must be one of {', '.join(_NAMES)}, got {part!r}")
    found = [Choice(DEFAULT, RUNGS, DEFAULT, QuantConfig())]
    if not names or RUNGS in names:
        others = [name for name in ladder.VARIANTS if name != DEFAULT]
        found = [*(Choice(name, RUNGS, name) for name in others), *found]
    for part, kind in PARTS.items():
        if not names or part in names:
            found += [
                Choice(name, kind, DEFAULT, QuantConfig(**fields))
                for name, fields in CHOICES[kind].items()
            ]
    return found


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "rounds")
    wanted: list[Choice | Way] = [*choices(args.parts)]
    missing = device.device_missing()
    case = inputs.choose(args, large=not missing)
    if missing:
        output.say(f"No device was found: {missing}. The choices run on the mirror, without times.")
    else:
        case = case.on_device()
    qkv, options = (case.q, case.k, case.v), inputs.call_options(args)
    call = check_attention(*qkv, **options)
    if not args.parts or ablate_ways.PART in args.parts:
        wanted += ablate_ways.ways(case.q, case.k)
    rows = array_namespace(case.q).asarray(rungs.judged_rows(call, args.seed))
    exact = rungs.remembered()
    found = []
    with output.progress(case.name, len(wanted)) as advance:
        for choice in wanted:
            found.append(
                choice.judged(qkv, options, rows, exact)
                if isinstance(choice, Way)
                else judged(choice, qkv, call, options, rows, exact)
            )
            advance(choice.name)
    if not missing:
        add_times(wanted, found, qkv, options, args.rounds)
    add_errors(found)
    output.say(
        f"\n{case.name}: batch {call.batch}, heads {call.heads}, length {call.len_q}"
        f"{'' if call.len_q == call.len_kv else f' x {call.len_kv}'}, head_dim {call.head_dim}, "
        f"{call.dtype}{', causal' if call.causal else ''}"
    )
    header, lines = table(found, timed=not missing)
    output.print_table(header, lines)
    output.say(
        "\nJ2, J3: largest error of the kernel, and of quantising, as a share of its bound; both "
        "must be\nat most 1. x error, x speed: beside fa_int8's default."
    )
    ok = all(row["ok"] for row in found if row["judgement"])
    if not ok:
        output.say("FAILED: a choice misses its bound (J2 or J3 > 1).")
    if args.json:
        sizes = {x.name: getattr(call, x.name) for x in fields(call) if x.init}
        problem = {"name": case.name, **sizes}
        output.write_json(
            args.json,
            {
                "experiment": "ablate", "command": " ".join(["cupyattn", *args.arguments]),
                "backend": "mirror" if missing else "cuda", "environment": device.environment(),
                "problems": [{"problem": problem, "rows": found}],
            },
        )  # fmt: skip
    return 0 if ok else 1


def judged(
    choice: Choice,
    qkv: tuple[Any, Any, Any],
    call: AttentionSpec,
    options: Mapping[str, Any],
    rows: Any,
    exact: rungs.Exact,
) -> dict[str, Any]:
    """Return the row of a choice with its judgement; ``unsupported`` says why there is none."""
    row: dict[str, Any] = {"variant": choice.name, "choice": choice.kind, "judgement": None}
    if call.dtype not in ladder.lookup(choice.variant).dtypes:
        return row | {"unsupported": f"takes {', '.join(ladder.lookup(choice.variant).dtypes)}"}
    try:
        z = None if choice.quant is None else quantize(*qkv, quant=choice.quant)
        o = choice.call(*qkv, **options)
        form = kernel_form(
            *(qkv if z is None else (z,)), variant=choice.variant, **options
        )  # fmt: skip
    except UnsupportedError as error:
        return row | {"unsupported": str(error)}
    q, k, v = qkv
    found = rungs.judge(
        o, q, k, v, variant=choice.variant, quantized=z, rows=rows, exact=exact, **form, **options
    )
    return row | {"judgement": asdict(found), "ok": found.ok, "form": form["form"]}


def add_times(
    wanted: list[Choice | Way],
    found: list[dict[str, Any]],
    qkv: tuple[Any, Any, Any],
    options: Mapping[str, Any],
    rounds: int,
) -> None:
    """Add times to the rows that hold their bounds, measured in turns."""
    sets = timing.rotated(qkv)

    def calling(choice: Choice | Way) -> Callable[[int], Any]:
        return lambda i: choice.call(*sets[i % len(sets)], **options)

    calls = {
        choice.name: calling(choice)
        for choice, row in zip(wanted, found, strict=True)
        if row["judgement"] and row["ok"]
    }
    with output.progress("timing", rounds * len(calls)) as advance:
        samples = timing.time_interleaved(calls, rounds=rounds, advance=advance)
    for row in found:
        if row["variant"] in samples:
            own = samples[row["variant"]]
            row["samples"] = own
            row["seconds"] = timing.median(own).median
            if DEFAULT in samples:
                row["speed_ratio"] = timing.paired_ratio(samples[DEFAULT], own).to_list()


def add_errors(found: list[dict[str, Any]]) -> None:
    """Add to each row its relative error over that of fa_int8's default."""
    errors = {row["variant"]: row["judgement"]["relative_error"] for row in found
              if row["judgement"]}  # fmt: skip
    for row in found:
        if row["judgement"] and errors.get(DEFAULT):
            row["error_over_default"] = errors[row["variant"]] / errors[DEFAULT]


def table(found: list[dict[str, Any]], *, timed: bool) -> tuple[list[str], list[list[str]]]:
    """Return header and lines."""
    header = ["", "of", "J2", "J3", "rel. error", "x error"]
    header += ["time", "x speed", "95 %"] if timed else []
    lines = []
    for row in found:
        judgement = row["judgement"]
        if judgement is None:
            blank = [""] * (len(header) - 3)
            lines.append([row["variant"], row["choice"], row["unsupported"], *blank])
            continue
        over = row.get("error_over_default")
        line = [
            row["variant"], row["choice"],
            "-" if judgement["j2"] is None else format_ratio(judgement["j2"]),
            "-" if judgement["j3"] is None else format_ratio(judgement["j3"]),
            f"{judgement['relative_error']:.2e}", "-" if over is None else f"{over:.3g}",
        ]  # fmt: skip
        if timed:
            ratio = row.get("speed_ratio")
            line += [
                format_seconds(row["seconds"]) if "seconds" in row else "not timed",
                "-" if ratio is None else f"{ratio[0]:.2f}",
                "-" if ratio is None else f"{ratio[1]:.2f} .. {ratio[2]:.2f}",
            ]
        lines.append(line)
    return header, lines
