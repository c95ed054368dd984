"""Checks of the arguments that FP8 linear layers can take."""

from __future__ import annotations

from typing import Literal

import torch

from cai_kernels.backend import capability, require
from cai_kernels.errors import KernelError
from cai_kernels.fp8_linear.reference import BLOCK, ROW, TENSOR

Scaling = Literal["tensor", "row", "block"]
SCALINGS = {"tensor": TENSOR, "row": ROW, "block": BLOCK}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_features(out_features: int, in_features: int) -> None:
    """Raise `KernelError` for a weight [out, in] of these dims that FP8 products cannot take."""
    shape = (out_features, in_features)
    if 0 in shape or out_features % 16 or in_features % 16:
        raise KernelError(
            "weight has dims that FP8 products cannot take",
            got=shape,
            expected="multiples of 16",
            fix="leave this layer in bfloat16",
        )


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: str) -> None:
    """Raise `KernelError` for arguments of `fp8_linear` that do not fit."""
    if scaling not in SCALINGS:
        raise KernelError("unknown scaling", got=repr(scaling), expected="'tensor', 'row' or 'block'")
    require("x", x, dtypes=DTYPES)
    require("weight", weight, dtypes=DTYPES, like=x)
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise KernelError(
            "weight does not fit x",
            got=f"weight {tuple(weight.shape)}, x {tuple(x.shape)}",
            expected="x [..., in] and weight [out, in]",
        )
    check_features(*weight.shape)
    if bias is not None:
        require("bias", bias, dtypes=DTYPES, like=x)
        if bias.shape != weight.shape[:1]:
            raise KernelError(
                "bias does not fit weight", got=tuple(bias.shape), expected=f"({weight.shape[0]},)"
            )


def check_device(device: torch.device) -> None:
    """Raise `KernelError` for a GPU without FP8 products."""
    if device.type == "cuda" and capability(device) < (8, 9):
        raise KernelError(
            "this GPU has no FP8 products",
            got="compute capability " + ".".join(map(str, capability(device))),
            expected="8.9 or higher (Ada, Hopper)",
            fix='use torch.nn.functional.linear, or backend="reference" to emulate',
        )
