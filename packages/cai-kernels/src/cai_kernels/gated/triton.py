"""Gated activations in Triton: one pass forward; backward computes the activation again and keeps nothing of it."""

from __future__ import annotations

import torch

from cai_kernels.activations import activation
from cai_kernels.compiler import tl, triton
from cai_kernels.gated import reference
from cai_kernels.launch import power_of_2
from cai_kernels.ops import define, gradients_of
from cai_kernels.rows import as_rows

BLOCK, BACKWARD_BLOCK = 1024, 512  # 512 is half a percent faster than 1024 backward (H200, Triton 3.6)


@triton.jit
def _forward(gate_ptr, up_ptr, y_ptr, shape, KIND: tl.constexpr, BLOCK: tl.constexpr):
    blocks, columns, gate_stride, up_stride = shape
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    value, _ = activation(gate, KIND, gate_ptr.dtype.element_ty != tl.float32)
    tl.store(y_ptr + row * columns + at, (value * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(inputs, outputs, shape, KIND: tl.constexpr, BLOCK: tl.constexpr):
    dy_ptr, gate_ptr, up_ptr = inputs
    dgate_ptr, dup_ptr = outputs
    blocks, columns, dy_stride, gate_stride, up_stride, out_stride = shape
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    dy = tl.load(dy_ptr + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    value, slope = activation(gate, KIND, gate_ptr.dtype.element_ty != tl.float32)
    if dup_ptr is not None:
        dup = (dy * value).to(dup_ptr.dtype.element_ty)
        tl.store(dup_ptr + row * out_stride + at, dup, mask=inside)
    if dgate_ptr is not None:
        up = tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
        dgate = (dy * up * slope).to(dgate_ptr.dtype.element_ty)
        tl.store(dgate_ptr + row * out_stride + at, dgate, mask=inside)


def _launch(tensors: list[torch.Tensor | None], most: int) -> tuple[int, tuple[int, ...], dict[str, int]]:
    """(programs, (blocks of a row, columns, row strides of what is there), sizes); one long row if all is dense."""
    present_tensors = [t for t in tensors if t is not None]
    rows, columns = present_tensors[0].shape
    strides = [t.stride(0) for t in present_tensors]
    if rows == 1 or all(stride == columns for stride in strides):
        rows, columns, strides = 1, rows * columns, [0] * len(present_tensors)
    block = min(power_of_2(columns), most)
    blocks = triton.cdiv(columns, block)
    return (
        rows * blocks,
        (blocks, columns, *strides),
        {"BLOCK": block, "num_warps": min(max(block // 128, 1), 4)},
    )


def _halves(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if up is None:
        packed = as_rows(gate)
        half = packed.shape[1] // 2
        return packed[:, :half], packed[:, half:]
    return as_rows(gate), as_rows(up)


def _gated(gate: torch.Tensor, up: torch.Tensor | None, kind: str) -> torch.Tensor:
    """gate, up [..., F], or gate alone [..., 2F] -> [..., F]."""
    y = _empty(gate, up, kind)
    if y.numel():
        gate, up = _halves(gate, up)
        programs, shape, sizes = _launch([gate, up], BLOCK)
        launch = _forward[(programs,)]  # pyright: ignore[reportIndexIssue]
        launch(gate, up, y, shape, KIND=kind, **sizes)
    return y


def _gated_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    kind: str,
    need_gate: bool,
    need_up: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up [..., F]; of a packed gate [..., 2F] in one tensor. One not needed is empty."""
    gradients = _empty_gradients(dy, gate, up, kind, need_gate, need_up)
    if dy.numel():
        if up is None:
            dgate, _ = gradients
            outputs = list(_halves(dgate, None))
        else:
            outputs = [
                as_rows(g) if w else None for g, w in zip(gradients, (need_gate, need_up), strict=True)
            ]
        dy, (gate, up) = as_rows(dy), _halves(gate, up)
        out = next(t for t in outputs if t is not None)
        programs, shape, sizes = _launch([dy, gate, up, out], BACKWARD_BLOCK)
        launch = _backward[(programs,)]  # pyright: ignore[reportIndexIssue]
        launch((dy, gate, up), tuple(outputs), shape, KIND=kind, **sizes)
    return gradients


def _empty(gate: torch.Tensor, up: torch.Tensor | None, kind: str) -> torch.Tensor:
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


def _empty_gradients(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    kind: str,
    need_gate: bool,
    need_up: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dgate = gate.new_empty(gate.shape if need_gate else 0)
    return dgate, gate.new_empty(0 if up is None or not need_up else up.shape)


def _save(ctx, inputs, output) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy):
    if dy is None:
        return None, None, None
    gate, up = ctx.saved_tensors
    need_gate, need_up, _ = ctx.needs_input_grad
    dgate, dup = gated_backward(dy, gate, up, ctx.kind, need_gate, need_up)
    return dgate if need_gate else None, dup if need_up else None, None


def _differentiate_again(ctx, dy):
    if dy is None:
        return None, None, None
    gate, up = ctx.saved_tensors

    def plain(gate, up):
        return reference.gated(gate, up, ctx.kind)

    return *gradients_of(plain, (gate, up), ctx.needs_input_grad[:2], dy), None


gated_backward = define(_gated_backward, _empty_gradients)
gated = define(_gated, _empty, save=_save, backward=_differentiate, twice=_differentiate_again)
