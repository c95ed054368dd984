"""ZeRO: sharded data parallelism for an ordinary optimizer (stages 0 to 2) or module (stage 3)."""

from cai_zero.average import Ema
from cai_zero.entry import last_unsharded, no_sync, shard_module, shard_optimizer, sharding_of, unsharded
from cai_zero.full_state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from cai_zero.loss_scale import LossScale
from cai_zero.precision import MixedPrecision
from cai_zero.reduction.compression import Compression
from cai_zero.replicated.optimizer import ShardedOptimizer
from cai_zero.samples import SampleClip
from cai_zero.stage3.gathering import Gather
from cai_zero.stage3.sharding import ModuleSharding
from cai_zero.state import optimizer_state, restore_groups

__version__ = "0.1.0"

__all__ = [
    "Compression",
    "Ema",
    "Gather",
    "LossScale",
    "MixedPrecision",
    "ModuleSharding",
    "SampleClip",
    "ShardedOptimizer",
    "full_optimizer_state_dict",
    "full_state_dict",
    "last_unsharded",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "no_sync",
    "optimizer_state",
    "restore_groups",
    "shard_module",
    "shard_optimizer",
    "sharding_of",
    "unsharded",
]
