"""Norms of rows in Triton: the launches of rms_norm, add_rms_norm and layer_norm.

In forward a program takes a few whole rows. Backward is a persistent launch: a program loops over rows, loads the next
ones to shared memory ahead, and sums its weight gradient in registers; a second kernel adds the sums of all programs.
Rows that do not fit into registers are processed in pieces (`row_pieces`) or in blocks of columns.

A kind is one of those of `row_norm_kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cai_kernels import row_norm_kernels as kernels
from cai_kernels import row_pieces
from cai_kernels.column_sums import column_sums_into
from cai_kernels.compiler import triton
from cai_kernels.launch import power_of_2, shared_memory, uses_pdl, waves
from cai_kernels.rows import as_rows

NARROW = 16384  # columns of a row that one program holds in registers
WIDE_BLOCK = 8192


class Needed(NamedTuple):
    """Whether the gradient of x is needed, and the dtypes of those of weight and bias, None if not needed."""

    x: bool
    weight_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None


def _tile(rows: int, columns: int, values: int) -> tuple[int, int, int]:
    """(rows a program holds at once, columns rounded up, warps) for about `values` values a program."""
    block = power_of_2(columns)
    tile_rows = min(max(values // block, 1), power_of_2(rows))
    return tile_rows, block, min(max(tile_rows * block // 512, 1), 16)


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
        launch = kernels.forward_wide[(rows,)]  # pyright: ignore[reportIndexIssue]
        shape = (columns, x.stride(0), stride)
        launch(inputs, outputs, shape, eps, KIND=kind, BLOCK=WIDE_BLOCK, num_warps=16)
    elif row_pieces.takes_forward(x, extra):
        row_pieces.forward(inputs, outputs, eps, kind)
    else:
        tile_rows, block, warps = _tile(rows, columns, 2048)
        # A layer norm sums a row twice. Of 8192 columns, programs of 8 warps, parameters fetched ahead, do that at 90 %
        # of a copy's bandwidth, of 16 at 70 % for want of registers, those of 16 without that at 86 %; of 4096 columns,
        # programs of 4 with it at 89 to 93 %, of 8 at 85 to 90 % with or without (H200, Triton 3.6).
        ahead = kind == "layer" and block in (NARROW // 4, NARROW // 2)
        ahead = ahead and weight is not None and bias is not None
        even = ahead and block == columns and rows % tile_rows == 0
        launch = kernels.forward[(triton.cdiv(rows, tile_rows),)]  # pyright: ignore[reportIndexIssue]
        shape = (rows, columns, x.stride(0), stride)
        launch(
            inputs, outputs, shape, eps,
            KIND=kind, AHEAD=ahead, EVEN=even, ROWS=tile_rows, BLOCK=block,
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
    dx, dw, db = empty_gradients(dy, x, weight, statistics, dsum, kind, needed)
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    dy, x, columns = as_rows(dy), as_rows(x), x.shape[-1]
    more = None if dsum is None else as_rows(dsum)
    # Float32 rows of that length, with one more tensor or sum, no longer fit into the registers.
    full = columns > NARROW // 2 and x.dtype == torch.float32 and (more is not None or kind == "layer")
    by_parts = _backward_in_blocks if columns > NARROW or full else _backward_in_registers
    sums = by_parts(dy, x, weight, statistics, more, kind, dx, needed)
    both = [(partial, out) for partial, out in zip(sums, (dw, db), strict=True) if partial is not None]
    for pairs in (both,) if len({partial.shape for partial, _ in both}) < 2 else ([pair] for pair in both):
        if pairs:
            column_sums_into(*zip(*pairs, strict=True))
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
    tile_rows, block, warps = _tile(rows, columns, 2048)
    even = block == columns and rows % tile_rows == 0
    inputs = (dy, x, weight, *statistics, dsum)
    tile_bytes = tile_rows * block * sum(t.element_size() for t in (dy, x, dsum) if t is not None)
    resident, registers, ahead = _residency(kind, even, block, warps, tile_bytes, shared_memory(x.device))
    programs = min(triton.cdiv(rows, tile_rows), waves(x.device, resident))
    need_weight, need_bias = needed.weight_dtype is not None, needed.bias_dtype is not None
    keep = [need_weight, need_bias]
    apart = block == NARROW and (kind == "layer" or not even)  # no registers left for sums over rows
    if _in_pieces(kind, block, even) and needed.x and row_pieces.takes(dy, x, dsum):
        # Widened by a conversion, not by bits, float16 leaves no registers for a second sum.
        together = [need_weight, need_bias and (x.dtype == torch.bfloat16 or block < NARROW)]
        sums = row_pieces.backward(dy, x, weight, statistics, dsum, kind, dx, together)
        separate = [k and not t for k, t in zip(keep, together, strict=True)]
        separate_sums = _over_rows(dy, x, statistics, kind, separate)
        return [a if b is None else b for a, b in zip(sums, separate_sums, strict=True)]
    partial = [x.new_empty(programs, columns, dtype=torch.float32) if k and not apart else None for k in keep]
    if needed.x or not apart:
        outputs = (dx if needed.x else None, *partial)
        shape = (rows, columns, dy.stride(0), x.stride(0), 0 if dsum is None else dsum.stride(0))
        launch = kernels.backward[(programs,)]  # pyright: ignore[reportIndexIssue]
        sizes = {
            "STAGES": 1 + ahead,
            "PDL": uses_pdl(x.device),
            "ROWS": tile_rows,
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
        launch = kernels.backward_wide[(rows,)]  # pyright: ignore[reportIndexIssue]
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
    launch = kernels.parameters_wide[(blocks, programs)]  # pyright: ignore[reportIndexIssue]
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
    """Empty tensors for what `forward` returns; takes the same arguments."""
    dtype = torch.promote_types(x.dtype, weight.dtype) if kind == "llama" and weight is not None else x.dtype
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    y = x.new_empty(x.shape, dtype=dtype)
    total = x.new_empty(0 if residual is None else x.shape)
    mean = x.new_empty(rows if kind == "layer" else 0, dtype=torch.float32)
    return y, total, mean, x.new_empty(rows, dtype=torch.float32)


def empty_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: tuple[torch.Tensor | None, torch.Tensor],
    dsum: torch.Tensor | None,
    kind: str,
    needed: Needed,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty tensors for what `backward` returns; takes the same arguments."""
    dtypes = (needed.weight_dtype, needed.bias_dtype)
    dx = x.new_empty(x.shape if needed.x else 0)
    dw, db = (x.new_empty(0 if dtype is None else x.shape[-1], dtype=dtype) for dtype in dtypes)
    return dx, dw, db
