"""Kills a training run again and again, and checks what each restart finds. Resumable.

    python tests/fault/torture.py DIRECTORY [--kills 200] [--config FILE] [key=value ...]

Two storage paths in DIRECTORY, a commit every five steps, `kill -9` at random instants, at least
half of them inside a commit. Once the run is made without a kill: its losses, and the digest of the
state at each commit, are what every killed run has to show. After each kill the store must open at
the last commit that was reported, or at the one in progress, with the reference's digest of that
step; the losses of the steps after the restart must be the reference's. DIRECTORY keeps the count
of kills: the same command goes on where it was interrupted. Exits 1 at the first difference.
"""

import argparse
import dataclasses
import json
import queue
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from offload.runs.inspection import inspect_store, verify_store

WORKER = Path(__file__).with_name("torture_worker.py")
ROOT = Path(__file__).parents[2]
WAIT_S = 1800


@dataclasses.dataclass
class Campaign:
    """What is done so far; kept in a file after each kill."""

    kills: int = 0
    inside_a_commit: int = 0
    runs: int = 0
    store_bytes: int = 0
    digests: dict = dataclasses.field(default_factory=dict)
    losses: dict = dataclasses.field(default_factory=dict)

    def save(self, path):
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        temporary.replace(path)


class Difference(Exception):  # noqa: N818 - the word of the report
    """A restart found something else than the reference."""


class Torture:
    def __init__(self, directory, *, config, overrides=(), seed=0):
        self.directory = directory
        self.config = config
        self.draw = random.Random(seed)
        self.file = directory / "campaign.json"
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / name for name in ("path-a", "path-b")]
        for path in paths:
            path.mkdir(exist_ok=True)
        listed = ",".join(f'"{path}"' for path in paths)
        self.overrides = [
            f"tiers.storage.paths=[{listed}]",
            "tiers.storage.commit_every=5",
            *overrides,
        ]
        self.campaign = (
            Campaign(**json.loads(self.file.read_text())) if self.file.exists() else Campaign()
        )
        self.commit_s = 0.05
        self.step_s = 1.0

    def run(self, num_kills):
        """Goes on until there were `num_kills` kills."""
        if not self.campaign.digests:
            self._make_reference()
        while self.campaign.kills < num_kills:
            self._kill_once()
            self.campaign.save(self.file)

    def _make_reference(self):
        run_dir = self.directory / "reference"
        self._delete(run_dir)
        losses, digests = {}, {}
        for event in events_of(self._start(run_dir, "digests")):
            if event["event"] == "step":
                losses[str(event["step"])] = event["loss"]
            elif event["event"] == "digest":
                digests[str(event["step"])] = event["digest"]
        if not digests:
            raise Difference("the reference did not reach a commit")
        self.campaign.losses, self.campaign.digests = losses, digests
        self.campaign.store_bytes = sum(inspect_store(run_dir).bytes_by_path.values())
        self._delete(run_dir)
        self.campaign.save(self.file)

    def _kill_once(self):
        run_dir = self.directory / f"run-{self.campaign.runs}"
        is_inside = self.campaign.inside_a_commit * 2 <= self.campaign.kills
        first = self._committed(run_dir) if run_dir.exists() else 0
        mode = "plain"
        if is_inside:
            mode = f"kill:{self.draw.randrange(2)}:{self.draw.uniform(0, self.commit_s):.6f}"
        watch = Watch(self, last=first)
        watch.follow(self._start(run_dir, mode), kills=not is_inside)
        if watch.is_done:
            self._require(watch.digest, self._last_digest(), "the run's end")
            self._delete(run_dir)
            self.campaign.runs += 1
            return
        self.campaign.kills += 1
        self.campaign.inside_a_commit += watch.is_in_commit
        self._check(run_dir, watch.last)
        sys.stderr.write(
            f"kill {self.campaign.kills}: {'inside' if watch.is_in_commit else 'outside'} a "
            f"commit, step {watch.last}; {self.campaign.inside_a_commit} inside so far\n"
        )

    def _check(self, run_dir, last):
        found = self._committed(run_dir)
        if found == 0 and last == 0:
            return
        following = [int(step) for step in self.campaign.digests if int(step) > last]
        allowed = {last, min(following, default=last)}
        if found not in allowed:
            raise Difference(f"expected the commit of a step in {allowed}, found {found}")
        inspection = inspect_store(run_dir)
        self._require(inspection.digest, self.campaign.digests[str(found)], f"step {found}")
        if self.campaign.kills % 10 == 0 and not verify_store(run_dir).ok:
            raise Difference("a block of the commit is bad")

    def _committed(self, run_dir):
        try:
            return inspect_store(run_dir).step or 0
        except Exception as error:
            if "no complete commit" in str(error) or "expected a directory" in str(error):
                return 0
            raise

    def require_loss(self, event):
        self._require(event["loss"], self.campaign.losses[str(event["step"])], f"loss {event}")

    def _require(self, found, expected, what):
        if found != expected:
            raise Difference(f"{what}: expected {expected}, found {found}")

    def _last_digest(self):
        return self.campaign.digests[max(self.campaign.digests, key=int)]

    def _start(self, run_dir, mode):
        command = [sys.executable, str(WORKER), str(self.config), str(run_dir), mode]
        with (self.directory / "worker.log").open("a") as log:
            return subprocess.Popen(
                [*command, *self.overrides], stdout=subprocess.PIPE, stderr=log, text=True
            )

    def _delete(self, run_dir):
        shutil.rmtree(run_dir, ignore_errors=True)
        for path in self.directory.glob(f"path-*/offload-{run_dir.name}-*"):
            shutil.rmtree(path, ignore_errors=True)


