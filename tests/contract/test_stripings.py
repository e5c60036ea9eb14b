"""The laws of a striping policy, for each that ships."""

import random

import pytest

from offload.errors import ConfigError
from offload.policy import PathState, Striping, resolve_striping

MIB = 1 << 20


def path(rate=None, *, nominal=None, queued=0, writes=0, available=10_000):
    return PathState(
        available_blocks=available,
        block_bytes=MIB,
        queued_bytes=queued + writes,
        queued_write_bytes=writes,
        round_trip_bytes_per_s=rate,
        nominal_bytes_per_s=nominal,
    )


def shares(striping, paths, *, sizes=(10, 2), records=300):
    """Returns the part of all blocks that each path was given."""
    totals = [0] * len(paths)
    for index in range(records):
        for at, count in enumerate(striping.split(sizes[index % len(sizes)], paths)):
            totals[at] += count
    return [total / sum(totals) for total in totals]


class StripingLaws:
    name: str

    @pytest.fixture
    def striping(self):
        return resolve_striping(self.name)

    def test_it_is_found_by_its_name(self, striping):
        assert isinstance(striping, Striping)
        assert striping.name == self.name.partition(":")[0]

    def test_counts_add_up_and_none_is_negative(self, striping):
        draw = random.Random(0)
        for _ in range(300):
            paths = [
                path(
                    draw.choice((None, 0.0, 1e6, 3.7e8)),
                    nominal=draw.choice((None, 2e8)),
                    queued=draw.choice((0, 1 << 20, 1 << 30)),
                    available=draw.choice((0, 1, 5, 10_000)),
                )
                for _ in range(3)
            ]
            num_blocks = draw.choice((0, 1, 2, 10, 1000))

            counts = striping.split(num_blocks, paths)

            assert len(counts) == 3
            assert min(counts) >= 0
            # `single` leaves to the mechanism what no path has room for.
            enough = sum(p.available_blocks for p in paths) >= num_blocks
            assert sum(counts) == num_blocks or (self.name == "single" and not enough)

    def test_a_path_without_room_is_given_nothing(self, striping):
        counts = striping.split(10, [path(1e8), path(1e9, nominal=1e9, available=0), path(1e8)])

        assert counts[1] == 0

    def test_one_path_is_given_everything(self):
        striping = resolve_striping(self.name.partition(":")[0])

        assert list(striping.split(7, [path(1e8)])) == [7]


class TestAdaptive(StripingLaws):
    name = "adaptive"

    @pytest.mark.parametrize("rates", [(4e8, 2e8), (4e8, 3e8, 1e8), (1e9, 7e6)])
    def test_shares_follow_the_recent_rates(self, striping, rates):
        found = shares(striping, [path(rate) for rate in rates])

        for share, rate in zip(found, rates, strict=True):
            assert share == pytest.approx(max(rate, max(rates) / 64) / sum(rates), rel=0.02)

    def test_small_records_follow_the_rates_too(self, striping):
        assert shares(striping, [path(4e8), path(2e8)], sizes=(1,)) == pytest.approx(
            [2 / 3, 1 / 3], abs=0.01
        )

    def test_the_next_record_follows_a_new_rate(self, striping):
        shares(striping, [path(4e8), path(2e8)])

        found = shares(striping, [path(4e8), path(1e8)], records=30)

        assert found == pytest.approx([0.8, 0.2], abs=0.02)

    def test_an_unknown_path_counts_as_the_mean_and_a_profile_stands_in(self, striping):
        assert shares(striping, [path(None), path(2e8)]) == pytest.approx([0.5, 0.5], abs=0.01)
        assert shares(striping, [path(None, nominal=6e8), path(2e8)]) == pytest.approx(
            [0.75, 0.25], abs=0.02
        )

    def test_a_path_whose_queue_does_not_drain_is_given_half_at_most(self, striping):
        found = shares(striping, [path(2e8), path(2e8, queued=400 << 20)])

        assert 0.29 < found[1] < 0.34

    def test_a_longer_queue_of_writes_corrects_the_share_a_little(self, striping):
        found = shares(striping, [path(2e8, writes=20 << 20), path(2e8, writes=30 << 20)])

        assert 0.46 < found[1] < 0.49

    def test_queued_reads_correct_nothing(self, striping):
        found = shares(striping, [path(2e8, queued=20 << 20), path(2e8, queued=90 << 20)])

        assert found == pytest.approx([0.5, 0.5], abs=0.01)

    def test_a_path_that_stands_still_is_tried_again_now_and_then(self, striping):
        found = shares(striping, [path(2e8), path(0.0)])

        assert 0 < found[1] < 0.02


class TestProportional(StripingLaws):
    name = "proportional"

    def test_shares_follow_the_profile_and_not_what_is_measured(self, striping):
        paths = [path(1e6, nominal=4e8), path(1e9, nominal=2e8)]

        assert shares(striping, paths) == pytest.approx([2 / 3, 1 / 3], abs=0.01)

    def test_without_a_profile_shares_are_equal(self, striping):
        assert shares(striping, [path(1e6), path(1e9)]) == pytest.approx([0.5, 0.5], abs=0.01)


class TestModulo(StripingLaws):
    name = "modulo"

    def test_records_are_whole_and_take_turns(self, striping):
        given = [tuple(striping.split(10, [path(), path()])) for _ in range(4)]

        assert given == [(10, 0), (0, 10), (10, 0), (0, 10)]

    def test_two_sizes_in_alternation_do_not_meet_the_same_path(self, striping):
        assert shares(striping, [path(), path()]) == pytest.approx([0.5, 0.5], abs=0.01)

    def test_a_ratio_is_kept(self):
        found = shares(resolve_striping("modulo:2:1"), [path(1e6), path(1e9)])

        assert found == pytest.approx([2 / 3, 1 / 3], abs=0.01)

    def test_a_ratio_for_another_number_of_paths_is_refused(self):
        with pytest.raises(ConfigError, match="one number for each of 2 paths"):
            resolve_striping("modulo:2:1:1").split(3, [path(), path()])


class TestSingle(StripingLaws):
    name = "single"

    def test_the_first_path_with_room_takes_all(self, striping):
        assert list(striping.split(10, [path(available=4), path(), path()])) == [4, 6, 0]


@pytest.mark.parametrize("name", ["", "fastest", "modulo:", "modulo:0:1", "modulo:a", "single:1"])
def test_an_unknown_striping_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match="`adaptive` or `proportional` or `modulo` or `single`"):
        resolve_striping(name)
