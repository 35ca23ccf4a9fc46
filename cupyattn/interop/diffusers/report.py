"""Reports of calls: by mode, and native calls by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cupyattn.measure.words import counted, printable


@dataclass(frozen=True)
class LayerReport:
    """Calls of one attention module.

    Parameters
    ----------
    name : str
        Dotted name, from the pipeline or the model on.
    modes : mapping of str to int
        Calls that cupyattn ran, by precision mode.
    native : mapping of str to int
        Calls that native attention ran, by reason.
    fallbacks : mapping of str to int
        Calls within `modes` that have an INT8 mode and ran in the type of the input, by reason.
    compiled : tuple of str
        The module's parts in graphs of `torch.compile` and `torch.export`, known when they are
        traced or run: modes, and ``"native: "`` with a reason. This holds for blocks that share a
        graph, and for graphs of an earlier replacement that run again.
    compiled_calls : mapping of str to int
        Calls in compiled code, by mode or ``"native"``, with ``count_compiled=True``.
    on_ranks : mapping of str to int
        Calls within `modes` that several ranks shared, by mesh and exchanged arrays.
    """

    name: str
    modes: Mapping[str, int]
    native: Mapping[str, int]
    fallbacks: Mapping[str, int]
    compiled: tuple[str, ...] = ()
    compiled_calls: Mapping[str, int] = field(default_factory=dict)
    on_ranks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Calls since attention was replaced.

    Parameters
    ----------
    layers : tuple of LayerReport
        In the order of the model; modules that were not called have no counts.
    compiled_fallbacks : mapping of str to int
        Calls in compiled code of this process that have an INT8 mode and ran in the type of the
        input, by reason. Replays of a CUDA graph are not counted.
    compiled_obstacle : str
        Why compiled code calls attention through torch's dispatcher, which costs host time; "" if
        it does not.

    Examples
    --------
    >>> layer = LayerReport("unet.attn1", {"balanced": 3}, {"gradients": 1}, {})
    >>> print(Report((layer,)))
    1 attention module: 3 calls by cupyattn (3 balanced), 1 native
    unet.attn1: 3 balanced; native: 1 (gradients)
    >>> print(Report((LayerReport("unet.attn1", {}, {}, {}, ("balanced",)),)))
    1 attention module: 1 module in compiled code, whose calls are not counted
    unet.attn1: in compiled code: balanced
    """

    layers: tuple[LayerReport, ...]
    compiled_fallbacks: Mapping[str, int] = field(default_factory=dict)
    compiled_obstacle: str = ""

    @property
    def modes(self) -> dict[str, int]:
        """Calls that cupyattn ran, by precision mode."""
        return self._summed("modes")

    @property
    def native(self) -> dict[str, int]:
        """Calls that native attention ran, by reason."""
        return self._summed("native")

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls in an INT8 mode that ran in the type of the input, by reason."""
        return self._summed("fallbacks")

    @property
    def compiled_calls(self) -> dict[str, int]:
        """Counted calls in compiled code, by mode or ``"native"``."""
        return self._summed("compiled_calls")

    @property
    def on_ranks(self) -> dict[str, int]:
        """Calls that several ranks shared, by mesh and exchanged arrays."""
        return self._summed("on_ranks")

    def _summed(self, field: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for layer in self.layers:
            total.update(getattr(layer, field))
        return dict(total)

    def __str__(self) -> str:
        lines = [f"{counted(len(self.layers), 'attention module')}: {self._totals()}"]
        for layer in self.layers:
            said = [_listed(layer.modes)] if layer.modes else []
            said += [f"native: {_reasons(layer.native)}"] if layer.native else []
            said += [f"on several ranks: {_listed(layer.on_ranks)}"] if layer.on_ranks else []
            said += [f"in its own type: {_reasons(layer.fallbacks)}"] if layer.fallbacks else []
            in_graphs = _listed(layer.compiled_calls) or ", ".join(layer.compiled)
            said += [f"in compiled code: {in_graphs}"] if in_graphs else []
            lines.append(f"{layer.name}: {'; '.join(said) or 'not called'}")
        if self.compiled_fallbacks:
            lines.append(f"compiled code, in its own type: {_reasons(self.compiled_fallbacks)}")
        if self.compiled_obstacle:
            lines.append(f"compiled code, by torch's dispatcher: {self.compiled_obstacle}")
        return "\n".join(map(printable, lines))

    def _totals(self) -> str:
        """Return calls of all layers, without the eager ones if all calls are compiled."""
        modes, native, in_graphs = self.modes, sum(self.native.values()), self.compiled_calls
        by_mode = f" ({_listed(modes)})" if modes else ""
        said = [f"{counted(sum(modes.values()), 'call')} by cupyattn{by_mode}, {native} native"]
        if in_graphs:
            number = counted(sum(in_graphs.values()), "call")
            said.append(f"{number} in compiled code ({_listed(in_graphs)})")
        elif modules := sum(bool(layer.compiled) for layer in self.layers):
            number = counted(modules, "module")
            said.append(f"{number} in compiled code, whose calls are not counted")
        return "; ".join(said if modes or native else said[-1:])


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} ({why})" for why, count in counts.items())
