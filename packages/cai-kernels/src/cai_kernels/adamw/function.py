"""Public entry points: argument checks and the choice of the backend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cai_kernels.adamw import reference
from cai_kernels.adamw.options import AdamWOptions, Tensors
from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError

GRAD_DTYPES = (torch.float32, torch.bfloat16)


def adamw_step_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    options: AdamWOptions,
    *,
    step: int,
    grad_scale: float | torch.Tensor = 1.0,
    low: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """A step of AdamW in place (Loshchilov and Hutter, arXiv:1711.05101), in one pass over memory.

    The arithmetic is that of `torch.optim.AdamW`, in float32. The host never waits.

    Args:
        param, exp_avg, exp_avg_sq: float32 of one shape and device, contiguous; written. A parameter and its moments.
        grad: float32 or bfloat16, of that shape and device, contiguous; only read.
        options: the learning rate and the other numbers.
        step: number of this step of the parameter; the first is 1.
        grad_scale: a factor of the gradient, applied as it is read: a number, or a tensor of one value of any floating
            dtype on that device. Nothing is written if it is not finite.
        low: int16, of that shape and device, contiguous; written. With it, `param` is bfloat16: these are the halves of
            float32 numbers, as `cai_kernels.adamw.halves` splits them. The step is that of the float32 numbers, and
            reads and writes as many bytes.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Not differentiable. Not for CUDA graphs, which would repeat one `step`. Raises `KernelError` naming the argument
    that does not fit.
    """
    adamw_steps_(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        options,
        steps=[step],
        grad_scale=grad_scale,
        lows=None if low is None else [low],
        backend=backend,
    )


def adamw_steps_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    options: AdamWOptions,
    *,
    steps: Sequence[int],
    grad_scale: float | torch.Tensor = 1.0,
    lows: Sequence[torch.Tensor] | None = None,
    backend: Backend = "auto",
) -> None:
    """`adamw_step_` of many parameters with the same options, in one launch for each device and dtype of gradients.

    Args:
        params, grads, exp_avgs, exp_avg_sqs, steps: lists of one length, of what `adamw_step_` takes. Nothing that is
            written is in two places of them.
        lows: as many, where all parameters are in halves.
        options, grad_scale, backend: as there, for all of them.

    Nothing is written if an argument does not fit. Raises `KernelError` naming it.
    """
    halves = [None] * len(params) if lows is None else lows
    lists = (params, grads, exp_avgs, exp_avg_sqs, steps, halves)
    if len({len(sequence) for sequence in lists}) > 1:
        raise KernelError(
            "params, grads, exp_avgs, exp_avg_sqs, steps and lows differ in length",
            got=[len(sequence) for sequence in lists],
        )
    forms = [choose(backend, param.device) for param in params]
    for i, (param, grad, exp_avg, exp_avg_sq, step, low) in enumerate(zip(*lists, strict=True)):
        if step < 1:
            raise KernelError(f"steps[{i}] is not positive", got=step, expected="1 for the first step")
        require(f"params[{i}]", param, dtypes=(torch.float32 if low is None else torch.bfloat16,))
        if low is not None:
            _check_like(f"lows[{i}]", low, param, (torch.int16,))
        _check_like(f"grads[{i}]", grad, param, GRAD_DTYPES)
        _check_like(f"exp_avgs[{i}]", exp_avg, param, (torch.float32,))
        _check_like(f"exp_avg_sqs[{i}]", exp_avg_sq, param, (torch.float32,))
        _check_contiguous(f"params[{i}]", param)
        _check_scale(grad_scale, param)
    entries: list[Tensors] = []
    counts: list[int] = []
    for form, param, grad, exp_avg, exp_avg_sq, step, low in zip(forms, *lists, strict=True):
        tensors = Tensors(param.detach(), grad.detach(), exp_avg.detach(), exp_avg_sq.detach(), low)
        if form == "reference":
            if _finite(grad_scale):
                reference.adamw_step(tensors, options, step, grad_scale)
        else:
            entries.append(tensors)
            counts.append(step)
    launch(entries, options, counts, grad_scale)


def launch(
    entries: Sequence[Tensors],
    options: AdamWOptions,
    steps: Sequence[int] | Sequence[torch.Tensor],
    grad_scale: float | torch.Tensor,
) -> None:
    """Run the kernel for all entries, unchecked: for who has checked what `adamw_steps_` would, and has many.

    A thousand parameters must not keep the device waiting for the host. A compiled graph has an operator an entry,
    with numbers of steps; otherwise these may be tensors, each on the device of its entry. Either all entries are in
    halves, or none.
    """
    if not entries or not _finite(grad_scale):
        return
    from cai_kernels.adamw import triton

    scale = grad_scale.detach() if isinstance(grad_scale, torch.Tensor) else None
    factor = 1.0 if isinstance(grad_scale, torch.Tensor) else float(grad_scale)
    if torch.compiler.is_compiling():
        numbers = (options.lr, options.beta1, options.beta2, options.eps, options.weight_decay)
        for tensors, step in zip(entries, steps, strict=True):
            triton.adamw_step(*tensors, scale, factor, int(step), *numbers)
    else:
        triton.run_many(entries, scale, factor, steps, options)
    written = [t for param, _, *state in entries for t in (param, *state) if t is not None]
    torch.autograd.graph.increment_version(written)


def _finite(grad_scale: float | torch.Tensor) -> bool:
    """False for a number that is not; a tensor is for the device to look at."""
    return isinstance(grad_scale, torch.Tensor) or math.isfinite(grad_scale)


def _check_like(
    name: str, tensor: torch.Tensor, param: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    require(name, tensor, dtypes=dtypes, like=param)
    if tensor.shape != param.shape:
        raise KernelError(
            f"{name} has another shape than its parameter",
            got=tuple(tensor.shape),
            expected=tuple(param.shape),
        )
    _check_contiguous(name, tensor)


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise KernelError(f"{name} is not contiguous", got=f"strides {tensor.stride()}", fix="contiguous()")


def _check_scale(grad_scale: float | torch.Tensor, param: torch.Tensor) -> None:
    if not isinstance(grad_scale, torch.Tensor):
        return
    if grad_scale.numel() != 1 or not grad_scale.is_floating_point():
        raise KernelError(
            "grad_scale is not one number",
            got=f"{grad_scale.dtype}, shape {tuple(grad_scale.shape)}",
            expected="a number, or a floating tensor of one value",
        )
    if grad_scale.device != param.device:
        raise KernelError("grad_scale is on another device", got=grad_scale.device, expected=param.device)
