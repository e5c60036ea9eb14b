"""Who owns a store: one process at a time writes it, and a dead one's claim is taken over.

[Note: ownership] The lock is an open-file-description lock on the owner file: the kernel drops it
when the process ends, however it ends, so on a local file system the lock alone decides. The
record in the file explains: who holds the lock, or who held it and died. Only where the file
system refuses locks does the record decide, by pid, start time, pid namespace and boot id.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import struct
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from offload.errors import StorageError, StoreError
from offload.storage.heartbeat import DEAD_AFTER_S, Heartbeat, silent_s
from offload.storage.mounts import is_on_network

OWNER_FILE = "offload-owner"
RUN_OWNER_FILE = "run-owner"
"""Of a run directory, which is owned from before its config is written until its run has ended."""

_log = logging.getLogger("offload.storage")

_FORMAT = "offload store owner"
_MAX_RECORD_BYTES = 4096
# struct flock of fcntl(2): l_type, l_whence, l_start, l_len, l_pid (0 for these locks).
_FLOCK = struct.Struct("@hhqqi4x")
_NO_LOCKS = (errno.ENOLCK, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRecord:
    """What identifies a process for as long as this machine and others may ask."""

    pid: int
    start_ticks: int
    """Clock ticks after boot at which the process started; tells a reused pid apart."""
    pid_namespace: int
    boot_id: str
    host: str
    since: float
    """Unix time in seconds."""

    def describe(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on host `{self.host}`, since {when}"


class Ownership:
    """The exclusive right to write one store directory, or one run directory.

    Attributes:
        record: This process's claim while it is held.
    """

    def __init__(self, root: Path, *, file: str = OWNER_FILE) -> None:
        self._path = root / file
        self._heartbeat = Heartbeat(self._path)
        self._fd = -1
        self.record: OwnerRecord | None = None

    def acquire(self) -> None:
        """Takes the store, also from an owner that has died.

        Raises:
            StoreError: Another live process, or another store object of this one, owns it.
            StorageError: The owner file cannot be made.
        """
        if self._fd >= 0:
            return
        is_shared = is_on_network(self._path.parent)
        fd, is_locked = self._lock_file()
        try:
            previous = _read_record(fd)
            if is_shared and is_locked and previous is not None:
                _require_silent(previous, self._path)
            if previous is not None:
                kind = _kind_of(self._path)
                _log.log(  # of a run, its store says the same
                    logging.WARNING if kind == "store" else logging.INFO,
                    "%s `%s` was not closed by %s, which has ended; taken over",
                    kind,
                    self._path.parent,
                    previous.describe(),
                )
            record = current_process()
            self._claim(fd, record)
        except BaseException:
            os.close(fd)
            raise
        self.record = record
        self._fd = fd
        try:
            if is_shared or not is_locked:
                self._heartbeat.start()
            _forget_in_children(self)
        except BaseException:
            self.release()
            raise

    def _claim(self, fd: int, record: OwnerRecord) -> None:
        """Writes the record; a file that was made for it and has no room for it goes again."""
        is_new = os.fstat(fd).st_size == 0
        try:
            _write_record(fd, record)
        except OSError as error:
            if is_new:
                self._path.unlink(missing_ok=True)
            raise StorageError(
                f"cannot own {_kind_of(self._path)} `{self._path.parent}`: expected room for the "
                f"owner's record, found {error.strerror}; free some, or use another directory",
                errno=error.errno,
            ) from error

    def _lock_file(self) -> tuple[int, bool]:
        """Returns the owner file, and whether it is locked; one deleted meanwhile is made anew."""
        while True:
            fd = _open(self._path, os.O_RDWR | os.O_CREAT)
            try:
                is_locked = _lock(fd, self._path)
                is_there = not is_locked or os.fstat(fd).st_nlink > 0
            except BaseException:
                os.close(fd)
                raise
            if is_there:
                return fd, is_locked
            os.close(fd)

    def release(self, *, deletes: bool = False) -> None:
        """Gives the store up; may be called again. The owner file says so, if it stays."""
        if self._fd < 0:
            return
        self._heartbeat.stop()
        fd, self._fd, self.record = self._fd, -1, None
        try:
            _write_record(fd, None)
            if deletes:  # while it is locked, so that nobody's lock goes with it
                self._path.unlink(missing_ok=True)
            _unlock(fd)
        finally:
            os.close(fd)

    def forget(self) -> None:
        """Closes this process's copy of the lock, in a child that inherited it by `fork`."""
        self._heartbeat.stop()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self.record = -1, None


def live_owner(root: Path, *, file: str = OWNER_FILE) -> OwnerRecord | None:
    """Returns the record of the process that owns the store now, or None. Takes nothing."""
    path = root / file
    try:
        fd = _open(path, os.O_RDONLY)
    except StorageError:
        return None
    try:
        record = _read_record(fd)
        if record is None:
            return None
        query = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        try:
            answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, query)
        except OSError:
            return record if _is_alive(record) is not False else None
        return None if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK else record
    finally:
        os.close(fd)


