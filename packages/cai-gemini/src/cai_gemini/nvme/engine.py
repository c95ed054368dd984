"""Requests in order, blocks in parallel: the threads of a store and the rules for who waits for whom.

A read waits for the last write of its region, a write for the last write and every read since. A request whose turn has
come is cut into blocks, and any thread takes the next block. No thread ever waits for another request.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from cai_gemini.nvme.blocks import Block, read_block, write_block
from cai_gemini.nvme.disk import ScratchFile, Stopped
from cai_gemini.nvme.errors import NvmeError, of_system
from cai_gemini.nvme.memory import Bounce, view_of


class Spans:
    """A set of whole numbers kept as disjoint, sorted intervals: which bytes of a region were written."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        """Add `start` to `stop`, merging with its neighbours."""
        if start == stop:
            return
        apart = [span for span in self._spans if span[1] < start or span[0] > stop]
        joined = [span for span in self._spans if not (span[1] < start or span[0] > stop)]
        start, stop = min([start, *(a for a, _ in joined)]), max([stop, *(b for _, b in joined)])
        self._spans = sorted([*apart, (start, stop)])

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of `start` to `stop` has been added."""
        return start == stop or any(a <= start and stop <= b for a, b in self._spans)


@dataclass(eq=False)
class Contents:
    """The state of a region in the file; guarded by the engine's lock.

    Attributes:
        name: the region's name.
        position: the region's first byte in the file.
        size: bytes.
        checksums: one a block; None where nothing was written.
        written: the bytes that have been written.
        poison: the reason why nothing of it may be read; "" when it may.
        last_write: the latest write asked for.
        reads: reads asked for since.
    """

    name: str
    position: int
    size: int
    checksums: list[int | None]
    written: Spans = field(default_factory=Spans)
    poison: str = ""
    last_write: Request | None = None
    reads: list[Request] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """A read or write of bytes `start` to `stop` of a region, from or into `tensor`."""

    kind: Literal["read", "write"]
    contents: Contents
    tensor: torch.Tensor | None
    start: int
    stop: int
    submitted: float = field(default_factory=time.monotonic)
    blockers: int = 0
    followers: list[Request] = field(default_factory=list)
    started: bool = False
    remaining: int = 0
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        return f"the {self.kind} of {self.contents.name}, bytes {self.start} to {self.stop}"

    @property
    def covers_region(self) -> bool:
        """Whether it is about all of the region."""
        return self.start == 0 and self.stop == self.contents.size


@dataclass
class Traffic:
    """The traffic of a store. Bounced bytes were copied once more because of their address or extent."""

    read_bytes: int = 0
    written_bytes: int = 0
    bounced_bytes: int = 0
    requests: int = 0


