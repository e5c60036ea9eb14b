"""Whatever fails while a store is opened, no descriptor stays open."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from storage_memory import put

from offload.errors import OffloadError
from offload.storage.heartbeat import Heartbeat
from offload.storage.manifest_files import ManifestFiles
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath

CALLS = [
    (os, "fstat"),
    (os, "set_blocking"),
    (os, "preadv"),
    (os, "pwritev"),
    (os, "pread"),
    (os, "pwrite"),
    (os, "ftruncate"),
    (os, "fsync"),
    (os, "unlink"),
    (fcntl, "fcntl"),
]
MOST_CALLS = 40
"""More than opening a store makes of any."""


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no such luck"), KeyboardInterrupt()],
                         ids=["error", "interrupt"])  # fmt: skip
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "opened"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[1])
def test_a_call_that_fails_leaves_no_descriptor(tmp_path, monkeypatch, engine, call, is_new, error):
    roots = [tmp_path / "a", tmp_path / "b"]
    if not is_new:
        make_store(roots, engine)
    before = descriptors()

    for number in range(1, MOST_CALLS):
        store = store_of(roots, engine)
        with monkeypatch.context() as patch:
            num_calls = fail_at(patch, call, number, error)
            try:
                store.create() if is_new else store.open()
            except (OffloadError, OSError, KeyboardInterrupt):
                pass
            finally:
                patch.undo()
                store.close()
        assert descriptors() == before, f"call {number} of `{call[1]}`"
        if num_calls() < number:
            return

    pytest.fail(f"opening a store calls `{call[1]}` more than {MOST_CALLS} times")


def test_a_directory_in_the_place_of_a_manifest_leaves_no_descriptor(tmp_path):
    files = ManifestFiles(tmp_path)
    files.checkpoint_path("one").mkdir()
    before = descriptors()

    with pytest.raises(OSError, match="Is a directory"):
        files.read_checkpoint("one")

    assert descriptors() == before


def test_a_heartbeat_that_no_thread_beats_can_be_stopped(tmp_path, monkeypatch):
    heartbeat = Heartbeat(tmp_path / "owner")
    monkeypatch.setattr("threading.Thread.start", refuse)

    with pytest.raises(RuntimeError, match="no thread"):
        heartbeat.start()

    heartbeat.stop()


def refuse(*_):
    raise RuntimeError("no thread")


def fail_at(patch, call, number, error):
    """Has call `number` of a function raise; returns what tells how many calls there were."""
    owner, name = call
    plain, calls = getattr(owner, name), []

    def counted(*args, **options):
        calls.append(args)
        if len(calls) == number:
            raise error
        return plain(*args, **options)

    patch.setattr(owner, name, counted)
    return lambda: len(calls)


def store_of(roots, engine):
    return BlockStore([StorePath(root=root) for root in roots], engine=engine)


def make_store(roots, engine):
    store = store_of(roots, engine)
    store.create()
    put(store, "one", 4096)
    store.commit({})
    store.close()


def descriptors():
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = entry.readlink()
        except OSError:
            continue
    return found
