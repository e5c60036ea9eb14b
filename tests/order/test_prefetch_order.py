"""The exact order in which units are fetched, prefetched and evicted: the specification.

Four units, used in the order 0 1 2 3 and, in backward, 3 2 1: the input needs no gradient, so
nothing asks for the weight of unit 0. An event names what is asked of the tier or leaves a slot:
`fetch N` (needed now), `prefetch N` (ahead of use), `evict N`, `write N`; `use N` is a call.
"""

import contextlib
import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from offload.devices import make_device
from offload.errors import BudgetError
from offload.layout import UnitFacts, build_layout
from offload.memory import Budget, SlotPool, memory_of
from offload.streaming.discovery import discover_units
from offload.streaming.model import StreamedModel
from offload.streaming.prefetch_distance import PrefetchDistance
from offload.streaming.residency import Residency
from offload.streaming.unit import StreamedUnit

WIDTH = 64


@pytest.fixture(params=["cpu", "emulated"], autouse=True)
def device(request, monkeypatch):
    """Every list holds on both; what is not yet there, or no longer, is read by nobody."""
    device = make_device(request.param)
    device.open()
    monkeypatch.setattr(Harness, "device", device)
    with device.checking() if request.param == "emulated" else contextlib.nullcontext():
        yield device
    device.close()


class FakeTier:
    """Keeps units in memory and notes what is read, in order; a copy is complete at once."""

    def __init__(self, events, device):
        self.events = events
        self.device = device
        self.stored = {}

    def can_prefetch(self):
        return True

    def bytes_from_update(self, unit):
        return 0

    def wait_readable(self, unit):
        pass

    def raise_failure(self):
        pass

    def wait_updated(self, transfers):
        pass

    def settle(self):
        pass

    def waits_for(self, transfers):
        return "path"

    def start_read(self, unit, into, *, is_prefetch):
        self.events.append(f"{'prefetch' if is_prefetch else 'fetch'} {unit.name}")
        copy = self.device.copy_in(memoryview(self.stored[unit.name]), into)
        copy.synchronize()
        return [copy]

    def write(self, unit, source):
        self.events.append(f"write {unit.name}")
        self.stored[unit.name] = bytes(memory_of(source))


