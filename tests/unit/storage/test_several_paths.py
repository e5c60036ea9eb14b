"""One store over several paths: where blocks go, what is published, what a restart finds."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
from storage_memory import content, get, put

from offload.errors import ConfigError, CorruptStateError, StorageError, StoreError
from offload.policy import resolve_striping
from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath
from offload.storage.summary import has_commit, peek
from offload.storage.verify import verify

BLOCK = 4096


def live_blocks(store):
    return [path.live_bytes // BLOCK for path in store.stats().paths]


@pytest.fixture
def engines():
    engines = [Engine() for _ in range(3)]
    for engine in engines:
        engine.open()
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
def make(tmp_path, engines):
    made = []

    def make(*names, striping="modulo", **options):
        paths = [
            path if isinstance(path, StorePath) else StorePath(root=tmp_path / path / "store")
            for path in names
        ]
        store = BlockStore(
            paths,
            engine=engines[: len(paths)],
            block_bytes=BLOCK,
            striping=resolve_striping(striping),
            **options,
        )
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def test_records_lie_on_all_paths_and_come_back(make):
    store = make("a", "b", "c", striping="adaptive")
    store.create()
    sizes = {str(i): (i % 5) * BLOCK + i for i in range(20)}
    for record, num_bytes in sizes.items():
        put(store, record, num_bytes, fill=int(record))

    store.commit({"step": 1})
    store.close()
    store.open()

    assert min(live_blocks(store)) > 0
    for record, num_bytes in sizes.items():
        assert get(store, record) == content(num_bytes, fill=int(record))
    assert verify(store).is_ok


def test_each_path_has_its_data_file_and_the_manifest(make):
    store = make("a", "b")
    store.create()
    put(store, "x", BLOCK)

    store.commit({})

    for index, root in enumerate(store.roots):
        assert sorted(path.name for path in root.iterdir()) == [
            f"data-{index}",
            "manifest-0000000001",
            "offload-owner",
        ]
    left, right = (root / "manifest-0000000001" for root in store.roots)
    assert left.read_bytes() == right.read_bytes()


def test_a_store_is_found_from_any_of_its_paths(make, engines):
    store = make("a", "b")
    store.create()
    for record in "xyz":
        put(store, record, 3 * BLOCK)
    store.commit({"step": 4})
    store.close()

    for root in store.roots:
        assert has_commit(root)
        assert peek(root).num_records == 3
        assert list(peek(root).bytes_by_path) == store.roots
        other = BlockStore(root, engine=engines[0])
        other.open(read_only=True)
        assert verify(other).is_ok
        other.close()


def test_the_newest_complete_manifest_of_any_path_wins(make, caplog):
    store = make("a", "b")
    store.create()
    for step in (1, 2):
        put(store, "x", BLOCK, fill=step)
        store.commit({"step": step})
    store.close()
    (store.roots[0] / "manifest-0000000002").write_bytes(b"damaged")

    with caplog.at_level(logging.WARNING, "offload.storage"):
        store.open()

    assert store.head["step"] == 2
    assert get(store, "x") == content(BLOCK, fill=2)
    assert "manifest-0000000002" in caplog.text


def test_a_copied_store_does_not_lead_back_to_the_original(make, tmp_path, engines):
    store = make("a", "b")
    store.create()
    put(store, "x", 3 * BLOCK, fill=1)
    store.commit({"step": 1})
    store.close()
    copies = [tmp_path / f"copy-{i}" for i in range(2)]
    for root, copy in zip(store.roots, copies, strict=True):
        shutil.copytree(root, copy)
    store.open()
    store.commit({"step": 2})
    store.close()

    copied = BlockStore([StorePath(root=copy) for copy in copies], engine=engines[0])
    copied.open()

    assert copied.head["step"] == 1
    assert copied.roots == copies
    copied.close()


def test_paths_in_another_order_are_the_same_store(make):
    store = make("a", "b")
    store.create()
    put(store, "x", 3 * BLOCK)
    put(store, "y", 3 * BLOCK)
    store.commit({})
    store.close()

    swapped = make("b", "a")
    swapped.open()

    assert get(swapped, "x") == get(swapped, "y") == content(3 * BLOCK)


def test_a_new_path_joins_and_a_left_one_takes_nothing_new(make, caplog):
    store = make("a", "b")
    store.create()
    for record in "wxyz":
        put(store, record, 2 * BLOCK)
    store.commit({})
    store.close()

    other = make("b", "c")
    with caplog.at_level(logging.WARNING, "offload.storage"):
        other.open()
    assert "is not asked for any more" in caplog.text
    for record in "wxyz":
        assert get(other, record) == content(2 * BLOCK)
        put(other, record, 2 * BLOCK, fill=3)
    other.commit({})
    other.commit({})
    a, b, c = (path.live_bytes for path in other.stats().paths)
    other.close()

    assert a == 0
    assert b > 0 and c > 0
    again = make("b", "c")
    again.open()
    assert get(again, "w") == content(2 * BLOCK, fill=3)


def test_directories_of_two_stores_are_refused(make):
    for name in "ab":
        store = make(name)
        store.create()
        store.commit({})
        store.close()

    with pytest.raises(StoreError, match="as one store"):
        make("a", "b").open()


def test_one_directory_twice_is_refused(make):
    with pytest.raises(ConfigError, match="twice"):
        make("a", "a")


def test_a_missing_path_is_named_with_what_is_lost(make):
    store = make("a", "b", advise=lambda: "go on from `/drain/step-5`")
    store.create()
    for record in "xyz":
        put(store, record, 2 * BLOCK)
    store.commit({})
    store.close()
    shutil.rmtree(store.roots[1])

    with pytest.raises(CorruptStateError) as caught:
        store.open()

    for part in (str(store.roots[1] / "data-1"), "1 of 3 records", "go on from `/drain/step-5`"):
        assert part in str(caught.value)


def test_all_paths_are_owned(make):
    store = make("a", "b")
    store.create()
    store.commit({})

    with pytest.raises(StoreError, match="another store object of this process"):
        make("b").open()

    store.close()
    other = make("b", "a")
    other.open()


def test_two_stores_live_side_by_side_on_the_same_paths(make, tmp_path, engines):
    left = make("a/1", "b/1")
    right = make("a/2", "b/2")
    for store, fill in ((left, 1), (right, 2)):
        store.create()
        put(store, "x", 5 * BLOCK, fill=fill)
        store.commit({})

    assert get(left, "x") == content(5 * BLOCK, fill=1)
    assert get(right, "x") == content(5 * BLOCK, fill=2)


# Space and trouble.


def test_capacity_of_a_path_sends_the_rest_to_the_others(make, tmp_path):
    small = StorePath(root=tmp_path / "small", capacity_bytes=5 * BLOCK)
    store = make(small, "b")
    store.create()

    for record in range(10):
        put(store, str(record), 2 * BLOCK)

    assert live_blocks(store) == [5, 15]


def test_all_paths_full_is_an_error_that_says_so(make, tmp_path):
    paths = [StorePath(root=tmp_path / name, capacity_bytes=4 * BLOCK) for name in "ab"]
    store = make(*paths, striping="adaptive")
    store.create()
    put(store, "x", 6 * BLOCK)

    with pytest.raises(StorageError, match="cannot write record `y`.*needs") as caught:
        put(store, "y", 3 * BLOCK)

    assert caught.value.errno == errno.ENOSPC
    put(store, "y", 2 * BLOCK)


def test_a_path_that_is_full_is_left_to_what_it_has_with_one_warning(make, monkeypatch, caplog):
    store = make("a", "b")
    store.create()
    put(store, "x", 60 * BLOCK)
    allocate = os.posix_fallocate

    def full(fd, offset, length):
        if "data-0" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING, "offload.storage"):
        for record in range(30):
            put(store, str(record), 5 * BLOCK, fill=record)

    store.commit({})
    assert caplog.text.count("is full") == 1
    assert live_blocks(store)[0] <= 64
    for record in range(30):
        assert get(store, str(record)) == content(5 * BLOCK, fill=record)


class FailingEngine:
    """Passes everything on, but writes fail once `error` is set."""

    def __init__(self, engine):
        self._engine = engine
        self.error = None

    def write(self, *args, **options):
        ticket = self._engine.write(*args, **options)
        ticket.wait()
        return FailedTicket(self.error) if self.error else ticket

    def __getattr__(self, name):
        return getattr(self._engine, name)


class FailedTicket:
    def __init__(self, error):
        self._error = error

    def wait(self, timeout_s=None):
        raise StorageError("the device says no", errno=self._error)

    def done(self):
        return True


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_path_that_cannot_be_written_is_left_out_and_the_run_goes_on(
    make, engines, caplog, number
):
    failing = FailingEngine(engines[0])
    engines[0:1] = [failing]
    store = make("a", "b")
    store.create()
    for record in range(4):
        put(store, str(record), 3 * BLOCK, fill=record)
    store.commit({"step": 1})

    failing.error = number
    with caplog.at_level(logging.WARNING, "offload.storage"):
        for record in range(4):
            put(store, str(record), 3 * BLOCK, fill=record + 10)
    store.commit({"step": 2})

    assert caplog.text.count("is left out") == 1
    assert [path.use for path in store.stats().paths] == ["left out", "in use"]
    engines[0] = failing._engine
    store.close()
    store.open()
    assert store.head["step"] == 2
    for record in range(4):
        assert get(store, str(record)) == content(3 * BLOCK, fill=record + 10)


def test_a_path_that_takes_no_manifest_is_left_out(make, monkeypatch, caplog):
    store = make("a", "b")
    store.create()
    put(store, "x", 3 * BLOCK, fill=1)
    store.commit({"step": 1})
    put(store, "x", 3 * BLOCK, fill=2)
    first, write = store.roots[0], os.write

    def read_only(fd, data):
        if Path(f"/proc/self/fd/{fd}").readlink().parent == first:
            raise OSError(errno.EROFS, "Read-only file system")
        return write(fd, data)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "offload.storage"):
        patch.setattr(os, "write", read_only)
        store.commit({"step": 2})
        store.commit({"step": 3})

    assert caplog.text.count("is left out") == 1
    store.close()
    store.open()
    assert store.head["step"] == 3
    assert get(store, "x") == content(3 * BLOCK, fill=2)


def test_a_path_that_cannot_be_read_says_what_is_lost(make, engines):
    class UnreadableEngine(FailingEngine):
        def read(self, *args, **options):
            ticket = self._engine.read(*args, **options)
            ticket.wait()
            return FailedTicket(errno.EIO) if self.error else ticket

    broken = UnreadableEngine(engines[0])
    engines[0:1] = [broken]
    store = make("a", "b", advise=lambda: "resume from checkpoint `/backup/run-step-4`")
    store.create()
    for record in "xyz":
        put(store, record, 2 * BLOCK)
    store.commit({})
    broken.error = errno.EIO

    with pytest.raises(StorageError) as caught:
        get(store, "x")

    for part in ("record `x`", f"path `{store.roots[0]}` is lost", "2 of 3 records", "/backup/"):
        assert part in str(caught.value)


def test_what_is_spilled_takes_its_part_of_a_capacity(make, tmp_path):
    path = StorePath(root=tmp_path / "a", capacity_bytes=4 * BLOCK, shares_capacity=True)
    store = make(path)
    store.create()
    put(store, "x", 2 * BLOCK)
    room = store.spill_room(tmp_path / "a")

    assert room.try_spill(BLOCK + 1)
    assert not room.try_spill(BLOCK)
    with pytest.raises(StorageError, match="capacity"):
        put(store, "y", BLOCK)

    room.end_spill(BLOCK + 1)
    put(store, "y", 2 * BLOCK)
    assert not room.try_spill(1)
    assert store.spill_room(tmp_path / "b") is None
