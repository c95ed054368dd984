"""A model that may be larger than the device: `cai_gemini.offload` under a run, and what the run tells of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from cai_apps.config import Config
from cai_apps.materialize import InitialValues
from cai_apps.metrics import Metrics
from cai_apps.run_directory import RunDirectory
from cai_gemini import OffloadedOptimizer, offload


def offload_model(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device,
    master: torch.dtype,
    compute: torch.dtype,
) -> OffloadedOptimizer:
    """Give a model on the meta device its initial values chunk by chunk in host memory, to be trained from there.

    Args:
        model: neither split nor parallelized; its optimizer is over its meta parameters.
        device: where it computes. At most one block is there while values are made.
        master: dtype of master weights and optimizer state.
        compute: dtype of forward and backward.

    Raises what `cai_gemini.offload` raises for memory that is too small.
    """
    pretrained = config.model.weights == "pretrained"
    values = InitialValues(model, seed=config.train.seed, dtype=master, device=device, pretrained=pretrained)
    for param in model.parameters():
        param.data = param.data.to(master)  # a meta tensor: only its dtype
    memory = config.memory
    _, offloaded = offload(
        model,
        optimizer,
        residency=memory.residency,
        device=device,
        device_memory=memory.device_memory,
        host_memory=memory.host_memory,
        nvme=None if memory.nvme is None else Path(memory.nvme).expanduser(),
        compute=compute,
        materialize=values,
    )
    values.finish()
    return offloaded


class Watch:
    """Follows an offloaded run: says once what stays where, and takes down one step after that.

    The step is drawn by `cai report` from plots/offload.timeline.json.

    Args:
        optimizer: of the session; one that is not offloaded is left alone.
        run: where the timeline goes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, run: RunDirectory):
        self._optimizer = optimizer if isinstance(optimizer, OffloadedOptimizer) else None
        self._file = run.plots / "offload.timeline.json"
        self._told = self._drawn = False

    def after_step(self, metrics: Metrics) -> Metrics:
        """Called after every step of every rank; returns the metrics with the bytes that stay on device and host."""
        if self._optimizer is None:
            return metrics
        placement = self._optimizer.placement()
        if self._told and not self._drawn:
            self._drawn = True
            timeline = self._optimizer.timeline()
            if dist.get_rank() == 0:
                timeline.save(self._file)
        if placement.planned and not self._told:
            self._told = True
            if dist.get_rank() == 0:
                print(f"offload: {placement}", flush=True)
            self._optimizer.record_timeline()
        return replace(metrics, device_bytes=placement.device_bytes, host_bytes=placement.host_bytes)
