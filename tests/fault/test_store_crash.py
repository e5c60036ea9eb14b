"""A crash at each point between two system calls of a commit leaves a whole commit.

The disk is modelled: what a crash leaves of each file is its content now or at its last sync, of
the directory its names now or at its last sync, in each combination.
"""

import mmap
import os
import threading
from pathlib import Path

import pytest

from offload.errors import StorageError, StoreError
from offload.storage.engine import Engine
from offload.storage.store import BlockStore

BLOCK = 4096
CALLS = ("open", "write", "fsync", "fdatasync", "rename", "unlink", "close")


def memory_of(content):
    memory = memoryview(mmap.mmap(-1, -(-len(content) // BLOCK) * BLOCK))
    memory[: len(content)] = content
    return memory


def put(store, record, content):
    store.write(record, memory_of(content), num_bytes=len(content)).wait()


def contents_of(store):
    contents = {}
    for record in store.records():
        num_bytes = store.num_bytes(record)
        memory = memory_of(b"\0" * num_bytes)
        store.read(record, memory).wait()
        contents[record] = bytes(memory[:num_bytes])
    return contents


def content_of(record, step):
    length = (1 + (record + step) % 3) * BLOCK - record
    return bytes((record * 31 + step * 7 + i) % 251 for i in range(length))


class Disk:
    """What of a directory a crash would leave; told of each system call before it is made."""

    def __init__(self, root):
        self.root = root
        self.on_point = lambda: None
        self._synced_content = {}  # by inode
        self._synced_names = {}  # inode by name

    def watch(self, monkeypatch):
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name), name))

    def images(self):
        """Yields the files by name, for each combination of what has reached the disk."""
        now = {path.name: path for path in self.root.iterdir()}
        for names in (self._synced_names, {n: p.stat().st_ino for n, p in now.items()}):
            by_inode = {path.stat().st_ino: path for path in now.values()}
            for is_data_synced_only in (True, False):
                for is_other_synced_only in (True, False):
                    image = {}
                    for name, inode in names.items():
                        is_data = name.startswith("data")
                        is_synced = is_data_synced_only if is_data else is_other_synced_only
                        if is_synced or inode not in by_inode:
                            image[name] = self._synced_content.get(inode, b"")
                        else:
                            image[name] = by_inode[inode].read_bytes()
                    yield image

    def _wrapped(self, call, name):
        def wrapper(first, *args, **options):
            if threading.current_thread() is threading.main_thread():  # not the engine's own
                self.on_point()
            result = call(first, *args, **options)
            if name in ("fsync", "fdatasync"):
                self._on_sync(first)
            return result

        return wrapper

    def _on_sync(self, fd):
        target = Path(f"/proc/self/fd/{fd}").readlink()
        if target == self.root:
            self._synced_names = {p.name: p.stat().st_ino for p in self.root.iterdir()}
        elif target.parent == self.root:
            self._synced_content[os.fstat(fd).st_ino] = target.read_bytes()


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


class CrashTest:
    """Runs steps of a store and, at each point, opens what a crash there would leave."""

    def __init__(self, directory, engine, monkeypatch):
        self.directory = directory
        self.engine = engine
        self.store = BlockStore(directory / "store", engine=engine, block_bytes=BLOCK)
        self.disk = Disk(self.store.root)
        self.allowed = [None]  # contents by commit that a restart may find; None: no commit
        self.num_points = 0
        self.num_found = {}
        self._found_by_image = {}  # many points leave the same
        self._monkeypatch = monkeypatch
        self._is_checking = False

    def run(self, num_steps):
        self.disk.on_point = self.check
        with self._monkeypatch.context() as patch:
            self.disk.watch(patch)
            self.store.create()
            for step in range(1, num_steps + 1):
                for record in (*range(6), *range(3)):  # some twice, into blocks just freed
                    put(self.store, str(record), content_of(record, step))
                if step == 2:
                    self.store.discard("5")
                self.check()
                self.allowed = [self.allowed[-1], (step, contents_of(self.store))]
                self.store.commit({"step": step})
                self.allowed = self.allowed[-1:]
                self.check()
                if step == 2:
                    self.store.close()
                    self.store.open()
            self.store.close()

    def check(self):
        if self._is_checking or not self.store.root.is_dir():
            return
        self._is_checking = True
        try:
            self.num_points += 1
            for image in self.disk.images():
                key = tuple(sorted(image.items()))
                if key not in self._found_by_image:
                    self._found_by_image[key] = self._restart(image)
                found = self._found_by_image[key]
                assert found in self.allowed, (self.num_points, found and found[0])
                self.num_found[found and found[0]] = self.num_found.get(found and found[0], 0) + 1
        finally:
            self._is_checking = False

    def _restart(self, image):
        root = self.directory / "image"
        root.mkdir(exist_ok=True)
        for path in root.iterdir():
            path.unlink()
        for name, content in image.items():
            (root / name).write_bytes(content)
        store = BlockStore(root, engine=self.engine, block_bytes=BLOCK)
        try:
            store.open()
        except StoreError:
            store.create()  # what an aborted start left can be replaced
            store.close()
            return None
        found = (store.head["step"], contents_of(store))
        store.close()
        return found


