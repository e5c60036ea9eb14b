"""The plan predicts the peak of resident memory: each plan and each run in a fresh process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offload.plan.machine_profile import MARK

pytestmark = [pytest.mark.slow, pytest.mark.alone]

MODEL = {
    "model.layers": 8,
    "model.width": 384,
    "model.heads": 6,
    "model.context": 128,
    "train.batch": 4,
    "train.steps": 3,
    "tiers.storage.durability": "none",
    "policy.overlap": "none",
}
STORED = {
    "policy.parameters": "storage",
    "policy.optimizer": "storage",
    "policy.order": "sequential",
    "tiers.host.memory": "120MiB",
}
IN_MEMORY = {
    "policy.parameters": "host",
    "policy.optimizer": "host",
    "tiers.host.memory": "400MiB",
}


def offload(command: str, *options: str, overrides: dict[str, Any], at: Path) -> dict[str, Any]:
    config = at / "run.toml"
    config.write_text("")
    values = [f"{key}={value}" for key, value in overrides.items()]
    done = subprocess.run(
        [sys.executable, "-m", "offload", command, str(config), *values, *options, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OFFLOAD_MACHINE": ""},
        cwd=at,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("changes", [
    pytest.param(STORED, id="stored"),
    pytest.param(STORED | {"train.micro_steps": 3}, id="micro-steps"),
    pytest.param(IN_MEMORY, id="in memory"),
    pytest.param(STORED | {"tiers.device.kind": "emulated"}, id="emulated"),
])  # fmt: skip
def test_the_planned_peak_is_within_five_per_cent_of_the_kernels(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    machine = tmp_path / "machine.toml"  # has the path's rates: nothing but memory is compared
    machine.write_text(
        f'{MARK}\nschema = 1\n[[paths]]\npath = "{tmp_path}"\nbackend = "threads"\n'
        "block_bytes = 1048576\nqueue_depth = 4\ndirect = true\n"
        "read_bytes_per_s = 4e8\nwrite_bytes_per_s = 2e8\nmixed_bytes_per_s = 2e8\n"
        'measured_at = "2026-01-01T00:00:00+00:00"\n'
    )
    overrides = MODEL | changes

    plan = offload("plan", "--machine", str(machine), overrides=overrides, at=tmp_path)
    run = offload("train", "--run-dir", "run", overrides=overrides, at=tmp_path)

    # The run's figure is VmHWM, which it resets when it begins.
    planned, measured = plan["predicted"]["rss_peak_bytes"], run["rss_peak_bytes"]
    assert planned == pytest.approx(measured, rel=0.05)
