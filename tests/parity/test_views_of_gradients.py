"""Views of `p.grad` that are kept: what is written to them before the step counts, and no more."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch import nn

EARLY = ["backward", "both"]
LOOKS = {
    "clip": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "clip one by one": lambda model, _: nn.utils.clip_grad_norm_(
        model.parameters(), 0.01, foreach=False
    ),
    "clip values": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "scaler": lambda _, optimizer: unscale(optimizer),
    "foreach": lambda model, _: torch._foreach_norm([each.grad for each in model.parameters()]),
    "norm": lambda model, _: [each.grad.norm().item() for each in model.parameters()],
    "print": lambda model, _: [str(each.grad) for each in model.parameters()],
    "vector": lambda model, _: nn.utils.parameters_to_vector(
        each.grad for each in model.parameters()
    ),
    "views": lambda model, _: [each.grad.view(-1).max().item() for each in model.parameters()],
    "arrays": lambda model, _: [
        each.grad.view(torch.int16).numpy() + 1 for each in model.parameters()
    ],
    "data": lambda model, _: [each.grad.data.mul_(0.5) for each in model.parameters()],
}
"""What loops do to gradients; nothing is kept that could be written to."""
VIEWS = {
    "row": lambda gradient: gradient[1],
    "flat": lambda gradient: gradient.view(-1),
    "view of a view": lambda gradient: gradient.t()[2:],
}


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def unscale(optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def trained(session):
    model = session.wrap(build(SmallGPT))
    optimizer = session.AdamW(model.parameters(), **OPTIONS)
    reference = Reference(build(SmallGPT), **OPTIONS)
    train_both(model, optimizer, reference, steps=2)
    return model, optimizer, reference


def gradients_of(*models):
    """Returns the gradients of some weights, in each of the models."""
    names = ("blocks.0.up.weight", "blocks.2.down.weight", "head.weight")
    return [model.get_parameter(name).grad for model in models for name in names]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("overlap", [*EARLY, "forward", "none"])
def test_a_view_of_an_earlier_micro_step_that_is_written_after_the_last(tmp_path, overlap, view):
    with open_session(tmp_path, budget_bytes=400_000, overlap=overlap) as session:
        model, optimizer, reference = trained(session)
        with session.accumulating():
            loss_of(model, 7).backward()
        loss_of(reference.model, 7).backward()
        views = [VIEWS[view](each) for each in gradients_of(model, reference.model)]

        loss_of(model, 8).backward()
        loss_of(reference.model, 8).backward()
        for each in views:
            each.mul_(-0.5)
        if overlap in EARLY:
            assert session._wrapped._updates.early.has_begun, "the others are updated early"
        optimizer.step()
        reference.step()

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("case", [
    ("storage", "backward"), ("storage", "both"), ("storage", "forward"), ("host", "forward"),
    ("host", "none"),
], ids="-".join)  # fmt: skip
def test_a_view_that_is_written_after_the_step_changes_no_update(tmp_path, case):
    parameters, overlap = case
    placement = (parameters, "storage")
    with open_session(tmp_path, placement, budget_bytes=800_000, overlap=overlap) as session:
        model, optimizer, reference = trained(session)
        loss_of(model, 7).backward()
        loss_of(reference.model, 7).backward()
        views = [each.view(-1) for each in gradients_of(model)]

        optimizer.step()
        for each in views:
            each.fill_(3.0)
        reference.step()

        require_equal_state(session, model, reference)


def test_without_views_updates_still_run_under_passes(tmp_path):
    with open_session(tmp_path, budget_bytes=400_000, overlap="both") as session:
        model, optimizer, _ = trained(session)
        loss_of(model, 7).backward()
        norms = [each.view(-1).norm() for each in gradients_of(model)]
        optimizer.zero_grad()

        loss_of(model, 8).backward()

        assert len(norms) == 3
        assert session._wrapped._updates.early.has_begun


def test_without_views_updates_still_run_under_the_next_forward(tmp_path):
    with open_session(tmp_path, budget_bytes=400_000, overlap="forward") as session:
        model, optimizer, _ = trained(session)
        loss_of(model, 7).backward()
        norms = [each.view(-1).norm() for each in gradients_of(model)]

        optimizer.step()

        assert len(norms) == 3
        assert session._wrapped._updates.deferred.is_pending


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.unified
def test_a_loop_that_looks_at_gradients_waits_for_no_update(tmp_path, look):
    plain, _ = updates_in_place(tmp_path / "plain", lambda *_: None)

    found, aliased = updates_in_place(tmp_path / "looked", LOOKS[look])

    assert not aliased
    assert found == plain > 0


def updates_in_place(path, look):
    """Returns how many units came from their update, and whose gradients might be written to."""
    with open_session(path, budget_bytes=233_360, overlap="forward") as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        aliased = []
        for step in range(3):
            loss_of(model, step).backward()
            looked_at = look(model, optimizer)
            names = session._wrapped._parameters
            aliased += session._wrapped._memory.gradients.aliased(names)
            optimizer.step()
            optimizer.zero_grad()
            del looked_at
        with torch.no_grad():
            loss_of(model, 0)
        return session.stats().updated_in_place, aliased


@pytest.mark.unified
def test_a_view_that_is_kept_holds_back_the_step_for_the_updates_of_its_unit(tmp_path):
    with open_session(tmp_path, budget_bytes=233_360, overlap="forward") as session:
        model, optimizer, _ = trained(session)
        loss_of(model, 7).backward()
        view = model.blocks[0].up.weight.grad[0]

        optimizer.step()
        updates = session._wrapped._updates
        is_updated = {n: updates.deferred.is_updated(u) for n, u in updates._unit_of.items()}

        assert view.shape
        assert is_updated["blocks.0.up.weight"]
        assert not is_updated["blocks.2.down.weight"]
