"""What holds for every test: nothing is left behind."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_SHARED_THREADS = ("asyncio_", "offload-kernels", "pymp", "QueueFeederThread", "Dummy-")
"""Pools of the process that start with their first use and stay; `Dummy-`: autograd's for a GPU."""
_END_S = 2.0


def pytest_collection_finish() -> None:
    # Modules stay: a collection in a test need not look at their objects, which takes 0.3 s.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def signals_that_are_not_ignored() -> None:
    # A shell has these ignored in what it starts in the background, and so would what tests start.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def no_machine_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured on this machine has no part in a test."""
    monkeypatch.setenv("OFFLOAD_MACHINE", "")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    # Small tensors gain nothing from more, and lose much where the cores are shared.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_leaked_descriptor() -> Iterator[None]:
    before = _descriptors()

    yield

    leaked = _leftover(lambda: _descriptors() - before)
    assert not leaked, f"descriptors left open: {sorted(leaked)}"


@pytest.fixture(autouse=True)
def no_leaked_thread() -> Iterator[None]:
    before = set(threading.enumerate())

    yield

    leaked = _leftover(lambda: _own_threads() - before)
    assert not leaked, f"threads left running: {sorted(thread.name for thread in leaked)}"


def _descriptors() -> set[tuple[int, str]]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the listing's own
        # Libraries keep devices and event descriptors of their own.
        if not target.startswith(("/dev/", "/proc/", "/sys/", "anon_inode:")):
            found.add((int(entry.name), target))
    return found


def _own_threads() -> set[threading.Thread]:
    return {
        thread for thread in threading.enumerate() if not thread.name.startswith(_SHARED_THREADS)
    }


def _leftover(find) -> set:
    # What the test dropped is given time to end: objects in cycles, threads on their way out.
    leaked = find()
    deadline = time.monotonic() + _END_S
    while leaked and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
        leaked = find()
    return leaked
