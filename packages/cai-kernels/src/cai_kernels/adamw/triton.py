"""The step of AdamW in Triton: 28 bytes of memory an element with a float32 gradient, each read or written once.

So it is where a parameter lies in halves, bfloat16 and 16 bits (`cai_kernels.adamw.halves`): they become one number in
registers.

Numbers that change from step to step are arguments of a kernel or lie in memory, and floats at that: Triton compiles
nothing again for them. A program has one block; its first element is counted in 64 bits.

There are two kernels for the same arithmetic. One has a single tensor's addresses as arguments: no program waits for a
table, and no copy goes to the device. The other steps any number of tensors, whose addresses it reads from a table: a
launch a tensor would keep the host busy for longer than a GPU needs for the step.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cai_kernels.adamw.options import AdamWOptions, Tensors
from cai_kernels.compiler import tl, triton
from cai_kernels.ops import define

BLOCK = 2048
WARPS = 8
KEPT = 32  # tables of blocks that are kept on devices, 4 bytes a block each
GRADS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class Numbers(NamedTuple):
    """The numbers of a step t: factor of the gradient, lr * weight_decay, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t),
    eps, 1 - beta1 and 1 - beta2."""

    factor: float
    decay: float
    rate: float
    root: float
    eps: float
    weight1: float
    weight2: float


@triton.jit
def _load(param_ptr, low_ptr, at, mask, SPLIT: tl.constexpr):
    """Parameters in float32; `join` of `cai_kernels.adamw.halves` where they are in halves."""
    param = tl.load(param_ptr + at, mask=mask)
    if SPLIT:
        high = param.to(tl.int16, bitcast=True).to(tl.int32) << 16
        low = tl.load(low_ptr + at, mask=mask).to(tl.int32)
        low = tl.where((high & 0x7FFFFFFF) == 0, tl.maximum(low, 0), low)
        param = (high + low).to(tl.float32, bitcast=True)
    return param


@triton.jit
def _store(param_ptr, low_ptr, param, at, mask, SPLIT: tl.constexpr):
    """The reverse, and `split`."""
    if SPLIT:
        bits = param.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        low = bits - (high << 16)
        is_number = param == param
        high = tl.where(is_number, high, 0x7FC0).to(tl.int16)
        tl.store(param_ptr + at, high.to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(low_ptr + at, tl.where(is_number, low, 0).to(tl.int16), mask=mask)
    else:
        tl.store(param_ptr + at, param, mask=mask)


@triton.jit
def _advance(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, numbers, at, mask, SPLIT: tl.constexpr
):
    """Steps the elements `at`, those under `mask` (None: all)."""
    grad = tl.load(grad_ptr + at, mask=mask).to(tl.float32) * numbers.factor
    param = _load(param_ptr, low_ptr, at, mask, SPLIT)
    exp_avg = tl.load(exp_avg_ptr + at, mask=mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=mask)
    # not beta * x: as 1 - beta is rounded, less of it is lost than of beta
    exp_avg = exp_avg - numbers.weight1 * exp_avg + numbers.weight1 * grad
    exp_avg_sq = exp_avg_sq - numbers.weight2 * exp_avg_sq + numbers.weight2 * (grad * grad)
    param -= numbers.decay * param
    param -= numbers.rate * (exp_avg / (tl.sqrt(exp_avg_sq) * numbers.root + numbers.eps))
    _store(param_ptr, low_ptr, param, at, mask, SPLIT)
    tl.store(exp_avg_ptr + at, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq, mask=mask)


@triton.jit
def _block(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    low_ptr,
    numbers,
    block,
    size,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one tensor steps: the last one under a mask, the others without, in vectors of 128 bits."""
    start = block.to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    param_ptr += start
    grad_ptr += start
    exp_avg_ptr += start
    exp_avg_sq_ptr += start
    low_ptr += start
    if start + BLOCK <= size:
        _advance(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, numbers, at, None, SPLIT)
    else:
        mask = at < size - start
        _advance(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, numbers, at, mask, SPLIT)


