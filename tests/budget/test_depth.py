"""A deeper model needs no more memory: what grows with the number of layers lies on storage."""

import pytest
from parity.models import SmallGPT, build
from parity.oracle import Reference
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both

TWO_UNITS = {"cpu": {}, "emulated": {"device_memory": 2 * 28672}}
"""Of the largest unit of `SmallGPT`; on `cpu` the plan itself gives the least."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulated", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layers", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_twice_the_layers_train_exactly_within_the_smallest_memory_of_half_of_them(
    tmp_path, monkeypatch, device, layers
):
    use_small_records(monkeypatch)
    options = {"device": device, **TWO_UNITS[device]}
    with open_session(tmp_path / "planned", budget_bytes=1 << 30, **options) as session:
        session.wrap(build(SmallGPT, layers=layers))
        smallest = session._wrapped.plan.smallest_bytes

    peaks = []
    for deeper in (layers, 2 * layers):
        reference = Reference(build(SmallGPT, layers=deeper), **OPTIONS)
        where = tmp_path / str(deeper)
        with open_session(where, budget_bytes=smallest, **options) as session:
            model = session.wrap(build(SmallGPT, layers=deeper))
            optimizer = session.AdamW(model.parameters(), **OPTIONS)
            train_both(model, optimizer, reference, steps=2, max_norm=0.05)
            require_equal_state(session, model, reference)
            peaks.append((session.stats().host_peak_bytes, session.stats().device_peak_bytes))

    assert peaks[0] == peaks[1]
    assert peaks[0][0] <= smallest
