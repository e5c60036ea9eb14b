"""The I/O engine: starts reads and writes of files and gives a ticket for each."""

import atexit
import errno
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from types import TracebackType
from typing import Self

from offload._native import aio
from offload.errors import ConfigError, StorageError, StoreError
from offload.sizes import MIB
from offload.storage.backend import Backend, EngineStats, Request
from offload.storage.backend_aiofiles import AiofilesBackend
from offload.storage.backend_native import NativeBackend
from offload.storage.buffer import Buffer, BufferView, view_buffer
from offload.storage.file import StorageFile
from offload.storage.in_flight import InFlight
from offload.storage.transfer import Completion, Operation, Priority, Transfer, transfer_error

__all__ = ["BACKENDS", "Engine", "EngineStats", "Priority", "Ticket"]

BACKENDS = ("io_uring", "libaio", "threads", "aiofiles")
"""In the order in which `auto` tries them."""

_LOGGER = logging.getLogger("offload.storage")
_MAX_OFFSET = (1 << 63) - 1


class Ticket:
    """One transfer in flight.

    Ownership: The buffer belongs to the engine until the transfer is over, and is kept alive until
        then, also if the ticket is dropped. Neither a timeout nor an interrupt of `wait` ends it.
    Concurrency: Any thread may wait, any number of times; each wait gives the same outcome, and
        waits for no other transfer.
    """

    __slots__ = ("_completion", "_request", "_transfer")

    def __init__(self, transfer: Transfer, request: Request) -> None:
        self._transfer = transfer
        self._request: Request | None = request
        self._completion: Completion | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the transfer is over.

        Raises:
            StorageError: It failed; the message names file, offset, length and errno.
            TimeoutError: `timeout_s` passed before; the transfer goes on.
        """
        if not self._wait(timeout_s):
            transfer = self._transfer
            raise TimeoutError(
                f"waiting to {transfer.operation.value} file `{transfer.file.path}` at offset "
                f"{transfer.offset}, length {transfer.buffer.num_bytes} bytes: expected it to be "
                f"over within {timeout_s} s, found it still in flight; wait again"
            )
        completion = self._completion
        if completion is not None and completion.error:
            raise transfer_error(self._transfer, completion) from completion.cause

    def done(self) -> bool:
        """Tells whether `wait` would return or raise at once."""
        request = self._request
        if request is not None:
            if not request.is_done():
                return False
            self._settle(request)
        return True

    def wait_done(self) -> None:
        """Waits until the transfer is over; does not raise its error."""
        self._wait(None)

    def _wait(self, timeout_s: float | None) -> bool:
        request = self._request
        if request is not None:
            if not request.wait(timeout_s):
                return False
            self._settle(request)
        return True

    def _settle(self, request: Request) -> None:
        """Takes the outcome and gives up the memory. Several threads at once store the same."""
        self._completion = request.completion()
        nothing = BufferView(address=0, num_bytes=self._transfer.buffer.num_bytes, owner=None)
        self._transfer = replace(self._transfer, buffer=nothing)
        self._request = None  # last: without it the ticket counts as settled


class Engine:
    """Reads and writes files without blocking the caller.

    Transfers are cut into pieces of `block_bytes`, of which at most `queue_depth` are in flight; a
    more urgent priority starts first. No bytes are copied.

    Concurrency: Any thread. `close` waits for what is in flight. Not usable in a forked child.
    """

    def __init__(
        self, backend: str = "auto", *, queue_depth: int = 8, block_bytes: int = MIB
    ) -> None:
        """Stores the choice.

        Args:
            backend: A name of `BACKENDS`, or `auto` for the first that this machine has.
            queue_depth: Pieces in flight, 1 to 1024; also the threads of `threads`, `aiofiles`.
            block_bytes: Bytes per piece, up to 1 GiB; a multiple of the files' alignment.
        """
        if backend != "auto" and backend not in BACKENDS:
            raise ConfigError(
                f"cannot make an I/O engine with backend `{backend}`: expected `auto` or one of "
                f"{', '.join(BACKENDS)}; choose one of them"
            )
        _check_range("queue_depth", queue_depth, aio.MAX_QUEUE_DEPTH)
        _check_range("block_bytes", block_bytes, aio.MAX_BLOCK_BYTES)
        self._requested = backend
        self._queue_depth = queue_depth
        self._block_bytes = block_bytes
        self._lock = threading.Lock()  # of the state and of submission
        self._closing = threading.Lock()  # one close at a time
        self._state = _State.CLOSED
        self._backend: Backend | None = None
        self._in_flight = InFlight()
        self._unsure: list[Transfer] = []  # interrupted while starting: never freed

    @property
    def name(self) -> str:
        """The backend in use; before `open` the one that was asked for."""
        return self._requested if self._backend is None else self._backend.name

    def open(self) -> None:
        """Opens the backend; again does nothing.

        Raises:
            StorageError: This machine refuses the backend that was asked for.
        """
        with self._lock:
            if self._state is _State.OPEN:
                return
            if self._state is _State.CLOSING:
                raise StoreError(
                    "cannot open the I/O engine: expected it closed, found it closing; call "
                    "`close()` until it returns, then `open()`"
                )
            self._move_to(_State.OPEN)
            try:
                self._backend = self._open_backend()
            except BaseException:
                self._state = _State.CLOSED
                raise
        # At exit the interpreter frees memory that a transfer may still use.
        atexit.register(self.close)

    def close(self) -> None:
        """Waits for what is in flight and closes the backend; again does nothing."""
        with self._closing:
            with self._lock:
                if self._state is _State.CLOSED:
                    return
                self._move_to(_State.CLOSING)
            self._in_flight.drain()
            if self._backend is not None:
                self._backend.close()
            self._move_to(_State.CLOSED)
            atexit.unregister(self.close)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def read(
        self,
        file: StorageFile,
        offset: int,
        into: Buffer,
        *,
        priority: Priority = Priority.NEEDED,
    ) -> Ticket:
        """Starts to fill all of `into` from `offset` of `file`.

        Raises:
            ConfigError: For a direct file, address, offset or length is not a multiple of its
                alignment; or `into` is not writable contiguous host memory.
            StoreError: The engine is not open.

        Ownership: `into` belongs to the engine until the ticket is done. It is kept alive.
        """
        return self._start(Operation.READ, file, offset, into, priority)

    def write(
        self,
        file: StorageFile,
        offset: int,
        source: Buffer,
        *,
        priority: Priority = Priority.WRITE_BACK,
    ) -> Ticket:
        """Starts to write all of `source` to `offset` of `file`; raises as `read`.

        Ownership: `source` may be changed again when the ticket is done. It is kept alive.
        """
        return self._start(Operation.WRITE, file, offset, source, priority)

    def flush(self, file: StorageFile) -> None:
        """Makes durable what was written: everything whose ticket is done.

        Of a buffered file the page cache is given back too.

        Raises:
            StorageError: The system reports a failure. What it covers is suspect; flushing again
                may report success without having written anything.
        """
        try:
            if file.fd < 0:  # closed; the system's functions would say ValueError
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            os.fdatasync(file.fd)
            if not file.is_direct:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _system_error(f"flush file `{file.path}`", "durable bytes", error) from error

    def stats(self) -> EngineStats:
        """Returns the counters since `open`, also after `close`."""
        return EngineStats() if self._backend is None else self._backend.stats()

    def _start(
        self,
        operation: Operation,
        file: StorageFile,
        offset: int,
        buffer: Buffer,
        priority: Priority,
    ) -> Ticket:
        view = view_buffer(buffer, writable=operation is Operation.READ)
        transfer = Transfer(
            operation=operation, file=file, offset=offset, buffer=view, priority=priority
        )
        self._check(transfer)
        try:
            with self._lock:
                ticket = Ticket(transfer, self._open_backend_or_raise().submit(transfer))
                self._in_flight.add(ticket)
            file.in_flight.add(ticket)
        except (StoreError, StorageError):
            raise
        except OSError as error:
            what = f"{operation.value} file `{file.path}` at offset {offset}"
            raise _system_error(what, "the transfer to start", error) from error
        except BaseException:
            # A signal handler raised, perhaps after the backend had taken the transfer.
            self._unsure.append(transfer)
            raise
        return ticket

    def _check(self, transfer: Transfer) -> None:
        view, file = transfer.buffer, transfer.file
        what = f"cannot {transfer.operation.value} file `{file.path}` at offset {transfer.offset}"
        if transfer.offset < 0 or transfer.offset + view.num_bytes > _MAX_OFFSET:
            raise ConfigError(
                f"{what}, length {view.num_bytes} bytes: expected a range between 0 and "
                f"{_MAX_OFFSET}, found one outside; correct the offset"
            )
        found = {
            "offset": transfer.offset,
            "length": view.num_bytes,
            "address": view.address,
            "engine's block_bytes": self._block_bytes,
        }
        bad = [f"{name} {value}" for name, value in found.items() if value % file.alignment]
        if bad:
            raise ConfigError(
                f"{what}, length {view.num_bytes} bytes: the file is open for direct transfers, "
                f"expected multiples of its alignment of {file.alignment} bytes, found "
                f"{', '.join(bad)}; align them or open the file with `direct=False`"
            )

    def _open_backend_or_raise(self) -> Backend:
        if self._state is not _State.OPEN or self._backend is None:
            raise StoreError(
                f"cannot start a transfer: expected an open I/O engine, found it "
                f"{self._state.value}; call `open()` first"
            )
        return self._backend

    def _open_backend(self) -> Backend:
        if self._requested != "auto":
            return self._opened(self._requested)
        refused: list[str] = []
        for name in BACKENDS[:-1]:
            try:
                backend = self._opened(name)
            except StorageError as error:
                refused.append(str(error))
            else:
                break
        else:
            backend = self._opened(BACKENDS[-1])
        _log_choice(backend.name, refused)
        return backend

    def _opened(self, name: str) -> Backend:
        backend: Backend
        if name == "aiofiles":
            backend = AiofilesBackend(queue_depth=self._queue_depth, block_bytes=self._block_bytes)
        else:
            backend = NativeBackend(
                name, queue_depth=self._queue_depth, block_bytes=self._block_bytes
            )
        backend.open()
        return backend

    def _move_to(self, state: "_State") -> None:
        assert state in _TRANSITIONS[self._state], (self._state, state)
        self._state = state


class _State(Enum):
    """What may be called. The value is the word for messages."""

    CLOSED = "closed"  # nothing is in flight, the backend holds nothing
    OPEN = "open"  # transfers are accepted
    CLOSING = "closing"  # none is accepted any more; some are in flight


_TRANSITIONS = {
    _State.CLOSED: {_State.OPEN},
    _State.OPEN: {_State.CLOSING},
    _State.CLOSING: {_State.CLOSING, _State.CLOSED},  # an interrupted close is taken up again
}

_logged_lock = threading.Lock()
_logged: set[str] = set()


def _log_choice(name: str, refused: Sequence[str]) -> None:
    with _logged_lock:
        if name in _logged:
            return
        _logged.add(name)
    if refused:
        _LOGGER.warning("I/O uses the backend `%s`, since: %s", name, "; ".join(refused))
    else:
        _LOGGER.info("I/O uses the backend `%s`, the first choice", name)


def _check_range(name: str, value: int, largest: int) -> None:
    if not 1 <= value <= largest:
        raise ConfigError(
            f"cannot make an I/O engine with `{name}` {value}: expected 1 to {largest}; change it"
        )


def _system_error(what: str, expected: str, error: OSError) -> StorageError:
    code = error.errno or errno.EIO
    return StorageError(
        f"cannot {what}: expected {expected}, found {errno.errorcode.get(code, code)} "
        f"({os.strerror(code)}); look at the kernel's log and the state of the file system",
        errno=code,
    )
