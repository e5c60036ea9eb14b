"""A simulated step moves the bytes of the formula and takes at least the bound."""

from dataclasses import replace

import pytest

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.bound import ComputeTimes, step_bound
from offload.plan.link import link_traffic
from offload.plan.machine import LinkRates, Machine, PathRates
from offload.plan.simulated_update import WindowSize
from offload.plan.simulation import SimulatedMachine, SimulatedPolicy, simulate
from offload.plan.traffic import ModelBytes, step_traffic
from offload.plan.work import PassTimes, work_of
from offload.policy import resolve_order, resolve_overlap, resolve_striping
from offload.sizes import MIB

NUM_UNITS = 8
LAYOUT = build_layout(
    [
        UnitFacts(
            name=f"u{index}",
            parameters=(ParameterFacts(name=f"p{index}", shape=(4 << 20,), dtype="bfloat16"),),
        )
        for index in range(NUM_UNITS)
    ],
    codec="split",
)
HALF = (1e9, 1e9, 5e8)
FULL = (4e8, 3e8, 3e8)
SLOW = (2e8, 2e8, 1e8)


def machine(*paths, update=1e9):
    return Machine(
        paths=tuple(
            PathRates(path=str(i), read_bytes_per_s=r, write_bytes_per_s=w, mixed_bytes_per_s=b)
            for i, (r, w, b) in enumerate(paths)
        ),
        copy_bytes_per_s=4e10,
        update_parameters_per_s=update,
    )


def policy(order="sequential", *, cached=0, striping="adaptive", **options):
    return SimulatedPolicy(
        order=resolve_order(order),
        striping=resolve_striping(striping),
        window=WindowSize(num_buffers=8, num_cached=cached),
        num_slots=4,
        prefetch_distance=2,
        **options,
    )


def work(parameters="storage", *, forward_s=0.01, micro_steps=1, **options):
    return work_of(
        LAYOUT,
        parameters=parameters,
        optimizer="storage",
        passes=[PassTimes(forward_s=forward_s, backward_s=2 * forward_s)] * NUM_UNITS,
        micro_steps=micro_steps,
        **options,
    )


@pytest.mark.parametrize("paths", [(HALF,), (FULL, SLOW)], ids=["one", "two"])
@pytest.mark.parametrize(
    ("order", "cached"), [("sequential", 0), ("alternating", 8), ("resident", 8)]
)
@pytest.mark.parametrize(("parameters", "micro_steps"), [("host", 1), ("storage", 2)])
def test_bytes_are_the_formula_and_time_is_little_more_than_the_bound(
    paths, order, cached, parameters, micro_steps
):
    rates = machine(*paths)
    traffic = step_traffic(
        ModelBytes.of(LAYOUT),
        parameters=parameters,
        optimizer="storage",
        micro_steps=micro_steps,
        cached_state_bytes=cached * LAYOUT.records[0].num_bytes,
    )

    step = simulate(
        work(parameters, micro_steps=micro_steps),
        SimulatedMachine(rates=rates),
        policy(order, cached=cached),
    )

    passes = ComputeTimes(forward_s=0.08, backward_s=0.16)
    bound = step_bound(
        rates,
        traffic,
        num_parameters=LAYOUT.trainable_elements,
        compute=[passes] * micro_steps,
    )
    assert (step.read_bytes, step.write_bytes) == (traffic.read_bytes, traffic.write_bytes)
    assert sum(step.path_bytes) == traffic.read_bytes + traffic.write_bytes
    assert bound.step_s <= step.step_s * (1 + 1e-9)
    assert bound.step_s >= 0.85 * step.step_s


def test_a_unit_in_use_as_backward_ends_and_the_next_forward_begins_is_not_read_between():
    plain, carried = (
        simulate(work(micro_steps=3, carried=name), SimulatedMachine(rates=machine(HALF)), policy())
        for name in (None, "u0")
    )

    assert plain.read_bytes - carried.read_bytes == 2 * LAYOUT.units[0].num_bytes


def test_a_split_that_fits_the_paths_is_faster_than_one_that_does_not():
    rates = SimulatedMachine(rates=machine(HALF, SLOW))

    steps = {
        striping: simulate(work("host"), rates, policy(striping=striping)).update_s
        for striping in ("adaptive", "modulo", "single")
    }

    assert steps["adaptive"] < steps["single"] < steps["modulo"]


def test_an_update_under_the_next_forward_is_hidden_by_compute_elsewhere_and_not_on_its_cores():
    rates = machine((4e9, 4e9, 2e9), update=2e8)
    plain, hidden = policy("resident"), policy("resident", overlap=resolve_overlap("forward"))

    def step_s(choice, *, shares_cores):
        simulated = SimulatedMachine(rates=rates, shares_cores=shares_cores)
        return simulate(work("host", forward_s=0.05), simulated, choice).step_s

    # Kernels alone take 33.5 M / 200 M/s = 0.168 s, a forward 0.4 s.
    assert step_s(hidden, shares_cores=False) < step_s(plain, shares_cores=False) - 0.14
    assert step_s(hidden, shares_cores=True) == pytest.approx(
        step_s(plain, shares_cores=True), rel=0.02
    )


