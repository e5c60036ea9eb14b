"""The C library `csrc/aio` seen from Python: queues and requests, nothing decided here.

Addresses are plain integers: the caller keeps the memory alive until the request is done.
The GIL is released in every call.
"""

import errno
import functools
import importlib
import os
from dataclasses import dataclass
from typing import Any

READ = 0
WRITE = 1
FAULT_READS = 1
FAULT_WRITES = 2
MAX_QUEUE_DEPTH = 1024
MAX_BLOCK_BYTES = 1 << 30
_NO_LIMIT = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """Counters of one queue since it was opened."""

    read_bytes: int
    write_bytes: int
    read_requests: int
    write_requests: int
    in_flight_ns: int
    read_in_flight_ns: int
    write_in_flight_ns: int
    both_bytes: int
    read_ns: int
    write_ns: int
    read_latencies: tuple[int, ...]
    write_latencies: tuple[int, ...]
    registered_memory_pieces: int
    registered_file_pieces: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueResult:
    """The outcome of a request: `error` is 0 or a positive errno."""

    error: int
    done_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """As `struct ofl_aio_fault`; `end` and `count` may be None: no limit."""

    reads: bool
    writes: bool
    start: int
    end: int | None
    per_million: int
    skip: int
    count: int | None
    error: int
    max_bytes: int
    delay_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """As `struct ofl_aio_faults`."""

    rules: tuple[FaultRule, ...]
    seed: int
    read_bytes_per_s: int
    write_bytes_per_s: int
    burst_bytes: int
    is_half_duplex: bool


def unavailable_because() -> str | None:
    """Returns why the extension cannot be used, or None if it can."""
    if os.environ.get("OFFLOAD_PURE") == "1":
        return "OFFLOAD_PURE=1 is set"
    try:
        _extension()
    except ImportError as error:
        return f"the extension `offload._native._aio` is missing ({error})"
    return None


def available() -> bool:
    """Tells whether the extension can be used."""
    return unavailable_because() is None


class Request:
    """One submitted transfer; any thread may wait for it."""

    __slots__ = ("_lib", "_request")

    def __init__(self, lib: Any, request: Any) -> None:
        self._lib = lib
        self._request = request

    def wait(self, timeout_ns: int) -> bool:
        """Waits until the request is done; returns False if `timeout_ns` passed before."""
        return bool(self._lib.ofl_aio_wait(self._request, timeout_ns) == 0)

    def is_done(self) -> bool:
        """Tells whether the request is done, without waiting."""
        return bool(self._lib.ofl_aio_is_done(self._request))

    def notify(self, event_fd: int) -> bool:
        """Has 1 added to `event_fd` when done; False if there is another. Negative: takes it back.

        Afterwards the descriptor may be closed.
        """
        return bool(self._lib.ofl_aio_notify(self._request, event_fd) == 0)

    def result(self) -> QueueResult:
        """Returns the outcome of a request that is done."""
        result = _extension().ffi.new("struct ofl_aio_result *")
        _raise_if(self._lib.ofl_aio_result(self._request, result), "ofl_aio_result")
        return QueueResult(error=-result.error, done_bytes=result.done_bytes)


