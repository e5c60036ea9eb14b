"""Two paths and checkpoints: power loss, and errors, at each point between two system calls.

What a power loss leaves is modelled for each path on its own: the content of its files and the
names in its directory, each as they are or as they were at their last sync. So one path may have
everything and the other nothing of what was not synced.
"""

import errno
import itertools
import logging
import mmap
import os
import threading
from pathlib import Path

import pytest

from offload.errors import OffloadError, StorageError, StoreError
from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath
from offload.storage.verify import verify

BLOCK = 4096
CALLS = ("open", "write", "fsync", "fdatasync", "rename", "unlink", "close")
ERRORS_AT = ("open", "write", "fsync", "fdatasync", "rename", "unlink")
NUM_RECORDS = 4


def memory_of(content):
    memory = memoryview(mmap.mmap(-1, -(-len(content) // BLOCK) * BLOCK))
    memory[: len(content)] = content
    return memory


def content_of(record, step):
    length = (1 + (record + step) % 3) * BLOCK - record
    return bytes((record * 31 + step * 7 + i) % 251 for i in range(length))


def put_step(store, step):
    for record in (*range(NUM_RECORDS), 0, 1):  # two twice, into blocks just freed
        content = content_of(record, step)
        store.write(str(record), memory_of(content), num_bytes=len(content)).wait()


def contents_of(store, checkpoint=None):
    records = (
        store.current_records() if checkpoint is None else store.checkpoint_records(checkpoint)
    )
    contents = {}
    for record, version in records.items():
        memory = memory_of(b"\0" * version.num_bytes)
        store.read(record, memory, checkpoint=checkpoint).wait()
        contents[record] = bytes(memory[: version.num_bytes])
    return contents


def expected_at(step):
    return {str(record): content_of(record, step) for record in range(NUM_RECORDS)}


def make_store(directory, engine):
    paths = [StorePath(root=directory / name) for name in ("a", "b")]
    return BlockStore(paths, engine=engine, block_bytes=BLOCK)


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


class PathDisk:
    """What a power loss would leave of one directory."""

    def __init__(self, root):
        self.root = root
        self.synced_content = {}  # by inode
        self.synced_names = {}  # inode by name

    def images(self):
        """Yields the files by name for each combination of what has reached the disk."""
        now = {path.name: path for path in self.root.iterdir()} if self.root.is_dir() else {}
        by_inode = {path.stat().st_ino: path for path in now.values()}
        all_names = {name: path.stat().st_ino for name, path in now.items()}
        for names, is_content_synced_only in itertools.product(
            (self.synced_names, all_names), (True, False)
        ):
            yield {
                name: self.synced_content.get(inode, b"")
                if is_content_synced_only or inode not in by_inode
                else by_inode[inode].read_bytes()
                for name, inode in names.items()
            }


class PowerLoss:
    """Watches system calls and, before each, opens what a power loss there would leave."""

    def __init__(self, directory, engine):
        self.directory = directory
        self.engine = engine
        self.disks = [PathDisk(directory / "store" / name) for name in ("a", "b")]
        self.allowed = {None}  # steps of commits that a restart may find
        self.saved = {}  # checkpoint: its step, once `save` has returned
        self.saving = None
        self.num_points = 0
        self.found = set()
        self._checked = {}
        self._is_checking = False

    def watch(self, monkeypatch):
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name), name))

    def check(self):
        if self._is_checking:
            return
        self._is_checking = True
        try:
            self.num_points += 1
            for images in itertools.product(*(list(disk.images()) for disk in self.disks)):
                key = tuple(tuple(sorted(image.items())) for image in images)
                if key not in self._checked:
                    self._checked[key] = self._restart(images)
                step, checkpoints = self._checked[key]
                self.found.add(step)
                assert step in self.allowed, (self.num_points, step)
                missing = self.saved.items() - checkpoints.items()
                assert not missing or step is None, (self.num_points, missing)
        finally:
            self._is_checking = False

    def _restart(self, images):
        root = self.directory / "image"
        for name, image in zip(("a", "b"), images, strict=True):
            (root / name).mkdir(parents=True, exist_ok=True)
            for path in (root / name).iterdir():
                path.unlink()
            for file, content in image.items():
                (root / name / file).write_bytes(content)
        store = make_store(root, self.engine)
        try:
            store.open()
        except StoreError:
            return None, {}
        try:
            step = store.head["step"]
            assert contents_of(store) == expected_at(step)
            checkpoints = {name: head["step"] for name, head in store.checkpoints().items()}
            for name, saved_step in checkpoints.items():
                assert contents_of(store, name) == expected_at(saved_step)
            return step, checkpoints
        finally:
            store.close()

    def _wrapped(self, call, name):
        def wrapper(first, *args, **options):
            if threading.current_thread() is threading.main_thread():  # not the engine's own
                self.check()
            result = call(first, *args, **options)
            if name in ("fsync", "fdatasync"):
                self._on_sync(first)
            return result

        return wrapper

    def _on_sync(self, fd):
        target = Path(f"/proc/self/fd/{fd}").readlink()
        for disk in self.disks:
            if target == disk.root:
                disk.synced_names = {p.name: p.stat().st_ino for p in disk.root.iterdir()}
            elif target.parent == disk.root:
                disk.synced_content[os.fstat(fd).st_ino] = target.read_bytes()


