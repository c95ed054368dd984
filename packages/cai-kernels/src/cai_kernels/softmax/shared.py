"""Softmax of rows that share a bias, whose place a program holds in registers while it walks over them.

Rows are held in pieces of a power of two, so that one of 384 values takes no more registers than these. A pair
bias of AlphaFold's is so read once for several rows of an alignment, and its gradient summed beside that of x.
"""

from __future__ import annotations

from cai_kernels.compiler import tl, triton
from cai_kernels.tiles import exp, to_float32


@triton.jit
def place_of(index, sizes):
    """Coordinates in [.., n1, n2, n3] of an index below 2^31: divisions of 64 bits cost as much as a row."""
    n1, n2, n3 = sizes
    index = (tl.full((), 0, tl.int32) + index).to(tl.int32)
    last, rest = index % n3, index // n3
    third, rest = rest % n2, rest // n2
    return (
        (rest // n1).to(tl.int64),
        (rest % n1).to(tl.int64),
        third.to(tl.int64),
        last.to(tl.int64),
    )


@triton.jit
def offset(place, at, strides):
    return (
        place[0] * strides[0]
        + place[1] * strides[1]
        + place[2] * strides[2]
        + place[3] * strides[3]
        + at * strides[4]
    )


@triton.jit
def _read(ptr, inside, EVEN: tl.constexpr):
    return tl.load(ptr) if EVEN else tl.load(ptr, mask=inside, other=0.0)


@triton.jit
def _write(ptr, value, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptr, value.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _pieces(ptr, start, along, stride, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """Rows in pieces, as they lie in memory from `start` on."""
    values = ()
    for i in tl.static_range(PIECES):
        values += (tl.load(ptr + start + (along + i * PIECE * stride)),)
    return values


@triton.jit
def forward_shared(
    tensors, y_ptr, strides, steps, shape, scale,
    STAGES: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Softmax of scale * x + shared + other by strides, `shared` the same for all members of a place; whole tiles only.

    steps: between neighbouring members of a run, of x, other and y; shape: (groups of places, parts of a run, members
    of a run, sizes of places, sizes of runs). What a member adds to a place is one product: with divisions for its
    dims there a program waited for them before every member.
    """
    x_ptr, shared_ptr, other_ptr = tensors
    of_x, of_shared, of_other, of_y = strides
    groups, parts, members, of_places, of_runs = shape
    program = tl.program_id(0)
    place = place_of((program % groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], of_places)
    run = place_of(program // groups // parts, of_runs)
    at = tl.arange(0, PIECE)[None, :]
    biases = _pieces(shared_ptr, 0, offset(place, at, of_shared), of_shared[4], PIECES, PIECE)
    along_x = offset(run, 0, of_x) + offset(place, at, of_x)
    along_other = offset(run, 0, of_other) + offset(place, at, of_other)
    along_y = offset(run, 0, of_y) + offset(place, at, of_y)
    for index in tl.range(program // groups % parts, members, parts, num_stages=STAGES):
        member = (tl.full((), 0, tl.int64) + index).to(tl.int64)
        xs = _pieces(x_ptr, member * steps[0], along_x, of_x[4], PIECES, PIECE)
        if other_ptr is not None:
            other_pieces = _pieces(other_ptr, member * steps[1], along_other, of_other[4], PIECES, PIECE)
        zs = ()
        top = tl.full((ROWS, PIECE), float("-inf"), tl.float32)
        for i in tl.static_range(PIECES):
            bias = biases[i].to(tl.float32)
            if other_ptr is not None:
                bias += other_pieces[i].to(tl.float32)
            z = xs[i].to(tl.float32) * scale + bias
            zs += (z,)
            top = tl.maximum(top, z)
        highest = tl.max(top, 1)[:, None]
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        es = ()
        total = tl.zeros((ROWS, PIECE), tl.float32)
        for i in tl.static_range(PIECES):
            e = exp(zs[i] - highest)
            es += (e,)
            total += e
        row_sum = tl.sum(total, 1)[:, None]
        inverse = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
        for i in tl.static_range(PIECES):
            piece = y_ptr + member * steps[2] + (along_y + i * PIECE)
            tl.store(piece, (es[i] * inverse).to(y_ptr.dtype.element_ty))


@triton.jit
def backward_shared(
    tensors, outputs, shape, scale,
    EVEN: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Gradients of x, as far as wanted dots of rows, and sums over every P-th member of a place, [P, places, K]."""
    y_ptr, dy_ptr = tensors
    dx_ptr, dot_ptr, partial_ptr = outputs
    columns, places, members, of_places, of_members, strides = shape
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, PIECE)[None, :]
    real = group < places
    start = offset(place_of(group, of_places), 0, strides)
    sums = ()
    for _ in tl.static_range(PIECES):
        sums += (tl.zeros((ROWS, PIECE), dtype=tl.float32),)
    part = tl.program_id(1).to(tl.int64)
    for member in tl.range(part, members, tl.num_programs(1), num_stages=STAGES):
        member_offset = offset(place_of(member, of_members), 0, strides)
        ys = ()
        dys = ()
        along = tl.zeros((ROWS, PIECE), dtype=tl.float32)
        for i in tl.static_range(PIECES):
            inside = real & (i * PIECE + at < columns)
            y = _read(y_ptr + member_offset * columns + start * columns + i * PIECE + at, inside, EVEN)
            dy = _read(dy_ptr + member_offset * columns + start * columns + i * PIECE + at, inside, EVEN)
            along += y.to(tl.float32) * dy.to(tl.float32)
            ys += (y,)
            dys += (dy,)
        dot = tl.sum(along, 1)[:, None]
        if dot_ptr is not None:
            tl.store(dot_ptr + member_offset + start, dot, mask=real)
        grown = ()
        for i in tl.static_range(PIECES):
            inside = real & (i * PIECE + at < columns)
            slope = to_float32(ys[i]) * (to_float32(dys[i]) - dot)
            grown += (sums[i] + slope,)
            if dx_ptr is not None:
                _write(
                    dx_ptr + member_offset * columns + start * columns + i * PIECE + at,
                    slope * scale,
                    inside,
                    EVEN,
                )
        sums = grown
    for i in tl.static_range(PIECES):
        inside = real & (i * PIECE + at < columns)
        _write(partial_ptr + (part * places + group) * columns + i * PIECE + at, sums[i], inside, EVEN)
