"""Cut layers of a model over ranks without a booster, and the options of recompute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.booster.launch import need_launch, rank_device
from cai_apps.compat.colossalai.absent import answer, raise_absent
from cai_mesh.errors import ConfigError
from cai_tensor_parallel import parallelize

__all__ = ["GradientCheckpointConfig", "PipelineGradientCheckpointConfig", "ShardConfig", "ShardFormer"]

__getattr__ = answer("shardformer", {"ModelSharder": "ShardFormer(config).optimize(model)"}, __all__)


@dataclass
class GradientCheckpointConfig:
    """Which part of the layers runs again in backward, where gradient checkpointing is on."""

    gradient_checkpointing_ratio: float = 0.0

    def get_num_ckpt_layers(self, num_layers: int) -> int:
        """Return how many of some layers run again."""
        return round(self.gradient_checkpointing_ratio * num_layers)


@dataclass
class PipelineGradientCheckpointConfig(GradientCheckpointConfig):
    """The same for a pipeline: the number of layers of each stage, or a part of them."""

    num_ckpt_layers_per_stage: list[int] | None = None


@dataclass
class ShardConfig:
    """How `ShardFormer` cuts a model."""

    tensor_parallel_process_group: dist.ProcessGroup | None = None
    sequence_parallel_process_group: dist.ProcessGroup | None = None
    pipeline_stage_manager: Any = None
    enable_tensor_parallelism: bool = True
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    parallel_output: bool = True
    make_vocab_size_divisible_by: int = 64
    gradient_checkpoint_config: GradientCheckpointConfig | None = None
    extra_kwargs: dict[str, Any] = field(default_factory=dict)
    fp8_communication: bool = False

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that cut layers between them."""
        group = self.tensor_parallel_process_group
        return dist.get_world_size(group) if self.enable_tensor_parallelism else 1


class ShardFormer:
    """Cuts the layers of a model over the ranks of a group.

    Args:
        shard_config: the group, and the options.
    """

    def __init__(self, shard_config: ShardConfig):
        need_launch("ShardFormer")
        if shard_config.pipeline_stage_manager is not None:
            raise ConfigError(
                "ShardFormer makes no stages of a pipeline",
                fix="HybridParallelPlugin(tp_size=..., pp_size=...) with Booster",
            )
        self.shard_config = shard_config

    def optimize(self, model: nn.Module, policy: Any = None) -> tuple[nn.Module, list[Any]]:
        """Cut a model in place; return it, and the parameters that stages share: none.

        Raises:
            PlanError: the model cannot be cut.
        """
        if policy is not None:
            raise_absent("shardformer", "policies", "leave the policy out: the plan is found from the model")
        config = self.shard_config
        if config.enable_tensor_parallelism and config.tensor_parallel_size > 1:
            group = config.tensor_parallel_process_group or dist.group.WORLD
            mesh = DeviceMesh.from_group(group, rank_device().type, mesh_dim_names=("tp",))  # type: ignore[arg-type]
            parallelize(model, mesh, sequence=config.enable_sequence_parallelism)
        return model, []
