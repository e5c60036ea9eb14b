"""Which share of each record goes to which path.

[Note: shares and credits] A share that is no whole number of blocks is carried over: each path has
a credit in blocks, which grows with its share of every record and shrinks with what it is given.
So the sums follow the shares to within a block, however small the records are.
"""

import math
from collections.abc import Sequence

from offload.errors import ConfigError
from offload.policy import PathState


class Adaptive:
    """Shares by what each path has delivered lately, so that all end at the same time.

    A path that has not been measured yet counts as the mean of the others. Queues of writes correct
    what rates get wrong: a path whose queue takes longer to drain than the others' gets a little
    less, so that none runs empty while another's is long. Reads say nothing of that: what of them
    is queued where follows from the shares of the step before. A path whose queues of both would
    take much longer than the shortest is behind, whatever its rate was: its share is halved until
    it has caught up.
    """

    name = "adaptive"

    def __init__(self) -> None:
        self._credits = _Credits()

    def split(self, num_blocks: int, paths: Sequence[PathState]) -> Sequence[int]:
        """Returns the blocks by path, in proportion to recent rates."""
        rates = _filled([_latest(path) for path in paths])
        drain_s = _drain_s([path.queued_bytes for path in paths], rates)
        written_s = _drain_s([path.queued_write_bytes for path in paths], rates)
        shares = [
            rate * (0.5 if _is_behind(both, drain_s) else _correction(writes, written_s))
            for rate, both, writes in zip(rates, drain_s, written_s, strict=True)
        ]
        return self._credits.spend(num_blocks, _usable(shares, paths))


class Proportional:
    """Shares by the rates of the machine's profile; equal ones where there is none."""

    name = "proportional"

    def __init__(self) -> None:
        self._credits = _Credits()

    def split(self, num_blocks: int, paths: Sequence[PathState]) -> Sequence[int]:
        """Returns the blocks by path, in proportion to the profile."""
        rates = _filled([path.nominal_bytes_per_s for path in paths])
        return self._credits.spend(num_blocks, _usable(rates, paths))


class Modulo:
    """Record by record in turns, each path as often as its part of the ratio says.

    Turns are counted in blocks, so that records of two sizes in alternation do not all meet the
    same path.
    """

    name = "modulo"

    def __init__(self, *ratio: int) -> None:
        self._ratio = ratio
        self._given: list[int] = []

    def split(self, num_blocks: int, paths: Sequence[PathState]) -> Sequence[int]:
        """Returns all blocks on the path whose turn it is."""
        ratio = self._ratio or (1,) * len(paths)
        if len(ratio) != len(paths):
            raise ConfigError(
                f"cannot stripe by `modulo:{':'.join(map(str, ratio))}`: expected one number for "
                f"each of {len(paths)} paths, found {len(ratio)}; change `policy.striping`"
            )
        if len(self._given) != len(paths):
            self._given = [0] * len(paths)
        turns = [
            ((given + num_blocks) / part, index)
            for index, (given, part, path) in enumerate(zip(self._given, ratio, paths, strict=True))
            if path.available_blocks
        ]
        chosen = min(turns)[1] if turns else 0
        self._given[chosen] += num_blocks
        return [num_blocks if index == chosen else 0 for index in range(len(paths))]


class Single:
    """The first path that has room; the others take what it cannot."""

    name = "single"

    def split(self, num_blocks: int, paths: Sequence[PathState]) -> Sequence[int]:
        """Returns as many blocks as possible on the lowest path."""
        counts: list[int] = []
        for path in paths:
            counts.append(min(num_blocks - sum(counts), path.available_blocks))
        return counts


class _Credits:
    """Whole blocks for shares that are none; see [Note: shares and credits]."""

    def __init__(self) -> None:
        self._credits: list[float] = []

    def spend(self, num_blocks: int, shares: Sequence[float]) -> list[int]:
        if len(self._credits) != len(shares):
            self._credits = [0.0] * len(shares)
        total = sum(shares)
        if not total:
            return [num_blocks] + [0] * (len(shares) - 1)
        for index, share in enumerate(shares):
            # What a path without a share once missed is not made up for later.
            earned = num_blocks * share / total
            self._credits[index] = self._credits[index] + earned if share else 0.0
        counts = [0] * len(shares)
        usable = [index for index, share in enumerate(shares) if share]
        for _ in range(num_blocks):
            index = max(usable, key=lambda i: self._credits[i])
            counts[index] += 1
            self._credits[index] -= 1
        return counts


def _latest(path: PathState) -> float | None:
    measured = path.round_trip_bytes_per_s
    return path.nominal_bytes_per_s if measured is None else measured


_BEHIND_FACTOR = 4.0
_BEHIND_S = 1.0
"""Less than this is the usual depth of a queue, not a delay."""
_LEAST_DRAIN_S = 0.01
"""Added to each, so that short queues are not compared by their last block."""
_GAIN = 0.2
_MOST_CORRECTION = 1.15
"""A share is corrected gently: what is taken from a path now it lacks in the next step's reads."""


def _drain_s(queued_bytes: Sequence[int], rates: Sequence[float]) -> list[float]:
    """Returns how long the queue of each path takes; 0 for one that stands still."""
    return [
        queued / rate + _LEAST_DRAIN_S if rate else 0.0
        for queued, rate in zip(queued_bytes, rates, strict=True)
    ]


def _is_behind(seconds: float, drain_s: Sequence[float]) -> bool:
    return seconds > _BEHIND_FACTOR * min(drain_s) + _BEHIND_S


def _correction(seconds: float, drain_s: Sequence[float]) -> float:
    """Returns the factor for a path whose queue drains in `seconds`."""
    if not seconds:
        return 1.0
    mean_s = sum(drain_s) / len(drain_s)
    correction = math.pow(mean_s / seconds, _GAIN)
    return min(max(correction, 1 / _MOST_CORRECTION), _MOST_CORRECTION)


def _filled(rates: Sequence[float | None]) -> list[float]:
    """Returns the rates; unknown ones are the mean of the others, or all 1."""
    known = [rate for rate in rates if rate is not None]
    mean = sum(known) / len(known) if known else 1.0
    return [mean if rate is None else rate for rate in rates]


def _usable(shares: Sequence[float], paths: Sequence[PathState]) -> list[float]:
    """Returns the shares; a path without room has none, and one that stands still a small one.

    Without any new block a path that stood still would never be measured again.
    """
    least = max(shares) / 64
    return [
        max(share, least) if path.available_blocks else 0.0
        for share, path in zip(shares, paths, strict=True)
    ]


STRIPINGS = {kind.name: kind for kind in (Adaptive, Proportional, Modulo, Single)}
