"""Backward of long rows, read once: a persistent launch whose program holds a row in pieces.

A row of 8193 to 16384 columns and its sums of weight and bias gradients do not fit into the registers in float32. Here
x and dy stay in their own two bytes a value and are widened piece by piece, once for the row's two sums and again for
the gradients. Pieces need no power of two together, so a row of 14336 holds nothing more than its own columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cai_kernels.launch import waves
from cai_kernels.tiles import again

PIECE = 2048
WARPS = 8
REGISTERS = 255
KEPT_PIECES = (
    4  # beside so many there are registers for the weight: a layer norm of 8192 runs at 91 % of a copy's
)
# bandwidth, and at 66 % with 128 registers, the weight read again and two reductions a row (H200, Triton 3.6)


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
def _weigh(
    dy, kept, w_ptr, first, columns, AHEAD: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """Gradients times the weight: `kept`, or fetched (AHEAD: with the row, from the L2 cache, in fewer registers)."""
    if w_ptr is not None:
        if len(kept) > 0:
            w = again(kept[0])
        else:
            w = tl.zeros((PIECE,), dtype=w_ptr.dtype.element_ty)
            if AHEAD or columns > 0:
                w = _load(w_ptr, first, columns, WHOLE, PIECE)
            w = w.to(tl.float32)
        dy *= w + 1.0 if KIND == "gemma" else w
    return dy


@triton.jit
def _row_sums(
    x, dy, kept, w_ptr, moments, sums, columns, KIND: tl.constexpr, EVEN: tl.constexpr, PIECE: tl.constexpr
):
    """Means over a row of weighted dy times normalized x and of weighted dy, and `sums` with the row added."""
    along = tl.zeros((PIECE,), dtype=tl.float32)
    total = tl.zeros((PIECE,), dtype=tl.float32)
    rstd, shifted = moments
    dw, db = sums
    grown_w = ()
    grown_b = ()
    for i in tl.static_range(len(x)):
        normalized = x[i].to(tl.float32) * rstd - shifted
        plain = dy[i].to(tl.float32)
        grown_w += (dw[i] + plain * normalized,)
        grown_b += (db[i] + plain,)
        weighted = _weigh(
            plain, kept[i : i + 1], w_ptr, i * PIECE, columns, len(x) > 7, KIND, EVEN or i < len(x) - 1, PIECE
        )
        along += weighted * normalized
        total += weighted
    if KIND == "layer":
        alike, shift = tl.reduce((along, total), 0, _both)
    else:
        alike, shift = tl.sum(along, 0), 0.0
    return alike / columns, shift / columns, grown_w, grown_b


@triton.jit
def _backward_pieces(
    inputs, outputs, shape,
    KIND: tl.constexpr, KEPT: tl.constexpr, EVEN: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dsum_ptr = inputs
    dx_ptr, dw_ptr, db_ptr = outputs
    rows, columns, dy_stride, x_stride, dsum_stride = shape
    dw = ()
    db = ()
    kept = ()
    for i in tl.static_range(PIECES):
        dw += (tl.zeros((PIECE,), dtype=tl.float32),)
        db += (tl.zeros((PIECE,), dtype=tl.float32),)
        if KEPT and w_ptr is not None:
            kept += (_load(w_ptr, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE),)
    program = tl.program_id(0).to(tl.int64)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=3 if KEPT else 2):
        xs = ()
        dys = ()
        for i in tl.static_range(PIECES):
            xs += (_load(x_ptr + row * x_stride, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE),)
            dys += (_load(dy_ptr + row * dy_stride, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE),)
        rstd = tl.load(rstd_ptr + row)
        shifted = tl.load(mean_ptr + row) * rstd if KIND == "layer" else 0.0
        moments = (rstd, shifted)
        alike, shift, dw, db = _row_sums(xs, dys, kept, w_ptr, moments, (dw, db), columns, KIND, EVEN, PIECE)
        for i in tl.static_range(PIECES):
            dx = _weigh(
                again(dys[i]), kept[i : i + 1], w_ptr, i * PIECE, columns,
                PIECES > 7, KIND, EVEN or i < PIECES - 1, PIECE,
            )  # fmt: skip
            dx = (dx - shift - (again(xs[i]) * rstd - shifted) * alike) * rstd
            if dsum_ptr is not None:
                dx += _load(
                    dsum_ptr + row * dsum_stride, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE
                ).to(tl.float32)
            dx = dx.to(dx_ptr.dtype.element_ty)
            _store(dx_ptr + row * columns, dx, i * PIECE, columns, EVEN or i < PIECES - 1, PIECE)
    for i in tl.static_range(PIECES):
        if dw_ptr is not None:
            _store(dw_ptr + program * columns, dw[i], i * PIECE, columns, False, PIECE)
        if db_ptr is not None:
            _store(db_ptr + program * columns, db[i], i * PIECE, columns, False, PIECE)


def takes(dy: torch.Tensor, x: torch.Tensor, dsum: torch.Tensor | None) -> bool:
    """Whether rows are of the length, dtypes and alignment for pieces; unaligned ones would not stay narrow."""
    aligned = all(n % 16 == 0 for t in (dy, x, dsum) if t is not None for n in (t.shape[1], t.stride(0)))
    return 2 * PIECE < x.shape[1] <= 8 * PIECE and x.element_size() == 2 and dy.dtype == x.dtype and aligned


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: tuple[torch.Tensor | None, torch.Tensor],
    dsum: torch.Tensor | None,
    kind: str,
    dx: torch.Tensor,
    wanted: list[bool],
) -> list[torch.Tensor | None]:
    """Fill dx [T, D] and return partial sums [programs, D] in float32 of the `wanted` of weight and bias, else None."""
    rows, columns = x.shape
    programs, pieces = min(rows, waves(x.device)), triton.cdiv(columns, PIECE)
    partial = [x.new_empty(programs, columns, dtype=torch.float32) if w else None for w in wanted]
    launch = _backward_pieces[(programs,)]  # pyright: ignore[reportIndexIssue]
    shape = (rows, columns, dy.stride(0), x.stride(0), 0 if dsum is None else dsum.stride(0))
    launch(
        (dy, x, weight, *statistics, dsum), (dx, *partial), shape, KIND=kind, KEPT=pieces <= KEPT_PIECES,
        EVEN=columns % PIECE == 0, PIECES=pieces, PIECE=PIECE, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return partial
