"""The plugins with degrees of several kinds, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cai_apps.booster.config import BoostConfig
from cai_apps.booster.meanings import (
    BUCKETS,
    KERNELS,
    ORDER,
    OVERLAP,
    SHARED,
    WRAPPING,
    check_policy,
    hybrid,
    of_choice,
)
from cai_apps.booster.plugin import Plugin, plugin
from cai_apps.config.sections import ExpertRanks
from cai_mesh.errors import ConfigError

HYBRID = {
    **SHARED,
    **WRAPPING,
    **dict.fromkeys(
        (
            "enable_all_optimization",
            "enable_fused_normalization",
            "enable_flash_attention",
            "enable_jit_fused",
        ),
        KERNELS,
    ),
    "parallel_output": "logits are whole where somebody reads them",
    "ddp_bucket_cap_mb": BUCKETS,
    "zero_bucket_size_in_m": BUCKETS,
    "overlap_communication": OVERLAP,
    "overlap_allgather": OVERLAP,
    "overlap_p2p": OVERLAP,
    "scheduler_nodes": "the schedule zb-v is made here, for these stages and microbatches",
    "enable_metadata_cache": "stages agree on shapes once for each kind of microbatch",
    "make_vocab_size_divisible_by": "rows of an embedding are divided as they come, none is added",
}


@plugin
class HybridParallelPlugin(Plugin):
    """Tensor, sequence, pipeline and data parallelism with ZeRO of any stage."""

    tp_size: int
    pp_size: int
    sp_size: int | None = None
    precision: str = "fp16"
    zero_stage: int = 0
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    parallel_output: bool = True
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0
    broadcast_buffers: bool = True
    ddp_bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    zero_bucket_size_in_m: int = 12
    cpu_offload: bool = False
    communication_dtype: Any = None
    overlap_communication: bool = True
    custom_policy: Any = None
    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    scheduler_nodes: Any = None
    num_layers_per_stage: Any = None
    gradient_checkpoint_config: Any = None
    enable_metadata_cache: bool = True
    make_vocab_size_divisible_by: int = 64
    dp_outside: bool = True
    overlap_p2p: bool = True
    overlap_allgather: bool = False
    fp8_communication: bool = False
    use_fp8: bool = False
    inner_ring_size: int | None = None

    no_effect: ClassVar[Mapping[str, str]] = {
        **HYBRID,
        "dp_outside": ORDER,
        "inner_ring_size": "the ring is one of all its ranks",
    }

    def check(self) -> None:
        _check_hybrid(self)

    def to_config(self) -> BoostConfig:
        return hybrid(self)


@plugin
class MoeHybridParallelPlugin(Plugin):
    """As `HybridParallelPlugin`, with the experts of each layer spread over `ep_size` data ranks."""

    tp_size: int
    pp_size: int
    ep_size: int
    sp_size: int | None = None
    precision: str = "fp16"
    zero_stage: int = 0
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    parallel_output: bool = True
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0
    broadcast_buffers: bool = True
    ddp_bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    zero_bucket_size_in_m: int = 12
    cpu_offload: bool = False
    communication_dtype: Any = None
    overlap_communication: bool = False
    custom_policy: Any = None
    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    scheduler_nodes: Any = None
    num_layers_per_stage: Any = None
    gradient_checkpoint_config: Any = None
    enable_metadata_cache: bool = True
    make_vocab_size_divisible_by: int = 64
    moe_dp_outside: bool = True
    overlap_p2p: bool = True
    overlap_allgather: bool = False
    fp8_communication: bool = False
    use_fp8: bool = False

    no_effect: ClassVar[Mapping[str, str]] = {**HYBRID, "moe_dp_outside": ORDER}

    def check(self) -> None:
        _check_hybrid(self)

    def to_config(self) -> BoostConfig:
        return hybrid(self, experts=ExpertRanks(size=self.ep_size))


HybridParallelPlugin.register(MoeHybridParallelPlugin)  # loops ask which kind a plugin is


def _check_hybrid(chosen: HybridParallelPlugin | MoeHybridParallelPlugin) -> None:
    """Raise ConfigError for options of a pipeline that say too little, and for a policy."""
    of_choice("zero_stage", chosen.zero_stage, (0, 1, 2, 3))
    check_policy(chosen)
    if chosen.pp_size > 1 and chosen.num_microbatches is None and chosen.microbatch_size is None:
        raise ConfigError(
            f"{type(chosen).__name__} has a pipeline, and nothing says into how many microbatches a batch is cut",
            got=f"pp_size = {chosen.pp_size}",
            fix="give num_microbatches, or microbatch_size",
        )
