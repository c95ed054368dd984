"""Bytes that the losses of routers keep for backward, which are made after the forward that a plan runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from cai_apps.compose.routing.entry import routers_for
from cai_apps.compose.workload import Workload, on_meta
from cai_apps.config.sections import RunConfig

WIDE = 4
"""Bytes of a probability, or of a logit in float32."""


def router_bytes(config: RunConfig, workload: Workload) -> Mapping[str, int]:
    """Return the bytes that losses of routers keep of a microbatch on a tensor-parallel rank, by layer.

    They stay with recompute too. The balance loss keeps probabilities, the z loss logits in float32.

    Args:
        config: the resolved config.
        workload: the workload that is trained.
    """
    sizes: Counter[str] = Counter()
    options = workload.experts
    if options is None or not (options.aux_loss or options.z_loss):
        return sizes
    model, tensor = on_meta(workload), config.parallel.tensor
    routers = routers_for(options, model)
    names = {module: name for name, module in model.named_modules()}
    layers = [names[layer] for layer in workload.layers(model)]
    with torch.device("meta"):
        places = workload.example(config.train.microbatch_size)["input_ids"].numel()
    tokens = places // tensor.size if tensor.sequence else places
    for router in routers:
        layer = next((name for name in layers if router.name.startswith(f"{name}.")), "")
        sizes[layer] += tokens * router.experts * WIDE * (2 if options.z_loss else 1)
    return sizes
