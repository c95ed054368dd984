"""How the sides of triangles update the pair [B, R, R, c_z]: Algorithms 11 to 14."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cai_apps.applications.protein.model.attention import GatedAttention
from cai_apps.applications.protein.model.layers import linear


class _Product(torch.autograd.Function):
    """left [B, i, k, C], right [B, j, k, C] -> their product over k for each channel, [B, i, j, C].

    Forward and backward multiply [B, C] contiguous matrices. A compiled kernel writes its result in that order at no
    cost. Multiplied as they are, with channels last, each operand would be copied before each product.
    """

    @staticmethod
    def forward(ctx, left_operand, right_operand):
        left_operand, right_operand = (
            x.permute(0, 3, 1, 2).contiguous() for x in (left_operand, right_operand)
        )
        ctx.save_for_backward(left_operand, right_operand)
        return (left_operand @ right_operand.transpose(-1, -2)).permute(0, 2, 3, 1)

    @staticmethod
    def backward(ctx, grad):
        left_operand, right_operand = ctx.saved_tensors
        grad = grad.permute(0, 3, 1, 2).contiguous()
        operand_grads = grad @ right_operand, grad.transpose(-1, -2) @ left_operand
        return tuple(x.permute(0, 2, 3, 1) for x in operand_grads)


class TriangleMultiplication(nn.Module):
    """Side ij from the sides that leave i and j, ik and jk (Algorithm 11), or that end there, ki and kj (12)."""

    def __init__(self, c_z: int, inner: int, *, outgoing: bool):
        super().__init__()
        self.outgoing = outgoing
        self.norm = nn.LayerNorm(c_z)
        self.left = linear(c_z, inner)
        self.left_gate = linear(c_z, inner, initial="gate")
        self.right = linear(c_z, inner)
        self.right_gate = linear(c_z, inner, initial="gate")
        self.norm_out = nn.LayerNorm(inner)
        self.out = linear(inner, c_z, initial="final")
        self.gate = linear(c_z, c_z, initial="gate")

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        """The update of z; mask [B, R, R]."""
        z = self.norm(z)
        mask = mask.to(z.dtype)[..., None]
        left_projection = torch.sigmoid(self.left_gate(z)) * self.left(z) * mask
        right_projection = torch.sigmoid(self.right_gate(z)) * self.right(z) * mask
        if not self.outgoing:
            left_projection, right_projection = (
                left_projection.transpose(1, 2),
                right_projection.transpose(1, 2),
            )
        product = _Product.apply(left_projection, right_projection)
        return self.out(self.norm_out(product)) * torch.sigmoid(self.gate(z))


class TriangleAttention(nn.Module):
    """Side ij looks at the sides ik, biased by jk (Algorithm 13), or at kj, biased by ki (14)."""

    def __init__(self, c_z: int, heads: int, head: int, *, starting: bool):
        super().__init__()
        self.starting = starting
        self.norm = nn.LayerNorm(c_z)
        self.bias = linear(c_z, heads, bias=False)
        self.attention = GatedAttention(c_z, heads, head)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        """The update of z; mask [B, R, R]."""
        if not self.starting:
            z, mask = z.transpose(1, 2), mask.transpose(1, 2)
        z = self.norm(z)
        update = self.attention(z, mask, self.bias(z).permute(0, 3, 1, 2))
        return update if self.starting else update.transpose(1, 2)
