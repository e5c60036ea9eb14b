"""An engine that moves no more than a given number of bytes each second."""

import os
import threading
import time
from collections import deque
from types import TracebackType
from typing import Self

from offload.errors import ConfigError, StorageError, StoreError
from offload.storage.buffer import Buffer, view_buffer
from offload.storage.engine import Engine, EngineStats, PathStats, Priority, Ticket
from offload.storage.file import StorageFile
from offload.storage.transfer import Operation

_PATIENCE_S = 0.02
"""Transfers are held back until what was started before is paid for, less this much: so the device
has something to do in the meantime. After a pause the limit is exceeded for so long."""


class PacedTicket:
    """A transfer that starts when its turn comes; otherwise as `engine.Ticket`."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._lock = threading.Lock()  # of starting and its report, and of the next
        self._event_fd: int | None = None
        self._ticket: Ticket | None = None
        self._error: StorageError | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the transfer is over; raises as `engine.Ticket.wait`."""
        begun_s = time.monotonic()
        if not self._started.wait(timeout_s):
            raise TimeoutError(
                f"waiting for a transfer: expected it to be over within {timeout_s} s, found it "
                "held back by the path's rate limit; wait again"
            )
        if self._error is not None:
            raise self._error
        assert self._ticket is not None
        passed_s = time.monotonic() - begun_s
        self._ticket.wait(None if timeout_s is None else max(0.0, timeout_s - passed_s))

    def done(self) -> bool:
        """Tells whether `wait` would return or raise at once."""
        with self._lock:  # who was told of the end asks while that is still being reported
            if not self._started.is_set():
                return False
            return self._ticket is None or self._ticket.done()

    def notify(self, event_fd: int | None) -> bool:
        """Has 1 added to an eventfd when the transfer is over; as `engine.Ticket.notify`."""
        with self._lock:
            if self._ticket is not None:
                return self._ticket.notify(event_fd)
            if self._error is not None:
                if event_fd is not None:
                    os.eventfd_write(event_fd, 1)
                return True
            if event_fd is not None and self._event_fd is not None:
                return False
            self._event_fd = event_fd
            return True

    def start(self, ticket: Ticket) -> None:
        with self._lock:
            self._ticket = ticket
            if self._event_fd is not None:
                ticket.notify(self._event_fd)
            self._started.set()

    def fail(self, error: StorageError) -> None:
        with self._lock:
            self._error = error
            if self._event_fd is not None:
                os.eventfd_write(self._event_fd, 1)
            self._started.set()


class PacedEngine:
    """Passes transfers on to an engine, at most `bytes_per_s` of both directions together.

    Waiting transfers start by priority, within one in the order of the calls. Over any time the
    limit is exceeded by one transfer, and what it gives in `_PATIENCE_S`, at most.

    Ownership: Memory belongs to it from the call until the ticket is done.
    Concurrency: Any thread. One thread of its own starts the transfers; `close` carries out what
        is waiting.
    """

    def __init__(self, engine: Engine, *, bytes_per_s: int) -> None:
        if bytes_per_s <= 0:
            raise ConfigError(
                f"cannot limit a path to {bytes_per_s} bytes/s: expected more than 0; change it"
            )
        self._engine = engine
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()  # over what follows
        self._waiting: dict[Priority, deque[_Held]] = {p: deque() for p in Priority}
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._paid_s = 0.0  # when all that was started is paid for

    def open(self) -> None:
        """Opens the engine and starts the thread; again does nothing."""
        if self._thread is not None:
            return
        self._engine.open()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="offload-paced", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Starts what is waiting, at the path's rate, and closes the engine; again does nothing."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self._engine.close()

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
        self, file: StorageFile, offset: int, into: Buffer, *, priority: Priority = Priority.NEEDED
    ) -> PacedTicket:
        """Fills all of `into`, when its turn comes; as `Engine.read`."""
        return self._hold(Operation.READ, file, offset, into, priority)

    def write(
        self,
        file: StorageFile,
        offset: int,
        source: Buffer,
        *,
        priority: Priority = Priority.WRITE_BACK,
    ) -> PacedTicket:
        """Writes all of `source`, when its turn comes; as `Engine.write`."""
        return self._hold(Operation.WRITE, file, offset, source, priority)

    def flush(self, file: StorageFile) -> None:
        """Makes durable what is done; as `Engine.flush`."""
        self._engine.flush(file)

    def register(self, memory: Buffer) -> bool:
        """Announces memory to the kernel; as `Engine.register`."""
        return self._engine.register(memory)

    def unregister(self, memory: Buffer) -> None:
        """Takes `register` back; as `Engine.unregister`."""
        self._engine.unregister(memory)

    def stats(self) -> EngineStats:
        """Returns the counters of the engine."""
        return self._engine.stats()

    def path_stats(self) -> list[PathStats]:
        """Returns the counters of the engine's paths; as `Engine.path_stats`."""
        return self._engine.path_stats()

    def _hold(
        self,
        operation: Operation,
        file: StorageFile,
        offset: int,
        buffer: Buffer,
        priority: Priority,
    ) -> PacedTicket:
        num_bytes = view_buffer(buffer, writable=operation is Operation.READ).num_bytes
        held = _Held(operation, file, offset, buffer, priority, num_bytes)
        with self._changed:
            if self._thread is None or self._is_closing:
                raise StoreError(
                    "cannot start a transfer: expected an open I/O engine, found it closed; call "
                    "`open()` first"
                )
            self._waiting[priority].append(held)
            self._changed.notify()
        return held.ticket

    def _run(self) -> None:
        while True:
            held = self._next()
            if held is None:
                return
            ticket, begun, failure = held.ticket, None, None
            try:
                begun = self._start(held)
            except StorageError as error:
                failure = error.with_traceback(None)  # its frames have the memory
            except (ConfigError, StoreError) as error:
                failure = StorageError(str(error))
            # Who waits may use the memory for something else: nothing of it is kept here.
            del held
            if begun is not None:
                ticket.start(begun)
            elif failure is not None:
                ticket.fail(failure)
            del ticket, begun, failure

    def _next(self) -> "_Held | None":
        """Waits for the next transfer whose turn has come; None at the end."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                held_back_s = self._paid_s - now_s - _PATIENCE_S
                queue = next((q for q in self._waiting.values() if q), None)
                if queue is None:
                    if self._is_closing:
                        return None
                    self._changed.wait()
                elif held_back_s > 0:
                    self._changed.wait(held_back_s)
                else:
                    held = queue.popleft()
                    cost_s = held.num_bytes / self._bytes_per_s
                    self._paid_s = max(self._paid_s, now_s) + cost_s
                    return held

    def _start(self, held: "_Held") -> Ticket:
        start = self._engine.read if held.operation is Operation.READ else self._engine.write
        return start(held.file, held.offset, held.buffer, priority=held.priority)


class _Held:
    """A transfer that waits for its turn."""

    __slots__ = ("buffer", "file", "num_bytes", "offset", "operation", "priority", "ticket")

    def __init__(
        self,
        operation: Operation,
        file: StorageFile,
        offset: int,
        buffer: Buffer,
        priority: Priority,
        num_bytes: int,
    ) -> None:
        self.operation = operation
        self.file = file
        self.offset = offset
        self.buffer = buffer
        self.priority = priority
        self.num_bytes = num_bytes
        self.ticket = PacedTicket()
