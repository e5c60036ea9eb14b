"""fp16 parameters under GradScaler: an overflow skips the step, and no bit depends on tiers."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import same_bits
from parity.sessions import open_session

HALF = {"codec": "fp32", "gradient_dtype": "float32"}
"""torch refuses to unscale fp16 gradients."""


def train(session, *, steps):
    """Returns losses, scales and the digest; at step 1 the loss overflows."""
    model = session.wrap(build(SmallGPT, dtype=torch.float16))
    optimizer = session.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    seen = []
    for step in range(steps):
        loss = loss_of(model, step)
        scaler.scale(loss * 1e8 if step == 1 else loss).backward()
        before = session.state_digest()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((loss.item(), scaler.get_scale()))
        assert (session.state_digest() == before) == (step == 1)
    return seen, session.state_digest()


@pytest.mark.parametrize("placement", [("host", "host"), ("storage", "storage")], ids="-".join)
def test_every_tier_gives_the_bits_of_memory_and_an_overflow_leaves_the_state(tmp_path, placement):
    with open_session(tmp_path / "memory", offload=False, **HALF) as session:
        expected = train(session, steps=4)

    with open_session(tmp_path, placement, budget_bytes=2 << 20, **HALF) as session:
        found = train(session, steps=4)

    assert found == expected
    assert expected[0][1][1] < expected[0][0][1], "the scale goes down"
    assert same_bits(torch.tensor(found[0]), torch.tensor(expected[0]))