def require_unowned(root: Path, *, file: str = OWNER_FILE) -> None:
    """Raises StoreError where a process owns the directory now. Takes nothing."""
    owner = live_owner(root, file=file)
    if owner is not None:
        raise _owned(root / file, owner)


def current_process() -> OwnerRecord:
    """Returns the record of this process."""
    start_ticks = _start_ticks(os.getpid())
    return OwnerRecord(
        pid=os.getpid(),
        start_ticks=-1 if start_ticks is None else start_ticks,
        pid_namespace=_pid_namespace(),
        boot_id=_boot_id(),
        host=socket.gethostname(),
        since=time.time(),
    )


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StorageError(
            f"cannot open owner file `{path}`: expected a file of this user, found "
            f"{error.strerror}; check the directory's permissions",
            errno=error.errno,
        ) from error


def _lock(fd: int, path: Path) -> bool:
    """Takes the lock; False where the file system has none and the record allows to go on."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise _owned(path, _read_record(fd)) from error
        if error.errno not in _NO_LOCKS:
            raise StorageError(
                f"cannot lock owner file `{path}`: expected a lock, found {error.strerror}; "
                "check the file system",
                errno=error.errno,
            ) from error
        _log.warning(
            "the file system of `%s` has no locks (%s): the owner is known by its record only",
            path.parent,
            error.strerror,
        )
        owner = _read_record(fd)
        if owner is not None and _is_alive(owner) is not False:
            if _is_alive(owner):
                raise _owned(path, owner) from error
            _require_silent(owner, path)
        return False
    return True


def _require_silent(owner: OwnerRecord, path: Path) -> None:
    """Refuses a store whose owner cannot be seen from here and gave a sign of life lately."""
    if _is_alive(owner) is not None:
        return  # a process of this machine: the lock has decided
    quiet_s = silent_s(path)
    if quiet_s is None or quiet_s < DEAD_AFTER_S:
        raise StoreError(
            f"cannot own {_kind_of(path)} `{path.parent}`: expected no owner, found "
            f"{owner.describe()}, which cannot be seen from here and gave a sign of life "
            f"{'lately' if quiet_s is None else f'{max(quiet_s, 0):.0f} s ago'}; end it there, or "
            f"try again when it has been silent for {DEAD_AFTER_S:.0f} s",
            is_refusal=True,
        )


def _unlock(fd: int) -> None:
    """Ends the lock for all who share it, also a child that is just being forked."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _owned(path: Path, owner: OwnerRecord | None) -> StoreError:
    remedy = "wait until it ends, end it, or use another directory"
    if owner is None:
        who = "a process that left no record"
    elif owner.pid == os.getpid() and _is_alive(owner):
        who = f"another store object of this process ({owner.describe()})"
        remedy = (
            "call `close()` of the session, or optimizer, that has it, as `del` does not, or end "
            "the process, or use another directory"
        )
    elif _is_alive(owner) is False:
        who = f"a child that outlived {owner.describe()}"
    else:
        who = owner.describe()
    return StoreError(
        f"cannot own {_kind_of(path)} `{path.parent}`: expected no owner, found {who}; {remedy}",
        is_refusal=True,
    )


def _kind_of(path: Path) -> str:
    return "run directory" if path.name == RUN_OWNER_FILE else "store"


def _is_alive(record: OwnerRecord) -> bool | None:
    """Returns whether the process still runs, None where that cannot be seen from here."""
    if record.boot_id != _boot_id():
        return False if record.host == socket.gethostname() else None
    if record.pid_namespace != _pid_namespace():
        return None
    return _start_ticks(record.pid) == record.start_ticks


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # proc(5): field 22; the second one, in parentheses, may contain anything.
    return int(text.rpartition(")")[2].split()[19])


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return -1


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read_record(fd: int) -> OwnerRecord | None:
    """Returns the claim in the owner file, None where it was given up or cannot be read."""
    try:
        fields = json.loads(os.pread(fd, _MAX_RECORD_BYTES, 0))
        return OwnerRecord(**fields["owner"]) if fields["owner"] else None
    except (ValueError, TypeError, KeyError):
        return None


def _write_record(fd: int, record: OwnerRecord | None) -> None:
    fields = {"format": _FORMAT, "owner": asdict(record) if record else None}
    content = json.dumps(fields).encode() + b"\n"
    os.pwrite(fd, content, 0)  # first, as a full file system may not give back what is cut off
    os.ftruncate(fd, len(content))


_held: "weakref.WeakSet[Ownership]" = weakref.WeakSet()
_is_fork_watched = False


def _forget_in_children(ownership: Ownership) -> None:
    """Sees to it that a forked child does not keep a dead owner's lock."""
    global _is_fork_watched
    _held.add(ownership)
    if not _is_fork_watched:
        os.register_at_fork(after_in_child=_forget_all)
        _is_fork_watched = True


def _forget_all() -> None:
    for ownership in list(_held):
        ownership.forget()
