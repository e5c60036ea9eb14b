"""A window of some bytes: how many records it holds, how large these are, and what is left."""

from dataclasses import replace

import pytest

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.gradients import spilled_sizes
from offload.plan.host_cut import plan_host
from offload.plan.machine import Machine, PathRates
from offload.plan.machine_profile import MachineProfile, PathProfile
from offload.plan.record_size import choose_records
from offload.plan.simulated_update import window_of
from offload.plan.simulation import SimulatedMachine, SimulatedPolicy, simulate
from offload.plan.traffic import cached_state_bytes, kept_for_backward
from offload.plan.update_time import PlannedLayout, fastest_plan, simulated_step_s
from offload.plan.window import (
    WINDOW_BYTES,
    cut_window,
    cut_window_beside_cache,
    is_left_for_reads,
    window_bytes_for,
)
from offload.plan.work import PassTimes, work_of
from offload.policy import resolve_order, resolve_striping
from offload.sizes import MIB

STATE, BESIDE = 10 * MIB, 2 * MIB
"""Of a record of 2^20 bf16 parameters under codec `split`."""


def layout_of(num_units, *, elements=1 << 20, record_elements=1 << 20, codec="split"):
    units = [
        UnitFacts(
            name=f"u{index}",
            parameters=(ParameterFacts(name=f"u{index}.p", shape=(elements,), dtype="bfloat16"),),
        )
        for index in range(num_units)
    ]
    return build_layout(units, codec=codec, record_elements=record_elements)


def plan(layout, budget_bytes, *, parameters="storage", **options):
    return plan_host(
        layout, budget_bytes=budget_bytes, parameters=parameters, optimizer="storage", **options
    )


@pytest.mark.parametrize(
    ("window_bytes", "count"),
    [(0, 1), (12 * MIB, 1), (24 * MIB - 1, 1), (24 * MIB, 2), (64 * MIB, 5), (1 << 40, 9)],
)
def test_a_window_holds_as_many_records_as_its_bytes_do(window_bytes, count):
    found = cut_window(window_bytes, state_bytes=STATE, beside_bytes=BESIDE, num_records=9)

    assert (found.num_buffers, found.num_places) == (count, count)
    assert found.num_bytes == count * (STATE + BESIDE)


def test_smaller_records_give_more_in_flight_in_the_same_bytes():
    few = cut_window(WINDOW_BYTES, state_bytes=STATE, beside_bytes=BESIDE, num_records=999)
    many = cut_window(
        WINDOW_BYTES, state_bytes=STATE // 4, beside_bytes=BESIDE // 4, num_records=999
    )

    assert many.num_places >= 4 * few.num_places
    assert max(few.num_bytes, many.num_bytes) <= WINDOW_BYTES


@pytest.mark.parametrize("free_mib", [12, 13, 48, 64, 100, 256, 1 << 20])
@pytest.mark.parametrize("beside", [0, BESIDE, STATE])
@pytest.mark.parametrize("num_records", [1, 5, 999])
def test_beside_a_cache_there_are_places_for_records_that_bring_their_state(
    free_mib, beside, num_records
):
    free = free_mib * MIB
    found = cut_window_beside_cache(
        WINDOW_BYTES,
        free_bytes=max(free, STATE + beside),
        state_bytes=STATE,
        beside_bytes=beside,
        num_records=num_records,
    )

    assert 1 <= found.num_buffers <= found.num_places <= num_records
    assert found.num_bytes <= max(min(WINDOW_BYTES, free), STATE + beside)
    if free_mib >= 256 and beside <= BESIDE:
        assert found.num_buffers >= min(4, num_records)
        assert found.num_places >= min(12, num_records)


def test_what_a_short_budget_has_goes_to_the_cache_before_a_longer_window():
    layout = layout_of(40)
    smallest = plan(layout, 0).smallest_bytes

    found = plan(layout, smallest + 160 * MIB, keeps_records=True, prefetch_distance=0)

    assert found.num_buffers == 3  # records that memory keeps come in between: four at one time
    assert found.num_cached >= 9
    assert found.planned_bytes <= smallest + 160 * MIB


