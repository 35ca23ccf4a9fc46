"""Choice of the groups that share a scale, if a configuration leaves it open: blocks or channels.

One rule for `convert`, `analyze`, ``replace_linear_with_int8`` and ``accelerate``. Scales of
channels make faster products. They err more where a few channels of the activations are much larger
than the others, which weights do not tell. So channels are taken where activations were looked at,
or where a whole model of the family was measured with them; blocks otherwise.
Outliers of a weight do not decide: a weight whose codes are noisy keeps 16 bits in either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cupyattn.measure.whole_gains import nearest, usual_width
from cupyattn.quant.blocks import AUTO

#: Largest error of a layer with scales of channels, as a multiple of its error with blocks, for
#: which channels are recommended.
CHANNEL_LIMIT = 1.05
#: The same up to which a model gets them, the worst of its layers. Activations of the transformer
#: in experiments/dit give at most 1.12, three channels that are ten times as large at least 1.6.
MODEL_LIMIT = 1.25


@dataclass(frozen=True)
class Choice:
    """Groups that share a scale, and the reason.

    Parameters
    ----------
    strategy : {"block", "channel"}
    why : str
    """

    strategy: str
    why: str

    def __str__(self) -> str:
        return f"scales by {self.strategy}: {self.why}"


def choose(
    strategy: str,
    cls: str = "",
    widths: Iterable[int] = (),
    errors: Mapping[str, tuple[float, float]] | None = None,
) -> Choice:
    """Return what shares a scale in a model.

    Parameters
    ----------
    strategy : {"auto", "block", "channel"}
        The requested strategy. Blocks and channels are taken as given.
    cls : str
        The model's class, "" if it is not known.
    widths : iterable of int
        Channels that its linear layers take.
    errors : mapping of str to (float, float), optional
        Relative errors of layers on activations, with scales of blocks and of channels.

    Examples
    --------
    >>> print(choose("auto", errors={"a": (0.010, 0.0102), "b": (0.01, 0.03)}))
    scales by block: scales of channels err 3 times as much on the activations of b
    >>> print(choose("auto", "FluxTransformer2DModel", [3072, 3072]))
    scales by channel: as in a whole Flux, where they erred no more than FP8 by row
    """
    if strategy != AUTO:
        return Choice(strategy, "as asked for")
    if errors:
        ratios = {name: channel / block if block else 1.0
                  for name, (block, channel) in errors.items()}  # fmt: skip
        worst = max(ratios, key=lambda name: ratios[name])
        if ratios[worst] <= MODEL_LIMIT:
            why = f"those err at most {ratios[worst]:.3g} times as much on the activations given"
            return Choice("channel", why)
        why = f"scales of channels err {ratios[worst]:.3g} times as much on the activations of"
        return Choice("block", f"{why} {worst}")
    known = nearest(cls, usual_width(widths))
    if known is not None and known.allows_channel:
        why = f"as in a whole {known.name}, where they erred no more than FP8 by row"
        return Choice("channel", why)
    return Choice("block", "no activations were given, and no such model was measured by channel")
