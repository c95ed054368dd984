"""Reductions beside compute."""

from __future__ import annotations

from collections import deque

from cai_mesh.comm import SideStream
from cai_mesh.gradients import GradBuffer
from cai_mesh.protocols import CommHandle


class Reductions:
    """Reductions under way on a side stream, and the gradient buffers they read.

    Args:
        stream: on which they run.
        ahead: how many may be under way while the next buffer fills.
    """

    def __init__(self, stream: SideStream, *, ahead: int = 1):
        self.stream, self._ahead = stream, ahead
        self._under_way: deque[tuple[CommHandle, GradBuffer]] = deque()

    def started(self, buffer: GradBuffer) -> None:
        """What was issued last reads `buffer`, which is closed when it is done."""
        self._under_way.append((self.stream.mark(), buffer))

    def make_room(self) -> None:
        """Wait for all but the last few and close their buffers; called before another is opened."""
        while len(self._under_way) > self._ahead:
            self._close()

    def join(self) -> None:
        """Let the compute stream wait for all of them."""
        while self._under_way:
            self._close()
        self.stream.join()

    def _close(self) -> None:
        handle, buffer = self._under_way.popleft()
        handle.wait()
        buffer.close()
