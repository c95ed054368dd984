"""A small language model of residual blocks, and the plain loop that sharded training is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, norm: bool = True, widen: int = 2):
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, widen * width), nn.Linear(widen * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Language(nn.Module):
    """An embedding, blocks and a head.

    Args:
        bias: the head has one.
        block: options of every `Block`.
    """

    def __init__(self, vocab: int, width: int, layers: int, bias: bool = False, **block):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, **block) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=bias)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable, steps: int, clip: float
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of steps in one process; `loss_of(model, step)` is of the whole batch."""
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms
