"""Which record an update reads next: where the pipeline asks, and the answer of a fixed order."""

from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from offload.layout import Record
from offload.plan.reading_order import ReadingOrder


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
        self._by_name = {record.name: record for record in records}
        self._order = ReadingOrder(self._by_name)

    def peek(self, *, besides: Container[str] = ()) -> Record | None:
        name = self._order.peek(besides=besides)
        return None if name is None else self._by_name[name]

    def take(self, record: Record) -> None:
        self._order.take(record.name)

    def choose(self, ready: Sequence[Record]) -> Record:
        return ready[0]

    def is_open(self) -> bool:
        return False
