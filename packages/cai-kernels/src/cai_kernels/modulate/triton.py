"""Adaptive layer norm and its gate as operators in Triton."""

from __future__ import annotations

import torch

from cai_kernels.column_sums import column_sums_into
from cai_kernels.compiler import triton
from cai_kernels.launch import power_of_2, waves
from cai_kernels.modulate import kernels, reference
from cai_kernels.ops import define, gradients_of

TILE, BLOCK = 2048, 256  # values of a tile, and columns of a gate's
RESIDENT = 2  # programs a multiprocessor that walk down tokens


def _of_samples(t: torch.Tensor) -> torch.Tensor:
    """[N, C] with neighbouring columns: a view of a chunk, else a copy."""
    return t if t.stride(1) == 1 else t.contiguous()


def _tile(tokens: int, block: int) -> dict[str, int]:
    """Rows and columns of a tile, and warps: 16 values a thread."""
    rows = min(max(TILE // block, 1), power_of_2(tokens))
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(max(rows * block // 512, 1), 16)}


def _walk(x: torch.Tensor, rows: int, blocks: int = 1) -> int:
    """Programs that share the tokens of a sample."""
    samples, tokens, _ = x.shape
    return max(min(triton.cdiv(tokens, rows), waves(x.device, RESIDENT) // (samples * blocks)), 1)


def _modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [N, T, C], scale, shift [N, C] -> (y [N, T, C], mean, reciprocal deviation [N * T] in float32)."""
    y, mean, rstd = _empty(x, scale, shift, eps)
    if x.numel():
        samples, tokens, columns = x.shape
        sizes = _tile(tokens, power_of_2(columns))
        parts = triton.cdiv(tokens, sizes["ROWS"])
        scale, shift = _of_samples(scale), _of_samples(shift)
        shape = (parts, tokens, columns, scale.stride(0), shift.stride(0))
        launch = kernels.modulate[(samples * parts,)]  # pyright: ignore[reportIndexIssue]
        launch((x.contiguous(), scale, shift), (y, mean, rstd), shape, eps, **sizes)
    return y, mean, rstd


def _modulate_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_x: bool,
    scale_dtype: torch.dtype | None,
    shift_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x [N, T, C], scale and shift [N, C]; one not needed (its dtype None) is empty."""
    dx, dscale, dshift = _empty_gradients(dy, x, scale, mean, rstd, need_x, scale_dtype, shift_dtype)
    if x.numel() == 0:
        return dx, dscale.zero_(), dshift.zero_()
    samples, tokens, columns = x.shape
    sizes = _tile(tokens, power_of_2(columns))
    parts, scale = _walk(x, sizes["ROWS"]), _of_samples(scale)
    partial = _partial(x, parts, [scale_dtype is not None, shift_dtype is not None])
    launch = kernels.modulate_backward[(samples * parts,)]  # pyright: ignore[reportIndexIssue]
    inputs = (dy.contiguous(), x.contiguous(), scale, mean, rstd)
    outputs = (dx if need_x else None, *partial)
    launch(inputs, outputs, (parts, tokens, columns, scale.stride(0), samples), STAGES=2, **sizes)
    _sum(partial, [dscale, dshift])
    return dx, dscale, dshift


def _gate_add(residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """residual, x [N, T, C], gate [N, C] -> [N, T, C] contiguous."""
    y = _empty_sum(residual, x, gate)
    if x.numel():
        samples, tokens, columns = x.shape
        sizes = _tile(tokens, min(power_of_2(columns), BLOCK))
        parts, gate = triton.cdiv(tokens, sizes["ROWS"]), _of_samples(gate)
        grid = (samples * parts, triton.cdiv(columns, sizes["BLOCK"]))
        launch = kernels.gate_add[grid]  # pyright: ignore[reportIndexIssue]
        inputs = (residual.contiguous(), x.contiguous(), gate)
        launch(inputs, y, (parts, tokens, columns, gate.stride(0)), **sizes)
    return y


def _gate_add_backward(
    dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, need_x: bool, need_gate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [N, T, C] and gate [N, C]; one not needed is empty."""
    dx, dgate = _empty_gate_gradients(dy, x, gate, need_x, need_gate)
    if x.numel() == 0:
        return dx, dgate.zero_()
    samples, tokens, columns = x.shape
    sizes = _tile(tokens, min(power_of_2(columns), BLOCK))
    blocks, gate = triton.cdiv(columns, sizes["BLOCK"]), _of_samples(gate)
    parts = _walk(x, sizes["ROWS"], blocks)
    partial = _partial(x, parts, [need_gate])
    launch = kernels.gate_add_backward[(samples * parts, blocks)]  # pyright: ignore[reportIndexIssue]
    outputs = (dx if need_x else None, *partial)
    shape = (parts, tokens, columns, gate.stride(0), samples)
    launch((dy.contiguous(), x.contiguous(), gate), outputs, shape, STAGES=3, **sizes)
    _sum(partial, [dgate])
    return dx, dgate


def _partial(x: torch.Tensor, parts: int, needed: list[bool]) -> list[torch.Tensor | None]:
    """Room for sums over a part of the tokens: [parts, N * C] in float32, None where not needed."""
    columns = x.shape[0] * x.shape[2]
    return [x.new_empty(parts, columns, dtype=torch.float32) if need else None for need in needed]


def _sum(partial: list[torch.Tensor | None], outs: list[torch.Tensor]) -> None:
    both = [(p, out.view(-1)) for p, out in zip(partial, outs, strict=True) if p is not None]
    if both:
        column_sums_into(*zip(*both, strict=True))


def _empty(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = x.shape[0] * x.shape[1]
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _empty_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_x: bool,
    scale_dtype: torch.dtype | None,
    shift_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = x.new_empty(x.shape if need_x else 0)
    dscale, dshift = (
        x.new_empty(0 if dtype is None else scale.shape, dtype=dtype) for dtype in (scale_dtype, shift_dtype)
    )
    return dx, dscale, dshift


def _empty_sum(residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _empty_gate_gradients(
    dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, need_x: bool, need_gate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape if need_x else 0), gate.new_empty(gate.shape if need_gate else 0)


def _save(ctx, inputs, output) -> None:
    x, scale, shift, ctx.eps = inputs
    ctx.shift_dtype = shift.dtype
    ctx.save_for_backward(x, scale, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, _mean, _rstd):
    if dy is None:
        return None, None, None, None
    x, scale, mean, rstd = ctx.saved_tensors
    need_x, need_scale, need_shift, _ = ctx.needs_input_grad
    dtypes = (scale.dtype if need_scale else None, ctx.shift_dtype if need_shift else None)
    dx, dscale, dshift = modulate_backward(dy, x, scale, mean, rstd, need_x, *dtypes)
    return dx if need_x else None, dscale if need_scale else None, dshift if need_shift else None, None


def _differentiate_again(ctx, dy, _mean, _rstd):
    if dy is None:
        return None, None, None, None
    x, scale, _, _ = ctx.saved_tensors
    # no gradient depends on its values
    shift = torch.zeros_like(scale, dtype=ctx.shift_dtype, requires_grad=True)

    def plain(x, scale, shift):
        return reference.modulate(x, scale, shift, ctx.eps)

    return *gradients_of(plain, (x, scale, shift), ctx.needs_input_grad[:3], dy), None


def _save_gate(ctx, inputs, output) -> None:
    _, x, gate = inputs
    ctx.save_for_backward(x, gate)
    ctx.set_materialize_grads(False)


def _differentiate_gate(ctx, dy):
    if dy is None:
        return None, None, None
    x, gate = ctx.saved_tensors
    need_residual, need_x, need_gate = ctx.needs_input_grad
    dx = dgate = None
    if need_x or need_gate:
        dx, dgate = gate_add_backward(dy, x, gate, need_x, need_gate)
    return dy if need_residual else None, dx if need_x else None, dgate if need_gate else None


def _differentiate_gate_again(ctx, dy):
    if dy is None:
        return None, None, None
    x, gate = ctx.saved_tensors
    need_residual, *needed = ctx.needs_input_grad

    def plain(x, gate):
        return reference.gate_add(torch.zeros_like(x), x, gate)

    dx, dgate = gradients_of(plain, (x, gate), needed, dy) if any(needed) else (None, None)
    return dy if need_residual else None, dx, dgate


modulate_backward = define(_modulate_backward, _empty_gradients)
modulate = define(_modulate, _empty, save=_save, backward=_differentiate, twice=_differentiate_again)
gate_add_backward = define(_gate_add_backward, _empty_gate_gradients)
gate_add = define(
    _gate_add,
    _empty_sum,
    save=_save_gate,
    backward=_differentiate_gate,
    twice=_differentiate_gate_again,
)
