"""Moving records between memory and the blocks of a data file, with their checksums."""

import errno
import logging
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
from offload.storage.data_file import DataFile
from offload.storage.engine import Engine, Priority, Ticket
from offload.storage.extents import (
    Move,
    Version,
    block_checksums,
    first_difference,
    moves_of,
)
from offload.storage.tickets import StoreTicket
from offload.storage.versions import VersionTable

_log = logging.getLogger("offload.storage")


class RecordTransfers:
    """Starts reads and writes of records; the rules are those of `BlockStore.read` and `write`.

    Concurrency: Any thread.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        data: DataFile,
        versions: VersionTable,
        block_bytes: int,
        alignment: int,
        capacity_bytes: int | None,
        describe: Callable[[str], str] | None,
        is_superseded: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._data = data
        self._versions = versions
        self._block_bytes = block_bytes
        self._alignment = alignment
        self._capacity_bytes = capacity_bytes
        self._describe = describe
        self._is_superseded = is_superseded
        self._grow_lock = threading.Lock()
        self._lock = threading.Lock()  # over what follows
        self._in_flight: set[StoreTicket] = set()
        self._read_bytes = 0
        self._write_bytes = 0

    @property
    def read_bytes(self) -> int:
        return self._read_bytes

    @property
    def write_bytes(self) -> int:
        return self._write_bytes

    def write(
        self, record: str, source: memoryview, *, num_bytes: int | None, priority: Priority
    ) -> StoreTicket:
        data = memoryview(source).cast("B")
        num_bytes = len(data) if num_bytes is None else num_bytes
        self._check_memory(record, data, num_bytes)
        version = self._allocate(record, num_bytes)
        moves = list(moves_of(version, block_bytes=self._block_bytes, alignment=self._alignment))
        tickets: list[Ticket] = []
        try:
            for move in moves:
                part = data[move.start : move.start + move.num_bytes]
                tickets.append(
                    self._engine.write(self._data.file, move.offset, part, priority=priority)
                )
            # The transfers run while this thread hashes.
            version.checksums = block_checksums(data[:num_bytes], self._block_bytes)
        except Exception:  # after an interrupt a transfer may be on its way: the blocks stay taken
            _drain(tickets)
            self._versions.release(version)
            raise

        def settle(ticket: StoreTicket, error: OffloadError | None) -> None:
            if error is None:
                self._versions.publish(record, version)
            else:
                self._versions.release(version)
            self._forget(ticket)

        ticket = StoreTicket(
            moves,
            tickets,
            outcome=lambda _, error: None if error is None else self._write_failed(record, error),
            settle=settle,
        )
        self._remember(ticket, write_bytes=sum(move.num_bytes for move in moves))
        return ticket

    def read(
        self,
        record: str,
        into: memoryview,
        *,
        offset: int,
        num_bytes: int | None,
        priority: Priority,
    ) -> StoreTicket:
        data = memoryview(into).cast("B")
        version = self._versions.hold(record)
        tickets: list[Ticket] = []
        try:
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
                tickets.append(
                    self._engine.read(self._data.file, move.offset, part, priority=priority)
                )
        except Exception:  # as in `write`
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
        self._remember(ticket, read_bytes=sum(move.num_bytes for move in moves))
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
        while True:
            version = self._versions.try_allocate(num_bytes)
            if version is not None:
                return version
            with self._grow_lock:
                missing = self._versions.num_missing_blocks(num_bytes)
                if missing:
                    self._grow(record, missing)

    def _grow(self, record: str, num_blocks: int) -> None:
        capacity = self._capacity_bytes
        try:
            total = self._data.grow(
                needed_blocks=num_blocks,
                most_blocks=None if capacity is None else capacity // self._block_bytes,
            )
        except StorageError as error:
            raise self._write_failed(record, error) from error
        self._versions.grow(total)

    # Tickets, from submission until they are settled.

    def _remember(self, ticket: StoreTicket, *, read_bytes: int = 0, write_bytes: int = 0) -> None:
        with self._lock:
            self._in_flight.add(ticket)
            self._read_bytes += read_bytes
            self._write_bytes += write_bytes

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
                f"found that the owner of `{self._data.path.parent}` has committed since and "
                "reused blocks; open the store again, or wait until its run has ended"
            )
        return CorruptStateError(
            f"record {self._name(record)} is damaged: block {move.first_block + index} at offset "
            f"{move.offset + index * self._block_bytes} of file `{self._data.path}`: expected "
            f"xxh3-64 {expected[index]:016x}, found {found[index]:016x}; restore the file from a "
            "copy or resume from another checkpoint; `offload verify` lists all such blocks"
        )

    def _read_failed(self, record: str, move: Move, error: StorageError) -> OffloadError:
        if error.errno != errno.ENODATA:
            return StorageError(
                f"cannot read record {self._name(record)}: {error}", errno=error.errno
            )
        return CorruptStateError(
            f"record {self._name(record)} is damaged: file `{self._data.path}` is truncated: "
            f"expected {move.num_bytes} bytes at offset {move.offset}, found its end; restore the "
            "file from a copy or resume from another checkpoint"
        )

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


def _drain(tickets: Sequence[Ticket]) -> None:
    """Waits for transfers whose outcome no longer matters: the submission has failed."""
    for ticket in tickets:
        try:
            ticket.wait()
        except StorageError as error:
            _log.warning("a transfer that was given up failed too: %s", error)
