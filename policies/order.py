"""In which order an update takes the records, and which of them stay in memory."""

from collections.abc import Sequence


class Sequential:
    """Takes the records in layout order in every step; nothing is found in memory."""

    name = "sequential"

    def sequence(self, num_records: int, step: int) -> Sequence[int]:
        """Returns the indices 0 to `num_records - 1`, whatever the step."""
        del step
        return range(num_records)

    def kept(self, num_records: int, capacity: int, step: int) -> frozenset[int]:
        """Returns nothing: each record is read and written in each step."""
        del num_records, capacity, step
        return frozenset()


class Alternating:
    """Takes the records forth in odd steps and back in even ones.

    What a step ends with stays in memory and is what the next one begins with: of N records a
    cache of K leaves N - K to be read and N - K to be written.
    """

    name = "alternating"

    def sequence(self, num_records: int, step: int) -> Sequence[int]:
        """Returns the indices ascending in odd steps, descending in even ones."""
        return range(num_records) if step % 2 else range(num_records - 1, -1, -1)

    def kept(self, num_records: int, capacity: int, step: int) -> frozenset[int]:
        """Returns the last `capacity` of the step's sequence."""
        return frozenset(self.sequence(num_records, step)[max(num_records - capacity, 0) :])


class Resident:
    """Takes the records in layout order; a fixed, evenly spread set of them never leaves memory.

    Spread evenly, so that records that are in memory lie between transfers all along the step.
    """

    name = "resident"

    def sequence(self, num_records: int, step: int) -> Sequence[int]:
        """Returns the indices 0 to `num_records - 1`, whatever the step."""
        del step
        return range(num_records)

    def kept(self, num_records: int, capacity: int, step: int) -> frozenset[int]:
        """Returns `capacity` indices, the same in every step, at even distances."""
        del step
        count = min(capacity, num_records)
        return frozenset(index * num_records // count for index in range(count))


ORDERS = {order.name: order for order in (Sequential, Alternating, Resident)}
