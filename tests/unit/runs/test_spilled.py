"""Activations on storage are in the plan's bytes, and within the capacity."""

import pytest
import torch

from offload import Session
from offload.config import build_config
from offload.runs.model import build_model
from offload.runs.planning import plan_run
from offload.runs.spilled import spilled_bytes

MODEL = {"layers": 3, "width": 128, "heads": 2, "context": 64}
HOST = {"host": {"memory": "32MiB"}}


def config(**overrides):
    values = {
        "model": MODEL,
        "tiers": HOST,
        # Slots of 4 KiB, of which every activation here is a multiple.
        "activations": {"offload": "storage", "threshold": "16KiB", "memory": "64KiB"},
    }
    return build_config(values, overrides=overrides)


def train(asked, tmp_path, *, steps=1):
    """Trains the model of a run, and once more without a step; returns the session's counters."""
    with Session(asked, store=tmp_path / "store") as session:
        model = session.wrap(build_model(asked.model))
        optimizer = session.AdamW(model.parameters())
        tokens = torch.zeros(asked.train.batch, asked.model.context, dtype=torch.int64)
        for _ in range(steps):
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        model(tokens, tokens).backward()
        return session.stats()


@pytest.mark.parametrize("checkpoint", ["none", "unit"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_planned_is_what_is_away_when_a_forward_ends(tmp_path, checkpoint, dtype):
    asked = config(**{"activations.checkpoint": checkpoint, "model.dtype": dtype})

    found = train(asked, tmp_path)

    assert spilled_bytes(asked) == found.activation_offload_peak_bytes > 0


def test_a_plan_counts_them_and_holds_them_against_the_capacity(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = plan_run(build_config({"model": MODEL, "tiers": HOST})).storage

    plan = plan_run(config()).storage

    spilled = plan.space.spill_bytes
    assert spilled == spilled_bytes(config()) > 0
    assert plan.planned_bytes == plain.planned_bytes + spilled
    short = plan_run(config(**{"tiers.storage.capacity": plan.planned_bytes - 1}))
    assert "MiB spilled" in short.reasons[0]
    assert plan_run(config(**{"tiers.storage.capacity": plan.planned_bytes})).fits


def test_a_capacity_leaves_room_for_them_or_keeps_them_in_memory(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    plan = plan_run(config()).storage
    enough = config(**{"tiers.storage.capacity": plan.planned_bytes})
    (tmp_path / "enough").mkdir()
    assert train(enough, tmp_path / "enough").activation_kept_bytes == 0

    with Session(config(), store=tmp_path / "one") as session:
        session.wrap(build_model(config().model))
        live = session.stats().paths[0].live_bytes
    short = config(**{"tiers.storage.capacity": live + 8192})
    with caplog.at_level("WARNING", "offload.streaming"):
        found = train(short, tmp_path, steps=0)

    assert found.activation_kept_bytes > 0
    assert found.activation_offload_bytes > 0
    assert "tiers.storage.capacity" in caplog.text
