import errno
import logging
import mmap
import os
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offload.errors import ConfigError, StorageError, StoreError
from offload.storage import data_file
from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.summary import has_commit, peek

BLOCK = 4096


def memory_of(content, padded=None):
    """Page-aligned memory that begins with `content`; the rest is 0xAA."""
    length = padded or max(BLOCK, -(-len(content) // BLOCK) * BLOCK)
    memory = memoryview(mmap.mmap(-1, length))
    memory[:] = content + b"\xaa" * (length - len(content))
    return memory


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


@pytest.fixture
def store(tmp_path, engine):
    store = BlockStore(
        tmp_path / "deep" / "store",
        engine=engine,
        block_bytes=BLOCK,
        describe=lambda record: f"weight of {record}",
    )
    store.create()
    yield store
    store.close()


def put(store, record, content):
    store.write(record, memory_of(content), num_bytes=len(content)).wait()


def get(store, record):
    num_bytes = store.num_bytes(record)
    memory = memory_of(b"", padded=max(BLOCK, -(-num_bytes // BLOCK) * BLOCK))
    store.read(record, memory).wait()
    return bytes(memory[:num_bytes])


# Opening and closing.


def test_files_and_directories_are_private(store):
    put(store, "a", b"x")
    store.commit({})

    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.root.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.root.iterdir()} == {0o600}
    assert sorted(path.name for path in store.root.iterdir()) == [
        "data-0",
        "manifest-0000000001",
        "offload-owner",
    ]


def test_open_and_close_may_be_repeated(store):
    store.commit({})
    store.close()
    store.close()

    store.open()
    store.open()

    assert store.records() == []


def test_a_closed_store_says_so(tmp_path, engine):
    store = BlockStore(tmp_path, engine=engine)

    for call in (store.records, store.stats, lambda: "a" in store, lambda: store.head):
        with pytest.raises(StoreError, match="is closed"):
            call()
    with pytest.raises(StoreError, match="cannot commit to store"):
        store.commit({})


def test_create_replaces_what_a_start_left_that_never_committed(store, engine):
    put(store, "a", b"x" * 9 * BLOCK)
    store.close()
    (store.root / "manifest-0000000001.tmp").write_bytes(b"half")

    store.create()

    assert store.records() == []
    assert store.head is None
    assert store.stats().file_bytes == 0
    assert sorted(path.name for path in store.root.iterdir()) == ["data-0", "offload-owner"]


@pytest.mark.parametrize("name", ["notes.txt", "data-1", "data-0", "manifest-1"])
def test_create_keeps_what_is_not_its_own(tmp_path, engine, name):
    (tmp_path / name).write_text("mine")

    with pytest.raises(StoreError, match=f"found `{name}`"):
        BlockStore(tmp_path, engine=engine).create()

    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_create_refuses_a_store_with_a_commit(store):
    store.commit({})
    store.close()

    with pytest.raises(StoreError, match="expected no commit there"):
        store.create()


def test_create_refuses_a_file(tmp_path, engine):
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreError, match="found a file"):
        BlockStore(tmp_path / "file", engine=engine).create()


def test_open_changes_nothing_where_no_store_is(tmp_path, engine):
    for root in (tmp_path, tmp_path / "absent"):
        for read_only in (False, True):
            with pytest.raises(StoreError):
                BlockStore(root, engine=engine).open(read_only=read_only)

    assert list(tmp_path.iterdir()) == []


def test_a_second_store_is_refused_and_reads_on(store, engine):
    put(store, "a", b"one")
    store.commit({"step": 1})
    second = BlockStore(store.root, engine=engine)

    with pytest.raises(StoreError, match="another store object of this process"):
        second.open()
    with pytest.raises(StoreError, match="expected no commit there"):
        second.create()
    second.open(read_only=True)

    assert get(second, "a") == b"one"
    second.close()


def test_a_reader_is_told_when_the_owner_has_moved_on(store, engine):
    put(store, "a", b"one")
    store.commit({})
    reader = BlockStore(store.root, engine=engine)
    reader.open(read_only=True)
    for content in (b"two", b"three"):
        put(store, "a", content)
        store.commit({})

    with pytest.raises(StoreError, match="has committed since"):
        get(reader, "a")

    reader.close()
    reader.open(read_only=True)
    assert get(reader, "a") == b"three"
    reader.close()


def test_a_read_only_store_is_not_changed(store):
    put(store, "a", b"one")
    store.commit({})
    store.close()
    before = {path: path.read_bytes() for path in store.root.iterdir()}
    store.open(read_only=True)

    for call in (
        lambda: put(store, "a", b"two"),
        lambda: store.discard("a"),
        lambda: store.commit({}),
    ):
        with pytest.raises(StoreError, match="expected it to be open for writing"):
            call()

    assert {path: path.read_bytes() for path in store.root.iterdir()} == before


def test_an_existing_store_keeps_its_block_size(store, engine, caplog):
    put(store, "a", b"x" * (BLOCK + 1))
    store.commit({})
    store.close()
    other = BlockStore(store.root, engine=engine, block_bytes=2 * BLOCK)

    with caplog.at_level(logging.WARNING, "offload.storage"):
        other.open()

    assert other.block_bytes == BLOCK
    assert "keeps its blocks of 4 KiB" in caplog.text
    assert get(other, "a") == b"x" * (BLOCK + 1)
    other.close()


@pytest.mark.parametrize("block_bytes", [0, 512, 4097, -4096])
def test_odd_block_sizes_are_refused(tmp_path, engine, block_bytes):
    with pytest.raises(ConfigError, match="multiple of 4096"):
        BlockStore(tmp_path, engine=engine, block_bytes=block_bytes)


def test_what_no_commit_published_is_gone_after_a_restart(store):
    put(store, "a", b"old")
    store.commit({"step": 1})
    put(store, "a", b"new")
    put(store, "b", b"new")
    store.close()

    store.open()

    assert store.records() == ["a"]
    assert get(store, "a") == b"old"
    assert store.stats().live_bytes == BLOCK


# Records.


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


# Commits.


def test_head_is_what_was_committed(store, engine):
    assert store.head is None

    report = store.commit({"step": 3, "layout": {"w": [1, 2]}, "shape": (1, 2)})

    expected = {"step": 3, "layout": {"w": [1, 2]}, "shape": [1, 2], "schema": 2}
    head = store.head
    assert head.pop("committed_at") > 1.7e9
    assert head == expected
    assert report.sequence == 1
    store.close()
    store.open()
    assert store.head["committed_at"] > 1.7e9
    assert {**store.head, **expected} == store.head


@pytest.mark.parametrize(
    "head", [{"schema": 2}, {"committed_at": 0}, {"a": object()}, {"a": {1, 2}}, {(1,): 1}]
)
def test_a_head_that_cannot_be_kept_is_refused(store, head):
    put(store, "a", b"x")

    with pytest.raises(ConfigError, match="cannot commit"):
        store.commit(head)

    assert store.head is None
    assert store.commit({}).sequence == 1


def test_the_last_two_manifests_are_kept(store):
    for _ in range(4):
        store.commit({})

    assert sorted(path.name for path in store.root.glob("manifest*")) == [
        "manifest-0000000003",
        "manifest-0000000004",
    ]


def test_versions_published_by_the_last_commit_keep_their_blocks(store):
    put(store, "a", b"old" * BLOCK)
    store.commit({})
    taken = store.stats().live_bytes

    for _ in range(5):
        put(store, "a", b"new" * BLOCK)
    assert store.stats().live_bytes == 2 * taken
    store.commit({})

    assert store.stats().live_bytes == taken


def test_without_durability_there_is_no_commit_and_no_sync(tmp_path, engine, monkeypatch):
    def refuse(fd):
        raise AssertionError("synced")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os, "fdatasync", refuse)
    store = BlockStore(tmp_path / "s", engine=engine, block_bytes=BLOCK, durability="none")
    store.create()
    put(store, "a", b"one")
    put(store, "a", b"two")

    with pytest.raises(StoreError, match="durability"):
        store.commit({})

    assert store.stats().live_bytes == BLOCK
    assert get(store, "a") == b"two"
    store.close()


def test_peek_takes_nothing_and_changes_nothing(store):
    put(store, "a", b"x" * (BLOCK + 1))
    put(store, "b", b"")
    assert not has_commit(store.root)
    store.commit({"step": 7})
    before = {path: path.stat().st_mtime_ns for path in store.root.iterdir()}

    summary = peek(store.root)

    assert has_commit(store.root)
    assert (summary.schema, summary.sequence, summary.block_bytes) == (2, 1, BLOCK)
    assert (summary.num_records, summary.num_bytes) == (2, BLOCK + 1)
    assert summary.bytes_by_path == {store.root: 2 * BLOCK}
    assert summary.head["step"] == 7
    assert summary.owner.pid == os.getpid()
    assert {path: path.stat().st_mtime_ns for path in store.root.iterdir()} == before
    assert not has_commit(store.root / "absent")
