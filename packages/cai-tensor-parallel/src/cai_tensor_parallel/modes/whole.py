"""Linear layers that stay whole, and of whose results each rank uses a part: key/value heads, rotary features.

Every rank computes all results; in backward the gradients of the results are put together over the ranks, and from
there on all of it is that of a layer alone: no sum of the input's gradient, the same weight gradient on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_mesh.comm import Members, start_sum
from cai_mesh.gradients import Local
from cai_mesh.protocols import TensorHandle

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Picked(Local):
    """Some heads of a whole layer's output: [..., len(picked) * width] of x [..., in] and weight [heads * width, in].

    Args:
        ranks: that share the layer.
        heads: the number of the layer's heads.
        picked: heads this rank computes with, in this order; one may come more than once.
    """

    ranks: Members
    heads: int
    picked: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"heads {self.picked} of {self.heads} of {self.ranks.name}, {self.products.key}"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        y, saved = self.products.forward(x, weight, bias)
        by_head = y.unflatten(-1, (self.heads, -1))
        return torch.cat([by_head[..., head, :] for head in self.picked], -1), saved

    def backward(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, **needs: bool
    ) -> tuple[TensorHandle, Tensors, torch.Tensor | None]:
        parts = dy.unflatten(-1, (len(self.picked), -1))
        all_heads = dy.new_zeros(*dy.shape[:-1], self.heads, parts.shape[-1])
        for place, head in enumerate(self.picked):
            all_heads[..., head, :] += parts[..., place, :]
        return super().backward(start_sum(all_heads.flatten(-2), self.ranks).wait(), weight, saved, **needs)


@dataclass(frozen=True)
class Tail(Local):
    """A whole layer [..., out], whose last features each rank uses in its own way, and the others all alike.

    Args:
        ranks: that share the layer.
        width: number of last features.
    """

    ranks: Members
    width: int

    @property
    def key(self) -> str:
        return f"last {self.width} of {self.ranks.name}, {self.products.key}"

    def backward(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, **needs: bool
    ) -> tuple[TensorHandle, Tensors, torch.Tensor | None]:
        tail = start_sum(dy[..., -self.width :].clone(), self.ranks).wait()
        return super().backward(torch.cat((dy[..., : -self.width], tail), -1), weight, saved, **needs)
