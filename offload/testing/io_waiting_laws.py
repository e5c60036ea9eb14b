"""Laws of the I/O engine: who waits for what, and what runs meanwhile."""

import asyncio
import errno
import threading

import numpy as np
import pytest

from offload.errors import StorageError
from offload.sizes import KIB, MIB
from offload.storage.engine import Engine, Priority, Ticket
from offload.storage.file import StorageFile
from offload.testing.io_cases import (
    SLOW_BYTES,
    WAIT_S,
    aligned,
    random_bytes,
    run_threads,
    start_slow_reads,
    wait_all,
)
from offload.testing.io_laws import IOLaws


class WaitingLaws(IOLaws):
    """Who waits for what, and what runs meanwhile."""

    def test_waiting_for_one_does_not_wait_for_another(self, file: StorageFile) -> None:
        def try_once(engine: Engine) -> bool:
            slow = start_slow_reads(engine, file)
            engine.read(file, 0, bytearray(1), priority=Priority.NEEDED).wait(WAIT_S)
            was_waiting_only_for_one = not slow[-1].done()
            wait_all(slow)
            return was_waiting_only_for_one

        self._assert_happens(try_once, file)

    def test_a_timeout_leaves_the_transfer_in_flight(self, file: StorageFile) -> None:
        def try_once(engine: Engine) -> bool:
            slow = start_slow_reads(engine, file)
            try:
                slow[-1].wait(0)
            except TimeoutError as error:
                timed_out = str(file.path) in str(error)
            else:
                timed_out = False
            wait_all(slow)
            return timed_out

        self._assert_happens(try_once, file)

    def test_other_threads_run_while_one_waits(self, file: StorageFile) -> None:
        def try_once(engine: Engine) -> bool:
            counter, is_over = [0], threading.Event()
            thread = threading.Thread(target=_count_until, args=(counter, is_over))
            thread.start()
            slow = start_slow_reads(engine, file)
            before = counter[0]
            slow[-1].wait(WAIT_S)
            counted = counter[0] - before
            is_over.set()
            thread.join()
            wait_all(slow)
            return counted > 0

        self._assert_happens(try_once, file)

    def test_an_urgent_read_overtakes_queued_write_back(self, file: StorageFile) -> None:
        def try_once(engine: Engine) -> bool:
            slow = start_slow_reads(engine, file)  # nothing else starts before its next piece
            behind = engine.write(file, 0, bytes(SLOW_BYTES), priority=Priority.WRITE_BACK)
            ahead = engine.read(file, 0, bytearray(SLOW_BYTES), priority=Priority.PREFETCH)
            engine.read(file, 0, bytearray(MIB), priority=Priority.NEEDED).wait(WAIT_S)
            needed_was_first = not ahead.done() and not behind.done()
            ahead.wait(WAIT_S)
            write_back_was_last = not behind.done()
            wait_all([*slow, behind])
            return needed_was_first and write_back_was_last

        self._assert_happens(try_once, file)

    def test_a_write_goes_on_while_more_urgent_reads_wait(self, file: StorageFile) -> None:
        memories = [np.empty(SLOW_BYTES, np.uint8) for _ in range(3)]
        one_piece = bytes(64 * KIB)

        def try_once(engine: Engine) -> bool:
            reads = [engine.read(file, 0, memory, priority=Priority.NEEDED) for memory in memories]
            engine.write(file, 0, one_piece, priority=Priority.WRITE_BACK).wait(WAIT_S)
            was_before_the_last_read = not reads[-1].done()
            wait_all(reads)
            return was_before_the_last_read

        self._assert_happens(try_once, file, queue_depth=4)

    def test_tickets_can_be_awaited(self, engine: Engine, file: StorageFile) -> None:
        written = random_bytes(300 * KIB)
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
            slow = start_slow_reads(engine, file)
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
            slow = start_slow_reads(engine, file)
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

        run_threads(8, lambda _: ticket.wait(WAIT_S))

        assert ticket.done()

    def test_a_hundred_threads_mix_reads_and_writes(
        self, engine: Engine, any_file: StorageFile
    ) -> None:
        num_bytes = 8 * KIB

        def work(number: int) -> None:
            memory, found = aligned(num_bytes), aligned(num_bytes)
            for turn in range(5):
                memory[:] = (number + turn) % 251
                engine.write(any_file, number * num_bytes, memory).wait(WAIT_S)
                engine.read(any_file, number * num_bytes, found).wait(WAIT_S)
                assert np.array_equal(memory, found)

        run_threads(100, work)

        assert engine.stats().write_requests == 500


async def _wait_for(ticket: Ticket) -> None:
    await ticket


def _count_until(counter: list[int], is_over: threading.Event) -> None:
    while not is_over.wait(0.0001):
        counter[0] += 1
