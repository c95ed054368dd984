"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

from typing import Literal

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.cross_entropy import reference
from cai_kernels.errors import KernelError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("none", "sum", "mean")


def check_options(reduction: str, label_smoothing: float, z_loss: float, softcap: float | None) -> None:
    """Raise `KernelError` for an option out of its range."""
    if reduction not in REDUCTIONS:
        raise KernelError("unknown reduction", got=repr(reduction), expected="'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise KernelError("label_smoothing is out of range", got=label_smoothing, expected="0 to 1")
    if not z_loss >= 0.0:
        raise KernelError("z_loss is out of range", got=z_loss, expected="0 or more")
    if softcap is not None and not softcap > 0.0:
        raise KernelError("softcap is out of range", got=softcap, expected="more than 0, or None")


def check_target(logits: torch.Tensor, target: torch.Tensor) -> None:
    """Raise `KernelError` unless target has a class for every row of logits [..., V]."""
    require("target", target, dtypes=(torch.int64, torch.int32), like=logits)
    if logits.dim() == 0 or logits.shape[-1] == 0 or target.shape != logits.shape[:-1]:
        raise KernelError(
            "target does not fit logits",
            got=f"target {tuple(target.shape)}, logits {tuple(logits.shape)}",
            expected="logits [..., V] with V of at least 1 and target [...]",
            fix="the classes are the last dim; flatten or transpose the others in front of it",
        )


def rows_of(logits: torch.Tensor) -> torch.Tensor:
    """[..., V] as [rows, V] or [outer, inner, V] with contiguous columns; a copy only where strides allow neither."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    return logits if 2 <= logits.dim() <= 3 else logits.reshape(-1, logits.shape[-1])


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    inplace_backward: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy over the last dim, computed in float32: one pass over the logits, one more for their gradient.

    Rows whose target is `ignore_index` are not read and their gradient is zero. As in torch, the mean is over the
    other rows: nan if there are none.

    Args:
        logits: [..., V], float32, bfloat16 or float16 (the reference takes float64 too). A slice such as
            `logits[:, :-1]` is read where it lies.
        target: [...], int64 or int32, from 0 to V - 1. Anything else that is not `ignore_index` is nan in the loss
            (on the CPU an error of torch).
        ignore_index: the target of rows that do not count.
        reduction: "mean" over the rows that count, "sum" or "none".
        label_smoothing: share of the target's probability given to all classes (Szegedy et al., arXiv:1512.00567).
        z_loss: weight of the squared log-sum-exp added to every row's loss (PaLM, arXiv:2204.02311).
        softcap: replaces the logits by `softcap * tanh(logits / softcap)` (Gemma 2, arXiv:2408.00118).
        return_z_loss: also return the z-loss within the loss, for a log; no gradient flows through it.
        inplace_backward: lets backward write the gradient over the logits; a second backward is then an error. A
            compiled graph decides for itself whether it can.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns the loss in float32 (float64 for float64 logits), a scalar or [...]; with `return_z_loss` (loss, z-loss).
    Differentiable once, in logits; one graph under torch.compile. Raises `KernelError` for what does not fit.
    """
    form = choose(backend, logits.device)
    require("logits", logits, dtypes=DTYPES if form == "triton" else (*DTYPES, torch.float64))
    check_target(logits, target)
    check_options(reduction, label_smoothing, z_loss, softcap)
    if form == "reference":
        rows, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1).long()
        options = (ignore_index, reduction, label_smoothing, z_loss, softcap)
        loss, z = reference.cross_entropy(rows, flat, *options)
    else:
        from cai_kernels.cross_entropy import triton

        loss, z, _, _ = triton.cross_entropy(
            rows_of(logits),
            target.contiguous(),
            ignore_index=ignore_index,
            reduction=REDUCTIONS.index(reduction),
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap or 0.0,
            inplace=inplace_backward and not torch.compiler.is_compiling(),
        )
    if reduction == "none":
        loss, z = loss.view(target.shape), z.view(target.shape)
    return (loss, z.detach()) if return_z_loss else loss
