"""Twenty checkpoints in two hundred steps: memory, descriptors and space stay flat.

No save takes more memory than the budget.
"""

import gc
import os
from pathlib import Path

import psutil
import pytest
from parity.models import SmallGPT, build, loss_of

import offload

STEPS, EVERY, KEEP_LAST = 200, 10, 3
BUDGET_BYTES = 1 << 20


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def save(session, name):
    session.save(name)
    session.wait_drained()


def peak_bytes():
    """The most resident bytes since they were last set to those of now."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def rise_of_peak(action):
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = peak_bytes()
    action()
    return peak_bytes() - before_bytes


@pytest.mark.slow
@pytest.mark.alone
def test_memory_descriptors_and_space_are_flat_over_saves(tmp_path):
    config = {
        "checkpoint": {"keep_last": KEEP_LAST, "drain": str(tmp_path / "backup")},
        "tiers": {"host": {"memory": BUDGET_BYTES}},
    }
    process = psutil.Process(os.getpid())
    found, rises = [], []
    with offload.Session(config, store=[tmp_path / "a", tmp_path / "b"]) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), lr=1e-3)
        for step in range(1, STEPS + 1):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0:
                rises.append(rise_of_peak(lambda name=f"step-{step}": save(session, name)))
                gc.collect()
                live_bytes = sum(path.live_bytes for path in session.stats().paths)
                found.append((process.memory_info().rss, descriptors(), live_bytes))
        names = session.checkpoints()

    assert names == [f"step-{step}" for step in (180, 190, 200)]
    rss, fds, live = zip(*found[KEEP_LAST + 1 :], strict=True)
    assert max(rss) - min(rss) < 8 << 20
    assert len(set(fds)) == 1
    assert len(set(live)) == 1
    one_version = found[0][2]
    assert live[0] == KEEP_LAST * one_version
    assert len(list((tmp_path / "backup").iterdir())) == KEEP_LAST
    assert session.stats().host_peak_bytes <= BUDGET_BYTES
    assert max(rises) < BUDGET_BYTES
