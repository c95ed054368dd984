"""The optimizer that a config asks for, over a model's parameters."""

from __future__ import annotations

import torch
from torch import nn

from cai_apps.config.sections import RunConfig


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what trains."""
    options = config.optimizer
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
