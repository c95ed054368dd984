"""What is done to the forward of every block, below the hooks of `__call__`: recompute inside, compile outside."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cai_mesh.storage import blocks


def recompute_blocks(model: nn.Module, *, compiled: bool) -> None:
    """Keep only a block's inputs and run its forward again in backward (Chen et al., arXiv:1604.06174).

    Args:
        compiled: the blocks are compiled afterwards. Every operator is then marked for recomputing as it is traced:
            the compiler of torch 2.11 does not mark those inside an `autograd.Function`, and would keep the results of
            all linear layers. In eager mode the marks would cost host time and are not needed.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if compiled:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _recompute_all)
    for block in blocks(model):
        if block is not model:
            block.forward = functools.partial(checkpoint, block.forward, **options)


def _recompute_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: nn.Module) -> None:
    """Compile the forward of every block; blocks of one kind share their compiled code."""
    for block in blocks(model):
        if block is not model:
            block.forward = torch.compile(block.forward)
