import pytest

from offload.plan.bound import Bound
from offload.plan.exposed import MeasuredPass, exposed_phases

BOUND = Bound(step_s=9.0, update_s=2.0, passes=((1.0, 2.0), (1.5, 2.5)))
FORWARD = [MeasuredPass(duration_s=1.2, update_wait_s=1.8), MeasuredPass(duration_s=1.7)]
BACKWARD = [
    MeasuredPass(duration_s=2.4, update_wait_s=0.1),
    MeasuredPass(duration_s=3.5, update_wait_s=0.25),
]


def phases(overlap, **options):
    found = exposed_phases(
        BOUND, overlap=overlap, forward=FORWARD, backward=BACKWARD, update_s=0.5, **options
    )
    return found.forward_s, found.backward_s, found.update_s


def test_under_the_forward_its_excess_is_exposed_and_elsewhere_the_waits():
    # The first forward took 3.0 s, 2.0 s longer than without an update; backward waited 0.35 s.
    assert phases("forward") == pytest.approx((1.0 + 1.7, 2.4 + 3.5, 0.5 + 2.0 + 0.35))


def test_a_backward_that_reads_records_ahead_carries_the_update_too():
    # The first backward took 2.5 s, 0.5 s longer than without an update.
    assert phases("forward", reads_ahead=True) == pytest.approx((2.7, 2.0 + 3.5, 0.5 + 2.75))


def test_under_backward_and_both_the_last_backward_carries():
    # The last backward took 3.75 s, 1.25 s longer than without an update.
    assert phases("backward") == pytest.approx((2.9, 2.4 + 2.5, 0.5 + 1.8 + 0.1 + 1.25))
    assert phases("both") == pytest.approx((2.7, 2.4 + 2.5, 0.5 + 2.0 + 0.1 + 1.25))


def test_a_wait_in_which_the_pass_would_have_read_anyway_is_not_exposed():
    found = exposed_phases(
        Bound(step_s=5.0, update_s=0.0, passes=((2.0, 1.0),)),
        overlap="forward",
        forward=[MeasuredPass(duration_s=0.5, update_wait_s=1.0)],
        backward=[MeasuredPass(duration_s=1.0)],
        update_s=0.0,
    )

    assert (found.forward_s, found.update_s) == (1.5, 0.0)