@pytest.mark.slow
def test_power_loss_at_any_point_leaves_the_last_or_the_new_commit_and_the_checkpoints(
    tmp_path, engine, monkeypatch, caplog
):
    caplog.set_level(logging.ERROR)
    loss = PowerLoss(tmp_path, engine)
    store = make_store(tmp_path / "store", engine)
    with monkeypatch.context() as patch:
        loss.watch(patch)
        store.create()
        for step in range(1, 5):
            put_step(store, step)
            loss.check()
            last = max((s for s in loss.allowed if s is not None), default=None)
            loss.allowed = {last, step}
            store.commit({"step": step})
            loss.allowed = {step}
            loss.check()
            if step in (1, 3):
                store.save(f"at-{step}")
                loss.saved[f"at-{step}"] = step
                loss.check()
            if step == 4:
                loss.saved.pop("at-1")
                store.delete_checkpoint("at-1")
                put_step(store, 9)  # into the blocks that are free now
                loss.check()
        store.close()

    assert loss.num_points > 100
    assert loss.found == {None, 1, 2, 3, 4}


class Failure:
    """Makes one system call fail: the `at`-th from now, by the main thread."""

    def __init__(self, monkeypatch, number, at):
        self.num_calls = 0
        self.has_failed = False
        for name in ERRORS_AT:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name), number, at))

    def _wrapped(self, call, number, at):
        def wrapper(*args, **options):
            if threading.current_thread() is threading.main_thread():
                self.num_calls += 1
                if self.num_calls == at:
                    self.has_failed = True
                    raise OSError(number, os.strerror(number))
            return call(*args, **options)

        return wrapper


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("what", ["commit", "save"])
def test_an_error_at_any_call_is_never_followed_by_a_lost_commit(
    tmp_path, engine, monkeypatch, caplog, number, what
):
    caplog.set_level(logging.ERROR)
    for at in itertools.count(1):
        store = make_store(tmp_path / f"store-{at}", engine)
        store.create()
        for step in (1, 2):
            put_step(store, step)
            store.commit({"step": step})
        store.save("old")
        put_step(store, 3)
        if what == "save":
            store.commit({"step": 3})
        is_done = True
        with monkeypatch.context() as patch:
            failure = Failure(patch, number, at)
            try:
                store.commit({"step": 3}) if what == "commit" else store.save("new")
            except StorageError:
                is_done = False
        put_step(store, 4)  # whatever happened, what a restart may find is not overwritten
        store.close()

        store.open()
        step = store.head["step"]
        assert step == 3 if is_done or what == "save" else step in (2, 3)
        assert contents_of(store) == expected_at(step)
        assert contents_of(store, "old") == expected_at(2)
        if what == "save":
            assert "new" in store.checkpoints() or not is_done
        if "new" in store.checkpoints():
            assert contents_of(store, "new") == expected_at(3)
        assert verify(store).is_ok
        store.close()
        if not failure.has_failed:
            break

    assert at > 10


def test_any_flipped_byte_of_what_a_manifest_refers_to_is_found(tmp_path, engine, caplog):
    caplog.set_level(logging.ERROR)
    store = make_store(tmp_path / "store", engine)
    store.create()
    put_step(store, 1)
    store.commit({"step": 1})
    places = []
    for record, version in store.current_records().items():
        for block in range(version.num_blocks):
            used = min(BLOCK, version.num_bytes - block * BLOCK)
            places.append((record, store.block_place(record, block), used))
    store.close()

    for record, place, used in places:
        for offset in (0, used // 2, used - 1):
            with (place.root / place.file).open("r+b") as file:
                file.seek(place.offset + offset)
                byte = file.read(1)
                file.seek(place.offset + offset)
                file.write(bytes([byte[0] ^ 0x40]))
            store.open(read_only=True)
            (bad,) = verify(store).bad
            assert (bad.record, bad.path, bad.file) == (record, place.root, place.file)
            assert bad.offset == place.offset
            store.close()
            with (place.root / place.file).open("r+b") as file:
                file.seek(place.offset + offset)
                file.write(byte)


def test_any_flipped_byte_of_all_manifests_is_never_a_wrong_number(tmp_path, engine, caplog):
    caplog.set_level(logging.CRITICAL)
    store = make_store(tmp_path / "store", engine)
    store.create()
    put_step(store, 1)
    store.commit({"step": 1})
    store.save("one")
    roots = store.roots
    store.close()
    files = [path for root in roots for path in root.iterdir() if "-" in path.name[4:]]
    manifests = [path for path in files if path.name.startswith(("manifest", "checkpoint"))]
    wholes = {path: path.read_bytes() for path in manifests}

    for at in range(0, len(wholes[manifests[0]]), 5):
        for path in manifests:
            damaged = bytearray(wholes[path])
            damaged[min(at, len(damaged) - 1)] ^= 0x01
            path.write_bytes(damaged)
        with pytest.raises(OffloadError):
            store.open(read_only=True)
    for path in manifests:
        path.write_bytes(wholes[path])
    store.open()
    assert contents_of(store) == expected_at(1)
    store.close()


def test_verify_names_a_manifest_with_any_flipped_byte_though_others_are_whole(
    tmp_path, engine, caplog
):
    caplog.set_level(logging.CRITICAL)
    store = make_store(tmp_path / "store", engine)
    store.create()
    for step in (1, 2):
        put_step(store, step)
        store.commit({"step": step})
    store.save("two")
    roots = store.roots
    store.close()
    files = [p for root in roots for p in root.iterdir() if p.name.startswith(("man", "check"))]
    assert len(files) == 2 * 3  # two commits and a checkpoint on each path

    for path in files:
        whole = path.read_bytes()
        for at in range(0, len(whole), 41):
            damaged = bytearray(whole)
            damaged[at] ^= 0x10
            path.write_bytes(damaged)
            store.open(read_only=True)
            report = verify(store)
            store.close()
            assert [(bad.path, bad.file) for bad in report.bad_manifests] == [
                (path.parent, path.name)
            ], at
            assert str(path) in report.bad_manifests[0].reason
            assert not report.is_ok
        path.write_bytes(whole)
