"""The exact order in which units are fetched, prefetched and evicted: the specification.

Of a step that is one forward and one backward; `test_prefetch_of_loops.py` has the others.
"""

import itertools
from collections import Counter

import pytest
import torch
from order.chain import Harness

from offload.errors import BudgetError
from offload.streaming.prefetch_distance import PrefetchDistance

pytestmark = pytest.mark.usefixtures("chain_device")


FIRST_FORWARD = [
    *["fetch 0", "use 0", "evict 0"],
    *["fetch 1", "use 1", "evict 1"],
    *["fetch 2", "use 2", "evict 2"],
    *["fetch 3", "use 3", "evict 3"],
]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_first_forward_fetches_on_demand_and_releases_after_each_call(slots):
    harness = Harness(slots=slots)

    harness.forward()

    assert harness.take() == FIRST_FORWARD


@pytest.mark.parametrize("slots, events", [
    (1, ["fetch 3", "evict 3", "fetch 2", "evict 2", "fetch 1"]),
    (2, ["fetch 3", "fetch 2", "evict 2", "fetch 1"]),
    (3, ["fetch 3", "fetch 2", "fetch 1"]),
])  # fmt: skip
def test_the_first_backward_evicts_only_when_a_slot_is_needed(slots, events):
    harness = Harness(slots=slots)
    loss = harness.forward()
    harness.take()

    loss.backward()

    assert harness.take() == events


def test_a_distance_of_0_never_prefetches():
    harness = Harness(slots=3, distance=0)
    harness.step()
    harness.take()

    harness.forward()

    assert harness.take() == [  # but the last stay for backward
        *["fetch 0", "use 0", "evict 0"],
        *["fetch 1", "use 1", "fetch 2", "use 2", "fetch 3", "use 3"],
    ]
    assert harness.residency.counters.prefetches == 0


def test_the_second_step_prefetches_two_ahead_in_three_slots():
    harness = Harness(slots=3)
    harness.step()
    harness.take()

    loss = harness.forward()
    forward = harness.take()
    loss.backward()
    backward = harness.take()

    assert forward == [
        *["prefetch 2", "use 0", "evict 0", "prefetch 3"],  # 0 and 1 were prefetched by the update
        *["use 1", "use 2", "use 3"],  # which stay for backward
    ]
    assert backward == []


def test_the_second_step_prefetches_one_ahead_in_two_slots():
    harness = Harness(slots=2)
    harness.step()
    harness.take()

    loss = harness.forward()
    forward = harness.take()
    loss.backward()
    backward = harness.take()

    assert forward == [
        *["use 0", "evict 0", "prefetch 2"],
        *["use 1", "evict 1", "prefetch 3"],
        *["use 2", "use 3"],
    ]
    assert backward == ["evict 3", "prefetch 1"]


def test_one_slot_prefetches_when_it_comes_free():
    harness = Harness(slots=1)
    harness.step()
    harness.take()

    loss = harness.forward()
    forward = harness.take()
    loss.backward()
    backward = harness.take()

    assert forward == [
        *["use 0", "evict 0", "prefetch 1"],
        *["use 1", "evict 1", "prefetch 2"],
        *["use 2", "evict 2", "prefetch 3"],
        "use 3",
    ]
    assert backward == ["evict 3", "fetch 2", "evict 2", "fetch 1"]


@pytest.mark.parametrize("slots, first", [(1, [0]), (2, [0, 1]), (3, [0, 1])])
def test_an_update_empties_the_slots_and_prefetches_the_next_forward(slots, first):
    harness = Harness(slots=slots)
    harness.forward().backward()
    harness.take()

    harness.update()

    events = harness.take()
    after = events.index("update") + 1
    assert all(event.startswith("evict") for event in events[: after - 1])
    assert events[after:] == [f"prefetch {unit}" for unit in first]


@pytest.mark.parametrize("slots, accesses", [(2, 4 + 1), (3, 4)])
def test_every_access_from_the_second_step_on_is_a_hit(slots, accesses):
    harness = Harness(slots=slots)
    harness.step()
    before = harness.residency.counters.accesses, harness.residency.counters.prefetch_hits

    for _ in range(3):
        harness.step()

    after = harness.residency.counters.accesses, harness.residency.counters.prefetch_hits
    assert after[0] - before[0] == after[1] - before[1] == 3 * accesses


@pytest.mark.parametrize("slots, expected", [
    (1, {0: 1, 1: 2, 2: 2, 3: 1}),
    (2, {0: 1, 1: 2, 2: 1, 3: 1}),
    (3, {0: 1, 1: 1, 2: 1, 3: 1}),
])  # fmt: skip
def test_a_unit_is_read_for_forward_and_for_backward_unless_it_stays(slots, expected):
    # What the traffic formula counts: the last units, one for each slot, are there for backward.
    harness = Harness(slots=slots)
    harness.step()
    harness.take()

    harness.step()

    reads = [event for event in harness.take() if event.startswith(("fetch", "prefetch"))]
    counts = Counter(int(event.split()[1]) for event in reads)
    assert counts == expected


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_reads_are_the_same_however_the_distance_changes(slots, monkeypatch):
    # As where fetches come late or early by turns. What is read ahead is the next step's.
    distances = itertools.cycle([3, 1, 2, 1, 3])
    monkeypatch.setattr(
        PrefetchDistance, "units", property(lambda d: max(min(next(distances), d._most), d._least))
    )
    harness = Harness(slots=slots, distance=1)
    harness.step()
    harness.take()

    steps = []
    for _ in range(6):
        harness.step()
        events = harness.take()
        used, ahead = events[: events.index("update")], events[events.index("update") :]
        steps.append([sum("fetch" in event for event in part) for part in (used, ahead)])

    reads = [now[0] + before[1] for before, now in itertools.pairwise(steps)]
    assert set(reads) == {4 + max(3 - slots, 0)}


