"""One thread that does host work in order: optimizer steps and sums of gradients."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

PATIENCE = 300  # seconds to wait for a thread that ends
_TWO_GRAINS = 2**17  # elements, which torch shares among at least two threads


class Worker:
    """Runs what is submitted, one after the other, in a thread of its own.

    The thread ends with the worker's `close`, or when nobody holds the worker any more. A process that ends waits for
    what was submitted: a thread that is in the middle of torch's code then would take the process down.

    Args:
        name: the thread's name.
        device: the device that its work is for.
        threads: the threads of its arithmetic; None: as many as steps want. A team of threads stays once it has done
            something.
    """

    def __init__(self, name: str, device: torch.device, threads: int | None = None):
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        ready, callers = threading.Event(), torch.get_num_threads()
        self._thread = threading.Thread(
            target=_serve, args=(self._queue, device, threads, ready), name=name, daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._queue.put, None).atexit = False
        _workers.add(self)
        ready.wait()
        if device.type == "cuda":
            torch.set_num_threads(callers)  # what the worker's thread has asked for is its own

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run `job` after what was submitted before. Its exception is the future's."""
        future: Future[None] = Future()
        self._queue.put((job, future))
        return future

    def close(self) -> None:
        """End the thread after what was submitted."""
        self._queue.put(None)
        self._thread.join(PATIENCE)


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in [*_workers]:
        worker.close()


def host_threads() -> int:
    """Return the threads of the worker's arithmetic: two cores of a process are left to those that drive its GPU.

    One that shares a core with a thread that launches kernels, or spins for them, keeps all others waiting at the end
    of every block: on 16 cores of an H200's host, 16 threads beside a busy one made half of what 14 did, and beside two
    a tenth. A launcher of several processes (torchrun) sets one thread each; then cores are shared out.
    """
    cores, processes = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share = max(cores // max(processes, 1), 1)
    threads = torch.get_num_threads() if processes == 1 else share
    return max(min(threads, share - 2), 1)


def leave_cores() -> None:
    """Let this thread's OpenMP threads end, all but one, until it needs them again.

    Every thread that computes in parallel has a team of its own that lives on, and where the members of all teams are
    more than the cores, GNU's OpenMP no longer spins at a barrier but sleeps: 75 us a block in place of 5.
    """
    threads = torch.get_num_threads()
    if threads > 2:
        torch.set_num_threads(2)
        torch.empty(_TWO_GRAINS).zero_()  # a team shrinks when a smaller one is asked for
        torch.set_num_threads(threads)


def use_device(device: torch.device) -> None:
    """Make `device` current in this thread: in a new one it is the first, whatever it is in others.

    Otherwise CUDA would take memory on the first one for every thread that waits for an event.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _serve(
    jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None],
    device: torch.device,
    threads: int | None,
    ready: threading.Event,
) -> None:
    use_device(device)
    if device.type == "cuda":
        torch.set_num_threads(threads or host_threads())
    ready.set()
    while (order := jobs.get()) is not None:
        job, future = order
        del order
        try:
            job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, future
