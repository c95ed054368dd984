"""The three matrix products of a linear layer in plain torch: the mathematics, which knows no rank and no buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class PlainProducts:
    """The `LinearProducts` of torch.

    Args:
        transposed: the weight is [in, out], as in GPT-2's Conv1D, and not [out, in].
    """

    transposed: bool = False

    @property
    def key(self) -> str:
        return "plain transposed" if self.transposed else "plain"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """x [..., in] -> y [..., out]; saves x."""
        return F.linear(x, weight.t() if self.transposed else weight, bias), (x,)

    def backward(
        self,
        dy: torch.Tensor,
        weight: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        *,
        needs_input: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...], torch.Tensor | None]:
        """dy [..., out] -> dx [..., in]; the weight's gradient is a product of dy and x."""
        dx = None
        if needs_input:
            dx = dy @ weight.t() if self.transposed else dy @ weight
        db = dy.flatten(0, -2).sum(0) if needs_bias else None
        return dx, (dy, *saved) if needs_weight else (), db

    def weight_grad(self, operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
        first, second = self._factors(operands)
        return first.t() @ second

    def write_weight_grad(
        self, operands: tuple[torch.Tensor, ...], out: torch.Tensor, *, fresh: bool
    ) -> None:
        """out (+)= the product, summed in float32 where `out` is and the device can."""
        first, second = self._factors(operands)
        if out.dtype == first.dtype:
            torch.mm(first.t(), second, out=out) if fresh else out.addmm_(first.t(), second)
        elif out.is_cuda and out.dtype == torch.float32:
            if fresh:
                torch.mm(first.t(), second, out_dtype=torch.float32, out=out)
            else:
                torch.addmm(out, first.t(), second, out_dtype=torch.float32, out=out)
        elif fresh:
            out.copy_(first.t() @ second)
        else:
            out.add_(first.t() @ second)

    def _factors(self, operands: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, rows] and [T, columns] of the weight's gradient."""
        dy, x = (t.flatten(0, -2) for t in operands)
        return (x, dy) if self.transposed else (dy, x)


PLAIN = PlainProducts()
TRANSPOSED = PlainProducts(transposed=True)
