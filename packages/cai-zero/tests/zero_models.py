"""A small language model of residual blocks."""

from __future__ import annotations

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
