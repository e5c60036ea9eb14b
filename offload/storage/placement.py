"""Where a new version goes: asks the striping policy, and keeps within what the paths have."""

import threading
from collections.abc import Sequence

from offload.errors import StorageError, StoreError
from offload.policy import PathState, Striping
from offload.storage.extents import Version, num_blocks_for
from offload.storage.path_rates import PathRates
from offload.storage.store_paths import NO_SPACE, OpenPath, PathUse
from offload.storage.versions import VersionTable


class Placement:
    """Allocates versions over the paths of a store.

    Concurrency: Any thread. A data file grows under a lock of its own, as that may take a while.
    """

    def __init__(
        self,
        paths: Sequence[OpenPath],
        *,
        versions: VersionTable,
        striping: Striping,
        rates: PathRates,
        block_bytes: int,
    ) -> None:
        self._paths = paths
        self._versions = versions
        self._striping = striping
        self._rates = rates
        self._block_bytes = block_bytes
        self._lock = threading.Lock()  # of the policy, which may remember
        self._grow_lock = threading.Lock()

    def allocate(self, num_bytes: int) -> Version:
        """Returns a new version in free blocks, growing data files as needed.

        Raises:
            StorageError: No path has room.
        """
        num_blocks = num_blocks_for(num_bytes, self._block_bytes)
        while True:
            counts = self._counts(num_blocks)
            version = self._versions.try_allocate(num_bytes, counts)
            if version is not None:
                return version
            with self._grow_lock:
                for path, count in zip(self._paths, counts, strict=True):
                    missing = count - self._versions.num_free_on(path.index)
                    if missing > 0:
                        self._grow(path, missing, num_blocks)

    def available_blocks(self) -> int:
        """Returns how many more blocks fit on all paths; what paths share counts once."""
        free = 0
        growable: dict[int, int] = {}
        on_device: dict[int, int] = {}
        for path in self._written():
            free += self._versions.num_free_on(path.index)
            growable[path.device] = growable.get(path.device, 0) + path.growable_blocks()
            on_device[path.device] = path.device_blocks()
        return free + sum(min(count, on_device[device]) for device, count in growable.items())

    def reserve(self, num_blocks: int) -> None:
        """Grows the data files until so many blocks are free, as their paths are used by now.

        Raises:
            StorageError: No path has room.
        """
        with self._grow_lock:
            while any(counts := self._missing(num_blocks)):
                for path, count in zip(self._paths, counts, strict=True):
                    if count > 0:
                        self._grow(path, count, count)

    def _missing(self, num_blocks: int) -> list[int]:
        """Returns by how many blocks each path has to grow, in proportion to what it holds."""
        written = self._written()
        missing = num_blocks - sum(self._versions.num_free_on(path.index) for path in written)
        counts = [0] * len(self._paths)
        taken = {path.index: self._versions.num_taken_on(path.index) for path in written}
        total = sum(taken.values())
        if missing <= 0 or not total:  # the first versions show which path takes how much
            return counts
        for index, held in taken.items():
            counts[index] = missing * held // total
        counts[written[0].index] += missing - sum(counts)
        return _fit(counts, [path.growable_blocks() for path in self._paths])

    def _written(self) -> list[OpenPath]:
        return [path for path in self._paths if path.use is not PathUse.LEFT_OUT]

    def has_other(self, path: OpenPath) -> bool:
        """Returns whether another path takes new blocks."""
        return any(p is not path and p.use is not PathUse.LEFT_OUT for p in self._paths)

    def _counts(self, num_blocks: int) -> list[int]:
        if len(self._paths) == 1:
            return [num_blocks]
        states = [self._state_of(path) for path in self._paths]
        with self._lock:
            wanted = list(self._striping.split(num_blocks, states))
        if len(wanted) != len(states) or sum(wanted) != num_blocks or min(wanted, default=0) < 0:
            raise StoreError(
                f"striping `{self._striping.name}` split {num_blocks} blocks into {wanted}: "
                f"expected {len(states)} counts that add up; correct the policy"
            )
        return _fit(wanted, [state.available_blocks for state in states])

    def _state_of(self, path: OpenPath) -> PathState:
        is_out = path.use is PathUse.LEFT_OUT
        free = 0 if is_out else self._versions.num_free_on(path.index)
        return PathState(
            available_blocks=free + path.growable_blocks(),
            block_bytes=self._block_bytes,
            queued_bytes=self._rates.queued_bytes(path.index),
            queued_write_bytes=self._rates.queued_write_bytes(path.index),
            round_trip_bytes_per_s=self._rates.round_trip_bytes_per_s(path.index),
            nominal_bytes_per_s=path.config.nominal_bytes_per_s,
        )

    def _grow(self, path: OpenPath, num_blocks: int, needed: int) -> None:
        try:
            total = path.grow(num_blocks)
        except StorageError as error:
            if not self.has_other(path):
                raise
            if error.errno in NO_SPACE:
                path.mark_full(error)
            else:
                path.note_write_error(error)
            available = sum(self._state_of(p).available_blocks for p in self._paths)
            if available < needed:
                raise
        else:
            self._versions.grow(path.index, total)


def _fit(wanted: Sequence[int], available: Sequence[int]) -> list[int]:
    """Returns `wanted` moved to where there is room; what has none stays on the first path."""
    counts = [min(count, room) for count, room in zip(wanted, available, strict=True)]
    left = sum(wanted) - sum(counts)
    for index, room in enumerate(available):
        more = min(left, room - counts[index])
        counts[index] += more
        left -= more
    if left:
        # Growing it fails and says what is free.
        counts[max(range(len(counts)), key=lambda i: available[i])] += left
    return counts
