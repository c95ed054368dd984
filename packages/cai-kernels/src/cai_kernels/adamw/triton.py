"""The step of AdamW in Triton: 28 bytes of memory an element with a float32 gradient, each read or written once.

Numbers that change from step to step are arguments of the kernel, and floats at that: Triton compiles nothing again for
them. A program has one block; its first element is counted in 64 bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from cai_kernels.ops import define

BLOCK = 2048
WARPS = 8


@triton.jit
def _advance(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, numbers, at, mask):
    """Steps the elements `at`, those under `mask` (None: all)."""
    factor, decay, rate, root, eps, weight1, weight2 = numbers
    grad = tl.load(grad_ptr + at, mask=mask).to(tl.float32) * factor
    param = tl.load(param_ptr + at, mask=mask)
    exp_avg = tl.load(exp_avg_ptr + at, mask=mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=mask)
    # not beta * x: as 1 - beta is rounded, less of it is lost than of beta
    exp_avg = exp_avg - weight1 * exp_avg + weight1 * grad
    exp_avg_sq = exp_avg_sq - weight2 * exp_avg_sq + weight2 * (grad * grad)
    param -= decay * param
    param -= rate * (exp_avg / (tl.sqrt(exp_avg_sq) * root + eps))
    tl.store(param_ptr + at, param, mask=mask)
    tl.store(exp_avg_ptr + at, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq, mask=mask)


@triton.jit(do_not_specialize=["size"])
def _adamw(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    scale_ptr,
    size,
    factor,
    decay,
    rate,
    root,
    eps,
    weight1,
    weight2,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of parameters steps: the last one under a mask, the others without, in vectors of 128 bits.

    decay = lr * weight_decay, rate = lr / (1 - beta1^t), root = 1 / sqrt(1 - beta2^t), weights 1 - beta.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    if SCALED:
        factor *= tl.load(scale_ptr).to(tl.float32)
    numbers = (factor, decay, rate, root, eps, weight1, weight2)
    param_ptr += start
    grad_ptr += start
    exp_avg_ptr += start
    exp_avg_sq_ptr += start
    if start + BLOCK <= size:
        _advance(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, numbers, at, None)
    else:
        _advance(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, numbers, at, at < size - start)


def run(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scale: torch.Tensor | None,
    factor: float,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """In place: contiguous tensors of one shape; the gradient times `factor`, and times `scale` if there is one."""
    size = param.numel()
    if not size:
        return
    launch = _adamw[(triton.cdiv(size, BLOCK),)]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(param):
        launch(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            param if scale is None else scale,
            size,
            float(factor),
            float(lr * weight_decay),
            float(lr / (1 - beta1**step)),
            1 / math.sqrt(1 - beta2**step),
            float(eps),
            1.0 - beta1,
            1.0 - beta2,
            SCALED=scale is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


adamw_step = define(run, name="adamw_step", mutates=("param", "exp_avg", "exp_avg_sq"))
