import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys

import pytest

from offload.errors import StorageError, StoreError
from offload.storage import ownership
from offload.storage.ownership import OWNER_FILE, Ownership, current_process, live_owner

HOLD = """
import sys, pathlib
from offload.storage.ownership import Ownership
Ownership(pathlib.Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_owner(tmp_path):
    """Another process that owns `tmp_path` until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_owner_is_refused_while_the_first_lives(tmp_path, other_owner):
    ownership = Ownership(tmp_path)

    with pytest.raises(StoreError, match=rf"found process {other_owner.pid} on host"):
        ownership.acquire()
    assert live_owner(tmp_path).pid == other_owner.pid
    assert ownership.record is None


def test_a_dead_owner_is_taken_over_and_named(tmp_path, other_owner, caplog):
    other_owner.send_signal(signal.SIGKILL)
    other_owner.wait()
    ownership = Ownership(tmp_path)

    assert live_owner(tmp_path) is None
    with caplog.at_level(logging.WARNING, "offload.storage"):
        ownership.acquire()

    assert f"process {other_owner.pid}" in caplog.text
    assert live_owner(tmp_path).pid == os.getpid()
    ownership.release()


def test_a_second_owner_in_one_process_is_refused(tmp_path):
    first, second = Ownership(tmp_path), Ownership(tmp_path)
    first.acquire()

    with pytest.raises(StoreError, match="another store object of this process"):
        second.acquire()

    first.release()
    second.acquire()
    second.release()


def test_acquire_and_release_may_be_repeated(tmp_path, caplog):
    ownership = Ownership(tmp_path)

    for _ in range(2):
        ownership.acquire()
        ownership.acquire()
        assert ownership.record.pid == os.getpid()
        ownership.release()
        ownership.release()

    assert live_owner(tmp_path) is None
    assert "taken over" not in caplog.text
    assert (tmp_path / OWNER_FILE).stat().st_mode & 0o777 == 0o600


def test_a_forked_child_does_not_keep_a_dead_owners_lock(tmp_path):
    ownership, other = Ownership(tmp_path), Ownership(tmp_path)
    ownership.acquire()
    to_child, to_parent = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(to_parent[1], b"x")
        os.read(to_child[0], 1)  # lives until the parent is done
        os._exit(0)
    os.read(to_parent[0], 1)

    ownership.forget()  # what SIGKILL does: the descriptor goes, the record stays
    other.acquire()

    other.release()
    os.write(to_child[1], b"x")
    os.waitpid(pid, 0)
    for fd in (*to_child, *to_parent):
        os.close(fd)


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(fd, command, argument=0):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({}, True),  # it lives
        ({"start_ticks": 1}, False),  # the pid was used again
        ({"pid": 2**22 + 1}, False),  # there is no such process
        ({"boot_id": "before"}, False),  # the machine was started again
        ({"boot_id": "there", "host": "another"}, True),  # cannot be seen from here
        ({"pid_namespace": 1}, True),
    ],
)
def test_without_locks_the_record_decides(tmp_path, caplog, change, is_refused):
    first, second = Ownership(tmp_path), Ownership(tmp_path)
    first.acquire()
    first.forget()  # as SIGKILL leaves it
    path = tmp_path / OWNER_FILE
    fields = json.loads(path.read_text())
    fields["owner"] |= change
    path.write_text(json.dumps(fields))

    if is_refused:
        with pytest.raises(StoreError, match="cannot own store"):
            second.acquire()
    else:
        second.acquire()
        second.release()
    assert "has no locks" in caplog.text


def test_a_file_that_its_owner_deletes_is_not_what_the_next_one_locks(tmp_path, monkeypatch):
    first, second = Ownership(tmp_path), Ownership(tmp_path)
    first.acquire()
    lock = ownership._lock

    def late(fd, path):  # between the next one's open and its lock
        first.release(deletes=True)
        return lock(fd, path)

    monkeypatch.setattr(ownership, "_lock", late)
    second.acquire()

    assert live_owner(tmp_path) == second.record
    second.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"owner":{"pid":1}}', b"\xff"])
def test_an_unreadable_record_does_not_matter(tmp_path, content):
    (tmp_path / OWNER_FILE).write_bytes(content)
    ownership = Ownership(tmp_path)

    assert live_owner(tmp_path) is None
    ownership.acquire()

    assert ownership.record == live_owner(tmp_path)
    ownership.release()


@pytest.mark.parametrize("was_there", [False, True])
def test_a_record_without_room_is_a_storage_error_that_leaves_what_was_there(
    tmp_path, monkeypatch, was_there
):
    if was_there:
        first = Ownership(tmp_path)
        first.acquire()
        first.release()
    before = [(each.name, each.read_bytes()) for each in tmp_path.iterdir()]

    def is_full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", is_full)
        with pytest.raises(StorageError, match="expected room .*No space left") as raised:
            Ownership(tmp_path).acquire()

    assert raised.value.errno == errno.ENOSPC
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == before
    again = Ownership(tmp_path)
    again.acquire()
    again.release()


def test_the_record_tells_this_process_apart():
    record = current_process()

    assert record.pid == os.getpid()
    assert record.start_ticks > 0
    assert record.boot_id
