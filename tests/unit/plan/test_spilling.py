import pytest

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.gradients import spill_gradients
from offload.plan.spilling import SpilledBytes, spilled_traffic, usual_arrivals

KIB = 1024
SIZE = 4 * KIB
"""Of the gradients of each of the units; those of `d` are twice as large."""


@pytest.fixture
def layout():
    sizes = {"a": 2048, "b": 2048, "c": 2048, "d": 4096}
    units = [
        UnitFacts(
            name=name,
            parameters=tuple(
                ParameterFacts(name=f"{name}{part}", shape=(elements // 2,), dtype="bfloat16")
                for part in (1, 2)
            ),
        )
        for name, elements in sizes.items()
    ]
    return build_layout(units, codec="split", record_elements=8192)


def moved(layout, arrivals, micro_steps=1, *, room_bytes=0):
    plan = spill_gradients(layout, "parameter", room_bytes=room_bytes)
    return spilled_traffic(layout, plan, arrivals=arrivals.split(), micro_steps=micro_steps)


def test_units_one_after_the_other_are_written_once_and_read_by_what_comes_next(layout):
    usual = usual_arrivals(layout, ())

    found = moved(layout, " ".join(usual), 3)

    assert usual == ["d2", "d1", "c2", "c1", "b2", "b1", "a2", "a1"]
    # What a micro-step ends with is written when the next one needs a slot, or by the step.
    assert found.write_bytes == (4 * SIZE, 5 * SIZE, 6 * SIZE)
    assert found.read_bytes == (0, 5 * SIZE, 5 * SIZE)
    assert found.update_bytes == 5 * SIZE


def test_a_unit_whose_gradients_come_at_two_moments_is_written_twice_and_read_between(layout):
    found = moved(layout, "d2 a2 c2 c1 b2 b1 a1")

    assert found.write_bytes == (2 * SIZE + 4 * SIZE,)  # `a` twice
    assert found.read_bytes == (SIZE,)
    assert found.update_bytes == 5 * SIZE


def test_one_that_is_still_in_a_slot_is_not_read(layout):
    found = moved(layout, "d2 c2 d1 c1 b1 a1")

    assert found.read_bytes == (0,)
    # `d` is written when `c` comes and again when `b` does; `c` has not been then.
    assert found.write_bytes == ((2 * 2 + 3) * SIZE,)


def test_two_units_stay_in_their_slots_from_one_micro_step_to_the_next(layout):
    found = moved(layout, "b1 a1", 2)

    assert found.read_bytes == (0, 0)
    assert found.update_bytes == 2 * SIZE


def test_what_stays_in_memory_and_what_gets_no_gradient_moves_nothing(layout):
    found = moved(layout, "d1 c1 a1", room_bytes=2 * SIZE)

    assert found == SpilledBytes(read_bytes=(0,), write_bytes=(3 * SIZE,), update_bytes=3 * SIZE)
    assert usual_arrivals(layout, {"a1", "c2"}) == ["d2", "d1", "c1", "b2", "b1", "a2"]
