import errno
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from unit.storage.records import BLOCK, get, memory_of, put

from offload.errors import ConfigError, StorageError, StoreError
from offload.storage import data_file
from offload.storage.engine import Engine
from offload.storage.record_transfers import RecordTransfers
from offload.storage.store import BlockStore


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 70 * BLOCK + 3])
def test_a_record_of_any_length_comes_back(store, num_bytes):
    content = bytes(i % 251 for i in range(num_bytes))

    put(store, "a", content)
    before = get(store, "a")
    store.commit({})
    store.close()
    store.open()

    assert before == get(store, "a") == content
    assert store.num_bytes("a") == num_bytes
    assert "a" in store


def test_a_close_that_is_interrupted_leaves_no_file_open(store, monkeypatch):
    put(store, "a", b"x")
    with monkeypatch.context() as patched:
        patched.setattr(RecordTransfers, "wait_all", mock.Mock(side_effect=KeyboardInterrupt))

        with pytest.raises(KeyboardInterrupt):
            store.close()

    targets = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    assert not [target for target in targets if target.startswith(str(store.root))]


def test_a_missing_record_says_so(store):
    for call in (store.num_bytes, lambda record: store.read(record, memory_of(b""))):
        with pytest.raises(StoreError, match="no record `b`"):
            call("b")
    store.discard("b")


def test_a_discarded_record_is_not_revived_by_its_write_in_flight(store):
    ticket = store.write("a", memory_of(b"x"), num_bytes=1)
    store.discard("a")

    ticket.wait()

    assert "a" not in store
    assert store.stats().live_bytes == 0


def test_a_version_is_current_only_once_it_was_waited_for(store):
    put(store, "a", b"old")
    ticket = store.write("a", memory_of(b"new"), num_bytes=3)

    assert get(store, "a") == b"old"
    ticket.wait()
    ticket.wait()
    assert get(store, "a") == b"new"


def test_a_read_is_not_disturbed_by_later_writes(store):
    put(store, "a", b"old" * BLOCK)
    memory = memory_of(b"", padded=3 * BLOCK)
    ticket = store.read("a", memory)
    for fill in (b"1", b"2", b"3", b"4"):
        put(store, "a", fill * 3 * BLOCK)

    ticket.wait()

    assert bytes(memory) == b"old" * BLOCK
    assert store.stats().live_bytes == 3 * BLOCK


def test_only_whole_blocks_can_be_read(store):
    put(store, "a", b"x" * (2 * BLOCK + 5))
    memory = memory_of(b"", padded=3 * BLOCK)

    for offset, num_bytes in (
        (1, None),
        (0, 5),
        (BLOCK, BLOCK + 4),
        (-BLOCK, None),
        (0, 3 * BLOCK),
    ):
        with pytest.raises(ConfigError, match="whole blocks of 4 KiB within 8197 bytes"):
            store.read("a", memory, offset=offset, num_bytes=num_bytes)
    store.read("a", memory, offset=BLOCK).wait()

    assert bytes(memory[: BLOCK + 5]) == b"x" * (BLOCK + 5)
    assert bytes(memory[2 * BLOCK :]) == b"\xaa" * BLOCK


def test_memory_that_does_not_fit_is_refused(store):
    put(store, "a", b"x" * (BLOCK + 1))

    with pytest.raises(ConfigError, match="at least 8192 bytes"):
        store.read("a", memory_of(b""))
    with pytest.raises(ConfigError, match="multiple of 4096, found 100 bytes"):
        store.write("a", memory_of(b"")[:100])
    with pytest.raises(ConfigError, match="weight of a"):
        store.write("a", memory_of(b""), num_bytes=BLOCK + 1)
    assert store.stats().live_bytes == 2 * BLOCK


def test_bytes_are_counted_with_their_padding(store):
    put(store, "a", b"x" * (BLOCK + 1))
    get(store, "a")
    report = store.commit({})

    stats = store.stats()

    assert (stats.write_bytes, stats.read_bytes) == (2 * BLOCK, 2 * BLOCK)
    manifest_bytes = (store.root / "manifest-0000000001").stat().st_size
    assert stats.commit_bytes == report.num_bytes == manifest_bytes
    assert stats.file_bytes == store.data_path.stat().st_size


def test_close_waits_for_what_is_in_flight(store):
    tickets = [store.write(str(i), memory_of(b"x" * 64 * BLOCK)) for i in range(8)]

    store.close()

    assert all(ticket.done() for ticket in tickets)


