"""Gradients that do not fit in memory go to storage and come back without a change of any bit."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both

from offload.errors import StorageError

STORED = [placement for placement in PLACEMENTS if "storage" in placement]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def make():
    return build(SmallGPT, layers=6)


ONE_RECORD = {"tiers": {"host": {"window": 1}}}
"""What is left of the budget is for gradients then."""


def smallest_bytes(tmp_path, placement=("storage", "storage"), **options):
    options.setdefault("config", ONE_RECORD)
    with open_session(tmp_path / "planned", placement, budget_bytes=1 << 30, **options) as session:
        session.wrap(make())
        return session._wrapped.plan.smallest_bytes


def open_spilling(tmp_path, placement=("storage", "storage"), *, extra_bytes=0, **options):
    options.setdefault("config", ONE_RECORD)
    budget_bytes = smallest_bytes(tmp_path, placement, **options) + extra_bytes
    return open_session(tmp_path, placement, budget_bytes=budget_bytes, **options)


@pytest.mark.parametrize("overlap", ["forward", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("micro_steps, extra_bytes", [
    (2, 0),
    pytest.param(1, 0, marks=pytest.mark.slow),
    pytest.param(2, 100_000, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("placement", STORED, ids="-".join)
def test_training_equals_the_reference(tmp_path, placement, micro_steps, extra_bytes, overlap):
    reference = Reference(make(), **OPTIONS)

    with open_spilling(tmp_path, placement, extra_bytes=extra_bytes, overlap=overlap) as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        plan = session._wrapped.plan.gradients
        assert plan.spilled
        if placement == ("storage", "storage"):
            assert bool(plan.resident_bytes) == bool(extra_bytes)

        train_both(model, optimizer, reference, steps=4, micro_steps=micro_steps, max_norm=0.05)

        require_equal_state(session, model, reference)


def test_fp32_gradients_are_spilled_too(tmp_path):
    plain = make()
    for parameter in plain.parameters():
        parameter.grad_dtype = torch.float32
    reference = Reference(plain, **OPTIONS)

    with open_spilling(tmp_path, gradient_dtype="float32") as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        assert session._wrapped.plan.gradients.spilled

        train_both(model, optimizer, reference, steps=3, micro_steps=2, max_norm=0.05)

        require_equal_state(session, model, reference)


def test_a_step_moves_the_bytes_of_the_plan(tmp_path):
    with open_spilling(tmp_path, overlap="none") as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        spill = session._wrapped.counters.spilled.spill
        moved = []
        for step in range(3):
            before = spill.read_bytes, spill.write_bytes
            for micro_step in range(2):
                loss_of(model, 2 * step + micro_step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            moved.append((spill.read_bytes - before[0], spill.write_bytes - before[1]))

        planned = session._wrapped.plan.gradients.spilled_bytes
        assert moved[-1] == (2 * planned, 2 * planned)
        assert spill.peak_bytes <= session._wrapped.plan.gradients.space_bytes


def test_gradients_are_read_and_written_as_plain_ones(tmp_path):
    plain = make()
    loss_of(plain, 0).backward()

    with open_spilling(tmp_path) as session:
        model = session.wrap(make())
        session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 0).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert same_bits(p.grad.clone(), q.grad), name
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.grad.view(-1)[:2].add_(1)
            q.grad.view(-1)[:2].add_(1)
            p.grad.mul_(0.5)
            q.grad.mul_(0.5)
        loss_of(model, 1).backward()
        loss_of(plain, 1).backward()

        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert same_bits(p.grad.clone(), q.grad), name


def test_a_view_of_a_gradient_keeps_its_slot(tmp_path):
    with open_spilling(tmp_path) as session:
        model = session.wrap(make())
        session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 0).backward()
        first = next(iter(model.parameters()))
        view = first.grad.view(-1)
        expected = view.clone()

        for parameter in model.parameters():
            parameter.grad.sum()

        assert torch.equal(view, expected)


def test_what_is_written_to_a_kept_view_after_a_step_counts_in_the_next_norm(tmp_path):
    with open_spilling(tmp_path, overlap="none") as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 0).backward()
        first = next(iter(model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        view = first.grad.view(-1)
        view.mul_(2)  # its gradient has no known norm any more
        optimizer.step()  # writes all that only slots have
        view.mul_(1000)
        del view
        found = torch.nn.utils.get_total_norm([first.grad])

        assert found.item() == pytest.approx(first.grad.clone().float().norm().item(), rel=1e-2)


def fail_once(monkeypatch, owner, method, error, *, after):
    """Lets the call number `after` of a method fail, from 0; no other."""
    calls, real = [], getattr(owner, method)

    def run(*arguments, **options):
        calls.append(None)
        if len(calls) == after + 1:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(owner, method, run)


def write_each_twice(model):
    for parameter in [*model.parameters()] * 2:
        parameter.grad.view(-1)[:1].add_(0)


@pytest.mark.parametrize(
    ("method", "after"), [("read", 0), ("read", 5), ("check", 5), ("write", 5)]
)
def test_a_transfer_that_failed_leaves_no_wrong_number(tmp_path, monkeypatch, method, after):
    plain = make()
    loss_of(plain, 0).backward()

    with open_spilling(tmp_path) as session:
        model = session.wrap(make())
        session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 0).backward()
        spill = session._wrapped.counters.spilled.spill
        error = StorageError("cannot move: no")
        fail_once(monkeypatch, spill, method, error, after=after)
        with pytest.raises(StorageError, match="cannot move"):
            write_each_twice(model)

        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert same_bits(p.grad.clone(), q.grad), name


def test_waits_for_spilled_gradients_are_in_the_stall_account(tmp_path):
    with open_spilling(tmp_path) as session:
        model = session.wrap(make())
        for index in range(2):  # the second adds to what the first one spilled
            loss_of(model, index).backward()
        stats = session.stats()
        root = session._store.roots[0]

    on_path = {s.cause for s in stats.stalls if s.waits_for == f"path {root}"}
    assert {"spilling gradients", "bringing spilled gradients back"} <= on_path
    waited_s = sum(s.duration_s for s in stats.stalls if s.waits_for != "kernel")
    assert waited_s == pytest.approx(stats.io_wait_s, abs=1e-6)
