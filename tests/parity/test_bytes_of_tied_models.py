"""Bytes of a step are those of the formula, however often its passes use a unit."""

import argparse
import json

import pytest

from offload.config import build_config
from offload.runs.planning import plan_run

MODELS = {
    "none": [
        *["TiedAtBothEnds", "Untied", "TiedInCode", "EncoderAndDecoder", "UsedTwice"],
        *["UsedBackwards", "NeedsValues", "UsedInTurns", "OwnedByRoot", "SharedInLayers"],
        *["TiedByFunctions", "AskedForLast"],
    ],
    "forward": [
        *["TiedAtBothEnds", "Untied", "EncoderAndDecoder", "UsedTwice", "UsedBackwards"],
        *["UsedInTurns", "OwnedByRoot", "SharedInLayers"],
    ],
}
SLOTS = [("13MiB", 2), ("24MiB", 1)]  # 2 slots and two micro-steps, or more and one
CASES = [
    *[
        (overlap, name, memory, micro_steps)
        for overlap, names in MODELS.items()
        for name in names
        for memory, micro_steps in SLOTS
    ],
    ("forward", "UsedBackwards", "26MiB", 1),  # other records and windows
]


def run_of(name, *, memory, micro_steps, overlap, eval_every=0, parameters="storage"):
    return build_config(
        {
            "model": {"factory": f"parity.factories:{name}", "width": 256, "depth": 6},
            "data": {"source": "files", "files": [argparse.__file__]},
            "train": {
                "steps": 4, "batch": 1, "micro_steps": micro_steps, "eval_every": eval_every
            },
            "policy": {
                "parameters": parameters, "optimizer": "storage", "overlap": overlap,
                "order": "resident" if overlap == "forward" else "sequential",
            },
            "tiers": {"host": {"memory": memory, "window": "2MiB"}},
        }
    )  # fmt: skip


@pytest.mark.parametrize(("overlap", "name", "memory", "micro_steps"), CASES)
def test_a_step_reads_what_the_formula_says(
    tmp_path, monkeypatch, train, name, memory, micro_steps, overlap
):
    monkeypatch.chdir(tmp_path)
    config = run_of(name, memory=memory, micro_steps=micro_steps, overlap=overlap)

    found = train(config, run_dir=tmp_path / "run")

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["read_bytes"] for line in lines][2:]  # the first have no trace
    assert max(steps) == min(steps)
    assert steps[0] == pytest.approx(found.formula_read_bytes_per_step, rel=0.01)


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("name", ["UsedTwice", "UsedInTurns", "TiedAtBothEnds"])
@pytest.mark.parametrize("memory", ["24MiB", "40MiB"])  # the larger one keeps every unit
def test_so_does_a_step_after_a_validation(tmp_path, monkeypatch, train, name, overlap, memory):
    monkeypatch.chdir(tmp_path)
    config = run_of(name, memory=memory, micro_steps=1, overlap=overlap, eval_every=1)

    found = train(config, run_dir=tmp_path / "run")

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["read_bytes"] for line in lines][2:]
    assert max(steps) == min(steps)
    assert steps[0] == pytest.approx(found.formula_read_bytes_per_step, rel=0.01)


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_gradients_of_a_unit_that_come_at_two_moments_are_spilled_twice(
    tmp_path, monkeypatch, train, micro_steps
):
    monkeypatch.chdir(tmp_path)
    config = run_of(
        "OwnedByRoot", memory="15600000", micro_steps=micro_steps, overlap="forward",
        parameters="host",
    )  # fmt: skip

    found = train(config, run_dir=tmp_path / "run")

    gradients = plan_run(config).host.gradients
    assert len(gradients.spilled) > 2  # more than there are slots
    assert found.formula_write_bytes_per_step > gradients.spilled_bytes * micro_steps
    assert found.read_bytes_per_step == pytest.approx(found.formula_read_bytes_per_step, rel=0.002)
    assert found.write_bytes_per_step == pytest.approx(
        found.formula_write_bytes_per_step, rel=0.002
    )


def test_a_model_without_values_is_taken_in_the_order_of_its_modules():
    plans = [
        plan_run(run_of(name, memory="18MiB", micro_steps=1, overlap="none"))
        for name in ("TiedAtBothEnds", "NeedsValues")
    ]

    assert plans[0].traffic == plans[1].traffic
