"""SIGTERM as an exit that cleans up: what a benchmark mounted or made does not outlive it."""

import contextlib
import signal
import sys

EXIT_CODE = 128 + signal.SIGTERM


@contextlib.contextmanager
def exits_on_sigterm():
    """While it lasts SIGTERM raises SystemExit, so that `finally` and `__exit__` run.

    One more during the cleaning up has no effect.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(_number, _frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(EXIT_CODE)
