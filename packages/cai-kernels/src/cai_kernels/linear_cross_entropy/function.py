"""Public entry point: checks arguments, chooses the backend and the form of the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch

from cai_kernels.backend import Backend
from cai_kernels.cross_entropy.function import Reduction, check_options
from cai_kernels.cross_entropy.options import LossOptions
from cai_kernels.cross_entropy.reference import reduce
from cai_kernels.errors import KernelError
from cai_kernels.linear_cross_entropy import autograd, slice_plan
from cai_kernels.linear_cross_entropy.inputs import CHUNK_BYTES, Inputs, prepare


class ComputeOptions(TypedDict, total=False):
    """Options of how `linear_cross_entropy` computes; see there."""

    return_z_loss: bool
    backward: Literal["auto", "fused", "split"]
    accumulate: Literal["float32", "weight"]
    chunk_bytes: int
    backend: Backend


@dataclass(frozen=True)
class _ComputeOptions:
    return_z_loss: bool = False
    backward: str = "auto"
    accumulate: str = "float32"
    chunk_bytes: int = CHUNK_BYTES
    backend: Backend = "auto"

    def form_of_backward(self, reduction: str) -> str:
        for name, value, choices in (
            ("backward", self.backward, ("auto", "fused", "split")),
            ("accumulate", self.accumulate, ("float32", "weight")),
        ):
            if value not in choices:
                raise KernelError(
                    f"unknown {name}", got=repr(value), expected=" or ".join(map(repr, choices))
                )
        if self.backward == "fused" and reduction == "none":
            raise KernelError(
                'backward="fused" computes gradients before it knows those of the rows',
                got='reduction="none"',
                fix='use backward="split" or "auto"',
            )
        if self.backward == "auto":
            return "split" if reduction == "none" else "fused"
        return self.backward


def _logits_fit_gradient(inputs: Inputs) -> bool:
    """Whether to compute in slices, with the logits in the memory of the weight's gradient; see `sliced`."""
    weight, execution = inputs.weight, inputs.execution
    summed_wide = execution.sum_dtype != weight.dtype and execution.grad_dtype == weight.dtype
    if not (inputs.needed.weight and execution.triton and summed_wide):
        return False
    return slice_plan.saves_memory(inputs.target.numel(), weight)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    **options: Unpack[ComputeOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy(F.linear(x, weight, bias), target)` without the logits of all tokens ever in memory.

    Logits are of a chunk of tokens at a time, in the dtype of x; the softmax is in float32. See `cross_entropy` for
    the options of the loss. Under autocast, x, weight and bias are cast first.

    Args:
        x: [..., D], float32, bfloat16 or float16 (the reference takes float64 too).
        weight: [V, D] in the dtype of x; bias: [V] or None.
        target: [...], int64 or int32.
        options: return_z_loss: also return the z-loss within the loss.
            backward: "fused" computes the gradients in forward, chunk by chunk, three matrix products in all;
            backward only scales them, and may run once where the weight's gradient keeps the dtype of its sum.
            "split" keeps four numbers a token and computes the logits again in backward, four products. "auto" (the
            default) is "fused", but "split" for reduction "none".
            accumulate: "float32" (the default) sums the weight's gradient in float32: over chunks, for a weight of
            16 bits in a buffer of 4 bytes a parameter beside the gradient; or, on Triton, for a large bfloat16 weight
            where it takes less memory, in one product over all tokens, whose logits wait in the gradient's own memory
            and a buffer for what does not fit (`chunk_bytes` bounds neither; backward may run once). Outside
            compiled graphs a weight whose `grad_dtype` is float32 gets the sum over chunks as its gradient. "weight"
            adds chunks in the weight's dtype, with no such buffer.
            chunk_bytes: bytes of the logits of a chunk, by default 512 MiB.
            backend: "auto" (Triton on CUDA, else the same in plain torch), "triton" or "reference".

    Returns the loss in float32 (float64 for float64), a scalar or [...]; with return_z_loss (loss, z-loss). Nothing is
    computed for inputs that need no gradient. Differentiable once, in x, weight and bias; one graph under
    torch.compile. Raises `KernelError` naming the argument that does not fit.
    """
    compute = _ComputeOptions(**options)
    form = compute.form_of_backward(reduction)
    check_options(reduction, label_smoothing, z_loss, softcap)
    sums = {"chunk_bytes": compute.chunk_bytes, "sum_in_weight_dtype": compute.accumulate == "weight"}
    inputs = prepare(x, weight, bias, target, backend=compute.backend, **sums)
    of_loss = LossOptions(ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))
    if form == "fused" and inputs.needed:
        loss, z, *_ = fused(inputs, of_loss, mean=reduction == "mean")
    else:
        loss, z = _split(inputs, of_loss, reduction)
    if reduction == "none":
        loss, z = loss.view(target.shape), z.view(target.shape)
    return (loss, z) if compute.return_z_loss else loss


def fused(inputs: Inputs, loss: LossOptions, *, mean: bool) -> tuple[torch.Tensor, ...]:
    """(loss, z-loss, gradients of x, weight and bias, their factor), all of them computed now."""
    return autograd.linear_loss_fused(
        *inputs.tensors(),
        mean=mean,
        **loss.arguments(),
        **inputs.needed.arguments(),
        **inputs.execution.arguments(),
        logits_in_gradient=_logits_fit_gradient(inputs),
        compiling=torch.compiler.is_compiling(),
    )


def _split(inputs: Inputs, loss: LossOptions, reduction: Reduction) -> Iterator[torch.Tensor]:
    """Loss and z-loss, whose backward computes the logits again."""
    losses, zs, _, _ = autograd.linear_scan(
        *inputs.tensors(), **loss.arguments(), statistic=loss.statistic, **inputs.execution.arguments()
    )
    return (reduce(v, inputs.target != loss.ignore_index, reduction) for v in (losses, zs))
