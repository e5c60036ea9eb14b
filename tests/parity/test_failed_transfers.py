"""What failed first is what is raised, also by whoever goes on and keeps the errors."""

import contextlib
import errno
import itertools

import pytest
from model.program_parts import refusing
from parity.models import SmallGPT, build, loss_of
from parity.sessions import open_session, use_small_records

from offload._native import aio
from offload.errors import BudgetError, StorageError
from offload.storage.engine import Engine
from offload.storage.faults import Fault, FaultPlan
from offload.storage.store import BlockStore


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def smallest_budgets(tmp_path, device):
    options = {} if device == "cpu" else {"device_memory": 8 << 20}
    with open_session(tmp_path / "plan", budget_bytes=8 << 20, **options) as session:
        session.wrap(build(SmallGPT))
        wrapped = session._wrapped
        budgets = {"budget_bytes": wrapped.plan.smallest_bytes}
        if device != "cpu":
            budgets["device_memory"] = wrapped.device_plan.smallest_bytes
    return budgets


def fail_from(monkeypatch, operation, number):
    """The store refuses every read or write from that of `number` on."""
    plain, counter = getattr(BlockStore, operation), itertools.count()

    def refuse(self, *args, **options):
        if next(counter) >= number:
            raise StorageError("what failed first")
        return plain(self, *args, **options)

    monkeypatch.setattr(BlockStore, operation, refuse)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("number", [0, 10, 21, 28, pytest.param(35, marks=pytest.mark.slow)])
def test_what_failed_is_not_hidden_by_slots_that_errors_keep(
    tmp_path, monkeypatch, device, operation, number
):
    budgets = smallest_budgets(tmp_path, device)
    errors = []
    session = open_session(tmp_path, **budgets)
    session.open()
    model = session.wrap(build(SmallGPT))
    optimizer = session.AdamW(model.parameters())

    def step(index):
        loss_of(model, index).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    fail_from(monkeypatch, operation, number)
    for index in range(4):
        try:
            step(index)
        except Exception as error:  # noqa: BLE001 - whatever it is
            errors.append(error)
    try:
        session.close()
    except StorageError as error:
        errors.append(error)

    assert errors
    assert not any(isinstance(error, BudgetError) for error in errors)
    assert all("what failed first" in str(error) for error in errors)


@pytest.mark.skipif(not aio.available(), reason="no compiled backend")
@pytest.mark.parametrize("skip", [57, 60])
def test_errors_of_reads_on_their_way_keep_no_slots(tmp_path, monkeypatch, device, skip):
    budgets = smallest_budgets(tmp_path, device)
    faults = FaultPlan(faults=(Fault(operation="read", skip=skip, count=3, error=errno.EIO),))

    def open_engine(*_):
        engine = Engine("fault", faults=faults)
        engine.open()
        return engine

    monkeypatch.setattr("offload.session.session_store._open_engine", open_engine)
    errors = []
    with contextlib.suppress(StorageError), open_session(tmp_path, **budgets) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        for index in range(5):
            try:
                loss_of(model, index).backward()
                optimizer.step()
            except Exception as error:  # noqa: BLE001 - whatever it is
                errors.append(error)
            optimizer.zero_grad()

    assert errors
    assert not any(isinstance(error, BudgetError) for error in errors)


def test_a_failure_under_backward_that_is_raised_again_keeps_no_frames_of_before(tmp_path):
    with open_session(tmp_path, budget_bytes=400_000, overlap="backward") as session:
        model = session.wrap(build(SmallGPT))
        session.AdamW(model.parameters())
        with refusing("write", 0, waits=False, goes_on=True):
            loss_of(model, 0).backward()
            depths = []
            for _ in range(3):  # they add to gradients that failed updates have used
                with pytest.raises(StorageError, match="what was refused") as raised:
                    loss_of(model, 1).backward()
                depths.append(len(raised.traceback))

    assert depths[0] == depths[1] == depths[2]
