"""The window of a session has the bytes that were asked for, and its size changes no bit."""

import pytest
from parity.models import SmallGPT, build
from parity.oracle import Reference
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both

from offload.runs.planning import plan_run


@pytest.mark.parametrize("window_bytes", [1, 100_000, 400_000])
@pytest.mark.parametrize("order, overlap", [("alternating", "none"), ("resident", "forward")])
def test_no_window_changes_a_bit_and_none_is_exceeded(
    tmp_path, monkeypatch, order, overlap, window_bytes
):
    use_small_records(monkeypatch)
    reference = Reference(build(SmallGPT), **OPTIONS)
    config = {"tiers": {"host": {"window": window_bytes}}}
    policy = {"order": order, "overlap": overlap, "budget_bytes": 3 << 19}

    with open_session(tmp_path, config=config, **policy) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=4, max_norm=0.1)
        require_equal_state(session, model, reference)
        plan, window = session._wrapped.plan, session._wrapped._memory.window

    assert plan.window_bytes <= max(window_bytes, plan.buffer_bytes)
    assert plan.num_cached > 0
    assert window.num_places == plan.num_places
    assert window.num_places_taken == 0


def test_a_plan_has_the_window_of_the_session_that_carries_it_out(monkeypatch, small_config):
    use_small_records(monkeypatch)

    plans = [
        plan_run(
            small_config(
                tiers__host__memory="3MiB", tiers__host__window=size,
                policy__order="sequential", policy__overlap="none",  # nothing gains by a short one
            )
        ).host
        for size in (200_000, "2MiB")
    ]  # fmt: skip

    small, large = plans
    assert small.window_bytes <= 200_000 < large.window_bytes <= 2 << 20
