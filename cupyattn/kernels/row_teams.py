"""Number of lanes that share a normalised row, which orders its sums in kernel and mirror."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

#: Neighbouring channels of a lane, a run.
RUN = 8
#: Runs of a lane at most, in teams of fewer than `_LARGE` lanes and of more.
_RUNS, _RUNS_OF_LARGE, _LARGE = 3, 4, 512
#: The same in teams of normalised rows, and their most channels. With many runs sums and addresses
#: cost few instructions for each channel.
_RUNS_NORMED, _CHANNELS_NORMED = 8, 8192
#: Runs of a group that a lane of a rotated row has, groups of a lane at most, and lanes of a warp.
TURNED, _SETS, WARP = 4, 5, 32
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


def team_of(channels: int, group: int = 0, *, normed: bool = True) -> Team:
    """Return the team of a row of so many channels.

    Parameters
    ----------
    channels : int
    group : int
        Channels of a group that is rotated; 0: none is. All lanes of a group are in one warp.
    normed : bool
        Whether the row is normalised. Few lanes with many runs then share it. A rotated row has
        one warp, if that can hold it: its sums need no barrier.

    Examples
    --------
    >>> [team_of(channels).lanes for channels in (64, 1536, 3072, 5120, 13_824, 32_768)]
    [32, 32, 64, 128, 512, 1024]
    >>> [team_of(channels, 256) for channels in (1536, 5120, 6144)]
    [Team(lanes=16, runs=12), Team(lanes=32, runs=20), Team(lanes=192, runs=4)]
    >>> team_of(3072, 256, normed=False)
    Team(lanes=96, runs=4)
    >>> team_of(3072).held, team_of(3073).held
    (3072, 3584)
    """
    if group:
        across, groups = lanes_across(group), channels // group
        teams = [
            Team(lanes, TURNED * sets)
            for lanes in (across << power for power in range(5)) if lanes <= WARP
            for sets in range(1, 1 + (_SETS if normed else 1)) if sets * lanes >= groups * across
        ]  # fmt: skip
        if teams:
            return min(teams, key=lambda one: (one.held, one.runs))
        return Team(-(-groups * across // WARP) * WARP, TURNED)
    runs, lanes = -(-channels // RUN), WARP
    most = _RUNS_NORMED if normed and channels <= _CHANNELS_NORMED else _RUNS
    while lanes * (most if lanes < _LARGE else _RUNS_OF_LARGE) < runs:
        lanes *= 2
    return Team(lanes, -(-runs // lanes))


def lanes_across(group: int) -> int:
    """Return how many lanes share a group that is rotated."""
    return group // (TURNED * RUN)


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
    across, groups, sets = lanes_across(group), channels // group, team.runs // TURNED
    part = min(team.lanes, WARP)
    padded = np.zeros((rows, across, TURNED, team.lanes // across * sets, RUN), x.dtype)
    padded[..., :groups, :] = x.reshape(rows, across, TURNED, groups, RUN)
    shape = rows, across, TURNED, team.lanes // part, sets, part // across, RUN
    warps = padded.reshape(shape).transpose(0, 4, 2, 3, 1, 5, 6)
    return warps.reshape(rows, team.runs, team.lanes, RUN)
