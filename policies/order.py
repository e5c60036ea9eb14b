"""In which order an update takes the records."""

from collections.abc import Sequence


class Sequential:
    """Takes the records in layout order in every step; nothing is found in memory."""

    name = "sequential"

    def sequence(self, num_records: int, step: int) -> Sequence[int]:
        """Returns the indices 0 to `num_records - 1`, whatever the step."""
        del step
        return range(num_records)


ORDERS = {Sequential.name: Sequential}
