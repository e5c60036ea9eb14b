"""The backends of the C library: `io_uring`, `libaio` and `threads`."""

import errno
import logging
import os
import threading
import time

from offload._native import aio
from offload.errors import StorageError
from offload.sizes import format_size
from offload.storage.backend import BackendStats, Request
from offload.storage.buffer import BufferView
from offload.storage.faults import FaultPlan
from offload.storage.file import StorageFile
from offload.storage.transfer import Completion, Operation, Transfer

_LOGGER = logging.getLogger("offload.storage")
_NATIVE_OPERATION = {Operation.READ: aio.READ, Operation.WRITE: aio.WRITE}
_DIRECT_ONLY = ("io_uring", "libaio")
_NS_PER_S = 1_000_000_000
_SIGNAL_CHECK_S = 0.2
"""Python runs signal handlers between calls into C only: Ctrl-C is seen after this at most."""

_ADVICE = {
    errno.EPERM: "the kernel's settings or a container forbid it: allow the system call "
    "(/proc/sys/kernel/io_uring_disabled, the seccomp profile), or use another backend",
    errno.ENOSYS: "this kernel or a container does not have it: use another backend",
    errno.EOPNOTSUPP: "the extension was built without liburing: install its header "
    "(`liburing-dev`) and reinstall `offload`, or use another backend",
    errno.ENOMEM: "raise RLIMIT_MEMLOCK or free memory, or use another backend",
}
_DEFAULT_ADVICE = (
    "raise /proc/sys/fs/aio-max-nr and the limits on threads and open files, or use another backend"
)


class NativeBackend:
    """One queue of the C library; if it is not of `threads`, a second one for buffered files.

    The kernel carries out a buffered transfer inside `io_submit`, where it would hold up all
    others, and gives those of `io_uring` to threads whose number it chooses.
    """

    def __init__(
        self, name: str, *, queue_depth: int, block_bytes: int, faults: FaultPlan | None = None
    ) -> None:
        self.name = name
        self._faults = faults
        self._queue_depth = queue_depth
        self._block_bytes = block_bytes
        self._lock = threading.Lock()  # of the two below
        self._queues: dict[str, aio.Queue] = {}
        self._closed_stats = BackendStats()

    def open(self) -> None:
        """Opens the queue."""
        reason = aio.unavailable_because()
        if reason is not None:
            raise StorageError(
                f"cannot open I/O backend `{self.name}`: expected the compiled extension, found "
                f"that {reason}; build it with a C compiler, or use the backend `aiofiles`"
            )
        self._closed_stats = BackendStats()
        self._queue(self.name)

    def submit(self, transfer: Transfer) -> Request:
        """Starts `transfer`."""
        file = transfer.file
        queue = self._queue(self.name if file.is_direct else self._buffered_name())
        if self.name == "io_uring" and file.is_direct and self not in file.before_close:
            self._register_file(queue, file)
        request = queue.submit(
            _NATIVE_OPERATION[transfer.operation],
            fd=file.fd,
            priority=int(transfer.priority),
            alignment=file.alignment,
            address=transfer.buffer.address,
            num_bytes=transfer.buffer.num_bytes,
            offset=transfer.offset,
        )
        return _NativeRequest(request)

    def cancel(self) -> None:
        """Ends what has not begun."""
        with self._lock:
            for queue in self._queues.values():
                queue.cancel()

    def register(self, view: BufferView) -> bool:
        """Announces memory to the kernel, for direct transfers through `io_uring`."""
        if self.name != "io_uring":
            return False
        try:
            self._queue(self.name).register(address=view.address, num_bytes=view.num_bytes)
        except OSError as error:
            _tell_unregistered(view.num_bytes, error)
            return False
        return True

    def unregister(self, view: BufferView) -> None:
        """Takes `register` back."""
        if self.name == "io_uring":
            self._queue(self.name).unregister(address=view.address)

    def _register_file(self, queue: aio.Queue, file: StorageFile) -> None:
        """Tells the kernel of a file, until that is closed; once for each file."""
        try:
            queue.register_file(file.fd)
        except OSError as error:
            _LOGGER.info("file `%s` is not registered: %s", file.path, error)
        file.before_close[self] = lambda: self._unregister_file(file.fd)

    def _unregister_file(self, fd: int) -> None:
        with self._lock:
            queue = self._queues.get(self.name)
            if queue is not None:
                queue.unregister_file(fd)

    def stats(self) -> BackendStats:
        """Returns the counters of all queues."""
        with self._lock:
            return sum(map(_stats_of, self._queues.values()), self._closed_stats)

    def close(self) -> None:
        """Carries out what was submitted, then stops the threads."""
        with self._lock:
            self._closed_stats = sum(map(_stats_of, self._queues.values()), self._closed_stats)
            for queue in self._queues.values():
                queue.close()
            self._queues.clear()

    def _buffered_name(self) -> str:
        return "threads" if self.name in _DIRECT_ONLY else self.name

    def _queue(self, name: str) -> aio.Queue:
        with self._lock:
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = self._open_queue(name)
            return queue

    def _open_queue(self, name: str) -> aio.Queue:
        try:
            return aio.Queue(
                name,
                queue_depth=self._queue_depth,
                block_bytes=self._block_bytes,
                faults=None if self._faults is None else _native_faults(self._faults),
            )
        except OSError as error:
            code = error.errno or errno.EIO
            raise StorageError(
                f"cannot open I/O backend `{name}`: expected {self._queue_depth} requests in "
                f"flight, found {errno.errorcode.get(code, code)} ({os.strerror(code)}); "
                f"{_ADVICE.get(code, _DEFAULT_ADVICE)}",
                errno=code,
            ) from error