@pytest.mark.parametrize("keeps_records", [False, True])
@pytest.mark.parametrize("parameters", ["host", "storage"])
@pytest.mark.parametrize("extra_mib", [0, 7, 24, 70, 300, 4000])
def test_no_plan_exceeds_its_budget_or_its_window(keeps_records, parameters, extra_mib):
    layout = layout_of(30)
    smallest = plan(layout, 0, parameters=parameters).smallest_bytes
    budget = smallest + extra_mib * MIB

    found = plan(
        layout, budget, parameters=parameters, keeps_records=keeps_records, window_bytes=40 * MIB
    )

    assert found.planned_bytes <= budget
    assert found.window_bytes <= 40 * MIB
    assert found.num_buffers >= 1


def test_a_third_of_the_places_is_left_for_records_that_must_be_read():
    free = (12, 5, 4, 0)
    assert [is_left_for_reads(each, 12, 4) for each in free] == [False, False, True, True]
    assert not is_left_for_reads(1, 1, 1)  # else one place would never be taken by what is cached


def test_no_more_places_are_left_for_reads_than_there_are_buffers_to_read_into():
    assert [is_left_for_reads(each, 12, 2) for each in (4, 3, 2, 0)] == [False, False, True, True]
    assert [is_left_for_reads(each, 12, 0) for each in (4, 1)] == [False, False]


def test_the_window_follows_the_measured_queues_unless_it_is_asked_for(tmp_path):
    deep = PathProfile(
        path=str(tmp_path),
        backend="io_uring",
        direct=True,
        block_bytes=MIB,
        queue_depth=64,
        read_bytes_per_s=1e9,
        write_bytes_per_s=1e9,
        mixed_bytes_per_s=5e8,
        measured_at="2026-11-30",
    )
    shallow = replace(deep, queue_depth=8)

    def found(asked, *profiles):
        return window_bytes_for(asked, [tmp_path / "store"], MachineProfile(paths=profiles))

    assert found(None) == found(None, shallow) == WINDOW_BYTES
    assert found(None, deep) == 128 * MIB
    assert found(16 * MIB, deep) == 16 * MIB


def chosen(budget_bytes, *, num_units=64, elements=1 << 20, codec="split", **options):
    def plan_with(record_elements):
        layout = layout_of(
            num_units, elements=elements, record_elements=record_elements, codec=codec
        )
        return layout, plan(layout, budget_bytes, **options)

    return choose_records(plan_with)


