"""How much of a model's blocks tensor-parallel ranks share: of the bytes of parameters, of the FLOPs of products."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cai_mesh.layout import layout_of

ENOUGH = 0.95
"""What counts as shared, of either."""


def shares(whole: nn.Module, cut: nn.Module, ids: Tensor, ranks: int) -> tuple[float, float]:
    """Of bytes and of FLOPs in the blocks, the parts that ranks share: 1.0 when each rank has its part of everything.

    Args:
        whole: the model, uncut.
        cut: the same model as one of `ranks` ranks has it. Collective: all run its forward.
        ids: a batch of token ids.
    """
    held = total = 0
    for name in _blocks(whole):
        for param in cut.get_submodule(name).parameters():
            layout = layout_of(param)
            size = math.prod(layout.global_shape)
            total, held = total + size, held + (size if "tp" in layout.sharded_axes else 0)
    own, all_of_it = _flops(cut, ids), _flops(whole, ids)
    shared = (1 - own / all_of_it) / (1 - 1 / ranks) if all_of_it else 1.0
    return held / max(total, 1), shared


def _blocks(model: nn.Module) -> Iterator[str]:
    """Outermost blocks in lists of modules."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(other + ".") for other in found):
            found.append(name)
            yield from (f"{name}.{own}" for own, _ in module.named_children())


@torch.no_grad()
def _flops(model: nn.Module, ids: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    root = type(model).__name__
    counts = counter.get_flop_counts()
    return sum(sum(counts.get(f"{root}.{name}", {}).values()) for name in _blocks(model))
