"""What packages that never import each other know of one another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from cai_mesh.flat import FlatChunk


@runtime_checkable
class CommHandle(Protocol):
    """A communication or copy under way."""

    def wait(self) -> None:
        """Return once the result may be used by the caller's stream."""


@runtime_checkable
class GradSync(Protocol):
    """Whoever combines gradients across ranks while backward runs."""

    def defer(self) -> AbstractContextManager[None]:
        """Backwards inside only accumulate. A backward outside reduces what has accumulated."""
        ...

    def finish(self) -> None:
        """Wait for every reduction of the step."""


@runtime_checkable
class ParameterSharding(Protocol):
    """Whoever keeps parameters sharded between uses.

    `driver` says who calls: module hooks ("hooks") or a schedule's actions ("actions"); never both.
    """

    driver: Literal["hooks", "actions"]

    def unshard(self, module: nn.Module) -> CommHandle:
        """Gather the parameters of `module` and everything below it."""
        ...

    def reshard(self, module: nn.Module) -> None:
        """Free what `unshard` gathered."""

    def reduce(self, module: nn.Module) -> None:
        """Start reducing the gradients accumulated below `module`."""


class Stored:
    """A chunk-shaped or shard-shaped tensor that stays between uses.

    Args:
        chunk: of which chunk it is (a part).
        home: the tensor that stays, in whatever memory its residency chose.
        device: where it is used.
    """

    def __init__(self, chunk: FlatChunk, home: torch.Tensor, device: torch.device):
        self.chunk, self.home, self.device = chunk, home, device
        self.on_device: torch.Tensor | None = home if home.device == device else None


@runtime_checkable
class Residency(Protocol):
    """Which memory data lives in between uses."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The home of a tensor that is to stay: itself, or a copy in another memory, complete on return."""
        ...

    def fetch(self, stored: Stored) -> CommHandle:
        """Bring the data to its device; it is in `stored.on_device` after `wait`."""
        ...

    def release(self, stored: Stored) -> None:
        """The device copy is not in use any more and was not changed; its memory may be taken."""

    def evict(self, stored: Stored) -> None:
        """Write a changed device copy back to its home and free it."""


class Done:
    """A `CommHandle` of something that has already happened."""

    def wait(self) -> None:
        return None


class OnDevice:
    """The `Residency` that leaves everything where it is."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def fetch(self, stored: Stored) -> CommHandle:
        return Done()

    def release(self, stored: Stored) -> None:
        return None

    def evict(self, stored: Stored) -> None:
        return None
