"""Ctrl-C at any line of a step: no slot is lost, and the state is a step's or is refused."""

import gc

import pytest
import torch
from interrupts import interrupted_at, num_lines
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS

import offload
from offload.streaming.tier import StagedUnits

FIRST = 2
"""The step that is interrupted; those before it are in checkpoint `before`."""
BUDGETS = {
    ("storage", "storage"): 400_000,
    ("host", "storage"): 600_000,
    ("storage", "host"): 700_000,
}
"""Few slots and records in memory."""
CASES = [
    *[(placement, "none") for placement in BUDGETS],
    *[(placement, "forward") for placement in BUDGETS],
    (("storage", "storage"), "backward"),
    (("storage", "storage"), "both"),
]
POINTS = [
    pytest.param(4, id="few"),
    pytest.param(12, id="some", marks=pytest.mark.slow),
    pytest.param(600, id="many", marks=pytest.mark.stress),
]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


@pytest.mark.parametrize("num_points", POINTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join((*case[0], case[1])))
@pytest.mark.unified
def test_a_step_that_is_interrupted_anywhere_loses_nothing(tmp_path, case, num_points):
    check_interrupts(tmp_path, *case, num_points=num_points)


@pytest.mark.parametrize("num_points", POINTS)
def test_on_every_device(tmp_path, num_points):
    check_interrupts(tmp_path, ("storage", "storage"), "forward", num_points=num_points)


def check_interrupts(tmp_path, placement, overlap, *, num_points):
    digests = digests_of_steps()
    options = {"budget_bytes": BUDGETS[placement], "overlap": overlap}
    with open_session(tmp_path, placement, **options) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for index in range(FIRST):
            step(model, optimizer, index)
        session.save("before")
        given = leases_at_rest(session, model)
        lines = num_lines(lambda: step(model, optimizer, FIRST))

        for point in range(num_points):
            go_back(session, model)
            line = 1 + (point * lines + 7 * point) // num_points % lines
            where = interrupted_at(line, lambda: step(model, optimizer, FIRST))
            model.zero_grad()
            where = f"interrupted at {where}, line {line} of {lines}"
            require_known_state(session, model, optimizer, digests, where)
            assert leases_at_rest(session, model) == given, where

        go_back(session, model)
        step(model, optimizer, FIRST)
        assert session.state_digest() == digests[FIRST + 1]


def step(model, optimizer, index):
    loss_of(model, index).backward()
    optimizer.step()
    optimizer.zero_grad()


def digests_of_steps():
    """Returns the digest before each step."""
    reference = Reference(build(SmallGPT), **OPTIONS)
    digests = [reference.digest()]
    for index in range(FIRST + 2):
        loss_of(reference.model, index).backward()
        reference.step()
        reference.model.zero_grad()
        digests.append(reference.digest())
    return digests


def require_known_state(session, model, optimizer, digests, where):
    """The state is that before or after the step, and a step from there is exact; or is refused."""
    try:
        found = session.state_digest()
        assert found in digests[FIRST : FIRST + 2], where
        at = digests.index(found)
        step(model, optimizer, at)
        assert session.state_digest() == digests[at + 1], where
        session.commit()
    except offload.OffloadError as error:
        if not isinstance(error, offload.StoreError) or "session.load" not in str(error):
            raise AssertionError(where) from error


def go_back(session, model):
    session.load("before")
    model.zero_grad()


def end_staged_reads(residency):
    """Gives staging slots of reads back that are over, as the next fetch would."""
    tier = getattr(residency, "_tier", None)
    staged = getattr(tier, "_tier", tier)
    while isinstance(staged, StagedUnits) and staged._in_flight:
        staged._end_first()


def leases_at_rest(session, model):
    """Returns what is leased after going back and a forward, with no unit in a slot.

    The engine forgets transfers that are over as others begin.
    """
    go_back(session, model)
    with torch.no_grad():
        loss_of(model, 0)
    wrapped = session._wrapped
    wrapped.leave_store()
    end_staged_reads(wrapped.residency)
    gc.collect()
    memory, window = wrapped._memory, wrapped._memory.window
    budgets = [memory.host.budget]
    if memory.on_device is not None:
        budgets.append(memory.on_device.budget)
    cached = sum(window._states.slot_bytes for _ in window.cached) if window._states else 0
    in_flight = session._store._open_parts.transfers._in_flight
    leased = [budget.leased_bytes for budget in budgets]
    leased[0] -= cached
    return leased, window.num_places_taken, len([t for t in in_flight if not t.done()])
