"""What a safe store costs: checksums, commits, and bytes that versions would add.

    python benchmarks/store_costs.py [--layers 12] [--pairs 8] [--commits 6] DIRECTORY ...

Trains the quickstart's model, or a smaller one, on random tokens with its state on the given paths,
prints one JSON object and deletes what it has written. Steps with and without a feature take turns
in one process, so that a machine which gets slower meanwhile does not count.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from array import array
from pathlib import Path

import torch

import offload
from offload.runs.gpt import GPT, GPTShape
from offload.storage import record_transfers
from offload.storage.extents import block_checksums
from offload.storage.record_transfers import RecordTransfers
from offload.streaming import wrapped

MIB = 1 << 20


class Run:
    """A model in training whose steps are timed."""

    def __init__(self, arguments, *, order="sequential", durability="commit", cached_bytes=0):
        self.shape = GPTShape(
            layers=arguments.layers, width=arguments.width, heads=12, context=256, vocabulary=256
        )
        self._paths = [
            path.absolute() / f"offload-store-costs-{os.getpid()}" for path in arguments.paths
        ]
        blocks = 12 * arguments.layers * arguments.width**2  # parameters, but for some
        budget = 2 * blocks + 240 * MIB + cached_bytes
        config = {"tiers": {"host": {"memory": budget}, "storage": {"durability": durability}}}
        self.session = offload.Session(config, store=self._paths, policy={"order": order})
        self._number = 0

    def __enter__(self):
        self.session.open()
        torch.manual_seed(0)
        with self.session.building():
            model = GPT(self.shape)
        self.model = self.session.wrap(model)
        self.optimizer = self.session.AdamW(self.model.parameters(), lr=1e-4)
        return self

    def __exit__(self, *_):
        self.session.close()
        for path in self._paths:
            shutil.rmtree(path, ignore_errors=True)

    def step(self):
        """Makes one step and returns its seconds."""
        generator = torch.Generator().manual_seed(self._number)
        tokens = torch.randint(0, 256, (2, self.shape.context + 1), generator=generator)
        self._number += 1
        started_s = time.perf_counter()
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started_s

    def commit(self):
        """Commits and returns the seconds."""
        started_s = time.perf_counter()
        self.session.commit()
        return time.perf_counter() - started_s


@contextlib.contextmanager
def hashing(is_on, spent):
    """Blocks are hashed as always, or not at all; what was not hashed is not compared."""
    before = record_transfers.block_checksums, RecordTransfers._difference

    def timed(data, block_bytes):
        started_s = time.perf_counter()
        num_blocks = -(-len(data) // block_bytes)
        found = block_checksums(data, block_bytes) if is_on else array("Q", bytes(8 * num_blocks))
        spent[0] += time.perf_counter() - started_s
        spent[1] += len(data)
        return found

    def compared(self, _record, version, move, data):
        found = timed(data[move.start : move.start + move.bytes_in_use], self._block_bytes)
        expected = version.checksums[move.first_block : move.first_block + len(found)]
        record_transfers.first_difference(found, expected)

    record_transfers.block_checksums, RecordTransfers._difference = timed, compared
    try:
        yield
    finally:
        record_transfers.block_checksums, RecordTransfers._difference = before


def checksums(arguments):
    """Steps with and without checksums in turn."""
    seconds, spent = {True: [], False: []}, {True: [0.0, 0], False: [0.0, 0]}
    with hashing(False, [0.0, 0]), Run(arguments) as run:
        for _ in range(3):
            run.step()
        for pair in range(arguments.pairs):
            for is_on in (True, False) if pair % 2 else (False, True):
                with hashing(is_on, spent[is_on]):
                    seconds[is_on].append(run.step())
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    return {
        "step_s": statistics.median(seconds[True]),
        "step_without_s": statistics.median(seconds[False]),
        "of_the_step": statistics.median(ratios) - 1,
        "of_the_step_by_pair": [round(ratio - 1, 4) for ratio in ratios],
        "hashing_s_per_step": spent[True][0] / arguments.pairs,
        "hashed_bytes_per_step": spent[True][1] // arguments.pairs,
        "hashed_bytes_per_s": spent[True][1] / spent[True][0],
    }


@contextlib.contextmanager
def timing_write_back(written_s):
    """Appends to `written_s` the seconds in which each commit writes records."""
    write_dirty = wrapped.write_dirty

    def timed(*arguments, **options):
        started_s = time.perf_counter()
        write_dirty(*arguments, **options)
        written_s.append(time.perf_counter() - started_s)

    wrapped.write_dirty = timed
    try:
        yield
    finally:
        wrapped.write_dirty = write_dirty


def commits(arguments, *, order, cached_bytes):
    """Three steps, a commit, and so on: what the commit takes beside the bytes it has to write."""
    rest_s, written_s, num_bytes, steps, after = [], [], [], [], []
    with Run(arguments, order=order, cached_bytes=cached_bytes) as run:
        for _ in range(4):
            run.step()
        run.commit()
        for _ in range(3):
            run.step()
        with timing_write_back(written_s):
            for _ in range(arguments.commits):
                before = run.session.stats().commit_bytes
                rest_s.append(run.commit() - written_s[-1])
                num_bytes.append(run.session.stats().commit_bytes - before)
                after.append(run.step())
                steps.extend(run.step() for _ in range(2))
    step_s = statistics.median(steps)
    return {
        "order": order,
        "step_s": step_s,
        "commit_bytes": round(statistics.median(num_bytes)),
        "writing_records_s": statistics.median(written_s),
        "rest_s": statistics.median(rest_s),
        "rest_of_a_step": statistics.median(rest_s) / step_s,
        "rest_of_a_step_each": [round(each / step_s, 4) for each in rest_s],
        "step_after_a_commit": statistics.median(after) / step_s,
    }


def traffic(arguments):
    """Bytes that the kernel counts in steps of a store with commits and of one without."""
    found = {}
    for durability in ("none", "commit"):
        with Run(arguments, durability=durability) as run:
            for _ in range(3):
                run.step()
            if durability == "commit":
                run.commit()
                run.step()
            kernel, engine, steps = [], [], 4
            for number in range(steps):
                before, counted = kernel_bytes(), run.session.stats()
                run.step()
                now, after = kernel_bytes(), run.session.stats()
                kernel.append([now[0] - before[0], now[1] - before[1]])
                engine.append(
                    [after.read_bytes - counted.read_bytes, after.write_bytes - counted.write_bytes]
                )
                if durability == "commit" and number == 1:
                    run.commit()  # what it writes is not the steps'
        found[durability] = {
            "kernel_read_bytes_per_step": statistics.median(each[0] for each in kernel),
            "kernel_write_bytes_per_step": statistics.median(each[1] for each in kernel),
            "read_bytes_per_step": statistics.median(each[0] for each in engine),
            "write_bytes_per_step": statistics.median(each[1] for each in engine),
        }
    return found | {
        f"{kind}_ratio": found["commit"][f"kernel_{kind}_bytes_per_step"]
        / max(found["none"][f"kernel_{kind}_bytes_per_step"], 1)
        for kind in ("read", "write")
    }


def kernel_bytes():
    lines = Path("/proc/self/io").read_text().splitlines()
    values = dict(line.split(": ") for line in lines)
    return int(values["read_bytes"]), int(values["write_bytes"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--commits", type=int, default=6)
    parser.add_argument("--only", choices=("checksums", "commits", "traffic"))
    arguments = parser.parse_args()
    result = {"parameters": 12 * arguments.layers * arguments.width**2, "torch": torch.__version__}
    if arguments.only in (None, "checksums"):
        result["checksums"] = checksums(arguments)
    if arguments.only in (None, "commits"):
        cached = 6 * arguments.layers * arguments.width**2 * 10  # about half of the state
        result["commits"] = [
            commits(arguments, order="sequential", cached_bytes=0),
            commits(arguments, order="resident", cached_bytes=cached),
        ]
    if arguments.only in (None, "traffic"):
        result["traffic"] = traffic(arguments)
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
