"""Linear layers of few rows in Triton: each weight is read once, at the rate of the memory.

A program has some outputs of one layer and reads the first numbers of its weight before it waits for the kernel that
computes the input, so that memory is not idle between two layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import dot_precision, pdl_options, power_of_2
from cai_kernels.ops import define
from cai_kernels.tiles import dot, launch_dependents, to_float32, wait_for_previous

MOST_LAYERS = 3


class Form(NamedTuple):
    """Outputs and inputs of a step of a program, its warps, and the steps whose loads are under way."""

    outputs: int
    inputs: int
    warps: int
    stages: int


class Layer(NamedTuple):
    """Weight [outputs, inputs], bias [outputs] or None and out [rows, outputs] of a layer."""

    weight: object
    bias: object
    out: object
    outputs: int


@triton.jit
def _row(x_ptr, layer, inputs, part, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr):
    """Some outputs of one row: products in float32, summed at the end."""
    weight_ptr, bias_ptr, out_ptr, outputs = layer
    output = part * OUTPUTS + tl.arange(0, OUTPUTS)
    at = tl.arange(0, INPUTS)
    inside = (output < outputs)[:, None]
    where = output.to(tl.int64)[:, None] * inputs + at[None, :]
    weight = tl.load(weight_ptr + where, mask=inside & (at < inputs)[None, :], other=0.0)
    launch_dependents(PDL)
    wait_for_previous(PDL)
    total = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    for first in range(0, inputs, INPUTS):
        hidden = tl.load(x_ptr + first + at, mask=first + at < inputs, other=0.0)
        total += to_float32(weight) * to_float32(hidden)[None, :]
        further = first + INPUTS
        mask = inside & (further + at < inputs)[None, :]
        weight = tl.load(weight_ptr + where + further, mask=mask, other=0.0)
    sums = tl.sum(total, 1)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)
    tl.store(out_ptr + output, sums.to(out_ptr.dtype.element_ty), mask=output < outputs)


@triton.jit
def _rows(
    x_ptr, layer, inputs, part, rows,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows: weight [OUTPUTS, INPUTS] @ hidden.T [INPUTS, ROWS]."""
    weight_ptr, bias_ptr, out_ptr, outputs = layer
    output = part * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    at = tl.arange(0, INPUTS)
    inside = (output < outputs)[:, None]
    where = output.to(tl.int64)[:, None] * inputs + at[None, :]
    launch_dependents(PDL)
    wait_for_previous(PDL)
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for first in tl.range(0, inputs, INPUTS, num_stages=STAGES):
        column = first + at
        mask = inside & (column < inputs)[None, :]
        weight = tl.load(weight_ptr + where + first, mask=mask, other=0.0)
        mask = (row < rows)[None, :] & (column < inputs)[:, None]
        hidden = tl.load(x_ptr + row[None, :] * inputs + column[:, None], mask=mask, other=0.0)
        total = dot(weight, hidden, total, PRECISION)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + output, mask=output < outputs, other=0.0)
        total += bias.to(tl.float32)[:, None]
    where_out = row[None, :] * outputs + output[:, None]
    out_mask = inside & (row < rows)[None, :]
    tl.store(out_ptr + where_out, total.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _layers(
    x_ptr, first, second, third, inputs, rows, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The part of one layer that a program has; those of the first layer come first."""
    part = tl.program_id(0)
    weight, bias, out, outputs = first
    if second.weight is not None:
        before = tl.cdiv(first.outputs, OUTPUTS)
        if part >= before:
            part -= before
            weight, out, outputs = second.weight, second.out, second.outputs
            if bias is not None:
                bias = second.bias
    if third.weight is not None:
        before = tl.cdiv(first.outputs, OUTPUTS) + tl.cdiv(second.outputs, OUTPUTS)
        if tl.program_id(0) >= before:
            part = tl.program_id(0) - before
            weight, out, outputs = third.weight, third.out, third.outputs
            if bias is not None:
                bias = third.bias
    layer = (weight, bias, out, outputs)
    if ROWS == 1:
        _row(x_ptr, layer, inputs, part, OUTPUTS, INPUTS, PDL)
    else:
        _rows(x_ptr, layer, inputs, part, rows, ROWS, OUTPUTS, INPUTS, STAGES, PRECISION, PDL)


def form_of(rows: int, outputs: int, inputs: int) -> Form:
    """Return the form of a launch, as measured on an H200."""
    if rows > 1:
        return Form(outputs=64, inputs=128, warps=4, stages=6)
    if outputs < 8192:
        return Form(outputs=16, inputs=1024, warps=4, stages=1)
    return Form(outputs=4, inputs=2048, warps=4, stages=1)


def _skinny_linears(
    hidden: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> list[torch.Tensor]:
    """hidden [rows, inputs] and up to three weights [outputs, inputs], all contiguous, with as many biases or none.

    Returns [rows, outputs] of each.
    """
    outputs = sum(weight.shape[0] for weight in weights)
    return launched(hidden, weights, biases, form_of(hidden.shape[0], outputs, hidden.shape[1]))


def launched(
    hidden: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], form: Form
) -> list[torch.Tensor]:
    """Compute in a form; see `_skinny_linears`."""
    rows, inputs = hidden.shape
    outs = [hidden.new_empty(rows, weight.shape[0]) for weight in weights]
    if not rows:
        return outs
    parts = zip(weights, biases or [None] * len(weights), outs, strict=True)
    layers = [Layer(weight, bias, out, weight.shape[0]) for weight, bias, out in parts]
    layers += [Layer(None, None, None, 0)] * (MOST_LAYERS - len(layers))
    grid = (sum(triton.cdiv(weight.shape[0], form.outputs) for weight in weights),)
    launch = _layers[grid]  # pyright: ignore[reportIndexIssue]
    launch(
        hidden, *layers, inputs, rows,
        ROWS=1 if rows == 1 else max(power_of_2(rows), 16), OUTPUTS=form.outputs, INPUTS=form.inputs,
        STAGES=form.stages, PRECISION=dot_precision(hidden.dtype), num_warps=form.warps, **pdl_options(hidden.device),
    )  # fmt: skip
    return outs


def _empty(
    hidden: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [hidden.new_empty(hidden.shape[0], weight.shape[0]) for weight in weights]


skinny_linears = define(_skinny_linears, _empty)
