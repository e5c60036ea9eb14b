"""The order of updates and the cache change no bit, also over commits, resumes and edits."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both

import offload


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def open_in_order(tmp_path, order, *, parameters="storage", budget_bytes=1 << 20, **options):
    policy = {"parameters": parameters, "optimizer": "storage", "order": order}
    return offload.Session(
        host_memory=budget_bytes, store=tmp_path / "store", policy=policy, **options
    )


def smallest_bytes(tmp_path):
    with open_session(tmp_path) as session:
        session.wrap(build(SmallGPT))
        return session._wrapped.plan.smallest_bytes


@pytest.mark.parametrize("extra_bytes", [0, 400_000, 700_000])
@pytest.mark.parametrize("parameters", ["host", "storage"])
@pytest.mark.parametrize("order", ["alternating", "resident"])
def test_order_and_cache_change_no_bit(tmp_path, order, parameters, extra_bytes):
    budget_bytes = extra_bytes + (smallest_bytes(tmp_path) if parameters == "storage" else 900_000)
    reference = Reference(build(SmallGPT), **OPTIONS)

    with open_in_order(
        tmp_path, order, parameters=parameters, budget_bytes=budget_bytes
    ) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=3, max_norm=0.1)
        session.commit({"step": 3})
        train_both(model, optimizer, reference, steps=1, max_norm=0.1, first=3)
        with torch.no_grad():
            for m in (model, reference.model):
                m.head.weight.mul_(0.5)
        reference.edited("head.weight")
        train_both(model, optimizer, reference, steps=2, max_norm=0.1, first=4)

        require_equal_state(session, model, reference)
        assert session.stats().host_peak_bytes <= budget_bytes
        if extra_bytes == 700_000:
            assert session.stats().cache_hit_bytes > 0


@pytest.mark.parametrize("order", ["alternating", "resident"])
def test_a_commit_writes_what_is_cached(tmp_path, order):
    with open_in_order(tmp_path, order) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for index in range(2):
            loss_of(model, index).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.commit()
        digest = session.state_digest()

    with open_in_order(tmp_path, "sequential", resume=True) as session:
        session.wrap(build(SmallGPT))

        assert session.state_digest() == digest
