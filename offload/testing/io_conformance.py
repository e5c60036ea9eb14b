"""The laws of the I/O engine: a backend is right if a subclass of `IOConformance` passes.

```python
class TestMyBackend(IOConformance):
    def make_engine(self, **options: int) -> Engine:
        return Engine("my-backend", **options)
```
"""

import asyncio
import errno
import gc
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from offload.errors import ConfigError, StorageError, StoreError
from offload.sizes import KIB, MIB
from offload.storage.engine import Engine, EngineStats, Priority, Ticket
from offload.storage.file import StorageFile, open_file

_ALIGNMENT = 4096
_ATTEMPTS = 50
"""A law about something still in flight is tried so often, should a transfer be too quick."""
_WAIT_S = 60.0
"""Only a hang takes so long."""


class IOConformance:
    """The laws. Subclasses say how an engine is made; pytest collects the rest."""

    def make_engine(self, **options: int) -> Engine:
        """Returns a new engine, not opened; `options` are those of `Engine`."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with self.make_engine() as engine:
            yield engine

    @pytest.fixture
    def file(self, tmp_path: Path) -> Iterator[StorageFile]:
        file = open_file(tmp_path / "buffered.bin", create=True, direct=False)
        yield file
        file.close()

    @pytest.fixture
    def direct_file(self, tmp_path: Path) -> Iterator[StorageFile]:
        file = _open_direct(tmp_path / "direct.bin")
        yield file
        file.close()

    @pytest.fixture(params=["buffered", "direct"])
    def any_file(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageFile]:
        path = tmp_path / "any.bin"
        is_direct = request.param == "direct"
        file = _open_direct(path) if is_direct else open_file(path, create=True, direct=False)
        yield file
        file.close()

    # ---- bytes ----

    # 0 and 1; around the alignment and around the piece, where cutting goes wrong.
    @pytest.mark.parametrize("num_bytes", [0, 1, 511, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1])
    @pytest.mark.parametrize("offset", [0, 1, 4095, (1 << 32) + 3])
    def test_bytes_of_any_length_at_any_offset_come_back(
        self, engine: Engine, file: StorageFile, num_bytes: int, offset: int
    ) -> None:
        written = _random_bytes(num_bytes)
        found = bytearray(num_bytes)

        engine.write(file, offset, written).wait()
        engine.read(file, offset, found).wait()

        assert found == written
        assert os.pread(file.fd, num_bytes, offset) == written

    @pytest.mark.parametrize("num_blocks", [1, 3, 257])
    def test_aligned_bytes_of_a_direct_file_come_back(
        self, engine: Engine, direct_file: StorageFile, num_blocks: int
    ) -> None:
        num_bytes = num_blocks * direct_file.alignment
        written, found = _aligned(num_bytes), _aligned(num_bytes)
        written[:] = np.frombuffer(_random_bytes(num_bytes), np.uint8)

        engine.write(direct_file, direct_file.alignment, written).wait()
        engine.read(direct_file, direct_file.alignment, found).wait()

        assert np.array_equal(found, written)
        assert (direct_file.path.read_bytes()[direct_file.alignment :]) == written.tobytes()

    @pytest.mark.parametrize("queue_depth", [1, 8])
    def test_large_transfers_are_cut_and_joined(self, file: StorageFile, queue_depth: int) -> None:
        num_bytes = 9 * MIB + 12345
        written = _random_bytes(num_bytes)
        found = bytearray(num_bytes)

        with self.make_engine(queue_depth=queue_depth, block_bytes=64 * KIB) as engine:
            engine.write(file, 777, written).wait()
            engine.read(file, 777, found).wait()

        assert found == written

    def test_many_tickets_in_flight_fill_the_right_memory(
        self, engine: Engine, any_file: StorageFile
    ) -> None:
        num_bytes = 64 * KIB
        written, found = _aligned(100 * num_bytes), _aligned(100 * num_bytes)
        written[:] = np.frombuffer(_random_bytes(100 * num_bytes), np.uint8)
        parts = [slice(i * num_bytes, (i + 1) * num_bytes) for i in range(100)]

        _wait_all([engine.write(any_file, part.start, written[part]) for part in parts])
        _wait_all([engine.read(any_file, part.start, found[part]) for part in reversed(parts)])

        assert np.array_equal(found, written)

    def test_tensors_are_moved_in_place(self, engine: Engine, file: StorageFile) -> None:
        written = torch.randn(3, 1001).to(torch.bfloat16)
        found = torch.zeros_like(written)

        engine.write(file, 2, written).wait()
        engine.read(file, 2, found).wait()
        engine.write(file, 0, torch.empty(0)).wait()
        engine.read(file, 0, np.empty((0, 4))).wait()

        assert torch.equal(found, written)

    @pytest.mark.slow
    @pytest.mark.stress
    def test_more_than_2_gib_in_one_transfer(self, engine: Engine, file: StorageFile) -> None:
        num_bytes = (1 << 31) + 4099  # Linux moves at most 2 GiB - 4 KiB per call
        marks = {0: 1, (1 << 31) - 4096: 2, (1 << 31) - 1: 3, 1 << 31: 4, num_bytes - 1: 5}
        os.ftruncate(file.fd, num_bytes)  # the rest is a hole
        for position, value in marks.items():
            os.pwrite(file.fd, bytes([value]), position)
        memory = np.full(num_bytes, 255, np.uint8)

        engine.read(file, 0, memory).wait()
        marked = {int(i): int(memory[i]) for i in np.flatnonzero(memory)}
        engine.write(file, num_bytes, memory).wait()

        assert marked == marks
        assert os.fstat(file.fd).st_size == 2 * num_bytes
        for position, value in marks.items():
            assert os.pread(file.fd, 1, num_bytes + position) == bytes([value])

    # ---- errors ----

    def test_a_read_beyond_the_end_says_what_was_found(
        self, engine: Engine, file: StorageFile
    ) -> None:
        engine.write(file, 0, bytes(3 * MIB)).wait()

        ticket = engine.read(file, 100, bytearray(5 * MIB))

        with pytest.raises(StorageError) as failure:
            ticket.wait()
        assert failure.value.errno == errno.ENODATA
        for part in (str(file.path), "offset 100", f"length {5 * MIB}", f"found {3 * MIB - 100}"):
            assert part in str(failure.value)

    def test_a_read_beyond_the_end_of_a_direct_file_says_what_was_found(
        self, engine: Engine, direct_file: StorageFile
    ) -> None:
        num_bytes = 4 * direct_file.alignment
        engine.write(direct_file, 0, _aligned(num_bytes)).wait()
        # Between two multiples of the alignment: the kernel's last count is none.
        os.truncate(direct_file.path, num_bytes - 100)

        ticket = engine.read(direct_file, 0, _aligned(num_bytes))

        with pytest.raises(StorageError, match=f"found {num_bytes - 100} ") as failure:
            ticket.wait()
        assert failure.value.errno == errno.ENODATA

    def test_each_wait_gives_the_same_error(self, engine: Engine, file: StorageFile) -> None:
        ticket = engine.read(file, 0, bytearray(1))

        messages = set()
        for _ in range(3):
            with pytest.raises(StorageError) as failure:
                ticket.wait()
            messages.add(str(failure.value))

        assert ticket.done()
        assert len(messages) == 1

    def test_a_full_device_is_an_error(self, engine: Engine) -> None:
        full = StorageFile(path=Path("/dev/full"), fd=os.open("/dev/full", os.O_RDWR))
        try:
            ticket = engine.write(full, 0, bytes(3 * MIB))

            with pytest.raises(StorageError, match="/dev/full") as failure:
                ticket.wait()
            assert failure.value.errno == errno.ENOSPC
        finally:
            full.close()

    def test_a_full_file_system_is_an_error(self, engine: Engine, tmp_path: Path) -> None:
        with _mounted_tmpfs(tmp_path / "tiny", num_bytes=MIB) as directory:
            file = open_file(directory / "file.bin", create=True)
            source = _aligned(8 * MIB)

            ticket = engine.write(file, 0, source)

            with pytest.raises(StorageError, match=str(file.path)) as failure:
                ticket.wait()
            file.close()
        assert failure.value.errno == errno.ENOSPC

    @pytest.mark.parametrize("num_bytes", [1, 3 * MIB])
    def test_a_closed_file_is_an_error(
        self, engine: Engine, file: StorageFile, num_bytes: int
    ) -> None:
        file.close()

        for ticket in (
            engine.read(file, 0, bytearray(num_bytes)),
            engine.write(file, 0, bytes(num_bytes)),
        ):
            with pytest.raises(StorageError, match=str(file.path)) as failure:
                ticket.wait()
            assert failure.value.errno == errno.EBADF
        with pytest.raises(StorageError, match=str(file.path)):
            engine.flush(file)

    def test_an_error_leaves_the_engine_usable(self, engine: Engine, file: StorageFile) -> None:
        with pytest.raises(StorageError):
            engine.read(file, 0, bytearray(20 * MIB)).wait()

        engine.write(file, 0, b"still here").wait()

        assert os.pread(file.fd, 10, 0) == b"still here"

    @pytest.mark.parametrize("wrong", ["offset", "length", "address"])
    def test_a_misaligned_direct_transfer_is_refused(
        self, engine: Engine, direct_file: StorageFile, wrong: str
    ) -> None:
        alignment = direct_file.alignment
        memory = _aligned(3 * alignment)
        start = 1 if wrong == "address" else 0
        stop = start + alignment - (1 if wrong == "length" else 0)
        offset = 1 if wrong == "offset" else 0

        with pytest.raises(ValueError, match=f"{alignment} bytes, found {wrong}") as failure:
            engine.read(direct_file, offset, memory[start:stop])

        assert isinstance(failure.value, ConfigError)
        assert str(direct_file.path) in str(failure.value)

    def test_unfit_memory_and_offsets_are_refused(self, engine: Engine, file: StorageFile) -> None:
        with pytest.raises(ConfigError, match="read-only"):
            engine.read(file, 0, b"constant")
        with pytest.raises(ConfigError, match="contiguous"):
            engine.write(file, 0, np.zeros((4, 4))[:, ::2])
        with pytest.raises(ConfigError, match="contiguous"):
            engine.write(file, 0, torch.zeros(4, 4).t()[1:])
        with pytest.raises(ConfigError, match="offset -1"):
            engine.read(file, -1, bytearray(1))
        with pytest.raises(ConfigError, match="range"):
            engine.read(file, (1 << 63) - 1, bytearray(1))
        with pytest.raises(TypeError):
            engine.write(file, 0, 17)  # type: ignore[arg-type]

    # ---- waiting ----

    def test_waiting_for_one_does_not_wait_for_another(self, file: StorageFile) -> None:
        def try_once(engine: Engine) -> bool:
            slow = _start_slow_reads(engine, file)
            engine.read(file, 0, bytearray(1), priority=Priority.NEEDED).wait(_WAIT_S)
            was_waiting_only_for_one = not slow[-1].done()
            _wait_all(slow)
            return was_waiting_only_for_one

        self._assert_happens(try_once, file)

    def test_a_timeout_leaves_the_transfer_in_flight(self, file: StorageFile) -> None:
        def try_once(engine: Engine) -> bool:
            slow = _start_slow_reads(engine, file)
            try:
                slow[-1].wait(0)
            except TimeoutError as error:
                timed_out = str(file.path) in str(error)
            else:
                timed_out = False
            _wait_all(slow)
            return timed_out

        self._assert_happens(try_once, file)

    def test_other_threads_run_while_one_waits(self, file: StorageFile) -> None:
        def try_once(engine: Engine) -> bool:
            counter, is_over = [0], threading.Event()
            thread = threading.Thread(target=_count_until, args=(counter, is_over))
            thread.start()
            slow = _start_slow_reads(engine, file)
            before = counter[0]
            slow[-1].wait(_WAIT_S)
            counted = counter[0] - before
            is_over.set()
            thread.join()
            _wait_all(slow)
            return counted > 0

        self._assert_happens(try_once, file)

    def test_an_urgent_read_overtakes_queued_write_back(self, file: StorageFile) -> None:
        def try_once(engine: Engine) -> bool:
            slow = _start_slow_reads(engine, file)  # nothing else starts before its next piece
            behind = engine.write(file, 0, bytes(_SLOW_BYTES), priority=Priority.WRITE_BACK)
            ahead = engine.read(file, 0, bytearray(_SLOW_BYTES), priority=Priority.PREFETCH)
            engine.read(file, 0, bytearray(MIB), priority=Priority.NEEDED).wait(_WAIT_S)
            needed_was_first = not ahead.done() and not behind.done()
            ahead.wait(_WAIT_S)
            write_back_was_last = not behind.done()
            _wait_all([*slow, behind])
            return needed_was_first and write_back_was_last

        self._assert_happens(try_once, file)

    def test_a_write_goes_on_while_more_urgent_reads_wait(self, file: StorageFile) -> None:
        memories = [np.empty(_SLOW_BYTES, np.uint8) for _ in range(3)]
        one_piece = bytes(64 * KIB)

        def try_once(engine: Engine) -> bool:
            reads = [engine.read(file, 0, memory, priority=Priority.NEEDED) for memory in memories]
            engine.write(file, 0, one_piece, priority=Priority.WRITE_BACK).wait(_WAIT_S)
            was_before_the_last_read = not reads[-1].done()
            _wait_all(reads)
            return was_before_the_last_read

        self._assert_happens(try_once, file, queue_depth=4)

    def test_tickets_can_be_awaited(self, engine: Engine, file: StorageFile) -> None:
        written = _random_bytes(300 * KIB)
        found = [bytearray(KIB) for _ in range(300)]

        async def move() -> None:
            await engine.write(file, 0, written)
            tickets = [engine.read(file, i * KIB, part) for i, part in enumerate(found)]
            await asyncio.gather(*(_wait_for(ticket) for ticket in (*tickets, tickets[0])))
            await tickets[0]

        asyncio.run(move())

        assert b"".join(found) == written

    def test_an_awaited_error_is_raised(self, engine: Engine, file: StorageFile) -> None:
        async def move() -> None:
            await engine.read(file, 0, bytearray(MIB))

        with pytest.raises(StorageError) as failure:
            asyncio.run(move())

        assert failure.value.errno == errno.ENODATA

    def test_the_event_loop_goes_on_while_a_ticket_is_awaited(self, file: StorageFile) -> None:
        async def count(engine: Engine) -> int:
            slow = _start_slow_reads(engine, file)
            task = asyncio.ensure_future(_wait_for(slow[-1]))
            turns = 0
            while not task.done():
                turns += 1
                await asyncio.sleep(0.0001)
            return turns

        def try_once(engine: Engine) -> bool:
            return asyncio.run(count(engine)) > 1

        self._assert_happens(try_once, file)

    def test_a_cancelled_task_leaves_the_transfer_in_flight(self, file: StorageFile) -> None:
        async def cancel(engine: Engine) -> bool:
            slow = _start_slow_reads(engine, file)
            task = asyncio.ensure_future(_wait_for(slow[-1]))
            await asyncio.sleep(0)
            was_in_flight = not slow[-1].done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await slow[-1]
            return was_in_flight

        self._assert_happens(lambda engine: asyncio.run(cancel(engine)), file)

    def test_several_threads_may_wait_for_one_ticket(
        self, engine: Engine, file: StorageFile
    ) -> None:
        engine.write(file, 0, bytes(16 * MIB)).wait()
        ticket = engine.read(file, 0, bytearray(16 * MIB))

        _run_threads(8, lambda _: ticket.wait(_WAIT_S))

        assert ticket.done()

    def test_a_hundred_threads_mix_reads_and_writes(
        self, engine: Engine, any_file: StorageFile
    ) -> None:
        num_bytes = 8 * KIB

        def work(number: int) -> None:
            memory, found = _aligned(num_bytes), _aligned(num_bytes)
            for turn in range(5):
                memory[:] = (number + turn) % 251
                engine.write(any_file, number * num_bytes, memory).wait(_WAIT_S)
                engine.read(any_file, number * num_bytes, found).wait(_WAIT_S)
                assert np.array_equal(memory, found)

        _run_threads(100, work)

        assert engine.stats().write_requests == 500

    # ---- ownership ----

    def test_memory_lives_until_the_transfer_is_over(
        self, engine: Engine, file: StorageFile
    ) -> None:
        written = _random_bytes(16 * MIB)
        source = np.frombuffer(written, np.uint8).copy()
        alive = weakref.ref(source)

        ticket = engine.write(file, 0, source)
        del source
        gc.collect()
        ticket.wait()

        assert os.pread(file.fd, len(written), 0) == written
        _assert_dies(alive)

    def test_a_dropped_ticket_is_carried_out(self, file: StorageFile) -> None:
        parts = [_random_bytes(MIB) for _ in range(20)]

        with self.make_engine() as engine:
            for i, part in enumerate(parts):
                engine.write(file, i * MIB, bytearray(part))

        assert file.path.read_bytes() == b"".join(parts)

    def test_memory_cannot_be_resized_in_flight(self, file: StorageFile) -> None:
        def try_once(engine: Engine) -> bool:
            slow = _start_slow_reads(engine, file)
            memory = bytearray(1)
            last = engine.read(file, 0, memory, priority=Priority.WRITE_BACK)
            try:
                memory.extend(b"more")
            except BufferError:
                was_refused = True
            else:
                was_refused = False
            last.wait(_WAIT_S)
            _wait_all(slow)
            return was_refused

        self._assert_happens(try_once, file)

    # ---- life ----

    def test_close_waits_for_what_is_in_flight(self, file: StorageFile) -> None:
        engine = self.make_engine()
        engine.open()
        written = _random_bytes(32 * MIB)

        tickets = [engine.write(file, i * MIB, written[i * MIB : (i + 1) * MIB]) for i in range(32)]
        engine.close()

        assert all(ticket.done() for ticket in tickets)
        assert file.path.read_bytes() == written
        _wait_all(tickets)

    def test_close_can_cancel_what_has_not_begun(self, file: StorageFile) -> None:
        os.ftruncate(file.fd, _SLOW_BYTES)

        def try_once() -> bool:
            engine = self.make_engine(queue_depth=1, block_bytes=64 * KIB)
            engine.open()
            slow = _start_slow_reads(engine, file)
            last = engine.write(file, 0, b"never written", priority=Priority.WRITE_BACK)
            engine.close(cancel=True)
            codes = [_errno_of(ticket) for ticket in (*slow, last)]
            assert all(ticket.done() for ticket in (*slow, last))
            assert set(codes) <= {None, errno.ECANCELED}
            was_cancelled = codes[-1] == errno.ECANCELED
            return was_cancelled and os.pread(file.fd, 5, 0) != b"never"

        assert any(try_once() for _ in range(_ATTEMPTS))

    def test_an_error_in_the_block_cancels(self, file: StorageFile) -> None:
        os.ftruncate(file.fd, _SLOW_BYTES)

        def try_once() -> bool:
            tickets: list[Ticket] = []

            def read_and_stop() -> None:
                with self.make_engine(queue_depth=1, block_bytes=64 * KIB) as engine:
                    tickets.extend(_start_slow_reads(engine, file))
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                read_and_stop()
            return _errno_of(tickets[-1]) == errno.ECANCELED

        assert any(try_once() for _ in range(_ATTEMPTS))

    def test_closing_a_file_waits_for_its_transfers(self, engine: Engine, tmp_path: Path) -> None:
        file = open_file(tmp_path / "closed.bin", create=True, direct=False)
        written = _random_bytes(32 * MIB)

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

    def test_registered_memory_moves_the_same_bytes(
        self, engine: Engine, any_file: StorageFile
    ) -> None:
        memory = _aligned(4 * MIB)
        written = _random_bytes(4 * MIB)

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
        memory = _aligned(MIB)

        for value in range(3):
            file = open_file(tmp_path / str(value), create=True)
            memory[:] = value
            engine.write(file, 0, memory).wait()
            file.close()

        for value in range(3):
            assert (tmp_path / str(value)).read_bytes() == bytes([value]) * MIB

    def test_flush_succeeds_after_writes(self, engine: Engine, any_file: StorageFile) -> None:
        engine.write(any_file, 0, _aligned(MIB)).wait()

        engine.flush(any_file)

        assert any_file.path.stat().st_size == MIB

    def _assert_happens(
        self, try_once: Callable[[Engine], bool], file: StorageFile, *, queue_depth: int = 1
    ) -> None:
        """Checks a law that can be seen only while a transfer is in flight.

        A broken engine never shows it; a right one does, unless the transfers are too quick.
        """
        os.ftruncate(file.fd, _SLOW_BYTES)
        with self.make_engine(queue_depth=queue_depth, block_bytes=64 * KIB) as engine:
            assert any(try_once(engine) for _ in range(_ATTEMPTS))


_SLOW_BYTES = 16 * MIB


async def _wait_for(ticket: Ticket) -> None:
    await ticket


def _errno_of(ticket: Ticket) -> int | None:
    try:
        ticket.wait(_WAIT_S)
    except StorageError as error:
        return error.errno
    return None


def _start_slow_reads(engine: Engine, file: StorageFile) -> list[Ticket]:
    return [
        engine.read(file, 0, np.empty(_SLOW_BYTES, np.uint8), priority=Priority.WRITE_BACK)
        for _ in range(2)
    ]


def _open_direct(path: Path) -> StorageFile:
    try:
        return open_file(path, create=True, direct=True)
    except StorageError as error:
        if error.errno == errno.EINVAL:
            pytest.skip(f"no O_DIRECT here: {error}")
        raise


def _random_bytes(num_bytes: int) -> bytes:
    return np.random.default_rng(num_bytes).bytes(num_bytes)


def _aligned(num_bytes: int) -> np.ndarray:
    """Returns zeros that start at a multiple of the alignment."""
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]


def _wait_all(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.wait(_WAIT_S)


def _run_threads(num: int, work: Callable[[int], None]) -> None:
    """Runs `work(0)`, `work(1)`, … in threads of their own, and raises the first error."""
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:  # noqa: BLE001  # raised below, in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _count_until(counter: list[int], is_over: threading.Event) -> None:
    while not is_over.wait(0.0001):
        counter[0] += 1


def _assert_dies(reference: "weakref.ref[np.ndarray]") -> None:
    # An idle thread may hold its last call's arguments a moment longer than the ticket.
    for _ in range(1000):
        gc.collect()
        if reference() is None:
            return
        threading.Event().wait(0.001)
    raise AssertionError("the memory is still held after the transfer")


def _resources() -> dict[str, int]:
    process = Path("/proc/self")
    num_pages = int((process / "statm").read_text().split()[1])
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "rss_bytes": num_pages * os.sysconf("SC_PAGE_SIZE"),
    }


@contextmanager
def _mounted_tmpfs(directory: Path, *, num_bytes: int) -> Iterator[Path]:
    """Mounts a file system of that size; skips the test where mounting is not allowed."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    if os.geteuid() != 0 or not _succeeds(command):
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield directory
    finally:
        assert _succeeds(["umount", str(directory)])


def _succeeds(command: list[str]) -> bool:
    try:
        # The commands are constants of this file.
        return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603
    except FileNotFoundError:
        return False
