"""The directories of one store that this process owns."""

import errno
from collections.abc import Iterable
from pathlib import Path

from offload.errors import StorageError
from offload.storage.ownership import Ownership

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class Ownerships:
    """Owns one directory after the other, and gives all up in reverse order."""

    def __init__(self) -> None:
        self._held: list[Ownership] = []

    def acquire(self, roots: Iterable[Path]) -> None:
        """Owns all of these directories.

        Raises:
            StoreError: Another process owns one; those before it are owned.
            StorageError: One cannot be written.
        """
        for root in roots:
            ownership = Ownership(root)
            ownership.acquire()
            self._held.append(ownership)

    def acquire_writable(self, roots: Iterable[Path]) -> dict[Path, StorageError]:
        """Owns the directories that can be written; returns the errors of the others.

        Raises:
            StorageError: None of them can be written.
        """
        refused: dict[Path, StorageError] = {}
        for root in roots:
            try:
                self.acquire([root])
            except StorageError as error:
                if error.errno not in _READ_ONLY:
                    raise
                refused[root] = error
        if refused and not self._held:
            raise next(iter(refused.values()))
        return refused

    def release(self, *, deletes: bool = False) -> None:
        """Gives all of them up, and `deletes` their owner files; may be called again."""
        held, self._held = self._held, []
        for ownership in reversed(held):
            ownership.release(deletes=deletes)
