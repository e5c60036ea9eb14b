"""Kills a training run again and again, and checks what each restart finds. Resumable.

    python tests/fault/torture.py DIRECTORY [--kills 200] [--config FILE] [key=value ...]

Two storage paths in DIRECTORY, a commit every five steps, `kill -9` at random instants, at least
half of them inside a commit: while it writes, syncs or publishes. Once the run is made without a
kill: its losses, and the digest of the state at each commit, are what every killed run has to show.
After each kill the store must open at the last commit that was reported, or at the one in progress,
with the reference's digest of that step; the losses of the steps after the restart must be the
reference's. DIRECTORY keeps the count of kills: the same command goes on where it was interrupted.
Exits 1 at the first difference, and deletes the last run's store at the end.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from offload.errors import OffloadError
from offload.runs.inspection import inspect_store, resolve_store, verify_store
from offload.storage.summary import peek

WORKER = Path(__file__).with_name("torture_worker.py")
CONFIG = Path(__file__).with_name("torture.toml")
WAIT_S = 1800
NOTHING_THERE = (
    "no complete commit",
    "no store at",
    "expected a directory",
    "expected a run directory",
)
"""What errors say of a run that was killed before its first commit."""


@dataclasses.dataclass
class Campaign:
    """What is done so far; kept in a file after each kill."""

    kills: int = 0
    inside_a_commit: int = 0
    after_publishing_began: int = 0
    found_the_commit_in_progress: int = 0
    runs: int = 0
    restarts: int = 0
    steps_compared: int = 0
    store_bytes: int = 0
    seconds: float = 0.0
    part_s: dict = dataclasses.field(default_factory=dict)
    """How long each part of a commit took last, by part and number of the commit in its run."""
    digests: dict = dataclasses.field(default_factory=dict)
    losses: dict = dataclasses.field(default_factory=dict)

    def save(self, path):
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        temporary.replace(path)

    def figures(self):
        """Returns what is reported: all but the reference."""
        fields = dataclasses.asdict(self)
        del fields["digests"], fields["losses"], fields["part_s"]
        return fields


class Difference(Exception):  # noqa: N818 - the word of the report
    """A restart found something else than the reference."""


class Torture:
    """A campaign of kills in one directory; a context manager, as it has a worker process."""

    def __init__(self, directory, *, config=CONFIG, overrides=(), seed=0):
        self.directory = directory
        self.config = config
        self.draw = random.Random(seed)
        self.file = directory / "campaign.json"
        listed = ",".join(f'"{directory / name}"' for name in ("path-a", "path-b"))
        self.overrides = [
            f"tiers.storage.paths=[{listed}]",
            "tiers.storage.commit_every=5",
            *overrides,
        ]
        self.campaign = Campaign()
        self.step_s = 1.0  # of the last step
        self._worker = None

    def __enter__(self):
        for name in ("path-a", "path-b"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self.campaign = Campaign(**json.loads(self.file.read_text()))
        self._worker = Worker(self.directory / "worker.log")
        return self

    def __exit__(self, *exception):
        self._worker.close()

    def run(self, num_kills):
        """Goes on until there were `num_kills` kills, and half of all were inside a commit."""
        if not self.campaign.digests:
            self._make_reference()
        while (
            self.campaign.kills < num_kills
            or self.campaign.inside_a_commit * 2 < self.campaign.kills
        ):
            started_s = time.monotonic()
            self._kill_once()
            self.campaign.seconds += time.monotonic() - started_s
            self.campaign.save(self.file)

    def delete_runs(self):
        for path in self.directory.glob("run-*"):
            self._delete(path)

    def _make_reference(self):
        run_dir = self.directory / "reference"
        self._delete(run_dir)
        losses, digests = {}, {}
        commits = CommitTimes(self.campaign.part_s)
        self._worker.start(self._job(run_dir, "digests"))
        while (event := self._worker.next(WAIT_S)) is not None:
            if event["event"] == "step":
                losses[str(event["step"])] = event["loss"]
            elif event["event"] == "digest":
                digests[str(event["step"])] = event["digest"]
            commits.take(event)
        if not digests:
            raise Difference("the reference did not reach a commit: see `worker.log`")
        self.campaign.losses, self.campaign.digests = losses, digests
        self.campaign.store_bytes = sum(inspect_store(run_dir).bytes_by_path.values())
        self._delete(run_dir)
        self.campaign.save(self.file)

    def _kill_once(self):
        run_dir = self.directory / f"run-{self.campaign.runs}"
        is_inside = self.campaign.inside_a_commit * 2 <= self.campaign.kills
        first = self._committed(run_dir) if run_dir.exists() else 0
        self._worker.start(self._job(run_dir, self._mode() if is_inside else "plain"))
        watch = Watch(self, last=first)
        watch.follow(self._worker, kills=not is_inside)
        self.campaign.restarts += first > 0
        self.campaign.steps_compared += watch.num_steps
        if watch.is_done:
            self._require(watch.digest, self._last_digest(), "the run's end")
            self._delete(run_dir)
            self.campaign.runs += 1
            return
        if watch.code != -signal.SIGKILL:
            raise Difference(f"the run ended with {watch.code}: see `worker.log`")
        self.campaign.kills += 1
        self.campaign.inside_a_commit += watch.is_in_commit
        self.campaign.after_publishing_began += watch.is_publishing
        found = self._check(run_dir, watch.last)
        self.campaign.found_the_commit_in_progress += found > watch.last
        sys.stderr.write(
            f"kill {self.campaign.kills}: {'inside' if watch.is_in_commit else 'outside'} a "
            f"commit, reported step {watch.last}, found {found}; "
            f"{self.campaign.inside_a_commit} inside so far\n"
        )

    def _mode(self):
        """Returns when to die in a commit: anywhere in it, or in its shorter, last part."""
        part = self.draw.choice(("commit", "publish"))
        number = self.draw.choice((0, 0, 1, 2))
        # A run's first commit writes more than those after it, so each number has its own time.
        length_s = self.campaign.part_s[f"{part} {number}"]
        return f"kill:{part}:{number}:{self.draw.uniform(0, length_s):.6f}"

    def _check(self, run_dir, last):
        found = self._committed(run_dir)
        if found == 0 and last == 0:
            return found
        following = [int(step) for step in self.campaign.digests if int(step) > last]
        allowed = {last, min(following, default=last)}
        if found not in allowed:
            raise Difference(f"expected the commit of a step in {allowed}, found {found}")
        inspection = inspect_store(run_dir)
        self._require(inspection.digest, self.campaign.digests[str(found)], f"step {found}")
        if self.campaign.kills % 10 == 0 and not verify_store(run_dir).ok:
            raise Difference("a block of the commit is bad")
        return found

    def _committed(self, run_dir):
        try:
            return peek(resolve_store(run_dir)).head["metadata"]["step"]
        except OffloadError as error:
            if any(text in str(error) for text in NOTHING_THERE):
                return 0
            raise

    def require_loss(self, event):
        self._require(event["loss"], self.campaign.losses[str(event["step"])], f"loss {event}")

    def _require(self, found, expected, what):
        if found != expected:
            raise Difference(f"{what}: expected {expected}, found {found}")

    def _last_digest(self):
        return self.campaign.digests[max(self.campaign.digests, key=int)]

    def _job(self, run_dir, mode):
        return {
            "config": str(self.config),
            "run_dir": str(run_dir),
            "mode": mode,
            "overrides": self.overrides,
        }

    def _delete(self, run_dir):
        shutil.rmtree(run_dir, ignore_errors=True)
        for path in self.directory.glob(f"path-*/offload-{run_dir.name}-*"):
            shutil.rmtree(path, ignore_errors=True)


class Worker:
    """The process that forks a training process for each request."""

    def __init__(self, log):
        with log.open("a") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        self._events = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._training = None  # its process, while it runs
        self.code = None  # of the training process that ended last

    def start(self, job):
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        event = self._events.get(timeout=WAIT_S)
        assert event is not None, "the worker has ended: see `worker.log`"
        self._training = event["pid"]

    def next(self, timeout_s):
        """Returns the next event; None once the training process has ended.

        Raises:
            queue.Empty: Nothing happened in time.
        """
        event = self._events.get(timeout=max(timeout_s, 0))
        if event is None or event["event"] == "ended":
            self.code = event and event["code"]
            self._training = None
            return None
        return event

    def kill(self):
        # It is its parent's child until `ended` was said, so the number is no other process's.
        os.kill(self._training, signal.SIGKILL)

    def close(self):
        if self._training is not None:
            with contextlib.suppress(ProcessLookupError):
                self.kill()
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def _read(self):
        for line in self._process.stdout:
            event = json.loads(line)
            self._events.put(event)
        self._events.put(None)


class CommitTimes:
    """Keeps how long the parts of a run's commits take, in `part_s`."""

    def __init__(self, part_s):
        self._part_s = part_s
        self._number = 0
        self._publish_s = 0.0

    def take(self, event):
        if event["event"] == "publish":
            self._publish_s = time.monotonic()
        elif event["event"] == "commit-end":
            self._part_s[f"commit {self._number}"] = event["seconds"]
            self._part_s[f"publish {self._number}"] = time.monotonic() - self._publish_s
            self._number += 1


