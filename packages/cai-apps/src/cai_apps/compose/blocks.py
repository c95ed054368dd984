"""What is done to the forward of every block, below the hooks of `__call__`: recompute inside, compile outside."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cai_mesh.storage import blocks


def recompute_blocks(model: nn.Module, *, selective: bool, compiled: bool) -> None:
    """Keep a block's inputs and run its forward again in backward (Chen et al., arXiv:1604.06174).

    Args:
        selective: keep the results of matrix products and attention too (Korthikanti et al., arXiv:2205.05198, turned
            around). A product of depth K costs K FLOPs for a byte of its result in bfloat16, all else about one, so
            what is run again gives back most bytes for its FLOPs.
        compiled: the blocks are compiled afterwards. Every operator is then marked as it is traced: the compiler of
            torch 2.11 does not mark those inside an `autograd.Function`, and would keep the results of all linear
            layers. For full recompute in eager mode the marks would cost host time and are not needed.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if selective or compiled:
        mark = _keep_products if selective else _recompute_all
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, mark)
    for block in blocks(model):
        if block is not model:
            block.forward = functools.partial(checkpoint, block.forward, **options)


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "attention", "linear")
"""Parts of the names of operators that multiply matrices, divided at underscores."""


def is_product(operator: Any) -> bool:
    """Whether an operator multiplies matrices or is attention: torch's, and those of kernels."""
    name = str(getattr(operator, "_opname", operator))
    words = name.split("::")[-1].split(".")[0].split("_")
    return any(word in PRODUCTS for word in words) and "backward" not in words


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_product(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: nn.Module) -> None:
    """Compile the forward of every block; blocks of one kind share their compiled code."""
    for block in blocks(model):
        if block is not model:
            block.forward = torch.compile(block.forward)
