"""`session.save` and `session.load` against the reference that takes the same steps."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both

import offload
from offload.errors import StoreError

pytestmark = pytest.mark.slow  # seconds in all; `make test` has others of their kind


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def reference_after(num_steps):
    reference = Reference(build(SmallGPT), **OPTIONS)
    for step in range(num_steps):
        loss_of(reference.model, step).backward()
        reference.step()
        reference.model.zero_grad()
    return reference


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("codec", ["split", "fp32"])
def test_a_load_goes_back_exactly_and_training_goes_on_from_there(tmp_path, placement, codec):
    reference = reference_after(0)
    with open_session(tmp_path, placement, codec=codec) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)
        session.save("two", metadata={"at": 2})
        train_both(model, optimizer, reference, steps=2, first=2)
        session.save("four")
        loss_of(model, 4).backward()  # gradients that are dropped

        session.load("two")

        back = reference_after(2)
        assert session.metadata == {"at": 2}
        require_equal_state(session, model, back)
        assert all(p.grad is None for p in model.parameters())
        train_both(model, optimizer, back, steps=2, first=2)
        require_equal_state(session, model, back)
        assert session.checkpoints() == ["two", "four"]
        session.load("four")
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_new_process_may_start_from_a_checkpoint(tmp_path, placement):
    reference = reference_after(2)
    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference_after(0), steps=2)
        session.save("two")
        loss_of(model, 2).backward()
        optimizer.step()
        session.commit()

    with open_session(tmp_path, placement, resume=True) as session:
        session.load("two")
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        require_equal_state(session, model, reference)
        train_both(model, optimizer, reference, steps=1, first=2)


def test_a_state_that_was_never_updated_begins_in_memory(tmp_path):
    """Records without state are not stored; where they come to memory, masters are parameters."""
    for placement in PLACEMENTS:
        with open_session(tmp_path, placement, codec="fp32") as session:
            model = session.wrap(build(SmallGPT))
            optimizer = session.AdamW(model.parameters(), **OPTIONS)
            session.save("untrained")
            train_both(model, optimizer, reference_after(0), steps=1)
            session.load("untrained")
            require_equal_state(session, model, reference_after(0))
            session.commit()

        elsewhere = {"parameters": "host", "optimizer": "host"}
        store = tmp_path / "-".join(placement)
        with offload.Session(
            host_memory=1 << 20, store=store, policy=elsewhere, codec="fp32", resume=True
        ) as session:
            model = session.wrap(build(SmallGPT))
            optimizer = session.AdamW(model.parameters(), **OPTIONS)
            reference = reference_after(0)
            require_equal_state(session, model, reference)
            train_both(model, optimizer, reference, steps=2)
            require_equal_state(session, model, reference)


def test_edits_after_a_save_are_gone_after_a_load(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        session.AdamW(model.parameters(), **OPTIONS)
        session.save("first")
        digest = session.state_digest()
        with torch.no_grad():
            model.head.weight.zero_()
        assert session.state_digest() != digest

        session.load("first")

        assert session.state_digest() == digest


def test_keep_last_deletes_the_oldest(tmp_path):
    config = {"checkpoint": {"keep_last": 2}, "tiers": {"host": {"memory": 1 << 20}}}
    with offload.Session(config, store=tmp_path / "store") as session:
        session.wrap(build(SmallGPT))
        for name in ("a", "b", "c"):
            session.save(name)

        assert session.checkpoints() == ["b", "c"]


def test_a_missing_checkpoint_changes_nothing(tmp_path):
    with open_session(tmp_path) as session:
        session.wrap(build(SmallGPT))
        session.save("first")
        digest = session.state_digest()

        with pytest.raises(StoreError, match="no checkpoint `second`"):
            session.load("second")

        assert session.state_digest() == digest


def test_a_copy_goes_on_where_the_paths_are_lost(tmp_path):
    config = {
        "checkpoint": {"drain": str(tmp_path / "backup")},
        "tiers": {"host": {"memory": 1 << 20}},
    }
    reference = reference_after(0)
    with offload.Session(config, store=[tmp_path / "a", tmp_path / "b"]) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)
        session.save("two")
        assert session.wait_drained() == []
    (copy,) = (tmp_path / "backup").iterdir()

    with offload.Session(config, store=copy, resume=True) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        require_equal_state(session, model, reference)
        train_both(model, optimizer, reference, steps=1, first=2)
