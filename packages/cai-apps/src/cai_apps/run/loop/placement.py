"""Placement of a model whose training state is not all on the device, told and drawn once a run."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.loop.metrics import Metrics
from cai_gemini import OffloadedOptimizer


class PlacementWatch:
    """Follows an offloaded run: says once what stays where, and takes down one step after that.

    The step is drawn by `cai report` from plots/offload.timeline.json.

    Args:
        optimizer: the session's optimizer, where training state is in several memories; None: nothing is done.
        run: the run's directory, to which the timeline goes.
    """

    def __init__(self, optimizer: OffloadedOptimizer | None, run: RunDirectory):
        self._optimizer = optimizer
        self._file = run.plots / "offload.timeline.json"
        self._reported = self._drawn = False

    def after_step(self, metrics: Metrics) -> Metrics:
        """Called after every step of every rank; returns the metrics with the bytes that stay on device and host."""
        if self._optimizer is None:
            return metrics
        placement = self._optimizer.placement()
        if self._reported and not self._drawn:
            self._drawn = True
            timeline = self._optimizer.timeline()
            if dist.get_rank() == 0:
                timeline.save(self._file)
        if placement.planned and not self._reported:
            self._reported = True
            if dist.get_rank() == 0:
                print(f"offload: {placement}", flush=True)
            self._optimizer.record_timeline()
        return replace(metrics, device_bytes=placement.device_bytes, host_bytes=placement.host_bytes)
