"""Make the five lines that `accelerate` prints: replaced parts, their gain, and native parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from cupyattn.checkpoints.roles import PRECISE_ROLES
from cupyattn.interop.torch.accelerated_parts import Part, Request
from cupyattn.measure.whole_gains import said
from cupyattn.measure.words import counted, printable

#: Said of a record beside a model that `accelerate` does not compile.
_COMPILED = ", which was compiled by blocks"
#: Number of kinds of reasons that a line names; the others are only counted.
_MOST_REASONS = 3


def summary_lines(
    target: Any, parts: Sequence[Part], attention: Any, request: Request, *,
    undone: Collection[str] = (),
) -> tuple[str, ...]:  # fmt: skip
    """Return five lines about replaced parts, their gain, and native parts.

    Parameters
    ----------
    target : object
    parts : sequence of Part
    attention : object or None
    request : Request
    undone : collection of str
        Which of ``"linear"``, ``"attention"`` and ``"compiled"`` are not in place any more.
    """
    replaced = replaced_of(parts, attention)
    is_native = bool(replaced) and replaced <= {*undone}

    def since(name: str, text: str = "; native since") -> str:
        return text if name in undone and not is_native else ""

    found = (
        f"{type(target).__name__}: attention's accuracy {request.accuracy!r}, "
        f"{_compiled(parts, request)}"
        f"{'; restored since' if is_native else since('compiled', '; not compiled any more')}",
        f"{_layers(parts)}{since('linear')}",
        f"{_attention(parts, attention)}{since('attention')}",
        _measured(parts, request),
        f"left native: {_left(parts)}",
    )
    return tuple(map(printable, found))


def replaced_of(parts: Sequence[Part], attention: Any) -> set[str]:
    """Return which of ``"linear"`` and ``"attention"`` were replaced in any model."""
    linear = any(part.linear is not None for part in parts)
    return {*["linear"] * linear, *["attention"] * (attention is not None)}


def _compiled(parts: Sequence[Part], request: Request) -> str:
    done: dict[str, list[str]] = {}  # names of models by text
    for part in parts:
        if part.compiled is not None:
            done.setdefault(part.compiled.said(), []).append(part.prefix.removesuffix("."))
    said_of = [
        f"{' and '.join(names)}: {text}" if len(parts) > 1 else text for text, names in done.items()
    ]
    return "; ".join(said_of) or (
        "not compiled" if not request.compile else "not compiled, since nothing was replaced"
    )


def _layers(parts: Sequence[Part]) -> str:
    made = [part.linear for part in parts if part.linear is not None]
    if not made:
        return "linear layers: native"
    replaced, kept = (sum(len(of) for of in some) for some in (
        [one.replaced for one in made], [one.kept for one in made],
    ))  # fmt: skip
    layers = [layer for one in made for layer in one._handle_in_place()]
    strategies = {layer.strategy for layer in layers}
    rotated = sum(layer.rotate is not None for layer in layers)
    saved = sum(one._handle_saved for one in made) / len(made)
    scales = f" with a scale for each {' or '.join(sorted(strategies))}" if strategies else ""
    scales += f", {rotated} rotated" if rotated else ""
    of_all = f"{replaced} of {replaced + kept} in INT8{scales}"
    return f"linear layers: {of_all}, {100 * saved:.0f} % less memory for weights"


def _attention(parts: Sequence[Part], attention: Any) -> str:
    if attention is None:
        return "attention: native"
    classes = dict.fromkeys(part.accuracy for part in parts if part.accuracy)
    said_of = " and ".join("16 bits" if one == "full" else f"{one} INT8" for one in classes)
    return f"attention: {counted(len(attention.replaced), 'module')} by cupyattn, in {said_of}"


def _measured(parts: Sequence[Part], request: Request) -> str:
    lines = []
    for part in parts:
        record, ran = part.record, {"linear", "attention"} - part.native.keys()
        if record is None or not ran or part.is_partial:
            continue
        name = "both" if len(ran) == 2 else ran.pop()
        gain = record.gain(name, part.accuracy or request.accuracy, request.how)
        lines.append(
            f"{said(gain)} as compiled native, measured in a whole {record.name} of "
            f"{record.tokens:,} tokens on an {record.device}{'' if request.compile else _COMPILED}"
        )
    if all(len(part.native) == 2 for part in parts):
        return "gain: none, since nothing was replaced"
    is_partial = any(part.record is not None and part.is_partial for part in parts)
    unknown = "with such a selection" if is_partial else "in such a model on such a device"
    measured = "; ".join(dict.fromkeys(lines))
    return f"gain: {measured or f'not measured {unknown}: compare(...) measures it here'}"


def _left(parts: Sequence[Part]) -> str:
    said_of = [
        f"{part.prefix}{'linear layers' if name == 'linear' else name} ({why})"
        for part in parts for name, why in sorted(part.native.items())
    ]  # fmt: skip
    kinds = Counter(
        why.partition(":")[0] for part in parts if part.linear is not None
        for why in part.linear.kept.values()
    )  # fmt: skip
    precise = [f"{kinds.pop(role)} {role}" for role in PRECISE_ROLES if role in kinds]
    if precise:
        said_of.append(f"linear layers that INT8 would make less accurate ({', '.join(precise)})")
    for why, count in kinds.most_common(_MOST_REASONS):
        said_of.append(f"{counted(count, 'linear layer')} ({why})")
    others = sum(kinds.values()) - sum(n for _, n in kinds.most_common(_MOST_REASONS))
    said_of += [f"{counted(others, 'more linear layer')}"] if others else []
    return ", ".join(said_of) or "nothing"
