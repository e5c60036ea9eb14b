from offload.streaming.trace import NEVER, Access, AccessTrace


def forward(*units):
    return [Access(unit=unit, is_backward=False) for unit in units]


def backward(*units):
    return [Access(unit=unit, is_backward=True) for unit in units]


def recorded(*accesses, mode="train"):
    """Returns a trace that has seen one pass and begins the next."""
    trace = AccessTrace()
    trace.begin(mode)
    for access in accesses:
        trace.record(access)
    trace.begin(mode)
    return trace


def test_nothing_is_predicted_in_the_first_pass():
    trace = AccessTrace()
    trace.begin("train")
    trace.record(*forward(0))

    assert next(trace.upcoming(), None) is None
    assert list(trace.upcoming()) == []
    assert trace.next_use(0) == NEVER
    assert trace.divergences == 0


def test_the_second_pass_is_predicted_from_the_first():
    trace = recorded(*forward(0, 1), *backward(1, 0))

    trace.record(*forward(0))

    assert next(trace.upcoming()) == 1
    assert list(trace.upcoming()) == [1, 0]
    assert trace.next_use(1) == 1
    assert trace.next_use(0) == 3


def test_a_run_of_the_same_unit_in_backward_is_one_access():
    trace = recorded(*forward(0), *backward(0, 0, 0))

    for access in (*forward(0), *backward(0, 0)):
        trace.record(access)

    assert next(trace.upcoming(), None) is None
    assert trace.divergences == 0


def test_two_calls_in_a_row_in_forward_are_two_accesses():
    trace = recorded(*forward(0, 0, 1))

    trace.record(*forward(0))

    assert next(trace.upcoming()) == 0


def test_an_unforeseen_unit_is_counted_and_the_prediction_goes_on_behind_it():
    trace = recorded(*forward(0, 1, 2, 3))

    trace.record(*forward(0))
    trace.record(*forward(2))

    assert trace.divergences == 1
    assert list(trace.upcoming()) == [3]
    assert trace.next_use(1) == NEVER


def test_an_unknown_unit_ends_the_prediction():
    trace = recorded(*forward(0, 1, 2))

    trace.record(*forward(7))

    assert list(trace.upcoming()) == []
    assert trace.divergences == 1


def test_a_pass_that_departs_is_the_next_prediction():
    trace = recorded(*forward(0, 1, 2))
    for access in forward(0, 2):
        trace.record(access)

    trace.begin("train")

    assert list(trace.upcoming()) == [0, 2]


def test_each_mode_has_its_own_trace():
    trace = recorded(*forward(0, 1))
    trace.begin("evaluate")
    trace.record(*forward(5))

    trace.begin("train")
    training = list(trace.upcoming())
    trace.begin("evaluate")

    assert training == [0, 1]
    assert list(trace.upcoming()) == [5]


def test_predict_looks_at_the_pass_that_is_ending():
    trace = AccessTrace()
    trace.begin("train")
    for access in forward(0, 1):
        trace.record(access)

    trace.predict("train")

    assert list(trace.upcoming()) == [0, 1]


def test_a_pass_without_accesses_leaves_the_trace():
    trace = recorded(*forward(0, 1))

    trace.begin("train")
    trace.begin("train")

    assert list(trace.upcoming()) == [0, 1]
