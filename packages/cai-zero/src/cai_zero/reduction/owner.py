"""The protocol by which the keepers of single parameters ask whoever reduces a step's gradients.

Owners make keepers, and keepers know an owner by this protocol alone. They refer weakly to what they ask. A chunk has
nodes of autograd, which have its parameters: were those to have the chunk, Python's collector would not see the
circle, and no memory would ever be free again.
"""

from __future__ import annotations

from typing import Protocol

from cai_mesh.errors import PlanError


class GradientOwner(Protocol):
    """Whoever reduces the gradients of a step, in any stage."""

    def ensure_gradients(self) -> None:
        """Return with the gradients of the coming step complete. Collective, unless they are already."""


def owner_gone() -> PlanError:
    """The error of a keeper whose owner has been collected."""
    return PlanError(
        "a gradient was asked for of a parameter whose model or optimizer is gone",
        fix="keep what shard_optimizer or shard_module returned as long as its parameters",
    )
