"""What a step computes, counted on a model without values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.design import Design
from cai_apps.applications.diffusion.workload import workload
from cai_apps.compose.workload import on_meta

BACKWARD = 2
"""Products of backward for each of forward."""


def image_flops(config: Config, design: Design) -> int:
    """FLOPs of forward and backward for one image: convolutions, matrix products and attentions of all that is trained.

    A multiplication and an addition are two. Recompute and frozen encoders are not counted.
    """
    plain = replace(config, precision=replace(config.precision, compute="fp32"))
    work = workload(plain, design)
    model = on_meta(work)
    with torch.device("meta"):
        inputs = work.inputs(work.example(1))
    with torch.no_grad(), work.running(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return (1 + BACKWARD) * counter.get_total_flops()
