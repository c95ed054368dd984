"""A chunk's gradient between backward and step: on its way, summed with others, complete."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from cai_gemini.copies import Copied
from cai_gemini.pinned import HostPool
from cai_gemini.worker import Worker


@dataclass(eq=False)
class Gradient:
    """A chunk's gradient between backward and step.

    Args:
        tensor: [n]; complete once settled.
        sent: its copy from the device.
        square: the sum of its squares, while nobody else could have written to it.
        adding: the sum with a further backward's, under way.
    """

    tensor: torch.Tensor
    sent: Copied | None
    square: torch.Tensor | None
    adding: Future[None] | None = None

    def settled(self) -> torch.Tensor:
        """The gradient, complete."""
        if self.adding is not None:
            self.adding.result()
        if self.sent is not None:
            self.sent.synchronize()
            self.sent = None
        return self.tensor

    def add_here(self, more: torch.Tensor) -> None:
        self.square = None
        self.tensor = self.tensor.to(wide(more.dtype)).add_(more)

    def add_later(self, more: torch.Tensor, sent: Copied, worker: Worker, pool: HostPool) -> None:
        """Add what is on its way; gradients of several backwards are summed in float32 at least."""
        first, before = self.sent, self.adding
        self.square = self.sent = None

        def add() -> None:
            if before is not None:
                before.result()
            if first is not None:
                first.synchronize()
            sent.synchronize()
            total = self.tensor.to(wide(more.dtype)).add_(more)
            if total is not self.tensor:
                pool.give(self.tensor)
            self.tensor = total
            pool.give(more)

        self.adding = worker.submit(add)


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of `dtype` are summed: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def square_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of squares, in float32 at least, without a copy."""
    return torch.linalg.vector_norm(tensor, dtype=wide(tensor.dtype)).square()
