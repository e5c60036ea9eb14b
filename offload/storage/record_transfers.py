"""Moving records between memory and the blocks of a data file, with their checksums."""

import errno
import logging
import sys
import threading
from collections.abc import Callable, Sequence

from offload.errors import (
    ConfigError,
    CorruptStateError,
    OffloadError,
    StorageError,
    StoreError,
)
from offload.sizes import format_size, round_up
from offload.storage.engine import Priority
from offload.storage.extents import (
    Move,
    Version,
    block_checksums,
    first_difference,
    moves_of,
)
from offload.storage.path_rates import PathRates
from offload.storage.placement import Placement
from offload.storage.store_paths import OpenPath, PathTicket
from offload.storage.tickets import StoreTicket
from offload.storage.versions import VersionTable

_log = logging.getLogger("offload.storage")

_OWN_REFERENCES = 4
"""To a ticket that nobody has: of the set, of the list of it, of the loop over that, and of
`sys.getrefcount`."""


class RecordTransfers:
    """Starts reads and writes of records; the rules are those of `BlockStore.read` and `write`.

    Concurrency: Any thread.
    """

    def __init__(
        self,
        *,
        paths: Sequence[OpenPath],
        versions: VersionTable,
        placement: Placement,
        rates: PathRates,
        block_bytes: int,
        alignment: int,
        describe: Callable[[str], str] | None,
        is_superseded: Callable[[], bool],
        advise: Callable[[], str],
    ) -> None:
        """Stores its arguments.

        Args:
            paths: Of the store.
            versions: Of the store.
            placement: Where new versions go.
            rates: Told what is submitted.
            block_bytes: Of the store.
            alignment: Of lengths in memory.
            describe: Gives what a record holds, for messages.
            is_superseded: Whether another process has committed since.
            advise: Says from which checkpoint a run can go on, for messages.
        """
        self._paths = paths
        self._versions = versions
        self._placement = placement
        self._rates = rates
        self._block_bytes = block_bytes
        self._alignment = alignment
        self._describe = describe
        self._is_superseded = is_superseded
        self._advise = advise
        self._lock = threading.Lock()  # over what follows
        self._in_flight: set[StoreTicket] = set()
        self._read_bytes = 0
        self._write_bytes = 0
        self._checkpoint_read_bytes = 0
        self._bytes_by_path = [[0, 0] for _ in paths]  # read, written

    @property
    def read_bytes(self) -> int:
        return self._read_bytes

    @property
    def write_bytes(self) -> int:
        return self._write_bytes

    @property
    def checkpoint_read_bytes(self) -> int:
        return self._checkpoint_read_bytes

    def bytes_on(self, path_index: int) -> tuple[int, int]:
        """Returns what was read from and written to a path."""
        read_bytes, write_bytes = self._bytes_by_path[path_index]
        return read_bytes, write_bytes

    def write(
        self,
        record: str,
        source: memoryview,
        *,
        num_bytes: int | None,
        priority: Priority,
        serial: int | None = None,
        is_staged: bool = False,
    ) -> StoreTicket:
        data = memoryview(source).cast("B")
        num_bytes = len(data) if num_bytes is None else num_bytes
        self._check_memory(record, data, num_bytes)
        version = self._allocate(record, num_bytes)
        tickets: list[PathTicket] = []
        is_begun = False
        try:
            if serial is not None:  # a write that is done over is no newer than it was
                version.serial = serial
            self._rates.note()
            moves = list(
                moves_of(version, block_bytes=self._block_bytes, alignment=self._alignment)
            )
            for move in moves:
                part = data[move.start : move.start + move.num_bytes]
                path = self._paths[move.path_index]
                path.needs_sync = is_begun = True
                tickets.append(
                    path.engine.write(path.data.file, move.offset, part, priority=priority)
                )
                self._rates.submitted(move.path_index, move.num_bytes, is_write=True)
            # The transfers run while this thread hashes.
            version.checksums = block_checksums(data[:num_bytes], self._block_bytes)
        except BaseException as error:
            # After an interrupt a transfer may be on its way: then the blocks stay taken.
            if isinstance(error, Exception) or not is_begun:
                _drain(tickets)
                self._versions.release(version)
            raise

        def settle(ticket: StoreTicket, error: OffloadError | None) -> None:
            if error is None and is_staged:
                self._versions.stage(record, version)
            elif error is None:
                self._versions.publish(record, version)
            else:
                self._versions.release(version)
            self._forget(ticket)

        ticket = StoreTicket(
            moves,
            tickets,
            outcome=lambda _, error: None if error is None else self._write_failed(record, error),
            settle=settle,
            retry=lambda move, error: self._write_elsewhere(
                move,
                error,
                lambda: self.write(
                    record,
                    data,
                    num_bytes=num_bytes,
                    priority=priority,
                    serial=version.serial,
                    is_staged=is_staged,
                ),
            ),
        )
        self._remember(ticket, moves, is_write=True)
        return ticket

    def read(
        self,
        record: str,
        into: memoryview,
        *,
        offset: int,
        num_bytes: int | None,
        priority: Priority,
        checkpoint: str | None = None,
    ) -> StoreTicket:
        data = memoryview(into).cast("B")
        version = self._versions.hold(record, checkpoint=checkpoint)
        tickets: list[PathTicket] = []
        try:
            self._rates.note()
            stop = version.num_bytes if num_bytes is None else offset + num_bytes
            self._check_range(record, version, offset, stop)
            self._check_memory(record, data, stop - offset)
            moves = list(
                moves_of(
                    version,
                    block_bytes=self._block_bytes,
                    alignment=self._alignment,
                    start=offset,
                    stop=stop,
                )
            )
            for move in moves:
                part = data[move.start : move.start + move.num_bytes]
                path = self._paths[move.path_index]
                tickets.append(
                    path.engine.read(path.data.file, move.offset, part, priority=priority)
                )
                self._rates.submitted(move.path_index, move.num_bytes, is_write=False)
        except BaseException as error:
            if isinstance(error, Exception):  # else what is on its way has the memory, and no user
                _drain(tickets)
            self._versions.release(version)
            raise

        def settle(ticket: StoreTicket, _error: OffloadError | None) -> None:
            self._versions.release(version)
            self._forget(ticket)

        ticket = StoreTicket(
            moves,
            tickets,
            outcome=lambda move, error: (
                self._difference(record, version, move, data)
                if error is None
                else self._read_failed(record, move, error)
            ),
            settle=settle,
        )
        self._remember(ticket, moves, is_write=False, is_of_checkpoint=checkpoint is not None)
        return ticket

    def wait_all(self) -> None:
        """Waits for all tickets, so that no transfer outlives the file."""
        with self._lock:
            in_flight = list(self._in_flight)
        for ticket in in_flight:
            try:
                ticket.wait()
            except OffloadError as error:
                _log.warning("a transfer that nobody waited for failed: %s", error)

    def _allocate(self, record: str, num_bytes: int) -> Version:
        try:
            return self._placement.allocate(num_bytes)
        except StorageError as error:
            raise self._write_failed(record, error) from error

    def _write_elsewhere(
        self, move: Move, error: OffloadError, write: Callable[[], StoreTicket]
    ) -> StoreTicket | None:
        """Leaves out a path that failed, and starts the write again on the others, if any."""
        path = self._paths[move.path_index]
        if not isinstance(error, StorageError) or not self._placement.has_other(path):
            return None
        path.note_write_error(error)
        return write()

    # Tickets, from submission until they are settled.

    def _remember(
        self,
        ticket: StoreTicket,
        moves: Sequence[Move],
        *,
        is_write: bool,
        is_of_checkpoint: bool = False,
    ) -> None:
        self._give_up_lost()
        num_bytes = sum(move.num_bytes for move in moves)
        with self._lock:
            self._in_flight.add(ticket)
            if is_of_checkpoint:
                self._checkpoint_read_bytes += num_bytes
                return
            ticket.counted_bytes = num_bytes
            self._read_bytes += 0 if is_write else num_bytes
            self._write_bytes += num_bytes if is_write else 0
            for move in moves:
                self._bytes_by_path[move.path_index][is_write] += move.num_bytes

    def _give_up_lost(self) -> None:
        """Ends the tickets that nobody has any more, as after an interrupt.

        Else they would keep their blocks, and the caller's memory, until the store is closed.
        """
        with self._lock:
            in_flight = list(self._in_flight)
        for ticket in in_flight:
            if sys.getrefcount(ticket) <= _OWN_REFERENCES and ticket.done():
                ticket.give_up()
                self._forget(ticket)  # an interrupt may have ended a ticket before it did this

    def _forget(self, ticket: StoreTicket) -> None:
        with self._lock:
            self._in_flight.discard(ticket)

    # Checks and messages.

    def _difference(
        self, record: str, version: Version, move: Move, data: memoryview
    ) -> OffloadError | None:
        used = data[move.start : move.start + move.bytes_in_use]
        found = block_checksums(used, self._block_bytes)
        expected = version.checksums[move.first_block : move.first_block + len(found)]
        index = first_difference(found, expected)
        if index is None:
            return None
        if self._is_superseded():
            return StoreError(
                f"cannot read record {self._name(record)}: expected the commit that was opened, "
                f"found that the owner of `{self._paths[0].root}` has committed since and "
                "reused blocks; open the store again, or wait until its run has ended"
            )
        return CorruptStateError(
            f"record {self._name(record)} is damaged: block {move.first_block + index} at offset "
            f"{move.offset + index * self._block_bytes} of file "
            f"`{self._paths[move.path_index].data.path}`: expected "
            f"xxh3-64 {expected[index]:016x}, found {found[index]:016x}; restore the file from a "
            "copy or resume from another checkpoint; `offload verify` lists all such blocks"
            f"{self._advice()}"
        )

    def _read_failed(self, record: str, move: Move, error: StorageError) -> OffloadError:
        path = self._paths[move.path_index]
        if error.errno != errno.ENODATA:
            num_lost = len(self._versions.lost_with(move.path_index))
            return StorageError(
                f"cannot read record {self._name(record)}: {error}; if path `{path.root}` is lost, "
                f"so are parts of {num_lost} of {len(self._versions.records())} records"
                f"{self._advice()}",
                errno=error.errno,
            )
        return CorruptStateError(
            f"record {self._name(record)} is damaged: file `{path.data.path}` is truncated: "
            f"expected {move.num_bytes} bytes at offset {move.offset}, found its end; restore the "
            f"file from a copy or resume from another checkpoint{self._advice()}"
        )

    def _advice(self) -> str:
        advice = self._advise()
        return f"; {advice}" if advice else ""

    def _write_failed(self, record: str, error: StorageError) -> StorageError:
        return StorageError(f"cannot write record {self._name(record)}: {error}", errno=error.errno)

    def _check_memory(self, record: str, data: memoryview, num_bytes: int) -> None:
        needed = round_up(num_bytes, self._alignment)
        if num_bytes < 0 or len(data) < needed or len(data) % self._alignment:
            raise ConfigError(
                f"cannot move {num_bytes} bytes of record {self._name(record)}: expected memory "
                f"of at least {needed} bytes, a multiple of {self._alignment}, found {len(data)} "
                f"bytes; round lengths up to the store's alignment"
            )

    def _check_range(self, record: str, version: Version, start: int, stop: int) -> None:
        is_inside = 0 <= start <= stop <= version.num_bytes
        ends_block = stop == version.num_bytes or stop % self._block_bytes == 0
        if not is_inside or not ends_block or start % self._block_bytes:
            raise ConfigError(
                f"cannot read bytes {start} to {stop} of record {self._name(record)}: expected "
                f"whole blocks of {format_size(self._block_bytes)} within {version.num_bytes} "
                "bytes, because checksums are by block; widen the range"
            )

    def _name(self, record: str) -> str:
        return f"`{record}`" if self._describe is None else f"`{record}` ({self._describe(record)})"


def _drain(tickets: Sequence[PathTicket]) -> None:
    """Waits for transfers whose outcome no longer matters: the submission has failed."""
    for ticket in tickets:
        try:
            ticket.wait()
        except StorageError as error:
            _log.warning("a transfer that was given up failed too: %s", error)
