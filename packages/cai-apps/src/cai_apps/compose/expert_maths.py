"""What computes the experts of a model: kernels, and for layers that they do not know the layers themselves."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

import torch.distributed as dist
from torch import nn

from cai_apps.compose.expert_adapters import adapted_layers
from cai_kernels.swap import Swapped, expert_kernels
from cai_tensor_parallel import ExpertMaths, own_forward


def expert_maths(model: nn.Module, kinds: Sequence[str]) -> ExpertMaths:
    """Return what computes the experts that a rank holds of a model whose experts are yet to be spread.

    Args:
        kinds: the kinds of modules that run kernels; without "experts", layers compute by their own forward.
    """
    if "experts" not in kinds:
        return own_forward
    kernels = expert_kernels(model, own_forward)
    report_experts(kernels.record, adapted_layers(model))
    return kernels


def report_experts(record: Swapped, adapted: Collection[str] = ()) -> None:
    """Warn, on the first rank, of layers of experts that run no kernels.

    Args:
        record: the layers that run kernels, and those that do not.
        adapted: names of layers with adapters, which kernels compute in parts.
    """
    reasons = dict[str, list[str]]()
    for layer in record.kept:
        if layer.kind == "experts" and layer.name not in adapted:
            reasons.setdefault(layer.reason, []).append(layer.name)
    for reason, names in reasons.items():
        if dist.get_rank() == 0:
            warnings.warn(
                f"experts compute by their own forward in {', '.join(names)}: {reason}", stacklevel=2
            )
