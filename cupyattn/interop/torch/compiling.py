"""Compiling the repeated blocks of a model, as diffusers recommends, and undoing it."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from cupyattn.interop.handle import uncompiled
from cupyattn.interop.torch.forwards import Forward, Substitute, substitute_of
from cupyattn.interop.torch.offloading import is_hooked
from cupyattn.interop.torch.whole_graph import WholeGraph
from cupyattn.measure.words import counted

#: Values of ``compile=`` of `accelerate`.
COMPILED: tuple[str | bool, ...] = ("blocks", "graphs", False)
_COMPILED_CALL = "_compiled_call_impl"
#: The attribute of a model that holds its `Compiled`, for callers without a handle.
_ATTRIBUTE = "_compiled_by_accelerate"


@dataclass(eq=False)
class Compiled:
    """Compiled modules of a model, and how to undo the compilation.

    Parameters
    ----------
    summary : str
        One line that says what was compiled.
    blocks : list of Substitute
    model : Module or None
        A model that was compiled as a whole.
    hooked : Counter of str
        Calls of blocks that ran uncompiled code because they contain hooks of diffusers, by class.
    limited : set of str
        Classes of blocks at torch's limit of compilations.
    graph : WholeGraph or None
        Records passes of the model.
    earlier : Compiled or None
        Compilation of other parts of the model, for another handle.
    """

    summary: str
    blocks: list[Substitute] = field(default_factory=list)
    model: nn.Module | None = None
    hooked: Counter[str] = field(default_factory=Counter)
    limited: set[str] = field(default_factory=set)
    graph: WholeGraph | None = None
    earlier: Compiled | None = None

    def __reduce__(self) -> Any:
        return _nothing, ()  # copies and files of a model run uncompiled code

    def said(self) -> str:
        """Return a text: the compiled parts, and why passes have run without a graph since."""
        reasons = self.graph.reasons if self.graph is not None else {}
        without = "".join(f"; without a graph: {n} for {why}" for why, n in reasons.items())
        eager = "".join(
            f"; {counted(n, f'{name} call')} not compiled, since hooks are within"
            for name, n in self.hooked.items()
        )
        full = "".join(f"; other forms of {name} not compiled" for name in self.limited)
        return f"{self.summary}{without}{eager}{full}"

    def warn_of_limit(self, name: str) -> None:
        """Warn once for each class of blocks that has reached torch's limit of compilations."""
        if name in self.limited:
            return
        self.limited.add(name)
        warnings.warn(
            f"torch has compiled {name} as often as torch._dynamo.config.recompile_limit = "
            f"{config.recompile_limit} allows, so its other adapters, lengths and layers run their "
            "own code: swap adapters with enable_lora_hotswap, or set a larger limit",
            UserWarning, stacklevel=2,
        )  # fmt: skip

    def undo(self) -> None:
        """Let the modules run uncompiled code again. A second call does nothing."""
        if self.graph is not None:
            self.graph.undo()
            self.graph = None
        while self.blocks:
            self.blocks.pop().undo()
        if self.model is not None:
            setattr(self.model, _COMPILED_CALL, None)
            self.model = None


def _nothing() -> None:
    """Return None, which copies of a model have in place of its `Compiled`."""


def restore_compiled(model: nn.Module) -> None:
    """Let a model run the code that it ran before any call of `compiled_blocks`."""
    done = vars(model).pop(_ATTRIBUTE, None)
    while done is not None:
        done.undo()
        done = done.earlier


def compiled_blocks(model: nn.Module, *, graphs: bool = False) -> Compiled:
    """Compile the repeated blocks of a model, or the whole model if it names none.

    Parameters
    ----------
    model : Module
        A model of diffusers names its blocks; code that is compiled already stays, and nothing is
        added to a model that the caller compiled as a whole.
    graphs : bool
        Record each form of a pass as one CUDA graph, too.

    Returns
    -------
    Compiled
    """
    given, model = model, uncompiled(model)
    names = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None)
    blocks = [module for module in model.modules() if type(module).__name__ in (names or ())]
    earlier: Compiled | None = vars(model).get(_ATTRIBUTE)
    if earlier is not None and not (earlier.blocks or earlier.model or earlier.graph):
        earlier = None  # undone
    if earlier is not None and earlier.model is model:
        done = Compiled(earlier.summary)
    elif given is not model or getattr(model, _COMPILED_CALL) is not None:
        done, graphs = Compiled("compiled by the caller"), False  # such code cannot call graphs
    elif blocks:
        fresh = [
            module for module in blocks
            if getattr(module, _COMPILED_CALL) is None and substitute_of(module) is None
        ]  # fmt: skip
        kinds = Counter(type(module).__name__ for module in blocks)
        said = " and ".join(f"{count} {name}" for name, count in kinds.items())
        done = Compiled(f"{said} compiled with fullgraph=True")
        # NOTE: below the hooks, whose code cannot be part of a graph of the whole block.
        for module in fresh:
            make = functools.partial(_Block, module, done)
            done.blocks.append(Substitute(module, make, below_hooks=True))
    else:
        done = Compiled("compiled as a whole", model=model)
        model.compile()
    done.earlier = earlier
    if graphs and (earlier is None or earlier.graph is None):
        done.graph = WholeGraph(model)
        done.summary += ", each form of a pass a CUDA graph from its third call on"
    vars(model)[_ATTRIBUTE] = done
    return done


def is_compiled_by_caller(model: nn.Module) -> bool:
    """Whether a model or a module in it was compiled in place, and not by `accelerate`."""
    done: Compiled | None = vars(model).get(_ATTRIBUTE)
    while done is not None and done.model is None:
        done = done.earlier
    ours = None if done is None else done.model
    return any(
        getattr(module, _COMPILED_CALL) is not None
        for module in model.modules() if module is not ours
    )  # fmt: skip


class _Block:
    """A block's compiled code; its uncompiled code if torch cannot or may not compile it.

    Parameters
    ----------
    module : Module
    done : Compiled
        Counts the calls of uncompiled code.
    own : callable
        The block's ``forward``.
    """

    def __init__(self, module: nn.Module, done: Compiled, own: Forward) -> None:
        self._module, self._done, self._own = module, done, own
        self._compiled: Forward = torch.compile(own, fullgraph=True)
        self._is_full = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = type(self._module).__name__
        if self._is_full:  # existing code is used if it fits, and none is added
            with torch.compiler.set_stance("eager_on_recompile"):
                return self._compiled(*args, **kwargs)
        if name not in self._done.hooked or not _has_hooks(self._module):
            try:
                return self._compiled(*args, **kwargs)
            except TorchDynamoException:  # nothing of the pass was run
                if not _has_hooks(self._module):
                    raise
            except FailOnRecompileLimitHit:
                self._is_full = True
                self._done.warn_of_limit(name)
                return self(*args, **kwargs)
        self._done.hooked[name] += 1
        return self._own(*args, **kwargs)


def _has_hooks(block: nn.Module) -> bool:
    """Whether diffusers or accelerate hook a module within a block."""
    return any(is_hooked(part) for part in block.modules() if part is not block)
