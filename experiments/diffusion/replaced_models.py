"""Do models with INT8 layers stay right while other libraries change them?

Varies       sequences of steps by a seed: load, swap, merge and unload adapters, replace linear
             layers and attention, cast, offload, fuse projections, call, compile, save, restore;
             the model's family and type
Holds fixed  small real transformers of diffusers, the real peft and accelerate; the mirror
Measures     every linear layer's result, adapters included, as a fraction of its bound of float64;
             the bits that restoring gives back; exceptions that are no refusals
Expect       every layer within its bound, every restored weight to the bit, every refusal one
             sentence that is allowed where it comes
Run          python -m experiments.diffusion.replaced_models --json FILE [--sequences 2000]
             python -m experiments.diffusion.replaced_models --resume FILE     # goes on
             python -m experiments.diffusion.replaced_models --sequence 17     # one again

Needs torch, diffusers, peft and accelerate.
A twin of the model shows the effect of a step without INT8. It takes all steps except replacing,
restoring and offloading. If a step fails, or a layer is wrong, a model without INT8 takes all steps
again, offloading included. A failure there, too, is the other library's, and ends the sequence.
Exit status 1: a sequence failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import json
import logging
import multiprocessing
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupyattn.cli import output
from cupyattn.errors import UnsupportedError
from experiments._harness import recording
from experiments.diffusion.diffusers_blocks import libraries

NAME = "replaced_models"
FAMILIES = ("flux", "wan", "sd3", "kandinsky")
#: Weights with which steps are drawn, and the largest number of steps of a sequence.
WEIGHTS = {
    "run": 5, "load": 5, "swap": 4, "merge": 3, "unmerge": 2, "unload": 2, "save_adapter": 1,
    "replace": 6, "attention": 1, "restore": 3, "cast": 2, "layerwise": 0.4, "offload": 3,
    "onload": 4, "fuse": 2, "unfuse": 2, "save": 2, "compiled": 0.2,
}  # fmt: skip
STEPS = 18
#: Allowed refusals, by the refused step. All other exceptions are failures.
REFUSALS = {
    "replace": (
        "replace first, then offload", "replace first, then cast", "is replaced already",
        "no linear layer of the model becomes INT8", "is INT8 without the layer",
        "remove the offloading hooks first", "offloaded to disk",
    ),
    "restore": (
        "remove the offloading hooks first", "offloaded to disk", "the layers were dropped",
        "is INT8 without the layer", "have other numbers than when it was replaced",
    ),
    "attention": ("is replaced already",),
    "merge": ("fuse",),
    "save": ("save_pretrained of a",),
}  # fmt: skip
#: Packages whose versions a record has.
LIBRARIES = ("torch", "diffusers", "peft", "accelerate")
SETTINGS = ("seed", "sequences", "start")


class Wrong(Exception):
    """A wrong result."""


@dataclass
class Sequence:
    """Steps that a model takes."""

    family: str
    dtype: str
    seed: int
    steps: list[tuple[str, dict[str, Any]]]


@dataclass
class Outcome:
    """Result of a sequence: "right", "native" or "failed", the message, and the observations."""

    kind: str = "right"
    said: str = ""
    taken: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    layers: int = 0
    worst: float = 0.0
    weights: int = 0


def draw(seed: int, number: int) -> Sequence:
    """Return the sequence of a number."""
    chance = random.Random(f"{seed}:{number}")
    family = FAMILIES[number % len(FAMILIES)]
    kinds = chance.choices([*WEIGHTS], [*WEIGHTS.values()], k=chance.randint(5, STEPS))
    steps = [(kind, _arguments(kind, chance)) for kind in kinds]
    end = [("run", {}), ("onload", {"read_back": chance.random() < 0.5})]
    end += [("restore", {"by_handle": False}), ("run", {})]
    dtype = chance.choice(("float32", "float32", "bfloat16"))
    return Sequence(family, dtype, chance.randrange(1000), [*steps, *end])


def _arguments(kind: str, chance: random.Random) -> dict[str, Any]:
    from experiments._harness.model_worlds import OFFLOADS, PATTERNS

    made: dict[str, dict[str, Any]] = {
        "load": {
            "rank": chance.choice((4, 16)), "part": chance.randrange(2),
            "dora": chance.random() < 0.15, "from_file": chance.random() < 0.5,
            "seed": chance.randrange(1000),
        },
        "swap": {"chosen": chance.randrange(8), "weight": chance.choice((1.0, 0.5, -1.0))},
        "unload": {"chosen": chance.randrange(8), "everything": chance.random() < 0.4},
        "merge": {"safe": chance.random() < 0.3},
        "replace": {
            "part": chance.randrange(len(PATTERNS)),
            "strategy": chance.choice(("block", "channel")),
            "originals": chance.choice(("cpu",) * 5 + ("device",) * 3 + ("drop",)),
            "again": chance.random() < 0.3,
        },
        "attention": {"again": chance.random() < 0.3},
        "restore": {"by_handle": chance.random() < 0.6},
        "cast": {"dtype": chance.choice(("float32", "bfloat16", "float16"))},
        "offload": {"way": chance.choice(OFFLOADS)},
        "onload": {"read_back": chance.random() < 0.7},
        "save": {"way": chance.choice(("state", "model", "copy", "library"))},
    }  # fmt: skip
    return made.get(kind, {})


# ---- one sequence --------------------------------------------------------------------------------


class Run:
    """A sequence on a model with INT8 layers and on its twin."""

    def __init__(self, sequence: Sequence) -> None:
        from experiments._harness.model_worlds import World

        self.sequence, self.outcome = sequence, Outcome()
        given = sequence.family, sequence.dtype, sequence.seed
        self.world = World(*given, int8=True, moves=True)
        self.twin = World(*given, int8=False, moves=False)

    def go(self) -> Outcome:
        """Take all steps."""
        try:
            for number, (kind, arguments) in enumerate(self.sequence.steps):
                try:
                    self._step(kind, arguments)
                    if self.world.is_lost:
                        self._restore_what_is_lost()
                        break
                except Exception as error:  # noqa: BLE001 - any kind is what this looks for
                    self._failed(number, error)
                    break
        finally:
            self.world.close()
            self.twin.close()
        return self.outcome

    def _step(self, kind: str, arguments: dict[str, Any]) -> None:
        from experiments._harness.model_worlds import NothingToDo

        if kind in ("run", "compiled"):
            self._call(compiled=kind == "compiled")
            self.outcome.taken[kind] += 1
            return
        before = self._output() if kind in REFUSALS else None
        try:
            self.world.do(kind, arguments)
        except NothingToDo:
            return
        except Exception as error:
            if not _is_refusal(kind, error):
                raise
            _check_same(self._output(), before, f"{kind} was refused, and changed the model")
            self.outcome.refused[f"{kind}: {' '.join(str(error).split()[-9:])}"] += 1
            return
        self.twin.do(kind, arguments)
        if kind in ("replace", "restore"):
            self._check_weights()
        self.outcome.taken[kind] += 1

    def _output(self) -> Any:
        """Call both models, since calls change adapters, too: PEFT unmerges disabled adapters."""
        self.twin.run()
        return self.world.run()

    def _call(self, *, compiled: bool) -> None:
        """Call both models, and hold each linear layer to its bound."""
        from experiments._harness.slot_bounds import recorded, slots, worst

        if compiled:
            found = self.world.compiled()
            _check_same(found, self._output(), "compiled code computes something else", 1e-4)
        with recorded(self.world.model) as calls:
            y = self.world.run()
        with recorded(self.twin.model) as own:
            expected = self.twin.run()
        count = {name: len(made) for name, made in calls.items()}
        if count != {name: len(made) for name, made in own.items()}:
            others = {n for n in count.keys() | own.keys() if count.get(n) != len(own.get(n, ()))}
            raise Wrong(f"other layers were called: {sorted(others)[:3]}")
        twins = slots(self.twin.model)
        for name, made in calls.items():
            for call in made:
                off = worst(call, twins[name], self.world.quantised.get(name))
                self.outcome.layers += 1
                self.outcome.worst = max(self.outcome.worst, off)
                if not off <= 1:
                    raise Wrong(f"{name} is {off:.3g} times its bound off")
        if not (self.world.is_int8 or self.world.handles or self.world.offloaded):
            _check_same(y, expected, "a restored model computes something else")
        if not y.isfinite().all():
            raise Wrong("the output is not finite")

    def _check_weights(self) -> None:
        """Hold what came back to what was taken, and all else to the twin; both to the bit."""
        mine = self.world.model.state_dict(keep_vars=True)
        others = self.twin.model.state_dict(keep_vars=True)
        for name, weight in self.world.came_back().items():
            key = next(k for k in (f"{name}.weight", f"{name}.base_layer.weight") if k in mine)
            # The twin was cast step by step, the weight that was kept once.
            others[key].data.copy_(weight)
            self.outcome.weights += 1
        for key in mine.keys() & others.keys():
            a, b = mine[key].detach(), others[key].detach()
            if a.is_meta or "disk" in self.world.offloaded:
                continue
            if a.dtype != b.dtype or not (a.float() == b.float()).all():
                raise Wrong(f"{key} is not what it was")

    def _restore_what_is_lost(self) -> None:
        """Take back layers whose memory has other numbers: their weights come back, or a sentence.

        All else of the model is lost without INT8, too.
        """
        from experiments._harness.model_worlds import NothingToDo
        from experiments._harness.slot_bounds import base_of, slots

        try:
            self.world.restore(by_handle=False)
        except NothingToDo:
            return
        except Exception as error:
            if not _is_refusal("restore", error):
                raise
            self.outcome.refused[f"restore: {' '.join(str(error).split()[-9:])}"] += 1
            return
        own, others = slots(self.world.model), slots(self.twin.model)
        for name, weight in self.world.came_back().items():
            base, other = base_of(own[name]), base_of(others[name])
            same = (base.weight == weight.to(base.weight.dtype)).all()
            if base.bias is not None:
                same = same and (base.bias == other.bias).all()
            if not same:
                raise Wrong(f"{name} came back with other numbers")

    def _failed(self, number: int, error: Exception) -> None:
        """Say whether a model without INT8 fails at the same step, too."""
        kind, arguments = self.sequence.steps[number]
        said = f"step {number}, {kind} {arguments}: {type(error).__name__}: {error}"
        tail = traceback.extract_tb(error.__traceback__)[-1]
        self.outcome.said = f"{said} ({Path(tail.filename).name}:{tail.lineno})"[:700]
        self.outcome.kind = "native" if self._fails_without(number, error) else "failed"

    def _fails_without(self, number: int, error: Exception) -> bool:
        from experiments._harness.model_worlds import NothingToDo, World

        sequence = self.sequence
        given = sequence.family, sequence.dtype, sequence.seed
        world = World(*given, int8=False, moves=True)
        twin = World(*given, int8=False, moves=False)
        try:
            for kind, arguments in sequence.steps[: number + 1]:
                for one in (world, twin):
                    with contextlib.suppress(NothingToDo):
                        one.do(kind, arguments)
            a, b = world.run(), twin.run()
        except Exception as other:  # noqa: BLE001
            return isinstance(error, Wrong) or type(other) is type(error)
        finally:
            world.close()
            twin.close()
        off = (a.double() - b.double()).norm() / b.double().norm()
        return not off < 1e-3


def _is_refusal(kind: str, error: Exception) -> bool:
    """Whether an exception is one sentence of ours that this step may be answered by."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = any("cupyattn" in Path(f.filename).parts for f in frames[-2:])
    said = str(error)
    return ours and "\n" not in said and any(part in said for part in REFUSALS.get(kind, ()))


