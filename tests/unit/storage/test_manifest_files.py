import logging
import os

import pytest

from offload.errors import CorruptStateError, StorageError, StoreError
from offload.storage.manifest import encode_manifest
from offload.storage.manifest_files import ManifestFiles
from offload.storage.opening import find_store


def manifest_of(sequence):
    return encode_manifest({}, sequence=sequence, block_bytes=4096, num_paths=1, head=b"{}")


def publish(files, sequence):
    files.stage(sequence, manifest_of(sequence))
    files.publish(sequence)


def test_the_newest_is_found(tmp_path):
    files = ManifestFiles(tmp_path)
    for sequence in (1, 2, 10):
        publish(files, sequence)

    assert files.sequences() == [10, 2, 1]
    assert files.newest().sequence == 10
    assert find_store([tmp_path]).manifest.sequence == 10


def test_a_staged_manifest_is_not_found(tmp_path):
    files = ManifestFiles(tmp_path)
    publish(files, 1)
    files.stage(2, manifest_of(2))

    assert files.newest().sequence == 1
    files.delete_temporaries()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest-0000000001"]


def test_damaged_ones_are_skipped_with_a_warning(tmp_path, caplog):
    files = ManifestFiles(tmp_path)
    for sequence in (1, 2, 3):
        publish(files, sequence)
    files.path(3).write_bytes(b"")
    files.path(2).write_bytes(manifest_of(2)[:-1])

    with caplog.at_level(logging.WARNING, "offload.storage"):
        newest = files.newest()

    assert newest.sequence == 1
    assert [str(files.path(n)) in caplog.text for n in (1, 2, 3)] == [False, True, True]


def test_one_under_another_name_is_damaged(tmp_path):
    files = ManifestFiles(tmp_path)
    files.path(7).write_bytes(manifest_of(6))

    with pytest.raises(CorruptStateError, match="expected sequence 7, found 6"):
        files.read(7)
    with pytest.raises(CorruptStateError, match="no manifest in"):
        files.newest()


def test_no_manifest_is_no_damage(tmp_path):
    assert ManifestFiles(tmp_path).newest() is None
    with pytest.raises(StoreError, match="no store"):
        find_store([tmp_path])
    (tmp_path / "data-0").touch()
    with pytest.raises(StoreError, match="no complete commit"):
        find_store([tmp_path])
    with pytest.raises(StoreError, match="no store"):
        find_store([tmp_path / "absent"])


def test_old_ones_are_deleted(tmp_path):
    files = ManifestFiles(tmp_path)
    for sequence in (1, 2, 3):
        publish(files, sequence)

    files.delete_before(2)

    assert files.sequences() == [3, 2]


def test_a_symbolic_link_is_not_followed(tmp_path):
    files = ManifestFiles(tmp_path)
    target = tmp_path / "elsewhere"
    target.write_bytes(manifest_of(1))
    files.path(1).symlink_to(target)
    files.path(2).with_suffix(".tmp").symlink_to(target)

    with pytest.raises(StorageError, match="cannot read manifest"):
        files.newest()
    with pytest.raises(StorageError, match="cannot write manifest"):
        files.stage(2, b"xx")
    assert target.read_bytes() == manifest_of(1)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def no_space(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", no_space)

    with pytest.raises(StorageError, match="No space left") as caught:
        ManifestFiles(tmp_path).stage(1, b"xx")
    assert caught.value.errno == 28
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    files = ManifestFiles(tmp_path)

    publish(files, 1)

    assert files.newest().sequence == 1
