"""The block store against two dicts: what is current, and what the last commit published."""

import mmap
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.verify import verify

BLOCK = 4096
NAMES = st.sampled_from(["a", "b", "parameter/0", "state/é"])
# Around one block, and runs of several: the edges of padding and of extents.
SIZES = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 17])


def memory_of(num_bytes, fill=0):
    padded = -(-num_bytes // BLOCK) * BLOCK
    if not padded:
        return memoryview(bytearray())
    memory = memoryview(mmap.mmap(-1, padded))
    memory[:] = bytes([255 - fill]) * padded  # padding that differs from the content
    memory[:num_bytes] = bytes((fill + i) % 251 for i in range(num_bytes))
    return memory


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.directory = Path(tempfile.mkdtemp())
        self.engine = Engine()
        self.engine.open()
        self.store = BlockStore(self.directory / "store", engine=self.engine, block_bytes=BLOCK)
        self.store.create()
        self.current = {}
        self.committed = None
        self.committed_places = []  # offset in the data file, and the bytes that belong there
        self.num_commits = 0
        self.writes = []  # ticket, record, content, in order of submission
        self.reads = []  # ticket, memory, expected

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            self.engine.close()
            shutil.rmtree(self.directory)

    @rule(record=NAMES, num_bytes=SIZES, fill=st.integers(0, 250))
    def write(self, record, num_bytes, fill):
        memory = memory_of(num_bytes, fill)

        ticket = self.store.write(record, memory, num_bytes=num_bytes)

        self.writes.append((ticket, record, bytes(memory[:num_bytes])))

    @precondition(lambda self: self.writes)
    @rule()
    def finish_writes(self):
        for ticket, record, content in self.writes:
            ticket.wait()
            assert ticket.done()
            self.current[record] = content
        self.writes = []

    @precondition(lambda self: self.writes)
    @rule()
    def finish_writes_in_reverse_order(self):
        """The one that was submitted last is current, whichever was waited for last."""
        for ticket, _, _ in reversed(self.writes):
            ticket.wait()
        self.current.update({record: content for _, record, content in self.writes})
        self.writes = []

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def start_read(self, data):
        record = data.draw(st.sampled_from(sorted(self.current)))
        expected = self.current[record]
        first = data.draw(st.integers(0, len(expected) // BLOCK))
        num_blocks = data.draw(st.none() | st.integers(0, len(expected) // BLOCK - first))
        num_bytes = None if num_blocks is None else num_blocks * BLOCK
        stop = len(expected) if num_bytes is None else first * BLOCK + num_bytes
        memory = memory_of(stop - first * BLOCK)

        ticket = self.store.read(record, memory, offset=first * BLOCK, num_bytes=num_bytes)

        self.reads.append((ticket, memory, expected[first * BLOCK : stop]))

    @rule()
    def finish_reads(self):
        for ticket, memory, expected in self.reads:
            ticket.wait()
            assert bytes(memory[: len(expected)]) == expected
        self.reads = []

    @precondition(lambda self: self.current and not self.writes)
    @rule(data=st.data())
    def discard(self, data):
        record = data.draw(st.sampled_from(sorted(self.current)))

        self.store.discard(record)

        del self.current[record]

    @rule()
    def commit(self):
        self.num_commits += 1

        report = self.store.commit({"commit": self.num_commits})

        assert report.sequence == self.num_commits
        self.committed = dict(self.current)
        self.committed_places = [
            (self.store.block_place(record, at // BLOCK).offset, content[at : at + BLOCK])
            for record, content in self.committed.items()
            for at in range(0, len(content), BLOCK)
        ]

    @precondition(lambda self: self.committed is not None)
    @rule(read_only_first=st.booleans())
    def reopen(self, read_only_first):
        self.finish_reads()
        self.store.close()
        if read_only_first:
            self.store.open(read_only=True)
            assert verify(self.store).bad == []
            self.store.close()
        self.store.open()
        self.writes = []
        self.current = dict(self.committed)
        assert self.store.head["commit"] == self.num_commits
        self.check_everything()

    @rule()
    def check_everything(self):
        for record, expected in self.current.items():
            memory = memory_of(len(expected))
            self.store.read(record, memory).wait()
            assert bytes(memory[: len(expected)]) == expected

    @invariant()
    def facts_agree(self):
        if hasattr(self, "store"):
            assert self.store.records() == sorted(self.current)
            assert all(
                self.store.num_bytes(record) == len(content)
                for record, content in self.current.items()
            )

    @invariant()
    def committed_blocks_are_untouched(self):
        """What a restart would find, whatever was written since."""
        if hasattr(self, "store") and self.committed is not None:
            data = self.store.data_path.read_bytes()
            for offset, content in self.committed_places:
                assert data[offset : offset + len(content)] == content

    @invariant()
    def no_block_is_lost(self):
        """Nothing in flight: blocks taken are those of the current and committed versions."""
        if hasattr(self, "store") and not self.writes and not self.reads:
            needed = sum(-(-len(content) // BLOCK) for content in self.current.values())
            committed = (self.committed or {}).values()
            most = needed + sum(-(-len(content) // BLOCK) for content in committed)
            assert needed * BLOCK <= self.store.stats().live_bytes <= most * BLOCK


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestStore = StoreMachine.TestCase
