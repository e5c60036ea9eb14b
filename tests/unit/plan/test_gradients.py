from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.gradients import keep_gradients, spill_gradients, spilled_sizes
from offload.plan.host_cut import plan_host

KIB = 1024


def layout_of(*num_elements, record_elements=8192):
    units = [
        UnitFacts(
            name=f"unit{index}",
            parameters=(ParameterFacts(name=f"p{index}", shape=(n,), dtype="bfloat16"),),
        )
        for index, n in enumerate(num_elements)
    ]
    return build_layout(units, codec="split", record_elements=record_elements)


def test_room_keeps_the_first_units_and_the_rest_needs_two_slots():
    layout = layout_of(8192, 16384, 4096)

    none = spill_gradients(layout, "parameter")
    some = spill_gradients(layout, "parameter", room_bytes=16 * KIB)

    assert none.spilled == ("unit0", "unit1", "unit2")
    assert (none.resident_bytes, none.spilled_bytes) == (0, 56 * KIB)
    assert some.spilled == ("unit1", "unit2")
    assert (some.resident_bytes, some.spilled_bytes) == (16 * KIB, 40 * KIB)
    assert some.slot_bytes == 32 * KIB
    assert some.fixed_bytes == (16 + 2 * 32) * KIB
    assert (some.num_places, some.place_bytes) == (3, 16 * KIB)
    assert sum(spilled_sizes(layout, some).values()) == some.spilled_bytes


def test_fp32_gradients_take_twice_the_bytes():
    layout = layout_of(8192, 4096)

    assert keep_gradients(layout, "float32").resident_bytes == 48 * KIB
    assert spill_gradients(layout, "float32").spilled_bytes == 48 * KIB


def test_a_budget_that_holds_all_gradients_spills_none():
    layout = layout_of(*[8192] * 40)
    options = {"parameters": "storage", "optimizer": "storage"}
    kept = plan_host(layout, budget_bytes=1 << 30, **options)

    enough = plan_host(layout, budget_bytes=kept.smallest_bytes, spills_gradients=True, **options)
    less = plan_host(layout, budget_bytes=kept.smallest_bytes - 1, spills_gradients=True, **options)

    assert not enough.gradients.spilled
    assert enough.gradients == kept.gradients
    assert less.gradients.spilled
    assert less.fits
    assert less.planned_bytes <= less.budget_bytes
    assert less.smallest_bytes < kept.smallest_bytes
    assert plan_host(
        layout, budget_bytes=less.smallest_bytes, spills_gradients=True, **options
    ).fits
