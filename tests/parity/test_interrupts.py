"""Ctrl-C in the middle of anything: what follows is as if that had not begun, or is refused."""

import contextlib
import threading

import pytest
from interrupts import ended_by
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both

import offload
from offload.optim.early import _ArrivingRecords
from offload.storage.store import BlockStore
from offload.storage.versions import VersionTable
from offload.streaming.pending import PendingUnits
from offload.streaming.unit import Binding


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


@contextlib.contextmanager
def trained(tmp_path, **options):
    with open_session(tmp_path, budget_bytes=400_000, **options) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)
        yield session, model, optimizer, reference


@pytest.mark.parametrize("where", [
    (Binding, "attach", 5),
    (Binding, "detach", 5),
    (PendingUnits, "bytes_from_update", 3),
], ids=lambda where: where[1])  # fmt: skip
def test_a_unit_that_is_half_in_its_slot_is_fetched_anew(tmp_path, where):
    owner, name, after = where
    with trained(tmp_path) as (session, model, optimizer, reference):
        with ended_by(KeyboardInterrupt, owner, name, after=after):
            loss_of(model, 9).backward()
        model.zero_grad()

        train_both(model, optimizer, reference, steps=2, first=2)
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("error", [KeyboardInterrupt, offload.StorageError])
def test_a_record_whose_reading_ahead_did_not_begin_is_read_by_its_update(
    tmp_path, monkeypatch, error
):
    with trained(tmp_path) as (session, model, optimizer, reference):
        loss, read = loss_of(model, 9), session._store.read

        def refuse(record, *args, **options):
            if record.startswith("state/"):
                raise error if error is KeyboardInterrupt else error("no such device")
            return read(record, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(session._store, "read", refuse)
            with pytest.raises(error):
                loss.backward()
        model.zero_grad()

        train_both(model, optimizer, reference, steps=2, first=2)
        require_equal_state(session, model, reference)


def test_a_window_without_places_is_an_error_and_no_endless_wait(tmp_path):
    with trained(tmp_path, overlap="none") as (session, model, optimizer, _):
        window = session._wrapped._memory.window
        taken = [window._take_place() for _ in range(window.num_places)]
        loss_of(model, 9).backward()

        with pytest.raises(offload.BudgetError, match="places taken and nothing in flight"):
            optimizer.step()
        with pytest.raises(offload.StoreError, match="between two steps"):
            session.commit()
        assert len(taken) == window.num_places_taken


@pytest.mark.parametrize("after", [1, 3])
def test_updates_under_a_backward_that_was_interrupted_are_given_up(tmp_path, after):
    with trained(tmp_path, overlap="both") as (session, model, optimizer, reference):
        with ended_by(KeyboardInterrupt, _ArrivingRecords, "add", after=after):
            loss_of(model, 9).backward()
        model.zero_grad()

        train_both(model, optimizer, reference, steps=2, first=2)
        require_equal_state(session, model, reference)


def test_a_step_that_was_interrupted_as_it_took_updates_is_not_made_twice(tmp_path):
    with trained(tmp_path, overlap="both") as (session, model, optimizer, _):
        loss_of(model, 9).backward()
        with ended_by(KeyboardInterrupt, BlockStore, "publish_staged", after=2):
            optimizer.step()

        for call in (optimizer.step, session.commit):
            with pytest.raises(offload.StoreError, match="between two steps"):
                call()


def test_writes_that_were_interrupted_as_they_ended_keep_no_slot(tmp_path):
    with trained(tmp_path, overlap="none") as (session, model, optimizer, reference):
        session.save("before")
        for after in range(1, 9):  # more than the window has records
            loss_of(model, 9).backward()
            with ended_by(KeyboardInterrupt, VersionTable, "publish", after=after):
                optimizer.step()
            session.load("before")
            model.zero_grad()

        train_both(model, optimizer, reference, steps=2, first=2)
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("overlap", ["forward", "both"])
def test_a_thread_of_updates_whose_start_was_interrupted_is_not_started_twice(tmp_path, overlap):
    with open_session(tmp_path, budget_bytes=400_000, overlap=overlap) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)
        session.save("none")
        with ended_by(KeyboardInterrupt, threading.Thread, "start", after=1):
            loss_of(model, 9).backward()
            optimizer.step()
        session.load("none")
        model.zero_grad()

        train_both(model, optimizer, reference, steps=3)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("offload-updates") <= 1
        assert names.count("offload-early-updates") <= 1
        require_equal_state(session, model, reference)