class Engine:
    """The threads, the queue and the order of requests of one store. It knows no store, so that one can be collected.

    Args:
        file: the scratch file; closed by the last thread to leave.
        threads: the number of blocks under way at once.
        block_bytes: the size of a block, a multiple of the file's alignment.
        checksums: whether blocks carry them.
    """

    def __init__(self, file: ScratchFile, threads: int, block_bytes: int, checksums: bool):
        self.file, self.traffic = file, Traffic()
        self._block_bytes, self._checksums = block_bytes, checksums
        self._lock, self._queue = threading.Lock(), queue.SimpleQueue[tuple[Request, Block] | None]()
        self._process = os.getpid()
        self._busy: dict[int, tuple[Request, float]] = {}
        self._progress = time.monotonic()
        self._threads = [
            threading.Thread(target=self._serve, name=f"nvme-{i}", daemon=True) for i in range(threads)
        ]
        self._serving = threads
        for thread in self._threads:
            thread.start()

    @property
    def _forked(self) -> bool:
        """Whether this is a copy in a child process, without threads and with locks that may be held for ever."""
        return os.getpid() != self._process

    def submit(self, request: Request, after: Iterable[Request] = ()) -> None:
        """Queue a request behind those it must follow and behind `after`. Raises `NvmeError` on a closed store."""
        contents = request.contents
        if self._forked:
            raise NvmeError(
                f"{request} belongs to another process",
                cause="a store does not survive a fork",
                fix="make the store in the process that uses it",
            )
        with self._lock:
            if self.file.stopped:
                raise self._is_closed(request)
            contents.reads = [read for read in contents.reads if not read.done.is_set()]
            earlier = {*after, contents.last_write} - {None}
            if request.kind == "write":
                earlier.update(contents.reads)
                contents.last_write, contents.reads = request, []
            else:
                contents.reads.append(request)
            for other in earlier:
                if other is not None and not other.done.is_set():
                    other.followers.append(request)
                    request.blockers += 1
            self.traffic.requests += 1
            if not request.blockers:
                self._start([request])

    def _start(self, ready: list[Request]) -> None:
        """Queue the blocks of requests whose turn has come; the lock is held."""
        while ready:
            request = ready.pop()
            request.error = request.error or self._refusal(request)
            blocks = [] if request.error else list(self._cut(request))
            request.remaining, request.started = len(blocks), not request.error
            for block in blocks:
                self._queue.put((request, block))
            if not blocks:
                ready += self._finish(request)

    def _refusal(self, request: Request) -> NvmeError | None:
        contents, path = request.contents, self.file.path
        if self.file.stopped:
            return self._is_closed(request)
        if contents.poison and not (request.kind == "write" and request.covers_region):
            return NvmeError(
                f"{contents.name} in {path} holds nothing that may be used",
                got=contents.poison,
                expected="a successful write of the whole region",
                fix="resume from a checkpoint",
            )
        if request.kind == "read" and not contents.written.covers(request.start, request.stop):
            return NvmeError(
                f"{request} in {path}: not all of it was ever written",
                fix="write it first, or reserve the region with zeros=True",
            )
        return None

    def _cut(self, request: Request) -> Iterator[Block]:
        contents, unit = request.contents, self._block_bytes
        assert request.tensor is not None
        view = view_of(request.tensor)
        for index in range(request.start // unit, -(-request.stop // unit)):
            low, high = index * unit, min((index + 1) * unit, contents.size)
            start, stop = max(low, request.start), min(high, request.stop)
            part = view[start - request.start : stop - request.start]
            yield Block(contents.name, index, contents.position + low, high - low, start - low, part)

    def _finish(self, request: Request) -> list[Request]:
        """Settle what the region holds now; which requests may start. The lock is held."""
        contents = request.contents
        if request.kind == "write" and request.started:
            if request.error is not None:
                contents.poison = f"{request} failed: {str(request.error).splitlines()[0]}"
            else:
                contents.written.add(request.start, request.stop)
                contents.poison = "" if request.covers_region else contents.poison
        request.tensor = None
        request.done.set()
        followers, request.followers = request.followers, []
        for follower in followers:
            follower.blockers -= 1
        return [follower for follower in followers if not follower.blockers]

    def _serve(self) -> None:
        bounce = Bounce(self._block_bytes + self.file.alignment)
        while self._perform(self._queue.get(), bounce):
            pass
        with self._lock:
            self._serving -= 1
            last = not self._serving
        if last:
            self.file.close()

    def _perform(self, item: tuple[Request, Block] | None, bounce: Bounce) -> bool:
        """Move one block; False for the word to leave."""
        if item is None:
            return False
        request, block = item
        error, bounced, thread = None, 0, threading.get_ident()
        if request.error is None:
            with self._lock:
                self._busy[thread] = (request, time.monotonic())
            try:
                bounced = self._move(request, block, bounce)
            except Stopped:
                error = self._is_closed(request)
            except OSError as failure:
                where = f"block {block.index}, file offset {block.position}"
                error = of_system(f"{request} ({where}) in {self.file.path} failed", failure)
                error.__cause__ = failure
            except Exception as failure:
                error = failure
        with self._lock:
            self._busy.pop(thread, None)
            self._progress = time.monotonic()
            request.error = request.error or error
            request.remaining -= 1
            if error is None and request.error is None:
                self._count(request, len(block.view), bounced)
            if not request.remaining:
                self._start(self._finish(request))
        return True

    def _move(self, request: Request, block: Block, bounce: Bounce) -> int:
        checksums = request.contents.checksums
        if request.kind == "read":
            return read_block(block, self.file, checksums[block.index], self._checksums, bounce)
        checksum, bounced = write_block(block, self.file, checksums[block.index], self._checksums, bounce)
        if not (self.file.direct or self._checksums):
            # Through the page cache a failed write shows later, here or as a wrong checksum.
            self.file.sync()
        checksums[block.index] = checksum
        return bounced

    def _count(self, request: Request, size: int, bounced: int) -> None:
        self.traffic.bounced_bytes += bounced
        if request.kind == "read":
            self.traffic.read_bytes += size
        else:
            self.traffic.written_bytes += size

    def wait(self, request: Request, timeout: float) -> None:
        """Return when the request is done; raise its error, or `NvmeError` when nothing moves for `timeout` seconds."""
        while not request.done.wait(min(timeout / 4, 1.0)):
            with self._lock:
                busy = list(self._busy.values())
                since = max(self._progress, request.submitted)
            since = min([began for other, began in busy if other is request], default=since)
            if time.monotonic() - since > timeout:
                raise self._is_stuck(request, [other for other, _ in busy], timeout)
        if request.error is not None:
            raise request.error

    def _is_stuck(self, request: Request, busy: list[Request], timeout: float) -> NvmeError:
        waiting = ", ".join(sorted({str(other) for other in busy})) or "no request"
        return NvmeError(
            f"{request} in {self.file.path} is stuck",
            got=f"no progress in {timeout:g} s; at the disk: {waiting}",
            cause="the disk hangs, or is far slower than expected",
            fix="look at the kernel's log (dmesg); name another disk, or allow more time with timeout=",
        )

    def _is_closed(self, request: Request) -> NvmeError:
        return NvmeError(f"{request}: the store in {self.file.path} is closed")

    def stop(self) -> None:
        """Have queued requests fail and the threads leave, without waiting and without a lock: for a finalizer."""
        if not (self._forked or self.file.stopped):
            self.file.stopped = True
            for _ in self._threads:
                self._queue.put(None)

    def close(self, timeout: float) -> bool:
        """`stop`, then wait for the threads at most `timeout` seconds; whether all have left."""
        if self._forked:
            return True
        with self._lock:
            self.stop()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
