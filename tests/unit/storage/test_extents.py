import random

import xxhash

from offload.storage.extents import (
    Extent,
    Version,
    block_checksums,
    first_difference,
    moves_of,
    num_blocks_for,
)

BLOCK = 4096


def test_moves_cover_each_byte_once_and_in_order():
    extents = (
        Extent(path_index=0, first_block=7, num_blocks=2),
        Extent(path_index=0, first_block=3, num_blocks=1),
        Extent(path_index=0, first_block=20, num_blocks=3),
    )
    version = Version(num_bytes=5 * BLOCK + 100, extents=extents)
    place = [7, 8, 3, 20, 21, 22]  # block of the file by block of the record

    for first in range(7):
        for last in range(first, 7):
            start, stop = first * BLOCK, min(last * BLOCK, version.num_bytes)
            if start > version.num_bytes:
                continue
            moves = list(
                moves_of(version, block_bytes=BLOCK, alignment=512, start=start, stop=stop)
            )
            at = start
            for move in moves:
                block = move.first_block
                assert move.start == at - start == block * BLOCK - start
                assert move.offset == place[block] * BLOCK
                assert move.num_bytes == -(-move.bytes_in_use // 512) * 512
                at += move.bytes_in_use
            assert at == max(start, stop)


def test_the_last_block_moves_only_up_to_the_alignment():
    version = Version(
        num_bytes=BLOCK + 1, extents=(Extent(path_index=0, first_block=0, num_blocks=2),)
    )

    (move,) = moves_of(version, block_bytes=BLOCK, alignment=512)

    assert (move.num_bytes, move.bytes_in_use) == (BLOCK + 512, BLOCK + 1)


def test_an_empty_version_moves_nothing():
    version = Version(num_bytes=0, extents=())

    assert list(moves_of(version, block_bytes=BLOCK, alignment=512)) == []


def test_checksums_are_xxh3_64_of_each_block_in_use():
    data = random.Random(0).randbytes(2 * BLOCK + 5)

    found = block_checksums(memoryview(data), BLOCK)

    blocks = [data[:BLOCK], data[BLOCK : 2 * BLOCK], data[2 * BLOCK :]]
    assert list(found) == [xxhash.xxh3_64_intdigest(block) for block in blocks]
    assert list(block_checksums(memoryview(b""), BLOCK)) == []


def test_the_first_difference_is_found():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 9, 9], [1, 2, 3]) == 1


def test_blocks_are_counted_up():
    assert [num_blocks_for(n, BLOCK) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]
