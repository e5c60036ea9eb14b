"""A queue of transfers in which neither direction stops for the other."""

import asyncio
import heapq
from collections.abc import Mapping
from typing import Protocol, Self, TypeVar

from offload.storage.transfer import Operation

_LEAST_SHARE = 4


class Waiting(Protocol):
    """What waits: ordered by urgency, the smallest first."""

    @property
    def priority(self) -> int: ...
    @property
    def operation(self) -> Operation: ...
    def __lt__(self, other: Self, /) -> bool: ...


_Entry = TypeVar("_Entry", bound=Waiting)


class FairQueue(asyncio.Queue[_Entry]):
    """The more urgent first; but while both directions wait, the other keeps a share.

    Of `queue_depth` entries in flight the less urgent direction has a quarter, or a half at the
    same priority; none at a depth too small for that. A device that reads and writes at the same
    time would else stand still in one direction.
    """

    def __init__(self, queue_depth: int) -> None:
        self._queue_depth = queue_depth
        super().__init__()

    def qsize(self) -> int:
        """Returns how many wait."""
        return sum(map(len, self._waiting.values()))

    def empty(self) -> bool:
        """Returns whether none waits."""
        return not any(self._waiting.values())

    def ended(self, operation: Operation) -> None:
        """Says that an entry that was taken is in flight no more."""
        self._in_flight[operation] -= 1

    # What `asyncio.Queue` leaves to subclasses.

    def _init(self, maxsize: int) -> None:
        del maxsize
        self._waiting: dict[Operation, list[_Entry]] = {each: [] for each in Operation}
        self._in_flight = dict.fromkeys(Operation, 0)

    def _put(self, item: _Entry) -> None:
        heapq.heappush(self._waiting[item.operation], item)

    def _get(self) -> _Entry:
        first = {each: heap[0].priority for each, heap in self._waiting.items() if heap}
        operation = chosen(first, self._in_flight, self._queue_depth)
        self._in_flight[operation] += 1
        return heapq.heappop(self._waiting[operation])


def chosen(
    waiting: Mapping[Operation, int], in_flight: Mapping[Operation, int], queue_depth: int
) -> Operation:
    """Returns the direction of the next transfer.

    Args:
        waiting: Priority of the most urgent one by direction, of those in which some wait.
        in_flight: Transfers by direction.
        queue_depth: The most in flight.
    """
    urgent = min(waiting, key=lambda each: (waiting[each], each is Operation.WRITE))
    others = [each for each in waiting if each is not urgent]
    if not others:
        return urgent
    is_equal = len(set(waiting.values())) == 1
    share = queue_depth // (2 if is_equal else _LEAST_SHARE)
    return others[0] if in_flight[others[0]] < share else urgent