@triton.jit
def _scaled(scale_ptr, factor, size):
    """The factor with a scale that lies in memory, and of how many elements: none if the scale is not finite."""
    scale = tl.load(scale_ptr).to(tl.float32)
    return factor * scale, tl.where(tl.abs(scale) < float("inf"), size, 0)


@triton.jit(do_not_specialize=["size"])
def _adamw(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    low_ptr,
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
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tensor; `low_ptr` is read and written only where it is in halves (SPLIT).

    factor to weight2 are the fields of `Numbers`.
    """
    if SCALED:
        factor, size = _scaled(scale_ptr, factor, size)
    numbers = Numbers(factor, decay, rate, root, eps, weight1, weight2)
    block = tl.program_id(0)
    _block(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, numbers, block, size, SPLIT, BLOCK)


@triton.jit
def _address(table_ptr, GRAD: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table_ptr).to(tl.pointer_type(GRAD))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["count"])
def _adamw_many(
    owners_ptr,
    spans_ptr,
    table_ptr,
    corrections_ptr,
    scale_ptr,
    count,
    factor,
    decay,
    eps,
    weight1,
    weight2,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`count` tensors, a block a program.

    Args:
        owners_ptr: index of the tensor that a program works on.
        spans_ptr: [2, count]: the first program of a tensor, and how many elements it has.
        table_ptr: [4, count]: addresses of parameters, gradients, first and second moments; [5, count] with those of
            lower halves where parameters are in halves (SPLIT).
        corrections_ptr: [count, 2]: rate and root of a tensor.
        ALIGNED: whether all addresses are multiples of 16 bytes.
    """
    tensor = tl.load(owners_ptr + tl.program_id(0))
    first = tl.load(spans_ptr + tensor)
    size = tl.load(spans_ptr + count + tensor)
    param_ptr = _address(table_ptr + tensor, tl.bfloat16 if SPLIT else tl.float32, ALIGNED)
    grad_ptr = _address(table_ptr + count + tensor, GRAD, ALIGNED)
    exp_avg_ptr = _address(table_ptr + 2 * count + tensor, tl.float32, ALIGNED)
    exp_avg_sq_ptr = _address(table_ptr + 3 * count + tensor, tl.float32, ALIGNED)
    low_ptr = param_ptr
    if SPLIT:
        low_ptr = _address(table_ptr + 4 * count + tensor, tl.int16, ALIGNED)
    rate = tl.load(corrections_ptr + 2 * tensor)
    root = tl.load(corrections_ptr + 2 * tensor + 1)
    if SCALED:
        factor, size = _scaled(scale_ptr, factor, size)
    numbers = Numbers(factor, decay, rate, root, eps, weight1, weight2)
    block = tl.program_id(0) - first
    _block(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, numbers, block, size, SPLIT, BLOCK)


def _corrections(
    steps: Sequence[int | torch.Tensor], options: AdamWOptions, device: torch.device
) -> torch.Tensor:
    """[count, 2], float32: rate and root of each step. A step is a number, or all are tensors on the device."""
    tensors = [step for step in steps if isinstance(step, torch.Tensor)]
    step = (torch.stack(tensors).to(device) if tensors else torch.tensor(steps)).double()
    rate, variance = options.lr / (1 - options.beta1**step), 1 - options.beta2**step
    corrections = torch.stack([rate, variance.rsqrt()], 1).float()
    return corrections if tensors else _on(device, corrections)


def run(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    low: torch.Tensor | None,
    scale: torch.Tensor | None,
    factor: float,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """A step in place on contiguous tensors of one shape; the gradient times `factor`, and `scale` if there is one.

    With `low`, it and `param` are the halves of the parameter.
    """
    size = param.numel()
    if not size:
        return
    rate, root = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    launch = _adamw[(triton.cdiv(size, BLOCK),)]  # pyright: ignore[reportIndexIssue]
    with torch.cuda.device_of(param):
        launch(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            param if low is None else low,
            param if scale is None else scale,
            size,
            float(factor),
            float(lr * weight_decay),
            rate,
            root,
            float(eps),
            1.0 - beta1,
            1.0 - beta2,
            SCALED=scale is not None,
            SPLIT=low is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


adamw_step = define(run, name="adamw_step", mutates=("param", "exp_avg", "exp_avg_sq", "low"))


def run_many(
    entries: Sequence[Tensors],
    scale: torch.Tensor | None,
    factor: float,
    steps: Sequence[int | torch.Tensor],
    options: AdamWOptions,
) -> None:
    """`run` of many tensors in one launch for each device and dtype of gradients; `steps` may lie on the device."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensors], list[int | torch.Tensor]]] = {}
    for tensors, step in zip(entries, steps, strict=True):
        if tensors.param.numel():
            group, counts = groups.setdefault((tensors.param.device, tensors.grad.dtype), ([], []))
            group.append(tensors)
            counts.append(step)
    numbers = (options.lr, options.beta1, options.beta2, options.eps, options.weight_decay)
    for (device, _), (group, counts) in groups.items():
        on_device = None if scale is None else scale.to(device, non_blocking=True)
        if len(group) == 1 and isinstance(counts[0], int):
            run(*group[0], on_device, factor, counts[0], *numbers)
            continue
        with torch.cuda.device_of(group[0].param):
            _launch_many(group, on_device, factor, _corrections(counts, options, device), options)


def _launch_many(
    entries: list[Tensors],
    scale: torch.Tensor | None,
    factor: float,
    corrections: torch.Tensor,
    options: AdamWOptions,
) -> None:
    """Tensors of one device, the current one, and one dtype of gradients, each with at least an element.

    All are in halves, or none.
    """
    device, count = entries[0].param.device, len(entries)
    owners, spans = _kept(tuple([tensors.param.numel() for tensors in entries]), device)
    columns = zip(*entries, strict=True)
    words = array("q", [t.data_ptr() for column in columns for t in column if t is not None])
    listed = torch.frombuffer(words, dtype=torch.int64)
    table = _on(device, listed)
    launch = _adamw_many[(owners.numel(),)]  # pyright: ignore[reportIndexIssue]
    launch(
        owners,
        spans,
        table,
        corrections,
        table if scale is None else scale,
        count,
        float(factor),
        float(options.lr * options.weight_decay),
        float(options.eps),
        1.0 - options.beta1,
        1.0 - options.beta2,
        GRAD=GRADS[entries[0].grad.dtype],
        ALIGNED=not (listed & 15).any().item(),
        SCALED=scale is not None,
        SPLIT=entries[0].low is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def _kept(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`_blocks`, of an earlier call on this stream if there was one.

    Another stream would read them before they are there. So would who comes after a graph's capture, which copies
    nothing yet.
    """
    if device.type != "cuda":
        return _blocks_of_stream(sizes, device, 0)
    if torch.cuda.is_current_stream_capturing():
        return _blocks(sizes, device)
    return _blocks_of_stream(sizes, device, torch.cuda.current_stream(device).cuda_stream)


@functools.lru_cache(maxsize=KEPT)
def _blocks_of_stream(
    sizes: tuple[int, ...], device: torch.device, stream: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _blocks(sizes, device)


def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The owners and spans of `_adamw_many`."""
    numel = torch.tensor(sizes, dtype=torch.int64)
    blocks = (numel + BLOCK - 1) // BLOCK
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), blocks)
    spans = torch.stack([blocks.cumsum(0) - blocks, numel])
    return _on(device, owners), _on(device, spans)


def _on(device: torch.device, table: torch.Tensor) -> torch.Tensor:
    """A table of the host on a device, without a wait: pinned memory is free again only after the copy."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
