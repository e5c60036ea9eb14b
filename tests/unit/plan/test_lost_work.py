import math

import pytest

from offload.plan.lost_work import CommitForecast, LostWork, measured_on_all
from offload.plan.machine_profile import PathProfile
from offload.plan.wear import wear


def lost(commit_s, failures_s=86400.0):
    return LostWork(commit_s=commit_s, recovery_s=30.0, mean_time_between_failures_s=failures_s)


def test_the_best_interval_is_where_an_exact_model_has_its_least():
    """Daly's full expectation, searched by brute force."""
    commit_s, failures_s, restart_s = 20.0, 7200.0, 30.0

    def total(interval_s):
        return (
            failures_s
            * math.exp(restart_s / failures_s)
            * math.expm1((interval_s + commit_s) / failures_s)
            / interval_s
        )

    best_s = min(range(10, 3000), key=total)

    assert lost(commit_s, failures_s).best_interval_s == pytest.approx(best_s, rel=0.01)


def test_a_short_commit_gives_youngs_interval():
    assert lost(0.01).best_interval_s == pytest.approx(math.sqrt(2 * 0.01 * 86400), rel=0.01)


def test_a_commit_longer_than_machines_live_is_bounded():
    assert lost(1000.0, failures_s=100.0).best_interval_s == 100.0


def test_a_failure_costs_a_commit_half_an_interval_and_the_recovery():
    assert lost(10.0).expected_s(600.0) == 10.0 + 300.0 + 30.0


def test_wear_counts_days_of_the_drive_that_is_written_most():
    worn = wear(
        bytes_per_step=10**9, step_s=10.0, endurance_bytes=600 * 10**12, shares=(0.75, 0.25)
    )

    assert worn.bytes_per_day == 10**9 * 8640
    assert worn.drive_days == pytest.approx(600e12 / (0.75 * 8.64e12))


def test_what_is_not_known_is_none():
    assert wear(bytes_per_step=5, step_s=None, endurance_bytes=10**12).bytes_per_day is None
    assert wear(bytes_per_step=5, step_s=1.0, endurance_bytes=None).drive_days is None
    assert wear(bytes_per_step=0, step_s=1.0, endurance_bytes=10**12).drive_days is None


def path_profile(path):
    return PathProfile(
        path=path, backend="threads", block_bytes=1, queue_depth=1, direct=True,
        read_bytes_per_s=4e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1e9, measured_at="",
    )  # fmt: skip


def forecast(*, intervals, paths=("/a", "/b")):
    return CommitForecast(
        commit_bytes=10**10,
        resident_bytes=16 * 10**9,
        paths=tuple(map(path_profile, paths)),
        intervals=intervals,
        mean_time_between_failures_s=86400.0,
    )


def test_a_plan_says_what_commits_will_cost_by_the_rates_of_all_paths():
    found = forecast(intervals=(600.0,)).to_json(step_s=None)

    # 10 GB at 2 GB/s, 16 GB at 8 GB/s.
    assert (found["commit_s"], found["recovery_s"]) == (5.0, 2.0)
    assert found["expected_lost_work_s"] == 5.0 + 300.0 + 2.0
    assert found["best_commit_interval_s"] == lost(5.0).best_interval_s
    assert found["best_commit_every"] is None


def test_a_path_that_is_held_back_is_no_faster_in_a_forecast():
    held = path_profile("/a").held_to(10**9)

    assert (held.read_bytes_per_s, held.write_bytes_per_s) == (1e9, 1e9)
    assert held.mixed_bytes_per_s == 5e8
    assert path_profile("/a").held_to(None) == path_profile("/a")


def test_an_interval_in_steps_needs_the_time_of_a_step():
    assert forecast(intervals=(100,)).to_json(step_s=None)["expected_lost_work_s"] is None
    found = forecast(intervals=(100,)).to_json(step_s=4.0)
    assert found["expected_lost_work_s"] == 5.0 + 200.0 + 2.0
    assert found["best_commit_every"] == round(lost(5.0).best_interval_s / 4.0)


@pytest.mark.parametrize(
    ("intervals", "shortest_s"),
    [((100, 0), 400.0), ((100, 10), 40.0), ((0, 60.0), 60.0), ((10, 60.0), 40.0), ((0, 0), None)],
)
def test_a_checkpoint_is_a_commit_too(intervals, shortest_s):
    found = forecast(intervals=intervals).to_json(step_s=4.0)["expected_lost_work_s"]

    assert found == (None if shortest_s is None else 5.0 + shortest_s / 2 + 2.0)


def test_without_rates_of_every_path_only_bytes_are_known():
    assert measured_on_all([path_profile("/a"), None]) == ()
    found = forecast(intervals=(600.0,), paths=()).to_json(step_s=4.0)
    assert found["commit_bytes"] == 10**10
    assert all(value is None for key, value in found.items() if key != "commit_bytes")
