"""Weights in the dtype of computation on a disk, and the host memory through which they go to the device."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

from cai_gemini.memory.copies import Copied, Copies
from cai_gemini.memory.worker import use_device
from cai_gemini.nvme import NvmeStore, Region
from cai_gemini.planning.disk_plan import BUFFERS

Send = Callable[[torch.Tensor, float], Copied]
Order = tuple[Region, Send, "Future[Copied]"]


class DiskReaders:
    """Threads that read weights from a disk and send them to the device, each through a buffer of its own.

    While one chunk is copied to the device the next is read. The threads end with the last reference to it.

    Args:
        store: the store that has the weights.
        nbytes: bytes of the largest weights.
        device: the device they go to.
    """

    def __init__(self, store: NvmeStore, nbytes: int, device: torch.device):
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        for i in range(BUFFERS):
            threading.Thread(
                target=_serve, args=(self._orders, store, nbytes, device), name=f"from-disk-{i}", daemon=True
            ).start()
        end = weakref.finalize(self, _dismiss, self._orders)
        end.atexit = (
            False  # a thread that frees its buffer while the interpreter ends would take the process down
        )

    def fetch(self, region: Region, send: Send, coming: Future[Copied]) -> None:
        """Read `region` behind all earlier writes of it, then `send` it on, with when the read began.

        `coming` gets what that returns.
        What goes wrong is the future's exception.
        """
        self._orders.put((region, send, coming))


def _dismiss(orders: queue.SimpleQueue[Order | None]) -> None:
    for _ in range(BUFFERS):
        orders.put(None)


def _serve(
    orders: queue.SimpleQueue[Order | None], store: NvmeStore, nbytes: int, device: torch.device
) -> None:
    use_device(device)
    buffer: torch.Tensor | None = None
    leaving: Copied | None = None
    while (order := orders.get()) is not None:
        region, send, coming = order
        del order
        try:
            if leaving is not None:
                leaving.synchronize()
            if buffer is None:
                buffer = store.buffer(nbytes, torch.uint8)
            weights = buffer[: region.nbytes].view(region.dtype)
            leaving = None
            begun = time.perf_counter()
            store.read(region, weights).wait()
            leaving = send(weights, begun)
        except BaseException as error:
            buffer = None  # a request that is stuck may still write there
            coming.set_exception(error)
        else:
            coming.set_result(leaving)
        del region, send, coming


class DiskWeights:
    """The weights of one chunk that are copied to the device, on a disk.

    Args:
        name: the chunk's name.
        weights: [n] on the host, in the dtype of computation; written at once.
        master: the region of the master weights, which serve as well where the dtype is the same.
        store: takes a region where it is not. Raises `NvmeError` where the disk has no room.
        readers: brings them.

    Attributes:
        own: the region, where it is not that of the master weights.
    """

    def __init__(
        self, name: str, weights: torch.Tensor, master: Region, store: NvmeStore, readers: DiskReaders
    ):
        self._store, self._readers = store, readers
        self.own: Region | None = None
        self._region = master
        if weights.dtype != master.dtype:
            self._region = self.own = store.reserve(f"{name} (weights)", weights.numel(), weights.dtype)
            self.write(weights)

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Let these values, [n] in any dtype, be the weights."""
        self._store.write(self._region, values.to(self._region.dtype)).wait()

    def fetch(
        self,
        copies: Copies,
        target: torch.Tensor,
        free: torch.cuda.Event | None,
        coming: Future[Copied],
        name: str,
    ) -> None:
        """Begin to bring the weights to `target` on the device, once its stream has passed `free`."""

        def send(weights: torch.Tensor, begun: float) -> Copied:
            if copies.recorder is not None:
                copies.recorder.span("disk", begun, time.perf_counter(), name)
            with torch.no_grad():
                return copies.to_device(target, weights, free, hold=True, name=name)

        self._readers.fetch(self._region, send, coming)
