"""What stands between the two products of a layer of experts, in one pass: a bias, the gate, and each row's weight."""

from __future__ import annotations

import torch

from cai_kernels.activations import activation
from cai_kernels.compiler import tl, triton
from cai_kernels.launch import power_of_2
from cai_kernels.ops import define

BLOCK = 1024  # columns of a step
SUM_ROWS, SUM_COLUMNS = 64, 64  # tile of a step of the sums by expert


@triton.jit
def _gate(gate, up, alpha, limit, KIND: tl.constexpr, ROUNDED: tl.constexpr):
    """(a(gate), a'(gate), the factor of a(gate), its slope): what is clamped has a slope of zero, NaN stays NaN."""
    if KIND == "clamped":
        at_most = tl.where(gate > limit, limit, gate)
        value, slope = activation(at_most * alpha, "sigmoid", ROUNDED)
        slope = tl.where(gate > limit, 0.0, value + at_most * alpha * slope)
        within = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        outside = (up > limit) | (up < -limit)
        return at_most * value, slope, within + 1.0, tl.where(outside, 0.0, 1.0)
    else:
        value, slope = activation(gate, KIND, ROUNDED)
        return value, slope, up, tl.full(up.shape, 1.0, tl.float32)


@triton.jit
def _halves(hidden_ptr, bias_ptr, expert, row, at, inside, columns, INTERLEAVED: tl.constexpr):
    """(gate, up, their columns) of a row in float32, with its expert's bias."""
    gate_at = 2 * at if INTERLEAVED else at
    up_at = 2 * at + 1 if INTERLEAVED else at + columns
    first = row * 2 * columns
    gate = tl.load(hidden_ptr + first + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(hidden_ptr + first + up_at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        first_bias = expert * 2 * columns
        gate += tl.load(bias_ptr + first_bias + gate_at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + first_bias + up_at, mask=inside, other=0.0).to(tl.float32)
    return gate, up, gate_at, up_at


@triton.jit
def _forward(
    inputs, out_ptr, columns, alpha, limit,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    hidden_ptr, by_row_ptr, bias_ptr, expert_ptr = inputs
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(by_row_ptr + row)
    expert = 0 if expert_ptr is None else tl.load(expert_ptr + row).to(tl.int64)
    ROUNDED: tl.constexpr = out_ptr.dtype.element_ty != tl.float32
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        gate, up, _, _ = _halves(hidden_ptr, bias_ptr, expert, row, at, inside, columns, INTERLEAVED)
        value, _, factor, _ = _gate(gate, up, alpha, limit, KIND, ROUNDED)
        out = (value * factor * weight).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * columns + at, out, mask=inside)


@triton.jit
def _backward(
    inputs, outputs, columns, alpha, limit,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dout_ptr, hidden_ptr, by_row_ptr, bias_ptr, expert_ptr = inputs
    dhidden_ptr, out_ptr, dby_row_ptr = outputs
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(by_row_ptr + row)
    expert = 0 if expert_ptr is None else tl.load(expert_ptr + row).to(tl.int64)
    ROUNDED: tl.constexpr = out_ptr.dtype.element_ty != tl.float32
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        gate, up, gate_at, up_at = _halves(
            hidden_ptr, bias_ptr, expert, row, at, inside, columns, INTERLEAVED
        )
        value, slope, factor, factor_slope = _gate(gate, up, alpha, limit, KIND, ROUNDED)
        dout = tl.load(dout_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        product = value * factor
        total += dout * product
        tl.store(out_ptr + row * columns + at, (product * weight).to(out_ptr.dtype.element_ty), mask=inside)
        dgate = (dout * weight * factor * slope).to(dhidden_ptr.dtype.element_ty)
        dup = (dout * weight * value * factor_slope).to(dhidden_ptr.dtype.element_ty)
        tl.store(dhidden_ptr + row * 2 * columns + gate_at, dgate, mask=inside)
        tl.store(dhidden_ptr + row * 2 * columns + up_at, dup, mask=inside)
    tl.store(dby_row_ptr + row, tl.sum(total, 0))


@triton.jit
def _sum_rows(rows_ptr, out_ptr, offsets_ptr, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [E, columns]: the sum of each expert's rows, in float32."""
    expert = tl.program_id(1)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (at < columns)[None, :]
    end = tl.load(offsets_ptr + expert + 1)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(tl.load(offsets_ptr + expert), end, ROWS):
        row = first + tl.arange(0, ROWS)
        pointers = rows_ptr + row.to(tl.int64)[:, None] * columns + at[None, :]
        total += tl.load(pointers, mask=(row < end)[:, None] & inside, other=0.0).to(tl.float32)
    summed = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + expert.to(tl.int64) * columns + at, summed, mask=at < columns)


def _block(columns: int) -> tuple[int, int]:
    """(columns of a step, warps): the largest step that divides a row, or one that is longer than a short row."""
    block = next((size for size in (BLOCK, BLOCK // 2, BLOCK // 4) if columns % size == 0), 0)
    block = block or min(power_of_2(columns), BLOCK)
    return block, min(max(block // 128, 1), 4)


def _expert_gate(
    hidden: torch.Tensor,
    by_row: torch.Tensor,
    bias: torch.Tensor | None,
    expert: torch.Tensor | None,
    kind: str,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """hidden [N, 2 I], weights of rows [N] float32, bias [E, 2 I] and the expert of each row [N] -> [N, I]."""
    out = _empty_gate(hidden)
    rows, columns = out.shape
    if out.numel():
        block, warps = _block(columns)
        bias = None if bias is None else bias.contiguous()
        launch = _forward[(rows,)]  # pyright: ignore[reportIndexIssue]
        launch(
            (hidden, by_row, bias, expert), out, columns, alpha, limit,
            KIND=kind, INTERLEAVED=interleaved, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out


def _expert_gate_backward(
    dout: torch.Tensor,
    hidden: torch.Tensor,
    by_row: torch.Tensor,
    bias: torch.Tensor | None,
    expert: torch.Tensor | None,
    kind: str,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of hidden and of the weights of rows, and between them the result of `expert_gate` once more."""
    outputs = _empty_gate_gradients(dout, hidden, by_row)
    rows, columns = dout.shape
    if dout.numel():
        block, warps = _block(columns)
        bias = None if bias is None else bias.contiguous()
        launch = _backward[(rows,)]  # pyright: ignore[reportIndexIssue]
        launch(
            (dout.contiguous(), hidden, by_row, bias, expert), outputs, columns, alpha, limit,
            KIND=kind, INTERLEAVED=interleaved, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return outputs


def _sums_by_expert(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """rows [N, F] contiguous, offsets [E + 1] -> [E, F]: sums in float32, rounded once."""
    out = _empty_sums(rows, offsets)
    experts, columns = out.shape
    if out.numel():
        launch = _sum_rows[(triton.cdiv(columns, SUM_COLUMNS), experts)]  # pyright: ignore[reportIndexIssue]
        launch(rows, out, offsets, columns, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS)
    return out


def _empty_gate(hidden: torch.Tensor, *_: object) -> torch.Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2)


def _empty_gate_gradients(
    dout: torch.Tensor, hidden: torch.Tensor, by_row: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(hidden), dout.new_empty(dout.shape), torch.empty_like(by_row)


def _empty_sums(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(offsets.shape[0] - 1, rows.shape[1])


expert_gate = define(_expert_gate, _empty_gate)
expert_gate_backward = define(_expert_gate_backward, _empty_gate_gradients)
sums_by_expert = define(_sums_by_expert, _empty_sums)
