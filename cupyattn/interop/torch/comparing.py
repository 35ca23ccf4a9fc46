"""Compare a pipeline or a model, native and accelerated in turns: time, memory, quality."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cupyattn.diffusion.arguments import check_count, check_whole
from cupyattn.errors import shown
from cupyattn.files import replacing
from cupyattn.interop.handle import uncompiled
from cupyattn.interop.torch.accelerated_parts import Part, Request
from cupyattn.interop.torch.compiling import is_compiled_by_caller
from cupyattn.interop.torch.offloading import check_not_offloaded, device_of_hooks
from cupyattn.interop.torch.ways import Way, bytes_of, ways_of
from cupyattn.interop.torch.whole_graph import CALLS_BEFORE
from cupyattn.measure import device, trial
from cupyattn.measure.pictures import data_uri, psnr, ssim
from cupyattn.measure.trial import NATIVE, Comparison
from cupyattn.measure.words import printable

#: Timed runs of each way, after one run that compiles.
ROUNDS = 7
#: Number of pictures of a result that are kept.
MOST_PICTURES = 4
#: Limit of the graphs that torch keeps for a function, which blocks of all ways share.
_RECOMPILES = 64


def compare(
    target: Any,
    parts: tuple[Part, ...],
    request: Request,
    call: Mapping[str, Any],
    *,
    rounds: int = ROUNDS,
    record: str | PathLike[str] | None = None,
    page: str | PathLike[str] | None = None,
    seed: int = 0,
    log: Callable[[str], object] | None = print,
) -> Comparison:
    """Run a call in every way, in turns; arguments as of `Accelerated.compare`."""
    check_count("rounds", rounds)
    if not 0 <= check_whole("seed", seed) < 2**64:
        raise ValueError(f"seed must be from 0 to 2^64 - 1, got {seed!r}")
    if log is not None and not callable(log):
        raise TypeError(f"log must take a line, as print does, or be None, got {log!r}")
    for name, file in (("record", record), ("page", page)):
        if file is not None and not isinstance(file, str | PathLike):
            raise TypeError(f"{name} must be the path of a file, got {shown(file)}")
        if file is not None and (not Path(file).parent.is_dir() or Path(file).is_dir()):
            raise OSError(f"{name} must be a file in a folder that exists, got {str(file)!r}")
    for part in parts:
        name = part.prefix.removesuffix(".")
        if name and uncompiled(vars(target).get(name)) is not part.model:
            raise ValueError(
                f"{name} of the {type(target).__name__} is not the model any more that accelerate "
                f"made faster: assign that to pipe.{name} again, or accelerate the pipeline again"
            )
        check_not_offloaded(part.model, "remove its hooks, compare, then offload again")
        if device_of_hooks(part.model) is not None:
            raise ValueError(
                f"the {type(part.model).__name__} is moved to the device in each call, and native "
                "weights are beside its codes: pipe.remove_all_hooks(), then pipe.to(device), "
                "compare, and offload again"
            )
        given = part.given(target)
        if uncompiled(given) is not given or is_compiled_by_caller(part.model):
            raise ValueError(
                f"the {type(part.model).__name__} was compiled by the caller, and its native "
                "copies cannot be compiled in the same way: compare a pipeline that only "
                "accelerate(..., compile='blocks') compiled"
            )
    where = next((x.device for part in parts for x in part.model.parameters()), None)
    bench = _Bench(target, call, where or torch.device("cpu"), seed)
    ways = ways_of(parts, request)
    what = {
        "model": type(target).__name__, "accuracy": request.accuracy,
        "compile": str(request.compile), "ways": {name: way.said for name, way in ways.items()},
        "call": {name: _described(x) for name, x in sorted(call.items())}, "seed": seed,
        "device": torch.cuda.get_device_name(bench.where) if bench.on_device else "a CPU",
    }  # fmt: skip
    path = None if record is None else Path(record)
    found = trial.read(path, what) if path is not None else trial.new(what)
    found["environment"] = device.environment()

    def keep() -> None:
        for target_path, text in ((path, trial.text(found)), (page, None)):
            if target_path is not None:
                text = Comparison(found).page() if text is None else text
                with replacing(target_path) as file:
                    file.write(text.encode())

    with torch._dynamo.config.patch(recompile_limit=_RECOMPILES), bench.restored(parts):
        warm = CALLS_BEFORE if request.compile == "graphs" else 0
        _measure(bench, ways, found, (warm, rounds), keep, log or _silent)
    return Comparison(found)


def named(target: Any, args: Sequence[Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names.

    Raises
    ------
    TypeError
        For more arguments without a name than there are names, or if one is named, too.
    """
    if not args:
        return dict(call)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    function = target.forward if isinstance(target, nn.Module) else target.__call__
    takes = inspect.signature(function).parameters.values()
    names = [p.name for p in takes if p.kind in kinds][: len(args)]
    if len(names) < len(args):
        raise TypeError(
            f"{type(target).__name__} takes {len(names)} arguments without a name, got {len(args)}"
        )
    if twice := [name for name in names if name in call]:
        raise TypeError(f"{twice[0]!r} is given twice, with and without its name")
    return {**dict(zip(names, args, strict=True)), **call}


