"""Rates that an estimate of passes rests on."""

import itertools
import time

from offload.runs.pass_estimate import _least_s


def test_a_round_in_which_others_had_the_cores_does_not_count(monkeypatch):
    now, durations = [0.0], itertools.chain([9.0, 0.4, 0.4], itertools.repeat(0.01))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def run():
        now[0] += next(durations)

    assert abs(_least_s(run) - 0.01) < 1e-9  # the first run is none of the rounds
