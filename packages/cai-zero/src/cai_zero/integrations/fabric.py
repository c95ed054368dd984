"""Lightning Fabric with ZeRO: a strategy that shards, or takes what is sharded or offloaded already."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.strategies import DDPStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_zero import full_state_dict, shard_module, shard_optimizer
from cai_zero.integrations import sync_of


class ZeroStrategy(DDPStrategy):
    """ZeRO over all processes. Set up the module first, then the optimizer over its parameters.

    Args:
        stage: 0 to 3: module and optimizer are sharded as they are set up. None: they are sharded or offloaded already,
            and are set up as they are.
    """

    def __init__(self, stage: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.stage = stage
        self._backward_sync_control = _Defer(self)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Unlike the parent's: nothing is wrapped."""
        self.module = module
        self.mesh = None
        if self.stage is not None:
            self.mesh = init_device_mesh(
                self.root_device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",)
            )
        if self.stage == 3:
            shard_module(module, self.mesh)
        self.sync = sync_of(module)
        return module

    def module_to_device(self, module: nn.Module) -> None:
        """Leave what is sharded or offloaded where it is."""
        if self.stage is not None:
            super().module_to_device(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self.stage is not None and self.stage < 3:
            optimizer = shard_optimizer(optimizer, self.mesh, model=self.module, stage=self.stage)
        self.sync = sync_of(self.module, optimizer)
        return optimizer

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Full tensors on rank 0, which writes the file."""
        return full_state_dict(module)


class _Defer(_BackwardSyncControl):
    """`fabric.no_backward_sync`."""

    def __init__(self, strategy: ZeroStrategy):
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
        sync = self._strategy.sync
        return sync.defer() if enabled and sync is not None else contextlib.nullcontext()
