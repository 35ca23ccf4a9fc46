"""Compiling what a model repeats, as diffusers recommends, and taking it back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cupyattn.interop.torch.whole_graph import WholeGraph

#: What ``compile=`` of `accelerate` may be.
COMPILED: tuple[str | bool, ...] = ("blocks", "graphs", False)
_COMPILED_CALL = "_compiled_call_impl"
#: The attribute of a model that holds its `Compiled`, for callers without a handle.
_ATTRIBUTE = "_compiled_by_accelerate"


@dataclass(eq=False)
class Compiled:
    """Modules of a model that were compiled, and how it is taken back.

    Parameters
    ----------
    summary : str
        What was compiled, for a line.
    modules : list of (Module, object)
        With what each had in the place of compiled code.
    graph : WholeGraph or None
        Records passes of the model.
    """

    summary: str
    modules: list[tuple[nn.Module, Any]] = field(default_factory=list)
    graph: WholeGraph | None = None

    def __reduce__(self) -> Any:
        return _nothing, ()  # copies and files of a model have their own code

    def said(self) -> str:
        """Return what was compiled, and why passes ran without a graph since."""
        reasons = self.graph.reasons if self.graph is not None else {}
        without = "".join(f"; without a graph: {n} for {why}" for why, n in reasons.items())
        return f"{self.summary}{without}"

    def undo(self) -> None:
        """Let the modules run their own code again. A second call does nothing."""
        if self.graph is not None:
            self.graph.undo()
            self.graph = None
        while self.modules:
            module, former = self.modules.pop()
            setattr(module, _COMPILED_CALL, former)


def _nothing() -> None:
    """Return what copies of a model have in the place of its `Compiled`."""


def restore_compiled(model: nn.Module) -> None:
    """Let a model run the code that it ran before `compiled_blocks`, whoever called that."""
    done = vars(model).pop(_ATTRIBUTE, None)
    if done is not None:
        done.undo()


def compiled_blocks(model: nn.Module, *, graphs: bool = False) -> Compiled:
    """Compile the blocks that a model repeats, or all of it if it names none.

    Parameters
    ----------
    model : Module
        A model of diffusers names its blocks; code that is compiled already stays.
    graphs : bool
        Record each form of a pass as one CUDA graph, too.

    Returns
    -------
    Compiled
    """
    names = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None)
    blocks = [module for module in model.modules() if type(module).__name__ in (names or ())]
    if getattr(model, _COMPILED_CALL) is not None:
        done = Compiled("compiled by the caller")
    elif blocks:
        fresh = [module for module in blocks if getattr(module, _COMPILED_CALL) is None]
        kinds = Counter(type(module).__name__ for module in blocks)
        said = " and ".join(f"{count} {name}" for name, count in kinds.items())
        done = Compiled(f"{said} compiled with fullgraph=True")
        _compile(done, fresh, fullgraph=True)
    else:
        done = Compiled("compiled as a whole")
        _compile(done, [model])
    if graphs:
        done.graph = WholeGraph(model)
        done.summary += ", each form of a pass a CUDA graph from its third call on"
    vars(model)[_ATTRIBUTE] = done
    return done


def _compile(done: Compiled, modules: list[nn.Module], **options: Any) -> None:
    for module in modules:
        done.modules.append((module, getattr(module, _COMPILED_CALL)))
        module.compile(**options)
