"""Autocast over fp32 parameters gives the bits that it gives in memory."""

import contextlib

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_state, train_both


def autocast_loss(model, index):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, index)


@pytest.mark.parametrize("tie", [None, "identity", "functional"])
def test_autocast_changes_no_bit(tmp_path, tie):
    reference = Reference(build(SmallGPT, dtype=torch.float32, tie=tie), **OPTIONS)
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(SmallGPT, dtype=torch.float32, tie=tie))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2, loss_of=autocast_loss)

        require_equal_state(session, model, reference)


def test_one_region_over_several_steps_casts_the_updated_values(tmp_path):
    digests = []
    for region in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with open_session(tmp_path / str(len(digests)), budget_bytes=2 << 20) as session:
            model = session.wrap(build(SmallGPT, dtype=torch.float32))
            optimizer = session.AdamW(model.parameters(), **OPTIONS)

            with region:
                for step in range(3):
                    autocast_loss(model, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()

            digests.append(session.state_digest())

    assert digests[0] == digests[1]
