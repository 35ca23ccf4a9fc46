"""Number of lanes that share a normalised row, which orders its sums in kernel and mirror."""

from __future__ import annotations

#: Neighbouring channels of a lane, a run.
RUN = 8
#: Runs of a lane at most, in teams of fewer than `_LARGE` lanes and of more.
_RUNS, _RUNS_OF_LARGE, _LARGE = 3, 4, 512
#: The widest row that a team holds in registers.
MOST_CHANNELS = 1024 * _RUNS_OF_LARGE * RUN


def lanes_of(channels: int) -> int:
    """Return how many lanes share a row of so many channels.

    Examples
    --------
    >>> [lanes_of(channels) for channels in (64, 1536, 3072, 5120, 13_824, 32_768)]
    [32, 64, 128, 256, 512, 1024]
    """
    runs, lanes = -(-channels // RUN), 32
    while lanes * (_RUNS if lanes < _LARGE else _RUNS_OF_LARGE) < runs:
        lanes *= 2
    return lanes


def held_of(channels: int) -> int:
    """Return the number of channels that such a team holds, including channels past the last.

    Examples
    --------
    >>> held_of(3072), held_of(3073)
    (3072, 4096)
    """
    every = lanes_of(channels) * RUN
    return -(-channels // every) * every
