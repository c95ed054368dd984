"""The linear cross-entropy as the products of a linear layer, for whoever runs the layer.

An output layer whose weight gradient goes into a buffer of somebody else is run by code that knows the buffer. It calls
`forward`, `backward` and one of the two functions for the weight's gradient; nothing here knows what happens between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_kernels.backend import Backend, choose
from cai_kernels.cross_entropy.function import Reduction, check_options
from cai_kernels.cross_entropy.options import LossOptions
from cai_kernels.linear_cross_entropy import autograd, chunked
from cai_kernels.linear_cross_entropy.function import fused
from cai_kernels.linear_cross_entropy.inputs import CHUNK_BYTES, Inputs, prepare
from cai_kernels.linear_cross_entropy.options import Needed

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class LossProducts:
    """Products of an output layer that returns its cross-entropy with `target`; see `linear_cross_entropy`.

    A mean or a sum computes its gradients in forward, unscaled; they wait for the gradient of the loss. The losses of
    "none" compute the logits again in backward.

    Args:
        target: the classes [...] of x [..., D].
        ignore_index, reduction, label_smoothing, softcap, backend: as in `linear_cross_entropy`.
    """

    target: torch.Tensor
    ignore_index: int = -100
    reduction: Reduction = "mean"
    label_smoothing: float = 0.0
    softcap: float | None = None
    backend: Backend = "auto"

    @property
    def key(self) -> str:
        """The weight's gradient is made of the same operands whatever the options."""
        return "linear cross-entropy"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        """x [..., D], weight [V, D] -> (the loss, a scalar or [...], what backward needs)."""
        check_options(self.reduction, self.label_smoothing, 0.0, self.softcap)
        inputs, loss = self._prepare(x, weight, bias), self._loss()
        if self.reduction == "none":
            losses, _, _, stats = autograd.linear_scan(
                *inputs.tensors(),
                **loss.arguments(),
                statistic=loss.statistic,
                **inputs.execution.arguments(),
            )
            return losses.view(self.target.shape), (x, stats, *(() if bias is None else (bias,)))
        total, _, *gradients = fused(inputs, loss, mean=self.reduction == "mean")
        return total, tuple(gradients)

    def backward(
        self,
        dy: torch.Tensor,
        weight: torch.Tensor,
        saved: Tensors,
        *,
        needs_input: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[torch.Tensor | None, Tensors, torch.Tensor | None]:
        """dy of the loss -> (dx [..., D], the weight's gradient unscaled and its factor, the bias's gradient)."""
        if self.reduction == "none":
            needed = Needed(needs_input, needs_weight, needs_bias)
            dx, dw, db = self._row_gradients(dy, weight, saved, needed)
            factor = torch.ones((), dtype=saved[1].dtype, device=dw.device)
        else:
            dx, dw, db, factor = saved
            factor, triton = factor * dy, choose(self.backend, weight.device) == "triton"
            dx, db = (
                chunked.scaled_gradient(gradient, factor, gradient.dtype, triton) for gradient in (dx, db)
            )
        return (
            dx.view(*self.target.shape, weight.shape[1]) if needs_input else None,
            (dw, factor) if needs_weight else (),
            db.to(weight.dtype) if needs_bias else None,
        )

    def _row_gradients(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, needed: Needed
    ) -> chunked.Gradients:
        """The gradients of x, weight and bias for dy [...] of every row's loss; the logits are computed again."""
        x, stats, *bias = saved
        inputs, loss = self._prepare(x, weight, bias[0] if bias else None), self._loss()
        flat = dy.reshape(-1).to(stats.dtype)
        return chunked.linear_scan_backward(
            *inputs.tensors(),
            stats,
            torch.stack((flat, torch.zeros_like(flat))),
            **loss.arguments(),
            statistic=loss.statistic,
            **needed.arguments(),
            chunk_rows=inputs.execution.chunk_rows,
            triton=inputs.execution.triton,
            sum_dtype=inputs.execution.sum_dtype,
        )

    def weight_grad(self, operands: Tensors) -> torch.Tensor:
        """The weight's gradient [V, D], in the dtype in which it was summed."""
        dw, factor = operands
        return dw * factor

    def write_weight_grad(self, operands: Tensors, out: torch.Tensor, *, fresh: bool) -> None:
        """Write the weight's gradient to `out` [V, D], or add it: rounded once, to the dtype of `out`."""
        dw, factor = operands
        wide = factor.view(1, 1)  # with dimensions, so that a product of 16 bits is computed in float32
        torch.mul(dw, wide, out=out) if fresh else out.addcmul_(dw, wide)

    def _loss(self) -> LossOptions:
        return LossOptions(self.ignore_index, float(self.label_smoothing), 0.0, float(self.softcap or 0.0))

    def _prepare(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Inputs:
        """The checked inputs; what needs a gradient is asked of the tensors, since none flows through here."""
        with torch.enable_grad():
            return prepare(x, weight, bias, self.target, backend=self.backend, chunk_bytes=CHUNK_BYTES)
