"""Which record an update reads next: where the pipeline asks, and the answer of a fixed order."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Protocol

from offload.layout import Record
from offload.plan.reading_order import ReadingOrder


class RecordSource(Protocol):
    """Says which record comes next. May change its mind until a record is taken."""

    def peek(self) -> Record | None:
        """Returns the record whose reading begins next; None if there is no more."""
        ...

    def take(self, record: Record) -> None:
        """Says that the reading of `record` begins."""
        ...

    def choose(self, ready: Sequence[Record], *, is_stuck: bool) -> Record | None:
        """Returns which of the records that are in memory is updated next; None: none may yet.

        Args:
            ready: At least one.
            is_stuck: Whether no transfer is in flight whose end could make room for another record.
        """
        ...

    def is_open(self) -> bool:
        """Returns whether more records may come; who adds one calls `UpdatePipeline.wake`."""
        ...


class InOrder:
    """Records in a given order, of which some may wait for others."""

    def __init__(
        self, records: Iterable[Record], *, that_wait: Callable[[], Container[str]]
    ) -> None:
        """Stores its arguments.

        Args:
            records: Each once.
            that_wait: Gives the names of records that had better wait now. Between two calls it
                loses none but what was taken, as long as it gives any.
        """
        self._by_name = {record.name: record for record in records}
        self._order = ReadingOrder(self._by_name)
        self._that_wait = that_wait

    def peek(self) -> Record | None:
        name = self._order.peek(besides=self._that_wait())
        return None if name is None else self._by_name[name]

    def take(self, record: Record) -> None:
        self._order.take(record.name)

    def choose(self, ready: Sequence[Record], *, is_stuck: bool) -> Record:
        del is_stuck
        return ready[0]

    def is_open(self) -> bool:
        return False
