"""What is done to the forward of every block, below the hooks of `__call__`: recompute inside, compile outside."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cai_mesh.storage import blocks


def recompute_blocks(model: nn.Module) -> None:
    """Keep only a block's inputs and run its forward again in backward (Chen et al., arXiv:1604.06174)."""
    for block in blocks(model):
        if block is not model:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(model: nn.Module) -> None:
    """Compile the forward of every block; blocks of one kind share their compiled code."""
    for block in blocks(model):
        if block is not model:
            block.forward = torch.compile(block.forward)
