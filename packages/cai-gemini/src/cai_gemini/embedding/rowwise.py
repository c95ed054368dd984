"""Adagrad with one accumulator a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from cai_mesh.errors import PlanError


class RowwiseAdagrad(Optimizer):
    """Adagrad for embedding tables that keeps, for each row, one running sum of the mean of its squared gradient.

    `sum[r] += mean(g[r]²)`, then `w[r] -= lr · g[r] / (sqrt(sum[r]) + eps)`, for the rows of the gradient alone
    (as Mudigere et al., arXiv:2104.05158, train recommendation models). The state of a row of D values is one value.
    On CUDA adding up the gradients of repeated rows makes the host wait, as in torch's own sparse optimizers.

    Args:
        params: parameters [rows, D] whose gradients are sparse.
        lr: step size.
        initial_accumulator_value: the value every sum starts at.
        eps: keeps the divisor from zero.

    Raises `PlanError` for a negative number or, in `step`, a dense gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ):
        for name, value in (
            ("lr", lr),
            ("initial_accumulator_value", initial_accumulator_value),
            ("eps", eps),
        ):
            if not value >= 0:
                raise PlanError(f"RowwiseAdagrad: {name} is negative", got=value)
        super().__init__(params, {"lr": lr, "eps": eps, "initial": initial_accumulator_value})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also make the state of the group's parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            self.state[p]["sum"] = torch.full_like(p.detach()[:, 0], group["initial"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows that have a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"], group["eps"])
        return loss

    def _update(self, p: torch.Tensor, lr: float, eps: float) -> None:
        if not p.grad.is_sparse:
            raise PlanError(
                "RowwiseAdagrad needs sparse gradients", got=f"a dense gradient of {tuple(p.shape)}"
            )
        gradient = p.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        sums = self.state[p]["sum"]
        sums.index_add_(0, rows, values.square().mean(1))
        divisor = sums.index_select(0, rows).sqrt_().add_(eps)
        p.index_add_(0, rows, values / divisor.unsqueeze(1), alpha=-lr)
