"""Softmax in Triton: rows in registers, or in two passes over them where they do not fit.

Tensors are seen as [n0, n1, n2, n3, K]; masks and biases by their strides, 0 along broadcast dims. For the gradient of
a bias a program holds some places of it and walks over the rows that share them: with whole rows it makes their
gradient too, so that they are read once; otherwise, and for a second bias, the sums are a kernel of their own.
"""

from __future__ import annotations

import torch

from cai_kernels.column_sums import column_sums
from cai_kernels.compiler import tl, triton
from cai_kernels.launch import power_of_2, waves
from cai_kernels.ops import define
from cai_kernels.softmax.shared import backward_shared, forward_shared, offset, place_of
from cai_kernels.tiles import exp, to_float32

NARROW, WIDE_BLOCK = 16384, 4096
ACROSS = 1024  # columns in a tile of a bias gradient
SHARED = 8192  # columns of rows whose sums a program keeps in registers beside them
PIECE, HELD = 128, 512  # columns of a piece, and of rows held in pieces: of 1024 a program would spill
# Rows in pieces: 16 lanes hold one, so that its sums never leave a warp. A forward program takes about EACH of them in
# turn and reads STAGES - 1 ahead: 91 % of a copy's speed with 384 values in bfloat16 (EACH 16: 89 %, no stage: 90 %);
# a row padded to 512 came to 54 % forward, and to 63 % backward in place of 76 % (H200, Triton 3.6).
ROWS, WARPS, EACH, STAGES = 8, 4, 8, 3


@triton.jit
def _logits(tensors, strides, row, at, inside, shape, scale, CAUSAL: tl.constexpr):
    """scale * x + biases in float32, -inf where masked."""
    x_ptr, first_ptr, second_ptr, mask_ptr = tensors
    of_x, of_first, of_second, of_mask = strides
    columns, sizes = shape
    place = place_of(row, sizes)
    z = tl.load(x_ptr + offset(place, at, of_x), mask=inside, other=0.0).to(tl.float32) * scale
    if first_ptr is not None:
        z += tl.load(first_ptr + offset(place, at, of_first), mask=inside, other=0.0).to(tl.float32)
    if second_ptr is not None:
        z += tl.load(second_ptr + offset(place, at, of_second), mask=inside, other=0.0).to(tl.float32)
    if CAUSAL:
        inside = inside & (at <= place[3] + columns - sizes[2])
    if mask_ptr is not None:
        inside = inside & (tl.load(mask_ptr + offset(place, at, of_mask), mask=inside, other=0) != 0)
    return tl.where(inside, z, float("-inf"))


