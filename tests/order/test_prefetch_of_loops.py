"""What is prefetched in loops other than one forward and one backward for each update.

Several forwards, layers that are called one by one, micro-steps, evaluations, and steps that take
turns: the exact order where it is one, and that all is foreseen.
"""

import pytest
import torch
from order.chain import WIDTH, Harness

pytestmark = pytest.mark.usefixtures("chain_device")


def run_twice(harness, passes):
    """Runs steps of `passes`; the events of what comes after them are those to look at."""
    for _ in range(2):
        passes()
        harness.update()
    harness.residency.trace.divergences = 0
    harness.take()


def missed(harness):
    return harness.residency.counters.accesses - harness.residency.counters.prefetch_hits


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
