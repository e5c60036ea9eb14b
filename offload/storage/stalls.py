"""The stall account: who waited for what, how long, and what caused it."""

import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KERNEL = "kernel"
"""What is waited for is being computed."""
LINK = "link"
"""What is waited for is on its way between host and device."""
CHECKSUM = "checksum"
"""What is waited for has arrived from storage: its checksums are computed and compared."""


def path_label(directory: Path) -> str:
    """Returns how a wait for transfers on a path is named."""
    return f"path {directory}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Waits of one kind, added up."""

    waits_for: str
    """`path` and its directory, `checksum`, `kernel`, or `link`."""
    cause: str
    """What could not go on, such as `fetch of a unit`."""
    duration_s: float
    count: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class StallAccount:
    """Adds waits up by what was waited for and what caused it.

    Concurrency: Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str], tuple[float, int]] = {}

    def add(self, waits_for: str, cause: str, duration_s: float, *, count: int = 1) -> None:
        """Adds one wait, or `count` of them that took `duration_s` together."""
        key = (waits_for, cause)
        with self._lock:
            total_s, known = self._entries.get(key, (0.0, 0))
            self._entries[key] = (total_s + duration_s, known + count)

    def stalls(self) -> tuple[Stall, ...]:
        """Returns what was added so far, longest first."""
        with self._lock:
            entries = list(self._entries.items())
        found = [
            Stall(waits_for=waits_for, cause=cause, duration_s=total_s, count=count)
            for (waits_for, cause), (total_s, count) in entries
        ]
        return tuple(sorted(found, key=lambda stall: -stall.duration_s))


def summed(accounts: Iterable[tuple[Stall, ...]]) -> tuple[Stall, ...]:
    """Returns the waits of several accounts as those of one, longest first."""
    found = StallAccount()
    for stall in (stall for account in accounts for stall in account):
        found.add(stall.waits_for, stall.cause, stall.duration_s, count=stall.count)
    return found.stalls()


def stalls_between(before: tuple[Stall, ...], after: tuple[Stall, ...]) -> tuple[Stall, ...]:
    """Returns what was added between two looks at an account, longest first."""
    known = {(stall.waits_for, stall.cause): stall for stall in before}
    found = []
    for stall in after:
        earlier = known.get((stall.waits_for, stall.cause))
        count = stall.count - (earlier.count if earlier else 0)
        if count:
            found.append(
                Stall(
                    waits_for=stall.waits_for,
                    cause=stall.cause,
                    duration_s=stall.duration_s - (earlier.duration_s if earlier else 0.0),
                    count=count,
                )
            )
    return tuple(sorted(found, key=lambda stall: -stall.duration_s))
