"""Lets SIGINT, SIGTERM and SIGHUP end a run between steps."""

import signal
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """While entered, the first of the signals asks for a stop; the second acts as usual.

    One that is ignored, as SIGHUP under `nohup` and SIGINT in a shell's background, stays so.

    Concurrency: Signals are taken over only in the main thread; elsewhere nothing happens.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        """The signal that asked for the stop, or None."""
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def is_set(self) -> bool:
        return self.signal_name is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
