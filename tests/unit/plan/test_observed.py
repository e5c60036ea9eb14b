import pytest

from offload.plan.machine import Machine, PathRates
from offload.plan.observed import raised_to_steps


def machine(rate=1e9):
    return Machine(
        paths=(
            PathRates(
                path="a", read_bytes_per_s=rate, write_bytes_per_s=rate, mixed_bytes_per_s=rate / 2
            ),
        ),
        copy_bytes_per_s=1e10,
        update_parameters_per_s=1e9,
    )


def bounds_of(times):
    """Each step moves 1 GB both ways, and computes for 0.5 s besides."""

    def bounds_s(rates):
        moving_s = rates.transfer_s(read_bytes=10**9, write_bytes=10**9)
        return [0.5 + moving_s for _ in times]

    return bounds_s


def test_rates_that_no_step_beats_stay():
    times = [2.5, 2.6, 3.0, 9.0]

    same, factor = raised_to_steps(machine(), times, bounds_of(times))

    assert (same, factor) == (machine(), 1.0)


def test_rates_are_raised_until_a_quarter_of_the_steps_at_most_beats_them():
    # The bound is 2.5 s; one step of four may be faster than it in the end.
    times = [1.4, 1.5, 1.6, 1.7]

    raised, factor = raised_to_steps(machine(), times, bounds_of(times))

    assert factor == pytest.approx(2.0)  # 0.5 s + 2 s / 2 = 1.5 s
    assert raised.paths[0].mixed_bytes_per_s == pytest.approx(1e9)
    assert raised.paths[0].read_bytes_per_s == pytest.approx(2e9)
    assert raised.copy_bytes_per_s == machine().copy_bytes_per_s


def test_what_is_not_the_paths_fault_is_not_blamed_on_them_beyond_all_measure():
    times = [0.1] * 4  # less than they compute

    _, factor = raised_to_steps(machine(), times, bounds_of(times))

    assert factor == 64.0


@pytest.mark.parametrize("times", [[], [1.0]])
def test_without_steps_or_paths_nothing_is_raised(times):
    rates = (
        machine()
        if not times
        else Machine(paths=(), copy_bytes_per_s=1e10, update_parameters_per_s=1e9)
    )

    assert raised_to_steps(rates, times, lambda _: [2.0] * len(times)) == (rates, 1.0)
