import contextlib
import errno
import threading
import time
import weakref

import pytest
import torch

from offload.errors import ConfigError, StorageError, StoreError
from offload.storage.engine import Engine, Priority
from offload.storage.file import StorageFile, open_file
from offload.storage.paced_engine import PacedEngine, PacedTicket


@pytest.fixture
def file(tmp_path):
    file = open_file(tmp_path / "f", create=True, direct=False)
    yield file
    file.close()


def test_what_is_written_comes_back(file):
    with PacedEngine(Engine(), bytes_per_s=10**9) as engine:
        engine.write(file, 0, b"hello").wait()
        into = bytearray(5)
        ticket = engine.read(file, 0, into)
        ticket.wait()

        assert into == b"hello"
        assert ticket.done()
        assert engine.stats().write_bytes == 5


def test_the_rate_is_kept(file):
    part = bytes(1 << 17)
    with PacedEngine(Engine(), bytes_per_s=1 << 22) as engine:
        started_s = time.monotonic()
        for index in range(16):
            engine.write(file, index * len(part), part)
        engine.write(file, 0, b"x").wait()
        paced_s = time.monotonic() - started_s

    # A busy machine only adds to what the limit asks for; 20 ms are its patience.
    assert paced_s >= 16 * len(part) / (1 << 22) - 0.03


def test_an_urgent_transfer_goes_before_those_that_wait(file):
    with PacedEngine(Engine(), bytes_per_s=1 << 20) as engine:
        engine.write(file, 0, bytes(1 << 19)).wait()
        late = [
            engine.write(file, 0, bytes(1 << 19), priority=Priority.WRITE_BACK) for _ in range(3)
        ]
        into = bytearray(16)
        urgent = engine.read(file, 0, into, priority=Priority.NEEDED)
        urgent.wait()

        # The first may begin as soon as the urgent one has; the last waits for those before it.
        assert not late[-1].done()


def test_a_timeout_leaves_the_transfer_waiting(file):
    with PacedEngine(Engine(), bytes_per_s=1 << 20) as engine:
        engine.write(file, 0, bytes(1 << 19)).wait()
        ticket = engine.write(file, 0, b"late")

        with pytest.raises(TimeoutError, match="held back"):
            ticket.wait(0.0)
        ticket.wait()


def test_close_carries_out_what_waits(file):
    engine = PacedEngine(Engine(), bytes_per_s=1 << 20)
    engine.open()
    engine.write(file, 0, bytes(1 << 18))
    ticket = engine.write(file, 0, b"last words")

    engine.close()
    engine.close()

    assert ticket.done()
    assert file.path.read_bytes().startswith(b"last words")
    with pytest.raises(StoreError, match="closed"):
        engine.write(file, 0, b"x")


def test_errors_come_from_the_ticket():
    full = StorageFile(path="/dev/full", fd=-1)
    with PacedEngine(Engine("threads"), bytes_per_s=10**9) as engine:
        ticket = engine.write(full, 0, b"x")

        with pytest.raises(StorageError) as caught:
            ticket.wait()

    assert caught.value.errno == errno.EBADF


def test_no_limit_at_all_is_no_limit():
    with pytest.raises(ConfigError, match="more than 0"):
        PacedEngine(Engine(), bytes_per_s=0)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_memory_is_kept_when_a_transfer_is_over(file, fails):
    target = StorageFile(path="/dev/full", fd=-1) if fails else file
    with PacedEngine(Engine("threads"), bytes_per_s=10**9) as engine:
        memory = torch.zeros(4096, dtype=torch.uint8)
        alive = weakref.ref(memory)

        ticket = engine.write(target, 0, memory)
        with contextlib.suppress(StorageError):
            ticket.wait()
        del memory

        assert alive() is None


class Ended:
    """A transfer that is over as soon as someone asks for a report."""

    def __init__(self, report):
        self.notify = report

    def done(self):
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_who_is_told_of_the_end_finds_it(fails, monkeypatch):
    ticket, found = PacedTicket(), []
    told = threading.Thread(target=lambda: found.append(ticket.done()))

    def report(*_):
        told.start()
        told.join(timeout=0.1)  # long enough to ask

    monkeypatch.setattr("os.eventfd_write", report)
    ticket.notify(3)

    if fails:
        ticket.fail(StorageError("cannot read"))
    else:
        ticket.start(Ended(report))

    told.join()
    assert found == [True]