def _check_same(found: Any, expected: Any, said: str, allowed: float = 0.0) -> None:
    off = (found.double() - expected.double()).norm() / expected.double().norm()
    if not (off <= allowed if allowed else (found == expected).all()):
        raise Wrong(f"{said}: relative L2 {float(off):.3g}")


# ---- many ----------------------------------------------------------------------------------------


class Record:
    """Results of a run so far, written every 20 sequences."""

    def __init__(self, args: argparse.Namespace, stored: dict[str, Any]) -> None:
        self.args, self.began = args, time.monotonic()
        self.seconds = float(stored.get("seconds", 0.0))
        self.done = int(stored.get("done", 0))
        self.counts = Counter(stored.get("counts", {}))
        self.taken = Counter(stored.get("steps", {}))
        self.refused = Counter(stored.get("refusals", {}))
        self.native = Counter(stored.get("native", {}))
        self.failed: list[dict[str, Any]] = stored.get("failed", [])
        self.layers, self.weights = int(stored.get("layers", 0)), int(stored.get("restored", 0))
        self.worst = float(stored.get("worst", 0.0))

    def add(self, number: int, outcome: Outcome) -> None:
        """Count a sequence."""
        self.done += 1
        self.counts[outcome.kind] += 1
        self.taken += outcome.taken
        self.refused += outcome.refused
        self.layers += outcome.layers
        self.weights += outcome.weights
        if outcome.kind == "right":
            self.worst = max(self.worst, outcome.worst)
        if outcome.kind == "native":
            self.native[re.sub(r"\d+", "N", outcome.said.partition(": ")[2])[:160]] += 1
        if outcome.kind == "failed":
            self.failed.append({"sequence": number, "said": outcome.said})
            print(f"{number}: {outcome.said}"[:400], flush=True)
        if self.done % 20 == 0:
            self.write()

    def write(self) -> None:
        """Write the record where the arguments say."""
        content = {name: getattr(self.args, name) for name in SETTINGS}
        content |= {
            "complete": self.done >= self.args.sequences, "done": self.done,
            "seconds": round(self.seconds + time.monotonic() - self.began, 1),
            "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
            "counts": dict(self.counts), "layers": self.layers, "worst": round(self.worst, 4),
            "restored": self.weights, "steps": dict(self.taken.most_common()),
            "refusals": dict(self.refused.most_common()), "native": dict(self.native.most_common()),
            "failed": self.failed,
        }  # fmt: skip
        if self.args.json:
            with contextlib.redirect_stdout(None):
                recording.keep(self.args, NAME, "mirror", content)


