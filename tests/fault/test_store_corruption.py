"""Damaged files: an earlier commit or a clear error, never wrong data."""

import logging
import mmap
import random

import pytest

from offload.errors import CorruptStateError, OffloadError, StoreError
from offload.storage.engine import Engine
from offload.storage.store import BlockStore

BLOCK = 4096
LENGTHS = {"a": 3 * BLOCK + 100, "b": BLOCK, "c": 7}


def memory_of(content):
    memory = memoryview(mmap.mmap(-1, -(-len(content) // BLOCK) * BLOCK))
    memory[: len(content)] = content
    return memory


def content_of(record, step):
    return random.Random(f"{record} {step}").randbytes(LENGTHS[record])


def contents_of(store):
    contents = {}
    for record in store.records():
        memory = memory_of(b"\0" * store.num_bytes(record))
        store.read(record, memory).wait()
        contents[record] = bytes(memory[: store.num_bytes(record)])
    return contents


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


@pytest.fixture
def store(tmp_path, engine):
    """A closed store with two commits, steps 1 and 2, in blocks of their own."""
    store = BlockStore(
        tmp_path / "store",
        engine=engine,
        block_bytes=BLOCK,
        describe=lambda record: f"parameter of {record}",
    )
    store.create()
    for step in (1, 2):
        for record in LENGTHS:
            content = content_of(record, step)
            store.write(record, memory_of(content), num_bytes=len(content)).wait()
        store.commit({"step": step})
    store.close()
    yield store
    store.close()


def expected_at(step):
    return {record: content_of(record, step) for record in LENGTHS}


def newest_manifest(store):
    return store.root / "manifest-0000000002"


def test_every_truncated_manifest_gives_the_commit_before(store):
    whole = newest_manifest(store).read_bytes()

    for length in range(0, len(whole), 7):
        newest_manifest(store).write_bytes(whole[:length])
        store.open(read_only=True)
        assert store.head["step"] == 1
        assert contents_of(store) == expected_at(1)
        store.close()


def test_flipped_bytes_of_a_manifest_give_the_commit_before(store):
    whole = newest_manifest(store).read_bytes()
    draw = random.Random(0)

    for _ in range(50):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 20))):
            damaged[draw.randrange(len(whole))] ^= draw.randrange(1, 256)
        newest_manifest(store).write_bytes(damaged)
        store.open(read_only=True)
        assert store.head["step"] == 1
        assert contents_of(store) == expected_at(1)
        store.close()


def test_a_commit_after_a_fallback_outnumbers_the_damaged_one(store, caplog):
    newest_manifest(store).write_bytes(b"damaged")

    with caplog.at_level(logging.WARNING, "offload.storage"):
        store.open()
    report = store.commit({"step": 3})
    store.close()
    store.open()

    assert str(newest_manifest(store)) in caplog.text
    assert report.sequence == 3
    assert store.head["step"] == 3
    assert contents_of(store) == expected_at(1)


def test_blocks_that_were_reused_since_are_not_taken_for_the_old_version(store):
    store.open()
    for record in LENGTHS:  # into the blocks of step 1, which no manifest needs
        content = content_of(record, 3)
        store.write(record, memory_of(content), num_bytes=len(content)).wait()
    store.close()
    newest_manifest(store).write_bytes(b"damaged")

    store.open()

    assert store.head["step"] == 1
    with pytest.raises(CorruptStateError):
        contents_of(store)


def test_no_whole_manifest_is_an_error_and_nothing_is_deleted(store):
    for path in store.root.glob("manifest-*"):
        path.write_bytes(path.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in store.root.iterdir()}

    with pytest.raises(CorruptStateError, match="no manifest in"):
        store.open()
    with pytest.raises(StoreError, match="expected no commit there"):
        store.create()

    assert {path: path.read_bytes() for path in store.root.iterdir()} == before


def test_every_flipped_data_block_names_record_and_file(store):
    blocks = {"a": 4, "b": 1, "c": 1}
    store.open(read_only=True)
    places = {
        (r, i): store.block_place(r, i).offset for r, count in blocks.items() for i in range(count)
    }

    for (record, block), offset in places.items():
        with store.data_path.open("r+b") as file:
            file.seek(offset + 6)
            byte = file.read(1)
            file.seek(offset + 6)
            file.write(bytes([byte[0] ^ 0x10]))
        memory = memory_of(b"\0" * LENGTHS[record])
        ticket = store.read(record, memory)
        for _ in range(2):
            with pytest.raises(CorruptStateError) as caught:
                ticket.wait()
            for part in (
                f"record `{record}` (parameter of {record})",
                f"block {block} at offset {offset} of file `{store.data_path}`",
            ):
                assert part in str(caught.value)
        with store.data_path.open("r+b") as file:
            file.seek(offset + 6)
            file.write(byte)
    assert contents_of(store) == expected_at(2)


def test_a_truncated_data_file_names_record_and_file(store):
    store.open(read_only=True)
    ends = [store.block_place(record, 0).offset + BLOCK for record in LENGTHS]
    store.close()
    size = store.data_path.stat().st_size

    for length in sorted({0, 1, BLOCK, *(end - 1 for end in ends)}, reverse=True):
        with store.data_path.open("r+b") as file:
            file.truncate(length)
        with pytest.raises(CorruptStateError, match=r"record `.` \(parameter.*data-0.*truncated"):
            store.open()
        store.open(read_only=True)
        with pytest.raises(CorruptStateError, match=r"record `.` \(parameter.*data-0.*"):
            contents_of(store)
        store.close()
    assert size > max(ends)


def test_a_missing_data_file_is_named(store):
    store.data_path.unlink()

    for read_only in (False, True):
        with pytest.raises(CorruptStateError, match="data-0` is missing"):
            store.open(read_only=read_only)
    assert not store.data_path.exists()


def test_free_space_cut_off_the_end_does_not_matter(store):
    store.open(read_only=True)
    most = max(
        store.block_place(record, -(-length // BLOCK) - 1).offset
        for record, length in LENGTHS.items()
    )
    store.close()
    with store.data_path.open("r+b") as file:
        file.truncate(most + BLOCK)

    store.open()

    assert contents_of(store) == expected_at(2)


def test_random_damage_never_gives_wrong_data(store, tmp_path, engine):
    draw = random.Random(1)
    files = {path.name: path.read_bytes() for path in store.root.iterdir()}
    copy = tmp_path / "copy"
    copy.mkdir()
    outcomes = set()

    for _ in range(60):
        for name, content in files.items():
            damaged = bytearray(content)
            for _ in range(draw.choice((0, 1, 3))):
                # Near the beginning, where the blocks in use are.
                at = min(draw.randrange(20 * BLOCK), len(damaged) - 1)
                damaged[at] ^= draw.randrange(1, 256)
            (copy / name).write_bytes(damaged[: draw.choice((len(damaged), len(damaged) - 1))])
        damaged_store = BlockStore(copy, engine=engine, block_bytes=BLOCK)
        try:
            damaged_store.open(read_only=True)
            found = contents_of(damaged_store)
        except OffloadError as error:
            outcomes.add(type(error))
        else:
            outcomes.add(damaged_store.head["step"])
            assert found == expected_at(damaged_store.head["step"])
        finally:
            damaged_store.close()

    assert {1, 2, CorruptStateError} <= outcomes
