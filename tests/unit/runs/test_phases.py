import pytest

from offload.runs.phases import StepClock


def test_phases_and_the_rest_add_up_to_the_step():
    waited = iter([0.0, 0.0, 2.0, 2.0, 3.0, 3.0, 3.5, 4.0])
    clock = StepClock(read_io_wait_s=lambda: next(waited))

    with clock.forward():
        pass
    with clock.backward():
        pass
    with clock.update():
        pass
    times = clock.stop()

    parts = times.forward_s + times.backward_s + times.update_s + times.other_s
    assert parts == pytest.approx(times.step_s)
    assert [span.io_wait_s for span in (*times.forward, *times.backward, *times.update)] == [
        2.0,
        1.0,
        0.5,
    ]
    assert times.io_wait_s == 4.0
    assert times.forward[0].busy_s == 0.0


def test_what_a_forward_waited_for_updates_is_the_update_s():
    # At the start, then before and after forward and update, then at the end.
    waited = iter([0.0, 0.0, 5.0, 5.0, 5.0, 5.0])
    for_updates = iter([(0.0, 0.0), (0.75, 0.5), (0.75, 0.5), (0.75, 0.5)])
    clock = StepClock(
        read_io_wait_s=lambda: next(waited), read_update_wait_s=lambda: next(for_updates)
    )

    with clock.forward():
        pass
    with clock.update():
        pass
    times = clock.stop()

    assert times.forward[0].io_wait_s == 4.5
    assert [span.io_wait_s for span in times.update] == [0.0, 0.5]
    assert times.update[1].busy_s == 0.25
    assert times.forward_s + times.update_s == pytest.approx(times.update[0].duration_s, abs=0.01)
