"""What packages that never import each other know of one another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

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


@runtime_checkable
class Residency(Protocol):
    """Which memory a chunk's data lives in between uses."""

    def fetch(self, chunk: FlatChunk) -> CommHandle:
        """Bring the chunk's data to its compute device."""
        ...

    def release(self, chunk: FlatChunk) -> None:
        """The chunk is not in use; its device memory may be taken."""

    def evict(self, chunk: FlatChunk) -> None:
        """Move the chunk's data off the device now."""


class GradSink(Protocol):
    """Where weight-gradient code puts its result without an intermediate tensor."""

    def add(self, param: nn.Parameter, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Accumulate `dy[T, out]ᵀ @ x[T, in]` into the gradient of `param[out, in]`."""


class Done:
    """A `CommHandle` of something that has already happened."""

    def wait(self) -> None:
        return None


class OnDevice:
    """The `Residency` that leaves everything where it is."""

    def fetch(self, chunk: FlatChunk) -> CommHandle:
        return Done()

    def release(self, chunk: FlatChunk) -> None:
        return None

    def evict(self, chunk: FlatChunk) -> None:
        return None


def check_single_driver(sharding: Any, asked: Literal["hooks", "actions"]) -> None:
    """Raise `PlanError` when `sharding` is driven by something other than `asked`."""
    from cai_mesh.errors import PlanError

    driver = getattr(sharding, "driver", None)
    if driver != asked:
        raise PlanError(
            "parameter sharding has two drivers",
            got=f"built with driver={driver!r}, now driven by {asked!r}",
            fix=f"shard the module with driver={asked!r}",
        )
