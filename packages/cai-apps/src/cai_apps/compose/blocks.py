"""What is done to the forwards of a workload's layers, below hooks of `__call__`: recompute inside, compile outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cai_mesh.storage import blocks


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: elements of its lists of layers."""
    return [block for block in blocks(model) if block is not model]


def recompute_layers(layers: Sequence[nn.Module], *, form: str, compiled: bool) -> None:
    """Keep a layer's inputs and run its forward again in backward (Chen et al., arXiv:1604.06174).

    Args:
        layers: layers of a model; none is part of another.
        form: "full": nothing else is kept. "most": the results of attention are kept too, which cost most FLOPs for a
            byte where sequences are long: as many as there are positions before the average one. "selective": those
            of all matrix products too (Korthikanti et al., arXiv:2205.05198, turned around). A product of depth K
            costs K FLOPs for a byte of its result in bfloat16; all that is run again then costs about one.
        compiled: they are compiled afterwards. Every operator is then marked as it is traced: the compiler of
            torch 2.11 does not mark those inside an `autograd.Function`, and would keep the results of all linear
            layers. For full recompute in eager mode the marks would cost host time and are not needed.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if form != "full" or compiled:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _POLICIES[form])
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "convolution", "attention", "linear")
"""Parts of the names of operators that multiply matrices, divided at underscores."""


def is_product(operator: Any) -> bool:
    """Return whether an operator multiplies matrices or is attention: torch's, and those of kernels."""
    words = _words(operator)
    return any(word in PRODUCTS for word in words) and "backward" not in words


def is_attention(operator: Any) -> bool:
    """Return whether an operator is all of attention: torch's, and those of kernels."""
    return "attention" in _words(operator) and is_product(operator)


def _words(operator: Any) -> list[str]:
    name = str(getattr(operator, "_opname", operator))
    return name.split("::")[-1].split(".")[0].split("_")


def _policy(keep: Callable[[Any], bool]) -> Callable[..., CheckpointPolicy]:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keep(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


_POLICIES = {
    "selective": _policy(is_product),
    "most": _policy(is_attention),
    "full": _policy(lambda operator: False),
}


def compile_layers(
    layers: Sequence[nn.Module], methods: Sequence[tuple[nn.Module, str]] = (), *, sizes: int = 1
) -> None:
    """Compile the forward of every layer; layers of one kind and size share their compiled code.

    Where layers of one kind differ in size, as in a UNet, each size is compiled for itself: torch would make one code
    of open sizes for all of them, and after eight compile no more.

    Args:
        methods: methods that are compiled too: a module and the method's name.
        sizes: the number of sizes of inputs that come along.
    """
    shapes: dict[type, set[tuple[torch.Size, ...]]] = {}
    for layer in layers:
        shapes.setdefault(type(layer), set()).add(tuple(param.shape for param in layer.parameters()))
    most = max(map(len, shapes.values()), default=1)
    options: dict[str, Any] = {} if most == 1 else {"dynamic": False}
    # each size in training and in evaluation, with inputs of two sizes (the last batch)
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 4 * most * sizes)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 8 * most * sizes)
    # what a hook notes in a layer that is run again in backward (`routing.balance.Noted`) is noted once, in forward
    limits.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for layer in layers:
        layer.forward = torch.compile(layer.forward, **options)
    for module, name in methods:
        setattr(module, name, torch.compile(getattr(module, name)))
