"""Gradients with respect to inputs, and hooks that see or change gradients on their way."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_gradients, require_equal_state
from torch.autograd.graph import register_multi_grad_hook


def input_gradient(model, *, by):
    x = torch.linspace(-1, 1, 2 * 16 * 32).view(2, 16, 32).bfloat16().requires_grad_()
    hidden = x
    for block in model.blocks:
        hidden = block(hidden)
    loss = model.head(model.norm(hidden)).float().square().mean()
    if by == "grad":
        (gradient,) = torch.autograd.grad(loss, x)
        return gradient
    loss.backward()
    return x.grad


@pytest.mark.parametrize("training, frozen", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("by", ["grad", "backward"])
def test_gradients_of_inputs_alone(tmp_path, training, frozen, by):
    plain, streamed = build(SmallGPT), build(SmallGPT)
    for model in (plain, streamed):
        model.requires_grad_(not frozen)

    with open_session(tmp_path, ("storage", "host")) as session:
        session.wrap(streamed, training=training)

        found, expected = (input_gradient(m, by=by) for m in (streamed, plain))

        assert same_bits(found, expected)
        require_equal_gradients(streamed, Reference(plain))
        if frozen or by == "grad":
            assert all(p.grad is None for p in streamed.parameters())


def add_hooks(model, seen):
    """Hooks of every kind that torch has on gradients; three of them change what they see."""

    def halve_accumulated(parameter):
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(0.5)

    def see_each(gradients):
        seen.extend(gradient.clone() for gradient in gradients)

    model.blocks[1].up.weight.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    model.blocks[2].down.weight.register_post_accumulate_grad_hook(halve_accumulated)
    model.blocks[0].register_full_backward_hook(lambda _, __, out: seen.append(out[0].clone()))
    model.blocks[1].register_full_backward_pre_hook(lambda _, out: (out[0] * 0.5,))
    register_multi_grad_hook([model.norm.weight, model.head.weight], see_each)


def test_hooks_see_and_change_what_they_would_in_memory(tmp_path):
    reference = Reference(build(SmallGPT), **OPTIONS)
    found, expected = [], []

    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        add_hooks(model, found)
        add_hooks(reference.model, expected)

        for index in range(2):
            for m in (model, reference.model):
                loss_of(m, index).backward()

        assert len(found) == len(expected) == 2 * 5
        assert all(map(same_bits, found, expected))
        require_equal_gradients(model, reference)
        optimizer.step()
        reference.step()
        require_equal_state(session, model, reference)
