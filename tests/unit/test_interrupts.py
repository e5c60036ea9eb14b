"""The harness of interrupts itself: no lock is kept that a signal could not keep."""

import threading

import interrupts
import pytest


def changes_under(lock, found):
    with lock:
        found.append(1)
    with lock:
        found.append(2)
        return len(found)


@pytest.mark.parametrize(("number", "changed"), [(2, 0), (3, 0), (4, 1), (5, 1), (6, 2)])
def test_no_line_that_is_interrupted_keeps_a_lock(monkeypatch, number, changed):
    monkeypatch.setattr(interrupts, "_ROOT", __file__)
    lock, found = threading.Lock(), []

    where = interrupts.interrupted_at(number, lambda: changes_under(lock, found))

    assert where is not None
    assert not lock.locked()
    assert len(found) == changed
