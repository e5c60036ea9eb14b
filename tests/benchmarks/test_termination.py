"""A benchmark that is killed by SIGTERM takes down what it set up."""

import signal
import subprocess
import sys
from pathlib import Path

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
