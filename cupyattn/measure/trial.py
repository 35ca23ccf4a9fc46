"""A comparison of a pipeline with itself, native and with parts in INT8, from its record.

The record is JSON. Each run is written when it ends, so an interrupted comparison continues after
the last finished run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from cupyattn.measure import report, timing
from cupyattn.measure.timing import FASTER, SLOWER, UNDECIDED, Estimate, judged
from cupyattn.measure.words import align, counted, format_bytes, format_seconds, printable

EXPERIMENT = "trial"
NATIVE, LINEAR, ATTENTION, ALL = "native", "linear layers", "attention", "accelerated"
#: The model as it was given, if ``native`` was compiled for the comparison.
AS_GIVEN = "native, not compiled"
#: The native model without the step cache of all other ways.
UNCACHED = "native, no step cache"
#: Text of a verdict after the ratio.
_ADVICE = {FASTER: "", UNDECIDED: ", undecided: leave it native", SLOWER: ": leave it native"}
#: Names of attention modules of diffusers, and how `accelerate` leaves a part native by them.
ATTENTION_NAMES = r"(attn|attention)\d?$"
_HOW = {
    ATTENTION: f", exclude=r'{ATTENTION_NAMES}'", LINEAR: f", include=r'{ATTENTION_NAMES}'",
    ALL: ", restore()",
}  # fmt: skip
_SHOWN_LATENTS = 8
#: Rounds that a 95 % interval needs: the least and the largest of five enclose a median in 94 %.
LEAST_ROUNDS = 6


@dataclass(frozen=True, repr=False)
class Comparison:
    """Measurements of `compare` on an accelerated pipeline, shown as a table with verdicts.

    Parameters
    ----------
    record : mapping
        JSON-ready: ``"ways"`` by name, and ``"pictures"`` by name. A way has ``"rounds"``, the
        seconds of the steps of each run in turn; ``"weights"`` and ``"peak"`` in bytes;
        ``"first"``, the seconds of the first run; and ``"latents"``, ``"psnr"`` and ``"ssim"``
        relative to native. JSON has no infinity: ``"psnr"`` is null if the pictures are equal, and
        an error of ``"latents"`` is null if it is not finite.
    """

    record: Mapping[str, Any]

    @property
    def ways(self) -> dict[str, Mapping[str, Any]]:
        """Names of the measured ways, native first."""
        return dict(self.record["ways"])

    @property
    def rounds(self) -> int:
        """Runs of each way."""
        return min((len(way["rounds"]) for way in self.ways.values()), default=0)

    @property
    def has_cache(self) -> bool:
        """Whether a step cache leaves out work in some of the steps."""
        return UNCACHED in self.record["ways"]

    def seconds(self, name: str) -> list[float]:
        """Return the median step of each run of a way; the mean of all if there is a step cache."""
        of = fmean if self.has_cache else median
        return [of(steps) for steps in self.ways[name]["rounds"][: self.rounds]]

    def speed(self, name: str, beside: str = NATIVE) -> Estimate:
        """Return how many times as fast as another way one is, with its 95 % interval."""
        return timing.paired_ratio(self.seconds(beside), self.seconds(name))

    def _ratio(self, speed: Estimate) -> str:
        """Return a ratio in words, with its interval if there are enough rounds for one."""
        if self.rounds < LEAST_ROUNDS:
            return f"{speed.median:.2f}"
        return f"{speed.median:.2f} [{speed.low:.2f}, {speed.high:.2f}]"

    def verdicts(self) -> dict[str, str]:
        """Return for each part that was replaced how fast it is, and whether to leave it native."""
        if not self.rounds:
            return {}
        found = {}
        for name in self.ways:
            if name in (NATIVE, AS_GIVEN, UNCACHED):
                continue
            said = self.ways[name]["said"]
            speed = self.speed(name)
            advice = _ADVICE[judged(speed)]
            how = _HOW.get(name, "") if advice else ""
            if self.rounds < LEAST_ROUNDS:
                advice = f", undecided: an interval needs {LEAST_ROUNDS} rounds, got {self.rounds}"
                how = ""
            found[name] = f"{said}: {self._ratio(speed)} times as fast{advice}{how}"
            latents = self.ways[name].get("latents") or ()
            if None in latents:
                found[name] += "; its result is not finite"
            elif latents and not any(latents):
                found[name] += "; its result has native's bits: report() says which calls ran"
        if self.has_cache:
            alone, both = (self._ratio(self.speed(name, UNCACHED)) for name in (NATIVE, ALL))
            said = f"{alone} times as fast as native without it, and {both} with"
            found[UNCACHED] = f"step cache alone: {said} {self.ways[ALL]['said']}"
        return found

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return a header, and a row of each way."""
        header = ["way", "a step", "times as fast", "first run", "weights", "peak",
                  "latents, last step", "PSNR", "SSIM"]  # fmt: skip
        rows = []
        for name, way in self.ways.items():
            of = ["-", "-"]
            if self.rounds:
                of = [format_seconds(median(self.seconds(name))), "-"]
                of[1] = "-" if name == NATIVE else self._ratio(self.speed(name))
            latents, pictures = way.get("latents"), "psnr" in way
            rows.append([
                name, *of, format_seconds(way["first"]), _shown(way.get("weights"), format_bytes),
                _shown(way.get("peak"), format_bytes), _error(latents[-1]) if latents else "-",
                _shown(way["psnr"], "{:.1f} dB".format, "equal") if pictures else "-",
                _shown(way.get("ssim"), "{:.4f}".format),
            ])  # fmt: skip
        return header, rows

    def latents(self) -> list[str]:
        """Return a line of each way: relative L2 of its latents to native's, by step."""
        lines = []
        for name, way in self.ways.items():
            found = way.get("latents") or []
            if name == NATIVE or len(found) < 2:
                continue
            step = max(1, math.ceil(len(found) / _SHOWN_LATENTS))
            some = [f"{i + 1}: {_error(found[i])}" for i in range(len(found)) if i % step == 0]
            lines.append(f"{name}, latents to native by step: {', '.join(some)}")
        return lines

    def __str__(self) -> str:
        header, rows = self.table()
        lines = [self.record["what"]["model"], align([header, *rows]), *self.latents()]
        lines += self.verdicts().values()
        return "\n".join(printable(line) for text in lines for line in text.split("\n"))

    def __repr__(self) -> str:
        return str(self)  # in a notebook: the fields have whole pictures

    def page(self) -> str:
        """Return one page of HTML with pictures side by side, without external files."""
        title = f"Trial of {self.record['what']['model']}"
        header, rows = self.table()
        lines = [*self.verdicts().values(), *self.latents()]
        of = "mean" if self.has_cache else "median"
        where = self.record["what"].get("device", "a CPU")
        text = "".join(f"<p>{report.escape(line)}</p>\n" for line in lines)
        return report.document(title, (
            f'<p class="facts">{counted(self.rounds, "run")} of each way in turns; a step is the '
            f"{of} of a run, intervals are of 95 %. Measured on {report.escape(where)}.</p>\n"
            f"{report.table(header, rows)}\n{text}{self._pictures()}"
        ))  # fmt: skip

    def _pictures(self) -> str:
        found = {n: uris for n, uris in self.record.get("pictures", {}).items() if uris}
        if not found:
            return "<p>The result has no pictures to show.</p>"
        heads = "".join(f"<th>{report.escape(name)}</th>" for name in found)
        lines = "".join(
            "<tr>" + "".join(f'<td><img alt="" src="{uri}"></td>' for uri in line) + "</tr>\n"
            for line in zip(*found.values(), strict=True)
        )
        return (
            f'<div class="scroll"><table class="pictures"><thead><tr>{heads}</tr></thead>\n'
            f"<tbody>{lines}</tbody></table></div>"
        )


