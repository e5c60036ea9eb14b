from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.plan.bound import ComputeTimes, step_bound
from offload.plan.machine import LinkRates, Machine, PathRates
from offload.plan.traffic import ModelBytes, step_traffic

GB = 10**9


def path(read, write, mixed):
    return PathRates(
        path="/a",
        read_bytes_per_s=read * GB,
        write_bytes_per_s=write * GB,
        mixed_bytes_per_s=mixed * GB,
    )


def machine(*paths):
    return Machine(paths=paths, copy_bytes_per_s=40 * GB, update_parameters_per_s=2 * GB)


def test_one_path_moves_both_ways_first_and_the_rest_alone():
    one = machine(path(2, 1, 0.5))

    assert one.transfer_s(read_bytes=3 * GB, write_bytes=1 * GB) == pytest.approx(1 / 0.5 + 2 / 2)
    assert one.transfer_s(read_bytes=1 * GB, write_bytes=3 * GB) == pytest.approx(1 / 0.5 + 2 / 1)
    assert one.transfer_s(read_bytes=0, write_bytes=0) == 0


def test_two_paths_share_the_bytes_by_their_speed():
    both = machine(path(2, 1, 0.8), path(4, 2, 1.6))

    # 2.25 s and 1.125 s alone: together 1 / (1/2.25 + 1/1.125).
    assert both.transfer_s(read_bytes=3 * GB, write_bytes=1 * GB) == pytest.approx(0.75)
    assert both.transfer_s(read_bytes=0, write_bytes=0) == 0


def test_each_direction_goes_where_it_is_fast():
    unlike = machine(path(4, 1, 1), path(1, 4, 1))

    # 4 GB/s of reads and 4 of writes; with more of the one the other's path helps.
    assert unlike.transfer_s(read_bytes=4 * GB, write_bytes=4 * GB) == pytest.approx(1.0)
    assert unlike.transfer_s(read_bytes=5 * GB, write_bytes=1 * GB) == pytest.approx(1.0)
    assert unlike.transfer_s(read_bytes=0, write_bytes=5 * GB) == pytest.approx(1.0)


def test_of_several_paths_those_that_are_slow_both_ways_at_once_take_turns():
    both = machine(path(2, 1, 0.5), path(4, 2, 1.0))

    assert both.transfer_s(read_bytes=3 * GB, write_bytes=1 * GB) == pytest.approx(3 / 6 + 1 / 3)


RATES = st.floats(0.1, 10)
SHARES = [share / 40 for share in range(41)]


@st.composite
def two_paths(draw):
    found = []
    for _ in range(2):
        read, write, duplex = draw(RATES), draw(RATES), draw(st.sampled_from([0.0, 0.4, 1.0]))
        half = 1 / (1 / read + 1 / write)
        found.append(path(read, write, half + duplex * (min(read, write) - half)))
    return machine(*found)


@settings(max_examples=25, deadline=None)
@given(two_paths(), st.integers(0, 20), st.integers(0, 20))
def test_no_split_of_the_bytes_takes_less_and_the_best_takes_as_much(both, read, write):
    first, second = both.paths

    least_s = both.transfer_s(read_bytes=read * GB, write_bytes=write * GB)

    # Every split in fortieths of each direction, by the rates of one path alone.
    tried_s = min(
        max(
            first.transfer_s(read_bytes=r * read * GB, write_bytes=w * write * GB),
            second.transfer_s(read_bytes=(1 - r) * read * GB, write_bytes=(1 - w) * write * GB),
        )
        for r in SHARES
        for w in SHARES
    )
    assert least_s <= tried_s * (1 + 1e-9)
    # No path takes longer for a fortieth more of either.
    step_s = max(each.transfer_s(read_bytes=read * GB, write_bytes=write * GB) / 40
                 for each in both.paths)  # fmt: skip
    assert tried_s <= least_s + step_s


def test_passes_take_the_longer_of_compute_and_reads_and_the_update_comes_after():
    model = ModelBytes(
        parameter_bytes=GB,
        trainable_parameter_bytes=GB,
        update_parameter_bytes=GB,
        state_bytes=5 * GB,
    )
    traffic = step_traffic(model, parameters="storage", optimizer="storage", micro_steps=1)

    bound = step_bound(
        machine(path(2, 2, 1)),
        traffic,
        num_parameters=GB // 2,
        compute=[ComputeTimes(forward_s=0.1, backward_s=0.9)],
    )

    # Reads of 1 GB take 0.5 s: longer than forward, shorter than backward. The update moves 6 GB
    # both ways at 1 GB/s; memory would take 0.25 s + 12/40 s.
    assert bound.update_s == pytest.approx(6.0)
    assert bound.step_s == pytest.approx(0.5 + 0.9 + 6.0)


