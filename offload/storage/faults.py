"""What the I/O backend `fault` does to transfers, for tests and emulated devices."""

import errno
import os
import threading
from dataclasses import dataclass, field
from typing import Literal

from offload.sizes import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to some of the calls of the kernel: an error, a short transfer, a delay."""

    operation: Literal["read", "write", "transfer", "flush"] = "transfer"
    """`transfer` is both directions. Of `flush` only `skip`, `count` and `error` are used."""
    start: int = 0
    """With `end`: calls that touch these bytes of a file."""
    end: int | None = None
    probability: float = 1.0
    """Of each matching call, from the plan's seed, its place and how often that was called."""
    skip: int = 0
    """So many of those pass first."""
    count: int | None = None
    """Then this happens to so many; None: to all that follow."""
    error: int = 0
    """An errno that takes the place of the call; 0: the call is made."""
    max_bytes: int | None = None
    """The call is shortened to these; for a direct file a multiple of its alignment."""
    delay_s: float = 0.0
    """The call takes at least as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Faults, of which the first that matches a call decides, and rates of a token bucket."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    read_bytes_per_s: int | None = None
    """None: as fast as the file system."""
    write_bytes_per_s: int | None = None
    is_half_duplex: bool = False
    """Reads and writes share the time, as on one drive; else each has its own bucket."""
    burst_bytes: int = MIB
    """Unused time is kept for so many bytes."""

    def transfer_faults(self) -> tuple[Fault, ...]:
        """Returns those that the backend carries out."""
        return tuple(each for each in self.faults if each.operation != "flush")


@dataclass(slots=True)
class FlushFaults:
    """Carries out the faults of `flush`; the kernel's call for it is not the backend's.

    Concurrency: Any thread.
    """

    plan: FaultPlan
    _num_flushes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_flush(self) -> None:
        """Raises the error that the plan has for this flush, if any."""
        with self._lock:
            number = self._num_flushes
            self._num_flushes += 1
        for fault in self.plan.faults:
            stop = None if fault.count is None else fault.skip + fault.count
            is_meant = fault.operation == "flush" and fault.skip <= number
            if is_meant and (stop is None or number < stop):
                code = fault.error or errno.EIO
                raise OSError(code, os.strerror(code))
