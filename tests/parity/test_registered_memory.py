"""Sessions tell the kernel of their slots and windows; where it refuses, nothing changes."""

import errno
import logging
import threading

import pytest
from parity.models import SmallGPT, build, loss_of
from parity.sessions import PLACEMENTS, open_session

from offload._native import aio
from offload.errors import StorageError
from offload.storage.engine import Engine


@pytest.fixture(autouse=True)
def needs_io_uring():
    try:
        with Engine("io_uring"):
            pass
    except StorageError as error:
        pytest.skip(str(error))


def train(tmp_path, placement):
    """Returns bytes registered, pieces moved with that, and the digest of the state."""
    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        (path,) = session._storage.engines[0].path_stats()
        num_pieces = path.counters.registered_memory_pieces
        return session.stats().registered_bytes, num_pieces, session.state_digest()


@pytest.mark.parametrize("placement", PLACEMENTS[1:], ids="-".join)
def test_what_every_step_moves_is_registered(tmp_path, placement):
    registered_bytes, num_pieces, _ = train(tmp_path, placement)

    assert registered_bytes > 0
    assert num_pieces > 0


def test_nothing_is_registered_where_no_step_moves_anything(tmp_path):
    assert train(tmp_path, ("host", "host"))[:2] == (0, 0)


def test_a_refusal_is_told_once_and_changes_no_bit(tmp_path, monkeypatch, caplog):
    *_, digest = train(tmp_path / "registered", ("storage", "storage"))

    def refuse(self, *, address, num_bytes):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(aio.Queue, "register", refuse)
    monkeypatch.setattr("offload.storage.backend_native._warned_unregistered", threading.Event())
    with caplog.at_level(logging.WARNING):
        found = [train(tmp_path / str(number), ("storage", "storage")) for number in range(2)]

    assert found == [(0, 0, digest)] * 2
    assert sum("RLIMIT_MEMLOCK" in record.getMessage() for record in caplog.records) == 1
