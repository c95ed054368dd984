"""Public entry points: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.token_permute import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (torch.int32, torch.int64)
MAX_CHOICES = 32
MAX_COLUMNS = 32768
MAX_EXPERTS = 1024


def token_permute(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    n_experts: int,
    *,
    rows: int | None = None,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy every token to a row for each of its choices, rows ordered by expert.

    The order is stable: among the rows of one expert, tokens stay in order. A choice whose id is outside 0..E-1 (-1,
    or E as Hugging Face marks experts of other ranks) is dropped: its row stands after all others and holds zeros.
    Sizes depend on shapes alone and nothing waits for the device. The sort is a counting sort: counts by block of
    choices, their prefix sums, the rank inside the block; no atomics, the same every run.

    Args:
        x: [T, D], float32, bfloat16 or float16 (the reference takes float64 too).
        expert_ids: [T, K], int32 or int64, on x's device. K up to 32 in Triton.
        n_experts: E; up to 1024 in Triton.
        rows: the number of rows of the result, for a host that knows how many choices are kept: as many at least, and
            T * K at most. None: T * K.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns (permuted [rows, D], offsets [E + 1] int32, index [T, K] int32). The rows of expert e are
    offsets[e]..offsets[e + 1]; offsets[E] is the number of rows kept. index is the row of a choice, or -1 - row where
    the choice is dropped. Differentiable in x: the gradient of a token is the sum of its rows', in float32.
    Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, x.device)
    require("x", x, dtypes=_DTYPES if form == "triton" else (*_DTYPES, torch.float64))
    require("expert_ids", expert_ids, dtypes=_WHOLE, like=x)
    if x.dim() != 2 or expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0]:
        raise KernelError(
            "expert_ids does not fit x",
            got=f"x {tuple(x.shape)}, expert_ids {tuple(expert_ids.shape)}",
            expected="x [T, D], expert_ids [T, K]",
        )
    if n_experts < 1:
        raise KernelError("n_experts must be positive", got=n_experts)
    rows = expert_ids.numel() if rows is None else rows
    if not 0 <= rows <= expert_ids.numel():
        raise KernelError(
            "rows does not fit expert_ids", got=rows, expected=f"0 to {expert_ids.numel()}, T * K"
        )
    if form == "reference":
        index, offsets = reference.expert_order(expert_ids, n_experts)
        return reference.spread(x, index, rows), offsets, index
    from cai_kernels.token_permute import triton

    check_sizes(expert_ids.shape[1], x.shape[1], n_experts)
    index, offsets = triton.expert_order(expert_ids.contiguous(), n_experts)
    return triton.token_spread(x.contiguous(), index, rows), offsets, index


def token_unpermute(
    y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None = None, *, backend: Backend = "auto"
) -> torch.Tensor:
    """The inverse of `token_permute`: the weighted sum of a token's rows, in float32.

    Args:
        y: [rows, D], float32, bfloat16 or float16 (the reference takes float64 too).
        index: [T, K] int32, from `token_permute`; dropped choices count as zero, their rows are not read.
        weights: [T, K], any floating dtype, on y's device; None for ones.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [T, D] in y's dtype. Differentiable in y and weights (the gradient of a dropped row or weight is zero).
    Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, y.device)
    require("y", y, dtypes=_DTYPES if form == "triton" else (*_DTYPES, torch.float64))
    require("index", index, dtypes=(torch.int32,), like=y)
    if y.dim() != 2 or index.dim() != 2 or index.numel() < y.shape[0]:
        raise KernelError(
            "index does not fit y",
            got=f"y {tuple(y.shape)}, index {tuple(index.shape)}",
            expected="y [rows, D], as many rows as token_permute was asked for, index [T, K]",
            fix="pass the index token_permute returned",
        )
    if weights is not None:
        require("weights", weights, dtypes=(*_DTYPES, torch.float64), like=y)
        if weights.shape != index.shape:
            raise KernelError(
                "weights does not fit index", got=tuple(weights.shape), expected=tuple(index.shape)
            )
    if form == "reference":
        return reference.collect(y, index, weights)
    from cai_kernels.token_permute import triton

    check_sizes(index.shape[1], y.shape[1], 1)
    if weights is not None and weights.dtype == torch.float64:
        raise KernelError(
            "the Triton token_unpermute does not take float64 weights", fix='cast, or use backend="reference"'
        )
    return triton.token_collect(
        y.contiguous(), index.contiguous(), None if weights is None else weights.contiguous()
    )


def check_sizes(choices: int, columns: int, experts: int) -> None:
    """Raise `KernelError` for sizes that the kernels do not take."""
    if choices > MAX_CHOICES or columns > MAX_COLUMNS or experts > MAX_EXPERTS:
        raise KernelError(
            "the Triton token_permute does not take this shape",
            got=f"K {choices}, D {columns}, n_experts {experts}",
            expected=f"K up to {MAX_CHOICES}, D up to {MAX_COLUMNS}, n_experts up to {MAX_EXPERTS}",
            fix='use backend="reference"',
        )
