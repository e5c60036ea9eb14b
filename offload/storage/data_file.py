"""The data file of one path: fixed blocks from offset 0, grown in large steps."""

import errno
import os
import re
from pathlib import Path

from offload.errors import CorruptStateError, StorageError
from offload.sizes import format_size
from offload.storage.file import StorageFile, open_file

_GROW_BLOCKS = 64  # least growth: 64 MiB with the default block, so that growing is rare
_GROW_FRACTION = 16
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def data_file_name(path_index: int) -> str:
    """Returns the name of the data file of one path."""
    return f"data-{path_index}"


def is_data_file_name(name: str) -> bool:
    """Returns whether `name` is that of a data file."""
    return re.fullmatch(r"data-\d+", name) is not None


class DataFile:
    """Blocks of one path and the file that holds them.

    Concurrency: `grow` by one thread at a time; the rest from any thread.
    """

    def __init__(self, root: Path, *, path_index: int, block_bytes: int) -> None:
        self.path = root / data_file_name(path_index)
        self.block_bytes = block_bytes
        self._file: StorageFile | None = None

    def open(self, *, create: bool = False, read_only: bool = False) -> None:
        """Opens the file.

        Raises:
            CorruptStateError: It is missing although a manifest refers to it.
        """
        try:
            self._file = open_file(self.path, create=create, read_only=read_only)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                raise self._missing() from error
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def file(self) -> StorageFile:
        assert self._file is not None, "the data file is open while its store is"
        return self._file

    def num_blocks(self) -> int:
        """Returns how many whole blocks the file has now."""
        return os.fstat(self.file.fd).st_size // self.block_bytes

    def grow(self, *, needed_blocks: int, most_blocks: int | None) -> int:
        """Adds free blocks at the end.

        Args:
            needed_blocks: How many at least; more are added where that is cheap.
            most_blocks: What the file may have at most in all; None: the file system decides.

        Returns:
            The number of blocks the file has now.

        Raises:
            StorageError: `errno` is ENOSPC or EDQUOT: no room for `needed_blocks`.
        """
        now = self.num_blocks()
        least = now + needed_blocks
        if most_blocks is not None and least > most_blocks:
            raise self._no_space(needed_blocks, max(0, most_blocks - now) * self.block_bytes)
        wanted = now + max(needed_blocks, _GROW_BLOCKS, now // _GROW_FRACTION)
        wanted = wanted if most_blocks is None else min(wanted, most_blocks)
        try:
            self._allocate(now, wanted)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise self._failed(error) from error
            self._grow_exactly(now, least)
        return self.num_blocks()

    def _grow_exactly(self, now: int, least: int) -> None:
        try:
            self._allocate(now, least)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise self._failed(error) from error
            status = os.fstatvfs(self.file.fd)
            free_bytes = status.f_bavail * status.f_frsize
            raise self._no_space(least - now, free_bytes, error.errno) from error

    def _allocate(self, now: int, blocks: int) -> None:
        """Reserves the space, so that a full disk shows here and not in a transfer."""
        size = blocks * self.block_bytes
        try:
            os.posix_fallocate(self.file.fd, now * self.block_bytes, size - now * self.block_bytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            os.ftruncate(self.file.fd, size)

    def _no_space(
        self, needed_blocks: int, found_bytes: int, number: int = errno.ENOSPC
    ) -> StorageError:
        return StorageError(
            f"cannot grow data file `{self.path}`: needs "
            f"{format_size(needed_blocks * self.block_bytes)} more, found "
            f"{format_size(found_bytes)} free; free space there or raise "
            "`tiers.storage.capacity`",
            errno=number,
        )

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot grow data file `{self.path}`: expected success, found {error.strerror}; "
            "check the file system",
            errno=error.errno,
        )

    def _missing(self) -> CorruptStateError:
        return CorruptStateError(
            f"data file `{self.path}` is missing: expected it because a manifest refers to it, "
            "found none; restore it from a copy"
        )