def _silent(_: str) -> None:
    """Ignore a line of the log."""


def _measure(
    bench: _Bench, ways: Mapping[str, Way], found: dict[str, Any], counts: tuple[int, int],
    keep: Callable[[], None], log: Callable[[str], object],
) -> None:  # fmt: skip
    """Run every way until its graph is recorded, then all ways in turns for `rounds` rounds."""
    warm, rounds = counts
    native: tuple[list[Tensor], list[Any]] | None = None
    for name, way in ways.items():
        start = time.perf_counter()
        ran = bench.run(way, follow=True)
        seconds = time.perf_counter() - start
        if len(ran.steps) <= warm:  # passes too few for a graph, which would be recorded in a round
            for _ in range(warm):
                bench.run(way)
        if native is None:
            native = ran.latents, ran.pictures
        row = found["ways"].setdefault(name, {"rounds": []})
        row |= {"said": way.said, "first": seconds, "weights": bytes_of(way.models)}
        if name != NATIVE:
            row |= _quality(ran.latents, ran.pictures, *native)
        found["pictures"][name] = [data_uri(x) for x in ran.pictures]
        log(f"{printable(name)}: first run {seconds:.1f} s")
    took: list[float] = []
    names = list(ways)
    for turn in range(rounds):
        order = names if turn % 2 == 0 else names[::-1]
        for name in order:
            row = found["ways"][name]
            if len(row["rounds"]) > turn:
                continue  # of an earlier comparison that was interrupted
            start = time.perf_counter()
            ran = bench.run(ways[name])
            took.append(time.perf_counter() - start)
            row["rounds"].append(ran.steps)
            if ran.peak is not None:
                row["peak"] = row["weights"] + ran.peak
            keep()
            left = sum(max(0, rounds - len(one["rounds"])) for one in found["ways"].values())
            log(f"round {turn + 1} of {rounds}, {name}, {trial.time_left(took, left)}")
    keep()


def _quality(
    latents: Sequence[Tensor], pictures: Sequence[Any], of: Sequence[Tensor], beside: Sequence[Any]
) -> dict[str, Any]:
    """Return the differences of latents and pictures from native ones."""
    found: dict[str, Any] = {
        "latents": [_finite(_relative(x, own)) for x, own in zip(latents, of, strict=False)]
    }
    if pictures and len(pictures) == len(beside):
        pairs = [*zip(pictures, beside, strict=True)]
        found["psnr"] = _finite(psnr(np.concatenate(pictures), np.concatenate(beside)))
        found["ssim"] = float(np.mean([ssim(*pair) for pair in pairs]))
    return found


def _finite(x: float) -> float | None:
    """Return a number for JSON, which has no infinities and NaN."""
    return x if math.isfinite(x) else None


def _relative(x: Tensor, own: Tensor) -> float:
    norm = own.norm().item()
    return float((x - own).norm().item() / norm) if norm else 0.0


class _Ran:
    """Results of one run: seconds of its steps, bytes beyond the weights, latents and pictures."""

    def __init__(self, steps: list[float], peak: int | None) -> None:
        self.steps, self.peak = steps, peak
        self.latents: list[Tensor] = []
        self.pictures: list[Any] = []


class _Bench:
    """Calls a pipeline or a model in each way in turn."""

    def __init__(
        self, target: Any, call: Mapping[str, Any], where: torch.device, seed: int
    ) -> None:
        self.target, self.call, self.where, self.seed = target, dict(call), where, seed
        self.is_module = isinstance(target, nn.Module)
        self.on_device = where.type == "cuda"
        given = self.call.get("generator")
        self._states = [g.get_state() for g in _generators(given)]

    @contextlib.contextmanager
    def restored(self, parts: Sequence[Part]) -> Iterator[None]:
        """Restore a pipeline's models, its progress bar and torch's random state at the end."""
        bar = vars(self.target).get("_progress_bar_config")
        if hasattr(self.target, "set_progress_bar_config"):  # a line after each run takes its place
            self.target.set_progress_bar_config(**{**(bar or {}), "disable": True})
        before = {} if self.is_module else {
            part.prefix: getattr(self.target, part.prefix.removesuffix(".")) for part in parts
        }  # fmt: skip
        try:
            with torch.random.fork_rng(devices=[self.where] if self.on_device else []):
                yield
        finally:
            for prefix, model in before.items():
                setattr(self.target, prefix.removesuffix("."), model)
            if hasattr(self.target, "set_progress_bar_config"):
                self.target.set_progress_bar_config(**(bar or {}))

    def run(self, way: Way, *, follow: bool = False) -> _Ran:
        """Run the call once; `follow` keeps latents and pictures."""
        call = dict(self.call)
        for generator, state in zip(_generators(call.get("generator")), self._states, strict=True):
            generator.set_state(state)
        if not self.is_module and "generator" not in call and _takes_generator(self.target):
            call["generator"] = torch.Generator(self.where).manual_seed(self.seed)
        marks, latents = _Marks(self.where), list[Tensor]()
        target = self.target
        for prefix, model in way.models.items():
            if self.is_module:
                target = model
            else:
                setattr(target, prefix.removesuffix("."), model)
        before = 0
        if self.on_device:
            torch.cuda.synchronize(self.where)
            torch.cuda.reset_peak_memory_stats(self.where)
            before = torch.cuda.memory_allocated(self.where)
        torch.manual_seed(self.seed)
        with torch.no_grad(), _watched(target, marks, latents if follow else None):
            result = called(target, call)
            marks.mark_end()
        ran = _Ran(marks.seconds(), None)
        if self.on_device:
            ran.peak = torch.cuda.max_memory_allocated(self.where) - before
        if follow:
            ran.latents = latents or _tensors(result)
            ran.pictures = [] if self.is_module else pictures_of(result)
        return ran


