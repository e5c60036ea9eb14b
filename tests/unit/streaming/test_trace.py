import random

from offload.streaming import access_history
from offload.streaming.access_history import AccessHistory
from offload.streaming.trace import NEVER, Access, AccessTrace


def forward(*units):
    return [Access(unit=unit, is_backward=False) for unit in units]


def backward(*units):
    return [Access(unit=unit, is_backward=True) for unit in units]


def run(trace, *accesses):
    for access in accesses:
        trace.record(access)


def recorded(*accesses):
    """Returns a trace that has seen one step and begins the next."""
    trace = AccessTrace()
    run(trace, *accesses)
    trace.end_step()
    return trace


def test_nothing_is_predicted_in_the_first_pass():
    trace = AccessTrace()
    run(trace, *forward(0))

    assert next(trace.upcoming(), None) is None
    assert trace.next_use(0) == NEVER
    assert trace.divergences == 0


def test_what_comes_next_is_looked_for_once_between_two_accesses(monkeypatch):
    found, find = [], AccessHistory._find_upcoming

    def noting(history):
        for unit in find(history):
            found.append(unit)
            yield unit

    monkeypatch.setattr(AccessHistory, "_find_upcoming", noting)
    trace = recorded(*forward(0, 1, 2), *backward(2, 1, 0))

    assert next(trace.upcoming()) == 0
    assert list(trace.upcoming()) == list(trace.upcoming()) == [0, 1, 2]
    assert found == [0, 1, 2]

    run(trace, *forward(0))
    assert list(trace.upcoming()) == [1, 2, 0]
    assert found == [0, 1, 2, 1, 2, 0]


def test_the_second_step_is_predicted_from_the_first():
    trace = recorded(*forward(0, 1), *backward(1, 0))
    before = list(trace.upcoming())

    run(trace, *forward(0))

    assert before == [0, 1]
    assert list(trace.upcoming()) == [1, 0]
    assert trace.next_use(1) < trace.next_use(0) < NEVER


def test_nothing_is_predicted_beyond_the_update():
    trace = recorded(*forward(0, 1))
    run(trace, *forward(0, 1))
    at_its_end = list(trace.upcoming()), trace.next_use(0)

    trace.end_step()

    assert at_its_end == ([], NEVER)
    assert list(trace.upcoming()) == [0, 1]
    assert trace.divergences == 0


def test_without_an_update_passes_are_predicted_from_each_other():
    trace = AccessTrace()
    run(trace, *forward(0, 1, 2, 0, 1, 2))

    assert list(trace.upcoming()) == [0, 1, 2]


def test_a_second_update_without_accesses_changes_nothing():
    trace = recorded(*forward(0, 1))

    trace.end_step()

    assert list(trace.upcoming()) == [0, 1]


def test_a_run_of_the_same_unit_in_backward_is_one_access():
    trace = recorded(*forward(0), *backward(0, 0, 0))

    run(trace, *forward(0), *backward(0, 0))

    assert next(trace.upcoming(), None) is None
    assert trace.divergences == 0


def test_two_calls_in_a_row_in_forward_are_two_accesses():
    trace = recorded(*forward(0, 0, 1))

    run(trace, *forward(0))

    assert next(trace.upcoming()) == 0


def test_an_unforeseen_unit_is_counted_and_the_prediction_goes_on_behind_it():
    trace = recorded(*forward(0, 1, 2, 3))

    run(trace, *forward(0, 2))

    assert trace.divergences == 1
    assert list(trace.upcoming()) == [3]
    assert trace.next_use(1) == NEVER


def test_an_unknown_unit_ends_the_prediction_until_a_known_one_comes():
    trace = recorded(*forward(0, 1, 2))

    run(trace, *forward(7))
    after_unknown = list(trace.upcoming())
    run(trace, *forward(1))

    assert after_unknown == []
    assert list(trace.upcoming()) == [2]
    assert trace.divergences == 1


def test_units_that_change_places_are_foreseen_behind_them():
    trace = recorded(*forward(0, 1, 2, 3, 4))

    run(trace, *forward(0, 2, 1, 3))

    assert list(trace.upcoming()) == [4]


def test_a_step_that_departs_is_the_next_prediction():
    trace = recorded(*forward(0, 1, 2))
    run(trace, *forward(0, 2))

    trace.end_step()

    assert list(trace.upcoming()) == [0, 2]


def test_the_place_that_is_most_alike_predicts():
    trace = recorded(*forward(0, 1, 2, 5, 1, 3))

    run(trace, *forward(4, 5, 1))

    assert list(trace.upcoming()) == [3]


def test_one_more_micro_step_is_foreseen():
    micro_step = [*forward(0, 1, 2), *backward(2, 1)]
    trace = recorded(*micro_step, *micro_step)
    run(trace, *micro_step, *micro_step)

    run(trace, *forward(0))

    assert list(trace.upcoming()) == [1, 2, 0]
    assert trace.divergences == 1


def test_evaluation_is_told_from_training():
    trace = recorded(*forward(0, 1, 2), *backward(2))
    trace.begin(is_evaluation=True)
    run(trace, *forward(0, 1, 2))
    trace.end()
    run(trace, *forward(0, 1, 2), *backward(2))
    trace.end_step()
    run(trace, *forward(0))

    trace.begin(is_evaluation=True)
    run(trace, *forward(0))
    evaluation = list(trace.upcoming())
    trace.end()
    run(trace, *backward(2))

    assert evaluation == [1, 2, 0]
    assert list(trace.upcoming()) == []


def test_a_long_history_is_forgotten_and_the_rest_still_predicts(monkeypatch):
    monkeypatch.setattr(access_history, "_MOST_ACCESSES", 64)
    trace = AccessTrace()

    for _ in range(100):
        run(trace, *forward(0, 1, 2))

    assert list(trace.upcoming()) == [0, 1, 2]
    assert trace.divergences == 0
    assert len(trace._history._accesses) <= 64


def test_what_is_unforeseen_is_compared_with_the_latest_places_alone(monkeypatch):
    trace, rng = AccessTrace(), random.Random(0)
    compare, places, most = AccessHistory._num_alike, [], 0

    def noted(history, place):
        places.append(place)
        return compare(history, place)

    monkeypatch.setattr(AccessHistory, "_num_alike", noted)
    for _ in range(2000):
        places.clear()
        run(trace, *forward(rng.randrange(3)))
        most = max(most, len(places))

    assert most == access_history._MOST_PLACES


def test_a_step_that_is_too_long_to_be_remembered_is_unforeseen(monkeypatch):
    monkeypatch.setattr(access_history, "_MOST_ACCESSES", 8)
    trace = AccessTrace()

    for _ in range(3):
        run(trace, *forward(*range(20)))
        trace.end_step()

    assert list(trace.upcoming()) == []