class Watch:
    """Follows a run until it ends or is killed."""

    def __init__(self, torture, *, last):
        self.last = last  # the last commit that was reported
        self.is_in_commit = False
        self.is_done = False
        self.digest = None
        self._torture = torture
        self._deadline_s = None
        self._last_step_s = None

    def follow(self, process, *, kills):
        events = queue.Queue()

        def read():
            for event in events_of(process):
                events.put(event)
            events.put(None)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            while (event := self._next(events)) is not None:
                self._take(event, kills=kills)
        finally:
            process.kill()
            process.wait()
            reader.join()
        while not events.empty():  # what was on its way when the kill came
            event = events.get()
            if event is not None:
                self._take(event, kills=False)

    def _next(self, events):
        """Returns the next event; None at the run's end, or when its time to die has come."""
        left_s = WAIT_S if self._deadline_s is None else self._deadline_s - time.monotonic()
        try:
            return events.get(timeout=max(left_s, 0))
        except queue.Empty:
            return None

    def _take(self, event, *, kills):
        kind, now_s = event["event"], time.monotonic()
        if kind == "step":
            self._torture.require_loss(event)
            if self._last_step_s is not None:
                self._torture.step_s = now_s - self._last_step_s
            self._last_step_s = now_s
            if kills and self._deadline_s is None:
                # Some time in the next steps, a commit among them.
                self._deadline_s = now_s + self._torture.draw.uniform(0, 6 * self._torture.step_s)
        elif kind == "commit-begin":
            self.is_in_commit = True
        elif kind == "commit-end":
            self.is_in_commit, self.last = False, event["step"]
            self._torture.commit_s = event["seconds"]
        elif kind == "done":
            self.is_done, self.digest = True, event["digest"]


def events_of(process):
    """Yields what a worker says until it has ended."""
    with process.stdout:
        for line in process.stdout:
            if line.startswith("{") and line.endswith("}\n"):
                yield json.loads(line)
    process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "quickstart.toml")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    torture = Torture(
        arguments.directory.absolute(), config=arguments.config, overrides=arguments.overrides,
        seed=time.time_ns(),
    )  # fmt: skip
    try:
        torture.run(arguments.kills)
    except Difference as error:
        sys.stderr.write(f"DIFFERENCE after {torture.campaign.kills} kills: {error}\n")
        return 1
    campaign = torture.campaign
    print(
        json.dumps(
            {
                "kills": campaign.kills,
                "inside_a_commit": campaign.inside_a_commit,
                "runs_to_the_end": campaign.runs,
                "store_bytes": campaign.store_bytes,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
