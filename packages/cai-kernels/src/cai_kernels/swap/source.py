"""The output layer at one call: what logits are computed with later, and their loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cai_kernels.backend import Backend
from cai_kernels.errors import KernelError
from cai_kernels.linear_cross_entropy import linear_cross_entropy

STEPS = [0]
"""Steps that optimizers have made."""


@dataclass(frozen=True)
class Request:
    """A loss asked of the output layer: the arguments of `linear_cross_entropy` after the weight."""

    target: torch.Tensor
    options: dict[str, Any]


FORM = None  # asked of the output layer instead of a loss: logits

Question = Callable[[nn.Module, torch.Tensor, float | None], torch.Tensor]
"""Takes the output layer, its input [..., D] and the cap of its logits; gives what they are wanted for."""


@dataclass(frozen=True)
class Source:
    """An output layer at one call.

    Args:
        head: the layer.
        tensors: its weight and bias then, with their versions; empty if the layer is called again.
        autocast: whether autocast was on, and its dtype.
        step: number of steps that optimizers had made.
        backend: backend of the kernel.
        is_part: whether it has a part of the vocabulary's columns: a cross-entropy of them alone means nothing.
    """

    head: nn.Module
    tensors: tuple[tuple[torch.Tensor | None, int], ...]
    autocast: tuple[bool, torch.dtype]
    step: int
    backend: Backend
    is_part: bool = False

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., V] for [..., D]."""
        self.check()
        with self._as_then(hidden):
            if not self.tensors:
                return self.head(hidden, FORM)
            return F.linear(hidden, *(t for t, _ in self.tensors))  # type: ignore[arg-type]

    def loss(self, hidden: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        self.check()
        with self._as_then(hidden):
            if not self.tensors:
                return self.head(hidden, Request(target, options))
            (weight, _), (bias, _) = self.tensors
            return linear_cross_entropy(hidden, weight, target, bias=bias, backend=self.backend, **options)  # type: ignore

    def answer(self, hidden: torch.Tensor, question: Question, softcap: float | None) -> torch.Tensor:
        """The answer to a question about the layer, called while its weights are there; of a layer called again."""
        self.check()
        with self._as_then(hidden):
            return self.head(hidden, lambda head, layer_input: question(head, layer_input, softcap))

    def _as_then(self, hidden: torch.Tensor) -> torch.autocast:
        enabled, dtype = self.autocast
        return torch.autocast(hidden.device.type, dtype, enabled)

    def check(self) -> None:
        """Raise `KernelError` if the weights have changed since."""
        changed = any(t is not None and t._version != version for t, version in self.tensors)
        if changed or (not self.tensors and self.step != STEPS[0]):
            raise KernelError(
                "logits are read, for the first time, after the weights of the output layer have changed",
                expected="the first use of logits, or a loss of them, before the optimizer's step",
                fix="read them before the step, call logits.form() there, or swap without kind 'loss'",
            )
