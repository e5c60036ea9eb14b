"""Exact lists of what updates under a forward read and write: the specification of `overlap`.

Four units and records `a` to `d`. `r`: a state is read, `w`: written. Parameters, which are read
and written for each record, are left out.
"""

import threading

import pytest
from unit.optim.test_pipeline import OPTIONS, Harness

from offload.optim.deferred import DeferredUpdates
from offload.optim.pipeline import ParameterUpdate
from offload.optim.scalars import adamw_scalars
from offload.policy import resolve_overlap
from offload.storage.stalls import StallAccount

A, B, C, D = range(4)


class Steps:
    """Steps of a model whose forward is expected to use units in the order `upcoming`."""

    def __init__(self, *, num_buffers=1, num_cached=0, num_places=None):
        self.harness = Harness(
            num_buffers=num_buffers, num_cached=num_cached, num_places=num_places
        )
        self.deferred = DeferredUpdates(resolve_overlap("forward"), StallAccount())
        self.deferred.use(self.harness.layout, self.harness.pipeline)
        self.step = 0

    def start(self, units="abcd", *, upcoming=(), kept=(), slotted=()):
        self.step += 1
        scalars = adamw_scalars(step=self.step, **OPTIONS)
        self.deferred.start(
            {f"{name}.p": ParameterUpdate(scalars=scalars, scales=()) for name in units},
            edited=frozenset(),
            kept={f"{name}#0" for name in kept},
            upcoming=list(upcoming),
            slotted=slotted,
        )

    def run(self, units="abcd", **options):
        self.harness.store.events.clear()
        self.start(units, **options)
        self.deferred.finish()
        return self.events()

    def events(self):
        states = [event for event in self.harness.store.events if " state/" in event]
        return [f"{event[0]} {event.split('/')[1][0]}" for event in states]


@pytest.fixture
def steps():
    steps = Steps()
    steps.run()
    yield steps
    steps.deferred.close()


def test_records_are_updated_in_the_order_of_the_forward(steps):
    events = steps.run(upcoming=(C, A, D, B))

    assert events == ["r c", "w c", "r a", "w a", "r d", "w d", "r b", "w b"]


def test_units_that_the_forward_is_not_expected_to_reach_come_last(steps):
    events = steps.run(upcoming=(D, B))

    assert events == ["r d", "w d", "r b", "w b", "r a", "w a", "r c", "w c"]


def test_a_record_of_several_units_comes_with_the_first_of_them():
    policy = resolve_overlap("forward")

    sequence = policy.sequence([(0,), (1, 3), (2,), ()], [2, 3, 0, 1])

    assert list(sequence) == [2, 1, 0, 3]


def test_records_without_gradients_are_left_alone(steps):
    assert steps.run("bd", upcoming=(D, C, B, A)) == ["r d", "w d", "r b", "w b"]


def test_what_the_forward_waits_for_comes_next(steps, monkeypatch):
    pipeline, compute = steps.harness.pipeline, steps.harness.pipeline.compute
    is_computing, may_go_on, was_asked = (threading.Event() for _ in range(3))

    def compute_when_told(current, job):
        is_computing.set()
        assert may_go_on.wait(10)
        compute(current, job)

    monkeypatch.setattr(pipeline, "compute", compute_when_told)
    monkeypatch.setattr(pipeline, "wake", was_asked.set)
    steps.harness.store.events.clear()

    steps.start(upcoming=(A, B, C, D))
    assert is_computing.wait(10)
    forward = threading.Thread(target=steps.deferred.wait_for, args=(D,))
    forward.start()
    assert was_asked.wait(10)
    may_go_on.set()
    forward.join()
    steps.deferred.finish()

    assert steps.events() == ["r a", "w a", "r d", "w d", "r b", "w b", "r c", "w c"]


def test_the_first_records_of_the_next_step_are_read_as_far_as_there_are_buffers():
    steps = Steps(num_buffers=2)
    steps.run()
    steps.run(upcoming=(C, A, D, B))
    steps.harness.store.events.clear()

    steps.deferred.prefetch()
    ahead = steps.events()
    steps.start(upcoming=(C, A, D, B))
    steps.deferred.finish()

    assert ahead == ["r c", "r a"]
    assert steps.events() == [
        *["r c", "r a", "w c", "r d", "w a", "r b", "w d", "w b"],
    ]
    steps.deferred.close()


@pytest.mark.parametrize(("num_places", "ahead"), [(2, ["r a"]), (3, ["r a", "r d"])])
def test_what_is_in_memory_is_not_read_ahead_and_has_a_place_left(num_places, ahead):
    steps = Steps(num_buffers=2, num_cached=1, num_places=num_places)
    for _ in range(2):
        steps.run(upcoming=(C, A, D, B), kept="c")
    steps.harness.store.events.clear()

    steps.deferred.prefetch()

    assert steps.events() == ahead
    steps.harness.pipeline.drop_prefetched()
    steps.deferred.close()


def test_what_was_read_ahead_and_has_no_gradient_then_is_given_up():
    steps = Steps(num_buffers=2)
    for _ in range(2):
        steps.run(upcoming=(A, B, C, D))
    steps.deferred.prefetch()

    events = steps.run("cd", upcoming=(A, B, C, D))

    assert events == ["r c", "r d", "w c", "w d"]
    assert steps.harness.pool.num_free == 2
    steps.deferred.close()


def test_units_are_told_one_by_one_when_they_are_updated(steps):
    told = []
    steps.harness.store.events.clear()
    steps.start(upcoming=(B, A, C, D))
    for unit in (A, B, C, D):
        steps.deferred.when_updated(unit, lambda unit=unit: told.append(unit))
    steps.deferred.finish()

    assert sorted(told) == [A, B, C, D]
    assert all(steps.deferred.is_updated(unit) for unit in (A, B, C, D))


def test_a_failure_is_raised_where_the_unit_is_waited_for_and_no_update_follows(steps):
    steps.harness.store.failing.add("write state/b#0")

    steps.start(upcoming=(A, B, C, D))

    with pytest.raises(OSError, match="no space"):
        steps.deferred.wait_for(B)
    with pytest.raises(OSError, match="no space"):
        steps.deferred.finish()
    assert steps.harness.pool.num_free == 1
    assert not steps.deferred.is_updated(B)
