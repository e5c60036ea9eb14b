"""Ctrl-C at any line of what moves activations: no slot is lost, and what follows is exact."""

import collections
import functools
import gc

import pytest
from interrupts import ended_by, interrupted_at, num_lines
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_state, train_both

import offload
from offload.storage.spill import Spill
from offload.streaming.activation_store import Away

POINTS = [
    pytest.param(6, id="few"),
    pytest.param(40, id="some", marks=pytest.mark.slow),
    pytest.param(400, id="many", marks=pytest.mark.stress),
]
FILE = "activation_store.py"


@pytest.mark.parametrize("num_points", POINTS)
@pytest.mark.parametrize("where", ["host", "storage"])
def test_a_pass_that_is_interrupted_keeps_no_slot_and_what_follows_is_exact(
    tmp_path, where, num_points
):
    config = {"activations": {"offload": where, "memory": 1 << 20, "threshold": 1}}
    with open_session(tmp_path, budget_bytes=4 << 20, config=config) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)
        store = session._wrapped._activations._store
        lines = num_lines(lambda: loss_of(model, 9).backward(), file=FILE)
        model.zero_grad()

        for point in range(num_points):
            line = 1 + (point * lines) // num_points
            found = interrupted_at(line, lambda: loss_of(model, 9).backward(), file=FILE)
            model.zero_grad()
            require_all_free(store, f"interrupted at {found}, line {line} of {lines}")

        train_both(model, optimizer, reference, steps=2, first=2)
        require_equal_state(session, model, reference)
        assert store.counters.kept_bytes == 0


@pytest.mark.parametrize("where", ["host", "storage"])
def test_a_backward_that_was_interrupted_may_be_called_again(tmp_path, where):
    config = {"activations": {"offload": where, "memory": 1 << 20, "threshold": 1}}
    with open_session(tmp_path, budget_bytes=4 << 20, config=config) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        loss_of(reference.model, 9).backward()
        reference.step()
        expected = reference.digest()
        session.save("before")
        loss = loss_of(model, 9)
        lines = num_lines(lambda: loss.backward(retain_graph=True), file=FILE)
        num_exact = 0

        for point in range(12):
            model.zero_grad()
            line = 1 + (point * lines) // 12
            interrupted_at(line, functools.partial(loss.backward, retain_graph=True), file=FILE)
            model.zero_grad()
            if goes_through(loss):
                optimizer.step()
                assert session.state_digest() == expected, line
                num_exact += 1
                session.load("before")
            loss = loss_of(model, 9)

        assert num_exact > 6


def test_slots_whose_writes_were_interrupted_are_used_again(tmp_path):
    config = {"activations": {"offload": "storage", "memory": 8192, "threshold": 1024}}
    with open_session(tmp_path, budget_bytes=4 << 20, config=config) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)
        num_slots = session._wrapped._activations._store._slots.num_slots
        for _ in range(num_slots + 1):
            with ended_by(KeyboardInterrupt, Spill, "write", after=1):
                loss_of(model, 9).backward()

        train_both(model, optimizer, reference, steps=2)
        require_equal_state(session, model, reference)


def test_what_is_put_away_may_be_interrupted_before_it_is_whole():
    dropped = collections.deque()
    lines = num_lines(lambda: Away("record", dropped), file=FILE)

    for line in range(1, lines + 1):
        interrupted_at(line, lambda: Away("record", dropped), file=FILE)
        gc.collect()  # a finalizer that fails is a warning, which is an error

    assert set(dropped) == {"record"}


def goes_through(loss):
    """Calls backward, which may ask for another forward."""
    try:
        loss.backward(retain_graph=True)
    except offload.StoreError as error:
        if "run the forward again" not in str(error):
            raise
        return False
    return True


def require_all_free(store, where):
    gc.collect()
    with store._lock:
        while store._moves:
            store._finish_oldest()
        store._settle()
        if store._spill is not None:
            store._spill.wait_idle()
    assert store._slots.num_free == store._slots.num_slots, where
    assert not store._live, where
