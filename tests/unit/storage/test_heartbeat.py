import errno
import fcntl
import json
import os
import threading

import pytest

from offload.errors import StoreError
from offload.storage import ownership as ownership_module
from offload.storage.heartbeat import DEAD_AFTER_S, Heartbeat, silent_s
from offload.storage.ownership import OWNER_FILE, Ownership


def age(path, seconds):
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_a_heartbeat_touches_the_file_until_it_is_stopped(tmp_path):
    path = tmp_path / "owner"
    path.write_text("")
    age(path, 1000)
    heartbeat = Heartbeat(path, beat_s=0.01)

    heartbeat.start()
    while silent_s(path) > 500:
        threading.Event().wait(0.01)
    heartbeat.stop()
    heartbeat.stop()
    age(path, 1000)

    assert silent_s(path) > 900


def test_a_file_that_is_gone_is_warned_of_once(tmp_path, caplog):
    heartbeat = Heartbeat(tmp_path / "absent", beat_s=0.001)

    heartbeat.start()
    while not caplog.records:
        threading.Event().wait(0.001)
    heartbeat.stop()

    assert caplog.text.count("cannot touch owner file") == 1


def test_silence_is_measured_by_the_file_systems_clock(tmp_path):
    path = tmp_path / "owner"
    path.write_text("")
    age(path, 300)

    assert 299 < silent_s(path) < 310
    assert [entry.name for entry in tmp_path.iterdir()] == ["owner"]
    assert silent_s(tmp_path / "absent" / "owner") is None


@pytest.fixture
def on_network(monkeypatch):
    monkeypatch.setattr(ownership_module, "is_on_network", lambda path: True)


def claim_of_another_machine(tmp_path):
    """An owner file as a process on a machine that cannot be seen from here leaves it."""
    ownership = Ownership(tmp_path)
    ownership.acquire()
    ownership.forget()
    path = tmp_path / OWNER_FILE
    fields = json.loads(path.read_text())
    fields["owner"] |= {"boot_id": "there", "host": "another"}
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.usefixtures("on_network")
@pytest.mark.parametrize("has_locks", [True, False])
def test_an_owner_elsewhere_holds_its_store_while_it_gives_signs(tmp_path, monkeypatch, has_locks):
    path = claim_of_another_machine(tmp_path)
    if not has_locks:

        def refuse(fd, command, argument=0):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "fcntl", refuse)
    other = Ownership(tmp_path)

    with pytest.raises(StoreError, match="on host `another`.*sign of life"):
        other.acquire()
    age(path, DEAD_AFTER_S + 5)
    other.acquire()

    assert any(thread.name == "offload-heartbeat" for thread in threading.enumerate())
    other.release()
    assert not any(thread.name == "offload-heartbeat" for thread in threading.enumerate())


def test_a_local_file_system_needs_no_heartbeat(tmp_path):
    ownership = Ownership(tmp_path)

    ownership.acquire()

    assert not any(thread.name == "offload-heartbeat" for thread in threading.enumerate())
    ownership.release()
