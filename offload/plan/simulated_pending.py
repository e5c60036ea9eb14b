"""What of a step's update has happened in simulated time, as the next forward asks for it."""

from collections.abc import Callable, Sequence
from functools import partial

from offload.plan.events import Ticket, all_of
from offload.plan.work import StepWork
from offload.policy import Overlap


class PendingUpdate:
    """The update of one step, from its beginning until the next one's.

    Attributes:
        over: Done when everything is updated and written.
    """

    def __init__(
        self,
        work: StepWork,
        *,
        copy_up: Callable[[int], Ticket],
        overlap: Overlap | None = None,
    ) -> None:
        """Nothing has happened yet.

        Args:
            work: What is updated.
            copy_up: Copies so many bytes of parameters to the device, and says when.
            overlap: Decides which record comes next under a forward; None: the first.
        """
        self.over = Ticket()
        self._overlap = overlap
        self._records = work.records
        self._copy_up = copy_up
        self._here = [Ticket() for _ in work.records]
        self._written = [Ticket() for _ in work.records]
        self._slotted = [Ticket() for _ in work.units]
        self._may_begin = [Ticket() for _ in work.records]
        self._taken: set[int] = set()
        self._held: list[int] = []
        """Taken ones whose pass nobody has hurried yet."""
        self._needed: set[int] = set()
        """Those that the pass waits for now."""
        self._missing: set[int] = set()
        """Needed ones that are not taken."""
        self._records_of: list[list[int]] = [[] for _ in work.units]
        self._needs: list[list[Ticket]] = [[] for _ in work.units]
        for index, record in enumerate(work.records):
            slots = [self._slotted[piece.unit] for piece in record.pieces if piece.is_handed_over]
            all_of(slots).on_done(partial(self._let_begin, index))
            for piece in record.pieces:
                is_read = piece.num_bytes and not piece.is_handed_over
                self._needs[piece.unit].append((self._written if is_read else self._here)[index])
                self._records_of[piece.unit].append(index)

    def on_taken(self, index: int) -> None:
        """Says that a record has a place in the window."""
        self._taken.add(index)
        self._held.append(index)
        self._missing.discard(index)
        self._hurry()

    def on_computed(self, index: int) -> None:
        """Says that the pass over a record is over: its parameters are copied to the device."""
        num_bytes = self._records[index].link_bytes
        if num_bytes:
            self._copy_up(num_bytes).on_done(self._here[index].complete)
        else:
            self._here[index].complete()

    def on_written(self, index: int) -> None:
        """Says that all of a record that is stored is written."""
        self._written[index].complete()
        self._needed.discard(index)

    def choose(self, indices: Sequence[int]) -> int:
        """Returns which of the records comes next: there is at least one."""
        if self._overlap is None:
            return indices[0]
        return self._overlap.choose(indices, self._needed)

    def may_begin(self, index: int) -> Ticket:
        """Returns when the pass over a record may begin: its units have slots, or never will."""
        return self._may_begin[index]

    def ask_for(self, unit: int) -> Ticket:
        """Returns when a unit can be fetched. Who asks has a slot for it, which updates fill."""
        if not self._slotted[unit].is_done:
            self._slotted[unit].complete()
        return all_of(self._needs[unit])

    def all_here(self) -> Ticket:
        """Returns when passes can use every parameter."""
        return all_of(self._here)

    def need(self, unit: int) -> None:
        """Says that the forward waits for a unit now."""
        records = self._records_of[unit]
        self._needed.update(i for i in records if not self._written[i].is_done)
        self._missing.update(i for i in records if i not in self._taken)
        self._hurry()

    def _hurry(self) -> None:
        """Lets no record keep its place for want of a slot while one that is needed has none."""
        if self._missing:
            for index in self._held:
                self._let_begin(index)
            self._held.clear()

    def _let_begin(self, index: int) -> None:
        if not self._may_begin[index].is_done:
            self._may_begin[index].complete()
