"""`ablate`: one input, every rung and every choice of INT8 arithmetic, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from cupyattn.arrays import interchange
from cupyattn.arrays.kinds import array_namespace
from cupyattn.diffusion import ablation_ways
from cupyattn.diffusion.ablation_ways import Way
from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels import ladder
from cupyattn.measure import rungs, timing
from cupyattn.measure.words import align, format_ratio, format_seconds
from cupyattn.ops.attention import attention
from cupyattn.ops.explain import kernel_form
from cupyattn.ops.quantize import quantize
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.settings import check_attention
from cupyattn.quant.choices import CHOICES
from cupyattn.quant.config import QuantConfig

RUNGS, DEFAULT = "rungs", "fa_int8"
#: Parts of an ablation that are choices of `QuantConfig`, and the kind of each.
KINDS = {
    "granularity": "granularity",
    "offsets": "offsets of Q and K",
    "pv": "P and V in 8 bits",
    "bits": "bits of Q and K",
    "codes": "where codes come from",
}
#: All parts.
PARTS = (RUNGS, *KINDS, ablation_ways.PART)
#: Meaning of the columns of the table.
LEGEND = (
    "J2, J3: largest error of the kernel, and of quantising, as a share of its bound; both must be"
    "\nat most 1. x error, x speed: beside fa_int8's default."
)


@dataclass(frozen=True)
class Choice:
    """A rung, or one choice of INT8 arithmetic.

    Parameters
    ----------
    name, kind : str
    variant : str
        The rung.
    quant : QuantConfig or None
        Configuration of `fa_int8`.
    """

    name: str
    kind: str
    variant: str
    quant: QuantConfig | None = None

    def call(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Return O."""
        own_options = options if self.quant is None else {**options, "quant": self.quant}
        return attention(q, k, v, variant=self.variant, **own_options)

    def judged(
        self, qkv: tuple[Any, Any, Any], options: Mapping[str, Any], rows: Any, exact: rungs.Exact
    ) -> dict[str, Any]:
        """Return its row of the table; ``unsupported`` says why there is no judgement."""
        row: dict[str, Any] = {"variant": self.name, "choice": self.kind, "judgement": None}
        dtypes = ladder.lookup(self.variant).dtypes
        if qkv[0].dtype.name not in dtypes:
            return row | {"unsupported": f"takes {', '.join(dtypes)}"}
        try:
            z = None if self.quant is None else quantize(*qkv, quant=self.quant)
            o = self.call(*qkv, **options)
            form = kernel_form(*(qkv if z is None else (z,)), variant=self.variant, **options)
        except UnsupportedError as error:
            return row | {"unsupported": str(error)}
        q, k, v = qkv
        found = rungs.judge(
            o, q, k, v, variant=self.variant, quantized=z, rows=rows, exact=exact, **form,
            **options,
        )  # fmt: skip
        return row | {"judgement": asdict(found), "ok": found.ok, "form": form["form"]}


