"""What else a program does with its model between steps, and training goes on exactly."""

import pytest
import torch
from parity.models import SmallGPT, batch, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import (
    OPTIONS,
    require_equal_gradients,
    require_equal_state,
    train_both,
)
from torch import nn

ALL_STORED = ("storage", "storage")
EITHER = [pytest.param(p, marks=[pytest.mark.slow] if p != ALL_STORED else []) for p in PLACEMENTS]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


@pytest.fixture(params=EITHER, ids="-".join)
def trained(request, tmp_path):
    """Yields a session, its model and optimizer, and the reference, two steps trained."""
    reference = Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path, request.param) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)

        yield session, model, optimizer, reference


def go_on(trained):
    session, model, optimizer, reference = trained
    train_both(model, optimizer, reference, steps=2, first=2, micro_steps=2, max_norm=0.05)
    require_equal_state(session, model, reference)


def greedy(model, *, length=6):
    tokens = batch(0)[0][:, :3]
    with torch.no_grad():
        for _ in range(length):
            following = model(tokens)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], 1)
    return tokens


def test_evaluation_and_generation(trained):
    _, model, _, reference = trained

    for m in (model, reference.model):
        m.eval()
    with torch.no_grad():
        losses = [loss_of(m, 50) for m in (model, reference.model)]
    generated = [greedy(m) for m in (model, reference.model)]
    with torch.inference_mode():
        inferred = [loss_of(m, 51) for m in (model, reference.model)]
    for m in (model, reference.model):
        m.train()

    assert same_bits(*losses)
    assert same_bits(*inferred)
    assert torch.equal(*generated)
    go_on(trained)


def test_evaluation_between_forward_and_backward(trained):
    _, model, _, reference = trained

    losses = [loss_of(m, 40) for m in (model, reference.model)]
    with torch.no_grad():
        assert same_bits(loss_of(model, 41), loss_of(reference.model, 41))
    for loss in losses:
        loss.backward()

    require_equal_gradients(model, reference)
    go_on(trained)


def test_two_forwards_before_one_backward(trained):
    _, model, _, reference = trained

    for m in (model, reference.model):
        (loss_of(m, 40) + loss_of(m, 41)).backward()

    require_equal_gradients(model, reference)
    go_on(trained)


def test_a_graph_kept_for_a_second_backward(trained):
    _, model, _, reference = trained

    for m in (model, reference.model):
        loss = loss_of(m, 40)
        loss.backward(retain_graph=True)
        loss.backward()

    require_equal_gradients(model, reference)
    go_on(trained)


def test_gradients_of_parameters_by_autograd_grad(trained):
    _, model, _, reference = trained

    found = torch.autograd.grad(loss_of(model, 40), list(model.parameters()))
    expected = torch.autograd.grad(loss_of(reference.model, 40), list(reference.model.parameters()))

    assert all(map(same_bits, found, expected))
    assert all(p.grad is None for p in model.parameters())
    go_on(trained)


def test_a_gradient_of_a_gradient(trained):
    _, model, _, reference = trained
    # Attention has no second derivative on the CPU: a block's feed-forward part has.
    x = torch.linspace(-1, 1, 32).bfloat16()

    for m in (model, reference.model):
        block = m.blocks[0]
        out = block.down(torch.tanh(block.up(x))).float().pow(2).sum()
        (first,) = torch.autograd.grad(out, block.up.bias, create_graph=True)
        first.float().pow(2).sum().backward()

    require_equal_gradients(model, reference)
    go_on(trained)