def run(seed: int, number: int) -> Outcome:
    """Run one sequence."""
    torch, _ = libraries()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Run(draw(seed, number)).go()
    finally:
        logging.disable(logging.NOTSET)


def _outcomes(args: argparse.Namespace, numbers: range) -> Iterator[Outcome]:
    """Yield what comes of sequences, in their order."""
    one = functools.partial(run, args.seed)
    if args.jobs == 1:
        yield from map(one, numbers)
        return
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        yield from pool.imap(one, numbers)


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0, help="number of the first sequence")
    parser.add_argument("--sequence", type=int, help="run this one, and say what comes of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, help="end after so many, to be resumed")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write the record")
    parser.add_argument("--resume", metavar="FILE", type=Path, help="a record to go on from")
    args = parser.parse_args(arguments)
    args.quick = True  # nothing is timed
    try:
        libraries()
        importlib.import_module("experiments._harness.model_worlds")
    except (ImportError, UnsupportedError) as error:
        print(f"{error}: pip install torch diffusers peft accelerate", file=sys.stderr)
        return 2
    if args.sequence is not None:
        sequence = draw(args.seed, args.sequence)
        print(sequence.family, sequence.dtype, *sequence.steps, sep="\n")
        print(outcome := run(args.seed, args.sequence))
        return int(outcome.kind == "failed")
    stored: dict[str, Any] = {}
    if args.resume is not None:
        stored = json.loads(args.resume.read_text())
        args.json = args.resume
        for name in SETTINGS:
            setattr(args, name, stored[name])
    record = Record(args, stored)
    todo = range(args.start + record.done, args.start + args.sequences)
    for number, outcome in zip(todo, _outcomes(args, todo), strict=True):
        record.add(number, outcome)
        if args.minutes is not None and time.monotonic() - record.began > 60 * args.minutes:
            break
    record.write()
    rows = [[kind, str(count)] for kind, count in record.counts.most_common()]
    output.print_table(["sequences", ""], rows)
    print(f"{record.layers} layers, the worst at {record.worst:.3f} of its bound; "
          f"{record.weights} weights came back to the bit")  # fmt: skip
    return int(bool(record.failed))


if __name__ == "__main__":
    sys.exit(main())