class Watch:
    """Follows a run until it ends or is killed."""

    def __init__(self, torture, *, last):
        self.last = last  # the last commit that was reported
        self.is_in_commit = False
        self.is_publishing = False
        self.is_done = False
        self.digest = None
        self.code = None
        self.num_steps = 0
        self._torture = torture
        self._commits = CommitTimes(torture.campaign.part_s)
        self._deadline_s = None
        self._last_step_s = None

    def follow(self, worker, *, kills):
        has_killed = False
        while True:
            left_s = WAIT_S
            if self._deadline_s is not None and not has_killed:
                left_s = self._deadline_s - time.monotonic()
            try:
                event = worker.next(left_s)
            except queue.Empty:
                worker.kill()
                has_killed = True
                continue
            if event is None:
                self.code = worker.code
                return
            self._take(event, kills=kills)

    def _take(self, event, *, kills):
        kind, now_s = event["event"], time.monotonic()
        self._commits.take(event)
        if kind == "step":
            self.num_steps += 1
            self._torture.require_loss(event)
            if self._last_step_s is not None:
                self._torture.step_s = now_s - self._last_step_s
            self._last_step_s = now_s
            if kills and self._deadline_s is None:
                # Some time in the next steps, a commit or two among them.
                self._deadline_s = now_s + self._torture.draw.uniform(0, 10 * self._torture.step_s)
        elif kind == "commit-begin":
            self.is_in_commit = True
        elif kind == "publish":
            self.is_publishing = True
        elif kind == "commit-end":
            self.is_in_commit = self.is_publishing = False
            self.last = event["step"]
        elif kind == "done":
            self.is_done, self.digest = True, event["digest"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    with Torture(
        arguments.directory.absolute(),
        config=arguments.config,
        overrides=arguments.overrides,
        seed=time.time_ns(),
    ) as torture:
        try:
            torture.run(arguments.kills)
        except Difference as error:
            sys.stderr.write(f"DIFFERENCE after {torture.campaign.kills} kills: {error}\n")
            return 1
        torture.delete_runs()
    print(json.dumps(torture.campaign.figures()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
