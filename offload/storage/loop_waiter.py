"""Waiting for transfers in an asyncio event loop, without a thread for each."""

import asyncio
import os
import weakref

from offload.storage.backend import Request

_waiters: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaiter]" = (
    weakref.WeakKeyDictionary()
)


async def wait_in_loop(request: Request) -> None:
    """Waits until the transfer is over.

    Ownership: Cancelling the task ends the waiting, not the transfer.
    """
    loop = asyncio.get_running_loop()
    waiter = _waiters.get(loop)
    if waiter is None:
        waiter = _waiters[loop] = LoopWaiter(loop)
    await waiter.wait(request)


class LoopWaiter:
    """One event descriptor that all transfers awaited in a loop report to.

    It is open while something is awaited. A request that is awaited in two loops at once reports
    to the first; the other waits on a thread.

    Concurrency: The loop's thread only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not the loop itself: this object is the value of a dictionary with weak keys.
        self._loop = weakref.ref(loop)
        self._event_fd: int | None = None
        self._waiting: dict[Request, list[asyncio.Future[None]]] = {}

    async def wait(self, request: Request) -> None:
        """Waits until the transfer is over."""
        if request.is_done():
            return
        loop = asyncio.get_running_loop()
        futures = self._waiting.get(request)
        if futures is None:
            if not request.notify(self._opened(loop)):
                self._close_if_idle()
                await loop.run_in_executor(None, request.wait, None)
                return
            futures = self._waiting[request] = []
        future = loop.create_future()
        futures.append(future)
        try:
            await future
        finally:
            futures.remove(future)
            if not futures:
                # From here on the request does not write to the descriptor.
                del self._waiting[request]
                request.notify(None)
                self._close_if_idle()

    def _opened(self, loop: asyncio.AbstractEventLoop) -> int:
        if self._event_fd is None:
            self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            loop.add_reader(self._event_fd, self._on_event)
        return self._event_fd

    def _on_event(self) -> None:
        if self._event_fd is not None:
            os.eventfd_read(self._event_fd)
        for request, futures in self._waiting.items():
            if request.is_done():
                for future in futures:
                    if not future.done():
                        future.set_result(None)

    def _close_if_idle(self) -> None:
        if self._waiting or self._event_fd is None:
            return
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._event_fd)
        os.close(self._event_fd)
        self._event_fd = None
