"""A store over several paths in simulated time: its striping policy places every version."""

from collections.abc import Sequence

from offload.plan.events import Ticket
from offload.plan.simulated_path import Direction, SimulatedPath, Urgency
from offload.policy import PathState, Striping

_MANY_BLOCKS = 1 << 40
"""Free blocks of a simulated path: room is the planner's concern, not the simulation's."""


class SimulatedStore:
    """Knows which bytes of what lie on which path."""

    def __init__(
        self, paths: Sequence[SimulatedPath], *, striping: Striping, block_bytes: int
    ) -> None:
        self.paths = paths
        self._striping = striping
        self._block_bytes = block_bytes
        self._placed: dict[str, list[int]] = {}

    def place(self, key: str, num_bytes: int) -> None:
        """Says that `key` was written before the simulation begins."""
        self._placed[key] = self._split(num_bytes)

    def read(self, key: str, urgency: Urgency = Urgency.PREFETCH) -> list[Ticket]:
        """Starts reading `key` from where it was last written."""
        return self._submit(Direction.READ, self._placed[key], urgency)

    def write(self, key: str, num_bytes: int) -> list[Ticket]:
        """Starts writing a new version of `key`."""
        self._placed[key] = self._split(num_bytes)
        return self._submit(Direction.WRITE, self._placed[key], Urgency.WRITE_BACK)

    def moved_bytes(self, direction: Direction) -> int:
        """Returns what was submitted in one direction, over all paths."""
        return sum(path.moved_bytes[direction] for path in self.paths)

    def _submit(
        self, direction: Direction, amounts: Sequence[int], urgency: Urgency
    ) -> list[Ticket]:
        return [
            path.submit(direction, amount, urgency)
            for path, amount in zip(self.paths, amounts, strict=True)
            if amount
        ]

    def _split(self, num_bytes: int) -> list[int]:
        if len(self.paths) == 1:
            return [num_bytes]
        num_blocks = -(-num_bytes // self._block_bytes)
        counts = self._striping.split(num_blocks, [self._state_of(path) for path in self.paths])
        amounts = [count * self._block_bytes for count in counts]
        last = max(index for index, count in enumerate(counts) if count)
        amounts[last] -= sum(amounts) - num_bytes  # the last block is transferred in part
        return amounts

    def _state_of(self, path: SimulatedPath) -> PathState:
        return PathState(
            available_blocks=_MANY_BLOCKS,
            block_bytes=self._block_bytes,
            queued_bytes=round(sum(path.queued_bytes.values())),
            queued_write_bytes=round(path.queued_bytes[Direction.WRITE]),
            round_trip_bytes_per_s=path.round_trip_bytes_per_s,
            nominal_bytes_per_s=path.rates.mixed_bytes_per_s,
        )
