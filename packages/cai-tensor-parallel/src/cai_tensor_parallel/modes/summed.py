"""The part that the rules of grids share: the gradient of a weight is put together over ranks before it is given on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cai_mesh.gradients import Local

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Summed(Local):
    """A rule whose operand of the weight's gradient is that gradient, summed over the ranks."""

    def part_of_sum(self, operands: Tensors, shape: Sequence[int], weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of a weight's gradient, of a shape, in float32 at least."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        out = torch.empty(shape, dtype=dtype, device=weight.device)
        self.products.write_weight_grad(operands, out, fresh=True)
        return out

    def weight_grad(self, operands: Tensors) -> torch.Tensor:
        return operands[0]

    def write_weight_grad(self, operands: Tensors, out: torch.Tensor, *, fresh: bool) -> None:
        out.copy_(operands[0]) if fresh else out.add_(operands[0])
