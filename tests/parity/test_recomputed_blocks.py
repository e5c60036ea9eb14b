"""Blocks that are computed again in backward, beside the plain program: buffers and gradients."""

from unittest import mock

import pytest
import torch
from parity.models import build
from parity.oracle import Reference, same_bits
from parity.sessions import open_session
from parity.side_by_side import (
    OPTIONS,
    require_equal_gradients,
    require_equal_state,
    train_both,
)
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from offload.streaming.recomputed_blocks import SMALL_BYTES

MEMORY = 1 << 20


def _session(tmp_path, offload):
    activations = {"checkpoint": "unit", "offload": offload}
    if offload != "none":
        activations |= {"memory": MEMORY, "threshold": 1}
    return open_session(tmp_path, budget_bytes=4 * MEMORY, config={"activations": activations})


class Remembering(nn.Module):
    """Blocks whose calls change buffers that they, or later steps, compute with.

    Args:
        around: `checkpoint(call, *args)` of the program's around `around_blocks` blocks at a time.
    """

    def __init__(self, around=None, around_blocks=1):
        super().__init__()
        self.around = around
        self.around_blocks = around_blocks
        self.blocks = nn.ModuleList(
            nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Tanh())
            for _ in range(4)
        )

    def forward(self, x):
        for first in range(0, len(self.blocks), self.around_blocks):
            if self.around is None:
                x = self._run(x, first)
            else:
                x = self.around(self._run, x, first)
        return x

    def _run(self, x, first):
        for block in self.blocks[first : first + self.around_blocks]:
            x = x + block(x)
        return x


def _loss_of_remembering(model, index):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
    return model(x.requires_grad_()).square().mean()


@pytest.mark.parametrize("offload", ["none", "storage"])
def test_what_is_computed_again_changes_no_buffer_twice(tmp_path, offload):
    reference = Reference(build(Remembering, dtype=None), **OPTIONS)
    with _session(tmp_path, offload) as session:
        model = session.wrap(build(Remembering, dtype=None))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=_loss_of_remembering)

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("around_blocks", [1, 2, 4])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("offload", ["none", "storage"])
def test_a_block_is_left_to_a_checkpoint_of_the_program_s_around_it(
    tmp_path, offload, reentrant, around_blocks
):
    def around(*args):
        return checkpoint(*args, use_reentrant=reentrant)

    options = {"dtype": None, "around": around, "around_blocks": around_blocks}
    reference = Reference(build(Remembering, **options), **OPTIONS)
    with _session(tmp_path, offload) as session:
        model = session.wrap(build(Remembering, **options))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=_loss_of_remembering)

        require_equal_state(session, model, reference)
        evaluated = [_loss_of_remembering(each.eval(), 9) for each in (model, reference.model)]
        assert same_bits(*evaluated)


class PartlyCheckpointed(nn.Module):
    """A block with a checkpoint of its own around a part of it."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.norm = nn.BatchNorm1d(8)
        self.inside = nn.Sequential(
            spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1)
        )
        self.after = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8))

    def forward(self, x):
        x = checkpoint(self.inside, self.norm(x), use_reentrant=self.reentrant)
        return self.after(x)


class Parts(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(PartlyCheckpointed(reentrant) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("offload", ["none", "storage"])
def test_a_checkpoint_of_the_program_s_in_a_block_changes_buffers_as_without(
    tmp_path, offload, reentrant
):
    def loss_of(model, index):
        torch.manual_seed(index)  # for the dropout
        return _loss_of_remembering(model, index)

    options = {"dtype": None, "reentrant": reentrant}
    reference = Reference(build(Parts, **options), **OPTIONS)
    with _session(tmp_path, offload) as session:
        model = session.wrap(build(Parts, **options))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=loss_of)

        require_equal_state(session, model, reference)


class Counting(nn.Module):
    """A block that computes with buffers of one memory, and that its model changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("state", torch.ones(8))
        self.register_buffer("first", self.state[:4])

    def forward(self, x):
        self.state.add_(0.5)
        return torch.tanh(self.linear(x) * self.first.sum()) * self.num_calls


class CountedFromOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(3))
        for block in self.blocks:
            block.register_buffer("num_calls", torch.ones(()))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        for block in self.blocks:
            block.num_calls = block.num_calls + 1
        return x


@pytest.mark.parametrize("factory", [CountedFromOutside, Remembering])
def test_small_buffers_are_found_as_forward_found_them_without_a_look(
    tmp_path, monkeypatch, factory
):
    reference = Reference(build(factory, dtype=None), **OPTIONS)
    with _session(tmp_path, "none") as session:
        model = session.wrap(build(factory, dtype=None))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        looks = mock.Mock(side_effect=torch.equal)
        monkeypatch.setattr("offload.streaming.recomputed_blocks.torch.equal", looks)

        _loss_of_remembering(model, 0).backward()
        monkeypatch.undo()

        assert not looks.called
        _loss_of_remembering(reference.model, 0).backward()
        require_equal_gradients(model, reference)
        train_both(model, optimizer, reference, steps=2, loss_of=_loss_of_remembering, first=1)
        require_equal_state(session, model, reference)


class Large(nn.Module):
    """A block that adds a large buffer, which autograd need not save."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(4 * SMALL_BYTES // 8, 8))

    def forward(self, x):
        return torch.tanh(self.dropout(self.linear(x)) + self.shift[:4])


class ChangedFromOutside(nn.Module):
    """Changes the buffers of its blocks after it has called them: `how` says in what way."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Large() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        for block in self.blocks:
            self.how(block)
        return x


def _replace(block):
    block.shift = block.shift + 0.5


def _add_in_place(block):
    block.shift.add_(0.5)


def _add_to_data(block):
    block.shift.data.add_(0.5)


def _replace_data(block):
    block.shift.data = block.shift + 0.5


@pytest.mark.parametrize("how", [_replace, _add_in_place, _add_to_data, _replace_data])
def test_a_large_buffer_that_the_model_changes_after_the_call_is_found_as_it_was(tmp_path, how):
    def loss_of(model, index):
        torch.manual_seed(index)  # for the dropout
        return _loss_of_remembering(model, index)

    reference = Reference(build(ChangedFromOutside, dtype=None, how=how), **OPTIONS)
    with _session(tmp_path, "none") as session:
        model = session.wrap(build(ChangedFromOutside, dtype=None, how=how))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=loss_of)

        require_equal_state(session, model, reference)


class Dropped(Remembering):
    def _run(self, x, first):
        return super()._run(nn.functional.dropout(x, 0.1, self.training), first)

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.append(nn.Dropout(0.5))


@pytest.mark.parametrize("offload", ["none", "storage"])
@pytest.mark.parametrize("first", [True, False])
def test_a_block_is_computed_again_in_the_mode_of_its_forward(tmp_path, offload, first):
    """`model.eval()` between forward and backward, and `model.train()`."""

    def loss_of(model, index):
        torch.manual_seed(index)  # for the dropout
        model.train(first)
        loss = _loss_of_remembering(model, index)
        model.train(not first)
        return loss

    reference = Reference(build(Dropped, dtype=None), **OPTIONS)
    with _session(tmp_path, offload) as session:
        model = session.wrap(build(Dropped, dtype=None))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=loss_of)

        require_equal_state(session, model, reference)
        assert all(each.training is not first for each in model.modules())
