"""Wall time of the phases of a step, and the waits for storage in them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stretch of wall time of the calling thread."""

    duration_s: float
    io_wait_s: float
    """Waits for storage within it."""
    update_wait_s: float = 0.0
    """Waits of a pass for updates that ran under it, which are not in `duration_s`."""

    @property
    def busy_s(self) -> float:
        """Time that was not spent waiting for storage."""
        return max(self.duration_s - self.io_wait_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The phases of one step; `other_s` is what none of them covers."""

    step_s: float
    io_wait_s: float
    forward: tuple[Span, ...]
    """One for each micro-step, as `backward`."""
    backward: tuple[Span, ...]
    update: tuple[Span, ...]

    @property
    def forward_s(self) -> float:
        return sum(span.duration_s for span in self.forward)

    @property
    def backward_s(self) -> float:
        return sum(span.duration_s for span in self.backward)

    @property
    def update_s(self) -> float:
        return sum(span.duration_s for span in self.update)

    @property
    def own_update_s(self) -> float:
        """The update's phase without what passes waited for."""
        waited_s = sum(span.update_wait_s for span in (*self.forward, *self.backward))
        return max(self.update_s - waited_s, 0.0)

    @property
    def other_s(self) -> float:
        return max(self.step_s - self.forward_s - self.backward_s - self.update_s, 0.0)

    @property
    def other_busy_s(self) -> float:
        """Of `other_s`, what was not spent waiting for storage or the link."""
        spans = (*self.forward, *self.backward, *self.update)
        waited_s = self.io_wait_s - sum(span.io_wait_s for span in spans)
        return max(self.other_s - max(waited_s, 0.0), 0.0)


@dataclass(slots=True, kw_only=True)
class StepClock:
    """Measures the phases of one step, from its making to `stop()`.

    What passes waited for updates that run under them is taken from the passes' time and added to
    the update's: it is what stays exposed of that.
    """

    read_io_wait_s: Callable[[], float]
    """Gives the waits for storage so far."""
    read_update_wait_s: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    """Gives the waits of passes for updates so far, and the part in which these waited for storage.
    """
    _started_s: float = field(init=False)
    _io_wait_at_start_s: float = field(init=False)
    _forward: list[Span] = field(init=False, default_factory=list)
    _backward: list[Span] = field(init=False, default_factory=list)
    _update: list[Span] = field(init=False, default_factory=list)
    _exposed_s: float = field(init=False, default=0.0)
    _exposed_io_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._io_wait_at_start_s = self.read_io_wait_s()
        self._started_s = time.perf_counter()

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._measured(self._forward):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        with self._measured(self._backward):
            yield

    @contextmanager
    def update(self) -> Iterator[None]:
        with self._measured(self._update):
            yield

    def stop(self) -> StepTimes:
        """Returns what was measured."""
        step_s = time.perf_counter() - self._started_s
        if self._exposed_s:
            self._update.append(Span(duration_s=self._exposed_s, io_wait_s=self._exposed_io_s))
        return StepTimes(
            step_s=step_s,
            io_wait_s=self.read_io_wait_s() - self._io_wait_at_start_s,
            forward=tuple(self._forward),
            backward=tuple(self._backward),
            update=tuple(self._update),
        )

    @contextmanager
    def _measured(self, spans: list[Span]) -> Iterator[None]:
        io_wait_s, before = self.read_io_wait_s(), self.read_update_wait_s()
        started_s = time.perf_counter()
        yield
        duration_s = time.perf_counter() - started_s
        io_wait_s, after = self.read_io_wait_s() - io_wait_s, self.read_update_wait_s()
        exposed_s, exposed_io_s = after[0] - before[0], after[1] - before[1]
        if spans is not self._update:
            self._exposed_s += exposed_s
            self._exposed_io_s += exposed_io_s
            duration_s, io_wait_s = duration_s - exposed_s, io_wait_s - exposed_io_s
        else:
            exposed_s = 0.0
        spans.append(Span(duration_s=duration_s, io_wait_s=io_wait_s, update_wait_s=exposed_s))
