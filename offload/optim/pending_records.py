"""The records that updates under a forward still have to read, as an overlap orders them."""

import threading
from collections import deque
from collections.abc import Sequence

from offload.layout import Record
from offload.optim.handover import Handovers
from offload.policy import Overlap


class PendingRecords:
    """The records of a step that are not read yet, as the policy orders them.

    Attributes:
        is_hurried: Whether no update waits for slots any more.
    """

    def __init__(self, policy: Overlap, lock: threading.Condition) -> None:
        self._policy = policy
        self._lock = lock
        self._records: Sequence[Record] = ()
        self._numbers: dict[str, int] = {}
        self._waiting: deque[int] = deque()
        self._needed: set[int] = set()
        self._handovers = Handovers((), {})
        self.is_hurried = False

    def begin(
        self, records: Sequence[Record], sequence: Sequence[int], handovers: Handovers
    ) -> None:
        """Starts a step. Under the lock."""
        if records is not self._records:
            self._records = records
            self._numbers = {record.name: index for index, record in enumerate(records)}
        self._handovers = handovers
        self._waiting = deque(sequence)
        self._needed.clear()
        self.is_hurried = False

    def need(self, numbers: Sequence[int]) -> None:
        """Says that the pass waits for these records. Under the lock."""
        self._needed.update(numbers)

    def number_of(self, record: Record) -> int:
        return self._numbers[record.name]

    def finish(self, number: int) -> None:
        """Says that a record is updated. Under the lock."""
        self._needed.discard(number)

    def peek(self) -> Record | None:
        with self._lock:
            if not self._waiting:
                return None
            return self._records[self._policy.choose(self._waiting, self._needed)]

    def take(self, record: Record) -> None:
        with self._lock:
            self._waiting.remove(self.number_of(record))

    def is_open(self) -> bool:
        return False

    def choose(self, ready: Sequence[Record], *, is_stuck: bool) -> Record | None:
        """As `RecordSource` has it; see [Note: an update waits for a slot]."""
        with self._lock:
            numbers = [self.number_of(record) for record in ready]
            if not self.is_hurried:
                waiting = numbers
                numbers = [n for n in numbers if n in self._needed or self._handovers.may_begin(n)]
                if not numbers and is_stuck and not self._needed.isdisjoint(self._waiting):
                    numbers = waiting[-1:]
            if not numbers:
                return None
            return self._records[self._policy.choose(numbers, self._needed)]