@pytest.mark.parametrize("codec", ["split", "fp32"])
@pytest.mark.parametrize("parameters", ["host", "storage"])
@pytest.mark.parametrize(("num_units", "elements"), [(5, 800_000), (12, 1 << 20)])
def test_more_memory_streams_no_more_than_a_record_or_a_slot(
    codec, parameters, num_units, elements
):
    options = {
        "num_units": num_units,
        "elements": elements,
        "codec": codec,
        "parameters": parameters,
        "keeps_records": True,
    }
    smallest = chosen(0, **options)[1].smallest_bytes
    least_streamed = float("inf")

    for step in range(0, 60, 5):
        layout, found = chosen(smallest + num_units * elements * step // 3, **options)
        state_bytes = sum(record.num_bytes for record in layout.records)
        streamed = state_bytes - cached_state_bytes(layout, "resident", found.num_cached)
        slack = 2 * found.state_buffer_bytes + 2 * found.slot_bytes
        # Larger records may stream what they save in their number.
        assert 2 * streamed <= least_streamed + slack + 2 * MIB * layout.trainable_elements / 2**19
        least_streamed = min(least_streamed, 2 * streamed)

    assert streamed == 0


@pytest.mark.parametrize("mixed", [2.5e8, 5e8])
@pytest.mark.parametrize(
    ("order", "parameters"), [("alternating", "storage"), ("resident", "host")]
)
def test_more_memory_makes_no_step_slower_by_more_than_a_few_per_cent(order, parameters, mixed):
    path = PathRates(path="p", read_bytes_per_s=5e8, write_bytes_per_s=5e8, mixed_bytes_per_s=mixed)
    machine = Machine(paths=(path,), copy_bytes_per_s=2e10, update_parameters_per_s=1e9)
    steps = []

    for budget_mib in range(36, 101, 8):
        layout, found = chosen(
            budget_mib * MIB,
            num_units=6,
            elements=800_000,
            parameters=parameters,
            keeps_records=True,
            spills_gradients=True,
        )
        kept = kept_for_backward(layout, found.num_slots)
        work = work_of(
            layout,
            parameters=parameters,
            optimizer="storage",
            passes=[PassTimes(forward_s=0.01, backward_s=0.02)] * 6,
            record_s=3e-4,
            spilled=spilled_sizes(layout, found.gradients),
            kept=kept,
        )
        policy = SimulatedPolicy(
            order=resolve_order(order),
            striping=resolve_striping("single"),
            window=window_of(found),
            num_slots=found.num_slots or 6,
            prefetch_distance=2,
        )
        steps.append(simulate(work, SimulatedMachine(rates=machine), policy).step_s)

    for more, step_s in enumerate(steps[1:], start=1):
        assert step_s <= min(steps[:more]) * 1.04


def test_of_plans_the_one_with_the_shortest_step_is_taken_and_of_equal_ones_the_first():
    layout = layout_of(12)
    plans = [
        PlannedLayout(layout=layout, host=plan(layout, budget * MIB, keeps_records=True))
        for budget in (40, 130, 40, 130)
    ]

    best = fastest_plan(plans)

    assert best is plans[1]
    assert simulated_step_s(best) == min(map(simulated_step_s, plans))


def test_records_that_leave_blocks_unused_are_taken_only_where_no_others_fit():
    found = [chosen(budget * MIB, num_units=64, keeps_records=True) for budget in range(131, 190)]
    wasteful = [is_wasteful(layout) for layout, host in found if host.fits]

    assert wasteful == sorted(wasteful, reverse=True)
    assert wasteful[0]
    assert not wasteful[-1]


def is_wasteful(layout):
    """Whether blocks of 1 MiB are used by less than two thirds."""
    sizes = [
        size
        for record in layout.records
        for size in (record.padded_bytes, *(s.padded_parameter_bytes for s in record.subgroups))
    ]
    return 3 * sum(sizes) <= 2 * sum(-(-size // MIB) * MIB for size in sizes)


def test_a_model_that_nearly_fits_is_kept_and_not_in_the_window_alone():
    options = {"parameters": "host", "keeps_records": True, "num_units": 4, "elements": 800_000}
    fixed = 2 * 4 * 2 * 800_000  # parameters and gradients

    layout, found = chosen((fixed + 46 * MIB) * 12 // 11, **options)

    # Four records of 7.6 MiB: a window of four of them would leave room for one.
    assert found.num_cached == len(layout.records) == 4


def test_records_are_the_largest_of_which_enough_are_in_the_window():
    assert chosen(1 << 40)[0].record_elements == 1 << 20
    assert chosen(1 << 40, window_bytes=30 * MIB)[0].record_elements == 1 << 19


def test_records_become_smaller_with_the_budget_as_far_as_they_pay():
    # 2^19 elements: 5 MiB of state and 1 MiB of parameters beside gradients and one slot.
    fixed = 64 * 2 * MIB + 2 * MIB
    sizes = [chosen(fixed + mib * MIB)[0].record_elements for mib in (64, 24, 6, 1)]

    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (1 << 20, 1 << 16)
    assert all(chosen(fixed + mib * MIB)[1].fits for mib in (64, 24, 6, 1))


def test_the_smallest_budget_is_that_of_the_smallest_records_and_it_fits():
    smallest = chosen(1 << 40)[1].smallest_bytes

    assert chosen(0)[1].smallest_bytes == smallest
    assert chosen(smallest)[1].fits
    assert not chosen(smallest - 1)[1].fits
