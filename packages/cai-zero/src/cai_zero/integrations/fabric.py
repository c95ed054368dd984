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

from cai_mesh.errors import PlanError
from cai_zero import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    shard_module,
    shard_optimizer,
)
from cai_zero.integrations import sync_of
from cai_zero.integrations.whole import load_whole_weights, whole_weights


class ZeroStrategy(DDPStrategy):
    """ZeRO over all processes. Set up the module first, then the optimizer over its parameters.

    `fabric.save` writes whole tensors, of the optimizer too, and `fabric.load` takes them on any number of ranks and in
    any stage; all processes call both.

    Args:
        stage: 0 to 3: module and optimizer are sharded as they are set up. None: they are sharded or offloaded already,
            and are set up as they are.
    """

    def __init__(self, stage: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.stage = stage
        self.mesh: Any = None
        self.optimizers: dict[nn.Module, torch.optim.Optimizer | None] = {}
        self._backward_sync_control = _Defer(self)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Unlike the parent's: nothing is wrapped."""
        if self.stage is not None and self.mesh is None:
            self.mesh = init_device_mesh(
                self.root_device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",)
            )
        if self.stage == 3:
            shard_module(module, self.mesh)
        self.optimizers[module] = None
        return module

    def module_to_device(self, module: nn.Module) -> None:
        """Leave what is sharded or offloaded where it is."""
        if self.stage is not None:
            super().module_to_device(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Shard the optimizer over the module whose parameters it has."""
        module = self._module_of(optimizer)
        if self.stage is not None and self.stage < 3:
            optimizer = shard_optimizer(optimizer, self.mesh, model=module, stage=self.stage)
        self.optimizers[module] = optimizer
        return optimizer

    def _module_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        groups = getattr(optimizer, "member_groups", None) or [
            group["params"] for group in optimizer.param_groups
        ]
        params = {id(param) for group in groups for param in group}
        for module in self.optimizers:
            if any(id(param) in params for param in module.parameters()):
                return module
        raise PlanError(
            "an optimizer has parameters of no module that is set up",
            fix="fabric.setup(module, optimizer), or set the module up first",
        )

    # -- state, whole ----------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Full tensors on rank 0, which writes the file."""
        return whole_weights(module, self.optimizers.get(module))

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Load full tensors, as rank 0 has read them."""
        load_whole_weights(module, self.optimizers.get(module), state_dict)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Full tensors on rank 0, in the form of a plain optimizer's state dict."""
        return full_optimizer_state_dict(optimizer, self._module_of(optimizer))

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Unlike the parent's: optimizers take full tensors."""
        if isinstance(state, torch.optim.Optimizer):
            self._load_optimizer(state, super().load_checkpoint(path, None, *args, **kwargs))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, *args, **kwargs)
        optimizers = {key: value for key, value in state.items() if isinstance(value, torch.optim.Optimizer)}
        values = {key: None if key in optimizers else value for key, value in state.items()}
        rest = super().load_checkpoint(path, values, *args, **kwargs)
        for key, optimizer in optimizers.items():
            saved, values[key] = values[key], optimizer
            if saved is not None:
                self._load_optimizer(optimizer, saved)
        state.update(values)
        return rest

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        load_full_optimizer_state_dict(optimizer, self._module_of(optimizer), saved)


class _Defer(_BackwardSyncControl):
    """`fabric.no_backward_sync`."""

    def __init__(self, strategy: ZeroStrategy):
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
        sync = sync_of(module, self._strategy.optimizers.get(module))
        return sync.defer() if enabled and sync is not None else contextlib.nullcontext()