@pytest.mark.parametrize("distance", [0, 1, 2, 3])
@pytest.mark.parametrize("slots, expected", [
    (1, {0: 3, 1: 3, 2: 2, 3: 2}),
    (2, {0: 2, 1: 3, 2: 2, 3: 2}),
    (3, {0: 2, 1: 3, 2: 2, 3: 1}),
    (4, {0: 1, 1: 1, 2: 1, 3: 1}),
])  # fmt: skip
def test_what_backward_uses_twice_is_read_by_its_slots_whatever_the_distance(
    slots, expected, distance
):
    # Forward 0 1 2 3 0 1, backward 1 0 3 2 1: what stays has less than `slots` others until then.
    harness = Harness(slots=slots, distance=distance)
    harness.model.order = [0, 1, 2, 3, 0, 1]
    harness.step()
    harness.take()
    harness.step()
    before = harness.take()
    harness.residency.trace.divergences = 0

    harness.step()

    events = harness.take()
    used = before[before.index("update") :] + events[: events.index("update")]
    reads = [event for event in used if "fetch" in event]
    assert Counter(int(event.split()[1]) for event in reads) == expected
    assert harness.residency.trace.divergences == 0
    if slots > 1 and distance > 0:  # what stays hinders no fetch ahead
        assert not any(read.startswith("fetch") for read in reads)


def test_a_layer_that_is_skipped_is_fetched_in_vain_once_and_the_trace_is_recorded_anew():
    harness = Harness(slots=2)
    harness.step()
    harness.model.skipped = {1}
    harness.take()

    harness.forward().backward()
    first = harness.take()
    harness.update()
    harness.take()
    harness.forward().backward()
    second = harness.take()

    assert first == [
        *["use 0", "evict 0", "prefetch 2", "evict 1", "prefetch 3"],
        *["use 2", "use 3"],
        *["evict 3", "prefetch 1"],  # in backward, where the old trace still had it
    ]
    assert second == [
        *["use 0", "evict 0", "prefetch 3"],
        *["use 2", "use 3"],
    ]
    assert harness.residency.trace.divergences == 1


def test_a_layer_that_is_called_twice_in_a_row_stays():
    harness = Harness(slots=3)
    harness.model.repeated = {1}
    harness.step()
    harness.take()

    harness.forward()

    assert harness.take() == [
        *["prefetch 2", "use 0", "evict 0"],
        *["use 1", "prefetch 3", "use 1"],
        *["use 2", "use 3"],
    ]


def test_an_edited_unit_is_written_before_it_leaves():
    harness = Harness(slots=3)
    harness.step()
    with torch.no_grad():
        harness.model.layers[2].weight.zero_()
    harness.take()

    harness.residency.evict_all()

    assert "write 2" in harness.take()
    harness.forward()
    assert harness.model.layers[2].weight.count_nonzero() == 0


def test_a_held_unit_is_never_evicted_and_the_refusal_names_it():
    harness = Harness(slots=1, distance=0)
    harness.residency.hold(0)

    with pytest.raises(BudgetError, match=r"unit `1`.*all 1 slots are taken; held: `0` \(1 holds"):
        harness.residency.hold(1)

    harness.residency.release_hold(0, evict=False)
    harness.residency.hold(1)
    assert harness.take() == ["fetch 0", "evict 0", "fetch 1"]


def test_a_slot_that_a_tensor_still_reaches_is_not_reused():
    harness = Harness(slots=2, distance=0)
    kept = harness.model.layers[0].weight.detach()
    values = kept.clone()

    with torch.no_grad():
        harness.forward()

    assert torch.equal(kept, values)
    assert harness.pool.num_free == 1
    del kept
    assert harness.pool.num_free == 2


def test_nothing_is_leased_once_every_unit_has_left():
    harness = Harness(slots=3)
    harness.step()
    harness.forward()

    harness.residency.evict_all()

    assert harness.pool.num_free == 3
    assert all(parameter.isnan().all() for parameter in harness.model.parameters())


def test_what_a_pass_in_inference_mode_prefetches_is_trained_with():
    harness = Harness(slots=3)
    for _ in range(3):
        with torch.inference_mode():
            harness.forward()

    harness.forward().backward()

    assert all(layer.weight.grad is not None for layer in harness.model.layers)


def test_each_part_of_a_wait_is_for_what_it_was_for():
    harness = Harness(slots=1, distance=0)
    harness.tier.parts = ["path /a", "path /b", "checksum"]

    harness.residency.fetch(harness.residency.units[0])

    assert harness.take() == ["fetch 0", "wait path /a", "wait path /b"]
    found = {stall.waits_for: stall for stall in harness.stalls.stalls()}
    assert set(found) == {"path /a", "path /b", "checksum"}
    assert {(stall.cause, stall.count) for stall in found.values()} == {("fetching a unit", 1)}
    waited_s = sum(stall.duration_s for stall in found.values())
    assert waited_s == pytest.approx(harness.residency.counters.io_wait_s)
