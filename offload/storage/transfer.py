"""One transfer between memory and a file: what was asked, how it ended, what to say of it."""

import errno
import os
from dataclasses import dataclass
from enum import Enum, IntEnum

from offload.errors import StorageError
from offload.storage.buffer import BufferView
from offload.storage.file import StorageFile

_ADVICE = {
    errno.ENODATA: "the file is shorter than what was asked: it was truncated or never written",
    errno.ECANCELED: "it was cancelled before all of it had begun; start it again if it is needed",
    errno.ENOSPC: "free space on its file system or choose another path",
    errno.EDQUOT: "raise the quota or choose another path",
    errno.EFBIG: "raise RLIMIT_FSIZE or use a file system with larger files",
    errno.EBADF: "the file was closed or opened for the other direction; open it again",
    errno.EINVAL: "the file system refuses this alignment; open the file with `direct=False`",
    errno.EIO: "look at the kernel's log: the device may be failing",
    errno.ESTALE: "the server lost the file: mount the path again",
    errno.EROFS: "mount the file system for writing or choose another path",
}
_DEFAULT_ADVICE = "look at the kernel's log and the state of the file system"


class Priority(IntEnum):
    """Which transfers start first; within one priority, in the order of submission."""

    NEEDED = 0
    PREFETCH = 1
    WRITE_BACK = 2


class Operation(Enum):
    """The direction of a transfer; the value is the word for messages."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What was asked: all of `buffer`, from or to `offset` of `file`."""

    operation: Operation
    file: StorageFile
    offset: int
    buffer: BufferView
    priority: Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How a transfer ended.

    `error` is 0 or an errno, that of the lowest byte that failed; the `done_bytes` before it were
    transferred. `cause` is the exception behind it, where there was one.
    """

    error: int
    done_bytes: int
    cause: Exception | None = None


def transfer_error(transfer: Transfer, completion: Completion) -> StorageError:
    """Returns the exception that says what failed, what was expected and found, what to do."""
    num_bytes = transfer.buffer.num_bytes
    code = completion.error
    reason = "end of file" if code == errno.ENODATA else os.strerror(code)
    return StorageError(
        f"cannot {transfer.operation.value} file `{transfer.file.path}` at offset "
        f"{transfer.offset}, length {num_bytes} bytes: expected {num_bytes} bytes, found "
        f"{completion.done_bytes} before {errno.errorcode.get(code, str(code))} ({reason}); "
        f"{_ADVICE.get(code, _DEFAULT_ADVICE)}",
        errno=code,
    )
