"""Activation checkpoints of the user's own, both kinds, in every form and number of slots.

These recompute parts of the forward in backward, below modules' calls and in nested graph tasks:
where simpler ways of streaming gave wrong gradients in silence.
"""

import dataclasses

import pytest
import torch
from parity.models import CheckpointedModel, batch, build, loss_of
from parity.oracle import same_bits
from parity.sessions import open_session
from torch import nn
from torch.nn import functional

import offload.plan.host

FORMS = [None, "each", "segments", "nested", "with_head", "sequential", "inside"]
KINDS = ["plain", "frozen", "tied", "tied_by_function"]


@pytest.fixture(scope="module")
def expected_of():
    """Returns the loss and the gradients of the plain model, computed once for each."""
    known = {}

    def expected(**options):
        key = tuple(options.items())
        if key not in known:
            model = make(**options)
            loss = loss_of(model, 0)
            loss.backward()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            known[key] = loss, gradients
        return known[key]

    return expected


def allow_slots(monkeypatch, num_slots):
    """Lets plans have `num_slots`, or as many as one call needs."""
    original = offload.streaming.planner.plan_host

    def plan(layout, *, co_resident_units, **options):
        found = original(layout, co_resident_units=co_resident_units, **options)
        return dataclasses.replace(found, num_slots=max(num_slots, co_resident_units))

    monkeypatch.setattr(offload.streaming.planner, "plan_host", plan)


def make(*, form, reentrant, kind):
    tie = {"tied": "identity", "tied_by_function": "functional"}.get(kind)
    model = build(CheckpointedModel, form=form, reentrant=reentrant, tie=tie)
    if kind == "frozen":
        model.blocks.requires_grad_(False)
    return model


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, nested
@pytest.mark.parametrize("num_slots", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradients_equal_those_of_the_plain_model(
    tmp_path, monkeypatch, expected_of, reentrant, form, kind, num_slots
):
    loss, gradients = expected_of(form=form, reentrant=reentrant, kind=kind)
    allow_slots(monkeypatch, num_slots)

    with open_session(tmp_path) as session:
        model = session.wrap(make(form=form, reentrant=reentrant, kind=kind))
        for _ in range(2):  # the second time as the trace of the first predicts
            model.zero_grad()
            found_loss = loss_of(model, 0)
            found_loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        held = [unit.name for unit in session._wrapped.residency.units if unit.num_holds]

    assert same_bits(found_loss, loss)
    assert found.keys() == gradients.keys()
    assert [n for n in found if not same_bits(found[n], gradients[n])] == []
    assert held == []


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_dropout_inside_a_checkpoint_is_drawn_again(tmp_path, reentrant):
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make(form="segments", reentrant=reentrant, kind="plain")
            for block in self.model.blocks:
                block.norm = nn.Sequential(block.norm, nn.Dropout(0.5))

        def forward(self, tokens):
            return self.model(tokens)

    def train(model):
        torch.manual_seed(7)
        inputs, targets = batch(0)
        loss = functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        return [loss, *(p.grad.clone() for p in model.parameters())]

    expected = train(Dropped())

    with open_session(tmp_path) as session:
        found = train(session.wrap(Dropped()))

    assert all(map(same_bits, found, expected))


def test_saved_tensors_that_a_user_moves_aside_still_pass_through_the_users_hooks(tmp_path):
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make(form=None, reentrant=False, kind="plain")
            self.packed = self.unpacked = 0

        def forward(self, tokens):
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                return self.model(tokens)

        def pack(self, tensor):
            self.packed += 1
            return tensor.clone()

        def unpack(self, tensor):
            self.unpacked += 1
            return tensor

    expected = Counted()
    loss_of(expected, 0).backward()

    with open_session(tmp_path) as session:
        model = session.wrap(Counted())
        loss_of(model, 0).backward()

        assert 0 < model.packed < expected.packed  # weights are the engine's, the rest the user's
        assert model.unpacked == model.packed
        for (name, found), plain in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            assert same_bits(found.grad.clone(), plain.grad), name
