"""The block allocator against a set of free block numbers."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.errors import StoreError
from offload.storage.allocator import BlockAllocator
from offload.storage.extents import Extent


def blocks_of(extents):
    return [block for e in extents for block in range(e.first_block, e.end_block)]


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.sampled_from([0, 1, 2, 17, 64]))
    def start(self, num_blocks):
        self.allocator = BlockAllocator(path_index=3, num_blocks=num_blocks)
        self.num_blocks = num_blocks
        self.free = set(range(num_blocks))
        self.taken = []

    @rule(num_blocks=st.integers(0, 20))
    def take(self, num_blocks):
        extents = self.allocator.try_take(num_blocks)

        if num_blocks > len(self.free):
            assert extents is None
            return
        blocks = blocks_of(extents)
        assert len(blocks) == num_blocks
        assert all(e.num_blocks > 0 and e.path_index == 3 for e in extents)
        assert blocks == sorted(set(blocks))
        assert self.free.issuperset(blocks)
        self.free.difference_update(blocks)
        if extents:
            self.taken.append(extents)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data):
        extents = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))

        self.allocator.release(extents)

        self.free.update(blocks_of(extents))

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take_exactly(self, data):
        block = data.draw(st.sampled_from(sorted(self.free)))
        extent = Extent(path_index=3, first_block=block, num_blocks=1)

        self.allocator.take_exactly(extent)

        self.free.remove(block)
        self.taken.append((extent,))

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def releasing_a_free_block_is_refused(self, data):
        block = data.draw(st.sampled_from(sorted(self.free)))

        with pytest.raises(StoreError, match="to be taken"):
            self.allocator.release([Extent(path_index=3, first_block=block, num_blocks=1)])

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def taking_a_taken_block_is_refused(self, data):
        extent = data.draw(st.sampled_from(self.taken))[0]

        with pytest.raises(StoreError, match="to be free"):
            self.allocator.take_exactly(extent)

    @rule(added=st.integers(-5, 20))
    def grow(self, added):
        self.allocator.grow(self.num_blocks + added)

        self.free.update(range(self.num_blocks, self.num_blocks + added))
        self.num_blocks = max(self.num_blocks, self.num_blocks + added)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "free"):
            assert self.allocator.num_blocks == self.num_blocks
            assert self.allocator.num_free == len(self.free)
            assert self.allocator.num_taken == self.num_blocks - len(self.free)


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestAllocator = AllocatorMachine.TestCase


def test_one_run_is_preferred_to_lower_pieces():
    allocator = BlockAllocator(num_blocks=16)
    first, _, third = (allocator.try_take(n) for n in (2, 1, 13))
    allocator.release(first)
    allocator.release(third)

    extents = allocator.try_take(5)

    assert extents == (Extent(path_index=0, first_block=3, num_blocks=5),)


def test_blocks_beyond_the_end_are_refused():
    allocator = BlockAllocator(num_blocks=4)

    with pytest.raises(StoreError, match="found 1 of 4 blocks"):
        allocator.take_exactly(Extent(path_index=0, first_block=3, num_blocks=2))
