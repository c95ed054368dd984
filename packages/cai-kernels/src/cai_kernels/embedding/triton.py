"""The gradient of an embedding in Triton, by sorted ids.

The sorted positions are cut into chunks. A program walks over a chunk and some columns, adding rows up, and stores a
sum whenever an id ends. Sums of ids that reach over the edge of a chunk go to tables in float32: `head` of what a chunk
has of an id that began before it, `tail` of what begins in it and goes on. A second kernel adds those up.
"""

from __future__ import annotations

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import power_of_2
from cai_kernels.ops import define

CHUNK, BLOCK, AT_ONCE = 32, 512, 16


@triton.jit
def _chunks(inputs, outputs, shape, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    dy_ptr, id_ptr, position_ptr = inputs
    dw_ptr, head_ptr, tail_ptr = outputs
    count, columns, padding, dy_stride = shape
    chunk = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, count)
    previous = tl.load(id_ptr + first - 1, mask=first > 0, other=-1)
    current_id = tl.load(id_ptr + first)
    following = tl.load(id_ptr + first + 1, mask=first + 1 < count, other=-1)
    entered = previous == current_id  # this id began in a chunk before
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # a row is on its way, and its place in dy known, before the one ahead of it is added
    row = tl.load(position_ptr + first)
    ahead = tl.load(dy_ptr + row * dy_stride + at, mask=inside, other=0.0)
    row = tl.load(position_ptr + first + 1, mask=first + 1 < last, other=0)
    for place in range(first, last):
        value = ahead
        ahead = tl.load(
            dy_ptr + row * dy_stride + at, mask=at < tl.where(place + 1 < last, columns, 0), other=0.0
        )
        row = tl.load(position_ptr + place + 2, mask=place + 2 < last, other=0)
        after = tl.load(id_ptr + place + 2, mask=place + 2 < count, other=-1)
        total += value.to(tl.float32)
        ends = following != current_id
        if ends | (place + 1 == last):
            if entered:
                tl.store(head_ptr + chunk * columns + at, total, mask=inside)
            elif ends:
                row_total = tl.where(current_id == padding, 0.0, total)
                tl.store(
                    dw_ptr + current_id * columns + at, row_total.to(dw_ptr.dtype.element_ty), mask=inside
                )
            else:
                tl.store(tail_ptr + chunk * columns + at, total, mask=inside)
        if ends:
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            entered = current_id != current_id
        current_id, following = following, after


@triton.jit
def _spans(id_ptr, outputs, shape, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """The ids that begin in a chunk and end in another: the tail of theirs and the heads of those that follow."""
    dw_ptr, head_ptr, tail_ptr = outputs
    count, columns, padding = shape
    chunk = tl.program_id(0).to(tl.int64)
    last = (chunk + 1) * CHUNK
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if last < count:
        current_id = tl.load(id_ptr + last - 1)
        before = tl.load(id_ptr + chunk * CHUNK - 1, mask=chunk > 0, other=-1)
        begins = (before != current_id) | (tl.load(id_ptr + chunk * CHUNK) != current_id)
        if begins & (tl.load(id_ptr + last) == current_id):
            total = tl.zeros((AT_ONCE, BLOCK), dtype=tl.float32)
            next_chunk = chunk + 1
            while (
                tl.load(id_ptr + next_chunk * CHUNK, mask=next_chunk * CHUNK < count, other=-1) == current_id
            ):
                some = next_chunk + tl.arange(0, AT_ONCE)
                valid = some * CHUNK < count
                same = tl.load(id_ptr + some * CHUNK, mask=valid, other=-1) == current_id
                read = (valid & same)[:, None] & (at < columns)[None, :]
                total += tl.load(head_ptr + some[:, None] * columns + at[None, :], mask=read, other=0.0)
                next_chunk += AT_ONCE
            start = tl.load(tail_ptr + chunk * columns + at, mask=at < columns, other=0.0)
            value = tl.where(current_id == padding, 0.0, start + tl.sum(total, 0))
            tl.store(dw_ptr + current_id * columns + at, value.to(dw_ptr.dtype.element_ty), mask=at < columns)


def _embedding(ids: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    """ids [...], weight [V, D] -> [..., D]; `padding` is -1 for none."""
    return torch.nn.functional.embedding(ids, weight)


def _embedding_backward(
    dy: torch.Tensor, ids: torch.Tensor, vocabulary: int, padding: int, dtype: torch.dtype
) -> torch.Tensor:
    """dy [..., D], ids [...] -> the gradient of weight [V, D], zeros where an id does not occur."""
    columns = dy.shape[-1]
    dw = dy.new_zeros(vocabulary, columns, dtype=dtype)
    count = ids.numel()
    if count == 0 or columns == 0:
        return dw
    dy = dy.reshape(count, columns)
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    ordered, positions = torch.sort(ids.reshape(-1).long(), stable=True)
    chunks, block = triton.cdiv(count, CHUNK), min(power_of_2(columns), BLOCK)
    head, tail = dy.new_empty(2, chunks, columns, dtype=torch.float32)
    grid = (chunks, triton.cdiv(columns, block))
    outputs, warps = (dw, head, tail), max(block // 256, 1)
    launch = _chunks[grid]  # pyright: ignore[reportIndexIssue]
    shape = (count, columns, padding, dy.stride(0))
    launch((dy, ordered, positions), outputs, shape, CHUNK=CHUNK, BLOCK=block, num_warps=warps)
    launch = _spans[grid]  # pyright: ignore[reportIndexIssue]
    launch(ordered, outputs, shape[:3], CHUNK=CHUNK, AT_ONCE=AT_ONCE, BLOCK=block, num_warps=4)
    return dw


def _empty(ids: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


def _empty_gradient(
    dy: torch.Tensor, ids: torch.Tensor, vocabulary: int, padding: int, dtype: torch.dtype
) -> torch.Tensor:
    return dy.new_empty(vocabulary, dy.shape[-1], dtype=dtype)


def _save(ctx, inputs, output) -> None:
    ids, weight, ctx.padding = inputs
    ctx.vocabulary, ctx.dtype = weight.shape[0], weight.dtype
    ctx.save_for_backward(ids)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy):
    if dy is None or not ctx.needs_input_grad[1]:
        return None, None, None
    (ids,) = ctx.saved_tensors
    return None, embedding_backward(dy, ids, ctx.vocabulary, ctx.padding, ctx.dtype), None


embedding_backward = define(_embedding_backward, _empty_gradient)
embedding = define(_embedding, _empty, save=_save, backward=_differentiate)
