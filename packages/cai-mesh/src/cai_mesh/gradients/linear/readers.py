"""Layers that read the same tensor, and sum its gradient over ranks once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cai_mesh.protocols import LinearRule


@dataclass(frozen=True)
class Reading:
    """The way in which a layer is to read a tensor.

    Args:
        source: the tensor its gradient goes to: itself, its part, or what the reader before has handed on.
        first: nobody has read it before: in backward this layer comes last, and sums the gradients of all.
        part: `source` is this rank's part of the tensor, so the sum is scattered.
    """

    source: torch.Tensor
    first: bool
    part: bool


class Readers:
    """The layers inside one module that read the same tensor, such as queries, keys and values.

    Alone, each of them would have the gradient of what it read summed over the ranks. Here each hands what it has read
    on to the next. So backward adds up the gradients from the last reader to the first, and the first has the sum
    summed over the ranks, beside its own weight's gradient. Who reads what is seen when layers are called: another
    tensor begins anew. Nothing is kept when the module is done.

    In compiled graphs each sums by itself unless `share_in_graphs` says otherwise.

    Attributes:
        leads: the layer whose product may be made while what it reads is put together; None: none.
        may_lead: whether one may, as its weight is there when `lend` is called.
    """

    def __init__(self) -> None:
        self.in_graphs = False
        self.leads: nn.Module | None = None
        self.may_lead = False
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None
        self._open = False
        self._read: torch.Tensor | None = None
        self._next: Reading | None = None

    def watch(self, module: nn.Module) -> None:
        """Be open while `module` computes."""
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._open, self._read, self._next, self._made = True, None, None, None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._made is not None:  # made in vain: the layer read something else
            self.leads = None
        self._open, self._read, self._next, self._made = False, None, None, None

    def _shares(self) -> bool:
        allowed = self.in_graphs or not torch.compiler.is_compiling()
        return allowed and self._open and torch.is_grad_enabled()

    def may_lend(self, part: torch.Tensor) -> bool:
        """Whether layers are to share what is put together from every rank's `part`."""
        return self._shares() and part.requires_grad

    def lend(self, x: torch.Tensor, part: torch.Tensor, made: torch.Tensor | None = None) -> None:
        """Expect that `x`, put together from every rank's `part`, is read next.

        Args:
            made: the product of `x` and the weight of the layer that `leads`, where there is one already.
        """
        if self.may_lend(part):
            self._read, self._next = x, Reading(part, True, True)
            self._made = None if made is None else (x, made)

    def take(self, x: torch.Tensor) -> Reading | None:
        """Return how the layer that is called with `x` reads it; None: by itself."""
        if not (self._shares() and x.requires_grad):
            return None
        if x is not self._read:
            self._read, self._next = x, Reading(x, True, False)
        return self._next

    def take_made(self, x: torch.Tensor, rule: LinearRule) -> torch.Tensor | None:
        """The product of `x` that the layer with this rule is about to make, if it is there already."""
        if self._made is None or self._made[0] is not x or not getattr(rule, "leads", False):
            return None
        product, self._made = self._made[1], None
        return product

    def hand_on(self, x: torch.Tensor) -> None:
        """Let the next reader of the same tensor give its gradient to `x`."""
        self._next = Reading(x, False, False)


def share_in_graphs(model: nn.Module) -> None:
    """Let readers share in compiled graphs, too; a graph must not keep products and make what follows again."""
    for module in model.modules():
        readers = getattr(module.__dict__.get("cai_rule"), "readers", None)
        if readers is not None:
            readers.in_graphs = True
