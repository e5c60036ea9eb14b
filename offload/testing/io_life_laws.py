"""Laws of the I/O engine: opening, closing and counting."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from offload.errors import StoreError
from offload.sizes import KIB, MIB
from offload.storage.engine import Engine, EngineStats, Priority, Ticket
from offload.storage.file import StorageFile, open_file
from offload.testing.io_cases import (
    ATTEMPTS,
    SLOW_BYTES,
    aligned,
    errno_of,
    random_bytes,
    start_slow_reads,
    wait_all,
)
from offload.testing.io_laws import IOLaws


class LifeLaws(IOLaws):
    """Opening, closing and counting."""

    def test_close_waits_for_what_is_in_flight(self, file: StorageFile) -> None:
        engine = self.make_engine()
        engine.open()
        written = random_bytes(32 * MIB)

        tickets = [engine.write(file, i * MIB, written[i * MIB : (i + 1) * MIB]) for i in range(32)]
        engine.close()

        assert all(ticket.done() for ticket in tickets)
        assert file.path.read_bytes() == written
        wait_all(tickets)

    def test_close_can_cancel_what_has_not_begun(self, file: StorageFile) -> None:
        os.ftruncate(file.fd, SLOW_BYTES)

        def try_once() -> bool:
            engine = self.make_engine(queue_depth=1, block_bytes=64 * KIB)
            engine.open()
            slow = start_slow_reads(engine, file)
            last = engine.write(file, 0, b"never written", priority=Priority.WRITE_BACK)
            engine.close(cancel=True)
            codes = [errno_of(ticket) for ticket in (*slow, last)]
            assert all(ticket.done() for ticket in (*slow, last))
            assert set(codes) <= {None, errno.ECANCELED}
            was_cancelled = codes[-1] == errno.ECANCELED
            return was_cancelled and os.pread(file.fd, 5, 0) != b"never"

        assert any(try_once() for _ in range(ATTEMPTS))

    def test_an_error_in_the_block_cancels(self, file: StorageFile) -> None:
        os.ftruncate(file.fd, SLOW_BYTES)

        def try_once() -> bool:
            tickets: list[Ticket] = []

            def read_and_stop() -> None:
                with self.make_engine(queue_depth=1, block_bytes=64 * KIB) as engine:
                    tickets.extend(start_slow_reads(engine, file))
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                read_and_stop()
            return errno_of(tickets[-1]) == errno.ECANCELED

        assert any(try_once() for _ in range(ATTEMPTS))

    def test_closing_a_file_waits_for_its_transfers(self, engine: Engine, tmp_path: Path) -> None:
        file = open_file(tmp_path / "closed.bin", create=True, direct=False)
        written = random_bytes(32 * MIB)

        ticket = engine.write(file, 0, written)
        file.close()
        file.close()

        assert ticket.done()
        assert file.path.read_bytes() == written

    def test_open_and_close_may_be_repeated(self, file: StorageFile) -> None:
        engine = self.make_engine()
        engine.close()

        for _ in range(2):
            engine.open()
            engine.open()
            engine.write(file, 0, b"x").wait()
            engine.close()
            engine.close()

        assert engine.stats() == EngineStats(write_bytes=1, write_requests=1)

    def test_an_engine_that_is_not_open_refuses_transfers(self, file: StorageFile) -> None:
        engine = self.make_engine()

        with pytest.raises(StoreError, match="closed"):
            engine.read(file, 0, bytearray(1))
        with engine:
            pass
        with pytest.raises(StoreError, match="closed"):
            engine.write(file, 0, b"x")

    def test_a_thousand_operations_leave_nothing_behind(
        self, engine: Engine, file: StorageFile
    ) -> None:
        memory = bytearray(64 * KIB)

        def operate(num: int) -> None:
            for i in range(num):
                engine.write(file, (i % 16) * len(memory), memory).wait()
                engine.read(file, (i % 16) * len(memory), memory).wait()

        operate(50)
        before = _resources()
        operate(1000)
        after = _resources()

        assert after["descriptors"] == before["descriptors"]
        assert after["threads"] == before["threads"]
        assert after["rss_bytes"] < before["rss_bytes"] + 4 * MIB

    def test_stats_count_bytes_and_requests(self, engine: Engine, file: StorageFile) -> None:
        engine.write(file, 0, bytes(3 * MIB + 1)).wait()
        engine.read(file, 0, bytearray(MIB)).wait()
        engine.read(file, 0, bytearray(0)).wait()

        assert engine.stats() == EngineStats(
            read_bytes=MIB, write_bytes=3 * MIB + 1, read_requests=2, write_requests=1
        )

    def test_path_stats_count_latencies_and_time_in_flight(
        self, engine: Engine, file: StorageFile
    ) -> None:
        for _ in range(3):
            engine.write(file, 0, bytes(MIB)).wait()
        engine.read(file, 0, bytearray(MIB)).wait()

        (path,) = engine.path_stats()

        counters = path.counters
        assert path.backend == engine.name
        assert counters.engine_stats() == engine.stats()
        assert sum(counters.write_latencies) == counters.write_requests == 3
        assert sum(counters.read_latencies) == counters.read_requests == 1
        assert 0 < counters.in_flight_s <= counters.read_s + counters.write_s + 1e-6
        assert counters.read_in_flight_s > 0 and counters.both_bytes == 0
        each_s = counters.read_in_flight_s + counters.write_in_flight_s
        assert each_s == pytest.approx(counters.in_flight_s)

    def test_time_and_bytes_of_both_directions_at_once_are_counted(
        self, engine: Engine, any_file: StorageFile
    ) -> None:
        memory = aligned(2 * MIB)
        engine.write(any_file, 0, memory).wait()
        tickets = []
        for offset in range(0, 64 * MIB, 2 * MIB):
            tickets.append(engine.write(any_file, 2 * MIB + offset, memory))
            tickets.append(engine.read(any_file, 0, aligned(2 * MIB)))
        for ticket in tickets:
            ticket.wait()

        (path,) = engine.path_stats()

        counters = path.counters
        both_s = counters.read_in_flight_s + counters.write_in_flight_s - counters.in_flight_s
        if any_file.is_direct:  # through the page cache one may be over before the next begins
            assert both_s > 0
            assert counters.both_bytes > 0
        assert both_s > -1e-6
        assert counters.both_bytes <= 128 * MIB

    def test_registered_memory_moves_the_same_bytes(
        self, engine: Engine, any_file: StorageFile
    ) -> None:
        memory = aligned(4 * MIB)
        written = random_bytes(4 * MIB)

        for _ in range(2):
            is_used = engine.register(memory)
            assert isinstance(is_used, bool)
            memory[:] = np.frombuffer(written, np.uint8)
            engine.write(any_file, 0, memory).wait()
            memory[:] = 0
            engine.read(any_file, MIB, memory[MIB:]).wait()
            engine.unregister(memory)
            engine.unregister(memory)

        assert memory[MIB:].tobytes() == written[MIB:]
        assert not memory[:MIB].any()

    def test_a_file_that_gets_the_number_of_a_closed_one_is_the_one_that_is_written(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        memory = aligned(MIB)

        for value in range(3):
            file = open_file(tmp_path / str(value), create=True)
            memory[:] = value
            engine.write(file, 0, memory).wait()
            file.close()

        for value in range(3):
            assert (tmp_path / str(value)).read_bytes() == bytes([value]) * MIB

    def test_flush_succeeds_after_writes(self, engine: Engine, any_file: StorageFile) -> None:
        engine.write(any_file, 0, aligned(MIB)).wait()

        engine.flush(any_file)

        assert any_file.path.stat().st_size == MIB


def _resources() -> dict[str, int]:
    process = Path("/proc/self")
    num_pages = int((process / "statm").read_text().split()[1])
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "rss_bytes": num_pages * os.sysconf("SC_PAGE_SIZE"),
    }
