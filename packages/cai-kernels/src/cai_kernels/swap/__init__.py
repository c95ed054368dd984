"""Replace what the modules of a model compute by kernels; modules are found by structure and by trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cai_kernels.backend import Backend
from cai_kernels.errors import KernelError
from cai_kernels.swap.expert_forms import ExpertForm, expert_form
from cai_kernels.swap.experts import ExpertKernels, expert_kernels
from cai_kernels.swap.head import defer_logits
from cai_kernels.swap.logits import Logits
from cai_kernels.swap.record import Kept, Replaced, Swapped

__all__ = [
    "KINDS",
    "ExpertForm",
    "ExpertKernels",
    "Kept",
    "Logits",
    "Replaced",
    "Swapped",
    "defer_logits",
    "expert_form",
    "expert_kernels",
    "swap",
]

KINDS = ("norm", "activation", "experts", "rope", "attention", "loss")


def swap(
    model: nn.Module,
    *,
    kinds: Sequence[str] = KINDS,
    backend: Backend = "auto",
    verify: Mapping[str, Any] | None = None,
    tolerance: float = 1e-2,
) -> Swapped:
    """Let the modules of `model` run kernels, in place; parameters, names, hooks and the state dict stay as they are.

    A module is a candidate by its parameters and its code, and is replaced if it computes what the kernel's reference
    computes on random values: RMS and layer norms ("norm"; group norms too, which run their kernel outside compiled
    graphs), `act(gate) * up` in MLPs ("activation"), layers of experts with stacked
    parameters ("experts"), rotary embedding of queries and keys ("rope"), modules whose code
    calls torch's attention ("attention": while they train, torch tries its operators fastest first), and the output
    layer of a model with `get_output_embeddings` ("loss"): while it trains, its logits are computed only when something
    other than a cross-entropy uses them.

    Swap after transforms that replace forwards by others (tensor parallelism) and before those that wrap them
    (recompute, compile, sharding). Modules whose forward was replaced before are left alone and reported.

    Args:
        model: any `nn.Module`, on any device, meta too.
        kinds: kinds of modules to replace.
        backend: backend of the kernels; "auto" runs Triton on CUDA and their plain torch forms elsewhere.
        verify: keyword arguments of the model. It is run on them before and after, in evaluation mode; if the first
            tensors of its results differ, everything is undone and a `KernelError` says by how much.
        tolerance: the largest difference that `verify` allows, relative to the largest value.

    Returns the record: print it, `undo()` it.
    Raises `KernelError` for an unknown kind.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise KernelError("unknown kind of module", got=", ".join(unknown), expected=", ".join(KINDS))
    from cai_kernels.swap.activations import swap_activations
    from cai_kernels.swap.attention import swap_attention
    from cai_kernels.swap.experts import swap_experts
    from cai_kernels.swap.group_norms import swap_group_norms
    from cai_kernels.swap.head import swap_loss
    from cai_kernels.swap.norms import swap_norms
    from cai_kernels.swap.rotary import swap_rotary

    steps = {
        "norm": (swap_norms, swap_group_norms),
        "activation": (swap_activations,),
        "experts": (swap_experts,),
        "rope": (swap_rotary,),
        "attention": (swap_attention,),
        "loss": (swap_loss,),
    }
    before = None if verify is None else _first_result(model, verify)
    record = Swapped()
    for kind in KINDS:
        if kind in kinds:
            for step in steps[kind]:
                step(model, record, backend)
    if before is not None and verify is not None:
        _compare(record, before, _first_result(model, verify), tolerance)
    return record


def _first_result(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            result = model(**inputs)
    finally:
        for module, was in training.items():
            module.training = was
    values = result.values() if isinstance(result, Mapping) else result
    first_tensor = (
        values if isinstance(values, torch.Tensor) else next(v for v in values if isinstance(v, torch.Tensor))
    )
    return first_tensor.double()


def _compare(record: Swapped, before: torch.Tensor, after: torch.Tensor, tolerance: float) -> None:
    scale = before.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    difference = ((after - before).abs().max() / scale).item()
    if not difference <= tolerance:
        described = str(record)
        record.undo()
        raise KernelError(
            "the model computes something else with its kernels; all of them were taken out",
            got=f"relative difference {difference:.2e} with\n{described}",
            expected=f"at most {tolerance:.0e}",
            fix="leave out kinds until it agrees, and tell us the model",
        )
