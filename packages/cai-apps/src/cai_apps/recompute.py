"""Activation recompute: keep a block's inputs, run its forward again in backward.

Chen et al., arXiv:1604.06174.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from cai_mesh.units import blocks


def recompute_blocks(model: nn.Module) -> None:
    """Replace the forward of every block by one that recomputes, below the hooks of `__call__`."""
    for block in blocks(model):
        if block is not model:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
