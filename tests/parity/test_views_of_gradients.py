"""Views of `p.grad` that are kept: what is written to them before the step counts, and no more."""

import pytest
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both

EARLY = ["backward", "both"]
VIEWS = {
    "row": lambda gradient: gradient[1],
    "flat": lambda gradient: gradient.view(-1),
    "view of a view": lambda gradient: gradient.t()[2:],
}


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


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
