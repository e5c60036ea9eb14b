import logging
import stat

import pytest
from unit.storage.records import BLOCK, get, put

from offload.errors import ConfigError, StoreError
from offload.storage.store import BlockStore


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


@pytest.mark.parametrize("is_there", [True, False])
def test_a_store_in_which_nothing_was_written_leaves_nothing(tmp_path, engine, is_there):
    root = tmp_path / "store"
    if is_there:
        root.mkdir()
    store = BlockStore(root, engine=engine)
    store.create()

    store.close()

    assert list(tmp_path.rglob("*")) == ([root] if is_there else [])


def test_a_store_without_a_record_keeps_its_commit(tmp_path, engine):
    store = BlockStore(tmp_path / "store", engine=engine)
    store.create()
    store.commit({"step": 1})
    store.close()

    store.open()

    assert store.head["step"] == 1
    store.close()


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
    with pytest.raises(StoreError, match="another store object of this process"):
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
