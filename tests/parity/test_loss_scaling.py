"""Training under GradScaler: an overflow skips the step, and no bit depends on tiers."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_state

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


def scaled_loss(model, step, scaler):
    """Returns the scaled loss under autocast; at step 1 it is infinite."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, step)
    return scaler.scale(loss * torch.inf if step == 1 else loss)


def test_fp32_parameters_under_autocast_and_a_scaler_equal_plain_torch(tmp_path):
    reference = Reference(build(SmallGPT, dtype=torch.float32), **OPTIONS)
    scaler, plain = (
        torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)
    )
    # Unscales and finds infinities as torch does; with a rate of 0 it changes no weight.
    unscaling = torch.optim.SGD(reference.model.parameters(), lr=0.0)
    scales = []

    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(build(SmallGPT, dtype=torch.float32))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for step in range(4):
            scaled_loss(model, step, scaler).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scaled_loss(reference.model, step, plain).backward()
            plain.unscale_(unscaling)
            if all(p.grad.isfinite().all() for p in reference.model.parameters()):
                reference.step()
            plain.step(unscaling)
            plain.update()
            unscaling.zero_grad()
            scales.append((scaler.get_scale(), plain.get_scale()))

        require_equal_state(session, model, reference)

    assert scales == [(256.0, 256.0), (128.0, 128.0), (128.0, 128.0), (256.0, 256.0)]
    assert reference.completed_steps == 3
