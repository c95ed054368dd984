"""Norms of rows in Triton: the kernels of rms_norm, add_rms_norm and layer_norm.

In forward a program takes a few whole rows. Backward is a persistent launch: a program loops over rows, loads the next
ones to shared memory ahead, and sums its weight gradient in registers; a second kernel adds the sums of all programs.
Rows that do not fit into registers are processed in pieces (`row_pieces`) or in blocks of columns.

KIND is "llama" (RMS, rounded to x's dtype before the weight), "gemma" (RMS, weight + 1, one rounding at the end) or
"layer" (mean and variance, bias).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cai_kernels import row_pieces
from cai_kernels.column_sums import column_sums_into
from cai_kernels.launch import power_of_2, shared_memory, uses_pdl, waves
from cai_kernels.rows import as_rows
from cai_kernels.tiles import launch_dependents

NARROW = 16384  # columns of a row that one program holds in registers
WIDE_BLOCK = 8192


class Needed(NamedTuple):
    """Whether the gradient of x is needed, and the dtypes of those of weight and bias, None if not needed."""

    x: bool
    weight_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None


@triton.jit
def _load(ptr, inside, EVEN: tl.constexpr):
    """With EVEN nothing is masked, which saves the registers of the mask."""
    return tl.load(ptr) if EVEN else tl.load(ptr, mask=inside, other=0.0)


@triton.jit
def _store(ptr, value, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptr, value)
    else:
        tl.store(ptr, value, mask=inside)


@triton.jit
def _weighted(
    normalized, parameters, at, inside, y_ptr, x_ptr, KIND: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Multiply by the weight and add the bias. `parameters` are pointers or None; with AHEAD they are loaded values."""
    if KIND == "llama":
        normalized = normalized.to(x_ptr.dtype.element_ty).to(tl.float32)
    w, b = parameters
    if w is not None:
        w = w if AHEAD else _load(w + at, inside, EVEN)
        w = w.to(tl.float32)
        normalized *= w + 1.0 if KIND == "gemma" else w
    if b is not None:
        b = b if AHEAD else _load(b + at, inside, EVEN)
        normalized += b.to(tl.float32)
    return normalized.to(y_ptr.dtype.element_ty)


@triton.jit
def _forward(
    inputs, outputs, shape, eps,
    KIND: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    x_ptr, residual_ptr, w_ptr, b_ptr = inputs
    y_ptr, sum_ptr, mean_ptr, rstd_ptr = outputs
    rows, columns, x_stride, residual_stride = shape
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    real, live = row < rows, at < columns
    inside = real[:, None] & live
    x = _load(x_ptr + row[:, None] * x_stride + at, inside, EVEN)
    if residual_ptr is not None:
        r = _load(residual_ptr + row[:, None] * residual_stride + at, inside, EVEN)
        x = (x.to(tl.float32) + r.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        _store(sum_ptr + row[:, None] * columns + at, x, inside, EVEN)
    parameters = (w_ptr, b_ptr)
    if AHEAD:
        parameters = (_load(w_ptr + at, live, EVEN), _load(b_ptr + at, live, EVEN))
    wide = x.to(tl.float32)
    if KIND == "layer":
        mean = tl.sum(wide, 1) / columns
        _store(mean_ptr + row, mean, real, EVEN)
        wide -= mean[:, None]
        if not EVEN:
            wide = tl.where(inside, wide, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / columns + eps)
    _store(rstd_ptr + row, rstd, real, EVEN)
    y = _weighted(wide * rstd[:, None], parameters, at, live, y_ptr, x_ptr, KIND, EVEN, AHEAD)
    _store(y_ptr + row[:, None] * columns + at, y, inside, EVEN)


@triton.jit
def _forward_wide(inputs, outputs, shape, eps, KIND: tl.constexpr, BLOCK: tl.constexpr):
    x_ptr, residual_ptr, w_ptr, b_ptr = inputs
    y_ptr, sum_ptr, mean_ptr, rstd_ptr = outputs
    columns, x_stride, residual_stride = shape
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0)
        if residual_ptr is not None:
            r = tl.load(residual_ptr + row * residual_stride + at, mask=at < columns, other=0.0)
            x = (x.to(tl.float32) + r.to(tl.float32)).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * columns + at, x, mask=at < columns)
        total += x.to(tl.float32)
        squares += x.to(tl.float32) * x.to(tl.float32)
    mean = tl.sum(total, 0) / columns
    if KIND == "layer":
        tl.store(mean_ptr + row, mean)
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0).to(tl.float32)
            centred = tl.where(at < columns, x - mean, 0.0)
            squares += centred * centred
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            r = tl.load(residual_ptr + row * residual_stride + at, mask=at < columns, other=0.0)
            x = (x + r.to(tl.float32)).to(sum_ptr.dtype.element_ty).to(tl.float32)
        if KIND == "layer":
            x -= mean
        y = _weighted(x * rstd, (w_ptr, b_ptr), at, at < columns, y_ptr, x_ptr, KIND, False, False)
        tl.store(y_ptr + row * columns + at, y, mask=at < columns)


