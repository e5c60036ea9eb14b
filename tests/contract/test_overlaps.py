"""What every overlap promises, whichever it is."""

import pytest

from offload.errors import ConfigError
from offload.policy import Overlap, resolve_overlap

UNITS = [(0,), (0, 1), (2,), (3,), ()]


class OverlapConformance:
    """Each subclass names one overlap."""

    name: str

    @pytest.fixture
    def overlap(self) -> Overlap:
        return resolve_overlap(self.name)

    def test_it_is_found_by_its_name(self, overlap):
        assert isinstance(overlap, Overlap)
        assert overlap.name == self.name

    @pytest.mark.parametrize("upcoming", [(), (0, 1, 2, 3), (3, 1), (2, 2, 9)])
    def test_each_record_is_taken_once_whatever_the_pass(self, overlap, upcoming):
        assert sorted(overlap.sequence(UNITS, upcoming)) == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("needed", [set(), {3}, {9}])
    def test_what_comes_next_is_one_that_waits(self, overlap, needed):
        assert overlap.choose([4, 3, 0], needed) in (4, 3, 0)

    @pytest.mark.parametrize("capacity", [0, 1, 9])
    def test_what_is_read_ahead_fits_and_is_not_in_memory(self, overlap, capacity):
        ahead = overlap.prefetched([4, 3, 0, 1], cached={3, 0}, capacity=capacity, num_places=9)

        assert len(ahead) <= capacity
        assert set(ahead) <= {4, 1}

    @pytest.mark.parametrize(
        ("sequence", "num_places", "most"),
        [([4, 1, 3, 0], 2, 2), ([4, 3, 1, 0], 2, 1), ([3, 4, 1, 0], 1, 0), ([3, 4, 1, 0], 9, 2)],
    )
    def test_what_is_read_ahead_leaves_a_place_for_what_comes_before_it(
        self, overlap, sequence, num_places, most
    ):
        ahead = overlap.prefetched(sequence, cached={3, 0}, capacity=2, num_places=num_places)

        assert len(ahead) <= most


class TestForward(OverlapConformance):
    name = "forward"


class TestBoth(OverlapConformance):
    name = "both"


def test_without_updates_under_a_forward_there_is_no_policy():
    assert resolve_overlap("none") is None
    assert resolve_overlap("backward") is None


def test_an_unknown_overlap_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"expected `none` .*`forward`.*, found `sideways`"):
        resolve_overlap("sideways")
