"""The backend `fault`: errors, short transfers, delays and rates, by rule or at random."""

import errno
import mmap
import time
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest
from unit.storage.records import BLOCK, put

from offload._native import aio
from offload.errors import ConfigError, StorageError
from offload.sizes import KIB, MIB
from offload.storage.engine import Engine, PathSettings, Priority
from offload.storage.faults import Fault, FaultPlan
from offload.storage.file import open_file
from offload.storage.store import BlockStore

pytestmark = pytest.mark.skipif(
    not aio.available(), reason=f"no compiled backend: {aio.unavailable_because()}"
)


@pytest.fixture
def file(tmp_path):
    file = open_file(tmp_path / "file", create=True, direct=False)
    yield file
    file.close()


def fault_engine(*faults, queue_depth=1, **plan):
    plan = FaultPlan(faults=faults, **plan)
    return Engine("fault", queue_depth=queue_depth, block_bytes=64 * KIB, faults=plan)


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS]
)
def test_an_error_names_path_offset_length_and_errno(file, code):
    where = Fault(operation="write", start=3 * 64 * KIB, end=4 * 64 * KIB, error=code)
    with fault_engine(where) as engine:
        ticket = engine.write(file, 0, bytes(MIB))

        with pytest.raises(StorageError) as failure:
            ticket.wait(60)

    assert failure.value.errno == code
    parts = (str(file.path), "offset 0", f"length {MIB}", f"found {192 * KIB}")
    for part in (*parts, errno.errorcode[code]):
        assert part in str(failure.value)


def test_skip_and_count_choose_the_calls(file):
    with fault_engine(Fault(operation="write", skip=1, count=2, error=errno.EIO)) as engine:
        outcomes = []
        for _ in range(5):
            try:
                engine.write(file, 0, b"x").wait(60)
                outcomes.append("done")
            except StorageError:
                outcomes.append("failed")

    assert outcomes == ["done", "failed", "failed", "done", "done"]


def test_reads_and_writes_have_their_own_faults(file):
    with fault_engine(Fault(operation="read", error=errno.EIO)) as engine:
        engine.write(file, 0, bytes(10)).wait(60)

        with pytest.raises(StorageError, match="EIO"):
            engine.read(file, 0, bytearray(10)).wait(60)


def test_short_and_interrupted_calls_are_continued(file):
    written = bytes(range(256)) * 1000
    found = bytearray(len(written))
    faults = (
        Fault(probability=0.5, max_bytes=777),
        Fault(probability=0.3, error=errno.EINTR),
    )
    with fault_engine(*faults, queue_depth=4, seed=3) as engine:
        engine.write(file, 5, written).wait(60)
        engine.read(file, 5, found).wait(60)

    assert found == written


def test_an_error_that_is_kept_keeps_no_memory(tmp_path):
    owner = np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)
    dies = weakref.ref(owner)
    memory = memoryview(owner)
    with fault_engine(Fault(operation="read", error=errno.EIO)) as engine:
        store = BlockStore(tmp_path / "store", engine=engine, block_bytes=BLOCK)
        store.create()
        put(store, "a", b"x")
        ticket = store.read("a", memory)
        with pytest.raises(StorageError) as failure:
            ticket.wait()
        store.close()

    traceback.clear_frames(failure.value.__traceback__)
    del owner, memory, ticket

    assert dies() is None, "the cause of the error has frames too"


@pytest.mark.parametrize("queue_depth", [1, 8])
def test_random_faults_depend_on_the_seed_and_not_on_threads(file, queue_depth):
    def outcomes(seed):
        fault = Fault(operation="write", probability=0.3, error=errno.EIO)
        with fault_engine(fault, queue_depth=queue_depth, seed=seed) as engine:
            tickets = [engine.write(file, i * 64 * KIB, bytes(8)) for i in range(64)]
            return [_fails(ticket) for ticket in tickets]

    first, again, other = outcomes(1), outcomes(1), outcomes(2)

    assert first == again
    assert first != other
    assert 0 < sum(first) < 64


def test_a_failed_flush_is_raised_and_counted(file):
    with fault_engine(Fault(operation="flush", skip=1, count=1, error=errno.EIO)) as engine:
        engine.write(file, 0, b"x").wait(60)
        engine.flush(file)

        with pytest.raises(StorageError, match="EIO"):
            engine.flush(file)
        engine.flush(file)


