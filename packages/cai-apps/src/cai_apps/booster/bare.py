"""What `boost` does to a user's module: the transforms in compose's order, then memory, and the optimizer by names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.booster.alike import make_alike
from cai_apps.booster.checkpoints import load_first
from cai_apps.booster.config import BoostConfig
from cai_apps.booster.lazy import files_of, initial_values, is_lazy
from cai_apps.compose.apply import is_compiled, rewrite
from cai_apps.compose.blocks import blocks_of, compile_layers, recompute_layers
from cai_apps.compose.materialize import InitialValues, materialize_from
from cai_apps.compose.sharding import DTYPES, shard_initial, sharding_options, share_tied, stepped_options
from cai_apps.compose.weights import Offloaded, Replicated, Sharded, Weights
from cai_apps.compose.workload import Workload
from cai_apps.config.memory import offloads
from cai_gemini import ChunkResidency, Tiers, offload
from cai_kernels import FusedAdamW
from cai_mesh.comm import ParallelMesh
from cai_mesh.errors import ConfigError
from cai_mesh.layout import canonical_name
from cai_pipeline import Stages
from cai_zero import MixedPrecision, shard_module, shard_optimizer, sharding_of

Names = list[list[str]]
"""Names of the parameters of each group of an optimizer."""


@dataclass(frozen=True)
class Bare:
    """A user's module and optimizer on the ranks of a mesh.

    Args:
        config: the resolved config.
        mesh: the mesh.
        device: the device of this rank.
    """

    config: BoostConfig
    mesh: Any
    device: torch.device

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype of computation; None: that of the user's module."""
        name = self.config.precision.compute
        return None if name == "fp32" else DTYPES[name]

    @property
    def precision(self) -> MixedPrecision:
        """The dtypes of weights."""
        reduce = None if self.config.reduce == "auto" else DTYPES[self.config.reduce]
        return MixedPrecision(
            compute=self.compute, master=None if self.config.masters else self.compute, reduce=reduce
        )

    def transform(self, model: nn.Module) -> nn.Module:
        """Change the operators of a module, in place, before it is on its device."""
        make_alike(model, self.mesh, self.device)
        rewrite(self.config, _workload(model), model, self.mesh, device=self.device)
        compiled = is_compiled(self.config, self.device)
        self._recompute(model, compiled=compiled)
        if compiled:
            compile_layers(blocks_of(model))
        return model

    def _recompute(self, model: nn.Module, *, compiled: bool) -> None:
        """Run layers again in backward, whose gradient checkpointing transformers has turned on, or a part of them."""
        layers = [
            module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True
        ]
        layers = [layer for layer in layers if hasattr(layer, "_gradient_checkpointing_func")]
        layers = [layer for layer in layers if _is_layer(layer)]
        if not layers:
            return
        for layer in layers:
            layer.gradient_checkpointing = False  # type: ignore[assignment]
        recompute_layers(self._chosen(model, layers), form="full", compiled=compiled)

    def _chosen(self, model: nn.Module, layers: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Return the layers that run again, of this rank's stages as many as the config says."""
        counts = self.config.recompute_layers
        if not counts:
            return layers[: round(self.config.recompute_share * len(layers))]
        stages = Stages.of(model)
        if len(counts) != stages.count:
            raise ConfigError(
                "num_ckpt_layers_per_stage has not a number for each stage",
                got=f"{len(counts)} numbers, {stages.count} stages",
            )
        if len(stages.own) == 1:
            return layers[: counts[next(iter(stages.own))]]
        named = dict(model.named_modules())
        chosen = []
        for index, stage in stages.own.items():
            parts = [named[name] for name in stage.parts if named.get(name) in set(layers)]
            chosen += parts[: counts[index]]
        return chosen

    # -- memory ------------------------------------------------------------------------------------------------------

    def place(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, names: Names
    ) -> Weights | None:
        """Move a module to its device, and shard or offload it with its optimizer; None without an optimizer.

        Args:
            model: the module, after `transform`; one on the meta device gets its values here.
            optimizer: the user's optimizer.
            names: `names_of` the optimizer before `transform`.
        """
        _statistics_to(model, self.compute)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self.device)
        values = initial_values(model, self.device) if is_lazy(model) else None
        weights = self._place(model, optimizer, names, values)
        if values is not None and (directory := files_of(model)) is not None:
            load_first(model, directory)
        return weights

    def _place(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        names: Names,
        values: InitialValues | None,
    ) -> Weights | None:
        if optimizer is not None and hasattr(optimizer, "mesh"):
            optimizer.mesh = ParallelMesh.of(self.mesh)  # type: ignore[attr-defined]
        if offloads(self.config, self.mesh.size()):
            return self._offload(model, optimizer, names, values)
        if self.config.parallel.zero == 3:
            return self._shard_module(model, optimizer, names, values)
        if values is None:
            for param in model.parameters():
                param.data = param.data.to(self.device)
        else:
            materialize_from(values)
            for param in model.parameters():
                share_tied(param, param)
        if optimizer is None:
            if self.compute is not None:
                for param in model.parameters():
                    param.data = param.data.to(self.compute)
            return None
        rebind(optimizer, model, names)
        options = stepped_options(self.config, self.mesh)
        sharded = shard_optimizer(optimizer, self.mesh, model=model, precision=self.precision, **options)
        return Replicated(model, sharded, stay=True)

    def _tiers(self) -> str | Tiers:
        shares, residency = self.config.on_device, self.config.memory.residency
        if residency == "host" and (shares.weights or shares.state):
            return Tiers(weights=shares.weights, state=shares.state)
        return residency

    def _memory(self) -> dict[str, Any]:
        memory = self.config.memory
        return {"device_memory": memory.device_memory, "host_memory": memory.host_memory, "nvme": memory.nvme}

    def _offload(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        names: Names,
        values: InitialValues | None,
    ) -> Weights:
        if optimizer is None:
            raise ConfigError(
                "a model whose memory is on the host is boosted with its optimizer",
                got=f'memory.residency = "{self.config.memory.residency}", no optimizer',
                fix="pass the optimizer, or leave the offloading out",
            )
        rebind(optimizer, model, names)
        stepped = _known_to_gemini(optimizer)
        _, offloaded = offload(
            model,
            stepped,
            residency=self._tiers(),
            device=self.device,
            compute=self.compute,
            materialize=values,
            **self._memory(),
        )
        if values is not None:
            values.finish()
        return Offloaded(model, offloaded, sync=None)

    def _shard_module(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        names: Names,
        values: InitialValues | None,
    ) -> Weights | None:
        away = self.config.memory.residency != "device"
        residency = ChunkResidency(self._tiers(), **self._memory()) if away else None
        options = {"device": self.device, "precision": self.precision, "residency": residency}
        options |= sharding_options(self.config, self.mesh)
        if values is not None:
            shard_initial(model, self.mesh, values, **options)
        else:
            present = _emptied(model)
            make = lambda name, param: present.pop(param).to(self.device)  # noqa: E731
            shard_module(model, self.mesh, materialize=make, **options)
        if optimizer is None:
            return None
        rebind(optimizer, model, names)
        if residency is not None:
            return Offloaded(model, residency.optimizer(_known_to_gemini(optimizer)), sync=sharding_of(model))
        return Sharded(model, optimizer, sharding_of(model), self.mesh)


