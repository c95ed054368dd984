"""One thread that does host work in order: optimizer steps and sums of gradients."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch


class Worker:
    """Runs what is submitted, one after the other, in a thread of its own.

    The thread ends with the worker's `close`, or when nobody holds the worker any more.

    Args:
        name: of the thread.
        device: that its work is for.
    """

    def __init__(self, name: str, device: torch.device):
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue, device), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run `job` after what was submitted before. Its exception is the future's."""
        future: Future[None] = Future()
        self._queue.put((job, future))
        return future

    def close(self) -> None:
        """End the thread after what was submitted."""
        self._queue.put(None)
        self._thread.join()


def use_device(device: torch.device) -> None:
    """Make `device` current in this thread: in a new one it is the first, whatever it is in others.

    Otherwise CUDA would take memory on the first one for every thread that waits for an event.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _serve(
    jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None], device: torch.device
) -> None:
    use_device(device)
    while (item := jobs.get()) is not None:
        job, future = item
        del item
        try:
            job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, future
