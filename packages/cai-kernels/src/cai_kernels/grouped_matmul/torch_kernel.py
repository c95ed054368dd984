"""Grouped matmul by torch's own operator; values that it leaves undefined are set to zero."""

from __future__ import annotations

import torch

from cai_kernels.backend import capability
from cai_kernels.grouped_matmul.operators import differentiable


def why_not(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """The reason why `torch._grouped_mm` cannot take these arguments, or None."""
    if not hasattr(torch, "_grouped_mm"):
        return "this torch has no _grouped_mm"
    if x.dtype != torch.bfloat16:
        return f"dtype {x.dtype}; it takes torch.bfloat16"
    if x.shape[0] == 0 or weight.shape[0] == 0:
        return "no rows or no experts"
    if weight.shape[0] >= 1024:
        return f"{weight.shape[0]} experts; it takes fewer than 1024"
    if weight.shape[1] % 8 or weight.shape[2] % 8 or 0 in weight.shape:
        return f"weight {tuple(weight.shape)}; it takes D and F that are positive multiples of 8"
    if not (_dense(weight) or _dense(weight.transpose(1, 2))):
        return f"weight has strides {weight.stride()}; it takes contiguous rows or columns, 16-byte aligned"
    return None


def fast(device: torch.device) -> bool:
    """Whether torch has a grouped kernel for this GPU (elsewhere the host loops over the groups)."""
    return device.type == "cuda" and capability(device) in ((9, 0), (10, 0))


def _dense(matrix: torch.Tensor) -> bool:
    """Whether the last dim is contiguous and every row starts at a multiple of 16 bytes of the first."""
    return (
        matrix.stride(-1) == 1
        and matrix.stride(-2) >= matrix.shape[-1]
        and all(stride % 8 == 0 for stride in matrix.stride()[:-1])
    )


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.dim() == 3 and not _dense(matrix):
        return _aligned(matrix.transpose(1, 2)).transpose(1, 2)
    if not _dense(matrix):
        matrix = matrix.contiguous()
    return matrix if matrix.data_ptr() % 16 == 0 else matrix.clone()


def _grouped_matmul_torch(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [T, D], weight [E, D, F], offsets [E + 1] -> [T, F]."""
    out = torch._grouped_mm(_aligned(x), _aligned(weight), offs=offsets[1:])
    if out.device.type == "cuda":
        from cai_kernels.grouped_matmul import triton

        triton.clear_tail(out, offsets)
    else:
        out[int(offsets[-1]) :] = 0
    return out


def _grouped_matmul_torch_weight(
    x: torch.Tensor, dout: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """The gradient of weight, `x[rows of e].T @ dout[rows of e]`, in the strides of weight."""
    dweight = torch.empty_like(weight)
    x, dout = _aligned(x), _aligned(dout)
    if dweight.stride(2) == 1:
        gradient = torch._grouped_mm(x.t(), dout, offs=offsets[1:])
    else:
        gradient = torch._grouped_mm(dout.t(), x, offs=offsets[1:]).transpose(1, 2)
    if gradient.device.type == "cuda":
        from cai_kernels.grouped_matmul import triton

        triton.clear_empty(gradient if gradient.is_contiguous() else gradient.transpose(1, 2), offsets)
    else:
        gradient[offsets.diff() == 0] = 0
    return gradient if gradient.stride() == dweight.stride() else dweight.copy_(gradient)


grouped_matmul, grouped_matmul_weight = differentiable(_grouped_matmul_torch, _grouped_matmul_torch_weight)
