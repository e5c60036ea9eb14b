import random
import struct
from array import array

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given, settings

from offload.errors import CorruptStateError, StoreError
from offload.storage.extents import Extent, Version
from offload.storage.manifest import decode_manifest, encode_manifest

BLOCK = 4096


def tiny_records():
    return {
        "b": Version(
            num_bytes=BLOCK + 1,
            extents=(
                Extent(path_index=0, first_block=5, num_blocks=1),
                Extent(path_index=0, first_block=2, num_blocks=1),
            ),
            checksums=array("Q", [0x1122334455667788, 0xFFFFFFFFFFFFFFFF]),
        ),
        "aé": Version(num_bytes=0, extents=()),
    }


def tiny_manifest():
    return encode_manifest(
        tiny_records(), sequence=3, block_bytes=BLOCK, num_paths=1, head=b'{"schema":1}'
    )


def resealed(data):
    """Returns the bytes with a checksum that fits them, as a defect in writing would leave."""
    return data[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))


def fields_of(records):
    return {
        name: (version.num_bytes, version.extents, list(version.checksums))
        for name, version in records.items()
    }


def test_the_format_is_what_the_document_says():
    """Written by hand from docs/state-format.md."""
    expected = bytes.fromhex(
        "4f46464c444d414e"  # magic "OFFLDMAN"
        "02000000"  # schema
        "01000000"  # paths
        "e000000000000000"  # bytes of the file: 224
        "0300000000000000"  # sequence
        "0010000000000000"  # bytes of a block
        "0c00000000000000"  # bytes of the head
        "0200000000000000"  # records
        "0200000000000000"  # extents
        "0200000000000000"  # checksums
        "0400000000000000"  # bytes of the names
        "7b22736368656d61223a317d00000000"  # head, padded to 8
        "00000000000000000300000000000000"  # record 0: bytes, bytes of its name, extents
        "01100000000000000100000002000000"  # record 1
        "05000000000000000100000000000000"  # extent 0: first block, blocks, path
        "02000000000000000100000000000000"  # extent 1
        "8877665544332211"  # checksum of block 0 of record 1
        "ffffffffffffffff"
        "61c3a96200000000"  # names, padded to 8
    )
    expected = expected.replace(struct.pack("<Q", 224), struct.pack("<Q", len(expected) + 8), 1)
    expected += struct.pack("<Q", xxhash.xxh3_64_intdigest(expected))

    assert tiny_manifest() == expected


def test_a_manifest_survives_the_round_trip():
    manifest = decode_manifest(tiny_manifest(), name="m")

    assert (manifest.sequence, manifest.block_bytes, manifest.num_paths) == (3, BLOCK, 1)
    assert manifest.head == {"schema": 1}
    assert list(manifest.records) == ["aé", "b"]
    assert fields_of(manifest.records) == fields_of(tiny_records())


def test_an_empty_manifest_survives_the_round_trip():
    data = encode_manifest({}, sequence=1, block_bytes=BLOCK, num_paths=1, head=b"{}")

    manifest = decode_manifest(data, name="m")

    assert (manifest.records, manifest.head) == ({}, {})


def test_every_truncation_is_detected():
    data = tiny_manifest()

    for length in range(len(data)):
        with pytest.raises(CorruptStateError, match="`m` is damaged"):
            decode_manifest(data[:length], name="m")


def test_appended_bytes_are_detected():
    with pytest.raises(CorruptStateError):
        decode_manifest(tiny_manifest() + b"\0", name="m")


def test_every_flipped_bit_is_detected():
    data = tiny_manifest()

    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(CorruptStateError):
                decode_manifest(bytes(flipped), name="m")


def test_a_newer_schema_is_refused_and_not_called_damage():
    data = bytearray(tiny_manifest())
    data[8] = 3

    with pytest.raises(StoreError, match="expected schema 2 or older, found 3"):
        decode_manifest(resealed(bytes(data)), name="m")


def test_the_first_schema_is_still_read():
    data = bytearray(tiny_manifest())
    data[8] = 1

    manifest = decode_manifest(resealed(bytes(data)), name="m")

    assert (manifest.store_id, manifest.roots) == (None, ())
    assert fields_of(manifest.records) == fields_of(tiny_records())


def test_a_manifest_of_several_paths_says_where_they_are():
    head = b'{"store":{"id":"abc","paths":["/a","/b"]}}'
    data = encode_manifest({}, sequence=1, block_bytes=BLOCK, num_paths=2, head=head)

    manifest = decode_manifest(data, name="m")

    assert manifest.store_id == "abc"
    assert [str(root) for root in manifest.roots] == ["/a", "/b"]


@pytest.mark.parametrize(
    "head",
    [b"{}", b'{"store":1}', b'{"store":{"id":"a","paths":["/a"]}}', b'{"store":{"id":"a"}}',
     b'{"store":{"id":1,"paths":["/a","/b"]}}', b'{"store":{"id":"a","paths":["/a",1]}}'],
)  # fmt: skip
def test_paths_without_their_directories_are_damage(head):
    data = encode_manifest({}, sequence=1, block_bytes=BLOCK, num_paths=2, head=head)

    with pytest.raises(CorruptStateError, match="`m` is damaged"):
        decode_manifest(data, name="m")


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_sealed_manifest_with_wrong_numbers_gives_a_clear_error(seed):
    """Counts, sizes and places that contradict each other: never another exception."""
    draw = random.Random(seed)
    data = bytearray(tiny_manifest())
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(8, len(data) - 8)] = draw.choice((0, 1, 2, 127, 128, 255))
    try:
        manifest = decode_manifest(resealed(bytes(data)), name="m")
    except (CorruptStateError, StoreError):
        return

    for version in manifest.records.values():
        blocks = -(-version.num_bytes // manifest.block_bytes)
        assert version.num_blocks == len(version.checksums) == blocks
        assert all(extent.path_index < manifest.num_paths for extent in version.extents)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (struct.pack("<QII", 5, 1, 0), struct.pack("<QII", 2, 1, 0), "block 2 twice"),
        (struct.pack("<QII", 5, 1, 0), struct.pack("<QII", 5, 1, 1), "does not exist"),
        (struct.pack("<QII", 5, 1, 0), struct.pack("<QII", 1 << 60, 1, 0), "beyond what a file"),
        (struct.pack("<QQ", 3, BLOCK), struct.pack("<QQ", 3, BLOCK + 1), "multiple of 4096"),
        (struct.pack("<QII", BLOCK + 1, 1, 2), struct.pack("<QII", BLOCK, 1, 2), "fit its size"),
        (b"a\xc3\xa9b", b"a\xff\xffb", "utf-8"),
        (b"a\xc3\xa9b", b"z\xc3\xa9b", "not in order"),
        (b'{"schema":1}', b'["schema",1]', "no JSON object"),
        (struct.pack("<QQ", 3, BLOCK), struct.pack("<QQ", 0, BLOCK), "of 0"),
    ],
)
def test_tables_that_disagree_are_named(old, new, problem):
    data = tiny_manifest()
    assert data.count(old) == 1

    with pytest.raises(CorruptStateError, match=problem):
        decode_manifest(resealed(data.replace(old, new)), name="m")
