"""What strips tell each other: at once, or to be read a step later."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from cai_mesh.comm import all_gather_into
from cai_mesh.errors import PlanError
from cai_mesh.protocols import CommHandle


@dataclass
class Clock:
    """Where a picture stands, for all its exchanges.

    Args:
        step: the step of the denoising, from 0.
        warmup: steps that wait for this step's neighbours; None: all.
        nbytes: the bytes that this rank has received.
    """

    step: int = -1
    warmup: int | None = None
    nbytes: int = 0

    @property
    def stale(self) -> bool:
        """Whether this step reads what was sent a step before."""
        return self.warmup is not None and self.step >= self.warmup


class Exchange:
    """One layer's tensors of all strips.

    Args:
        name: the name of the layer, in messages.
        group: the group of the ranks, in the order of their strips.
        clock: shared by all layers.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, clock: Clock):
        self._name, self._group, self._clock = name, group, clock
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._step: int | None = None
        self._parts: list[Tensor] = []
        self._work: CommHandle | None = None
        self._sent: Tensor | None = None

    def clear(self) -> None:
        """Forget the last picture, after what is under way has arrived."""
        self._wait()
        self._step, self._parts, self._sent = None, [], None

    def all(self, local_tensor: Tensor) -> list[Tensor]:
        """The tensors of all strips, in their order: of this step, or of the step before, one's own among them.

        Raises:
            PlanError: the layer runs twice in a step, or its shape changes within a picture.
        """
        if self._step == self._clock.step:
            raise PlanError(f"{self._name} runs twice in a step", expected="layers of their own for each use")
        before = self._before(local_tensor) if self._clock.stale else None
        self._start(local_tensor)
        self._step = self._clock.step
        if before is not None:
            return before
        self._wait()
        return self._parts

    def _before(self, local_tensor: Tensor) -> list[Tensor]:
        self._wait()
        if self._step != self._clock.step - 1 or self._parts[0].shape != local_tensor.shape:
            raise PlanError(f"{self._name} has nothing of the step before", fix="start() before each picture")
        return self._parts

    def _start(self, local_tensor: Tensor) -> None:
        self._sent = local_tensor.contiguous()
        gathered = self._sent.new_empty(self._size, *self._sent.shape)  # a list would be copied once more
        self._parts = list(gathered)
        self._work = all_gather_into(gathered.flatten(0, 1), self._sent, self._group, async_op=True)
        self._clock.nbytes += self._sent.nbytes * (self._size - 1)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
