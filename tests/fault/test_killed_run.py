import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = Path(__file__).parents[2] / "examples" / "small.toml"
WAIT_S = 120
STEPS = 12
ENDLESS = "train.steps=1000000"
"""Of a run that is ended: it cannot end before, however late the signal comes."""


def command(run_dir, *arguments):
    return [
        sys.executable, "-m", "offload", "train", str(SMALL), f"train.steps={STEPS}",
        "tiers.storage.commit_every=2", "data.source=files", f'data.files=["{argparse.__file__}"]',
        "--run-dir", str(run_dir), "--json", *arguments,
    ]  # fmt: skip


def run(run_dir, *arguments):
    done = subprocess.run(command(run_dir, *arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def signal_after_step(run_dir, step, number):
    """Starts a run, sends it a signal once `step` has its line, and returns how it ended."""
    process = subprocess.Popen(
        command(run_dir, ENDLESS), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + WAIT_S
    while not metrics.exists() or metrics.read_text().count("\n") < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, number)
    output, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, output, errors


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_digest_of_an_uninterrupted_one(tmp_path):
    whole = run(tmp_path / "whole")

    code, _, _ = signal_after_step(tmp_path / "killed", 5, signal.SIGKILL)
    resumed = run(tmp_path / "killed", "--resume", "auto")

    assert code == -signal.SIGKILL
    assert 5 <= resumed["first_step"] <= 12
    assert resumed["state_digest"] == whole["state_digest"]
    assert resumed["losses"] == whole["losses"][resumed["first_step"] - 1 :]
    lines = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_commits_and_says_how_to_go_on(tmp_path, number):
    code, output, errors = signal_after_step(tmp_path / "run", 3, number)

    result = json.loads(output)
    assert code == 128 + number
    assert result["stopped_by"] == number.name
    assert 3 <= result["steps"] < STEPS
    assert "--resume auto" in errors
    resumed = run(tmp_path / "run", "--resume", "auto")
    assert resumed["first_step"] == result["steps"] + 1