class _NativeRequest:
    __slots__ = ("_request",)

    def __init__(self, request: aio.Request) -> None:
        self._request = request

    def wait(self, timeout_s: float | None) -> bool:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _SIGNAL_CHECK_S
            if deadline_s is not None:
                left_s = min(left_s, max(0.0, deadline_s - time.monotonic()))
            if self._request.wait(int(left_s * _NS_PER_S)):
                return True
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return False

    def is_done(self) -> bool:
        return self._request.is_done()

    def notify(self, event_fd: int | None) -> bool:
        return self._request.notify(-1 if event_fd is None else event_fd)

    def completion(self) -> Completion:
        result = self._request.result()
        return Completion(error=result.error, done_bytes=result.done_bytes)


_warned_unregistered = threading.Event()


def _tell_unregistered(num_bytes: int, error: OSError) -> None:
    """A warning, once, of what the user can change."""
    is_warned = _warned_unregistered.is_set() or error.errno != errno.ENOMEM
    if not is_warned:
        _warned_unregistered.set()
    _LOGGER.log(
        logging.INFO if is_warned else logging.WARNING,
        "memory of %s is not registered with io_uring, which looks its pages up at each transfer: "
        "%s; raise RLIMIT_MEMLOCK (`ulimit -l`) to spare that CPU time",
        format_size(num_bytes),
        error,
    )


def _stats_of(queue: aio.Queue) -> BackendStats:
    stats = queue.stats()
    return BackendStats(
        read_bytes=stats.read_bytes,
        write_bytes=stats.write_bytes,
        read_requests=stats.read_requests,
        write_requests=stats.write_requests,
        in_flight_s=stats.in_flight_ns / _NS_PER_S,
        read_in_flight_s=stats.read_in_flight_ns / _NS_PER_S,
        write_in_flight_s=stats.write_in_flight_ns / _NS_PER_S,
        both_bytes=stats.both_bytes,
        read_s=stats.read_ns / _NS_PER_S,
        write_s=stats.write_ns / _NS_PER_S,
        read_latencies=stats.read_latencies,
        write_latencies=stats.write_latencies,
        registered_memory_pieces=stats.registered_memory_pieces,
        registered_file_pieces=stats.registered_file_pieces,
    )


def _native_faults(plan: FaultPlan) -> aio.Faults:
    rules = tuple(
        aio.FaultRule(
            reads=fault.operation in ("read", "transfer"),
            writes=fault.operation in ("write", "transfer"),
            start=fault.start,
            end=fault.end,
            per_million=round(fault.probability * 1_000_000),
            skip=fault.skip,
            count=fault.count,
            error=fault.error,
            max_bytes=fault.max_bytes or 0,
            delay_ns=int(fault.delay_s * _NS_PER_S),
        )
        for fault in plan.transfer_faults()
    )
    return aio.Faults(
        rules=rules,
        seed=plan.seed,
        read_bytes_per_s=plan.read_bytes_per_s or 0,
        write_bytes_per_s=plan.write_bytes_per_s or 0,
        burst_bytes=plan.burst_bytes,
        is_half_duplex=plan.is_half_duplex,
    )
