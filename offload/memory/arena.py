"""One block of anonymous memory, taken once, from which regions and slots are cut."""

import mmap

from offload.errors import BudgetError, StoreError
from offload.sizes import format_size, round_up

PAGE_BYTES = mmap.PAGESIZE


class Arena:
    """Page-aligned memory of an exact size, with huge pages where the kernel gives them.

    Ownership: The mapping lives as long as any view of it, also after `close()`, so that no
        tensor ever points at unmapped memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = round_up(num_bytes, PAGE_BYTES)
        self._memory: memoryview | None = None
        self._used_bytes = 0

    def open(self) -> None:
        """Maps the memory; pages are taken as they are touched."""
        if self._memory is not None or self.num_bytes == 0:
            return
        try:
            mapping = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BudgetError(
                f"cannot map an arena of {format_size(self.num_bytes)}: {error}; "
                "lower `tiers.host.memory`"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages: the arena works all the same, slower
        self._memory = memoryview(mapping)

    def close(self) -> None:
        """Drops the arena's own view; the mapping goes with the last tensor over it."""
        self._memory = None

    def whole(self) -> memoryview:
        """Returns all of the arena's memory, whatever was cut off it."""
        if self._memory is None:
            raise StoreError("cannot use a closed arena: open it first")
        return self._memory

    def take(self, num_bytes: int, *, is_inherited: bool = True) -> memoryview:
        """Cuts the next `num_bytes` off the arena, page-aligned.

        Args:
            num_bytes: May be 0.
            is_inherited: False leaves the pages out of forked children. Of pages that the kernel
                holds for transfers a child would get copies at once, and not when they change.
        """
        start, stop = self._used_bytes, self._used_bytes + round_up(num_bytes, PAGE_BYTES)
        if num_bytes == 0:
            return memoryview(bytearray())
        if self._memory is None or stop > self.num_bytes:
            raise StoreError(
                f"cannot cut {format_size(num_bytes)} off an arena of "
                f"{format_size(self.num_bytes)}: {format_size(self.num_bytes - start)} left; "
                "open the arena, or plan it larger"
            )
        self._used_bytes = stop
        mapping = self._memory.obj
        if not is_inherited and isinstance(mapping, mmap.mmap):
            mapping.madvise(mmap.MADV_DONTFORK, start, stop - start)
        return self._memory[start : start + num_bytes]
