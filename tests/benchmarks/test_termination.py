"""A benchmark that is killed by SIGTERM takes down what it set up."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from termination import exits_on_sigterm
with exits_on_sigterm():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        os.kill(os.getpid(), 15)
        print("cleaned up", flush=True)
"""


def test_sigterm_runs_what_cleans_up_to_its_end_though_it_comes_twice():
    command = [sys.executable, "-c", SCRIPT, str(BENCHMARKS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"

        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()

    assert rest == "cleaned up\n"
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_comparison_of_runs_ends_with_the_run_that_is_ended(tmp_path):
    script = [str(BENCHMARKS / "overlap_forward.py"), "--layers", "2", "--width", "128"]
    command = [sys.executable, *script, "--steps", "10000", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.iterdir()):
            time.sleep(0.01)

        process.send_signal(signal.SIGTERM)
        try:
            printed, _ = process.communicate(timeout=120)
        finally:
            process.kill()

    assert process.returncode == 128 + signal.SIGTERM
    assert printed == ""
    assert list(tmp_path.iterdir()) == []