def test_a_write_that_fails_leaves_the_version_before(store, engine, monkeypatch):
    class FailedTicket:
        def wait(self, timeout_s=None):
            raise StorageError("the device is gone", errno=errno.EIO)

        def done(self):
            return True

    put(store, "a", b"old")
    monkeypatch.setattr(engine, "write", lambda *args, **options: FailedTicket())
    ticket = store.write("a", memory_of(b"new"), num_bytes=3)

    for _ in range(2):
        with pytest.raises(StorageError, match=r"record `a` \(weight of a\).*device is gone"):
            ticket.wait()

    assert get(store, "a") == b"old"
    assert store.stats().live_bytes == BLOCK


def test_a_write_that_cannot_start_takes_no_blocks(store, engine, monkeypatch):
    def refuse(*args, **options):
        raise StoreError("closed")

    monkeypatch.setattr(engine, "write", refuse)

    with pytest.raises(StoreError, match="closed"):
        store.write("a", memory_of(b"new"))

    assert store.stats().live_bytes == 0


def test_a_timeout_leaves_the_ticket_as_it_was(store, engine, monkeypatch):
    class SlowTicket:
        is_done = False

        def wait(self, timeout_s=None):
            if not self.is_done:
                raise TimeoutError

        def done(self):
            return self.is_done

    slow = SlowTicket()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "write", lambda *args, **options: slow)
        ticket = store.write("a", memory_of(b""))

    with pytest.raises(TimeoutError):
        ticket.wait(0.0)
    assert "a" not in store
    assert not ticket.done()
    slow.is_done = True
    ticket.wait(0.0)

    assert "a" in store


def test_many_threads_write_read_and_commit(store):
    """Each has its own record; commits run among them."""

    def work(number):
        for step in range(8):
            content = bytes([number, step]) * (BLOCK // 2 + number)
            put(store, str(number), content)
            assert get(store, str(number)) == content
            if number % 4 == 0:
                store.commit({"step": step})

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))

    store.commit({})
    needed = sum(-(-store.num_bytes(record) // BLOCK) for record in store.records())
    assert store.stats().live_bytes == needed * BLOCK


@pytest.mark.parametrize("backend", ["libaio", "threads", "aiofiles"])
@pytest.mark.parametrize("directory", ["/tmp", "/dev/shm"])  # the second refuses O_DIRECT
def test_every_backend_carries_a_store(backend, directory):
    content = bytes(i % 251 for i in range(9 * BLOCK + 1))
    engine = Engine(backend)
    try:
        engine.open()
    except StorageError as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(dir=directory) as root, engine:
        store = BlockStore(Path(root) / "s", engine=engine, block_bytes=BLOCK)
        store.create()
        put(store, "a", content)
        store.commit({})
        store.close()
        store.open()

        assert get(store, "a") == content

        store.close()


# Space.


def test_capacity_is_a_hard_limit_and_the_message_says_what_is_free(tmp_path, engine):
    store = BlockStore(
        tmp_path / "s", engine=engine, block_bytes=BLOCK, capacity_bytes=8 * BLOCK + 100
    )
    store.create()
    put(store, "a", b"x" * 5 * BLOCK)

    with pytest.raises(StorageError, match=r"record `b`.*needs 4 KiB more, found 0 B") as caught:
        put(store, "b", b"x" * 4 * BLOCK)

    assert caught.value.errno == errno.ENOSPC
    assert store.stats().file_bytes == 8 * BLOCK
    store.discard("a")
    put(store, "b", b"y" * 8 * BLOCK)  # the freed blocks and the rest, in pieces or not
    assert get(store, "b") == b"y" * 8 * BLOCK
    store.close()


def test_a_full_disk_shows_when_the_file_grows(store, monkeypatch):
    put(store, "a", b"x" * 60 * BLOCK)
    allocate = os.posix_fallocate
    asked = []

    def almost_full(fd, offset, length):
        asked.append(length)
        if length > 10 * BLOCK:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", almost_full)

    put(store, "b", b"y" * 12 * BLOCK)  # 4 are free, 8 more fit: less than a usual step
    with pytest.raises(StorageError, match="cannot write record `c`") as caught:
        put(store, "c", b"z" * 11 * BLOCK)

    assert caught.value.errno == errno.ENOSPC
    assert asked == [64 * BLOCK, 8 * BLOCK, 64 * BLOCK, 11 * BLOCK]
    assert get(store, "b") == b"y" * 12 * BLOCK


def test_a_file_system_that_cannot_reserve_space_is_grown_without(store, monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    put(store, "a", b"x" * 5)

    assert store.stats().file_bytes == data_file._GROW_BLOCKS * BLOCK
    assert get(store, "a") == b"x" * 5
