"""Parameters that go from their update straight into the slot in which they are used next.

[Note: an update waits for a slot]
What an update under a forward writes to storage is what that forward uses next. A slot that is
there when the pass over a record ends takes the parameters from it, and nobody reads them. That it
is there must not depend on who is faster: so the pass over a record waits until every unit of it
that the forward is expected to use has a slot, or until somebody waits for one of them. Records
still are read as far ahead as there are buffers, and slots come free as fast as units are used.

Records come into the window in the order in which the forward needs them. So what is waited for is
there, or comes as soon as others are written: that takes no record its wait for slots. What is read
before the step leaves a place for those in memory that come before it. Only where all places are
taken by records that wait, as in a pass that departs from what was foreseen, one of them is updated
without slots, the last first.
"""

import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence

import numpy as np

from offload.layout import Record


class HandedOver:
    """Parameters of one subgroup on their way from their update into memory.

    Ownership: Once they are there this refers to the memory no more.
    Concurrency: `give` in the updates' thread, the rest in any other.
    """

    def __init__(self, into: memoryview, wait_for: Callable[["HandedOver", bool], None]) -> None:
        """Stores its arguments.

        Args:
            into: As many bytes as the subgroup has, padded.
            wait_for: Waits until the update is done, and asks for it if told so; raises if it
                failed.
        """
        self._into: memoryview | None = into
        self._wait_for = wait_for
        self._given = threading.Event()

    def give(self, parameters: memoryview) -> None:
        assert self._into is not None
        np.copyto(np.frombuffer(self._into, np.uint8), np.frombuffer(parameters, np.uint8))
        self._into = None
        self._given.set()

    def wait(self) -> None:
        """Asks for the update and waits for it.

        Raises:
            StorageError, CorruptStateError: It failed.
        """
        if not self._given.is_set():
            self._wait_for(self, True)

    def join(self) -> None:
        """As `wait`, but leaves the update its time."""
        if not self._given.is_set():
            self._wait_for(self, False)

    def let_go(self) -> None:
        """Refers to the memory no more: the update has failed, and whoever waits is told."""
        self._into = None

    def cancel(self) -> None:
        """Ends the wait: what was to be filled is worth nothing."""
        self._into = None
        self._given.set()

    def done(self) -> bool:
        return self._given.is_set()


class Handovers:
    """The subgroups of one step's records, and who waits for them.

    See [Note: an update waits for a slot].

    Concurrency: Every call is under one lock of the owner's.
    """

    def __init__(self, records: Sequence[Record], unit_of: Mapping[str, int]) -> None:
        """Stores its arguments.

        Args:
            records: Of the model.
            unit_of: Unit numbers by the name of a shard.
        """
        self._subgroups = [
            [(subgroup.name, unit_of[subgroup.shard]) for subgroup in record.subgroups]
            for record in records
        ]
        self._record_of = {
            name: number for number, each in enumerate(self._subgroups) for name, _ in each
        }
        # Of records that are not updated: which of their subgroups have no slot, and which do.
        self._missing: dict[int, set[str]] = {}
        self._waiting: dict[int, dict[str, HandedOver]] = {}
        self._unwritten: set[int] = set()

    def begin(self, numbers: Collection[int], expected: Container[int]) -> None:
        """Starts a step that updates the records `numbers`.

        Args:
            expected: The units that will have slots.
        """
        self._missing = {
            number: {name for name, unit in self._subgroups[number] if unit in expected}
            for number in numbers
        }
        self._waiting.clear()
        self._unwritten = set(numbers)

    def may_begin(self, number: int) -> bool:
        """Tells whether every unit of a record that is expected to has a slot."""
        return not self._missing.get(number)

    def is_to_come(self, name: str) -> bool:
        """Tells whether the update of a subgroup has not given its parameters yet."""
        return self._record_of.get(name) in self._missing

    def is_written(self, name: str) -> bool:
        """Tells whether a subgroup is stored as it should be."""
        return self._record_of.get(name) not in self._unwritten

    def add(self, name: str, handed: HandedOver) -> int:
        """Notes who waits for a subgroup that is to come; returns the number of its record."""
        number = self._record_of[name]
        self._missing[number].discard(name)
        self._waiting.setdefault(number, {})[name] = handed
        return number

    def take(self, number: int) -> Mapping[str, HandedOver]:
        """Returns who waits for a record, which is updated."""
        self._missing.pop(number, None)
        return self._waiting.pop(number, {})

    def finish(self, number: int) -> None:
        """Says that a record is written."""
        self._unwritten.discard(number)

    def fail(self) -> None:
        """Lets go of all memory that waits: no more records are updated."""
        for handed in self._all_waiting():
            handed.let_go()

    def clear(self) -> None:
        """Forgets the step, and what waits for it."""
        for handed in self._all_waiting():
            handed.cancel()
        self._missing.clear()
        self._waiting.clear()
        self._unwritten.clear()

    def _all_waiting(self) -> Iterator[HandedOver]:
        for waiting in self._waiting.values():
            yield from waiting.values()
