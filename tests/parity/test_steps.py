"""A step changes everything with a learning rate and nothing without; short batches count."""

import pytest
from parity.models import SmallGPT, batch, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch.nn import functional


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_every_parameter_changes_with_a_learning_rate_and_none_without(tmp_path, monkeypatch, lr):
    use_small_records(monkeypatch)
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **{**OPTIONS, "lr": lr})
        before = {name: values.clone() for name, values in model.state_dict().items()}

        loss_of(model, 0).backward()
        optimizer.step()

        after = model.state_dict()
        changed = {name for name, values in before.items() if not same_bits(values, after[name])}
        assert changed == (set(before) if lr else set())


def test_the_last_micro_batch_may_be_short(tmp_path, monkeypatch):
    use_small_records(monkeypatch)

    def short_loss(model, index):
        inputs, targets = batch(index, size=1 if index % 3 == 2 else 3)
        logits = model(inputs).float().flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum")

    reference = Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2, micro_steps=3, loss_of=short_loss)

        require_equal_state(session, model, reference)
