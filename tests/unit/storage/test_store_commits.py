import os

import pytest
from unit.storage.records import BLOCK, get, put

from offload.errors import ConfigError, StoreError
from offload.storage.store import BlockStore
from offload.storage.summary import has_commit, peek


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
