"""Options that say how the linear cross-entropy computes, as the operators take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Needed:
    """Whether each input needs a gradient."""

    x: bool = False
    weight: bool = False
    bias: bool = False

    def __bool__(self) -> bool:
        return self.x or self.weight or self.bias

    def arguments(self) -> dict[str, bool]:
        """The fields as keyword arguments of an operator."""
        return {"need_x": self.x, "need_weight": self.weight, "need_bias": self.bias}


@dataclass(frozen=True)
class Execution:
    """The way an operator computes.

    Args:
        chunk_rows: tokens of a chunk.
        triton: whether Triton kernels process the logits, or plain torch.
        sum_dtype: dtype in which the gradient of the weight is summed over chunks.
        grad_dtype: dtype in which the gradient of the weight is returned.
    """

    chunk_rows: int
    triton: bool
    sum_dtype: torch.dtype
    grad_dtype: torch.dtype

    def arguments(self) -> dict[str, int | torch.dtype]:
        """The fields as keyword arguments of an operator."""
        return {
            "chunk_rows": self.chunk_rows,
            "triton": self.triton,
            "sum_dtype": self.sum_dtype,
            "grad_dtype": self.grad_dtype,
        }


def float32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)