@triton.jit
def _read(ptr, inside, EVEN: tl.constexpr):
    return _load(ptr, inside, EVEN).to(tl.float32)


@triton.jit
def _backward(
    inputs,
    outputs,
    shape,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dsum_ptr = inputs
    dx_ptr, dw_ptr, db_ptr = outputs
    rows, columns, dy_stride, x_stride, dsum_stride = shape
    at = tl.arange(0, BLOCK)[None, :]
    live = at < columns
    if dw_ptr is not None:
        dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if db_ptr is not None:
        db = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for block in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        real = row < rows
        inside = real[:, None] & live
        x = _read(x_ptr + row[:, None] * x_stride + at, inside, EVEN)
        dy = _read(dy_ptr + row[:, None] * dy_stride + at, inside, EVEN)
        rstd = _read(rstd_ptr + row, real, EVEN)[:, None]
        if KIND == "layer":
            x -= _read(mean_ptr + row, real, EVEN)[:, None]
        x *= rstd
        if dw_ptr is not None:
            dw += dy * x
        if db_ptr is not None:
            db += dy
        if dx_ptr is not None:
            # The weight again for every row: kept, it would take too many registers. Loads within a branch are not
            # fetched ahead to shared memory, past the L1 cache; so this one does not load the L2 cache with every row.
            if w_ptr is not None:
                w = tl.zeros((1, BLOCK), dtype=tl.float32)
                if rows > 0:
                    w = _read(w_ptr + at, live, EVEN)
                dy *= w + 1.0 if KIND == "gemma" else w
            dx = dy - x * (tl.sum(dy * x, 1) / columns)[:, None]
            if KIND == "layer":
                dx -= (tl.sum(dy, 1) / columns)[:, None]
            dx *= rstd
            if dsum_ptr is not None:
                dx += _read(dsum_ptr + row[:, None] * dsum_stride + at, inside, EVEN)
            dx = dx.to(dx_ptr.dtype.element_ty)
            _store(dx_ptr + row[:, None] * columns + at, dx, inside, EVEN)
    launch_dependents(PDL)
    at = tl.arange(0, BLOCK)
    if dw_ptr is not None:
        tl.store(dw_ptr + program * columns + at, tl.sum(dw, 0), mask=at < columns)
    if db_ptr is not None:
        tl.store(db_ptr + program * columns + at, tl.sum(db, 0), mask=at < columns)


@triton.jit
def _backward_wide(inputs, dx_ptr, shape, KIND: tl.constexpr, BLOCK: tl.constexpr):
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dsum_ptr = inputs
    columns, dy_stride, x_stride, dsum_stride = shape
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = tl.load(mean_ptr + row) if KIND == "layer" else 0.0
    along = tl.zeros((BLOCK,), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = (tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0).to(tl.float32) - mean) * rstd
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        if w_ptr is not None:
            w = tl.load(w_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
            dy *= w + 1.0 if KIND == "gemma" else w
        along += dy * x
        total += dy
    alike = tl.sum(along, 0) / columns
    shift = tl.sum(total, 0) / columns if KIND == "layer" else 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = (tl.load(x_ptr + row * x_stride + at, mask=at < columns, other=0.0).to(tl.float32) - mean) * rstd
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        if w_ptr is not None:
            w = tl.load(w_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
            dy *= w + 1.0 if KIND == "gemma" else w
        dx = (dy - shift - x * alike) * rstd
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + row * dsum_stride + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * columns + at, dx.to(dx_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def _parameters_wide(inputs, outputs, shape, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Weight and bias gradients of a block of columns, summed over every P-th block of rows."""
    dy_ptr, x_ptr, mean_ptr, rstd_ptr = inputs
    dw_ptr, db_ptr = outputs
    rows, columns, dy_stride, x_stride = shape
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1).to(tl.int64)
    if dw_ptr is not None:
        dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if db_ptr is not None:
        db = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for block in tl.range(part, tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=3):
        row = block * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
        if db_ptr is not None:
            db += dy
        if dw_ptr is not None:
            x = tl.load(x_ptr + row[:, None] * x_stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
            if KIND == "layer":
                x -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
            dw += dy * x * tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
    if dw_ptr is not None:
        tl.store(dw_ptr + part * columns + at, tl.sum(dw, 0), mask=at < columns)
    if db_ptr is not None:
        tl.store(db_ptr + part * columns + at, tl.sum(db, 0), mask=at < columns)


def _tile(rows: int, columns: int, values: int) -> tuple[int, int, int]:
    """(rows a program holds at once, columns rounded up, warps) for about `values` values a program."""
    block = power_of_2(columns)
    each = min(max(values // block, 1), power_of_2(rows))
    return each, block, min(max(each * block // 512, 1), 16)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual [..., D], weight, bias [D] -> y, x + residual [..., D], mean and reciprocal deviation [T].

    What a kind does not need (the sum, the mean) is empty.
    """
    y, total, mean, rstd = empty(x, residual, weight, bias, eps, kind)
    if x.numel() == 0:
        return y, total, mean, rstd
    x, columns = as_rows(x), x.shape[-1]
    extra = None if residual is None else as_rows(residual)
    rows, stride = x.shape[0], 0 if extra is None else extra.stride(0)
    inputs, outputs = (x, extra, weight, bias), (y, total, mean, rstd)
    if columns > NARROW:
        launch = _forward_wide[(rows,)]  # pyright: ignore[reportIndexIssue]
        shape = (columns, x.stride(0), stride)
        launch(inputs, outputs, shape, eps, KIND=kind, BLOCK=WIDE_BLOCK, num_warps=16)
    elif row_pieces.takes_forward(x, extra):
        row_pieces.forward(inputs, outputs, eps, kind)
    else:
        each, block, warps = _tile(rows, columns, 2048)
        # A layer norm sums a row twice. Of 8192 columns, programs of 8 warps, parameters fetched ahead, do that at 90 %
        # of a copy's bandwidth, of 16 at 70 % for want of registers, those of 16 without that at 86 %; of 4096 columns,
        # programs of 4 with it at 89 to 93 %, of 8 at 85 to 90 % with or without (H200, Triton 3.6).
        ahead = kind == "layer" and block in (NARROW // 4, NARROW // 2)
        ahead = ahead and weight is not None and bias is not None
        even = ahead and block == columns and rows % each == 0
        launch = _forward[(triton.cdiv(rows, each),)]  # pyright: ignore[reportIndexIssue]
        shape = (rows, columns, x.stride(0), stride)
        launch(
            inputs, outputs, shape, eps,
            KIND=kind, AHEAD=ahead, EVEN=even, ROWS=each, BLOCK=block,
            num_warps=max(block // 1024, 1) if ahead else warps,
        )  # fmt: skip
    return y, total, mean, rstd


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: tuple[torch.Tensor | None, torch.Tensor],
    dsum: torch.Tensor | None,
    kind: str,
    needed: Needed,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x [..., D] (plus `dsum`), weight and bias [D]; the ones not `needed` are empty.

    `x` is what was normalized, `statistics` its (mean, reciprocal deviation) [T] in float32. Gradients of weight and
    bias are summed in float32.
    """
    dx, dw, db = empty_gradients(x, needed)
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    dy, x, columns = as_rows(dy), as_rows(x), x.shape[-1]
    more = None if dsum is None else as_rows(dsum)
    # Float32 rows of that length, with one more tensor or sum, no longer fit into the registers.
    full = columns > NARROW // 2 and x.dtype == torch.float32 and (more is not None or kind == "layer")
    by_parts = _backward_in_blocks if columns > NARROW or full else _backward_in_registers
    sums = by_parts(dy, x, weight, statistics, more, kind, dx, needed)
    both = [(partial, out) for partial, out in zip(sums, (dw, db), strict=True) if partial is not None]
    for alike in (both,) if len({partial.shape for partial, _ in both}) < 2 else ([pair] for pair in both):
        if alike:
            column_sums_into(*zip(*alike, strict=True))
    return dx, dw, db


def _residency(
    kind: str, even: bool, block: int, warps: int, tile_bytes: int, shared_bytes: int
) -> tuple[int, int, int]:
    """(programs per multiprocessor, registers per thread, tiles loaded ahead) of the backward kernel.

    `tile_bytes`: of one tile of every input; `shared_bytes`: of shared memory. By what the kernel compiles to, an even
    RMS norm needs 64 registers, others 128.
    """
    choices = [(16 // warps if warps > 4 else 4, 128)]
    if even and kind != "layer" and 4096 <= block <= 8192:
        choices.insert(0, (2, 64) if block == 8192 else (3, 80))
    for programs, registers in choices:
        ahead = min((shared_bytes // programs - 4096) // tile_bytes, 2)
        if ahead > 0:
            return programs, registers, ahead
    return *choices[-1], 0


def _in_pieces(kind: str, block: int, even: bool) -> bool:
    """Whether backward uses `row_pieces` if it takes the rows."""
    return block in (NARROW, NARROW // 4) or (2 * block == NARROW and (kind == "layer" or not even))


def _backward_in_registers(dy, x, weight, statistics, dsum, kind, dx, needed):
    rows, columns = x.shape
    each, block, warps = _tile(rows, columns, 2048)
    even = block == columns and rows % each == 0
    inputs = (dy, x, weight, *statistics, dsum)
    tile_bytes = each * block * sum(t.element_size() for t in (dy, x, dsum) if t is not None)
    resident, registers, ahead = _residency(kind, even, block, warps, tile_bytes, shared_memory(x.device))
    programs = min(triton.cdiv(rows, each), waves(x.device, resident))
    need_weight, need_bias = needed.weight_dtype is not None, needed.bias_dtype is not None
    keep = [need_weight, need_bias]
    apart = block == NARROW and (kind == "layer" or not even)  # no registers left for sums over rows
    if _in_pieces(kind, block, even) and needed.x and row_pieces.takes(dy, x, dsum):
        # Widened by a conversion, not by bits, float16 leaves no registers for a second sum.
        together = [need_weight, need_bias and (x.dtype == torch.bfloat16 or block < NARROW)]
        sums = row_pieces.backward(dy, x, weight, statistics, dsum, kind, dx, together)
        left = [k and not t for k, t in zip(keep, together, strict=True)]
        others = _over_rows(dy, x, statistics, kind, left)
        return [a if b is None else b for a, b in zip(sums, others, strict=True)]
    partial = [x.new_empty(programs, columns, dtype=torch.float32) if k and not apart else None for k in keep]
    if needed.x or not apart:
        outputs = (dx if needed.x else None, *partial)
        shape = (rows, columns, dy.stride(0), x.stride(0), 0 if dsum is None else dsum.stride(0))
        launch = _backward[(programs,)]  # pyright: ignore[reportIndexIssue]
        sizes = {
            "STAGES": 1 + ahead,
            "PDL": uses_pdl(x.device),
            "ROWS": each,
            "BLOCK": block,
            "num_warps": warps,
            "maxnreg": registers,
        }
        launch(inputs, outputs, shape, KIND=kind, EVEN=even, **sizes)
    return _over_rows(dy, x, statistics, kind, keep) if apart else partial


def _backward_in_blocks(dy, x, weight, statistics, dsum, kind, dx, needed):
    rows, columns = x.shape
    strides = (dy.stride(0), x.stride(0))
    if needed.x:
        launch = _backward_wide[(rows,)]  # pyright: ignore[reportIndexIssue]
        shape = (columns, *strides, 0 if dsum is None else dsum.stride(0))
        inputs = (dy, x, weight, *statistics, dsum)
        launch(inputs, dx, shape, KIND=kind, BLOCK=WIDE_BLOCK, num_warps=16)
    return _over_rows(
        dy, x, statistics, kind, [needed.weight_dtype is not None, needed.bias_dtype is not None]
    )


def _over_rows(dy, x, statistics, kind, needed):
    """Partial sums over rows of weight and bias gradients, in a launch over blocks of columns."""
    if not any(needed):
        return [None, None]
    rows, columns = x.shape
    blocks = triton.cdiv(columns, 256)
    programs = min(triton.cdiv(rows, 16), max(waves(x.device, 4) // blocks, 1))
    partial = [x.new_empty(programs, columns, dtype=torch.float32) if need else None for need in needed]
    shape = (rows, columns, dy.stride(0), x.stride(0))
    launch = _parameters_wide[(blocks, programs)]  # pyright: ignore[reportIndexIssue]
    launch((dy, x, *statistics), tuple(partial), shape, KIND=kind, ROWS=16, BLOCK=256, num_warps=4)
    return partial


def empty(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty tensors for what `forward` returns."""
    dtype = torch.promote_types(x.dtype, weight.dtype) if kind == "llama" and weight is not None else x.dtype
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    y = x.new_empty(x.shape, dtype=dtype)
    total = x.new_empty(0 if residual is None else x.shape)
    mean = x.new_empty(rows if kind == "layer" else 0, dtype=torch.float32)
    return y, total, mean, x.new_empty(rows, dtype=torch.float32)


def empty_gradients(x: torch.Tensor, needed: Needed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty tensors for what `backward` returns."""
    dtypes = (needed.weight_dtype, needed.bias_dtype)
    dx = x.new_empty(x.shape if needed.x else 0)
    dw, db = (x.new_empty(0 if dtype is None else x.shape[-1], dtype=dtype) for dtype in dtypes)
    return dx, dw, db
