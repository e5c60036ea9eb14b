"""The I/O engine: starts reads and writes of files and gives a ticket for each."""

import atexit
import errno
import os
import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
from enum import Enum
from types import TracebackType
from typing import Self

from offload.errors import ConfigError, OffloadError, StorageError, StoreError
from offload.sizes import MIB
from offload.storage.backend import EngineStats, PathStats, Request
from offload.storage.buffer import Buffer, BufferView, view_buffer
from offload.storage.faults import FaultPlan
from offload.storage.file import StorageFile
from offload.storage.in_flight import InFlight
from offload.storage.loop_waiter import wait_in_loop
from offload.storage.path_queues import PathQueues
from offload.storage.paths import BACKENDS, PathSettings
from offload.storage.transfer import Completion, Operation, Priority, Transfer, transfer_error

__all__ = ["BACKENDS", "Engine", "EngineStats", "PathSettings", "PathStats", "Priority", "Ticket"]

_MAX_OFFSET = (1 << 63) - 1


class Ticket:
    """One transfer in flight.

    Ownership: The buffer belongs to the engine until the transfer is over, and is kept alive until
        then, also if the ticket is dropped. Neither a timeout nor an interrupt of `wait` ends it.
    Concurrency: Any thread may wait, any number of times; each wait gives the same outcome, and
        waits for no other transfer.
    """

    __slots__ = ("_completion", "_reports", "_request", "_transfer")

    def __init__(self, transfer: Transfer, request: Request) -> None:
        self._transfer = transfer
        self._request: Request | None = request
        self._completion: Completion | None = None
        self._reports = False

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

    def notify(self, event_fd: int | None) -> bool:
        """Has 1 added to an eventfd when the transfer is over, or now if it is.

        Only one at a time: False if there is another. None takes it back; then the descriptor may
        be closed.
        """
        request = self._request
        if request is not None:
            self._reports = event_fd is not None
            return request.notify(event_fd)
        if event_fd is not None:
            os.eventfd_write(event_fd, 1)
        return True

    def __await__(self) -> Generator[object, None, None]:
        """Lets the event loop go on until the transfer is over; raises as `wait`.

        Cancelling the task ends the waiting, not the transfer.
        """
        request = self._request
        if request is not None:
            yield from wait_in_loop(request).__await__()
        self.wait()

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
        if self._reports:
            request.notify(None)  # it may be done and about to report
        self._completion = request.completion()
        nothing = BufferView(address=0, num_bytes=self._transfer.buffer.num_bytes, owner=None)
        self._transfer = replace(self._transfer, buffer=nothing)
        self._request = None  # last: without it the ticket counts as settled