def new(what: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a comparison before its first run; `what` as for `read`."""
    return {"experiment": EXPERIMENT, "what": dict(what), "ways": {}, "pictures": {}}


def text(record: Mapping[str, Any]) -> str:
    """Return a record as the text of its file."""
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def read(path: Path, what: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of an unfinished comparison, or a new record if there is no file.

    Parameters
    ----------
    path : Path
    what : mapping
        Model, call and ways; a file of another comparison is refused.

    Raises
    ------
    ValueError
        For a file of something else.
    """
    if not path.exists():
        return new(what)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        is_one = found["experiment"] == EXPERIMENT and isinstance(found["what"], dict)
        is_one &= isinstance(found["pictures"], dict) and all(map(_is_way, found["ways"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        is_one = False
    if not is_one:
        raise ValueError(
            f"{path} is no record of a comparison, or is damaged: give another file, or delete it"
        )
    others = [name for name in what if found["what"].get(name) != what[name]]
    if others or found["what"].keys() != what.keys():
        raise ValueError(
            f"{path} is the record of another comparison, by its {', '.join(others) or 'entries'}: "
            "give another file, or delete that one"
        )
    return dict(found)


def _is_way(way: Any) -> bool:
    """Whether a way of a record has runs, each of the seconds of its steps."""
    return all(
        isinstance(steps, list) and steps and all(isinstance(s, float) and s > 0 for s in steps)
        for steps in way["rounds"]
    ) and isinstance(way["rounds"], list)


def time_left(done: Sequence[float], left: int) -> str:
    """Say how long the runs that are left will take, given the seconds of earlier runs.

    Examples
    --------
    >>> time_left([50.0, 70.0], 4), time_left([], 4)
    ('4 min left', '')
    """
    if not done:
        return ""
    seconds = median(done) * left
    return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"


def _shown(value: Any, words: Any, none: str = "-") -> str:
    return none if value is None else str(words(float(value) if words != format_bytes else value))


def _error(value: float | None) -> str:
    """Return a relative error of a record in words."""
    return _shown(value, "{:.1e}".format, "not finite")