@dataclass(frozen=True)
class Ablation:
    """Result of `ablate`; ``print`` it for the table.

    Parameters
    ----------
    call : AttentionSpec
        The sizes and options that all points share.
    backend : {"cuda", "mirror"}
    rows : list of dict
        JSON-ready, one for each point: ``variant``, its name; ``choice``, its part in words;
        ``judgement``, shares of the bounds ``j2`` and ``j3`` and ``relative_error``, or None with
        the reason in ``unsupported``; ``ok``; ``error_over_default``; on a device ``seconds``, and
        ``speed_ratio``, the speed beside the default of ``fa_int8`` with its 95 % interval.
    """

    call: AttentionSpec
    backend: str
    rows: list[dict[str, Any]]

    @property
    def ok(self) -> bool:
        """Whether every point that was judged holds its bounds."""
        return all(row["ok"] for row in self.rows if row["judgement"])

    @property
    def header(self) -> list[str]:
        """Names of the columns."""
        timed = ["time", "x speed", "95 %"] if self.backend == "cuda" else []
        return ["", "group", "J2", "J3", "rel. error", "x error", *timed]

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [self._line(row) for row in self.rows]

    def _line(self, row: Mapping[str, Any]) -> list[str]:
        judgement = row["judgement"]
        if judgement is None:
            blank = [""] * (len(self.header) - 3)
            return [row["variant"], row["choice"], row["unsupported"], *blank]
        over = row.get("error_over_default")
        line = [
            row["variant"], row["choice"],
            "-" if judgement["j2"] is None else format_ratio(judgement["j2"]),
            "-" if judgement["j3"] is None else format_ratio(judgement["j3"]),
            f"{judgement['relative_error']:.2e}", "-" if over is None else f"{over:.3g}",
        ]  # fmt: skip
        if self.backend == "cuda":
            ratio = row.get("speed_ratio")
            line += [
                format_seconds(row["seconds"]) if "seconds" in row else "not timed",
                "-" if ratio is None else f"{ratio[0]:.2f}",
                "-" if ratio is None else f"{ratio[1]:.2f} .. {ratio[2]:.2f}",
            ]
        return line

    def __str__(self) -> str:
        return f"{align([self.header, *self.cells])}\n\n{LEGEND}"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record: the sizes of the call, and the rows."""
        sizes = {x.name: getattr(self.call, x.name) for x in fields(self.call) if x.init}
        return {"problem": sizes, "rows": self.rows}


@explains_foreign_arguments
def ablate(
    q: Any,
    k: Any,
    v: Any,
    parts: Sequence[str] | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    seed: int = 0,
    rounds: int = 15,
    advance: Callable[[str], None] | None = None,
) -> Ablation:
    """Run every rung and every choice of INT8 arithmetic on one input; judge, then time them.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
        CuPy arrays run on their device and are timed; NumPy arrays run on the mirror.
    k, v : array, (batch, heads_kv, len_kv, head_dim)
    parts : sequence of str, optional
        Out of ``"rungs"``, ``"granularity"``, ``"offsets"``, ``"pv"``, ``"bits"``, ``"codes"`` and
        ``"diffusion"``; all when omitted. Every part has the default of ``fa_int8`` among its
        points. The last one has given and static scales, scales by timestep, pruned keys, windows
        and block-sparse attention.
    scale, causal, causal_align
        As for `cupyattn.attention`.
    seed : int
        Draws the rows that are judged where there are too many for all.
    rounds : int
        Timed samples of each point, all points in turns; 0 times nothing.
    advance : callable, optional
        Told what was done, for a progress bar.

    Returns
    -------
    Ablation

    Raises
    ------
    TypeError, ValueError
        For arrays or options that do not fit together, and for a part that does not exist.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 64, 32)).astype(np.float16)
    >>> found = ablate(q, k, v, ["bits"])
    >>> found.ok, [row["variant"] for row in found.rows[:3]]
    (True, ['fa_int8', '4 bits', '4 bits, Q and K per token'])
    """
    chosen = checked(parts)
    (q, _), (k, _), (v, _) = (
        interchange.take(name, array) for name, array in zip("qkv", (q, k, v), strict=True)
    )
    options: dict[str, Any] = {"scale": scale, "causal": causal, "causal_align": causal_align}
    call = check_attention(q, k, v, **options)
    if 0 in (*q.shape, *k.shape):
        raise ValueError(
            "q, k and v must hold 1 or more of every axis to be judged, got "
            f"q.shape={tuple(q.shape)} and k.shape={tuple(k.shape)}"
        )
    qkv = q, k, v
    wanted = points(chosen, q, k)
    rows = array_namespace(q).asarray(rungs.judged_rows(call, seed))
    exact = rungs.remembered()
    told = advance or (lambda done: None)
    found = []
    for point in wanted:
        found.append(point.judged(qkv, options, rows, exact))
        told(point.name)
    backend = "cuda" if interchange.is_cupy(q) else "mirror"
    if backend == "cuda" and rounds:
        _add_times(wanted, found, qkv, options, rounds, told)
    _add_errors(found)
    return Ablation(call, backend, found)


def checked(parts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the parts of an ablation, all of them for None or none; raise for one that is none."""
    if isinstance(parts, str) or not isinstance(parts, Iterable | None):
        raise TypeError(f"parts must be names of parts, as ['rungs'], got {shown(parts)}")
    for part in parts or ():
        if part not in PARTS:
            raise ValueError(f"parts must be out of {', '.join(PARTS)}, got {part!r}")
    return tuple(parts or PARTS)


def points(parts: Sequence[str], q: Any, k: Any) -> list[Choice | Way]:
    """Return the points of some parts: rungs, the default of fa_int8, choices, ways."""
    found: list[Choice | Way] = [Choice(DEFAULT, RUNGS, DEFAULT, QuantConfig())]
    if RUNGS in parts:
        others = [name for name in ladder.VARIANTS if name != DEFAULT]
        found = [*(Choice(name, RUNGS, name) for name in others), *found]
    for part, kind in KINDS.items():
        if part in parts:
            found += [
                Choice(name, kind, DEFAULT, QuantConfig(**differing))
                for name, differing in CHOICES[kind].items()
            ]
    return [*found, *(ablation_ways.ways(q, k) if ablation_ways.PART in parts else [])]


def _add_times(
    wanted: Sequence[Choice | Way],
    found: Sequence[dict[str, Any]],
    qkv: tuple[Any, Any, Any],
    options: Mapping[str, Any],
    rounds: int,
    advance: Callable[[str], None],
) -> None:
    """Add times to the rows that hold their bounds, measured in turns."""
    sets = timing.rotated(qkv)

    def calling(point: Choice | Way) -> Callable[[int], Any]:
        return lambda i: point.call(*sets[i % len(sets)], **options)

    calls = {
        point.name: calling(point)
        for point, row in zip(wanted, found, strict=True)
        if row["judgement"] and row["ok"]
    }
    samples = timing.time_interleaved(calls, rounds=rounds, advance=advance)
    for row in found:
        if row["variant"] in samples:
            own = samples[row["variant"]]
            row["samples"] = own
            row["seconds"] = timing.median(own).median
            if DEFAULT in samples:
                row["speed_ratio"] = timing.paired_ratio(samples[DEFAULT], own).to_list()


def _add_errors(found: Sequence[dict[str, Any]]) -> None:
    """Add to each row its relative error as a multiple of the default of fa_int8."""
    errors = {row["variant"]: row["judgement"]["relative_error"] for row in found
              if row["judgement"]}  # fmt: skip
    for row in found:
        if row["judgement"] and errors.get(DEFAULT):
            row["error_over_default"] = errors[row["variant"]] / errors[DEFAULT]
