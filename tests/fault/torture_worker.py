"""Trains as a configuration says, and tells its parent when a commit begins and ends.

    python torture_worker.py CONFIG RUN_DIR MODE [key=value ...]

MODE is `plain`; `digests` prints the digest of the state after each commit; `kill:N:S` kills this
process S seconds after its commit number N, from 0, has begun.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from offload.config import load_config
from offload.runs.train import run_training
from offload.session import Session
from offload.storage.commits import Commits


def say(**fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def kill_after(delay_s):
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    config, run_dir, mode, *overrides = sys.argv[1:]
    publish, commit = Commits.commit, Session.commit
    skip, delay_s = (float(part) for part in mode.split(":")[1:]) if ":" in mode else (-1, 0)

    def publish_and_say(self, head):
        nonlocal skip
        say(event="commit-begin", step=head["step"])
        if skip == 0:
            threading.Thread(target=kill_after, args=(delay_s,), daemon=True).start()
        skip -= 1
        report = publish(self, head)
        say(event="commit-end", step=head["step"], seconds=report.duration_s)
        return report

    def commit_and_say(self, metadata=None):
        commit(self, metadata)
        if mode == "digests":
            say(event="digest", step=metadata["step"], digest=self.state_digest())

    Commits.commit, Session.commit = publish_and_say, commit_and_say
    result = run_training(
        load_config(config, overrides),
        run_dir=Path(run_dir),
        resume="auto",
        progress=lambda metrics: say(event="step", step=metrics.step, loss=metrics.loss),
    )
    say(event="done", digest=result.state_digest)


main()
