"""The recorded order of accesses, which tells what comes next. Pure: no torch, no I/O.

An access that the prediction does not hold is never wrong, only unforeseen.
"""

from collections.abc import Iterator

from offload.streaming.access_history import NEVER, UPDATE, Access, AccessHistory, access_of

__all__ = ["NEVER", "Access", "AccessTrace", "access_of"]


class AccessTrace:
    """Records accesses and predicts the next ones, as far as the next update.

    Attributes:
        divergences: How often another access was predicted than came.
    """

    def __init__(self) -> None:
        self._history = AccessHistory()
        self._is_evaluation = False
        self.divergences = 0

    def begin(self, *, is_evaluation: bool) -> None:
        """Begins a pass, whose accesses are told from those of the other kind."""
        self._is_evaluation = is_evaluation

    def end(self) -> None:
        """Ends a pass: what comes outside one is backward."""
        self._is_evaluation = False

    def end_step(self) -> None:
        """Notes an update, and predicts the next step; again does nothing."""
        if self._history.last != UPDATE:
            self._history.add(UPDATE)

    @property
    def is_in_forward(self) -> bool:
        """Whether the last access was in a forward: no backward or update came since."""
        last = self._history.last
        return last != UPDATE and not last.is_backward

    def record(self, access: Access) -> None:
        """Records `access` and moves the prediction on.

        Backward asks for a unit once per saved weight: a run of these is one access.
        """
        last = self._history.last
        if access.is_backward and (last is access or last == access):
            return
        if self._is_evaluation:
            access = access_of(access.unit, is_backward=access.is_backward, is_evaluation=True)
        self.divergences += self._history.add(access)

    def upcoming(self) -> Iterator[int]:
        """Yields the distinct units of the predicted accesses, soonest first."""
        return self._history.upcoming()

    def next_use(self, unit: int) -> int:
        """Returns the place of the next predicted access of `unit`, or `NEVER`."""
        return self._history.next_use(unit)