class Engine:
    """Reads and writes files without blocking the caller.

    Each path has a queue with threads of its own. Transfers are cut into pieces of `block_bytes`,
    of which at most `queue_depth` per path are in flight; a more urgent priority starts first. No
    bytes are copied.

    Concurrency: Any thread. `close` waits for what is in flight. Not usable in a forked child.
    """

    def __init__(
        self,
        backend: str = "auto",
        *,
        queue_depth: int = 8,
        block_bytes: int = MIB,
        faults: FaultPlan | None = None,
        paths: Sequence[PathSettings] = (),
    ) -> None:
        """Stores the choice.

        Args:
            backend: Of the files that lie on none of `paths`, as the next three.
            queue_depth: See `PathSettings`.
            block_bytes: See `PathSettings`.
            faults: See `PathSettings`.
            paths: The paths that have a queue of their own.
        """
        default = PathSettings(
            root=None,
            backend=backend,
            queue_depth=queue_depth,
            block_bytes=block_bytes,
            faults=faults,
        )
        for settings in (default, *paths):
            settings.check()
        self._requested = paths[0].backend if paths else backend
        self._queues = PathQueues(default, paths)
        self._lock = threading.Lock()  # of the state and of submission
        self._closing = threading.Lock()  # one close at a time
        self._state = _State.CLOSED
        self._in_flight = InFlight()
        self._registered: dict[int, BufferView] = {}  # by address; kept alive until the end

    @property
    def name(self) -> str:
        """The backend in use, of the first path; before `open` the one that was asked for."""
        return self._queues.name or self._requested

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
                self._queues.open()
            except BaseException:
                self._state = _State.CLOSED
                raise
        # At exit the interpreter frees memory that a transfer may still use.
        atexit.register(self.close)

    def close(self, *, cancel: bool = False) -> None:
        """Waits for what was started and closes the backends; again does nothing.

        Args:
            cancel: Begins nothing more: what is not in flight ends with ECANCELED.
        """
        with self._closing:
            with self._lock:
                if self._state is _State.CLOSED:
                    return
                self._move_to(_State.CLOSING)
            if cancel:
                self._queues.cancel()
            self._in_flight.drain()
            self._queues.close()
            self._registered.clear()
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
        # After an error or an interrupt nobody waits for what has not begun.
        self.close(cancel=kind is not None)

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
            faults = self._queues.find(file.path).flush_faults if self._is_open() else None
            if faults is not None:
                faults.on_flush()
            os.fdatasync(file.fd)
            if not file.is_direct:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _system_error(f"flush file `{file.path}`", "durable bytes", error) from error

    def register(self, memory: Buffer) -> bool:
        """Announces memory that many transfers will use, until `unregister` or `close`.

        The kernel then holds its pages once, and not for each transfer: about half the CPU time
        of direct transfers through `io_uring`. Nothing else changes. The pages count against
        RLIMIT_MEMLOCK. Files are announced by themselves, from their first transfer until they
        are closed.

        Returns:
            False if it has no effect: no path uses `io_uring`, or the kernel refuses.

        Ownership: `memory` is kept alive until then.
        """
        view = view_buffer(memory, writable=False)
        with self._lock:
            self._require_open("register memory")
            is_used = self._queues.register(view)
            if is_used:
                self._registered[view.address] = view
        return is_used

    def unregister(self, memory: Buffer) -> None:
        """Takes `register` back; no transfer may be using the memory. Again does nothing."""
        view = view_buffer(memory, writable=False)
        with self._lock:
            if self._registered.pop(view.address, None) is not None:
                self._queues.unregister(view)

    def stats(self) -> EngineStats:
        """Returns the counters since `open`, also after `close`."""
        return self._queues.stats().engine_stats()

    def path_stats(self) -> list[PathStats]:
        """Returns the counters of each path that was used, in the order of the paths."""
        return [queue.stats() for queue in self._queues]

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
        ticket: Ticket | None = None
        try:
            with self._lock:
                self._require_open("start a transfer")
                queue = self._queues.find(file.path)
                _check_transfer(transfer, block_bytes=queue.settings.block_bytes)
                ticket = Ticket(transfer, queue.backend.submit(transfer))
                self._in_flight.add(ticket)
            file.in_flight.add(ticket)
        except OffloadError:
            raise
        except OSError as error:
            what = f"{operation.value} file `{file.path}` at offset {offset}"
            raise _system_error(what, "the transfer to start", error) from error
        except BaseException:
            if ticket is not None:  # interrupted: the transfer goes on
                self._in_flight.add(ticket)
                file.in_flight.add(ticket)
            raise
        return ticket

    def _is_open(self) -> bool:
        return self._state is _State.OPEN

    def _require_open(self, what: str) -> None:
        if not self._is_open():
            raise StoreError(
                f"cannot {what}: expected an open I/O engine, found it {self._state.value}; "
                "call `open()` first"
            )

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


def _check_transfer(transfer: Transfer, *, block_bytes: int) -> None:
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
        "engine's block_bytes": block_bytes,
    }
    bad = [f"{name} {value}" for name, value in found.items() if value % file.alignment]
    if bad:
        raise ConfigError(
            f"{what}, length {view.num_bytes} bytes: the file is open for direct transfers, "
            f"expected multiples of its alignment of {file.alignment} bytes, found "
            f"{', '.join(bad)}; align them or open the file with `direct=False`"
        )


def _system_error(what: str, expected: str, error: OSError) -> StorageError:
    code = error.errno or errno.EIO
    return StorageError(
        f"cannot {what}: expected {expected}, found {errno.errorcode.get(code, code)} "
        f"({os.strerror(code)}); look at the kernel's log and the state of the file system",
        errno=code,
    )