def _is_layer(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Names:
    """Return the names of an optimizer's parameters, group by group.

    Raises:
        ConfigError: it has parameters that the model does not have, or has stepped.
    """
    names = {id(param): canonical_name(name, param) for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [param for param in params if id(param) not in names]
    if strangers:
        raise ConfigError(
            "the optimizer has parameters that the model does not have",
            got=f"{len(strangers)} of them, the first of shape {tuple(strangers[0].shape)}",
            cause="the model's parameters were replaced after the optimizer was made",
            fix="make the optimizer of model.parameters() just before boost",
        )
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def rebind(optimizer: torch.optim.Optimizer, model: nn.Module, names: Names) -> None:
    """Give an optimizer the parameters that a model has now, by their names; those of other ranks leave its groups.

    Its groups stay the same objects, so that schedules of learning rates go on.
    """
    params = {canonical_name(name, param): param for name, param in model.named_parameters()}
    for group, members in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [params[name] for name in members if name in params]
    optimizer.state.clear()


def _known_to_gemini(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return torch's own AdamW with the same groups for a subclass of it: chunks are stepped by that."""
    if not isinstance(optimizer, FusedAdamW):
        return optimizer
    return torch.optim.AdamW(optimizer.param_groups)


def _emptied(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return the values of a model's parameters, by parameter, which are on the meta device from then on."""
    values: dict[nn.Parameter, Tensor] = {}
    metas: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if param not in metas:
                meta = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
                meta.__dict__.update(
                    {key: value for key, value in param.__dict__.items() if key.startswith("cai_")}
                )
                metas[param], values[meta] = meta, param.detach()
            module._parameters[name] = metas[param]
    return values


def _statistics_to(model: nn.Module, compute: torch.dtype | None) -> None:
    """Keep the statistics of batch norms in the dtype of computation, as torch's operator has all it takes."""
    for module in model.modules():
        for name in ("running_mean", "running_var") if compute is not None else ():
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(compute)


def _no_loss(model: nn.Module, mesh: Any) -> Any:
    return None


def _workload(model: nn.Module) -> Workload:
    """Return a workload of a module that is there already, and whose loss is the user's."""
    return Workload(
        build=lambda: model,
        inputs=dict,
        target=dict,
        loss=_no_loss,
        example=lambda samples: {},
        initializer=lambda module: lambda part: None,
        logits="whole",
    )
