"""Measures in seconds what a machine does, for the bounds of the run that follows."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from offload._native.optim import copy_rate_bytes_per_s
from offload.layout import DTYPES, section_kinds, state_bytes_per_element
from offload.optim.kernels import Kernels, Operands, Range
from offload.optim.scalars import adamw_scalars
from offload.plan.machine import Machine, PathRates
from offload.sizes import MIB
from offload.storage.engine import Engine, Priority, Ticket
from offload.storage.file import StorageFile, open_file

_FILE = ".offload-probe"
_REQUEST_BYTES = 4 * MIB
_MAX_BUFFERS = 16
_ROUNDS = 3
_MEASURE_S = 0.15
"""Time of reads and of writes alone in a round; both together take twice as long."""
_MIN_BYTES = 16 * _REQUEST_BYTES
_READ = "read"
_WRITE = "write"
_UPDATE_ROUNDS = 4
_UPDATE_ELEMENTS = 4 << 20
"""64 MiB of operands: larger than the caches of most machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSize:
    """What a probe may use, set from the budget of the run."""

    file_bytes: int
    memory_bytes: int

    @staticmethod
    def within(*, host_bytes: int, storage_bytes: int) -> "ProbeSize":
        """Returns sizes that stay small against a host budget and the store's bytes."""
        return ProbeSize(
            file_bytes=max(min(256 * MIB, storage_bytes // 2), 4 * _REQUEST_BYTES),
            memory_bytes=max(min(128 * MIB, host_bytes // 4), 2 * _REQUEST_BYTES),
        )


def probe_machine(
    directories: Sequence[Path],
    *,
    engine: Engine,
    kernels: Kernels,
    codec: str,
    dtype: str,
    size: ProbeSize,
    rule: str = "adamw",
) -> Machine:
    """Returns the rates of each path, one after the other, and of memory, measured now.

    Args:
        directories: One on each path; a file is made there and removed again.
        engine: Open, with the block size and the queue depth of the run.
        kernels: Those of the run.
        codec: Of the optimizer state.
        dtype: Of most parameters.
        size: The most file and memory bytes to use.
        rule: The update rule of most parameters.
    """
    return Machine(
        paths=tuple(probe_path(directory, engine, size) for directory in directories),
        copy_bytes_per_s=copy_rate_bytes_per_s(),
        update_parameters_per_s=probe_update(
            kernels, codec=codec, dtype=dtype, size=size, rule=rule
        ),
    )


def probe_path(
    directory: Path, engine: Engine, size: ProbeSize, *, patience: float = 1.0
) -> PathRates:
    """Returns the rates of the path that `directory` lies on.

    Args:
        directory: A file is made there and removed again.
        engine: Open, with the block size and the queue depth of the run.
        size: The most file and memory bytes to use.
        patience: How many times longer than usual to measure.
    """
    window_s = _MEASURE_S * patience
    path = directory / _FILE
    path.unlink(missing_ok=True)
    file = open_file(path, create=True)
    try:
        # The name goes at once, so that no end of the process leaves a file behind.
        path.unlink()
        stream = _Stream(file, engine, size)
        stream.fill()
        rounds = [
            (
                stream.rate(_READ, seconds=window_s),
                stream.rate(_WRITE, seconds=window_s),
                stream.rate(_READ, _WRITE, seconds=2 * window_s),
            )
            for _ in range(_ROUNDS)
        ]
        # Medians: the best of short windows would be more than a throttled path ever gives. What
        # is too low for the steps of a run is raised by them: [Note: probes and bursts].
        read, write, mixed = (statistics.median(rates) for rates in zip(*rounds, strict=True))
        return PathRates(
            path=str(directory),
            read_bytes_per_s=read,
            write_bytes_per_s=write,
            mixed_bytes_per_s=mixed / 2,
        )
    finally:
        file.close()


class _Stream:
    """Requests over a file, one after the other, with a few buffers always in flight."""

    def __init__(self, file: StorageFile, engine: Engine, size: ProbeSize) -> None:
        self._file = file
        self._engine = engine
        self._num_requests = size.file_bytes // _REQUEST_BYTES
        count = min(max(size.memory_bytes // _REQUEST_BYTES, 2), _MAX_BUFFERS)
        self._idle = [_aligned(_REQUEST_BYTES) for _ in range(count)]
        self._in_flight: deque[_Request] = deque()
        self._next = 0

    def fill(self) -> None:
        """Writes the whole file once, so that nothing is measured on fresh extents."""
        for _ in range(self._num_requests):
            self._submit(_WRITE)
        self._drain()
        self._engine.flush(self._file)

    def rate(self, *kinds: str, seconds: float) -> float:
        """Returns bytes/s of requests of `kinds` in turn, both directions together."""
        num_bytes = 0
        started_s = time.perf_counter()
        while num_bytes < _MIN_BYTES or time.perf_counter() - started_s < seconds:
            for kind in kinds:
                self._submit(kind)
                num_bytes += _REQUEST_BYTES
        self._drain()
        return num_bytes / (time.perf_counter() - started_s)

    def _submit(self, kind: str) -> None:
        if not self._idle:
            self._reap()
        buffer = self._idle.pop()
        offset = self._next * _REQUEST_BYTES
        self._next = (self._next + 1) % self._num_requests
        if kind == _READ:
            ticket = self._engine.read(self._file, offset, buffer, priority=Priority.PREFETCH)
        else:
            ticket = self._engine.write(self._file, offset, buffer)
        self._in_flight.append(_Request(ticket=ticket, buffer=buffer))

    def _reap(self) -> None:
        request = self._in_flight.popleft()
        request.ticket.wait()
        self._idle.append(request.buffer)

    def _drain(self) -> None:
        while self._in_flight:
            self._reap()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    ticket: Ticket
    buffer: torch.Tensor


def probe_update(kernels: Kernels, *, codec: str, dtype: str, size: ProbeSize, rule: str) -> float:
    """Returns how many parameters the fused pass updates each second, all in memory."""
    bytes_each = 2 * DTYPES[dtype].itemsize + state_bytes_per_element(codec, dtype, rule)
    num_elements = max(min(_UPDATE_ELEMENTS, size.memory_bytes // bytes_each), 1 << 16)
    operands = _operands(num_elements, codec=codec, dtype=dtype, rule=rule)
    scalars = adamw_scalars(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=10)
    ranges = [Range(start=0, stop=num_elements, scalars=scalars)]
    best_s = float("inf")
    for _ in range(_UPDATE_ROUNDS):
        started_s = time.perf_counter()
        kernels.update(operands, ranges)
        best_s = min(best_s, time.perf_counter() - started_s)
    return num_elements / best_s


def _operands(num_elements: int, *, codec: str, dtype: str, rule: str) -> Operands:
    sections = {
        kind.name: torch.full((num_elements,), 1, dtype=getattr(torch, kind.dtype))
        for kind in section_kinds(codec, dtype, rule)
    }
    element = getattr(torch, dtype)
    return Operands(
        rule=rule,
        parameter=torch.ones(num_elements, dtype=element),
        gradient=torch.full((num_elements,), 0.5, dtype=element),
        master_low=sections.pop("master_low", None),
        master=sections.pop("master", None),
        state=sections,
    )


def _aligned(num_bytes: int) -> torch.Tensor:
    """Zeros at an address that O_DIRECT takes."""
    whole = torch.zeros(num_bytes + 4096, dtype=torch.uint8)
    start = -whole.data_ptr() % 4096
    return whole[start : start + num_bytes]
