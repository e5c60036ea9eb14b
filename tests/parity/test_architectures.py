"""Gradients and weights of many kinds of model are those of the plain one, bit for bit."""

import re

import pytest
from parity.architectures import ARCHITECTURES, CustomFunctions
from parity.models import build
from parity.oracle import Reference, same_bits
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_gradients, require_equal_state, train_both

import offload

SMALLEST = re.compile(r"at least (\d+) bytes")


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


@pytest.fixture
def budgets(tmp_path, device):
    """Gives the smallest budgets that the plan allows, from what it says in refusing less."""

    def smallest(factory):
        found = {"budget_bytes": 1 << 20}
        for key in ["budget_bytes"] + (["device_memory"] if device == "emulated" else []):
            with open_session(tmp_path / "refused" / key, **{**found, key: 1}) as session:
                with pytest.raises(offload.PlanError) as refusal:
                    session.wrap(build(factory))
                assert session.stats().write_bytes == 0
            found[key] = int(SMALLEST.search(str(refusal.value))[1])
        return found

    return smallest


def test_a_function_that_keeps_the_weight_itself_keeps_its_slot(tmp_path):
    model, reference = build(CustomFunctions), Reference(build(CustomFunctions), **OPTIONS)
    with open_session(tmp_path, budget_bytes=1 << 20, prefetch=4) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=CustomFunctions.loss)

        require_equal_state(session, model, reference)


def test_weights_that_functions_keep_need_a_slot_each_and_the_refusal_says_so(tmp_path, budgets):
    with open_session(tmp_path / "run", **budgets(CustomFunctions)) as session:
        model = session.wrap(build(CustomFunctions))

        with pytest.raises(offload.BudgetError, match=r"slots are kept by .*`layers.0.weight`"):
            model.loss(0).backward()


@pytest.mark.parametrize("budget", ["smallest", "generous"])
@pytest.mark.parametrize("factory", ARCHITECTURES, ids=lambda factory: factory.__name__)
def test_training_equals_the_plain_model(tmp_path, budgets, factory, budget):
    given = budgets(factory) if budget == "smallest" else {"budget_bytes": 1 << 20}
    model, reference = build(factory), Reference(build(factory), **OPTIONS)
    with open_session(tmp_path / "run", **given) as session:
        session.wrap(model)
        optimizer = session.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)
        for step in range(3):
            for micro_step in range(2):
                losses = [each.loss(2 * step + micro_step) for each in (model, reference.model)]
                for loss in losses:
                    loss.backward()
                assert same_bits(*losses)
            require_equal_gradients(model, reference)
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            reference.model.zero_grad()

        expected = reference.model.state_dict()
        for name, values in model.state_dict().items():
            assert same_bits(values, expected[name]), name
        assert session.state_digest() == reference.digest()
        stats = session.stats()
        assert stats.host_peak_bytes <= given["budget_bytes"]
        if "device_memory" in given:
            assert stats.device_peak_bytes <= given["device_memory"]