class Tanh(nn.Module):
    """Layers that have a second derivative."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def penalty(model, *, times=1):
    """Returns a loss with the norm of the gradient of the inputs in it."""
    x = torch.linspace(-1, 1, 64).view(2, 32).requires_grad_()
    loss = model(x).square().sum()
    for _ in range(times):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + gradient.square().sum()
    return loss


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_of_gradients_at_the_smallest_budget(tmp_path, times, device):
    def make():
        return build(Tanh, dtype=torch.float32)

    with open_session(tmp_path / "planned", budget_bytes=1 << 30) as session:
        session.wrap(make())
        options = {"budget_bytes": session._wrapped.plan.smallest_bytes}
        if device == "emulated":
            options["device_memory"] = session._wrapped.device_plan.smallest_bytes
    reference = Reference(make(), **OPTIONS)
    with open_session(tmp_path, overlap="none", **options) as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for _ in range(2):
            losses = [penalty(m, times=times) for m in (model, reference.model)]
            for loss in losses:
                loss.backward()

            assert same_bits(*losses)
            require_equal_gradients(model, reference)
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            reference.model.zero_grad()


def test_a_step_between_a_gradient_and_its_gradient_is_refused(tmp_path):
    with open_session(tmp_path, overlap="none") as session:
        model = session.wrap(build(Tanh, dtype=torch.float32))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        loss = penalty(model)
        penalty(model).backward()
        optimizer.step()

        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()


def test_an_exception_in_forward(trained):
    _, model, _, reference = trained

    class InterruptionError(Exception):
        pass

    def interrupt(*_):
        raise InterruptionError

    for m in (model, reference.model):
        handle = m.blocks[1].up.register_forward_pre_hook(interrupt)
        with pytest.raises(InterruptionError):
            loss_of(m, 40)
        handle.remove()

    go_on(trained)


def test_an_exception_in_backward(trained):
    _, model, _, reference = trained

    class InterruptionError(Exception):
        pass

    def interrupt(gradient):
        raise InterruptionError

    for m in (model, reference.model):
        loss = loss_of(m, 40)
        handle = m.blocks[1].up.weight.register_hook(interrupt)
        with pytest.raises(InterruptionError):
            loss.backward()
        handle.remove()
        m.zero_grad()

    go_on(trained)


def test_the_digest_is_taken_in_mid_step(trained):
    session, model, _, reference = trained

    losses = [loss_of(m, 40) for m in (model, reference.model)]
    assert session.state_digest() == reference.digest()
    for loss in losses:
        loss.backward()
    assert session.state_digest() == reference.digest()

    require_equal_gradients(model, reference)
    go_on(trained)


def test_a_commit_in_mid_step(trained):
    session, model, _, reference = trained

    losses = [loss_of(m, 40) for m in (model, reference.model)]
    session.commit({"note": "between forward and backward"})
    for loss in losses:
        loss.backward()
    session.commit()

    require_equal_gradients(model, reference)
    go_on(trained)


def test_a_view_of_a_weight_kept_across_steps(trained):
    _, model, _, _ = trained
    kept = model.blocks[0].up.weight[:2].detach().clone()
    view = model.blocks[0].up.weight[:2]

    with torch.no_grad():
        loss_of(model, 40)

    assert same_bits(view, kept), "the slot was reused under a live view"
    go_on(trained)


def test_an_edit_in_place_becomes_the_master(trained):
    session, model, _, reference = trained

    for m in (model, reference.model):
        with torch.no_grad():
            m.blocks[1].up.weight.mul_(0.5)
            nn.init.normal_(m.head.weight, generator=torch.Generator().manual_seed(3))
    for name in ("blocks.1.up.weight", "head.weight"):
        reference.edited(name)

    assert session.state_digest() == reference.digest()
    go_on(trained)


def test_an_edit_through_data_becomes_the_master(trained):
    session, model, _, reference = trained

    for m in (model, reference.model):
        m.blocks[1].up.weight.data.mul_(0.5)
        m.head.weight.data[3] = 0.25
        m.blocks[0].down.bias.data.zero_()
    for name in ("blocks.1.up.weight", "head.weight", "blocks.0.down.bias"):
        reference.edited(name)

    require_equal_state(session, model, reference)
    go_on(trained)


def test_an_edit_through_data_of_a_unit_that_backward_left_resident(trained):
    session, model, optimizer, reference = trained

    for m in (model, reference.model):
        loss_of(m, 40).backward()
        m.blocks[0].up.weight.data.clamp_(-0.05, 0.05)
    reference.edited("blocks.0.up.weight")
    optimizer.step()
    reference.step()
    optimizer.zero_grad()
    reference.model.zero_grad()

    require_equal_state(session, model, reference)
    go_on(trained)


def test_an_edit_between_forward_and_step_becomes_the_master(trained):
    session, model, optimizer, reference = trained

    for m in (model, reference.model):
        loss_of(m, 40).backward()
        with torch.no_grad():
            m.blocks[2].down.bias.clamp_(-0.01, 0.01)
    reference.edited("blocks.2.down.bias")
    optimizer.step()
    reference.step()
    optimizer.zero_grad()
    reference.model.zero_grad()

    require_equal_state(session, model, reference)
    go_on(trained)


def test_an_edit_of_a_parameter_without_a_gradient_becomes_the_master(trained):
    session, model, optimizer, reference = trained

    for m in (model, reference.model):
        with torch.no_grad():
            m.head.weight.add_(1)
        (m.tokens.weight[:3].float().sum() * 2).backward()
    reference.edited("head.weight")
    optimizer.step()
    reference.step()
    optimizer.zero_grad()
    reference.model.zero_grad()

    require_equal_state(session, model, reference)
    go_on(trained)


def test_a_state_dict_loaded_into_a_wrapped_model(trained):
    session, model, _, reference = trained
    other = build(SmallGPT, seed=9).state_dict()

    for m in (model, reference.model):
        m.load_state_dict(other)
    for name in reference.trainable:
        reference.edited(name)

    require_equal_state(session, model, reference)
    go_on(trained)


def test_weights_saved_and_loaded_back_change_no_value(trained, tmp_path):
    session, model, _, reference = trained
    torch.save(model.state_dict(), tmp_path / "weights.pt")

    for m in (model, reference.model):
        m.load_state_dict(torch.load(tmp_path / "weights.pt"))
    for name in reference.trainable:
        reference.edited(name)  # the low halves of the masters are gone, as documented

    require_equal_state(session, model, reference)
    go_on(trained)


def test_zeroing_gradients_keeps_them_as_zeros(trained):
    session, model, optimizer, reference = trained

    for m in (model, reference.model):
        loss_of(m, 40).backward()
    optimizer.zero_grad(set_to_none=False)
    reference.model.zero_grad(set_to_none=False)

    require_equal_gradients(model, reference)
    optimizer.step()  # zeros are gradients: decayed and counted
    reference.step()
    require_equal_state(session, model, reference)
    optimizer.zero_grad()
    reference.model.zero_grad()
    go_on(trained)


def test_a_gradient_that_the_user_assigned_is_applied(trained):
    session, model, optimizer, reference = trained

    for m in (model, reference.model):
        loss_of(m, 40).backward()
        m.head.weight.grad = m.head.weight.grad * 2
        m.norm.bias.grad = torch.ones_like(m.norm.weight.grad)
        m.tokens.weight.grad = None
    optimizer.step()
    reference.step()
    optimizer.zero_grad()
    reference.model.zero_grad()

    require_equal_state(session, model, reference)
    go_on(trained)


def test_a_closure_gives_its_loss(trained):
    session, model, optimizer, reference = trained

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 40)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    expected = loss_of(reference.model, 40)
    expected.backward()
    reference.step()
    optimizer.zero_grad()
    reference.model.zero_grad()

    assert same_bits(loss, expected)
    require_equal_state(session, model, reference)
