"""Opening files: what is refused, and when the page cache is used instead of O_DIRECT."""

import errno
import os
import subprocess

import pytest

from offload.errors import StorageError
from offload.storage.file import open_file


@pytest.fixture
def no_direct_opening(monkeypatch):
    """A file system that refuses the flag, as ramfs does."""
    real_open = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


@pytest.fixture
def no_direct_transfers(monkeypatch):
    """A file system that takes the flag and refuses the transfers, as some FUSE ones do."""

    def refuse(fd, buffers, offset):
        raise OSError(errno.EINVAL, "no direct transfer")

    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(os, "pwritev", refuse)


def test_a_new_file_is_private_empty_and_not_inherited(tmp_path):
    path = tmp_path / "new.bin"

    file = open_file(path, create=True)

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == 0
    assert not os.get_inheritable(file.fd)
    file.close()
    file.close()
    assert file.fd == -1


def test_what_a_file_holds_survives_the_probe(tmp_path):
    path = tmp_path / "old.bin"
    path.write_bytes(b"kept")

    for options in ({}, {"create": True}, {"read_only": True}, {"direct": False}):
        open_file(path, **options).close()

    assert path.read_bytes() == b"kept"


def test_alignment_is_that_of_the_file(tmp_path):
    buffered = open_file(tmp_path / "a", create=True, direct=False)
    automatic = open_file(tmp_path / "b", create=True)

    assert (buffered.is_direct, buffered.alignment) == (False, 1)
    if automatic.is_direct:
        assert automatic.alignment >= 512
        assert automatic.alignment & (automatic.alignment - 1) == 0
    buffered.close()
    automatic.close()


def test_symbolic_links_are_refused(tmp_path):
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "target")

    with pytest.raises(StorageError, match="symbolic link") as failure:
        open_file(tmp_path / "link")

    assert failure.value.errno == errno.ELOOP


def test_other_kinds_of_files_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(StorageError, match="regular file"):
        open_file(tmp_path / "pipe", read_only=True, direct=False)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StorageError, match=str(tmp_path / "missing")) as failure:
        open_file(tmp_path / "missing")

    assert failure.value.errno == errno.ENOENT


@pytest.mark.parametrize("refusal", ["no_direct_opening", "no_direct_transfers"])
def test_the_page_cache_is_used_with_one_warning_per_directory(tmp_path, caplog, request, refusal):
    request.getfixturevalue(refusal)

    files = [open_file(tmp_path / name, create=True) for name in ("a", "b", "c")]

    assert [file.is_direct for file in files] == [False] * 3
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0]
    for file in files:
        file.close()


@pytest.mark.parametrize("refusal", ["no_direct_opening", "no_direct_transfers"])
def test_direct_transfers_that_are_asked_for_are_not_replaced(tmp_path, request, refusal):
    request.getfixturevalue(refusal)

    with pytest.raises(StorageError, match="O_DIRECT") as failure:
        open_file(tmp_path / "file", create=True, direct=True)

    assert failure.value.errno == errno.EINVAL


def test_a_file_system_without_direct_transfers_works(tmp_path):
    mount = ["mount", "-t", "ramfs", "ramfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a ramfs is not allowed here")
    try:
        file = open_file(tmp_path / "file", create=True)
        assert not file.is_direct
        file.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