def test_memory_bounds_an_update_that_storage_does_not():
    model = ModelBytes(
        parameter_bytes=0, trainable_parameter_bytes=0, update_parameter_bytes=0, state_bytes=0
    )
    traffic = step_traffic(model, parameters="host", optimizer="host", micro_steps=1)

    bound = step_bound(
        machine(path(2, 2, 1)),
        traffic,
        num_parameters=GB,
        compute=[ComputeTimes(forward_s=0.1, backward_s=0.2)],
    )

    assert bound.update_s == pytest.approx(0.5)
    assert bound.step_s == pytest.approx(0.8)


MODEL = ModelBytes(
    parameter_bytes=GB,
    trainable_parameter_bytes=GB,
    update_parameter_bytes=GB,
    state_bytes=5 * GB,
)


def bound_under_forward(*, forward_s, backward_s=0.9, micro_steps=1, overlap="forward", **options):
    traffic = step_traffic(
        MODEL, parameters="storage", optimizer="storage", micro_steps=micro_steps
    )
    return step_bound(
        machine(path(2, 2, 1)),
        traffic,
        num_parameters=GB // 2,
        compute=[ComputeTimes(forward_s=forward_s, backward_s=backward_s)] * micro_steps,
        overlap=overlap,
        **options,
    )


def test_an_update_under_the_forward_shares_its_time():
    # 6 GB both ways and 1 GB of parameters in take 6.5 s; memory would take 0.55 s.
    hidden = bound_under_forward(forward_s=7.0, shares_cores=False)
    exposed = bound_under_forward(forward_s=2.0, shares_cores=False)

    assert hidden.step_s == pytest.approx(7.0 + 0.9)
    assert hidden.update_s == pytest.approx(0.0)
    assert exposed.step_s == pytest.approx(6.5 + 0.9)
    assert exposed.update_s == pytest.approx(4.5)


def test_on_shared_cores_the_passes_over_records_add_to_the_forward():
    bound = bound_under_forward(forward_s=7.0)

    assert bound.step_s == pytest.approx(7.0 + 0.25 + 12 / 40 + 0.9)
    assert bound.update_s == pytest.approx(0.25 + 12 / 40)


def test_records_that_are_read_in_backward_take_its_time_not_the_forward_s():
    bound = bound_under_forward(forward_s=2.0, backward_s=0.9, prefetched_bytes=2 * GB)

    # Forward: 5 GB in and 6 GB out; backward: 1 GB of parameters and 2 GB of records in.
    assert bound.step_s == pytest.approx(5.0 + 1 / 2 + 3 / 2)


def test_no_more_is_read_ahead_than_is_worth_it():
    traffic = step_traffic(MODEL, parameters="storage", optimizer="storage", micro_steps=1)
    full_duplex = machine(path(2, 2, 2))

    bounds = [
        step_bound(
            full_duplex,
            traffic,
            num_parameters=GB // 2,
            compute=[ComputeTimes(forward_s=0.1, backward_s=0.9)],
            overlap="forward",
            prefetched_bytes=num_bytes,
            shares_cores=False,
        ).step_s
        for num_bytes in (0, GB // 2, GB, 4 * GB)
    ]

    # Forward: 7 GB in beside 6 GB out; backward has 0.4 s for 0.8 GB more in, and no use for it
    # after 1 GB, as the writes take 3 s in any case.
    assert bounds == pytest.approx([3.5 + 0.9, 3.25 + 0.9, 3.1 + 0.9, 3.1 + 0.9])


def test_only_the_first_micro_step_carries_the_update():
    bound = bound_under_forward(forward_s=2.0, micro_steps=3)

    assert bound.step_s == pytest.approx(6.5 + 0.9 + 2 * (2.0 + 0.9))


def test_an_update_under_backward_or_both_shares_their_time():
    options = {"forward_s": 2.0, "backward_s": 4.0, "micro_steps": 2, "shares_cores": False}

    backward = bound_under_forward(overlap="backward", **options)
    both = bound_under_forward(overlap="both", **options)

    # 6 GB both ways and 1 GB of parameters in take 6.5 s; with both passes' parameters 7 s.
    assert backward.step_s == pytest.approx(2.0 + 4.0 + 2.0 + 6.5)
    assert both.step_s == pytest.approx(2.0 + 4.0 + 7.0)


def test_the_best_of_two_measurements_has_the_better_of_each_rate_that_of_the_link_too():
    link = LinkRates(in_bytes_per_s=20 * GB, out_bytes_per_s=10 * GB, latency_s=2e-5)
    other = LinkRates(in_bytes_per_s=15 * GB, out_bytes_per_s=12 * GB, latency_s=1e-5)
    first, second = (replace(machine(path(*rates)), link=each) for rates, each in (
        ((2, 1, 0.5), link), ((1, 2, 0.6), other)
    ))  # fmt: skip

    best = first.best_of(second)

    assert best.paths == (path(2, 2, 0.6),)
    assert best.link == LinkRates(in_bytes_per_s=20 * GB, out_bytes_per_s=12 * GB, latency_s=1e-5)
    assert machine().best_of(machine()).link is None
