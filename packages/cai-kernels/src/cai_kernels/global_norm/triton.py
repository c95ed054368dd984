"""The norm of many tensors in Triton: one launch for all of a dtype, which reads their addresses from a table."""

from __future__ import annotations

import math

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import power_of_2, waves
from cai_kernels.ops import define

BLOCK = 8192


@triton.jit
def _power(x, p, KIND: tl.constexpr):
    if KIND == "square":
        return x * x
    elif KIND == "power":
        return tl.exp2(p * tl.log2(tl.abs(x)))
    else:
        return tl.abs(x)


@triton.jit
def _powers(
    table_ptr, like_ptr, partial_ptr, shape, p, KIND: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums of |x|^p, or the largest |x|, over a P-th of the blocks of all tensors; nan if there is one.

    The table [3, count]: addresses, numbers of values, and the number of blocks before each tensor.
    """
    count, blocks, halvings = shape
    total = tl.zeros((BLOCK // 8,), dtype=tl.float32)
    wrong = tl.zeros((BLOCK // 8,), dtype=tl.int32)
    program_blocks = tl.cdiv(blocks, tl.num_programs(0))
    first = tl.program_id(0) * program_blocks
    low, high = first * 0, first * 0 + count - 1
    for _ in range(halvings):
        middle = (low + high + 1) // 2
        reached = tl.load(table_ptr + 2 * count + middle) <= first
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    for block in range(first, tl.minimum(first + program_blocks, blocks)):
        # a tensor has at least one block, so the next block is at most one tensor on
        following = tl.load(table_ptr + 2 * count + low + 1, mask=low + 1 < count, other=blocks)
        low += (following <= block).to(tl.int32)
        start = (block - tl.load(table_ptr + 2 * count + low)) * BLOCK
        size = tl.load(table_ptr + count + low)
        tensor_ptr = tl.load(table_ptr + low).to(like_ptr.dtype)
        if ALIGNED:
            tensor_ptr = tl.multiple_of(tensor_ptr, 16)
        at = start + tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        if start + BLOCK <= size:
            x = tl.load(tensor_ptr + at).to(tl.float32)
        else:
            x = tl.load(tensor_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        if KIND == "largest":
            wrong = wrong | tl.max((x != x).to(tl.int32), 1)
            total = tl.maximum(total, tl.max(tl.abs(x), 1))
        else:
            total += tl.sum(_power(x, p, KIND), 1)
    if KIND == "largest":
        value = tl.where(tl.max(wrong, 0) > 0, float("nan"), tl.max(total, 0))
    else:
        value = tl.sum(total, 0)
    tl.store(partial_ptr + tl.program_id(0), value)


@triton.jit
def _root(partial_ptr, out_ptr, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(partial_ptr + at, mask=at < count, other=0.0)
    if KIND == "largest":
        value = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), tl.max(x, 0))
    elif KIND == "square":
        value = tl.sqrt(tl.sum(x, 0))
    else:
        value = tl.sum(x, 0)
    tl.store(out_ptr, value)


def _kind(p: float) -> str:
    return {1.0: "magnitude", 2.0: "square", math.inf: "largest"}.get(p, "power")


def _parts(tensors: list[torch.Tensor], p: float) -> torch.Tensor:
    """One partial result a program, for tensors of one dtype and device with at least a value each."""
    device, count = tensors[0].device, len(tensors)
    addresses, sizes = [t.data_ptr() for t in tensors], [t.numel() for t in tensors]
    before, blocks = [], 0
    for size in sizes:
        before.append(blocks)
        blocks += triton.cdiv(size, BLOCK)
    table = torch.tensor((addresses, sizes, before), dtype=torch.int64, pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )
    programs = min(blocks, waves(device, 8))
    partial = torch.empty(programs, dtype=torch.float32, device=device)
    aligned = all(address % 16 == 0 for address in addresses)
    launch = _powers[(programs,)]  # pyright: ignore[reportIndexIssue]
    shape = (count, blocks, count.bit_length())
    finite = 0.0 if p == math.inf else p
    launch(
        table, tensors[0], partial, shape, finite, KIND=_kind(p), ALIGNED=aligned, BLOCK=BLOCK, num_warps=8
    )
    return partial


def _global_norm(tensors: list[torch.Tensor], p: float) -> torch.Tensor:
    """The p-norm of all values: 0-d float32 on the device of the first."""
    first = tensors[0]
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.contiguous())
    if not groups:
        return torch.zeros((), dtype=torch.float32, device=first.device)
    parts = []
    for group in groups.values():
        with torch.cuda.device_of(group[0]):
            parts.append(_parts(group, p).to(first.device, non_blocking=True))
    partial = parts[0] if len(parts) == 1 else torch.cat(parts)
    if _kind(p) == "power":
        return partial.double().sum().pow(1.0 / p).float()
    out = torch.empty((), dtype=torch.float32, device=first.device)
    launch = _root[(1,)]  # pyright: ignore[reportIndexIssue]
    size = partial.shape[0]
    with torch.cuda.device_of(first):
        launch(partial, out, size, KIND=_kind(p), BLOCK=power_of_2(size), num_warps=4)
    return out


def _empty(tensors: list[torch.Tensor], p: float) -> torch.Tensor:
    return tensors[0].new_empty((), dtype=torch.float32)


global_norm = define(_global_norm, _empty)
