"""The checked inputs of the linear cross-entropy, flattened to rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.cross_entropy.function import DTYPES, check_target
from cai_kernels.errors import KernelError
from cai_kernels.linear_cross_entropy.options import Execution, Needed, float32_or_wider

CHUNK_BYTES = 512 << 20


@dataclass(frozen=True)
class Inputs:
    """Checked inputs: x [T, D], weight [V, D], bias [V] or None, target [T]."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    needed: Needed
    execution: Execution

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(x, weight, bias, target), the first arguments of every operator."""
        return self.x, self.weight, self.bias, self.target


def chunk_rows(tokens: int, columns: int, width: int, limit: int) -> int:
    """Tokens of a chunk: equal chunks, as few as keep its logits, `width` bytes each, within `limit` bytes."""
    most = max(limit // (columns * width), 1)
    if most >= tokens:
        return max(tokens, 1)
    step = 128 if most >= 128 else 1
    most -= most % step
    chunks = -(-tokens // most)
    even = -(-tokens // chunks)
    return even + -even % step


def _needs_grad(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    backend: Backend,
    chunk_bytes: int,
    sum_in_weight_dtype: bool = False,
) -> Inputs:
    """Check the tensors, flatten them and, under autocast, cast them."""
    form = choose(backend, x.device)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    require("x", x, dtypes=DTYPES if form == "triton" else (*DTYPES, torch.float64))
    require("weight", weight, dtypes=(x.dtype,), like=x)
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or 0 in weight.shape:
        raise KernelError(
            "weight does not fit x",
            got=f"weight {tuple(weight.shape)}, x {tuple(x.shape)}",
            expected="x [..., D] and weight [V, D], V and D of at least 1",
        )
    if bias is not None:
        require("bias", bias, dtypes=(x.dtype,), like=x)
        if bias.shape != weight.shape[:1]:
            raise KernelError(
                "bias does not fit weight", got=tuple(bias.shape), expected=f"({weight.shape[0]},)"
            )
    check_target(x, target)
    if chunk_bytes < 1:
        raise KernelError("chunk_bytes is too small", got=chunk_bytes, expected="1 or more")
    wide = float32_or_wider(weight.dtype)
    execution = Execution(
        chunk_rows(target.numel(), weight.shape[0], x.element_size(), chunk_bytes),
        triton=form == "triton",
        sum_dtype=weight.dtype if sum_in_weight_dtype else wide,
        grad_dtype=wide if not sum_in_weight_dtype and _wants_float32(weight) else weight.dtype,
    )
    return Inputs(
        x.reshape(-1, x.shape[-1]).contiguous(),
        weight,
        bias,
        target.reshape(-1).contiguous(),
        Needed(_needs_grad(x), _needs_grad(weight), _needs_grad(bias)),
        execution,
    )


def _wants_float32(weight: torch.Tensor) -> bool:
    """Whether the gradient of the weight is to be float32; a compiled graph cannot read `grad_dtype`."""
    if torch.compiler.is_compiling() or not weight.is_leaf:
        return False
    return getattr(weight, "grad_dtype", None) == torch.float32
