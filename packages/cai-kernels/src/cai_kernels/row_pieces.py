"""Norms of rows of 2049 columns and more: each row is read once and held in registers in pieces.

A row of 8193 to 16384 columns and its sums of weight and bias gradients do not fit into the registers in float32. Here
x and dy stay in 16 bits and are cast to float32 piece by piece, once for the sums of the row and again for the results.
The number of pieces need not be a power of two, so a row of 14336 columns is not padded. Backward is a persistent
launch, as in `row_norm`; pieces of the weight for which no registers are left are loaded again with every row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import power_of_2, shared_memory, uses_pdl, waves
from cai_kernels.tiles import launch_dependents, to_float32

PIECE = 2048
WARPS = 8
REGISTERS = 255
HALVES = 7  # up to so many pieces of half the size and half the warps, a row of odd length goes by these


@triton.jit
def _load(ptr, first, columns, WHOLE: tl.constexpr, PIECE: tl.constexpr):
    at = first + tl.arange(0, PIECE)
    return tl.load(ptr + at) if WHOLE else tl.load(ptr + at, mask=at < columns, other=0.0)


@triton.jit
def _store(ptr, value, first, columns, WHOLE: tl.constexpr, PIECE: tl.constexpr):
    at = first + tl.arange(0, PIECE)
    if WHOLE:
        tl.store(ptr + at, value)
    else:
        tl.store(ptr + at, value, mask=at < columns)


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _folded(value):
    """Sums of 8 neighbours, which are in one thread: a row's partial sums then take an eighth of the registers."""
    return tl.sum(tl.reshape(value, (value.shape[0] // 8, 8)), 1)


@triton.jit
def _weight(weights, w_ptr, first, columns, KIND: tl.constexpr, WHOLE: tl.constexpr, PIECE: tl.constexpr):
    """The weight of a piece: from `weights`, else loaded with the row."""
    w = (
        to_float32(weights[0])
        if len(weights) > 0
        else _load(w_ptr, first, columns, WHOLE, PIECE).to(tl.float32)
    )
    return w + 1.0 if KIND == "gemma" else w


@triton.jit
def _forward_pieces(
    inputs,
    outputs,
    shape,
    eps,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    x_ptr, residual_ptr, w_ptr, b_ptr = inputs
    y_ptr, sum_ptr, mean_ptr, rstd_ptr = outputs
    columns, x_stride, residual_stride = shape
    row = tl.program_id(0).to(tl.int64)
    xs = ()
    for i in tl.static_range(PIECES):
        x = _load(x_ptr + row * x_stride, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE)
        if residual_ptr is not None:
            r = _load(residual_ptr + row * residual_stride, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE)
            x = (x.to(tl.float32) + r.to(tl.float32)).to(sum_ptr.dtype.element_ty)
            _store(sum_ptr + row * columns, x, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE)
        xs += (x,)
    mean = 0.0
    if KIND == "layer":
        total = tl.zeros((PIECE // 8,), dtype=tl.float32)
        for i in tl.static_range(PIECES):
            total += _folded(xs[i].to(tl.float32))
        mean = tl.sum(total, 0) / columns
        tl.store(mean_ptr + row, mean)
    squares = tl.zeros((PIECE // 8,), dtype=tl.float32)
    for i in tl.static_range(PIECES):
        centred = to_float32(xs[i]) - mean
        if KIND == "layer" and not EVEN and i == PIECES - 1:
            centred = tl.where(i * PIECE + tl.arange(0, PIECE) < columns, centred, 0.0)
        squares += _folded(centred * centred)
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    for i in tl.static_range(PIECES):
        y = (to_float32(xs[i]) - mean) * rstd
        if KIND == "llama":
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        if w_ptr is not None:
            y *= _weight((), w_ptr, i * PIECE, columns, KIND, EVEN or i < PIECES - 1, PIECE)
        if b_ptr is not None:
            y += _load(b_ptr, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE).to(tl.float32)
        y = y.to(y_ptr.dtype.element_ty)
        _store(y_ptr + row * columns, y, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE)


@triton.jit
def _row_sums(
    x, dy, weights, w_ptr, moments, sums, columns, KIND: tl.constexpr, EVEN: tl.constexpr, PIECE: tl.constexpr
):
    """Means over a row of weighted dy times normalized x and of weighted dy, and `sums` with the row added."""
    along = tl.zeros((PIECE // 8,), dtype=tl.float32)
    total = tl.zeros((PIECE // 8,), dtype=tl.float32)
    rstd, shifted = moments
    dw, db = sums
    grown_w = ()
    grown_b = ()
    for i in tl.static_range(len(x)):
        normalized = x[i].to(tl.float32) * rstd - shifted
        weighted = dy[i].to(tl.float32)
        grown_w += (dw[i] + weighted * normalized,)
        grown_b += (db[i] + weighted,)
        if w_ptr is not None:
            weighted *= _weight(
                weights[i : i + 1], w_ptr, i * PIECE, columns, KIND, EVEN or i < len(x) - 1, PIECE
            )
        along += _folded(weighted * normalized)
        total += _folded(weighted)
    if KIND == "layer":
        projection, shift = tl.reduce((along, total), 0, _both)
    else:
        projection, shift = tl.sum(along, 0), 0.0
    return projection / columns, shift / columns, grown_w, grown_b


@triton.jit
def _backward_pieces(
    inputs, outputs, shape, KIND: tl.constexpr, WEIGHTS: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dsum_ptr = inputs
    dx_ptr, dw_ptr, db_ptr = outputs
    rows, columns, dy_stride, x_stride, dsum_stride = shape
    dw = ()
    db = ()
    weights = ()
    for i in tl.static_range(PIECES):
        dw += (tl.zeros((PIECE,), dtype=tl.float32),)
        db += (tl.zeros((PIECE,), dtype=tl.float32),)
        if i < WEIGHTS and w_ptr is not None:
            weights += (_load(w_ptr, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE),)
    program = tl.program_id(0).to(tl.int64)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        xs = ()
        dys = ()
        for i in tl.static_range(PIECES):
            xs += (_load(x_ptr + row * x_stride, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE),)
            dys += (_load(dy_ptr + row * dy_stride, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE),)
        rstd = tl.load(rstd_ptr + row)
        shifted = tl.load(mean_ptr + row) * rstd if KIND == "layer" else 0.0
        moments = (rstd, shifted)
        projection, shift, dw, db = _row_sums(
            xs, dys, weights, w_ptr, moments, (dw, db), columns, KIND, EVEN, PIECE
        )
        # dx = (weighted - shift - (x * rstd - shifted) * projection) * rstd, what is one for a row taken out
        slope, offset = -projection * rstd * rstd, (shifted * projection - shift) * rstd
        for i in tl.static_range(PIECES):
            dx = to_float32(dys[i]) * rstd
            if w_ptr is not None:
                dx *= _weight(
                    weights[i : i + 1], w_ptr, i * PIECE, columns, KIND, EVEN or i < PIECES - 1, PIECE
                )
            dx += to_float32(xs[i]) * slope + offset
            if dsum_ptr is not None:
                dx += _load(
                    dsum_ptr + row * dsum_stride, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE
                ).to(tl.float32)
            dx = dx.to(dx_ptr.dtype.element_ty)
            _store(dx_ptr + row * columns, dx, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE)
    launch_dependents(PDL)
    for i in tl.static_range(PIECES):
        if dw_ptr is not None:
            _store(dw_ptr + program * columns, dw[i], i * PIECE, columns, EVEN or i < PIECES - 1, PIECE)
        if db_ptr is not None:
            _store(db_ptr + program * columns, db[i], i * PIECE, columns, EVEN or i < PIECES - 1, PIECE)


def takes(dy: torch.Tensor, x: torch.Tensor, dsum: torch.Tensor | None) -> bool:
    """Whether rows have the length, dtypes and alignment for pieces; the compiler widens unaligned ones at once."""
    return PIECE < x.shape[1] <= 8 * PIECE and dy.dtype == x.dtype and _aligned(dy, x, dsum)


def takes_forward(x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether forward uses pieces: for rows much shorter than the next power of two."""
    return PIECE < x.shape[1] <= 8 * PIECE and x.shape[1] != power_of_2(x.shape[1]) and _aligned(x, residual)


def _aligned(*rows: torch.Tensor | None) -> bool:
    return all(
        t.element_size() == 2 and t.shape[1] % 16 == 0 and t.stride(0) % 16 == 0
        for t in rows
        if t is not None
    )


def forward(inputs, outputs, eps: float, kind: str) -> None:
    """Fill `outputs` (y, sum, mean, rstd) of rows `inputs` (x, residual, weight, bias)."""
    x, residual, _, _ = inputs
    rows, columns = x.shape
    short = columns <= 4 * PIECE
    piece, warps = (PIECE // 2, WARPS // 2) if short else (PIECE, WARPS)
    launch = _forward_pieces[(rows,)]  # pyright: ignore[reportIndexIssue]
    shape = (columns, x.stride(0), 0 if residual is None else residual.stride(0))
    pieces = triton.cdiv(columns, piece)
    launch(
        inputs, outputs, shape, eps, KIND=kind, EVEN=columns % piece == 0, PIECES=pieces, PIECE=piece,
        num_warps=warps, maxnreg=64 if pieces < 7 else 80,
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The way the backward kernel holds a row: `weight_pieces` pieces of the weight stay in registers, `stages - 1`
    rows are loaded ahead, `resident` programs share a multiprocessor."""

    piece: int
    warps: int
    resident: int
    weight_pieces: int
    stages: int


def plan(x: torch.Tensor, tensors: int, sums: int) -> Plan:
    """The plan for rows of x, when `tensors` tensors are read and `sums` sums over rows are made.

    From what the kernel compiles to: 8 pieces with two sums leave registers for 5 pieces of the weight. Widened by a
    conversion, not by bits, float16 stays wide, and 4 it is. From what it takes on an H200 (Triton 3.6, shares of a
    copy's bandwidth): 4096 columns 88 % with two programs a multiprocessor and two rows ahead, 81 % not in pieces; 5120
    with two sums 93 % with one program and three rows ahead, 90 % with two; 16384 92 % two rows ahead, 82 % one.
    """
    columns = x.shape[1]
    halves = triton.cdiv(columns, PIECE // 2)
    if columns % PIECE and halves <= HALVES:
        piece, warps, pieces = PIECE // 2, WARPS // 2, halves
        resident, stages = (1, 4) if sums > 1 else (2, 3)
    else:
        piece, warps, pieces = PIECE, WARPS, triton.cdiv(columns, PIECE)
        resident, stages = 2 if pieces == 2 else 1, 3
    weight_pieces = 5 if pieces > 7 and sums > 1 else pieces
    if x.dtype == torch.float16:
        weight_pieces = min(weight_pieces, 4)
    stage_bytes = 2 * piece * (tensors * pieces + 2 * (pieces - weight_pieces))
    ahead = (shared_memory(x.device) // resident - 4096) // stage_bytes
    stages = min(stages, max(ahead, 1) + 1)
    return Plan(piece, warps, resident, weight_pieces, stages)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: tuple[torch.Tensor | None, torch.Tensor],
    dsum: torch.Tensor | None,
    kind: str,
    dx: torch.Tensor,
    needed: list[bool],
) -> list[torch.Tensor | None]:
    """Fill dx [T, D] and return partial sums [programs, D] in float32 of weight and bias, None where not `needed`."""
    rows, columns = x.shape
    chosen = plan(x, 2 if dsum is None else 3, sum(needed))
    programs = min(rows, waves(x.device, chosen.resident))
    partial = [x.new_empty(programs, columns, dtype=torch.float32) if need else None for need in needed]
    launch = _backward_pieces[(programs,)]  # pyright: ignore[reportIndexIssue]
    shape = (rows, columns, dy.stride(0), x.stride(0), 0 if dsum is None else dsum.stride(0))
    launch(
        (dy, x, weight, *statistics, dsum), (dx, *partial), shape, KIND=kind, WEIGHTS=chosen.weight_pieces,
        STAGES=chosen.stages, EVEN=columns % chosen.piece == 0,
        PIECES=triton.cdiv(columns, chosen.piece), PIECE=chosen.piece, num_warps=chosen.warps, PDL=uses_pdl(x.device),
        maxnreg=min(REGISTERS, 65536 // (32 * chosen.warps * chosen.resident)),
    )  # fmt: skip
    return partial
