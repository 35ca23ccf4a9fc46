"""Choice of blocks, channels or rotation for a model whose configuration leaves it open.

One rule for `convert`, `analyze`, ``replace_linear_with_int8`` and ``accelerate``. Products with
scales by channel are faster than with scales by block. Their error is larger if a few channels of
the activations are much larger than the others, which weights do not show. So without activations
a model gets channels only if a whole model of its family was measured with them, else blocks. With
activations, the error of each layer is estimated. It gets channels if their error is little more
than that of blocks, else channels of rotated rows if theirs is little more, else blocks.

Outliers of a weight do not decide: a weight whose codes are noisy keeps 16 bits in either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cupyattn.checkpoints.predicted_errors import Errors
from cupyattn.measure.whole_gains import nearest, usual_width
from cupyattn.quant.blocks import AUTO

#: Largest error of a layer with scales of channels, as a multiple of its error with blocks, for
#: which channels are recommended.
CHANNEL_LIMIT = 1.05
#: The same up to which a layer gets them, and up to which it gets them with a rotation. Activations
#: of the transformer in experiments/dit give at most 1.12, three channels that are ten times as
#: large at least 1.6.
LIMIT, ROTATED_LIMIT = 1.15, 1.3


@dataclass(frozen=True)
class Way:
    """Choices for the codes of a layer's weight, as arguments of `Int8Linear.from_weight`."""

    strategy: str
    rotate: str | None = None

    def __str__(self) -> str:
        return f"by {self.strategy}" + (", rotated" if self.rotate else "")


@dataclass(frozen=True)
class Choice:
    """Groups that share a scale, and the reason.

    Parameters
    ----------
    strategy : {"block", "channel"}
        The common strategy of a model: channels, rotated or not, if no layer needs blocks.
    why : str
    layers : mapping of str to Way
        What layers get whose activations were looked at.
    rotate : str or None
        For the other layers: as the rest, if one of those is rotated.
    """

    strategy: str
    why: str
    layers: Mapping[str, Way] = field(default_factory=dict)
    rotate: str | None = None

    def __str__(self) -> str:
        return f"scales by {self.strategy}: {self.why}"

    def way_of(self, layer: str) -> Way:
        """Return the way of a layer in a model whose layers may differ."""
        return self.layers.get(layer, Way(self.strategy, self.rotate))


def choose(
    strategy: str,
    cls: str = "",
    widths: Iterable[int] = (),
    errors: Mapping[str, Errors] | None = None,
    rotate: str | None = AUTO,
) -> Choice:
    """Return the strategy of scales for a model, and for its layers.

    Parameters
    ----------
    strategy : {"auto", "block", "channel"}
        The requested strategy. Blocks and channels are taken as given.
    cls : str
        The model's class, "" if it is not known.
    widths : iterable of int
        Channels that its linear layers take.
    errors : mapping of str to Errors, optional
        Errors of layers whose activations are known.
    rotate : {"auto", None, "hadamard"}
        As for `Int8Config`.

    Examples
    --------
    >>> print(choose("auto", errors={"a": Errors(0.010, 0.0102), "b": Errors(0.01, 0.03)}))
    scales by block: scales of channels err 3 times as much on the activations of b
    >>> print(choose("auto", errors={"b": Errors(0.01, 0.03, 0.011)}))
    scales by channel: rotated in 1 of 1 layers, where they err at most 1.1 times as much as blocks
    >>> print(choose("auto", "FluxTransformer2DModel", [3072, 3072]))
    scales by channel: as in a whole Flux, where they erred no more than FP8 by row
    """
    if rotate not in (AUTO, None):
        return Choice("channel", "as asked for, rotated", rotate=rotate)
    if strategy != AUTO:
        return Choice(strategy, "as asked for")
    if errors:
        return _by_errors(errors, may_rotate=rotate == AUTO)
    known = nearest(cls, usual_width(widths))
    if known is not None and known.allows_channel:
        why = f"as in a whole {known.name}, where they erred no more than FP8 by row"
        return Choice("channel", why)
    return Choice("block", "no activations were given, and no such model was measured by channel")


def _by_errors(errors: Mapping[str, Errors], *, may_rotate: bool) -> Choice:
    """Choose for each layer, and for a model whose layers all have one strategy."""
    layers = {name: _way(one, may_rotate=may_rotate) for name, one in errors.items()}
    ratios = {name: _ratio(one, layers[name]) for name, one in errors.items()}
    in_blocks = [name for name, way in layers.items() if way.strategy == "block"]
    if in_blocks:
        worst = max(in_blocks, key=lambda name: ratios[name])
        why = f"scales of channels err {ratios[worst]:.3g} times as much on the activations of"
        return Choice("block", f"{why} {worst}", layers)
    rotated = [name for name, way in layers.items() if way.rotate]
    if not rotated:
        most = max(ratios.values())
        why = f"those err at most {most:.3g} times as much on the activations given"
        return Choice("channel", why, layers)
    most = max(ratios[name] for name in rotated)
    why = (
        f"rotated in {len(rotated)} of {len(layers)} layers, where they err at most {most:.3g} "
        "times as much as blocks"
    )
    return Choice("channel", why, layers, "hadamard")


def _way(one: Errors, *, may_rotate: bool) -> Way:
    if one.channel <= LIMIT * one.block:
        return Way("channel")
    if may_rotate and one.rotated is not None and one.rotated <= ROTATED_LIMIT * one.block:
        return Way("channel", "hadamard")
    return Way("block")


def _ratio(one: Errors, way: Way) -> float:
    """Return the error of channels, rotated if the layer is, relative to the error of blocks."""
    error = one.rotated if way.rotate and one.rotated is not None else one.channel
    return error / one.block if one.block else 1.0
