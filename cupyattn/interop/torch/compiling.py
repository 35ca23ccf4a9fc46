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
#: The attribute of a model that holds its `Code`, for its handles and for callers without one.
_ATTRIBUTE = "_compiled_by_accelerate"


@dataclass(eq=False)
class Code:
    """Compiled code of a model, which the handles of the model share until the last is undone.

    Parameters
    ----------
    blocks : list of Substitute
    model : Module or None
        A model that was compiled as a whole.
    graph : WholeGraph or None
        Records passes of the model.
    hooked : Counter of str
        Calls of blocks that ran uncompiled code because they contain hooks of diffusers, by class.
    limited : set of str
        Classes of blocks at torch's limit of compilations.
    users : list of Compiled
        One for each handle.
    """

    blocks: list[Substitute] = field(default_factory=list)
    model: nn.Module | None = None
    graph: WholeGraph | None = None
    hooked: Counter[str] = field(default_factory=Counter)
    limited: set[str] = field(default_factory=set)
    users: list[Compiled] = field(default_factory=list)

    def __reduce__(self) -> Any:
        return _nothing, ()  # copies and files of a model run uncompiled code

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

    def release(self, user: Compiled) -> None:
        """Undo the compilation for one handle, except parts that other handles need.

        A second call completes one that was interrupted.
        """
        others = [one for one in self.users if one is not user]
        if self.graph is not None and not any(one.graphs for one in others):
            self.graph.undo()
            self.graph = None
        while self.blocks and not others:
            self.blocks[-1].undo()
            self.blocks.pop()
        if self.model is not None and not others:
            setattr(self.model, _COMPILED_CALL, None)
            self.model = None
        self.users = others


@dataclass(eq=False)
class Compiled:
    """The use that one handle makes of a model's compiled code.

    Parameters
    ----------
    summary : str
        What was compiled.
    code : Code or None
        None if the caller compiled the model, and after `undo`.
    graphs : bool
        Whether each form of a pass is recorded as one CUDA graph, too.
    is_undone : bool
    """

    summary: str
    code: Code | None = None
    graphs: bool = False
    is_undone: bool = False

    def said(self) -> str:
        """Return a text: the compiled parts, and why passes have run without a graph since."""
        code = self.code
        if code is None or self.is_undone:
            return self.summary
        graph = reasons = ""
        if code.graph is not None:
            graph = ", each form of a pass a CUDA graph from its third call on"
            reasons = "".join(
                f"; without a graph: {n} for {why}" for why, n in code.graph.reasons.items()
            )
        eager = "".join(
            f"; {counted(n, f'{name} call')} not compiled, since hooks are within"
            for name, n in code.hooked.items()
        )
        full = "".join(f"; other forms of {name} not compiled" for name in code.limited)
        return f"{self.summary}{graph}{reasons}{eager}{full}"

    def undo(self) -> None:
        """Let the modules run uncompiled code again, if no other handle has compiled them, too.

        A second call does nothing.
        """
        self.summary, self.is_undone = self.said(), True
        if self.code is not None:
            self.code.release(self)
            self.code = None


def _nothing() -> None:
    """Return None, which copies of a model have in place of its `Code`."""


def restore_compiled(model: nn.Module) -> None:
    """Let a model run the code that it ran before any call of `compiled_blocks`."""
    code: Code | None = vars(model).get(_ATTRIBUTE)
    while code is not None and code.users:
        code.users[-1].undo()


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
    found: Code | None = vars(model).get(_ATTRIBUTE)
    code = found if found is not None and found.users else Code()
    is_whole = code.model is model
    if not is_whole and (given is not model or getattr(model, _COMPILED_CALL) is not None):
        return Compiled("compiled by the caller")  # such code cannot call graphs
    names = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None)
    blocks = [module for module in model.modules() if type(module).__name__ in (names or ())]
    kinds = Counter(type(module).__name__ for module in blocks)
    said = " and ".join(f"{count} {name}" for name, count in kinds.items())
    said = f"{said} compiled with fullgraph=True" if blocks else "compiled as a whole"
    done = Compiled(said, code, graphs)
    code.users.append(done)
    vars(model)[_ATTRIBUTE] = code
    try:
        _compile(model, blocks, code)
        if graphs and code.graph is None:
            code.graph = WholeGraph(model)
    except BaseException:
        done.undo()
        raise
    return done


def _compile(model: nn.Module, blocks: list[nn.Module], code: Code) -> None:
    """Compile the blocks that run their own code, or the whole model if there are no blocks."""
    for module in blocks:
        if getattr(module, _COMPILED_CALL) is None and substitute_of(module) is None:
            # NOTE: below the hooks, whose code cannot be part of a graph of the whole block.
            make = functools.partial(_Block, module, code)
            code.blocks.append(Substitute(module, make, below_hooks=True))
    if not blocks and code.model is None:
        code.model = model
        model.compile()


def is_compiled_by_caller(model: nn.Module) -> bool:
    """Whether a model or a module in it was compiled in place, and not by `accelerate`."""
    code: Code | None = vars(model).get(_ATTRIBUTE)
    ours = None if code is None else code.model
    return any(
        getattr(module, _COMPILED_CALL) is not None
        for module in model.modules() if module is not ours
    )  # fmt: skip


class _Block:
    """A block's compiled code; its uncompiled code if torch cannot or may not compile it.

    Parameters
    ----------
    module : Module
    code : Code
        Counts the calls of uncompiled code.
    own : callable
        The block's ``forward``.
    """

    def __init__(self, module: nn.Module, code: Code, own: Forward) -> None:
        self._module, self._code, self._own = module, code, own
        self._compiled: Forward = torch.compile(own, fullgraph=True)
        self._is_full = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = type(self._module).__name__
        if self._is_full:  # existing code is used if it fits, and none is added
            with torch.compiler.set_stance("eager_on_recompile"):
                return self._compiled(*args, **kwargs)
        if name not in self._code.hooked or not _has_hooks(self._module):
            try:
                return self._compiled(*args, **kwargs)
            except TorchDynamoException:  # nothing of the pass was run
                if not _has_hooks(self._module):
                    raise
            except FailOnRecompileLimitHit:
                self._is_full = True
                self._code.warn_of_limit(name)
                return self(*args, **kwargs)
        self._code.hooked[name] += 1
        return self._own(*args, **kwargs)


def _has_hooks(block: nn.Module) -> bool:
    """Whether diffusers or accelerate hook a module within a block."""
    return any(is_hooked(part) for part in block.modules() if part is not block)
