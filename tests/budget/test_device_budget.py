"""The device budget is hard and its smallest is exact, beside the smallest host budget."""

import pytest
from parity.models import SmallGPT, build
from parity.oracle import Reference
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both

from offload.errors import PlanError


def smallest(tmp_path, placement, make):
    """Returns the smallest budgets of host and device."""
    with open_session(tmp_path, placement, device="emulated", budget_bytes=1 << 30) as session:
        session.wrap(make())
        wrapped = session._wrapped
        return wrapped.plan.smallest_bytes, wrapped.device_plan.smallest_bytes


@pytest.mark.parametrize("tie", [None, pytest.param("identity", marks=pytest.mark.slow)])
@pytest.mark.parametrize("placement", [
    *(pytest.param(placement, marks=pytest.mark.slow) for placement in PLACEMENTS[:-1]),
    PLACEMENTS[-1],
], ids="-".join)  # fmt: skip
def test_both_smallest_budgets_train_exactly_and_one_byte_less_of_the_device_is_refused(
    tmp_path, monkeypatch, placement, tie
):
    use_small_records(monkeypatch)

    def make():
        return build(SmallGPT, tie=tie)

    host, device = smallest(tmp_path / "planned", placement, make)
    reference = Reference(make(), **OPTIONS)
    options = {"device": "emulated", "budget_bytes": host}

    with open_session(tmp_path, placement, device_memory=device, **options) as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        with session._device.checking():
            train_both(model, optimizer, reference, steps=2, micro_steps=2, max_norm=0.05)
        require_equal_state(session, model, reference)
        stats = session.stats()
        assert 0 < stats.device_peak_bytes <= device
        assert stats.host_peak_bytes <= host

    refused = tmp_path / "refused"
    with (
        open_session(refused, placement, device_memory=device - 1, **options) as session,
        pytest.raises(PlanError, match=rf"at least {device} bytes.*found {device - 1} bytes"),
    ):
        session.wrap(make())


@pytest.mark.parametrize("extra_bytes", [0, 4095, 30_000, 1 << 20])
def test_no_device_budget_is_exceeded_by_plan_or_peak(tmp_path, monkeypatch, extra_bytes):
    use_small_records(monkeypatch)
    _, least = smallest(tmp_path / "planned", PLACEMENTS[-1], lambda: build(SmallGPT))

    budget = least + extra_bytes
    with open_session(tmp_path, device="emulated", device_memory=budget) as session:
        model = session.wrap(build(SmallGPT))
        reference = Reference(build(SmallGPT), **OPTIONS)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)

        planned = session._wrapped.device_plan.planned_bytes
        assert least <= planned <= budget
        assert least <= session.stats().device_peak_bytes <= planned