def test_a_delayed_transfer_holds_up_no_other(file):
    with fault_engine(Fault(start=MIB, end=2 * MIB, delay_s=0.3), queue_depth=2) as engine:
        slow = engine.write(file, MIB, b"slow")
        engine.write(file, 0, b"quick").wait(60)
        was_in_flight = not slow.done()
        slow.wait(60)

    assert was_in_flight


def test_reads_and_writes_share_the_time_only_on_a_half_duplex_path(file):
    def best_s(*, is_half_duplex):
        rates = {"read_bytes_per_s": 40 * MIB, "write_bytes_per_s": 40 * MIB}
        with fault_engine(queue_depth=8, is_half_duplex=is_half_duplex, **rates) as engine:
            engine.write(file, 0, bytes(4 * MIB)).wait(60)
            return min(_seconds(lambda: both(engine)) for _ in range(3))

    def both(engine):
        # Small parts in turn, so that both directions are in flight all the time.
        part = 64 * KIB
        tickets = []
        for i in range(64):
            tickets.append(engine.read(file, i * part, bytearray(part)))
            tickets.append(engine.write(file, i * part, bytes(part), priority=Priority.NEEDED))
        for ticket in tickets:
            ticket.wait(60)

    assert best_s(is_half_duplex=False) < best_s(is_half_duplex=True)


def test_each_path_has_its_own_queue_settings_and_counters(tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    settings = [
        PathSettings(root=roots[0], backend="threads", queue_depth=2, block_bytes=4096),
        PathSettings(
            root=roots[1],
            backend="fault",
            queue_depth=3,
            faults=FaultPlan(faults=(Fault(error=errno.EIO),)),
        ),
    ]
    files = [open_file(root / "file", create=True, direct=False) for root in (*roots, tmp_path)]
    with Engine("threads", paths=settings) as engine:
        engine.write(files[0], 0, bytes(100)).wait(60)
        with pytest.raises(StorageError, match="EIO"):
            engine.write(files[1], 0, bytes(100)).wait(60)
        engine.write(files[2], 0, bytes(7)).wait(60)
        stats = engine.path_stats()
        total = engine.stats()
    for file in files:
        file.close()

    assert [each.root for each in stats] == [*roots, None]
    assert [each.backend for each in stats] == ["threads", "fault", "threads"]
    assert [each.queue_depth for each in stats] == [2, 3, 8]
    assert [each.counters.write_bytes for each in stats] == [100, 0, 7]
    assert total.write_requests == 3


def test_a_slow_path_does_not_hold_up_another(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    slow = FaultPlan(faults=(Fault(delay_s=0.3),))
    settings = [
        PathSettings(root=tmp_path / "a", backend="fault", queue_depth=1, faults=slow),
        PathSettings(root=tmp_path / "b", backend="threads", queue_depth=1),
    ]
    files = [open_file(tmp_path / name / "f", create=True, direct=False) for name in "ab"]
    with Engine(paths=settings) as engine:
        waiting = [engine.write(files[0], 0, b"x") for _ in range(3)]
        engine.write(files[1], 0, b"x").wait(60)
        was_in_flight = not waiting[-1].done()
        engine.close(cancel=True)
    for file in files:
        file.close()

    assert was_in_flight


def test_faults_need_the_backend_that_makes_them():
    with pytest.raises(ConfigError, match="faults"):
        Engine("threads", faults=FaultPlan())
    with pytest.raises(ConfigError, match="queue_depth"):
        Engine(paths=[PathSettings(root=Path("a"), queue_depth=0)])


def _fails(ticket):
    try:
        ticket.wait(60)
    except StorageError:
        return True
    return False


def _seconds(work):
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


@pytest.mark.parametrize(("operation", "other"), [("read", "write"), ("write", "read")])
def test_within_a_priority_one_direction_does_not_wait_for_all_of_the_other(file, operation, other):
    with fault_engine(Fault(delay_s=0.01), queue_depth=2) as engine:
        engine.write(file, 0, bytes(MIB)).wait()
        long = getattr(engine, operation)(file, 0, bytearray(MIB), priority=Priority.WRITE_BACK)
        short = getattr(engine, other)(
            file, MIB if other == "write" else 0, bytearray(KIB), priority=Priority.WRITE_BACK
        )

        short.wait()

        assert not long.done()
        long.wait()
