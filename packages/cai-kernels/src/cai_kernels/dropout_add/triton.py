"""Dropout and residual sum in Triton: backward makes the random numbers again, of the seed and the place of a value."""

from __future__ import annotations

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.ops import define

BLOCK = 1024


@triton.jit
def _kept(seed_ptr, program, p, BLOCK: tl.constexpr):
    """1 / (1 - p) where a value of this block is kept, else 0.

    Eight values come of each Philox block of 128 bits, 16 bits each; seven rounds pass all of BigCrush (Salmon et al.).
    More of either and the kernel would wait for its arithmetic, not for memory.
    """
    eight = program * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), eight, 7)
    ab = tl.join(tl.join(a & 0xFFFF, (a >> 16) & 0xFFFF), tl.join(b & 0xFFFF, (b >> 16) & 0xFFFF))
    cd = tl.join(tl.join(c & 0xFFFF, (c >> 16) & 0xFFFF), tl.join(d & 0xFFFF, (d >> 16) & 0xFFFF))
    drawn = tl.reshape(tl.join(ab, cd), (BLOCK,)).to(tl.int32)
    return tl.where(drawn >= (tl.full((), 65536.0, tl.float32) * p + 0.5).to(tl.int32), 1.0 / (1.0 - p), 0.0)


@triton.jit
def _forward(x_ptr, residual_ptr, y_ptr, seed_ptr, count, p, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    y = x * _kept(seed_ptr, program, p, BLOCK)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < count)


def _run(x: torch.Tensor, residual: torch.Tensor | None, p: float, seed: torch.Tensor) -> torch.Tensor:
    count = x.numel()
    y = x.new_zeros(x.shape) if p == 1.0 and residual is None else x.new_empty(x.shape)
    if p == 1.0:
        return y if residual is None else y.copy_(residual)
    if count:
        launch = _forward[(triton.cdiv(count, BLOCK),)]  # pyright: ignore[reportIndexIssue]
        residual = None if residual is None else residual.contiguous()
        launch(x.contiguous(), residual, y, seed, count, p, BLOCK=BLOCK, num_warps=4)
    return y


def _dropout_add(x: torch.Tensor, residual: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    """residual + x / (1 - p) where x is kept; contiguous, of x's shape."""
    return _run(x, residual, p, seed)


def _dropout(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    """x / (1 - p) where it is kept, else 0: the gradient of x from that of the sum."""
    return _run(x, None, p, seed)


def _empty_sum(x: torch.Tensor, residual: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _empty(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _save(ctx, inputs, output) -> None:
    _, _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy):
    if dy is None:
        return None, None, None, None
    x, residual = ctx.needs_input_grad[:2]
    (seed,) = ctx.saved_tensors
    return dropout(dy, ctx.p, seed) if x else None, dy if residual else None, None, None


def _save_seed(ctx, inputs, output) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _differentiate_again(ctx, dy):
    return dropout(dy, ctx.p, *ctx.saved_tensors), None, None


dropout = define(_dropout, _empty, save=_save_seed, backward=_differentiate_again, twice=_differentiate_again)
dropout_add = define(_dropout_add, _empty_sum, save=_save, backward=_differentiate, twice=_differentiate)


def dropout_mask(shape: tuple[int, ...], p: float, seed: int, device: torch.device) -> torch.Tensor:
    """Mask of the values that the kernel keeps of a tensor of this shape: bool. For tests and debugging."""
    ones = torch.ones(shape, device=device)
    return dropout(ones, p, torch.full((), seed, dtype=torch.int64, device=device)) != 0
