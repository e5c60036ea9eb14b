"""Which record an update reads next: where the pipeline asks, and the answer of a fixed order."""

from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from offload.layout import Record


class RecordSource(Protocol):
    """Says which record comes next. May change its mind until a record is taken."""

    def peek(self, *, besides: Container[str] = ()) -> Record | None:
        """Returns the record whose reading begins next; None if there is no more.

        Args:
            besides: Names of records that had better wait, where the order allows it.
        """
        ...

    def take(self, record: Record) -> None:
        """Says that the reading of `record` begins."""
        ...

    def choose(self, ready: Sequence[Record]) -> Record | None:
        """Returns which of the records that are in memory is updated next; None: none may yet."""
        ...

    def is_open(self) -> bool:
        """Returns whether more records may come; who adds one calls `UpdatePipeline.wake`."""
        ...


class InOrder:
    """Records in a given order."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = deque(records)

    def peek(self, *, besides: Container[str] = ()) -> Record | None:
        first = self._records[0] if self._records else None
        if first is None or first.name not in besides:
            return first
        return next((record for record in self._records if record.name not in besides), first)

    def take(self, record: Record) -> None:
        if record is self._records[0]:
            self._records.popleft()
        else:
            self._records.remove(record)

    def choose(self, ready: Sequence[Record]) -> Record:
        return ready[0]

    def is_open(self) -> bool:
        return False
