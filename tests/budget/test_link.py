"""Bytes over the link to a device are those of the formula, for each placement of parameters."""

import pytest
import torch

import offload
from offload.config import build_config
from offload.runs.model import build_model
from offload.runs.planning import plan_run

MODEL = {"layers": 3, "width": 256, "heads": 2, "context": 32, "vocabulary": 256}


@pytest.mark.parametrize(
    ("gradient_dtype", "micro_steps"), [("parameter", 1), ("float32", 1), ("parameter", 2)]
)
@pytest.mark.parametrize("parameters", ["device", "host", "storage"])
def test_a_step_copies_what_the_plan_says(
    tmp_path, monkeypatch, parameters, gradient_dtype, micro_steps
):
    monkeypatch.chdir(tmp_path)
    config = build_config(
        {
            "model": MODEL,
            "tiers": {"host": {"memory": "64MiB"}, "device": {"kind": "emulated"}},
            "policy": {"parameters": parameters, "order": "resident", "prefetch": 0},
            "train": {"gradient_dtype": gradient_dtype, "micro_steps": micro_steps},
        }
    )
    planned = plan_run(config).to_json()["link"]
    found = []
    with offload.Session(config, store=tmp_path / "store") as session:
        model = session.wrap(build_model(config.model))
        optimizer = session.AdamW(model.parameters())
        tokens = torch.arange(33)[None]
        for _ in range(3):
            for _ in range(micro_steps):
                model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            session.state_digest()  # nothing is pending
            stats = session.stats()
            found.append((stats.link_in_bytes, stats.link_out_bytes))

    moved_in, moved_out = (found[2][way] - found[1][way] for way in (0, 1))
    assert moved_in == pytest.approx(planned["in_bytes_per_step"], rel=0.01)
    assert moved_out == pytest.approx(planned["out_bytes_per_step"], rel=0.01)


def test_later_micro_steps_and_the_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def link(kind, micro_steps):
        config = build_config(
            {
                "model": MODEL,
                "tiers": {"host": {"memory": "64MiB"}, "device": {"kind": kind}},
                "policy": {"parameters": "device"},
                "train": {"micro_steps": micro_steps},
            }
        )
        return plan_run(config).to_json()["link"]

    one, three = link("cuda", 1), link("cuda", 3)

    gradients = one["out_bytes_per_step"]
    assert three["out_bytes_per_step"] == 3 * gradients
    assert three["in_bytes_per_step"] == one["in_bytes_per_step"] + 2 * gradients
    assert link("emulated", 3) == one  # its tensors are the host's, where sums are made
    assert link("cpu", 1) is None


def test_waits_for_gradients_on_the_link_are_counted(tmp_path):
    slow = {"kind": "emulated", "link_rate": "20MB"}
    config = build_config(
        {"model": MODEL, "tiers": {"host": {"memory": "64MiB"}, "device": slow}},
        overrides={"policy.parameters": "device"},
    )
    with offload.Session(config, store=tmp_path / "store") as session:
        model = session.wrap(build_model(config.model))
        optimizer = session.AdamW(model.parameters())
        tokens = torch.arange(33)[None]
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        session.state_digest()
        stats = session.stats()

    waits = [each for each in stats.stalls if each.cause == "copying gradients"]
    assert [each.waits_for for each in waits] == ["link"]
    assert 0 < waits[0].duration_s <= stats.io_wait_s