class Queue:
    """An open queue. `close()` ends it; no other call may run at that time or later."""

    def __init__(
        self, backend: str, *, queue_depth: int, block_bytes: int, faults: Faults | None = None
    ) -> None:
        """Opens the queue.

        Raises:
            OSError: The kernel refused, with its errno.
        """
        ffi, lib = _extension().ffi, _extension().lib
        name = ffi.new("char[]", backend.encode())
        options = ffi.new("struct ofl_aio_options *")
        options.backend = name
        options.queue_depth = queue_depth
        options.block_bytes = block_bytes
        queue = ffi.new("struct ofl_aio **")
        # The library copies these; they have to live until it has.
        rules = None if faults is None else _new_rules(ffi, faults.rules)
        native_faults = None if faults is None else _new_faults(ffi, faults, rules)
        if native_faults is not None:
            options.faults = native_faults
        _raise_if(lib.ofl_aio_open(options, queue), f"opening a `{backend}` queue")
        self._ffi = ffi
        self._lib = lib
        self._queue = queue[0]

    def submit(
        self,
        operation: int,
        *,
        fd: int,
        priority: int,
        alignment: int,
        address: int,
        num_bytes: int,
        offset: int,
    ) -> Request:
        """Starts a transfer and returns at once.

        Whatever it raises, an interrupt too, the transfer is not in flight.

        Raises:
            OSError: The arguments are out of range (EINVAL, EOVERFLOW) or memory is short.
        """
        transfer = self._ffi.new("struct ofl_aio_transfer *")
        transfer.fd = fd
        transfer.operation = operation
        transfer.priority = priority
        transfer.alignment = alignment
        transfer.buf = self._ffi.cast("void *", address)
        transfer.len = num_bytes
        transfer.offset = offset
        out = self._ffi.new("struct ofl_aio_request **")
        try:
            _raise_if(self._lib.ofl_aio_submit(self._queue, transfer, out), "ofl_aio_submit")
            return Request(self._lib, self._ffi.gc(out[0], self._end_request))
        except BaseException:
            if out[0]:  # an interrupt: nobody knows of the transfer
                self._lib.ofl_aio_wait(out[0], -1)
            raise

    def _end_request(self, request: Any) -> None:
        """Gives a request up; its memory may go next, so it has to be over."""
        self._lib.ofl_aio_wait(request, -1)
        self._lib.ofl_aio_release(request)

    def register(self, *, address: int, num_bytes: int) -> None:
        """Announces memory that many transfers will use; it stays until `close()`.

        Raises:
            OSError: The backend or the kernel has no such thing (EOPNOTSUPP), or RLIMIT_MEMLOCK
                is reached (ENOMEM). Transfers work without.
        """
        memory = self._ffi.cast("void *", address)
        _raise_if(self._lib.ofl_aio_register(self._queue, memory, num_bytes), "ofl_aio_register")

    def unregister(self, *, address: int) -> None:
        """Ends the registration that began at `address`; no transfer may be using the memory."""
        self._lib.ofl_aio_unregister(self._queue, self._ffi.cast("void *", address))

    def register_file(self, fd: int) -> None:
        """Announces a file that many transfers will use; raises as `register`, or ENOSPC."""
        _raise_if(self._lib.ofl_aio_register_file(self._queue, fd), "ofl_aio_register_file")

    def unregister_file(self, fd: int) -> None:
        """Ends the registration; before `fd` is closed, and with no transfer using it."""
        self._lib.ofl_aio_unregister_file(self._queue, fd)

    def stats(self) -> QueueStats:
        """Returns the counters."""
        stats = self._ffi.new("struct ofl_aio_stats *")
        self._lib.ofl_aio_read_stats(self._queue, stats)
        return QueueStats(
            read_bytes=stats.read_bytes,
            write_bytes=stats.write_bytes,
            read_requests=stats.read_requests,
            write_requests=stats.write_requests,
            in_flight_ns=stats.in_flight_ns,
            read_in_flight_ns=stats.read_in_flight_ns,
            write_in_flight_ns=stats.write_in_flight_ns,
            both_bytes=stats.both_bytes,
            read_ns=stats.read_ns,
            write_ns=stats.write_ns,
            read_latencies=tuple(stats.read_latencies),
            write_latencies=tuple(stats.write_latencies),
            registered_memory_pieces=stats.registered_memory_pieces,
            registered_file_pieces=stats.registered_file_pieces,
        )

    def cancel(self) -> None:
        """Starts no further piece of what was submitted; that ends with ECANCELED."""
        self._lib.ofl_aio_cancel(self._queue)

    def close(self) -> None:
        """Carries out what was submitted, then stops the threads."""
        self._lib.ofl_aio_close(self._queue)


def _new_rules(ffi: Any, rules: tuple[FaultRule, ...]) -> Any:
    native = ffi.new("struct ofl_aio_fault[]", len(rules))
    for each, rule in zip(native, rules, strict=True):
        each.operations = rule.reads * FAULT_READS + rule.writes * FAULT_WRITES
        each.start = rule.start
        each.end = _NO_LIMIT if rule.end is None else rule.end
        each.per_million = rule.per_million
        each.skip = rule.skip
        each.count = _NO_LIMIT if rule.count is None else rule.count
        each.error = -rule.error
        each.max_bytes = rule.max_bytes
        each.delay_ns = rule.delay_ns
    return native


def _new_faults(ffi: Any, faults: Faults, rules: Any) -> Any:
    native = ffi.new("struct ofl_aio_faults *")
    native.rules = rules
    native.num_rules = len(faults.rules)
    native.seed = faults.seed
    native.read_bytes_per_s = faults.read_bytes_per_s
    native.write_bytes_per_s = faults.write_bytes_per_s
    native.burst_bytes = faults.burst_bytes
    native.is_half_duplex = faults.is_half_duplex
    return native


@functools.cache
def _extension() -> Any:
    return importlib.import_module("offload._native._aio")


def _raise_if(result: int, what: str) -> None:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)} ({errno.errorcode.get(-result)})")
