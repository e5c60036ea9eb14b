"""Named commits: they keep their blocks, cost none, and can be gone back to."""

import errno
import os
import shutil

import pytest
import storage_memory
from storage_memory import get, memory_of

from offload.errors import ConfigError, StorageError, StoreError
from offload.storage.store import BlockStore

BLOCK = 4096
NUM_BYTES = 3 * BLOCK + 5


def put(store, record, fill, num_bytes=NUM_BYTES):
    storage_memory.put(store, record, num_bytes, fill)


def content(fill, num_bytes=NUM_BYTES):
    return storage_memory.content(num_bytes, fill)


@pytest.fixture
def store(store_on_two_paths):
    return store_on_two_paths


def save_steps(store, *steps):
    for step in steps:
        for record in ("x", "y"):
            put(store, record, fill=step)
        store.commit({"step": step})
        store.save(f"step-{step}")


def test_a_checkpoint_keeps_its_versions_through_later_commits_and_restarts(store):
    save_steps(store, 1, 2)
    for step in (3, 4, 5):
        put(store, "x", fill=step)
        store.commit({"step": step})
    store.close()
    store.open()

    assert list(store.checkpoints()) == ["step-1", "step-2"]
    assert store.checkpoints()["step-2"]["step"] == 2
    assert get(store, "x") == content(5)
    assert get(store, "x", checkpoint="step-1") == content(1)
    assert get(store, "y", checkpoint="step-2") == content(2)


def test_saving_copies_no_block(store):
    put(store, "x", fill=1)
    store.commit({"step": 1})
    before = store.stats()

    store.save("first")

    after = store.stats()
    assert (after.live_bytes, after.write_bytes) == (before.live_bytes, before.write_bytes)
    manifest_bytes = (store.root / "checkpoint-first").stat().st_size
    assert after.commit_bytes - before.commit_bytes == 2 * manifest_bytes


def test_space_is_one_version_of_what_changed_for_each_checkpoint(store):
    save_steps(store, 1)
    one = store.stats().live_bytes

    save_steps(store, 2, 3)
    assert store.stats().live_bytes == 3 * one
    store.delete_checkpoint("step-1")

    assert store.stats().live_bytes == 2 * one
    store.close()
    store.open()
    assert store.stats().live_bytes == 2 * one
    assert list(store.checkpoints()) == ["step-2", "step-3"]


def test_loading_goes_back_and_the_next_commit_makes_it_last(store):
    save_steps(store, 1, 2)
    put(store, "z", fill=9)
    store.commit({"step": 3})

    head = store.load("step-1")

    assert head["step"] == 1
    assert (get(store, "x"), store.records()) == (content(1), ["x", "y"])
    put(store, "x", fill=7)
    store.commit({"step": 2})
    store.close()
    store.open()
    assert (get(store, "x"), get(store, "y")) == (content(7), content(1))
    assert get(store, "x", checkpoint="step-1") == content(1)


def test_a_write_in_flight_does_not_come_after_a_load(store):
    save_steps(store, 1)
    ticket = store.write("x", memory_of(4, fill=5), num_bytes=4)
    store.load("step-1")

    ticket.wait()

    assert get(store, "x") == content(1)


def test_the_same_name_again_replaces(store):
    save_steps(store, 1)
    live = store.stats().live_bytes
    for record in ("x", "y"):
        put(store, record, fill=8)
    store.commit({"step": 8})

    store.save("step-1")

    assert get(store, "x", checkpoint="step-1") == content(8)
    assert store.stats().live_bytes == live


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", ".hidden", "x.tmp", "é", "a" * 101])
def test_names_that_are_no_file_names_are_refused(store, name):
    store.commit({})

    with pytest.raises(ConfigError, match="cannot name a checkpoint"):
        store.save(name)


def test_a_missing_checkpoint_and_a_missing_commit_say_so(store):
    with pytest.raises(StoreError, match="commit first"):
        store.save("a")
    store.commit({})
    for call in (store.load, store.delete_checkpoint, store.checkpoint_records):
        with pytest.raises(StoreError, match="no checkpoint `b`"):
            call("b")


def test_a_full_disk_while_saving_keeps_the_older_ones(store, monkeypatch):
    save_steps(store, 1)
    put(store, "x", fill=2)
    store.commit({"step": 2})

    def no_space(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        with pytest.raises(StorageError, match="No space left"):
            store.save("step-2")

    assert list(store.checkpoints()) == ["step-1"]
    assert get(store, "x", checkpoint="step-1") == content(1)
    store.close()
    store.open()
    assert list(store.checkpoints()) == ["step-1"]


def test_a_checkpoint_is_found_while_one_path_has_it(store):
    save_steps(store, 1, 2)
    store.close()
    (store.roots[0] / "checkpoint-step-1").unlink()

    store.open()

    assert list(store.checkpoints()) == ["step-1", "step-2"]
    assert get(store, "x", checkpoint="step-1") == content(1)


def test_a_damaged_checkpoint_is_left_out_with_a_warning(store, caplog):
    save_steps(store, 1, 2)
    store.close()
    for root in store.roots:
        path = root / "checkpoint-step-1"
        data = bytearray(path.read_bytes())
        data[90] ^= 1
        path.write_bytes(data)

    store.open()

    assert "checkpoint-step-1` is damaged" in caplog.text
    assert list(store.checkpoints()) == ["step-2"]
    assert get(store, "x") == content(2)


def test_a_checkpoint_of_another_store_is_left_out(store, tmp_path, engine, caplog):
    save_steps(store, 1)
    other = BlockStore(tmp_path / "other", engine=engine, block_bytes=BLOCK)
    other.create()
    other.commit({})
    other.save("stranger")
    other.close()
    store.close()
    shutil.copy(tmp_path / "other" / "checkpoint-stranger", store.root)

    store.open()

    assert list(store.checkpoints()) == ["step-1"]
    assert "of another store" in caplog.text


def test_a_store_with_only_checkpoints_is_not_replaced(store):
    save_steps(store, 1)
    store.close()
    for root in store.roots:
        for path in root.glob("manifest-*"):
            path.unlink()

    with pytest.raises(StoreError, match="cannot create store"):
        store.create()
