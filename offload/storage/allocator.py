"""Which blocks of one data file are free."""

from collections.abc import Iterable

from offload.errors import StoreError
from offload.storage.extents import Extent

_FREE = b"\0"
_TAKEN = b"\1"


class BlockAllocator:
    """Hands out the blocks of one path's data file, lowest free ones first.

    A pure table with one byte per block, so that runs are found at the speed of `memchr`; it
    touches no file.

    Concurrency: None of its own; the owner holds a lock.
    """

    def __init__(self, *, path_index: int = 0, num_blocks: int = 0) -> None:
        self._path_index = path_index
        self._map = bytearray(_FREE * num_blocks)
        self._num_free = num_blocks
        self._lowest_free = 0  # no block below it is free

    @property
    def num_blocks(self) -> int:
        return len(self._map)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_taken(self) -> int:
        return len(self._map) - self._num_free

    def grow(self, num_blocks: int) -> None:
        """Adds free blocks at the end until there are `num_blocks`; never removes any."""
        added = max(0, num_blocks - len(self._map))
        self._map.extend(_FREE * added)
        self._num_free += added

    def try_take(self, num_blocks: int) -> tuple[Extent, ...] | None:
        """Takes `num_blocks` blocks: one run if one is long enough, else the lowest pieces.

        Returns:
            The extents in ascending order, or None where too few blocks are free.
        """
        if num_blocks > self._num_free:
            return None
        if num_blocks == 0:
            return ()
        first = self._map.find(_FREE * num_blocks, self._lowest_free)
        extents = (self._extent(first, num_blocks),) if first >= 0 else self._pieces(num_blocks)
        for extent in extents:
            self._mark(extent, _TAKEN)
        return extents

    def take_exactly(self, extent: Extent) -> None:
        """Takes the blocks of `extent`, as recovery finds them in a manifest.

        Raises:
            StoreError: One of them does not exist or is taken.
        """
        self._require(extent, _FREE)
        self._mark(extent, _TAKEN)

    def release(self, extents: Iterable[Extent]) -> None:
        """Makes the blocks of `extents` free again.

        Raises:
            StoreError: One of them does not exist or is free.
        """
        for extent in extents:
            self._require(extent, _TAKEN)
            self._mark(extent, _FREE)

    def _pieces(self, num_blocks: int) -> tuple[Extent, ...]:
        extents = []
        at = self._lowest_free
        while num_blocks:
            first = self._map.find(_FREE, at)
            at = self._map.find(_TAKEN, first, first + num_blocks)
            at = first + num_blocks if at < 0 else at
            at = min(at, len(self._map))
            extents.append(self._extent(first, at - first))
            num_blocks -= at - first
        return tuple(extents)

    def _extent(self, first_block: int, num_blocks: int) -> Extent:
        return Extent(path_index=self._path_index, first_block=first_block, num_blocks=num_blocks)

    def _require(self, extent: Extent, state: bytes) -> None:
        found = self._map.count(state, extent.first_block, extent.end_block)
        if extent.first_block < 0 or found != extent.num_blocks:
            wanted = "free" if state == _FREE else "taken"
            raise StoreError(
                f"cannot change blocks {extent.first_block} to {extent.end_block - 1} of path "
                f"{extent.path_index}: expected all {extent.num_blocks} to be {wanted}, found "
                f"{found} of {len(self._map)} blocks; this is a defect of `offload`, or the "
                "manifest names a block twice; please report it"
            )

    def _mark(self, extent: Extent, state: bytes) -> None:
        self._map[extent.first_block : extent.end_block] = state * extent.num_blocks
        if state == _FREE:
            self._num_free += extent.num_blocks
            self._lowest_free = min(self._lowest_free, extent.first_block)
        else:
            self._num_free -= extent.num_blocks
            if extent.first_block == self._lowest_free:
                self._lowest_free = extent.end_block
