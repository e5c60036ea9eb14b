import pytest

from offload.plan.rhythm import Rhythm

MORE = {"step": 0, "commit": 6, "validation": 60}


@pytest.mark.parametrize(
    ("validation", "commits", "mean"),
    [
        (0, (), 0),
        (0, (0, 3), 2),
        (0, (2, 3), 4),  # after 2, 3, 4 and 6 of six
        (2, (3,), 31),  # after 2, 4, 6, and after 3
        (1, (1,), 60),
    ],
)
def test_the_mean_counts_each_step_by_what_comes_before_it(validation, commits, mean):
    rhythm = Rhythm(validation=validation, commits=commits, more_read_bytes=MORE)

    assert rhythm.mean_more_bytes() == mean


def test_of_steps_that_are_named_only_those_count():
    rhythm = Rhythm(validation=4, commits=(2,), more_read_bytes=MORE)

    assert [rhythm.before(step) for step in (2, 3, 4, 5)] == [
        "step",
        "commit",
        "step",
        "validation",
    ]
    assert rhythm.mean_more_bytes([2, 3]) == 3
    assert rhythm.mean_more_bytes([]) == 0
    assert not rhythm.is_even


def test_steps_that_all_come_after_the_same_are_even():
    assert Rhythm(validation=0, commits=(0,), more_read_bytes=MORE).is_even
    assert Rhythm(validation=1, commits=(2,), more_read_bytes=MORE).is_even
    assert Rhythm(validation=3, commits=(), more_read_bytes={}).is_even
