import mmap

import pytest

from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.verify import BadBlock, bad_blocks, verify

BLOCK = 4096
NUM_BLOCKS = 21  # more than one span of 8, the last one partly filled


@pytest.fixture
def store(tmp_path):
    memory = memoryview(mmap.mmap(-1, NUM_BLOCKS * BLOCK))
    memory[:] = bytes(i % 253 for i in range(len(memory)))
    with Engine() as engine:
        store = BlockStore(tmp_path / "s", engine=engine, block_bytes=BLOCK)
        store.create()
        for record in "abc":
            store.write(record, memory, num_bytes=NUM_BLOCKS * BLOCK - 5).wait()
        store.commit({})
        store.close()
        yield store
        store.close()


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_a_whole_store_has_no_bad_blocks(store):
    store.open(read_only=True)

    report = verify(store)

    assert (report.num_records, report.num_bytes) == (3, 3 * (NUM_BLOCKS * BLOCK - 5))
    assert report.is_ok


def test_each_bad_block_is_listed_once(store):
    bad_blocks_of_b = [0, 7, 8, 20]
    for block in bad_blocks_of_b:
        flip(store.data_path, (NUM_BLOCKS + block) * BLOCK + 17)
    flip(store.data_path, NUM_BLOCKS * BLOCK - 1)  # padding of record `a`
    store.open(read_only=True)

    bad = verify(store).bad

    assert [(b.record, b.path, b.file, b.offset) for b in bad] == [
        ("b", store.root, "data-0", (NUM_BLOCKS + block) * BLOCK) for block in bad_blocks_of_b
    ]
    assert all("expected xxh3-64" in b.reason for b in bad)


def test_blocks_of_a_truncated_file_are_listed(store):
    with store.data_path.open("r+b") as file:
        file.truncate((3 * NUM_BLOCKS - 2) * BLOCK)
    store.open(read_only=True)

    bad = verify(store).bad

    assert [(b.record, b.offset // BLOCK) for b in bad] == [
        ("c", 3 * NUM_BLOCKS - 2),
        ("c", 3 * NUM_BLOCKS - 1),
    ]
    assert all("truncated" in b.reason for b in bad)


def test_listing_may_stop_early(store):
    flip(store.data_path, 0)
    store.open(read_only=True)

    first = next(iter(bad_blocks(store)))

    assert isinstance(first, BadBlock)
    assert first.record == "a"


def test_blocks_that_only_a_checkpoint_keeps_are_checked_and_progress_is_told(store):
    """The store has records `a` and `b`, committed."""
    store.close()
    store.open()
    store.save("kept")
    before = store.block_place("a", 0)
    memory = memoryview(mmap.mmap(-1, BLOCK))
    store.write("a", memory, num_bytes=5).wait()
    store.commit({})
    flip(store.data_path, before.offset)
    told = []

    report = verify(store, progress=lambda done, total: told.append((done, total)))

    assert [(bad.record, bad.offset) for bad in report.bad] == [("a", before.offset)]
    assert told[-1] == (report.num_bytes, report.num_bytes)
