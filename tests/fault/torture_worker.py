"""Trains on request, in one forked process after the other, and tells its parent what happens.

Reads one JSON object per line: `config`, `run_dir`, `overrides`, and `mode`, which is `plain`,
`digests` (the digest of the state is told after each commit), or `kill:PART:N:S`: the process kills
itself S seconds after commit number N, from 0, of this process has begun (PART `commit`), or after
it has begun to sync and publish (PART `publish`). Forking spares each run the imports.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from offload.config import load_config
from offload.runs import train
from offload.runs.loop import TrainingLoop
from offload.session import Session
from offload.storage.commits import Commits


def say(**fields):
    # One write of less than PIPE_BUF bytes: a killed process leaves no half line.
    os.write(1, (json.dumps(fields) + "\n").encode())


def serve():
    """Forks a process for each request and says when it has ended."""
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            work(**job)
        say(event="started", pid=pid)
        _, status = os.waitpid(pid, 0)
        say(event="ended", code=os.waitstatus_to_exitcode(status))


def work(*, config, run_dir, mode, overrides):
    """Trains, and never returns."""
    code = 1
    try:
        run(config, Path(run_dir), mode, overrides)
        code = 0
    except BaseException:  # noqa: BLE001 - told, and the exit code says so
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(config, run_dir, mode, overrides):
    killer = Killer(mode)
    publish, commit = Commits.commit, Session.commit

    def publish_and_say(self, head):
        say(event="publish", step=head["step"])
        killer.reached("publish")
        return publish(self, head)

    def commit_and_say(self, metadata=None):
        say(event="commit-begin", step=metadata["step"])
        killer.reached("commit")
        started_s = time.perf_counter()
        commit(self, metadata)
        say(event="commit-end", step=metadata["step"], seconds=time.perf_counter() - started_s)
        if mode == "digests":
            say(event="digest", step=metadata["step"], digest=self.state_digest())

    Commits.commit, Session.commit = publish_and_say, commit_and_say
    # Bounds and validation are of no interest here and take seconds.
    train.probe_run = lambda *arguments: None
    TrainingLoop.validate = lambda loop: 0.0
    result = train.run_training(
        load_config(config, overrides),
        run_dir=run_dir,
        resume="auto",
        progress=lambda metrics: say(event="step", step=metrics.step, loss=metrics.loss),
    )
    say(event="done", digest=result.state_digest)


class Killer:
    """Kills this process some time after a part of a commit has begun."""

    def __init__(self, mode):
        self._part, self._left, self._delay_s = None, 0, 0.0
        if mode.startswith("kill:"):
            _, self._part, number, delay = mode.split(":")
            self._left, self._delay_s = int(number), float(delay)

    def reached(self, part):
        if part != self._part:
            return
        if self._left == 0:
            threading.Thread(target=self._kill, daemon=True).start()
        self._left -= 1

    def _kill(self):
        time.sleep(self._delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


serve()
