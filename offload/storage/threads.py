"""Threads of one owner, which an interrupt neither loses nor doubles.

[Note: an interrupted start]
An interrupt may come while `Thread.start` waits for the thread, or before it was called. So an
owner has the thread before it starts it, and asks here whether it was.
"""

import threading
import time

_PAUSE_S = 0.001


def was_started(thread: threading.Thread | None) -> bool:
    """Tells whether `start` has begun: the thread runs, will run, or has run."""
    if thread is None:
        return False
    return thread.ident is not None or thread in threading.enumerate()


def join(thread: threading.Thread | None) -> None:
    """Waits for the end of a thread, if it was started."""
    while thread is not None and was_started(thread):
        if thread.ident is not None:
            thread.join()
            return
        time.sleep(_PAUSE_S)  # its start was interrupted, and it is about to run
