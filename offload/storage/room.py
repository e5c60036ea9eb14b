"""Room for what is about to be written, made sure of before the first byte is."""

import errno
from collections.abc import Mapping, Sequence

from offload.errors import StorageError
from offload.sizes import format_size
from offload.storage.extents import num_blocks_for
from offload.storage.placement import Placement
from offload.storage.store_paths import OpenPath
from offload.storage.versions import VersionTable


class Room:
    """Says whether new versions of records fit beside all that is kept, and reserves the space.

    [Note: room before a step] A step that runs out of space in its middle leaves the state between
    two steps: it can only be given up. So the blocks that the steps up to the next commit, and that
    commit, can take at most are counted, and reserved in the data files, before one of them writes.

    Concurrency: One thread at a time; nothing else is written meanwhile.
    """

    def __init__(
        self,
        paths: Sequence[OpenPath],
        *,
        versions: VersionTable,
        placement: Placement,
        block_bytes: int,
    ) -> None:
        self._paths = paths
        self._versions = versions
        self._placement = placement
        self._block_bytes = block_bytes

    def require(
        self, groups: Sequence[Mapping[str, int]], *, num_in_flight: int, what: str
    ) -> None:
        """Makes sure that new versions of all records of `groups` fit.

        Args:
            groups: Bytes by record, of the records that are written together.
            num_in_flight: The most groups that are written at one time.
            what: Is about to be done, for the message.

        Raises:
            StorageError: They do not; nothing was changed. `errno` is ENOSPC.
        """
        needed = self._num_needed(groups, num_in_flight)
        available = self._placement.available_blocks()
        if needed > available:
            raise self._refused(needed, available, what)
        try:
            self._placement.reserve(needed)
        except StorageError as error:
            raise self._refused(needed, self._placement.available_blocks(), what) from error

    def _num_needed(self, groups: Sequence[Mapping[str, int]], num_in_flight: int) -> int:
        lasting = sum(self._versions.num_lasting(sizes) for sizes in groups)
        # Steps after this one write the same records before their versions before are free.
        totals = (
            sum(num_blocks_for(num_bytes, self._block_bytes) for num_bytes in sizes.values())
            for sizes in groups
        )
        return lasting + sum(sorted(totals, reverse=True)[:num_in_flight])

    def _refused(self, needed: int, available: int, what: str) -> StorageError:
        missing = self._size(max(needed - available, 1))
        roots = ", ".join(f"`{path.root}`" for path in self._paths)
        return StorageError(
            f"cannot {what}: expected {self._size(needed)} for new versions of records on {roots}, "
            f"beside the last commit and the checkpoints kept, found {self._size(available)}; "
            f"nothing was written: free {missing} there{self._checkpoints()}, or raise "
            "`tiers.storage.capacity`",
            errno=errno.ENOSPC,
        )

    def _checkpoints(self) -> str:
        sizes = {name: self._versions.num_kept_only_by(name) for name in self._versions.kept()}
        if not sizes:
            return ""
        listed = ", ".join(f"`{name}` {self._size(count)}" for name, count in sizes.items())
        return f", delete checkpoints (each alone keeps {listed})"

    def _size(self, num_blocks: int) -> str:
        return format_size(num_blocks * self._block_bytes)
