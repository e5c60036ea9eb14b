"""Bytes that go to storage for a while and belong to no version: the spill files.

A spill file has no name: it is unlinked as soon as it is open, so that nothing of it outlives the
process, however that ends. Places are of one size; one that is given back is used again.
"""

import contextlib
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from offload.errors import CorruptStateError, StorageError
from offload.sizes import format_size, round_up
from offload.storage.engine import Priority
from offload.storage.file import StorageFile, open_file
from offload.storage.stalls import path_label
from offload.storage.store_paths import PathEngine, PathTicket

SPILL_NAME = "data.spill"
"""The name that a file has until it is unlinked; a store takes what is left of one for its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one piece lies.

    Attributes:
        path_index: Of the spill file.
        offset: In the file.
        num_bytes: Those in use.
        checksum: xxh3-64 of them.
    """

    path_index: int
    offset: int
    num_bytes: int
    checksum: int


class SpillRoom(Protocol):
    """Counts the bytes of spill files on a path among what a store may take there."""

    def try_spill(self, num_bytes: int) -> bool: ...
    def end_spill(self, num_bytes: int) -> None: ...


class Spill:
    """One spill file on each path; a piece goes to the path with least to do.

    Attributes:
        write_bytes: To the files since the beginning, padding included.
        read_bytes: From them.
        peak_bytes: Of the files together: they do not shrink.

    Concurrency: One thread at a time.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        engines: Sequence[PathEngine],
        *,
        place_bytes: int,
        rooms: Sequence[SpillRoom | None] = (),
    ) -> None:
        """Stores its arguments.

        Args:
            roots: Directories that exist.
            engines: Of each of them.
            place_bytes: Of the largest piece; a multiple of every file's alignment.
            rooms: Of each of them; None, or none at all: the file system is the limit.
        """
        self.write_bytes = 0
        self.read_bytes = 0
        self._roots = roots
        self._engines = engines
        self._place_bytes = place_bytes
        self._rooms = list(rooms) or [None] * len(roots)
        self._files: list[StorageFile] = []
        self._free: list[list[int]] = []
        self._ends: list[int] = []
        self._writing: list[list[PathTicket]] = []
        self._reading: list[list[PathTicket]] = []

    @property
    def peak_bytes(self) -> int:
        return sum(self._ends)

    def open(self) -> None:
        """Makes the files; may be called again.

        Raises:
            StorageError: One can't be made.
        """
        if self._files:
            return
        try:
            for root in self._roots:
                path = root / SPILL_NAME
                self._files.append(open_file(path, create=True))
                path.unlink()
        except BaseException:
            self.close()
            raise
        self._free = [[] for _ in self._files]
        self._ends = [0 for _ in self._files]
        self._writing = [[] for _ in self._files]
        self._reading = [[] for _ in self._files]

    def close(self) -> None:
        """Waits for transfers in flight and gives the space back; may be called again."""
        files, self._files = self._files, []
        for file in files:
            file.close()
        for room, end in zip(self._rooms, self._ends, strict=False):
            if room is not None:
                room.end_spill(end)
        self._ends, self._writing, self._reading = [], [], []

    def write(self, memory: memoryview, *, num_bytes: int) -> tuple[Place, PathTicket]:
        """Starts writing the first `num_bytes` of a piece.

        Args:
            memory: Aligned, and as long as a place.
            num_bytes: What is in use; the rest up to the alignment is written too.

        Raises:
            StorageError: No path has room. `errno` is ENOSPC.

        Ownership: `memory` belongs to the engine until the ticket is done.
        """
        index, offset = self._take()
        file = self._files[index]
        padded = round_up(num_bytes, file.alignment)
        ticket = self._engines[index].write(file, offset, memory[:padded])
        self._writing[index].append(ticket)
        self.write_bytes += padded
        checksum = xxhash.xxh3_64_intdigest(memory[:num_bytes])
        return (
            Place(path_index=index, offset=offset, num_bytes=num_bytes, checksum=checksum),
            ticket,
        )

    def read(self, place: Place, into: memoryview, *, is_needed: bool) -> PathTicket:
        """Starts reading a piece; `check` it when the ticket is done."""
        index = place.path_index
        file = self._files[index]
        padded = round_up(place.num_bytes, file.alignment)
        self.read_bytes += padded
        self._reading[index] = [ticket for ticket in self._reading[index] if not ticket.done()]
        ticket = self._engines[index].read(
            file,
            place.offset,
            into[:padded],
            priority=Priority.NEEDED if is_needed else Priority.PREFETCH,
        )
        self._reading[index].append(ticket)
        return ticket

    def check(self, place: Place, memory: memoryview) -> None:
        """Raises CorruptStateError unless `memory` holds what was written."""
        if xxhash.xxh3_64_intdigest(memory[: place.num_bytes]) != place.checksum:
            raise CorruptStateError(
                f"cannot read back what was spilled to `{self._roots[place.path_index]}`: "
                f"{place.num_bytes} bytes at offset {place.offset} are not those that were "
                "written; check the drive, and go on from the last commit"
            )

    def label_of(self, place: Place) -> str:
        """Returns how a wait for a transfer of the place is named in a stall account."""
        return path_label(self._roots[place.path_index])

    def wait_idle(self) -> None:
        """Waits for all transfers, whatever they give; refers to the memory of none any more."""
        for tickets in (*self._writing, *self._reading):
            for ticket in tickets:
                with contextlib.suppress(StorageError):  # whoever has the ticket gets it
                    ticket.wait()
            tickets.clear()

    def release(self, place: Place) -> None:
        """Gives the place back; no transfer of it is in flight."""
        self._free[place.path_index].append(place.offset)

    def _take(self) -> tuple[int, int]:
        """Returns a path and an offset there: of the path with least to do that has room."""
        for index in self._by_work():
            if self._free[index]:
                return index, self._free[index].pop()
            room, offset = self._rooms[index], self._ends[index]
            if room is None or room.try_spill(self._place_bytes):
                self._ends[index] += self._place_bytes
                return index, offset
        raise StorageError(
            f"cannot spill to {', '.join(f'`{root}`' for root in self._roots)}: expected "
            f"{format_size(self._place_bytes)} more beside {format_size(self.peak_bytes)} that are "
            "spilled and the store, found no room; free space there or raise "
            "`tiers.storage.capacity`",
            errno=errno.ENOSPC,
        )

    def _by_work(self) -> list[int]:
        for index, tickets in enumerate(self._writing):
            self._writing[index] = [ticket for ticket in tickets if not ticket.done()]
        counts = [len(tickets) for tickets in self._writing]
        return sorted(range(len(counts)), key=lambda i: (counts[i], self._used_bytes(i)))

    def _used_bytes(self, index: int) -> int:
        return self._ends[index] - len(self._free[index]) * self._place_bytes