def test_a_crash_between_any_two_calls_leaves_the_last_or_the_new_commit(
    tmp_path, engine, monkeypatch
):
    test = CrashTest(tmp_path, engine, monkeypatch)

    test.run(num_steps=4)

    assert test.num_points > 60
    assert set(test.num_found) == {None, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("call", "which"), [("fdatasync", 1), ("fsync", 1), ("fsync", 2), ("rename", 1)]
)
def test_a_failed_sync_is_final(tmp_path, engine, monkeypatch, call, which):
    store = BlockStore(tmp_path / "store", engine=engine, block_bytes=BLOCK)
    store.create()
    put(store, "a", b"one")
    store.commit({"step": 1})
    put(store, "a", b"two")
    original = getattr(os, call)
    num_calls = 0

    def fail_once(*args, **options):
        nonlocal num_calls
        num_calls += 1
        if num_calls == which:
            raise OSError(5, "Input/output error")
        return original(*args, **options)

    monkeypatch.setattr(os, call, fail_once)

    with pytest.raises(StorageError) as caught:
        store.commit({"step": 2})
    assert caught.value.errno == 5
    for _ in range(2):
        with pytest.raises(StoreError, match="earlier syncs to have succeeded"):
            store.commit({"step": 2})

    assert store.head["step"] == 1
    for fill in (b"x", b"y", b"z"):  # neither commit's blocks are reused, whichever is found
        put(store, "a", fill * 3)
    assert contents_of(store) == {"a": b"zzz"}
    store.close()
    store.open()
    assert (store.head["step"], contents_of(store)) in [(1, {"a": b"one"}), (2, {"a": b"two"})]
    assert call == "fsync" or store.head["step"] == 1
    store.close()


def test_a_manifest_that_cannot_be_written_may_be_tried_again(tmp_path, engine, monkeypatch):
    store = BlockStore(tmp_path / "store", engine=engine, block_bytes=BLOCK)
    store.create()
    put(store, "a", b"one")
    store.commit({"step": 1})
    put(store, "a", b"two")

    def no_space(fd, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        with pytest.raises(StorageError, match="No space left"):
            store.commit({"step": 2})
    live_bytes = store.stats().live_bytes
    report = store.commit({"step": 2})

    assert report.sequence == 2
    assert (live_bytes, store.stats().live_bytes) == (2 * BLOCK, BLOCK)
    store.close()
    store.open()
    assert contents_of(store) == {"a": b"two"}
    store.close()


def test_a_commit_makes_its_calls_in_the_order_that_survives_a_crash(tmp_path, engine, monkeypatch):
    store = BlockStore(tmp_path / "store", engine=engine, block_bytes=BLOCK)
    store.create()
    put(store, "a", b"one")
    made = []

    def name_of(first):
        if isinstance(first, int):
            first = Path(f"/proc/self/fd/{first}").readlink()
        return Path(first).name

    def traced(name):
        call = getattr(os, name)

        def wrapper(first, *args, **options):
            made.append(f"{name} {name_of(first)}")
            return call(first, *args, **options)

        return wrapper

    for name in ("write", "fsync", "fdatasync", "rename", "unlink"):
        monkeypatch.setattr(os, name, traced(name))

    for _ in range(3):
        store.commit({})

    assert made[:8] == [
        "fdatasync data-0",
        "fsync store",  # the data file is new in it
        f"fsync {tmp_path.name}",  # and it is new in this one
        "write manifest-0000000001.tmp",
        "fsync manifest-0000000001.tmp",
        "rename manifest-0000000001.tmp",
        "fsync store",
        "fdatasync data-0",
    ]
    assert made[-6:] == [
        "fdatasync data-0",
        "write manifest-0000000003.tmp",
        "fsync manifest-0000000003.tmp",
        "rename manifest-0000000003.tmp",
        "fsync store",
        "unlink manifest-0000000001",
    ]
    store.close()
