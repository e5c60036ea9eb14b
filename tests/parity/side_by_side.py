"""A wrapped model and its reference, trained side by side and compared bit for bit."""

import contextlib
from unittest import mock

import pytest
from parity.models import loss_of
from parity.oracle import same_bits
from torch import nn

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def train_both(
    model, optimizer, reference, *, steps, micro_steps=1, max_norm=None, loss_of=loss_of, first=0
):
    """Trains model and reference side by side and compares losses, norms and gradients."""
    for step in range(first, first + steps):
        for micro_step in range(micro_steps):
            losses = [
                loss_of(m, step * micro_steps + micro_step) / micro_steps
                for m in (model, reference.model)
            ]
            for loss in losses:
                loss.backward()
            assert same_bits(*losses)
        require_equal_gradients(model, reference)
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert norm.item() == reference.clip(max_norm)
            assert reference.scale < 1, "the test means to clip"
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.model.zero_grad()


def require_equal_gradients(model, reference):
    expected = dict(reference.model.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if expected[name].grad is None:
            assert gradient is None, name
        else:
            assert same_bits(gradient.clone(), expected[name].grad), name


def require_equal_state(session, model, reference):
    assert session.state_digest() == reference.digest()
    expected = reference.model.state_dict()
    for name, values in model.state_dict().items():
        assert same_bits(values, expected[name]), name


@contextlib.contextmanager
def interrupted_in(owner, name):
    """Interrupts what runs in this context where it calls a method; goes on after it."""
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(owner, name, mock.Mock(side_effect=KeyboardInterrupt))
        yield
