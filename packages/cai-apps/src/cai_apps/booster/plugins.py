"""The plugins: how a model is trained, in options that users of ColossalAI know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from cai_apps.booster.config import BoostConfig, OnDevice
from cai_apps.booster.meanings import (
    BUCKETS,
    KERNELS,
    OVERLAP,
    SHARED,
    STREAMS,
    WRAPPING,
    check_norm,
    clipping,
    dtype_name,
    of_choice,
    scaling_of,
)
from cai_apps.booster.plugin import Plugin, plugin
from cai_apps.config.sections import Memory, Parallel, Precision, Tensor
from cai_mesh.errors import ConfigError


@plugin
class ConfigPlugin(Plugin):
    """Any config of cai, with modes, schedules and memories that other plugins have no option for."""

    run: BoostConfig

    def to_config(self) -> BoostConfig:
        return self.run


@plugin
class TorchDDPPlugin(Plugin):
    """Every rank has the whole model and its own samples; gradients are averaged."""

    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    fp8_communication: bool = False

    no_effect: ClassVar[Mapping[str, str]] = {"bucket_cap_mb": BUCKETS, **WRAPPING}

    def to_config(self) -> BoostConfig:
        wire = "fp8" if self.fp8_communication else "full"
        # gradients travel in fp8 between owners of shards, so there are shards then; the numbers are the same
        return BoostConfig(
            parallel=Parallel(shard=-1, zero=1 if self.fp8_communication else 0, wire_gradients=wire)
        )


@plugin
class LowLevelZeroPlugin(Plugin):
    """ZeRO of stage 1 or 2: optimizer state, and gradients, are divided over data ranks."""

    stage: int = 1
    precision: str = "fp16"
    initial_scale: float = 2**32
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    reduce_bucket_size_in_m: int = 12
    communication_dtype: Any = None
    overlap_communication: bool = True
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    verbose: bool = False
    cast_inputs: bool = True
    fp8_communication: bool = False
    use_fp8: bool = False
    extra_dp_size: int = 1

    no_effect: ClassVar[Mapping[str, str]] = {
        **SHARED,
        "reduce_bucket_size_in_m": BUCKETS,
        "overlap_communication": OVERLAP,
        "overlap_allgather": OVERLAP,
        "verbose": "what was chosen is in plugin.config",
    }

    def check(self) -> None:
        of_choice("stage", self.stage, (0, 1, 2, 3))
        check_norm(self)

    def to_config(self) -> BoostConfig:
        zero, memory, on_device = self.stage, Memory(), OnDevice()
        if self.cpu_offload:
            zero, memory, on_device = 3, Memory(residency="host"), OnDevice(weights=1.0)
        wire = "fp8" if self.fp8_communication and zero else "full"
        return BoostConfig(
            parallel=Parallel(
                replicate=self.extra_dp_size,
                shard=-1,
                zero=zero,  # type: ignore[arg-type]
                wire_gradients=wire,
                wire_weights=wire,
            ),
            memory=memory,
            on_device=on_device,
            precision=Precision(
                compute=of_choice("precision", self.precision, ("fp16", "bf16", "fp32")),
                linear="fp8" if self.use_fp8 else "compute",
            ),
            optimizer=clipping(self.max_norm),
            scaling=scaling_of(self),
            masters=self.master_weights,
            reduce="auto"
            if self.communication_dtype is None
            else dtype_name("communication_dtype", self.communication_dtype),
            casts_inputs=self.cast_inputs,
        )


@plugin
class GeminiPlugin(Plugin):
    """Parameters are divided over data ranks (ZeRO-3), and live on the device or in host memory."""

    chunk_config_dict: Any = None
    chunk_init_device: Any = None
    placement_policy: str = "static"
    enable_gradient_accumulation: bool = False
    max_prefetch: int = 0
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    precision: str = "fp16"
    master_weights: bool = True
    pin_memory: bool = False
    force_outputs_fp32: bool = False
    strict_ddp_mode: bool = False
    search_range_m: int = 32
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    memstats: Any = None
    gpu_margin_mem_ratio: float = 0.0
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    tp_size: int = 1
    extra_dp_size: int = 1
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_sequence_parallelism: bool = False
    enable_jit_fused: bool = False
    enable_async_reduce: bool = True
    use_fp8: bool = False
    verbose: bool = False
    fp8_communication: bool = False

    no_effect: ClassVar[Mapping[str, str]] = {
        **SHARED,
        **dict.fromkeys(
            ("chunk_config_dict", "search_range_m", "hidden_dim", "min_chunk_size_m"),
            "the parameters of a block are one chunk, whatever its size",
        ),
        "chunk_init_device": "a block's values are made where its shards will live",
        "enable_gradient_accumulation": "gradients add up until optimizer.step() anyway, also under no_sync",
        "max_prefetch": "the next block is gathered while one computes",
        **dict.fromkeys(
            ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "memstats", "gpu_margin_mem_ratio"),
            "placement_policy='auto' plans by two traced steps and what torch may take of the device",
        ),
        "pin_memory": STREAMS,
        "strict_ddp_mode": "data ranks have the same weights anyway",
        **dict.fromkeys(
            (
                "enable_all_optimization",
                "enable_fused_normalization",
                "enable_flash_attention",
                "enable_jit_fused",
            ),
            KERNELS,
        ),
        "enable_async_reduce": OVERLAP,
        "verbose": "what was chosen is in plugin.config",
    }

    def check(self) -> None:
        of_choice("placement_policy", self.placement_policy, ("static", "auto", "cuda", "cpu"))
        check_norm(self)
        if not 0 <= self.shard_param_frac <= 1:
            raise ConfigError(
                "shard_param_frac is no fraction",
                got=self.shard_param_frac,
                expected="0 (whole parameters) to 1",
            )

    def notes(self) -> list[str]:
        lines = super().notes()
        if 0 < self.shard_param_frac < 1:
            lines.append(
                "GeminiPlugin(shard_param_frac=...) between 0 and 1 shards all parameters, as 1 does"
            )
        return lines

    def to_config(self) -> BoostConfig:
        memory, on_device = self._memory()
        wire = "fp8" if self.fp8_communication else "full"
        zero = 3 if self.shard_param_frac or memory.residency != "device" else 2
        return BoostConfig(
            parallel=Parallel(
                replicate=self.extra_dp_size,
                shard=-1,
                zero=zero,
                wire_gradients=wire,
                wire_weights=wire,
                tensor=Tensor(
                    size=self.tp_size, sequence=self.enable_sequence_parallelism and self.tp_size > 1
                ),
            ),
            memory=memory,
            on_device=on_device,
            precision=Precision(
                compute=of_choice("precision", self.precision, ("fp16", "bf16")),
                linear="fp8" if self.use_fp8 else "compute",
            ),
            optimizer=clipping(self.max_norm),
            scaling=scaling_of(self),
            masters=self.master_weights,
            outputs="fp32" if self.force_outputs_fp32 else "compute",
        )

    def _memory(self) -> tuple[Memory, OnDevice]:
        if self.placement_policy in ("auto", "cpu"):
            return Memory(residency="auto" if self.placement_policy == "auto" else "host"), OnDevice()
        if self.placement_policy == "cuda" or not (self.offload_optim_frac or self.offload_param_frac):
            return Memory(), OnDevice()
        shares = OnDevice(weights=1.0 - self.offload_param_frac, state=1.0 - self.offload_optim_frac)
        return Memory(residency="host"), shares


@plugin
class TorchFSDPPlugin(Plugin):
    """Parameters are divided over data ranks, with the options of torch's FullyShardedDataParallel."""

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    auto_wrap_policy: Any = None
    backward_prefetch: Any = None
    mixed_precision: Any = None
    ignored_modules: Any = None
    param_init_fn: Any = None
    sync_module_states: bool = False
    fp8_communication: bool = False

    no_effect: ClassVar[Mapping[str, str]] = {
        "auto_wrap_policy": "blocks are found: the elements of lists of layers, and large layers outside them",
        "backward_prefetch": OVERLAP,
        "sync_module_states": "ranks whose weights differ get those of the first one anyway",
    }

    def check(self) -> None:
        refused = {
            "process_group": "make the ranks that share parameters with ConfigPlugin(BoostConfig(parallel=...))",
            "ignored_modules": "freeze what is not to be trained (requires_grad_(False))",
            "param_init_fn": "build the model with values, or under LazyInitContext, which keeps the model's own",
        }
        for name, fix in refused.items():
            if getattr(self, name) not in (None, [], ()):
                raise ConfigError(f"TorchFSDPPlugin takes no {name}", got=repr(getattr(self, name)), fix=fix)

    def to_config(self) -> BoostConfig:
        strategy = getattr(self.sharding_strategy, "name", None) or "FULL_SHARD"
        stages = {
            "FULL_SHARD": 3,
            "SHARD_GRAD_OP": 2,
            "NO_SHARD": 0,
            "HYBRID_SHARD": 3,
            "_HYBRID_SHARD_ZERO2": 2,
        }
        zero = stages[of_choice("sharding_strategy", strategy, stages)]
        hosts = int(os.environ.get("WORLD_SIZE", 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1) or 1)
        away = self.cpu_offload is not None and self.cpu_offload.offload_params
        wire = "fp8" if self.fp8_communication and zero else "full"
        return BoostConfig(
            parallel=Parallel(
                replicate=max(1, hosts) if "HYBRID" in strategy else 1,
                shard=-1,
                zero=3 if away else zero,  # type: ignore[arg-type]
                wire_gradients=wire,
                wire_weights=wire,
            ),
            memory=Memory(residency="host" if away else "device"),
            **self._dtypes(),
        )

    def _dtypes(self) -> dict[str, Any]:
        mixed = self.mixed_precision
        if mixed is None or mixed.param_dtype is None:
            return {}
        reduce = mixed.reduce_dtype
        return {
            "precision": Precision(compute=dtype_name("MixedPrecision.param_dtype", mixed.param_dtype)),
            "reduce": "auto" if reduce is None else dtype_name("MixedPrecision.reduce_dtype", reduce),
        }
