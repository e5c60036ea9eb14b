"""The backend without compiled code: `aiofiles` on an event loop in a thread of its own."""

import asyncio
import errno
import itertools
import os
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from aiofiles.os import wrap

from offload.errors import StorageError
from offload.storage.backend import BackendStats, Request
from offload.storage.buffer import BufferView
from offload.storage.counters import Counters
from offload.storage.fair_queue import FairQueue
from offload.storage.transfer import Completion, Operation, Transfer

_RETRIED = (errno.EINTR, errno.EAGAIN)
_RETRY_S = 0.001
_MAX_RETRIES = 5000
"""EINTR and EAGAIN are retried so often in a row, with that pause: about five seconds."""

_Call = Callable[..., Awaitable[int]]


class AiofilesBackend:
    """Reference and fallback: `os.preadv` and `os.pwritev` through `aiofiles`' executor calls.

    Positional calls, since transfers of one file run at the same time and share its offset.

    Concurrency: Everything but `submit`, `stats`, `open` and `close` runs on the loop's thread.
    """

    def __init__(self, *, queue_depth: int, block_bytes: int) -> None:
        self.name = "aiofiles"
        self._queue_depth = queue_depth
        self._block_bytes = block_bytes
        self._counters = Counters()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._queue: FairQueue[_Entry]
        self._closing: asyncio.Event
        self._calls: dict[Operation, _Call] = {
            Operation.READ: wrap(os.preadv),
            Operation.WRITE: wrap(os.pwritev),
        }

    def open(self) -> None:
        """Starts the loop's thread and all threads for calls."""
        self._counters = Counters()
        outcome: queue.SimpleQueue[StorageError | None] = queue.SimpleQueue()
        # A daemon, or a program that forgets to close would not end.
        self._thread = threading.Thread(
            target=self._run, args=(outcome,), name="offload-aiofiles", daemon=True
        )
        self._thread.start()
        error = outcome.get()
        if error is not None:
            self._thread.join()
            self._thread = None
            raise error

    def submit(self, transfer: Transfer) -> Request:
        """Starts `transfer`."""
        request = _AiofilesRequest(transfer, begun_s=self._counters.begin(transfer.operation))
        self._loop.call_soon_threadsafe(self._enqueue, request)
        return request

    def cancel(self) -> None:
        """Ends what has not begun."""
        self._loop.call_soon_threadsafe(self._cancel_waiting)

    def register(self, view: BufferView) -> bool:  # noqa: ARG002
        """Has no effect here."""
        return False

    def unregister(self, view: BufferView) -> None:
        """Has no effect here."""

    def stats(self) -> BackendStats:
        """Returns the counters."""
        return self._counters.stats()

    def close(self) -> None:
        """Carries out what was submitted, then ends the thread."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
            self._thread = None

    def _run(self, outcome: "queue.SimpleQueue[StorageError | None]") -> None:
        # All on this thread: an interrupt reaches the main thread only, and there it could leave
        # a lock of the pool taken.
        pool = ThreadPoolExecutor(self._queue_depth, thread_name_prefix="offload-aiofiles")
        try:
            _start_threads(pool, self._queue_depth)
        except StorageError as error:
            outcome.put(error)
            return
        asyncio.run(self._serve(pool, outcome))

    async def _serve(
        self, pool: ThreadPoolExecutor, outcome: "queue.SimpleQueue[StorageError | None]"
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = FairQueue(self._queue_depth)
        self._closing = asyncio.Event()
        self._sequence = itertools.count()
        with pool:
            workers = [self._loop.create_task(self._work(pool)) for _ in range(self._queue_depth)]
            outcome.put(None)
            await self._closing.wait()
            await self._queue.join()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    def _enqueue(self, request: "_AiofilesRequest") -> None:
        if request.transfer.buffer.num_bytes == 0:
            self._finish(request)
            return
        priority = int(request.transfer.priority)
        self._queue.put_nowait(_Entry(priority, next(self._sequence), request))

    def _cancel_waiting(self) -> None:
        while not self._queue.empty():
            request = self._queue.get_nowait().request
            self._queue.ended(request.transfer.operation)
            if request.has_more():
                request.cancel()
                if request.is_complete():
                    self._finish(request)
            self._queue.task_done()

    async def _work(self, pool: ThreadPoolExecutor) -> None:
        while True:
            # Not kept in a variable: an idle worker would keep the memory of its last transfer.
            self._queue.ended(await self._work_on(await self._queue.get(), pool))
            self._queue.task_done()

    async def _work_on(self, entry: "_Entry", pool: ThreadPoolExecutor) -> Operation:
        """Moves the next piece of what was taken; returns its direction."""
        request = entry.request
        if not request.has_more():  # failed since it was queued
            return entry.operation
        start = request.cut_bytes
        num_bytes = request.cut(self._block_bytes)
        if request.has_more():
            self._queue.put_nowait(entry)
        completion = await self._move(request.transfer, start, num_bytes, pool)
        self._counters.move(request.transfer.operation, completion.done_bytes)
        request.finish_piece(start, completion)
        if request.is_complete():
            self._finish(request)
        return entry.operation

    async def _move(
        self, transfer: Transfer, start: int, num_bytes: int, pool: ThreadPoolExecutor
    ) -> Completion:
        """Moves one piece; the only place that judges what the kernel returned."""
        call, file = self._calls[transfer.operation], transfer.file
        memory = transfer.buffer.memory()[start : start + num_bytes]
        done_bytes = num_retries = 0
        while done_bytes < num_bytes:
            # A short transfer with O_DIRECT may end between two multiples of the alignment.
            resume = done_bytes - done_bytes % file.alignment
            offset = transfer.offset + start + resume
            try:
                count = await call(file.fd, [memory[resume:]], offset, executor=pool)
            except OSError as error:
                if error.errno in _RETRIED and num_retries < _MAX_RETRIES:
                    num_retries += 1
                    await asyncio.sleep(_RETRY_S)
                    continue
                return Completion(
                    error=error.errno or errno.EIO, done_bytes=done_bytes, cause=error
                )
            except RuntimeError as error:  # the interpreter is ending: no more executor calls
                return Completion(error=errno.EIO, done_bytes=done_bytes, cause=error)
            if resume + count <= done_bytes:
                code = errno.ENODATA if transfer.operation is Operation.READ else errno.EIO
                return Completion(error=code, done_bytes=done_bytes)
            done_bytes, num_retries = resume + count, 0
        return Completion(error=0, done_bytes=done_bytes)

    def _finish(self, request: "_AiofilesRequest") -> None:
        self._counters.end(request.transfer.operation, request.begun_s)
        request.finish()


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    priority: int
    sequence: int
    request: "_AiofilesRequest" = field(compare=False)

    @property
    def operation(self) -> Operation:
        return self.request.transfer.operation


class _AiofilesRequest:
    """What is known of a transfer; changed by the loop's thread only, until it is done."""

    def __init__(self, transfer: Transfer, *, begun_s: float) -> None:
        self.transfer = transfer
        self.begun_s = begun_s
        self.cut_bytes = 0
        self._num_pieces = 0  # cut and not finished
        self._completion = Completion(error=0, done_bytes=transfer.buffer.num_bytes)
        self._done = threading.Event()
        self._lock = threading.Lock()  # of the next, and held from done until it was written
        self._notify_fd: int | None = None

    def cut(self, block_bytes: int) -> int:
        num_bytes = min(block_bytes, self.transfer.buffer.num_bytes - self.cut_bytes)
        self.cut_bytes += num_bytes
        self._num_pieces += 1
        return num_bytes

    def has_more(self) -> bool:
        return self.cut_bytes < self.transfer.buffer.num_bytes

    def finish_piece(self, start: int, piece: Completion) -> None:
        self._num_pieces -= 1
        reached = start + piece.done_bytes
        if piece.error:
            self.cut_bytes = self.transfer.buffer.num_bytes  # nothing more is started
            if reached < self._completion.done_bytes:
                self._completion = replace(piece, done_bytes=reached)

    def cancel(self) -> None:
        reached, self.cut_bytes = self.cut_bytes, self.transfer.buffer.num_bytes
        self._completion = Completion(error=errno.ECANCELED, done_bytes=reached)

    def is_complete(self) -> bool:
        return not self._num_pieces and not self.has_more()

    def finish(self) -> None:
        with self._lock:
            self._done.set()
            if self._notify_fd is not None:
                os.eventfd_write(self._notify_fd, 1)

    def notify(self, event_fd: int | None) -> bool:
        with self._lock:
            if event_fd is not None and self._notify_fd is not None:
                return False
            self._notify_fd = event_fd
            if event_fd is not None and self._done.is_set():
                os.eventfd_write(event_fd, 1)
            return True

    def wait(self, timeout_s: float | None) -> bool:
        return self._done.wait(timeout_s)

    def is_done(self) -> bool:
        return self._done.is_set()

    def completion(self) -> Completion:
        return self._completion


def _start_threads(pool: ThreadPoolExecutor, num_threads: int) -> None:
    """Makes the pool start all its threads, which it else does at its own time."""
    barrier = threading.Barrier(num_threads)
    try:
        for started in [pool.submit(barrier.wait) for _ in range(num_threads)]:
            started.result()
    except RuntimeError as error:
        barrier.abort()
        pool.shutdown()
        raise StorageError(
            f"cannot open I/O backend `aiofiles`: expected {num_threads} threads, found no more "
            "allowed; raise the limit on threads or lower the engine's `queue_depth`",
            errno=errno.EAGAIN,
        ) from error
