"""SIGKILL of a process that writes and commits in a loop, then a restart from what it left."""

import mmap
import random
import subprocess
import sys
import time

import pytest

from offload.storage.engine import Engine
from offload.storage.store import BlockStore

BLOCK = 64 << 10
NUM_RECORDS = 12
WORKER = """
import mmap, pathlib, random, sys
from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.summary import has_commit

BLOCK, NUM_RECORDS = int(sys.argv[2]), int(sys.argv[3])
root = pathlib.Path(sys.argv[1])
memory = [memoryview(mmap.mmap(-1, 4 * BLOCK)) for _ in range(NUM_RECORDS)]
with Engine() as engine:
    store = BlockStore(root, engine=engine, block_bytes=BLOCK)
    store.open() if has_commit(root) else store.create()
    step = store.head["step"] if store.head else 0
    while True:
        step += 1
        tickets = []
        for i in range(NUM_RECORDS):
            content = random.Random(f"{i} {step}").randbytes(3 * BLOCK + i)
            memory[i][: len(content)] = content
            tickets.append(store.write(str(i), memory[i], num_bytes=len(content)))
        for ticket in tickets:
            ticket.wait()
        store.commit({"step": step})
        print(step, flush=True)
"""


@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_its_last_commit_whole(tmp_path, num_kills):
    root = tmp_path / "store"
    draw = random.Random(num_kills)
    committed = 0

    for _ in range(num_kills):
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(root), str(BLOCK), str(NUM_RECORDS)],
            stdout=subprocess.PIPE,
        )
        for _ in range(draw.randrange(1, 4)):
            committed = int(process.stdout.readline())
        time.sleep(draw.uniform(0, 0.03))  # somewhere in the next steps
        process.kill()
        rest, _ = process.communicate()
        committed = int(rest.split()[-1]) if rest.split() else committed

        with Engine() as engine:
            store = BlockStore(root, engine=engine, block_bytes=BLOCK)
            store.open(read_only=True)
            step = store.head["step"]
            # The kill may have come between the commit and the word about it.
            assert step in (committed, committed + 1)
            memory = memoryview(mmap.mmap(-1, 4 * BLOCK))
            for i in range(NUM_RECORDS):
                store.read(str(i), memory).wait()
                expected = random.Random(f"{i} {step}").randbytes(3 * BLOCK + i)
                assert bytes(memory[: len(expected)]) == expected
            store.close()
