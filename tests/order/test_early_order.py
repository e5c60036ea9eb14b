"""Exact lists of what updates under backward read, stage and publish: the specification.

Records `a` to `d`, one unit each. `r`: a state is read, `s`: staged, `p`: becomes current.
"""

import threading
from types import SimpleNamespace

import pytest
from unit.optim.test_pipeline import OPTIONS, Harness

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.optim.early import EarlyUpdates
from offload.optim.pipeline import ParameterUpdate
from offload.optim.scalars import adamw_scalars
from offload.storage.stalls import StallAccount


class Steps:
    """Steps in which gradients arrive in the order of `backward`."""

    def __init__(self, *, kept="", num_buffers=1):
        self.harness = Harness(num_buffers=num_buffers)
        self.early = EarlyUpdates(StallAccount())
        self.early.use(self.harness.pipeline, kept={f"{name}#0" for name in kept})
        self.harness.run("abcd")
        self.step = 2

    def update(self, lr=OPTIONS["lr"]):
        return ParameterUpdate(
            scalars=adamw_scalars(step=self.step, **OPTIONS | {"lr": lr}), scales=()
        )

    def backward(self, units="dcba", *, edited=()):
        self.harness.store.events.clear()
        for name in units:
            self.early.arrived(f"{name}.p", update_of=lambda _: self.update(), edited=edited)
            self.early.finish()

    def take(self, *, lr=OPTIONS["lr"], edited=()):
        updates = {f"{name}.p": self.update(lr) for name in "abcd"}
        return sorted(name[0] for name in self.early.take(updates, edited=edited))

    def events(self):
        states = [event for event in self.harness.store.events if " state/" in event]
        return [f"{event[0]} {event.split('/')[1][0]}" for event in states]


@pytest.fixture
def steps():
    steps = Steps()
    yield steps
    steps.early.close()


def test_each_record_is_updated_when_its_gradient_is_complete_and_current_at_the_step(steps):
    plain = Harness(num_buffers=1)
    plain.run("abcd")
    plain.run("abcd", step=2)
    before = dict(steps.harness.store.values)

    steps.backward()

    assert steps.events() == ["r d", "s d", "r c", "s c", "r b", "s b", "r a", "s a"]
    assert steps.harness.store.values == before
    assert steps.take() == ["a", "b", "c", "d"]
    assert steps.harness.store.values == plain.store.values


def test_without_a_step_what_was_updated_is_given_up(steps):
    before = dict(steps.harness.store.values)

    steps.backward()
    for name in "abcd":  # the next backward's gradients
        steps.early.forget(f"{name}.p")

    assert steps.harness.store.staged == {}
    assert steps.harness.store.values == before
    assert steps.take() == []


def test_a_gradient_that_changes_once_more_is_applied_anew(steps):
    steps.backward("dc")
    steps.early.forget("d.p")
    steps.backward("d")

    assert steps.events() == ["r d", "s d"]
    assert steps.take() == ["c", "d"]


def test_other_hyperparameters_at_the_step_leave_it_to_the_step(steps):
    steps.backward()

    assert steps.take(lr=0.5) == []
    assert steps.harness.store.staged == {}


def test_edited_parameters_are_left_to_the_step(steps):
    steps.backward("dc", edited={"d.p"})

    assert steps.events() == ["r c", "s c"]
    assert steps.take(edited={"c.p"}) == []


def test_records_that_stay_in_memory_are_left_to_the_step():
    steps = Steps(kept="bd")

    steps.backward()

    assert steps.events() == ["r c", "s c", "r a", "s a"]
    assert steps.take() == ["a", "c"]
    steps.early.close()


def test_a_failure_is_raised_by_the_step(steps):
    steps.harness.store.failing.add("stage state/c#0")
    steps.backward("d")

    with pytest.raises(OSError, match="no space"):
        steps.backward("c")
    with pytest.raises(OSError, match="no space"):
        steps.take()
    steps.early.drop()
    assert steps.harness.pool.num_free == 1


def test_what_waited_for_an_update_that_failed_is_given_up_with_it(steps, monkeypatch):
    store, all_wait = steps.harness.store, threading.Event()
    plain = store.write_staged

    def stage_when_all_wait(*args, **options):
        assert all_wait.wait(10)
        return plain(*args, **options)

    monkeypatch.setattr(store, "write_staged", stage_when_all_wait)
    store.failing.add("stage state/d#0")
    for name in "dcb":
        steps.early.arrived(f"{name}.p", update_of=lambda _: steps.update(), edited=())
    all_wait.set()
    with pytest.raises(OSError, match="no space"):
        steps.early.finish()

    steps.early.drop()
    store.failing.clear()
    steps.backward("a")

    assert steps.events() == ["r a", "s a"]
    assert steps.take() == ["a"]
    assert store.staged == {}


def test_a_record_begins_with_the_last_gradient_of_its_parameters(monkeypatch):
    parameters = [
        ParameterFacts(name=f"a.{name}", shape=(8,), dtype="bfloat16") for name in ("p", "q")
    ]
    layout = build_layout([UnitFacts(name="a", parameters=tuple(parameters))], codec="split")
    early, begun = EarlyUpdates(StallAccount()), []
    monkeypatch.setattr(early, "_submit", lambda index, updates: begun.append(sorted(updates)))
    early.use(SimpleNamespace(state=SimpleNamespace(store=object(), layout=layout)), kept=())
    update = ParameterUpdate(scalars=adamw_scalars(step=1, **OPTIONS), scales=())

    def arrive(name):  # both have a gradient, of an earlier micro-step too
        early.arrived(name, update_of=lambda _: update, edited=())

    arrive("a.q")
    early.forget("a.q")  # it is about to change
    arrive("a.p")
    assert begun == []
    arrive("a.q")

    assert begun == [["a.p", "a.q"]]
