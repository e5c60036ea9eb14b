import math
from dataclasses import dataclass, field

import pytest

from offload.storage.backend import BackendStats
from offload.storage.path_rates import PathRates


@dataclass
class Path:
    """A path whose counters the test moves: each direction at a rate while it has something."""

    waiting: list = field(default_factory=lambda: [0.0, 0.0])
    moved: list = field(default_factory=lambda: [0.0, 0.0])
    busy_s: list = field(default_factory=lambda: [0.0, 0.0])
    any_s: float = 0.0
    both_bytes: float = 0.0

    def move(self, seconds, rates):
        spans = [
            min(seconds, waiting / rate if rate else math.inf) if waiting else 0.0
            for waiting, rate in zip(self.waiting, rates, strict=True)
        ]
        for index, (span, rate) in enumerate(zip(spans, rates, strict=True)):
            self.busy_s[index] += span
            self.moved[index] += span * rate
            self.waiting[index] -= span * rate
            self.both_bytes += min(spans) * rate
        self.any_s += max(spans)

    def counters(self):
        return BackendStats(
            read_bytes=round(self.moved[0]),
            write_bytes=round(self.moved[1]),
            read_in_flight_s=self.busy_s[0],
            write_in_flight_s=self.busy_s[1],
            in_flight_s=self.any_s,
            both_bytes=round(self.both_bytes),
        )


class Paths:
    """Two paths."""

    def __init__(self, **options):
        self.paths = [Path(), Path()]
        self.now_s = 100.0
        self.rates = PathRates(
            [path.counters for path in self.paths], clock_s=lambda: self.now_s, **options
        )
        self.rates.note()

    def submit(self, path, *, read=0, write=0):
        self.rates.note()
        self.rates.submitted(path, read, is_write=False)
        self.rates.submitted(path, write, is_write=True)
        self.paths[path].waiting[0] += read
        self.paths[path].waiting[1] += write

    def move(self, seconds, *rates):
        """Lets time pass while each path reads and writes so many bytes/s."""
        self.now_s += seconds
        for path, each in zip(self.paths, rates, strict=True):
            path.move(seconds, each)
        self.rates.note()


@pytest.fixture
def paths():
    return Paths()


def test_nothing_is_known_before_something_moved(paths):
    assert paths.rates.round_trip_bytes_per_s(0) is None
    assert paths.rates.queued_bytes(0) == 0


def test_a_busy_path_shows_its_rate_and_queue(paths):
    for path in (0, 1):
        paths.submit(path, read=10**9, write=10**9)

    for _ in range(10):
        paths.move(0.1, (400e6, 400e6), (150e6, 150e6))

    assert paths.rates.round_trip_bytes_per_s(0) == pytest.approx(400e6)
    assert paths.rates.round_trip_bytes_per_s(1) == pytest.approx(150e6)
    assert paths.rates.queued_bytes(1) == 2 * 10**9 - 300_000_000
    assert paths.rates.queued_write_bytes(1) == 10**9 - 150_000_000


def test_idle_time_does_not_count(paths):
    paths.submit(0, read=40_000_000)
    paths.move(10.0, (400e6, 0), (0, 0))

    assert paths.rates.round_trip_bytes_per_s(0) == pytest.approx(200e6)
    assert paths.rates.queued_bytes(0) == 0


def test_a_path_with_little_to_do_is_as_fast_as_while_it_had_some(paths):
    """At a tenth of its use it is neither slower nor faster than a busy one."""
    for _ in range(50):
        paths.submit(0, read=4_000_000, write=4_000_000)
        paths.move(0.1, (400e6, 400e6), (0, 0))

    assert paths.rates.round_trip_bytes_per_s(0) == pytest.approx(400e6)


def test_a_full_duplex_path_that_only_reads_for_a_while_is_no_slower(paths):
    paths.submit(0, read=10**10, write=80_000_000)

    for _ in range(14):
        paths.move(0.02, (400e6, 400e6), (0, 0))

    assert paths.rates.round_trip_bytes_per_s(0) == pytest.approx(400e6)


def test_a_path_that_has_long_moved_one_direction_shows_the_rate_of_that(paths):
    paths.submit(0, read=10**10, write=40_000_000)

    for _ in range(65):
        paths.move(0.02, (400e6, 400e6), (0, 0))

    assert paths.rates.round_trip_bytes_per_s(0) == pytest.approx(200e6, rel=0.01)


def test_a_path_that_prefers_one_direction_is_as_fast_as_both_together(paths):
    for _ in range(10):
        paths.submit(0, read=20_000_000, write=20_000_000)
        for read, write in ((200e6, 100e6), (200e6, 100e6), (0, 300e6)):
            paths.move(0.05 if read else 0.1 / 3, (read, write), (0, 0))

    assert paths.rates.round_trip_bytes_per_s(0) == pytest.approx(150e6, rel=0.01)


@pytest.mark.parametrize("reads_in_bursts", [False, True])
def test_a_direction_that_comes_in_bursts_does_not_hide_the_one_that_is_always_busy(
    paths, reads_in_bursts
):
    """As where a throttle gives 200 MB/s each way, and lets a direction catch up after a pause."""

    def both(steady, bursts):
        return (bursts, steady) if reads_in_bursts else (steady, bursts)

    def submit(steady, bursts):
        read, write = both(steady, bursts)
        paths.submit(0, read=read, write=write)

    submit(10**10, 0)
    for _ in range(200):
        submit(0, 2_000_000)
        paths.move(0.01, both(200e6, 1000e6), (0, 0))

    assert paths.rates.round_trip_bytes_per_s(0) == pytest.approx(200e6, rel=0.05)


def test_what_a_path_catches_up_after_a_pause_does_not_count(paths):
    """As where a throttle gives 200 MB/s each way, and a tenth of a second's bytes at once."""
    for _ in range(4):
        paths.submit(0, read=60_000_000, write=60_000_000)
        paths.move(0.02, (1000e6, 1000e6), (0, 0))
        for _ in range(20):
            paths.move(0.02, (200e6, 200e6), (0, 0))

    assert paths.rates.round_trip_bytes_per_s(0) == pytest.approx(200e6, rel=0.01)


def test_a_new_rate_is_followed_within_a_second_of_work(paths):
    paths.submit(0, write=10**10)
    for _ in range(20):
        paths.move(0.1, (0, 400e6), (0, 0))

    for _ in range(10):
        paths.move(0.1, (0, 100e6), (0, 0))

    assert paths.rates.round_trip_bytes_per_s(0) == pytest.approx(50e6, rel=0.3)


def test_a_path_that_stands_still_falls_to_nothing(paths):
    paths.submit(0, write=10**10)
    paths.move(0.1, (0, 400e6), (0, 0))

    for _ in range(40):
        paths.move(0.1, (0, 0), (0, 0))

    assert paths.rates.round_trip_bytes_per_s(0) < 5e6


def test_a_path_is_no_faster_than_it_is_held_to():
    """What waits for its turn before the engine is not in flight there."""
    paths = Paths(limits=[100e6, None])
    for path in (0, 1):
        paths.submit(path, read=10**9, write=10**9)
    paths.move(1.0, (400e6, 400e6), (400e6, 400e6))

    assert paths.rates.round_trip_bytes_per_s(0) == pytest.approx(50e6)
    assert paths.rates.round_trip_bytes_per_s(1) == pytest.approx(400e6)


def test_what_was_moved_before_does_not_count():
    rates = PathRates([lambda: BackendStats(read_bytes=10**9)])
    rates.note()
    rates.submitted(0, 5, is_write=False)
    rates.note()

    assert rates.queued_bytes(0) == 5
