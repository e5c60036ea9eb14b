import pytest

from offload.runs.intervals import Interval


def test_steps_are_counted_from_the_runs_first():
    interval = Interval(5)

    assert [step for step in range(1, 17) if interval.is_due(step)] == [5, 10, 15]


def test_zero_is_never():
    assert not any(Interval(0).is_due(step) for step in range(1, 100))


def test_time_counts_from_the_last_occurrence():
    now = [0.0]
    interval = Interval("10min", clock_s=lambda: now[0])
    due = []
    for step in range(1, 31):
        now[0] += 61
        if interval.is_due(step):
            due.append(step)
            interval.happened()

    assert due == [10, 20, 30]


@pytest.mark.parametrize("text", ["", "10", "10 minutes", "-5s", "0s", "1week"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="a time such as"):
        Interval(text)