def test_an_update_under_backward_ends_sooner_than_one_after_it():
    simulated = SimulatedMachine(rates=machine(HALF), shares_cores=False)

    after = simulate(work("host", forward_s=0.03), simulated, policy("resident"))
    under = simulate(
        work("host", forward_s=0.03), simulated, policy("resident", updates_in_backward=True)
    )

    assert under.update_s < 0.6 * after.update_s
    assert under.step_s < after.step_s
    assert under.write_bytes == after.write_bytes


def test_what_memory_keeps_is_updated_at_the_step_and_not_under_backward():
    simulated = SimulatedMachine(rates=machine(FULL, update=1e8), shares_cores=False)

    streamed, half, kept = (
        simulate(
            work("host", forward_s=0.5),
            simulated,
            policy("resident", cached=cached, updates_in_backward=True),
        )
        for cached in (0, len(LAYOUT.records) // 2, len(LAYOUT.records))
    )

    kernel_s = LAYOUT.num_parameters / 1e8
    assert streamed.update_s < half.update_s < kept.update_s
    assert kept.update_s == pytest.approx(kernel_s, rel=0.01)


def test_with_both_what_memory_keeps_is_updated_under_the_next_forward_in_its_order():
    simulated = SimulatedMachine(rates=machine(FULL, update=1e8), shares_cores=False)

    def step_s(overlap, **options):
        chosen = policy(
            "resident", cached=len(LAYOUT.records), overlap=resolve_overlap(overlap), **options
        )
        return simulate(work(forward_s=0.2), simulated, chosen).step_s

    assert step_s("both", updates_in_backward=True) == pytest.approx(step_s("forward"), rel=0.02)


class LastFirst:
    """Reads in the order of `forward`, and then takes of what waits the last."""

    def __init__(self):
        self._forward = resolve_overlap("forward")
        self.needed = set()
        self.sequence, self.prefetched = self._forward.sequence, lambda *_, **__: []
        self.name = "last-first"

    def choose(self, waiting, needed):
        self.needed |= set(needed)
        return waiting[-1]


def test_the_overlap_chooses_which_record_is_next():
    backwards = LastFirst()
    step_s = [
        simulate(
            work(forward_s=0.05),
            SimulatedMachine(rates=machine(FULL)),
            policy("resident", overlap=overlap),
        ).step_s
        for overlap in (resolve_overlap("forward"), backwards)
    ]

    assert backwards.needed >= {0}  # the pass begins with it
    # The forward waits for what is updated last before it computes at all.
    assert step_s[1] > step_s[0] + 4 * 0.05


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_gradients_that_leave_memory_are_written_in_each_backward_and_read_back(overlap):
    spilled = work("host", micro_steps=2)
    spilled = replace(
        spilled,
        records=tuple(replace(record, spilled_bytes=1 << 20) for record in spilled.records),
    )
    simulated = SimulatedMachine(rates=machine(HALF))

    chosen = policy(overlap=resolve_overlap(overlap))
    step = simulate(spilled, simulated, chosen)
    plain = simulate(work("host", micro_steps=2), simulated, chosen)

    extra = len(spilled.records) << 20
    assert step.write_bytes - plain.write_bytes == 2 * extra
    assert step.read_bytes - plain.read_bytes == 2 * extra  # once to add to, once to update


def linked(parameters, *, latency_s=0.0, **options):
    """A step on a device behind a link of 100 MB/s each way."""
    rates = replace(
        machine(HALF),
        link=LinkRates(in_bytes_per_s=1e8, out_bytes_per_s=1e8, latency_s=latency_s),
    )
    traffic = link_traffic(LAYOUT, parameters=parameters, gradient_dtype="parameter", micro_steps=1)
    step = work(parameters, link=traffic, **options)
    return simulate(step, SimulatedMachine(rates=rates, shares_cores=False), policy())


def test_parameters_cross_the_link_before_each_use():
    step = linked("host")

    # 67 MB up in forward and in backward at 100 MB/s; the last gradients of 8.4 MB come down after.
    assert step.forward_s == pytest.approx(0.67, rel=0.05)
    assert step.backward_s == pytest.approx(0.67, rel=0.05)
    assert step.other_s == pytest.approx(0.084, rel=0.05)


def test_what_lives_on_the_device_crosses_the_link_after_its_update():
    step = linked("device")

    assert step.forward_s == pytest.approx(0.08)
    # Gradients of seven units have left by the end of backward, one after the other.
    assert step.backward_s == pytest.approx(0.02 + 7 * 0.084, rel=0.05)
    assert step.update_s > 0.67


def test_a_link_s_latency_is_waited_for_where_copies_do_not_follow_each_other():
    plain, late = linked("host"), linked("host", latency_s=0.01)

    # Units are fetched ahead; of gradients there is one unit's on its way at a time.
    assert late.forward_s - plain.forward_s == pytest.approx(0.01)
    assert late.backward_s - plain.backward_s == pytest.approx(0.07)
    assert late.other_s - plain.other_s == pytest.approx(0.01)


def test_the_first_gradient_waits_until_the_update_before_is_written():
    writes = machine((1e9, 1e8, 1e8), update=1e12)
    hidden = policy("resident", overlap=resolve_overlap("forward"))

    step = simulate(work("host", forward_s=0.02), SimulatedMachine(rates=writes), hidden)

    # 335.5 MB at 100 MB/s under a forward of 0.16 s; backward takes 0.32 s and none of it.
    assert step.step_s > 3.355 + 0.32


def test_what_backward_finds_in_its_slots_is_not_read_again():
    simulated = SimulatedMachine(rates=machine(HALF))

    again = simulate(work(), simulated, policy())
    kept = simulate(work(kept={"u6", "u7"}), simulated, policy())

    assert again.read_bytes - kept.read_bytes == 2 * LAYOUT.units[0].num_bytes


def test_a_window_without_a_buffer_is_refused():
    choice = replace(policy(), window=WindowSize(num_buffers=0))

    with pytest.raises(ValueError, match="at least one buffer"):
        simulate(work(), SimulatedMachine(rates=machine(HALF)), choice)


def test_what_a_pass_waits_for_updates_is_the_updates_and_not_the_pass_s():
    slow, hidden = machine(SLOW), policy("resident", overlap=resolve_overlap("forward"))

    step = simulate(work(), SimulatedMachine(rates=slow), hidden)

    # Nearly all of 0.94 GB at 200 MB/s is the update's, and all of that is under the forward.
    assert step.update_s > 0.25 * step.step_s
    total_s = step.forward_s + step.backward_s + step.update_s + step.other_s
    assert step.step_s == pytest.approx(total_s)


class StateApart:
    """State to the first path, which is as fast both ways at once, all else to the second."""

    name = "state-apart"

    def split(self, num_blocks, paths):
        is_state = num_blocks == LAYOUT.records[0].padded_bytes // MIB
        return [num_blocks, 0] if is_state else [0, num_blocks]


def test_a_placement_that_suits_unlike_paths_does_not_beat_the_bound():
    frozen_bytes = 30 * MIB
    rates = machine((2e8, 2e8, 2e8), (1e9, 1e8, 1 / (1 / 1e9 + 1 / 1e8)))
    plain, apart = work(), replace(policy(), striping=StateApart())
    units = tuple(replace(unit, frozen_bytes=frozen_bytes) for unit in plain.units)
    model = replace(
        ModelBytes.of(LAYOUT),
        parameter_bytes=LAYOUT.parameter_bytes + NUM_UNITS * frozen_bytes,
    )

    step = simulate(
        replace(plain, units=units),
        SimulatedMachine(rates=rates),
        replace(apart, overlap=resolve_overlap("forward")),
    )

    bound_s = step_bound(
        rates,
        step_traffic(model, parameters="storage", optimizer="storage", micro_steps=1),
        num_parameters=LAYOUT.trainable_elements,
        compute=[ComputeTimes(forward_s=0.08, backward_s=0.16)],
        overlap="forward",
        prefetched_bytes=8 * LAYOUT.records[0].padded_bytes,
    ).step_s
    assert 0.8 * step.step_s < bound_s <= step.step_s


@pytest.mark.parametrize("parameters", ["host", "storage"])
@pytest.mark.parametrize("paths", [(HALF,), (FULL,), (HALF, SLOW), (FULL, SLOW), (FULL, HALF)])
def test_the_bound_is_near_the_best_of_what_policies_reach(paths, parameters):
    rates = machine(*paths)
    traffic = step_traffic(
        ModelBytes.of(LAYOUT), parameters=parameters, optimizer="storage", micro_steps=1
    )

    best_s = min(
        simulate(work(parameters), SimulatedMachine(rates=rates), policy(striping=name)).step_s
        for name in ("adaptive", "modulo", "modulo:2:1", "single")
    )

    bound = step_bound(
        rates,
        traffic,
        num_parameters=LAYOUT.trainable_elements,
        compute=[ComputeTimes(forward_s=0.08, backward_s=0.16)],
    )
    assert 0.95 * best_s < bound.step_s <= best_s * (1 + 1e-9)
