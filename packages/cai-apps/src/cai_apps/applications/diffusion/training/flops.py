"""What a step computes, counted on a model without values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.model.design import Design
from cai_apps.applications.diffusion.training.workload import workload
from cai_apps.compose.workload import on_meta

BACKWARD = 2
"""Products of backward for each of forward: one for the gradient of the input and one for that of the weight, which
frozen layers beside adapters do not have."""


def image_flops(config: Config, design: Design) -> int:
    """FLOPs of forward and backward for one image: convolutions, matrix products and attentions of all that is trained.

    A multiplication and an addition are two. Recompute, frozen encoders and, beside frozen layers, the
    gradients of adapters are not counted.
    """
    plain = replace(config, precision=replace(config.precision, compute="fp32"))
    work = workload(plain, design)
    model = on_meta(work)
    with torch.device("meta"):
        inputs = work.inputs(work.example(1))
    with torch.no_grad(), work.running(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    backward = BACKWARD - 1 if config.lora.rank else BACKWARD
    return (1 + backward) * counter.get_total_flops()
