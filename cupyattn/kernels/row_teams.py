"""How many lanes share a row that is normalised: this orders its sums, in kernel and mirror."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

#: Neighbouring channels of a lane, a run.
RUN = 8
#: Runs of a lane at most, in teams of fewer than `_LARGE` lanes and of more.
_RUNS, _RUNS_OF_LARGE, _LARGE = 3, 4, 512
#: Runs of a lane in rotated rows, and lanes of a warp.
_RUNS_OF_ROTATED, WARP = 4, 32
#: The widest row that a team holds in registers.
MOST_CHANNELS = 1024 * _RUNS_OF_LARGE * RUN


class Team(NamedTuple):
    """Lanes that share a row, and the runs that each of them has."""

    lanes: int
    runs: int

    @property
    def held(self) -> int:
        """Number of channels that the team holds, including channels past the last."""
        return self.lanes * self.runs * RUN

    @property
    def additions(self) -> int:
        """Most additions that a number of a row passes in a sum: over runs, then in pairs."""
        return self.runs + (self.lanes * RUN - 1).bit_length()


def team_of(channels: int, group: int = 0) -> Team:
    """Return the team of a row of so many channels.

    Parameters
    ----------
    channels : int
    group : int
        Channels of a group that is rotated; 0: none is. All lanes of a group are in one warp.

    Examples
    --------
    >>> [team_of(channels).lanes for channels in (64, 1536, 3072, 5120, 13_824, 32_768)]
    [32, 64, 128, 256, 512, 1024]
    >>> [team_of(channels, 256).lanes for channels in (256, 1536, 3072, 5120, 32_768)]
    [8, 64, 96, 160, 1024]
    >>> team_of(3072).held, team_of(3073).held
    (3072, 4096)
    """
    if group:
        across, groups = lanes_across(group), channels // group
        few = across * (1 << (groups - 1).bit_length())
        return Team(few if few < WARP else -(-groups * across // WARP) * WARP, _RUNS_OF_ROTATED)
    runs, lanes = -(-channels // RUN), WARP
    while lanes * (_RUNS if lanes < _LARGE else _RUNS_OF_LARGE) < runs:
        lanes *= 2
    return Team(lanes, -(-runs // lanes))


def lanes_across(group: int) -> int:
    """Return how many lanes share a group that is rotated."""
    return group // (_RUNS_OF_ROTATED * RUN)


def by_lane(x: Any, group: int = 0) -> Any:
    """Arrange rows as their team has them, with zeros past the last channel.

    Parameters
    ----------
    x : array, (rows, channels)
    group : int
        As for `team_of`.

    Returns
    -------
    array, (rows, runs, lanes, RUN)
        Of the library and type of x.
    """
    rows, channels = x.shape
    team = team_of(channels, group)
    if not group:
        padded = np.zeros((rows, team.held), x.dtype)
        padded[:, :channels] = x
        return padded.reshape(rows, team.runs, team.lanes, RUN)
    across, groups = lanes_across(group), channels // group
    padded = np.zeros((rows, across, team.runs, team.lanes // across, RUN), x.dtype)
    padded[..., :groups, :] = x.reshape(rows, across, team.runs, groups, RUN)
    part = min(team.lanes, WARP)
    warps = padded.reshape(rows, across, team.runs, team.lanes // part, part // across, RUN)
    return warps.transpose(0, 2, 3, 1, 4, 5).reshape(rows, team.runs, team.lanes, RUN)