class Chain(nn.Module):
    """Layers in a list; `skipped` ones are left out, `repeated` ones are called twice."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.skipped = set()
        self.repeated = set()
        self.order = range(layers)

    def forward(self, x):
        for index in self.order:
            layer = self.layers[index]
            if index not in self.skipped:
                x = layer(x)
            if index in self.repeated:
                x = layer(x)
        return x


class Harness:
    """A chain over a fake tier, and the events of what it does."""

    device = None

    def __init__(self, *, slots, distance=2, layers=4):
        torch.manual_seed(0)
        self.events = []
        self.model = Chain(layers)
        tier = FakeTier(self.events, self.device)
        discovered = discover_units(self.model)
        for unit in discovered.units:
            unit.facts = UnitFacts(name=unit.facts.name[-1], parameters=unit.facts.parameters)
        layout = build_layout([u.facts for u in discovered.units], codec="split")
        slot_bytes = layout.units[0].num_bytes
        memory = self.device.allocate(slots * slot_bytes)
        budget = Budget(slots * slot_bytes, tier="host")
        self.pool = SlotPool(memory, slot_bytes=slot_bytes, budget=budget, purpose="slots")
        parameters = {n: p for u in discovered.units for n, p in u.parameters.items()}
        units = [StreamedUnit(unit, i, parameters) for i, unit in enumerate(layout.units)]
        for unit in units:
            stored = torch.zeros(unit.layout.num_bytes, dtype=torch.uint8)
            for binding in unit.bindings:
                stop = binding.offset_bytes + binding.num_bytes
                values = binding.parameter.detach().view(-1).view(torch.uint8)
                stored[binding.offset_bytes : stop] = values
            unit.begin()
            tier.stored[unit.name] = bytes(stored.numpy())
        self.residency = Recorded(
            self.events,
            units,
            pool=self.pool,
            tier=tier,
            prefetch_distance=distance,
            on_edit=lambda edits: None,
            device=self.device,
        )
        self.streamed = StreamedModel(self.model, discovered, self.residency, on_pass=lambda: None)
        self.streamed.open()
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self._note_use)

    def forward(self, *, needs_gradient=False):
        return self.model(torch.ones(1, WIDTH, requires_grad=needs_gradient)).sum()

    def take(self):
        taken = list(self.events)
        self.events.clear()
        return taken

    def update(self):
        """What the engine does around an update."""
        self.residency.evict_all()
        self.events.append("update")
        self.streamed.after_update()

    def step(self):
        self.forward().backward()
        self.update()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            self.forward()
        self.model.train()

    def _note_use(self, layer, _):
        index = list(self.model.layers).index(layer)
        self.events.append(f"use {index}")


class Recorded(Residency):
    """A residency that notes what leaves its slots."""

    def __init__(self, events, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.events = events

    def evict(self, unit):
        if unit.base is not None:
            self.events.append(f"evict {unit.name}")
        super().evict(unit)


def run_twice(harness, passes):
    """Runs steps of `passes`; the events of what comes after them are those to look at."""
    for _ in range(2):
        passes()
        harness.update()
    harness.residency.trace.divergences = 0
    harness.take()


def missed(harness):
    return harness.residency.counters.accesses - harness.residency.counters.prefetch_hits


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


FORWARD_WITHIN_A_STEP = [
    *["prefetch 2", "use 0", "evict 0", "prefetch 3"],  # 0 and 1 were prefetched before
    *["use 1", "evict 1", "prefetch 0", "use 2", "evict 2", "prefetch 1", "use 3", "evict 3"],
]
FORWARD_BEFORE_BACKWARD = [
    *["prefetch 2", "use 0", "evict 0", "prefetch 3"],
    *["use 1", "use 2", "use 3"],  # which stay for backward
]


def test_a_forward_prefetches_the_next_one_of_its_step():
    harness = Harness(slots=3)
    run_twice(harness, lambda: (harness.forward() + harness.forward()).backward())

    first = harness.forward()
    events = harness.take()
    second = harness.forward()
    again = harness.take()
    (first + second).backward()

    assert events == FORWARD_WITHIN_A_STEP
    assert again == FORWARD_BEFORE_BACKWARD
    assert harness.take() == []
    assert harness.residency.trace.divergences == 0


def test_layers_that_are_called_directly_are_as_those_of_a_model_that_is_called():
    harness = Harness(slots=3)

    def forward():
        x = torch.ones(1, WIDTH)
        for layer in harness.model.layers:
            x = layer(x)
        return x.sum()

    run_twice(harness, lambda: forward().backward())

    loss = forward()

    assert harness.take() == FORWARD_BEFORE_BACKWARD
    loss.backward()
    assert harness.take() == []
    assert harness.residency.trace.divergences == 0


def test_backward_prefetches_the_next_micro_step_which_reads_as_much_as_the_first():
    harness = Harness(slots=3)

    def micro_steps():
        harness.forward().backward()
        harness.forward().backward()

    run_twice(harness, micro_steps)
    harness.forward().backward()
    first = harness.take()

    harness.forward().backward()

    assert first == [*FORWARD_BEFORE_BACKWARD, "evict 3", "prefetch 0"]
    assert harness.take() == [
        *["evict 1", "evict 2"],  # what backward left
        *["prefetch 1", "prefetch 2", "use 0", "evict 0", "prefetch 3"],
        *["use 1", "use 2", "use 3"],
    ]
    assert harness.residency.trace.divergences == 0


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_what_backward_used_last_is_there_for_a_micro_step_that_begins_with_it(slots):
    harness = Harness(slots=slots)

    def micro_step():
        harness.forward(needs_gradient=True).backward()  # which asks for 0, too

    def micro_steps():
        micro_step()
        micro_step()

    run_twice(harness, micro_steps)
    micro_step()
    before = missed(harness)
    harness.take()

    harness.forward(needs_gradient=True)

    events = harness.take()
    assert "use 0" in events
    assert not any(event.endswith("fetch 0") for event in events[: events.index("use 0")])
    assert missed(harness) == before
    assert harness.residency.trace.divergences == 0


def test_the_second_micro_step_ever_is_predicted_from_the_first():
    harness = Harness(slots=3)
    harness.forward().backward()
    harness.take()

    harness.forward().backward()

    assert harness.take() == [
        *["evict 1", "evict 2", "evict 3"],
        *["fetch 0", "prefetch 1", "prefetch 2", "use 0", "evict 0", "prefetch 3"],
        *["use 1", "use 2", "use 3", "evict 3", "prefetch 0"],
    ]


def test_a_loop_without_updates_prefetches_from_pass_to_pass():
    harness = Harness(slots=3)
    for _ in range(3):
        harness.evaluate()
    harness.take()

    harness.evaluate()

    assert harness.take() == FORWARD_WITHIN_A_STEP


@pytest.mark.parametrize("is_inside", [False, True])
def test_evaluations_of_every_step_are_foreseen(is_inside):
    harness = Harness(slots=3)

    def step():
        loss = harness.forward()
        if is_inside:
            harness.evaluate()
        loss.backward()
        if not is_inside:
            harness.evaluate()

    run_twice(harness, step)
    before = missed(harness)

    for _ in range(3):
        step()
        harness.update()

    assert missed(harness) == before
    assert harness.residency.trace.divergences == 0


def test_an_evaluation_once_in_a_while_costs_the_steps_no_hit():
    harness = Harness(slots=3)
    for _ in range(3):
        harness.step()
    harness.evaluate()
    harness.step()
    before = missed(harness)

    harness.evaluate()
    harness.evaluate()
    for _ in range(3):
        harness.step()

    assert missed(harness) == before


def test_generation_in_the_middle_of_a_step_leaves_the_rest_of_it_foreseen():
    harness = Harness(slots=3)
    for _ in range(3):
        harness.step()
    loss = harness.forward()
    before = missed(harness)

    harness.evaluate()
    harness.evaluate()
    loss.backward()
    harness.update()
    for _ in range(2):
        harness.step()
    harness.take()
    loss = harness.forward()

    # The first generation is not foreseen, nor that backward follows it; the steps after it are.
    assert missed(harness) - before == 4 + 2

    assert harness.take() == FORWARD_BEFORE_BACKWARD


def test_steps_that_take_turns_are_foreseen():
    harness = Harness(slots=2)

    def step(skipped):
        harness.model.skipped = skipped
        harness.step()

    for skipped in ({1}, {2, 3}) * 3:
        step(skipped)
    before = missed(harness), harness.residency.trace.divergences

    for skipped in ({1}, {2, 3}) * 2:
        step(skipped)

    assert (missed(harness), harness.residency.trace.divergences) == before


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