def called(target: Any, call: Mapping[str, Any]) -> Any:
    """Call a pipeline or a model; its exceptions have a frame of this function."""
    return target(**call)


class _Marks:
    """Records the times at which steps end, on the device or the host."""

    def __init__(self, where: torch.device) -> None:
        self._on_device = where.type == "cuda"
        self._start = self._now()
        self._steps: list[Any] = []
        self._end: Any = None

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        """End a step."""
        self._steps.append(self._now())

    def mark_end(self) -> None:
        """End the call."""
        self._end = self._now()

    def seconds(self) -> list[float]:
        """Return the seconds between steps, or of the call if it has fewer than two steps."""
        marks = self._steps if len(self._steps) > 1 else [self._start, self._end]
        if not self._on_device:
            return [b - a for a, b in zip(marks, marks[1:], strict=False)]
        self._end.synchronize()
        return [a.elapsed_time(b) * 1e-3 for a, b in zip(marks, marks[1:], strict=False)]


@contextlib.contextmanager
def _watched(target: Any, marks: _Marks, latents: list[Tensor] | None) -> Iterator[None]:
    """Observe every step of a pipeline's scheduler."""
    scheduler = getattr(target, "scheduler", None)
    if scheduler is None or not callable(getattr(scheduler, "step", None)):
        yield
        return
    own, set_before = scheduler.step, vars(scheduler).get("step")

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        marks.mark()
        x = found[0] if isinstance(found, tuple) else getattr(found, "prev_sample", None)
        if latents is not None and isinstance(x, Tensor):
            latents.append(x.detach().float().cpu())
        return found

    scheduler.step = step
    try:
        yield
    finally:
        if set_before is None:
            del scheduler.step
        else:
            scheduler.step = set_before


def _takes_generator(target: Any) -> bool:
    return "generator" in inspect.signature(type(target).__call__).parameters


def _generators(given: Any) -> list[torch.Generator]:
    found = given if isinstance(given, list | tuple) else [given]
    return [one for one in found if isinstance(one, torch.Generator)]


def _tensors(result: Any) -> list[Tensor]:
    """Return the first tensor of a model's result as one latent."""
    leaves, _ = torch.utils._pytree.tree_flatten(result)
    return [x.detach().float().cpu() for x in leaves if isinstance(x, Tensor)][:1]


def pictures_of(result: Any) -> list[Any]:
    """Return up to `MOST_PICTURES` of a pipeline's result as arrays (height, width, 3), uint8.

    Parameters
    ----------
    result : object
        Has ``images`` or ``frames``, or is a tuple with one of these first: PIL pictures, arrays or
        tensors of numbers from 0 to 1. Latents give no pictures.
    """
    found = getattr(result, "images", None)
    found = getattr(result, "frames", None) if found is None else found
    if found is None and isinstance(result, tuple) and result:
        found = result[0]
    flat = [*_flat(found)]
    step = max(1, -(-len(flat) // MOST_PICTURES))
    return flat[::step]


def _flat(found: Any) -> Iterator[Any]:
    if isinstance(found, list | tuple):
        for one in found:
            yield from _flat(one)
    elif hasattr(found, "convert"):  # of PIL
        yield np.asarray(found.convert("RGB"))
    else:
        array = None
        if isinstance(found, Tensor) and found.ndim >= 3 and found.shape[-3] == 3:
            array = found.detach().float().cpu().movedim(-3, -1).numpy()
        elif isinstance(found, np.ndarray) and found.ndim >= 3 and found.shape[-1] == 3:
            array = found
        if array is not None:
            if array.dtype != np.uint8:
                array = (np.clip(array, 0, 1) * 255).round().astype(np.uint8)
            yield from array.reshape(-1, *array.shape[-3:])


def _described(x: Any) -> str:
    """Return the property of an argument by which calls are distinguished."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {tuple(x.shape)}"
    if isinstance(x, bool | int | float | str | type(None)):
        return f"{x!r:.200}"
    if isinstance(x, list | tuple):
        return ", ".join(map(_described, x))
    return type(x).__name__