@triton.jit
def _forward(
    tensors, y_ptr, strides, rows, shape, scale, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    columns = shape[0]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < columns)
    z = _logits(tensors, strides, row, at, inside, shape, scale, CAUSAL)
    highest = tl.max(z, 1)[:, None]
    e = exp(z - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(e, 1)[:, None]
    y = e * (1.0 / tl.where(total == 0.0, 1.0, total))
    tl.store(y_ptr + row * columns + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _forward_wide(tensors, y_ptr, strides, shape, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    columns = shape[0]
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = _logits(tensors, strides, row, at, at < columns, shape, scale, CAUSAL)
        higher = tl.maximum(highest, z)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * exp(highest - base) + exp(z - base)
        highest = higher
    top = tl.max(highest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    row_sum = tl.sum(total * exp(highest - top), 0)
    inverse = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = _logits(tensors, strides, row, at, at < columns, shape, scale, CAUSAL)
        y = exp(z - top) * inverse
        tl.store(y_ptr + row * columns + at, y.to(y_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def _backward(tensors, outputs, rows, columns, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    y_ptr, dy_ptr = tensors
    dx_ptr, dot_ptr = outputs
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (at < columns)
    y = tl.load(y_ptr + row[:, None] * columns + at, mask=inside, other=0.0)
    dy = tl.load(dy_ptr + row[:, None] * columns + at, mask=inside, other=0.0)
    dot = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    if dot_ptr is not None:
        tl.store(dot_ptr + row, dot, mask=row < rows)
    if dx_ptr is not None:
        dx = to_float32(y) * (to_float32(dy) - dot[:, None]) * scale
        tl.store(dx_ptr + row[:, None] * columns + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_wide(tensors, outputs, columns, scale, BLOCK: tl.constexpr):
    y_ptr, dy_ptr = tensors
    dx_ptr, dot_ptr = outputs
    start = tl.program_id(0).to(tl.int64) * columns
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + start + at, mask=at < columns, other=0.0).to(tl.float32)
        sums += y * tl.load(dy_ptr + start + at, mask=at < columns, other=0.0).to(tl.float32)
    dot = tl.sum(sums, 0)
    if dot_ptr is not None:
        tl.store(dot_ptr + tl.program_id(0), dot)
    if dx_ptr is not None:
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)
            y = tl.load(y_ptr + start + at, mask=at < columns, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + start + at, mask=at < columns, other=0.0).to(tl.float32)
            dx = y * (dy - dot) * scale
            tl.store(dx_ptr + start + at, dx.to(dx_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def _bias_gradient(tensors, partial_ptr, shape, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of y * (dy - dot) over every P-th of the rows that share a place of the bias; [P, places, K]."""
    y_ptr, dy_ptr, dot_ptr = tensors
    columns, places, members, of_places, of_members, strides = shape
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (group < places) & (at < columns)
    start = offset(place_of(group, of_places), 0, strides)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    part = tl.program_id(2).to(tl.int64)
    for member in tl.range(part, members, tl.num_programs(2), num_stages=3):
        row = start + offset(place_of(member, of_members), 0, strides)
        y = tl.load(y_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        total += y * (dy - tl.load(dot_ptr + row, mask=group < places, other=0.0))
    tl.store(partial_ptr + (part * places + group) * columns + at, total, mask=inside)


def _tile(rows: int, columns: int) -> tuple[int, int, int]:
    """(rows a program holds at once, columns rounded up, warps)."""
    block = power_of_2(columns)
    tile_rows = min(max(2048 // block, 1), power_of_2(rows))
    return tile_rows, block, min(max(tile_rows * block // 512, 1), 16)


def _in_pieces(places: int, columns: int) -> bool:
    """Whether places of a bias are whole tiles of rows that are held in pieces."""
    return columns <= HELD and columns % PIECE == 0 and places % ROWS == 0


def _sizes(shape: torch.Size | list[int]) -> tuple[int, ...]:
    """The dims before the last, as four."""
    return (*(1,) * (5 - len(shape)), *shape[:-1])


def _strides(tensor: torch.Tensor | None, shape: torch.Size) -> tuple[int, ...]:
    if tensor is None:
        return (0,) * 5
    return (*(0,) * (5 - len(shape)), *tensor.expand(shape).stride())


def _softmax(
    x: torch.Tensor,
    first: torch.Tensor | None,
    second: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x [..., K] -> [..., K] contiguous in `dtype`."""
    y = _empty(x, first, second, mask, scale, causal, dtype)
    if y.numel() == 0:
        return y
    columns = x.shape[-1]
    rows = x.numel() // columns
    tensors = (x, first, second, mask)
    strides = tuple(_strides(t, x.shape) for t in tensors)
    shape = (columns, _sizes(x.shape)[1:])
    shared_bias = None if causal or mask is not None else _held_forward(x, first, second)
    if shared_bias is not None:
        _forward_beside(x, shared_bias, second if shared_bias is first else first, y, scale)
    elif columns > NARROW:
        launch = _forward_wide[(rows,)]  # pyright: ignore[reportIndexIssue]
        launch(tensors, y, strides, shape, scale, CAUSAL=causal, BLOCK=WIDE_BLOCK, num_warps=8)
    else:
        tile_rows, block, warps = _tile(rows, columns)
        launch = _forward[(triton.cdiv(rows, tile_rows),)]  # pyright: ignore[reportIndexIssue]
        sizes = {"ROWS": tile_rows, "BLOCK": block, "num_warps": warps}
        launch(tensors, y, strides, rows, shape, scale, CAUSAL=causal, **sizes)
    return y


def _held_forward(
    x: torch.Tensor, first: torch.Tensor | None, second: torch.Tensor | None
) -> torch.Tensor | None:
    """The larger bias, if it has whole rows that several of x share and that fit into registers."""
    biases = [b for b in (first, second) if b is not None]
    largest = max(biases, key=torch.Tensor.numel, default=None)
    columns = x.shape[-1]
    if largest is None or x.numel() == largest.numel() or not _held(list(largest.shape), x):
        return None
    return largest if _in_pieces(_sharing(list(largest.shape), x)[0], columns) else None


def _forward_beside(
    x: torch.Tensor, shared_bias: torch.Tensor, other: torch.Tensor | None, y: torch.Tensor, scale: float
) -> None:
    columns = x.shape[-1]
    places, _, of_places, _, _ = _sharing(list(shared_bias.shape), x)
    of_x, _, of_other, of_y = strides = tuple(_strides(t, x.shape) for t in (x, shared_bias, other, y))
    members, steps, of_runs = _runs(shared_bias, x, (of_x, of_other, of_y))
    groups, runs = places // ROWS, torch.Size(of_runs).numel()
    parts = max(triton.cdiv(members, EACH), triton.cdiv(waves(x.device, 16), groups * runs))
    parts = min(parts, members)
    launch = forward_shared[(groups * parts * runs,)]  # pyright: ignore[reportIndexIssue]
    launch(
        (x, shared_bias, other), y, strides, steps, (groups, parts, members, of_places, of_runs[1:]), scale,
        STAGES=STAGES, ROWS=ROWS, PIECES=columns // PIECE, PIECE=PIECE, num_warps=WARPS,
    )  # fmt: skip


def _runs(
    shared_bias: torch.Tensor, x: torch.Tensor, strides: tuple[tuple[int, ...], ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The rows that share a place of `shared_bias` as runs of rows whose neighbours lie evenly apart in every tensor.

    (rows in a run, strides between them, how many runs there are in each dim)
    """
    lengths, bias_sizes = _sizes(x.shape), _sizes((*(1,) * (x.dim() - shared_bias.dim()), *shared_bias.shape))
    apart = [length // bias_size for length, bias_size in zip(lengths, bias_sizes, strict=True)]
    members, steps = 1, None
    for dim in (3, 2, 1, 0):
        dim_strides = tuple(s[dim] for s in strides)
        if apart[dim] == 1:
            continue
        if steps is not None and dim_strides != tuple(members * step for step in steps):
            break
        steps = dim_strides if steps is None else steps
        members *= apart[dim]
        apart[dim] = 1
    return members, steps or (0,) * len(strides), tuple(apart)


def _softmax_backward(
    dy: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    x_dtype: torch.dtype | None,
    first: list[int] | None,
    first_dtype: torch.dtype | None,
    second: list[int] | None,
    second_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x [..., K] and of biases of the shapes `first` and `second`; None (no dtype, no shape): empty."""
    dx, dfirst, dsecond = _empty_gradients(dy, y, scale, x_dtype, first, first_dtype, second, second_dtype)
    if y.numel() == 0:
        return dx, dfirst.zero_(), dsecond.zero_()
    dy, columns = dy.contiguous(), y.shape[-1]
    rows, bias_shapes = y.numel() // columns, [shape for shape in (first, second) if shape is not None]
    shared = max((s for s in bias_shapes if _held(s, y)), key=lambda s: torch.Size(s).numel(), default=None)
    dot = y.new_empty(rows, dtype=torch.float32) if len(bias_shapes) > (shared is not None) else None
    outputs = (None if x_dtype is None else dx, dot)
    if shared is not None:
        of_shared = _backward_and_sum(shared, y, dy, outputs, scale)
    elif columns > NARROW:
        launch = _backward_wide[(rows,)]  # pyright: ignore[reportIndexIssue]
        launch((y, dy), outputs, columns, scale, BLOCK=WIDE_BLOCK, num_warps=8)
    else:
        tile_rows, block, warps = _tile(rows, columns)
        launch = _backward[(triton.cdiv(rows, tile_rows),)]  # pyright: ignore[reportIndexIssue]
        # two programs a multiprocessor hold a row of 16384 in 16 bits each, so that one stores while the other loads
        narrow = block == NARROW and y.element_size() == 2 and dy.element_size() == 2
        sizes = {"ROWS": tile_rows, "BLOCK": block, "num_warps": warps, "maxnreg": 64 if narrow else None}
        launch((y, dy), outputs, rows, columns, scale, **sizes)
    if first is not None:
        ours = first is shared
        dfirst = (
            column_sums(of_shared, first_dtype).view(first)
            if ours
            else _sum_for(first, first_dtype, y, dy, dot)
        )
    if second is not None:
        ours = second is shared
        dsecond = (
            column_sums(of_shared, second_dtype).view(second)
            if ours
            else _sum_for(second, second_dtype, y, dy, dot)
        )
    return dx, dfirst, dsecond


def _sharing(
    shape: list[int], y: torch.Tensor
) -> tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(places of a bias, rows that share one, sizes of both in n1, n2 and n3, rows between neighbours in each dim)."""
    lengths = _sizes(y.shape)
    bias_sizes = _sizes((*(1,) * (y.dim() - len(shape)), *shape))
    apart = tuple(length // bias_size for length, bias_size in zip(lengths, bias_sizes, strict=True))
    strides = tuple(torch.Size(lengths[i + 1 :]).numel() for i in range(4))
    return torch.Size(bias_sizes).numel(), torch.Size(apart).numel(), bias_sizes[1:], apart[1:], (*strides, 0)


def _held(shape: list[int], y: torch.Tensor) -> bool:
    """Whether `_backward_shared` takes a bias of this shape: whole rows, and enough of them to fill a program."""
    columns = y.shape[-1]
    if not shape or shape[-1] != columns or columns > min(SHARED, NARROW):
        return False
    tile_rows, block, _ = _tile(_sharing(shape, y)[0], columns)
    return tile_rows * block >= ACROSS


def _backward_and_sum(
    shape: list[int],
    y: torch.Tensor,
    dy: torch.Tensor,
    outputs: tuple[torch.Tensor | None, torch.Tensor | None],
    scale: float,
) -> torch.Tensor:
    """Fill the gradient of x and the dots of rows, as far as needed; partial sums [P, places * K] for this bias."""
    columns = y.shape[-1]
    places, members, *rest = _sharing(shape, y)
    pieces = _in_pieces(places, columns)
    tile_rows, block, warps = (ROWS, PIECE, WARPS) if pieces else _tile(places, columns)
    groups = triton.cdiv(places, tile_rows)
    parts = triton.cdiv(waves(y.device, 4), groups) if pieces else max(waves(y.device, 8) // groups, 1)
    parts = min(parts, members)
    partial = y.new_empty(parts, places * columns, dtype=torch.float32)
    launch = backward_shared[(groups, parts)]  # pyright: ignore[reportIndexIssue]
    launch(
        (y, dy), (*outputs, partial), (columns, places, members, *rest), scale,
        EVEN=pieces, STAGES=2 if pieces else 3, ROWS=tile_rows, PIECES=triton.cdiv(columns, block), PIECE=block,
        num_warps=warps,
    )  # fmt: skip
    return partial


def _sum_for(shape, dtype, y, dy, dot) -> torch.Tensor:
    """The gradient of a bias of this shape."""
    columns = y.shape[-1]
    places, members, *rest = _sharing(shape, y)
    block = min(power_of_2(columns), ACROSS)
    tile_rows = min(ACROSS // block, power_of_2(places))
    grid = [triton.cdiv(places, tile_rows), triton.cdiv(columns, block)]
    parts = max(min(waves(y.device, 4) // (grid[0] * grid[1]), members), 1)
    partial = y.new_empty(parts, places * columns, dtype=torch.float32)
    launch = _bias_gradient[(*grid, parts)]  # pyright: ignore[reportIndexIssue]
    sizes = (columns, places, members, *rest)
    launch(
        (y, dy, dot), partial, sizes, ROWS=tile_rows, BLOCK=block, num_warps=max(tile_rows * block // 256, 1)
    )
    if shape and shape[-1] == columns:
        return column_sums(partial, dtype).view(shape)
    return column_sums(partial, torch.float32).view(places, columns).sum(1).to(dtype).view(shape)


def _empty(
    x: torch.Tensor,
    first: torch.Tensor | None,
    second: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _empty_gradients(
    dy: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    x_dtype: torch.dtype | None,
    first: list[int] | None,
    first_dtype: torch.dtype | None,
    second: list[int] | None,
    second_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = y.new_empty(0 if x_dtype is None else y.shape, dtype=x_dtype)
    dfirst = y.new_empty(0 if first is None else first, dtype=first_dtype)
    return dx, dfirst, y.new_empty(0 if second is None else second, dtype=second_dtype)


def _save(ctx, inputs, output) -> None:
    x, first, second, _, ctx.scale, _, _ = inputs
    ctx.x_dtype = x.dtype
    ctx.biases = [(None, None) if b is None else (list(b.shape), b.dtype) for b in (first, second)]
    ctx.save_for_backward(output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy):
    if dy is None:
        return (None,) * 7
    (y,) = ctx.saved_tensors
    need_x, need_first, need_second, *_ = ctx.needs_input_grad
    biases = [
        value
        for bias, need in zip(ctx.biases, (need_first, need_second), strict=True)
        for value in (bias if need else (None, None))
    ]
    dx, dfirst, dsecond = softmax_backward(dy, y, ctx.scale, ctx.x_dtype if need_x else None, *biases)
    gradients = (dx if need_x else None, dfirst if need_first else None, dsecond if need_second else None)
    return *gradients, None, None, None, None


softmax_backward = define(_softmax_backward, _empty_gradients)
softmax = define(_softmax, _empty, save=_save, backward=_differentiate)
