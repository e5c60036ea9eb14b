"""Models of many shapes train exactly, at the smallest budget that the plan allows and above."""

import pytest
import torch
from parity.architectures import ARCHITECTURES
from parity.oracle import Reference, same_bits
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_gradients, require_equal_state

STEPS = 3
GENEROUS = 16 << 20


def smallest_budgets(tmp_path, make):
    """Returns the smallest budgets of the plan: host, device (None where that is the host)."""
    with open_session(tmp_path / "planned", budget_bytes=GENEROUS) as session:
        session.wrap(make())
        wrapped = session._wrapped
        device_bytes = None if wrapped.device.is_unified else wrapped.device_plan.smallest_bytes
        return wrapped.plan.smallest_bytes, device_bytes


def train_both(model, optimizer, reference, losses_of):
    for step in range(STEPS):
        found, expected = losses_of(model, step), losses_of(reference.model, step)
        assert all(map(same_bits, found, expected))
        for losses in (found, expected):
            for index, loss in enumerate(losses):
                loss.backward(retain_graph=index < len(losses) - 1)
        require_equal_gradients(model, reference)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.model.zero_grad()


def require_equal_training(session, architecture, dtype):
    reference = Reference(architecture.build(dtype), **OPTIONS)
    model = session.wrap(architecture.build(dtype))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = session.AdamW(trainable, **OPTIONS)

    train_both(model, optimizer, reference, architecture.losses)

    require_equal_state(session, model, reference)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_and_weights_equal_the_reference_at_the_smallest_budget(tmp_path, name):
    architecture = ARCHITECTURES[name]
    host_bytes, device_bytes = smallest_budgets(tmp_path, architecture.build)
    options = {} if device_bytes is None else {"device_memory": device_bytes}

    with open_session(tmp_path, budget_bytes=host_bytes, **options) as session:
        require_equal_training(session, architecture, torch.bfloat16)

        stats = session.stats()
        assert stats.host_peak_bytes <= host_bytes
        assert device_bytes is None or stats.device_peak_bytes <= device_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_and_weights_equal_the_reference_at_a_generous_budget(tmp_path, name):
    with open_session(tmp_path, budget_bytes=GENEROUS) as session:
        require_equal_training(session, ARCHITECTURES[name], torch.float32)
